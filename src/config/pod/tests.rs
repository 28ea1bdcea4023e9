//! Pods, and what is made of what they say.

use std::path::PathBuf;

use tempfile::TempDir;

use super::own::NO_ADDRESS;
use super::*;
use crate::config::{
    Config, CrlPolicy, Discovery, Examined, Identity, LocalityOrigin, LogFormat, Source,
};

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

/// The findings, without the folder's name.
fn findings(variables: &[(&str, &str)], file: &str) -> String {
    let folder = folder();
    let examined = source(&folder, variables, file).examine();
    let name = format!("{}/", folder.path().display());
    examined.findings.to_string().replace(&name, "")
}

#[test]
fn a_pod_needs_no_file_and_no_variable() {
    let config = good(&[], "");
    assert_eq!(config.gateway.cluster, "Kubernetes");
    assert_eq!(config.gateway.network, "Kubernetes");
    let Identity::IstioCa(ca) = &config.identity else {
        panic!("{:?}", config.identity);
    };
    assert_eq!(ca.plane.address.to_string(), ISTIOD);
    assert_eq!((&*ca.trust_domain, &ca.namespace), (TRUST_DOMAIN, &None));
    let trust: Vec<_> = config.trust.domains.iter().map(|of| (&*of.name, &*of.cluster)).collect();
    assert_eq!(trust, [("cluster.local", "Kubernetes")]);
    let Discovery::Istio { plane, cache } = &config.discovery else {
        panic!("{:?}", config.discovery);
    };
    assert_eq!(plane.address.to_string(), ISTIOD);
    assert!(plane.token.as_ref().unwrap().ends_with(TOKEN));
    assert_eq!((plane.san.as_deref(), cache.as_deref()), (None, None));
    let metrics = [0, 1].map(|index| config.metrics.bind[index]);
    let binds = [config.admin.bind, metrics[0], metrics[1], config.readiness.bind];
    assert_eq!(
        binds.map(|bind| bind.to_string()),
        ["127.0.0.1:15000", "[::]:15020", "[::]:15090", "[::]:15021"]
    );
    assert_eq!(config.listeners[0].bind.to_string(), "[::]:15008");
    assert!(config.exposure.services.is_empty());
}

#[test]
fn istios_variables_say_what_they_say_to_its_proxies() {
    let folder = folder();
    write(&folder, &format!("{DATA}/x"), "");
    write(&folder, LABELS, "app=\"x\"\ntopology.istio.io/network=\"net-1\"\n");
    let variables = [
        ("ISTIO_META_CLUSTER_ID", "east"),
        ("TRUST_DOMAIN", "east.local"),
        ("TRUST_DOMAINS", "west.local, east.local,west.local"),
        ("XDS_ADDRESS", "https://istiod-canary.istio-system.svc:15012/"),
        ("ISTIOD_SAN", "istiod.other"),
        ("XDS_HEADER_X-Tenant", "a b"),
        ("ENVOY_STATUS_PORT", "16021"),
        ("IPV6_ENABLED", "false"),
        ("TERMINATION_GRACE_PERIOD_SECONDS", "60"),
        ("MINIMUM_DRAIN_DURATION", "10s"),
        ("ZTUNNEL_WORKER_THREADS", "3"),
        ("LOG_FORMAT", "json"),
        ("RUST_LOG", "debug"),
        ("POD_NAME", ""),
        ("SOMETHING_ELSE", "\u{7}"),
    ];
    let examined = source(&folder, &variables, "").examine();
    assert_eq!(examined.findings.to_string(), "");
    let config = examined.config.unwrap();
    assert_eq!((&*config.gateway.cluster, &*config.gateway.network), ("east", "net-1"));
    let trust: Vec<_> = config.trust.domains.iter().map(|of| (&*of.name, &*of.cluster)).collect();
    assert_eq!(trust, [("east.local", "east"), ("west.local", "west.local")]);
    let Discovery::Istio { plane, cache, .. } = &config.discovery else {
        panic!("{:?}", config.discovery);
    };
    assert_eq!(plane.address.to_string(), "istiod-canary.istio-system.svc:15012");
    assert_eq!(plane.san.as_deref(), Some("istiod.other"));
    assert_eq!(plane.headers, [("x-tenant".to_owned(), "a b".to_owned())]);
    assert!(cache.as_ref().unwrap().starts_with(folder.path().join(DATA)));
    assert_eq!(config.readiness.bind.to_string(), "0.0.0.0:16021");
    assert_eq!(config.listeners[0].bind.to_string(), "0.0.0.0:15008");
    assert_eq!(config.drain.lag, Duration::from_secs(10));
    assert_eq!(config.drain.deadline, Duration::from_secs(60 - 10 - 5));
    assert_eq!(config.workers, 3);
    assert_eq!((config.log.format, &*config.log.level), (LogFormat::Json, "debug"));
}

