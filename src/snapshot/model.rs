//! The builder against a plain reading of the rules, over changes that a seed draws: whatever it
//! shares with the snapshot before, the next one has to be what the mesh says by itself.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use fastrand::Rng;

use super::builder::{Change, HBONE_PORT, build};
use super::mesh::{GatewayAddress, Mesh, Place, Protocol, Service, Waypoint, Workload};
use super::{EndpointState, Snapshot};

const SEEDS: u64 = 128;
const STEPS: usize = 60;
const NETWORK: &str = "east";

/// What is wrong with a builder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Nothing,
    /// What has gone stays.
    MissesRemovals,
    /// Every snapshot is built from nothing.
    LosesStates,
    /// Services are looked at only when they change themselves.
    MissesWorkloads,
    /// A change of a service that has the name already is passed over.
    MissesServices,
}

/// Hostname to namespace and, by port, what is dialled: uid, address and weight.
type Services = BTreeMap<String, (String, BTreeMap<u16, Vec<(String, SocketAddr, u32)>>)>;

type States = HashMap<(String, SocketAddr), Arc<EndpointState>>;

/// What a mesh means, in the plainest way.
fn meaning(mesh: &Mesh) -> (Services, BTreeMap<IpAddr, String>) {
    let mut answering: BTreeMap<&str, &Arc<Service>> = BTreeMap::new();
    for service in mesh.services.sorted() {
        if service.canonical || !answering.contains_key(&*service.hostname) {
            answering.insert(&service.hostname, service);
        }
    }
    let (mut services, mut vips) = (Services::new(), BTreeMap::new());
    for (hostname, service) in answering {
        for (network, vip) in &service.vips {
            if network.is_empty() || network == NETWORK {
                vips.entry(*vip).or_insert_with(|| hostname.to_owned());
            }
        }
        let sets = service
            .ports
            .keys()
            .map(|port| (*port, endpoints(mesh, service, *port)));
        let named = (service.namespace.to_string(), sets.collect());
        services.insert(hostname.to_owned(), named);
    }
    (services, vips)
}

fn endpoints(mesh: &Mesh, service: &Service, port: u16) -> Vec<(String, SocketAddr, u32)> {
    let name = format!("{}/{}", service.namespace, service.hostname);
    let mut found = Vec::new();
    if service.passthrough {
        return found;
    }
    for workload in mesh.workloads.sorted() {
        let target = workload
            .services
            .get(&*name)
            .and_then(|ports| ports.get(&port));
        let (Some(&target), Some(ip)) = (target, workload.addresses.first()) else {
            continue;
        };
        let is_here = workload.network.is_empty() || &*workload.network == NETWORK;
        let is_spoken = !mesh.hbone_only || workload.protocol == Protocol::Hbone;
        let serves = workload.healthy || service.allow_unhealthy;
        let direct = workload.network_gateway.is_none();
        if is_here && is_spoken && serves && direct && workload.capacity > 0 {
            let port = match workload.protocol {
                Protocol::Hbone => HBONE_PORT,
                Protocol::Tcp => target,
            };
            let address = SocketAddr::new(*ip, port);
            found.push((workload.uid.to_string(), address, workload.capacity));
        }
    }
    found
}

/// What a snapshot has, and the states of its endpoints.
fn contents(snapshot: &Snapshot) -> (Services, BTreeMap<IpAddr, String>, States) {
    let (mut services, mut states) = (Services::new(), States::new());
    for (hostname, service) in snapshot.services.iter() {
        let mut ports = BTreeMap::new();
        for (port, set) in &service.ports {
            assert_eq!(set.endpoints.len(), set.candidates.len());
            let mut found = Vec::new();
            for (endpoint, candidate) in set.endpoints.iter().zip(&set.candidates) {
                assert_eq!(endpoint.weight, candidate.weight);
                assert!(Arc::ptr_eq(&endpoint.state, &candidate.state));
                let key = (endpoint.uid().to_string(), endpoint.address);
                let state = states
                    .entry(key.clone())
                    .or_insert_with(|| endpoint.state.clone());
                assert!(
                    Arc::ptr_eq(state, &endpoint.state),
                    "{key:?} has two states"
                );
                found.push((key.0, key.1, endpoint.weight));
            }
            ports.insert(*port, found);
        }
        services.insert(hostname.to_string(), (service.namespace.to_string(), ports));
    }
    let vips = snapshot.vips.keys();
    let vips = vips.map(|vip| (*vip, snapshot.by_vip(*vip).expect("one who answers")));
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
    Service {
        name: hostname.into(),
        namespace: namespace.into(),
        hostname: hostname.into(),
        vips: (0..rng.u8(..3)).map(|_| vip(rng)).collect(),
        ports: (0..rng.u16(..3)).map(|at| (80 + at, 0)).collect(),
        waypoints: (0..rng.usize(..8) / 7).map(|_| waypoint.clone()).collect(),
        passthrough: rng.u8(..10) == 0,
        canonical: rng.u8(..3) == 0,
        allow_unhealthy: rng.bool(),
        ..Service::default()
    }
}

