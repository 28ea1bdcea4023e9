//! Shares of endpoints over 100,000 seeded picks.

use super::*;
use crate::config::Distribution;
use crate::datapath::balance::{Tried, choose};
use crate::snapshot::mesh::Service;
use crate::snapshot::tests::{locality, region_weights, samples};
use crate::snapshot::traffic::{Position, Traffic, TrafficRule};
use crate::snapshot::{InFlight, pick_probabilities};

const PICKS: u32 = 100_000;

/// Five standard deviations of a share of one half over [`PICKS`].
const BOUND: f64 = 0.008;

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

/// Each row has the number of ready endpoints, of ten, in the own zone, in another zone of the
/// own region, and in another region; then the shares of the three by each distribution.
#[test]
fn each_distribution_keeps_to_its_tiers_whatever_is_ready() {
    const PLACES: [&str; 3] = ["us-west/us-west-a", "us-west/us-west-b", "us-east/us-east-a"];
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
        for (distribution, wants) in [
            (Distribution::Close, percent(close_wants)),
            (Distribution::Region, percent(region_wants)),
            (Distribution::Network, even(ready)),
            (Distribution::Any, even(ready)),
        ] {
            fastrand::seed(8);
            let workloads = (0..30).map(|at| Workload {
                healthy: at % 10 < ready[at / 10] as usize,
                ..workload(at, "west", PLACES[at / 10])
            });
            let rule = TrafficRule { distribution: Some(distribution), ..TrafficRule::default() };
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
        TrafficRule { distribution: Some(Distribution::Close), ..TrafficRule::default() },
        region_weights(&[("us-west", 1), ("*", 3)]),
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

#[tokio::test(start_paused = true)]
async fn of_two_endpoints_the_nearer_takes_all_until_its_load_exceeds_that_of_the_other() {
    let workloads = (0..2).map(|at| workload(at, "west", "us-west/us-west-a"));
    let rule = TrafficRule { latency: Some(true), ..TrafficRule::default() };
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
