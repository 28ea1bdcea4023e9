//! Where the waypoints of services are: asked by the data path, which goes there, and by the
//! status page, which says where nothing is.

use std::fmt;
use std::sync::Arc;

use super::mesh::{self, GatewayAddress, Place};
use super::{EndpointSet, Protocol, Service, Shards, Snapshot};

/// The places of the waypoints that services name, each with the number of services.
#[derive(Clone, Debug, Default)]
pub(super) struct NamedWaypoints(Shards<Place, usize>);

impl NamedWaypoints {
    /// Counts the waypoints of a service that comes, goes or changes.
    pub(super) fn change(
        &mut self,
        before: Option<&Arc<mesh::Service>>,
        after: Option<&Arc<mesh::Service>>,
    ) {
        let of = |service: Option<&Arc<mesh::Service>>| -> Vec<Place> {
            let waypoints = service.into_iter().flat_map(|of| &of.waypoints);
            waypoints.map(|one| one.gateway.place.clone()).collect()
        };
        let (before, after) = (of(before), of(after));
        if before == after {
            return;
        }
        for place in after {
            let count = self.0.get(&place).copied().unwrap_or(0);
            self.0.insert(place, count + 1);
        }
        for place in before {
            match self.0.get(&place).copied().unwrap_or(0) {
                0 | 1 => drop(self.0.remove(&place)),
                count => drop(self.0.insert(place, count - 1)),
            }
        }
    }

    /// Returns the places, each once.
    pub(super) fn places(&self) -> impl Iterator<Item = &Place> {
        self.0.keys()
    }
}

impl Snapshot {
    /// The endpoints of a waypoint. They are dialled at the port of HBONE whatever port of the
    /// waypoint they serve, so one without HBONE is of no use.
    pub fn waypoint_endpoints(&self, gateway: &GatewayAddress) -> Option<&Arc<EndpointSet>> {
        let speaks_hbone = |set: &&Arc<EndpointSet>| {
            let endpoints = &set.endpoints;
            let hbone = |protocol| protocol == Protocol::Hbone;
            !endpoints.is_empty() && endpoints.iter().all(|one| hbone(one.protocol))
        };
        let ports = &self.waypoint(gateway)?.ports;
        let named = ports.get(&gateway.port).filter(speaks_hbone);
        named.or_else(|| ports.values().find(speaks_hbone))
    }

    /// The service of a waypoint: by its name, or by an address of it in this network.
    pub fn waypoint(&self, gateway: &GatewayAddress) -> Option<&Arc<Service>> {
        self.waypoint_at(&gateway.place)
    }

    /// Returns the service of a waypoint at a place.
    pub(super) fn waypoint_at(&self, place: &Place) -> Option<&Arc<Service>> {
        match place {
            Place::Name(name) => {
                let (namespace, hostname) = name.split_once('/')?;
                let service = self.services.get(hostname)?;
                (*service.namespace == *namespace).then_some(service)
            }
            Place::Address(network, ip) if self.is_local(network) => self.by_vip(ip.to_canonical()),
            Place::Address(..) => None,
        }
    }

    /// Whether tunnels to a service go to a waypoint and there is none that could take them.
    pub fn lacks_waypoint(&self, service: &mesh::Service) -> bool {
        let waypoints = &service.waypoints;
        let is_usable =
            |of: &mesh::Waypoint| of.weight > 0 && self.waypoint_endpoints(&of.gateway).is_some();
        !waypoints.is_empty() && !waypoints.iter().any(is_usable)
    }
}

impl mesh::Service {
    /// The waypoints as people write them, with commas between.
    pub fn waypoint_names(&self) -> String {
        let names = self.waypoints.iter();
        let names: Vec<_> = names.map(|of| of.gateway.place.to_string()).collect();
        names.join(", ")
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Address(network, ip) => write!(f, "{network}/{ip}"),
        }
    }
}
