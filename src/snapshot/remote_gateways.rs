//! Gateways of other networks by their records, and the endpoints that represent instances behind
//! them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::mesh::{self, Locality, Protocol, Template, Workload};
use super::networks::NetworkTable;
use super::remote::{GATEWAY_RECORD, UNNAMED_CLUSTER};
use super::{Endpoint, EndpointState, RemoteGateway};
use crate::wire::HBONE_PORT;

/// Service account of records whose source names none (docs/wire-contract.md 3.2). Different
/// gateways can share it, so it identifies none.
const UNNAMED_ACCOUNT: &str = "default";

/// Attributes of an instance by which an Envoy assignment ranks it; the default without one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank<'a> {
    pub(super) priority: u32,
    pub(super) degraded: bool,
    /// Locality, if localities have weights.
    pub(super) locality: Option<&'a Locality>,
}

/// Formats the end of the uid of an endpoint; empty for the default.
impl fmt::Display for Rank<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::default() {
            return Ok(());
        }
        let degraded = if self.degraded { "/degraded" } else { "" };
        write!(f, "/{}{degraded}", self.priority)?;
        match self.locality {
            Some(of) => write!(f, "/{}/{}/{}", of.region, of.zone, of.subzone),
            None => Ok(()),
        }
    }
}

/// Number of instances of each cluster, once for each of their services.
pub(super) type ClustersBehind = BTreeMap<Arc<str>, usize>;

/// Gateway of another network.
#[derive(Clone, Debug)]
pub(super) struct Gateway {
    /// First address, by which the gateway is known.
    pub(super) address: SocketAddr,
    /// Record of the mesh or of the configuration; `None` if only instances
    /// name the address.
    pub(super) record: Option<Arc<Workload>>,
    pub(super) remote: Arc<RemoteGateway>,
    /// Record of the address of the other family, if istiod has one for each.
    pub(super) second_record: Option<Arc<Workload>>,
}

impl Gateway {
    /// Returns the gateways of a record: one for each address, or for each pair of both families.
    /// `cluster_behind` gives the cluster of the instances behind addresses, which counts if the
    /// record names none, as those of istiod (pilot/pkg/serviceregistry/kube/controller/ambient).
    pub(super) fn of_record(
        record: &Arc<Workload>,
        network: &str,
        rules: &NetworkTable,
        cluster_behind: impl Fn(&[SocketAddr]) -> Arc<str>,
    ) -> Vec<Self> {
        let port = record_port(record, network);
        let is_named = !["", UNNAMED_CLUSTER].contains(&&*record.cluster);
        let gateway = |(first, other): (IpAddr, Option<IpAddr>)| {
            let address = SocketAddr::new(first, port);
            let others: Box<[_]> = other.map(|ip| SocketAddr::new(ip, port)).into_iter().collect();
            let cluster = if is_named {
                Arc::clone(&record.cluster)
            } else {
                let addresses: Vec<_> = others.iter().copied().chain([address]).collect();
                cluster_behind(&addresses)
            };
            let mut remote = remote_gateway(network, (&cluster, Some(record)), rules);
            remote.other_addresses = others;
            Self {
                address,
                remote: Arc::new(remote),
                record: Some(Arc::clone(record)),
                second_record: None,
            }
        };
        pairs(&record.addresses).into_iter().map(gateway).collect()
    }

    /// Joins the gateways of these records whose addresses are those of one dual-stack gateway.
    ///
    /// istiod has a record for each address of a Gateway, without the name of the Gateway. The n-th
    /// IPv6 and IPv4 addresses of equal records are one gateway, as in [`pairs`]. Two of which one
    /// is not ready, or that different clusters are behind, stay apart, and the pairs after them
    /// stay the same.
    pub(super) fn join_families(mut all: Vec<Self>) -> Vec<Self> {
        all.sort_by_key(|one| one.address);
        let is_ipv4 = |one: &Self| one.address.is_ipv4();
        let (mut v4, mut joined): (Vec<_>, Vec<_>) = all.into_iter().partition(is_ipv4);
        let mut apart = Vec::new();
        for v6 in &mut joined {
            let Some(at) = v4.iter().position(|other| other.is_twin_of(v6)) else {
                continue;
            };
            let other = v4.remove(at);
            // Instances may name one of the addresses alone.
            let known = match (&*v6.remote.cluster, &*other.remote.cluster) {
                (one, two) if one == two || two.is_empty() => Some(&v6.remote),
                ("", _) => Some(&other.remote),
                _ => None,
            };
            let known = known.filter(|_| v6.is_ready() && other.is_ready());
            let Some(known) = known else {
                apart.push(other);
                continue;
            };
            let remote =
                RemoteGateway { other_addresses: [other.address].into(), ..(**known).clone() };
            v6.remote = Arc::new(remote);
            v6.second_record = other.record;
        }
        joined.extend(v4);
        joined.extend(apart);
        joined
    }

    /// Returns true if another record may be that of the same gateway: both have a service account
    /// and one address, and differ in nothing but the address.
    fn is_twin_of(&self, other: &Self) -> bool {
        let (Some(own), Some(record)) = (&self.record, &other.record) else {
            return false;
        };
        let has_account = !["", UNNAMED_ACCOUNT].contains(&&*own.service_account);
        let has_one_address = (own.addresses.len(), record.addresses.len()) == (1, 1);
        has_account
            && has_one_address
            && self.address.port() == other.address.port()
            && own.template == record.template
    }

    pub(super) fn records(&self) -> impl Iterator<Item = &Arc<Workload>> {
        self.record.iter().chain(&self.second_record)
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        let others = self.remote.other_addresses.iter().copied();
        std::iter::once(self.address).chain(others)
    }

