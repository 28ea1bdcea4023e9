//! Factors of weights by links whose budget is exceeded.

use std::sync::Arc;

use super::Endpoint;
use crate::status::ReducedLink;

/// Factors of the weights of gateways for the tunnels of one peer, in percent, by the cluster of
/// the gateway. Usually there are none.
#[derive(Clone, Debug, Default)]
pub struct LinkFactors(Vec<(Arc<str>, u32)>);

/// Factor of a weight that no link reduces.
pub(super) const WHOLE_PERCENT: u32 = 100;

/// No factors, for picks that no link reduces.
pub const NO_LINK_FACTORS: &LinkFactors = &LinkFactors(Vec::new());

impl LinkFactors {
    pub fn of_peer(links: &[ReducedLink], cluster: &str) -> Self {
        let of_peer = links.iter().filter(|link| link.is_from(cluster));
        let factors = of_peer.map(|link| (Arc::clone(&link.to), link.weight_percent.into()));
        Self(factors.collect())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the factor of the link to the cluster of the endpoint's gateway, in percent.
    pub(super) fn percent(&self, endpoint: &Endpoint) -> u32 {
        let of_link = endpoint.remote.as_ref().and_then(|remote| {
            let mut links = self.0.iter();
            links.find(|(to, _)| *to == remote.cluster)
        });
        of_link.map_or(WHOLE_PERCENT, |(_, percent)| *percent)
    }
}
