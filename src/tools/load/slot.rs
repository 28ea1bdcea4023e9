//! Worker that repeats one kind of operation, or moves one stream.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{sleep, timeout};

use super::args::{Plan, Work};
use super::pace::Schedule;
use super::tally::Counters;
use super::target::{OpenTunnel, ReconnectingConnection, Target};
use super::watchdog::DeadlineGuard;
use super::{ops, streams};

/// Limit of failures in a row, after which a slot gives up.
const CONSECUTIVE_FAILURES_MAX: u32 = 10;
/// Pause after a failure, so that a gateway that rejects everything is not flooded.
const PAUSE: Duration = Duration::from_millis(100);
/// Deadline for the other side to end a tunnel that the slot has ended.
const END_DEADLINE: Duration = Duration::from_secs(1);
/// Time in which bytes of a tunnel still arrive after its reset.
const RESET_GRACE: Duration = Duration::from_millis(100);

/// State that every slot of a run shares.
pub(super) struct RunState {
    pub(super) plan: Plan,
    pub(super) target: Rc<Target>,
    pub(super) pace: Schedule,
    pub(super) tally: Counters,
    /// Bytes of one request.
    pub(super) request: Bytes,
    /// Bytes that endless streams send repeatedly.
    pub(super) chunk: Bytes,
    /// Number of idle streams that have begun.
    pub(super) idle: Cell<u64>,
}

/// Work of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    Up,
    Down,
    Rr,
    Churn,
    Handshake,
    Idle,
    Stall,
    /// Sends to an echo and reads back, as fast as possible.
    FullDuplex,
    /// Sends two windows to an echo and never reads.
    StalledEcho,
}

impl Job {
    /// Returns the jobs of one connection.
    pub(super) fn of_connection(plan: &Plan) -> Vec<Self> {
        let each = match plan.work {
            Work::Up => Self::Up,
            Work::Down => Self::Down,
            Work::Rr | Work::Mixed => Self::Rr,
            Work::Churn => Self::Churn,
            Work::Handshake => Self::Handshake,
            Work::Idle => Self::Idle,
            Work::Stall => Self::Stall,
        };
        let mut jobs = vec![each; plan.streams];
        if plan.work == Work::Mixed {
            jobs.extend([Self::FullDuplex, Self::StalledEcho]);
        }
        jobs
    }
}

/// Job, with the tunnel that it uses.
pub(super) struct Worker {
    run: Rc<RunState>,
    line: Rc<ReconnectingConnection>,
    job: Job,
    open: Option<OpenTunnel>,
    watchdog: DeadlineGuard,
}

impl Worker {
    pub(super) fn new(run: &Rc<RunState>, line: &Rc<ReconnectingConnection>, job: Job) -> Self {
        Self {
            run: Rc::clone(run),
            line: Rc::clone(line),
            job,
            open: None,
            watchdog: DeadlineGuard::new(),
        }
    }

    /// Opens everything that is not part of an operation, on a connection for `streams` streams.
    ///
    /// # Errors
    /// The connection or tunnel failed, or the server allows fewer streams.
    pub(super) async fn prepare(&mut self, streams: usize) -> anyhow::Result<()> {
        if self.job == Job::Handshake {
            return Ok(());
        }
        if ops::opens_tunnels(self.job, &self.run.plan) {
            self.watchdog.guard(self.line.prepare()).await?;
            return Ok(());
        }
        let open = self.watchdog.guard(self.line.open()).await?;
        if let Some(connection) = &open.connection {
            connection.check_stream_limit(streams)?;
        }
        self.open = Some(open);
        Ok(())
    }

    /// Works until the time is over.
    pub(super) async fn work(&mut self) {
        if ops::is_operation(self.job, &self.run.plan) {
            self.run_operations().await;
            return;
        }
        let Some(open) = &mut self.open else {
            return;
        };
        let tally = &self.run.tally;
        match streams::run_stream(&self.run, self.job, &mut open.tunnel, &mut self.watchdog).await {
            Ok(()) => tally.held.set(tally.held.get() + 1),
            Err(error) => {
                tally.failed(&error);
                self.open = None;
            }
        }
    }

    async fn run_operations(&mut self) {
        let mut in_a_row = 0;
        while in_a_row < CONSECUTIVE_FAILURES_MAX
            && let Some(due) = self.run.pace.next_due().await
        {
            let work = ops::run_operation(&self.run, &self.line, self.job, &mut self.open);
            match self.watchdog.guard(work).await {
                Ok(()) => {
                    self.run.tally.count_success(due.elapsed());
                    in_a_row = 0;
                    if self.job == Job::Handshake {
                        self.close().await;
                    }
                }
                Err(error) => {
                    self.run.tally.failed(&error);
                    self.open = None;
                    in_a_row += 1;
                    tokio::select! {
                        () = sleep(PAUSE) => {}
                        () = self.run.pace.wait_for_end() => {}
                    }
                }
            }
        }
    }

    /// Ends the tunnel in order if the other side will end it too; resets it otherwise. A
    /// connection that only this slot uses is closed.
    pub(super) async fn close(&mut self) {
        let Some(OpenTunnel {
            mut tunnel,
            connection,
        }) = self.open.take()
        else {
            return;
        };
        if matches!(
            self.job,
            Job::Rr | Job::Handshake | Job::Idle | Job::FullDuplex
        ) {
            let _ = timeout(END_DEADLINE, ops::close_both_directions(&mut tunnel)).await;
        }
        drop(tunnel);
        if matches!(self.job, Job::Down | Job::Stall | Job::StalledEcho) {
            // Bytes under way have to be read, or closing would reset the connection.
            sleep(RESET_GRACE).await;
        }
        if self.job == Job::Handshake
            && let Some(connection) = connection.and_then(Rc::into_inner)
        {
            let _ = timeout(END_DEADLINE, connection.close()).await;
        }
    }
}
