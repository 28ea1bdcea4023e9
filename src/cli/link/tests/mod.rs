//! The printed configuration, read back.

mod selection;

use std::collections::BTreeSet;
use std::path::Path;

use clap::{Args, FromArgMatches};

use super::expose::text_of_exposure;
use super::*;
use crate::config::Config;
use crate::wire::Transit;
use crate::xds::file;
use crate::yaml::{Document, Node};

const ADDRESSES: [&str; 2] = [
    "west,domain=west.local,network=net-w,gateway=198.51.100.7:31008",
    "east,identity=spiffe://east.local/ns/istio-system/sa/eastwest,gateway=gw.east.example,\
     gateway=203.0.113.10:15009",
];

fn try_parsed<T: Args + FromArgMatches>(args: &[&str]) -> Result<T, clap::Error> {
    let command = T::augment_args(clap::Command::new("strait")).no_binary_name(true);
    T::from_arg_matches(&command.try_get_matches_from(args)?)
}

fn parsed<T: Args + FromArgMatches>(args: &[&str]) -> T {
    try_parsed(args).unwrap_or_else(|error| panic!("{error}"))
}

fn link_text(more: &[&str]) -> anyhow::Result<String> {
    text_of_link(&parsed(&[&ADDRESSES[..], more].concat()))
}

/// Reads printed sections as those of the gateway of a cluster. Every file that it names exists.
fn read(cluster: &str, sections: &str) -> (Config, String) {
    let text = format!(
        "gateway: {{cluster: {}}}
identity: {{kind: files, chain: Cargo.toml, key: Cargo.toml, roots: Cargo.toml}}
listeners: [{{name: cross-network, bind: '127.0.0.1:15008'}}]
discovery: {{kind: file, path: Cargo.toml}}
{sections}",
        quoted(cluster)
    );
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("strait.yaml");
    let (config, findings) = Config::parse(&path, &text);
    let config = config.unwrap_or_else(|| panic!("{findings}\n{text}"));
    (config, findings.to_string())
}

/// Returns the printed part of each cluster.
fn parts(text: &str) -> Vec<(&str, &str)> {
    let parts = text.split("# strait.yaml of the gateways of cluster ").skip(1);
    parts
        .map(|part| part.strip_suffix("---\n").unwrap_or(part))
        .map(|part| part.split_once('\n').expect("a line"))
        .collect()
}

#[test]
fn the_configuration_of_a_link_is_read_back_on_both_sides() {
    let text = link_text(&["--both"]).expect("a text");
    let parts = parts(&text);
    assert_eq!(parts.len(), 2, "{text}");
    for (cluster, sections) in parts {
        let (config, findings) = read(cluster, sections);
        assert_eq!(findings, "", "{text}");
        let domains = config.trust.domains.iter();
        let mut domains: Vec<_> = domains.map(|one| (&*one.name, &*one.cluster)).collect();
        domains.sort_unstable();
        assert_eq!(domains, [("east.local", "east"), ("west.local", "west")]);
        let links = config.links.expect("links");
        let links: Vec<_> = links.iter().map(|one| (&*one.from, &*one.to)).collect();
        assert_eq!(links, [("west", "east"), ("east", "west")]);
        let [network] = &config.networks[..] else {
            panic!("{text}");
        };
        let gateways: Vec<_> = network.gateways.iter().map(ToString::to_string).collect();
        if cluster == "east" {
            assert_eq!((&*network.name, network.cluster.as_deref()), ("net-w", Some("west")));
            assert_eq!(gateways, ["198.51.100.7:31008"]);
        } else {
            let identity = "spiffe://east.local/ns/istio-system/sa/eastwest";
            assert_eq!(gateways, ["gw.east.example:15008", "203.0.113.10:15009"]);
            assert_eq!(network.identities, [identity]);
            assert_eq!(config.trust.gateways, [identity]);
        }
    }
}

#[test]
fn a_link_of_one_direction_opens_the_second_cluster_alone() {
    let text = link_text(&[]).expect("a text");
    for (cluster, sections) in parts(&text) {
        let (config, _) = read(cluster, sections);
        assert_eq!(config.links.is_some(), cluster == "east", "{text}");
        assert_eq!(config.networks.is_empty(), cluster == "east", "{text}");
    }
}

