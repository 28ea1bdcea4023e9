//! How long to wait between two streams, by how the last one ended (contract 3.1).

use std::time::Duration;

/// The wait after an end that says nothing bad of the server, and the first one after others.
const WAIT_MIN: Duration = Duration::from_millis(10);
/// The longest wait.
const WAIT_MAX: Duration = Duration::from_secs(15);

/// How a stream ended, or why none came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// No connection: address, TCP, TLS, or the call was not taken.
    Connect,
    /// gRPC status Cancelled.
    Cancelled,
    /// gRPC status Unknown.
    Unknown,
    /// gRPC status DeadlineExceeded.
    DeadlineExceeded,
    /// gRPC status Unavailable, "transport is closing".
    TransportClosing,
    /// gRPC status Unavailable, "received prior goaway".
    GoAway,
    /// Any other gRPC status but OK.
    Status,
    /// The server ended it, without a status or with OK.
    Clean,
}

impl End {
    /// The end by a gRPC status: its code as a number, and its message.
    pub fn of_status(code: i32, message: &str) -> Self {
        match code {
            0 => Self::Clean,
            1 => Self::Cancelled,
            2 => Self::Unknown,
            4 => Self::DeadlineExceeded,
            14 if message.contains("transport is closing") => Self::TransportClosing,
            14 if message.contains("received prior goaway") => Self::GoAway,
            _ => Self::Status,
        }
    }

    /// Whether the next stream is tried as soon as after the first failure.
    fn resets(self) -> bool {
        !matches!(self, Self::Connect | Self::Status)
    }
}

/// The wait before the next try, doubled by each end that does not reset it.
#[derive(Clone, Debug)]
pub(super) struct Backoff {
    next: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { next: WAIT_MIN }
    }
}

impl Backoff {
    /// The wait after this end.
    pub(super) fn wait(&mut self, end: End) -> Duration {
        if end.resets() {
            self.next = WAIT_MIN;
        }
        let wait = self.next;
        self.next = (wait * 2).min(WAIT_MAX);
        wait
    }
}
