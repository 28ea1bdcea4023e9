//! Division of time, by the tree alone and by tasks on a worker.

mod simulation;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use tokio::sync::Notify;
use tokio::task::{JoinSet, yield_now};

use super::time::Nanos;
use super::tree::Tree;
use super::*;

fn cluster(name: &str) -> Source {
    Source::cluster(&name.into())
}

fn identity(of: &str, name: &str) -> Source {
    cluster(of).identity(&name.into())
}

/// Sources with tasks that are ready again after each turn, on a worker without a clock.
struct Busy {
    tree: Tree,
    /// Sources by their tasks, and the length of their turns.
    tasks: Vec<(usize, Nanos)>,
    used: HashMap<usize, Nanos>,
}

impl Busy {
    fn new(sources: &[(Source, usize, Nanos)]) -> Self {
        Self::with(Tree::new(Arc::default()), sources)
    }

    fn with(mut tree: Tree, sources: &[(Source, usize, Nanos)]) -> Self {
        let mut tasks = Vec::new();
        for (source, count, turn) in sources {
            for _ in 0..*count {
                let node = tree.enter(source);
                tree.push(node, tasks.len());
                tasks.push((node, *turn));
            }
        }
        Self { tree, tasks, used: HashMap::new() }
    }

    /// Runs turns for a time, with all tasks that run ready again at once.
    fn run(&mut self, time: Nanos) {
        let mut left = time;
        while left > 0 {
            let task = self.tree.pop().expect("a ready task");
            let (node, turn) = self.tasks[task];
            self.tree.charge(node, turn);
            *self.used.entry(node).or_default() += turn;
            self.tree.push(node, task);
            left -= turn;
        }
    }

    /// Returns the time that the tasks of each source have used.
    fn used(&self, of: &[(Source, usize, Nanos)]) -> Vec<Nanos> {
        let mut first = 0;
        let nodes = of.iter().map(|(_, count, _)| {
            let node = self.tasks[first].0;
            first += count;
            self.used.get(&node).copied().unwrap_or_default()
        });
        nodes.collect()
    }
}

const SECOND: Nanos = 1_000_000_000;

fn assert_equal(used: &[Nanos]) {
    let (least, most) = (used.iter().min().unwrap(), used.iter().max().unwrap());
    assert!(most - least <= 2_000_000, "{used:?}");
}

#[test]
fn clusters_have_equal_time_whatever_their_tasks_and_turns_are() {
    let all = [
        (identity("a", "1"), 1, 8_000),
        (identity("b", "1"), 1000, 8_000),
        (identity("c", "1"), 10, 500_000),
        (cluster("d"), 3, 90_000),
    ];
    let mut busy = Busy::new(&all);
    busy.run(SECOND);
    assert_equal(&busy.used(&all));
}

fn settings(weight: u32) -> ClusterSettings {
    ClusterSettings { weight, bytes: None }
}

#[test]
fn weights_divide_the_time_of_clusters_and_all_of_it_is_counted() {
    let weights = [("b", 1), ("c", 100)];
    let weights = weights.map(|(name, weight)| (name.to_owned(), settings(weight)));
    let time = Arc::new(WorkerTime::new(HashMap::from(weights)));
    let all = ["a", "b", "c"].map(|name| (identity(name, "1"), 100, 8_000));
    let mut busy = Busy::with(Tree::new(Arc::clone(&time)), &all);
    busy.run(SECOND);
    let used = busy.used(&all);
    for (used, weight) in used.iter().zip([10, 1, 100]) {
        assert!((used - SECOND * weight / 111).abs() <= 3_000_000, "{used}, weight {weight}");
    }
    busy.tree.note_wait(busy.tasks[0].0, 5_000);
    let counted = time.used().into_iter().map(|row| (row.cluster, nanos(row.used), row.waited));
    let counted: Vec<_> = counted.collect();
    let waited = [5_000, 0, 0].map(Duration::from_nanos);
    let wanted = ["a", "b", "c"].into_iter().zip(used).zip(waited);
    let wanted: Vec<_> =
        wanted.map(|((name, used), waited)| (name.to_owned(), used, waited)).collect();
    assert_eq!(counted, wanted);
}

#[test]
fn identities_divide_the_time_of_their_cluster() {
    let all = [
        (identity("a", "1"), 500, 8_000),
        (identity("a", "2"), 1, 8_000),
        (cluster("b"), 1, 8_000),
    ];
    let mut busy = Busy::new(&all);
    busy.run(SECOND);
    let used = busy.used(&all);
    assert_equal(&used[..2]);
    assert_equal(&[used[0] + used[1], used[2]]);
}

