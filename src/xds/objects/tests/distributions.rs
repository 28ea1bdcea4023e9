//! Tests of GlobalTrafficPolicy objects: entries of `traffic`, for the services of their namespace.

use std::sync::Arc;

use super::entries::{distributing, gateway, gateway_with, merged};
use super::*;
use crate::config::{Discovery, Traffic};
use crate::snapshot::mesh::{Locality, Ports, Service, Template, Workload};

#[test]
fn a_global_traffic_policy_is_the_traffic_that_a_configuration_would_have() {
    let objects = distributing(&[
        "{dns: default.payments.global, lbType: 1, target: [{region: us-west-2/*, weight: 10}, \
         {region: us-east-2/*, weight: 90}, {region: eu}]}",
        "{dns: ECHO.global, dnsPrefix: default, lbType: TOPOLOGY}",
        "{dns: other.global, lbType: failover, target: [{region: \"*\", weight: 1}]}",
        "{dns: plain.global}",
    ]);
    let services = "services: [{service: echo.app, to: [{cluster: west}], names: [echo.global]}]";
    let aliases = "names: {aliases: [{name: other.global, to: [other.app]}]}\n";
    let (config, reported) = merged(&gateway(services, aliases), &objects);
    assert_eq!(reported, "");
    let written = "traffic:
  - service: default.payments.global
    regions:
      - {region: us-west-2, weight: 10}
      - {region: us-east-2, weight: 90}
      - {region: eu, weight: 0}
  - {service: echo.app, distribution: close}
  - {service: other.app, regions: [{region: \"*\", weight: 1}]}
  - {service: plain.global, distribution: close}
";
    let limited = |entry: Traffic| Traffic { namespace: Some("payments".into()), ..entry };
    let written = gateway("services: []", written).traffic.into_iter();
    assert_eq!(config.traffic, written.map(limited).collect::<Vec<_>>());
    // An entry of the configuration, or the first of two policies, counts alone.
    let own = gateway("services: []", "traffic: [{service: a.global, distribution: any}]\n");
    let twice = distributing(&["{dns: a.global}", "{dns: b.global}", "{dns: b.global}"]);
    let (config, reported) = merged(&own, &twice);
    assert_eq!(config.traffic.len(), 2);
    let lines: Vec<_> = reported.lines().collect();
    assert!(lines[0].starts_with("o.yaml:5: warning: a.global has an entry on "), "{reported}");
    assert!(lines[1].starts_with("o.yaml:7: warning: b.global has an entry on "), "{reported}");
}

#[test]
fn a_global_traffic_policy_distributes_services_of_its_namespace_only() {
    let services = "services: [
        {service: pay.bank.svc.cluster.local, to: [{cluster: west}], names: [pay.global]},
        {service: ledger.example.com, namespace: bank, to: [{cluster: west}]}]";
    let aliases = "names: {aliases: [
        {name: both.global, to: [a.payments.svc.cluster.local, a.bank.svc.cluster.local]},
        {name: others.global, to: [a.bank.svc.cluster.local, a.shop.svc.cluster.local]},
        {name: contextual.global, to: [a.payments.svc.cluster.local, a.bank.svc.cluster.local]},
        {name: contextual.global, consumers: [west],
         to: [a.shop.svc.cluster.local, a.bank.svc.cluster.local]},
        {name: some.global, to: [a.payments.svc.cluster.local, a.example.com]},
        {name: own.global, to: [a.payments.svc.cluster.local, b.payments.global]}]}\n";
    let config = gateway(services, aliases);
    for foreign in [
        "pay.global",
        "pay.bank.global",
        "pay.bank.svc.cluster.local",
        "ledger.example.com",
        "some.global",
        "others.global",
        "contextual.global",
    ] {
        let entry = format!("{{dns: {foreign}, lbType: 1, target: [{{region: us, weight: 1}}]}}");
        let (merged, reported) = merged(&config, &distributing(&[&entry]));
        assert_eq!(merged.traffic, [], "{foreign}");
        let want = "may be a service of another namespace than payments";
        assert!(
            reported.starts_with("o.yaml:5: error: ") && reported.contains(want),
            "{foreign}: {reported}"
        );
    }
    // The namespace of the last one is known to the mesh alone.
    for own in ["a.payments.global", "own.global", "a.example.com"] {
        let entry = format!("{{dns: {own}}}");
        let (merged, reported) = merged(&config, &distributing(&[&entry]));
        assert_eq!(reported, "", "{own}");
        assert_eq!(merged.traffic[0].namespace.as_deref(), Some("payments"));
    }
    // An alias of services of several namespaces has a distribution of its own, by the oldest
    // policy of one of them.
    let policy = distributing(&["{dns: both.global}"]);
    let of_bank = policy.replace("namespace: payments", "namespace: bank");
    let (both, reported) = merged(&config, &format!("{policy}---\n{of_bank}"));
    let [entry] = &both.traffic[..] else {
        panic!("{reported}");
    };
    assert_eq!(entry.namespace.as_deref(), Some("bank"));
    assert_eq!(entry.alias_namespaces, ["payments".into()]);
    assert!(reported.contains("both.global has an entry on "), "{reported}");
    // A policy of another namespace takes no name away.
    let objects = distributing(&["{dns: a.example.com}"]);
    let evil = objects.replace("namespace: payments", "namespace: evil");
    let (merged, reported) = merged(&config, &format!("{evil}---\n{objects}"));
    assert_eq!((merged.traffic.len(), &*reported), (2, ""));
}

