//! Tests of endpoints in other networks, up to their shares.

use tokio::time::Instant;

use super::*;
use crate::config::ExposedService;
use crate::snapshot::builder::{Change, build};
use crate::snapshot::mesh::{Template, Workload};
use crate::snapshot::tests::{entry, locality, region_weights};
use crate::snapshot::traffic::{Traffic, TrafficRule};
use crate::snapshot::{
    EndpointSet, ExposureTable, NO_LINK_FACTORS, gateway_record, pick_probabilities,
};
use crate::wire::Transit;

const GATEWAY: &str = "192.0.2.1:15008";

/// Returns the gateway of a network with instances of this weight behind it.
fn gateway(network: &str, weight: u32) -> LbEndpoint {
    LbEndpoint {
        metadata: Some(metadata("istio", "network", network)),
        load_balancing_weight: Some(weight),
        ..at(socket("192.0.2.1", 15008))
    }
}

fn with_health(one: LbEndpoint, status: HealthStatus) -> LbEndpoint {
    LbEndpoint { health_status: status.into(), ..one }
}

fn pods() -> Vec<LbEndpoint> {
    vec![at(socket("10.0.0.1", 80)), at(socket("10.0.0.2", 80))]
}

/// Returns the endpoints of a zone at a priority.
fn zone(zone: &str, priority: u32, lb_endpoints: Vec<LbEndpoint>) -> LocalityLbEndpoints {
    LocalityLbEndpoints {
        locality: Some(Locality { region: "r".into(), zone: zone.into(), ..Locality::default() }),
        priority,
        lb_endpoints,
        ..LocalityLbEndpoints::default()
    }
}

fn with_weight(of: LocalityLbEndpoints, weight: u32) -> LocalityLbEndpoints {
    LocalityLbEndpoints { load_balancing_weight: Some(weight), ..of }
}

/// Returns the endpoints of a cluster for tunnels that may leave the network `east`.
fn endpoints_of(zones: Vec<LocalityLbEndpoints>) -> Arc<EndpointSet> {
    endpoints_by(zones, TrafficRule::default(), None)
}

/// Returns the same under a rule of the configuration, and with the record of a gateway.
fn endpoints_by(
    zones: Vec<LocalityLbEndpoints>,
    rule: TrafficRule,
    record: Option<Workload>,
) -> Arc<EndpointSet> {
    let has_weights = zones.iter().any(|of| of.load_balancing_weight.is_some());
    let by_locality =
        CommonLbConfig { locality_weighted_lb_config: Some(LocalityWeightedLbConfig {}) };
    let cluster = Cluster {
        load_assignment: Some(ClusterLoadAssignment {
            endpoints: zones,
            ..assignment(ECHO, Vec::new())
        }),
        common_lb_config: has_weights.then_some(by_locality),
        ..of_type(ECHO, DiscoveryType::Static)
    };
    let mut clusters = ClusterStore::default();
    put(&mut clusters, CLUSTER, ECHO, &cluster).expect("a cluster");
    let host = "echo.app.svc.cluster.local";
    let mut exposure = ExposureTable::new(false);
    let transit = Some(Transit::Always);
    exposure.add(ExposedService { transit, ..entry(host, Vec::new()) });
    let mut mesh = clusters.tables.mesh();
    if let Some(record) = record {
        mesh.workloads.insert(Arc::clone(&record.uid), Arc::new(record));
    }
    let change = Change {
        mesh: Some((mesh, "east".into())),
        exposure: Some(exposure),
        traffic: Some(Traffic::new([], rule)),
        ..Change::default()
    };
    let snapshot = build(&Default::default(), change);
    let service = snapshot.services.get(host).expect("a service");
    let set = service.endpoints_by(80, Transit::Always);
    Arc::clone(set.expect("a set"))
}

/// Returns the probability in percent of a pick in each of these networks, empty for the own one.
fn shares<const N: usize>(zones: Vec<LocalityLbEndpoints>, networks: [&str; N]) -> [f64; N] {
    shares_in(&endpoints_of(zones), networks)
}

fn shares_in<const N: usize>(set: &EndpointSet, networks: [&str; N]) -> [f64; N] {
    let predicted = pick_probabilities(set, NO_LINK_FACTORS, Instant::now());
    networks.map(|network| {
        let endpoints = set.endpoints.iter().zip(&predicted);
        let of = endpoints.filter(|(one, _)| *one.definition.network == *network);
        let sum: f64 = of.map(|(_, share)| share).sum();
        (100.0 * sum).round()
    })
}

#[test]
fn an_endpoint_of_another_network_is_its_gateway() {
    let gateway = gateway("west", 5);
    let read = endpoints::endpoints(assignment("x", vec![gateway]), &mut Interner::default());
    let read = read.expect("an assignment");
    let (_, workload, _) = &read.list[0];
    let gateway = workload.network_gateway.as_deref().expect("a gateway");
    assert_eq!((&*workload.network, workload.capacity), ("west", 5));
    assert_eq!(gateway.place.to_string(), "west/192.0.2.1");
    assert_eq!(gateway.port, 15008);
}

#[test]
fn the_instances_of_each_zone_behind_a_gateway_count() {
    let zones = |status| {
        let first = with_health(gateway("west", 2), status);
        vec![
            zone("l", 0, pods()),
            zone("a", 0, vec![first]),
            zone("b", 0, vec![gateway("west", 2)]),
            zone("c", 0, vec![gateway("west", 2)]),
        ]
    };
    let all = shares(zones(HealthStatus::Healthy), ["", "west"]);
    assert_eq!(all, [25.0, 75.0]);
    let without = shares(zones(HealthStatus::Unhealthy), ["", "west"]);
    assert_eq!(without, [33.0, 67.0]);
    let twice = zone("a", 0, vec![gateway("west", 1), gateway("west", 1)]);
    assert_eq!(shares(vec![zone("l", 0, pods()), twice], ["west"]), [33.0]);
}

