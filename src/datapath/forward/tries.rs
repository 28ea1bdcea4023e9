//! Endpoints that one tunnel has tried, and the decision whether it may try another one.

use std::sync::Arc;

use crate::datapath::DataPath;
use crate::datapath::balance;
use crate::outer::Failure;
use crate::reason::Reason;
use crate::snapshot::{Endpoint, EndpointSet};
use crate::telemetry::Record;

/// Number of endpoints of one [`rejection_scope`] that may reject one tunnel before the others of
/// the scope are left out. Gateways that are busy or have no endpoint count too.
///
/// Policies usually apply to a whole service and reject at each of its endpoints, and the gateways
/// of one network usually expose the same services, of the same endpoints. More tries would only be
/// work that a peer can cause. Policies that apply to some endpoints, such as a canary, are likely
/// to leave others. Other networks have policies of their own, so they are still tried.
pub const REJECTIONS_MAX: usize = 3;

/// Endpoints that one tunnel has tried in vain.
#[derive(Debug)]
pub struct Tries<'a> {
    data_path: &'a DataPath,
    /// False if another gateway forwarded the tunnel. After a loop, only the first gateway tries
    /// other endpoints, which bounds the connections of the loop.
    is_from_client: bool,
    /// Endpoints that are not picked again: those that failed, and those that are left out.
    pub tried: Vec<Arc<Endpoint>>,
    rejected_by: Vec<Arc<Endpoint>>,
}

impl<'a> Tries<'a> {
    /// Creates the tries of a tunnel. No gateway has forwarded one that is from a client.
    pub fn new(data_path: &'a DataPath, is_from_client: bool) -> Self {
        Self {
            data_path,
            is_from_client,
            tried: Vec::new(),
            rejected_by: Vec::new(),
        }
    }

    /// Records and counts a failed try, and requests fresh addresses or ejects the endpoint if its
    /// reason says so.
    ///
    /// # Errors
    /// The reason, if the tunnel may not try another endpoint.
    pub fn next(
        &mut self,
        Failure { reason, detail }: Failure,
        endpoints: &EndpointSet,
        endpoint: Arc<Endpoint>,
        record: &mut Record,
    ) -> Result<(), Reason> {
        record.set_detail(detail);
        let metrics = &self.data_path.metrics;
        if reason != Reason::PolicyDenied {
            metrics.dial_failed(reason);
        }
        if !reason.is_retriable() || reason == Reason::GatewayLoop && !self.is_from_client {
            return Err(reason);
        }
        if !matches!(reason, Reason::PolicyDenied | Reason::DialDenied) {
            self.data_path.reader.request_refresh(&endpoint);
        }
        if reason.ejects_endpoint() {
            balance::eject_after_failure(endpoints, &endpoint, metrics);
        }
        self.tried.push(Arc::clone(&endpoint));
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
                let others = endpoints.endpoints.iter().filter(is_alike);
                self.tried.extend(others.cloned());
            }
        }
        Ok(())
    }
}

/// Returns the network and cluster of the gateway of an endpoint, `None` for all endpoints of this
/// network. Endpoints of one scope usually reject the same tunnels.
pub fn rejection_scope(endpoint: &Endpoint) -> Option<(&Arc<str>, &Arc<str>)> {
    let remote = endpoint.remote.as_ref()?;
    Some((&remote.network, &remote.cluster))
}
