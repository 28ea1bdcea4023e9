//! Pods, and what is made of what they say.

use std::path::PathBuf;

use tempfile::TempDir;

use super::own::NO_ADDRESS;
use super::*;
use crate::config::{Config, Discovery, Examined, Source, XdsSource};

/// A folder with the files that Istio mounts.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(&folder, ROOTS, "");
    write(&folder, TOKEN, "");
    folder
}

fn write(folder: &TempDir, file: &str, text: &str) {
    let path = folder.path().join(file);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

/// A pod in a folder with variables, and `strait.yaml` over it, if it is not empty.
fn source(folder: &TempDir, variables: &[(&str, &str)], file: &str) -> Source {
    let variables = variables.iter().map(|&(name, value)| (name.to_owned(), value.to_owned()));
    let environment = Environment::new(variables, folder.path());
    let usual = folder.path().join("strait.yaml");
    if !file.is_empty() {
        std::fs::write(&usual, file).unwrap();
    }
    Source::pod(environment, &Flags::default(), None, &usual)
}

fn examine(variables: &[(&str, &str)], file: &str) -> Examined {
    source(&folder(), variables, file).examine()
}

fn good(variables: &[(&str, &str)], file: &str) -> Config {
    let examined = examine(variables, file);
    assert_eq!(examined.findings.to_string(), "");
    examined.config.unwrap()
}

#[test]
fn a_file_that_was_named_has_to_be_there() {
    let folder = folder();
    let environment = Environment::new([], folder.path());
    let absent = PathBuf::from("/no/such/strait.yaml");
    let flags = Flags::default();
    let source = |named| Source::pod(environment.clone(), &flags, named, &absent).examine();
    assert_eq!(source(None).findings.to_string(), "");
    let named = source(Some(absent.as_path())).findings.to_string();
    assert!(named.contains("the file cannot be read: No such file"), "{named}");
}

#[test]
fn what_is_printed_says_who_says_so_and_reads_as_the_same_configuration() {
    let folder = folder();
    let variables = [
        ("ISTIO_META_CLUSTER_ID", "e: #\"'st"),
        ("ISTIO_META_NETWORK", "007"),
        ("TRUST_DOMAINS", "west.local"),
        ("RUST_LOG", "off"),
    ];
    let file = "workers: 3\nexposure: {services: []}\ndrain: {lag: 1m 30s}\n";
    let source = source(&folder, &variables, file);
    let text = source.print().0.unwrap();
    for default in ["  ttl: \"1day\"", "  istio: \"off\"", "  format: text"] {
        assert!(text.lines().any(|line| line.starts_with(default)), "{text}");
    }
    let place = format!("{}/strait.yaml:1", folder.path().display());
    for (reported, by) in [
        ("  network: \"007\"", "ISTIO_META_NETWORK"),
        ("      cluster: \"e: #\\\"'st\"", "ISTIO_META_CLUSTER_ID"),
        ("  kind: istio", DEFAULT),
        ("workers: 3", &place),
    ] {
        let is_it = |line: &str| {
            let rest = line.strip_prefix(reported).map(str::trim_start);
            rest == Some(&format!("# {by}"))
        };
        assert!(text.lines().any(is_it), "{reported}\n{text}");
    }
    let (printed, findings) = Config::parse(source.path(), &text);
    assert_eq!(findings.to_string(), "");
    assert_eq!(printed, source.examine().config);
}

#[test]
fn the_control_plane_receives_what_the_configuration_says() {
    let account = |pod: &Pod| pod.service_account.clone();
    let who = |variables: &[(&str, &str)], file: &str| {
        let folder = folder();
        write(&folder, LABELS, "gateway.networking.k8s.io/gateway-name=\"gate\"\n");
        let source = source(&folder, variables, file);
        source.who(&source.examine().config.unwrap())
    };
    let pod = who(&[], "");
    assert_eq!((&*pod.namespace, account(&pod)), ("istio-system", None));
    assert_eq!((&*pod.name, &*pod.ip, &*pod.gateway), ("strait", NO_ADDRESS, "gate"));
    assert_eq!(pod.identity("a.b"), "spiffe://a.b/ns/istio-system/sa/default");

    let variables = [
        ("ISTIO_META_CLUSTER_ID", "east"),
        ("ISTIO_META_SERVICE_ACCOUNT", "own"),
        (
            "PROXY_CONFIG",
            "proxyMetadata: {POD_NAME: p, POD_NAMESPACE: n, INSTANCE_IP: 10.0.0.9, \
             ISTIO_META_ISTIO_VERSION: 1.30.2}",
        ),
    ];
    let pod = who(&variables, "");
    assert_eq!((&*pod.cluster, &*pod.namespace), ("east", "n"));
    assert_eq!((&*pod.name, &*pod.ip, &*pod.istio_version), ("p", "10.0.0.9", "1.30.2"));
    assert_eq!(account(&pod).as_deref(), Some("own"));

    let file = "gateway: {cluster: mine}\nidentity: {namespace: x, service_account: y}\n";
    let pod = who(&variables, file);
    assert_eq!((&*pod.cluster, &*pod.namespace), ("mine", "x"));
    assert_eq!(pod.identity("a.b"), "spiffe://a.b/ns/x/sa/y");
    let files = "identity: {kind: files, chain: strait.yaml, key: strait.yaml, roots: strait.yaml}";
    assert_eq!(account(&who(&variables, files)).as_deref(), Some("own"));
}

#[test]
fn headers_come_from_proxy_metadata_too() {
    let config = "proxyMetadata: {XDS_HEADER_x-a: one, XDS_HEADER_x-b: two}";
    let variables = [("PROXY_CONFIG", config), ("XDS_HEADER_x-b", "three")];
    let config = good(&variables, "");
    assert!(!serde_json::to_string(&config).unwrap().contains("three"), "no value is shown");
    let Discovery::Istio(XdsSource { plane, .. }) = config.discovery else {
        panic!("no control plane");
    };
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    assert_eq!(plane.headers, [pair("x-a", "one"), pair("x-b", "three")]);
}
