//! Every manifest of `deploy/kubernetes`, started as a kubelet starts its pods.

use std::collections::BTreeSet;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use rustix::process::Signal;
use serde_json::Value;
use strait::tools::hbone::Client;
use strait::xds::store::{ADDRESS, CLUSTER};
use tokio::net::TcpStream;

use crate::support::istiod::Istiod;
use crate::support::kubelet::{ISTIOD, POD, Pod, in_namespaces, list, text};
use crate::support::wds::{HOSTNAME, SERVICE, changed, service};
use crate::support::{
    CLIENT, ECHO, GATEWAY, RESTART_MAX, identities, print_uncaptured, run, until,
};

/// The dialects, each a folder of manifests.
const DIALECTS: [&str; 2] = ["istio", "solo"];
/// Manifests beside those folders.
const SHARED: [&str; 5] =
    ["crds.yaml", "watch.yaml", "workload.yaml", "overlay.yaml", "network-policy.yaml"];
/// The manifests of a dialect.
const GATEWAYS: [&str; 3] = ["managed.yaml", "manual.yaml", "remote.yaml"];

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/kubernetes"))
}

/// The documents of a file.
fn documents(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).expect("a manifest");
    let documents = text.split("\n---\n");
    let parsed = documents.map(|text| serde_saphyr::from_str(text).expect("YAML"));
    parsed.collect()
}

fn manifest(name: &str) -> Vec<Value> {
    documents(&folder().join(name))
}

fn of_kind(documents: &[Value], kind: &str) -> Value {
    let found = documents.iter().find(|document| document["kind"] == kind);
    found.unwrap_or_else(|| panic!("a {kind}")).clone()
}

/// Applies a strategic merge patch, as far as these need it: maps by key, lists of named things by
/// name.
fn patched(base: &Value, patch: &Value) -> Value {
    let name = |value: &Value| value.get("name").cloned();
    match (base, patch) {
        (Value::Object(base), Value::Object(patch)) => {
            let mut merged = base.clone();
            for (key, value) in patch {
                let below = base.get(key).map(|below| patched(below, value));
                merged.insert(key.clone(), below.unwrap_or_else(|| value.clone()));
            }
            Value::Object(merged)
        }
        (Value::Array(base), Value::Array(patch))
            if base.iter().chain(patch).all(|item| name(item).is_some()) =>
        {
            let mut merged = base.clone();
            for item in patch {
                match merged.iter_mut().find(|known| name(known) == name(item)) {
                    Some(known) => *known = patched(known, item),
                    None => merged.push(item.clone()),
                }
            }
            Value::Array(merged)
        }
        _ => patch.clone(),
    }
}

/// Returns the Deployment of a managed Gateway: istiod's, with the patch that the Gateway names.
fn managed(gateway: &Value) -> Value {
    let overlay = of_kind(&manifest("overlay.yaml"), "ConfigMap");
    let parameters = "/spec/infrastructure/parametersRef/name";
    assert_eq!(text(gateway, parameters), text(&overlay, "/metadata/name"));
    let rendered = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/deploy/rendered.yaml");
    let rendered = of_kind(&documents(&rendered), "Deployment");
    assert_eq!(text(gateway, "/metadata/name"), text(&rendered, "/metadata/name"));
    let patch = text(&overlay, "/data/deployment");
    patched(&rendered, &serde_saphyr::from_str(patch).expect("YAML"))
}

/// Returns the Deployment of a Gateway with pods of our own.
fn manual(gateway: &Value) -> Value {
    let workload = manifest("workload.yaml");
    let (deployment, service) = (of_kind(&workload, "Deployment"), of_kind(&workload, "Service"));
    let host = text(gateway, "/spec/addresses/0/value");
    let of_service = format!(
        "{}.{}.svc.cluster.local",
        text(&service, "/metadata/name"),
        text(&service, "/metadata/namespace")
    );
    assert_eq!(host, of_service);
    deployment
}

#[test]
fn the_kubelet_of_these_tests_knows_every_manifest() {
    let mut known: BTreeSet<_> = SHARED.map(str::to_owned).into();
    for dialect in DIALECTS {
        known.extend(GATEWAYS.map(|name| format!("{dialect}/{name}")));
    }
    let names = |folder: &Path| -> Vec<_> {
        let entries = fs::read_dir(folder).expect("a folder");
        entries.map(|entry| entry.expect("an entry").path()).collect()
    };
    let (folders, files): (Vec<_>, Vec<_>) =
        names(folder()).into_iter().partition(|at| at.is_dir());
    let all = files.into_iter().chain(folders.iter().flat_map(|at| names(at)));
    let all = all.filter(|file| file.extension().is_some_and(|end| end == "yaml"));
    let all = all.map(|file| file.strip_prefix(folder()).expect("below it").to_owned());
    let all: BTreeSet<_> = all.map(|file| file.to_string_lossy().into_owned()).collect();
    assert_eq!(all, known);
}

#[test]
fn managed_pods_start_as_rendered_and_restart_without_istiod() {
    in_namespaces("kubelet::managed_pods_start_as_rendered_and_restart_without_istiod", || {
        for dialect in DIALECTS {
            let gateway = of_kind(&manifest(&format!("{dialect}/managed.yaml")), "Gateway");
            run(starts(managed(&gateway), &gateway));
        }
    });
}

#[test]
fn manual_pods_start_as_written_and_restart_without_istiod() {
    in_namespaces("kubelet::manual_pods_start_as_written_and_restart_without_istiod", || {
        for dialect in DIALECTS {
            let gateway = of_kind(&manifest(&format!("{dialect}/manual.yaml")), "Gateway");
            run(starts(manual(&gateway), &gateway));
        }
    });
}

