//! Tests of hostnames and VIPs that several services claim.

use super::*;
use crate::config::ExposedService;
use crate::snapshot::builder::{Change, build};
use crate::snapshot::mesh::Mesh;
use crate::snapshot::tests::entry;
use crate::snapshot::{ExposureTable, NameTable};

const VIP: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(240, 0, 0, 1));

/// Parses a service `NAMESPACE/HOSTNAME`, canonical if an asterisk follows.
fn service(text: &str) -> mesh::Service {
    let (namespace, host) = text.split_once('/').expect("a namespace");
    let host = host.trim_end_matches('*');
    mesh::Service {
        name: host.into(),
        namespace: namespace.into(),
        hostname: host.into(),
        vips: vec![(String::new(), VIP)],
        canonical: text.ends_with('*'),
        ..mesh::Service::default()
    }
}

fn next(old: &Snapshot, services: &[&str]) -> Snapshot {
    let services = services.iter().map(|text| service(text));
    let change =
        Change { mesh: Some((Mesh::new(services, []), "east".into())), ..Change::default() };
    build(old, change)
}

/// Returns a snapshot without services, with entries `HOST` or `NAMESPACE/HOST`.
fn configured(entries: &[&str]) -> Snapshot {
    let change = Change {
        exposure: Some(table(entries)),
        names: Some(NameTable::new(["svc.cluster.local", "mesh.internal"], [])),
        ..Change::default()
    };
    build(&Snapshot::default(), change)
}

fn table(entries: &[&str]) -> ExposureTable {
    let mut table = ExposureTable::new(false);
    for text in entries {
        let (namespace, host) = match text.split_once('/') {
            Some((namespace, host)) => (Some(namespace.into()), host),
            None => (None, *text),
        };
        table.add(ExposedService { namespace, ..entry(host, Vec::new()) });
    }
    table
}

fn namespace<'a>(snapshot: &'a Snapshot, host: &str) -> Option<&'a str> {
    let service = snapshot.services.get(host);
    service.map(|service| &*service.namespace)
}

#[test]
fn the_configuration_then_the_canonical_then_the_owner_then_the_first_has_a_hostname() {
    const OWN: &str = "echo.app.svc.cluster.local";
    const FREE: &str = "api.example";
    let name = |namespace: &str, host: &str| format!("{namespace}/{host}");
    // Each row: entries, hostname, and a sequence of claiming namespaces with the one that answers.
    for (entries, host, steps) in [
        (&[][..], FREE, &[(&["b"][..], Some("b")), (&["a", "b"], Some("b"))][..]),
        (&[], FREE, &[(&["a", "b"], None), (&["b"], Some("b"))]),
        (&[], FREE, &[(&["b"], Some("b")), (&["b", "a*"], Some("a"))]),
        (&[], FREE, &[(&["a*", "b*"], None)]),
        (&[], OWN, &[(&["a", "app", "z"], Some("app"))]),
        (&[], OWN, &[(&["a"], Some("a")), (&["a", "app"], Some("app"))]),
        (&[], OWN, &[(&["a*", "app", "z"], Some("a"))]),
        (&["z/echo.app.svc.cluster.local"], OWN, &[(&["a", "app*"], None)]),
        (&["z/echo.app.svc.cluster.local"], OWN, &[(&["app*", "z"], Some("z"))]),
        (&["z/echo.app.mesh.internal"], OWN, &[(&["app*", "z"], Some("z"))]),
    ] {
        let mut snapshot = configured(entries);
        for (namespaces, want) in steps {
            let all = namespaces.iter().map(|space| match space.strip_suffix('*') {
                Some(space) => name(space, host) + "*",
                None => name(space, host),
            });
            let all: Vec<_> = all.collect();
            let all: Vec<_> = all.iter().map(String::as_str).collect();
            snapshot = next(&snapshot, &all);
            assert_eq!(namespace(&snapshot, host), *want, "{entries:?} {all:?}");
        }
    }
}

#[test]
fn nobody_but_its_owner_takes_a_name_of_a_family() {
    let (own, other) = ("app/echo.app.svc.cluster.local", "a/echo.app.mesh.internal");
    let mut snapshot = configured(&[]);
    for (services, want) in [
        (&[other][..], Some("a")),
        (&[other, own], None),
        (&[other], Some("a")),
        (&[other, own, "app/echo.app.mesh.internal"], Some("app")),
    ] {
        snapshot = next(&snapshot, services);
        assert_eq!(namespace(&snapshot, "echo.app.mesh.internal"), want);
    }
    snapshot = next(&snapshot, &[other, own]);
    let reported = snapshot.collision("echo.app.mesh.internal");
    assert_eq!(
        reported.expect("a collision").to_string(),
        "echo.app.mesh.internal is claimed by a/echo.app.mesh.internal, and none answers: \
         namespace app owns the name"
    );
    let called = snapshot.service_by_name("echo.app.mesh.internal");
    assert_eq!(called.map(|of| &*of.namespace), Some("app"));
}

