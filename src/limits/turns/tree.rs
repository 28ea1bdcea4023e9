//! Order of tasks: deficit round robin between sources, at each level of their tree.

use std::collections::VecDeque;
use std::sync::Arc;

use slab::Slab;

use super::time::{ClusterTime, DEFAULT_WEIGHT, Nanos, WorkerTime};
use crate::limits::{Source, SourceMap};

/// Time that a cluster of weight 1 uses in a round, and so before others that are ready. Bindings,
/// all prefixes together, and other clusters have ten times as much: about five short tunnels.
const QUANTUM: Nanos = 25_000;
/// Time that a part of one, such as an identity, uses in a round of its parent.
const PART_QUANTUM: Nanos = 100_000;
/// Limit of the debt of a source, in quanta. It bounds the rounds that a source waits after one
/// long turn.
const DEBT_MAX: Nanos = 10;

/// Root of all sources, and the parent of prefixes, whose peers are not verified yet.
const ROOT: usize = 0;
const UNVERIFIED: usize = 1;

/// Tasks that are ready, by source.
#[derive(Debug)]
pub(super) struct Tree {
    time: Arc<WorkerTime>,
    nodes: Slab<Node>,
    by_source: SourceMap<usize>,
    /// Number of times that nothing was ready. All credit is full after each of them.
    idle: u64,
}

/// Source, or a root.
#[derive(Debug)]
struct Node {
    source: Option<Source>,
    /// Time that its cluster has used; None for a part of one.
    time: Option<Arc<ClusterTime>>,
    /// Index of its cluster.
    cluster: usize,
    parent: usize,
    /// Number of its tasks and parts.
    users: usize,
    quantum: Nanos,
    /// Time that it may use before others of its parent. Negative after a long turn.
    credit: Nanos,
    /// Round of its parent, and [`Tree::idle`], up to which its credit has grown.
    round: u64,
    idle: u64,
    place: Place,
    /// Number of ready tasks, including those of its parts.
    ready: usize,
    tasks: VecDeque<usize>,
    /// Parts with and without credit that were ready. They leave at their next turn if they are
    /// not any more.
    fresh: VecDeque<usize>,
    spent: VecDeque<usize>,
    /// Rounds of its parts.
    rounds: u64,
    /// The last turn was that of a part, and the next one is that of a task of its own.
    is_own_turn: bool,
}

/// List of its parent in which a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    None,
    Fresh,
    Spent,
}

impl Node {
    fn new(source: Option<Source>, parent: usize, quantum: Nanos) -> Self {
        Self {
            source,
            time: None,
            cluster: 0,
            parent,
            users: 0,
            quantum,
            credit: quantum,
            round: 0,
            idle: 0,
            place: Place::None,
            ready: 0,
            tasks: VecDeque::new(),
            fresh: VecDeque::new(),
            spent: VecDeque::new(),
            rounds: 0,
            is_own_turn: true,
        }
    }
}

impl Tree {
    /// Creates an empty tree, which adds to this time.
    pub(super) fn new(time: Arc<WorkerTime>) -> Self {
        let mut nodes = Slab::new();
        for _ in [ROOT, UNVERIFIED] {
            nodes.insert(Node::new(None, ROOT, QUANTUM * DEFAULT_WEIGHT));
        }
        Self { time, nodes, by_source: SourceMap::default(), idle: 0 }
    }

    /// Returns the node of a source for one more task, until [`Self::leave`].
    pub(super) fn enter(&mut self, source: &Source) -> usize {
        if let Some(&node) = self.by_source.get(source) {
            self.nodes[node].users += 1;
            return node;
        }
        let (parent, quantum) = match source.parent() {
            Some(parent) => (self.enter(parent), PART_QUANTUM),
            None if source.address().is_some() => (UNVERIFIED, PART_QUANTUM),
            None => (ROOT, QUANTUM * self.time.weight(source)),
        };
        let mut node = Node::new(Some(source.clone()), parent, quantum);
        node.time = source.parent().is_none().then(|| self.time.of(source));
        node.cluster = node.time.as_ref().map_or(self.nodes[parent].cluster, |time| time.index);
        (node.users, node.round, node.idle) = (1, self.nodes[parent].rounds, self.idle);
        let node = self.nodes.insert(node);
        self.by_source.insert(source.clone(), node);
        node
    }

    /// Removes a task, which must not be ready.
    pub(super) fn leave(&mut self, node: usize) {
        let left = &mut self.nodes[node];
        let Some(source) = &left.source else { return };
        left.users -= 1;
        if left.users > 0 {
            return;
        }
        self.by_source.remove(source);
        let Node { parent, place, .. } = self.nodes.remove(node);
        let lists = &mut self.nodes[parent];
        match place {
            Place::None => {}
            Place::Fresh => lists.fresh.retain(|&other| other != node),
            Place::Spent => lists.spent.retain(|&other| other != node),
        }
        self.leave(parent);
    }

    /// Notes that all sources have had all the time that they wanted.
    pub(super) fn note_idle(&mut self) {
        self.idle += 1;
    }

    /// Returns true if there is more than one identity or prefix with its cluster.
    pub(super) fn is_shared(&self) -> bool {
        self.by_source.len() > 2
    }

