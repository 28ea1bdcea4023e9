//! Simulation of drains by seed: orders of all kinds, previews and cancels, changes of the mesh,
//! times without a place for the file, and restarts. Pages, builder, pick, listeners and file are
//! those of the product. Wrong machines are found.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use axum::http::StatusCode;
use fastrand::Rng;
use tempfile::TempDir;

use super::*;
use crate::admin::admin_router;
use crate::admin::tests::{Fixture, ask, fixture};
use crate::app::listeners::Listeners;
use crate::config::{ExposedService, Listener};
use crate::datapath::balance::{Tried, choose};
use crate::datapath::dial::DenyList;
use crate::datapath::tests::data_path_of;
use crate::snapshot::mesh::{Mesh, Protocol, Template, Workload};
use crate::snapshot::tests::{entry, locality, samples};
use crate::snapshot::{
    BoundEndpoints, EndpointSet, ExposureTable, NO_LINK_FACTORS, Publisher, Snapshot,
};
use crate::wire::Transit;

const SEEDS: u64 = 12;
const STEPS: usize = 50;
const SERVICES: [&str; 3] = ["s0", "s1", "s2"];
const LISTENERS: [&str; 3] = ["a", "b", "c"];

/// Kind and name.
type Target = (&'static str, &'static str);

const TARGETS: [Target; 24] = [
    ("region", "r1"),
    ("region", "r1/z1"),
    ("region", "r2"),
    ("region", "r3"),
    ("region", "r3/z1"),
    ("region", "nowhere"),
    ("cluster", "c0"),
    ("cluster", "c1"),
    ("cluster", "west"),
    ("cluster", "nowhere"),
    ("endpoint", "10.0.0.1"),
    ("endpoint", "10.0.0.4"),
    ("endpoint", "u2"),
    ("endpoint", "u7"),
    ("endpoint", "192.0.2.1"),
    ("gateway", "192.0.2.1:15008"),
    ("gateway", "192.0.2.2:15008"),
    ("service", "s0.app"),
    ("service", "app/s1.app"),
    ("service", "nowhere.app"),
    ("listener", "a"),
    ("listener", "b"),
    ("listener", "c"),
    ("listener", "nowhere"),
];

/// Part of the product that a machine lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    Nothing,
    /// No order is to keep.
    Persist,
    /// A cancel has no effect.
    Cancels,
    /// Listeners follow no order.
    Listeners,
    /// The pick has the endpoints from before the last order.
    Updates,
    /// A change of the mesh ends all orders.
    Mesh,
    /// A restart does not read the file.
    Restore,
    /// The file has the orders that restarts do not keep, too.
    Choice,
    /// Orders stay in the file for ever.
    Removals,
}

const WRONG: [Without; 8] = [
    Without::Persist,
    Without::Cancels,
    Without::Listeners,
    Without::Updates,
    Without::Mesh,
    Without::Restore,
    Without::Choice,
    Without::Removals,
];

/// Process of the gateway, with a part left out.
struct Process {
    app: App,
    fixture: Fixture,
    without: Without,
    /// Snapshot before the last order.
    before: Arc<Snapshot>,
}

