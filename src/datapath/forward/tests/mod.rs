//! Tests of a connection's turns: a model, idle hours, defects that were mended, and a panic.

mod idle;
mod mended;
mod model;
mod panic;
mod rig;
mod wire;
