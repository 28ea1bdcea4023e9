//! Budget: the limit of bytes that all tunnels together hold for slow readers.
//!
//! Bytes that a tunnel holds are on its account. Buffers that an HBONE peer makes its connection
//! hold are on an account of the connection, whose eviction ends the connection. Windows bound one
//! connection; the budget bounds all of them. Over the limit, new tunnels are rejected. Stalled
//! tunnels that hold the most are reset until an eighth of the limit is free. While the limit is
//! exceeded by more than a quarter, no endpoint is read.

use std::cmp::Reverse;
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

/// Limit of bytes that a tunnel may hold unreported, so that small messages cost nothing. It does
/// not exceed the memory of the tunnel itself.
const UNREPORTED_MAX: usize = 2 * 1024;
/// Period after which a tunnel counts as stalled if it moved less than it holds.
const STALL_PERIOD: Duration = Duration::from_secs(1);

/// Minimum time between two rounds.
const ROUND_PAUSE_MIN: Duration = Duration::from_millis(10);

/// Number of rounds of [`STALL_PERIOD`] in which only stalled tunnels are reset.
const STALLED_ONLY_ROUNDS: u32 = 4;

/// Bytes that all tunnels hold, and their limit.
#[derive(Debug)]
pub struct BufferBudget {
    limit: AtomicUsize,
    held: Gauge,
    over_limit: Notify,
    /// Notified when the limit is exceeded by more than a quarter.
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
    /// Returns the number of bytes.
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

/// Progress of an account at an earlier time.
struct ProgressMark {
    account: Arc<BufferAccount>,
    moved: usize,
}

impl BufferBudget {
    /// Creates a budget of `limit` bytes. The gauge counts the bytes that are held.
    pub fn new(limit: usize, held: Gauge) -> Self {
        Self {
            limit: AtomicUsize::new(limit),
            held,
            over_limit: Notify::new(),
            exhausted: Notify::new(),
            accounts: Mutex::default(),
        }
    }

    /// Returns the number of bytes that are held now.
    pub fn held(&self) -> usize {
        usize::try_from(self.held.get()).unwrap_or(0)
    }

    /// Returns true if another tunnel may be opened.
    pub fn has_room(&self) -> bool {
        self.held() <= self.limit()
    }

    /// Returns true if the limit is exceeded by more than a quarter.
    pub fn is_exhausted(&self) -> bool {
        let limit = self.limit();
        self.held() > limit.saturating_add(limit / 4)
    }

    /// Replaces the limit after a change of the free memory.
    pub fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
        self.notify_if_over_limit();
    }

    fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
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

