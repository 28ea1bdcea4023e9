//! Lookup of the waypoints of services and of their identities, for the data path, which dials
//! them, and for the status page, which reports missing ones.

use std::sync::Arc;

use crate::snapshot::identities::Counts;
use crate::snapshot::mesh::{self, GatewayAddress, Place};
use crate::snapshot::waypoints::AffectedServices;
use crate::snapshot::{EndpointSet, Protocol, Service, Snapshot};

impl Snapshot {
    /// Applies a change since `before`. Requests a review of the wanted hostnames if the change
    /// affects services with waypoints, or waypoints that services name. Returns whether such a
    /// waypoint has lost an identity.
    pub(in crate::snapshot) fn apply_waypoint_changes(
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
    pub(in crate::snapshot) fn named_waypoints<'a>(
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
    pub(in crate::snapshot) fn waypoint_at(&self, place: &Place) -> Option<&Arc<Service>> {
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

    /// Returns true if this is an identity (`spiffe://…`) of a workload of one of the waypoints of
    /// `service`.
    pub fn is_waypoint_of(&self, principal: &str, service: &mesh::Service) -> bool {
        service.waypoints.iter().any(|waypoint| {
            let identities = self.waypoint_identities(&waypoint.gateway.place);
            identities.is_some_and(|of| of.contains_key(principal))
        })
    }

    /// Returns true if the waypoint at one of these places has lost an identity since `old`: its
    /// last workload with the identity is gone, the waypoint is gone, or another service has its
    /// hostname or VIP. Tunnels that bypassed the waypoint may still be open.
    pub(in crate::snapshot) fn has_lost_waypoint_identity(
        &self,
        old: &Self,
        places: &[Place],
    ) -> bool {
        places.iter().any(|place| {
            let now = self.waypoint_identities(place);
            let is_there = |principal: &Arc<str>| now.is_some_and(|of| of.contains_key(principal));
            let before = old.waypoint_identities(place);
            before.is_some_and(|before| {
                let is_same = now.is_some_and(|now| Arc::ptr_eq(now, before));
                !is_same && !before.keys().all(is_there)
            })
        })
    }

    fn waypoint_identities(&self, place: &Place) -> Option<&Arc<Counts>> {
        let of = self.waypoint_at(place)?;
        let name = format!("{}/{}", of.namespace, of.hostname);
        self.index.identities.0.get(&*name)
    }
}
