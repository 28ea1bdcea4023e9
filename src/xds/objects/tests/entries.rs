//! Tests of objects of other projects: the entries of the configuration that they describe.

use super::*;
use crate::config::Binding;

/// Returns the configuration of a gateway in cluster east with these keys of `exposure`, and these
/// sections.
pub(super) fn gateway(exposure: &str, sections: &str) -> Config {
    gateway_with("discovery: {kind: file, path: Cargo.toml}", exposure, sections)
}

/// Returns that configuration with another source.
pub(super) fn gateway_with(discovery: &str, exposure: &str, sections: &str) -> Config {
    let text = format!(
        "gateway: {{cluster: east, locality: {{region: us-east, zone: a}}}}
identity: {{kind: files, chain: Cargo.toml, key: Cargo.toml, roots: Cargo.toml}}
trust:
  domains:
    - {{name: east.local, cluster: east}}
    - {{name: west.local, cluster: west}}
    - {{name: north.local, cluster: north}}
listeners: [{{name: a, bind: \"127.0.0.1:15008\"}}]
{discovery}
exposure: {{files: [Cargo.toml], {exposure}}}
{sections}"
    );
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("s.yaml");
    let (config, findings) = Config::parse(&path, &text);
    config.unwrap_or_else(|| panic!("{findings}"))
}

/// Merges a text of objects. Returns the findings without the path of the file.
pub(super) fn merged(config: &Config, text: &str) -> (Config, String) {
    merged_with(config, text, &Mesh::default())
}

/// Merges a text of objects beside a mesh file.
pub(super) fn merged_with(config: &Config, text: &str, mesh: &Mesh) -> (Config, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("o.yaml");
    std::fs::write(&file, text).unwrap();
    let (objects, findings) = load(&[file]).unwrap_or_else(|findings| panic!("{findings}"));
    let (mut config, more) = merge(config, &objects, mesh);
    let last = distribute(&mut config, &objects, None);
    let all = findings.0.iter().chain(&more.0).chain(&last.0);
    let path = format!("{}/", folder.path().display());
    let lines: Vec<_> = all.map(|one| one.to_string().replace(&path, "")).collect();
    (config, lines.join("\n"))
}

/// Returns a policy of namespace app with these entries of `exposed`, one on a line from 5.
pub(super) fn exposing(entries: &[&str]) -> String {
    format!(
        "apiVersion: multicluster.istio.io/v1alpha1\nkind: ServiceExpositionPolicy\nmetadata: \
         {{name: shared, namespace: app}}\nspec: {{exposed: [\n{}]}}\n",
        entries.join(",\n")
    )
}

/// Returns a binding of namespace shop with these entries of `remote`, one on a line from 5.
pub(super) fn binding(entries: &[&str]) -> String {
    format!(
        "apiVersion: multicluster.istio.io/v1alpha1\nkind: RemoteServiceBinding\nmetadata: \
         {{name: remote, namespace: shop}}\nspec: {{remote: [\n{}]}}\n",
        entries.join(",\n")
    )
}

/// Returns a policy of traffic of namespace payments with these entries, one on a line from 5.
pub(super) fn distributing(entries: &[&str]) -> String {
    format!(
        "apiVersion: admiral.io/v1alpha1\nkind: GlobalTrafficPolicy\nmetadata: {{name: gtp, \
         namespace: payments}}\nspec: {{selector: {{identity: echo}}, policy: [\n{}]}}\n",
        entries.join(",\n")
    )
}

#[test]
fn a_policy_of_exposition_is_the_entries_that_a_configuration_would_have() {
    let objects = exposing(&[
        "{name: echo, alias: shared-echo, port: 80, clusters: [west, north]}",
        "{name: ledger, alias: ledger.global, port: [81, 82], clusters: [west]}",
        "{name: open, clusters: [north]}",
    ]);
    let (config, reported) = merged(&gateway("services: []", ""), &objects);
    assert_eq!(reported, "");
    let written = "services: [
        {service: \"echo.app.svc.cluster.local:80\", namespace: app,
         to: [{cluster: west}, {cluster: north}],
         names: [\"shared-echo.app.svc.cluster.local:80\"]},
        {service: \"ledger.app.svc.cluster.local:81\", namespace: app, to: [{cluster: west}],
         names: [\"ledger.global:81\"]},
        {service: \"ledger.app.svc.cluster.local:82\", namespace: app, to: [{cluster: west}],
         names: [\"ledger.global:82\"]},
        {service: open.app.svc.cluster.local, namespace: app, to: [{cluster: north}]}]";
    let mut written = gateway(written, "").exposure.services;
    for entry in &mut written {
        entry.is_of_object = true;
    }
    assert_eq!(config.exposure.services, written);
    let lines: Vec<_> = config.exposure.services.iter().map(|one| one.line.number()).collect();
    assert_eq!(lines, [5, 6, 6, 7]);
}

#[test]
fn an_invalid_policy_of_exposition_closes_its_services() {
    let created = "a misspelt time";
    let late = exposing(&["{name: echo, clusters: [west]}"]);
    let late = late.replace("name: shared", &format!("creationTimestamp: {created}, name: s"));
    let (config, reported) = merged(&gateway("services: []", ""), &late);
    let want = format!("o.yaml:1: error: `object` has `{created}` for its creationTimestamp");
    assert!(reported.starts_with(&want), "{reported}");
    assert_eq!(config.exposure.services[0].to, []);
    let objects = exposing(&["{name: echo, clusters: [west]}", "{name: a, subset: v1}"]);
    let (config, reported) = merged(&gateway("services: []", ""), &objects);
    assert!(!reported.is_empty());
    let services: Vec<_> = config.exposure.services.iter().collect();
    assert_eq!(services.len(), 2);
    assert!(services.iter().all(|one| one.to.is_empty()), "{services:?}");
    let unnamed = exposing(&["{name: echo, clusters: [moon]}"]);
    let (config, _) = merged(&gateway("services: []", ""), &unnamed);
    assert_eq!(config.exposure.services[0].to, []);
    let policy = exposing(&["{name: echo, clusters: [west]}"]);
    let nameless = policy.replace("name: shared, ", "");
    let (config, _) = merged(&gateway("services: []", ""), &nameless);
    assert_eq!(config.exposure.services[0].to, [], "a policy without a name");
}

#[test]
fn an_entry_of_the_configuration_counts_alone_whatever_name_of_the_family_it_has() {
    for service in ["echo.app.svc.cluster.local:80", "echo.app.mesh.internal", "echo.app.global:80"]
    {
        let own = format!("services: [{{service: \"{service}\", to: [{{cluster: north}}]}}]");
        let config = gateway(&own, "");
        let objects = exposing(&["{name: echo, port: 80, clusters: [west]}"]);
        let (merged, reported) = merged(&config, &objects);
        assert_eq!(merged, config);
        let want = "o.yaml:5: warning: echo.app.svc.cluster.local:80 has an entry on ";
        assert!(reported.starts_with(want), "{reported}");
    }
}

#[test]
fn objects_of_another_cluster_are_its_own() {
    let label = "metadata: {labels: {topology.istio.io/cluster: west}, name";
    let config = gateway("bindings: {addresses: 127.64.0.0/10}", "");
    for object in [
        exposing(&["{name: echo, clusters: [west]}"]),
        binding(&["{cluster: west, services: [{name: echo, port: 80}]}"]),
        distributing(&["{dns: echo.global, lbType: 0}"]),
    ] {
        assert_ne!(merged(&config, &object).0, config);
        let theirs = object.replace("metadata: {name", label);
        assert_eq!(merged(&config, &theirs), (config.clone(), String::new()));
    }
}

#[test]
fn a_remote_service_binding_is_the_bindings_that_a_configuration_would_have() {
    let objects = binding(&[
        "{cluster: west, services: [{name: echo, port: 80}, {name: echo, port: 81}]}",
        "{cluster: north, services: [{name: echo, port: 80}, \
         {name: pay.global, alias: pay, namespace: shop, port: 443}]}",
    ]);
    let keys = "bindings: {addresses: 10.0.0.5/32, clients: [10.0.0.0/8]}";
    let (config, reported) = merged(&gateway(keys, ""), &objects);
    assert_eq!(reported, "");
    let written = "bindings:
  - {cluster: [west, north], service: \"echo.shop.svc.cluster.local:80\", listen: \"10.0.0.5:80\",
     clients: [10.0.0.0/8]}
  - {cluster: west, service: \"echo.shop.svc.cluster.local:81\", listen: \"10.0.0.5:81\",
     clients: [10.0.0.0/8]}
  - {cluster: north, service: \"pay.global:443\", listen: \"10.0.0.5:443\", clients: [10.0.0.0/8],
     names: [pay.shop.svc.cluster.local]}
";
    let written = gateway(keys, written).bindings.into_iter();
    let written = written.map(|binding| Binding { is_of_object: true, ..binding });
    assert_eq!(config.bindings, written.collect::<Vec<_>>());
    // In a larger network each name has an address of its own, which does not depend on others.
    let keys = "bindings: {addresses: 127.64.0.0/10}";
    let (config, _) = merged(&gateway(keys, ""), &objects);
    let ips: Vec<_> = config.bindings.iter().map(|one| one.listen.ip()).collect();
    assert!(ips[0] == ips[1] && ips[0] != ips[2], "{ips:?}");
    let alone = binding(&["{cluster: west, services: [{name: echo, port: 80}]}"]);
    let (config, _) = merged(&gateway(keys, ""), &alone);
    assert_eq!(config.bindings[0].listen.ip(), ips[0]);
    // Without addresses nothing is opened.
    let (config, reported) = merged(&gateway("services: []", ""), &alone);
    assert_eq!(config.bindings, []);
    let want = "o.yaml:5: warning: no binding of echo.shop.svc.cluster.local:80 is opened; write";
    assert!(reported.starts_with(want), "{reported}");
}

#[test]
fn an_object_gives_local_names_in_its_own_namespace_only() {
    let keys = "bindings: {addresses: 10.0.0.0/24}";
    for alias in ["payments.bank.com", "x.prod.svc.cluster.local", "x.prod.global"] {
        let objects = binding(&[&format!(
            "{{cluster: west, services: [{{name: echo, alias: {alias}, port: 80}}]}}"
        )]);
        let (config, reported) = merged(&gateway(keys, ""), &objects);
        assert_eq!(config.bindings, [], "{alias}");
        let want = format!("the local name {alias} may be another service");
        assert!(reported.contains(&want), "{reported}");
    }
    // Another tenant, of the same age and later by name, does not become a donor of the name.
    let shop = binding(&["{cluster: west, services: [{name: echo.global, port: 80}]}"]);
    let other = binding(&["{cluster: north, services: [{name: echo.global, port: 80}]}"]);
    let other = other.replace("namespace: shop", "namespace: zoo");
    let (config, reported) = merged(&gateway(keys, ""), &format!("{shop}---\n{other}"));
    assert_eq!(config.bindings.len(), 1);
    assert_eq!(config.bindings[0].cluster, ["west"]);
    let want = "the local name echo.global is that of an object in shop";
    assert!(reported.contains(want), "{reported}");
}

#[test]
fn a_namespace_with_too_many_bindings_takes_no_place_of_another_one() {
    let config = gateway("bindings: {addresses: 127.0.0.1/32}", "");
    let service = |port| format!("{{cluster: west, services: [{{name: a, port: {port}}}]}}");
    let many: Vec<_> = (1..=300).map(service).collect();
    let many = binding(&many.iter().map(String::as_str).collect::<Vec<_>>());
    let (alone, reported) = merged(&config, &many);
    assert_eq!(alone.bindings.len(), 256);
    let want =
        "error: objects have more than 256 bindings, and namespace shop has the most of them";
    assert_eq!(reported.matches(want).count(), 44, "{reported}");
    for other in ["app", "zoo"] {
        let one = binding(&[&service(1000)]).replace("shop", other);
        for text in [format!("{one}---\n{many}"), format!("{many}---\n{one}")] {
            let (merged, reported) = merged(&config, &text);
            assert_eq!(merged.bindings.len(), 256);
            let mut hosts = merged.bindings.iter().map(|one| &*one.service.host);
            assert!(hosts.any(|host| host == format!("a.{other}.svc.cluster.local")));
            assert_eq!(reported.matches(want).count(), 45, "{reported}");
        }
    }
}

#[test]
fn a_namespace_with_many_names_leaves_others_an_address_of_a_small_network() {
    let config = gateway("bindings: {addresses: 127.64.0.0/29}", "");
    let service = |name: &str| format!("{{cluster: west, services: [{{name: {name}, port: 80}}]}}");
    let many = ["a", "b", "c", "d", "e", "f", "g", "h"].map(service);
    let many = binding(&many.each_ref().map(String::as_str));
    let one = binding(&[&service("z")]).replace("shop", "zoo");
    let (merged, reported) = merged(&config, &format!("{many}---\n{one}"));
    let hosts: Vec<_> = merged.bindings.iter().map(|one| &one.service.host[..3]).collect();
    assert_eq!(hosts, ["a.s", "b.s", "c.s", "d.s", "e.s", "z.z"]);
    assert_eq!(reported.matches("has no free address").count(), 3, "{reported}");
}

#[test]
fn a_misspelt_kind_version_or_field_is_an_error_and_closes_services() {
    let policy = exposing(&["{name: echo, clusters: [west]}"]);
    let config = gateway("services: []", "");
    for (from, to, want) in [
        (
            "ServiceExpositionPolicy",
            "ServiceExpositonPolicy",
            "o.yaml:1: error: objects of ServiceExpositonPolicy of multicluster.istio.io/v1alpha1 \
             are not supported (did you mean ServiceExpositionPolicy of",
        ),
        (
            "multicluster.istio.io/v1alpha1",
            "multicluster.istio.io/v1",
            "o.yaml:1: error: objects of ServiceExpositionPolicy of multicluster.istio.io/v1 are",
        ),
        (
            "multicluster.istio.io/",
            "multiclutser.istio.io/",
            "o.yaml:1: error: objects of ServiceExpositionPolicy of multiclutser.istio.io/",
        ),
        (
            "spec: ",
            "spec: {exposed: [{name: echo, clusters: [west]}]}\nspecs: ",
            "o.yaml:5: error: unknown key `specs` in `object` (did you mean `spec`?)",
        ),
    ] {
        let (merged, reported) = merged(&config, &policy.replacen(from, to, 1));
        assert!(reported.contains(want), "{to}: {reported}");
        let [service] = &merged.exposure.services[..] else {
            panic!("{to}: {reported}");
        };
        assert_eq!(service.to, [], "{to}");
    }
}

#[test]
fn a_misspelt_spec_is_an_error() {
    let policy = exposing(&["{name: echo, clusters: [west]}"]);
    let config = gateway("services: []", "");
    let (merged, reported) = merged(&config, &policy.replacen("spec:", "sepc:", 1));
    assert_eq!(merged.exposure.services, []);
    for want in [
        "o.yaml:1: error: `object` has no `spec`",
        "o.yaml:4: error: unknown key `sepc` in `object` (did you mean `spec`?)",
    ] {
        assert!(reported.contains(want), "{reported}");
    }
}

#[test]
fn a_kind_without_a_group_is_an_error_and_closes_services() {
    let policy = exposing(&["{name: echo, clusters: [west]}"]);
    let policy = policy.replacen("multicluster.istio.io/v1alpha1", "v1", 1);
    let (merged, reported) = merged(&gateway("services: []", ""), &policy);
    assert!(reported.contains("error: objects of ServiceExpositionPolicy of v1 are"));
    assert_eq!(merged.exposure.services[0].to, [], "{reported}");
}

#[test]
fn a_misspelt_kind_of_another_group_is_an_error_that_affects_no_service() {
    let policy = exposing(&["{name: echo, clusters: [west]}"]);
    let config = gateway("services: []", "");
    let other = policy.replacen(
        "multicluster.istio.io/v1alpha1\nkind: ServiceExposition",
        "example.com/v1\nkind: ServiceExpositon",
        1,
    );
    let (merged, reported) = merged(&config, &other);
    assert!(reported.starts_with("o.yaml:1: error: objects of "), "{reported}");
    assert_eq!(merged, config);
    for (version, kind, rest) in [
        ("example.com/v1", "NameSpace", ""),
        ("example.com/v1", "NameSpace", ", namespace: evil"),
        ("example.com/v1", "Services", ", namespace: evil"),
        ("v1", "NameSpace", ", namespace: evil"),
    ] {
        let text = format!("apiVersion: {version}\nkind: {kind}\nmetadata: {{name: app{rest}}}\n");
        let read = objects(&text);
        assert!(read.passed_over.namespaces.is_empty(), "{text}");
        assert!(read.services.is_empty(), "{text}");
    }
}

#[test]
fn a_namespace_with_a_namespace_is_invalid() {
    let text = "apiVersion: v1\nkind: Namespace\nmetadata: {name: app, namespace: evil}\n";
    let read = objects(text);
    assert_eq!((read.namespaces.len(), read.passed_over.namespaces.len()), (0, 1));
    let (_, reported) = merged(&gateway("services: []", ""), text);
    let want = "o.yaml:1: error: `object` is a Namespace with `metadata.namespace`; write the";
    assert!(reported.starts_with(want), "{reported}");
}

#[test]
fn a_list_of_a_kind_is_read_and_one_without_items_is_an_error() {
    let config = gateway("services: []", "");
    let policy = exposing(&["{name: echo, clusters: [west]}"]);
    let item = policy.replace('\n', "\n  ");
    for (version, kind) in
        [("v1", "List"), ("multicluster.istio.io/v1alpha1", "ServiceExpositionPolicyList")]
    {
        let list = |key| format!("apiVersion: {version}\nkind: {kind}\n{key}:\n- {item}\n");
        let (merged, reported) = merged(&config, &list("items"));
        assert_eq!((merged.exposure.services.len(), &*reported), (1, ""), "{kind}");
        let findings = parse(Path::new("o.yaml"), &list("itmes")).expect_err("unusable");
        let reported = findings.to_string();
        for want in ["`object` has no `items`", "unknown key `itmes` in `object`"] {
            assert!(reported.contains(want), "{kind}: {reported}");
        }
    }
}

#[test]
fn kinds_of_other_groups_are_warnings_and_those_of_supported_groups_are_errors() {
    let config = gateway("services: []", "");
    for (version, kind, severity) in [
        ("v1", "ConfigMap", "warning"),
        ("v1", "Endpoints", "warning"),
        ("v1", "ServiceAccount", "warning"),
        ("networking.istio.io/v1", "ServiceEntry", "warning"),
        ("serving.knative.dev/v1", "Service", "warning"),
        ("net.gke.io/v1", "ServiceExport", "warning"),
        ("v1", "ServiceExport", "error"),
        ("v2", "Service", "error"),
        ("example.com/v1", "GlobalTraficPolicy", "error"),
        ("admiral.io/v2", "GlobalTrafficPolicy", "error"),
        ("admiral.io/v1", "Dependency", "warning"),
        ("discovery.k8s.io/v1beta1", "EndpointSlice", "error"),
    ] {
        let object = format!("apiVersion: {version}\nkind: {kind}\nmetadata: {{name: a}}\n");
        let (_, reported) = merged(&config, &object);
        let want = format!("o.yaml:1: {severity}: objects of {kind} of {version} are ");
        assert!(reported.starts_with(&want), "{want}: {reported}");
    }
}
