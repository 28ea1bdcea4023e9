//! Deadline of an operation.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use anyhow::anyhow;
use tokio::time::{Instant, Sleep, sleep};

/// Limit of an operation's duration, and of a stream's time without progress.
const DEADLINE: Duration = Duration::from_secs(10);

/// Deadline guard with one timer for all operations of a slot. The timer is reset only when it
/// fires: setting one for each operation costs as much as a small request.
pub(super) struct DeadlineGuard(Pin<Box<Sleep>>);

impl DeadlineGuard {
    pub(super) fn new() -> Self {
        Self(Box::pin(sleep(DEADLINE)))
    }

    /// Runs `work` for 10 s at most.
    pub(super) async fn guard<T, E: Into<anyhow::Error>>(
        &mut self,
        work: impl Future<Output = Result<T, E>>,
    ) -> anyhow::Result<T> {
        let begun = Instant::now();
        let mut work = pin!(work);
        poll_fn(|cx| {
            if let Poll::Ready(done) = work.as_mut().poll(cx) {
                return Poll::Ready(done.map_err(Into::into));
            }
            while self.0.as_mut().poll(cx).is_ready() {
                let deadline = begun + DEADLINE;
                if Instant::now() >= deadline {
                    return Poll::Ready(Err(anyhow!("not done within {} s", DEADLINE.as_secs())));
                }
                self.0.as_mut().reset(deadline);
            }
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::io;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_operation_has_its_ten_seconds() {
        let mut watchdog = DeadlineGuard::new();
        for _ in 0..4 {
            let nine = async {
                sleep(Duration::from_secs(9)).await;
                io::Result::Ok(())
            };
            watchdog.guard(nine).await.unwrap();
        }
        let begun = Instant::now();
        let error = watchdog.guard(pending::<io::Result<()>>()).await;
        assert_eq!(error.unwrap_err().to_string(), "not done within 10 s");
        assert!((begun.elapsed().as_secs_f64() - 10.0).abs() < 0.01);
    }
}
