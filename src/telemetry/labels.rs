//! Istio's labels of a tunnel: the facts that they come from, their names and their order.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use prometheus_client::encoding::{EncodeLabel, EncodeLabelSet, LabelSetEncoder};

use crate::status::WorkloadLabels;

/// Facts about a connection that all its tunnels share.
#[derive(Clone, Debug)]
pub struct Source {
    /// The peer's socket address.
    pub address: SocketAddr,
    /// The peer's identity, `spiffe://…`.
    pub principal: Arc<str>,
    /// The trust domain of the identity.
    pub trust_domain: Arc<str>,
    /// The namespace of the identity.
    pub namespace: Arc<str>,
    /// The service account of the identity.
    pub service_account: Arc<str>,
    /// The cluster that the trust domain stands for.
    pub cluster: Arc<str>,
}

/// Facts about the service that a tunnel was routed to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct DestinationService {
    /// The hostname.
    pub hostname: Arc<str>,
    /// The name.
    pub name: Arc<str>,
    /// The namespace.
    pub namespace: Arc<str>,
}

/// The endpoint that was dialled for a tunnel.
#[derive(Clone, Debug)]
pub struct Destination {
    /// The address that was dialled.
    pub address: SocketAddr,
    /// The pod's name: in the log only, because pods come and go and label sets stay.
    pub pod: Arc<str>,
}

/// The label set of the `istio_tcp_*` counters. What is empty is written as `unknown`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct TcpLabels {
    pub(super) source_principal: Arc<str>,
    pub(super) source_namespace: Arc<str>,
    pub(super) source_cluster: Arc<str>,
    pub(super) service: DestinationService,
    pub(super) workload: Arc<WorkloadLabels>,
    pub(super) response_flags: &'static str,
}

impl TcpLabels {
    /// The labels of a tunnel of which only the source is known.
    pub(super) fn new(source: &Source) -> Self {
        Self {
            source_principal: Arc::clone(&source.principal),
            source_namespace: Arc::clone(&source.namespace),
            source_cluster: Arc::clone(&source.cluster),
            response_flags: "-",
            ..Self::default()
        }
    }

    /// Names and values in the order of contract 6.
    ///
    /// The workload labels of the source stay unknown: a certificate names an account, not a
    /// workload (contract 10, Labels). As in ztunnel, app and version are the canonical ones.
    fn pairs(&self) -> [(&'static str, &str); 27] {
        let Self {
            service, workload, ..
        } = self;
        [
            ("reporter", "destination"),
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
            (
                "destination_canonical_revision",
                &workload.canonical_revision,
            ),
            ("destination_workload_namespace", &workload.namespace),
            ("destination_principal", &workload.principal),
            ("destination_app", &workload.canonical_name),
            ("destination_version", &workload.canonical_revision),
            ("destination_cluster", &workload.cluster),
            ("request_protocol", "tcp"),
            ("response_flags", self.response_flags),
            ("connection_security_policy", "mutual_tls"),
            ("source_region", ""),
            ("source_zone", ""),
            ("destination_region", &workload.region),
            ("destination_zone", &workload.zone),
        ]
    }
}

impl EncodeLabelSet for TcpLabels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        for (name, value) in self.pairs() {
            let value = if value.is_empty() { "unknown" } else { value };
            (name, value).encode(encoder.encode_label())?;
        }
        Ok(())
    }
}
