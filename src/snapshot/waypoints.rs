//! Where the waypoints of services are: asked by the data path, which goes there, and by the
//! status page, which says where nothing is.

use std::borrow::Cow;
use std::collections::BTreeSet;
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

/// Services that a change of the mesh affects.
pub(super) struct Touched<'a> {
    /// All of it is built anew.
    pub(super) all: bool,
    /// A service that comes, goes or changes has waypoints, or had.
    pub(super) has_waypoints: bool,
    /// Hostnames that other services may answer to.
    pub(super) hosts: BTreeSet<Cow<'a, str>>,
    /// Services (`namespace/hostname`) that have lost an identity.
    pub(super) losers: Vec<Arc<str>>,
}

/// Returns a place with its address in the form in which VIPs are kept.
fn canonical(place: &Place) -> Place {
    match place {
        Place::Name(name) => Place::Name(name.clone()),
        Place::Address(network, ip) => Place::Address(network.clone(), ip.to_canonical()),
    }
}

impl Snapshot {
    /// Follows a change since `before`: other hostnames may be wanted where it touches services
    /// with waypoints, or waypoints that services name. Returns whether one of these waypoints has
    /// lost an identity.
    pub(super) fn follow_waypoints(&mut self, before: &Self, touched: &Touched<'_>) -> bool {
        let hosts = touched.hosts.iter().map(|host| &**host);
        let mut places: Vec<_> = match touched.all {
            true => self.index.waypoints.places().cloned().collect(),
            false => self.named_waypoints(before, hosts).collect(),
        };
        if touched.all || touched.has_waypoints || !places.is_empty() {
            self.hosts.reconsider();
        }
        let losers = touched.losers.iter();
        let losers = losers.filter_map(|service| service.split_once('/'));
        places.extend(self.named_waypoints(before, losers.map(|(_, host)| host)));
        self.has_lost_waypoint_identity(before, &places)
    }

    /// Returns the places at which services name a waypoint and which lead to one of these
    /// hostnames, now or in `before`. Costs what the hostnames do.
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
        let places = services.flat_map(|service| self.places_of(&service.definition));
        places.filter(|place| named.contains_key(place))
    }

    /// Returns the places at which a service may be named as a waypoint.
    fn places_of(&self, service: &mesh::Service) -> Vec<Place> {
        let vips = self.index.vips(service).into_iter();
        let vips = vips.flat_map(|vip| {
            let networks = ["", self.network()];
            networks.map(|network| Place::Address(network.to_owned(), vip))
        });
        let name = format!("{}/{}", service.namespace, service.hostname);
        vips.chain([Place::Name(name)]).collect()
    }

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
