//! Budget: the limit of bytes that all tunnels together hold for slow readers.
//!
//! Bytes that a tunnel holds are on its account. Buffers that an HBONE peer makes its connection
//! hold are on an account of the connection, whose eviction ends the connection. Windows bound one
//! connection; the budget bounds all of them, and sources have shares of it (`crate::limits`).
//! Over its share, a source gets no new tunnel, and its stalled tunnels that hold the most are
//! reset. The same applies to the largest source over the limit of all. While share or limit are
//! exceeded by more, endpoints are not read.

mod evict;

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tracing::warn;

use crate::datapath::io::gate::WakeGate;
use crate::limits::{Account, Pool, Resource, Source};
use crate::reason::Reason;

/// Limit of bytes that a tunnel may hold unreported, so that small messages cost nothing. It does
/// not exceed the memory of the tunnel itself.
const UNREPORTED_MAX: usize = 2 * 1024;
/// Period after which a tunnel counts as stalled if it moved less than it holds.
const STALL_PERIOD: Duration = Duration::from_secs(1);

/// Minimum time between two rounds.
const ROUND_PAUSE_MIN: Duration = Duration::from_millis(10);

/// Divisor of the limit for the excess of a source over its share at which its endpoints are not
/// read and nothing is waited for.
const FAR_DIVISOR: usize = 8;

/// Number of rounds of [`STALL_PERIOD`] in which only stalled tunnels are reset.
const STALLED_ONLY_ROUNDS: u32 = 4;

/// Bytes that all tunnels hold, and their limit.
#[derive(Debug)]
pub struct BufferBudget {
    pool: Arc<Pool>,
    held: Gauge,
    /// True if a source may hold more than its share.
    is_over_share: AtomicBool,
    over_limit: Notify,
    /// Notified when the limit is exceeded by more than a quarter, or a share by more than an
    /// eighth of it.
    exhausted: Notify,
    /// Tunnels that have reported bytes to the budget or have paused their endpoint.
    accounts: Mutex<Vec<Weak<BufferAccount>>>,
}

/// Account of the bytes that one tunnel, or one connection, holds.
///
/// A tunnel and its connection live on one thread. Only this thread writes the counters, except
/// those of shared bytes; others read them.
#[derive(Debug)]
pub struct BufferAccount {
    budget: Arc<BufferBudget>,
    /// Account of the source, which holds everything that was reported.
    source: Mutex<Account>,
    held: AtomicUsize,
    /// Part of `held` that was reported to the budget.
    reported: AtomicUsize,
    /// Number of bytes given back so far; it wraps.
    released: AtomicUsize,
    /// Bytes that other threads may give back, all reported to the budget.
    shared: AtomicUsize,
    /// Part of `shared` that was given back so far; it wraps.
    shared_released: AtomicUsize,
    is_registered: AtomicBool,
    evicted: AtomicBool,
    /// True if the task waits until endpoints are read again.
    paused: AtomicBool,
    /// Gate in front of the events that may end the tunnel from outside.
    gate: WakeGate,
}

/// Memory that is held for a tunnel, on its account until it is dropped.
#[derive(Debug)]
pub struct HeldBytes {
    account: Arc<BufferAccount>,
    bytes: usize,
}

impl HeldBytes {
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Memory on an account that another thread may give back, such as bytes that wait for a pooled
/// connection.
#[derive(Debug)]
pub struct SharedBytes {
    account: Arc<BufferAccount>,
    bytes: usize,
}

/// The tunnel must end: all tunnels together hold too much, and this one is among the largest.
#[derive(Clone, Copy, Debug)]
pub struct Evicted;

/// Source of a connection, for the accounts of its tunnels.
#[derive(Clone, Debug)]
pub struct BufferSource {
    budget: Arc<BufferBudget>,
    source: Account,
}

/// Wait before a round of evictions.
#[derive(Clone, Copy, Debug)]
struct Wait {
    /// True if it was shorter than [`STALL_PERIOD`], so that it shows no stall.
    was_cut_short: bool,
    /// True if tunnels that move are evicted too.
    is_last: bool,
}

/// Progress of an account at an earlier time.
struct ProgressMark {
    account: Arc<BufferAccount>,
    moved: usize,
}

impl BufferBudget {
    /// Creates a budget of `limit` bytes. The gauge counts the bytes that are held.
    pub fn new(limit: usize, held: Gauge) -> Self {
        Self {
            pool: Pool::new(Resource::BufferedBytes, limit),
            held,
            is_over_share: AtomicBool::new(false),
            over_limit: Notify::new(),
            exhausted: Notify::new(),
            accounts: Mutex::default(),
        }
    }

