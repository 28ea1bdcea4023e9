//! Simulation of a control plane by seed and in virtual time. It loses all of a mesh or parts of
//! it, at once or little by little, reconnects, and gets them back; an operator releases what is
//! held. Client, recorder, hold and store are those of the product. Wrong machines are found.

use std::iter::repeat_with;

use fastrand::Rng;
use tokio::time::advance;

use super::*;
use crate::snapshot::authorization::PolicyScope;
use crate::snapshot::{ExportSet, Policies};

const SEEDS: u64 = 40;
const STEPS: usize = 150;
const TYPES: [&str; 3] = [ADDRESS, CLUSTER, AUTHORIZATION];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Service,
    Workload,
    Export,
    Policy,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Service, Self::Workload, Self::Export, Self::Policy];

    fn type_url(self) -> &'static str {
        match self {
            Self::Service | Self::Workload => ADDRESS,
            Self::Export => CLUSTER,
            Self::Policy => AUTHORIZATION,
        }
    }

    /// Returns the number at the start. A rollout replaces workloads by as many others.
    fn initial(self) -> usize {
        if self == Self::Policy { 6 } else { 24 }
    }

    fn count<'a>(self, items: impl Iterator<Item = &'a Item>) -> usize {
        items.filter(|(kind, _)| *kind == self).count()
    }
}

/// Resource of the control plane.
type Item = (Kind, usize);

/// Versions of resources.
type Items = BTreeMap<Item, u32>;

fn name((kind, index): Item) -> String {
    match kind {
        Kind::Service => format!("app/s{index}.app"),
        Kind::Workload => format!("w{index}"),
        Kind::Export => format!("inbound-vip|80|tcp|s{index}.app"),
        Kind::Policy => format!("app/p{index}"),
    }
}

/// Returns a version of a resource. Those of a policy alternate between two scopes.
fn version_of((kind, index): Item, version: u32) -> Resource {
    match kind {
        Kind::Service => service(index),
        Kind::Workload => workload(&format!("w{index}"), &version.to_string()),
        Kind::Export => export(index),
        Kind::Policy => {
            let scope = i32::try_from(version % 2).expect("a bit");
            samples::named_policy(&format!("p{index}"), scope, 80, &version.to_string())
        }
    }
}

/// Part of the product's hold that a machine lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    Nothing,
    /// All removals apply at once.
    Hold,
    /// A hold ends with its stream.
    Reconnects,
    /// A hold lasts for a minute.
    Duration,
    /// Policies go as other resources do.
    Policies,
    /// Any removal of the first minute waits.
    Threshold,
    /// Each response is compared alone.
    Sums,
    /// The first minute never ends.
    Minute,
    /// A resource that is sent again stays in the hold.
    Returns,
    /// New resources wait while removals do.
    News,
    /// The time of a hold never ends.
    End,
    /// A release leaves policies.
    Release,
}

const WRONG: [Without; 11] = [
    Without::Hold,
    Without::Reconnects,
    Without::Duration,
    Without::Policies,
    Without::Threshold,
    Without::Sums,
    Without::Minute,
    Without::Returns,
    Without::News,
    Without::End,
    Without::Release,
];

/// Control plane, gateway, and what has to be in force there.
struct World {
    rng: Rng,
    without: Without,
    time: Duration,
    gateway: Gateway,
    names: BTreeMap<Item, String>,
    exports: ExportSet,
    policies: Policies,
    /// Resources of the control plane, and those that it has sent.
    plane: Items,
    sent: Items,
    is_connected: bool,
    /// Times of the first responses of this stream.
    first: BTreeMap<&'static str, Instant>,
    /// Those since the last end of a hold.
    windows: BTreeMap<&'static str, Instant>,
    /// Largest numbers since.
    most: BTreeMap<Kind, usize>,
    is_mass: bool,
    has_begun: bool,
    /// Removals that wait, each with whether it has to.
    waiting: BTreeMap<Item, bool>,
    /// Limit of those that are held: resources when the hold began.
    waiting_max: usize,
    /// End of the hold.
    until: Option<Instant>,
    /// Policies that were there before the stream.
    old_policies: BTreeSet<Item>,
    /// Policies during the hold. None may go before what it covers.
    covering: BTreeSet<Item>,
    /// Number of holds.
    holds: usize,
}

