//! Shares of endpoints over 100,000 seeded picks. The numbers in the test names refer to the
//! acceptance list of the features that Strait was planned with.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use tokio::time::Instant;

use crate::datapath::balance::{Tried, choose};
use crate::snapshot::builder::{Change, build};
use crate::snapshot::mesh::{
    Assignment, LocalityWeight, Mesh, Protocol, Scope, Service, Template, Workload,
};
use crate::snapshot::tests::locality;
use crate::snapshot::tests::samples;
use crate::snapshot::traffic::{Position, Regions, Traffic, TrafficRule};
use crate::snapshot::{EndpointSet, InFlight, NO_LINK_FACTORS, Snapshot, pick_probabilities};
use crate::wire::RegionPattern;

use super::chi_square::p_value;

const PICKS: u32 = 100_000;

/// Five standard deviations of a share of one half over [`PICKS`].
const BOUND: f64 = 0.008;

const CLOSE: &[Scope] = &[Scope::Network, Scope::Region, Scope::Zone];

/// Returns a workload in a cluster and at `region/zone`. `at` determines its uid and address.
fn workload(at: usize, cluster: &str, place: &str) -> Workload {
    let [.., high, low] = at.to_be_bytes();
    let template = Template {
        cluster: cluster.into(),
        locality: locality(place).into(),
        network: "shared".into(),
        protocol: Protocol::Hbone,
        ..Template::default()
    };
    let addresses = [[10, 0, high, low].into()].into();
    Workload { addresses, ..samples::workload(&format!("{at:05}"), "echo", template) }
}

/// Builds the snapshot of a gateway in network `shared` at `us-west/us-west-a`.
fn build_snapshot(service: Service, workloads: Vec<Workload>, rule: TrafficRule) -> Snapshot {
    let position = Position {
        cluster: "west".into(),
        locality: locality("us-west/us-west-a"),
        ..Position::default()
    };
    let change = Change {
        mesh: Some((Mesh::new([service], workloads), "shared".into())),
        position: Some(position),
        traffic: Some(Traffic::new([("echo.app".into(), rule)], TrafficRule::default())),
        has_passthrough: Some(true),
        ..Change::default()
    };
    build(&Snapshot::default(), change)
}

fn set(snapshot: &Snapshot) -> &EndpointSet {
    &snapshot.services.get("echo.app").expect("a service").ports[&80]
}

/// Counts the picks of each endpoint, by index in the set.
fn picked(set: &EndpointSet) -> Vec<u32> {
    let mut counts = vec![0; set.endpoints.len()];
    for _ in 0..PICKS {
        let chosen = choose(set, &Tried::default(), NO_LINK_FACTORS).expect("an endpoint");
        let place = set.endpoints.iter().position(|one| Arc::ptr_eq(one, chosen));
        counts[place.expect("one of the set")] += 1;
    }
    counts
}

/// Returns the share of the endpoints that satisfy `is_meant`.
fn share(set: &EndpointSet, counts: &[u32], is_meant: impl Fn(&Workload) -> bool) -> f64 {
    let endpoints = set.endpoints.iter().zip(counts);
    let meant = endpoints.filter(|(endpoint, _)| is_meant(&endpoint.definition));
    meant.map(|(_, count)| f64::from(*count)).sum::<f64>() / f64::from(PICKS)
}

#[track_caller]
fn assert_share(got: f64, want: f64, bound: f64) {
    assert!((got - want).abs() < bound, "{got} instead of {want} within {bound}");
}

#[test]
fn two_and_two_endpoints_of_two_clusters_get_a_quarter_each() {
    fastrand::seed(1);
    let clusters = ["west", "west", "east", "east"];
    let workloads = clusters.iter().enumerate();
    let workloads = workloads.map(|(at, cluster)| workload(at, cluster, "")).collect();
    let snapshot = build_snapshot(samples::service("echo"), workloads, TrafficRule::default());
    for count in picked(set(&snapshot)) {
        assert_share(f64::from(count) / f64::from(PICKS), 0.25, BOUND);
    }
}

