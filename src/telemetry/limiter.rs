//! A limit on log lines that anybody on the network can cause.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lets a number of lines a second pass and counts the others.
#[derive(Debug)]
pub(super) struct Limiter {
    a_second: u32,
    window: Mutex<Window>,
}

#[derive(Debug, Default)]
struct Window {
    start: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

impl Limiter {
    /// A limiter that lets `a_second` lines pass in each second.
    pub(super) fn new(a_second: u32) -> Self {
        Self {
            a_second,
            window: Mutex::default(),
        }
    }

    /// Whether a line may be written at `now`; if so, how many were suppressed since the last.
    pub(super) fn admit(&self, now: Instant) -> Option<u64> {
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        let over = |start| now.saturating_duration_since(start) >= Duration::from_secs(1);
        if window.start.is_none_or(over) {
            window.start = Some(now);
            window.lines = 0;
        }
        if window.lines >= self.a_second {
            window.suppressed = window.suppressed.saturating_add(1);
            return None;
        }
        window.lines += 1;
        Some(std::mem::take(&mut window.suppressed))
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
        let later = start + Duration::from_secs(1);
        assert_eq!(limiter.admit(later), Some(90));
        assert_eq!(limiter.admit(later), Some(0));
    }
}
