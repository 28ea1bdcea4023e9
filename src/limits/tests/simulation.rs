//! Simulation of admission by seed and in virtual time: peers of clusters, first peers behind a
//! gateway, clients of bindings and of prefixes take places, bytes and handshakes, give them back,
//! and spend credit. Wrong machines are found.

use std::iter::successors;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fastrand::Rng;

use super::*;
use crate::limits::places::tests::evicted;

const SEEDS: u64 = 40;
const STEPS: usize = 1000;
/// Number of steps in which one source asks for as much as all others.
const PHASE: usize = 50;
const RATE: u32 = 5;
const CREDIT: u32 = 20;
/// Limit of a request for bytes, and of one for places.
const AMOUNTS: [usize; 2] = [2, 128 * 1024];
const PLACES: usize = 0;

/// Part of the product's admission that a machine lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    Nothing,
    /// Each identity is a cluster of its own.
    Clusters,
    /// All identities of a cluster are one.
    Identities,
    /// The floor is one place.
    Floors,
    /// The listener has no reserve.
    Reserves,
    /// Everything is granted.
    Limits,
    /// An amount stays on its account after its end.
    Returns,
    /// No handshake makes room for another one.
    Evictions,
    /// The oldest handshake makes room, whichever source has most.
    Largest,
    /// Time earns no credit.
    Time,
    /// All sources have one credit.
    Rates,
    /// Each request finds full credit.
    Spending,
}

const WRONG: [Without; 11] = [
    Without::Clusters,
    Without::Identities,
    Without::Floors,
    Without::Reserves,
    Without::Limits,
    Without::Returns,
    Without::Evictions,
    Without::Largest,
    Without::Time,
    Without::Rates,
    Without::Spending,
];

/// Admission of the product, with a part left out.
struct Machine {
    /// Places and bytes.
    pools: [Arc<Pool>; 2],
    /// Places of the clients of the listener.
    listener: Arc<AtomicUsize>,
    handshakes: Arc<Places>,
    rates: Rates,
    start: Instant,
    without: Without,
}

impl Machine {
    fn new(without: Without, maxima: [usize; 2], handshakes: usize) -> Self {
        let is_floorless = without == Without::Floors;
        let resource = if is_floorless { Resource::Tunnels } else { Resource::Descriptors };
        let places = Pool::new(resource, maxima[0]);
        let bytes = Pool::new(Resource::BufferedBytes, maxima[1]);
        let listener = match without {
            Without::Reserves => Arc::default(),
            _ => places.reserve_for_listener(),
        };
        let sources_max = if without == Without::Rates { 0 } else { 1000 };
        Self {
            pools: [places, bytes],
            listener,
            handshakes: Places::new(Resource::Handshakes, handshakes),
            rates: Rates::new(Rate::new(RATE, CREDIT), sources_max),
            start: Instant::now(),
            without,
        }
    }

    fn source(&self, source: &Source) -> Source {
        match (self.without, source.principal()) {
            (Without::Clusters, Some(principal)) => Source::cluster(principal),
            (Without::Identities, _) => source.root().clone(),
            _ => source.clone(),
        }
    }

    /// Takes an amount of a pool.
    fn take(&self, of: usize, source: &Source, amount: usize) -> Option<Held> {
        let pool = &self.pools[of];
        let account = pool.account(&self.source(source));
        let is_client = of == PLACES && is_client(source);
        let terms = Terms { free: pool.free_for(&self.listener), reserve: pool.reserve() };
        let held = match self.without {
            Without::Limits => Ok(account.charge(amount)),
            _ if is_client => account.take_on(amount, terms),
            _ => account.take(amount),
        };
        if held.is_ok() && is_client {
            self.listener.fetch_add(amount, Ordering::Relaxed);
        }
        held.ok()
    }

    fn give_back(&self, of: usize, Grant { source, amount, held }: Grant) {
        if of == PLACES && is_client(&source) {
            self.listener.fetch_sub(amount, Ordering::Relaxed);
        }
        if self.without == Without::Returns { held.keep() } else { drop(held) }
    }

    /// Takes a place of a handshake. May remove one that is open.
    fn shake_hands(&self, source: &Source, open: &mut Vec<Handshake>) -> Option<Place> {
        let is_full = self.handshakes.pool().free() == 0;
        match self.without {
            Without::Evictions if is_full => return None,
            Without::Largest if is_full && !open.is_empty() => drop(open.remove(0)),
            _ => {}
        }
        if source.is_balancers() {
            return self.handshakes.take_or_replace(source);
        }
        self.handshakes.take(source)
    }

