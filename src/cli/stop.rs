//! Signals that ask a command to end.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Ctrl-C and SIGTERM.
pub(super) struct Stop {
    interrupt: Signal,
    terminate: Signal,
    /// Whether one has come.
    pub(super) was_asked: bool,
}

impl Stop {
    /// From now on these signals are ours to answer.
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            was_asked: false,
        })
    }

    /// Waits for the next one.
    pub(super) async fn asked(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
        self.was_asked = true;
    }
}
