//! Endpoints in several networks: loads, states and changes, which cases of explanations in
//! `tests/corpus/findings/explain` cannot show.

mod budgets;
mod first_peer;
mod gateways;
mod loads;
mod subsets;
mod transit;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::chi_square::p_value;
use super::{data_path, peer_of, target_of};
use crate::config::{Distribution, ExposedService};
use crate::datapath::balance::{Tried, choose};
use crate::datapath::http2::tunnel::Forwarded;
use crate::datapath::identity::Peer;
use crate::datapath::route;
use crate::reason::Reason;
use crate::snapshot::builder::{Change, build};
use crate::snapshot::mesh::{
    GatewayAddress, Locality, Mesh, Place, Protocol, Scope, Service, Template, Workload,
};
use crate::snapshot::tests::{alias, echo as service, entry, hosts, samples};
use crate::snapshot::traffic::{Position, Traffic, TrafficRule};
use crate::snapshot::{
    Alias, Audience, EndpointSet, ExposureTable, InFlight, LinkFactors, NO_LINK_FACTORS, NameTable,
    Network, NetworkTable, Snapshot, TrustSet, pick_probabilities,
};
use crate::wire::Transit;

const PICKS: u32 = 100_000;
/// Significance level: one correct sample in a million is rejected. The seeds are fixed.
const P_MIN: f64 = 1e-6;
const CLIENT: &str = "spiffe://west.local/ns/shop/sa/checkout";

fn locality(region: &str) -> Locality {
    Locality { region: region.into(), zone: format!("{region}-a").into(), ..Locality::default() }
}

/// Returns a pod of network `network`, which is also its region.
fn pod(network: &str, at: u8) -> Workload {
    let template = Template {
        cluster: network.into(),
        network: network.into(),
        protocol: Protocol::Hbone,
        locality: locality(network).into(),
        ..Template::default()
    };
    let addresses = [[10, 0, 0, at].into()].into();
    Workload { addresses, ..samples::workload(&format!("{network}-{at:03}"), "echo", template) }
}

fn pods(network: &str, count: u8) -> Vec<Workload> {
    (1..=count).map(|at| pod(network, at)).collect()
}

/// Returns the record of a gateway at 192.0.2.`at`.
fn gateway(network: &str, at: u8) -> Workload {
    Workload {
        uid: format!("NetworkGateway/{network}/192.0.2.{at}/15008").into(),
        addresses: [[192, 0, 2, at].into()].into(),
        services: [].into(),
        template: Template {
            namespace: "edge".into(),
            service_account: "gateway".into(),
            trust_domain: format!("{network}.local").into(),
            cluster: network.into(),
            network: network.into(),
            locality: locality(network).into(),
            ..Template::default()
        }
        .into(),
        ..pod(network, at)
    }
}

/// Returns the snapshot of a gateway in network and region `east`. The service is exposed to
/// cluster west with `transit`.
fn snapshot_with(
    transit: Transit,
    service: Service,
    workloads: Vec<Workload>,
    rule: TrafficRule,
) -> Snapshot {
    build(&Snapshot::default(), change(transit, service, workloads, rule))
}

fn change(
    transit: Transit,
    service: Service,
    workloads: Vec<Workload>,
    rule: TrafficRule,
) -> Change {
    let domains = ["east", "west", "north"].map(|name| (format!("{name}.local"), name));
    Change {
        mesh: Some((Mesh::new([service], workloads), "east".into())),
        trust: Some(TrustSet::new(domains.iter().map(|(domain, name)| (domain.as_str(), *name)))),
        exposure: Some(exposure(transit)),
        position: Some(Position {
            cluster: "east".into(),
            locality: locality("east"),
            ..Position::default()
        }),
        traffic: Some(Traffic::new([("echo.app".into(), rule)], TrafficRule::default())),
        ..Change::default()
    }
}

fn exposure(transit: Transit) -> ExposureTable {
    let mut table = ExposureTable::new(false);
    let to = Audience { cluster: Some("west".into()), ..Audience::default() };
    table.add(ExposedService {
        names: hosts(&["echo.example"]),
        transit: Some(transit),
        ..entry("echo.app", vec![to])
    });
    table
}

/// Returns the snapshot with the distribution `any` and transit without limits.
fn spread(workloads: Vec<Workload>) -> Snapshot {
    let any = TrafficRule { distribution: Some(Distribution::Any), ..TrafficRule::default() };
    snapshot_with(Transit::Always, service(&[]), workloads, any)
}

