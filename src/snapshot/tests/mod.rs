//! Randomized test of the builder against a reference implementation of the rules. Whatever the
//! next snapshot shares with the previous one, it must equal the one that the mesh alone defines.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use fastrand::Rng;

mod oracle;
pub(crate) mod samples;

use super::builder::{Change, build};
use super::mesh::{
    GatewayAddress, Locality, Mesh, Place, Protocol, Scope, Service, Template, Waypoint, Workload,
};
use super::traffic::{Drained, Override, TrafficRule};
use super::{EndpointState, Snapshot};
use crate::config::{self, Audience, ExposedService, HostPort, RegionWeight};
use crate::wire::HBONE_PORT;
use crate::wire::RegionPattern;
use oracle::{Inputs, PLACES};

const SEEDS: u64 = 128;
const STEPS: usize = 60;
const NETWORK: &str = "east";

/// Returns the locality of `region/zone/subzone`, whose last parts may be absent.
pub(crate) fn locality(text: &str) -> Locality {
    let mut parts = text.split('/').map(Arc::from);
    let mut part = || parts.next().unwrap_or_default();
    Locality { region: part(), zone: part(), subzone: part() }
}

/// Returns names, each `HOST` or `HOST:PORT`.
pub(crate) fn hosts(names: &[&str]) -> Vec<HostPort> {
    names.iter().map(|name| HostPort::parse(name).expect("a name")).collect()
}

/// Returns an alias of services.
pub(crate) fn alias(name: &str, to: &[&str]) -> config::Alias {
    config::Alias::new(hosts(&[name]).remove(0), hosts(to))
}

/// Returns an entry that exposes a service.
pub(crate) fn entry(service: &str, to: Vec<Audience>) -> ExposedService {
    ExposedService { to, ..ExposedService::new(hosts(&[service]).remove(0)) }
}

/// Returns a rule with these weights of regions.
pub(crate) fn region_weights(weights: &[(&str, u32)]) -> TrafficRule {
    let pattern = |text| RegionPattern::parse(text).expect("a region");
    let regions = weights.iter();
    let regions =
        regions.map(|(text, weight)| RegionWeight { region: pattern(text), weight: *weight });
    TrafficRule { regions: regions.collect(), ..TrafficRule::default() }
}

/// Returns service `app/echo.app` with port 80.
pub(crate) fn echo(preferences: &[Scope]) -> Service {
    let preferences = Some(preferences.to_vec()).filter(|of| !of.is_empty());
    Service { preferences, ..samples::service("echo") }
}

/// Defect injected into the builder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Nothing,
    /// Removed workloads stay.
    MissesRemovals,
    /// Every snapshot is built from scratch.
    LosesStates,
    /// Services are rebuilt only when services change, not when workloads do.
    MissesWorkloads,
    /// Changes of existing services are ignored.
    MissesServices,
    /// A change of the `traffic` configuration is ignored unless a mesh comes with it.
    MissesTraffic,
    /// Evacuations are ignored.
    ForgetsOrders,
}

/// Services by hostname: namespace and, by port, the uid, address and weight of each endpoint.
type Services = BTreeMap<String, (String, BTreeMap<u16, Vec<(String, SocketAddr, u32)>>)>;

type States = HashMap<(String, SocketAddr), Arc<EndpointState>>;

/// Steps since which services claim hostnames and VIPs.
#[derive(Debug, Default)]
struct Ages {
    step: u64,
    /// By namespace and hostname.
    hosts: BTreeMap<(String, String), u64>,
    /// By VIP, hostname and namespace.
    vips: BTreeMap<(IpAddr, String, String), u64>,
}

impl Ages {
    /// Returns the age of each current claim, which is the previous one if the claim existed.
    fn aged<K: Ord>(
        old: &BTreeMap<K, u64>,
        step: u64,
        now: impl Iterator<Item = K>,
    ) -> BTreeMap<K, u64> {
        now.map(|key| {
            let since = old.get(&key).copied().unwrap_or(step);
            (key, since)
        })
        .collect()
    }
}

/// Returns the item of the lowest rank, or `None` on a tie.
fn first<T>(claims: impl Iterator<Item = ((bool, u64), T)>) -> Option<T> {
    let mut claims: Vec<_> = claims.collect();
    claims.sort_by_key(|(rank, _)| *rank);
    let is_tied = claims.len() > 1 && claims[0].0 == claims[1].0;
    let first = claims.into_iter().next().filter(|_| !is_tied);
    first.map(|(_, claim)| claim)
}

