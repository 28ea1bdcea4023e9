//! Subsets with endpoints in other networks.

use std::sync::Arc;

use tokio::time::Instant;

use crate::datapath::balance::{Tried, choose};
use crate::snapshot::builder::{Change, build};
use crate::snapshot::mesh::{Scope, Workload};
use crate::snapshot::tests::alias;
use crate::snapshot::traffic::TrafficRule;
use crate::snapshot::{
    Alias, EndpointSet, NO_LINK_FACTORS, NameTable, Snapshot, Subset, SubsetPart,
};
use crate::wire::Transit;
use crate::wire::label::{CLUSTER, REGION};

use super::{assert_shares, change, gateway, locality, pod, pods, record, service};

/// Name and weight of a part, and its labels.
type Part<'a> = (&'a str, u32, &'a [(&'a str, &'a str)]);

const LOCAL: Part<'_> = ("local", 10, &[(CLUSTER, "east")]);
const REMOTE: Part<'_> = ("remote", 90, &[(CLUSTER, "west")]);

/// Returns the endpoints of a subset with these parts.
fn subset(
    transit: Transit,
    workloads: Vec<Workload>,
    preferences: Option<&'static [Scope]>,
    parts: &[Part<'_>],
) -> Option<Arc<EndpointSet>> {
    let part = |(name, weight, labels): &Part<'_>| SubsetPart {
        name: (*name).into(),
        labels: labels.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect(),
        weight: *weight,
    };
    let of = Subset { name: "mix".into(), parts: parts.iter().map(part).collect() };
    let alias = Alias::new(alias("echo.app", &["echo.app"]), Some(of));
    let label = Arc::clone(&alias.label);
    let rule = TrafficRule { preferences, ..TrafficRule::default() };
    let change = Change {
        names: Some(NameTable::new([], [("echo.app@mix", alias)])),
        ..change(transit, service(&[]), workloads, rule)
    };
    let snapshot = build(&Snapshot::default(), change);
    let service = snapshot.derived_services.get(&label).expect("a service");
    service.endpoints_by(80, transit).cloned()
}

fn networks() -> Vec<Workload> {
    let mut workloads = [pods("east", 2), pods("west", 4), pods("north", 3)].concat();
    workloads.extend([gateway("west", 1), gateway("west", 2), gateway("north", 3)]);
    workloads
}

#[test]
fn a_split_between_the_own_cluster_and_another_is_10_to_90_whatever_is_preferred() {
    let want = [
        ("10.0.0.1:15008", 0.05),
        ("10.0.0.2:15008", 0.05),
        ("192.0.2.1:15008", 0.45),
        ("192.0.2.2:15008", 0.45),
    ];
    let preferences: [Option<&[Scope]>; 4] =
        [None, Some(&[]), Some(&[Scope::Network]), Some(&[Scope::Region])];
    for preferences in preferences {
        let set = subset(Transit::Always, networks(), preferences, &[LOCAL, REMOTE]);
        assert_shares(&set.expect("a set"), &want);
    }
    // The same network as istiod describes it.
    let mut records = pods("east", 2);
    records.extend([record("west", 1, 4), gateway("west", 1), gateway("west", 2)]);
    let set = subset(Transit::Always, records, None, &[LOCAL, REMOTE]);
    assert_shares(&set.expect("a set"), &want);
}

#[test]
fn a_part_that_is_not_ready_leaves_its_share_to_the_other() {
    let mut workloads = networks();
    for one in workloads.iter_mut().filter(|one| !one.services.is_empty()) {
        one.healthy = *one.network != *"west";
    }
    let set = subset(Transit::Always, workloads, None, &[LOCAL, REMOTE]);
    let want = [("10.0.0.1:15008", 0.5), ("10.0.0.2:15008", 0.5)];
    assert_shares(&set.expect("a set"), &want);
}

#[test]
fn a_split_under_failover_stays_while_the_own_network_is_ready() {
    let set = subset(Transit::Failover, networks(), None, &[LOCAL, REMOTE]);
    let want = [("10.0.0.1:15008", 0.5), ("10.0.0.2:15008", 0.5)];
    assert_shares(&set.expect("a set"), &want);
    let mut workloads = networks();
    for one in workloads.iter_mut().filter(|one| *one.network == *"east") {
        one.healthy = false;
    }
    let set = subset(Transit::Failover, workloads, None, &[LOCAL, REMOTE]);
    let want = [("192.0.2.1:15008", 0.5), ("192.0.2.2:15008", 0.5)];
    assert_shares(&set.expect("a set"), &want);
}

