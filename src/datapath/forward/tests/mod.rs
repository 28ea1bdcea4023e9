//! Tests of a connection's turns: a model, defects that were mended, and a panic.

mod mended;
mod model;
mod panic;
mod rig;
mod wire;
