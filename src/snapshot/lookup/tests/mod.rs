//! Table-driven tests of lookup and exposure.

mod behind;
mod incremental;
mod rules;

use std::collections::BTreeMap;

use super::*;
use crate::config::{self, ExposedService};
use crate::snapshot::builder::{Change, build};
use crate::snapshot::mesh::{self, GatewayAddress, Locality, Mesh, Place, Protocol, Waypoint};
use crate::snapshot::tests::{alias, entry, hosts};
use crate::snapshot::{Audience, ExportSet, ExposureTable, NameTable, TrustSet};

const SUFFIXES: [&str; 3] = ["svc.cluster.local", "mesh.internal", "global"];

fn caller(domain: &str) -> Caller<'_> {
    Caller {
        trust_domain: domain,
        namespace: "shop",
        service_account: "checkout",
        ..Caller::UNKNOWN
    }
}

fn requested(text: &str) -> Authority {
    Authority::parse(text).expect("an authority")
}

fn service(hostname: &str, ports: &[u16]) -> mesh::Service {
    let namespace = hostname.split('.').nth(1).unwrap_or("app");
    mesh::Service {
        name: hostname.into(),
        namespace: namespace.into(),
        hostname: hostname.into(),
        ports: ports.iter().map(|port| (*port, 0)).collect(),
        ..mesh::Service::default()
    }
}

/// Returns a workload with this last byte of its address. It serves each service at the given
/// (hostname, service port, target port).
fn workload(last: u8, region: &str, services: &[(&str, u16, u16)]) -> Workload {
    let mut ports: BTreeMap<String, Vec<(u16, u16)>> = BTreeMap::new();
    for (hostname, port, target) in services {
        let namespace = hostname.split('.').nth(1).unwrap_or("app");
        let name = format!("{namespace}/{hostname}");
        ports.entry(name).or_default().push((*port, *target));
    }
    let ports = ports.into_iter();
    let ports = ports.map(|(name, ports)| (name.as_str().into(), ports.into_iter().collect()));
    Workload {
        uid: format!("uid-{last}").into(),
        addresses: [[10, 0, 0, last].into()].into(),
        healthy: true,
        capacity: 1,
        services: ports.collect(),
        template: mesh::Template {
            protocol: Protocol::Hbone,
            locality: Arc::new(Locality { region: region.into(), ..Locality::default() }),
            ..mesh::Template::default()
        }
        .into(),
        ..Workload::default()
    }
}

/// Alias as configured: name, targets, consumers and region.
type AliasSpec<'a> = (&'a str, &'a [&'a str], Option<&'a [&'a str]>, &'a str);

