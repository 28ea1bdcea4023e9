//! Istio's labels of a tunnel: their sources, names and order.

use std::fmt;
use std::hash::Hash;
use std::net::SocketAddr;
use std::sync::Arc;

use prometheus_client::encoding::{EncodeLabel, EncodeLabelSet, LabelSetEncoder};

use crate::status::{PodName, WorkloadLabels};
use crate::wire::UNKNOWN_CLUSTER;

/// Facts about a connection that all its tunnels share.
#[derive(Clone, Debug)]
pub struct Source {
    pub address: SocketAddr,
    /// Name of the listener. Only in the log.
    pub listener: Arc<str>,
    /// SPIFFE identity of the peer. This and the next fields are empty if none was verified.
    pub principal: Arc<str>,
    pub trust_domain: Arc<str>,
    pub namespace: Arc<str>,
    pub service_account: Arc<str>,
    /// Cluster, from the issuer of the certificate or from the trust domain.
    pub cluster: Arc<str>,
    /// Cluster for metric labels: one name for all trust domains that the configuration does not
    /// name.
    pub counted_cluster: Arc<str>,
}

/// Facts about the service that a tunnel was routed to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct DestinationService {
    pub hostname: Arc<str>,
    pub name: Arc<str>,
    pub namespace: Arc<str>,
}

/// Endpoint that was dialled for a tunnel.
#[derive(Clone, Debug)]
pub struct Destination {
    pub address: SocketAddr,
    /// Name of the pod. Only in the log: pods are short-lived, and label sets persist.
    pub pod: Arc<dyn PodName>,
}

/// Labels of a counter with a limit of label sets.
pub(super) trait Labels:
    EncodeLabelSet + Clone + Eq + Hash + Send + Sync + fmt::Debug + 'static
{
    /// Returns labels with fewer values, which those that exceed the limit share. Called on shared
    /// labels, it returns the default.
    fn overflow(&self) -> Self;
}

/// Gateway of another network that a tunnel was opened through.
#[derive(Clone, Copy, Debug)]
pub struct RemoteNetwork<'a> {
    pub cluster: &'a Arc<str>,
    pub network: &'a Arc<str>,
}

/// Label set of the `istio_tcp_*` counters. Empty values are exported as `unknown`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct TcpLabels {
    source_principal: Arc<str>,
    source_namespace: Arc<str>,
    source_cluster: Arc<str>,
    service: DestinationService,
    workload: Arc<WorkloadLabels>,
    response_flags: &'static str,
    security: &'static str,
}

/// Label set of a value of a closed list, and of the cluster of the peer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct PeerLabels {
    /// Name and value of the first label.
    listed: (&'static str, &'static str),
    /// [`Source::counted_cluster`], which the configuration bounds. Empty for a peer without an
    /// identity and for an unknown cluster, exported as `unknown`.
    source_cluster: Arc<str>,
}

impl PeerLabels {
    pub(super) fn new(listed: (&'static str, &'static str), counted_cluster: &Arc<str>) -> Self {
        let source_cluster = match &**counted_cluster {
            UNKNOWN_CLUSTER => Arc::default(),
            _ => Arc::clone(counted_cluster),
        };
        Self { listed, source_cluster }
    }
}

/// Label set of the bytes of tunnels to other networks. Empty values are exported as `unknown`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct NetworkLabels {
    /// [`Source::counted_cluster`].
    pub(super) source_cluster: Arc<str>,
    pub(super) destination_cluster: Arc<str>,
    pub(super) destination_network: Arc<str>,
    pub(super) destination_service: Arc<str>,
}

impl Labels for NetworkLabels {
    /// Removes the service first. Budgets of links need the clusters.
    fn overflow(&self) -> Self {
        if self.destination_service.is_empty() {
            return Self::default();
        }
        Self { destination_service: Arc::default(), ..self.clone() }
    }
}

impl EncodeLabelSet for NetworkLabels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        for (name, value) in [
            ("source_cluster", &self.source_cluster),
            ("destination_cluster", &self.destination_cluster),
            ("destination_network", &self.destination_network),
            ("destination_service", &self.destination_service),
        ] {
            (name, or_unknown(value)).encode(encoder.encode_label())?;
        }
        Ok(())
    }
}

