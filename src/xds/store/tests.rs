//! Tests of the store.

use std::net::IpAddr;

use super::*;
use crate::grpc::workload as proto;
use crate::snapshot::authorization::Action;
use crate::snapshot::mesh::{Mesh, Template};
use crate::xds::tests::{self as samples, resource, workload};

fn service(namespace: &str, canonical: bool) -> Resource {
    samples::service(proto::Service {
        name: "echo".into(),
        namespace: namespace.into(),
        hostname: "Echo.app".into(),
        canonical,
        ..proto::Service::default()
    })
}

fn policy(scope: i32, port: u32) -> Resource {
    samples::policy(scope, port, "1")
}

fn uids(mesh: &Mesh) -> Vec<&str> {
    let workloads = mesh.workloads.sorted().into_iter();
    workloads.map(|one| &*one.uid).collect()
}

#[test]
fn the_mesh_is_given_once_for_each_change_in_the_order_of_names() {
    let mut store = Store::default();
    assert_eq!(store.tables.take_change(), None);
    for one in [workload("b", ""), workload("a", ""), service("app", false)] {
        store.upsert(ADDRESS, &one).unwrap();
    }
    let mesh = store.tables.take_change().unwrap();
    assert_eq!(uids(&mesh), ["a", "b"]);
    assert_eq!(&*mesh.services.sorted()[0].hostname, "echo.app");
    assert!(mesh.hbone_only);
    store.upsert(ADDRESS, &workload("a", "")).unwrap();
    store.remove(ADDRESS, "c");
    assert_eq!(store.tables.take_change(), None, "nothing is different");
    store.upsert(ADDRESS, &workload("a", "n")).unwrap();
    let next = store.tables.take_change().unwrap();
    assert_eq!(&*next.workloads.sorted()[0].node, "n");
    assert!(Arc::ptr_eq(next.workloads.sorted()[1], mesh.workloads.sorted()[1]), "shared");
}

#[test]
fn resources_go_by_uid_and_by_namespace_and_hostname() {
    let mut store = Store::default();
    store.set_policies_received();
    store.upsert(ADDRESS, &workload("a", "")).unwrap();
    store.upsert(ADDRESS, &service("app", false)).unwrap();
    store.upsert(ADDRESS, &service("other", true)).unwrap();
    store.upsert(AUTHORIZATION, &policy(0, 80)).unwrap();
    let mesh = store.tables.take_change().unwrap();
    let sizes = (mesh.workloads.len(), mesh.services.len());
    assert_eq!((sizes, store.take_policies().unwrap().len()), ((1, 2), 1));
    store.remove(ADDRESS, "a");
    assert!(store.tables.take_change().unwrap().workloads.is_empty());
    store.remove(ADDRESS, "app/Echo.app");
    let mesh = store.tables.take_change().unwrap();
    assert_eq!(&*mesh.services.sorted()[0].namespace, "other");
    store.remove(AUTHORIZATION, "app/p");
    assert!(store.take_policies().unwrap().is_empty());
    assert_eq!(store.tables.take_change(), None, "policies are no part of the mesh");
}

#[test]
fn what_all_resources_make_together_is_bounded_and_what_goes_makes_room() {
    let mut store = Store::default();
    store.upsert(ADDRESS, &workload("a", "")).unwrap();
    store.endpoints = ENDPOINTS_MAX;
    let why = store.upsert(ADDRESS, &workload("b", "")).unwrap_err();
    let want = "workload.services: 4000001 endpoints with these, want at most 4000000";
    assert_eq!(why, want);
    store.upsert(ADDRESS, &workload("a", "changed")).unwrap();
    store.remove(ADDRESS, "a");
    store.upsert(ADDRESS, &workload("b", "")).unwrap();
    store.remove(ADDRESS, "b");
    assert_eq!(store.endpoints, ENDPOINTS_MAX - 1, "as without any");
    // The namespace of the policy and another one.
    for (of, parts, most) in [("app", 499_997, 500_000), ("other", 999_993, 3)] {
        store.policy_parts = [(of.to_owned(), parts)].into();
        store.all_policy_parts = parts;
        let why = store.upsert(AUTHORIZATION, &policy(0, 80)).unwrap_err();
        let parts = if of == "app" { parts + 4 } else { 4 };
        let want = format!(
            "authorization.rules: {parts} rules, clauses, matches and entries with those of the \
             namespace, want at most {most}"
        );
        assert_eq!(why, want);
    }
    store.remove(AUTHORIZATION, "app/p");
    store.policy_parts = [("other".to_owned(), 999_992)].into();
    store.all_policy_parts = 999_992;
    store.upsert(AUTHORIZATION, &policy(0, 80)).unwrap();
    store.upsert(AUTHORIZATION, &policy(0, 81)).unwrap();
    assert_eq!(store.policy_parts["app"], 4, "an update counts once");
    assert_eq!(store.all_policy_parts, 999_996);
    store.remove(AUTHORIZATION, "app/p");
    assert!(!store.policy_parts.contains_key("app"));
    assert_eq!(store.all_policy_parts, 999_992);
    let long = Resource { body: Some(vec![0; BODY_BYTES_MAX + 1].into()), ..workload("c", "") };
    let why = store.upsert(ADDRESS, &long).unwrap_err();
    assert_eq!(why, "resource: 2097153 bytes, want at most 2097152");
}

