//! Evictions, and what is charged.

use super::*;

fn source(name: &str) -> Source {
    Source::cluster(&name.into()).identity(&name.into())
}

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
        let account = budget.account(&source("a"));
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
    assert!(evicted(&largest), "12 - 4 units are under seven eighths of 10");
    assert!(!evicted(&large) && !evicted(&moving) && !evicted(&thin));
    largest.release(4 * UNIT_BYTES);
    assert!(budget.has_room());

    thin.charge(3 * UNIT_BYTES);
    sleep(STALL_PERIOD).await;
    assert!(evicted(&thin) && !evicted(&large) && !evicted(&moving));
}

#[tokio::test(start_paused = true)]
async fn where_everything_moves_a_little_the_largest_go_in_the_end() {
    let budget = budget(10 * UNIT_BYTES);
    let accounts: Vec<_> = (0..50).map(|_| budget.account(&source("a"))).collect();
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
    let account = budget.account(&source("a"));
    account.charge(13 * UNIT_BYTES);
    sleep(STALL_PERIOD / 5).await;
    assert!(evicted(&account));
}

#[tokio::test(start_paused = true)]
async fn an_evicted_tunnel_that_gives_nothing_back_is_passed_over_after_a_second() {
    let budget = budget(10 * UNIT_BYTES);
    let [stuck, next] = [8, 4].map(|units| {
        let account = budget.account(&source("a"));
        account.charge(units * UNIT_BYTES);
        account
    });
    sleep(STALL_PERIOD * 3 / 2).await;
    assert!(evicted(&stuck) && !evicted(&next));
    sleep(STALL_PERIOD).await;
    assert!(evicted(&next));
}

#[tokio::test(start_paused = true)]
async fn bytes_that_another_thread_gives_back_count_like_the_tunnels_own() {
    let budget = budget(10 * UNIT_BYTES);
    let (account, small) = (budget.account(&source("a")), budget.account(&source("a")));
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
        let account = budget.account(&source("a"));
        drop(account.hold(UNIT_BYTES));
        budget.account(&source("a")).charge(0);
    }
    assert_eq!(budget.held(), 0);
    let listed = budget.accounts.lock().len();
    assert!(listed <= 8, "{listed} are listed");
    assert!(budget.marks().is_empty());
}

#[test]
fn all_but_a_little_is_reported_to_the_budget() {
    let budget = Arc::new(BufferBudget::new(100, Gauge::default()));
    let account = budget.account(&source("a"));
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

#[tokio::test(start_paused = true)]
async fn one_source_over_its_share_loses_tunnels_and_the_others_get_new_ones() {
    let budget = budget(64 * UNIT_BYTES);
    let (greedy, quiet) = (source("greedy"), source("quiet"));
    // As many connections that hold a part of a record.
    let all: Vec<_> = (0..300).map(|_| budget.account(&greedy)).collect();
    let mut open = Vec::new();
    for account in &all {
        account.charge(UNIT_BYTES / 2);
        open.push(account);
        sleep(ROUND_PAUSE_MIN).await;
        // An evicted tunnel gives its bytes back.
        open.retain(|account| {
            let ends = evicted(account);
            if ends {
                account.release(UNIT_BYTES / 2);
            }
            !ends
        });
        assert!(budget.has_room(), "{} of {}", budget.held(), budget.limit());
        assert!(budget.account(&quiet).check_room().is_ok());
    }
    sleep(3 * STALL_PERIOD).await;
    let left = open.iter().filter(|account| !evicted(account)).count();
    assert!(left > 0 && left <= 66, "{left}");
    assert!(budget.account(&greedy).check_room().is_err() || left < 66);
}

#[tokio::test(start_paused = true)]
async fn eviction_takes_from_the_largest_holder_and_not_the_largest_tunnel() {
    let budget = budget(100 * UNIT_BYTES);
    let large = budget.account(&source("quiet"));
    large.charge(20 * UNIT_BYTES);
    let small: Vec<_> = (0..60).map(|_| budget.account(&source("greedy"))).collect();
    for account in &small {
        account.charge(UNIT_BYTES);
    }
    sleep(3 * STALL_PERIOD).await;
    let gone = small.iter().filter(|account| evicted(account)).count();
    assert!(gone > 0 && !evicted(&large), "{gone}");
}

#[tokio::test(start_paused = true)]
async fn bytes_of_a_tunnel_move_to_its_first_peer() {
    let budget = budget(100 * UNIT_BYTES);
    let gateway = source("gateway");
    let account = budget.account(&gateway);
    account.charge(UNIT_BYTES);
    let shared = account.share(UNIT_BYTES);
    let first = gateway.behind(&"west".into()).identity(&"first".into());
    account.move_to(&first);
    let held = |source: &Source| budget.pool.account(source).held();
    assert_eq!((held(&first), held(&gateway)), (2 * UNIT_BYTES, 2 * UNIT_BYTES));
    drop(shared);
    account.release(UNIT_BYTES);
    assert_eq!((held(&first), held(&gateway), budget.pool.used()), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn an_old_notification_evicts_no_tunnel_that_moves() {
    let budget = budget(160 * UNIT_BYTES);
    // The runner has found room, and waits again.
    sleep(STALL_PERIOD).await;
    budget.exhausted.notify_one();
    let account = budget.account(&source("a"));
    account.charge(84 * UNIT_BYTES);
    assert!(account.source.lock().excess() > 0, "a little over its share");
    assert!(!budget.is_any_far_over_share());
    // Within the wait that the notification would cut short.
    sleep(STALL_PERIOD / 2).await;
    assert!(!evicted(&account));
}
