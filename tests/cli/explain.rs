//! `strait explain` by files: the gateway of `deploy/local`, and its exit codes.

use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{Done, done, folder_with_certificates, run, write};

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

async fn explained(folder: &TempDir, args: &[&str]) -> Done {
    let args = [&["explain", "-c", "deploy/local/strait.yaml"], args].concat();
    done(folder.path(), &args).await
}

#[test]
fn a_tunnel_that_would_be_opened_is_explained_by_its_rule_and_its_odds() {
    run(async {
        let folder = local().await;
        let asked = ["--from", CHECKOUT, "--to", "echo.global:80"];
        let text = explained(&folder, &asked).await;
        assert_eq!((text.code, &*text.stderr), (Some(0), ""), "{text:?}");
        for part in [
            "a name that `exposure` gives it",
            "of cluster west, by its trust domain west.local",
            "Allowed   exposure.services[0] admits the peer",
            "cluster west, namespace shop",
            "  75.0%  127.0.1.2:15008",
            "  25.0%  127.0.1.1:15008",
            "Outcome   opened, if the endpoint answers: 200",
        ] {
            assert!(text.stdout.contains(part), "{part}: {}", text.stdout);
        }
        let json = explained(&folder, &[&asked[..], &["--json"]].concat()).await;
        assert_eq!(json.code, Some(0), "{json:?}");
        let answer: Value = serde_json::from_str(&json.stdout).expect("JSON");
        assert_eq!(answer["outcome"]["opened"], true);
        assert_eq!(answer["outcome"]["status"], 200);
        assert_eq!(answer["endpoints"][0]["odds"], 0.75);
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
        let stranger = "spiffe://north.local/ns/shop/sa/checkout";
        for (args, parts) in [
            (
                [teller, "echo.app.svc.cluster.local:80"],
                [
                    "write {cluster: west, namespaces: [bank]} into `to` of exposure.services[0]",
                    "refused: 503 (not_for_peer)",
                ],
            ),
            (
                [CHECKOUT, "echo.app.svc.cluster.local:81"],
                [
                    "has no port 81; it has 80",
                    "refused: 503 (unknown_service)",
                ],
            ),
            (
                [CHECKOUT, "echo"],
                ["it is no authority", "refused: 400 (bad_authority)"],
            ),
            (
                [stranger, "echo.global:80"],
                ["`trust.domains`", "(untrusted_domain)"],
            ),
        ] {
            let asked = explained(&folder, &["--from", args[0], "--to", args[1]]).await;
            assert_eq!(asked.code, Some(1), "{asked:?}");
            for part in parts {
                assert!(asked.stdout.contains(part), "{part}: {}", asked.stdout);
            }
        }
    });
}

#[test]
fn a_question_that_is_none_exits_with_2_and_says_what_to_write() {
    run(async {
        let folder = local().await;
        for (args, part) in [
            (&["--from", CHECKOUT][..], "--to HOST:PORT"),
            (&["--to", "echo.global:80"], "write --from spiffe://"),
            (
                &["--to", "a:1", "--from", "checkout"],
                "no identity of a workload",
            ),
            (&["--sni", "echo.global"], "there is no TLS listener"),
            (
                &["--to", "a:1", "--listener", "b"],
                "write one of cross-network",
            ),
            (&["--to", "a:1", "--origin", "sidecar"], "waypoint, gateway"),
            (&["--to", "a:1", "--admin"], "cannot be used with"),
        ] {
            let asked = explained(&folder, args).await;
            assert_eq!((asked.code, &*asked.stdout), (Some(2), ""), "{asked:?}");
            assert!(asked.stderr.contains(part), "{part}: {}", asked.stderr);
        }
        write(
            &folder.path().join("deploy/local"),
            "mesh.yaml",
            "services: 1\n",
        );
        let asked = explained(&folder, &["--from", CHECKOUT, "--to", "echo.global:80"]).await;
        assert_eq!(asked.code, Some(2), "{asked:?}");
        assert!(asked.stderr.contains("mesh.yaml"), "{asked:?}");
    });
}
