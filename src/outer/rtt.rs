//! Least round trip time of a gateway.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// Time for which a sample counts, as that of Linux's `tcp_min_rtt_wlen`. Of 30 PINGs one finds an
/// empty queue, unless the path is full all the time.
const WINDOW: Duration = Duration::from_secs(300);
/// Part of the window of which one sample is kept, which bounds the memory.
const PART: Duration = Duration::from_secs(30);

/// Least round trip time of [`WINDOW`], as in BBR: a PING behind bulk data measures the queue, and
/// not the distance.
#[derive(Debug, Default)]
pub(crate) struct MinRtt {
    /// Start of each part, with its least time.
    parts: VecDeque<(Instant, Duration)>,
}

impl MinRtt {
    pub(crate) fn record(&mut self, time: Duration, now: Instant) {
        let is_old = |start: Instant| now.duration_since(start) >= WINDOW;
        while self.parts.front().is_some_and(|(start, _)| is_old(*start)) {
            self.parts.pop_front();
        }
        match self.parts.back_mut() {
            Some((start, least)) if now.duration_since(*start) < PART => *least = time.min(*least),
            _ => self.parts.push_back((now, time)),
        }
    }

    /// Returns the least time, zero without a sample.
    pub(crate) fn least(&self) -> Duration {
        self.parts.iter().map(|(_, time)| *time).min().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_sample_counts_for_five_minutes_and_memory_is_bounded() {
        let (start, mut rtt) = (Instant::now(), MinRtt::default());
        assert_eq!(rtt.least(), Duration::ZERO);
        let mut record = |second: u64, millis| {
            let now = start + Duration::from_secs(second);
            rtt.record(Duration::from_millis(millis), now);
            rtt.least().as_millis()
        };
        assert_eq!(record(0, 20), 20);
        for second in 1..300 {
            assert_eq!(record(second, 90), 20);
        }
        assert_eq!(record(300, 90), 90);
        assert_eq!(record(301, 30), 30, "a shorter path counts at once");
        assert!(rtt.parts.len() <= 10, "{}", rtt.parts.len());
    }
}
