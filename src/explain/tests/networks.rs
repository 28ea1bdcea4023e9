//! Explanation of tunnels to services with instances in another network.

use std::sync::Arc;

use super::*;
use crate::snapshot::builder::{Change, build};
use crate::snapshot::mesh::{Mesh, Protocol, Service, Template, Workload};
use crate::snapshot::{Audience, Exposure, ExposureTable, TrustSet};
use crate::wire::Transit;

/// Returns a workload of network `west`.
fn workload(uid: &str, last: u8) -> Workload {
    Workload {
        uid: uid.into(),
        addresses: [[192, 0, 2, last].into()].into(),
        healthy: true,
        capacity: 1,
        template: Template {
            network: "west".into(),
            protocol: Protocol::Hbone,
            ..Template::default()
        }
        .into(),
        ..Workload::default()
    }
}

/// Explains a tunnel to a service whose two instances are in network `west`.
fn explained(transit: Transit, has_gateway: bool) -> Answer {
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
    let entry = Exposure {
        audiences: vec![Audience {
            anyone: true,
            ..Audience::default()
        }],
        transit,
        ..Exposure::default()
    };
    exposure.add_entry("echo.app", &entry, []);
    let workloads = instances.into_iter().chain(gateway);
    let change = Change {
        mesh: Some((Mesh::new([service], workloads), "east".into())),
        trust: Some(TrustSet::new([("west.local", "west")])),
        exposure: Some(exposure),
        ..Change::default()
    };
    let listeners = [("cross-network".to_owned(), ListenerRules::default())];
    let world = ExplainState {
        snapshot: &build(&Snapshot::default(), change),
        places: &ConfigPositions::default(),
        deny: &DenyList::new(Vec::new(), Vec::new()),
        listeners: &listeners,
        has_room: true,
        now: Instant::now(),
    };
    let question = Question {
        from: Some("spiffe://west.local/ns/shop/sa/checkout".to_owned()),
        to: Some("echo.app:80".to_owned()),
        ..Question::default()
    };
    run(&world, &question).expect("a good question")
}

#[test]
fn a_tunnel_that_may_not_leave_is_refused_and_the_answer_says_why() {
    for (transit, has_gateway, why) in [
        (Transit::Off, true, "in network west, and transit is off"),
        (
            Transit::Failover,
            false,
            "in network west, which has no gateway that can be used",
        ),
    ] {
        let answer = explained(transit, has_gateway);
        assert_eq!(answer.outcome.reason.as_deref(), Some("no_endpoint"));
        let transit_row = answer.transit.expect("a row");
        assert!(
            transit_row.starts_with(&transit.to_string()),
            "{transit_row}"
        );
        let unused: Vec<_> = answer.unused.iter().map(|row| &*row.why).collect();
        assert_eq!(unused, [why, why]);
    }
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