#[test]
fn proxy_config_says_what_no_variable_does() {
    let yaml = "discoveryAddress: istiod.a:15012\nconcurrency: 2\n\
                proxyMetadata:\n  ISTIO_META_NETWORK: n\n  TRUST_DOMAIN: a.local\n";
    let json = r#"{"discoveryAddress":"istiod.a:15012","concurrency":2,
                   "proxyMetadata":{"ISTIO_META_NETWORK":"n","TRUST_DOMAIN":"a.local"}}"#;
    for text in [yaml, json] {
        let config = good(&[("PROXY_CONFIG", text), ("TRUST_DOMAIN", "b.local")], "");
        let Discovery::Istio { plane, .. } = &config.discovery else {
            panic!("{:?}", config.discovery);
        };
        assert_eq!(plane.address.to_string(), "istiod.a:15012");
        assert_eq!((config.workers, &*config.gateway.network), (2, "n"));
        assert_eq!(config.trust.domains[0].name, "b.local");
    }
    assert_eq!(
        findings(&[("PROXY_CONFIG", "a: b: c")], ""),
        "PROXY_CONFIG:1: error: not valid YAML: mapping values are not allowed in this context"
    );
}

#[test]
fn a_mistake_is_reported_of_the_variable_that_makes_it() {
    let cases = [
        (
            ("XDS_ADDRESS", "istiod"),
            "XDS_ADDRESS: error: `discovery.address` is `istiod`; write a host and a port, such as \
             `istiod.istio-system.svc:15012`",
        ),
        (
            ("XDS_ROOT_CA", "/no/such"),
            "XDS_ROOT_CA: error: `discovery.roots` is `/no/such`: No such file or directory (os \
             error 2); write the path of an existing file, relative to the working directory",
        ),
        (
            ("CA_ROOT_CA", "-----BEGIN CERTIFICATE-----\nhunter2"),
            "CA_ROOT_CA: error: `identity.roots` has a PEM text that cannot be read as \
             certificates; write PEM of certificates, the path of a file with them, or `SYSTEM`",
        ),
        (
            ("PROXY_CONFIG", "{concurrency: -1}"),
            "PROXY_CONFIG.concurrency: error: `workers` is `-1`; write a whole number from 0 to \
             1024",
        ),
        (
            ("TRUST_DOMAINS", "*"),
            "TRUST_DOMAINS: error: `trust.domains[].name` is `*`, and a pattern would trust \
             domains that are not listed; write each trust domain by its name",
        ),
        (
            ("XDS_HEADER_Authorization", "x"),
            "XDS_HEADER_Authorization: error: `discovery.headers[]` has `Authorization`, which \
             cannot be sent; write the name of a custom header, such as `x-tenant`",
        ),
        (
            ("SKIP_VALIDATE_TRUST_DOMAIN", "true"),
            "SKIP_VALIDATE_TRUST_DOMAIN: warning: `trust.skip_validation` is true: a peer of any \
             trust domain is accepted under the shared roots, and its domain's name stands for \
             its cluster; write `trust.domains` with each domain instead",
        ),
    ];
    for (variable, want) in cases {
        assert_eq!(findings(&[variable], ""), want);
    }
}