/// Returns the service that answers to each hostname, and the hostname that answers to each VIP.
fn answering<'a>(
    mesh: &'a Mesh,
    ages: &mut Ages,
) -> (BTreeMap<&'a str, &'a Arc<Service>>, BTreeMap<IpAddr, String>) {
    ages.step += 1;
    let all = mesh.services.sorted();
    let key = |of: &Service| (of.namespace.to_string(), of.hostname.to_string());
    ages.hosts = Ages::aged(&ages.hosts, ages.step, all.iter().map(|of| key(of)));
    let mut hosts: BTreeMap<&str, Vec<&Arc<Service>>> = BTreeMap::new();
    for service in &all {
        hosts.entry(&service.hostname).or_default().push(service);
    }
    let hosts: BTreeMap<_, _> = hosts
        .into_iter()
        .filter_map(|(host, claims)| {
            let ranked = claims.into_iter();
            let ranked = ranked.map(|of| ((!of.canonical, ages.hosts[&key(of)]), of));
            Some((host, first(ranked)?))
        })
        .collect();
    let is_here = |network: &str| network.is_empty() || network == NETWORK;
    let claims = hosts.values().flat_map(|of| {
        let vips = of.vips.iter().filter(|(network, _)| is_here(network));
        vips.map(|(_, vip)| (*vip, of.hostname.to_string(), of.namespace.to_string()))
    });
    ages.vips = Ages::aged(&ages.vips, ages.step, claims);
    let vips: BTreeSet<IpAddr> = ages.vips.keys().map(|(vip, ..)| *vip).collect();
    let vips = vips.into_iter().filter_map(|vip| {
        let claims = ages.vips.iter().filter(|((of, ..), _)| *of == vip);
        let ranked =
            claims.map(|((_, host, _), since)| ((!hosts[&**host].canonical, *since), host));
        Some((vip, first(ranked)?.clone()))
    });
    let vips = vips.collect();
    (hosts, vips)
}

/// Returns the expected services and VIPs of a mesh, computed in the simplest way.
fn expected(
    mesh: &Mesh,
    reported: &Inputs,
    ages: &mut Ages,
) -> (Services, BTreeMap<IpAddr, String>) {
    let (answering, vips) = answering(mesh, ages);
    let mut services = Services::new();
    for (hostname, service) in answering {
        let sets = service.ports.keys().map(|port| {
            let ready = members(mesh, service, *port).into_iter();
            let ready = ready.filter(|(workload, ..)| is_ready(service, workload));
            let ready = ready.filter(|(workload, ..)| reported.is_endpoint(service, workload));
            let endpoint = |(workload, address): (&Workload, SocketAddr)| {
                (workload.uid.to_string(), address, workload.capacity)
            };
            (*port, ready.map(endpoint).collect())
        });
        let named = (service.namespace.to_string(), sets.collect());
        services.insert(hostname.to_owned(), named);
    }
    (services, vips)
}

fn is_ready(service: &Service, workload: &Workload) -> bool {
    workload.healthy || service.allow_unhealthy
}

/// Returns the workloads of a service port that can be endpoints, ready or not, with the addresses
/// to dial.
fn members<'a>(mesh: &'a Mesh, service: &Service, port: u16) -> Vec<(&'a Workload, SocketAddr)> {
    let name = service.key();
    let mut found = Vec::new();
    if service.passthrough {
        return found;
    }
    for workload in mesh.workloads.sorted() {
        let target = workload.services.get(&*name).and_then(|ports| ports.get(&port));
        let (Some(&target), Some(ip)) = (target, workload.addresses.first()) else {
            continue;
        };
        let is_here = workload.network.is_empty() || &*workload.network == NETWORK;
        let is_hbone_port = port == HBONE_PORT && target == HBONE_PORT;
        let speaks = workload.protocol == Protocol::Hbone || is_hbone_port;
        let is_spoken = !mesh.hbone_only || speaks;
        if is_here && is_spoken && workload.capacity > 0 {
            let port = match workload.protocol {
                Protocol::Hbone => HBONE_PORT,
                Protocol::Tcp => target,
            };
            found.push((&**workload, SocketAddr::new(*ip, port)));
        }
    }
    found
}