    /// Returns the index of the cluster of a node.
    pub(super) fn cluster(&self, node: usize) -> usize {
        self.nodes[node].cluster
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.nodes[ROOT].ready == 0 && self.nodes[UNVERIFIED].ready == 0
    }

    /// Returns true if a source and all that it is a part of have credit. That of the only part of
    /// a source is the credit of the source.
    pub(super) fn has_credit(&mut self, node: usize) -> bool {
        let mut at = node;
        while at != ROOT {
            let parent = self.nodes[at].parent;
            let is_only = parent != ROOT && self.nodes[parent].users == 1;
            if self.renew(at) <= 0 && !is_only {
                return false;
            }
            at = parent;
        }
        true
    }

    /// Charges the time of a turn to a source and all that it is a part of.
    pub(super) fn charge(&mut self, node: usize, time: Nanos) {
        let mut at = node;
        while at != ROOT {
            let credit = self.renew(at) - time;
            let node = &mut self.nodes[at];
            node.credit = credit.max(-DEBT_MAX * node.quantum);
            if let Some(cluster) = &node.time {
                cluster.add_used(time);
            }
            at = node.parent;
        }
    }

    /// Notes the time for which a task of a source was ready before its turn.
    pub(super) fn note_wait(&self, node: usize, time: Nanos) {
        let mut at = node;
        while at != ROOT {
            let node = &self.nodes[at];
            if let Some(cluster) = &node.time {
                cluster.add_waited(time);
            }
            at = node.parent;
        }
    }

    /// Adds a ready task of a source.
    pub(super) fn push(&mut self, node: usize, task: usize) {
        self.nodes[node].tasks.push_back(task);
        let mut at = node;
        loop {
            self.nodes[at].ready += 1;
            if at == ROOT {
                return;
            }
            let (has_credit, parent) = (self.renew(at) > 0, self.nodes[at].parent);
            if self.nodes[at].place == Place::None {
                self.place(at, has_credit);
            }
            at = parent;
        }
    }

    /// Removes a ready task that will not run.
    pub(super) fn remove(&mut self, node: usize, task: usize) {
        self.nodes[node].tasks.retain(|&other| other != task);
        self.count_out(node);
    }

    /// Returns the task that runs next, and removes it.
    pub(super) fn pop(&mut self) -> Option<usize> {
        if self.nodes[ROOT].ready == 0 {
            return None;
        }
        let mut at = ROOT;
        loop {
            let node = &mut self.nodes[at];
            let has_parts = node.ready > node.tasks.len();
            let takes_own = !node.tasks.is_empty() && (node.is_own_turn || !has_parts);
            node.is_own_turn = !takes_own;
            if takes_own {
                let task = node.tasks.pop_front();
                self.count_out(at);
                return task;
            }
            at = self.next_part(at)?;
        }
    }

    /// Returns the part whose turn it is: the first one with credit.
    fn next_part(&mut self, parent: usize) -> Option<usize> {
        loop {
            if let Some(&part) = self.nodes[parent].fresh.front() {
                let (is_ready, has_credit) = (self.nodes[part].ready > 0, self.renew(part) > 0);
                if is_ready && has_credit {
                    return Some(part);
                }
                self.nodes[parent].fresh.pop_front();
                self.nodes[part].place = Place::None;
                if is_ready {
                    self.place(part, false);
                }
                continue;
            }
            let spent = std::mem::take(&mut self.nodes[parent].spent);
            if spent.is_empty() {
                return None;
            }
            self.nodes[parent].rounds += 1;
            for part in spent {
                self.nodes[part].place = Place::None;
                if self.nodes[part].ready > 0 {
                    let has_credit = self.renew(part) > 0;
                    self.place(part, has_credit);
                }
            }
        }
    }

    fn place(&mut self, part: usize, has_credit: bool) {
        let parent = self.nodes[part].parent;
        let parent = &mut self.nodes[parent];
        let (list, place) = if has_credit {
            (&mut parent.fresh, Place::Fresh)
        } else {
            (&mut parent.spent, Place::Spent)
        };
        list.push_back(part);
        self.nodes[part].place = place;
    }

    fn count_out(&mut self, node: usize) {
        let mut at = node;
        loop {
            self.nodes[at].ready -= 1;
            if at == ROOT {
                return;
            }
            at = self.nodes[at].parent;
        }
    }

    /// Lets the credit of a node grow by the rounds of its parent. Returns it.
    fn renew(&mut self, node: usize) -> Nanos {
        let (idle, round) = (self.idle, self.nodes[self.nodes[node].parent].rounds);
        let node = &mut self.nodes[node];
        if (node.idle, node.round) == (idle, round) {
            return node.credit;
        }
        if node.idle != idle {
            node.credit = node.quantum;
        } else {
            let rounds = Nanos::try_from(round - node.round).unwrap_or(DEBT_MAX + 1);
            let grown = node.credit + rounds.min(DEBT_MAX + 1) * node.quantum;
            node.credit = grown.min(node.quantum);
        }
        (node.idle, node.round) = (idle, round);
        node.credit
    }
}