#[test]
fn a_word_that_means_nothing_is_warned_of_once_and_booleans_have_one_rule() {
    for name in ["FILE_MOUNTED_CERTS", "IPV6_ENABLED"] {
        let warned = findings(&[(name, "maybe")], "");
        let want = format!("{name}: warning: is `maybe`, and is ignored; write `true` or `false`");
        assert_eq!(warned, want);
    }
    for no in ["false", "False", "0", "no"] {
        let config = good(&[("IPV6_ENABLED", no)], "");
        assert_eq!(config.listeners[0].bind.to_string(), "0.0.0.0:15008");
        assert_eq!(findings(&[("SKIP_VALIDATE_TRUST_DOMAIN", no)], ""), "");
    }
    let files = findings(&[("FILE_MOUNTED_CERTS", "yes")], "");
    assert!(files.contains("FILE_MOUNTED_CERTS: error: `identity.chain`"), "{files}");
    let format = findings(&[("LOG_FORMAT", "xml")], "");
    assert_eq!(format, "LOG_FORMAT: warning: is `xml`, and is ignored; write `json` or `text`");
}

#[test]
fn the_lists_of_crl_path_are_taken_leniently_and_those_of_a_file_are_not() {
    let variables = [("CRL_PATH", "absent.pem")];
    assert_eq!(findings(&variables, ""), "");
    let crl = good(&variables, "").trust.crl.expect("lists");
    assert!(crl.files[0].ends_with("absent.pem"));
    let accept = (CrlPolicy::Accept, CrlPolicy::Accept);
    assert_eq!((crl.on_stale, crl.on_missing), accept);
    let file = "trust: {crl: {files: [strait.yaml]}}\n";
    let crl = good(&variables, file).trust.crl.expect("lists");
    let reject = (CrlPolicy::Reject, CrlPolicy::Reject);
    assert_eq!((crl.on_stale, crl.on_missing), reject);
    let absent = findings(&variables, "trust: {crl: {files: [absent.pem]}}\n");
    assert!(absent.contains("`trust.crl.files[]` is `"), "{absent}");
}

#[test]
fn a_pod_that_skips_validation_says_so_and_its_file_may_not() {
    let variables = [("SKIP_VALIDATE_TRUST_DOMAIN", "1")];
    let config = examine(&variables, "").config.expect("a configuration");
    assert!(config.trust.skip_validation);
    let file = "trust: {skip_validation: false}\n";
    assert!(!good(&variables, file).trust.skip_validation);
    assert!(!good(&[], "").trust.skip_validation);
}

#[test]
fn a_grace_period_that_is_no_number_or_leaves_nothing_is_named() {
    let grace = |seconds| ("TERMINATION_GRACE_PERIOD_SECONDS", seconds);
    assert_eq!(
        findings(&[grace("30s")], ""),
        "TERMINATION_GRACE_PERIOD_SECONDS: error: is `30s`; write a whole number of seconds, such \
         as `30`"
    );
    let none = findings(&[grace("30"), ("MINIMUM_DRAIN_DURATION", "40s")], "");
    assert!(none.contains("warning: is 30 s, of which lag and end take 45s"), "{none}");
}

