//! Independent TLS and HTTP/2 peers: Python's `h2` over OpenSSL, `openssl s_client`, and rustls
//! with other records than usual.

mod records;

use std::collections::BTreeMap;
use std::process::Stdio;

use rustix::process::Signal;
use tokio::process::Command;

use crate::support::{CLIENT, GATEWAY, Gateway, Net, Settings, identities, print_uncaptured, run};

/// Python with the package `h2`, as `make strict-client` installs it.
const PYTHON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/.h2/bin/python");
const CLIENT_PY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/peers/client.py");

/// Returns true if `program` exists. Otherwise prints that the test is skipped; under
/// `STRAIT_CI=1` that is a failure.
pub(crate) fn exists(program: &str, test: &str, remedy: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|folder| folder.join(program).exists());
    if !found {
        // Starts a new line, even if the harness has begun one.
        print_uncaptured(&format!(
            "\nSKIPPED {test}: there is no {program}; {remedy}"
        ));
        let is_ci = std::env::var_os("STRAIT_CI").is_some_and(|ci| ci == "1");
        assert!(!is_ci, "nothing may be skipped under STRAIT_CI=1");
    }
    found
}

/// Starts a gateway for the Python client.
async fn gateway(test: &str, net: Net) -> Option<Gateway> {
    if !exists(PYTHON, test, "type `make strict-client`") {
        return None;
    }
    let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    settings.more = "drain: {lag: 0s, deadline: 20s}\n".to_owned();
    let gateway = Gateway::start(&settings).await;
    let leaf = identities().leaf(CLIENT);
    for (name, text) in [("client.crt", leaf.chain_pem), ("client.key", leaf.key_pem)] {
        std::fs::write(gateway.file(name), text).expect("a file");
    }
    Some(gateway)
}

/// Runs scenarios of the Python client. Returns the number of tunnels that they have opened, by
/// the reason of their end.
async fn play(gateway: &Gateway, net: Net, scenarios: &str) -> BTreeMap<String, f64> {
    let output = Command::new(PYTHON)
        .arg(CLIENT_PY)
        .args(["--gateway", &gateway.address.to_string()])
        .args(["--endpoint", &net.address(11, 9000).to_string()])
        .args(["--identity", GATEWAY, scenarios])
        .current_dir(gateway.folder.path())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .expect("Python");
    let notes = String::from_utf8_lossy(&output.stderr);
    let log = gateway.log();
    assert!(output.status.success(), "{notes}\n{log}");
    serde_json::from_slice(&output.stdout).expect("numbers of tunnels")
}

/// Runs scenarios, and compares their tunnels with those that the gateway has counted.
fn check(test: &str, scenarios: &str) {
    run(async {
        let net = Net::new();
        let Some(gateway) = gateway(test, net).await else {
            return;
        };
        let expected = play(&gateway, net, scenarios).await;
        gateway.wait_until_open(0, 0).await;
        assert_eq!(gateway.tunnels_by_reason().await, expected);
    });
}

#[test]
fn a_strict_h2_client_over_openssl_finds_no_error() {
    check("the client of Python's h2", "h2");
}

#[test]
fn openssl_updates_keys_at_any_point_and_every_byte_arrives() {
    let test = "key updates of OpenSSL";
    if exists("openssl", test, "install Debian's package openssl") {
        check(test, "openssl");
    }
}

#[test]
fn a_strict_h2_client_ends_its_tunnels_while_the_gateway_drains() {
    run(async {
        let net = Net::new();
        let Some(mut gateway) = gateway("the client of Python's h2, drained", net).await else {
            return;
        };
        let drain = async {
            gateway.wait_until_open(1, 3).await;
            gateway.signal(Signal::TERM);
        };
        let (tunnels, ()) = tokio::join!(play(&gateway, net, "drain"), drain);
        assert_eq!(tunnels, BTreeMap::from([("completed".to_owned(), 4.0)]));
        assert!(gateway.exited().await.success());
    });
}