#[test]
fn topology_without_a_locality_of_the_gateway_is_a_warning() {
    let mut config = gateway("services: []", "");
    config.gateway.locality = Locality::default();
    let (_, reported) = merged(&config, &distributing(&["{dns: echo.global}"]));
    let want = "o.yaml:5: warning: TOPOLOGY needs the gateway's locality";
    assert!(reported.starts_with(want), "{reported}");
}

/// Returns a policy as Admiral's samples have it, in a namespace.
fn of_identity(namespace: &str, metadata: &str, prefix: &str) -> String {
    format!(
        "apiVersion: admiral.io/v1alpha1\nkind: GlobalTrafficPolicy\nmetadata: {{name: gtp, \
         namespace: {namespace}, {metadata}}}\nspec:\n  policy: [{{dnsPrefix: {prefix}, lbType: 1, \
         target: [{{region: us-west-2, weight: 10}}, {{region: us-east-2, weight: 90}}]}}]\n"
    )
}

#[test]
fn a_prefix_names_the_service_of_an_identity_and_environment() {
    let aliases = "names: {aliases: [
        {name: stage.greeting.global, to: [greeting.sample.svc.cluster.local]},
        {name: west.stage.greeting.global, to: [west.sample.svc.cluster.local]},
        {name: default.greeting.global, to: [plain.sample.svc.cluster.local]}]}\n";
    let config = gateway("services: []", aliases);
    let stage = "annotations: {admiral.io/env: stage}, labels: {identity: Greeting}";
    for (metadata, prefix, want) in [
        (stage, "default", "greeting"),
        (stage, "stage", "greeting"),
        (stage, "west", "west"),
        ("labels: {identity: greeting, admiral.io/env: stage}", "default", "greeting"),
        ("labels: {identity: greeting, env: stage}", "default", "greeting"),
        ("labels: {identity: greeting}", "default", "plain"),
    ] {
        let (merged, reported) = merged(&config, &of_identity("sample", metadata, prefix));
        assert_eq!(reported, "", "{metadata} {prefix}");
        let host = format!("{want}.sample.svc.cluster.local");
        assert_eq!(merged.traffic[0].service.as_ref(), Some(&host), "{metadata} {prefix}");
        assert_eq!(merged.traffic[0].regions.len(), 2);
    }
    // The selector has the identity as well, and a policy without one needs `dns`.
    let by_selector = of_identity("sample", "annotations: {}", "default")
        .replace("spec:", "spec:\n  selector: {identity: greeting, env: stage}");
    let (selected, reported) = merged(&config, &by_selector);
    assert_eq!((selected.traffic.len(), &*reported), (1, ""));
    let (none, reported) = merged(&config, &of_identity("sample", "annotations: {}", "default"));
    assert_eq!(none.traffic, []);
    assert!(reported.contains("`spec.policy[]` has no `dns`"), "{reported}");
}

#[test]
fn a_policy_in_a_namespace_without_the_identity_distributes_nothing_as_in_admiral() {
    let aliases = "names: {aliases: [{name: stage.greeting.global, to: [
        greeting.west.svc.cluster.local, greeting.east.svc.cluster.local]}]}\n";
    let config = gateway("services: []", aliases);
    let metadata = "annotations: {admiral.io/env: stage}, labels: {identity: greeting}";
    for (namespace, is_used) in [("west", true), ("east", true), ("admiral-sync", false)] {
        let (merged, reported) = merged(&config, &of_identity(namespace, metadata, "default"));
        assert_eq!(!merged.traffic.is_empty(), is_used, "{namespace}: {reported}");
        let want = "may be a service of another namespace than admiral-sync";
        assert_eq!(reported.contains(want), !is_used, "{reported}");
    }
}

