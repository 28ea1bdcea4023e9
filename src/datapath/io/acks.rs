//! Watch over a side that has vanished without FIN while bytes to it are in flight.
//!
//! Keepalive waits while bytes are unacknowledged: the kernel sends them again instead, for 15
//! minutes by default (`net.ipv4.tcp_retries2`). `TCP_USER_TIMEOUT` would also end the connection
//! of a stopped process, because it counts the time with a closed window too (`tcp_probe_timer` in
//! Linux). The kernel of a stopped process answers each probe of its window, and that of a host
//! that is gone answers nothing.

use std::time::Duration;

use tokio::net::TcpStream;

use crate::sock_diag::TcpCounters;

/// Least time between two checks.
pub const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Number of consecutive checks that find bytes sent again and no acknowledgement since the first
/// of them. A side without any for 20 s has vanished, as with keepalive.
const CHECKS_MAX: u32 = 3;

/// Number of such checks so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct AckWatch(u8);

impl AckWatch {
    /// Checks the socket of a side. Returns true if bytes to it are unacknowledged. Without the
    /// counters of the socket the kernel decides, and this returns false.
    ///
    /// # Errors
    /// The description of a side that has vanished.
    pub fn check(&mut self, stream: &TcpStream) -> Result<bool, String> {
        self.note(&TcpCounters::of(stream).unwrap_or_default())
    }

    fn note(&mut self, counters: &TcpCounters) -> Result<bool, String> {
        // A closed window is that of a process which does not read.
        let is_sent_again = counters.retransmissions > 0 && counters.window > 0;
        let is_silent = counters.silence >= u32::from(self.0) * CHECK_INTERVAL;
        self.0 = if is_sent_again && is_silent { self.0 + 1 } else { is_sent_again.into() };
        if u32::from(self.0) < CHECKS_MAX {
            return Ok(counters.unacknowledged > 0);
        }
        Err(counters.describe_stall())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the results of checks 10 s apart, each with retransmissions, seconds without an
    /// acknowledgement, and window.
    fn results(checks: &[(u8, u64, u32)]) -> Vec<Result<bool, ()>> {
        let mut watch = AckWatch::default();
        let results = checks.iter().map(|&(retransmissions, seconds, window)| {
            watch.note(&TcpCounters {
                unacknowledged: 7,
                retransmissions,
                silence: Duration::from_secs(seconds),
                window,
                ..TcpCounters::default()
            })
        });
        results.map(|result| result.map_err(drop)).collect()
    }

    #[test]
    fn a_side_that_acknowledges_nothing_for_20_seconds_has_vanished() {
        let (open, gone) = (Ok(true), Err(()));
        assert_eq!(results(&[(3, 4, 100), (6, 14, 100), (7, 24, 100)]), [open, open, gone]);
        // It was idle for an hour before, which proves nothing.
        assert_eq!(results(&[(1, 3600, 100), (1, 3610, 100)]), [open; 2]);
        // It answers again after 15 s, and vanishes again.
        let checks = [(5, 9, 100), (6, 19, 100), (2, 3, 100), (6, 13, 100), (7, 23, 100)];
        assert_eq!(results(&checks), [open, open, open, open, gone]);
        // Its acknowledgements are late, or bytes are sent for the first time.
        assert_eq!(results(&[(1, 1, 100), (1, 1, 100), (1, 1, 100)]), [open; 3]);
        assert_eq!(results(&[(0, 60, 100), (0, 70, 100), (0, 80, 100)]), [open; 3]);
    }

    #[test]
    fn a_side_that_has_closed_its_window_has_not_vanished() {
        assert_eq!(results(&[(1, 30, 0), (1, 60, 0), (1, 120, 0), (1, 120, 0)]), [Ok(true); 4]);
    }

    #[test]
    fn everything_is_acknowledged_without_counters() {
        assert_eq!(AckWatch::default().note(&TcpCounters::default()), Ok(false));
    }
}
