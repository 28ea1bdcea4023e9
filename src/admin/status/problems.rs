//! Problems on the status page, which exist even if the gateway is ready.

use std::time::SystemTime;

use crate::admin::pages::StatusPage;
use crate::config::Config;
use crate::snapshot::Snapshot;
use crate::status::Status;
use crate::wire::DrainTarget;

/// Maximum number of collisions: tenants can cause any number of them.
const COLLISIONS_SHOWN: usize = 10;
/// Maximum number of conflicts of objects.
const CONFLICTS_SHOWN: usize = 20;

/// Returns the problems of the rest of the page, the configuration and the mesh.
pub(super) fn find(
    page: &StatusPage,
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
    problems.extend(
        status.unlisted_roots.lock().iter().map(|root| {
            format!("`trust.crl` has no list of {root}: peers below {root} are refused")
        }),
    );
    problems.extend(status.drain_problem.lock().clone());
    problems.extend(snapshot.balancing.evacuated.keys().filter_map(|target| {
        let DrainTarget::Listener(name) = target else { return None };
        let is_known = config.listeners.iter().any(|listener| *listener.name == **name);
        (!is_known).then(|| format!("{target} is drained, and `listeners[]` has no such name"))
    }));
    problems.extend(missing_waypoints(snapshot));
    let more = "more objects conflict; see `strait check`";
    problems.extend(truncated(status.conflicts.lock().clone(), CONFLICTS_SHOWN, more));
    problems.extend(collisions(snapshot));
    problems
}

/// Returns the problems of the control plane, of reloads and of hostnames.
fn of_inputs(page: &StatusPage) -> Vec<String> {
    let mut problems = Vec::new();
    if let Some(stream) = &page.source.stream {
        if !stream.connected {
            let why = stream.why.as_deref().unwrap_or("no stream was attempted yet");
            problems.push(format!("no stream to the control plane: {why}"));
        }
        problems.extend(stream.from_disk.clone());
        problems.extend(stream.hold.as_ref().map(ToString::to_string));
        for kind in stream.types.iter().filter(|kind| kind.rejected > 0) {
            problems.push(format!("{} of {} are rejected", kind.rejected_count(), kind.name));
        }
    }
    problems.extend(page.source.objects_from_disk.clone());
    problems.extend(page.source.hold.as_ref().map(ToString::to_string));
    for reload in &page.reloads {
        let lines = reload.error.iter().flat_map(|error| error.lines());
        problems.extend(lines.map(|line| format!("{}: {line}", reload.what)));
    }
    let hosts = &page.hosts;
    let mut failing = hosts.list.iter().filter_map(|host| Some((&host.name, host.error.as_ref()?)));
    if let Some((name, why)) = failing.next() {
        let others = others(failing.count(), "; so do those of");
        problems.push(format!("lookups of {name} fail: {why}{others}"));
    }
    if hosts.left_out > 0 {
        let count = hosts.left_out;
        problems.push(format!("{count} hostnames are not looked up: there are too many"));
    }
    problems
}

/// Returns the problems of revocation lists and of our certificates.
fn of_certificates(page: &StatusPage) -> Vec<String> {
    let mut problems = Vec::new();
    for crl in page.crls.iter().filter(|crl| crl.stale) {
        problems.push(format!("the revocation list of {} in {} is stale", crl.issuer, crl.file));
    }
    for certificate in &page.certificates {
        let (identity, state) = (&certificate.identity, &certificate.state);
        let expires = humantime::parse_rfc3339(&certificate.expires);
        if expires.is_ok_and(|expires| expires <= SystemTime::now()) {
            problems.push(format!("the certificate of {identity} has expired"));
            continue;
        }
        // A renewal that failed is a problem only after a part of the lifetime.
        if !state.starts_with("Available") {
            problems.push(format!("the certificate of {identity}: {state}"));
        } else if let Some(problem) = &certificate.renewal_problem {
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
        first.key(),
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
