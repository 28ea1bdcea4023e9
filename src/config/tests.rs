//! Whole files: a situation in `strait.yaml` and the findings about it.

use std::path::Path;
use std::time::Duration;

use super::*;

pub(super) const GOOD: &str = r#"gateway: {cluster: east}
identity: {kind: files, chain: Cargo.toml, key: Cargo.toml, roots: Cargo.toml}
trust:
  domains:
    - {name: East.Local, cluster: east}
    - {name: west.local, cluster: west}
    - {name: partner.example}
listeners:
  - {name: cross-network, bind: "[::]:15008", protocol: hbone, route_by: authority}
discovery: {kind: file, path: Cargo.toml}
"#;

/// A file in the crate's root, so that `Cargo.toml` stands for every file that must exist.
pub(super) fn check(text: &str) -> (Option<Config>, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("s.yaml");
    let (config, findings) = Config::parse(&path, text);
    assert_eq!(config.is_some(), !findings.has_errors());
    let prefix = format!("{}:", path.display());
    let lines: Vec<_> = findings.to_string().lines().map(|l| l.replace(&prefix, "")).collect();
    (config, lines.join("\n"))
}

/// The findings about the good file with one text replaced by another.
pub(super) fn instead(old: &str, new: &str) -> String {
    assert!(GOOD.contains(old));
    check(&GOOD.replacen(old, new, 1)).1
}

#[test]
fn a_change_says_which_keys_need_a_restart() {
    let old = check(GOOD).0.unwrap();
    let mut new = old.clone();
    new.log.level = "debug".to_owned();
    new.trust.domains.clear();
    new.exposure.default = DefaultExposure::All;
    new.links = Some(Vec::new());
    new.dial.probe_interval = Some(Duration::from_secs(60));
    new.dial.probe_authority = HostPort::parse("health.edge:80").ok();
    assert!(old.keep_restart_only(&mut new).is_empty());
    let live = new.clone();
    new.workers = 3;
    new.limits.buffers = Some(1 << 20);
    new.drain.lag = Duration::ZERO;
    new.dial.allow = vec!["127.0.0.0/8".parse().unwrap()];
    new.log.format = LogFormat::Json;
    let keys = old.keep_restart_only(&mut new);
    assert_eq!(keys, ["dial.allow", "limits", "workers", "drain", "log.format"]);
    assert_eq!(new, live);
}
