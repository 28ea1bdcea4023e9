//! Services that links expose, and entries whose limits apply.

use std::sync::Arc;

use super::*;
use crate::limits::Source;
use crate::snapshot::builder::{Change, build};
use crate::snapshot::mesh::Mesh;
use crate::snapshot::tests::region_weights;
use crate::snapshot::traffic::Traffic;
use crate::snapshot::{
    NO_LINK_FACTORS, ServiceLimits, ServiceVisibility, Snapshot, Subset, SubsetPart,
    pick_probabilities,
};
use crate::wire::sni::{self, SniPattern};

const ECHO: &str = "echo.app.svc.cluster.local";
const CART: &str = "cart.shop.svc.cluster.local";
const HIDDEN: &str = "hidden.shop.svc.cluster.local";

#[test]
fn one_peer_reaches_what_its_link_exposes_and_another_its_selection() {
    let mut hidden = service(HIDDEN, &[80]);
    hidden.private = true;
    let mesh = Mesh::new([service(ECHO, &[80]), service(CART, &[80]), hidden], []);
    let mut exposure = ExposureTable::new(false);
    exposure.add(exposed(ECHO, "north", false));
    let snapshot = build_snapshot(mesh, names(&[("cart.alias", &[CART], None, "")]), exposure);
    let reached = |patterns: &[&str], local: &[&str]| {
        let patterns = patterns.iter().map(|text| SniPattern::parse(text));
        let patterns: Result<Vec<_>, _> = patterns.collect();
        let scope = ServiceVisibility {
            by_link: [("west".into(), patterns.expect("patterns"))].into_iter().collect(),
            local: local.iter().map(|&host| host.into()).collect(),
            ..ServiceVisibility::default()
        };
        let change = Change { scope: Some(scope), ..Change::default() };
        let snapshot = build(&snapshot, change);
        let requested = ["echo.app.global:80", "cart.alias:80", "hidden.shop.global:80"];
        requested.map(|text| {
            let found = found(&snapshot, text);
            found.map(|found| found.expect("a service").1)
        })
    };
    let (north, nobody) = ([false, true, false], [false; 3]);
    let both = [true, true, false];
    let west = [true, false, false];
    assert_eq!(reached(&[], &[]), [north, nobody, nobody]);
    assert_eq!(reached(&["*"], &[]), [both, west, nobody]);
    assert_eq!(reached(&["*"], &[CART]), [both, nobody, nobody]);
    assert_eq!(reached(&["*.shop.svc.cluster.local"], &[]), [north, west, nobody]);
    assert_eq!(reached(&["echo.app.global"], &[]), [both, nobody, nobody]);
}

fn limited(service: &str, to: &str, tunnels: u32) -> ExposedService {
    ExposedService {
        limits: ServiceLimits { tunnels: Some(tunnels), ..ServiceLimits::default() },
        ..exposed(service, to, false)
    }
}

fn limits(snapshot: &Snapshot, domain: &str, text: &str) -> Vec<Option<u32>> {
    let requested = requested(text);
    let found = snapshot.find(caller(domain), &requested).expect("a service");
    let callers = std::iter::once(caller(domain));
    let entries = snapshot.limiting_entries(callers, found.requested(&requested));
    entries.iter().map(|entry| entry.limits.tunnels).collect()
}

#[test]
fn the_limits_of_each_entry_that_admits_a_peer_apply() {
    let mesh = Mesh::new([service(ECHO, &[80, 81]), service(CART, &[80])], []);
    let mut exposure = ExposureTable::new(false);
    let twice = ["given.name", "given.name:80"];
    exposure.add(named(limited(ECHO, "west", 1), &twice));
    exposure.add(limited(ECHO, "north", 2));
    exposure.add(limited(&format!("{ECHO}:81"), "west", 3));
    exposure.add(exposed(ECHO, "anyone", false));
    exposure.add(limited(CART, "anyone", 4));
    let names = names(&[("both.global:80", &[ECHO, CART], None, "")]);
    let snapshot = build_snapshot(mesh, names, exposure);
    for (domain, text, want) in [
        ("west.local", "echo.app.global:80", &[1][..]),
        ("west.local", "echo.app.global:81", &[1, 3]),
        ("west.local", "given.name:80", &[1]),
        ("north.local", "echo.app.global:80", &[2]),
        ("west.local", "both.global:80", &[1, 4]),
    ] {
        let want: Vec<_> = want.iter().map(|max| Some(*max)).collect();
        assert_eq!(limits(&snapshot, domain, text), want, "{domain} {text}");
    }
}

