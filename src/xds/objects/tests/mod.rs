//! Tests of objects of several clusters, from files to snapshots.

use std::fmt::Write as _;
use std::path::Path;

use super::*;
use crate::config::{Config, SUFFIXES};
use crate::reason::Reason;
use crate::snapshot::builder::{Change, build};
use crate::snapshot::mesh::Mesh;
use crate::snapshot::tests::entry;
use crate::snapshot::{
    Audience, Caller, ExposureTable, NameTable, Service as Built, ServicePort, Snapshot, TrustSet,
};
use crate::wire::Authority;

mod claims;
mod distributions;
mod endpoints;
mod entries;
mod holders;
mod passed_over;
mod tenants;

const OWN: &str = "hello.app.svc.cluster.local";
const GLOBAL: &str = "hello.app.mesh.internal";

/// Returns the configuration of a gateway in cluster and network east, with this `exposure`.
fn config(exposure: &str) -> Config {
    let text = format!(
        "gateway: {{cluster: east, network: east, locality: {{region: r1}}}}
identity: {{kind: files, chain: Cargo.toml, key: Cargo.toml, roots: Cargo.toml}}
trust: {{domains: [{{name: east.local, cluster: east}}]}}
listeners: [{{name: a, bind: \"[::]:15008\"}}]
discovery: {{kind: file, path: Cargo.toml}}
exposure: {exposure}
"
    );
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("s.yaml");
    let (config, findings) = Config::parse(&path, &text);
    config.unwrap_or_else(|| panic!("{findings}"))
}

fn objects(text: &str) -> Objects {
    parse(Path::new("o.yaml"), text).unwrap_or_else(|findings| panic!("{findings}\n{text}"))
}

fn joined_with(mesh: &Mesh, text: &str, exposure: &str) -> JoinResult {
    joined_after(&AddressHolders::default(), mesh, text, exposure)
}

/// As [`joined_with`], after a join with these holders of addresses.
fn joined_after(held: &AddressHolders, mesh: &Mesh, text: &str, exposure: &str) -> JoinResult {
    join(mesh, &objects(text), &config(exposure), held)
}

fn joined(text: &str) -> JoinResult {
    joined_with(&Mesh::default(), text, "{}")
}

fn snapshot(joined: &JoinResult) -> Snapshot {
    let change = Change {
        mesh: Some((joined.mesh.clone(), "east".into())),
        scope: Some(joined.scope.clone()),
        names: Some(NameTable::new(SUFFIXES, [])),
        ..Change::default()
    };
    build(&Snapshot::default(), change)
}

/// Returns the endpoints that the gateway dials for port 80 of a service.
fn endpoints_of(service: &Built) -> Vec<String> {
    let endpoints = service.ports.get(&80).map(|set| &set.endpoints);
    let endpoints = endpoints.into_iter().flatten();
    let mut shown: Vec<_> = endpoints.map(|one| one.address.to_string()).collect();
    shown.sort();
    shown
}

/// Returns the endpoints of the service with this hostname, if it exists.
fn endpoints_of_host(joined: &JoinResult, host: &str) -> Option<Vec<String>> {
    snapshot(joined).services.get(host).map(|service| endpoints_of(service))
}

/// Returns the endpoints of the service that peers reach by this name, if it is exported.
fn exposed_endpoints(joined: &JoinResult, host: &str) -> Option<Vec<String>> {
    let snapshot = snapshot(joined);
    let service = snapshot.service_by_name(host)?;
    let is_exported = snapshot.is_exported(&service.hostname, 80);
    is_exported.then(|| endpoints_of(service))
}

/// Returns a Service of a cluster, with a label for its scope.
fn service(cluster: &str, label: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Service\nmetadata:\n  name: hello\n  namespace: app\n  \
         labels: {{topology.istio.io/cluster: {cluster}, {label}}}\n\
         spec: {{ports: [{{name: http, port: 80}}]}}\n"
    )
}

/// Returns a slice of a cluster, with additional labels and with endpoints as YAML list
/// entries.
fn slice(cluster: &str, labels: &str, endpoints: &str) -> String {
    format!(
        "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: hello-1\n  \
         namespace: app\n  labels: {{kubernetes.io/service-name: hello, \
         topology.istio.io/cluster: {cluster}, {labels}}}\naddressType: IPv4\n\
         ports: [{{name: http, port: 8080}}]\nendpoints: [{endpoints}]\n"
    )
}

fn export(cluster: &str, created: &str) -> String {
    format!(
        "---\napiVersion: multicluster.x-k8s.io/v1alpha1\nkind: ServiceExport\n\
         metadata: {{name: hello, namespace: app, creationTimestamp: {created}, \
         labels: {{topology.istio.io/cluster: {cluster}}}}}\n"
    )
}

fn at(ip: &str) -> String {
    format!("{{addresses: [{ip}]}}")
}

#[test]
fn s4_six_row_scope_table() {
    const GLOBALLY: &str = "solo.io/service-scope: global";
    const LOCAL: &str = "10.0.0.1:8080";
    const REMOTE: &str = "10.0.0.2:8080";
    // Label of the Service in this cluster, label of the Service in the other cluster, and
    // endpoints of the global service.
    type Row = (Option<&'static str>, Option<&'static str>, Option<&'static [&'static str]>);
    let rows: [Row; 6] = [
        (Some(""), Some(""), None),
        (None, Some(GLOBALLY), Some(&[REMOTE])),
        (Some(""), Some(GLOBALLY), Some(&[REMOTE])),
        (Some(GLOBALLY), Some(GLOBALLY), Some(&[LOCAL, REMOTE])),
        (Some(GLOBALLY), None, Some(&[LOCAL])),
        (Some(GLOBALLY), Some(""), Some(&[LOCAL])),
    ];
    for (index, (local, remote, want)) in rows.into_iter().enumerate() {
        for network in ["east", "west"] {
            let mut text = String::new();
            if let Some(label) = local {
                text += &service("east", label);
                text += &slice("east", "", &at("10.0.0.1"));
            }
            if let Some(label) = remote {
                text += &service("west", label);
                let label = format!("topology.istio.io/network: {network}");
                text += &slice("west", &label, &at("10.0.0.2"));
            }
            let joined = joined(&text);
            let row = format!("row {}, the other cluster in network {network}", index + 1);
            assert!(joined.warnings.is_empty(), "{row}: {}", joined.warnings);
            // Endpoints of another network are known but not dialled.
            let is_near = |address: &&&str| network == "east" || **address == LOCAL;
            let want = want.map(|all| {
                let near = all.iter().filter(is_near).map(ToString::to_string);
                near.collect::<Vec<_>>()
            });
            assert_eq!(exposed_endpoints(&joined, GLOBAL), want, "{row}");
            // The Service itself is unchanged, and exported only if it declares so. Without a
            // Service, its name leads to the global one.
            let own = local.map(|_| vec![LOCAL.to_owned()]);
            assert_eq!(endpoints_of_host(&joined, OWN), own, "{row}");
            let own = match local {
                None => want.clone(),
                Some(label) => own.filter(|_| label == GLOBALLY),
            };
            assert_eq!(exposed_endpoints(&joined, OWN), own, "{row}");
            let remote = joined.mesh.workloads.values().find(|one| *one.cluster == *"west");
            let is_known = want.is_some() && index < 4 && index > 0;
            assert_eq!(remote.is_some(), is_known, "{row}");
            assert!(remote.is_none_or(|one| *one.network == *network), "{row}");
        }
    }
}

#[test]
fn a_global_only_service_has_the_endpoints_of_all_under_its_own_name() {
    let mut text = service("east", "solo.io/service-scope: global-only");
    text += &slice("east", "", &at("10.0.0.1"));
    text += &service("west", "istio.io/global: \"true\"");
    text += &slice("west", "topology.istio.io/network: east", &at("10.0.0.2"));
    let joined = joined(&text);
    let both = vec!["10.0.0.1:8080".to_owned(), "10.0.0.2:8080".to_owned()];
    assert_eq!(endpoints_of_host(&joined, OWN), Some(both));
    assert_eq!(joined.mesh.services.len(), 1);
    assert!(joined.scope.exported.contains(OWN) && joined.scope.exported.contains(GLOBAL));
}

#[test]
fn an_entry_narrows_an_export_under_all_its_names() {
    let mut text = service("east", "istio.io/global: \"true\"");
    text += &slice("east", "", &at("10.0.0.1"));
    text += &service("west", "istio.io/global: \"true\"");
    text += &slice("west", "topology.istio.io/network: east", &at("10.0.0.2"));
    let exported = snapshot(&joined(&text));
    for own in [None, Some(OWN), Some(GLOBAL)] {
        let mut table = ExposureTable::new(false);
        if let Some(host) = own {
            let to = vec![Audience { namespaces: vec!["shop".into()], ..Audience::default() }];
            table.add(entry(host, to));
        }
        let change = Change {
            exposure: Some(table),
            trust: Some(TrustSet::new([("west.local", "west")])),
            ..Change::default()
        };
        let snapshot = build(&exported, change);
        for (namespace, host) in [("shop", OWN), ("shop", GLOBAL), ("bank", OWN), ("bank", GLOBAL)]
        {
            let caller = Caller {
                trust_domain: "west.local",
                issuer: None,
                namespace,
                service_account: "a",
            };
            let requested = Authority::parse(&format!("{host}:80")).unwrap();
            let found = snapshot.find(caller, &requested).unwrap();
            assert_eq!(&*found.service.hostname, host);
            let verdict = snapshot.evaluate_exposure(
                caller,
                &requested,
                ServicePort { host, port: 80 },
                &found.matched_by,
            );
            let want =
                if own.is_none() || namespace == "shop" { Ok(()) } else { Err(Reason::NotForPeer) };
            assert_eq!(verdict, want, "{own:?}: {namespace} asks for {host}");
        }
    }
}

#[test]
fn what_a_service_says_of_its_scope() {
    let table = [
        ("", false, false),
        ("solo.io/service-scope: global", true, false),
        ("solo.io/service-scope: global-only", true, false),
        ("solo.io/service-scope: cluster", false, true),
        ("istio.io/global: \"true\"", true, false),
        ("istio.io/global: true", true, false),
        ("istio.io/global: \"false\"", false, true),
    ];
    for (label, exported, local) in table {
        let joined = joined(&service("east", label));
        assert_eq!(joined.scope.exported.contains(OWN), exported, "{label}");
        assert_eq!(joined.scope.local.contains(OWN), local, "{label}");
        assert_eq!(joined.scope.local.contains(GLOBAL), local, "{label}");
    }
    let annotated = service("east", "")
        .replace("  labels:", "  annotations: {networking.istio.io/exportTo: \".\"}\n  labels:");
    assert!(joined(&annotated).scope.local.contains(OWN));
    let both = format!(
        "{}{}",
        service("east", "istio.io/global: \"false\""),
        export("east", "2026-01-31T12:00:00Z")
    );
    let joined = joined(&both);
    assert!(joined.scope.local.contains(OWN) && !joined.scope.exported.contains(OWN));
    let reported = joined.warnings.to_string();
    assert!(
        reported.contains("o.yaml:10: warning: the export of app/hello has no effect"),
        "{reported}"
    );
}

#[test]
fn a_rule_and_the_default_export_what_does_not_opt_out() {
    let namespace = "---\napiVersion: v1\nkind: Namespace\n\
                     metadata: {name: app, labels: {team: shop}}\n";
    let auto = |rule: &str| format!("{{files: [Cargo.toml], auto: [{rule}]}}");
    let by_team = auto("{namespaces: {matchLabels: {team: shop}}}");
    let by_name = auto("{namespaces: {matchLabels: {kubernetes.io/metadata.name: app}}}");
    let by_tier = auto("{services: {matchLabels: {tier: web}}}");
    let all = "{default: all}".to_owned();
    let table = [
        (&by_team, "", true),
        (&by_team, "istio.io/global: \"false\"", false),
        (&by_name, "", true),
        (&by_tier, "tier: web", true),
        (&by_tier, "tier: db", false),
        (&by_tier, "tier: web, istio.io/global: \"false\"", false),
        (&all, "", true),
        (&all, "istio.io/global: \"false\"", false),
    ];
    for (exposure, label, want) in table {
        let text = format!("{namespace}{}", service("east", label));
        let joined = joined_with(&Mesh::default(), &text, exposure);
        assert_eq!(joined.scope.exported.contains(OWN), want, "{exposure} {label}");
        let remote = format!("{namespace}{}", service("west", label));
        let joined = joined_with(&Mesh::default(), &remote, exposure);
        assert!(joined.scope.exported.is_empty(), "another cluster exports by its own rules");
    }
}

#[test]
fn a_rule_about_labels_exports_nothing_of_an_unknown_namespace() {
    let auto = |rule: &str| format!("{{files: [Cargo.toml], auto: [{{namespaces: {rule}}}]}}");
    let expression =
        |text: &str| auto(&format!("{{matchExpressions: [{{key: env, operator: {text}}}]}}"));
    let text = service("east", "");
    let reported = "---\napiVersion: v1\nkind: Namespace\nmetadata: {name: app}\n";
    for rule in ["NotIn, values: [prod]", "DoesNotExist"] {
        let exposure = expression(rule);
        let untold = joined_with(&Mesh::default(), &text, &exposure);
        assert!(untold.scope.exported.is_empty(), "{rule}: it may be prod");
        let joined = joined_with(&Mesh::default(), &format!("{reported}{text}"), &exposure);
        assert!(joined.scope.exported.contains(OWN), "{rule}");
    }
    let by_name = auto("{matchLabels: {kubernetes.io/metadata.name: app}}");
    let joined = joined_with(&Mesh::default(), &text, &by_name);
    assert!(joined.scope.exported.contains(OWN), "a name needs no object");
}

#[test]
fn an_export_of_no_service_is_no_route_and_an_entry_for_a_local_one_is_pointed_at() {
    let joined = joined(&export("east", "null"));
    let reported = joined.warnings.to_string();
    assert!(joined.scope.exported.is_empty() && joined.mesh.services.is_empty());
    let want = "o.yaml:2: warning: the export of app/hello has no effect: no such Service";
    assert!(reported.starts_with(want), "{reported}");
    let entry = format!("{{services: [{{service: {OWN}, to: [{{anyone: true}}]}}]}}");
    let text = service("east", "istio.io/global: \"false\"");
    let joined = joined_with(&Mesh::default(), &text, &entry);
    let reported = joined.warnings.to_string();
    assert!(
        reported.contains("s.yaml:6: warning: hello.app.svc.cluster.local is exposed to nobody")
    );
}

#[test]
fn many_clusters_share_one_service() {
    let mut text = String::new();
    for cluster in 0..50 {
        let name = format!("c{cluster}");
        text += &service(&name, "istio.io/global: \"true\"");
        let near = "topology.istio.io/network: east";
        let _ = write!(text, "{}", slice(&name, near, &at(&format!("10.0.1.{cluster}"))));
    }
    let joined = joined(&text);
    assert_eq!(endpoints_of_host(&joined, GLOBAL).map(|all| all.len()), Some(50));
    assert_eq!(endpoints_of_host(&joined, OWN), None);
}

#[test]
fn a_directory_is_its_yaml_and_json_files_and_one_that_is_no_object_spoils_all() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let paths = [folder.path().to_owned()];
    write("b.yml", &service("east", ""));
    write("a.yaml", &slice("east", "", &at("10.0.0.1")));
    write("c.json", "{\"apiVersion\": \"v1\", \"kind\": \"ConfigMap\"}");
    write(".hidden.yaml", "broken: [");
    write("notes.txt", "broken: [");
    std::fs::create_dir(folder.path().join("d.yaml")).unwrap();
    let (objects, findings) = load(&paths).unwrap();
    assert_eq!((objects.services.len(), objects.slices.len()), (1, 1));
    assert!(findings.to_string().contains("c.json:1: warning: objects of ConfigMap of v1"));
    write("d.yml", "kind: Service\n");
    let reported = load(&paths).unwrap_err().to_string();
    assert!(reported.contains("d.yml:1: error: `object` has no `apiVersion`"), "{reported}");
    assert!(reported.contains("c.json:1: warning"), "{reported}");
}