#[test]
fn the_file_lies_over_the_pod_and_its_mistakes_have_lines() {
    let file = "gateway: {network: mine}\n\
                trust: {domains: [{name: a.local, cluster: east}]}\n\
                discovery: {kind: file, path: strait.yaml}\n\
                drain: {lag: 1s}\n\
                exposure: {services: []}\n";
    let config = good(&[("ISTIO_META_CLUSTER_ID", "east")], file);
    assert_eq!((&*config.gateway.cluster, &*config.gateway.network), ("east", "mine"));
    assert_eq!(config.trust.domains.len(), 1);
    assert!(matches!(&config.discovery, Discovery::File { path } if path.ends_with("strait.yaml")));

    let variables = [("XDS_ADDRESS", "istiod")];
    assert_eq!(
        findings(&variables, "gateway: {x: 1}\nworkers: 1\nworkers: many\n"),
        "XDS_ADDRESS: error: `discovery.address` is `istiod`; write a host and a port, such as \
         `istiod.istio-system.svc:15012`\n\
         strait.yaml:1: error: unknown key `x` in `gateway`; write one of `cluster`, `network`, \
         `locality`\n\
         strait.yaml:3: error: `workers` is given twice, first on line 2; write it once"
    );
    assert!(findings(&[], "[a]").starts_with("strait.yaml:1: error: the file is not a map"));
    assert_eq!(findings(&[], "# nothing yet\n"), "");
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
fn certificates_in_files_come_before_a_socket_and_that_before_the_authority() {
    let folder = tempfile::tempdir().unwrap();
    let kind = |variables: &[(&str, &str)]| {
        let printed = source(&folder, variables, "").print().unwrap();
        let lines = printed.lines().skip_while(|line| !line.starts_with("identity:"));
        lines.take(3).map(|line| line.split('#').next().unwrap().trim().to_owned()).collect()
    };
    let all: Vec<String> = kind(&[("CA_ADDR", "istiod.b:15012")]);
    assert_eq!(all[1..], ["kind: istio-ca", "address: \"istiod.b:15012\""]);
    write(&folder, &format!("{SOCKETS}/socket"), "");
    assert_eq!(kind(&[])[1], "kind: spiffe");
    FILES.iter().for_each(|file| write(&folder, &format!("{MOUNTED}/{file}"), ""));
    let chain = format!("chain: {}/{MOUNTED}/cert-chain.pem", folder.path().display());
    assert_eq!(kind(&[])[1..], ["kind: files", &chain]);
    let folder = tempfile::tempdir().unwrap();
    let source = source(&folder, &[("FILE_MOUNTED_CERTS", "true")], "");
    let findings = source.examine().findings.to_string();
    assert!(findings.contains("FILE_MOUNTED_CERTS: error: `identity.chain` is"), "{findings}");
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
    let text = source.print().unwrap();
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
fn headers_are_not_printed() {
    let folder = folder();
    let text = source(&folder, &[("XDS_HEADER_X-Key", "hunter2")], "").print().unwrap();
    assert!(text.contains("X-Key: hidden"), "{text}");
    assert!(!text.contains("hunter2"), "{text}");
    let config = good(&[("XDS_HEADER_X-Key", "hunter2")], "");
    assert!(!serde_json::to_string(&config).unwrap().contains("hunter2"));

    let wrong = [
        (("XDS_HEADER_X-Key", "hunter2\n"), ""),
        (("CA_HEADER_X-Key", "hunter2\u{7}"), ""),
        (("POD_NAME", "a"), "discovery: {headers: {x-key: \"hunter2\\n\"}}"),
        (("POD_NAME", "a"), "discovery: {headers: \"x-key: hunter2\"}"),
        (("POD_NAME", "a"), "identity: {headers: {x-key: [hunter2]}}"),
    ];
    for (variable, file) in wrong {
        let reported = findings(&[variable], file);
        assert!(reported.contains("headers"), "{variable:?} {file}: {reported}");
        assert!(!reported.contains("hunter2"), "{reported}");
    }
    let reported = findings(&[wrong[0].0], "");
    assert_eq!(
        reported,
        "XDS_HEADER_X-Key: error: `discovery.headers[]` has an invalid value, which is not shown \
         here; write the value of a header, in printable ASCII"
    );
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
    let Discovery::Istio { plane, .. } = good(&variables, "").discovery else {
        panic!("no control plane");
    };
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    assert_eq!(plane.headers, [pair("x-a", "one"), pair("x-b", "three")]);
}

#[test]
fn our_trust_domain_stands_for_the_cluster_that_the_file_names() {
    let variables = [("ISTIO_META_CLUSTER_ID", "east"), ("TRUST_DOMAINS", "west.local")];
    let clusters = |file: &str| -> Vec<String> {
        let domains = good(&variables, file).trust.domains.into_iter();
        domains.map(|domain| domain.cluster).collect()
    };
    assert_eq!(clusters("workers: 1"), ["east", "west.local"]);
    assert_eq!(clusters("gateway: {cluster: mine}"), ["mine", "west.local"]);
    assert_eq!(clusters("gateway: {cluster: 7}"), ["7", "west.local"]);
    let own = "gateway: {cluster: a}\ntrust: {domains: [{name: a.local, cluster: a}]}";
    assert_eq!(clusters(own), ["a"]);
    let reported = findings(&variables, "gateway: {cluster: [mine]}");
    assert_eq!(reported, "strait.yaml:1: error: `gateway.cluster` is a list; write text");
}

#[test]
fn the_locality_is_that_of_the_first_source_and_a_file_replaces_all_of_it() {
    let labels = "topology.kubernetes.io/region=\"us\"\ntopology.kubernetes.io/zone=\"us-a\"\n\
                  topology.istio.io/subzone=\"rack\"\n";
    let whole = "istio-locality=\"eu.eu-b.shelf\"\n";
    let both = format!("{labels}{whole}");
    let locality = |labels: &str, variable: &str, file: &str| {
        let folder = folder();
        write(&folder, LABELS, labels);
        let examined = source(&folder, &[("ISTIO_META_LOCALITY", variable)], file).examine();
        assert_eq!(examined.findings.to_string(), "");
        let gateway = examined.config.unwrap().gateway;
        let own = gateway.locality;
        let place = [own.region, own.zone, own.subzone].join("/");
        (place, gateway.locality_origin)
    };
    let pod = |by: &str| LocalityOrigin::Pod(by.to_owned());
    let file = "gateway: {locality: {zone: z}}\n";
    for (labels, variable, file, place, origin) in [
        ("", "", "", "//", LocalityOrigin::Unknown),
        (labels, "", "", "us/us-a/rack", pod("label topology.kubernetes.io/region")),
        (&both, "", "", "eu/eu-b/shelf", pod("label istio-locality")),
        (&both, "a/b.c", "", "a/b.c/", pod("ISTIO_META_LOCALITY")),
        (&both, "a/b/c/d", "", "a/b/c/d", pod("ISTIO_META_LOCALITY")),
        (&both, "a/b", file, "/z/", LocalityOrigin::Configuration),
    ] {
        let got = locality(labels, variable, file);
        assert_eq!(got, (place.to_owned(), origin), "{labels} {variable} {file}");
    }
}

#[test]
fn a_pod_with_a_directory_in_memory_keeps_its_key_there() {
    let folder = folder();
    let cache = |folder: &TempDir| match source(folder, &[], "").examine().config.unwrap().identity
    {
        Identity::IstioCa(ca) => ca.cache,
        other => panic!("{other:?}"),
    };
    assert_eq!(cache(&folder), None);
    std::fs::create_dir_all(folder.path().join(MEMORY)).unwrap();
    let wanted = folder.path().join(MEMORY).join("strait-identity");
    assert_eq!(cache(&folder), Some(wanted));
}

#[test]
fn a_file_over_a_pod_says_the_clusters_of_issuers() {
    let hash = "5".repeat(64);
    let file = format!(
        "trust: {{clusters: [{{name: west, issuers: [{hash}]}}]}}\n\
         exposure: {{services: [{{service: a, to: [{{cluster: west}}]}}]}}\n"
    );
    let trust = good(&[("ISTIO_META_CLUSTER_ID", "east")], &file).trust;
    assert_eq!(trust.domains[0].name, TRUST_DOMAIN);
    assert_eq!(trust.clusters[0].name, "west");
    assert_eq!(trust.clusters[0].issuers[0].to_string(), hash);
}
