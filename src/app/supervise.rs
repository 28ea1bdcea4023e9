//! Supervision of the process's own threads and tasks: a panic in one of them, and workers that
//! stand still.
//!
//! A panic in the task of a connection ends that connection only, and nothing here is concerned
//! with it. A thread or task of the process itself is missing after a panic: what it owned may be
//! inconsistent, so it is not started again. The process goes on with the last state, is not ready,
//! and says why.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use tokio::runtime::Handle;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{error, info, warn};

use crate::datapath::accept::WorkerHandle;
use crate::status::Status;
use crate::telemetry::Metrics;

use super::thread::runtime;

const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Time without a turn after which a worker is reported.
const REPORT_AFTER: Duration = Duration::from_secs(1);
/// Time without a turn after which the process is not ready.
const UNREADY_AFTER: Duration = Duration::from_secs(10);
/// Condition of readiness: no worker stands still.
const WORKERS: &str = "workers";

/// Runs a future on a thread and a runtime of its own, and returns the handle of the runtime. The
/// process is not ready after a panic.
pub(super) fn spawn_thread(
    status: &Arc<Status>,
    name: impl Into<Cow<'static, str>>,
    run: impl Future<Output = ()> + Send + 'static,
) -> anyhow::Result<Handle> {
    let what = name.into();
    let name = what.to_string();
    let (runtime, status) = (runtime()?, Arc::clone(status));
    let handle = runtime.handle().clone();
    let body = move || {
        if catch_unwind(AssertUnwindSafe(|| runtime.block_on(run))).is_err() {
            fail(&status, what);
        }
    };
    let spawned = thread::Builder::new().name(name.clone()).spawn(body);
    spawned.map_err(|error| anyhow!("cannot start the thread {name}: {error}"))?;
    Ok(handle)
}

/// Spawns a task of the process on a runtime. The process is not ready after a panic.
pub(super) fn spawn_task(
    (runtime, status): (&Handle, &Arc<Status>),
    name: &'static str,
    run: impl Future<Output = ()> + Send + 'static,
) {
    let (task, status) = (runtime.spawn(run), Arc::clone(status));
    runtime.spawn(async move {
        if task.await.is_err_and(|error| error.is_panic()) {
            fail(&status, name);
        }
    });
}

fn fail(status: &Status, what: impl Into<Cow<'static, str>>) {
    let what = what.into();
    status.pending(what.clone());
    error!(part = %what, "a part of the process ended by a panic; restart the process");
    status.missing(&what, vec!["ended by a panic, see the log; restart the process"]);
}

/// Result of a check of one worker.
#[derive(Debug, PartialEq, Eq)]
enum Change {
    None,
    /// It has stood still for [`REPORT_AFTER`].
    Stalled,
    /// It runs again, after this time.
    Recovered(Duration),
}

/// Worker from the view of the watchdog.
#[derive(Debug, Default)]
struct Watched {
    /// Time without a turn, if that was reported.
    stalled: Option<Duration>,
}

impl Watched {
    /// Checks a worker that has had no turn for `idle`.
    fn check(&mut self, idle: Duration) -> Change {
        match self.stalled {
            None if idle > REPORT_AFTER => {
                self.stalled = Some(idle);
                Change::Stalled
            }
            Some(longest) if idle <= REPORT_AFTER => {
                self.stalled = None;
                Change::Recovered(longest)
            }
            Some(_) => {
                self.stalled = Some(idle);
                Change::None
            }
            None => Change::None,
        }
    }

    fn is_unready(&self) -> bool {
        self.stalled.is_some_and(|idle| idle > UNREADY_AFTER)
    }
}

/// Reports workers that stand still. Never returns.
pub(super) async fn watch(workers: Vec<WorkerHandle>, status: Arc<Status>, metrics: Arc<Metrics>) {
    let mut watched: Vec<_> = workers.iter().map(|_| Watched::default()).collect();
    let (mut ticks, mut last) = (interval(CHECK_INTERVAL), Instant::now());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let pause = last.elapsed();
        last = Instant::now();
        if pause > REPORT_AFTER {
            // The whole process stood still, such as by SIGSTOP: workers get time to catch up.
            workers.iter().for_each(|worker| worker.turns.note());
            continue;
        }
        for (index, (worker, watched)) in workers.iter().zip(&mut watched).enumerate() {
            match watched.check(worker.turns.idle()) {
                Change::None => {}
                Change::Stalled => {
                    metrics.worker_stalls.inc();
                    warn!(
                        worker = index,
                        state = worker.turns.thread_state(),
                        "a worker has stood still for a second; its connections wait"
                    );
                }
                Change::Recovered(after) => {
                    info!(worker = index, ?after, "a worker runs again");
                }
            }
        }
        if watched.iter().any(Watched::is_unready) {
            status.pending(WORKERS);
            status.missing(WORKERS, vec!["one has stood still for ten seconds, see the log"]);
        } else {
            status.clear_pending(WORKERS);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;
    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    async fn pending(status: &Status, wanted: &[&str]) {
        let asked = async {
            while status.list_pending() != wanted {
                tokio::task::yield_now().await;
            }
        };
        let found = timeout(SOON, asked).await;
        assert!(found.is_ok(), "{:?}", status.list_pending());
    }

    #[tokio::test]
    async fn a_panic_of_a_thread_or_task_of_the_process_fails_readiness() {
        let status = Arc::new(Status::default());
        let (end, ended) = oneshot::channel::<()>();
        let handle = spawn_thread(&status, "first", async {
            ended.await.unwrap();
        });
        spawn_task((&handle.unwrap(), &status), "second", async { panic!("planted") });
        let why = "(ended by a panic, see the log; restart the process)";
        pending(&status, &[&format!("second {why}")]).await;
        drop(end);
        pending(&status, &[&format!("second {why}"), &format!("first {why}")]).await;
    }

    #[tokio::test]
    async fn a_task_that_ends_is_no_panic() {
        let status = Arc::new(Status::default());
        let (end, ended) = oneshot::channel::<()>();
        spawn_task((&Handle::current(), &status), "task", async move { drop(end) });
        assert!(ended.await.is_err());
        assert!(status.list_pending().is_empty());
    }

    #[test]
    fn a_stall_is_reported_once_and_recovers() {
        let mut worker = Watched::default();
        let idle = Duration::from_millis;
        for (time, wanted, is_unready) in [
            (0, Change::None, false),
            (1000, Change::None, false),
            (1001, Change::Stalled, false),
            (9999, Change::None, false),
            (10_500, Change::None, true),
            (400, Change::Recovered(idle(10_500)), false),
            (1500, Change::Stalled, false),
        ] {
            assert_eq!(worker.check(idle(time)), wanted, "{time}");
            assert_eq!(worker.is_unready(), is_unready, "{time}");
        }
    }
}