/// Returns a mesh with a.example.com and b.example.com of namespace payments, and with a workload
/// of each service of `placed` in a region.
fn mesh(placed: &[(&str, &str)]) -> Mesh {
    let services = ["a.example.com", "b.example.com"].map(|host| Service {
        namespace: "payments".into(),
        hostname: host.into(),
        ..Service::default()
    });
    let workloads = placed.iter().map(|(host, region)| {
        let locality = Locality { region: (*region).into(), ..Locality::default() };
        let key = format!("payments/{host}");
        let template = Template { locality: Arc::new(locality), ..Template::default() };
        Workload {
            uid: format!("{host} in {region}").into(),
            services: [(key.into(), Ports::default())].into_iter().collect(),
            template: template.into(),
            ..Workload::default()
        }
    });
    Mesh::new(services, workloads)
}

/// Returns the lines of the policies in use under a mesh, and the findings.
fn distributed(mesh: &Mesh, text: &str) -> (Vec<u64>, Findings) {
    let mut config = gateway("services: []", "");
    let findings = distribute(&mut config, &objects(text), Some(mesh));
    let lines = config.traffic.iter().map(|one| one.line.number());
    (lines.collect(), findings)
}

fn weighing(host: &str, region: &str) -> String {
    format!("{{dns: {host}, lbType: 1, target: [{{region: {region}, weight: 1}}]}}")
}

#[test]
fn weights_are_compared_with_the_workloads_of_the_service() {
    let mesh = mesh(&[("a.example.com", "east"), ("b.example.com", "west")]);
    for (host, region, is_used) in [
        ("a.example.com", "east", true),
        ("a.example.com", "west", false),
        ("a.example.com", "\"*\"", true),
        ("b.example.com", "west", true),
        ("b.example.com", "east", false),
    ] {
        let policy = distributing(&[&weighing(host, region)]);
        let (used, findings) = distributed(&mesh, &policy);
        assert_eq!(!used.is_empty(), is_used, "{host} {region}: {findings}");
        let want = format!("the distribution of {host} is ignored: no workload of it");
        assert_eq!(findings.to_string().contains(&want), !is_used, "{findings}");
    }
}

#[test]
fn a_service_without_workloads_keeps_its_weights() {
    let policy = distributing(&[&weighing("a.example.com", "east")]);
    let (used, findings) = distributed(&mesh(&[("b.example.com", "west")]), &policy);
    assert_eq!((used, findings.is_empty()), (vec![5], true));
}

#[test]
fn an_unusable_policy_does_not_displace_a_usable_one() {
    let mesh = mesh(&[("a.example.com", "east")]);
    let [bad, good] = ["west", "east"].map(|region| weighing("a.example.com", region));
    let (used, findings) = distributed(&mesh, &distributing(&[&bad, &good]));
    assert_eq!(used, [6], "{findings}");
    assert_eq!(findings.0.len(), 1, "{findings}");
    assert_eq!(findings.0[0].place.line, 5);
}

#[test]
fn a_namespace_with_too_many_policies_takes_no_place_of_another_one() {
    let policies = |count, namespace: &str| {
        let names = (0..count).map(|index| format!("{{dns: n{index}.{namespace}.global}}"));
        let names: Vec<_> = names.collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        let text = distributing(&names);
        text.replace("namespace: payments", &format!("namespace: {namespace}"))
    };
    let mut config = gateway("services: []", "");
    let text = format!("{}---\n{}", policies(5000, "payments"), policies(1, "shop"));
    let findings = distribute(&mut config, &objects(&text), Some(&mesh(&[])));
    assert_eq!(config.traffic.len(), 4096);
    let (last, others) = config.traffic.split_last().expect("entries");
    assert_eq!(last.namespace.as_deref(), Some("shop"));
    let newest = others.last().and_then(|one| one.service.as_deref());
    assert_eq!(newest, Some("n4094.payments.global"));
    assert_eq!(findings.0.len(), 201);
    let want = "objects have more than 4096 distributions, and namespace payments has the most";
    assert!(findings.0[0].what.contains(want), "{findings}");
}

#[test]
fn under_an_envoy_control_plane_only_names_of_kubernetes_have_a_namespace() {
    let text = "discovery: {kind: envoy, address: \"127.0.0.1:1\", tls: off}";
    let config = gateway_with(text, "services: []", "");
    assert!(matches!(config.discovery, Discovery::Envoy { .. }));
    for (namespace, host, is_used) in [
        ("unknown", "ledger.example.com", false),
        ("payments", "ledger.example.com", false),
        ("unknown", "ledger.global", false),
        ("payments", "ledger.payments.svc.cluster.local", true),
        ("unknown", "ledger.payments.svc.cluster.local", false),
    ] {
        let policy = distributing(&[&format!("{{dns: {host}}}")]);
        let policy = policy.replace("namespace: payments", &format!("namespace: {namespace}"));
        let (merged, reported) = merged(&config, &policy);
        assert_eq!(!merged.traffic.is_empty(), is_used, "{namespace} {host}: {reported}");
        assert_eq!(reported.is_empty(), is_used, "{reported}");
    }
}