#[test]
fn a_peer_that_only_a_link_admits_has_the_limits_of_all_entries() {
    let mesh = Mesh::new([service(ECHO, &[80]), service(CART, &[80])], []);
    let of_cart = Audience { namespaces: vec!["cart".into()], ..Audience::default() };
    let of_cart = ExposedService { to: vec![of_cart], ..limited(ECHO, "west", 2) };
    let mut exposure = ExposureTable::new(false);
    exposure.add(of_cart);
    exposure.add(limited(ECHO, "north", 3));
    exposure.add(exposed(CART, "west", false));
    exposure.add(limited(CART, "north", 4));
    let names = names(&[("both.global:80", &[ECHO, CART], None, "")]);
    let pattern = SniPattern::parse("*").expect("a pattern");
    let change = Change {
        scope: Some(ServiceVisibility {
            by_link: [("west".into(), vec![pattern])].into_iter().collect(),
            ..ServiceVisibility::default()
        }),
        ..Change::default()
    };
    let snapshot = build(&build_snapshot(mesh, names, exposure), change);
    for (domain, text, want) in [
        ("west.local", "echo.app.global:80", &[2, 3][..]),
        ("west.local", "cart.shop.global:80", &[]),
        ("west.local", "both.global:80", &[2, 3]),
        ("north.local", "echo.app.global:80", &[3]),
    ] {
        let want: Vec<_> = want.iter().map(|max| Some(*max)).collect();
        assert_eq!(limits(&snapshot, domain, text), want, "{domain} {text}");
    }
}

#[test]
fn an_entry_for_the_same_peers_keeps_its_count_in_a_new_table() {
    let table = |first: &str, second: &str, tunnels| {
        let mut exposure = ExposureTable::new(false);
        exposure.add(named(limited(ECHO, first, tunnels), &["given.name"]));
        exposure.add(limited(ECHO, second, tunnels));
        exposure
    };
    let old = table("west", "north", 1);
    let mesh = Mesh::new([service(ECHO, &[80])], []);
    let old = build_snapshot(mesh, names(&[]), old);
    let of = |snapshot: &Snapshot, at: usize| Arc::clone(&snapshot.exposure.entries(ECHO)[at].open);
    let _open = of(&old, 0).add(&Source::prefix([192, 0, 2, 1].into()));
    let next = |first: &str, second: &str| {
        let change = Change { exposure: Some(table(first, second, 7)), ..Change::default() };
        let next = build(&old, change);
        let name = requested("given.name:80");
        let given = next.exposure.entries_with_alias(&name);
        let given: Vec<_> = given.map(|entry| entry.open.get()).collect();
        (of(&next, 0).get(), of(&next, 1).get(), given)
    };
    assert_eq!(next("north", "west"), (0, 1, vec![0]));
    assert_eq!(next("west", "north"), (1, 0, vec![1]));
    assert_eq!(next("north", "anyone"), (0, 0, vec![0]));
}

fn of_version(last: u8, version: &str) -> Workload {
    let one = workload(last, "", &[(ECHO, 80, 8080)]);
    let template = mesh::Template {
        canonical_revision: version.into(),
        ..mesh::Template::clone(&one.template)
    };
    Workload { template: template.into(), ..one }
}

fn part(version: &str, weight: u32) -> SubsetPart {
    SubsetPart { name: version.into(), labels: [("version".into(), version.into())].into(), weight }
}