#[test]
fn the_endpoints_of_three_zones_get_the_same_whichever_zone_comes_first() {
    fastrand::seed(1);
    // Endpoints are in the order of their workloads, which `workload` numbers by place.
    for order in ["abbccc", "acccbb", "bbaccc", "bbccca", "cccabb", "cccbba", "cbcabc"] {
        let zones = order.chars().enumerate();
        let workloads =
            zones.map(|(at, zone)| workload(at, "west", &format!("us-west/{zone}"))).collect();
        let snapshot = build_snapshot(samples::service("echo"), workloads, TrafficRule::default());
        let set = set(&snapshot);
        let first = &*set.endpoints[0].definition.locality.zone;
        assert_eq!(Some(first), order.get(..1));
        let counts = picked(set);
        for (zone, want) in [("a", 1.0), ("b", 2.0), ("c", 3.0)] {
            let is_there = |workload: &Workload| *workload.locality.zone == *zone;
            assert_share(share(set, &counts, is_there), want / 6.0, BOUND);
        }
    }
}

fn weights(weights: &[(&str, u32)]) -> TrafficRule {
    let pattern = |text| RegionPattern::parse(text).expect("a pattern");
    TrafficRule {
        regions: Regions::new(weights.iter().map(|(text, weight)| (pattern(text), *weight))),
        ..TrafficRule::default()
    }
}

#[test]
fn regional_weights_of_10_and_90_hold_within_1_percent() {
    fastrand::seed(7);
    // The shares of regions do not depend on their numbers of endpoints and zones.
    let west = (0..8).map(|at| workload(at, "west", ["us-west-2/a", "us-west-2/b"][at % 2]));
    let east = (8..11).map(|at| workload(at, "east", "us-east-2/a"));
    let workloads = west.chain(east).collect();
    let rule = weights(&[("us-west-2/*", 10), ("us-east-2/*", 90)]);
    let snapshot = build_snapshot(samples::service("echo"), workloads, rule);
    let set = set(&snapshot);
    let counts = picked(set);
    let is_east = |workload: &Workload| &*workload.locality.region == "us-east-2";
    assert_share(share(set, &counts, is_east), 0.9, 0.01);
    assert_share(share(set, &counts, |one| !is_east(one)), 0.1, 0.01);
}

#[test]
fn a_weight_of_0_evacuates_a_region() {
    fastrand::seed(7);
    let places = ["us-west-2/a", "us-east-2/a", "us-east-2/b"];
    let workloads = || {
        let places = places.iter().enumerate();
        places.map(|(at, place)| workload(at, "west", place)).collect()
    };
    for rule in [
        weights(&[("us-east-2", 0)]),
        weights(&[("us-east-2", 0), ("*", 1)]),
        weights(&[("us-east-2/*", 0), ("us-west-2/*", 90)]),
    ] {
        let snapshot = build_snapshot(samples::service("echo"), workloads(), rule);
        let set = set(&snapshot);
        assert_eq!(picked(set), [PICKS]);
        assert_eq!(&*set.endpoints[0].definition.locality.region, "us-west-2");
    }
}