    fn spend(&mut self, source: &Source, price: u32, time: Duration) -> bool {
        let now = if self.without == Without::Time { self.start } else { self.start + time };
        match self.without {
            Without::Spending => Rate::new(RATE, CREDIT).spend(price, now),
            _ => self.rates.of(source, now).spend(price, now),
        }
    }
}

/// Amount that a source has.
struct Grant {
    source: Source,
    amount: usize,
    held: Held,
}

/// Open handshake with its number.
struct Handshake {
    number: usize,
    source: Source,
    place: Place,
}

/// Amounts of a pool as they were granted, and the shares of docs/operations.md.
struct Ledger {
    max: usize,
    floor: usize,
    /// By each level.
    held: SourceMap<usize>,
    used: usize,
    /// Part of `used` of the clients of the listener.
    clients: usize,
    has_listener: bool,
    grants: Vec<Grant>,
}

impl Ledger {
    fn new(max: usize, floor: usize, has_listener: bool) -> Self {
        let (held, grants) = (SourceMap::default(), Vec::new());
        Self { max, floor, held, used: 0, clients: 0, has_listener, grants }
    }

    fn held(&self, source: &Source) -> usize {
        self.held.get(source).copied().unwrap_or_default()
    }

    /// Returns the amount that a source finds free: the clients of the listener have a sixteenth
    /// for themselves.
    fn free(&self, source: &Source) -> usize {
        let free = self.max.saturating_sub(self.used);
        let reserve = if self.has_listener { self.max / 16 } else { 0 };
        let is_own = is_client(source);
        free.saturating_sub(if is_own { 0 } else { reserve.saturating_sub(self.clients) })
    }

    /// Returns whether a source that is not behind a gateway is below its share.
    fn is_below_share(&self, source: &Source, free: usize) -> bool {
        let (held, is_common) = (self.held(source), free > self.max / 16);
        let Some(group) = source.parent() else {
            let multiple = if source.is_balancers() { 2 } else { 1 };
            return held < self.floor || (is_common && held < multiple * free);
        };
        let of_group = self.held(group);
        let has_little = held < self.floor;
        let is_below = of_group < 2 * free && (has_little || held + of_group < 2 * free);
        let has_rest = free > self.max / 32 && of_group < self.max - self.max / 4;
        of_group < self.floor || (is_common && is_below) || (has_little && has_rest)
    }

    /// Returns whether a source may get an amount, and whether it has to. First peers stay within
    /// the share of their gateway, where each cluster has a floor.
    fn rights(&self, source: &Source, amount: usize) -> [bool; 2] {
        let free = self.free(source);
        let has_room = (1..=free).contains(&amount);
        let gateway = source.parent().and_then(|group| Some((group, group.parent()?)));
        let Some((cluster, gateway)) = gateway else {
            return [has_room && self.is_below_share(source, free); 2];
        };
        let may = has_room && self.is_below_share(gateway, free);
        [may, may && self.held(cluster) < self.floor]
    }

    fn add(&mut self, grant: Grant) {
        for level in successors(Some(&grant.source), |level| level.parent()) {
            *self.held.entry(level.clone()).or_default() += grant.amount;
        }
        self.used += grant.amount;
        self.clients += if is_client(&grant.source) { grant.amount } else { 0 };
        self.grants.push(grant);
    }

    fn remove(&mut self, at: usize) -> Grant {
        let grant = self.grants.swap_remove(at);
        for level in successors(Some(&grant.source), |level| level.parent()) {
            *self.held.entry(level.clone()).or_default() -= grant.amount;
        }
        self.used -= grant.amount;
        self.clients -= if is_client(&grant.source) { grant.amount } else { 0 };
        grant
    }
}

/// Returns whether a source is one of the clients of the listener.
fn is_client(source: &Source) -> bool {
    source.parent().is_none() && source.address().is_some_and(|address| address.is_ipv4())
}

/// Sources, machine, and what it has granted.
struct World {
    rng: Rng,
    machine: Machine,
    /// Of places and bytes.
    ledgers: [Ledger; 2],
    /// Oldest first.
    handshakes: Vec<Handshake>,
    handshakes_max: usize,
    next_number: usize,
    /// Credit that each source has spent, with the times.
    spent: SourceMap<Vec<(Duration, u32)>>,
    refused: u64,
    time: Duration,
}

