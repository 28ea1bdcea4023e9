//! Explanation of tunnels to services with instances in another network.

use std::sync::Arc;

use super::*;
use crate::config::ExposedService;
use crate::datapath::balance;
use crate::snapshot::builder::{Change, build};
use crate::snapshot::mesh::{Locality, Mesh, Protocol, Service, Template, Workload};
use crate::snapshot::tests::entry;
use crate::snapshot::traffic::Override;
use crate::snapshot::{Audience, Endpoint, ExposureTable, RemoteGateway, TrustSet};
use crate::status::ReducedLink;
use crate::wire::{RegionPattern, Transit};

const CLIENT: &str = "spiffe://west.local/ns/shop/sa/checkout";
const GATEWAY: &str = "spiffe://west.local/ns/edge/sa/gateway";

/// Returns a workload of network `west`.
fn workload(uid: &str, last: u8) -> Workload {
    Workload {
        uid: uid.into(),
        addresses: [[192, 0, 2, last].into()].into(),
        healthy: true,
        capacity: 1,
        template: Template {
            network: "west".into(),
            cluster: "north".into(),
            protocol: Protocol::Hbone,
            locality: Arc::new(Locality { region: "us-west-2".into(), ..Locality::default() }),
            ..Template::default()
        }
        .into(),
        ..Workload::default()
    }
}

/// Explains a tunnel to a service whose two instances are in network `west`.
fn explained(transit: Transit, has_gateway: bool) -> Answer {
    explained_with(transit, has_gateway, Question::default())
}

/// As [`explained`], with more of the question.
fn explained_with(transit: Transit, has_gateway: bool, question: Question) -> Answer {
    explained_in(&snapshot(transit, has_gateway), &[], question)
}

fn snapshot(transit: Transit, has_gateway: bool) -> Snapshot {
    let service = Service {
        namespace: "app".into(),
        hostname: "echo.app".into(),
        ports: [(80, 8080)].into(),
        ..Service::default()
    };
    let instances = [1, 2].map(|at| Workload {
        services: [("app/echo.app".into(), [(80, 8080)].into())].into(),
        ..workload(&format!("west-{at}"), at)
    });
    let gateway = has_gateway.then(|| workload("NetworkGateway/west/192.0.2.9/15008", 9));
    let mut exposure = ExposureTable::new(false);
    let to = vec![Audience { anyone: true, ..Audience::default() }];
    exposure.add(ExposedService { transit: Some(transit), ..entry("echo.app", to) });
    let workloads = instances.into_iter().chain(gateway);
    let change = Change {
        mesh: Some((Mesh::new([service], workloads), "east".into())),
        trust: Some(TrustSet::new([("west.local", "west")]).with_gateways([GATEWAY])),
        exposure: Some(exposure),
        ..Change::default()
    };
    build(&Snapshot::default(), change)
}

/// Explains a tunnel by this snapshot, under exceeded budgets of links.
fn explained_in(snapshot: &Snapshot, links: &[ReducedLink], question: Question) -> Answer {
    let listeners = [("cross-network".to_owned(), ListenerRules::default())];
    let world = ExplainState {
        snapshot,
        places: &ConfigPositions::default(),
        deny: &DenyList::new(Vec::new(), Vec::new()),
        listeners: &listeners,
        bindings: &[],
        links,
        has_room: true,
        now: Instant::now(),
    };
    let question = Question {
        from: Some(question.from.unwrap_or_else(|| CLIENT.to_owned())),
        to: Some("echo.app:80".to_owned()),
        ..question
    };
    run(&world, &question).expect("a good question")
}

#[test]
fn a_tunnel_that_may_not_leave_is_refused_and_the_answer_says_why() {
    for (transit, has_gateway, why) in [
        (Transit::Off, true, "in network west, and transit is off"),
        (Transit::Failover, false, "in network west, which has no gateway that can be used"),
    ] {
        let answer = explained(transit, has_gateway);
        assert_eq!(answer.outcome.reason.as_deref(), Some("no_endpoint"));
        let transit_row = answer.transit.expect("a row");
        assert!(transit_row.starts_with(&transit.to_string()), "{transit_row}");
        let unused: Vec<_> = answer.unused.iter().map(|row| &*row.why).collect();
        assert_eq!(unused, [why, why]);
    }
}