impl World {
    fn new(seed: u64, without: Without) -> Self {
        let mut rng = Rng::with_seed(seed);
        let time = if rng.u8(..8) == 0 { 0 } else { 300 * rng.u64(1..3) };
        let time = Duration::from_secs(time);
        let hold = match without {
            Without::Hold => Hold::new(Duration::ZERO),
            Without::Duration => Hold::new(time.min(WINDOW)),
            Without::Policies => {
                let rule = WaitRule { of: &[], covers: |_, _, _| false, ..WaitRule::default() };
                Hold::with(time, rule)
            }
            _ => Hold::new(time),
        };
        let items = Kind::ALL.into_iter().flat_map(|kind| {
            let others = if kind == Kind::Workload { kind.initial() } else { 0 };
            (0..kind.initial() + others).map(move |index| (kind, index))
        });
        let names: BTreeMap<_, _> = items.map(|item| (item, name(item))).collect();
        let initial = names.keys().filter(|(kind, index)| *index < kind.initial());
        Self {
            plane: initial.map(|item| (*item, 0)).collect(),
            rng,
            without,
            time,
            gateway: Gateway::new(hold),
            names,
            exports: ExportSet::default(),
            policies: Policies::default(),
            sent: Items::new(),
            is_connected: false,
            first: BTreeMap::new(),
            windows: BTreeMap::new(),
            most: BTreeMap::new(),
            is_mass: false,
            has_begun: false,
            waiting: BTreeMap::new(),
            waiting_max: 0,
            until: None,
            old_policies: BTreeSet::new(),
            covering: BTreeSet::new(),
            holds: 0,
        }
    }

    /// Returns what is in force, published as by the stream.
    fn in_force(&mut self) -> Items {
        let store = &mut self.gateway.recorder.store;
        let mesh = store.tables().mesh();
        if let Some(exports) = store.tables().take_exports() {
            self.exports = exports;
        }
        if let Some(policies) = store.take_policies() {
            self.policies = policies;
        }
        let scope = |scope| u32::from(scope == PolicyScope::Namespace);
        let policies = self.policies.iter().map(|one| (one.full_name(), scope(one.scope)));
        let policies: BTreeMap<_, _> = policies.collect();
        let version = |(kind, _): &Item, name: &String| match kind {
            Kind::Service => mesh.services.get(name.as_str()).map(|_| 0),
            Kind::Workload => mesh.workloads.get(name.as_str())?.node.parse().ok(),
            Kind::Export => {
                let host = name.trim_start_matches("inbound-vip|80|tcp|");
                self.exports.contains(host, 80).then_some(0)
            }
            Kind::Policy => policies.get(name).copied(),
        };
        let known = self.names.iter();
        known.filter_map(|(item, name)| Some((*item, version(item, name)?))).collect()
    }

    /// Begins a stream.
    fn connect(&mut self) {
        if self.without == Without::Reconnects {
            self.gateway.recorder.release();
        }
        self.gateway.connect();
        self.gateway.recorder.connected();
        self.is_connected = true;
        self.first.clear();
        self.close_windows();
        let policies = self.in_force().into_keys().filter(|(kind, _)| *kind == Kind::Policy);
        self.old_policies = policies.collect();
    }

    fn close_windows(&mut self) {
        self.windows.clear();
        self.most.clear();
        (self.is_mass, self.has_begun) = (false, false);
    }

