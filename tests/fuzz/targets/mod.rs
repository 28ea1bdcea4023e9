//! Fuzz targets: one function each, which panics if an invariant is broken.
//!
//! `make fuzz` runs these under libFuzzer, and the test `corpus` replays the committed corpus.

mod ca_answer;
mod certificate;
mod eds;
mod frames;
mod gateway;
mod hello;
mod hpack;
mod http2;
mod objects;
mod plain;
mod proxy_header;
mod received;
mod record;
mod script;
mod wds;

use std::path::Path;
use std::sync::Arc;

use strait::config::Config;
use strait::snapshot::builder::{Change, build};
use strait::snapshot::{ExposureTable, Snapshot, TrustSet};
use strait::tls::record::{HEADER_BYTES, PLAINTEXT_MAX, TRAILER_BYTES};
use strait::wire::{Authority, Host};
use strait::xds;
use strait::yaml::{Findings, Severity};

pub use ca_answer::ca_answer;
pub use certificate::identity;
pub use eds::eds;
pub use hello::hello;
pub use hpack::hpack;
pub use http2::http2;
pub use objects::objects;
pub use proxy_header::proxy_header;
pub use record::record;
pub use wds::wds;

/// Checks that an accepted authority reads the same after printing.
pub fn authority(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let Ok(authority) = Authority::parse(text) else {
        return;
    };
    let printed = authority.to_string();
    assert_eq!(Authority::parse(&printed), Ok(authority.clone()), "{text:?}");
    assert_ne!(authority.port, 0, "{text:?}");
    if let Host::Name(name) = &authority.host {
        let plain = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '-' | '_' | '.');
        assert!(name.chars().all(plain), "{text:?}");
        assert!(name.split('.').all(|label| !label.is_empty()), "{text:?}");
    }
}

/// Checks that a mesh file is read as a whole or rejected with findings, and that the result yields
/// a snapshot.
pub fn mesh_file(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let (mesh, policies) = match xds::file::parse(Path::new("mesh.yaml"), text) {
        Ok(read) => read,
        Err(findings) => return assert_refused(&findings),
    };
    let services = mesh.services.len();
    // A workload occurs once for each of its addresses.
    let addresses = mesh.workloads.values().map(|one| one.addresses.len().max(1));
    let workloads: usize = addresses.sum();
    let change = Change {
        mesh: Some((mesh, Arc::from("east"))),
        trust: Some(TrustSet::new([("west.local", "west")])),
        exposure: Some(ExposureTable::new(true)),
        policies: Some(policies),
        ..Change::default()
    };
    let snapshot = build(&Snapshot::default(), change);
    assert!(snapshot.services.len() <= services);
    assert_eq!(snapshot.mesh.workloads.len(), workloads);
    let again = build(&snapshot, Change::default());
    assert_eq!(again.generation, snapshot.generation, "nothing has moved");
}

/// Checks that a configuration is read, and can be shown, exactly if no finding is an error.
pub fn strait_yaml(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let (config, findings) = Config::parse(Path::new("strait.yaml"), text);
    let Some(config) = config else {
        return assert_refused(&findings);
    };
    let is_error = |severity| severity != Severity::Warning;
    let errors = findings.0.iter().filter(|one| is_error(one.severity));
    assert_eq!(errors.count(), 0);
    assert!(!config.listeners.is_empty() && !config.trust.domains.is_empty());
    assert!(config.keep_restart_only(&mut config.clone()).is_empty());
    let shown = serde_json::to_string(&config).expect("a dump never fails");
    assert!(shown.contains("listeners"));
}

/// Checks that a rejection has a reason, on lines that name the file.
fn assert_refused(findings: &Findings) {
    let is_error = |severity| severity != Severity::Warning;
    assert!(findings.0.iter().any(|one| is_error(one.severity)), "says nothing");
    for finding in &findings.0 {
        assert!(finding.to_string().contains(".yaml:"), "{finding}");
    }
}