#[test]
fn what_was_a_service_and_is_a_workload_is_only_that() {
    let mut store = Store::default();
    store.upsert(ADDRESS, &service("app", false)).unwrap();
    store.upsert(ADDRESS, &workload("app/Echo.app", "")).unwrap();
    let mesh = store.tables.take_change().unwrap();
    assert_eq!((mesh.services.len(), mesh.workloads.len()), (0, 1));
    store.upsert(ADDRESS, &service("app", false)).unwrap();
    let mesh = store.tables.take_change().unwrap();
    assert_eq!((mesh.services.len(), mesh.workloads.len()), (1, 0));
}

#[test]
fn a_rejected_resource_says_why_and_leaves_its_last_good_version() {
    let mut store = Store::default();
    store.upsert(ADDRESS, &workload("a", "good")).unwrap();
    store.tables.take_change().unwrap();
    let named = |name: &str, one: Resource| Resource { name: name.into(), ..one };
    let without_body = Resource { body: None, ..workload("a", "") };
    let of_another_type = Resource { body_type: AUTHORIZATION.into(), ..workload("a", "") };
    let cut_off = Resource { body: Some(vec![0x0a, 0x7f].into()), ..workload("a", "") };
    let table = [
        (named("a", workload("b", "")), "workload.uid: `b` is named `a`"),
        (named("a", service("app", true)), "service.hostname: `app/Echo.app` is named `a`"),
        (without_body, "resource: missing"),
        (
            of_another_type,
            "resource.type_url: `type.googleapis.com/istio.security.Authorization`, want \
             `type.googleapis.com/istio.workload.Address`",
        ),
        (
            resource(ADDRESS, "a", "1", &proto::Address::default()),
            "address.type: neither workload nor service",
        ),
    ];
    for (one, want) in table {
        assert_eq!(store.upsert(ADDRESS, &one), Err(want.to_owned()));
    }
    let why = store.upsert(ADDRESS, &cut_off).unwrap_err();
    assert!(why.contains("Address"), "{why}");
    let why = store.upsert("x", &workload("a", "")).unwrap_err();
    assert_eq!(why, "unsupported type x");
    assert_eq!(store.tables.take_change(), None);
    assert_eq!(&*store.tables.mesh().workloads.sorted()[0].node, "good");
}

#[test]
fn a_policy_that_was_never_readable_refuses_what_it_covers() {
    const NAMESPACE: i32 = 1;
    let mut store = Store::default();
    let mut judge = |one: &Resource| {
        let result = store.upsert(AUTHORIZATION, one);
        let policies = store.policies();
        let policy = policies.iter().next().unwrap();
        (result.is_ok(), Policy::clone(policy))
    };
    let with = |more: &[u8]| {
        let body = policy(NAMESPACE, 80).body.unwrap();
        Resource { body: Some([&body, more].concat().into()), ..policy(NAMESPACE, 80) }
    };
    let broken = Resource { body: Some(vec![0xff].into()), ..policy(NAMESPACE, 80) };
    // A rule of one byte, which is no message; and a field of more bytes than a body may have.
    let invalid = with(&[0x2a, 1, 0xff]);
    let too_large = with(&[&[0x3a, 0x80, 0x80, 0x80, 0x01][..], &vec![0; 1 << 21]].concat());
    for (one, scope, dry_run) in [
        (policy(NAMESPACE, 65536), PolicyScope::Namespace, false),
        (policy(NAMESPACE, 0), PolicyScope::Namespace, true),
        (policy(9, 80), PolicyScope::Global, false),
        (broken.clone(), PolicyScope::Global, false),
        (invalid, PolicyScope::Namespace, false),
        (too_large, PolicyScope::Namespace, false),
    ] {
        let (is_good, placeholder) = judge(&one);
        assert!(!is_good && placeholder.unreadable);
        assert_eq!((placeholder.scope, placeholder.dry_run), (scope, dry_run));
        assert_eq!(placeholder.action, Action::Deny);
        assert_eq!((&*placeholder.namespace, &*placeholder.name), ("app", "p"));
    }
    let another = Resource { name: "app/other".into(), ..policy(NAMESPACE, 80) };
    assert!(store.upsert(AUTHORIZATION, &another).is_err());
    let placeholder = &store.policies["app/other"];
    assert_eq!(placeholder.scope, PolicyScope::Global, "nobody knows what selects it");
    store.remove(AUTHORIZATION, "app/other");
    let mut judge = |one: &Resource| {
        let result = store.upsert(AUTHORIZATION, one);
        (result.is_ok(), Policy::clone(&store.policies["app/p"]))
    };
    let (is_good, first) = judge(&policy(NAMESPACE, 80));
    assert!(is_good && !first.unreadable);
    assert_eq!(judge(&broken), (false, first), "the last good one stays");
}
#[test]
fn what_the_machine_rejects_itself_is_stood_in_for_if_it_is_a_policy() {
    let mut store = Store::default();
    store.set_policies_received();
    assert_eq!(store.take_policies().unwrap().len(), 0);
    assert!(!store.handle_rejection(ADDRESS, "a") && store.take_policies().is_none());
    assert!(store.handle_rejection(AUTHORIZATION, "app/p"));
    let policy = Policy::clone(&store.policies["app/p"]);
    assert!(policy.unreadable && policy.scope == PolicyScope::Global && !policy.dry_run);
    assert_eq!(store.take_policies().unwrap().len(), 1);
    store.upsert(AUTHORIZATION, &self::policy(1, 80)).unwrap();
    assert!(!store.handle_rejection(AUTHORIZATION, "app/p"), "the good one stays");
    assert!(!store.policies["app/p"].unreadable);
}