    pub fn held(&self) -> usize {
        usize::try_from(self.held.get()).unwrap_or(0)
    }

    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Returns true if all tunnels together leave room for another one.
    pub fn has_room(&self) -> bool {
        self.held() <= self.limit()
    }

    /// Checks that a source may open another tunnel.
    ///
    /// # Errors
    /// [`Reason::BuffersFull`].
    pub fn check_room(&self, source: &Account) -> Result<(), Reason> {
        let has_room = self.has_room() && source.excess() == 0;
        has_room.then_some(()).ok_or(Reason::BuffersFull)
    }

    /// Returns true if the limit is exceeded by more than a quarter.
    pub fn is_exhausted(&self) -> bool {
        let limit = self.limit();
        self.held() > limit.saturating_add(limit / 4)
    }

    /// Replaces the limit after a change of the free memory.
    pub fn set_limit(&self, limit: usize) {
        self.pool.set_max(limit);
        self.notify_if_over_limit();
    }

    fn limit(&self) -> usize {
        self.pool.max()
    }

    /// Returns true if reads of some endpoints may have to pause.
    pub fn is_short(&self) -> bool {
        self.is_exhausted() || self.is_over_share.load(Ordering::Relaxed)
    }

    /// Returns true if a source exceeds its share by so much that nothing is waited for.
    fn is_far_over_share(&self, source: &Account) -> bool {
        source.excess() > self.limit() / FAR_DIVISOR
    }

    /// Wakes [`BufferBudget::run`] if the share of a source is exceeded.
    fn notify_if_over_share(&self, source: &Account) {
        let excess = source.excess();
        if excess == 0 {
            return;
        }
        self.is_over_share.store(true, Ordering::Relaxed);
        self.over_limit.notify_one();
        if excess > self.limit() / FAR_DIVISOR {
            self.exhausted.notify_one();
        }
    }

    /// Wakes [`BufferBudget::run`] if the limit is exceeded.
    fn notify_if_over_limit(&self) {
        if !self.has_room() {
            self.over_limit.notify_one();
        }
        if self.is_exhausted() {
            self.exhausted.notify_one();
        }
    }

    /// Returns a source, for the accounts of its tunnels.
    pub fn source(self: &Arc<Self>, source: &Source) -> BufferSource {
        BufferSource { budget: Arc::clone(self), source: self.pool.account(source) }
    }

    pub fn account(self: &Arc<Self>, source: &Source) -> Arc<BufferAccount> {
        self.account_of(self.pool.account(source))
    }

    fn account_of(self: &Arc<Self>, source: Account) -> Arc<BufferAccount> {
        Arc::new(BufferAccount {
            budget: Arc::clone(self),
            source: Mutex::new(source),
            held: AtomicUsize::new(0),
            reported: AtomicUsize::new(0),
            released: AtomicUsize::new(0),
            shared: AtomicUsize::new(0),
            shared_released: AtomicUsize::new(0),
            is_registered: AtomicBool::new(false),
            evicted: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            gate: WakeGate::default(),
        })
    }

    /// Resets the stalled tunnels that hold the most whenever the limit, or a share, is exceeded.
    /// Never returns.
    ///
    /// Other tunnels are reset too if this is not enough: after four rounds, as all of them may
    /// move a little, or when the limit is exceeded by more than a quarter, or a share by more than
    /// an eighth of the limit.
    pub async fn run(&self) {
        loop {
            self.over_limit.notified().await;
            let mut rounds = 0;
            loop {
                self.is_over_share.store(false, Ordering::Relaxed);
                let marks = self.marks();
                let is_over = |mark: &ProgressMark| mark.account.source.lock().excess() > 0;
                let is_over_share = marks.iter().any(is_over);
                self.is_over_share.store(is_over_share, Ordering::Relaxed);
                self.resume_reads();
                if self.has_room() && !is_over_share {
                    break;
                }
                let wait = Wait {
                    was_cut_short: self.wait_for_round().await,
                    is_last: rounds >= STALLED_ONLY_ROUNDS,
                };
                let reset = evict::run(self, &marks, wait);
                let (held, limit) = (self.held(), self.limit());
                warn!(held, limit, reset, "buffer budget exceeded; new tunnels are rejected");
                rounds += 1;
            }
        }
    }

