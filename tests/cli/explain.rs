//! `strait explain` by files: the gateway of `deploy/local`, and its exit codes.

use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{CommandOutput, folder_with_certificates, run, run_command, write};

const CHECKOUT: &str = "spiffe://west.local/ns/shop/sa/checkout";

/// The files of `deploy/local`, in a folder with certificates.
async fn local() -> TempDir {
    let folder = folder_with_certificates().await;
    let deploy = folder.path().join("deploy/local");
    std::fs::create_dir_all(&deploy).expect("a folder");
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/local");
    for file in ["strait.yaml", "mesh.yaml"] {
        let text = std::fs::read_to_string(from.join(file)).expect("a file");
        write(&deploy, file, &text);
    }
    folder
}

async fn explained(folder: &TempDir, args: &[&str]) -> CommandOutput {
    let args = [&["explain", "-c", "deploy/local/strait.yaml"], args].concat();
    run_command(folder.path(), &args).await
}

#[test]
fn a_tunnel_that_would_be_opened_is_explained_by_its_rule_and_its_probabilities() {
    run(async {
        let folder = local().await;
        let requested = ["--from", CHECKOUT, "--to", "echo.global:80"];
        let text = explained(&folder, &requested).await;
        assert_eq!((text.code, &*text.stderr), (Some(0), ""), "{text:?}");
        for part in [
            "a name of its entry in `exposure.services`",
            "of cluster west, by its trust domain west.local",
            "Allowed   exposure.services[0] admits the peer",
            "cluster west, namespace shop",
            "  75.0%        127.0.1.2:15008",
            "  25.0%        127.0.1.1:15008",
            "Outcome   opened, if the endpoint answers: 200",
        ] {
            assert!(text.stdout.contains(part), "{part}: {}", text.stdout);
        }
        let json = explained(&folder, &[&requested[..], &["--json"]].concat()).await;
        assert_eq!(json.code, Some(0), "{json:?}");
        let answer: Value = serde_json::from_str(&json.stdout).expect("JSON");
        assert_eq!(answer["outcome"]["opened"], true);
        assert_eq!(answer["outcome"]["status"], 200);
        assert_eq!(answer["endpoints"][0]["odds"], 0.75);
        assert_eq!(answer["legs"][0]["asked"], "echo.global:80");
        assert_eq!(answer["legs"][0]["route"]["by"], "exposedName");
        let file = folder.path().join("deploy/local/strait.yaml");
        let file = std::fs::read_to_string(file).expect("a file");
        let entry = file.lines().position(|line| line.contains("- service: "));
        let line = &answer["legs"][0]["rule"]["entries"][0]["line"];
        assert_eq!(line.as_u64(), entry.map(|at| at as u64 + 1));
    });
}

#[test]
fn a_refusal_exits_with_1_and_says_what_to_write() {
    run(async {
        let folder = local().await;
        let teller = "spiffe://west.local/ns/bank/sa/teller";
        let foreign = "spiffe://north.local/ns/shop/sa/checkout";
        for (args, parts) in [
            (
                [teller, "echo.app.svc.cluster.local:80"],
                [
                    "Change    add namespace bank to exposure.services[0] (line 57)",
                    "rejected: 503 (not_for_peer)",
                ],
            ),
            (
                [CHECKOUT, "echo.app.svc.cluster.local:81"],
                ["has no port 81; it has 80", "rejected: 503 (unknown_service)"],
            ),
            ([CHECKOUT, "echo"], ["not an authority", "rejected: 400 (bad_authority)"]),
            ([foreign, "echo.global:80"], ["`trust.domains`", "(untrusted_domain)"]),
        ] {
            let requested = explained(&folder, &["--from", args[0], "--to", args[1]]).await;
            assert_eq!(requested.code, Some(1), "{requested:?}");
            for part in parts {
                assert!(requested.stdout.contains(part), "{part}: {}", requested.stdout);
            }
        }
    });
}

#[test]
fn a_question_that_is_none_exits_with_2_and_says_what_to_write() {
    run(async {
        let folder = local().await;
        for (args, part) in [
            (&["--from", CHECKOUT][..], "`--to echo.app.svc.cluster.local:80`"),
            (&["--to", "echo.global:80"], "`--from spiffe://west.local/ns/shop/sa/checkout`"),
            (&["--to", "a:1", "--from", "checkout"], "is not a workload identity"),
            (&["--sni", "echo.global"], "there is no TLS listener"),
            (&["--to", "a:1", "--listener", "b"], "write one of cross-network"),
            (&["--to", "a:1", "--origin", "sidecar"], "waypoint, gateway"),
            (&["--to", "a:1", "--admin"], "cannot be used with"),
        ] {
            let requested = explained(&folder, args).await;
            assert_eq!((requested.code, &*requested.stdout), (Some(2), ""), "{requested:?}");
            assert!(requested.stderr.contains(part), "{part}: {}", requested.stderr);
        }
        write(&folder.path().join("deploy/local"), "mesh.yaml", "services: 1\n");
        let requested = explained(&folder, &["--from", CHECKOUT, "--to", "echo.global:80"]).await;
        assert_eq!(requested.code, Some(2), "{requested:?}");
        assert!(requested.stderr.contains("mesh.yaml"), "{requested:?}");
    });
}

