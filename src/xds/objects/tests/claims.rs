//! Tests of names and addresses that objects of several namespaces claim.

use std::net::SocketAddr;

use super::entries::{binding, distributing, exposing, gateway, merged, merged_with};
use super::*;
use crate::snapshot::mesh::Service;

const ADDRESSES: &str = "bindings: {addresses: 127.64.0.0/10}";

/// Returns an object of entries for another namespace, created in a month of 2026 if it is not 0.
fn of(object: &str, namespace: &str, month: u8) -> String {
    let created = format!(", creationTimestamp: \"2026-{month:02}-01T00:00:00Z\"");
    let created = if month == 0 { "" } else { &created };
    let metadata = format!("namespace: {namespace}{created}}}");
    let object = object.replace("namespace: app}", &metadata);
    object.replace("namespace: shop}", &metadata)
}

/// Returns an exposed service with the alias `pay.global`.
fn aliased(namespace: &str, month: u8) -> String {
    let entry = "{name: echo, alias: pay.global, port: 80, clusters: [west]}";
    of(&exposing(&[entry]), namespace, month)
}

/// Returns a binding of a service of cluster west at port 80.
fn bound(name: &str, namespace: &str, month: u8) -> String {
    let entry = format!("{{cluster: west, services: [{{name: {name}, port: 80}}]}}");
    of(&binding(&[&entry]), namespace, month)
}

/// Returns the local names of bindings with their addresses.
fn addresses(config: &Config) -> Vec<(&str, SocketAddr)> {
    let bindings = config.bindings.iter();
    bindings.map(|one| (&*one.names[0], one.listen)).collect()
}

/// Merges objects in both orders, and asserts that the order of files has no effect.
fn merged_in_any_order(config: &Config, one: &str, other: &str) -> (Config, String) {
    let (first, reported) = merged(config, &format!("{one}---\n{other}"));
    let (second, _) = merged(config, &format!("{other}---\n{one}"));
    let names = |config: &Config| {
        let services = config.exposure.services.iter();
        let services = services.map(|one| (one.service.clone(), one.names.clone()));
        services.collect::<Vec<_>>()
    };
    assert_eq!(names(&first), names(&second));
    assert_eq!(addresses(&first), addresses(&second));
    (first, reported)
}

#[test]
fn the_oldest_object_that_claims_an_alias_has_it() {
    let config = gateway("services: []", "");
    // Months of creation of app and evil, and the owner.
    for (app, evil, owner) in
        [(1, 2, "app"), (2, 1, "evil"), (1, 0, "app"), (0, 1, "evil"), (1, 1, "app"), (0, 0, "app")]
    {
        let objects = (aliased("evil", evil), aliased("app", app));
        let (config, reported) = merged_in_any_order(&config, &objects.0, &objects.1);
        let services = config.exposure.services.iter();
        let named: Vec<_> = services.filter(|one| !one.names.is_empty()).collect();
        assert_eq!((named.len(), config.exposure.services.len()), (1, 2));
        assert_eq!(named[0].namespace.as_deref(), Some(owner));
        let want = "error: the alias pay.global is that of ";
        assert_eq!(reported.matches(want).count(), 1, "{reported}");
    }
}

#[test]
fn a_newer_object_takes_neither_the_name_nor_the_address_of_a_binding() {
    let config = gateway(ADDRESSES, "");
    let shop = bound("echo", "shop", 1);
    let (alone, _) = merged(&config, &shop);
    // Both names have the same hash in this network.
    let (same, _) = merged(&config, &bound("a9923833", "evil", 1));
    assert_eq!(alone.bindings[0].listen, same.bindings[0].listen);
    let evil = bound("a9923833", "evil", 2);
    let (both, reported) = merged_in_any_order(&config, &evil, &shop);
    assert_eq!((both.bindings.len(), &*reported), (2, ""));
    assert_eq!(addresses(&both)[0], addresses(&alone)[0]);
    assert_ne!(both.bindings[1].listen, both.bindings[0].listen);
    // An older one that is refused takes no address.
    let refused = bound("a9923833", "evil", 0).replace("cluster: west", "cluster: moon");
    let shop = bound("echo", "shop", 0);
    let (both, _) = merged_in_any_order(&config, &refused, &shop);
    assert_eq!(addresses(&both), addresses(&alone));
    let (first, second) = (bound("pay.global", "shop", 1), bound("pay.global", "evil", 2));
    let (named, reported) = merged_in_any_order(&config, &second, &first);
    assert_eq!((named.bindings.len(), named.bindings[0].cluster.len()), (1, 1));
    let want = "the local name pay.global is that of an object in shop";
    assert!(reported.contains(want), "{reported}");
}