/// Returns an istiod with a service, and with its record of the pod.
fn istiod() -> Istiod {
    let istiod = Istiod::default();
    istiod.put(ADDRESS, SERVICE, &service());
    istiod.put(CLUSTER, &format!("inbound-vip|80|tcp|{HOSTNAME}"), &());
    let uid = format!("east//Pod/istio-system/{POD}");
    let own = changed(&uid, vec![10, 244, 1, 7], |workload| {
        workload.services.clear();
        workload.locality = Some(strait::grpc::workload::Locality {
            region: "us-east-2".into(),
            zone: "us-east-2a".into(),
            ..Default::default()
        });
    });
    istiod.put(ADDRESS, &uid, &own);
    istiod
}

/// Starts a pod of a Deployment, uses it, and restarts its container without istiod.
async fn starts(deployment: Value, gateway: &Value) {
    let istiod = istiod();
    let serving = istiod.serve(ISTIOD, identities()).await;
    let mut pod = Pod::new(&deployment);
    pod.start();
    pod.ready().await;
    is_confined(&pod);
    is_reached(&pod, &deployment, gateway).await;
    let place = "\"us-east-2a\",\"subzone\":\"\",\"origin\":\"istiod's record of this pod\"";
    let status = async || pod.get(15000, "/status").await.1;
    until("the locality", status, |page| page.contains(place)).await;

    let key = pod.file("etc/istio/proxy/strait-identity/identity.json");
    let mesh = pod.file("var/lib/istio/data/strait-mesh");
    let kept = async || [key.exists(), mesh.exists()];
    until("what is kept", kept, |kept| *kept == [true; 2]).await;
    for (path, mode) in [(key.parent().expect("a folder"), 0o700), (&*key, 0o600)] {
        let metadata = path.metadata().expect("metadata");
        assert_eq!((metadata.mode() & 0o777, metadata.uid()), (mode, 1337));
    }
    serving.stop().await;
    pod.signal(Signal::KILL);
    pod.ended().await;
    let began = Instant::now();
    pod.start();
    pod.ready().await;
    let took = began.elapsed();
    print_uncaptured(&format!("ready without istiod after {took:?}"));
    assert!(took < RESTART_MAX, "{took:?}: {}", pod.log());
    is_reached(&pod, &deployment, gateway).await;
    // The second signal ends the wait of the first.
    pod.signal(Signal::TERM);
    let stopping = async || pod.log().matches("stopping").count();
    until("the first signal", stopping, |count| *count > 0).await;
    pod.signal(Signal::TERM);
    assert!(pod.ended().await, "{}", pod.log());
}

/// Asserts that user, capabilities and root file system match the security context.
fn is_confined(pod: &Pod) {
    assert_eq!(pod.proc_status("Uid:"), "1337 1337 1337 1337");
    assert_eq!(pod.proc_status("Gid:"), "1337 1337 1337 1337");
    assert_eq!(pod.proc_status("CapEff:").trim_matches('0'), "");
    assert_eq!(pod.proc_status("NoNewPrivs:"), "1");
    for path in ["x", "etc/istio/pod/x", "var/run/secrets/istio/x"] {
        let error = fs::write(pod.file(path), "").expect_err("a read-only mount");
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem, "{path}");
    }
}

/// Asserts that declared ports listen, metrics are at the port of the annotations and the policy,
/// and the Gateway's listener answers as the Gateway's service account.
async fn is_reached(pod: &Pod, deployment: &Value, gateway: &Value) {
    let template = &deployment["spec"]["template"];
    let ports = list(template, "/spec/containers/0/ports").iter();
    let ports = ports.map(|port| port["containerPort"].as_u64().expect("a port"));
    let policy = manifest("network-policy.yaml").remove(0);
    let allowed = list(&policy, "/spec/ingress").iter();
    let allowed = allowed.flat_map(|rule| list(rule, "/ports"));
    let allowed = allowed.map(|port| port["port"].as_u64().expect("a port"));
    for port in ports.chain(allowed) {
        let address = (Ipv4Addr::LOCALHOST, port.try_into().expect("a port"));
        TcpStream::connect(address).await.expect("a listener");
    }
    let annotations = &template["metadata"]["annotations"];
    let scraped = text(annotations, "/prometheus.io~1port").parse().expect("a port");
    for port in [scraped, 15090] {
        let path = text(annotations, "/prometheus.io~1path");
        let (status, page) = pod.get(port, path).await;
        assert_eq!(status, 200, "{port}");
        assert!(page.contains("strait_tunnels_open"), "{port}: {page}");
    }
    let port = gateway["spec"]["listeners"][0]["port"].as_u64().expect("a port");
    let account = text(template, "/spec/serviceAccountName");
    assert_eq!(account, text(gateway, "/metadata/name"));
    assert!(GATEWAY.ends_with(&format!("/ns/istio-system/sa/{account}")));
    let tls = identities().client(CLIENT, GATEWAY);
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port.try_into().expect("a port")));
    let client = Client::connect(address, &tls).await.expect("a connection");
    let refused = client.tunnel(ECHO).await.expect_err("no endpoint");
    assert!(refused.to_string().contains("503"), "{refused}");
}

#[test]
fn the_remote_gateways_name_the_account_of_the_pods() {
    let workload = manifest("workload.yaml");
    let account = of_kind(&workload, "ServiceAccount");
    for dialect in DIALECTS {
        let remote = of_kind(&manifest(&format!("{dialect}/remote.yaml")), "Gateway");
        let named = text(&remote, "/metadata/annotations/gateway.istio.io~1service-account");
        assert_eq!(named, text(&account, "/metadata/name"));
    }
}
