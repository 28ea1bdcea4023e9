//! Replay of recordings of a real istiod.

#[path = "../../../../tests/corpus/recording.rs"]
mod recording;
mod replay;
