//! Tunnels to endpoints that are reached through gateways of other networks.
//!
//! Each gateway adds its hash to `x-strait-via`, so a path that comes back ends after as many
//! tunnels as it has gateways.

use tokio::time::Instant;

use crate::outer::{Failure, Request, SOURCE_HEADER, Stream, Target};
use crate::reason::Reason;
use crate::snapshot::{Endpoint, Snapshot};
use crate::wire::{HOPS_MAX, Via};

use super::super::DataPath;
use super::super::balance::{self, Pick};
use super::super::http2::tunnel::Forwarded;
use super::super::identity::Peer;

/// Rejects a tunnel that has passed this gateway already.
///
/// The list of any peer counts, not only of `trust.gateways`: it can only reject the peer's own
/// tunnel, and a gateway that is missing in `trust.gateways` must not make a loop endless.
///
/// # Errors
/// [`Reason::GatewayLoop`].
pub fn check_loop(
    gateway: &DataPath,
    snapshot: &Snapshot,
    forwarded: Option<&Forwarded>,
) -> Result<(), Reason> {
    let Some(via) = forwarded.and_then(|forwarded| forwarded.via.as_deref()) else {
        return Ok(());
    };
    let passed = Via::parse(via).ok_or(Reason::GatewayLoop)?;
    let own = gateway.outer.own_hash(snapshot);
    let is_new = own.is_none_or(|own| !passed.contains(own));
    is_new.then_some(()).ok_or(Reason::GatewayLoop)
}

/// Returns the gateway of an endpoint of another network.
pub fn target(endpoint: &Endpoint) -> Option<Target> {
    let gateway = endpoint.remote.clone()?;
    let address = endpoint.address;
    Some(Target { address, gateway })
}

/// Ejects the endpoint of the pick if its gateway is ejected, which another service has caused.
/// Returns true if it was ejected now, and another endpoint should be picked. An ejected endpoint
/// is only picked if no other is left, and is then dialled.
pub fn avoid(gateway: &DataPath, pick: &Pick) -> bool {
    let endpoint = pick.endpoint();
    target(endpoint).is_some_and(|target| gateway.outer.is_ejected(&target))
        && balance::eject_after_failure(pick.route().endpoints(), endpoint, &gateway.metrics)
}

/// Opens a tunnel through the gateway of the picked endpoint.
pub(super) async fn open(
    pick: &Pick,
    target: &Target,
    (gateway, peer): (&DataPath, &Peer),
    deadline: Instant,
) -> Result<Stream, Failure> {
    let fail = |reason, detail| Failure { reason, detail };
    if peer.is_unauthenticated() {
        let what = "endpoints of other networks are reached only from HBONE listeners";
        return Err(fail(Reason::DialDenied, what.to_owned()));
    }
    if let Some(detail) = gateway.deny.explain(target.address) {
        return Err(fail(Reason::DialDenied, detail));
    }
    let request = request(gateway, peer, pick);
    let request = request.map_err(|detail| fail(Reason::GatewayLoop, detail))?;
    let opened = gateway.outer.open(target, &request, deadline).await;
    opened.inspect_err(|failure| {
        let is_gateway = matches!(
            failure.reason,
            Reason::GatewayUnreachable | Reason::GatewayUntrusted
        );
        if is_gateway && has_alternative(gateway, pick, target) {
            gateway.outer.eject(target);
        }
    })
}

/// Returns true if the service has another gateway of the same network that is not ejected.
fn has_alternative(gateway: &DataPath, pick: &Pick, target: &Target) -> bool {
    let endpoints = pick.route().endpoints().endpoints.iter();
    let mut others = endpoints.filter_map(|endpoint| self::target(endpoint));
    others.any(|other| {
        other.gateway.network == target.gateway.network
            && other != *target
            && !gateway.outer.is_ejected(&other)
    })
}

/// Creates the CONNECT for the service of the picked endpoint, with our hash in `x-strait-via`.
///
/// # Errors
/// The tunnel has passed too many gateways.
fn request(gateway: &DataPath, peer: &Peer, pick: &Pick) -> Result<Request, String> {
    let snapshot = gateway.reader.load();
    let forwarded = pick.route().forwarded();
    let passed = forwarded.and_then(|forwarded| forwarded.via.as_deref());
    let passed = passed.map_or_else(Via::default, |via| Via::parse(via).unwrap_or_default());
    let own = gateway.outer.own_hash(&snapshot);
    let via = own.and_then(|own| passed.with(own));
    let via = via.ok_or_else(|| format!("the tunnel has passed {HOPS_MAX} gateways"))?;
    let authority = pick.endpoint().remote_authority();
    let authority = authority.ok_or("the endpoint names no service")?;
    let mut request = Request::new(authority, &via);
    let is_gateway = snapshot.trust.is_gateway(&peer.source.principal);
    let original = forwarded.and_then(|forwarded| forwarded.source.as_deref());
    let original = original.filter(|_| is_gateway);
    let source = original.unwrap_or(peer.source.principal.as_bytes());
    request.set(SOURCE_HEADER, source);
    let traces = forwarded.map(|forwarded| {
        [
            ("baggage", forwarded.baggage.as_deref()),
            ("traceparent", forwarded.traceparent.as_deref()),
        ]
    });
    for (name, value) in traces.into_iter().flatten() {
        if let Some(value) = value {
            request.set(name, value);
        }
    }
    Ok(request)
}
