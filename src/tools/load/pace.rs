//! Schedule of operations: each is due after the previous one (closed loop), or at a fixed rate.
//!
//! At a fixed rate, an operation is due even if the gateway does not keep up, and its latency
//! counts from then. Otherwise a gateway that stops for a second would hide the requests that were
//! not sent meanwhile (coordinated omission).

use std::cell::Cell;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use tokio::io::unix::AsyncFd;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

/// Time after the end in which operations that were due may still begin. A short delay is not an
/// overload.
const GRACE: Duration = Duration::from_secs(1);

pub(super) struct Schedule {
    begun: Cell<Instant>,
    time: Duration,
    schedule: Option<FixedRate>,
    over: CancellationToken,
}

struct FixedRate {
    rate: u64,
    /// Number of operations that a slot has taken.
    taken: Cell<u64>,
    /// One permit for each operation that is due and not taken. The semaphore is fair: the slot
    /// that waited longest is next.
    due: Semaphore,
}

impl Schedule {
    /// Creates a schedule of `rate` operations per second for `time`, or a closed loop without a
    /// rate.
    pub(super) fn new(time: Duration, rate: Option<NonZeroU64>) -> Self {
        let schedule = rate.map(|rate| FixedRate {
            rate: rate.get(),
            taken: Cell::new(0),
            due: Semaphore::new(0),
        });
        Self { begun: Cell::new(Instant::now()), time, schedule, over: CancellationToken::new() }
    }

    /// Waits until an operation is due, and returns its due time; none when the time is over.
    pub(super) async fn next_due(&self) -> Option<Instant> {
        let Some(schedule) = &self.schedule else {
            return (!self.over.is_cancelled()).then(Instant::now);
        };
        schedule.due.acquire().await.ok()?.forget();
        let number = schedule.taken.get();
        schedule.taken.set(number + 1);
        Some(self.begun.get() + schedule.due_offset(number))
    }

    pub(super) async fn wait_for_end(&self) {
        self.over.cancelled().await;
    }

    /// Begins now, and releases operations as they become due, until the time is over. `wait` waits
    /// until an instant.
    pub(super) async fn release_operations(
        &self,
        mut wait: impl AsyncFnMut(Instant) -> io::Result<()>,
    ) -> io::Result<()> {
        let begun = Instant::now();
        self.begun.set(begun);
        let end = begun + self.time;
        let Some(schedule) = &self.schedule else {
            sleep_until(end).await;
            return Ok(());
        };
        let all = schedule.due_before(self.time);
        let mut released = 0;
        while released < all {
            let due = schedule.due_before(begun.elapsed() + Duration::from_nanos(1)).min(all);
            let more = usize::try_from(due - released).unwrap_or(Semaphore::MAX_PERMITS);
            schedule.due.add_permits(more);
            released = due;
            wait(begun + schedule.due_offset(released)).await?;
        }
        sleep_until(end).await;
        let taken = async {
            while schedule.due.available_permits() > 0 {
                wait(Instant::now() + Duration::from_millis(1)).await?;
            }
            Ok(())
        };
        timeout(GRACE, taken).await.unwrap_or(Ok(()))
    }

    /// Ends the run, and returns the number of operations that were due and have not begun.
    pub(super) fn end(&self) -> usize {
        self.over.cancel();
        let Some(schedule) = &self.schedule else {
            return 0;
        };
        schedule.due.close();
        schedule.due.available_permits()
    }
}

const SECOND: u128 = 1_000_000_000;