fn maxima(rng: &mut Rng) -> [usize; 2] {
    [rng.usize(32..160), rng.usize(1 << 20..8 << 20)]
}

fn sources(rng: &mut Rng) -> Vec<Source> {
    let (gateway, binding) = (peer("a", "gateway"), Source::binding(&"db".into()));
    let mut all = vec![gateway.clone(), Source::balancers()];
    for cluster in ["a", "b", "c"] {
        all.extend((0..rng.u8(1..5)).map(|at| peer(cluster, &format!("{cluster}{at}"))));
    }
    for cluster in ["x", "y"] {
        all.extend((0..rng.u8(1..4)).map(|at| behind(&gateway, cluster, &at.to_string())));
    }
    all.extend((0..3).map(|last| binding.client([10, 0, 0, last].into())));
    for at in 0..6 {
        all.push(Source::prefix([192, 0, 2, at].into()));
        all.push(Source::prefix([0x2001, 0xdb8, 0, at.into(), 0, 0, 0, 1].into()));
    }
    all
}

impl World {
    fn new(seed: u64, without: Without) -> Self {
        let mut rng = Rng::with_seed(seed);
        let (maxima, handshakes_max) = (maxima(&mut rng), rng.usize(6..40));
        let floors = [Resource::Descriptors, Resource::BufferedBytes].map(Resource::floor);
        let ledger = |of: usize| Ledger::new(maxima[of], floors[of], of == PLACES);
        Self {
            machine: Machine::new(without, maxima, handshakes_max),
            ledgers: [ledger(0), ledger(1)],
            rng,
            handshakes: Vec::new(),
            handshakes_max,
            next_number: 0,
            spent: SourceMap::default(),
            refused: 0,
            time: Duration::ZERO,
        }
    }

    fn step(&mut self, source: &Source) -> Result<(), String> {
        self.time += Duration::from_millis(self.rng.u64(..20));
        let of = self.rng.usize(..2);
        match self.rng.u8(..40) {
            ..20 => return self.take(of, source),
            20..25 => self.give_back(of),
            25..33 if source.parent().is_none() => return self.shake_hands(source),
            25..28 if !self.handshakes.is_empty() => {
                drop(self.handshakes.remove(self.rng.usize(..self.handshakes.len())));
            }
            28..39 => return self.spend(source),
            _ => {
                let maxima = maxima(&mut self.rng);
                self.ledgers[of].max = maxima[of];
                self.machine.pools[of].set_max(maxima[of]);
                self.handshakes_max = self.rng.usize(6..40);
                self.machine.handshakes.pool().set_max(self.handshakes_max);
            }
        }
        Ok(())
    }

    fn take(&mut self, of: usize, source: &Source) -> Result<(), String> {
        let (ledger, amount) = (&mut self.ledgers[of], self.rng.usize(1..=AMOUNTS[of]));
        let [may, must] = ledger.rights(source, amount);
        match self.machine.take(of, source, amount) {
            Some(_) if !may => return Err(format!("{amount} are granted above its share")),
            None if must => return Err(format!("{amount} are refused below its share")),
            Some(held) => {
                ledger.add(Grant { source: source.clone(), amount, held });
                if ledger.used > ledger.max {
                    return Err(format!("{} of {} are granted", ledger.used, ledger.max));
                }
            }
            None => {}
        }
        self.compare(of)
    }

    fn give_back(&mut self, of: usize) {
        let ledger = &mut self.ledgers[of];
        for _ in 0..self.rng.usize(..8).min(ledger.grants.len()) {
            let at = self.rng.usize(..ledger.grants.len());
            let grant = ledger.remove(at);
            self.machine.give_back(of, grant);
        }
    }

    /// Compares the sum of a pool.
    fn compare(&self, of: usize) -> Result<(), String> {
        let (used, want) = (self.machine.pools[of].used(), self.ledgers[of].used);
        if used == want { Ok(()) } else { Err(format!("{used} are in use instead of {want}")) }
    }

