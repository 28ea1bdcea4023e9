//! Pool of one resource, and the share of it that each source may take.
//!
//! Shares are dynamic thresholds, as in the buffers of switches (Choudhury and Hahne, 1998): a
//! source may take more only while it holds less than a multiple of what is free. This rejects
//! nobody while half of the pool is free, lets a single identity or prefix take half and a single
//! cluster or binding two thirds, shrinks every share as the pool fills, and does not depend on
//! the number of sources. What is free for the clusters behind a gateway is what the gateway itself
//! may still take. So they and their identities divide the gateway's share in the same way.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use crate::status::{Holder, ResourceUsage};

use super::{LimitReached, Resource, Source, SourceMap};

/// Multiple of the free rest that a cluster or binding may hold: two thirds of the pool when it is
/// alone. One identity of it may hold half, and leaves some to other identities.
const GROUP_FACTOR: usize = 2;
/// Multiple of the free rest that a prefix may hold: half of the pool when it is alone.
const PREFIX_FACTOR: usize = 1;
/// Growth of both sides of an identity's threshold by one that it takes: the identity and its
/// cluster hold one more each, and twice the free rest is two less.
const GROWTH_BY_ONE: usize = 4;
/// Divisor of the pool for the reserve of sources below their floor.
const FLOOR_RESERVE_DIVISOR: usize = 16;
/// Divisor of the pool for the reserve of clusters, bindings and prefixes below their floor.
/// Identities below it may take the rest of the previous reserve, while their cluster holds less
/// than three quarters of the pool.
const GROUP_RESERVE_DIVISOR: usize = 32;
/// Divisor of the pool for the reserve of each listener: 1/16. It is less with more than eight
/// listeners, as half of the pool stays common.
const LISTENER_RESERVE_DIVISOR: usize = 16;

#[derive(Debug)]
pub struct Pool {
    resource: Resource,
    max: AtomicUsize,
    used: AtomicUsize,
    /// Sources with an account. An entry is removed with its last account, so their number is
    /// bounded by what is held and asked for.
    nodes: Mutex<SourceMap<Weak<Node>>>,
    /// Amounts that the clients of each listener with a reserve hold.
    listeners: ArcSwap<Vec<Arc<AtomicUsize>>>,
}

/// Pool with what it belongs to, where its resource has several: the address of a gateway, a
/// hostname of a service, or the name of a binding.
#[derive(Clone, Debug)]
pub struct OwnedPool {
    pub pool: Arc<Pool>,
    pub of: Option<String>,
}

impl OwnedPool {
    /// Creates it.
    pub fn new(pool: &Arc<Pool>, of: Option<String>) -> Self {
        Self { pool: Arc::clone(pool), of }
    }

    pub fn usage(self, most: usize) -> ResourceUsage {
        ResourceUsage { of: self.of, ..self.pool.usage(most) }
    }
}

/// Amount that one source holds, with everything that it consists of.
#[derive(Debug)]
struct Node {
    pool: Arc<Pool>,
    source: Source,
    parent: Option<Arc<Self>>,
    held: AtomicUsize,
}

/// Account of one source in one pool. Taking needs neither lock nor look-up.
#[derive(Clone, Debug)]
pub struct Account(Arc<Node>);

/// Amount that a source holds, given back on drop.
#[derive(Debug)]
pub struct Held {
    account: Account,
    amount: usize,
}

#[derive(Clone, Copy, Debug)]
struct OverShare {
    limit: LimitReached,
    /// Amount to give back until the source may take more.
    excess: usize,
}

/// Terms of a request, if the pool is shared with more than its sources.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    pub free: usize,
    /// Part of it that is left to sources below their floor.
    pub reserve: usize,
}

impl Pool {
    pub fn new(resource: Resource, max: usize) -> Arc<Self> {
        Arc::new(Self {
            resource,
            max: AtomicUsize::new(max),
            used: AtomicUsize::new(0),
            nodes: Mutex::default(),
            listeners: ArcSwap::default(),
        })
    }

    /// Reserves a part for the clients of a listener, which others cannot take. Returns the amount
    /// that they hold, as the caller counts it, and by which it ends the reserve.
    pub fn reserve_for_listener(&self) -> Arc<AtomicUsize> {
        let held = Arc::new(AtomicUsize::new(0));
        self.listeners.rcu(|all| {
            let mut all = Vec::clone(all);
            all.push(Arc::clone(&held));
            all
        });
        held
    }

    pub fn end_reserve(&self, of: &Arc<AtomicUsize>) {
        self.listeners
            .rcu(|all| all.iter().filter(|it| !Arc::ptr_eq(it, of)).cloned().collect::<Vec<_>>());
    }

    /// Returns the amount that is free for the clients of a listener, without the reserves of other
    /// listeners.
    pub fn free_for(&self, listener: &Arc<AtomicUsize>) -> usize {
        self.free().saturating_sub(self.unclaimed(Some(listener)))
    }