#[test]
fn manifests_have_the_configuration_as_comments_and_a_gateway_for_each_address() {
    let text = link_text(&["--kubernetes"]).expect("a text");
    assert_eq!(names(&text).len(), 3, "{text}");
    for want in [
        "# To merge into strait.yaml of the gateways of cluster east\n# trust:\n#   domains:\n",
        "    - type: Hostname\n      value: \"gw.east.example\"\n",
        "    - type: IPAddress\n      value: \"203.0.113.10\"\n",
        "    topology.istio.io/network: \"east\"\n",
        "      port: 15009\n",
    ] {
        assert!(text.contains(want), "{want}\n{text}");
    }
    let of_edge = text_of_link(&parsed(&[
        "west,domain=west.local,network=net-w,gateway=198.51.100.7:31008",
        "east,identity=spiffe://east.local/ns/edge/sa/gw,gateway=203.0.113.10",
        "--kubernetes",
    ]));
    let of_edge = of_edge.expect("a text");
    for want in ["  namespace: \"edge\"\n", "service-account: \"gw\"\n"] {
        assert!(of_edge.contains(want), "{want}\n{of_edge}");
    }
    let (config, _) = read("west", &to_merge_in(&text, "west"));
    assert_eq!(config.networks[0].cluster.as_deref(), Some("east"));
}

/// Returns the sections for a cluster that are comments among manifests.
fn to_merge_in(text: &str, cluster: &str) -> String {
    let heading = format!("# To merge into strait.yaml of the gateways of cluster {cluster}\n");
    let (_, sections) = text.split_once(&heading).expect("a heading");
    let lines = sections
        .lines()
        .map_while(|line| line.strip_prefix("# "))
        .take_while(|line| !line.starts_with("To merge") && !line.starts_with("In cluster"));
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns kind, namespace and name of each manifest.
fn names(text: &str) -> Vec<[String; 3]> {
    let documents = Document::parse_all(Path::new("a"), text).expect("YAML");
    let documents = documents.iter().filter(|one| one.root.get("kind").is_some());
    let name = |one: &Document| {
        let metadata = one.root.get("metadata").expect("metadata");
        let word = |node: &Node, key| node.word(key).expect("a word").to_owned();
        [word(&one.root, "kind"), word(metadata, "namespace"), word(metadata, "name")]
    };
    documents.map(name).collect()
}

#[test]
fn manifests_of_a_link_and_of_services_replace_nothing_of_each_other() {
    let mut all = names(&link_text(&["--both", "--kubernetes"]).expect("a text"));
    // The second gateway of `north` is not the first one of `north-1`.
    let both = parsed(&[
        "north,domain=north.local,gateway=a.example,gateway=b.example",
        "north-1,domain=x.local,gateway=c.example",
        "--both",
        "--kubernetes",
    ]);
    // Both links have the Gateway of each of their clusters.
    let of_both = names(&text_of_link(&both).expect("a text"));
    all.extend(of_both.into_iter().filter(|[.., name]| name != "eastwest"));
    all.sort();
    all.dedup();
    for service in [
        "echo.app.svc.cluster.local:80",
        "echo.app.svc.cluster.local:81",
        "echo.app.global:80",
        "other.app.global:80",
    ] {
        let args = parsed(&[service, "--of", "east", "--to", "west", "--kubernetes"]);
        let own = |[.., name]: &[String; 3]| name != "eastwest";
        all.extend(names(&text_of_exposure(&args).expect("a text")).into_iter().filter(own));
    }
    assert_eq!(all.iter().filter(|[kind, ..]| kind == "ConfigMap").count(), 0);
    let different: BTreeSet<_> = all.iter().collect();
    assert_eq!(different.len(), all.len(), "{all:?}");
    assert_eq!(all.len(), 11, "{all:?}");
}

#[test]
fn names_of_objects_are_those_that_the_api_server_accepts() {
    let texts = [
        "eastwest-of-west",
        "eastwest-of-west.local",
        "eastwest-of-Kubernetes",
        "eastwest-of-kubernetes",
        "eastwest-of-a_b",
        "eastwest-of-a-b",
        "eastwest-of-a--",
        "eastwest-of-a..b",
        "eastwest-of-ä b",
        &"eastwest-of-".repeat(9),
    ];
    let names = texts.map(object_name);
    for name in &names {
        let label = |label: &str| {
            let is_end = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
            label.starts_with(is_end)
                && label.ends_with(is_end)
                && label.chars().all(|c| is_end(c) || c == '-')
        };
        assert!(name.len() <= 63 && name.split('.').all(label), "{name}");
    }
    assert_eq!(names[..2], texts[..2]);
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), texts.len());
}

