//! Warnings about routes of TLS listeners that lead nowhere in the mesh.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use crate::config::{Config, ListenerProtocol, SniRoute, TlsRouting};
use crate::datapath::dial::DenyList;
use crate::snapshot::mesh::Place;
use crate::snapshot::{Caller, LookupResult, Snapshot};
use crate::wire::HBONE_PORT;
use crate::yaml::Finding;

/// Returns warnings about routes to services that are missing or that are gateways. Also warns of
/// listeners with Istio's names if no service is exposed to anyone.
pub(super) fn check_routes(config: &Config, snapshot: &Snapshot) -> Vec<Finding> {
    let routes = config.listeners.iter().flat_map(|one| one.routes());
    let gateways = Gateways::new(config, snapshot);
    let wrong = routes.filter_map(|route| {
        let wrong = check_target(snapshot, route).or_else(|| gateways.reached_by(snapshot, route));
        Some(Finding::warning(&route.line.0, wrong?, ""))
    });
    let mut warnings: Vec<_> = wrong.collect();
    let mut audiences = config.exposure.services.iter().flat_map(|one| &one.to);
    if !audiences.any(|audience| audience.anyone) {
        let istio = config.listeners.iter().filter(|listener| {
            matches!(&listener.protocol, ListenerProtocol::Tls(TlsRouting::Istio { .. }))
        });
        warnings.extend(istio.map(|listener| {
            let what = format!(
                "listener `{}` reaches no service: its peers have no identity, and no service is \
                 exposed to them",
                listener.name
            );
            Finding::warning(&listener.line.0, what, "`to: [{anyone: true}]` for one")
        }));
    }
    warnings
}

struct Gateways {
    /// Contains the listeners of this gateway.
    deny: DenyList,
    networks: HashSet<IpAddr>,
}

/// Ports of gateways for TLS with Istio's names and for HBONE.
const GATEWAY_PORTS: [u16; 2] = [15443, HBONE_PORT];

impl Gateways {
    fn new(config: &Config, snapshot: &Snapshot) -> Self {
        let workloads = snapshot.mesh.workloads.values();
        let gateways = workloads.filter_map(|workload| workload.network_gateway.as_deref());
        let addresses = gateways.filter_map(|gateway| match &gateway.place {
            Place::Address(_, ip) => Some(*ip),
            Place::Name(_) => None,
        });
        Self { deny: DenyList::of(config), networks: addresses.collect() }
    }

    /// Returns a warning if an endpoint of the route's service is a gateway. If that gateway
    /// routes back, one ClientHello loops.
    fn reached_by(&self, snapshot: &Snapshot, route: &SniRoute) -> Option<String> {
        let found = find(snapshot, route)?;
        let endpoints = &found.service.passthrough_ports.get(&found.port)?.endpoints;
        let mut addresses = endpoints.iter().map(|endpoint| endpoint.address);
        let gateway = addresses.find(|address| self.has(*address))?;
        Some(format!(
            "{} leads to the gateway at {gateway}, which may route it back; name the service \
             itself",
            route.to
        ))
    }

    fn has(&self, address: SocketAddr) -> bool {
        GATEWAY_PORTS.contains(&address.port())
            || self.deny.is_own(address)
            || self.networks.contains(&address.ip())
    }
}

/// Finds the target of a route. Peers of the listener have no identity, and see only the names that
/// are visible to everyone.
fn find<'a>(snapshot: &'a Snapshot, route: &SniRoute) -> Option<LookupResult<'a>> {
    snapshot.find(Caller::UNKNOWN, &route.target())
}

fn check_target(snapshot: &Snapshot, route: &SniRoute) -> Option<String> {
    if find(snapshot, route).is_some() {
        return None;
    }
    let host = route.to.host.as_str();
    Some(match snapshot.service_by_name(host) {
        Some(_) => format!("{} is not a port of the service; write one that it has", route.to),
        None => format!("{host} is not a service of the mesh; write the hostname of one"),
    })
}