#[test]
fn the_oldest_object_has_the_port_of_the_only_address() {
    let config = gateway("bindings: {addresses: 127.0.0.5/32}", "");
    let (evil, shop) = (bound("a", "evil", 2), bound("echo", "shop", 1));
    let (merged, reported) = merged_in_any_order(&config, &evil, &shop);
    let names: Vec<_> = addresses(&merged).iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["echo.shop.svc.cluster.local"]);
    let want = "a.evil.svc.cluster.local has no free address for port 80";
    assert!(reported.contains(want), "{reported}");
}

#[test]
fn a_hostname_of_the_mesh_file_is_given_to_no_object_of_another_namespace() {
    let service =
        Service { namespace: "pay".into(), hostname: "pay.global".into(), ..Service::default() };
    let mesh = Mesh::new([service], []);
    let config = gateway(ADDRESSES, "");
    for (namespace, count) in [("evil", 0), ("pay", 1)] {
        let objects = [aliased(namespace, 1), bound("pay.global", namespace, 1)].join("---\n");
        let (merged, reported) = merged_with(&config, &objects, &mesh);
        assert_eq!(merged.exposure.services[0].names.len(), count, "{reported}");
        assert_eq!(merged.bindings.len(), count, "{reported}");
        for kind in ["alias", "local name"] {
            let want = format!("error: the {kind} pay.global is the hostname of a service of pay");
            assert_eq!(reported.contains(&want), count == 0, "{reported}");
        }
    }
}

#[test]
fn an_alias_of_objects_takes_no_distribution_from_a_service_of_another_namespace() {
    let config = gateway("services: []", "");
    let policy = distributing(&["{dns: pay.global}"]);
    let (merged, reported) = merged(&config, &[aliased("evil", 1), policy].join("---\n"));
    assert_eq!(reported, "");
    assert_eq!(merged.traffic[0].service.as_deref(), Some("pay.global"));
    assert_eq!(merged.traffic[0].namespace.as_deref(), Some("payments"));
}

#[test]
fn a_namespace_with_too_many_exposed_ports_takes_no_place_of_another_one() {
    let config = gateway("services: []", "");
    let ports: Vec<_> = (1..=100).collect();
    let many = (0..170).map(|at| {
        format!("{{name: s{at}, alias: s{at}.global, port: {ports:?}, clusters: [west]}}")
    });
    let many: Vec<_> = many.collect();
    let many: Vec<_> = many.iter().map(String::as_str).collect();
    let (many, app) = (of(&exposing(&many), "a-evil", 1), aliased("app", 2));
    let (merged, reported) = merged_in_any_order(&config, &many, &app);
    let open = merged.exposure.services.iter();
    let (open, closed): (Vec<_>, Vec<_>) = open.partition(|one| !one.to.is_empty());
    assert_eq!(open.len(), 16_384);
    assert_eq!(open[16_383].namespace.as_deref(), Some("app"));
    // Services without any port in use stay closed.
    assert_eq!(closed.len(), 170 - 164);
    let want = "objects expose more than 16384 ports of services, and namespace a-evil has the";
    assert_eq!(reported.matches(want).count(), 7, "{reported}");
}

#[test]
fn a_binding_beyond_the_limit_stays_out_with_the_younger_donors_of_its_service() {
    let config = gateway("bindings: {addresses: 127.0.0.1/32}", "");
    let of = |cluster: &str, namespace: &str, name: &str, ports: std::ops::Range<u16>| {
        let service =
            |port| format!("{{cluster: {cluster}, services: [{{name: a, port: {port}}}]}}");
        let services: Vec<_> = ports.map(service).collect();
        let text = binding(&services.iter().map(String::as_str).collect::<Vec<_>>());
        let text = text.replace("name: remote", &format!("name: {name}"));
        text.replace("namespace: shop", &format!("namespace: {namespace}"))
    };
    let [old, new, other] = [
        of("west", "shop", "a", 1..301),
        of("north", "shop", "b", 1..301),
        of("west", "zoo", "c", 1001..1101),
    ];
    let (merged, _) = merged(&config, &[old, new, other].join("---\n"));
    assert_eq!(merged.bindings.len(), 256);
    for binding in &merged.bindings {
        let is_shared = binding.service.host.contains("shop");
        assert_eq!(binding.cluster.len(), if is_shared { 2 } else { 1 });
    }
}