#[test]
fn a_side_without_a_value_that_its_peer_needs_is_an_error() {
    let fails = |args: &[&str]| {
        let failed = text_of_link(&parsed(args)).expect_err("an error");
        failed.to_string()
    };
    let east = "east,domain=east.local,gateway=203.0.113.10";
    assert_eq!(
        fails(&["west,domain=west.local", east, "--both"]),
        "cluster west has no gateway; write west,gateway=HOST:PORT"
    );
    assert!(fails(&[east, east]).starts_with("both sides are cluster east"));
    assert!(fails(&["west,domain=east.local", east]).starts_with("both clusters have trust"));
    for (side, want) in [
        ("", "write a cluster's name first"),
        ("west", "no trust domain; write west,domain=DOMAIN"),
        ("west,dom=a", "unknown part \"dom=a\""),
        ("west,identity=a", "is not spiffe://"),
        ("west,domain=a,gateway=a b", "\"a b\" "),
        (
            "west,domain=*.west",
            "`domain` is `*.west`, and a pattern would trust domains that are not listed; write \
             each trust domain by its name",
        ),
        ("west,domain=", "`domain` is empty; write at least one character"),
        ("west,domain=a,network=", "`network` is empty; write at least one character"),
        ("a\nb,domain=a", "`cluster` is \"a\\nb\"; write text on one line"),
        (
            "west,domain=a.local,identity=spiffe://b.local/ns/x/sa/y",
            "`identity` has trust domain b.local, and `domain` is a.local; write the domain of \
             the gateways in both",
        ),
    ] {
        let failed = Side::parse(side).expect_err("an error");
        assert!(failed.contains(want), "{side}: {failed}");
    }
}

const ECHO: &str = "echo.app.svc.cluster.local:80";

#[test]
fn the_configuration_of_an_exposure_is_read_back_on_both_sides() {
    let args = [
        ECHO,
        "--of",
        "east",
        "--network",
        "net-e",
        "--to",
        "west",
        "--to",
        "north",
        "--namespace",
        "shop",
        "--service-account",
        "shop/checkout",
        "--gateway",
        "istio-system/eastwest",
        "--tunnels",
        "9",
        "--instances",
        "3",
    ];
    let text = text_of_exposure(&parsed(&args)).expect("a text");
    let meshes: Vec<_> = text.split("# Mesh file of the gateways of cluster ").collect();
    let [first, west, north] = meshes[..] else {
        panic!("{text}");
    };
    let (donor, consumer) = first.split_once("---\n").expect("two documents");
    let (_, consumer) = consumer.split_once('\n').expect("a line");
    let consumer = consumer.split("---\n").next().expect("a document");
    let trust = "trust: {domains: [{name: east.local, cluster: east}, {name: west.local, \
                 cluster: west}, {name: north.local, cluster: north}]}\n";
    let (config, findings) = read("east", &[trust, donor].concat());
    assert_eq!(findings, "", "{text}");
    let [entry] = &config.exposure.services[..] else {
        panic!("{text}");
    };
    assert_eq!((entry.service.to_string(), entry.limits.tunnels), (ECHO.to_owned(), Some(9)));
    let to = entry.to.iter().map(|to| to.cluster.as_deref());
    let (west_only, north_only) = (Some("west"), Some("north"));
    assert_eq!(to.collect::<Vec<_>>(), [west_only, west_only, north_only, north_only]);
    assert_eq!(entry.to[0].namespaces, ["shop"]);
    let account = |namespace: &str, name: &str| [(namespace.to_owned(), name.to_owned())];
    assert_eq!(entry.to[2].service_accounts, account("shop", "checkout"));
    // The gateway has its own namespace, and is admitted beside the clients.
    assert_eq!(entry.to[1].namespaces, [""; 0]);
    assert_eq!(entry.to[1].service_accounts, account("istio-system", "eastwest"));
    assert_consumer_is_read(trust, consumer);
    for (cluster, part) in [("west", west), ("north", north)] {
        let part = part.strip_prefix(cluster).expect("the cluster");
        let part = part.split("---\n").next().expect("a document");
        let (mesh, _) = file::parse(Path::new("mesh.yaml"), part)
            .unwrap_or_else(|findings| panic!("{findings}\n{text}"));
        let [instance] = mesh.workloads.sorted()[..] else {
            panic!("{text}");
        };
        assert_eq!((&*instance.network, instance.capacity), ("net-e", 3));
        assert!(mesh.services.contains_key("app/echo.app.svc.cluster.local"));
    }
}

