//! Buffered TLS below h2: [`stream`] meters frames and coalesces writes, [`seal`] collects the
//! written bytes as TLS records until a flush.

pub mod seal;
pub mod stream;
