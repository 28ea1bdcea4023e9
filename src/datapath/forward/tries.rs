//! Endpoints that one tunnel has tried, and the decision whether it may try another one.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::datapath::DataPath;
use crate::datapath::balance::{self, FAILED_DIALS_MAX, Tried};
use crate::datapath::dial::{DIAL_TIMEOUT, remote};
use crate::outer::Failure;
use crate::reason::Reason;
use crate::snapshot::{DialAdmission, Endpoint, EndpointSet, Probe};
use crate::telemetry::Record;

/// Number of endpoints of one [`rejection_scope`] that may reject one tunnel before the others of
/// the scope are left out. Gateways that are busy or have no endpoint count too.
///
/// Policies usually apply to a whole service and reject at each of its endpoints, and the gateways
/// of one network usually expose the same services, of the same endpoints. More tries would only be
/// work that a peer can cause. Policies that apply to some endpoints, such as a canary, are likely
/// to leave others. Other networks have policies of their own, so they are still tried.
pub const REJECTIONS_MAX: usize = 3;

/// Time for which an endpoint whose address is denied leaves the draw.
const DENIAL: Duration = Duration::from_secs(5);

/// Endpoints that one tunnel has tried in vain.
#[derive(Debug)]
pub struct Tries {
    /// False if another gateway forwarded the tunnel. After a loop, only the first gateway tries
    /// other endpoints, which bounds the connections of the loop.
    is_from_client: bool,
    /// Milliseconds before the deadline that the own network leaves to endpoints of other networks,
    /// so that endpoints that do not answer do not use up the time of these. A number, as the
    /// future of a tunnel has little room.
    reserved_ms: u16,
    /// Endpoints that are not picked again: those that failed, and those that are left out.
    pub tried: Tried,
    rejected_by: Vec<Arc<Endpoint>>,
    /// Right to dial in the own network while all dials there fail.
    probe: Option<Probe>,
}

impl Tries {
    /// Creates the tries of a tunnel until `deadline`. No gateway has forwarded one that is from a
    /// client.
    pub fn new(is_from_client: bool, deadline: Instant) -> Self {
        let time = deadline.saturating_duration_since(Instant::now());
        // One whole dial comes first: a cut dial would eject an endpoint that lost one SYN.
        let reserved = remote::TRY_MIN.min(time.saturating_sub(DIAL_TIMEOUT));
        Self {
            is_from_client,
            reserved_ms: u16::try_from(reserved.as_millis()).unwrap_or(u16::MAX),
            tried: Tried::default(),
            rejected_by: Vec::new(),
            probe: None,
        }
    }

    /// Leaves the own network out if its time is over, or if all recent dials there failed and
    /// another tunnel tries one.
    ///
    /// # Errors
    /// The reason, if no endpoint of another network is left either.
    pub fn admit(
        &mut self,
        set: &EndpointSet,
        deadline: Instant,
        record: &mut Record,
    ) -> Result<(), Reason> {
        if self.tried.is_own_network_left_out {
            return Ok(());
        }
        let now = Instant::now();
        if self.own_network_deadline(deadline) <= now && self.has_other_network(set) {
            self.leave_out(None, set);
            return Ok(());
        }
        if self.probe.is_some() {
            return Ok(());
        }
        match set.admit_dial(now) {
            DialAdmission::Free => {}
            DialAdmission::Probe(probe) => self.probe = Some(probe),
            DialAdmission::Refused => {
                self.tried.is_own_network_left_out = true;
                if !set.has_remote() {
                    let detail = "all recent dials of the service failed; another tunnel tries it";
                    record.set_detail(detail.to_owned());
                    return Err(Reason::DialFailed);
                }
            }
        }
        Ok(())
    }

    /// Returns the deadline for a try of an endpoint of a tunnel with this `deadline`.
    pub fn deadline(
        &self,
        data_path: &DataPath,
        set: &EndpointSet,
        endpoint: &Endpoint,
        deadline: Instant,
    ) -> Instant {
        if endpoint.remote.is_none() && self.has_other_network(set) {
            return self.own_network_deadline(deadline);
        }
        remote::deadline_of_try(data_path, set, endpoint, &self.tried, deadline)
    }