    /// Creates the account of a new tunnel.
    pub fn account(self: &Arc<Self>) -> Arc<BufferAccount> {
        Arc::new(BufferAccount {
            budget: Arc::clone(self),
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

    /// Resets the stalled tunnels that hold the most whenever the limit is exceeded. Never
    /// returns.
    ///
    /// Other tunnels are reset too if this is not enough: after four rounds, as all of them may
    /// move a little, or when the limit is exceeded by more than a quarter.
    pub async fn run(&self) {
        loop {
            self.over_limit.notified().await;
            let mut rounds = 0;
            loop {
                self.resume_reads();
                if self.has_room() {
                    break;
                }
                let marks = self.marks();
                let urgent = self.wait_for_round().await || rounds >= STALLED_ONLY_ROUNDS;
                let reset = self.evict(&marks, urgent);
                let (held, limit) = (self.held(), self.limit());
                warn!(
                    held,
                    limit, reset, "buffer budget exceeded; new tunnels are rejected"
                );
                rounds += 1;
            }
        }
    }

    /// Wakes the tunnels that wait until endpoints are read again, unless the budget is exhausted.
    fn resume_reads(&self) {
        if self.is_exhausted() {
            return;
        }
        let listed = self.accounts.lock();
        for account in listed.iter().filter_map(Weak::upgrade) {
            if account.paused.swap(false, Ordering::SeqCst) {
                account.gate.open();
            }
        }
    }

    /// Waits for [`STALL_PERIOD`], or until the budget is exhausted; returns true in the second
    /// case. Waits for [`ROUND_PAUSE_MIN`] at least, in which the tunnels evicted last give back
    /// their bytes.
    async fn wait_for_round(&self) -> bool {
        sleep(ROUND_PAUSE_MIN).await;
        let urgent = async {
            loop {
                self.exhausted.notified().await;
                if self.is_exhausted() {
                    return;
                }
            }
        };
        timeout(STALL_PERIOD, urgent).await.is_ok()
    }

    fn marks(&self) -> Vec<ProgressMark> {
        let mut listed = self.accounts.lock();
        listed.retain(|account| account.strong_count() > 0);
        let alive = listed.iter().filter_map(Weak::upgrade);
        alive
            .map(|account| ProgressMark {
                moved: account.moved(),
                account,
            })
            .collect()
    }

    /// Evicts tunnels until an eighth of the limit is free, those that hold the most first. Evicts
    /// only tunnels that have stalled since `marks`, and then others if `urgent`. Returns their
    /// number.
    fn evict(&self, marks: &[ProgressMark], urgent: bool) -> usize {
        if self.has_room() {
            return 0;
        }
        let mut excess = self.held().saturating_sub(self.limit() / 8 * 7);
        let mut order: Vec<_> = marks
            .iter()
            .map(|mark| {
                let held = mark.account.held();
                (mark.is_stalled(), held, &mark.account)
            })
            .filter(|&(stalled, held, _)| held > 0 && (stalled || urgent))
            .collect();
        order.sort_unstable_by_key(|&(stalled, held, _)| Reverse((stalled, held)));
        let mut count = 0;
        for (_, held, account) in order {
            if excess == 0 {
                break;
            }
            account.evict();
            excess = excess.saturating_sub(held);
            count += 1;
        }
        count
    }

    fn register(&self, account: &Arc<BufferAccount>) {
        let mut listed = self.accounts.lock();
        if listed.len() == listed.capacity() {
            listed.retain(|account| account.strong_count() > 0);
        }
        listed.push(Arc::downgrade(account));
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
    /// Returns the number of bytes that are held.
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
            self.budget.notify_if_over_limit();
        }
    }

    fn register_once(self: &Arc<Self>) {
        if !self.is_registered.swap(true, Ordering::Relaxed) {
            self.budget.register(self);
        }
    }

    /// Returns true if reads from the endpoint must pause because all tunnels hold too much. The
    /// task in [`BufferAccount::poll_gated`] is woken once this may have changed.
    pub fn must_pause_reads(self: &Arc<Self>) -> bool {
        if !self.budget.is_exhausted() {
            return false;
        }
        self.paused.store(true, Ordering::SeqCst);
        self.register_once();
        self.budget.notify_if_over_limit();
        // Room that was made before the store has woken no task.
        self.budget.is_exhausted()
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
        let reported = self.reported.swap(held, Ordering::Relaxed);
        self.budget.held.inc_by(to_gauge(held) - to_gauge(reported));
    }

    /// Adds memory to the account until the result is dropped.
    pub fn hold(self: &Arc<Self>, bytes: usize) -> HeldBytes {
        self.charge(bytes);
        HeldBytes {
            account: Arc::clone(self),
            bytes,
        }
    }

    /// Adds memory to the account until the result is dropped, by any thread.
    pub fn share(self: &Arc<Self>, bytes: usize) -> SharedBytes {
        self.shared.fetch_add(bytes, Ordering::Relaxed);
        self.budget.held.inc_by(to_gauge(bytes));
        self.register_once();
        self.budget.notify_if_over_limit();
        SharedBytes {
            account: Arc::clone(self),
            bytes,
        }
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
        account.shared.fetch_sub(*bytes, Ordering::Relaxed);
        account.shared_released.fetch_add(*bytes, Ordering::Relaxed);
        account.budget.held.dec_by(to_gauge(*bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT_BYTES: usize = 16 * 1024;

    fn evicted(account: &Arc<BufferAccount>) -> bool {
        let never = |_: &mut Context<'_>| Poll::<()>::Pending;
        let cx = Context::from_waker(Waker::noop());
        account.poll_gated(&cx, never).is_ready()
    }

    fn budget(limit: usize) -> Arc<BufferBudget> {
        let budget = Arc::new(BufferBudget::new(limit, Gauge::default()));
        let runs = Arc::clone(&budget);
        tokio::spawn(async move { runs.run().await });
        budget
    }

    #[tokio::test(start_paused = true)]
    async fn past_the_limit_the_largest_stalled_tunnels_go_and_the_others_stay() {
        let budget = budget(10 * UNIT_BYTES);
        let [largest, large, moving, thin] = [4, 3, 4, 1].map(|units| {
            let account = budget.account();
            account.charge(units * UNIT_BYTES);
            account
        });
        assert!(!budget.has_room());
        let moves = Arc::clone(&moving);
        tokio::spawn(async move {
            loop {
                sleep(STALL_PERIOD / 10).await;
                moves.release(UNIT_BYTES);
                moves.charge(UNIT_BYTES);
            }
        });
        sleep(STALL_PERIOD / 2).await;
        assert!(!evicted(&largest), "nobody has stalled yet");
        sleep(STALL_PERIOD).await;
        assert!(
            evicted(&largest),
            "12 - 4 units are under seven eighths of 10"
        );
        assert!(!evicted(&large) && !evicted(&moving) && !evicted(&thin));
        largest.release(4 * UNIT_BYTES);
        assert!(budget.has_room());

        thin.charge(3 * UNIT_BYTES);
        sleep(3 * STALL_PERIOD).await;
        assert!(evicted(&thin) && !evicted(&large) && !evicted(&moving));
    }

    #[tokio::test(start_paused = true)]
    async fn where_everything_moves_a_little_the_largest_go_in_the_end() {
        let budget = budget(10 * UNIT_BYTES);
        let accounts: Vec<_> = (0..50).map(|_| budget.account()).collect();
        for account in &accounts {
            account.charge(UNIT_BYTES / 10);
            account.charge(UNREPORTED_MAX);
        }
        assert!(!budget.has_room());
        let moving = accounts.clone();
        tokio::spawn(async move {
            loop {
                sleep(STALL_PERIOD / 10).await;
                for account in &moving {
                    account.release(1000);
                    account.charge(1000);
                }
            }
        });
        sleep(3 * STALL_PERIOD).await;
        let count = || accounts.iter().filter(|account| evicted(account)).count();
        let patient = count();
        sleep(3 * STALL_PERIOD).await;
        assert!(patient == 0 && count() > 0, "{patient}, then {}", count());
    }

    #[tokio::test(start_paused = true)]
    async fn far_past_the_limit_nobody_is_waited_for() {
        let budget = budget(10 * UNIT_BYTES);
        let account = budget.account();
        account.charge(13 * UNIT_BYTES);
        sleep(STALL_PERIOD / 5).await;
        assert!(evicted(&account));
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_that_another_thread_gives_back_count_like_the_tunnels_own() {
        let budget = budget(10 * UNIT_BYTES);
        let (account, small) = (budget.account(), budget.account());
        small.charge(2 * UNIT_BYTES);
        account.charge(UNIT_BYTES);
        let shared: Vec<_> = (0..8).map(|_| account.share(UNIT_BYTES)).collect();
        assert_eq!(budget.held(), 11 * UNIT_BYTES);
        sleep(2 * STALL_PERIOD).await;
        assert!(evicted(&account) && !evicted(&small));
        let given_back = std::thread::spawn(move || drop(shared));
        given_back.join().expect("no panic");
        assert_eq!(budget.held(), 3 * UNIT_BYTES);
    }

    #[tokio::test(start_paused = true)]
    async fn a_tunnel_that_has_gone_is_forgotten_and_small_ones_are_never_listed() {
        let budget = budget(UNIT_BYTES);
        for _ in 0..1000 {
            let account = budget.account();
            drop(account.hold(UNIT_BYTES));
            budget.account().charge(0);
        }
        assert_eq!(budget.held(), 0);
        let listed = budget.accounts.lock().len();
        assert!(listed <= 8, "{listed} are listed");
        assert!(budget.marks().is_empty());
    }

    #[test]
    fn all_but_a_little_is_reported_to_the_budget() {
        let budget = Arc::new(BufferBudget::new(100, Gauge::default()));
        let account = budget.account();
        account.charge(UNREPORTED_MAX - 1);
        assert_eq!(budget.held(), 0);
        account.charge(1);
        assert_eq!(budget.held(), UNREPORTED_MAX);
        account.charge(UNREPORTED_MAX - 1);
        account.release(UNREPORTED_MAX);
        assert_eq!(budget.held(), UNREPORTED_MAX);
        account.release(UNREPORTED_MAX - 1);
        assert_eq!(budget.held(), 0, "nothing is nothing");
    }
}
