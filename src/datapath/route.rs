//! Stage 5: a target resolved against the snapshot.

use std::sync::Arc;

use crate::reason::Reason;
use crate::snapshot::{EndpointSet, Service, Snapshot};
use crate::wire::{Authority, Host};

use super::tunnel::Target;

/// A service port and the endpoints that serve it.
#[derive(Debug)]
pub struct Route {
    asked: Authority,
    service: Arc<Service>,
    port: u16,
    endpoints: Arc<EndpointSet>,
}

impl Route {
    /// What the peer asked for.
    pub fn asked(&self) -> &Authority {
        &self.asked
    }

    /// What the peer asked for, for whoever needs nothing else.
    pub fn into_asked(self) -> Authority {
        self.asked
    }

    /// The service.
    pub fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// The service's port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The endpoints of this port.
    pub fn endpoints(&self) -> &Arc<EndpointSet> {
        &self.endpoints
    }
}

/// Looks the target up.
///
/// # Errors
/// [`Reason::UnknownService`].
pub fn run(snapshot: &Snapshot, target: Target) -> Result<Route, Reason> {
    let asked = target.into_authority();
    let (service, port, endpoints) = find(snapshot, &asked).ok_or(Reason::UnknownService)?;
    Ok(Route {
        service: Arc::clone(service),
        port,
        endpoints: Arc::clone(endpoints),
        asked,
    })
}

/// As [`run`], with the endpoints of TLS listeners.
///
/// # Errors
/// [`Reason::UnknownService`].
pub fn direct(snapshot: &Snapshot, target: Target) -> Result<Route, Reason> {
    let route = run(snapshot, target)?;
    let endpoints = route.service.direct.get(&route.port);
    let endpoints = Arc::clone(endpoints.ok_or(Reason::UnknownService)?);
    Ok(Route { endpoints, ..route })
}

/// What is asked for: a service's own name, then an alias, then a VIP of this network.
///
/// Own names come first, so that no alias can take the place of a service. Nothing is resolved
/// by DNS.
pub fn find<'a>(
    snapshot: &'a Snapshot,
    asked: &Authority,
) -> Option<(&'a Arc<Service>, u16, &'a Arc<EndpointSet>)> {
    let (service, port) = match &asked.host {
        Host::Name(name) => match snapshot.services.get(&**name) {
            Some(service) => (service, asked.port),
            None => {
                let (host, port) = snapshot.exposure.alias(asked)?;
                (snapshot.services.get(host)?, port)
            }
        },
        Host::Ip(ip) => (snapshot.vips.get(ip)?, asked.port),
    };
    Some((service, port, service.ports.get(&port)?))
}
