//! Supervision of the process's own threads and tasks: a panic in one of them, and workers that
//! stand still.
//!
//! A panic in the task of a connection ends that connection only, and nothing here is concerned
//! with it. A thread or task of the process itself is missing after a panic: what it owned may be
//! inconsistent, so it is not started again. The process goes on with the last state, is not ready,
//! and says why.

use std::borrow::Cow;
use std::mem::replace;
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
    // A part may have the name of a condition, which others clear.
    let condition = format!("panic of {what}");
    status.pending(condition.clone());
    error!(part = %what, "a part of the process ended by a panic; restart the process");
    status.missing(&condition, vec!["see the log; restart the process"]);
}

/// Notes the time that a worker has had no turn, if it is above [`REPORT_AFTER`], and returns the
/// time noted before.
fn note(stalled: &mut Option<Duration>, idle: Duration) -> Option<Duration> {
    replace(stalled, Some(idle).filter(|idle| *idle > REPORT_AFTER))
}

fn is_unready(stalled: &Option<Duration>) -> bool {
    stalled.is_some_and(|idle| idle > UNREADY_AFTER)
}

/// Reports workers that stand still. Never returns.
pub(super) async fn watch(workers: Vec<WorkerHandle>, status: Arc<Status>, metrics: Arc<Metrics>) {
    let mut stalled = vec![None; workers.len()];
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
        for (index, (worker, stalled)) in workers.iter().zip(&mut stalled).enumerate() {
            match (note(stalled, worker.turns.idle()), *stalled) {
                (None, Some(_)) => {
                    metrics.worker_stalls.inc();
                    let (work, cluster) = worker.turns.work();
                    warn!(
                        worker = index,
                        state = worker.turns.thread_state(),
                        %work,
                        cluster,
                        "a worker has stood still for a second; its connections wait"
                    );
                }
                (Some(after), None) => info!(worker = index, ?after, "a worker runs again"),
                _ => {}
            }
        }
        if stalled.iter().any(is_unready) {
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
    use crate::app::certificates::CERTIFICATES;
    use crate::app::listeners::LISTENERS;
    use crate::app::state::{DISCOVERY, OBJECTS};

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
        let second = "panic of second (see the log; restart the process)";
        pending(&status, &[second]).await;
        drop(end);
        let first = "panic of first (see the log; restart the process)";
        pending(&status, &[second, first]).await;
    }

    #[test]
    fn a_condition_that_is_met_hides_no_panic_of_a_part_with_its_name() {
        for name in [CERTIFICATES, DISCOVERY, LISTENERS, OBJECTS, WORKERS] {
            let status = Status::new(&[name]);
            fail(&status, name);
            status.clear_pending(name);
            let left = format!("panic of {name} (see the log; restart the process)");
            assert_eq!(status.list_pending(), [left]);
        }
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
        let mut stalled = None;
        for (idle, before, after, unready) in [
            (0, None, None, false),
            (1000, None, None, false),
            (1001, None, Some(1001), false),
            (9999, Some(1001), Some(9999), false),
            (10_500, Some(9999), Some(10_500), true),
            (400, Some(10_500), None, false),
            (1500, None, Some(1500), false),
        ] {
            let milliseconds = |time: Option<u64>| time.map(Duration::from_millis);
            let noted = note(&mut stalled, Duration::from_millis(idle));
            assert_eq!((noted, stalled), (milliseconds(before), milliseconds(after)), "{idle}");
            assert_eq!(is_unready(&stalled), unready, "{idle}");
        }
    }
}