#[test]
fn a_gateway_divides_its_time_between_itself_and_its_first_peers() {
    let gateway = identity("west", "gateway");
    let behind = gateway.behind(&"north".into());
    let all = [
        (gateway, 1, 8_000),
        (behind.identity(&"1".into()), 100, 8_000),
        (behind.identity(&"2".into()), 1, 8_000),
        (identity("east", "1"), 1, 8_000),
    ];
    let mut busy = Busy::new(&all);
    busy.run(SECOND);
    let used = busy.used(&all);
    assert!(used[0] > SECOND / 10, "{used:?}");
    assert_equal(&used[1..3]);
    assert_equal(&[used[0] + used[1] + used[2], used[3]]);
}

#[test]
fn peers_that_are_not_verified_share_the_time_of_one_cluster() {
    let prefix = |last: u8| Source::prefix([192, 0, 2, last].into());
    let mut all: Vec<_> = (0..100).map(|last| (prefix(last), 1, 400_000)).collect();
    all.push((identity("a", "1"), 1, 8_000));
    let mut busy = Busy::new(&all);
    busy.run(SECOND);
    let used = busy.used(&all);
    let (verified, others) = used.split_last().unwrap();
    assert!((others.iter().sum::<Nanos>() - verified).abs() < 50_000_000, "{used:?}");
}

#[test]
fn an_unused_share_goes_to_others() {
    let all = [(identity("a", "1"), 10, 8_000), (identity("b", "1"), 1, 8_000)];
    let mut busy = Busy::new(&all);
    let (idle, _) = busy.tasks[10];
    busy.tree.remove(idle, 10);
    busy.run(SECOND);
    assert_eq!(busy.used(&all), [SECOND, 0]);
    busy.tree.push(idle, 10);
    busy.run(SECOND);
    let used = busy.used(&all);
    assert_equal(&[used[0] - SECOND, used[1]]);
}

#[test]
fn credit_returns_after_a_pause_and_debt_is_bounded() {
    let mut tree = Tree::new(Arc::default());
    let node = tree.enter(&identity("a", "1"));
    tree.charge(node, 60 * SECOND);
    assert!(!tree.has_credit(node));
    tree.push(node, 7);
    assert_eq!(tree.pop(), Some(7), "nobody else is ready");
    tree.charge(node, 60 * SECOND);
    tree.note_idle();
    assert!(tree.has_credit(node));
}

#[test]
fn the_only_identity_of_a_cluster_has_the_credit_of_the_cluster() {
    let mut tree = Tree::new(Arc::default());
    let node = tree.enter(&identity("a", "1"));
    tree.charge(node, 200_000);
    assert!(tree.has_credit(node));
    let other = tree.enter(&identity("a", "2"));
    assert!(!tree.has_credit(node) && tree.has_credit(other));
    tree.leave(other);
    tree.charge(node, 100_000);
    assert!(!tree.has_credit(node), "the credit of the cluster is used up");
}

#[test]
fn sources_without_tasks_are_forgotten() {
    let mut tree = Tree::new(Arc::default());
    let gateway = identity("west", "gateway");
    let all = [gateway.behind(&"north".into()).identity(&"1".into()), gateway, cluster("east")];
    let nodes: Vec<_> = all.iter().map(|source| tree.enter(source)).collect();
    for &node in &nodes {
        tree.push(node, 3);
        tree.remove(node, 3);
    }
    assert!(tree.is_empty());
    nodes.into_iter().for_each(|node| tree.leave(node));
    assert_eq!(tree.len(), 2, "{tree:?}");
}

/// Runs for this time without waiting.
fn compute(time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time {
        std::hint::spin_loop();
    }
}

#[tokio::test]
async fn a_task_with_credit_precedes_all_tasks_of_a_source_without() {
    enter(&Arc::default());
    let (noisy, quiet) = (identity("noisy", "1"), identity("quiet", "1"));
    let mut tasks = JoinSet::new();
    let turns = spawn_busy(&mut tasks, &noisy, 100);
    let (called, answered) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (call, answer) = (Arc::clone(&called), Arc::clone(&answered));
    tasks.spawn(of(&quiet, async move {
        loop {
            called.notified().await;
            answered.notify_one();
        }
    }));
    let mut between = Vec::new();
    for _ in 0..50 {
        for _ in 0..5 {
            yield_now().await;
        }
        let before = turns.load(Ordering::Relaxed);
        call.notify_one();
        answer.notified().await;
        between.push(turns.load(Ordering::Relaxed) - before);
    }
    between.sort_unstable();
    assert!(between[25] <= 10, "{between:?}");
    assert!(turns.load(Ordering::Relaxed) > 100, "the worker does not rest");
}