#[test]
fn an_instance_of_an_evacuated_region_names_the_evacuation() {
    let region = RegionPattern::parse("us-west-2").expect("a region");
    let change = Change { overrides: Some(Override::Evacuate(region)), ..Change::default() };
    let evacuated = build(&snapshot(Transit::Failover, true), change);
    let answer = explained_in(&evacuated, &[], Question::default());
    let unused: Vec<_> = answer.unused.iter().map(|row| &*row.why).collect();
    let why = "in network west: region us-west-2 is evacuated (`strait drain region`)";
    assert_eq!(unused, [why, why]);
}

#[test]
fn gateways_are_endpoints_with_the_network_behind_them() {
    let answer = explained(Transit::Failover, true);
    assert!(answer.outcome.opened);
    let [row] = &answer.endpoints[..] else {
        panic!("{:?}", answer.endpoints);
    };
    assert_eq!((&*row.address, row.weight), ("192.0.2.9:15008", 2));
    assert_eq!(row.network, Some(Arc::from("west")));
    let [group] = &answer.groups[..] else {
        panic!("{:?}", answer.groups);
    };
    assert_eq!((&*group.tier, group.ready), ("other network", 2));
    let unused: Vec<_> = answer.unused.iter().map(|row| &*row.why).collect();
    assert_eq!(unused, ["in network west, reached through its gateways"; 2]);
}

/// Returns the reason for which a real tunnel is rejected before the dial; none if it has an
/// endpoint.
fn rejection(of: &Generated) -> Option<Reason> {
    let (peer, target) = (of.peer(), of.target());
    let own = || Some(OWN_HASH);
    let looped = remote::check_loop(own, target.forwarded());
    let route = looped.and_then(|()| route::resolve(&of.snapshot, &peer, target));
    let permit =
        route.map_err(Into::into).and_then(|route| policy::run(&of.snapshot, &peer, route));
    match permit {
        Err(Rejection { reason, .. }) => Some(reason),
        Ok(permit) => match balance::pick(permit, &Tried::default(), &of.link_factors()) {
            Err(permit) => Some(permit.route().reason_without_endpoint()),
            // The generated gateways fail in no other way.
            Ok(pick) => {
                let endpoints = &pick.route().endpoints().endpoints;
                let remote = |one: &Arc<Endpoint>| one.remote.clone();
                let is_unknown = |of: Arc<RemoteGateway>| !of.is_verifiable();
                let mut remote = endpoints.iter().map(remote);
                let is_untrusted = remote.all(|of| of.is_some_and(is_unknown));
                is_untrusted.then_some(Reason::GatewayUntrusted)
            }
        },
    }
}

/// Listeners, entries and peers that are gateways limit transit; regions are drained.
#[test]
fn in_300_meshes_with_remote_tiers_shares_and_rejections_are_those_of_real_tunnels() {
    let (mut compared, mut rejected, mut drained, mut looped) = (0, 0, 0, 0);
    let (mut reduced, mut subsets, mut loaded) = (0, 0, 0);
    for seed in 100_000.. {
        let of = Generated::new(seed);
        let answer = of.explained();
        let reason = rejection(&of).map(|reason| reason.label().to_owned());
        looped += usize::from(reason.as_deref() == Some("gateway_loop"));
        let is_predicted = answer.outcome.all().any(|one| one.reason == reason);
        let outcome = &answer.outcome;
        assert!(is_predicted, "seed {seed}: {reason:?}, not {outcome:?}");
        let Some(transit) = &answer.transit else {
            continue;
        };
        rejected += usize::from(transit.starts_with("off") && reason.is_some());
        if reaches_other_network(&answer) {
            let p = fit(seed, Fault::Nothing).expect("an endpoint");
            assert!(p > P_MIN, "seed {seed}: p is {p}");
            drained += usize::from(!of.snapshot.balancing.evacuated.is_empty());
            reduced += usize::from(answer.notes.iter().any(|note| note.contains("budget")));
            let to = of.question.to.as_deref();
            subsets += usize::from(to == Some("subset.example:80"));
            loaded += usize::from(is_loaded(&answer));
            compared += 1;
        }
        if compared == 300 {
            break;
        }
    }
    assert!(rejected > 30, "{rejected} are rejected because transit is off");
    assert!(drained > 10, "{drained} have a drained region");
    assert!(looped > 30, "{looped} end as a gateway loop");
    assert!(reduced > 30, "{reduced} have a link with an exceeded budget");
    assert!(subsets > 20, "{subsets} are for a subset");
    assert!(loaded > 100, "{loaded} have a gateway with a load");
}

