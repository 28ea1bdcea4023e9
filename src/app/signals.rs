//! Signal of a reload.

use std::future;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGHUP, which requests a reload of all files. `None` if it was ignored at the start, as under
/// `nohup`: a handler would replace that.
pub(super) struct ReloadSignal(Option<Signal>);

impl ReloadSignal {
    /// Installs the handler, and handlers without effect for SIGUSR1 and SIGUSR2, which would end
    /// the process. Handlers of tokio stay installed without a listener.
    pub(super) fn new() -> std::io::Result<Self> {
        for unused in [SignalKind::user_defined1(), SignalKind::user_defined2()] {
            drop(signal(unused)?);
        }
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        if is_ignored(&status, SignalKind::hangup()) {
            return Ok(Self(None));
        }
        signal(SignalKind::hangup()).map(Some).map(Self)
    }

    /// Waits for the next signal. Signals that arrive before the wait count as one. Cancel safe.
    pub(super) async fn received(&mut self) {
        match &mut self.0 {
            Some(signal) => {
                signal.recv().await;
            }
            None => future::pending().await,
        }
    }
}

/// Returns true if a `/proc/PID/status` names the signal among the ignored ones (`proc(5)`).
fn is_ignored(status: &str, signal: SignalKind) -> bool {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal.as_raw_value() - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ignored_signal_is_found_in_the_mask_of_its_process() {
        let status = |mask: &str| format!("SigBlk:\tffffffffffffffff\nSigIgn:\t{mask}\n");
        for (mask, hangup, first) in [
            ("0000000000000000", false, false),
            ("0000000000001000", false, false),
            ("0000000000001001", true, false),
            ("0000000000000200", false, true),
            ("none", false, false),
        ] {
            let is_ignored = |signal| is_ignored(&status(mask), signal);
            assert_eq!(is_ignored(SignalKind::hangup()), hangup, "{mask}");
            assert_eq!(is_ignored(SignalKind::user_defined1()), first, "{mask}");
        }
        assert!(!is_ignored("", SignalKind::hangup()));
    }
}