    /// Sends what the control plane has of a type, and checks what follows.
    fn push(&mut self, url: &'static str) -> Result<(), String> {
        let is_of = |(kind, _): &Item| kind.type_url() == url;
        let is_new = |item: &Item, version: &u32| self.sent.get(item) != Some(version);
        let new = self.plane.iter().filter(|(item, version)| is_of(item) && is_new(item, version));
        let new: Vec<_> = new.map(|(item, version)| (*item, *version)).collect();
        let gone = self.sent.keys().filter(|item| is_of(item) && !self.plane.contains_key(*item));
        let gone: Vec<_> = gone.copied().collect();
        let (now, is_first) = (Instant::now(), !self.first.contains_key(url));
        if is_first {
            self.first.insert(url, now);
            self.windows.insert(url, now);
        } else if new.is_empty() && gone.is_empty() {
            return Ok(());
        }
        let (before, is_waiting) = (self.in_force(), !self.waiting.is_empty());
        let is_open = self.windows.get(url).is_some_and(|begin| now < *begin + WINDOW);
        let is_within = is_open && !self.time.is_zero();
        let is_mass = is_within && self.count(url, &new, &gone);
        let is_bounded = self.note_hold(is_mass, is_waiting, &gone);
        self.send(url, &new, &gone);
        let after = self.in_force();
        for item in gone {
            let (was_in_force, stays) = (before.contains_key(&item), after.contains_key(&item));
            let is_policy = item.0 == Kind::Policy;
            let is_old = self.old_policies.contains(&item) && is_within;
            let must_stay = is_mass || (is_policy && (is_old || is_waiting));
            let may_stay = must_stay || (is_policy && is_within);
            if was_in_force && must_stay && !stays && !is_bounded {
                return Err(format!("{item:?} goes at once; within the minute: {is_within}"));
            }
            if stays && !may_stay {
                return Err(format!("{item:?} waits without a cause"));
            }
            if stays {
                self.waiting.insert(item, must_stay);
            } else if is_mass && !was_in_force {
                // It was kept back until now, as the policies are not received.
                self.waiting.insert(item, false);
            } else {
                self.old_policies.remove(&item);
                self.covering.remove(&item);
            }
        }
        self.until = self.until.filter(|_| !self.waiting.is_empty());
        Ok(())
    }

    /// Sends a response to the client.
    fn send(&mut self, url: &'static str, new: &[(Item, u32)], gone: &[Item]) {
        let hold = &mut self.gateway.recorder.hold;
        match self.without {
            Without::Threshold => hold.is_mass = true,
            Without::Sums => hold.windows.values_mut().for_each(|window| window.most = [0; 2]),
            Without::Minute => hold.windows.values_mut().for_each(|window| window.end += WINDOW),
            _ => {}
        }
        let is_delayed = self.without == Without::News && !self.waiting.is_empty();
        let received = if is_delayed { &new[..0] } else { new };
        let resources = received.iter().map(|(item, version)| version_of(*item, *version));
        self.gateway.send(url, resources.collect(), gone.iter().copied().map(name).collect());
        if url == AUTHORIZATION {
            self.gateway.recorder.set_policies_received();
        }
        for (item, _) in received {
            if self.waiting.remove(item).is_some() && self.without == Without::Returns {
                let name = name(*item).into();
                self.gateway.recorder.hold.removed.insert((item.0.type_url(), name));
            }
        }
        self.sent.extend(new.iter().copied());
        self.sent.retain(|item, _| !gone.contains(item));
    }

    /// Returns whether more than half of a kind, and at least ten, were removed within the minute.
    fn count(&mut self, url: &str, new: &[(Item, u32)], gone: &[Item]) -> bool {
        let tables = self.gateway.recorder.store.tables();
        let (services, workloads) = (tables.services.len(), tables.workloads.len());
        for kind in Kind::ALL.into_iter().filter(|kind| kind.type_url() == url) {
            let total = match kind {
                Kind::Service => services,
                Kind::Workload => workloads,
                _ => kind.count(self.sent.keys()),
            };
            let added = new.iter().map(|(item, _)| item);
            let added = kind.count(added.filter(|item| !self.sent.contains_key(*item)));
            // New workloads replace others.
            let replaced = if kind == Kind::Workload { added } else { 0 };
            let lost = kind.count(gone.iter()).saturating_sub(replaced);
            let most = self.most.entry(kind).or_default();
            *most = total.max(*most);
            let missing = *most - total.saturating_sub(lost);
            self.is_mass |= missing >= 10 && missing > *most / 2;
        }
        self.is_mass
    }

