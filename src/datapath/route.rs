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

/// Looks the target up: a service's own name, then an alias, then a VIP of this network.
///
/// Own names come first, so that no alias can take the place of a service. Nothing is resolved
/// by DNS.
///
/// # Errors
/// [`Reason::UnknownService`].
pub fn run(snapshot: &Snapshot, target: Target) -> Result<Route, Reason> {
    let asked = target.into_authority();
    let found = match &asked.host {
        Host::Name(name) => match snapshot.services.get(&**name) {
            Some(service) => Some((service, asked.port)),
            None => snapshot
                .exposure
                .alias(&asked)
                .and_then(|(host, port)| Some((snapshot.services.get(host)?, port))),
        },
        Host::Ip(ip) => snapshot.vips.get(ip).map(|service| (service, asked.port)),
    };
    let (service, port) = found.ok_or(Reason::UnknownService)?;
    let endpoints = Arc::clone(service.ports.get(&port).ok_or(Reason::UnknownService)?);
    Ok(Route {
        service: Arc::clone(service),
        port,
        endpoints,
        asked,
    })
}
