//! Stage 0 for local clients: a binding, by which they use a service of other clusters.

use std::sync::Arc;

use crate::config::{self, Inner};
use crate::snapshot::{BoundEndpoints, Caller, Service, Snapshot, mesh};

/// Service and gateways of a binding. Two are equal if their configuration is.
#[derive(Debug)]
pub struct Binding {
    pub config: config::Binding,
    /// `HOST:PORT` of the service, as gateways and workloads know it.
    pub authority: Box<str>,
    /// Service of the route, which the mesh may not know.
    pub service: Arc<Service>,
    pub port: u16,
    pub endpoints: BoundEndpoints,
}

impl Binding {
    pub fn new(config: &config::Binding) -> Self {
        let host: Arc<str> = config.service.host.as_str().into();
        // The configuration was validated: there is no service without a port.
        let port = config.service.port.unwrap_or_default();
        let clusters = config.cluster.iter().map(|cluster| cluster.as_str().into());
        let (name, namespace) = host.split_once('.').unwrap_or((&*host, ""));
        let namespace = namespace.split('.').next().unwrap_or_default();
        let definition = mesh::Service {
            name: name.into(),
            namespace: namespace.into(),
            hostname: Arc::clone(&host),
            ..mesh::Service::default()
        };
        Self {
            authority: config.service.to_string().into(),
            service: Arc::new(Service { definition: Arc::new(definition), ..Service::default() }),
            port,
            endpoints: BoundEndpoints::new(clusters, Arc::clone(&host), port),
            config: config.clone(),
        }
    }

    /// Returns whether clients speak mutual TLS.
    pub fn requires_identity(&self) -> bool {
        !self.config.to.is_empty()
    }

    /// Returns whether a client may use the binding. Without `to`, only clients without an identity
    /// may. With `to`, the identity has to match it, and its cluster has to be linked to this one.
    pub fn admits(&self, client: Caller<'_>, snapshot: &Snapshot) -> bool {
        if !self.requires_identity() {
            return client.is_unknown();
        }
        let mut audiences = self.config.to.iter();
        !client.is_unknown()
            && snapshot.is_linked(client)
            && audiences.any(|audience| audience.admits(client, &snapshot.trust))
    }

    /// Returns whether the tunnel ends at a workload whose identity is verified.
    pub fn is_inner_hbone(&self) -> bool {
        self.config.inner == Inner::Hbone
    }

    /// Returns whether another version of the binding permits the same tunnels.
    pub fn leads_as(&self, other: &Self) -> bool {
        fn of(one: &Binding) -> impl PartialEq + '_ {
            let config = &one.config;
            (&config.cluster, &config.service, config.inner, &config.workloads)
        }
        of(self) == of(other)
    }

    pub fn clusters(&self) -> String {
        self.config.cluster.join(", ")
    }
}

impl PartialEq for Binding {
    fn eq(&self, other: &Self) -> bool {
        self.config == other.config
    }
}