    fn shake_hands(&mut self, source: &Source) -> Result<(), String> {
        let mut held = SourceMap::<usize>::default();
        self.handshakes.iter().for_each(|one| *held.entry(one.source.clone()).or_default() += 1);
        let own = held.get(source).copied().unwrap_or_default();
        let (open, max) = (self.handshakes.len(), self.handshakes_max);
        let free = max.saturating_sub(open);
        let multiple = if source.is_balancers() { 2 } else { 1 };
        let is_common = free > max / 16 && own < multiple * free;
        let is_below = own < Resource::Handshakes.floor() || is_common;
        let may = is_below || (source.is_balancers() && own > 0);
        let most = held.values().max().copied().unwrap_or_default();
        let is_candidate = |one: &&Handshake| {
            if is_below { held[&one.source] == most } else { one.source == *source }
        };
        let oldest = self.handshakes.iter().find(is_candidate).map(|one| one.number);
        let victim = oldest.filter(|_| may && (free == 0 || !is_below));

        let numbers: Vec<_> = self.handshakes.iter().map(|one| one.number).collect();
        let place = self.machine.shake_hands(source, &mut self.handshakes);
        self.handshakes.retain(|one| !evicted(&one.place));
        let is_open = |number| self.handshakes.iter().any(|one| one.number == number);
        let gone: Vec<_> = numbers.into_iter().filter(|number| !is_open(*number)).collect();
        if place.is_some() != may {
            return Err(format!(
                "a handshake beside {own} of {open} is wrong: {}",
                place.is_some()
            ));
        }
        if gone != Vec::from_iter(victim) {
            return Err(format!("handshakes {gone:?} make room, not {victim:?}"));
        }
        let number = self.next_number;
        self.next_number += 1;
        let source = source.clone();
        self.handshakes.extend(place.map(|place| Handshake { number, source, place }));
        if self.machine.handshakes.pool().used() != self.handshakes.len() {
            return Err("handshakes are counted twice, or not at all".to_owned());
        }
        Ok(())
    }

    fn spend(&mut self, source: &Source) -> Result<(), String> {
        let (price, now) = (self.rng.u32(1..8), self.time);
        let spent = self.spent.entry(source.clone()).or_default();
        // In no span more than the full credit and what the span earns.
        let mut sum = price;
        let fits = spent.iter().rev().all(|(at, price)| {
            sum += price;
            let earned = u128::from(RATE) * (now - *at).as_nanos();
            u128::from(sum) * 1_000_000_000 <= u128::from(CREDIT) * 1_000_000_000 + earned
        });
        if self.machine.spend(source, price, now) != fits {
            return Err(format!("a price of {price} is wrong at {now:?}: {}", !fits));
        }
        if fits {
            spent.push((now, price));
        } else {
            self.refused += 1;
        }
        Ok(())
    }

    /// Gives everything back.
    fn end(mut self) -> Result<(), String> {
        for of in 0..2 {
            while !self.ledgers[of].grants.is_empty() {
                let grant = self.ledgers[of].remove(0);
                self.machine.give_back(of, grant);
            }
            self.compare(of)?;
        }
        self.handshakes.clear();
        let Machine { pools, listener, handshakes, rates, start, .. } = &mut self.machine;
        let pools = pools.iter().chain([handshakes.pool()]);
        if pools.clone().any(|pool| pool.used() > 0 || pool.nodes_len() > 0) {
            return Err(format!("accounts are left: {pools:?}"));
        }
        if listener.load(Ordering::Relaxed) > 0 {
            return Err("the listener keeps places".to_owned());
        }
        let later = *start + self.time + Duration::from_secs(3600);
        let reported: u64 = rates.sweep(later).iter().map(|(_, refused)| refused).sum();
        let is_reported = (reported, rates.sweep(later).len()) == (self.refused, 0);
        is_reported.then_some(()).ok_or_else(|| format!("{reported} refusals are reported"))
    }
}

fn run(seed: u64, without: Without) -> Result<(), String> {
    let mut world = World::new(seed, without);
    let sources = sources(&mut world.rng);
    let mut greedy = &sources[0];
    for step in 0..STEPS {
        if step % PHASE == 0 {
            greedy = world.rng.choice(&sources).expect("a source");
        }
        let any = world.rng.choice(&sources).expect("a source");
        let source = if world.rng.bool() { greedy } else { any };
        let at = |error: String| format!("seed {seed}, step {step}, {source}: {error}");
        world.step(source).map_err(at)?;
    }
    world.end().map_err(|error| format!("seed {seed}, end: {error}"))
}

#[test]
fn admission_refuses_and_sheds_nobody_below_its_share_and_all_is_given_back() {
    for seed in 0..SEEDS {
        run(seed, Without::Nothing).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn wrong_machines_of_admission_are_found() {
    for without in WRONG {
        assert!((0..SEEDS).any(|seed| run(seed, without).is_err()), "without {without:?}");
    }
}
