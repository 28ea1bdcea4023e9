//! Other networks by the configuration: their gateways, and the certificates that these need.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::mesh::{Protocol, Template, Workload};
use super::remote::GATEWAY_RECORD;
use crate::config::Config;
pub use crate::config::Network;
use crate::wire::HBONE_PORT;

/// Configured networks by name, and the trust domains of clusters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NetworkTable {
    networks: BTreeMap<Arc<str>, Network>,
    /// Trust domains, each with its cluster.
    domains: Box<[(Arc<str>, Arc<str>)]>,
    /// True if bindings use gateways, whatever the exposure grants.
    pub(super) has_bindings: bool,
}

impl NetworkTable {
    pub fn of(config: &Config) -> Self {
        let networks = config.networks.iter();
        let domains = config.trust.domains.iter();
        Self::from_iter(networks.map(|one| (one.name.as_str().into(), one.clone())))
            .with_domains(domains.map(|domain| (&*domain.name, &*domain.cluster)))
            .with_bindings(!config.bindings.is_empty())
    }

    /// Returns the table with these trust domains, each with its cluster.
    pub fn with_domains<'a>(self, domains: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let domains = domains.into_iter();
        Self {
            domains: domains.map(|(domain, cluster)| (domain.into(), cluster.into())).collect(),
            ..self
        }
    }

    /// Returns the table of a gateway that has bindings or none.
    pub fn with_bindings(self, has_bindings: bool) -> Self {
        Self { has_bindings, ..self }
    }

    /// Returns the identities of the gateway of a record. istiod derives the trust domain of a
    /// record from its own, so the domains of the gateway's cluster replace it
    /// (docs/wire-contract.md 2.1).
    pub(super) fn identities_of(&self, record: &Workload, cluster: &str) -> Box<[Arc<str>]> {
        let [scheme, domain, rest @ ..] = record.principal();
        let own = self.domains.iter().filter(|(_, of)| **of == *cluster);
        let mut domains: Vec<&str> = own.map(|(domain, _)| &**domain).collect();
        if domains.is_empty() {
            domains.push(domain);
        }
        let identity = |domain| [scheme, domain, &rest.concat()].concat().into();
        domains.into_iter().map(identity).collect()
    }

    pub(super) fn get(&self, network: &str) -> Option<&Network> {
        self.networks.get(network)
    }

    /// Returns the records of the configured gateways, in the form of those of the mesh.
    pub(super) fn records(&self) -> impl Iterator<Item = Workload> {
        self.networks.iter().flat_map(|(name, network)| {
            let cluster: Arc<str> = network.cluster.as_deref().unwrap_or_default().into();
            network.gateways.iter().map(move |gateway| {
                let port = gateway.port.unwrap_or(HBONE_PORT);
                gateway_record(name, &cluster, &gateway.host, port)
            })
        })
    }

    pub(super) fn has_identity(&self, principal: &str) -> bool {
        let mut identities = self.networks.values().flat_map(|network| &network.identities);
        identities.any(|identity| **identity == *principal)
    }
}

impl FromIterator<(Arc<str>, Network)> for NetworkTable {
    fn from_iter<I: IntoIterator<Item = (Arc<str>, Network)>>(networks: I) -> Self {
        Self { networks: networks.into_iter().collect(), ..Self::default() }
    }
}

/// Returns the record of a gateway, in the form of those of WDS (docs/wire-contract.md 3.3). A host
/// that is no address is resolved.
pub fn gateway_record(network: &Arc<str>, cluster: &Arc<str>, host: &str, port: u16) -> Workload {
    let address: Option<IpAddr> = host.parse().ok();
    let hostname = if address.is_some() { "" } else { host };
    Workload {
        uid: format!("{GATEWAY_RECORD}{network}/{host}/{port}").into(),
        own_name: Some(host.into()),
        addresses: address.into_iter().collect(),
        healthy: true,
        capacity: 1,
        template: Template {
            network: Arc::clone(network),
            cluster: Arc::clone(cluster),
            hostname: hostname.into(),
            protocol: Protocol::Hbone,
            ..Template::default()
        }
        .into(),
        ..Workload::default()
    }
}
