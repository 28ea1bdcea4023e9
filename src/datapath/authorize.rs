//! Stage 8: what Istio's authorization policies say of a tunnel to the picked endpoint.
//!
//! They are judged after the pick, as they are a workload's and not a service's. This gateway
//! knows less than the destination does: of an HBONE endpoint the inner CONNECT names the port,
//! the source that the destination sees is not the peer of the outer connection, and the endpoint
//! may be a waypoint. So it refuses what the destination would refuse whatever port and source are,
//! and the destination judges the rest.
//!
//! A tunnel to a waypoint is not judged. Policies of its namespace and selectors do not apply to a
//! waypoint's pods, and the waypoint itself evaluates those that are attached to it (contract 11).

use tracing::{info, warn};

use crate::snapshot::authorization::{Attributes, PeerIdentity};
use crate::snapshot::mesh::Workload;
use crate::snapshot::{Endpoint, Enforcement, PolicyVerdict, Protocol, Refusal, Snapshot};
use crate::telemetry::PolicyOutcome;

use super::Gateway;
use super::balance::Pick;
use super::identity::Peer;
use super::policy::Right;

/// A pick whose endpoint's policies let the peer in. Only [`run`] makes one, and only this can be
/// dialled.
#[derive(Debug)]
pub struct Authorized(Pick);

impl Authorized {
    /// The pick.
    pub fn into_pick(self) -> Pick {
        self.0
    }
}

/// Judges the tunnel by the policies that cover the picked endpoint's workload. What is only
/// audited is logged and counted here.
///
/// # Errors
/// Under `enforce` the pick, for another one, and why its policies refuse it.
pub fn run(gateway: &Gateway, peer: &Peer, pick: Pick) -> Result<Authorized, (Pick, String)> {
    let snapshot = gateway.reader.load();
    let (endpoint, by_waypoint) = (pick.endpoint(), pick.route().is_by_waypoint());
    let verdict = verdict(&snapshot, peer, endpoint, by_waypoint);
    let Some(PolicyVerdict { refusal, dry_run }) = verdict else {
        return Ok(Authorized(pick));
    };
    warn_of_missing(&snapshot, gateway, endpoint);
    if let Some(why) = dry_run {
        note(gateway, peer, endpoint, PolicyOutcome::DryRun, &why);
    }
    let Some(refusal) = refusal else {
        return Ok(Authorized(pick));
    };
    if snapshot.enforcement == Enforcement::Audit {
        note(gateway, peer, endpoint, PolicyOutcome::Audited, &refusal);
        return Ok(Authorized(pick));
    }
    note(gateway, peer, endpoint, PolicyOutcome::Refused, &refusal);
    Err((pick, refusal.to_string()))
}

/// Judges an open tunnel again, by the policies of now. What lets it go on was counted when it was
/// opened, and is not counted with every change.
///
/// # Errors
/// What refuses it: a change of the policies, of what selects them or of the mode.
pub fn still_allowed(
    snapshot: &Snapshot,
    gateway: &Gateway,
    peer: &Peer,
    right: &Right,
) -> Result<(), String> {
    if snapshot.enforcement != Enforcement::Enforce {
        return Ok(());
    }
    let endpoint = right.endpoint();
    let verdict = verdict(snapshot, peer, endpoint, right.is_by_waypoint());
    match verdict.and_then(|verdict| verdict.refusal) {
        None => Ok(()),
        Some(refusal) => {
            note(gateway, peer, endpoint, PolicyOutcome::Refused, &refusal);
            Err(refusal.to_string())
        }
    }
}

/// Returns what policies say of a tunnel to the endpoint, which may be one of a waypoint, where
/// they are looked at; nothing is counted.
pub fn verdict(
    snapshot: &Snapshot,
    peer: &Peer,
    endpoint: &Endpoint,
    by_waypoint: bool,
) -> Option<PolicyVerdict> {
    // Of TLS that is passed on the endpoint alone learns who the peer is (contract 2.6).
    let looks = snapshot.enforcement != Enforcement::Off && !peer.is_unknown() && !by_waypoint;
    looks.then(|| judge(snapshot, peer, endpoint))
}

/// What the policies of now say of a tunnel to the endpoint.
fn judge(snapshot: &Snapshot, peer: &Peer, endpoint: &Endpoint) -> PolicyVerdict {
    let is_plain = endpoint.protocol == Protocol::Tcp;
    let attributes = Attributes {
        peer: Some(PeerIdentity {
            principal: &peer.source.principal,
            namespace: &peer.source.namespace,
            service_account: &peer.source.service_account,
        }),
        source: is_plain.then(|| peer.source.address.ip()),
        destination: endpoint.address.ip(),
        port: is_plain.then(|| endpoint.address.port()),
    };
    let workload = workload(snapshot, endpoint);
    snapshot.policies.judge(workload, &attributes)
}

/// The endpoint's workload. What selects it may have changed since the endpoint was picked, and so
/// may its uid in the mesh, with the number of its addresses. One that is gone is judged as it was.
fn workload<'a>(snapshot: &'a Snapshot, endpoint: &'a Endpoint) -> &'a Workload {
    let now = snapshot.mesh.workloads.get(endpoint.uid());
    let now = now.map(|now| &**now);
    now.or_else(|| snapshot.hosts.source_of(&endpoint.definition))
        .unwrap_or(&endpoint.definition)
}

fn warn_of_missing(snapshot: &Snapshot, gateway: &Gateway, endpoint: &Endpoint) {
    let workload = workload(snapshot, endpoint);
    if let Some(name) = snapshot.policies.missing(workload)
        && gateway.metrics.may_log_policy()
    {
        let workload = &*workload.uid;
        warn!(
            policy = name,
            workload, "a workload names a policy that is not there; it is passed over"
        );
    }
}

/// Counts what policies say, and says it in the log at most a few times a second: a peer can ask
/// as often as it likes.
fn note(
    gateway: &Gateway,
    peer: &Peer,
    endpoint: &Endpoint,
    outcome: PolicyOutcome,
    why: &Refusal,
) {
    gateway.metrics.policy_refused(outcome);
    if gateway.metrics.may_log_policy() {
        let (peer, why) = (&*peer.source.principal, why.to_string());
        let (endpoint, outcome) = (&**endpoint.uid(), outcome.label());
        info!(
            peer,
            endpoint, outcome, why, "authorization policies refuse a tunnel"
        );
    }
}