/// Asserts that transit and binding of a peer's gateway are read back.
fn assert_consumer_is_read(trust: &str, consumer: &str) {
    let network = "networks: [{name: net-e, cluster: east, gateways: ['203.0.113.1:15008']}]\n";
    let (config, findings) = read("west", &[trust, network, consumer].concat());
    assert_eq!(findings, "", "{consumer}");
    assert_eq!(config.exposure.services[0].transit, Some(Transit::Always));
    let (_, binding) = consumer.split_once("instead\n").expect("a binding");
    let binding = binding.replace("# ", "");
    let (config, findings) = read("west", &[trust, network, &*binding].concat());
    assert_eq!(findings, "", "{consumer}");
    assert_eq!(config.bindings[0].listen.to_string(), "127.0.0.1:8080");
}

#[test]
fn an_exposure_without_the_gateway_of_a_peer_tells_how_to_admit_it() {
    let text = |more: &[&str]| {
        let args = [&[ECHO, "--of", "east", "--to", "west"], more].concat();
        text_of_exposure(&parsed(&args)).expect("a text")
    };
    let hint = "# A binding needs its gateway here: --gateway NAMESPACE/NAME";
    assert!(text(&["--namespace", "shop"]).contains(hint));
    // All peers of the cluster include its gateways.
    let all = text(&["--gateway", "istio-system/eastwest"]);
    assert!(!all.contains(hint) && !all.contains("eastwest"), "{all}");
}

#[test]
fn the_manifests_of_an_exposure_are_comments_and_a_service_entry() {
    let args = [ECHO, "--of", "east", "--to", "west", "--kubernetes"];
    let text = text_of_exposure(&parsed(&args)).expect("a text");
    for want in [
        "# exposure:\n#   services:\n#     - service: \"echo.app.svc.cluster.local:80\"\n",
        "# In cluster west\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\n",
        "  endpoints:\n    - network: \"east\"\n",
    ] {
        assert!(text.contains(want), "{want}\n{text}");
    }
    let is_outside = "--service-account pay/web is in no --namespace, so it admits no peer; write \
                      --namespace pay too, or no --namespace";
    for (args, want) in [
        (&["echo.app.global"][..], "`service` is `echo.app.global`; write the hostname and port"),
        (&["10.0.0.1:80"], "`service` is `10.0.0.1:80`; write the hostname and port"),
        (&["echo:80"], "is not NAME.NAMESPACE.SUFFIX"),
        (&[ECHO, "--namespace", "a/b"], "`namespace` is `a/b`; write one name"),
        (&[ECHO, "--gateway", "eastwest"], "`account` is `eastwest`; write `NAMESPACE/NAME`"),
        (&[ECHO, "--namespace", "shop", "--service-account", "pay/web"], is_outside),
    ] {
        let args = [&["--of", "east", "--to", "west"], args].concat();
        let failed = exposure_text(&args).expect_err("an error");
        assert!(failed.contains(want), "{args:?}: {failed}");
    }
}

