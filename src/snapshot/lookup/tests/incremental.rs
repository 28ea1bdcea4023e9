//! Test that a sequence of changes leads each name to the same result as a snapshot built from
//! scratch.

use std::sync::Arc;

use fastrand::Rng;

use super::{address_suffixes, build_snapshot, exposed, found, names, service, trust, workload};
use crate::snapshot::builder::{Change, build};
use crate::snapshot::mesh::{self, GatewayAddress, Mesh, Place, Workload};
use crate::snapshot::{ExposureTable, NameTable, ServiceVisibility, Snapshot};

/// Returns, for each name and each of two callers, the service, whether the caller may reach it,
/// and the endpoints.
fn lookup_results(snapshot: &Snapshot) -> Vec<String> {
    let mut texts: Vec<_> = HOSTS.map(|host| format!("{host}:80")).into();
    let aliases = ["one.name", "two.name", "region.name"];
    texts.extend(aliases.map(|name| format!("{name}:80")));
    texts.extend((0..4).flat_map(|at| [8080, 8081].map(|port| format!("10.0.0.{at}:{port}"))));
    texts.extend((0..6).map(|at| format!("240.0.0.{at}:80")));
    let callers = ["west.local", "north.local"];
    let requested = texts.iter().flat_map(|text| callers.map(|domain| (text, domain)));
    let reported = requested.map(|(text, domain)| {
        let all = found(snapshot, text);
        let place = usize::from(domain == "north.local");
        format!("{text} {domain}: {:?} {:?}", all[place], address_suffixes(snapshot, domain, text))
    });
    reported.collect()
}

/// Names of two families, one service for each suffix.
const HOSTS: [&str; 6] = [
    "a.x.svc.cluster.local",
    "a.x.mesh.internal",
    "a.x.global",
    "b.y.svc.cluster.local",
    "b.y.mesh.internal",
    "b.y.global",
];

fn drawn_host(rng: &mut Rng) -> &'static str {
    rng.choice(&HOSTS).expect("a host")
}

fn drawn_service(rng: &mut Rng) -> mesh::Service {
    let place = rng.usize(..HOSTS.len());
    let mut service = service(HOSTS[place], &[80, 81]);
    // The last service does not own its family. Each VIP is claimed by one hostname only, because
    // the age of a claim is lost when a snapshot is built from scratch.
    if place == HOSTS.len() - 1 {
        service.namespace = "z".into();
    }
    service.vips =
        vec![(String::new(), [240, 0, 0, u8::try_from(place).expect("few hosts")].into())];
    service
}

fn drawn_workload(rng: &mut Rng) -> Workload {
    let served: Vec<_> =
        (0..rng.u8(1..4)).map(|_| (drawn_host(rng), 80, 8080 + rng.u16(..2))).collect();
    let region = *rng.choice(&["r1", "r2"]).expect("a region");
    let mut workload = workload(rng.u8(..4), region, &served);
    workload.uid = format!("uid-{}", rng.u8(..6)).into();
    workload.healthy = rng.u8(..5) > 0;
    workload.network = (*rng.choice(&["", "east", "west"]).expect("a network")).into();
    workload.cluster = (*rng.choice(&["", "west", "north"]).expect("a cluster")).into();
    workload.network_gateway = rng.bool().then(|| {
        let place = Place::Address("west".to_owned(), [192, 0, 2, rng.u8(..3)].into());
        Arc::new(GatewayAddress { place, port: 15008 })
    });
    workload
}

/// Returns the record of a gateway of network west.
fn drawn_record(rng: &mut Rng) -> Workload {
    let at = rng.u8(..3);
    Workload {
        uid: format!("NetworkGateway/west/192.0.2.{at}/15008").into(),
        addresses: [[192, 0, 2, at].into()].into(),
        services: [].into(),
        network_gateway: None,
        ..drawn_workload(rng)
    }
}