/// Returns the services and VIPs of a snapshot, and the states of its endpoints.
fn actual(snapshot: &Snapshot) -> (Services, BTreeMap<IpAddr, String>, States) {
    let (mut services, mut states) = (Services::new(), States::new());
    for (hostname, service) in snapshot.services.iter() {
        let mut ports = BTreeMap::new();
        for (port, set) in service.ports.iter() {
            assert_eq!(set.endpoints.len(), set.candidates.len());
            let mut found = Vec::new();
            for (endpoint, candidate) in set.endpoints.iter().zip(&set.candidates) {
                assert_eq!(endpoint.weight, candidate.weight);
                assert!(Arc::ptr_eq(&endpoint.state, &candidate.state));
                let is_hbone = endpoint.protocol == Protocol::Hbone;
                assert!(!is_hbone || endpoint.address.port() == HBONE_PORT);
                let key = (endpoint.uid().to_string(), endpoint.address);
                let state = states.entry(key.clone()).or_insert_with(|| endpoint.state.clone());
                assert!(Arc::ptr_eq(state, &endpoint.state), "{key:?} has two states");
                found.push((key.0, key.1, endpoint.weight));
            }
            found.sort();
            ports.insert(*port, found);
        }
        services.insert(hostname.to_string(), (service.namespace.to_string(), ports));
    }
    let vips = snapshot.vips.keys();
    let vips = vips.filter_map(|vip| Some((*vip, snapshot.service_by_vip(*vip)?)));
    let vips = vips.map(|(vip, service)| (vip, service.hostname.to_string()));
    (services, vips.collect(), states)
}

fn hostname(rng: &mut Rng) -> String {
    format!("host-{}", rng.u8(..5))
}

fn namespace(rng: &mut Rng) -> String {
    format!("ns-{}", rng.u8(..3))
}

fn service(rng: &mut Rng, (namespace, hostname): (&str, &str)) -> Service {
    let place = Place::Name("ns-0/gateway".into());
    let gateway = GatewayAddress { place, port: 15008 };
    let waypoint = Waypoint { gateway, weight: 1 };
    let vip = |rng: &mut Rng| {
        let network = *rng.choice(&["", NETWORK, "west"]).expect("a network");
        (network.to_owned(), IpAddr::from([240, 0, 0, rng.u8(..6)]))
    };
    let mut service = Service {
        name: hostname.into(),
        namespace: namespace.into(),
        hostname: hostname.into(),
        vips: (0..rng.u8(..3)).map(|_| vip(rng)).collect(),
        ports: (0..rng.u16(..3)).map(|at| (port(at), 0)).collect(),
        waypoints: (0..rng.usize(..8) / 7).map(|_| waypoint.clone()).collect(),
        passthrough: rng.u8(..10) == 0,
        canonical: rng.u8(..3) == 0,
        allow_unhealthy: rng.bool(),
        ..Service::default()
    };
    oracle::balance(rng, &mut service);
    service
}

/// Returns the HBONE port for the second port of a service. A workload that serves it at the same
/// port is dialled over HBONE.
fn port(at: u16) -> u16 {
    if at == 1 { HBONE_PORT } else { 80 + at }
}

fn workload(rng: &mut Rng, uid: &str) -> Workload {
    let place = Place::Name("ns-0/gateway".into());
    let gateway = Arc::new(GatewayAddress { place, port: 15008 });
    let ports = |rng: &mut Rng| {
        let is_gateway = rng.bool();
        let target = |at| match at {
            1 if is_gateway => (port(at), HBONE_PORT),
            _ => (port(at), 8080 + at % 2),
        };
        (0..rng.u16(..4)).map(target).collect()
    };
    let named =
        |rng: &mut Rng| (format!("{}/{}", namespace(rng), hostname(rng)).into(), ports(rng));
    let networks = ["", NETWORK, NETWORK, NETWORK, "west"];
    let mut workload = Workload {
        uid: uid.into(),
        addresses: (0..rng.u8(..6).min(1)).map(|_| [10, 0, 0, rng.u8(..4)].into()).collect(),
        healthy: rng.u8(..5) > 0,
        capacity: rng.u32(..4),
        network_gateway: (rng.u8(..12) == 0).then_some(gateway),
        services: (0..rng.u8(..4)).map(|_| named(rng)).collect(),
        template: Template {
            workload_name: format!("deployment-{}", rng.u8(..2)).into(),
            network: (*rng.choice(&networks).expect("a network")).into(),
            protocol: if rng.u8(..4) == 0 { Protocol::Tcp } else { Protocol::Hbone },
            ..Template::default()
        }
        .into(),
        ..Workload::default()
    };
    oracle::locate(rng, &mut workload);
    workload
}