#[test]
fn a_field_of_tomorrow_makes_a_policy_unreadable() {
    let good = policy(1, 80);
    let body = good.body.unwrap();
    let newer =
        Resource { body: Some([&*body, &[0x98, 0x06, 0x01]].concat().into()), ..policy(1, 80) };
    let mut store = Store::default();
    let why = store.upsert(AUTHORIZATION, &newer).unwrap_err();
    assert_eq!(why, "authorization: unknown field 99");
    let policy = &store.policies["app/p"];
    assert!(policy.unreadable && policy.scope == PolicyScope::Namespace);
}

#[test]
fn policies_are_reported_once_though_there_is_none() {
    let mut store = Store::default();
    store.upsert(AUTHORIZATION, &policy(0, 80)).unwrap();
    store.remove(AUTHORIZATION, "app/p");
    assert!(store.take_policies().is_none(), "they may not be all");
    store.set_policies_received();
    assert!(store.take_policies().unwrap().is_empty());
    store.set_policies_received();
    assert!(store.take_policies().is_none());
}

#[test]
fn every_list_counts_and_a_service_without_ports_too() {
    let ports = || [(80, 8080), (81, 8081)].into();
    let workload = Workload {
        services: [("a".into(), ports()), ("b".into(), [].into())].into(),
        template: Template { policies: ["a/p".into(), "a/q".into()].into(), ..Template::default() }
            .into(),
        ..Workload::default()
    };
    assert_eq!(workload_entries(&workload), 2 + 1 + 2);
    let service = Service {
        ports: [(80, 0)].into(),
        vips: vec![(String::new(), IpAddr::from([240, 0, 0, 1])); 2],
        subject_alt_names: vec![String::new(); 4],
        ..Service::default()
    };
    assert_eq!(service_entries(&service), 1 + 2 + 4);
}

#[test]
fn what_another_thread_decodes_is_stored_as_if_this_one_did() {
    let one = |index: usize| {
        let (name, node) = (format!("w{index}"), format!("node-{}", index % 5));
        // Alone in their batch.
        let node = if index % 1_000 == 4 { node.repeat(1 << 15) } else { node };
        let good = workload(&name, &node);
        match index % 9 {
            0 => service(&name, false),
            1 => Resource { body: Some(vec![7].into()), ..good },
            2 => Resource { name: "other".into(), ..good },
            3 => Resource { body: None, ..good },
            _ => good,
        }
    };
    let resources: Vec<_> = (0..5_000).map(one).collect();
    let all: Vec<_> = resources.iter().collect();
    let (mut ahead, mut alone) = (Store::default(), Store::default());
    ahead.announce_upserts(ADDRESS, &all);
    assert!(ahead.ahead.is_some(), "so many that a thread decodes them");
    // The client rejects some before.
    for (_, resource) in resources.iter().enumerate().filter(|(index, _)| index % 7 != 6) {
        assert_eq!(ahead.upsert(ADDRESS, resource), alone.upsert(ADDRESS, resource));
    }
    let mesh = ahead.tables.mesh();
    assert_eq!(mesh, alone.tables.mesh());
    ahead.upsert(ADDRESS, &workload("last", "node-1")).unwrap();
    assert!(ahead.ahead.is_none());
    let node = |uid: &str| Arc::clone(&ahead.tables.workloads.get(uid).unwrap().node);
    assert!(Arc::ptr_eq(&node("last"), &node("w31")), "the interner is back");
    ahead.announce_upserts(ADDRESS, &all);
    ahead.announce_upserts(ADDRESS, &all[..1]);
    assert!(ahead.ahead.is_none(), "few are decoded one by one");
}