    pub(super) fn has_address(&self, address: SocketAddr) -> bool {
        self.address == address || self.remote.other_addresses.contains(&address)
    }

    pub(super) fn is_ready(&self) -> bool {
        let record = self.record.as_ref();
        record.is_none_or(|record| record.healthy && record.capacity > 0)
    }

    /// Returns the endpoint that represents instances of a service port, of one rank, behind the
    /// gateway.
    /// Namespace policies of the service apply to it. Its one service names the authority. Its
    /// capacity is that of the network's ready instances, and its weight is not set yet.
    pub(super) fn endpoint(
        &self,
        (service, name): (&mesh::Service, &str),
        port: u16,
        rank: Rank<'_>,
        (instances, ready): (&[(&Arc<Workload>, bool)], u32),
        state: Arc<EndpointState>,
    ) -> Endpoint {
        let (network, address) = (&self.remote.network, self.address);
        let record = self.record.as_ref();
        let unknown = Locality::default();
        // The instances of a rank with a locality all have it.
        let is_ranked = rank.locality.is_some_and(|of| *of != unknown);
        let own_locality = record.map(|record| &record.locality);
        let own_locality = own_locality.filter(|own| !is_ranked && ***own != unknown);
        let instances = instances.iter().map(|(one, _)| &*one.locality);
        let definition = Workload {
            uid: format!("{network}/gateway/{address}/{name}:{port}{rank}").into(),
            own_name: Some(format!("gateway of {network}").into()),
            healthy: true,
            capacity: ready.max(1),
            priority: rank.priority,
            degraded: rank.degraded,
            services: [(name.into(), [(port, 0)].into())].into(),
            template: Template {
                namespace: Arc::clone(&service.namespace),
                cluster: Arc::clone(&self.remote.cluster),
                network: Arc::clone(network),
                hostname: record.map_or_else(Arc::default, |record| Arc::clone(&record.hostname)),
                protocol: Protocol::Hbone,
                locality: own_locality
                    .map_or_else(|| Arc::new(common_locality(instances)), Arc::clone),
                ..Template::default()
            }
            .into(),
            ..Workload::default()
        };
        Endpoint {
            address,
            protocol: Protocol::Hbone,
            weight: 0,
            definition: Arc::new(definition),
            remote: Some(Arc::clone(&self.remote)),
            state,
        }
    }
}

/// Returns the gateway of a network with what its configuration, and otherwise the mesh, say: the
/// cluster, and the record if there is one.
pub(super) fn remote_gateway(
    network: &str,
    (cluster, record): (&Arc<str>, Option<&Workload>),
    rules: &NetworkTable,
) -> RemoteGateway {
    let rule = rules.get(network);
    let configured = rule.and_then(|rule| Some(rule.cluster.as_deref()?.into()));
    let of_mesh = || Some(cluster).filter(|of| ***of != *UNNAMED_CLUSTER).cloned();
    let cluster: Arc<str> = configured.or_else(of_mesh).unwrap_or_default();
    let identities = rule.into_iter().flat_map(|rule| &rule.identities);
    let identities: Box<[Arc<str>]> = identities.map(|one| one.as_str().into()).collect();
    let identities = Some(identities).filter(|list| !list.is_empty());
    let of_record = || {
        let known = record.filter(|record| !record.service_account.is_empty())?;
        Some(rules.identities_of(known, &cluster))
    };
    RemoteGateway {
        network: network.into(),
        cluster: Arc::clone(&cluster),
        identities: identities.or_else(of_record).unwrap_or_default(),
        other_addresses: Box::default(),
    }
}

/// Returns the addresses of a record by gateway, each in the order in which they are tried: IPv6
/// first (RFC 8305 section 4). The n-th addresses of both families are one dual-stack gateway.
/// Addresses of a family are sorted, because answers of DNS come in any order.
fn pairs(addresses: &[IpAddr]) -> Vec<(IpAddr, Option<IpAddr>)> {
    let addresses: BTreeSet<_> = addresses.iter().map(IpAddr::to_canonical).collect();
    let (v6, v4): (Vec<_>, Vec<_>) = addresses.into_iter().partition(IpAddr::is_ipv6);
    let pair = |index: usize| match (v6.get(index), v4.get(index)) {
        (Some(&v6), v4) => Some((v6, v4.copied())),
        (None, v4) => Some((*v4?, None)),
    };
    (0..v6.len().max(v4.len())).filter_map(pair).collect()
}

/// Returns the port in the uid of a record, `NetworkGateway/NETWORK/ADDRESS/PORT`. The address
/// follows if the record had a hostname. Port 0 means the default (docs/wire-contract.md 2.1).
fn record_port(record: &Workload, network: &str) -> u16 {
    let rest = record.uid.strip_prefix(GATEWAY_RECORD);
    let rest = rest.and_then(|rest| rest.strip_prefix(network)?.strip_prefix('/'));
    let port = rest.and_then(|rest| rest.split('/').nth(1)?.parse().ok());
    port.filter(|port| *port != 0).unwrap_or(HBONE_PORT)
}

fn common_locality<'a>(mut localities: impl Iterator<Item = &'a Locality>) -> Locality {
    let Some(first) = localities.next() else {
        return Locality::default();
    };
    localities.fold(first.clone(), |common, other| {
        let is_region = common.region == other.region;
        let is_zone = is_region && common.zone == other.zone;
        let is_subzone = is_zone && common.subzone == other.subzone;
        let keep = |part: Arc<str>, is_same| if is_same { part } else { Arc::default() };
        Locality {
            region: keep(common.region, is_region),
            zone: keep(common.zone, is_zone),
            subzone: keep(common.subzone, is_subzone),
        }
    })
}
