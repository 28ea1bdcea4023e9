//! Workloads that can be dialled, each with its endpoints.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::Endpoint;
use super::exclusion::speaks_hbone;
use super::mesh::{self, Protocol};
use crate::wire::HBONE_PORT;

/// Endpoints of a workload that can be dialled. There is at least one, and one per dialled port,
/// in the order of the ports.
#[derive(Clone, Debug)]
pub(super) enum Member {
    /// Common case; it saves an allocation.
    One(Arc<Endpoint>),
    /// Endpoints at several ports.
    Several(Arc<[Arc<Endpoint>]>),
}

impl Member {
    /// Returns a workload that is dialled at `ip` and these ports. Its endpoints keep their
    /// previous states.
    pub(super) fn new(
        workload: &Arc<mesh::Workload>,
        ip: IpAddr,
        ports: &[(u16, Protocol)],
        before: Option<&Self>,
    ) -> Self {
        let endpoint = |&(port, protocol): &(u16, Protocol)| {
            let address = SocketAddr::new(ip, port);
            let state = before.and_then(|before| before.endpoint(port));
            let state = state.filter(|old| old.address == address);
            Arc::new(Endpoint {
                address,
                protocol,
                weight: workload.capacity,
                definition: Arc::clone(workload),
                remote: None,
                state: state.map_or_else(Arc::default, |old| Arc::clone(&old.state)),
            })
        };
        match ports {
            [port] => Self::One(endpoint(port)),
            ports => Self::Several(ports.iter().map(endpoint).collect()),
        }
    }

    fn endpoints(&self) -> &[Arc<Endpoint>] {
        match self {
            Self::One(endpoint) => std::slice::from_ref(endpoint),
            Self::Several(endpoints) => endpoints,
        }
    }

    pub(super) fn workload(&self) -> Option<&Arc<mesh::Workload>> {
        self.endpoints().first().map(|endpoint| &endpoint.definition)
    }

    pub(super) fn uid(&self) -> &str {
        self.endpoints().first().map_or("", |endpoint| endpoint.uid())
    }

    pub(super) fn endpoint(&self, port: u16) -> Option<&Arc<Endpoint>> {
        let endpoints = self.endpoints();
        let found = endpoints.binary_search_by_key(&port, |endpoint| endpoint.address.port());
        endpoints.get(found.ok()?)
    }
}

/// Returns the ports at which a workload is dialled, with those of TLS listeners if
/// `has_passthrough`.
pub(super) fn ports(workload: &mesh::Workload, has_passthrough: bool) -> Vec<(u16, Protocol)> {
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
    ports.into_iter().collect()
}

pub(super) fn dialled_port(workload: &mesh::Template, target: u16) -> u16 {
    match workload.protocol {
        Protocol::Hbone => HBONE_PORT,
        Protocol::Tcp => target,
    }
}
