//! Tests of a connection's turns: defects that were mended, and a panic.

mod mended;
mod panic;
mod rig;
mod wire;