    /// Returns the amount of the reserves of all listeners but one that is not in use.
    fn unclaimed(&self, listener: Option<&Arc<AtomicUsize>>) -> usize {
        let listeners = self.listeners.load();
        let reserve = self.max() / LISTENER_RESERVE_DIVISOR.max(2 * listeners.len());
        let is_own = |it: &Arc<AtomicUsize>| listener.is_some_and(|own| Arc::ptr_eq(it, own));
        let others = listeners.iter().filter(|it| !is_own(it));
        others.map(|held| reserve.saturating_sub(held.load(Ordering::Relaxed))).sum()
    }

    /// Replaces the maximum. What is held above it stays held.
    pub fn set_max(&self, max: usize) {
        self.max.store(max, Ordering::Relaxed);
    }

    pub fn max(&self) -> usize {
        self.max.load(Ordering::Relaxed)
    }

    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    pub fn free(&self) -> usize {
        self.max().saturating_sub(self.used())
    }

    pub fn resource(&self) -> Resource {
        self.resource
    }

    /// Returns the account of a source. Costs a lock and a look-up for each level.
    pub fn account(self: &Arc<Self>, source: &Source) -> Account {
        Account(self.node(&mut self.nodes.lock(), source))
    }

    fn node(self: &Arc<Self>, nodes: &mut SourceMap<Weak<Node>>, of: &Source) -> Arc<Node> {
        if let Some(node) = nodes.get(of).and_then(Weak::upgrade) {
            return node;
        }
        let node = Arc::new(Node {
            pool: Arc::clone(self),
            source: of.clone(),
            parent: of.parent().map(|parent| self.node(nodes, parent)),
            held: AtomicUsize::new(0),
        });
        nodes.insert(of.clone(), Arc::downgrade(&node));
        node
    }

    /// Returns the sources that hold something, and the amounts.
    pub fn holders(&self) -> Vec<(Source, usize)> {
        // The nodes outlive the lock, which their drop takes.
        let live: Vec<_> = self.nodes.lock().values().filter_map(Weak::upgrade).collect();
        let held = live.iter().map(|node| (node.source.clone(), node.held()));
        held.filter(|(_, held)| *held > 0).collect()
    }

    /// Returns the amounts by the metric label of their cluster. All together are what is held.
    pub fn held_by_cluster(&self) -> BTreeMap<String, i64> {
        let mut by_cluster = BTreeMap::new();
        for (source, held) in self.holders() {
            let Some(cluster) = source.metric_cluster() else {
                continue;
            };
            let held = i64::try_from(held).unwrap_or(i64::MAX);
            *by_cluster.entry(cluster.to_owned()).or_default() += held;
            // The cluster of the gateway holds it too.
            if let Some(root) = source.parent().and_then(|gateway| gateway.root().metric_cluster())
            {
                *by_cluster.entry(root.to_owned()).or_default() -= held;
            }
        }
        by_cluster
    }

    /// Returns the size and use of the pool, with the `most` largest holders.
    pub fn usage(&self, most: usize) -> ResourceUsage {
        let named = |(source, held): (Source, usize)| Holder { source: source.to_string(), held };
        let mut holders: Vec<_> = self.holders().into_iter().map(named).collect();
        holders.sort_unstable_by(|a, b| (b.held, &a.source).cmp(&(a.held, &b.source)));
        holders.truncate(most);
        ResourceUsage {
            resource: self.resource.label().to_owned(),
            of: None,
            used: self.used(),
            max: Some(self.max()).filter(|max| *max != usize::MAX),
            holders,
        }
    }

    /// Takes an amount that is on nobody's account, if less than `below` is in use. The caller
    /// gives it back by [`Pool::give_back`].
    pub fn take_common(&self, amount: usize, below: usize) -> bool {
        let room = |used: usize| (used < below).then(|| used.saturating_add(amount));
        let order = Ordering::Relaxed;
        self.used.fetch_update(order, order, room).is_ok()
    }