#[test]
fn a_split_of_subsets_is_kept_and_each_part_is_divided_by_the_weights_of_regions() {
    let placed = |last, version, region: &str| {
        let one = of_version(last, version);
        let template = mesh::Template {
            locality: Locality { region: region.into(), ..Locality::default() }.into(),
            ..mesh::Template::clone(&one.template)
        };
        Workload { template: template.into(), ..one }
    };
    let workloads = [
        placed(1, "v1", "us-west"),
        placed(2, "v1", "us-east"),
        placed(3, "v2", "us-west"),
        placed(4, "v2", "evacuated"),
    ];
    let split = Subset { name: "mix".into(), parts: [part("v1", 3), part("v2", 1)].into() };
    let alias = (format!("{ECHO}@mix"), Alias::new(alias(ECHO, &[ECHO]), Some(split)));
    let rule = region_weights(&[("us-west", 10), ("us-east", 90), ("evacuated", 0)]);
    let mesh = Mesh::new([service(ECHO, &[80])], workloads);
    let names = NameTable::new(SUFFIXES, [(&*alias.0, alias.1)]);
    let before = build_snapshot(mesh, names, ExposureTable::new(true));
    let change = Change { traffic: Some(Traffic::new([], rule)), ..Change::default() };
    let snapshot = build(&before, change);
    let requested = sni::authority_of("outbound_.80_.mix_.echo.app.global", 1);
    let found = snapshot.find(caller("west.local"), &requested).expect("a service");
    let set = snapshot.endpoints(&found, false);
    let shares = pick_probabilities(&set, NO_LINK_FACTORS, tokio::time::Instant::now());
    let mut shares: Vec<_> = set.endpoints.iter().map(|one| one.uid()).zip(shares).collect();
    shares.sort_by(|one, other| one.0.cmp(other.0));
    let want = [("uid-1", 0.075), ("uid-2", 0.675), ("uid-3", 0.25)];
    assert_eq!(shares.len(), want.len(), "{shares:?}");
    for ((uid, share), (wanted, part)) in shares.iter().zip(want) {
        let is_near = (share - part).abs() < 1e-6;
        assert!(***uid == *wanted && is_near, "{shares:?}");
    }
}

#[test]
fn a_subset_has_the_endpoints_with_its_labels_and_shares_those_of_its_parts() {
    let workloads =
        [of_version(1, "v1"), of_version(2, "v1"), of_version(3, "v2"), of_version(4, "v3")];
    let subset = |name: &str, parts: Vec<SubsetPart>| {
        let subset = Subset { name: name.into(), parts: parts.into() };
        (format!("{ECHO}@{name}"), Alias::new(alias(ECHO, &[ECHO]), Some(subset)))
    };
    let subsets =
        [subset("v1", vec![part("v1", 1)]), subset("mix", vec![part("v1", 30), part("v2", 10)])];
    let (hosts, aliases): (Vec<_>, Vec<_>) = subsets.into_iter().unzip();
    let names = NameTable::new(SUFFIXES, hosts.iter().map(String::as_str).zip(aliases));
    let mut exposure = ExposureTable::new(false);
    exposure.add(exposed(ECHO, "west", false));
    let mesh = Mesh::new([service(ECHO, &[80])], workloads);
    let snapshot = build_snapshot(mesh, names, exposure);
    let endpoints = |subset: &str| {
        let name = format!("outbound_.80_.{subset}_.echo.app.global");
        let requested = sni::authority_of(&name, 1);
        let found = snapshot.find(caller("west.local"), &requested)?;
        let set = snapshot.endpoints(&found, false);
        let of = found.requested(&requested);
        let judge = |domain| snapshot.evaluate_exposure(caller(domain), of);
        assert_eq!(judge("west.local"), Ok(()));
        assert_eq!(judge("north.local"), Err(Reason::NotForPeer));
        let mut uids: Vec<_> = set.endpoints.iter().map(|one| one.uid().to_string()).collect();
        uids.sort_unstable();
        let groups = set.groups().map(|groups| {
            let groups = groups.list().iter();
            groups.map(|group| (group.ready, group.share)).collect::<Vec<_>>()
        });
        Some((uids.join(" "), groups))
    };
    assert_eq!(endpoints("v1"), Some(("uid-1 uid-2".to_owned(), None)));
    let shares = vec![(2, 0.75), (1, 0.25)];
    assert_eq!(endpoints("mix"), Some(("uid-1 uid-2 uid-3".to_owned(), Some(shares))));
    assert_eq!(endpoints("v4"), None);
}