/// Applies a few random changes to a mesh.
fn change(rng: &mut Rng, mesh: &mut Mesh) {
    for _ in 0..rng.u8(..5) {
        let uid = format!("uid-{}", rng.u8(..12));
        let (namespace, hostname) = (namespace(rng), hostname(rng));
        let name = format!("{namespace}/{hostname}");
        match rng.u8(..10) {
            0..2 => drop(mesh.workloads.remove(&*uid)),
            2..7 => {
                let workload = Arc::new(workload(rng, &uid));
                mesh.workloads.insert(uid.into(), workload);
            }
            7 => drop(mesh.services.remove(&*name)),
            _ => {
                let service = service(rng, (&namespace, &hostname));
                mesh.services.insert(name.into(), Arc::new(service));
            }
        }
    }
    if rng.u8(..8) == 0 {
        // Simulates a file that is read again: nothing is shared, but most is equal.
        let (services, workloads) = (mesh.services.sorted(), mesh.workloads.sorted());
        let services = services.into_iter().map(|one| Service::clone(one));
        let workloads = workloads.into_iter().map(|one| Workload::clone(one));
        let hbone_only = mesh.hbone_only;
        *mesh = Mesh::new(services, workloads);
        mesh.hbone_only = hbone_only;
    }
}

/// Randomly changes an input other than the mesh. Returns the operator's command, if it is one.
fn change_inputs(rng: &mut Rng, reported: &mut Inputs) -> Option<Override> {
    let host = match rng.u8(..4) {
        0 => "*".to_owned(),
        _ => hostname(rng),
    };
    match rng.u8(..6) {
        0 => drop(reported.traffic.insert(host, oracle::entry(rng))),
        1 => drop(reported.traffic.remove(&host)),
        2 => {
            let place = rng.choice(&PLACES[1..]).expect("a place");
            let pattern = RegionPattern::parse(place).expect("a pattern");
            return Some(if reported.evacuated.remove(place) {
                Override::Restore(pattern.into())
            } else {
                reported.evacuated.insert(place);
                Override::Drain(pattern.into(), Drained::now(false))
            });
        }
        _ => {}
    }
    None
}

/// Returns the mesh as a builder with this defect would see it.
fn mesh_with_fault(fault: Fault, old: &Snapshot, mesh: &Mesh) -> Mesh {
    let mut mesh = mesh.clone();
    let gone = |mesh: &Mesh| {
        let gone = old.mesh.workloads.iter();
        let gone = gone.filter(|(uid, _)| !mesh.workloads.contains_key(&***uid));
        gone.map(|(uid, one)| (uid.clone(), one.clone())).collect::<Vec<_>>()
    };
    match fault {
        Fault::Nothing | Fault::LosesStates | Fault::MissesTraffic | Fault::ForgetsOrders => {}
        Fault::MissesRemovals => {
            for (uid, workload) in gone(&mesh) {
                mesh.workloads.insert(uid, workload);
            }
        }
        Fault::MissesWorkloads if mesh.services == old.mesh.services => {
            mesh.workloads = old.mesh.workloads.clone();
        }
        Fault::MissesServices if mesh.services.len() == old.mesh.services.len() => {
            mesh.services = old.mesh.services.clone();
        }
        Fault::MissesWorkloads | Fault::MissesServices => {}
    }
    mesh
}

/// Checks the groups and shares of each service of the snapshot.
///
/// # Errors
/// Returns a service with wrong groups or shares.
fn check_groups(snapshot: &Snapshot, mesh: &Mesh, reported: &Inputs) -> Result<(), String> {
    for (hostname, service) in snapshot.services.iter() {
        let definition = &service.definition;
        for (port, set) in service.ports.iter() {
            let all = members(mesh, definition, *port).into_iter();
            let all = all.map(|(workload, _)| (workload, is_ready(definition, workload)));
            let want = oracle::groups(definition, reported, &all.collect::<Vec<_>>());
            if !oracle::has_groups(set, &want) {
                let groups = set.groups();
                return Err(format!("{hostname}:{port}: {groups:?} instead of {want:?}"));
            }
        }
    }
    Ok(())
}

