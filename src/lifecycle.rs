//! Process shutdown: the phases of a drain, its deadlines, and the tasks that it waits for.
//!
//! `app` drives the phases; the data path and readiness watch them. The first stop request starts
//! the drain, the second ends it immediately.

use std::future::Future;
use std::io;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};
use tokio_util::task::TaskTracker;

/// Phase of the process. Phases only advance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Serving.
    #[default]
    Running,
    /// Readiness fails; everything else continues, so that load balancers can react.
    Lag,
    /// New connections are refused and GOAWAY is sent; open tunnels continue.
    Draining,
    /// The drain deadline has passed: open tunnels are reset with their own code.
    Closing,
}

/// Handlers of SIGTERM and SIGINT (Ctrl-C).
#[derive(Debug)]
pub struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
    pub was_signalled: bool,
}

impl StopSignals {
    /// Installs the handlers. From then on, the signals no longer end the process by themselves.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            was_signalled: false,
        })
    }

    /// Waits for the next signal and returns its name.
    pub async fn next(&mut self) -> &'static str {
        let name = tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        };
        self.was_signalled = true;
        name
    }
}

/// Time for resets and close messages to leave after the start of [`Phase::Closing`]. One round
/// trip between regions is under 0.3 s.
const CLOSE_GRACE: Duration = Duration::from_secs(1);
/// Time of one task of [`DrainScope::run_until_closed`] in [`Phase::Closing`]. Two that follow each
/// other fit into [`CLOSE_GRACE`].
const TASK_CLOSE_GRACE: Duration = Duration::from_millis(400);

/// Request to stop. Requests only become more urgent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Stop {
    #[default]
    None,
    /// Drain after [`Phase::Lag`].
    AfterLag,
    /// Drain at once, because another process serves.
    HandedOver,
    /// End without waiting.
    Now,
}

/// Handle to the process lifecycle; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Lifecycle {
    phase: watch::Sender<Phase>,
    stop: watch::Sender<Stop>,
    /// Cancelled once another process serves the ports.
    released: CancellationToken,
    root_scope: DrainScope,
    tasks: TaskTracker,
}

/// Drain of a part of the process, such as one listener with its connections. A part drains and
/// closes at the latest with the process.
#[derive(Clone, Debug, Default)]
pub struct DrainScope {
    draining: CancellationToken,
    closing: CancellationToken,
}

impl DrainScope {
    fn child(&self) -> Self {
        Self { draining: self.draining.child_token(), closing: self.closing.child_token() }
    }

    /// Starts [`Phase::Draining`] for this part.
    pub fn drain(&self) {
        self.draining.cancel();
    }

    /// Starts [`Phase::Closing`] for this part.
    pub fn close(&self) {
        self.closing.cancel();
    }

    /// Returns true if the part is draining or closed.
    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Waits for [`Phase::Draining`].
    pub fn draining(&self) -> WaitForCancellationFuture<'_> {
        self.draining.cancelled()
    }

    /// Waits for [`Phase::Closing`]. Every tunnel holds this future, which is a third of the size
    /// of a receiver of the phases.
    pub fn closing(&self) -> WaitForCancellationFuture<'_> {
        self.closing.cancelled()
    }

    /// Runs a task that does not watch the drain itself. Drops it soon after the start of
    /// [`Phase::Closing`], and then returns `None`.
    pub async fn run_until_closed<F: Future>(&self, task: F) -> Option<F::Output> {
        let closed = async {
            self.closing().await;
            sleep(TASK_CLOSE_GRACE).await;
        };
        tokio::select! {
            output = task => Some(output),
            () = closed => None,
        }
    }
}

impl Lifecycle {
    /// Requests a stop; a second call skips the waiting.
    pub fn stop(&self) {
        let next = |stop: &Stop| if *stop == Stop::None { Stop::AfterLag } else { Stop::Now };
        self.stop.send_modify(|stop| *stop = next(stop));
    }

    /// Drains without [`Phase::Lag`], because another process serves all ports from now on.
    pub fn hand_over(&self) {
        self.released.cancel();
        self.stop.send_modify(|stop| *stop = Stop::HandedOver.max(*stop));
    }

    /// Waits until this process has no port to serve: another one serves them, or
    /// [`Phase::Closing`] has begun.
    pub async fn ports_end(&self) {
        let mut phases = self.phases();
        tokio::select! {
            () = self.released.cancelled() => {}
            () = wait_for_phase(&mut phases, Phase::Closing) => {}
        }
    }

    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    pub fn phases(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Returns a new part that can be drained separately.
    pub fn drain_scope(&self) -> DrainScope {
        self.root_scope.child()
    }

    /// Spawns a task that a drain waits for on the current runtime.
    pub fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send + 'static> + Send + 'static,
    {
        self.tasks.spawn(task)
    }

    /// Spawns a task that a drain waits for, as [`DrainScope::run_until_closed`], so that a silent
    /// peer does not leave it unfinished at the end of the process.
    pub fn spawn_closing<F>(&self, task: F)
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let scope = self.root_scope.clone();
        self.spawn(async move {
            scope.run_until_closed(task).await;
        });
    }

