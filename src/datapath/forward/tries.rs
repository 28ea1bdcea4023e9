//! Endpoints that one tunnel has tried, and the decision whether it may try another one.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::datapath::DataPath;
use crate::datapath::balance::{self, FAILED_DIALS_MAX, Tried};
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
    /// Endpoints that are not picked again: those that failed, and those that are left out.
    pub tried: Tried,
    rejected_by: Vec<Arc<Endpoint>>,
    /// Right to dial in the own network while all dials there fail.
    probe: Option<Probe>,
}

impl Tries {
    /// Creates the tries of a tunnel. No gateway has forwarded one that is from a client.
    pub fn new(is_from_client: bool) -> Self {
        Self { is_from_client, tried: Tried::default(), rejected_by: Vec::new(), probe: None }
    }

    /// Leaves the own network out if all recent dials there failed and another tunnel tries one.
    ///
    /// # Errors
    /// The reason, if no endpoint of another network is left either.
    pub fn admit(&mut self, set: &EndpointSet, record: &mut Record) -> Result<(), Reason> {
        if self.probe.is_some() || self.tried.is_own_network_left_out {
            return Ok(());
        }
        match set.admit_dial(Instant::now()) {
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

    /// Counts a failed dial of an endpoint of the own network.
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

    /// Leaves out all endpoints of a scope.
    fn leave_out(&mut self, scope: Option<(&Arc<str>, &Arc<str>)>, endpoints: &EndpointSet) {
        if scope.is_none() {
            self.tried.is_own_network_left_out = true;
            self.probe = None;
            return;
        }
        let others = endpoints.endpoints.iter();
        let others = others.filter(|other| rejection_scope(other) == scope);
        self.tried.endpoints.extend(others.cloned());
    }
}

/// Returns the network and cluster of the gateway of an endpoint, `None` for all endpoints of this
/// network. Endpoints of one scope usually reject the same tunnels.
pub fn rejection_scope(endpoint: &Endpoint) -> Option<(&Arc<str>, &Arc<str>)> {
    let remote = endpoint.remote.as_ref()?;
    Some((&remote.network, &remote.cluster))
}