#[test]
fn a_vip_is_of_the_service_that_comes_first_by_the_same_rules() {
    let by_vip = |snapshot: &Snapshot| {
        let service = snapshot.service_by_vip(VIP);
        service.map(|service| service.hostname.to_string())
    };
    let (own, other) = ("z/echo.z.svc.cluster.local", "a/a.a.svc.cluster.local");
    let host = |name: &str| name.split_once('/').map(|(_, host)| host.to_owned());
    let both = next(&configured(&[]), &[own, other]);
    assert_eq!(by_vip(&both), None, "nothing decides");
    let reported = both.vip_collision(VIP).expect("a collision").to_string();
    assert!(reported.ends_with("add an entry to `exposure.services` for the intended service"));
    let first = next(&configured(&[]), &[own]);
    let second = next(&first, &[own, other]);
    assert_eq!(by_vip(&second), host(own));
    let canonical = next(&second, &[own, "a/a.a.svc.cluster.local*"]);
    assert_eq!(by_vip(&canonical), host(other));
    let free = next(&configured(&[]), &["z/example.com"]);
    let owned = next(&free, &["z/example.com", other]);
    assert_eq!(by_vip(&owned), host("z/example.com"), "anybody has a namespace");
    // A change of the configuration is enough.
    let change =
        Change { exposure: Some(table(&["echo.z.svc.cluster.local"])), ..Change::default() };
    let exposed = build(&canonical, change);
    assert_eq!(by_vip(&exposed), host(own));
    assert_eq!(
        exposed.vip_collision(VIP).expect("a collision").to_string(),
        "240.0.0.1 is claimed by a/a.a.svc.cluster.local, and z/echo.z.svc.cluster.local answers: \
         it has an entry in `exposure.services`"
    );
    // Another service with the same hostname is a new claim.
    let moved = next(&second, &["y/echo.z.svc.cluster.local", other]);
    assert_eq!(by_vip(&moved), host(other));
}

#[test]
fn an_entry_that_comes_before_a_rival_counts_for_a_vip_that_nobody_else_claimed() {
    let (own, rival) = ("z/echo.z.svc.cluster.local", "a/a.a.svc.cluster.local*");
    let entry = |snapshot: &Snapshot, entries: &[&str]| {
        let change = Change { exposure: Some(table(entries)), ..Change::default() };
        build(snapshot, change)
    };
    let first = next(&configured(&[]), &[own]);
    let exposed = entry(&first, &["echo.z.svc.cluster.local"]);
    let both = next(&exposed, &[own, rival]);
    assert_eq!(both.service_by_vip(VIP).map(|of| &*of.namespace), Some("z"));
    // The reverse: the entry is removed while the claim is the only one.
    let both = next(&entry(&exposed, &[]), &[own, rival]);
    assert_eq!(both.service_by_vip(VIP).map(|of| &*of.namespace), Some("a"));
}

#[test]
fn claims_to_a_vip_keep_their_age_when_the_first_tls_listener_comes_and_goes() {
    let own = "z/echo.z.svc.cluster.local";
    let (other, third) = ("a/a.a.svc.cluster.local", "b/b.b.svc.cluster.local");
    let first = next(&configured(&[]), &[own]);
    let mut snapshot = next(&first, &[own, other]);
    for has_passthrough in [true, false] {
        let services = [own, other].map(service);
        let change = Change {
            mesh: Some((Mesh::new(services, []), "east".into())),
            has_passthrough: Some(has_passthrough),
            ..Change::default()
        };
        snapshot = build(&snapshot, change);
        let namespace = snapshot.service_by_vip(VIP).map(|of| of.namespace.to_string());
        assert_eq!(namespace.as_deref(), Some("z"), "{has_passthrough}");
    }
    // A single claim is older than one that is added later.
    let rebuilt = Change { has_passthrough: Some(true), ..Change::default() };
    let alone = build(&first, rebuilt);
    let joined = next(&alone, &[own, third]);
    assert_eq!(joined.service_by_vip(VIP).map(|of| &*of.namespace), Some("z"));
    // Another service with the same hostname is a new claim.
    let change = Change {
        mesh: Some((
            Mesh::new(["y/echo.z.svc.cluster.local", other].map(service), []),
            "east".into(),
        )),
        has_passthrough: Some(true),
        ..Change::default()
    };
    let moved = build(&next(&first, &[own, other]), change);
    assert_eq!(moved.service_by_vip(VIP).map(|of| &*of.namespace), Some("a"));
}

#[test]
fn an_entry_that_comes_gives_a_hostname_to_its_namespace_and_takes_it_from_others() {
    let before = next(&configured(&[]), &["app/echo.app.svc.cluster.local", "z/api.example"]);
    let change = |entries: &[&str]| {
        let change = Change { exposure: Some(table(entries)), ..Change::default() };
        build(&before, change)
    };
    let after = change(&["y/api.example"]);
    assert_eq!(namespace(&after, "api.example"), None);
    let reported = after.collision("api.example").expect("a collision");
    assert!(!reported.is_intended(), "none answers: {reported}");
    assert!(!after.may_answer("api.example", "z") && after.may_answer("api.example", "y"));
    assert_eq!(after.collisions().count(), 1);
    let after = change(&["z/api.example"]);
    assert_eq!(namespace(&after, "api.example"), Some("z"));
    let both = next(&after, &["y/api.example", "z/api.example"]);
    let reported = both.collision("api.example").expect("a collision");
    assert!(reported.is_intended(), "{reported}");
    assert_eq!(after.collisions().count(), 1, "the VIP");
}
