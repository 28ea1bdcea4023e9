//! Timer of a connection for the next check of its tunnels' limits of time.

use std::pin::Pin;
use std::task::Context;

use tokio::time::{Instant, Sleep, sleep_until};

/// Timer, set while a tunnel of the connection has a limit of time.
#[derive(Debug, Default)]
pub(super) struct LimitTimer(Option<Pin<Box<Sleep>>>);

impl LimitTimer {
    /// Sets the next check, if there is one, unless an earlier one is set.
    pub(super) fn set(&mut self, due: Option<Instant>) {
        let Some(due) = due else { return };
        match &mut self.0 {
            Some(timer) if timer.deadline() <= due => {}
            Some(timer) => timer.as_mut().reset(due),
            None => self.0 = Some(Box::pin(sleep_until(due))),
        }
    }

    pub(super) fn is_set(&self) -> bool {
        self.0.is_some()
    }

    /// Returns true if a check is due, which is then no longer set.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        let timer = self.0.as_mut();
        let is_due = timer.is_some_and(|timer| timer.as_mut().poll(cx).is_ready());
        if is_due {
            self.0 = None;
        }
        is_due
    }
}
