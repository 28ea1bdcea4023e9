//! Simulation of the order of tasks, by virtual time and seed, against the shares that fluid
//! division would give. Wrong orders are found.

use std::collections::VecDeque;

use fastrand::Rng;

use super::*;
use crate::limits::turns::time::DEFAULT_WEIGHT;

/// Virtual time of a run.
const RUN: Nanos = SECOND / 2;
const CLUSTERS: [(&str, u32); 4] = [("a", 10), ("b", 10), ("c", 40), ("d", 5)];
const IDENTITIES_MAX: usize = 4;
const TASKS_MAX: usize = 200;
const TURN_MAX: Nanos = 500_000;
/// Lag behind the share of a cluster or identity that rounds and turns explain: one turn, one
/// quantum and a debt of each source.
const LAG_MAX: Nanos = 20_000_000;

/// Order of tasks.
trait Order {
    /// Adds a task that is ready.
    fn push(&mut self, source: &Source, task: usize);
    /// Returns the next task.
    fn pop(&mut self) -> Option<usize>;
    /// Notes the length of a turn.
    fn charge(&mut self, source: &Source, time: Nanos);
}

/// Order of the product, with a part left out.
struct Shares {
    tree: Tree,
    without: Without,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    Nothing,
    /// All identities are equal, whatever their clusters are.
    Clusters,
    /// All identities of a cluster are one.
    Identities,
    /// A turn has no price.
    Prices,
    /// All turns have the same price.
    Lengths,
}

impl Shares {
    fn source(&self, source: &Source) -> Source {
        match self.without {
            Without::Clusters => Source::cluster(source.principal().expect("an identity")),
            Without::Identities => source.root().clone(),
            _ => source.clone(),
        }
    }
}

impl Order for Shares {
    fn push(&mut self, source: &Source, task: usize) {
        let node = self.tree.enter(&self.source(source));
        self.tree.push(node, task);
    }

    fn pop(&mut self) -> Option<usize> {
        self.tree.pop()
    }

    fn charge(&mut self, source: &Source, time: Nanos) {
        let node = self.tree.enter(&self.source(source));
        let price = match self.without {
            Without::Prices => 0,
            Without::Lengths => 10_000,
            _ => time,
        };
        self.tree.charge(node, price);
    }
}

/// Order of wake-ups, as that of tokio.
#[derive(Default)]
struct Fifo(VecDeque<usize>);

impl Order for Fifo {
    fn push(&mut self, _: &Source, task: usize) {
        self.0.push_back(task);
    }

    fn pop(&mut self) -> Option<usize> {
        self.0.pop_front()
    }

    fn charge(&mut self, _: &Source, _: Nanos) {}
}

/// Source that is always busy.
struct Worker {
    source: Source,
    weight: Nanos,
    turn: Nanos,
    used: Nanos,
}

/// Runs always busy sources of a seed. Returns what it finds wrong.
fn run(seed: u64, order: &mut impl Order) -> Option<String> {
    let mut rng = Rng::with_seed(seed);
    let (mut workers, mut tasks) = (Vec::new(), Vec::new());
    for (cluster, weight) in CLUSTERS {
        for name in 0..rng.usize(1..=IDENTITIES_MAX) {
            let source = identity(cluster, &format!("{cluster}{name}"));
            let turn = rng.i64(5_000..TURN_MAX);
            tasks.extend(std::iter::repeat_n(workers.len(), rng.usize(1..TASKS_MAX)));
            workers.push(Worker { source, weight: weight.into(), turn, used: 0 });
        }
    }
    for (task, worker) in tasks.iter().enumerate() {
        order.push(&workers[*worker].source, task);
    }
    let mut now = 0;
    while now < RUN {
        let Some(task) = order.pop() else { return Some("a ready task does not run".to_owned()) };
        let worker = &mut workers[tasks[task]];
        let time = rng.i64(worker.turn / 2..=worker.turn);
        (worker.used, now) = (worker.used + time, now + time);
        order.charge(&worker.source, time);
        order.push(&worker.source, task);
    }
    lag(&workers, now)
}

/// Returns the first cluster or identity that is behind its share.
fn lag(workers: &[Worker], time: Nanos) -> Option<String> {
    let all: Nanos = CLUSTERS.iter().map(|(_, weight)| Nanos::from(*weight)).sum();
    for cluster in workers.chunk_by(|one, next| one.source.root() == next.source.root()) {
        let used: Nanos = cluster.iter().map(|worker| worker.used).sum();
        let share = time * cluster[0].weight / all;
        let identities = Nanos::try_from(cluster.len()).expect("few");
        let mut behind = cluster.iter().filter(|one| one.used + LAG_MAX < used / identities);
        if used + LAG_MAX < share {
            return Some(format!("{}: {used} of {share}", cluster[0].source.root()));
        }
        if let Some(one) = behind.next() {
            return Some(format!("{}: {} of {used} / {identities}", one.source, one.used));
        }
    }
    None
}

fn shares(without: Without) -> Shares {
    let weights = CLUSTERS.map(|(name, weight)| (name.to_owned(), settings(weight)));
    Shares { tree: Tree::new(Arc::new(WorkerTime::new(weights.into()))), without }
}

#[test]
fn in_200_runs_nobody_is_behind_the_share_of_its_weight() {
    assert_eq!(DEFAULT_WEIGHT, Nanos::from(CLUSTERS[0].1));
    for seed in 0..200 {
        assert_eq!(run(seed, &mut shares(Without::Nothing)), None, "seed {seed}");
    }
}

#[test]
fn wrong_orders_are_found() {
    let wrong = [Without::Clusters, Without::Identities, Without::Prices, Without::Lengths];
    for without in wrong {
        let mut found = (0..20).filter_map(|seed| run(seed, &mut shares(without)));
        assert!(found.next().is_some(), "without {without:?}");
    }
    assert!((0..20).any(|seed| run(seed, &mut Fifo::default()).is_some()));
}
