//! Tests of objects that are not a case of `tests/corpus/findings/join` or `merge`: files, names in
//! snapshots, and limits.

use std::path::Path;

use super::*;
use crate::config::{Config, SUFFIXES};
use crate::reason::Reason;
use crate::snapshot::builder::{Change, build};
use crate::snapshot::mesh::Mesh;
use crate::snapshot::tests::entry;
use crate::snapshot::{Audience, Caller, ExposureTable, NameTable, Snapshot, TrustSet};
use crate::wire::Authority;

mod limits;

const OWN: &str = "hello.app.svc.cluster.local";
const GLOBAL: &str = "hello.app.mesh.internal";
const EXPORTED: &str = "istio.io/global: \"true\"";

/// Gateways of the cases of objects, without exposure.
const JOIN: &str = include_str!("../../../../tests/corpus/findings/join/base.yaml");
const MERGE: &str = include_str!("../../../../tests/corpus/findings/merge/base.yaml");

/// Returns the configuration of a gateway with this `exposure`.
fn config(base: &str, exposure: &str) -> Config {
    let sections = base.lines().filter(|line| !line.starts_with("exposure:"));
    let text = sections.fold(format!("exposure: {exposure}\n"), |all, line| all + line + "\n");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("s.yaml");
    let (config, findings) = Config::parse(&path, &text);
    config.unwrap_or_else(|| panic!("{findings}"))
}

fn objects(text: &str) -> Objects {
    parse(Path::new("o.yaml"), text).unwrap_or_else(|findings| panic!("{findings}\n{text}"))
}

fn joined_with(text: &str, exposure: &str) -> JoinResult {
    let held = AddressHolders::default();
    join(&Mesh::default(), &objects(text), &config(JOIN, exposure), &held)
}

fn joined(text: &str) -> JoinResult {
    joined_with(text, "{}")
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
fn an_entry_narrows_an_export_under_all_its_names() {
    let mut text = service("east", EXPORTED);
    text += &slice("east", "", &at("10.0.0.1"));
    text += &service("west", EXPORTED);
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
                namespace,
                service_account: "a",
                ..Caller::UNKNOWN
            };
            let requested = Authority::parse(&format!("{host}:80")).unwrap();
            let found = snapshot.find(caller, &requested).unwrap();
            assert_eq!(&*found.service.hostname, host);
            let verdict = snapshot.evaluate_exposure(caller, found.requested(&requested));
            let want =
                if own.is_none() || namespace == "shop" { Ok(()) } else { Err(Reason::NotForPeer) };
            assert_eq!(verdict, want, "{own:?}: {namespace} asks for {host}");
        }
    }
}

#[test]
fn many_clusters_share_one_service() {
    let mut text = String::new();
    for cluster in 0..50 {
        let name = format!("c{cluster}");
        text += &service(&name, EXPORTED);
        let near = "topology.istio.io/network: east";
        text += &slice(&name, near, &at(&format!("10.0.1.{cluster}")));
    }
    let joined = joined(&text);
    let services = snapshot(&joined).services;
    assert_eq!(services.get(GLOBAL).map(|one| one.ports[&80].endpoints.len()), Some(50));
    assert!(services.get(OWN).is_none());
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

#[test]
fn a_closed_namespace_exposes_no_service_whether_it_is_known_or_not() {
    let mut text = service("east", EXPORTED) + &slice("east", "", &at("10.0.0.1"));
    text += &service("west", EXPORTED);
    text += &slice("west", "topology.istio.io/network: east", &at("10.0.0.2"));
    let objects = objects(&text);
    let is_exposed = |closed: &[&str], host: &str| {
        let closed = Objects::closing(closed.iter().map(|name| (*name).into()).collect());
        let all = objects.with([&closed].into_iter());
        let config = config(JOIN, "{default: all}");
        let joined = join(&Mesh::default(), &all, &config, &AddressHolders::default());
        let snapshot = snapshot(&joined);
        assert!(!joined.scope.exported.contains(host) || !snapshot.is_cluster_local(host));
        !snapshot.is_cluster_local(host)
    };
    let unknown = "other.app.svc.cluster.local";
    for host in [OWN, GLOBAL, "hello.app.svc.clusterset.local", unknown] {
        assert!(is_exposed(&[], host) && is_exposed(&["shop"], host), "{host}");
        assert!(!is_exposed(&["app"], host), "{host}");
    }
    for host in ["app.example.com", "x.app.example.com", "hello.shop.svc.cluster.local"] {
        assert!(is_exposed(&["app"], host), "{host}");
    }
}