#[tokio::test]
async fn all_tasks_go_on_once_other_sources_have_left() {
    enter(&Arc::default());
    let busy = identity("a", "1");
    let mut tasks = JoinSet::new();
    let turns = [(); 3].map(|()| spawn_busy(&mut tasks, &busy, 1));
    let counts = || turns.each_ref().map(|turns| turns.load(Ordering::Relaxed));
    for _ in 0..20 {
        // Without credit, all but one wait for each other.
        let other = of(&identity("b", "1"), std::future::pending::<()>());
        for _ in 0..50 {
            yield_now().await;
        }
        drop(other);
        let before = counts();
        for _ in 0..50 {
            yield_now().await;
        }
        let after = counts();
        assert!((0..3).all(|task| after[task] > before[task]), "{before:?} {after:?}");
    }
}

/// Starts tasks of a source that are always ready. Returns the number of their turns.
fn spawn_busy(tasks: &mut JoinSet<()>, source: &Source, count: usize) -> Arc<AtomicUsize> {
    let turns = Arc::new(AtomicUsize::new(0));
    for _ in 0..count {
        let turns = Arc::clone(&turns);
        tasks.spawn(of(source, async move {
            loop {
                compute(Duration::from_micros(50));
                turns.fetch_add(1, Ordering::Relaxed);
                yield_now().await;
            }
        }));
    }
    turns
}

#[tokio::test]
async fn all_that_a_task_with_credit_wakes_precedes_the_tasks_of_a_source_without() {
    // More than the turns in a round of the other source.
    const CHAIN: usize = 30;
    enter(&Arc::default());
    let (noisy, quiet) = (identity("noisy", "1"), identity("quiet", "1"));
    let mut tasks = JoinSet::new();
    let turns = spawn_busy(&mut tasks, &noisy, 100);
    let links: Vec<_> = (0..=CHAIN).map(|_| Arc::new(Notify::new())).collect();
    for link in links.windows(2) {
        let (called, next) = (Arc::clone(&link[0]), Arc::clone(&link[1]));
        tasks.spawn(of(&quiet, async move {
            loop {
                called.notified().await;
                next.notify_one();
            }
        }));
    }
    let mut between = Vec::new();
    for _ in 0..50 {
        for _ in 0..5 {
            yield_now().await;
        }
        let before = turns.load(Ordering::Relaxed);
        links[0].notify_one();
        links[CHAIN].notified().await;
        between.push(turns.load(Ordering::Relaxed) - before);
    }
    between.sort_unstable();
    assert!(between[25] < CHAIN / 2, "{between:?}");
}

#[tokio::test]
async fn a_selected_task_waits_for_others_with_credit_only() {
    enter(&Arc::default());
    let mut tasks = JoinSet::new();
    let counts = [("a", 100), ("b", 1)]
        .map(|(name, count)| spawn_busy(&mut tasks, &identity(name, "1"), count));
    let turns = || counts.each_ref().map(|turns| turns.load(Ordering::Relaxed));
    while turns().iter().sum::<usize>() < 500 {
        yield_now().await;
    }
    assert!(turns().iter().all(|&turns| turns > 50), "{:?}", turns());
}

#[tokio::test]
async fn tasks_that_panic_end_or_are_aborted_leave_their_turn_to_others() {
    enter(&Arc::default());
    let source = identity("a", "1");
    let other = of(&identity("b", "1"), std::future::pending::<()>());
    let mut tasks = JoinSet::new();
    for number in 0..300 {
        tasks.spawn(of(&source, async move {
            for _ in 0..20 {
                compute(Duration::from_micros(20));
                yield_now().await;
            }
            assert!(number % 3 != 0, "planned");
            if number % 3 == 1 {
                std::future::pending::<()>().await;
            }
        }));
    }
    let (mut ended, mut panicked) = (0, 0);
    while ended + panicked < 200 {
        match tasks.join_next().await.expect("a task") {
            Ok(()) => ended += 1,
            Err(error) => panicked += usize::from(error.is_panic()),
        }
    }
    assert_eq!((ended, panicked), (100, 100));
    tasks.shutdown().await;
    drop(other);
    SCHEDULER.with_borrow(|scheduler| {
        let scheduler = scheduler.as_ref().expect("a scheduler");
        assert!(scheduler.tasks.is_empty() && scheduler.tree.is_empty());
        assert_eq!(scheduler.selected, None);
    });
}