    /// Returns the number of running tasks that a drain waits for.
    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }

    /// Waits for a stop request, then drives the process through its phases.
    ///
    /// `lag` is the time in [`Phase::Lag`], `deadline` the longest time in [`Phase::Draining`].
    /// Returns the number of tasks that were still running at the end.
    pub async fn run(&self, lag: Duration, deadline: Duration) -> usize {
        let mut stop = self.stop.subscribe();
        let _ = stop.wait_for(|&stop| stop > Stop::None).await;
        self.phase.send_replace(Phase::Lag);
        let _ = timeout(lag, stop.wait_for(|&stop| stop > Stop::AfterLag)).await;
        self.phase.send_replace(Phase::Draining);
        self.root_scope.drain();
        self.tasks.close();
        let now = async {
            let _ = stop.wait_for(|&stop| stop == Stop::Now).await;
        };
        tokio::select! {
            () = self.tasks.wait() => {}
            () = now => {}
            () = sleep(deadline) => {}
        }
        self.phase.send_replace(Phase::Closing);
        self.root_scope.close();
        let _ = timeout(CLOSE_GRACE, self.tasks.wait()).await;
        self.tasks.len()
    }
}

/// Waits until `phases` reaches `phase`. Never returns if the sender is gone.
pub async fn wait_for_phase(phases: &mut watch::Receiver<Phase>, phase: Phase) {
    if phases.wait_for(|&now| now >= phase).await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    const LAG: Duration = Duration::from_secs(5);
    const DEADLINE: Duration = Duration::from_secs(20);

    #[tokio::test(start_paused = true)]
    async fn a_drain_ends_as_soon_as_the_last_task_has() {
        let life = Lifecycle::default();
        life.spawn(sleep(Duration::from_secs(8)));
        life.stop();
        let start = Instant::now();
        assert_eq!(life.run(LAG, DEADLINE).await, 0);
        assert_eq!(start.elapsed(), Duration::from_secs(8));
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_counts_from_the_end_of_the_lag() {
        let life = Lifecycle::default();
        let mut phases = life.phases();
        life.spawn(std::future::pending::<()>());
        life.stop();
        let start = Instant::now();
        let closing = async {
            wait_for_phase(&mut phases, Phase::Closing).await;
            start.elapsed()
        };
        let (left, closing) = tokio::join!(life.run(LAG, DEADLINE), closing);
        assert_eq!((left, closing), (1, LAG + DEADLINE));
        assert_eq!(start.elapsed(), LAG + DEADLINE + CLOSE_GRACE);
    }

    #[tokio::test(start_paused = true)]
    async fn two_closing_tasks_in_a_row_that_wait_for_ever_end_before_the_process() {
        struct Next(Lifecycle);
        impl Drop for Next {
            fn drop(&mut self) {
                self.0.spawn_closing(std::future::pending::<()>());
            }
        }
        let life = Lifecycle::default();
        let next = Next(life.clone());
        life.spawn_closing(async move {
            let _next = next;
            std::future::pending::<()>().await;
        });
        life.stop();
        let start = Instant::now();
        assert_eq!(life.run(LAG, DEADLINE).await, 0);
        let end = LAG + DEADLINE + 2 * TASK_CLOSE_GRACE;
        assert!((end..LAG + DEADLINE + CLOSE_GRACE).contains(&start.elapsed()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_part_drains_by_itself_and_with_the_process() {
        let life = Lifecycle::default();
        let (one, other) = (life.drain_scope(), life.drain_scope());
        one.drain();
        assert!(one.is_draining() && !other.is_draining());
        one.close();
        one.closing().await;
        life.stop();
        assert_eq!(life.run(LAG, DEADLINE).await, 0);
        assert!(other.is_draining());
        other.closing().await;
        assert!(life.drain_scope().is_draining(), "one that comes too late");
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_hand_over_the_drain_begins_at_once_and_has_its_time() {
        let life = Lifecycle::default();
        life.spawn(sleep(Duration::from_secs(8)));
        life.hand_over();
        let start = Instant::now();
        life.ports_end().await;
        assert_eq!(start.elapsed(), Duration::ZERO);
        assert_eq!(life.run(LAG, DEADLINE).await, 0);
        assert_eq!(start.elapsed(), Duration::from_secs(8));
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_stop_is_now() {
        let life = Lifecycle::default();
        life.spawn(std::future::pending::<()>());
        life.stop();
        life.stop();
        let start = Instant::now();
        life.run(LAG, DEADLINE).await;
        assert_eq!(start.elapsed(), CLOSE_GRACE);
    }
}