fn drawn_exposure(rng: &mut Rng) -> ExposureTable {
    let mut table = ExposureTable::new(rng.bool());
    for _ in 0..rng.u8(..4) {
        let to = *rng.choice(&["west", "north"]).expect("a cluster");
        let mut entry = exposed(drawn_host(rng), to, rng.bool());
        let namespaces = [None, None, Some("x"), Some("y"), Some("z")];
        let namespace = *rng.choice(&namespaces).expect("a namespace");
        entry.namespace = namespace.map(Into::into);
        table.add(entry);
    }
    table
}

fn drawn_names(rng: &mut Rng) -> NameTable {
    let both: &[&str] = &[drawn_host(rng), drawn_host(rng)];
    let some: Option<&[&str]> = rng.bool().then_some(&["west"]);
    names(&[
        ("one.name", &both[..1], some, ""),
        ("two.name:80", both, None, ""),
        ("region.name", both, some, "r1"),
    ])
}

/// Adds, replaces and removes some services and workloads.
fn change_some(mesh: &mut Mesh, rng: &mut Rng) {
    for _ in 0..rng.u8(..4) {
        let (service, mut workload) = (drawn_service(rng), drawn_workload(rng));
        if rng.u8(..8) == 0 {
            workload = drawn_record(rng);
        }
        let name: Arc<str> = service.key().into();
        match rng.u8(..8) {
            0..2 => drop(mesh.services.remove(&name)),
            2..4 => drop(mesh.services.insert(name, Arc::new(service))),
            4 => drop(mesh.workloads.remove(&workload.uid)),
            _ => drop(mesh.workloads.insert(workload.uid.clone(), Arc::new(workload))),
        }
    }
}

#[test]
fn any_row_of_changes_leads_where_the_same_configuration_and_mesh_lead_from_nothing() {
    let mut steps_by_gateways = [0; 4];
    for seed in 0..24 {
        let mut rng = Rng::with_seed(seed);
        let mut mesh = Mesh::default();
        let mut snapshot = build_snapshot(mesh.clone(), names(&[]), ExposureTable::new(false));
        for step in 0..40 {
            change_some(&mut mesh, &mut rng);
            let rules = rng.u64(..);
            let configured = |seed| {
                let mut rng = Rng::with_seed(seed);
                let exported = (0..rng.u8(..3)).map(|_| drawn_host(&mut rng).into());
                let scope = ServiceVisibility {
                    exported: exported.collect(),
                    ..ServiceVisibility::default()
                };
                (drawn_exposure(&mut rng), drawn_names(&mut rng), scope)
            };
            let change = Change { mesh: Some((mesh.clone(), "east".into())), ..Change::default() };
            snapshot = build(&snapshot, change);
            snapshot.index.remote.assert_counts();
            steps_by_gateways[snapshot.remote_gateways().count()] += 1;
            if step % 4 == 3 {
                let (exposure, names, scope) = configured(rules);
                let change = Change {
                    exposure: Some(exposure),
                    names: Some(names),
                    scope: Some(scope),
                    ..Change::default()
                };
                snapshot = build(&snapshot, change);
            }
            let change = Change {
                mesh: Some((mesh.clone(), "east".into())),
                trust: Some(trust()),
                ..Change::default()
            };
            let same_rules = Snapshot {
                exposure: Arc::clone(&snapshot.exposure),
                names: Arc::clone(&snapshot.names),
                scope: Arc::clone(&snapshot.scope),
                ..Snapshot::default()
            };
            let fresh = build(&same_rules, change);
            assert_eq!(
                lookup_results(&snapshot),
                lookup_results(&fresh),
                "seed {seed}, step {step}"
            );
            assert_eq!(snapshot.derived_services.len(), fresh.derived_services.len());
        }
    }
    let is_seen = steps_by_gateways.iter().all(|steps| *steps > 0);
    assert!(is_seen, "{steps_by_gateways:?}");
}