fn exposure_text(args: &[&str]) -> Result<String, String> {
    let args = try_parsed(args).map_err(|error| error.to_string())?;
    text_of_exposure(&args).map_err(|error| error.to_string())
}

/// Values of clusters, networks, domains and namespaces, most of which some form rejects.
const VALUES: [&str; 14] = [
    "west",
    "West_1",
    "*",
    "*.west",
    "",
    "a/b",
    "a b",
    "a: b",
    "a #b",
    "1",
    "true",
    "a\nb",
    "a\u{2028}b",
    "\u{feff}",
];

fn any(values: &[&'static str]) -> &'static str {
    values[fastrand::usize(..values.len())]
}

/// Asserts that the reader accepts the parts of `strait.yaml` in a printed text.
fn assert_is_read(text: &str, trust: &str) {
    for (cluster, part) in parts(text) {
        let sections = part.split("---\n").next();
        let sections = sections.unwrap_or_default();
        read(cluster.lines().next().unwrap_or_default(), &[trust, sections].concat());
    }
}

#[test]
fn whatever_link_accepts_is_read_back() {
    fastrand::seed(1);
    let mut accepted = 0;
    for _ in 0..3000 {
        let side = |name, domain, identity| {
            let mut side = any(&[name, name, name, any(&VALUES)]).to_owned();
            for (key, values) in [
                ("domain", &[domain, domain, domain, any(&VALUES)]),
                ("network", &["net", "net", "net", any(&VALUES)]),
                ("gateway", &["203.0.113.1", "[::1]:9", "gw.example:1", any(&VALUES)]),
                ("identity", &[identity, identity, "spiffe://x/ns/x/sa/y", any(&VALUES)]),
            ] {
                if any(&["", "given", "given"]) == "given" {
                    let _ = write!(side, ",{key}={}", any(values));
                }
            }
            side
        };
        let sides = [
            side("west", "west.local", "spiffe://west.local/ns/x/sa/y"),
            side("east", "east.local", "spiffe://east.local/ns/x/sa/y"),
        ];
        let args = [&*sides[0], &*sides[1], any(&["--both", "--"])];
        let text = try_parsed(&args).ok().and_then(|args| text_of_link(&args).ok());
        if let Some(text) = text {
            accepted += 1;
            assert_is_read(&text, "");
        }
    }
    assert!((100..2900).contains(&accepted), "{accepted}");
}

#[test]
fn whatever_expose_accepts_is_read_back() {
    fastrand::seed(1);
    let mut accepted = 0;
    for _ in 0..2000 {
        let to = any(&["west", "west", any(&VALUES)]);
        let service = any(&[ECHO, ECHO, "A_b.C.d:1", "10.0.0.1:80", "[::1]:80", "a.b.c", "a.b:1"]);
        let mut args = vec![service, "--to", to, "--of", any(&["east", any(&VALUES)])];
        for (option, values) in [
            ("--network", &["net", any(&VALUES)][..]),
            ("--namespace", &["shop", any(&VALUES)]),
            ("--namespace", &["shop", any(&VALUES)]),
            ("--service-account", &["shop/web", "pay/web", "west/web", any(&VALUES)]),
            ("--gateway", &["istio-system/eastwest", "eastwest", any(&VALUES)]),
            ("--tunnels", &["1", "0", "4294967295"]),
            ("--instances", &["1", "0", "4294967295"]),
        ] {
            if any(&["", "given"]) == "given" {
                args.extend([option, any(values)]);
            }
        }
        let Ok(text) = exposure_text(&args) else {
            continue;
        };
        accepted += 1;
        let trust = format!("trust: {{domains: [{{name: a.local, cluster: {}}}]}}\n", quoted(to));
        assert_is_read(&text, &trust);
        let (_, mesh) = text.split_once("# Mesh file of the gateways").expect("a mesh file");
        let mesh = mesh.split("---\n").next().unwrap_or_default();
        let mesh = mesh.split_once('\n').expect("a line").1;
        let read = file::parse(Path::new("mesh.yaml"), mesh);
        assert!(read.is_ok(), "{args:?}\n{text}");
    }
    assert!((100..1900).contains(&accepted), "{accepted}");
}