/// As [`spread`], with these pods of networks `east` and `west`, and gateways of `west`.
fn two_networks([east, west]: [u8; 2], gateways: u8) -> Snapshot {
    let gateways = (1..=gateways).map(|at| gateway("west", at));
    let pods = [pods("east", east), pods("west", west)].concat();
    spread(pods.into_iter().chain(gateways).collect())
}

fn always(snapshot: &Snapshot) -> &Arc<EndpointSet> {
    let service = snapshot.services.get("echo.app").expect("a service");
    service.endpoints_by(80, Transit::Always).expect("a set")
}

/// Asserts that the predicted shares are exactly `want`, by address, and that 100,000 picks fit.
#[track_caller]
fn assert_shares(set: &EndpointSet, want: &[(&str, f64)]) {
    assert_shares_with(set, NO_LINK_FACTORS, want);
}

/// As [`assert_shares`], with the factors of links.
#[track_caller]
fn assert_shares_with(set: &EndpointSet, links: &LinkFactors, want: &[(&str, f64)]) {
    fastrand::seed(17);
    let now = Instant::now();
    let predicted = pick_probabilities(set, links, now);
    let mut got: Vec<_> = set.endpoints.iter().zip(predicted).collect();
    got.retain(|(_, share)| *share > 0.0);
    got.sort_by_key(|(one, _)| one.address);
    let shown: Vec<_> = got.iter().map(|(one, share)| (one.address.to_string(), *share)).collect();
    let is_equal = |(got, want): (&(String, f64), &(&str, f64))| {
        got.0 == want.0 && (got.1 - want.1).abs() < 1e-6
    };
    assert_eq!(shown.len(), want.len(), "{shown:?}");
    assert!(shown.iter().zip(want).all(is_equal), "{shown:?}");
    let mut counts = vec![0_u32; got.len()];
    for _ in 0..PICKS {
        let chosen = choose(set, &Tried::default(), links).expect("an endpoint");
        let place = got.iter().position(|(one, _)| Arc::ptr_eq(one, chosen));
        counts[place.expect("one with a share")] += 1;
    }
    let bins = want.iter().zip(&counts);
    let bins: Vec<_> =
        bins.map(|((_, share), count)| (share * f64::from(PICKS), f64::from(*count))).collect();
    let p = p_value(&bins);
    assert!(p > P_MIN, "p is {p}: {bins:?}");
}

#[test]
fn each_instance_of_random_networks_has_the_same_share() {
    for seed in 0..300 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut workloads = pods("east", rng.u8(..30));
        let here = workloads.len();
        let networks: Vec<_> =
            ["west", "north", "south"].map(|network| (network, rng.u8(1..40), rng.u8(1..6))).into();
        let mut at = 0;
        for (network, instances, gateways) in &networks {
            workloads.extend(pods(network, *instances));
            for _ in 0..*gateways {
                at += 1;
                workloads.push(gateway(network, at));
            }
        }
        let all: usize = networks.iter().map(|(_, count, _)| usize::from(*count)).sum();
        let part = 1.0 / f64::from(u32::try_from(here + all).expect("few"));
        let snapshot = spread(workloads);
        let set = always(&snapshot);
        let predicted = pick_probabilities(set, NO_LINK_FACTORS, Instant::now());
        for (endpoint, share) in set.endpoints.iter().zip(predicted) {
            let remote = endpoint.remote.as_ref();
            let of = remote.and_then(|remote| {
                networks.iter().find(|(network, ..)| **network == *remote.network)
            });
            let want = of.map_or(part, |(_, instances, gateways)| {
                part * f64::from(*instances) / f64::from(*gateways)
            });
            assert!((share - want).abs() < 1e-9, "seed {seed}: {share}, {want}");
        }
    }
}

/// Returns the share of the own network, of a near and of a far one.
fn shares_by_network(set: &EndpointSet) -> [f64; 3] {
    let now = Instant::now();
    let mut shares = [0.0; 3];
    let predicted = pick_probabilities(set, NO_LINK_FACTORS, now);
    for (endpoint, share) in set.endpoints.iter().zip(predicted) {
        let place = match endpoint.remote.as_ref().map(|remote| &*remote.network) {
            None => 0,
            Some("west") => 1,
            Some(_) => 2,
        };
        shares[place] += share;
    }
    shares.map(|share| (share * 100.0).round() / 100.0)
}

