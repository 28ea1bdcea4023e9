//! Validation of `trust.clusters` and `trust.domains[].issuers` by `strait check`.

use tempfile::TempDir;

use crate::check::{GOOD, GOOD_MESH, check};
use crate::support::{CommandOutput, folder_with_certificates, run, write};

/// Checks a file whose `trust` has this line besides, its eighth.
async fn checked(folder: &TempDir, line: &str) -> CommandOutput {
    let text = GOOD.replace("trust:\n", &format!("trust:\n  {line}\n"));
    write(folder.path(), "strait.yaml", &text);
    write(folder.path(), "mesh.yaml", GOOD_MESH);
    check(folder.path()).await
}

#[test]
fn an_issuer_file_holds_authorities_and_an_issuer_is_in_one_cluster() {
    run(async {
        let folder = folder_with_certificates().await;
        let at = |name: &str| folder.path().join(name);
        std::fs::copy(at("certs/gateway.crt"), at("certs/leaf.crt")).expect("a copy");
        for (line, want) in [
            (
                "clusters: [{name: west, issuers: [certs/leaf.crt]}]",
                "strait.yaml:8: error: certs/leaf.crt: contains a certificate that is not a CA \
                 certificate;",
            ),
            (
                "clusters: [{name: west, issuers: [certs/root.crt]}, \
                 {name: east, issuers: [certs/root.crt]}]",
                "is in both `west` and `east`; remove it from one of them",
            ),
            (
                "clusters: [{name: west, issuers: [certs/absent.pem]}]",
                "strait.yaml:8: error: `trust.clusters[].issuers[]` is `certs/absent.pem`: No such",
            ),
        ] {
            let done = checked(&folder, line).await;
            assert_eq!(done.code, Some(1), "{done:?}");
            assert!(done.stderr.contains(want), "{want}: {done:?}");
        }
    });
}

#[test]
fn an_own_issuer_that_is_not_of_the_own_cluster_is_a_warning() {
    run(async {
        let folder = folder_with_certificates().await;
        let line = "clusters: [{name: west, issuers: [certs/root.crt]}]";
        let done = checked(&folder, line).await;
        assert_eq!(done.code, Some(0), "{done:?}");
        let reported = done.stdout.clone() + &done.stderr;
        let want = "is in no cluster of `trust.clusters`, and this gateway is in `east`";
        assert!(reported.contains(want), "{reported}");
        let start = "the issuer of the gateway's certificate, ";
        let (_, rest) = reported.split_once(start).expect("the issuer");
        let (hash, _) = rest.split_once(' ').expect("its hash");
        let line = line.replace("{name", &format!("{{name: east, issuers: [{hash}]}}, {{name"));
        let done = checked(&folder, &line).await;
        assert_eq!(done.code, Some(0), "{done:?}");
        let reported = done.stdout.clone() + &done.stderr;
        assert!(!reported.contains(start), "{reported}");
    });
}