impl EncodeLabelSet for PeerLabels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        self.listed.encode(encoder.encode_label())?;
        let cluster = or_unknown(&self.source_cluster);
        ("source_cluster", cluster).encode(encoder.encode_label())
    }
}

/// Response flags of a tunnel that ended normally or is open.
pub(super) const NO_FLAGS: &str = "-";

#[derive(Clone, Copy, Debug)]
pub(super) struct TunnelFacts<'a> {
    pub(super) source: &'a Arc<Source>,
    pub(super) service: &'a DestinationService,
    workload: Option<&'a Arc<WorkloadLabels>>,
}

impl<'a> TunnelFacts<'a> {
    /// Collects the facts so far. The workload is known after its dial.
    pub(super) fn new(
        source: &'a Arc<Source>,
        service: &'a DestinationService,
        workload: Option<&'a Arc<WorkloadLabels>>,
    ) -> Self {
        Self { source, service, workload }
    }

    /// Returns true if the peer's identity was verified.
    pub(super) fn has_identity(self) -> bool {
        !self.source.principal.is_empty()
    }

    pub(super) fn network_labels(self, remote: RemoteNetwork<'_>) -> NetworkLabels {
        NetworkLabels {
            source_cluster: Arc::clone(&self.source.counted_cluster),
            destination_cluster: Arc::clone(remote.cluster),
            destination_network: Arc::clone(remote.network),
            destination_service: Arc::clone(&self.service.hostname),
        }
    }

    pub(super) fn labels(self, response_flags: &'static str) -> TcpLabels {
        let source = self.source;
        TcpLabels {
            source_principal: Arc::clone(&source.principal),
            source_namespace: Arc::clone(&source.namespace),
            source_cluster: Arc::clone(&source.cluster),
            service: self.service.clone(),
            workload: self.workload.cloned().unwrap_or_default(),
            response_flags,
            // The security of TLS that is passed through is unknown.
            security: if self.has_identity() { "mutual_tls" } else { "unknown" },
        }
    }
}

/// Value of `reporter`. The ztunnels or sidecars of source and destination report the same bytes
/// as `source` and `destination`, and a waypoint as `waypoint`. Istio's dashboards and Kiali sum
/// over these three.
const REPORTER: &str = "gateway";

impl TcpLabels {
    /// Returns names and values in the order of docs/wire-contract.md 6.1.
    ///
    /// The source's workload labels stay unknown: a certificate names a service account, not a
    /// workload (docs/wire-contract.md 6.1). As in ztunnel, app and version are the canonical ones.
    fn pairs(&self) -> [(&'static str, &str); 27] {
        let Self { service, workload, .. } = self;
        [
            ("reporter", REPORTER),
            ("source_workload", ""),
            ("source_canonical_service", ""),
            ("source_canonical_revision", ""),
            ("source_workload_namespace", &self.source_namespace),
            ("source_principal", &self.source_principal),
            ("source_app", ""),
            ("source_version", ""),
            ("source_cluster", &self.source_cluster),
            ("destination_service", &service.hostname),
            ("destination_service_namespace", &service.namespace),
            ("destination_service_name", &service.name),
            ("destination_workload", &workload.workload),
            ("destination_canonical_service", &workload.canonical_name),
            ("destination_canonical_revision", &workload.canonical_revision),
            ("destination_workload_namespace", &workload.namespace),
            ("destination_principal", &workload.principal),
            ("destination_app", &workload.canonical_name),
            ("destination_version", &workload.canonical_revision),
            ("destination_cluster", &workload.cluster),
            ("request_protocol", "tcp"),
            ("response_flags", self.response_flags),
            ("connection_security_policy", self.security),
            ("source_region", ""),
            ("source_zone", ""),
            ("destination_region", &workload.region),
            ("destination_zone", &workload.zone),
        ]
    }
}

impl Labels for TcpLabels {
    fn overflow(&self) -> Self {
        Self { response_flags: self.response_flags, security: self.security, ..Self::default() }
    }
}

impl EncodeLabelSet for TcpLabels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        for (name, value) in self.pairs() {
            (name, or_unknown(value)).encode(encoder.encode_label())?;
        }
        Ok(())
    }
}

pub(super) fn or_unknown(value: &str) -> &str {
    if value.is_empty() { "unknown" } else { value }
}
