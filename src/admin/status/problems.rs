//! Problems on the status page.

use super::Page;
use crate::admin::view::key_of;
use crate::config::Config;
use crate::snapshot::Snapshot;
use crate::status::{ResourceType, Status};

/// Maximum number of collisions: tenants can cause any number of them.
const COLLISIONS_SHOWN: usize = 10;
/// Maximum number of conflicts of objects.
const CONFLICTS_SHOWN: usize = 20;

/// Formats the number of rejected resources of a type.
pub(super) fn format_rejected(kind: &ResourceType) -> String {
    let at_least = if kind.at_least { "at least " } else { "" };
    format!("{at_least}{}", kind.rejected)
}

/// Returns the problems, which exist even if the gateway is ready.
pub(super) fn list(
    page: &Page,
    config: &Config,
    snapshot: &Snapshot,
    status: &Status,
) -> Vec<String> {
    let mut problems = of_discovery(page);
    problems.extend(of_certificates(page));
    if config.trust.skip_validation {
        let problem = "`trust.skip_validation`: peers of any trust domain are accepted";
        problems.push(problem.to_owned());
    }
    let roots = status.unlisted_roots().into_iter();
    problems.extend(
        roots.map(|root| {
            format!("`trust.crl` has no list of {root}: peers below {root} are refused")
        }),
    );
    problems.extend(missing_waypoints(snapshot));
    let more = "more objects conflict; see `strait check`";
    problems.extend(truncated(status.conflicts(), CONFLICTS_SHOWN, more));
    problems.extend(collisions(snapshot));
    problems
}

/// Returns the problems of the control plane, of reloads and of hostnames.
fn of_discovery(page: &Page) -> Vec<String> {
    let mut problems = Vec::new();
    if let Some(stream) = &page.source.stream {
        if !stream.connected {
            let why = stream.why.as_deref().unwrap_or("no stream was tried yet");
            problems.push(format!("no stream to the control plane: {why}"));
        }
        problems.extend(stream.from_disk.clone());
        for kind in stream.types.iter().filter(|kind| kind.rejected > 0) {
            let count = format_rejected(kind);
            problems.push(format!("{count} of {} are rejected", kind.name));
        }
    }
    for reload in &page.reloads {
        if let Some(error) = &reload.error {
            let lines = error.lines();
            problems.extend(lines.map(|line| format!("{}: {line}", reload.what)));
        }
    }
    let mut failing = page.hosts.list.iter().filter(|host| host.error.is_some());
    if let Some(first) = failing.next() {
        let why = first.error.as_deref().unwrap_or_default();
        let others = others(failing.count(), "; so do those of");
        problems.push(format!("lookups of {} fail: {why}{others}", first.name));
    }
    if page.hosts.left_out > 0 {
        let count = page.hosts.left_out;
        problems.push(format!(
            "{count} hostnames are not looked up: there are too many"
        ));
    }
    problems
}

/// Returns the problems of revocation lists and of our certificates.
fn of_certificates(page: &Page) -> Vec<String> {
    let mut problems = Vec::new();
    for crl in page.crls.iter().filter(|crl| crl.stale) {
        let (issuer, file) = (&crl.issuer, &crl.file);
        problems.push(format!(
            "the revocation list of {issuer} in {file} is stale"
        ));
    }
    for certificate in &page.certificates {
        let (identity, state) = (&certificate.identity, &certificate.state);
        let expires = humantime::parse_rfc3339(&certificate.expires);
        if expires.is_ok_and(|expires| expires <= page.at) {
            problems.push(format!("the certificate of {identity} has expired"));
        } else if state != "Available" {
            problems.push(format!("the certificate of {identity}: {state}"));
        }
    }
    problems
}

/// Returns at most `max` problems, and a last one with the number of the others.
fn truncated(mut all: Vec<String>, max: usize, what: &str) -> Vec<String> {
    let more = all.len().saturating_sub(max);
    all.truncate(max);
    if more > 0 {
        all.push(format!("{more} {what}"));
    }
    all
}

/// Formats the number of others with the same problem; empty without any.
fn others(count: usize, what: &str) -> String {
    match count {
        0 => String::new(),
        count => format!("{what} {count} more"),
    }
}

/// Reports services whose tunnels are all rejected, because their waypoint is missing.
fn missing_waypoints(snapshot: &Snapshot) -> Option<String> {
    let services = snapshot.mesh.services.sorted().into_iter();
    let mut lost = services.filter(|service| snapshot.lacks_waypoint(service));
    let first = lost.next()?;
    let others = others(lost.count(), "; so are those of");
    Some(format!(
        "tunnels to {} are refused: its waypoint {} is unknown or has no HBONE endpoint{others}",
        key_of(first),
        first.waypoint_names()
    ))
}

/// Returns the hostnames and VIPs that several services claim, with the one that is used. Claims
/// that the configuration decides by a namespace are omitted.
fn collisions(snapshot: &Snapshot) -> Vec<String> {
    let open = snapshot.collisions().filter(|one| !one.is_intended());
    let mut collisions: Vec<_> = open.map(|one| one.to_string()).collect();
    collisions.sort_unstable();
    let more = "more hostnames and VIPs are claimed by several services";
    truncated(collisions, COLLISIONS_SHOWN, more)
}
