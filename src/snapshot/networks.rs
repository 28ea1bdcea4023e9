//! Other networks by the configuration: their gateways, and the certificates that these need.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::exclusion::GATEWAY_RECORD;
use super::mesh::{Protocol, Template, Workload};

/// Configured networks by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NetworkTable(BTreeMap<Arc<str>, NetworkRule>);

/// Configuration of one network.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NetworkRule {
    /// Cluster of the gateways' certificates; empty if the mesh decides.
    pub cluster: Arc<str>,
    /// Identities of the gateways; empty if the mesh decides.
    pub identities: Box<[Arc<str>]>,
    /// Hosts and HBONE ports of gateways besides those of the mesh.
    pub gateways: Box<[(Box<str>, u16)]>,
}

impl NetworkTable {
    /// Returns the rule of a network.
    pub(super) fn get(&self, network: &str) -> Option<&NetworkRule> {
        self.0.get(network)
    }

    /// Returns the records of the configured gateways, in the form of those of the mesh.
    pub(super) fn records(&self) -> impl Iterator<Item = Workload> {
        self.0.iter().flat_map(|(network, rule)| {
            let gateways = rule.gateways.iter();
            gateways.map(|(host, port)| gateway_record(network, &rule.cluster, host, *port))
        })
    }

    /// Returns whether an identity is that of a configured gateway.
    pub(super) fn has_identity(&self, principal: &str) -> bool {
        let mut identities = self.0.values().flat_map(|rule| &rule.identities);
        identities.any(|identity| **identity == *principal)
    }
}

impl FromIterator<(Arc<str>, NetworkRule)> for NetworkTable {
    fn from_iter<I: IntoIterator<Item = (Arc<str>, NetworkRule)>>(networks: I) -> Self {
        Self(networks.into_iter().collect())
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