/// Runs one random sequence of changes.
///
/// # Errors
/// Returns the step at which the snapshot differs from the expected one.
fn run(seed: u64, fault: Fault) -> Result<(), String> {
    let mut rng = Rng::with_seed(seed);
    let mut mesh = Mesh { hbone_only: rng.bool(), ..Mesh::default() };
    let (mut snapshot, mut reported) = (Snapshot::default(), Inputs::default());
    let (mut ages, mut is_read) = (Ages::default(), false);
    for step in 0..STEPS {
        let order = change_inputs(&mut rng, &mut reported);
        // In some steps the mesh does not change.
        let has_mesh = rng.u8(..4) > 0 || fault == Fault::LosesStates;
        if has_mesh {
            change(&mut rng, &mut mesh);
        }
        let old = match fault {
            Fault::LosesStates => {
                &Snapshot { balancing: Arc::clone(&snapshot.balancing), ..Snapshot::default() }
            }
            _ => &snapshot,
        };
        let mesh_of_fault = mesh_with_fault(fault, old, &mesh);
        let change = Change {
            mesh: has_mesh.then(|| (mesh_of_fault, NETWORK.into())),
            traffic: (has_mesh || fault != Fault::MissesTraffic).then(|| reported.traffic()),
            position: Some(oracle::position()),
            overrides: order.filter(|_| fault != Fault::ForgetsOrders),
            ..Change::default()
        };
        let next = build(old, change);
        let (want, want_vips) = expected(&mesh, &reported, &mut ages);
        // Endpoints are built when they are read. Here the next snapshot follows one without any.
        let was_read = std::mem::replace(&mut is_read, rng.u8(..4) > 0);
        if !is_read {
            snapshot = next;
            continue;
        }
        let (services, vips, states) = actual(&next);
        let at = format!("seed {seed}, step {step}");
        if services != want {
            return Err(format!("{at}: {services:?} instead of {want:?}"));
        }
        check_groups(&next, &mesh, &reported).map_err(|error| format!("{at}: {error}"))?;
        if vips != want_vips {
            return Err(format!("{at}: {vips:?} instead of {want_vips:?}"));
        }
        let before = if was_read { actual(&snapshot).2 } else { States::new() };
        for (key, state) in &states {
            let same = before.get(key).is_none_or(|old| Arc::ptr_eq(old, state));
            let stolen = before.iter().any(|(of, old)| of != key && Arc::ptr_eq(old, state));
            if !same || stolen {
                return Err(format!("{at}: the state of {key:?} is not its own"));
            }
        }
        snapshot = next;
    }
    Ok(())
}

#[test]
fn any_row_of_changes_makes_the_snapshot_that_the_mesh_says() {
    for seed in 0..SEEDS {
        if let Err(error) = run(seed, Fault::Nothing) {
            panic!("{error}");
        }
    }
}

/// In the sequences above a service has few endpoints. Here all belong to one service.
#[test]
fn any_service_is_shared_out_as_mesh_and_configuration_say() {
    let mut several = 0;
    for seed in 0..4_000 {
        let mut rng = Rng::with_seed(seed);
        let (hostname, mut reported) = ("host-0", Inputs::default());
        for host in [hostname, "*"] {
            if rng.u8(..3) == 0 {
                reported.traffic.insert(host.to_owned(), oracle::entry(&mut rng));
            }
        }
        let evacuated = rng.choice(&PLACES[1..]).filter(|_| rng.u8(..4) == 0);
        reported.evacuated.extend(evacuated);
        let pattern = evacuated.and_then(|place| RegionPattern::parse(place));
        let mut of = service(&mut rng, ("ns-0", hostname));
        (of.ports, of.passthrough) = ([(80, 0)].into(), false);
        let workload = |at| {
            let mut one = workload(&mut rng, &format!("uid-{at:02}"));
            one.services = [("ns-0/host-0".into(), [(80, 8080)].into())].into();
            one
        };
        let workloads: Vec<_> = (0..24).map(workload).collect();
        let change = Change {
            mesh: Some((Mesh::new([of], workloads), NETWORK.into())),
            traffic: Some(reported.traffic()),
            position: Some(oracle::position()),
            overrides: pattern.map(|one| Override::Drain(one.into(), Drained::now(false))),
            ..Change::default()
        };
        let snapshot = build(&Snapshot::default(), change);
        if let Err(error) = check_groups(&snapshot, &snapshot.mesh, &reported) {
            panic!("seed {seed}: {error}");
        }
        let set = &snapshot.services.get(hostname).expect("a service").ports[&80];
        several += usize::from(set.groups().is_some_and(|groups| groups.list().len() > 1));
    }
    assert!(several > 1_000, "{several} have several groups");
}

#[test]
fn each_wrong_builder_is_caught() {
    for fault in [
        Fault::MissesRemovals,
        Fault::LosesStates,
        Fault::MissesWorkloads,
        Fault::MissesServices,
        Fault::MissesTraffic,
        Fault::ForgetsOrders,
    ] {
        let caught = (0..SEEDS).any(|seed| run(seed, fault).is_err());
        assert!(caught, "{fault:?} passes for right");
    }
}