#[test]
fn an_exceeded_budget_of_the_peers_link_is_a_factor_and_a_note() {
    let link = |from: &str| ReducedLink {
        from: from.into(),
        is_own: false,
        to: "north".into(),
        weight_percent: 25,
    };
    let question = Question::default();
    for (from, factor, notes) in [("west", 0.25, 1), ("east", 1.0, 0)] {
        let links = [link(from)];
        let answer = explained_in(&snapshot(Transit::Always, true), &links, question.clone());
        assert!((answer.endpoints[0].factor - factor).abs() < 1e-9, "{from}");
        let of_budget = answer.notes.iter().filter(|note| note.contains("budget"));
        let of_budget: Vec<_> = of_budget.collect();
        assert_eq!(of_budget.len(), notes, "{of_budget:?}");
        let want = "the budget of the link from west to north is exceeded: gateways of north have \
                    25% of their weight";
        assert!(of_budget.iter().all(|note| **note == want), "{of_budget:?}");
    }
}

#[test]
fn a_tunnel_that_comes_back_or_has_passed_too_many_gateways_is_predicted_to_loop() {
    for (via, is_opened) in [
        ("other", true),
        ("other,other", true),
        ("own", false),
        ("other,own", false),
        ("other,other,other", false),
        ("other,other,other,other", false),
    ] {
        let question = Question {
            from: Some(GATEWAY.to_owned()),
            via: Some(via.to_owned()),
            ..Question::default()
        };
        let answer = explained_with(Transit::Always, true, question);
        let description = answer.lookups.first().map_or("", |lookup| &*lookup.rule.description);
        let why = ["this gateway, so", "more than 3 gateways"].map(|why| description.contains(why));
        let has_four = via.split(',').count() > 3;
        assert_eq!(why, [via.contains("own"), has_four], "{via}: {description}");
        let outcome = answer.outcome;
        let label = (!is_opened).then_some("gateway_loop");
        assert_eq!(outcome.reason.as_deref(), label, "{via}: {outcome:?}");
        assert_eq!(outcome.or, [], "{via}");
    }
}

#[test]
fn the_evaluation_of_a_first_peer_is_explained() {
    for (from, source, is_opened, note) in [
        (GATEWAY, Some(CLIENT), true, "rules are evaluated for the first peer"),
        (GATEWAY, None, true, "only its own identity is evaluated"),
        (CLIENT, Some(GATEWAY), true, "x-strait-source is ignored"),
        (
            GATEWAY,
            Some("spiffe://foreign.local/ns/a/sa/b"),
            false,
            "rules are evaluated for the first peer",
        ),
        (GATEWAY, Some("nobody"), false, "rules are evaluated for the first peer"),
    ] {
        let question = Question {
            from: Some(from.to_owned()),
            source: source.map(str::to_owned),
            ..Question::default()
        };
        let answer = explained_with(Transit::Always, true, question);
        assert_eq!(answer.outcome.opened, is_opened, "{from} {source:?}");
        let notes = answer.notes.join("\n");
        assert!(notes.contains(note), "{notes}");
        let rule = format!("{:?}", answer.lookups[0].rule);
        let is_first = rule.contains("first peer") || rule.contains("x-strait-source");
        assert_eq!(is_first, !is_opened, "{rule}");
    }
}
