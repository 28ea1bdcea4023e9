//! `strait check` of revocation lists that would cause refusals of peers.

use std::path::Path;
use std::time::{Duration, SystemTime};

use strait::tools::dev::{Authority, Issuer};
use tempfile::TempDir;

use crate::check::{GOOD, GOOD_MESH, check};
use crate::support::{run, write};

const HOUR: Duration = Duration::from_secs(3600);

/// A folder with a gateway's files, whose root and intermediate can sign lists.
fn world() -> (TempDir, Authority, Issuer) {
    let folder = tempfile::tempdir().expect("a folder");
    let authority = Authority::new().expect("a root");
    let west = authority.intermediate("west").expect("an intermediate");
    let leaf = west.leaf("spiffe://east.local/ns/istio-system/sa/strait");
    let leaf = leaf.expect("a leaf");
    std::fs::create_dir(folder.path().join("certs")).expect("a folder");
    let key = folder.path().join("certs/gateway.key");
    std::fs::write(&key, &leaf.key_pem).expect("a key");
    let owner = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&key, owner).expect("its mode");
    for (file, text) in
        [("certs/gateway.crt", &leaf.chain_pem), ("certs/root.crt", &authority.root_pem())]
    {
        std::fs::write(folder.path().join(file), text).expect("a certificate");
    }
    (folder, authority, west)
}

/// Checks with these lists in `crl.pem` and `trust.crl` with these keys. Returns the output.
async fn checked(folder: &Path, lists: &str, more: &str) -> String {
    std::fs::write(folder.join("crl.pem"), lists).expect("lists");
    let crl = format!("trust:\n  crl: {{files: [crl.pem]{more}}}\n");
    write(folder, "strait.yaml", &GOOD.replace("trust:\n", &crl));
    write(folder, "mesh.yaml", GOOD_MESH);
    let checked = check(folder).await;
    assert_eq!(checked.code, Some(0), "{checked:?}");
    checked.stderr
}

#[test]
fn check_warns_of_a_root_without_a_list_of_its_own() {
    run(async {
        let (folder, authority, west) = world();
        let end = SystemTime::now() + HOUR;
        let of_west = west.crl(&[], 1, end).expect("a list");
        let reported = checked(folder.path(), &of_west, "").await;
        assert!(
            reported
                .contains("strait.yaml:8: warning: `trust.crl` has no list of the root CN=Strait"),
            "{reported}"
        );
        assert!(reported.contains("peers below CN=Strait development root"), "{reported}");
        let reported = checked(folder.path(), &of_west, ", on_missing: accept").await;
        assert!(!reported.contains("list"), "{reported}");
        let other = Authority::new().expect("a root").crl(&[], 1, end);
        let lists = of_west.clone() + &other.expect("a list");
        let reported = checked(folder.path(), &lists, "").await;
        assert!(reported.contains("peers below"), "another root's: {reported}");
        let lists = of_west + &authority.crl(&[], 1, end).expect("a list");
        let reported = checked(folder.path(), &lists, "").await;
        assert!(!reported.contains("list"), "{reported}");
    });
}

#[test]
fn check_warns_of_a_stale_list_that_has_peers_refused() {
    run(async {
        let (folder, authority, west) = world();
        let root = authority.crl(&[], 1, SystemTime::now() + HOUR);
        let end = SystemTime::now() - HOUR;
        let lists = root.expect("a list") + &west.crl(&[], 7, end).expect("a list");
        let reported = checked(folder.path(), &lists, "").await;
        let end = humantime::format_rfc3339_seconds(end).to_string();
        for part in
            ["strait.yaml:8: warning: ", "intermediate of west", "crl.pem, nextUpdate ", &*end]
        {
            assert!(reported.contains(part), "{part}: {reported}");
        }
        let reported = checked(folder.path(), &lists, ", on_stale: accept").await;
        assert!(!reported.contains("stale"), "{reported}");
    });
}
