//! The printed configuration, read back.

use std::collections::BTreeSet;
use std::path::Path;

use clap::{Args, FromArgMatches};

use super::expose::text_of_exposure;
use super::*;
use crate::config::Config;
use crate::xds::file;
use crate::yaml::{Document, Node};

const ADDRESSES: [&str; 2] = [
    "west,domain=west.local,network=net-w,gateway=198.51.100.7:31008",
    "east,identity=spiffe://east.local/ns/istio-system/sa/eastwest,gateway=gw.east.example,\
     gateway=203.0.113.10:15009",
];

fn parsed<T: Args + FromArgMatches>(args: &[&str]) -> T {
    let command = T::augment_args(clap::Command::new("strait")).no_binary_name(true);
    let matches = command.try_get_matches_from(args);
    let matches = matches.unwrap_or_else(|error| panic!("{error}"));
    T::from_arg_matches(&matches).unwrap_or_else(|error| panic!("{error}"))
}

fn link_text(more: &[&str]) -> anyhow::Result<String> {
    text_of_link(&parsed(&[&ADDRESSES[..], more].concat()))
}

/// Reads printed sections as those of the gateway of a cluster. Every file that it names exists.
fn read(cluster: &str, sections: &str) -> (Config, String) {
    let text = format!(
        "gateway: {{cluster: {cluster}}}
identity: {{kind: files, chain: Cargo.toml, key: Cargo.toml, roots: Cargo.toml}}
listeners: [{{name: cross-network, bind: '127.0.0.1:15008'}}]
discovery: {{kind: file, path: Cargo.toml}}
{sections}"
    );
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("strait.yaml");
    let (config, findings) = Config::parse(&path, &text);
    let config = config.unwrap_or_else(|| panic!("{findings}\n{text}"));
    (config, findings.to_string())
}

/// Returns the printed part of each cluster.
fn parts(text: &str) -> Vec<(&str, &str)> {
    let parts = text
        .split("# strait.yaml of the gateways of cluster ")
        .skip(1);
    parts
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
            assert_eq!(
                (&*network.name, network.cluster.as_deref()),
                ("net-w", Some("west"))
            );
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
    assert_eq!(names(&text).len(), 2, "{text}");
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
    let documents = documents
        .iter()
        .filter(|one| one.root.get("kind").is_some());
    let name = |one: &Document| {
        let metadata = one.root.get("metadata").expect("metadata");
        let word = |node: &Node, key| node.word(key).expect("a word").to_owned();
        [
            word(&one.root, "kind"),
            word(metadata, "namespace"),
            word(metadata, "name"),
        ]
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
    all.extend(names(&text_of_link(&both).expect("a text")));
    for service in [
        "echo.app.svc.cluster.local:80",
        "echo.app.svc.cluster.local:81",
        "echo.app.global:80",
        "other.app.global:80",
    ] {
        let args = parsed(&[service, "--of", "east", "--to", "west", "--kubernetes"]);
        all.extend(names(&text_of_exposure(&args).expect("a text")));
    }
    assert_eq!(
        all.iter().filter(|[kind, ..]| kind == "ConfigMap").count(),
        0
    );
    let different: BTreeSet<_> = all.iter().collect();
    assert_eq!(different.len(), all.len(), "{all:?}");
    assert_eq!(all.len(), 10, "{all:?}");
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
    let meshes: Vec<_> = text
        .split("# Mesh file of the gateways of cluster ")
        .collect();
    let [donor, west, north] = meshes[..] else {
        panic!("{text}");
    };
    let trust = "trust: {domains: [{name: east.local, cluster: east}, {name: west.local, \
                 cluster: west}, {name: north.local, cluster: north}]}\n";
    let (config, findings) = read("east", &[trust, donor].concat());
    assert_eq!(findings, "", "{text}");
    let [entry] = &config.exposure.services[..] else {
        panic!("{text}");
    };
    assert_eq!(
        (entry.service.to_string(), entry.limits.tunnels),
        (ECHO.to_owned(), Some(9))
    );
    let to = entry.to.iter().map(|to| to.cluster.as_deref());
    let (west_only, north_only) = (Some("west"), Some("north"));
    assert_eq!(
        to.collect::<Vec<_>>(),
        [west_only, west_only, north_only, north_only]
    );
    assert_eq!(entry.to[0].namespaces, ["shop"]);
    let account = |namespace: &str, name: &str| [(namespace.to_owned(), name.to_owned())];
    assert_eq!(entry.to[2].service_accounts, account("shop", "checkout"));
    // The gateway has its own namespace, and is admitted beside the clients.
    assert_eq!(entry.to[1].namespaces, [""; 0]);
    assert_eq!(
        entry.to[1].service_accounts,
        account("istio-system", "eastwest")
    );
    for (cluster, part) in [("west", west), ("north", north)] {
        let part = part.strip_prefix(cluster).expect("the cluster");
        let (mesh, _) = file::parse(Path::new("mesh.yaml"), part)
            .unwrap_or_else(|findings| panic!("{findings}\n{text}"));
        let [instance] = mesh.workloads.sorted()[..] else {
            panic!("{text}");
        };
        assert_eq!((&*instance.network, instance.capacity), ("net-e", 3));
        assert!(mesh.services.contains_key("app/echo.app.svc.cluster.local"));
    }
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
    for (service, want) in [
        ("echo.app.svc.cluster.local", "has no port"),
        ("echo:80", "is not NAME.NAMESPACE.SUFFIX"),
    ] {
        let failed = text_of_exposure(&parsed(&[service, "--of", "east", "--to", "west"]));
        let failed = failed.expect_err("an error").to_string();
        assert!(failed.contains(want), "{service}: {failed}");
    }
}
