//! Stage 8: what Istio's authorization policies say of a tunnel to the picked endpoint.
//!
//! They are judged after the pick, as they are a workload's and not a service's. This gateway
//! knows less than the destination does: of an HBONE endpoint the inner CONNECT names the port,
//! the source that the destination sees is not the peer of the outer connection, and the endpoint
//! may be a waypoint. So it refuses what the destination would refuse whatever port and source are,
//! and the destination judges the rest.

use tracing::{info, warn};

use crate::reason::Reason;
use crate::snapshot::authorization::{Attributes, PeerIdentity};
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

/// Judges the tunnel by the policies that cover the picked endpoint's workload.
///
/// # Errors
/// Under `enforce` the pick, for another one, and why its policies refuse it.
pub fn run(gateway: &Gateway, peer: &Peer, pick: Pick) -> Result<Authorized, (Pick, String)> {
    let refusal = judge(&gateway.reader.load(), gateway, peer, pick.endpoint());
    match refusal {
        None => Ok(Authorized(pick)),
        Some(refusal) => Err((pick, refusal.to_string())),
    }
}

/// Judges an open tunnel again, by the policies of now.
///
/// # Errors
/// [`Reason::Revoked`]: a change of the policies, of what selects them or of the mode took the
/// right away.
pub fn still_allowed(
    snapshot: &Snapshot,
    gateway: &Gateway,
    peer: &Peer,
    right: &Right,
) -> Result<(), Reason> {
    // Of what is only audited an open tunnel has been counted.
    if snapshot.enforcement != Enforcement::Enforce {
        return Ok(());
    }
    match judge(snapshot, gateway, peer, right.endpoint()) {
        None => Ok(()),
        Some(_) => Err(Reason::Revoked),
    }
}

/// Why the tunnel is refused, if it is. What is only audited is logged and counted here.
fn judge(
    snapshot: &Snapshot,
    gateway: &Gateway,
    peer: &Peer,
    endpoint: &Endpoint,
) -> Option<Refusal> {
    if snapshot.enforcement == Enforcement::Off {
        return None;
    }
    // What selects a workload may have changed since; one that is gone is judged as it was.
    let now = snapshot.mesh.workloads.get(endpoint.uid());
    let workload = now.unwrap_or(&endpoint.definition);
    if let Some(name) = snapshot.policies.missing(workload)
        && gateway.metrics.may_log_policy()
    {
        let workload = &*workload.uid;
        warn!(
            policy = name,
            workload, "a workload names a policy that is not there; it is passed over"
        );
    }
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
    let PolicyVerdict { refusal, dry_run } = snapshot.policies.judge(workload, &attributes);
    let note = |outcome, why: &Refusal| note(gateway, peer, endpoint, outcome, why);
    if let Some(why) = dry_run {
        note(PolicyOutcome::DryRun, &why);
    }
    let refusal = refusal?;
    if snapshot.enforcement == Enforcement::Audit {
        note(PolicyOutcome::Audited, &refusal);
        return None;
    }
    note(PolicyOutcome::Refused, &refusal);
    Some(refusal)
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
