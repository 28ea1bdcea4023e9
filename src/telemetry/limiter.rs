//! Rate limits of log lines that a peer can cause.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Period of the limits.
pub(super) const WINDOW: Duration = Duration::from_secs(1);
/// Number of identities with a window of their own. An entry takes about 100 bytes, and exists
/// while the identity is rejected.
const IDENTITIES_MAX: usize = 256;

/// Rate limiter that admits a number of lines per second and counts the others.
#[derive(Debug)]
pub(super) struct Limiter {
    lines_per_second: u32,
    window: Mutex<Window>,
}

/// Lines of one second.
#[derive(Debug, Default)]
struct Window {
    start: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

impl Window {
    fn is_over(&self, now: Instant) -> bool {
        self.start.is_none_or(|start| now.saturating_duration_since(start) >= WINDOW)
    }

    fn admit(&mut self, a_second: u32, now: Instant) -> Option<u64> {
        if self.is_over(now) {
            self.start = Some(now);
            self.lines = 0;
        }
        if self.lines >= a_second {
            self.suppressed = self.suppressed.saturating_add(1);
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

impl Limiter {
    /// Creates a limiter of `a_second` lines per second.
    pub(super) fn new(a_second: u32) -> Self {
        Self { lines_per_second: a_second, window: Mutex::default() }
    }

    /// Returns the number of lines suppressed since the last if a line may be written at `now`.
    pub(super) fn admit(&self, now: Instant) -> Option<u64> {
        self.window.lock().admit(self.lines_per_second, now)
    }

    /// Returns and resets the count of suppressed lines, if their second is over.
    pub(super) fn take_suppressed(&self, now: Instant) -> u64 {
        let mut window = self.window.lock();
        if window.is_over(now) { std::mem::take(&mut window.suppressed) } else { 0 }
    }
}

/// Limiters by identity. Identities beyond the limit of the table share one.
#[derive(Debug)]
pub(super) struct IdentityLimiter {
    a_second: u32,
    windows: Mutex<HashMap<Arc<str>, Window>>,
    others: Limiter,
}

impl IdentityLimiter {
    /// Creates limiters of `a_second` lines per second for each identity.
    pub(super) fn new(a_second: u32) -> Self {
        Self { a_second, windows: Mutex::default(), others: Limiter::new(a_second) }
    }

    /// Decides like [`Limiter::admit`], for a line about an identity.
    pub(super) fn admit(&self, identity: &Arc<str>, now: Instant) -> Option<u64> {
        let mut windows = self.windows.lock();
        if let Some(window) = windows.get_mut(identity) {
            return window.admit(self.a_second, now);
        }
        if windows.len() >= IDENTITIES_MAX {
            drop(windows);
            return self.others.admit(now);
        }
        let window = windows.entry(Arc::clone(identity)).or_default();
        window.admit(self.a_second, now)
    }

    /// Removes the identities whose second is over. Returns those with suppressed lines and their
    /// count; the empty identity is that of all that share a limiter.
    pub(super) fn sweep(&self, now: Instant) -> Vec<(Arc<str>, u64)> {
        let mut left = Vec::new();
        self.windows.lock().retain(|identity, window| {
            let is_over = window.is_over(now);
            if is_over && window.suppressed > 0 {
                left.push((Arc::clone(identity), window.suppressed));
            }
            !is_over
        });
        let others = self.others.take_suppressed(now);
        if others > 0 {
            left.push((Arc::default(), others));
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_passes_ten_lines_a_second_and_the_next_line_tells_the_rest() {
        let limiter = Limiter::new(10);
        let start = Instant::now();
        let passed = (0..100).filter(|_| limiter.admit(start).is_some()).count();
        assert_eq!(passed, 10);
        assert_eq!(limiter.take_suppressed(start), 0);
        let later = start + WINDOW;
        assert_eq!(limiter.admit(later), Some(90));
        assert_eq!(limiter.admit(later), Some(0));
        assert_eq!(limiter.take_suppressed(later + WINDOW), 0);
    }

    #[test]
    fn an_identity_that_floods_takes_no_line_of_another_one() {
        let limiter = IdentityLimiter::new(10);
        let [flood, other] = ["flood", "other"].map(Arc::from);
        let start = Instant::now();
        let passed = (0..100).filter(|_| limiter.admit(&flood, start).is_some());
        assert_eq!(passed.count(), 10);
        assert_eq!(limiter.admit(&other, start), Some(0));
        assert_eq!(limiter.sweep(start), []);
        let later = start + WINDOW;
        assert_eq!(limiter.sweep(later), [(flood, 90)]);
        assert_eq!(limiter.sweep(later), [], "they are forgotten");
    }

    #[test]
    fn identities_beyond_the_table_share_one_limit_until_there_is_room() {
        let limiter = IdentityLimiter::new(1);
        let start = Instant::now();
        let minted = |i: usize| Arc::from(format!("minted-{i}"));
        let passed = |now| {
            let all = 0..IDENTITIES_MAX + 50;
            all.filter(|&i| limiter.admit(&minted(i), now).is_some()).count()
        };
        assert_eq!(passed(start), IDENTITIES_MAX + 1);
        assert_eq!(limiter.windows.lock().len(), IDENTITIES_MAX);
        let later = start + WINDOW;
        assert_eq!(limiter.sweep(later), [(Arc::default(), 49)]);
        assert!(limiter.windows.lock().is_empty());
        assert_eq!(passed(later), IDENTITIES_MAX + 1);
    }
}