#[tokio::test]
async fn a_task_pays_for_the_source_that_it_verifies() {
    enter(&Arc::default());
    let (unknown, known) = (Source::prefix([192, 0, 2, 1].into()), identity("a", "1"));
    let verified = known.clone();
    let _others = [&unknown, &known].map(|source| of(source, std::future::pending::<()>()));
    of(&unknown, async move {
        charge_to(&verified);
        compute(Duration::from_millis(1));
    })
    .await;
    let has_credit = |source: &Source| {
        scheduled(|scheduler| {
            let node = scheduler.tree.enter(source);
            (scheduler.tree.has_credit(node), None)
        })
    };
    assert_eq!((has_credit(&unknown), has_credit(&known)), (Some(true), Some(false)));
}

#[test]
fn a_busy_task_is_named_by_its_work_and_the_cluster_that_pays() {
    const SOON: Duration = Duration::from_secs(10);
    let ((shown, seen), (go_on, wait)) = (mpsc::channel(), mpsc::channel());
    let worker = thread::spawn(move || {
        let current = enter(&Arc::default());
        let show = move || {
            shown.send(Arc::clone(&current)).expect("a watchdog");
            wait.recv_timeout(SOON).expect("an answer");
        };
        let [prefix, verified] =
            [Source::prefix([192, 0, 2, 1].into()), identity("noisy", "1").behind(&"b".into())];
        let _other = of(&cluster("quiet"), std::future::pending::<()>());
        let task = of(&prefix, async {
            show();
            charge_to(&verified);
            set_work(Work::Connect);
            show();
        });
        let mut cx = Context::from_waker(Waker::noop());
        assert!(pin!(task).poll(&mut cx).is_ready());
        show();
    });
    for (work, cluster) in
        [(Work::Handshake, Some("prefixes")), (Work::Connect, Some("noisy")), (Work::Other, None)]
    {
        let current = seen.recv_timeout(SOON).expect("a worker");
        assert_eq!(current.read(), (work, cluster.map(str::to_owned)));
        go_on.send(()).expect("a worker");
    }
    worker.join().expect("no panic");
}

#[tokio::test]
async fn a_future_within_another_has_its_turns() {
    enter(&Arc::default());
    let (outer, inner) = (identity("a", "1"), identity("b", "1"));
    let nested = of(&inner, async {
        yield_now().await;
        7
    });
    let outer = of(&outer, async move {
        yield_now().await;
        nested.await
    });
    assert_eq!(tokio::spawn(outer).await.expect("a task"), 7);
    let idle = SCHEDULER.with_borrow(|one| one.as_ref().map(|one| (one.running, one.tasks.len())));
    assert_eq!(idle, Some((None, 0)));
}

/// Counts the turns of a busy task, alone on its worker, until a socket that is ready is served.
/// `polled` is the time of the last poll of the sockets.
async fn turns_until_served(polled: Instant) -> (usize, Instant) {
    let source = cluster("a");
    let (near, far) = std::os::unix::net::UnixStream::pair().expect("a pair");
    near.set_nonblocking(true).expect("a socket");
    let near = tokio::net::UnixStream::from_std(near).expect("a socket");
    let waiting = tokio::spawn(async move { near.readable().await });
    for _ in 0..3 {
        yield_now().await;
    }
    std::io::Write::write_all(&mut &far, &[7]).expect("a byte");
    let with = |scheduler: &mut Scheduler| (scheduler.polled = polled, None);
    scheduled(with).expect("a scheduler");
    let mut turns = 0;
    let busy = std::future::poll_fn(move |cx| {
        if waiting.is_finished() {
            return Poll::Ready(turns);
        }
        turns += 1;
        yield_turn(cx);
        Poll::Pending
    });
    let turns = tokio::spawn(of(&source, busy)).await.expect("a task");
    (turns, scheduled(|scheduler| (scheduler.polled, None)).expect("a scheduler"))
}

#[tokio::test]
async fn a_busy_task_lets_the_sockets_be_polled_once_that_is_due() {
    enter(&Arc::default());
    let now = Instant::now();
    let (turns, polled) = turns_until_served(now - LONE_POLL_INTERVAL).await;
    assert!(turns <= 3 && polled >= now, "{turns}");
    // Not due: tokio polls them by itself, after 61 tasks.
    let later = now + Duration::from_secs(3600);
    let (turns, polled) = turns_until_served(later).await;
    assert!((10..100).contains(&turns) && polled == later, "{turns}");
    // Several sources have tasks, so that it is due earlier.
    let _other = of(&identity("b", "1"), std::future::pending::<()>());
    let (turns, _) = turns_until_served(Instant::now() - POLL_INTERVAL).await;
    assert!(turns <= 3, "{turns}");
}

#[test]
fn without_a_worker_a_future_is_polled_at_once() {
    let future = of(&cluster("a"), async { 7 });
    let mut cx = Context::from_waker(Waker::noop());
    assert_eq!(std::pin::pin!(future).poll(&mut cx), Poll::Ready(7));
}