impl FixedRate {
    /// Returns the due time of an operation, relative to the beginning.
    fn due_offset(&self, number: u64) -> Duration {
        let nanos = u128::from(number) * SECOND / u128::from(self.rate);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// Returns the number of operations that are due before `time`.
    fn due_before(&self, time: Duration) -> u64 {
        let due = (time.as_nanos() * u128::from(self.rate)).div_ceil(SECOND);
        u64::try_from(due).unwrap_or(u64::MAX)
    }
}

/// Timer of the kernel (timerfd). Timers of tokio have a resolution of a millisecond, which is
/// longer than most requests take.
pub(super) struct PreciseTimer(AsyncFd<OwnedFd>);

impl PreciseTimer {
    #[expect(
        deprecated,
        reason = "its successor is unsafe, for descriptors that may change; an OwnedFd does not"
    )]
    pub(super) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Self(AsyncFd::new(timer)?))
    }

    /// Waits until `moment`, with a delay well below a millisecond.
    pub(super) async fn wait(&self, moment: Instant) -> io::Result<()> {
        let left = moment.saturating_duration_since(Instant::now());
        let Ok(value) = left.try_into() else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        if left.is_zero() {
            // Yields to the tasks of the run, which do the operations that are due.
            tokio::task::yield_now().await;
            return Ok(());
        }
        let once = Itimerspec { it_interval: Timespec::default(), it_value: value };
        // Setting the timer again also clears its expiration, so that nothing has to be read from
        // it.
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &once)?;
        self.0.readable().await?.clear_ready();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::super::tally::Counters;
    use super::*;

    fn pace(milliseconds: u64, rate: Option<u64>) -> Schedule {
        let rate = rate.and_then(NonZeroU64::new);
        Schedule::new(Duration::from_millis(milliseconds), rate)
    }

    async fn lead(pace: &Schedule) -> usize {
        let wait = async |moment| {
            sleep_until(moment).await;
            Ok(())
        };
        pace.release_operations(wait).await.unwrap();
        pace.end()
    }

    /// Runs one slot with operations of 1 ms, except for the tenth, which takes `stall`. Returns
    /// the number of operations, and the number of those that took more than 100 ms.
    async fn slot(pace: &Schedule, stall: Duration) -> (u64, u64) {
        let tally = Counters::new().unwrap();
        while let Some(due) = pace.next_due().await {
            let tenth = tally.operations.get() == 9;
            sleep(if tenth { stall } else { Duration::from_millis(1) }).await;
            tally.count_success(due.elapsed());
        }
        let latency = tally.latency();
        (latency.len(), latency.count_between(100_000_000, u64::MAX))
    }

    #[test]
    fn operations_are_due_at_even_distances_at_every_rate() {
        for rate in [1, 3, 7, 1_000, 999_999_937] {
            let schedule = pace(1, Some(rate)).schedule.unwrap();
            for number in [0, 1, 2, 3, 1_000, 123_456_789] {
                let due = schedule.due_offset(number);
                assert!(schedule.due_before(due) <= number, "{number} at {rate}");
                let then = due + Duration::from_nanos(1);
                assert!(schedule.due_before(then) > number, "{number} at {rate}");
            }
            assert_eq!(schedule.due_before(Duration::from_secs(10)), 10 * rate);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn operations_are_due_until_the_time_is_over() {
        let pace = pace(1_000, Some(100));
        let begun = Instant::now();
        let take = async {
            let mut due = Vec::new();
            while let Some(moment) = pace.next_due().await {
                due.push((moment - begun).as_millis());
            }
            due
        };
        let (missed, due) = tokio::join!(lead(&pace), take);
        assert_eq!(missed, 0);
        assert_eq!(due, (0..100).map(|number| number * 10).collect::<Vec<_>>());
        assert_eq!(begun.elapsed().as_millis(), 1_000);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stall_shows_in_all_that_was_due_meanwhile() {
        let pace = pace(2_000, Some(100));
        let (missed, (all, slow)) =
            tokio::join!(lead(&pace), slot(&pace, Duration::from_millis(500)));
        assert_eq!((missed, all), (0, 200));
        // 50 were due in the 500 ms. Those of the first 400 ms and some after them were late.
        assert!((40..=50).contains(&slow), "{slow}");
    }

    #[tokio::test(start_paused = true)]
    async fn in_a_closed_loop_a_stall_is_one_slow_operation() {
        let pace = pace(2_000, None);
        let (_, (all, slow)) = tokio::join!(lead(&pace), slot(&pace, Duration::from_millis(500)));
        assert!(all > 500, "{all}");
        assert_eq!(slow, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_slot_could_not_begin_is_missed() {
        let pace = pace(1_000, Some(5_000));
        let (missed, (all, _)) = tokio::join!(lead(&pace), slot(&pace, Duration::ZERO));
        assert_eq!(missed as u64 + all, 5_000);
        // One second, and one second of grace, with one or two milliseconds for each.
        assert!((900..=2_010).contains(&all), "{all}");
    }

    #[tokio::test]
    async fn the_alarm_is_not_early_and_fires_again() {
        let alarm = PreciseTimer::new().unwrap();
        for _ in 0..3 {
            let moment = Instant::now() + Duration::from_micros(300);
            alarm.wait(moment).await.unwrap();
            assert!(Instant::now() >= moment);
        }
        alarm.wait(Instant::now()).await.unwrap();
    }
}