#[test]
fn an_instance_behind_a_gateway_has_its_priority() {
    let zones = |status, west: u32| {
        let local = pods().into_iter().map(|one| with_health(one, status));
        vec![
            zone("l", 0, local.collect()),
            zone("a", west, vec![gateway("west", 2)]),
            zone("b", 2, vec![gateway("north", 6)]),
        ]
    };
    let networks = ["", "west", "north"];
    let healthy = shares(zones(HealthStatus::Healthy, 1), networks);
    assert_eq!(healthy, [100.0, 0.0, 0.0]);
    let unhealthy = shares(zones(HealthStatus::Unhealthy, 1), networks);
    assert_eq!(unhealthy, [0.0, 100.0, 0.0]);
    let together = shares(zones(HealthStatus::Unhealthy, 2), networks);
    assert_eq!(together, [0.0, 25.0, 75.0]);
}

#[test]
fn degraded_instances_behind_a_gateway_take_what_the_others_leave() {
    let remote = |status| with_health(gateway("west", 1), status);
    let zones = |status| {
        vec![
            zone("l", 0, pods()),
            zone("a", 0, vec![remote(status)]),
            zone("b", 0, vec![remote(HealthStatus::Healthy)]),
        ]
    };
    assert_eq!(shares(zones(HealthStatus::Degraded), ["west"]), [33.0]);
    assert_eq!(shares(zones(HealthStatus::Healthy), ["west"]), [50.0]);
}

#[test]
fn each_zone_behind_a_gateway_has_its_weight_and_the_loads_are_those_of_all() {
    let zones = || {
        vec![
            with_weight(zone("l", 0, pods()), 1),
            with_weight(zone("a", 0, vec![gateway("west", 2)]), 1),
            with_weight(zone("b", 0, vec![gateway("west", 4)]), 2),
        ]
    };
    assert_eq!(shares(zones(), ["", "west"]), [25.0, 75.0]);
    let set = endpoints_of(zones());
    let candidates = set.endpoints.iter().zip(&set.candidates);
    let remote = candidates.filter(|(one, _)| one.remote.is_some());
    let (endpoints, candidates): (Vec<_>, Vec<_>) = remote.unzip();
    assert_eq!(endpoints.len(), 2);
    assert_ne!(endpoints[0].uid(), endpoints[1].uid());
    assert!(endpoints.iter().all(|one| one.address.to_string() == GATEWAY));
    assert!(candidates.iter().all(|one| one.instances == 6));
    assert!(Arc::ptr_eq(&candidates[0].state, &candidates[1].state));
}

#[test]
fn each_zone_behind_a_gateway_has_the_weight_that_the_configuration_gives_it() {
    let zones = || {
        vec![
            zone("l", 0, pods()),
            zone("a", 0, vec![gateway("west", 2)]),
            zone("b", 0, vec![gateway("west", 4)]),
        ]
    };
    // The locality of the gateway itself is that of none of the instances.
    let west = gateway_record(&"west".into(), &Arc::default(), "192.0.2.1", 15008);
    let placed = Template { locality: locality("r/l").into(), ..Template::clone(&west.template) };
    let placed = Workload { template: placed.into(), ..west.clone() };
    for record in [None, Some(west), Some(placed)] {
        let rule = region_weights(&[("r/l", 20), ("r/a", 20), ("r/b", 60)]);
        let set = endpoints_by(zones(), rule, record);
        assert_eq!(shares_in(&set, ["", "west"]), [20.0, 80.0]);
    }
}

#[test]
fn a_gateway_by_hostname_has_one_record_with_the_istio_cluster_of_all_envoy_clusters() {
    let endpoint = |cluster: &str| {
        let workload = metadata("istio", "workload", &format!(";;;;{cluster}"));
        let fields = workload.filter_metadata["istio"].fields.clone();
        let mut one = gateway("west", 1);
        one.host_identifier = at(socket("gw.example.com", 15008)).host_identifier;
        let of = one.metadata.get_or_insert_default();
        let of = of.filter_metadata.get_mut("istio").expect("a filter");
        of.fields.extend(fields);
        one
    };
    let mut clusters = ClusterStore::default();
    let mut serve = |name: &str, endpoints: Option<Vec<LbEndpoint>>| {
        match endpoints {
            Some(endpoints) => {
                let mut cluster = of_type(name, DiscoveryType::StrictDns);
                cluster.load_assignment = Some(assignment(name, endpoints));
                put(&mut clusters, CLUSTER, name, &cluster).expect("a cluster");
            }
            None => clusters.remove(CLUSTER, name),
        }
        let mesh = clusters.tables.mesh();
        let records = mesh.workloads.values();
        let records = records.filter(|one| one.uid.starts_with("NetworkGateway/west/"));
        let records = records.map(|one| format!("{} {}", one.hostname, one.cluster));
        records.collect::<Vec<_>>()
    };
    let [one, other] = ["a.app", "b.app"].map(|host| format!("outbound|80||{host}"));
    let known = ["gw.example.com west"];
    assert_eq!(serve(&one, Some(vec![endpoint("west")])), known);
    assert_eq!(serve(&other, Some(vec![endpoint("west")])), known);
    let differs = serve(&one, Some(vec![endpoint("north")]));
    assert_eq!(differs, ["gw.example.com "], "no certificate is accepted");
    assert_eq!(serve(&one, Some(Vec::new())), known);
    let none: [&str; 0] = [];
    assert_eq!(serve(&other, None), none);
}