fn names(aliases: &[AliasSpec<'_>]) -> NameTable {
    let aliases = aliases.iter().map(|(name, to, consumers, region)| {
        let entry = config::Alias {
            consumers: consumers.map(|of| of.iter().map(|&one| one.into()).collect()),
            region: (!region.is_empty()).then(|| (*region).into()),
            ..alias(name, to)
        };
        (name.split(':').next().unwrap(), Alias::new(entry, None))
    });
    NameTable::new(SUFFIXES, aliases)
}

fn exposed(service: &str, to: &str, workloads: bool) -> ExposedService {
    let audience = Audience {
        anyone: to == "anyone",
        cluster: (to != "anyone").then(|| to.into()),
        ..Audience::default()
    };
    ExposedService { workloads, ..entry(service, vec![audience]) }
}

fn named(entry: ExposedService, names: &[&str]) -> ExposedService {
    ExposedService { names: hosts(names), ..entry }
}

fn trust() -> TrustSet {
    TrustSet::new([("west.local", "west"), ("north.local", "north")])
}

fn build_snapshot(mesh: Mesh, names: NameTable, exposure: ExposureTable) -> Snapshot {
    let change = Change {
        mesh: Some((mesh, "east".into())),
        names: Some(names),
        exposure: Some(exposure),
        trust: Some(trust()),
        ..Change::default()
    };
    build(&Snapshot::default(), change)
}

/// Returns, for callers of west, of north and without identity, `hostname:port` and whether the
/// caller may reach it.
fn found(snapshot: &Snapshot, text: &str) -> [Option<(String, bool)>; 3] {
    let callers = [caller("west.local"), caller("north.local"), Caller::UNKNOWN];
    callers.map(|caller| {
        let requested = requested(text);
        let found = snapshot.find(caller, &requested)?;
        let host = &*found.service.hostname;
        let verdict = snapshot.evaluate_exposure(caller, found.requested(&requested));
        let is_allowed = verdict == Ok(());
        Some((format!("{host}:{}", found.port), is_allowed))
    })
}

#[test]
fn names_are_looked_up_in_their_order() {
    let mut echo = service("echo.app.svc.cluster.local", &[80]);
    echo.vips = vec![("east".into(), [240, 0, 0, 1].into()), ("west".into(), [10, 0, 0, 3].into())];
    let services = [
        echo,
        service("other.app.svc.cluster.local", &[80, 81]),
        service("both.app.svc.cluster.local", &[80]),
        service("both.app.mesh.internal", &[80]),
        service("taken.global", &[80]),
        service("for.some", &[80, 81]),
    ];
    let echo = "echo.app.svc.cluster.local";
    let names = names(&[
        ("taken.global", &[echo], None, ""),
        ("given.global", &["other.app.svc.cluster.local"], None, ""),
        ("echo.app.global", &["other.app.global:81"], Some(&["west"]), ""),
        ("for.some:80", &[echo], Some(&["west"]), ""),
        ("for.some:80", &["other.app.mesh.internal"], None, ""),
        ("gone.global", &["gone.app.svc.cluster.local"], None, ""),
    ]);
    let mut exposure = ExposureTable::new(false);
    exposure.add(named(exposed(echo, "west", true), &["given.global"]));
    let workloads = [workload(3, "", &[(echo, 80, 8080)])];
    let snapshot = build_snapshot(Mesh::new(services, workloads), names, exposure);
    let other = |port: u16| format!("other.app.svc.cluster.local:{port}");
    let echo = format!("{echo}:80");
    // Each row: authority, result for west, result for all other callers.
    for (text, west, others) in [
        (&*echo, &*echo, &*echo),
        ("echo.app.mesh.internal:80", &echo, &echo),
        // A configured name takes precedence over a hostname, which a tenant may have chosen.
        ("taken.global:80", &echo, &echo),
        // A name of `exposure` takes precedence over an alias, and an alias over a family.
        ("given.global:80", &echo, &echo),
        ("echo.app.global:80", &other(81), &echo),
        ("for.some:80", &echo, &other(80)),
        ("for.some:81", "", ""),
        ("gone.global:80", "", ""),
        // Of two services of one family, the other names lead to the first.
        ("both.app.global:80", "both.app.svc.cluster.local:80", "both.app.svc.cluster.local:80"),
        ("both.app.mesh.internal:80", "both.app.mesh.internal:80", "both.app.mesh.internal:80"),
        // Only VIPs and workloads of this network match.
        ("240.0.0.1:80", &echo, &echo),
        ("10.0.0.3:8080", &echo, &echo),
        ("10.0.0.3:80", "", ""),
        ("10.0.0.3:15008", "", ""),
        ("10.0.0.4:8080", "", ""),
        ("echo.app.elsewhere:80", "", ""),
        ("echo.app:80", "", ""),
        ("a.echo.app.svc.cluster.local:80", "", ""),
        ("svc.cluster.local:80", "", ""),
    ] {
        let name = |at: usize| found(&snapshot, text)[at].clone().unwrap_or_default().0;
        assert_eq!([name(0), name(1), name(2)], [west, others, others], "{text}");
    }
}

#[test]
fn an_entry_holds_for_all_names_of_its_service() {
    let services = [
        service("echo.app.svc.cluster.local", &[80]),
        service("both.app.svc.cluster.local", &[80]),
        service("both.app.mesh.internal", &[80]),
        service("own.app.svc.cluster.local", &[80]),
        service("exported.app.svc.cluster.local", &[80]),
    ];
    let mut exposure = ExposureTable::new(false);
    for (host, to) in [
        ("echo.app.mesh.internal", "west"),
        ("both.app.mesh.internal", "west"),
        ("own.app.global", "west"),
        ("own.app.svc.cluster.local", "north"),
    ] {
        exposure.add(exposed(host, to, false));
    }
    let old = build_snapshot(Mesh::new(services.clone(), []), names(&[]), exposure);
    let exports: ExportSet = [("exported.app.global", 80)].into_iter().collect();
    let change = Change { exports: Some(exports), ..Change::default() };
    let snapshot = build(&old, change);
    for (text, west, north) in [
        ("echo.app.svc.cluster.local:80", true, false),
        ("echo.app.global:80", true, false),
        // Two services of one family do not share entries.
        ("both.app.mesh.internal:80", true, false),
        ("both.app.svc.cluster.local:80", false, false),
        ("both.app.global:80", false, false),
        ("own.app.svc.cluster.local:80", false, true),
        ("own.app.global:80", false, true),
        ("exported.app.svc.cluster.local:80", true, true),
        ("exported.app.mesh.internal:80", true, true),
    ] {
        let [by_west, by_north, by_unknown] =
            found(&snapshot, text).map(|one| one.map(|one| one.1));
        assert_eq!([by_west, by_north], [Some(west), Some(north)], "{text}");
        assert_eq!(by_unknown, Some(false), "{text}");
    }
    // An entry for another name of the family stops applying once that name has its own service.
    // Tunnels are then evaluated again.
    let appears = service("echo.app.mesh.internal", &[80]);
    let mesh = Mesh::new(services.into_iter().chain([appears]), []);
    let change = Change { mesh: Some((mesh, "east".into())), ..Change::default() };
    let next = build(&snapshot, change);
    assert_eq!(next.generation, snapshot.generation + 1);
    let [by_west, ..] = found(&next, "echo.app.svc.cluster.local:80");
    assert!(!by_west.expect("the service").1);
    let [by_west, ..] = found(&next, "echo.app.mesh.internal:80");
    assert!(by_west.expect("the service").1);
}

const WEST2: &str = "foo.uswest2.svc.cluster.local";
const EAST2: &str = "foo.useast2.svc.cluster.local";

fn payments() -> Mesh {
    let workloads = [
        workload(1, "us-west-2", &[(WEST2, 80, 8080)]),
        workload(2, "us-east-2", &[(EAST2, 80, 8080)]),
        // Serves both, but is one endpoint.
        workload(3, "us-west-2", &[(WEST2, 80, 8080), (EAST2, 80, 8080)]),
    ];
    Mesh::new([service(WEST2, &[80]), service(EAST2, &[80])], workloads)
}

/// Returns the last bytes of the endpoint addresses to which `text` leads, in order.
fn address_suffixes(snapshot: &Snapshot, domain: &str, text: &str) -> Option<Vec<u8>> {
    let found = snapshot.find(caller(domain), &requested(text))?;
    let set = snapshot.endpoints(&found, false);
    let last = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ip.octets()[3],
        IpAddr::V6(_) => 0,
    };
    let endpoints = set.endpoints.iter();
    Some(endpoints.map(|one| last(one.address.ip())).collect())
}

