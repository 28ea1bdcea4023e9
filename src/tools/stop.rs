//! Signals that end a command.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Handlers of SIGINT (Ctrl-C) and SIGTERM.
pub(super) struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
    pub(super) was_signalled: bool,
}

impl StopSignals {
    /// Installs the handlers. From then on, the signals no longer end the process by themselves.
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            was_signalled: false,
        })
    }

    pub(super) async fn recv(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
        self.was_signalled = true;
    }
}
