//! Tests of a connection's turns: a model, idle hours, mended defects, bounds, and a panic.

mod idle;
mod mended;
mod model;
mod panic;
mod rig;
mod turns;
mod wire;