#[test]
fn an_alias_of_several_services_has_the_endpoints_of_all_and_of_a_region_those_there() {
    let names = names(&[
        ("foo.global:80", &[WEST2, "foo.useast2.global", "foo.gone.global"], None, ""),
        ("foo-west.global:80", &[WEST2, EAST2], None, "us-west-2"),
        ("foo-east.global:80", &[WEST2, EAST2], Some(&["west"]), "us-east-2"),
        ("foo-south.global:8080", &["foo.uswest2.global:80"], None, "sa-east-1"),
        ("nothing.global", &["foo.gone.global"], None, "us-west-2"),
    ]);
    let mut exposure = ExposureTable::new(false);
    exposure.add(exposed(WEST2, "west", false));
    exposure.add(exposed(WEST2, "north", false));
    exposure.add(exposed("foo.useast2.mesh.internal", "west", false));
    let snapshot = build_snapshot(payments(), names, exposure);
    let at = |domain, text| address_suffixes(&snapshot, domain, text);
    assert_eq!(at("west.local", "foo.global:80"), Some(vec![1, 2, 3]));
    assert_eq!(at("west.local", "foo-west.global:80"), Some(vec![1, 3]));
    assert_eq!(at("west.local", "foo-east.global:80"), Some(vec![2]));
    assert_eq!(at("west.local", "foo-south.global:8080"), Some(vec![]));
    for (domain, text) in [
        ("north.local", "foo-east.global:80"),
        ("west.local", "foo.global:81"),
        ("west.local", "foo-south.global:80"),
        ("west.local", "nothing.global:80"),
    ] {
        assert_eq!(at(domain, text), None, "{domain} {text}");
    }
    // West may reach both services behind it, north one, a caller without identity none.
    let allowed = found(&snapshot, "foo.global:80").map(|found| found.map(|found| found.1));
    assert_eq!(allowed, [Some(true), Some(false), Some(false)]);
    // One target and one workload are removed.
    let mut mesh = payments();
    mesh.services.remove("useast2/foo.useast2.svc.cluster.local");
    mesh.workloads.remove("uid-1");
    let change = Change { mesh: Some((mesh, "east".into())), ..Change::default() };
    let next = build(&snapshot, change);
    assert_eq!(address_suffixes(&next, "west.local", "foo.global:80"), Some(vec![3]));
    assert_eq!(address_suffixes(&next, "west.local", "foo-east.global:80"), Some(vec![]));
    let allowed = found(&next, "foo.global:80").map(|found| found.map(|found| found.1));
    assert_eq!(allowed, [Some(true), Some(true), Some(false)]);
}