impl Process {
    fn start(file: &Path, without: Without) -> Self {
        let mut fixture = fixture();
        fixture.bind("s0.app:80");
        let state = &mut fixture.state;
        let mut config = state.config.load().as_ref().clone();
        config.drain.file = Some(file.into());
        let listener = |name: &str| Listener {
            name: name.into(),
            bind: ([127, 0, 0, 1], 0).into(),
            ..config.listeners[0].clone()
        };
        config.listeners = LISTENERS.map(listener).into();
        state.config.store(Arc::new(config.clone()));
        let data_path = data_path_of(fixture.publisher.reader(), DenyList::default());
        let (own, deadline) = ((&data_path, &state.status), config.drain.deadline);
        let listeners = Listeners::new(own, Vec::new(), deadline, Arc::default());
        let app = App {
            config: Arc::clone(&state.config),
            status: Arc::clone(&state.status),
            publisher: Arc::clone(&fixture.publisher),
            listeners: Arc::new(listeners),
            data_path,
            live: None,
            reconnected: Arc::default(),
        };
        if without != Without::Restore {
            restore(&app);
        }
        // No socket for the binding.
        config.bindings.clear();
        app.listeners.apply(&config);
        let listeners = Arc::clone(&app.listeners);
        state.listeners = Arc::new(move || listeners.rows());
        let listeners = Arc::clone(&app.listeners);
        if without != Without::Listeners {
            state.follow_drains = Arc::new(move || listeners.follow_drains());
        }
        let (right, reader, path) = (storage(&app), state.reader.clone(), PathBuf::from(file));
        state.store_drains = match without {
            Without::Choice | Without::Removals => Arc::new(move || {
                let old = read(&path).0;
                right()?;
                let mut drains = reader.snapshot().balancing.evacuated.clone();
                if without == Without::Removals {
                    drains.extend(old);
                } else {
                    drains.values_mut().for_each(|drained| drained.is_persisted = true);
                }
                store(&path, &drains).map_err(|error| error.to_string())
            }),
            _ => right,
        };
        let before = state.reader.snapshot();
        Self { app, fixture, without, before }
    }

    async fn ask(&mut self, method: &str, uri: &str) -> (StatusCode, String) {
        let (method, uri) = match self.without {
            Without::Persist => (method, uri.replace("&persist", "")),
            Without::Cancels if uri.contains("&undo") => ("GET", uri.to_owned()),
            _ => (method, uri.to_owned()),
        };
        self.before = self.fixture.state.reader.snapshot();
        ask(admin_router(self.fixture.state.clone()), method, &uri).await
    }

    /// Publishes a mesh of these workloads.
    fn publish(&mut self, workloads: Vec<Workload>) {
        self.app.publisher.update(mesh(workloads));
        if self.without == Without::Mesh {
            let drains = self.app.data_path.reader.snapshot().balancing.evacuated.clone();
            for target in drains.into_keys() {
                let overrides = Some(Override::Restore(target));
                self.app.publisher.update(Change { overrides, ..Change::default() });
            }
        }
        self.before = self.fixture.state.reader.snapshot();
    }

    /// Returns the snapshot of the pick.
    fn snapshot(&self) -> Arc<Snapshot> {
        if self.without == Without::Updates {
            return Arc::clone(&self.before);
        }
        self.app.data_path.reader.snapshot()
    }
}

/// Returns the change to a mesh of these workloads, whose services may use other networks.
fn mesh(workloads: Vec<Workload>) -> Change {
    let mut exposure = ExposureTable::new(false);
    for service in SERVICES {
        let entry = entry(&format!("{service}.app"), Vec::new());
        exposure.add(ExposedService { transit: Some(Transit::Always), ..entry });
    }
    let services = SERVICES.map(samples::service);
    Change {
        mesh: Some((Mesh::new(services, workloads), "east".into())),
        exposure: Some(exposure),
        ..Change::default()
    }
}

/// Returns nine workloads, an instance of each of two services in another network, and the records
/// of two gateways of that.
fn workloads() -> Vec<Workload> {
    let workload = |uid: &str, of, address: [u8; 4], place: [&str; 3]| {
        let [network, cluster, at] = place;
        let template = Template {
            namespace: "edge".into(),
            service_account: "gateway".into(),
            trust_domain: "west.local".into(),
            network: network.into(),
            cluster: cluster.into(),
            locality: locality(at).into(),
            protocol: Protocol::Hbone,
            ..Template::default()
        };
        let addresses = [IpAddr::from(address)].into();
        Workload { addresses, ..samples::workload(uid, of, template) }
    };
    let mut all = Vec::new();
    for at in 0..9 {
        let (of, place) = (usize::from(at % 3), ["r1/z1", "r1/z2", "r2/z1"][usize::from(at / 3)]);
        let place = ["east", ["c0", "c1"][usize::from(at % 2)], place];
        all.push(workload(&format!("u{at}"), SERVICES[of], [10, 0, 0, at], place));
    }
    for at in 0..2 {
        let service = SERVICES[usize::from(at)];
        all.push(workload(&format!("v{at}"), service, [10, 1, 0, at], ["west", "west", "r3/z1"]));
    }
    for (last, zone) in [(1, "r3/z1"), (2, "r3/z2")] {
        let uid = format!("NetworkGateway/west/192.0.2.{last}/15008");
        let record = workload(&uid, "none", [192, 0, 2, last], ["west", "west", zone]);
        all.push(Workload { services: [].into(), ..record });
    }
    all
}