    /// Wakes the tunnels that wait until endpoints are read again, unless the budget is exhausted
    /// or their source is far over its share.
    fn resume_reads(&self) {
        if self.is_exhausted() {
            return;
        }
        let listed: Vec<_> = self.accounts.lock().iter().filter_map(Weak::upgrade).collect();
        for account in listed {
            if account.paused.load(Ordering::Relaxed)
                && !self.is_far_over_share(&account.source.lock())
                && account.paused.swap(false, Ordering::SeqCst)
            {
                account.gate.open();
            }
        }
    }

    /// Waits for [`STALL_PERIOD`], or until the budget is exhausted or a source is far over its
    /// share; returns true in the second case. Waits for [`ROUND_PAUSE_MIN`] at least, in which
    /// the tunnels evicted last give back their bytes.
    async fn wait_for_round(&self) -> bool {
        sleep(ROUND_PAUSE_MIN).await;
        let urgent = async {
            loop {
                self.exhausted.notified().await;
                // The notification may be older than the last round.
                if self.is_exhausted() || self.is_any_far_over_share() {
                    return;
                }
            }
        };
        timeout(STALL_PERIOD, urgent).await.is_ok()
    }

    fn is_any_far_over_share(&self) -> bool {
        let listed = self.accounts.lock().clone();
        let mut alive = listed.iter().filter_map(Weak::upgrade);
        alive.any(|account| self.is_far_over_share(&account.source.lock()))
    }

    fn marks(&self) -> Vec<ProgressMark> {
        let mut listed = self.accounts.lock();
        listed.retain(|account| account.strong_count() > 0);
        let alive = listed.iter().filter_map(Weak::upgrade);
        alive.map(|account| ProgressMark { moved: account.moved(), account }).collect()
    }

    fn register(&self, account: &Arc<BufferAccount>) {
        let mut listed = self.accounts.lock();
        if listed.len() == listed.capacity() {
            listed.retain(|account| account.strong_count() > 0);
        }
        listed.push(Arc::downgrade(account));
    }
}

impl BufferSource {
    pub fn account(&self) -> Arc<BufferAccount> {
        self.budget.account_of(self.source.clone())
    }
}

impl ProgressMark {
    /// Returns true if the tunnel has moved less than it holds.
    fn is_stalled(&self) -> bool {
        let account = &self.account;
        account.moved().wrapping_sub(self.moved) < account.held()
    }
}

impl BufferAccount {
    fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed) + self.shared.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes given back so far; it wraps.
    fn moved(&self) -> usize {
        let shared = self.shared_released.load(Ordering::Relaxed);
        self.released.load(Ordering::Relaxed).wrapping_add(shared)
    }

    /// Adds bytes that the tunnel holds.
    pub fn charge(self: &Arc<Self>, bytes: usize) {
        let held = self.held.load(Ordering::Relaxed) + bytes;
        self.held.store(held, Ordering::Relaxed);
        if held >= self.reported.load(Ordering::Relaxed) + UNREPORTED_MAX {
            self.report(held);
            self.register_once();
            self.notify_if_over();
        }
    }

    fn notify_if_over(&self) {
        self.budget.notify_if_over_limit();
        self.budget.notify_if_over_share(&self.source.lock());
    }

    /// Moves what the tunnel holds to another source, such as the first peer behind a gateway.
    pub fn move_to(&self, source: &Source) {
        let mut current = self.source.lock();
        let next = self.budget.pool.account(source);
        let shared = self.shared.load(Ordering::Relaxed);
        let reported = self.reported.load(Ordering::Relaxed) + shared;
        next.charge(reported).keep();
        std::mem::replace(&mut *current, next).give_back(reported);
    }

    /// Checks that the source may open another tunnel.
    ///
    /// # Errors
    /// [`Reason::BuffersFull`].
    pub fn check_room(&self) -> Result<(), Reason> {
        self.budget.check_room(&self.source.lock())
    }