    /// Notes the begin of a hold. Returns true if the limit of what waits is exceeded.
    fn note_hold(&mut self, is_mass: bool, is_waiting: bool, gone: &[Item]) -> bool {
        let begins = is_mass && !self.has_begun && gone.len() >= 10;
        if !is_waiting || begins {
            let before = if is_waiting { self.waiting_max } else { 0 };
            self.waiting_max = before.max(self.sent.len());
        }
        if is_mass && !gone.is_empty() {
            self.holds += usize::from(self.until.is_none());
            let until = Instant::now() + self.time;
            self.until = self.until.filter(|_| !begins).or(Some(until));
        }
        self.has_begun |= begins;
        self.waiting.len() + gone.len() > self.waiting_max
    }

    /// Makes the removals that wait, at their time or for an operator.
    fn release(&mut self, is_due: bool) -> Result<(), String> {
        let now = Instant::now();
        let first = self.first.values().min();
        let is_early = first.is_some_and(|first| now < *first + WINDOW);
        let has_old = self.waiting.keys().any(|item| self.old_policies.contains(item));
        match self.until.take() {
            Some(until) if is_due && now < until => {
                return Err("a hold ends before its time".to_owned());
            }
            Some(_) => self.close_windows(),
            None if is_due && is_early && has_old => {
                return Err("a policy goes within the first minute".to_owned());
            }
            None => {}
        }
        let hold = &mut self.gateway.recorder.hold;
        let is_left =
            |one: &Removed| self.without == Without::Release && !is_due && one.0 == AUTHORIZATION;
        let left: Vec<_> = hold.removed.iter().filter(|one| is_left(one)).cloned().collect();
        hold.removed.retain(|one| !left.contains(one));
        self.gateway.recorder.release();
        self.gateway.recorder.hold.removed.extend(left);
        self.waiting.clear();
        let after = self.in_force();
        self.old_policies.retain(|item| after.contains_key(item));
        match after.keys().find(|item| !self.sent.contains_key(*item)) {
            Some(item) => Err(format!("{item:?} stays after a release")),
            None => Ok(()),
        }
    }

    /// Lets a time pass, with the ends of holds in it.
    async fn pass(&mut self, time: Duration) -> Result<(), String> {
        let end = Instant::now() + time;
        while let Some(due) = self.gateway.recorder.hold.due().filter(|due| *due <= end)
            && self.is_connected
            && self.without != Without::End
        {
            advance(due.saturating_duration_since(Instant::now())).await;
            self.release(true)?;
        }
        advance(end.saturating_duration_since(Instant::now())).await;
        self.check()
    }

    /// Checks what is in force.
    fn check(&mut self) -> Result<(), String> {
        let in_force = self.in_force();
        let is_lost = |(item, must): &(&Item, &bool)| **must && !in_force.contains_key(*item);
        let lost = self.waiting.iter().find(is_lost);
        if let Some((item, _)) = lost {
            return Err(format!("{item:?} goes before its time"));
        }
        let is_due =
            |item: &&Item| self.sent.contains_key(*item) || self.waiting.contains_key(*item);
        if let Some(item) = in_force.keys().find(|item| !is_due(item)) {
            return Err(format!("{item:?} stays without a cause"));
        }
        let is_received = self.first.contains_key(AUTHORIZATION);
        let late = self.sent.iter().find(|(item, version)| {
            let wanted = match item.0 {
                Kind::Workload => **version,
                Kind::Policy => **version % 2,
                // New ones wait for the policies.
                Kind::Service | Kind::Export if !is_received => return false,
                Kind::Service | Kind::Export => 0,
            };
            in_force.get(*item) != Some(&wanted)
        });
        if let Some((item, version)) = late {
            return Err(format!("version {version} of {item:?} is not in force"));
        }
        let is_held = |((kind, _), must): (&Item, &bool)| *kind != Kind::Policy && *must;
        if !self.waiting.iter().any(is_held) {
            self.covering.clear();
            return Ok(());
        }
        self.covering.extend(&self.old_policies);
        if let Some(item) = self.covering.iter().find(|item| !in_force.contains_key(*item)) {
            return Err(format!("{item:?} goes before what it covers"));
        }
        let policies = in_force.into_keys().filter(|(kind, _)| *kind == Kind::Policy);
        self.covering.extend(policies);
        Ok(())
    }