/// Returns address, network, cluster and identities of each gateway.
fn shown(snapshot: &Snapshot) -> Vec<String> {
    let endpoints = always(snapshot).endpoints.iter();
    let shown = endpoints.map(|one| {
        let remote = one.remote.as_ref().expect("a gateway");
        let (network, cluster) = (&remote.network, &remote.cluster);
        let identities = remote.identities.join(",");
        format!("{} {network} {cluster} {identities}", one.address)
    });
    shown.collect()
}

fn answered(before: &Snapshot, last: u8) -> Snapshot {
    let answer = ("gw.example.com".into(), [[192, 0, 2, last].into()].into());
    let change = Change { answers: vec![answer], ..Change::default() };
    build(before, change)
}

#[test]
fn gateways_come_from_records_instances_and_the_configuration() {
    let mut by_address = pod("west", 1);
    let place = Place::Address("west".to_owned(), [192, 0, 2, 7].into());
    let port = 31_008;
    by_address.network_gateway = Some(Arc::new(GatewayAddress { place, port }));
    let rule = Network {
        cluster: Some("north".into()),
        identities: ["spiffe://north.local/ns/edge/sa/gw".into()].into(),
        gateways: hosts(&["gw.example.com:15008", "192.0.2.9:443"]),
        ..Network::default()
    };
    let any = TrafficRule { distribution: Some(Distribution::Any), ..TrafficRule::default() };
    let workloads = vec![by_address, pod("north", 1), gateway("north", 4)];
    let change = Change {
        networks: Some([("north".into(), rule)].into_iter().collect()),
        ..change(Transit::Always, service(&[]), workloads, any)
    };
    let first = build(&Snapshot::default(), change);
    assert!(first.wanted_hosts().contains_key("gw.example.com"));
    let second = answered(&first, 8);
    let configured = "north north spiffe://north.local/ns/edge/sa/gw";
    let want = [
        format!("192.0.2.4:15008 {configured}"),
        format!("192.0.2.8:15008 {configured}"),
        format!("192.0.2.9:443 {configured}"),
        "192.0.2.7:31008 west west ".to_owned(),
    ];
    assert_eq!(shown(&second), want);
    assert!(second.is_gateway("spiffe://north.local/ns/edge/sa/gw"));
    assert!(!second.is_gateway(CLIENT));
    // All addresses of a hostname are replaced, and states of the other gateways stay.
    let third = answered(&second, 10);
    assert!(shown(&third).contains(&format!("192.0.2.10:15008 {configured}")));
    let state = |snapshot: &Snapshot| Arc::as_ptr(&always(snapshot).endpoints[0].state);
    assert_eq!(state(&second), state(&third));
    let without = Change { networks: Some(NetworkTable::default()), ..Change::default() };
    let want = [
        "192.0.2.4:15008 north north spiffe://north.local/ns/edge/sa/gateway",
        "192.0.2.7:31008 west west ",
    ];
    assert_eq!(shown(&build(&third, without)), want);
}

#[test]
fn the_state_of_a_gateway_belongs_to_one_service_and_outlives_snapshots() {
    let mut workloads = pods("west", 2);
    workloads.push(gateway("west", 1));
    let first = spread(workloads);
    let state = |snapshot: &Snapshot| Arc::clone(&always(snapshot).endpoints[0].state);
    let mut mesh = first.mesh.clone();
    let more = pod("west", 3);
    mesh.workloads.insert(Arc::clone(&more.uid), Arc::new(more));
    let mut twin = service(&[]);
    (twin.name, twin.hostname) = ("twin".into(), "twin.app".into());
    mesh.services.insert("app/twin.app".into(), Arc::new(twin));
    let mut of_twin = pod("west", 4);
    of_twin.services = [("app/twin.app".into(), [(80, 80)].into())].into();
    mesh.workloads.insert("twin".into(), Arc::new(of_twin));
    let second = build(&first, Change { mesh: Some((mesh, "east".into())), ..Change::default() });
    assert_eq!(always(&second).endpoints[0].weight, 3);
    assert!(Arc::ptr_eq(&state(&first), &state(&second)));
    let twin = second.services.get("twin.app").expect("a service");
    let twin = twin.endpoints_by(80, Transit::Always).expect("a set");
    assert!(!Arc::ptr_eq(&twin.endpoints[0].state, &state(&second)));
    assert_eq!(twin.endpoints[0].address, always(&second).endpoints[0].address);
}