/// Each row has the number of ready endpoints, of ten, in the own zone, in another zone of the
/// own region, and in another region; then the shares of the three by each distribution.
#[test]
fn each_distribution_keeps_to_its_tiers_whatever_is_ready() {
    const PLACES: [&str; 3] = ["us-west/us-west-a", "us-west/us-west-b", "us-east/us-east-a"];
    let (network, region, any) = (&CLOSE[..1], &CLOSE[..2], &CLOSE[..0]);
    let even = |ready: [u32; 3]| {
        let all: u32 = ready.iter().sum();
        ready.map(|ready| f64::from(ready) / f64::from(all))
    };
    // Shares of PreferClose and PreferRegion, in percent.
    let table = [
        ([10, 10, 10], [100, 0, 0], [50, 50, 0]),
        ([0, 10, 10], [0, 100, 0], [0, 71, 29]),
        ([0, 0, 10], [0, 0, 100], [0, 0, 100]),
        ([10, 0, 0], [100, 0, 0], [100, 0, 0]),
        ([0, 10, 0], [0, 100, 0], [0, 100, 0]),
        ([7, 10, 10], [100, 0, 0], [41, 59, 0]),
        ([5, 10, 10], [71, 29, 0], [33, 67, 0]),
        ([5, 5, 10], [71, 29, 0], [35, 36, 29]),
        ([2, 2, 10], [28, 28, 44], [14, 14, 72]),
    ];
    for (ready, close_wants, region_wants) in table {
        let percent = |wants: [u32; 3]| wants.map(|want| f64::from(want) / 100.0);
        for (preferences, wants) in [
            (CLOSE, percent(close_wants)),
            (region, percent(region_wants)),
            (network, even(ready)),
            (any, even(ready)),
        ] {
            fastrand::seed(8);
            let workloads = (0..30).map(|at| Workload {
                healthy: at % 10 < ready[at / 10] as usize,
                ..workload(at, "west", PLACES[at / 10])
            });
            let rule = TrafficRule { preferences: Some(preferences), ..TrafficRule::default() };
            let snapshot = build_snapshot(samples::service("echo"), workloads.collect(), rule);
            let set = set(&snapshot);
            let counts = picked(set);
            for (place, want) in PLACES.iter().zip(wants) {
                let zone = locality(place).zone;
                let got = share(set, &counts, |one| one.locality.zone == zone);
                // The table is rounded, with an error of up to half a percent.
                assert_share(got, want, BOUND + 0.005);
            }
        }
    }
}

#[test]
fn a_service_has_the_same_probabilities_by_server_name_as_by_authority() {
    let places = ["us-west/us-west-a", "us-west/us-west-b", "us-east/us-east-a"];
    let workloads = (0..30).map(|at| Workload {
        healthy: at % 7 < 5,
        capacity: 1 + u32::try_from(at % 3).expect("a weight"),
        ..workload(at, "west", places[at % 3])
    });
    let rules = [
        TrafficRule::default(),
        TrafficRule { preferences: Some(CLOSE), ..TrafficRule::default() },
        weights(&[("us-west", 1), ("*", 3)]),
    ];
    for rule in rules {
        let snapshot = build_snapshot(samples::service("echo"), workloads.clone().collect(), rule);
        let service = snapshot.services.get("echo.app").expect("a service");
        let (by_authority, by_name) = (&service.ports[&80], &service.passthrough_ports[&80]);
        let uids = |set: &EndpointSet| -> Vec<_> {
            set.endpoints.iter().map(|one| Arc::clone(one.uid())).collect()
        };
        assert_eq!(uids(by_authority), uids(by_name));
        let now = Instant::now();
        assert_eq!(
            pick_probabilities(by_authority, NO_LINK_FACTORS, now),
            pick_probabilities(by_name, NO_LINK_FACTORS, now)
        );
        let ports = |set: &EndpointSet| set.endpoints[0].address.port();
        assert_eq!((ports(by_authority), ports(by_name)), (15008, 8080));
    }
}

/// Probability that counts deviate this far from correct probabilities by chance.
const CHANCE: f64 = 1e-9;

