//! Stage 8: evaluation of Istio's authorization policies for a tunnel to the picked endpoint.
//!
//! Policies apply to a workload and not to a service, so they are evaluated after the pick. This
//! gateway has less information than the destination. For an HBONE endpoint, only the inner
//! CONNECT names the port, and the destination sees a source other than the outer peer. The
//! endpoint may also be a waypoint. This stage therefore rejects only what the destination rejects
//! for any port and source. The destination evaluates the rest.
//!
//! The destination sees the peer inside the tunnel. Behind a gateway of another network that is the
//! first peer, so its identity is evaluated if a trusted gateway has sent it.
//!
//! Tunnels to a waypoint are not evaluated. Policies of its namespace and selectors do not apply to
//! its pods, and the waypoint evaluates those that are attached to it (docs/wire-contract.md 5.1).

use tracing::{info, warn};

use crate::outer::{Failure, Servers};
use crate::reason::Reason;
use crate::snapshot::authorization::Attributes;
use crate::snapshot::mesh::Workload;
use crate::snapshot::{Endpoint, Enforcement, PolicyRejection, PolicyVerdict, Protocol, Snapshot};
use crate::telemetry::PolicyOutcome;

use super::DataPath;
use super::balance::{FailedTry, Pick};
use super::first_peer::FirstPeer;
use super::identity::Peer;
use super::policy::{self, Grant};

/// A pick that the policies of its endpoint allow. Only [`run`] creates one, and only this type
/// can be dialled.
#[derive(Debug)]
pub struct Authorized(Pick);

impl Authorized {
    pub fn into_pick(self) -> Pick {
        self.0
    }
}

/// Evaluates the policies that cover the workload of the picked endpoint. Logs and counts
/// rejections that are only audited.
///
/// # Errors
/// Under `enforce`, returns the rejection, and the permit for another endpoint.
pub fn run(data_path: &DataPath, peer: &Peer, pick: Pick) -> Result<Authorized, FailedTry> {
    if pick.route().binding.is_some() {
        // Policies of the service are those of the other cluster.
        return Ok(Authorized(pick));
    }
    let snapshot = data_path.reader.load();
    let (endpoint, by_waypoint) = (pick.endpoint(), pick.route().by_waypoint);
    let callers = (peer, pick.route().first_peer());
    let verdict = evaluate(&snapshot, callers, endpoint, by_waypoint);
    let Some(PolicyVerdict { refusal, dry_run }) = verdict else {
        return Ok(Authorized(pick));
    };
    warn_missing_policy(&snapshot, data_path, endpoint);
    if let Some(why) = dry_run {
        record_outcome(data_path, peer, endpoint, PolicyOutcome::DryRun, &why);
    }
    let Some(refusal) = refusal else {
        return Ok(Authorized(pick));
    };
    if snapshot.enforcement == Enforcement::Audit {
        record_outcome(data_path, peer, endpoint, PolicyOutcome::Audited, &refusal);
        return Ok(Authorized(pick));
    }
    record_outcome(data_path, peer, endpoint, PolicyOutcome::Refused, &refusal);
    Err(pick.failed(Failure::new(Reason::PolicyDenied, refusal.to_string())))
}

/// Evaluates the grant of an open tunnel again: exposure with its limits, the current policies, and
/// the servers by which its endpoint was verified. Counts only rejections: audited outcomes were
/// counted when the tunnel opened, and are not counted again with every change.
///
/// # Errors
/// Returns the change that revokes the grant.
pub fn reevaluate(
    snapshot: &Snapshot,
    data_path: &DataPath,
    peer: &Peer,
    grant: &mut Grant,
    servers: Option<&Servers>,
) -> Result<(), String> {
    policy::still_allowed(snapshot, peer, grant)?;
    if grant.binding.is_none() {
        grant.update_limits(snapshot, peer);
        check_policies(snapshot, data_path, peer, grant)?;
    }
    servers.map_or(Ok(()), |servers| check_servers(snapshot, grant, servers))
}

