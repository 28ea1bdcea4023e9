//! Table-driven tests of the groups of a service and their shares.

use crate::config::Distribution;
use crate::snapshot::builder::{Change, build};
use crate::snapshot::mesh::{Mesh, Protocol, Template};
use crate::snapshot::tests::samples;
use crate::snapshot::tests::{alias, echo as service, locality, region_weights};
use crate::snapshot::traffic::{Drained, Override, Position, Traffic, TrafficRule};
use crate::snapshot::{Alias, Group, NameTable, Snapshot, SubsetPart};
use crate::wire::RegionPattern;

use super::*;

/// Regions with their weights, and the expected groups.
type Weighed<'a> = (&'a [(&'a str, u32)], &'a [&'a str]);

/// Workload as `region/zone`, cluster, and whether it is ready.
type WorkloadSpec<'a> = (&'a str, &'a str, bool);

fn workload(at: usize, (place, cluster, healthy): WorkloadSpec<'_>) -> Workload {
    let last = u8::try_from(at).expect("few workloads");
    let template = Template {
        cluster: cluster.into(),
        locality: locality(place).into(),
        protocol: Protocol::Hbone,
        ..Template::default()
    };
    Workload {
        addresses: [[10, 0, 0, last].into()].into(),
        node: "a-node".into(),
        healthy,
        ..samples::workload(&format!("{at:03}"), "echo", template)
    }
}

/// Builds a snapshot for a gateway in `us-west/us-west-a` of cluster `west`.
fn built(service: Service, workloads: Vec<Workload>, change: Change) -> Snapshot {
    let position = Position {
        cluster: "west".into(),
        locality: locality("us-west/us-west-a/rack-1"),
        ..Position::default()
    };
    let change = Change {
        mesh: Some((Mesh::new([service], workloads), "net".into())),
        position: Some(position),
        ..change
    };
    build(&Snapshot::default(), change)
}

fn set(snapshot: &Snapshot) -> &Arc<EndpointSet> {
    &snapshot.services.get("echo.app").expect("a service").ports[&80]
}

fn groups(snapshot: &Snapshot) -> Vec<String> {
    groups_of(set(snapshot))
}

/// Formats the groups: tier, place, share in percent, ready of all.
fn groups_of(set: &EndpointSet) -> Vec<String> {
    let Some(groups) = set.groups() else {
        return vec![format!("plain, {} ready", set.endpoints.len())];
    };
    let reported = |group: &Group| {
        assert_eq!(set.of(group).len(), group.ready as usize);
        let place = group.place.as_ref().map(|(name, _)| format!(" {name}"));
        let place = place.unwrap_or_default();
        let share = 100.0 * group.share;
        format!("{}{place} {share:.0}% {}/{}", group.tier, group.ready, group.all)
    };
    groups.list().iter().map(reported).collect()
}

fn workloads(workloads: &[WorkloadSpec<'_>]) -> Vec<Workload> {
    let workloads = workloads.iter().enumerate();
    workloads.map(|(at, received)| workload(at, *received)).collect()
}

const EVERYWHERE: [WorkloadSpec<'_>; 6] = [
    ("us-west/us-west-a/rack-1", "west", true),
    ("us-west/us-west-a/rack-2", "west", true),
    ("us-west/us-west-b", "west", true),
    ("us-east/us-east-a", "east", true),
    ("us-east/us-west-a", "east", true),
    ("", "", true),
];

#[test]
fn each_preference_matched_before_the_first_one_missed_is_a_tier() {
    use Scope::{Cluster, Network, Node, Region, Subzone, Zone};
    let table: [(&[Scope], &[&str]); 8] = [
        (&[], &["plain, 6 ready"]),
        (&[Node], &["plain, 6 ready"]),
        (&[Network], &["same network 100% 6/6"]),
        (&[Network, Region], &["same region 100% 3/3", "same network 0% 3/3"]),
        (
            &[Network, Region, Zone],
            &["same zone 100% 2/2", "same region 0% 1/1", "same network 0% 3/3"],
        ),
        // Order as configured in the mesh: a zone of the same name in another region matches too.
        (&[Zone, Region], &["same region 100% 2/2", "same zone 0% 1/1", "elsewhere 0% 3/3"]),
        (
            &[Cluster, Node, Subzone],
            &["same subzone 100% 1/1", "same cluster 0% 2/2", "elsewhere 0% 3/3"],
        ),
        (&[Region], &["same region 100% 3/3", "elsewhere 0% 3/3"]),
    ];
    for (preferences, want) in table {
        let snapshot = built(service(preferences), workloads(&EVERYWHERE), Change::default());
        assert_eq!(groups(&snapshot), want, "{preferences:?}");
    }
}

#[test]
fn strict_drops_what_misses_a_preference_and_says_so() {
    let strict = Service { strict: true, ..service(&[Scope::Network, Scope::Region, Scope::Zone]) };
    let snapshot = built(strict.clone(), workloads(&EVERYWHERE), Change::default());
    assert_eq!(groups(&snapshot), ["same zone 100% 2/2"]);
    let left_out = [
        ExclusionReason::MissesPreference(Scope::Region),
        ExclusionReason::MissesPreference(Scope::Zone),
    ];
    assert_eq!(set(&snapshot).left_out(), left_out);
    let snapshot = built(strict, workloads(&EVERYWHERE[3..]), Change::default());
    assert_eq!(set(&snapshot).endpoints.len(), 0);
    assert_eq!(set(&snapshot).left_out(), &left_out[..1]);
}

/// Returns workloads of the gateway's zone, of its region and of another region, by (ready, all).
fn near_and_far(counts: [(usize, usize); 3]) -> Vec<Workload> {
    let places = ["us-west/us-west-a", "us-west/us-west-b", "us-east/us-east-a"];
    let all = places.into_iter().zip(counts);
    let all: Vec<_> = all
        .flat_map(|(place, (ready, all))| (0..all).map(move |at| (place, "", at < ready)))
        .collect();
    workloads(&all)
}

#[test]
fn a_tier_leaves_its_share_gradually_to_the_next() {
    let close = [Scope::Network, Scope::Region, Scope::Zone];
    for (counts, want) in [
        ([(10, 10), (10, 10), (10, 10)], [100, 0, 0]),
        ([(7, 10), (10, 10), (10, 10)], [100, 0, 0]),
        ([(6, 10), (10, 10), (10, 10)], [85, 15, 0]),
        ([(1, 10), (10, 10), (10, 10)], [14, 86, 0]),
        ([(1, 10), (3, 10), (10, 10)], [14, 42, 44]),
        ([(0, 10), (3, 10), (10, 10)], [0, 42, 58]),
        ([(0, 10), (0, 10), (1, 10)], [0, 0, 100]),
        // Together they cannot take 100 %: each gets more than its threshold allows.
        ([(2, 10), (2, 10), (2, 10)], [34, 33, 33]),
        ([(1, 10), (0, 10), (2, 10)], [34, 0, 66]),
        ([(0, 10), (0, 10), (0, 10)], [0, 0, 0]),
    ] {
        let snapshot = built(service(&close), near_and_far(counts), Change::default());
        let found = set(&snapshot).groups().expect("groups");
        let shares = found.list().iter().map(|group| (100.0 * group.share).round());
        let mut got: Vec<_> = shares.collect();
        got.resize(3, 0.0);
        assert_eq!(got, want.map(f64::from), "{counts:?}");
    }
}

#[test]
fn so_few_that_they_can_take_nothing_take_all_before_nobody_does() {
    let workloads = near_and_far([(0, 1), (1, 200), (0, 1)]);
    let snapshot = built(service(&[Scope::Zone]), workloads, Change::default());
    assert_eq!(groups(&snapshot), ["same zone 0% 0/1", "elsewhere 100% 1/201"]);
}

fn traffic(own: TrafficRule, every: TrafficRule) -> Change {
    Change { traffic: Some(Traffic::new([("echo.app".into(), own)], every)), ..Change::default() }
}

#[test]
fn weights_of_regions_share_out_what_is_ready_there() {
    let places: [WorkloadSpec<'_>; 7] = [
        ("us-west/us-west-a", "", true),
        ("us-west/us-west-b", "", true),
        ("us-west/us-west-b", "", false),
        ("us-east/us-east-a", "", true),
        ("us-east/us-east-b", "", true),
        ("eu/eu-a", "", true),
        ("", "", true),
    ];
    let table: [Weighed<'_>; 6] = [
        (&[("us-west/*", 10), ("us-east", 90)], &["all us-east 90% 2/2", "all us-west 10% 2/3"]),
        // The threshold applies to each place: half of us-west-b can take 1 / 1.4 of its weight.
        (
            &[("us-west/us-west-b", 50), ("*", 50)],
            &["all * 58% 5/5", "all us-west/us-west-b 42% 1/2"],
        ),
        (&[("us-west", 1), ("us-east", 0)], &["all us-west 100% 2/3"]),
        (&[("us-east", 0)], &["all 100% 4/5"]),
        (&[("us-east", 0), ("*", 1)], &["all * 100% 4/5"]),
        (&[("mars", 1)], &[]),
    ];
    for (weights, want) in table {
        let rule = region_weights(weights);
        let snapshot =
            built(service(&[]), workloads(&places), traffic(rule, TrafficRule::default()));
        assert_eq!(groups(&snapshot), want, "{weights:?}");
    }
}

#[test]
fn the_own_entry_counts_before_the_source_and_that_before_every() {
    let close = Some(Distribution::Close);
    let reported = |distribution: Option<Distribution>, weights: &[(&str, u32)]| TrafficRule {
        distribution,
        ..region_weights(weights)
    };
    let nothing = TrafficRule::default;
    let split: &[(&str, u32)] = &[("us-west", 1), ("us-east", 1)];
    let zones = ["same zone 100% 2/2", "same region 0% 1/1", "same network 0% 3/3"];
    let region = ["same region 100% 3/3", "elsewhere 0% 3/3"];
    let table: [(&[Scope], TrafficRule, TrafficRule, &[&str]); 8] = [
        (&[], reported(close, &[]), nothing(), &zones),
        (&[], nothing(), reported(close, &[]), &zones),
        (&[Scope::Region], nothing(), reported(close, &[]), &region),
        (&[Scope::Region], reported(close, &[]), nothing(), &zones),
        (&[Scope::Region], reported(Some(Distribution::Any), &[]), nothing(), &["plain, 6 ready"]),
        // Weights without preferences mean a single tier. The source's preferences still apply if
        // only the rule for every service has weights.
        (
            &[Scope::Region],
            reported(None, split),
            nothing(),
            &["all us-west 50% 3/3", "all us-east 50% 2/2"],
        ),
        (
            &[Scope::Region],
            nothing(),
            reported(None, split),
            &["same region us-west 100% 3/3", "elsewhere us-east 0% 2/2"],
        ),
        (
            &[Scope::Region],
            reported(None, &[("us-west", 0)]),
            reported(None, split),
            &["elsewhere 100% 3/3"],
        ),
    ];
    for (of_source, own, every, want) in table {
        let what = format!("{of_source:?} {own:?} {every:?}");
        let change = traffic(own, every);
        let snapshot = built(service(of_source), workloads(&EVERYWHERE), change);
        assert_eq!(groups(&snapshot), want, "{what}");
    }
}

/// Returns the service with an Envoy assignment. Weights are by priority and locality.
fn assigned(by_locality: bool, localities: &[(u32, &str, u32)]) -> Service {
    let localities = localities.iter();
    let localities = localities.map(|(priority, of, weight)| LocalityWeight {
        priority: *priority,
        locality: locality(of),
        weight: *weight,
    });
    let assignment = Assignment {
        overprovisioning: 140,
        by_locality,
        localities: localities.collect(),
        drops: Vec::new(),
    };
    Service { assignments: [(80, Arc::new(assignment))].into(), ..service(&[]) }
}

/// Tests against Envoy's arithmetic: `load_balancer_impl.cc` gives each priority min(100, factor ×
/// ready / all) of the remaining load, and each locality weight × that ratio.
#[test]
fn an_assignment_is_shared_out_as_envoy_does() {
    // Priority, locality, ready, all.
    type Of = (u32, &'static str, usize, usize);
    let table: [(Service, &[Of], &[&str]); 7] = [
        (assigned(false, &[]), &[(0, "a", 2, 3)], &["plain, 2 ready"]),
        (
            assigned(false, &[]),
            &[(0, "a", 1, 2), (1, "b", 2, 2)],
            &["priority 0 70% 1/2", "priority 1 30% 2/2"],
        ),
        (
            assigned(false, &[]),
            &[(0, "a", 1, 4), (3, "b", 1, 4)],
            &["priority 0 50% 1/4", "priority 3 50% 1/4"],
        ),
        (
            assigned(true, &[(0, "a", 1), (0, "b", 3)]),
            &[(0, "a", 5, 5), (0, "b", 1, 1)],
            &["priority 0 b 75% 1/1", "priority 0 a 25% 5/5"],
        ),
        (
            assigned(true, &[(0, "a", 1), (0, "b", 1)]),
            &[(0, "a", 1, 2), (0, "b", 2, 2)],
            &["priority 0 b 59% 2/2", "priority 0 a 41% 1/2"],
        ),
        // A locality without weight counts in its priority but gets no tunnels.
        (
            assigned(true, &[(0, "a", 1), (0, "b", 0), (1, "c", 1)]),
            &[(0, "a", 2, 2), (0, "b", 0, 2), (1, "c", 1, 1)],
            &["priority 0 a 70% 2/2", "priority 1 c 30% 1/1"],
        ),
        // If no locality of a priority has a weight, weights are ignored.
        (assigned(true, &[(0, "a", 0)]), &[(0, "a", 2, 2), (0, "b", 1, 2)], &["plain, 3 ready"]),
    ];
    for (service, of, want) in table {
        let workloads = of.iter().flat_map(|(priority, place, ready, all)| {
            (0..*all).map(move |at| (*priority, *place, at < *ready))
        });
        let workloads = workloads.enumerate().map(|(at, (priority, place, ready))| Workload {
            priority,
            ..workload(at, (place, "", ready))
        });
        let snapshot = built(service, workloads.collect(), Change::default());
        assert_eq!(groups(&snapshot), want, "{of:?}");
    }
}

/// As in Envoy, degraded endpoints take what healthy ones leave, and count as not ready there.
#[test]
fn degraded_endpoints_take_what_the_others_leave() {
    // Priority, locality, degraded, number.
    type Of = (u32, &'static str, bool, usize);
    let table: [(bool, &[Of], &[&str]); 5] = [
        (
            false,
            &[(0, "a", false, 4), (0, "a", true, 4)],
            &["priority 0 70% 4/8", "degraded of priority 0 30% 4/8"],
        ),
        (
            false,
            &[(0, "a", false, 4), (0, "a", true, 4), (1, "a", false, 2)],
            &["priority 0 70% 4/8", "priority 1 30% 2/2", "degraded of priority 0 0% 4/8"],
        ),
        (
            false,
            &[(0, "a", false, 1), (0, "a", true, 3), (1, "a", true, 2)],
            &[
                "priority 0 35% 1/4",
                "degraded of priority 0 65% 3/4",
                "degraded of priority 1 0% 2/2",
            ],
        ),
        (false, &[(0, "a", true, 2)], &["degraded of priority 0 100% 2/2"]),
        // The locality weights are those of the priority.
        (
            true,
            &[(0, "a", true, 2), (0, "b", true, 2)],
            &["degraded of priority 0 b 75% 2/2", "degraded of priority 0 a 25% 2/2"],
        ),
    ];
    for (by_locality, of, want) in table {
        let workloads = of.iter().flat_map(|(priority, place, degraded, all)| {
            (0..*all).map(move |_| (*priority, *place, *degraded))
        });
        let workloads = workloads.enumerate().map(|(at, (priority, place, degraded))| Workload {
            priority,
            degraded,
            ..workload(at, (place, "", true))
        });
        let snapshot = built(
            assigned(by_locality, &[(0, "a", 1), (0, "b", 3)]),
            workloads.collect(),
            Change::default(),
        );
        assert_eq!(groups(&snapshot), want, "{of:?}");
    }
}

#[test]
fn a_tier_without_weights_takes_nothing_of_the_share_of_a_subset() {
    let service = assigned(true, &[(0, "a", 1), (0, "b", 0), (1, "c", 1)]);
    let workloads = [(0, "a", "v1"), (0, "b", "v2"), (1, "c", "v2")].into_iter();
    let workloads = workloads.enumerate().map(|(at, (priority, place, version))| {
        let mut one = workload(at, (place, "", true));
        one.canonical_revision = version.into();
        Workload { priority, ..one }
    });
    let part = |name: &str| SubsetPart {
        name: name.into(),
        labels: [("version".into(), name.into())].into(),
        weight: 50,
    };
    let parts = ["v1", "v2"].map(part).into();
    let subset = Subset { name: "mix".into(), parts };
    let alias = Alias::new(alias("echo.app", &["echo.app"]), Some(subset));
    let label = Arc::clone(&alias.label);
    let names = Some(NameTable::new([], [("echo.app@mix", alias)]));
    let change = Change { names, ..Change::default() };
    let snapshot = built(service, workloads.collect(), change);
    let derived = snapshot.derived_services.get(&label).expect("a service");
    let want = ["priority 0 v1, a 50% 1/1", "priority 1 v2, c 50% 1/1"];
    assert_eq!(groups_of(&derived.ports[&80]), want);
}

#[test]
fn an_operator_evacuates_a_region_and_takes_it_back() {
    let region = |text| RegionPattern::parse(text).expect("a region");
    let close = service(&[Scope::Network, Scope::Region]);
    let first = built(close, workloads(&EVERYWHERE), Change::default());
    let before = ["same region 100% 3/3", "same network 0% 3/3"];
    assert_eq!(groups(&first), before);
    let order = |snapshot: &Snapshot, order| {
        let overrides = Some(order);
        build(snapshot, Change { overrides, ..Change::default() })
    };
    let second = order(&first, Override::Drain(region("us-west").into(), Drained::now(false)));
    assert_eq!(groups(&second), ["same network 100% 3/3"]);
    assert_eq!(set(&second).left_out(), [ExclusionReason::Evacuated(region("us-west").into())]);
    // Neither a change of the mesh nor one of the configuration ends the evacuation.
    let mesh = Mesh::new([service(&[])], workloads(&EVERYWHERE[..4]));
    let change = Change {
        mesh: Some((mesh, "net".into())),
        ..traffic(TrafficRule::default(), TrafficRule::default())
    };
    let third = build(&second, change);
    assert_eq!(groups(&third), ["all 100% 1/1"]);
    let fourth = order(&third, Override::Restore(region("us-west/*").into()));
    assert_eq!(groups(&fourth), ["plain, 4 ready"]);
    let generations = [&first, &second, &third, &fourth].map(|one| one.generation);
    assert_eq!(generations, [first.generation; 4], "open tunnels go on");
    let state = |snapshot: &Snapshot| Arc::clone(&set(snapshot).candidates[0].state);
    assert!(Arc::ptr_eq(&state(&first), &state(&fourth)));
}

#[test]
fn only_services_that_a_change_of_traffic_touches_are_built_anew() {
    let other = Service { hostname: "other.app".into(), ..service(&[]) };
    let first = built(service(&[]), workloads(&EVERYWHERE), Change::default());
    let mut mesh = first.mesh.clone();
    mesh.services.insert("app/other.app".into(), other.into());
    let change = Change { mesh: Some((mesh, "net".into())), ..Change::default() };
    let first = build(&first, change);
    let rule = TrafficRule { latency: Some(true), ..TrafficRule::default() };
    let second = build(&first, traffic(rule, TrafficRule::default()));
    let is_same = |host: &str| {
        let service = |snapshot: &Snapshot| Arc::clone(snapshot.services.get(host).expect("one"));
        Arc::ptr_eq(&service(&first), &service(&second))
    };
    assert_eq!((is_same("echo.app"), is_same("other.app")), (false, true));
    assert!(set(&second).groups().is_some_and(|groups| groups.by_latency));
}