/// Returns a random mesh: preferences, an assignment, weights of regions, latency, unready
/// workloads.
fn random_snapshot(rng: &mut Rng) -> Snapshot {
    let places = ["us-west/us-west-a", "us-west/us-west-b", "us-east/us-east-a", "eu/eu-a"];
    let workloads = (0..rng.usize(1..24)).map(|at| Workload {
        healthy: rng.u8(..4) > 0,
        capacity: rng.u32(..5),
        priority: rng.u32(..3),
        degraded: rng.u8(..5) == 0,
        ..workload(at, "west", rng.choice(places).expect("a place"))
    });
    let workloads = workloads.collect();
    let localities = (0..3).flat_map(|priority| places.map(|place| (priority, locality(place))));
    let localities = localities.map(|(priority, locality)| LocalityWeight {
        priority,
        locality,
        weight: rng.u32(..4),
    });
    let localities = localities.collect();
    let assignment = Assignment {
        overprovisioning: rng.u32(90..200),
        by_locality: rng.bool(),
        localities,
        drops: Vec::new(),
    };
    let service = Service {
        assignments: (rng.u8(..3) == 0).then(|| (80, assignment.into())).into_iter().collect(),
        ..samples::service("echo")
    };
    let regions = [("us-west", rng.u32(..3)), ("us-east/*", rng.u32(..3)), ("*", 1)];
    let rule = TrafficRule {
        preferences: rng.bool().then(|| &CLOSE[..rng.usize(..4)]),
        by_latency: Some(rng.u8(..3) == 0),
        ..weights(if rng.u8(..3) == 0 { &regions } else { &[] })
    };
    build_snapshot(service, workloads, rule)
}

#[tokio::test(start_paused = true)]
async fn of_two_endpoints_the_nearer_takes_all_until_its_load_exceeds_that_of_the_other() {
    let workloads = (0..2).map(|at| workload(at, "west", "us-west/us-west-a"));
    let rule = TrafficRule { by_latency: Some(true), ..TrafficRule::default() };
    let snapshot = build_snapshot(samples::service("echo"), workloads.collect(), rule);
    let set = set(&snapshot);
    let [near, far] = [0, 1].map(|place| &set.endpoints[place].state);
    near.record_dial(Duration::from_millis(1));
    far.record_dial(Duration::from_millis(20));
    assert_eq!(picked(set), [PICKS, 0]);
    let _busy: Vec<_> = (0..20).map(|_| InFlight::new(near)).collect();
    assert_eq!(picked(set), [0, PICKS]);
    let probabilities = pick_probabilities(set, NO_LINK_FACTORS, Instant::now());
    assert_eq!(probabilities, [0.0, 1.0]);
}

#[tokio::test(start_paused = true)]
async fn the_pick_probabilities_are_those_of_real_picks() {
    let (mut grouped, mut compared) = (0, 0);
    for seed in 0..60 {
        let mut rng = Rng::with_seed(seed);
        fastrand::seed(seed);
        let snapshot = random_snapshot(&mut rng);
        let set = set(&snapshot);
        if set.endpoints.is_empty() {
            continue;
        }
        let mut tunnels = Vec::new();
        for endpoint in &set.endpoints {
            tunnels.extend((0..rng.u32(..4)).map(|_| InFlight::new(&endpoint.state)));
            endpoint.state.record_dial(Duration::from_millis(rng.u64(1..5)));
            if rng.u8(..5) == 0 {
                endpoint.state.eject(Instant::now());
            }
        }
        let probabilities = pick_probabilities(set, NO_LINK_FACTORS, Instant::now());
        let all: f64 = probabilities.iter().sum();
        assert!((all - 1.0).abs() < 1e-9, "seed {seed}: {probabilities:?}");
        let counts = picked(set);
        for (place, probability) in probabilities.iter().enumerate() {
            assert!(*probability > 0.0 || counts[place] == 0, "seed {seed}: {place}");
        }
        let bins = probabilities.iter().zip(&counts);
        let bins = bins.map(|(share, count)| (share * f64::from(PICKS), f64::from(*count)));
        let chance = p_value(&bins.collect::<Vec<_>>());
        assert!(chance > CHANCE, "seed {seed}: {chance}: {counts:?} {probabilities:?}");
        grouped += usize::from(set.groups().is_some_and(|groups| groups.list().len() > 1));
        compared += 1;
    }
    assert!(compared > 50 && grouped > 20, "{grouped} of {compared} have groups");
}