/// Checks that the verified servers of a tunnel are still those of the current records: the gateway
/// and, for a binding, the workload.
fn check_servers(snapshot: &Snapshot, grant: &Grant, servers: &Servers) -> Result<(), String> {
    let endpoint = &grant.endpoint;
    if let Some(remote) = &endpoint.remote {
        let wanted = snapshot.current_gateway(remote, endpoint.address);
        servers.check_gateway(&wanted, snapshot)?;
    }
    let cluster = &endpoint.definition.cluster;
    let workloads = grant.binding.as_ref().map(|binding| &binding.config.workloads);
    workloads.map_or(Ok(()), |it| servers.check_workload(it, cluster, snapshot))
}

fn check_policies(
    snapshot: &Snapshot,
    data_path: &DataPath,
    peer: &Peer,
    grant: &Grant,
) -> Result<(), String> {
    if snapshot.enforcement != Enforcement::Enforce {
        return Ok(());
    }
    let endpoint = &grant.endpoint;
    let callers = (peer, grant.first_peer());
    let verdict = evaluate(snapshot, callers, endpoint, grant.requires_waypoint());
    match verdict.and_then(|verdict| verdict.refusal) {
        None => Ok(()),
        Some(refusal) => {
            record_outcome(data_path, peer, endpoint, PolicyOutcome::Refused, &refusal);
            Err(refusal.to_string())
        }
    }
}

/// Returns the verdict of the policies on a tunnel to the endpoint, by a peer and the first peer
/// behind it, if one is known. `by_waypoint` is true if the endpoint belongs to a waypoint. Returns
/// `None` if enforcement is off, for an unknown peer and for a waypoint, which are not evaluated.
/// Source and port are known only for a plain TCP endpoint. Counts nothing.
pub fn evaluate(
    snapshot: &Snapshot,
    (peer, first_peer): (&Peer, Option<&FirstPeer>),
    endpoint: &Endpoint,
    by_waypoint: bool,
) -> Option<PolicyVerdict> {
    // Only the endpoint of a passthrough tunnel learns the identity of the peer
    // (docs/wire-contract.md 1.9).
    if snapshot.enforcement == Enforcement::Off || peer.is_unauthenticated() || by_waypoint {
        return None;
    }
    let is_plain = endpoint.protocol == Protocol::Tcp;
    let attributes = Attributes {
        peer: Some(first_peer.map_or_else(|| peer.policy_source(), FirstPeer::caller)),
        source: is_plain.then(|| peer.source.address.ip()),
        destination: endpoint.address.ip(),
        port: is_plain.then(|| endpoint.address.port()),
    };
    let workload = workload(snapshot, endpoint);
    Some(snapshot.policies.evaluate(workload, &attributes))
}

/// Returns the workload of the endpoint. Its selection by policies may have changed since the
/// pick, and its uid in the mesh may have changed with the number of its addresses. A workload that
/// is gone is evaluated by its definition at the pick.
fn workload<'a>(snapshot: &'a Snapshot, endpoint: &'a Endpoint) -> &'a Workload {
    let now = snapshot.mesh.workloads.get(endpoint.uid());
    let now = now.map(|now| &**now);
    now.or_else(|| snapshot.hosts.source_of(&endpoint.definition)).unwrap_or(&endpoint.definition)
}

fn warn_missing_policy(snapshot: &Snapshot, data_path: &DataPath, endpoint: &Endpoint) {
    let workload = workload(snapshot, endpoint);
    if let Some(name) = snapshot.policies.missing(workload)
        && data_path.metrics.admit_policy_line()
    {
        let workload = &*workload.uid;
        warn!(
            policy = name,
            workload, "workload refers to a missing authorization policy; the policy is ignored"
        );
    }
}

/// Counts a policy outcome, and logs it at most a few times a second: the rate of requests is up
/// to the peer.
fn record_outcome(
    data_path: &DataPath,
    peer: &Peer,
    endpoint: &Endpoint,
    outcome: PolicyOutcome,
    refusal: &PolicyRejection,
) {
    data_path.metrics.policies.inc(outcome.label());
    if data_path.metrics.admit_policy_line() {
        let (peer, error) = (&*peer.source.principal, refusal.to_string());
        let (endpoint, outcome) = (&**endpoint.uid(), outcome.label());
        info!(peer, endpoint, outcome, error, "authorization policies reject a tunnel");
    }
}
