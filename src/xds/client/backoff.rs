//! Delay between two streams, which depends on how the last one ended (docs/wire-contract.md 3.1).

use std::time::Duration;

/// Delay after an end that does not indicate a failing server, and first delay after any other.
const WAIT_MIN: Duration = Duration::from_millis(10);
/// Longest delay.
const WAIT_MAX: Duration = Duration::from_secs(15);

/// Reason for which a stream ended or could not be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamEnd {
    /// No connection: failure of the address, TCP or TLS, or rejection of the call.
    Connect,
    /// gRPC status Cancelled, Unknown, DeadlineExceeded, or Unavailable, "transport is closing".
    Harmless,
    /// gRPC status Unavailable, "received prior goaway".
    GoAway,
    /// Any other gRPC status except OK.
    Status,
    /// End by the server without a status or with OK.
    Clean,
}

impl StreamEnd {
    /// Classifies a gRPC status by its numeric code and its message.
    pub fn from_status(code: i32, message: &str) -> Self {
        match code {
            0 => Self::Clean,
            1 | 2 | 4 => Self::Harmless,
            14 if message.contains("transport is closing") => Self::Harmless,
            14 if message.contains("received prior goaway") => Self::GoAway,
            _ => Self::Status,
        }
    }

    /// Returns whether the backoff starts again from the first delay.
    fn resets(self) -> bool {
        !matches!(self, Self::Connect | Self::Status)
    }
}

/// Delay before the next attempt. It doubles with each end that does not reset it.
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
    /// Returns the delay after this end.
    pub(super) fn next_delay(&mut self, end: StreamEnd) -> Duration {
        if end.resets() {
            self.next = WAIT_MIN;
        }
        let wait = self.next;
        self.next = (wait * 2).min(WAIT_MAX);
        wait
    }
}
