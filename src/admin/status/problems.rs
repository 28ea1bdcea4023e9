//! Problems on the status page, which exist even if the gateway is ready.

use std::time::SystemTime;

use serde_json::Value;

use super::list;
use crate::admin::text::cell;
use crate::admin::view::key_of;
use crate::config::Config;
use crate::snapshot::Snapshot;
use crate::status::Status;

/// Maximum number of collisions: tenants can cause any number of them.
const COLLISIONS_SHOWN: usize = 10;
/// Maximum number of conflicts of objects.
const CONFLICTS_SHOWN: usize = 20;

/// Returns the problems of the rest of the page, the configuration and the mesh.
pub(super) fn find(
    page: &Value,
    config: &Config,
    snapshot: &Snapshot,
    status: &Status,
) -> Vec<String> {
    let mut problems = of_inputs(page);
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

/// Formats the number of rejected resources of a type.
pub(super) fn format_rejected(kind: &Value) -> String {
    let at_least = if kind["atLeast"] == true { "at least " } else { "" };
    format!("{at_least}{}", kind["rejected"])
}

/// Returns the problems of the control plane, of reloads and of hostnames.
fn of_inputs(page: &Value) -> Vec<String> {
    let mut problems = Vec::new();
    let stream = &page["source"]["stream"];
    if stream["connected"] == false {
        let why = stream["why"].as_str().unwrap_or("no stream was attempted yet");
        problems.push(format!("no stream to the control plane: {why}"));
    }
    problems.extend(stream["fromDisk"].as_str().map(ToOwned::to_owned));
    for kind in list(&stream["types"]).iter().filter(|kind| kind["rejected"] != 0) {
        let (count, name) = (format_rejected(kind), cell(&kind["name"]));
        problems.push(format!("{count} of {name} are rejected"));
    }
    for reload in list(&page["reloads"]) {
        let (what, error) = (cell(&reload["what"]), reload["error"].as_str());
        let lines = error.into_iter().flat_map(str::lines);
        problems.extend(lines.map(|line| format!("{what}: {line}")));
    }
    let hosts = &page["hosts"];
    let mut failing = list(&hosts["list"]).iter().filter(|host| !host["error"].is_null());
    if let Some(first) = failing.next() {
        let (name, why) = (cell(&first["name"]), cell(&first["error"]));
        let others = others(failing.count(), "; so do those of");
        problems.push(format!("lookups of {name} fail: {why}{others}"));
    }
    if hosts["leftOut"] != 0 {
        let count = &hosts["leftOut"];
        problems.push(format!("{count} hostnames are not looked up: there are too many"));
    }
    problems
}

/// Returns the problems of revocation lists and of our certificates.
fn of_certificates(page: &Value) -> Vec<String> {
    let mut problems = Vec::new();
    for crl in list(&page["crls"]).iter().filter(|crl| crl["stale"] == true) {
        let (issuer, file) = (cell(&crl["issuer"]), cell(&crl["file"]));
        problems.push(format!("the revocation list of {issuer} in {file} is stale"));
    }
    for certificate in list(&page["certificates"]) {
        let [identity, state, expires] =
            ["identity", "state", "expires"].map(|key| cell(&certificate[key]));
        let expires = humantime::parse_rfc3339(&expires);
        if expires.is_ok_and(|expires| expires <= SystemTime::now()) {
            problems.push(format!("the certificate of {identity} has expired"));
            continue;
        }
        // A renewal that failed is a problem only after a part of the lifetime.
        if !state.starts_with("Available") {
            problems.push(format!("the certificate of {identity}: {state}"));
        } else if let Some(problem) = certificate["renewalProblem"].as_str() {
            let why = state.strip_prefix("Available").unwrap_or_default();
            problems.push(format!("the certificate of {identity} {problem}{why}"));
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
        "tunnels to {} are rejected: its waypoint {} is unknown or has no HBONE endpoint{others}",
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