    /// Changes what the control plane has.
    fn change(&mut self) {
        let rng = &mut self.rng;
        let kind = *rng.choice(&Kind::ALL).expect("a kind");
        match rng.u8(..16) {
            // All of it, or most.
            ..3 => {
                let (is_all, left) = (rng.bool(), *rng.choice(&[0, 0, 10, 30]).expect("a part"));
                let mut is_lost = |item: &Item| rng.u8(..100) >= left && (is_all || item.0 == kind);
                self.plane.retain(|item, _| !is_lost(item));
            }
            3..6 => {
                for item in self.names.keys().filter(|(kind, index)| *index < kind.initial()) {
                    self.plane.entry(*item).or_default();
                }
            }
            // A part, of which several are most.
            6..9 => {
                let of_kind: Vec<_> = self.plane.keys().filter(|item| item.0 == kind).collect();
                let gone: Vec<_> = of_kind.into_iter().take(8).copied().collect();
                self.plane.retain(|item, _| !gone.contains(item));
            }
            // A rollout.
            9 => {
                let old = self.plane.keys().filter(|item| item.0 == Kind::Workload);
                let count = Kind::Workload.initial();
                let new = old.map(|(kind, at)| ((*kind, (at + count) % (2 * count)), 0));
                let new: Items = new.collect();
                self.plane.retain(|item, _| item.0 != Kind::Workload);
                self.plane.extend(new);
            }
            at => {
                let items: Vec<_> = self.names.keys().copied().collect();
                for item in repeat_with(|| *rng.choice(&items).expect("an item")).take(3) {
                    if at < 13 {
                        self.plane.remove(&item);
                    } else {
                        *self.plane.entry(item).or_default() += 1;
                    }
                }
            }
        }
    }

    async fn step(&mut self) -> Result<(), String> {
        let millis = match self.rng.u8(..32) {
            ..25 => self.rng.u64(..4_000),
            25..31 => self.rng.u64(4_000..40_000),
            _ => self.rng.u64(40_000..400_000),
        };
        self.pass(Duration::from_millis(millis)).await?;
        let url = *self.rng.choice(&TYPES).expect("a type");
        match self.rng.u8(..16) {
            ..8 if !self.is_connected => self.connect(),
            ..8 => self.push(url)?,
            8..12 => self.change(),
            12 if self.is_connected => {
                self.gateway.client.disconnected(StreamEnd::Clean);
                self.is_connected = false;
            }
            13 if self.rng.bool() => self.release(false)?,
            _ => {}
        }
        self.check()
    }

    /// Lets the control plane send all that it has, and the last hold end.
    async fn settle(&mut self) -> Result<(), String> {
        if !self.is_connected {
            self.connect();
        }
        for url in TYPES {
            self.push(url)?;
            self.check()?;
        }
        self.pass(self.time + 3 * WINDOW).await?;
        let in_force = self.in_force();
        if in_force.keys().ne(self.plane.keys()) {
            return Err(format!("{in_force:?} is in force instead of {:?}", self.plane));
        }
        let hold = &self.gateway.recorder.hold;
        let is_empty = hold.removed().is_empty() && hold.mass_times().is_none();
        is_empty.then_some(()).ok_or_else(|| format!("{hold:?} does not end"))
    }
}

/// Returns the number of holds.
async fn run(seed: u64, without: Without) -> Result<usize, String> {
    let mut world = World::new(seed, without);
    let at = |step: usize| move |error: String| format!("seed {seed}, step {step}: {error}");
    world.settle().await.map_err(at(0))?;
    for step in 1..=STEPS {
        world.step().await.map_err(at(step))?;
    }
    world.settle().await.map_err(at(STEPS + 1))?;
    Ok(world.holds)
}

#[tokio::test(start_paused = true)]
async fn what_a_control_plane_loses_stays_for_the_hold_and_all_else_is_obeyed_at_once() {
    let mut holds = 0;
    for seed in 0..SEEDS {
        holds += run(seed, Without::Nothing).await.unwrap_or_else(|error| panic!("{error}"));
    }
    assert!(holds > 20, "{holds}");
}

#[tokio::test(start_paused = true)]
async fn wrong_machines_of_the_hold_are_found() {
    for without in WRONG {
        let mut found = false;
        for seed in 0..SEEDS {
            found = found || run(seed, without).await.is_err();
        }
        assert!(found, "without {without:?}");
    }
}
