//! Factors of weights by links whose budget is exceeded.

use std::sync::Arc;

use super::Endpoint;
use crate::status::ReducedLink;

/// Factors of the weights of gateways for the tunnels of one peer, in percent, by the cluster of
/// the gateway. Usually there are none.
#[derive(Clone, Debug, Default)]
pub struct LinkFactors(Vec<(Arc<str>, u32)>);

/// No factors, for picks that no link reduces.
pub const NO_LINK_FACTORS: &LinkFactors = &LinkFactors(Vec::new());

impl LinkFactors {
    /// Returns the factors for peers of a cluster.
    pub fn of_peer(links: &[ReducedLink], cluster: &str) -> Self {
        let of_peer = links.iter().filter(|link| link.is_from(cluster));
        let factors = of_peer.map(|link| (Arc::clone(&link.to), link.weight_percent.into()));
        Self(factors.collect())
    }

    /// Returns the factor of a weight with that of the link to the cluster of the endpoint's
    /// gateway, rounded up, so that it is never 0.
    pub(super) fn apply(&self, endpoint: Option<&Arc<Endpoint>>, factor: u32) -> u32 {
        if self.0.is_empty() {
            return factor;
        }
        let remote = endpoint.and_then(|endpoint| endpoint.remote.as_ref());
        let of_link = remote.and_then(|remote| {
            let mut links = self.0.iter();
            links.find(|(to, _)| *to == remote.cluster)
        });
        of_link.map_or(factor, |(_, percent)| {
            factor.saturating_mul(*percent).div_ceil(100)
        })
    }
}