/// Returns workloads of which two of the six pods of region `west` are here, and parts by region.
fn region_in_two_networks() -> (Vec<Workload>, [Part<'static>; 2]) {
    let mut workloads = networks();
    let mut here: Vec<_> = pods("east", 4).drain(2..).collect();
    for one in &mut here {
        one.locality = Arc::new(locality("west"));
    }
    workloads.extend(here);
    let local: Part<'_> = ("local", 10, &[(REGION, "east")]);
    let remote: Part<'_> = ("remote", 90, &[(REGION, "west")]);
    (workloads, [local, remote])
}

#[test]
fn a_part_with_endpoints_here_and_in_another_network_has_tiers_of_its_own() {
    let (workloads, parts) = region_in_two_networks();
    let network: Option<&[Scope]> = Some(&[Scope::Network]);
    for transit in [Transit::Always, Transit::Failover] {
        let set = subset(transit, workloads.clone(), network, &parts);
        let want = [
            ("10.0.0.1:15008", 0.05),
            ("10.0.0.2:15008", 0.05),
            ("10.0.0.3:15008", 0.45),
            ("10.0.0.4:15008", 0.45),
        ];
        assert_shares(&set.expect("a set"), &want);
    }
}

#[tokio::test(start_paused = true)]
async fn a_part_whose_first_tier_fails_uses_its_next_one_before_another_part() {
    let (workloads, parts) = region_in_two_networks();
    let gateways = ["192.0.2.1:15008", "192.0.2.2:15008"];
    let local = ["10.0.0.1:15008", "10.0.0.2:15008"];
    // Under failover, other networks come after all parts of the own network.
    for (transit, to_local, through) in
        [(Transit::Always, 0.05, &gateways[..]), (Transit::Failover, 0.5, &[])]
    {
        let network: Option<&[Scope]> = Some(&[Scope::Network]);
        let set = subset(transit, workloads.clone(), network, &parts).expect("a set");
        let first = set.endpoints.iter().filter(|one| {
            let is_west = *one.definition.locality.region == *"west";
            is_west && one.remote.is_none()
        });
        let first = Tried { endpoints: first.cloned().collect(), ..Tried::default() };
        assert_eq!(first.endpoints.len(), 2);
        let is_local = |_: &u32| {
            let chosen = choose(&set, &first, NO_LINK_FACTORS).expect("an endpoint");
            local.contains(&chosen.address.to_string().as_str())
        };
        fastrand::seed(17);
        let count = (0..10_000).filter(is_local).count();
        // Four standard deviations of a share of 10 % are 120.
        let want = if through.is_empty() { 10_000 } else { 1_000 };
        assert!(count.abs_diff(want) < 120, "{transit:?}: {count}");
        for one in &first.endpoints {
            one.state.eject(Instant::now());
        }
        let to_local = local.iter().map(|at| (*at, to_local));
        let want: Vec<_> = to_local.chain(through.iter().map(|at| (*at, 0.45))).collect();
        assert_shares(&set, &want);
    }
}

/// Returns the addresses of the gateways in a subset by these labels.
fn gateways(workloads: Vec<Workload>, labels: &[(&str, &str)]) -> Vec<String> {
    let set = subset(Transit::Always, workloads, None, &[("one", 1, labels)]);
    let set = set.unwrap_or_default();
    let remote = set.endpoints.iter().filter(|one| one.remote.is_some());
    remote.map(|one| one.address.to_string()).collect()
}

#[test]
fn only_the_location_of_all_instances_selects_a_network() {
    let west = ["192.0.2.1:15008", "192.0.2.2:15008"];
    let none: [&str; 0] = [];
    assert_eq!(gateways(networks(), &[(CLUSTER, "west")]), west);
    assert_eq!(gateways(networks(), &[(CLUSTER, "west"), (REGION, "west")]), west);
    assert_eq!(gateways(networks(), &[(CLUSTER, "west"), (REGION, "north")]), none);
    // The next gateway could forward a tunnel to any instance of the service.
    let mut mixed = networks();
    mixed.push(Workload { uid: "west-other-region".into(), ..pod("west", 9) });
    mixed.last_mut().expect("a pod").locality = Arc::new(locality("north"));
    assert_eq!(gateways(mixed.clone(), &[(REGION, "west")]), none);
    assert_eq!(gateways(mixed, &[(CLUSTER, "west")]), west);
    // All instances have the labels, but the next gateway does not know the subset.
    let mut versions = networks();
    for one in &mut versions {
        one.canonical_revision = "v1".into();
        one.pod_labels = [("team".into(), "a".into())].into();
    }
    for label in [("version", "v1"), ("team", "a")] {
        assert_eq!(gateways(versions.clone(), &[(CLUSTER, "west"), label]), none);
    }
}

#[test]
fn a_record_without_a_cluster_or_a_locality_has_that_of_its_gateway_or_none() {
    let mut records = vec![record("west", 1, 4), gateway("west", 1)];
    records[0].cluster = "Kubernetes".into();
    records[0].locality = Arc::default();
    assert_eq!(gateways(records.clone(), &[(CLUSTER, "west")]), ["192.0.2.1:15008"]);
    assert_eq!(gateways(records.clone(), &[(CLUSTER, "Kubernetes")]).len(), 0);
    assert_eq!(gateways(records.clone(), &[(REGION, "west")]).len(), 0);
    let mut other = gateway("west", 2);
    other.cluster = "north".into();
    records.push(other);
    assert_eq!(gateways(records, &[(CLUSTER, "west")]).len(), 0);
}
