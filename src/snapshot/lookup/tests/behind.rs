//! Tests of the services behind aliases and given names, and of their rules.

use std::sync::Arc;

use super::*;
use crate::snapshot::builder::{Change, build};
use crate::snapshot::mesh::{self, Mesh};
use crate::snapshot::{ExposureTable, Snapshot};

const EAST_80: &str = "foo.useast2.svc.cluster.local:80";

#[test]
fn a_service_that_goes_from_behind_an_alias_leaves_its_tunnels_under_its_rules() {
    let names = names(&[("foo.global:80", &[WEST2, EAST2], None, "")]);
    let table = |to| {
        let mut exposure = ExposureTable::new(false);
        exposure.add(exposed("foo.uswest2.global", to, false));
        exposure.add(exposed(EAST2, "west", false));
        exposure
    };
    let mut mesh = payments();
    let west = Arc::clone(mesh.workloads.get("uid-1").expect("a workload"));
    let east = Arc::clone(mesh.workloads.get("uid-2").expect("a workload"));
    mesh.services.remove("uswest2/foo.uswest2.svc.cluster.local");
    let old = build_snapshot(mesh, names, table("west"));
    let change = Change { exposure: Some(table("north")), ..Change::default() };
    let next = build(&old, change);
    let (caller, requested) = (caller("west.local"), requested("foo.global:80"));
    let judged = |snapshot: &Snapshot, workload: &Workload| {
        let found = snapshot.find(caller, &requested).expect("the alias");
        snapshot.evaluate_removed_target(caller, found.requested(&requested), workload)
    };
    assert_eq!(judged(&old, &west), Ok(()));
    assert_eq!(judged(&next, &west), Err(Reason::NotForPeer));
    assert_eq!(judged(&next, &east), Ok(()));
}

#[test]
fn an_alias_keeps_the_priorities_of_what_is_behind_it() {
    let mut mesh = payments();
    let assignment = Arc::new(mesh::Assignment {
        overprovisioning: 140,
        by_locality: true,
        localities: Vec::new(),
        drops: Vec::new(),
    });
    for host in [WEST2, EAST2] {
        let mut assigned = service(host, &[80]);
        assigned.assignments.insert(80, Arc::clone(&assignment));
        let name = format!("{}/{host}", assigned.namespace);
        mesh.services.insert(name.as_str().into(), Arc::new(assigned));
    }
    let mut last = Workload::clone(mesh.workloads.get("uid-2").expect("a workload"));
    last.priority = 1;
    mesh.workloads.insert("uid-2".into(), Arc::new(last));
    let names = names(&[
        ("foo.global:8080", &["foo.uswest2.global:80", EAST_80], None, ""),
        ("foo-east.global:80", &[WEST2, EAST2], None, "us-east-2"),
    ]);
    let snapshot = build_snapshot(mesh, names, ExposureTable::new(true));
    let shares = |text| -> Vec<_> {
        let found = snapshot.find(caller("west.local"), &requested(text));
        let set = snapshot.endpoints(&found.expect("the alias"), false);
        let groups = set.groups().expect("several groups").list();
        groups.iter().map(|group| (group.ready, group.share)).collect()
    };
    assert_eq!(shares("foo.global:8080"), [(2, 1.0), (1, 0.0)]);
    // In that region, no endpoint has a better priority.
    assert_eq!(shares("foo-east.global:80"), [(1, 1.0)]);
}

#[test]
fn a_name_that_an_entry_gives_is_routed_by_what_that_entry_says() {
    let host = "echo.app.svc.cluster.local";
    let route_by = |entry: &str, own: bool| {
        let mut exposure = ExposureTable::new(false);
        let strict = Some(RouteBy::Strict);
        let entry = ExposedService { route_by: strict, ..exposed(entry, "west", false) };
        exposure.add(named(entry, &["given.name"]));
        if own {
            exposure.add(exposed(host, "west", false));
        }
        let mesh = Mesh::new([service(host, &[80])], []);
        let snapshot = build_snapshot(mesh, names(&[]), exposure);
        ["given.name:80", "echo.app.global:80"].map(|text| {
            let requested = requested(text);
            let found = snapshot.find(caller("west.local"), &requested).expect("it");
            snapshot.route_by(found.requested(&requested))
        })
    };
    let strict = Some(RouteBy::Strict);
    assert_eq!(route_by(host, false), [strict; 2]);
    assert_eq!(route_by("echo.app.mesh.internal", false), [strict; 2]);
    // The service's own entry applies to all its names except the given one.
    assert_eq!(route_by("echo.app.mesh.internal", true), [strict, None]);
}