/// A configuration with everything that a remedy names: entries, aliases, links and routes.
const EVERYTHING: &str = "\
gateway: {cluster: east, network: east}
identity: {kind: files, chain: gateway.crt, key: gateway.key, roots: root.crt}
trust: {domains: [{name: east.local, cluster: east}, {name: west.local, cluster: west},
  {name: north.local, cluster: north}]}
listeners:
  - {name: hbone, bind: \"127.0.0.1:15008\"}
  - {name: sidecars, bind: \"127.0.0.1:15443\", protocol: tls, routing: istio}
  - {name: routes, bind: \"127.0.0.1:15012\", protocol: tls,
     routes: [{sni: [one.example, \"*.two.example\"], to: \"echo.app.svc.cluster.local:80\"}]}
discovery: {kind: file, path: deploy/local/mesh.yaml}
links: [{from: west, to: east}]
exposure:
  services:
    - {service: \"echo.app.svc.cluster.local:80\", to: [{cluster: west, namespaces: [shop]}],
       names: [\"echo.global:80\"]}
    - {service: \"echo.app.svc.cluster.local:80\", to: [{cluster: west, namespaces: [bank],
         service_accounts: [bank/teller]}], names: [\"other.global:80\"]}
    - {service: \"gone.app.svc.cluster.local:80\", to: [{cluster: west}], names: [gone.name]}
names:
  aliases:
    - {name: \"alias.example:80\", to: \"echo.app.svc.cluster.local:81\"}
    - {name: \"east.example:80\", to: \"echo.app.svc.cluster.local:80\", consumers: [east]}
";

const PLACEHOLDERS: [&str; 6] = ["HOST", "PORT", "NAME", "CLUSTER", "NAMESPACE", "THIS_CLUSTER"];

/// Peer (trust domain, namespace, account) and its request, with the remedy.
const REMEDIES: &[(&str, &str, &str)] = &[
    ("west shop cart", "echo", "such as echo.app.svc.cluster.local:80"),
    ("west shop cart", "echo.app.svc.cluster.local:81", "request echo.app.svc.cluster.local:80"),
    ("west shop cart", "east.example:81", "request east.example:80"),
    (
        "west shop cart",
        "cart.example:80",
        "request a hostname of the mesh, such as echo.app.svc.cluster.local:80",
    ),
    (
        "west shop cart",
        "echo.example:80",
        "request echo.app.svc.cluster.local:80, or add \"echo.example:80\" to `names` of \
         exposure.services[0] (line 14)",
    ),
    (
        "west shop cart",
        "gone.name:80",
        "add gone.app.svc.cluster.local to the mesh, or correct `service` of exposure.services[2] \
         (line 18)",
    ),
    (
        "west shop cart",
        "alias.example:80",
        "correct `to` of names.aliases[0] (line 21): echo.app.svc.cluster.local has port 80",
    ),
    ("west shop cart", "east.example:80", "add west to `consumers` of names.aliases[1] (line 22)"),
    ("west shop cart", "127.0.1.1:8080", "add `workloads: true` to exposure.services[0] (line 14)"),
    (
        "west cart cart",
        "echo.app.svc.cluster.local:80",
        "add namespace cart to exposure.services[0] (line 14)",
    ),
    (
        "west bank clerk",
        "other.global:80",
        "add service account bank/clerk to exposure.services[1] (line 16)",
    ),
    (
        "east shop cart",
        "echo.global:80",
        "add {cluster: east, namespaces: [shop]} to `to` of exposure.services[0] (line 14)",
    ),
    ("north shop cart", "echo.global:80", "add {from: north, to: east} to `links`"),
    ("south shop cart", "echo.global:80", "add {name: south.local} to `trust.domains`"),
];

/// ClientHellos to TLS listeners, as arguments, each with its remedy.
const TLS_REMEDIES: &[(&str, &str)] = &[
    (
        "--listener sidecars --sni echo.app.svc.cluster.local",
        "send a server name such as outbound_.80_._.echo.app.svc.cluster.local",
    ),
    (
        "--listener routes --sni echo.app.svc.cluster.local",
        "send one of the server names *.two.example, one.example",
    ),
    (
        "--listener sidecars --alpn istio --sni outbound_.80_._.echo.app.svc.cluster.local",
        "add {anyone: true} to `to` of exposure.services[1] (line 16)",
    ),
];

#[test]
fn a_remedy_names_the_entry_its_line_and_the_values_and_no_placeholder() {
    run(async {
        let folder = local().await;
        write(folder.path(), "all.yaml", EVERYTHING);
        let hbone = REMEDIES.iter().map(|(peer, to, want)| {
            let parts: Vec<_> = peer.split(' ').collect();
            let [domain, namespace, account] = parts[..] else {
                panic!("{peer}");
            };
            let from = format!("spiffe://{domain}.local/ns/{namespace}/sa/{account}");
            (format!("--from {from} --to {to}"), want)
        });
        let tls = TLS_REMEDIES.iter();
        let tls = tls.map(|(args, want)| ((*args).to_owned(), want));
        for (args, want) in hbone.chain(tls) {
            let command = "explain -c all.yaml".split(' ');
            let args: Vec<_> = command.chain(args.split(' ')).collect();
            let answer = run_command(folder.path(), &args).await;
            assert_eq!(answer.code, Some(1), "{answer:?}");
            assert!(answer.stdout.contains(want), "{want}: {answer:?}");
            let mut words = answer.stdout.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let placeholder = words.find(|word| PLACEHOLDERS.contains(word));
            assert_eq!(placeholder, None, "{answer:?}");
        }
    });
}
