//! `check` and `explain -c` on machines without the gateway's certificates.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::support::{CommandOutput, folder_with_certificates, run, run_command, write};

/// The files of `deploy/local`, in a folder without certificates.
fn without_certificates() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    copied(folder.path());
    folder
}

fn copied(folder: &Path) {
    let deploy = folder.join("deploy/local");
    fs::create_dir_all(&deploy).expect("a folder");
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/local");
    for file in ["strait.yaml", "mesh.yaml"] {
        let text = fs::read_to_string(from.join(file)).expect("a file");
        write(&deploy, file, &text);
    }
}

/// Replaces a text of a file that has it.
fn replaced(folder: &Path, file: &str, old: &str, new: &str) {
    let path = folder.join("deploy/local").join(file);
    let text = fs::read_to_string(&path).expect("a file");
    assert!(text.contains(old), "{text}");
    fs::write(path, text.replacen(old, new, 1)).expect("a file");
}

async fn command(folder: &Path, command: &str) -> CommandOutput {
    run_command(folder, &[command, "-c", "deploy/local/strait.yaml"]).await
}

/// The line that names the first file of the identity.
fn line_of_chain(folder: &Path) -> usize {
    let path = folder.join("deploy/local/strait.yaml");
    let text = fs::read_to_string(path).expect("a file");
    let line = text.lines().position(|line| line.contains("  chain: "));
    line.expect("a chain") + 1
}

fn names_all_three(warning: &str) -> bool {
    ["certs/gateway.crt", "certs/gateway.key", "certs/root.crt"]
        .iter()
        .all(|file| warning.contains(file))
}

#[test]
fn explain_answers_without_certificates_with_one_warning() {
    run(async {
        let folder = without_certificates();
        let from = "spiffe://west.local/ns/shop/sa/checkout";
        let args = ["explain", "-c", "deploy/local/strait.yaml", "--from", from];
        let requested = [&args[..], &["--to", "echo.global:80"]].concat();
        let answer = run_command(folder.path(), &requested).await;
        assert_eq!(answer.code, Some(0), "{answer:?}");
        assert!(answer.stdout.contains("  75.0%        127.0.1.2:15008"));
        let place = format!("deploy/local/strait.yaml:{}: warning: ", line_of_chain(folder.path()));
        assert!(answer.stderr.starts_with(&place), "{answer:?}");
        assert_eq!(answer.stderr.lines().count(), 1, "{answer:?}");
        assert!(names_all_three(&answer.stderr), "{answer:?}");
        // The key is not needed, though a certificate exists and the key does not.
        fs::create_dir(folder.path().join("certs")).expect("a folder");
        write(folder.path(), "certs/gateway.crt", "");
        let answer = run_command(folder.path(), &requested).await;
        assert_eq!(answer.code, Some(0), "{answer:?}");
        // Other mistakes are still reported.
        replaced(folder.path(), "mesh.yaml", "services:", "servcies:");
        let answer = run_command(folder.path(), &requested).await;
        assert_eq!(answer.code, Some(2), "{answer:?}");
        assert!(answer.stderr.contains("mesh.yaml:"), "{answer:?}");
    });
}

#[test]
fn check_without_certificates_warns_once_and_finds_everything_else() {
    run(async {
        let folder = without_certificates();
        let path = folder.path();
        let checked = command(path, "check").await;
        assert_eq!(checked.code, Some(0), "{checked:?}");
        assert!(checked.stdout.contains(": ok: 1 listener, "), "{checked:?}");
        assert_eq!(checked.stderr.lines().count(), 1, "{checked:?}");
        let place = format!("deploy/local/strait.yaml:{}: warning: ", line_of_chain(path));
        assert!(checked.stderr.starts_with(&place), "{checked:?}");
        assert!(names_all_three(&checked.stderr), "{checked:?}");
        // Findings that only both files together show are reported, and so are mistakes.
        replaced(path, "strait.yaml", "- service: echo.app", "- service: echo2.app");
        let checked = command(path, "check").await;
        assert_eq!(checked.code, Some(0), "{checked:?}");
        let wanted = "echo2.app.svc.cluster.local is not a service of";
        assert!(checked.stderr.contains(wanted), "{checked:?}");
        replaced(path, "strait.yaml", "\ngateway:", "\ngatewya:");
        let checked = command(path, "check").await;
        assert_eq!(checked.code, Some(1), "{checked:?}");
        assert!(checked.stderr.contains("`gatewya`"), "{checked:?}");
        assert!(!checked.stderr.contains("No such file"), "{checked:?}");
    });
}

#[test]
fn a_missing_file_is_an_error_for_run_and_beside_the_certificate_for_check_too() {
    run(async {
        let folder = without_certificates();
        let refused = command(folder.path(), "run").await;
        assert_eq!(refused.code, Some(1), "{refused:?}");
        for key in ["chain", "key", "roots"] {
            let wanted = format!("error: `identity.{key}` is `");
            assert!(refused.stderr.contains(&wanted), "{refused:?}");
        }
        let folder = folder_with_certificates().await;
        copied(folder.path());
        assert_eq!(command(folder.path(), "check").await.stderr, "");
        let key = folder.path().join("certs/gateway.key");
        fs::rename(&key, key.with_extension("old")).expect("a file");
        for name in ["check", "run"] {
            let refused = command(folder.path(), name).await;
            assert_eq!(refused.code, Some(1), "{refused:?}");
            let wanted = "error: `identity.key` is `";
            assert!(refused.stderr.contains(wanted), "{refused:?}");
            assert!(!refused.stderr.contains("warning"), "{refused:?}");
        }
    });
}

#[test]
fn roots_and_tokens_of_control_planes_are_among_the_files_that_need_not_exist() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        let text = "\
gateway: {cluster: east, network: east}
identity: {kind: istio-ca, address: \"istiod.istio-system.svc:15012\", roots: /no/root.pem,
  token: /no/token, namespace: istio-system, service_account: eastwest, trust_domain: east.local}
trust: {domains: [{name: east.local, cluster: east}, {name: west.local, roots: /no/west.pem}]}
listeners: [{name: cross-network, bind: \"127.0.0.1:15008\"}]
discovery: {kind: istio, address: \"istiod.istio-system.svc:15012\", roots: /no/root.pem,
  token: /no/token}
";
        write(folder.path(), "strait.yaml", text);
        let checked = run_command(folder.path(), &["check", "-c", "strait.yaml"]).await;
        assert_eq!(checked.code, Some(0), "{checked:?}");
        assert_eq!(checked.stderr.lines().count(), 1, "{checked:?}");
        for file in ["/no/root.pem", "/no/token", "/no/west.pem"] {
            assert!(checked.stderr.contains(file), "{checked:?}");
        }
        // A token marks the machine as one on which the gateway runs.
        let with_token = text.replacen("/no/token", "strait.yaml", 1);
        write(folder.path(), "strait.yaml", &with_token);
        let checked = run_command(folder.path(), &["check", "-c", "strait.yaml"]).await;
        assert_eq!(checked.code, Some(1), "{checked:?}");
        let wanted = "error: `trust.domains[].roots` is `/no/west.pem`";
        assert!(checked.stderr.contains(wanted), "{checked:?}");
    });
}
