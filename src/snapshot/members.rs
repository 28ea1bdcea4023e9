//! Workloads that can be dialled, each with its endpoints.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};

use super::Endpoint;
use super::exclusion::speaks_hbone;
use super::mesh::{self, Protocol};
use crate::wire::HBONE_PORT;

/// Workload that can be dialled. Its endpoints are built for the first endpoint set that reads
/// them, as most workloads of a mesh belong to services that no tunnel of this gateway uses.
#[derive(Clone, Debug)]
pub(super) struct Member(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    workload: Arc<mesh::Workload>,
    /// One per dialled port, in the order of the ports.
    endpoints: OnceLock<Box<[Arc<Endpoint>]>>,
}

impl Member {
    /// Returns the member for a workload, with the ports of TLS listeners if `has_passthrough`. If
    /// the endpoints of `before` were built, its own are built at once and keep their states.
    pub(super) fn new(
        workload: &Arc<mesh::Workload>,
        has_passthrough: bool,
        before: Option<&Self>,
    ) -> Self {
        let before = before.and_then(|before| before.0.endpoints.get());
        let built = before.map(|before| endpoints(workload, has_passthrough, before));
        Self(Arc::new(Inner {
            workload: Arc::clone(workload),
            endpoints: built.map_or_else(OnceLock::new, OnceLock::from),
        }))
    }

    pub(super) fn workload(&self) -> &Arc<mesh::Workload> {
        &self.0.workload
    }

    pub(super) fn uid(&self) -> &str {
        &self.0.workload.uid
    }

    /// Returns the endpoint at a port. `has_passthrough` is as in [`Self::new`].
    pub(super) fn endpoint(&self, port: u16, has_passthrough: bool) -> Option<&Arc<Endpoint>> {
        let build = || endpoints(&self.0.workload, has_passthrough, &[]);
        let endpoints = self.0.endpoints.get_or_init(build);
        let found = endpoints.binary_search_by_key(&port, |endpoint| endpoint.address.port());
        endpoints.get(found.ok()?)
    }
}

/// Returns the endpoints of a workload, with the states of those of `before` at their addresses.
fn endpoints(
    workload: &Arc<mesh::Workload>,
    has_passthrough: bool,
    before: &[Arc<Endpoint>],
) -> Box<[Arc<Endpoint>]> {
    let Some(ip) = workload.addresses.first().map(IpAddr::to_canonical) else {
        return Box::default();
    };
    let endpoint = |(port, protocol)| {
        let address = SocketAddr::new(ip, port);
        let known = before.iter().find(|old| old.address == address);
        Arc::new(Endpoint {
            address,
            protocol,
            weight: workload.capacity,
            definition: Arc::clone(workload),
            remote: None,
            state: known.map_or_else(Arc::default, |old| Arc::clone(&old.state)),
        })
    };
    ports(workload, has_passthrough).into_iter().map(endpoint).collect()
}

/// Returns the ports at which a workload is dialled, with those of TLS listeners if
/// `has_passthrough`.
fn ports(workload: &mesh::Workload, has_passthrough: bool) -> BTreeMap<u16, Protocol> {
    let targets = workload.services.values().flat_map(mesh::Ports::iter);
    // HBONE wins if one of the services at a port uses it. A workload without HBONE uses it at
    // port 15008 alone.
    let mut ports = BTreeMap::<u16, Protocol>::new();
    for (&port, &target) in targets {
        if has_passthrough {
            ports.entry(target).or_default();
        }
        let protocol = ports.entry(dialled_port(workload, target)).or_default();
        if speaks_hbone(workload, port, target) {
            *protocol = Protocol::Hbone;
        }
    }
    ports
}

pub(super) fn dialled_port(workload: &mesh::Template, target: u16) -> u16 {
    match workload.protocol {
        Protocol::Hbone => HBONE_PORT,
        Protocol::Tcp => target,
    }
}