    fn own_network_deadline(&self, deadline: Instant) -> Instant {
        deadline - Duration::from_millis(self.reserved_ms.into())
    }

    /// Returns true if an endpoint of another network is left.
    fn has_other_network(&self, set: &EndpointSet) -> bool {
        set.remote().any(|one| !self.tried.has(one))
    }

    /// Notes the endpoint of the next dial. Other tunnels may try the own network meanwhile if it
    /// is in another one.
    pub fn begin(&mut self, endpoint: &Endpoint) {
        if endpoint.remote.is_some() {
            self.probe = None;
        }
    }

    /// Records and counts a failed try, and requests fresh addresses or ejects the endpoint if its
    /// reason says so.
    ///
    /// # Errors
    /// The reason, if the tunnel may not try another endpoint.
    pub fn next(
        &mut self,
        data_path: &DataPath,
        Failure { reason, detail }: Failure,
        endpoints: &EndpointSet,
        endpoint: Arc<Endpoint>,
        record: &mut Record,
    ) -> Result<(), Reason> {
        record.set_detail(detail);
        let metrics = &data_path.metrics;
        if reason != Reason::PolicyDenied {
            metrics.dial_failed(reason);
        }
        if !reason.is_retriable() || reason == Reason::GatewayLoop && !self.is_from_client {
            return Err(reason);
        }
        if !matches!(reason, Reason::PolicyDenied | Reason::DialDenied) {
            data_path.reader.request_refresh(&endpoint);
        }
        if reason.ejects_endpoint() {
            balance::eject_after_failed_dial(&endpoint, metrics);
        }
        if endpoint.remote.is_none() && reason != Reason::PolicyDenied {
            self.note_failed_dial(reason, endpoints, &endpoint);
        }
        self.tried.endpoints.push(Arc::clone(&endpoint));
        if self.probe.is_some() && self.has_other_network(endpoints) {
            self.leave_out(None, endpoints);
        }
        if matches!(
            reason,
            Reason::PolicyDenied
                | Reason::RemoteRejected
                | Reason::RemoteUnavailable
                | Reason::RemoteBusy
        ) {
            self.rejected_by.push(Arc::clone(&endpoint));
            let scope = rejection_scope(&endpoint);
            let is_alike = |other: &&Arc<Endpoint>| rejection_scope(other) == scope;
            if self.rejected_by.iter().filter(is_alike).count() >= REJECTIONS_MAX {
                self.leave_out(scope, endpoints);
            }
        }
        Ok(())
    }

    fn note_failed_dial(&mut self, reason: Reason, set: &EndpointSet, endpoint: &Endpoint) {
        let now = Instant::now();
        if reason == Reason::DialDenied {
            endpoint.state.suspend(now, DENIAL);
        } else {
            set.dial_failed(now);
        }
        self.tried.failed_dials += 1;
        if self.tried.failed_dials >= FAILED_DIALS_MAX {
            self.leave_out(None, set);
        }
    }

    fn leave_out(&mut self, scope: Option<(&Arc<str>, &Arc<str>)>, endpoints: &EndpointSet) {
        if scope.is_none() {
            self.tried.is_own_network_left_out = true;
            self.probe = None;
            return;
        }
        let others = endpoints.endpoints.iter().filter(|other| rejection_scope(other) == scope);
        self.tried.endpoints.extend(others.cloned());
    }
}

/// Returns the network and cluster of the gateway of an endpoint, `None` for all endpoints of this
/// network. Endpoints of one scope usually reject the same tunnels.
pub fn rejection_scope(endpoint: &Endpoint) -> Option<(&Arc<str>, &Arc<str>)> {
    let remote = endpoint.remote.as_ref()?;
    Some((&remote.network, &remote.cluster))
}