#[test]
fn an_alias_goes_past_no_waypoint_of_what_is_behind_it() {
    let place = Place::Name("app/waypoint.app".into());
    let gateway = GatewayAddress { place, port: 15008 };
    let mut mesh = payments();
    let mut behind = service(EAST2, &[80]);
    behind.waypoints = vec![Waypoint { gateway, weight: 1 }];
    let name = format!("useast2/{EAST2}").as_str().into();
    mesh.services.insert(name, Arc::new(behind));
    let names = names(&[("foo.global:80", &[WEST2, EAST2], None, "")]);
    let snapshot = build_snapshot(mesh, names, ExposureTable::new(true));
    let authority = requested("foo.global:80");
    let found = snapshot.find(caller("west.local"), &authority);
    let found = found.expect("what stands for it");
    assert_eq!(found.service.definition.waypoints.len(), 1);
}

#[test]
fn a_workload_is_reached_at_its_target_port_where_its_service_says_so() {
    let (echo, other) = ("echo.app.svc.cluster.local", "other.app.svc.cluster.local");
    let mut here = workload(1, "", &[(echo, 80, 8080), (other, 80, 8080)]);
    here.network = "east".into();
    // The same address in another network.
    let mut there = workload(1, "", &[(echo, 80, 8080)]);
    (there.uid, there.network) = ("uid-there".into(), "west".into());
    let mut sick = workload(2, "", &[(echo, 80, 8080)]);
    sick.healthy = false;
    let mut behind = workload(5, "", &[(echo, 80, 8080)]);
    behind.has_waypoint = true;
    let mut plain = workload(3, "", &[(echo, 80, 8080), (echo, 81, 8081)]);
    plain.protocol = Protocol::Tcp;
    let closed = workload(4, "", &[("closed.app.svc.cluster.local", 80, 8080)]);
    let services = [
        service(echo, &[80, 81]),
        service(other, &[80]),
        service("closed.app.svc.cluster.local", &[80]),
    ];
    let mesh = Mesh::new(services, [here, there, sick, plain, closed, behind]);
    let mut exposure = ExposureTable::new(false);
    exposure.add(exposed("echo.app.global:80", "west", true));
    exposure.add(exposed(other, "north", true));
    exposure.add(exposed("closed.app.svc.cluster.local", "west", false));
    let snapshot = build_snapshot(mesh, names(&[]), exposure);
    let allowed = |text| found(&snapshot, text).map(|found| found.map(|found| found.1));
    let nobody = [Some(false); 3];
    for (text, want) in [
        // Both may, each by the entry of a different service.
        ("10.0.0.1:8080", [Some(true), Some(true), Some(false)]),
        ("10.0.0.2:8080", [Some(true), Some(false), Some(false)]),
        ("10.0.0.3:8080", [Some(true), Some(false), Some(false)]),
        ("10.0.0.3:8081", nobody),
        ("10.0.0.3:80", [None; 3]),
        ("10.0.0.4:8080", [None; 3]),
        // A workload with its own waypoint is not exposed, so that the waypoint is not bypassed.
        ("10.0.0.5:8080", [None; 3]),
    ] {
        assert_eq!(allowed(text), want, "{text}");
    }
    let dialled = |text| {
        let authority = requested(text);
        let found = snapshot.find(caller("west.local"), &authority).expect("one");
        let endpoints = &snapshot.endpoints(&found, false).endpoints;
        let addresses = endpoints.iter().map(|one| one.address.to_string());
        addresses.collect::<Vec<_>>()
    };
    assert_eq!(dialled("10.0.0.1:8080"), ["10.0.0.1:15008"]);
    assert_eq!(dialled("10.0.0.3:8080"), ["10.0.0.3:8080"]);
    assert!(dialled("10.0.0.2:8080").is_empty(), "it is not healthy");
    // Tunnels by address and tunnels by service name count as one load.
    let by_name = snapshot.services.get(echo).expect("a service");
    let authority = requested("10.0.0.1:8080");
    let found = snapshot.find(caller("west.local"), &authority);
    let set = snapshot.endpoints(&found.expect("one"), false);
    let state = &set.endpoints[0].state;
    let same = |one: &Arc<crate::snapshot::Endpoint>| Arc::ptr_eq(&one.state, state);
    assert!(by_name.ports[&80].endpoints.iter().any(same));
    // Without the entries no address resolves.
    let change = Change { exposure: Some(ExposureTable::new(true)), ..Change::default() };
    let closed = build(&snapshot, change);
    assert!(closed.find(caller("west.local"), &authority).is_none());
    assert_eq!(closed.ports_at_address([10, 0, 0, 1].into(), 8080).count(), 0);
}