    /// Gives back an amount of [`Pool::take_common`].
    pub fn give_back(&self, amount: usize) {
        self.used.fetch_sub(amount, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(super) fn nodes_len(&self) -> usize {
        self.nodes.lock().len()
    }

    /// Returns the part that is left to sources below their floor.
    pub fn reserve(&self) -> usize {
        self.max() / FLOOR_RESERVE_DIVISOR
    }

    fn terms(&self) -> Terms {
        self.terms_after(0)
    }

    /// Returns the terms of holders that no listener has accepted, once an amount is given back.
    pub fn terms_after(&self, amount: usize) -> Terms {
        let free = (self.free() + amount).saturating_sub(self.unclaimed(None));
        Terms { free, reserve: self.reserve() }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let mut nodes = self.pool.nodes.lock();
        // Another thread may have replaced the entry after the last reference was dropped.
        if nodes.get(&self.source).is_some_and(|it| it.strong_count() == 0) {
            nodes.remove(&self.source);
        }
    }
}

impl Node {
    fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    fn path(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |node| node.parent.as_deref())
    }

    /// Checks the shares on the path to this node. Returns the amount that the node may still take
    /// if nothing else changes.
    fn check(&self, terms: Terms) -> Result<usize, OverShare> {
        let resource = self.pool.resource;
        let (group, own) = match &self.parent {
            Some(group) if !self.source.is_group() => (&**group, Some(self.held())),
            _ => (self, None),
        };
        let (in_group, floor) = (group.held(), resource.floor());
        let max = self.pool.max();
        let (free, reserve) = match &group.parent {
            None => (terms.free, terms.reserve),
            Some(gateway) => {
                let free = gateway.check(terms)?;
                (free, (free + gateway.held()) / FLOOR_RESERVE_DIVISOR)
            }
        };
        let is_outermost = group.parent.is_none();
        let factor = if group.source.is_group() { GROUP_FACTOR } else { PREFIX_FACTOR };
        let threshold = free.saturating_mul(factor);
        // Identities behind a gateway have no floor: the gateway could invent them.
        let is_below_floor = is_outermost && own.is_some_and(|own| own < floor);
        let counted = own.unwrap_or(0).saturating_add(in_group);
        let fits =
            free > reserve && in_group < threshold && (is_below_floor || counted < threshold);
        // Admits an identity with little even if others of its cluster hold all of the share.
        let is_identity_below_floor =
            is_below_floor && in_group < max - max / 4 && free > max / GROUP_RESERVE_DIVISOR;
        let has_floor = in_group < floor || is_identity_below_floor;
        let is_full = is_outermost && free == 0;
        if is_full || !(fits || has_floor) {
            let of_own = counted.saturating_sub(threshold) / GROWTH_BY_ONE;
            let of_group = in_group.saturating_sub(threshold) / (1 + factor);
            let excess = of_own.max(of_group).max(reserve.saturating_sub(free)) + 1;
            let limit =
                if is_full { LimitReached::Full(resource) } else { LimitReached::Share(resource) };
            let excess = if has_floor { 0 } else { excess };
            return Err(OverShare { limit, excess });
        }
        let rest = threshold.saturating_sub(counted) / GROWTH_BY_ONE;
        Ok(rest.min(free.saturating_sub(reserve)))
    }

    fn add(&self, amount: usize) {
        for node in self.path() {
            node.held.fetch_add(amount, Ordering::Relaxed);
        }
    }

    fn remove(&self, amount: usize) {
        for node in self.path() {
            node.held.fetch_sub(amount, Ordering::Relaxed);
        }
    }
}

impl Account {
    pub fn source(&self) -> &Source {
        &self.0.source
    }

    pub fn pool(&self) -> &Arc<Pool> {
        &self.0.pool
    }

    pub fn held(&self) -> usize {
        self.0.held()
    }

    /// Checks that the source may take an amount.
    pub fn check(&self, amount: usize) -> Result<(), LimitReached> {
        self.check_on(amount, self.0.pool.terms())
    }

    /// Checks like [`Account::check`], on other terms than those of the pool.
    pub fn check_on(&self, amount: usize, terms: Terms) -> Result<(), LimitReached> {
        if amount > terms.free {
            return Err(LimitReached::Full(self.0.pool.resource));
        }
        let checked = self.0.check(terms);
        checked.map(|_| ()).map_err(|over| over.limit)
    }

    /// Returns the amount that the source, or a source above it, has to give back until it may
    /// take more.
    pub fn excess(&self) -> usize {
        let checked = self.0.check(self.0.pool.terms());
        checked.map_or_else(|over| over.excess, |_| 0)
    }

    /// Takes an amount. Concurrent threads may exceed a share by one request each, but never the
    /// maximum.
    pub fn take(&self, amount: usize) -> Result<Held, LimitReached> {
        self.take_on(amount, self.0.pool.terms())
    }

    /// Takes an amount, on other terms than those of the pool.
    pub fn take_on(&self, amount: usize, terms: Terms) -> Result<Held, LimitReached> {
        self.check_on(amount, terms)?;
        let pool = &self.0.pool;
        let room = |used: usize| used.checked_add(amount).filter(|used| *used <= pool.max());
        let order = Ordering::Relaxed;
        let taken = pool.used.fetch_update(order, order, room);
        taken.map_err(|_| LimitReached::Full(pool.resource))?;
        self.0.add(amount);
        let account = self.clone();
        Ok(Held { account, amount })
    }

    /// Charges an amount that exists already, whatever the share.
    pub fn charge(&self, amount: usize) -> Held {
        self.0.pool.used.fetch_add(amount, Ordering::Relaxed);
        self.0.add(amount);
        let account = self.clone();
        Held { account, amount }
    }

    /// Gives back an amount that [`Held::keep`] has left on the account.
    pub fn give_back(&self, amount: usize) {
        self.0.remove(amount);
        self.0.pool.give_back(amount);
    }
}

impl Held {
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Leaves the amount on the account until [`Account::give_back`].
    pub fn keep(mut self) {
        self.amount = 0;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.account.give_back(self.amount);
    }
}