fn is_record(workload: &Workload) -> bool {
    workload.uid.starts_with("NetworkGateway/")
}

/// Returns whether an order drains a workload, or the gateway of a record.
fn covers((kind, name): &Target, workload: &Workload) -> bool {
    let address = workload.addresses[0];
    match *kind {
        "region" => {
            let place = format!("{}/{}", workload.locality.region, workload.locality.zone);
            place == *name || place.starts_with(&format!("{name}/"))
        }
        "cluster" => *workload.cluster == **name,
        "endpoint" => *workload.uid == **name || address.to_string() == *name,
        "gateway" => is_record(workload) && format!("{address}:15008") == *name,
        _ => false,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Order {
    /// Seconds since 1970.
    since: u64,
    is_persisted: bool,
}

type Orders = BTreeMap<Target, Order>;

/// Operator, mesh and process.
struct World {
    rng: Rng,
    folder: TempDir,
    without: Without,
    process: Process,
    orders: Orders,
    /// Orders of the file.
    file: Orders,
    /// True if the folder of the file is away.
    is_away: bool,
    /// True if the last write has failed.
    has_failed: bool,
    /// Workloads, each with whether the mesh has it.
    workloads: Vec<(Workload, bool)>,
}

impl World {
    fn new(seed: u64, without: Without) -> Self {
        fastrand::seed(seed);
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join("state")).expect("a folder");
        let process = Process::start(&folder.path().join("state/drains"), without);
        let mut world = Self {
            rng: Rng::with_seed(seed),
            folder,
            without,
            process,
            orders: Orders::new(),
            file: Orders::new(),
            is_away: false,
            has_failed: false,
            workloads: workloads().into_iter().map(|one| (one, true)).collect(),
        };
        world.publish();
        world
    }

    /// Returns the workloads of the mesh.
    fn present(&self) -> impl Iterator<Item = &Workload> {
        self.workloads.iter().filter(|(_, is_present)| *is_present).map(|(one, _)| one)
    }

    fn publish(&mut self) {
        let present = self.present().cloned().collect();
        self.process.publish(present);
    }

    /// Returns the addresses that tunnels to a service may get, or those of a binding to it.
    fn endpoints(&self, orders: &Orders, service: &str, is_binding: bool) -> BTreeSet<SocketAddr> {
        let (host, key) = (format!("{service}.app"), format!("app/{service}.app"));
        let is_drained =
            |(kind, name): &Target| *kind == "service" && (host == *name || key == *name);
        if orders.keys().any(is_drained) {
            return BTreeSet::new();
        }
        let is_of = |one: &Workload| one.services.get(key.as_str()).is_some();
        let is_remote = |one: &Workload| *one.network == *"west";
        let has_remote = is_binding || self.present().any(|one| is_of(one) && is_remote(one));
        let used = self.present().filter(|one| {
            if is_record(one) { has_remote } else { !is_binding && is_of(one) && !is_remote(one) }
        });
        let used = used.filter(|one| !orders.keys().any(|target| covers(target, one)));
        used.map(|one| SocketAddr::new(one.addresses[0], 15008)).collect()
    }

    /// Returns the addresses for each service, and for the binding.
    fn all_endpoints(&self, orders: &Orders) -> [BTreeSet<SocketAddr>; 4] {
        let [a, b, c] = SERVICES.map(|service| self.endpoints(orders, service, false));
        [a, b, c, self.endpoints(orders, SERVICES[0], true)]
    }

    /// Returns the status of an order, if it can be stored.
    fn status(&self, target: Target, undo: bool, force: bool) -> StatusCode {
        let (kind, name) = target;
        let is_known = self.orders.contains_key(&target);
        let is_there = match kind {
            "listener" | "service" => !name.starts_with("nowhere"),
            _ => self.present().any(|one| covers(&target, one)),
        };
        if undo {
            let is_done = is_known || self.has_failed;
            return if is_done { StatusCode::OK } else { StatusCode::NOT_FOUND };
        }
        if !is_known && !is_there {
            return StatusCode::NOT_FOUND;
        }
        let mut next = self.orders.clone();
        next.insert(target, Order { since: 0, is_persisted: false });
        let (before, after) = (self.all_endpoints(&self.orders), self.all_endpoints(&next));
        let is_lost = before.iter().zip(&after).any(|(old, new)| !old.is_empty() && new.is_empty());
        let is_meant = force || kind == "service";
        if is_lost && !is_meant { StatusCode::CONFLICT } else { StatusCode::OK }
    }

    /// Gives an order, or cancels it, perhaps after a preview.
    async fn order(&mut self, target: Target, undo: bool) -> Result<(), String> {
        let (force, persist) = (self.rng.bool(), !undo && self.rng.bool());
        let (kind, name) = target;
        let mut uri = format!("/drain/{kind}?{kind}={name}");
        for (flag, is_set) in [("&undo", undo), ("&force", force), ("&persist", persist)] {
            uri += if is_set { flag } else { "" };
        }
        let mut want = self.status(target, undo, force);
        if self.rng.u8(..4) == 0 {
            let (status, text) = self.process.ask("GET", &uri).await;
            if status != want {
                return Err(format!("preview of {uri}: {status} instead of {want}: {text}"));
            }
            self.check()?;
        }
        let (status, text) = self.process.ask("POST", &uri).await;
        let is_kept = |orders: &Orders| orders.get(&target).is_some_and(|one| one.is_persisted);
        let was_kept = is_kept(&self.orders);
        if want == StatusCode::OK {
            let drains = &self.process.app.data_path.reader.snapshot().balancing.evacuated;
            let drained = DrainTarget::parse(kind, name).and_then(|target| drains.get(&target));
            if undo {
                self.orders.remove(&target);
            } else {
                let drained = drained.ok_or_else(|| format!("{uri} is not in force: {text}"))?;
                let new = Order { since: seconds(drained), is_persisted: false };
                self.orders.entry(target).or_insert(new).is_persisted |= persist;
            }
            let is_changed = was_kept != is_kept(&self.orders);
            if persist || is_changed || (undo && self.has_failed) {
                self.has_failed = self.is_away;
                if self.is_away {
                    want = StatusCode::CONFLICT;
                } else {
                    self.file = self.orders.clone();
                    self.file.retain(|_, order| order.is_persisted);
                }
            }
        }
        let is_right = status == want;
        is_right.then_some(()).ok_or_else(|| format!("{uri}: {status} instead of {want}: {text}"))
    }

    /// Moves the folder of the file away, or back.
    fn move_folder(&mut self) {
        let [here, away] = ["state", "away"].map(|name| self.folder.path().join(name));
        let (from, to) = if self.is_away { (away, here) } else { (here, away) };
        fs::rename(from, to).expect("a folder");
        self.is_away = !self.is_away;
    }

    fn restart(&mut self) {
        if self.is_away {
            self.move_folder();
        }
        let file = self.folder.path().join("state/drains");
        self.process = Process::start(&file, self.without);
        self.orders = self.file.clone();
        self.has_failed = false;
        self.publish();
    }

    /// Checks the orders in force, the endpoints that may be picked, and the listeners.
    fn check(&self) -> Result<(), String> {
        let drains = &self.process.app.data_path.reader.snapshot().balancing.evacuated;
        let in_force = drains.iter().map(|(target, drained)| {
            let order = Order { since: seconds(drained), is_persisted: drained.is_persisted };
            (format!("{target}"), order)
        });
        let in_force: BTreeMap<_, _> = in_force.collect();
        let want = self.orders.iter().map(|((kind, name), one)| (format!("{kind} {name}"), *one));
        let want: BTreeMap<_, _> = want.collect();
        if in_force != want {
            return Err(format!("{in_force:?} is in force instead of {want:?}"));
        }
        self.check_endpoints(&self.process.snapshot())?;
        let rows = self.process.app.listeners.rows();
        let open: Vec<_> = rows.into_iter().map(|row| row.listener.name).collect();
        let mut used = LISTENERS.to_vec();
        used.retain(|name| !self.orders.contains_key(&("listener", *name)));
        if open == used { Ok(()) } else { Err(format!("{open:?} are open instead of {used:?}")) }
    }

    fn check_endpoints(&self, snapshot: &Snapshot) -> Result<(), String> {
        let all = self.all_endpoints(&self.orders);
        for (service, want) in SERVICES.iter().zip(&all) {
            let of = snapshot.services.get(format!("{service}.app").as_str());
            let of = of.ok_or_else(|| format!("{service} is unknown"))?;
            let transit = of.endpoints_by(80, Transit::Always);
            check_set(transit.unwrap_or_else(|| of.ports[&80].get()), want)
                .map_err(|error| format!("{service}: {error}"))?;
        }
        let bound = BoundEndpoints::new(["west".into()], "s0.app".into(), 80);
        check_set(&bound.load(snapshot), &all[3]).map_err(|error| format!("binding: {error}"))
    }

    /// Checks a process that got the same orders in another order, some of them before the mesh.
    fn check_other_order(&mut self) -> Result<(), String> {
        let mut targets: Vec<_> = self.orders.keys().copied().collect();
        self.rng.shuffle(&mut targets);
        let change = |(kind, name): Target| {
            let target = DrainTarget::parse(kind, name).expect("a target");
            let overrides = Some(Override::Drain(target, Drained::now(false)));
            Change { overrides, ..Change::default() }
        };
        let mut changes: Vec<_> = targets.into_iter().map(change).collect();
        let mesh = mesh(self.present().cloned().collect());
        changes.insert(self.rng.usize(..=changes.len()), mesh);
        let publisher = Publisher::default();
        changes.into_iter().for_each(|change| publisher.update(change));
        self.check_endpoints(&publisher.reader().snapshot())
    }

    async fn step(&mut self) -> Result<(), String> {
        let target = *self.rng.choice(&TARGETS).expect("a target");
        match self.rng.u8(..20) {
            ..9 => self.order(target, false).await?,
            9..11 => self.order(target, true).await?,
            11..15 => {
                let known = self.rng.choice(self.orders.keys()).copied();
                self.order(known.unwrap_or(target), true).await?;
            }
            15..18 => {
                let at = self.rng.usize(..self.workloads.len());
                self.workloads[at].1 ^= true;
                self.publish();
            }
            18 => self.move_folder(),
            _ => self.restart(),
        }
        self.check()
    }
}

/// Checks the endpoints of a set, and some picks.
fn check_set(set: &EndpointSet, want: &BTreeSet<SocketAddr>) -> Result<(), String> {
    let have: BTreeSet<_> = set.endpoints.iter().map(|one| one.address).collect();
    if have != *want {
        return Err(format!("{have:?} instead of {want:?}"));
    }
    for _ in 0..4 {
        let picked = choose(set, &Tried::default(), NO_LINK_FACTORS).map(|one| one.address);
        if picked.map_or(!want.is_empty(), |address| !want.contains(&address)) {
            return Err(format!("{picked:?} is picked of {want:?}"));
        }
    }
    Ok(())
}

fn seconds(drained: &Drained) -> u64 {
    drained.since.duration_since(UNIX_EPOCH).expect("a time").as_secs()
}

async fn run(seed: u64, without: Without) -> Result<(), String> {
    let mut world = World::new(seed, without);
    for step in 0..STEPS {
        let at = |error: String| format!("seed {seed}, step {step}: {error}");
        world.step().await.map_err(at)?;
    }
    world.check_other_order().map_err(|error| format!("seed {seed}, end: {error}"))
}

#[tokio::test]
async fn drains_are_what_the_orders_say_in_any_order_and_those_to_keep_outlive_restarts() {
    for seed in 0..SEEDS {
        run(seed, Without::Nothing).await.unwrap_or_else(|error| panic!("{error}"));
    }
}

#[tokio::test]
async fn wrong_machines_of_drains_are_found() {
    for without in WRONG {
        let mut found = false;
        for seed in 0..SEEDS {
            found = found || run(seed, without).await.is_err();
        }
        assert!(found, "without {without:?}");
    }
}
