//! Bytes of a peer that an endpoint has not taken yet.

use std::io::IoSlice;
use std::sync::Arc;

use bytes::{Buf, BytesMut};

use crate::datapath::io::copied;
use crate::datapath::limits::budget::{BufferAccount, BufferBudget};
use crate::limits::Source;

/// Size of a rest that is copied out of the memory of a larger backlog.
const SMALL_BYTES: usize = 4 * 1024;

/// Bytes that wait for an endpoint, on the account of their tunnel. Empty on most tunnels, and
/// then without memory.
#[derive(Debug, Default)]
pub struct Backlog {
    bytes: BytesMut,
    account: Option<Arc<BufferAccount>>,
}

impl Backlog {
    /// Creates an empty backlog on this account, or on one of its own.
    pub fn new(account: Option<&Arc<BufferAccount>>) -> Self {
        Self { bytes: BytesMut::new(), account: account.map(Arc::clone) }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the account, if there is one: bytes have waited, or other memory is on it.
    pub fn account(&self) -> Option<&Arc<BufferAccount>> {
        self.account.as_ref()
    }

    /// Returns the account, which is created if there is none.
    pub fn open_account(
        &mut self,
        budget: &Arc<BufferBudget>,
        source: &Source,
    ) -> &Arc<BufferAccount> {
        self.account.get_or_insert_with(|| budget.account(source))
    }

    /// Appends what follows the first `taken` bytes of the slices.
    pub fn push(
        &mut self,
        (budget, source): (&Arc<BufferBudget>, &Source),
        slices: &[IoSlice<'_>],
        mut taken: usize,
    ) {
        let before = self.bytes.len();
        let all: usize = slices.iter().map(|slice| slice.len()).sum();
        self.bytes.reserve(all.saturating_sub(taken));
        for slice in slices {
            let skipped = taken.min(slice.len());
            taken -= skipped;
            self.bytes.extend_from_slice(&slice[skipped..]);
        }
        let added = self.bytes.len() - before;
        copied::count(added);
        self.open_account(budget, source).charge(added);
    }

    /// Removes bytes that the endpoint has taken.
    pub fn advance(&mut self, bytes: usize) {
        self.bytes.advance(bytes);
        if let Some(account) = &self.account {
            account.release(bytes);
        }
        // `advance` frees no memory, and the account counts the bytes that are left.
        if self.bytes.len() < SMALL_BYTES {
            copied::count(self.bytes.len());
            self.bytes = BytesMut::from(self.bytes());
        }
    }
}

impl Drop for Backlog {
    fn drop(&mut self) {
        if let Some(account) = &self.account {
            account.release(self.bytes.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::gauge::Gauge;

    use super::*;

    #[test]
    fn the_memory_of_a_backlog_is_what_its_account_counts() {
        const BYTES: usize = 1 << 20;
        let budget = Arc::new(BufferBudget::new(BYTES, Gauge::default()));
        let mut backlog = Backlog::default();
        let bytes: Vec<u8> = (0..BYTES).map(|at| at.to_le_bytes()[0]).collect();
        let slices = [IoSlice::new(&bytes[..10]), IoSlice::new(&bytes[10..])];
        backlog.push((&budget, &Source::prefix([192, 0, 2, 1].into())), &slices, 4);
        assert_eq!(backlog.bytes(), &bytes[4..]);
        assert_eq!(budget.held(), BYTES - 4);
        backlog.advance(BYTES - 104);
        assert_eq!(backlog.bytes(), &bytes[BYTES - 100..]);
        let has_more = backlog.bytes.try_reclaim(SMALL_BYTES);
        assert!(!has_more, "the memory of taken bytes is kept");
        drop(backlog);
        assert_eq!(budget.held(), 0);
    }
}
