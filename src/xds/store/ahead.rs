//! Thread that decodes the addresses of a large response ahead of the thread that stores them.
//!
//! The first state of a mesh comes in one response.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::{mem, thread, vec};

use super::address::{ADDRESS, Address, body};
use super::alike::Alike;
use crate::xds::client::Resource;
use crate::xds::interner::Interner;

/// Number of resources from which a thread saves time.
const RESOURCES_MIN: usize = 2_048;
/// Limits of the resources that are handed over together: their number, and the bytes of all of
/// their bodies but the last.
const BATCH: usize = 128;
const BATCH_BYTES: usize = 128 * 1024;
/// Limit of batches that wait.
const BATCHES_MAX: usize = 8;

type Decoded = (Arc<str>, Result<Address, String>);

#[derive(Debug)]
pub(super) struct Ahead {
    batch: vec::IntoIter<Decoded>,
    batches: Receiver<Vec<Decoded>>,
    thread: thread::JoinHandle<Interner>,
}

impl Ahead {
    /// Starts to decode resources if they are many. The thread has the interner until
    /// [`Self::finish`].
    pub(super) fn start(interner: &mut Interner, resources: &[&Resource]) -> Option<Self> {
        if resources.len() < RESOURCES_MIN {
            return None;
        }
        let readable = |one: &&Resource| {
            let body = body(ADDRESS, one).ok()?;
            Some((Arc::clone(&one.name), body.clone()))
        };
        let resources: Vec<_> = resources.iter().filter_map(readable).collect();
        let (decoded, batches) = sync_channel(BATCHES_MAX);
        let (mut interner, mut alike) = (mem::take(interner), Alike::default());
        let decode = move || {
            let (mut batch, mut bytes) = (Vec::with_capacity(BATCH), 0);
            for (name, body) in resources {
                bytes += body.len();
                let address = alike.read(&name, body, &mut interner);
                batch.push((name, address));
                if batch.len() == BATCH || bytes > BATCH_BYTES {
                    bytes = 0;
                    if decoded.send(mem::replace(&mut batch, Vec::with_capacity(BATCH))).is_err() {
                        return interner;
                    }
                }
            }
            // The receiver may be gone, as it skips what it does not need.
            let _ = decoded.send(batch);
            interner
        };
        // If no thread can be started, the resources are decoded one by one, and share no strings
        // with earlier ones.
        let thread = thread::Builder::new().name("strait-decode".to_owned()).spawn(decode).ok()?;
        Some(Self { batch: Vec::new().into_iter(), batches, thread })
    }

    /// Returns the content of a resource, unless all others were taken. Resources that were
    /// announced before it are skipped.
    pub(super) fn take(&mut self, name: &Arc<str>) -> Option<Result<Address, String>> {
        loop {
            if let Some((_, address)) = self.batch.find(|(own, _)| Arc::ptr_eq(own, name)) {
                return Some(address);
            }
            self.batch = self.batches.recv().ok()?.into_iter();
        }
    }

    /// Ends the thread, and returns the interner.
    pub(super) fn finish(self) -> Interner {
        drop(self.batches);
        self.thread.join().unwrap_or_default()
    }
}