    fn register_once(self: &Arc<Self>) {
        if !self.is_registered.swap(true, Ordering::Relaxed) {
            self.budget.register(self);
        }
    }

    /// Returns true if reads from the endpoint must pause because all tunnels, or those of the
    /// source, hold too much. The task in [`BufferAccount::poll_gated`] is woken once this may have
    /// changed.
    pub fn must_pause_reads(self: &Arc<Self>) -> bool {
        if !self.budget.is_short() {
            return false;
        }
        let must_pause =
            || self.budget.is_exhausted() || self.budget.is_far_over_share(&self.source.lock());
        if !must_pause() {
            return false;
        }
        self.paused.store(true, Ordering::SeqCst);
        self.register_once();
        self.notify_if_over();
        // Room that was made before the store has woken no task.
        must_pause()
    }

    /// Removes bytes that the tunnel no longer holds.
    pub fn release(&self, bytes: usize) {
        let held = self.held.load(Ordering::Relaxed).saturating_sub(bytes);
        self.held.store(held, Ordering::Relaxed);
        let moved = self.released.load(Ordering::Relaxed).wrapping_add(bytes);
        self.released.store(moved, Ordering::Relaxed);
        let reported = self.reported.load(Ordering::Relaxed);
        if reported > 0 && (held == 0 || held + UNREPORTED_MAX <= reported) {
            self.report(held);
        }
    }

    fn report(&self, held: usize) {
        let source = self.source.lock();
        let reported = self.reported.swap(held, Ordering::Relaxed);
        match held.checked_sub(reported) {
            Some(more) => source.charge(more).keep(),
            None => source.give_back(reported - held),
        }
        self.budget.held.inc_by(to_gauge(held) - to_gauge(reported));
    }

    /// Adds memory to the account until the result is dropped.
    pub fn hold(self: &Arc<Self>, bytes: usize) -> HeldBytes {
        self.charge(bytes);
        HeldBytes { account: Arc::clone(self), bytes }
    }

    /// Adds memory to the account until the result is dropped, by any thread.
    pub fn share(self: &Arc<Self>, bytes: usize) -> SharedBytes {
        let source = self.source.lock();
        self.shared.fetch_add(bytes, Ordering::Relaxed);
        source.charge(bytes).keep();
        drop(source);
        self.budget.held.inc_by(to_gauge(bytes));
        self.register_once();
        self.notify_if_over();
        SharedBytes { account: Arc::clone(self), bytes }
    }

    /// Opens the gate, so that a future that is new behind it is polled without a wake-up.
    pub fn open_gate(&self) {
        self.gate.open();
    }

    /// Calls `poll` when the gate is open. Completes with its result, or fails if the tunnel is
    /// evicted. Only one task may wait.
    pub fn poll_gated<T>(
        self: &Arc<Self>,
        cx: &Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<Result<T, Evicted>> {
        let waker = || Waker::from(Arc::clone(self));
        self.gate.poll(cx, waker, |cx| {
            if self.evicted.load(Ordering::Acquire) {
                return Poll::Ready(Err(Evicted));
            }
            poll(cx).map(Ok)
        })
    }

    /// Waits until the tunnel is evicted, as the only task that waits.
    pub async fn wait_until_evicted(self: &Arc<Self>) {
        let _ = poll_fn(|cx| self.poll_gated(cx, |_| Poll::<()>::Pending)).await;
    }

    fn evict(&self) {
        self.evicted.store(true, Ordering::Release);
        self.gate.open();
    }
}

impl Wake for BufferAccount {
    fn wake(self: Arc<Self>) {
        self.gate.open();
    }
}

impl Drop for BufferAccount {
    fn drop(&mut self) {
        // Nothing should be held any more. This corrects the gauge if the sums were wrong.
        self.report(0);
    }
}

/// Converts a byte count for a Prometheus gauge, which is signed.
fn to_gauge(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.account.release(self.bytes);
    }
}

impl Drop for SharedBytes {
    fn drop(&mut self) {
        let Self { account, bytes } = self;
        let source = account.source.lock();
        account.shared.fetch_sub(*bytes, Ordering::Relaxed);
        source.give_back(*bytes);
        drop(source);
        account.shared_released.fetch_add(*bytes, Ordering::Relaxed);
        account.budget.held.dec_by(to_gauge(*bytes));
    }
}

#[cfg(test)]
mod tests;
