//! Location of the waypoints of services, for the data path, which dials them, and for the status
//! page, which reports missing ones.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use super::mesh::{self, GatewayAddress, Place};
use super::{EndpointSet, Protocol, Service, Shards, Snapshot};

/// Places of the waypoints that services name, each with the number of these services.
#[derive(Clone, Debug, Default)]
pub(super) struct NamedWaypoints(Shards<Place, usize>);

impl NamedWaypoints {
    /// Counts the waypoints of a service that is added, removed or changed.
    pub(super) fn update_counts(
        &mut self,
        before: Option<&Arc<mesh::Service>>,
        after: Option<&Arc<mesh::Service>>,
    ) {
        let of = |service: Option<&Arc<mesh::Service>>| -> Vec<Place> {
            let waypoints = service.into_iter().flat_map(|of| &of.waypoints);
            waypoints.map(|one| canonical(&one.gateway.place)).collect()
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
            let count = self.0.get(&place).copied().unwrap_or(0);
            self.0
                .set(place, count.checked_sub(1).filter(|rest| *rest > 0));
        }
    }

    /// Returns the places, each once.
    pub(super) fn places(&self) -> impl Iterator<Item = &Place> {
        self.0.keys()
    }
}

/// Services that a change of the mesh affects.
pub(super) struct AffectedServices<'a> {
    /// True if all services are rebuilt.
    pub(super) all: bool,
    /// True if an added, removed or changed service has or had waypoints.
    pub(super) has_waypoints: bool,
    /// Hostnames that another service may now answer to.
    pub(super) hosts: BTreeSet<Cow<'a, str>>,
    /// Services (`namespace/hostname`) that have lost an identity.
    pub(super) lost_identity: Vec<Arc<str>>,
}

/// Returns a place with its address in canonical form, as VIPs are stored.
fn canonical(place: &Place) -> Place {
    match place {
        Place::Name(name) => Place::Name(name.clone()),
        Place::Address(network, ip) => Place::Address(network.clone(), ip.to_canonical()),
    }
}

impl Snapshot {
    /// Applies a change since `before`. Requests a review of the wanted hostnames if the change
    /// affects services with waypoints, or waypoints that services name. Returns whether such a
    /// waypoint has lost an identity.
    pub(super) fn apply_waypoint_changes(
        &mut self,
        before: &Self,
        touched: &AffectedServices<'_>,
    ) -> bool {
        let hosts = touched.hosts.iter().map(|host| &**host);
        let mut places: Vec<_> = if touched.all {
            self.index.waypoints.places().cloned().collect()
        } else {
            self.named_waypoints(before, hosts).collect()
        };
        if touched.all || touched.has_waypoints || !places.is_empty() {
            self.hosts.reconsider();
        }
        let losers = touched.lost_identity.iter();
        let losers = losers.filter_map(|service| service.split_once('/'));
        places.extend(self.named_waypoints(before, losers.map(|(_, host)| host)));
        self.has_lost_waypoint_identity(before, &places)
    }

    /// Returns the places at which services name a waypoint and that lead to one of these
    /// hostnames, now or in `before`. The cost is proportional to the number of hostnames.
    pub(super) fn named_waypoints<'a>(
        &'a self,
        before: &'a Self,
        hosts: impl Iterator<Item = &'a str>,
    ) -> impl Iterator<Item = Place> {
        let named = &self.index.waypoints.0;
        let hosts = hosts.filter(|_| !named.is_empty());
        let services = hosts.flat_map(move |host| {
            let services = [before, self].map(|of| of.services.get(host));
            services.into_iter().flatten()
        });
        let places = services.flat_map(|service| self.waypoint_places(&service.definition));
        places.filter(|place| named.contains_key(place))
    }

    /// Returns the places by which services can name this service as a waypoint.
    fn waypoint_places(&self, service: &mesh::Service) -> Vec<Place> {
        let vips = self.index.vips(service).into_iter();
        let vips = vips.flat_map(|vip| {
            let networks = ["", self.network()];
            networks.map(|network| Place::Address(network.to_owned(), vip))
        });
        let name = format!("{}/{}", service.namespace, service.hostname);
        vips.chain([Place::Name(name)]).collect()
    }

    /// Returns the endpoints of a waypoint: those of the named port, or else those of the lowest
    /// port.
    /// They are dialled at the HBONE port regardless of the service port, so sets with endpoints
    /// without HBONE do not qualify.
    pub fn waypoint_endpoints(&self, gateway: &GatewayAddress) -> Option<&Arc<EndpointSet>> {
        let speaks_hbone = |set: &&Arc<EndpointSet>| {
            let endpoints = &set.endpoints;
            let hbone = |protocol| protocol == Protocol::Hbone;
            !endpoints.is_empty() && endpoints.iter().all(|one| hbone(one.protocol))
        };
        let ports = &self.waypoint(gateway)?.ports;
        let named = ports.get(&gateway.port).filter(speaks_hbone);
        named.or_else(|| {
            let others = ports.iter().filter(|(_, set)| speaks_hbone(set));
            others.min_by_key(|(port, _)| **port).map(|(_, set)| set)
        })
    }

    /// Returns the service of a waypoint, by its name or by one of its addresses in this network.
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
            Place::Address(network, ip) if self.is_local(network) => {
                self.service_by_vip(ip.to_canonical())
            }
            Place::Address(..) => None,
        }
    }

    /// Returns whether tunnels to a service go to a waypoint and no waypoint can take them.
    pub fn lacks_waypoint(&self, service: &mesh::Service) -> bool {
        let waypoints = &service.waypoints;
        let is_usable =
            |of: &mesh::Waypoint| of.weight > 0 && self.waypoint_endpoints(&of.gateway).is_some();
        !waypoints.is_empty() && !waypoints.iter().any(is_usable)
    }
}

impl mesh::Service {
    /// Returns the names of the waypoints, separated by commas, for display.
    pub fn waypoint_names(&self) -> String {
        let names = self.waypoints.iter();
        let names: Vec<_> = names.map(|of| of.gateway.place.to_string()).collect();
        names.join(", ")
    }
}
