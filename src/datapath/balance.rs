//! Stage 7: which endpoint, by weight, live load and passive health.

use std::sync::Arc;

use tokio::time::Instant;
use tracing::info;

use crate::snapshot::{Endpoint, EndpointSet, InFlight};
use crate::telemetry::Metrics;

use super::policy::Permit;

/// A permit and the endpoint that it is to be dialled at. Only [`pick`] makes one.
#[derive(Debug)]
pub struct Pick {
    permit: Permit,
    endpoint: Arc<Endpoint>,
    in_flight: InFlight,
}

impl Pick {
    /// The endpoint to dial.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// Gives the permit back after a failed dial, for another endpoint.
    pub fn into_permit(self) -> Permit {
        self.permit
    }

    /// Takes the pick apart after a successful dial.
    pub fn into_parts(self) -> (Permit, Arc<Endpoint>, InFlight) {
        (self.permit, self.endpoint, self.in_flight)
    }
}

/// Picks an endpoint that was not `tried` for this tunnel, or gives the permit back if none is left.
///
/// Two weighted draws; the less loaded of the two is taken, load being tunnels in flight per
/// weight. With equal load the first draw stands, so that the shares equal the weights. Ejected
/// endpoints serve only when no other is left: a doubtful endpoint is better than none.
pub fn pick(permit: Permit, tried: &[Arc<Endpoint>]) -> Result<Pick, Permit> {
    let set = Arc::clone(permit.route().endpoints());
    let now = Instant::now();
    let untried = |endpoint: &Endpoint| !tried.iter().any(|other| same(other, endpoint));
    let healthy = |endpoint: &Endpoint| untried(endpoint) && !endpoint.state.is_ejected(now);
    let Some(endpoint) = choose(&set, &healthy).or_else(|| choose(&set, &untried)) else {
        return Err(permit);
    };
    let in_flight = InFlight::new(&endpoint.state);
    Ok(Pick {
        permit,
        endpoint: Arc::clone(endpoint),
        in_flight,
    })
}

/// Ejects an endpoint that failed, unless that would eject more than half of its service's.
///
/// A service with one endpoint never loses it, and a failure of the network, which fails them
/// all, leaves half of them in service.
pub fn failed(set: &EndpointSet, endpoint: &Endpoint, metrics: &Metrics) {
    let now = Instant::now();
    let ejected = set
        .endpoints
        .iter()
        .filter(|other| other.state.is_ejected(now))
        .count();
    let fits = (ejected + 1) * 2 <= set.endpoints.len();
    if fits && !endpoint.state.is_ejected(now) {
        let time = endpoint.state.eject(now);
        metrics.endpoint_ejected();
        info!(
            endpoint = %endpoint.uid, address = %endpoint.address, ?time,
            "endpoint ejected after a failure"
        );
    }
}

fn same(one: &Endpoint, other: &Endpoint) -> bool {
    Arc::ptr_eq(&one.state, &other.state)
}

fn choose<'a>(
    set: &'a EndpointSet,
    eligible: &impl Fn(&Endpoint) -> bool,
) -> Option<&'a Arc<Endpoint>> {
    let first = draw(set, eligible)?;
    let second = draw(set, eligible)?;
    // In flight per weight, compared without division.
    let load = |endpoint: &Endpoint| u64::from(endpoint.state.in_flight());
    let first_load = load(first) * u64::from(second.weight);
    let second_load = load(second) * u64::from(first.weight);
    Some(if second_load < first_load {
        second
    } else {
        first
    })
}

/// Draws by weight among the eligible endpoints.
fn draw<'a>(
    set: &'a EndpointSet,
    eligible: &impl Fn(&Endpoint) -> bool,
) -> Option<&'a Arc<Endpoint>> {
    /// Draws over all endpoints before the eligible ones are counted: most are eligible as a rule.
    const BLIND_DRAWS: usize = 3;
    let total = *set.cumulative.last()?;
    for _ in 0..BLIND_DRAWS {
        let at = fastrand::u64(..total);
        let index = set.cumulative.partition_point(|&sum| sum <= at);
        if let Some(endpoint) = set
            .endpoints
            .get(index)
            .filter(|endpoint| eligible(endpoint))
        {
            return Some(endpoint);
        }
    }
    let weight = |endpoint: &Arc<Endpoint>| {
        if eligible(endpoint) {
            u64::from(endpoint.weight)
        } else {
            0
        }
    };
    let total: u64 = set.endpoints.iter().map(weight).sum();
    if total == 0 {
        return None;
    }
    let mut at = fastrand::u64(..total);
    set.endpoints
        .iter()
        .find(|endpoint| match at.checked_sub(weight(endpoint)) {
            Some(left) => {
                at = left;
                false
            }
            None => true,
        })
}