fn workload(rng: &mut Rng, uid: &str) -> Workload {
    let place = Place::Name("ns-0/gateway".into());
    let gateway = Box::new(GatewayAddress { place, port: 15008 });
    let ports = |rng: &mut Rng| {
        let port = |at| (80 + at, 8080 + at % 2);
        (0..rng.u16(..4)).map(port).collect()
    };
    let named = |rng: &mut Rng| {
        (
            format!("{}/{}", namespace(rng), hostname(rng)).into(),
            ports(rng),
        )
    };
    let words = ["", NETWORK, NETWORK, NETWORK, "west"];
    Workload {
        uid: uid.into(),
        workload_name: format!("deployment-{}", rng.u8(..2)).into(),
        network: (*rng.choice(&words).expect("a network")).into(),
        addresses: (0..rng.u8(..6).min(1))
            .map(|_| [10, 0, 0, rng.u8(..4)].into())
            .collect(),
        protocol: if rng.u8(..4) == 0 {
            Protocol::Tcp
        } else {
            Protocol::Hbone
        },
        healthy: rng.u8(..5) > 0,
        capacity: rng.u32(..4),
        network_gateway: (rng.u8(..12) == 0).then_some(gateway),
        services: (0..rng.u8(..4)).map(|_| named(rng)).collect(),
        ..Workload::default()
    }
}

/// Draws some changes of a mesh.
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
        // As a file is read again: nothing is shared, and the most is the same.
        let (services, workloads) = (mesh.services.sorted(), mesh.workloads.sorted());
        let services = services.into_iter().map(|one| Service::clone(one));
        let workloads = workloads.into_iter().map(|one| Workload::clone(one));
        let hbone_only = mesh.hbone_only;
        *mesh = Mesh::new(services, workloads);
        mesh.hbone_only = hbone_only;
    }
}

/// What a wrong builder makes of a mesh.
fn spoilt(fault: Fault, old: &Snapshot, mesh: &Mesh) -> Mesh {
    let mut mesh = mesh.clone();
    let gone = |mesh: &Mesh| {
        let gone = old.mesh.workloads.iter();
        let gone = gone.filter(|(uid, _)| !mesh.workloads.contains_key(&***uid));
        gone.map(|(uid, one)| (uid.clone(), one.clone()))
            .collect::<Vec<_>>()
    };
    match fault {
        Fault::Nothing | Fault::LosesStates => {}
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

/// Runs one schedule.
///
/// # Errors
/// In which step the snapshot is not what the mesh says.
fn run(seed: u64, fault: Fault) -> Result<(), String> {
    let mut rng = Rng::with_seed(seed);
    let mut mesh = Mesh {
        hbone_only: rng.bool(),
        ..Mesh::default()
    };
    let mut snapshot = Snapshot::default();
    for step in 0..STEPS {
        change(&mut rng, &mut mesh);
        let old = match fault {
            Fault::LosesStates => &Snapshot::default(),
            _ => &snapshot,
        };
        let mesh_of_fault = spoilt(fault, old, &mesh);
        let change = Change {
            mesh: Some((mesh_of_fault, NETWORK.into())),
            ..Change::default()
        };
        let next = build(old, change);
        let (services, vips, states) = contents(&next);
        let (want, want_vips) = meaning(&mesh);
        let at = format!("seed {seed}, step {step}");
        if services != want {
            return Err(format!("{at}: {services:?} instead of {want:?}"));
        }
        if vips != want_vips {
            return Err(format!("{at}: {vips:?} instead of {want_vips:?}"));
        }
        let (_, _, before) = contents(&snapshot);
        for (key, state) in &states {
            let same = before.get(key).is_none_or(|old| Arc::ptr_eq(old, state));
            let stolen = before
                .iter()
                .any(|(of, old)| of != key && Arc::ptr_eq(old, state));
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

#[test]
fn each_wrong_builder_is_caught() {
    for fault in [
        Fault::MissesRemovals,
        Fault::LosesStates,
        Fault::MissesWorkloads,
        Fault::MissesServices,
    ] {
        let caught = (0..SEEDS).any(|seed| run(seed, fault).is_err());
        assert!(caught, "{fault:?} passes for right");
    }
}
