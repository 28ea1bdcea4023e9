//! Worker that repeats one kind of operation, or moves one stream.

use std::rc::Rc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::args::Work;
use super::run::RunState;
use super::target::{OpenTunnel, ReconnectingConnection};
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

/// Work of one stream, with the tunnel that it uses.
pub(super) struct Worker {
    run: Rc<RunState>,
    line: Rc<ReconnectingConnection>,
    job: Work,
    open: Option<OpenTunnel>,
    watchdog: DeadlineGuard,
}

impl Worker {
    pub(super) fn new(run: &Rc<RunState>, line: &Rc<ReconnectingConnection>, job: Work) -> Self {
        Self {
            run: Rc::clone(run),
            line: Rc::clone(line),
            job,
            open: None,
            watchdog: DeadlineGuard::new(),
        }
    }

    /// Opens everything that is not part of an operation, on a connection for `streams` streams.
    pub(super) async fn prepare(&mut self, streams: usize) -> anyhow::Result<()> {
        if self.job == Work::Handshake {
            return Ok(());
        }
        if self.job != Work::Rr && ops::is_operation(self.job, &self.run.plan) {
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
                    if self.job == Work::Handshake {
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
        let Some(OpenTunnel { mut tunnel, connection }) = self.open.take() else {
            return;
        };
        if matches!(self.job, Work::Rr | Work::Handshake | Work::Idle | Work::FullDuplex) {
            let _ = timeout(END_DEADLINE, ops::close_both_directions(&mut tunnel)).await;
        }
        drop(tunnel);
        if matches!(self.job, Work::Down | Work::Stall | Work::StalledEcho) {
            // Bytes under way have to be read, or closing would reset the connection.
            sleep(RESET_GRACE).await;
        }
        if self.job == Work::Handshake
            && let Some(connection) = connection.and_then(Rc::into_inner)
        {
            let _ = timeout(END_DEADLINE, connection.close()).await;
        }
    }
}
