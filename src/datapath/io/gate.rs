//! Gate that polls a rarely ready future only after its waker fired.
//!
//! Each turn of a task polls everything that the task waits for. For a drain, a change of trust or
//! a timer this costs a few locks per turn without effect; behind a gate it costs one flag.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use atomic_waker::AtomicWaker;

/// A gate that is open at first, and again whenever something behind it was woken.
#[derive(Debug, Default)]
pub struct WakeGate {
    is_closed: AtomicBool,
    task: AtomicWaker,
}

impl WakeGate {
    /// Opens the gate for the next poll, and wakes the task.
    pub fn open(&self) {
        self.is_closed.store(false, Ordering::Release);
        self.task.wake();
    }

    /// Calls `poll` if the gate is open. `waker` creates a waker that opens the gate.
    pub fn poll<T>(
        &self,
        cx: &Context<'_>,
        waker: impl FnOnce() -> Waker,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        self.task.register(cx.waker());
        if self.is_closed.swap(true, Ordering::AcqRel) {
            return Poll::Pending;
        }
        let waker = waker();
        let done = poll(&mut Context::from_waker(&waker));
        if done.is_ready() {
            // Another event may be ready too.
            self.is_closed.store(false, Ordering::Release);
        }
        done
    }
}

impl Wake for WakeGate {
    fn wake(self: Arc<Self>) {
        self.open();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_woken_is_polled() {
        let gate = Arc::new(WakeGate::default());
        let mut polls = 0;
        let mut kept = None;
        let mut poll = |ready: bool| {
            let waker = || Waker::from(Arc::clone(&gate));
            gate.poll(&Context::from_waker(Waker::noop()), waker, |cx| {
                polls += 1;
                kept = Some(cx.waker().clone());
                if ready { Poll::Ready(polls) } else { Poll::Pending }
            })
        };
        assert_eq!(poll(false), Poll::Pending, "the first poll goes through");
        assert_eq!(poll(true), Poll::Pending, "and no other");
        gate.open();
        assert_eq!(poll(true), Poll::Ready(2));
        assert_eq!(poll(false), Poll::Pending, "after an event there may be another");
        assert_eq!(poll(true), Poll::Pending);
        kept.expect("a waker").wake();
        let waker = || Waker::from(Arc::clone(&gate));
        let open = gate.poll(&Context::from_waker(Waker::noop()), waker, |_| Poll::Ready(()));
        assert!(open.is_ready(), "the waker opens it");
        assert_eq!(polls, 3);
    }
}