#[test]
fn a_hostname_of_another_namespace_overrides_an_alias_of_objects() {
    const EVIL: &str = "evil.evil.svc.cluster.local";
    let services = |all: &[(&str, &str)]| {
        let all = all.iter().map(|(namespace, host)| mesh::Service {
            namespace: (*namespace).into(),
            ..service(host, &[80, 81])
        });
        Mesh::new([service(EVIL, &[80, 81])].into_iter().chain(all), [])
    };
    let exposure = |is_of_object| {
        let entry = ExposedService {
            namespace: Some("evil".into()),
            names: hosts(&["payments.global:80", "a.evil.global:80"]),
            is_of_object,
            ..exposed(&format!("{EVIL}:80"), "west", false)
        };
        let mut table = ExposureTable::new(true);
        table.add(entry);
        table
    };
    let next = |old: &Snapshot, all: &[(&str, &str)]| {
        let change = Change { mesh: Some((services(all), "east".into())), ..Change::default() };
        build(old, change)
    };
    let west = |snapshot: &Snapshot, text: &str| found(snapshot, text)[0].take();
    let to = |host: &str, port: u16| Some((format!("{host}:{port}"), true));
    let alone = build_snapshot(services(&[]), names(&[]), exposure(true));
    assert_eq!(west(&alone, "payments.global:80"), to(EVIL, 80));
    for name in ["payments.global", "a.evil.global"] {
        let requested = requested(&format!("{name}:80"));
        let leads = |snapshot: &Snapshot, matched_by| {
            let service = &snapshot.services.get(EVIL).expect("a service").definition;
            let west = caller("west.local");
            snapshot.still_leads_to(west, &requested, service, 80, matched_by)
        };
        for claimants in [&["pay"][..], &["pay", "shop"]] {
            let all: Vec<_> = claimants.iter().map(|of| (*of, name)).collect();
            let taken = next(&alone, &all);
            assert!(taken.generation > alone.generation, "{name} {claimants:?}");
            let is_own = name == "a.evil.global";
            assert!(leads(&alone, &MatchedBy::Exposed));
            assert_eq!(leads(&taken, &MatchedBy::Exposed), is_own, "{name}");
            let own = to(EVIL, 80).filter(|_| is_own);
            let theirs = |port| to(name, port).filter(|_| claimants.len() == 1 && !is_own);
            assert_eq!(west(&taken, &format!("{name}:80")), own.or_else(|| theirs(80)));
            assert_eq!(west(&taken, &format!("{name}:81")), theirs(81), "{name}");
            assert_eq!(next(&taken, &[]).generation, taken.generation + 1);
        }
    }
    let taken = next(&alone, &[("pay", "payments.global")]);
    let stated = taken.collision("payments.global").expect("a collision");
    assert_eq!(
        stated.to_string(),
        "payments.global is claimed by objects of namespace evil, and pay/payments.global \
         answers: a hostname precedes names that objects give"
    );
    // Neither a service of the same namespace nor a hostname precedes the configuration.
    let own = next(&alone, &[("evil", "payments.global")]);
    assert_eq!(west(&own, "payments.global:80"), to(EVIL, 80));
    let theirs = services(&[("pay", "payments.global")]);
    let configured = build_snapshot(theirs, names(&[]), exposure(false));
    assert_eq!(west(&configured, "payments.global:80"), to(EVIL, 80));
}
