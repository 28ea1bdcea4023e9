//! Slots of one connection: the limit of tunnels that it has at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::Notify;

use super::streams::STREAMS_MAX;

/// Slots of a connection's tunnels.
#[derive(Debug, Default)]
pub struct StreamSlots {
    taken: AtomicU32,
    freed: Notify,
}

/// One of the [`STREAMS_MAX`] slots of a connection, held from the CONNECT until the socket to
/// the endpoint is closed. The stream may end earlier.
#[derive(Debug)]
pub struct StreamSlot(Arc<StreamSlots>);

impl Drop for StreamSlot {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
        self.0.freed.notify_one();
    }
}

impl StreamSlots {
    /// Takes a slot for one more stream, if one is free. The stream counts before its dial, as
    /// its client sends as soon as it is answered.
    pub fn try_take(self: &Arc<Self>) -> Option<StreamSlot> {
        let free = |count: u32| (count < STREAMS_MAX).then_some(count + 1);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, free).ok()?;
        Some(StreamSlot(Arc::clone(self)))
    }

    /// Returns the number of slots that are taken.
    pub fn taken(&self) -> u32 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Waits until a slot is free, and takes it.
    pub async fn take(self: &Arc<Self>) -> StreamSlot {
        loop {
            if let Some(slot) = self.try_take() {
                return slot;
            }
            self.freed.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_has_256_slots_and_one_that_is_freed_goes_to_a_waiter() {
        let slots = Arc::new(StreamSlots::default());
        let mut open: Vec<_> = (0..STREAMS_MAX).map(|_| slots.try_take()).collect();
        assert!(open.iter().all(Option::is_some) && slots.try_take().is_none());
        let waits = || {
            let slots = Arc::clone(&slots);
            tokio::spawn(async move { slots.take().await })
        };
        let waiting = [waits(), waits()];
        tokio::task::yield_now().await;
        open.truncate(open.len() - 2);
        for waiting in waiting {
            open.push(Some(waiting.await.expect("a slot")));
        }
        assert!(slots.try_take().is_none());
        drop(open);
        assert_eq!(slots.taken.load(Ordering::Relaxed), 0);
    }
}
