//! Run of a plan, from its first connection to its report.

use std::rc::Rc;
use std::time::Duration;

use anyhow::bail;
use rustix::time::{ClockId, clock_gettime};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::lifecycle::StopSignals;

use super::args::{Plan, Work};
use super::pace::PreciseTimer;
use super::progress;
use super::report::Report;
use super::run::{RunCost, RunState};
use super::slot::Worker;
use super::target::ReconnectingConnection;

/// Number of connections that are opened concurrently: gateways limit the handshakes of one source.
const CONCURRENT_OPENS: usize = 32;
/// Deadline for closing a connection in order.
const CLOSE_DEADLINE: Duration = Duration::from_secs(1);

/// Runs the plan.
///
/// # Errors
/// The run could not begin: a file cannot be used, a name has no address, or a signal came first.
/// Failures of the gateway are in the report.
pub(super) async fn run_plan(plan: Plan) -> anyhow::Result<Report> {
    let mut stop = StopSignals::new()?;
    let run = Rc::new(RunState::new(plan).await?);
    let lines: Vec<_> = (0..run.plan.connections.get())
        .map(|_| Rc::new(ReconnectingConnection::new(&run.target)))
        .collect();
    let slots = tokio::select! {
        slots = open(&run, &lines) => slots,
        _ = stop.next() => bail!("stopped before everything was open"),
    };
    // Figures for a smaller load than requested would mislead.
    let (slots, took) = match run.tally.failures.get() {
        0 => run_slots(&run, slots, &mut stop).await?,
        _ => (slots, RunCost::default()),
    };
    let report = Report::new(&run, &took);
    tokio::select! {
        () = close_all(slots, lines) => {}
        _ = stop.next() => {}
    }
    Ok(report)
}

/// Opens all connections, and the tunnels that are not part of an operation. Each one that cannot
/// be opened counts as a failure.
async fn open(run: &Rc<RunState>, lines: &[Rc<ReconnectingConnection>]) -> Vec<Worker> {
    let mut slots = Vec::new();
    let mut opening = JoinSet::new();
    for line in lines {
        if opening.len() == CONCURRENT_OPENS {
            slots.extend(task_result(run, opening.join_next().await).into_iter().flatten());
        }
        opening.spawn_local(open_line(Rc::clone(run), Rc::clone(line)));
    }
    while !opening.is_empty() {
        slots.extend(task_result(run, opening.join_next().await).into_iter().flatten());
    }
    slots
}

fn jobs(plan: &Plan) -> Vec<Work> {
    if plan.work != Work::Mixed {
        return vec![plan.work; plan.streams];
    }
    let mut jobs = vec![Work::Rr; plan.streams];
    jobs.extend([Work::FullDuplex, Work::StalledEcho]);
    jobs
}

async fn open_line(run: Rc<RunState>, line: Rc<ReconnectingConnection>) -> Vec<Worker> {
    let jobs = jobs(&run.plan);
    let count = jobs.len();
    let mut waiting = jobs.into_iter().map(|job| Worker::new(&run, &line, job));
    let mut slots = Vec::new();
    // The first slot learns the server's limit of streams. If it fails, so would all others.
    if let Some(first) = waiting.next() {
        slots.extend(prepare(Rc::clone(&run), first, count).await);
    }
    if slots.is_empty() {
        return slots;
    }
    let mut preparing = JoinSet::new();
    for slot in waiting {
        preparing.spawn_local(prepare(Rc::clone(&run), slot, count));
    }
    while let Some(prepared) = preparing.join_next().await {
        slots.extend(task_result(&run, Some(prepared)).flatten());
    }
    slots
}

/// Prepares a slot on a connection with `streams` streams; returns none if that fails.
async fn prepare(run: Rc<RunState>, mut slot: Worker, streams: usize) -> Option<Worker> {
    let prepared = slot.prepare(streams).await;
    prepared.map_err(|error| run.tally.failed(&error)).ok()?;
    Some(slot)
}

/// Returns the result of a task. A panic counts as a failure.
fn task_result<T>(run: &RunState, ended: Option<Result<T, tokio::task::JoinError>>) -> Option<T> {
    ended?.map_err(|stopped| run.tally.failed(&stopped.into())).ok()
}

async fn run_slots(
    run: &Rc<RunState>,
    slots: Vec<Worker>,
    stop: &mut StopSignals,
) -> anyhow::Result<(Vec<Worker>, RunCost)> {
    let alarm = PreciseTimer::new()?;
    let mut working = JoinSet::new();
    let mut progress = JoinSet::new();
    let (begun, cpu) = (Instant::now(), cpu_time());
    for mut slot in slots {
        working.spawn_local(async move {
            slot.work().await;
            slot
        });
    }
    progress.spawn_local(progress::show(Rc::clone(run)));
    let mut slots = Vec::new();
    let all = async |working: &mut JoinSet<Worker>, slots: &mut Vec<Worker>| {
        while let Some(ended) = working.join_next().await {
            slots.extend(task_result(run, Some(ended)));
        }
    };
    tokio::select! {
        led = run.pace.release_operations(async |moment| alarm.wait(moment).await) => led?,
        () = all(&mut working, &mut slots) => {}
        _ = stop.next() => {}
    }
    let interrupted = stop.was_signalled;
    let missed = run.pace.end();
    if !interrupted {
        let kind = "not started, no free stream; use more --streams or a lower --rate";
        run.tally.count_failures(missed as u64, kind.to_owned());
    }
    // Operations under way have their own deadlines. A second signal does not wait for them.
    tokio::select! {
        () = all(&mut working, &mut slots) => {}
        _ = stop.next() => {}
    }
    let took = RunCost { time: begun.elapsed(), cpu: cpu_time().saturating_sub(cpu), interrupted };
    progress.shutdown().await;
    progress::clear();
    Ok((slots, took))
}

/// Closes all tunnels and connections in order, as far as the gateway does so within the deadlines.
async fn close_all(slots: Vec<Worker>, lines: Vec<Rc<ReconnectingConnection>>) {
    let mut parting = JoinSet::new();
    for mut slot in slots {
        parting.spawn_local(async move { slot.close().await });
    }
    while parting.join_next().await.is_some() {}
    for line in lines {
        parting.spawn_local(async move {
            let _ = timeout(CLOSE_DEADLINE, line.close()).await;
        });
    }
    while parting.join_next().await.is_some() {}
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}