#[test]
fn a_tunnel_loses_its_right_when_its_name_leads_elsewhere() {
    let (echo, other) = ("echo.app.svc.cluster.local", "other.app.svc.cluster.local");
    let services = || [service(echo, &[80]), service(other, &[80])];
    let table = |name: Option<&'static str>| {
        let mut exposure = ExposureTable::new(true);
        exposure.add(named(exposed(echo, "west", false), name.as_slice()));
        exposure
    };
    let aliases: &[AliasSpec<'_>] =
        &[("a.global", &[echo], None, ""), ("b.global", &[echo, other], None, "")];
    let with = |aliases: &[AliasSpec<'_>], name| {
        build_snapshot(Mesh::new(services(), []), names(aliases), table(name))
    };
    let old = with(aliases, Some("given.global"));
    let none = || NameTable::new(["svc.cluster.local"], []);
    let moved: &[AliasSpec<'_>] =
        &[("a.global", &[other], None, ""), ("b.global", &[echo], None, "")];
    let more: &[AliasSpec<'_>] = &[
        ("a.global", &[echo, other], None, ""),
        ("b.global", &["new.app.global", other, echo], None, ""),
    ];
    let hidden: &[AliasSpec<'_>] = &[("a.global", &[echo], Some(&["north"]), "")];
    let later = [
        ("the same", with(aliases, Some("given.global"))),
        ("no names", build_snapshot(Mesh::new(services(), []), none(), table(None))),
        ("other targets", with(moved, Some("other.global"))),
        ("hidden", with(hidden, Some("given.global"))),
        ("more targets", with(more, Some("given.global"))),
        (
            "no services",
            build_snapshot(Mesh::default(), names(aliases), table(Some("given.global"))),
        ),
    ];
    // Each row: authority, and whether it still leads to the same service in each later snapshot.
    for (text, want) in [
        ("echo.app.svc.cluster.local:80", [true, true, true, true, true, true]),
        ("echo.app.global:80", [true, false, true, true, true, true]),
        ("given.global:80", [true, false, false, true, true, true]),
        ("a.global:80", [true, false, false, false, true, true]),
        ("b.global:80", [true, false, false, false, true, true]),
    ] {
        let requested = requested(text);
        let west = caller("west.local");
        let found = old.find(west, &requested).expect("a service");
        let of = (&*found.service.definition, found.port);
        let stands = |(_, next): &(&str, Snapshot)| {
            next.still_leads_to(west, &requested, of.0, of.1, &found.matched_by)
        };
        let got: Vec<_> = later.iter().map(stands).collect();
        assert_eq!(got, want, "{text} {:?}", later.each_ref().map(|(what, _)| what));
    }
}

#[test]
fn exposing_all_admits_the_trust_set_to_what_more_than_its_namespace_sees() {
    let [open, narrow, mut private, mut named, mut exported] = [
        "open.app.svc.cluster.local",
        "narrow.app.svc.cluster.local",
        "private.app.svc.cluster.local",
        "named.app.svc.cluster.local",
        "exported.app.svc.cluster.local",
    ]
    .map(|host| service(host, &[80]));
    for service in [&mut private, &mut named, &mut exported] {
        service.private = true;
    }
    let mut exposure = ExposureTable::new(true);
    exposure.add(exposed(&narrow.hostname, "north", false));
    exposure.add(exposed(&named.hostname, "west", false));
    let mesh = Mesh::new([open, narrow, private, named, exported], []);
    let alias = ("alias.name", &["private.app.svc.cluster.local"][..], None, "");
    let old = build_snapshot(mesh, names(&[alias]), exposure);
    let exports: ExportSet = [("exported.app.svc.cluster.local", 80)].into_iter().collect();
    let change = Change { exports: Some(exports), ..Change::default() };
    let snapshot = build(&old, change);
    for (name, want) in [
        ("open.app.svc.cluster.local", [true, true]),
        ("narrow.app.svc.cluster.local", [false, true]),
        ("private.app.svc.cluster.local", [false, false]),
        ("private.app.mesh.internal", [false, false]),
        ("alias.name", [false, false]),
        ("named.app.svc.cluster.local", [true, false]),
        ("exported.app.svc.cluster.local", [true, true]),
    ] {
        let got = found(&snapshot, &format!("{name}:80")).map(|one| one.map(|one| one.1));
        let [west, north] = want.map(Some);
        // `all` means all peers of the trust set.
        assert_eq!(got, [west, north, Some(false)], "{name}");
    }
}
