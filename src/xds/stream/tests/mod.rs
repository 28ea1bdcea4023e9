//! Replay of recordings of a real istiod.

mod recording;
mod replay;
