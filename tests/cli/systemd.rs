//! The units of `deploy/systemd` match the program and the configuration of its package.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use strait::config::reference;

use crate::support::{run, run_command};

/// Runs a script of the package, whose commands only print their arguments.
const HARMLESS: &str = r#"
rm() { echo rm "$@"; }
systemctl() { :; }
. "$0"
"#;

/// Command of the service.
const START: &str = "/usr/bin/strait run -c /etc/strait/strait.yaml";

fn deployed(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(name)
}

fn read(name: &str) -> String {
    std::fs::read_to_string(deployed(name)).expect("a file of deploy")
}

/// Returns the values of a key of a unit; none of ours continues a line.
fn values<'a>(unit: &'a str, key: &'a str) -> impl Iterator<Item = &'a str> {
    unit.lines().filter_map(move |line| line.strip_prefix(key)?.strip_prefix('='))
}

fn only<'a>(unit: &'a str, key: &'a str) -> &'a str {
    let found: Vec<_> = values(unit, key).collect();
    assert_eq!(found.len(), 1, "{key} is {found:?}");
    found[0]
}

fn seconds(text: &str) -> u64 {
    let number = text.strip_suffix('s').unwrap_or_else(|| panic!("{text} is in seconds"));
    number.parse().expect("a number")
}

#[test]
fn the_service_starts_a_configuration_that_its_package_has() {
    run(async {
        let service = read("systemd/strait.service");
        assert_eq!(only(&service, "ExecStart"), START);
        assert_eq!(only(&service, "Type"), "notify");
        let arguments = ["check", "--format", "json", "-c", "strait.yaml"];
        let done = run_command(&deployed("debian"), &arguments).await;
        assert_eq!(done.code, Some(0), "{done:?}");
        let report: Value = serde_json::from_str(&done.stdout).expect("JSON");
        let findings = report["findings"].as_array().expect("a list");
        let messages: Vec<_> = findings.iter().map(|of| &of["message"]).collect();
        assert_eq!(findings.len(), 1, "only certificates are missing: {messages:?}");
        assert!(messages[0].to_string().contains("certificates were not checked"), "{messages:?}");
    });
}

#[test]
fn the_template_differs_from_the_service_by_the_hand_over_alone() {
    let settings = |name: &str| {
        let unit = read(name);
        let section = unit.split("[Service]\n").nth(1).expect("a section");
        let section = section.split("[Install]").next().unwrap_or_default();
        let is_setting = |line: &&str| !line.is_empty() && !line.starts_with('#');
        section.lines().filter(is_setting).collect::<Vec<_>>().join("\n")
    };
    let service = settings("systemd/strait.service");
    let folder = only(&service, "RuntimeDirectory");
    let template = service
        .replace(START, &format!("{START} --take-over /run/{folder}/take-over"))
        // The end of one process must not remove the socket of the next one.
        .replace("RuntimeDirectoryPreserve=restart", "RuntimeDirectoryPreserve=yes");
    assert_eq!(settings("systemd/strait@.service"), template);
}

#[test]
fn systemd_opens_the_addresses_of_the_listeners() {
    let socket = read("systemd/strait.socket");
    assert_eq!(only(&socket, "BindIPv6Only"), "both");
    // A port alone is one of the IPv6 wildcard.
    let opened: Vec<_> = values(&socket, "ListenStream")
        .map(|port| SocketAddr::from(([0_u16; 8], port.parse().expect("a port"))))
        .collect();
    let config: Value = serde_saphyr::from_str(&read("debian/strait.yaml")).expect("YAML");
    let listeners = config["listeners"].as_array().expect("a list").iter();
    let bound: Vec<SocketAddr> = listeners
        .map(|of| of["bind"].as_str().expect("text").parse().expect("an address"))
        .collect();
    assert_eq!(opened, bound);
}

#[test]
fn systemd_waits_for_the_whole_drain() {
    let schema = reference::schema();
    let default = |key: &str| {
        let of = &schema["properties"]["drain"]["properties"][key]["default"];
        seconds(of.as_str().unwrap_or_else(|| panic!("drain.{key} has a default")))
    };
    let stop = seconds(only(&read("systemd/strait.service"), "TimeoutStopSec"));
    let drain = default("lag") + default("deadline");
    assert!(stop >= drain + 5, "{stop} s are no time for a drain of {drain} s");
}

#[test]
fn a_removal_of_the_package_removes_the_private_key_and_a_purge_the_state() {
    let key = "rm -rf /run/strait\n";
    let all = "rm -rf /run/strait\nrm -rf /var/lib/strait\n";
    for (action, removed) in [("upgrade", ""), ("remove", key), ("purge", all)] {
        let mut shell = Command::new("sh");
        let done = shell.args(["-c", HARMLESS]).arg(deployed("debian/postrm")).arg(action).output();
        let done = done.expect("a shell");
        assert!(done.status.success(), "{action}: {done:?}");
        assert_eq!(String::from_utf8_lossy(&done.stdout), removed, "{action}");
    }
}
