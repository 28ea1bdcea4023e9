//! GET `/config_dump`: what the data path uses, with the key names that istioctl reads.

use std::collections::{BTreeMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
use tokio::time::Instant;

use super::AdminState;
use crate::config::Config;
use crate::snapshot::mesh::{self, Locality};
use crate::snapshot::{Protocol, Snapshot};
use crate::status::{Certificate, CertificateInfo, Reload, Status, What};

/// Answers with the dump, indented for people.
pub(super) async fn config_dump(State(state): State<AdminState>) -> Response {
    let config = state.config.load_full();
    let text = Dump::of(&state.reader.load(), &state.status, &config)
        .and_then(|dump| serde_json::to_string_pretty(&dump));
    match text {
        Ok(text) => ([(header::CONTENT_TYPE, "application/json")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

#[derive(Debug, Serialize)]
struct Dump {
    version: u64,
    generation: u64,
    config: Value,
    exposure: Value,
    services: Vec<Service>,
    workloads: Vec<Workload>,
    policies: [(); 0],
    certificates: Vec<CertificateDump>,
    reloads: BTreeMap<&'static str, ReloadDump>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Service {
    name: Arc<str>,
    namespace: Arc<str>,
    hostname: Arc<str>,
    vips: Vec<String>,
    ports: BTreeMap<u16, u16>,
    subject_alt_names: Vec<String>,
    waypoint: bool,
    allow_unhealthy: bool,
    passthrough: bool,
    canonical: bool,
    /// By workload uid.
    endpoints: BTreeMap<String, Endpoint>,
}

/// A workload that this gateway may dial for a service, and its live state.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Endpoint {
    workload_uid: String,
    service: String,
    port: BTreeMap<u16, u16>,
    weight: u32,
    ejected: bool,
    in_flight: u32,
    addresses: Vec<SocketAddr>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Workload {
    uid: Arc<str>,
    workload_ips: Box<[IpAddr]>,
    protocol: Protocol,
    name: Arc<str>,
    namespace: Arc<str>,
    service_account: Arc<str>,
    workload_name: Arc<str>,
    workload_type: Arc<str>,
    canonical_name: Arc<str>,
    canonical_revision: Arc<str>,
    cluster_id: Arc<str>,
    trust_domain: Arc<str>,
    locality: Locality,
    node: Arc<str>,
    network: Arc<str>,
    status: &'static str,
    hostname: Arc<str>,
    capacity: u32,
    host_network: bool,
    /// Not istioctl's `networkGateway`, which holds an address.
    is_network_gateway: bool,
    services: Vec<Arc<str>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct CertificateDump {
    identity: String,
    state: String,
    cert_chain: Vec<Cert>,
    root_certs: Vec<Cert>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Cert {
    /// The PEM once more in base64, as istioctl expects it.
    pem: String,
    serial_number: String,
    valid_from: String,
    expiration_time: String,
}

#[derive(Debug, Serialize)]
struct ReloadDump {
    at: String,
    ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl Dump {
    fn of(snapshot: &Snapshot, status: &Status, config: &Config) -> serde_json::Result<Self> {
        let config = serde_json::to_value(config)?;
        let now = Instant::now();
        Ok(Self {
            version: snapshot.version,
            generation: snapshot.generation,
            exposure: config.get("exposure").cloned().unwrap_or(Value::Null),
            config,
            services: snapshot
                .mesh
                .services
                .sorted()
                .into_iter()
                .map(|service| Service::of(service, snapshot, now))
                .collect(),
            workloads: snapshot
                .mesh
                .workloads
                .sorted()
                .into_iter()
                .map(|workload| Workload::of(workload))
                .collect(),
            policies: [],
            certificates: status
                .certificates()
                .into_iter()
                .map(CertificateDump::of)
                .collect(),
            reloads: status.reloads().into_iter().map(ReloadDump::of).collect(),
        })
    }
}

impl Service {
    fn of(service: &mesh::Service, snapshot: &Snapshot, now: Instant) -> Self {
        let vip = |(network, ip): &(String, IpAddr)| format!("{network}/{ip}");
        Self {
            name: Arc::clone(&service.name),
            namespace: Arc::clone(&service.namespace),
            hostname: Arc::clone(&service.hostname),
            vips: service.vips.iter().map(vip).collect(),
            ports: service.ports.clone(),
            subject_alt_names: service.subject_alt_names.clone(),
            waypoint: !service.waypoints.is_empty(),
            allow_unhealthy: service.allow_unhealthy,
            passthrough: service.passthrough,
            canonical: service.canonical,
            endpoints: endpoints(service, snapshot, now),
        }
    }
}

/// The endpoints as the data path sees them: the drained and the unusable are not among them.
fn endpoints(
    service: &mesh::Service,
    snapshot: &Snapshot,
    now: Instant,
) -> BTreeMap<String, Endpoint> {
    let mut endpoints: BTreeMap<String, Endpoint> = BTreeMap::new();
    // Of several services with one hostname the snapshot serves one.
    let built = snapshot.services.get(&service.hostname);
    let Some(built) = built.filter(|built| *built.namespace == *service.namespace) else {
        return endpoints;
    };
    let key = format!("{}/{}", service.namespace, service.hostname);
    let targets = |uid: &str| {
        let ports = snapshot.mesh.workloads.get(uid)?.services.get(&*key)?;
        Some(
            ports
                .iter()
                .map(|(port, target)| (*port, *target))
                .collect(),
        )
    };
    let mut seen = HashSet::new();
    for endpoint in built.ports.values().flat_map(|set| &set.endpoints) {
        let shown = endpoints
            .entry(endpoint.uid.to_string())
            .or_insert_with(|| Endpoint {
                workload_uid: endpoint.uid.to_string(),
                service: key.clone(),
                port: targets(&endpoint.uid).unwrap_or_default(),
                weight: endpoint.weight,
                ..Endpoint::default()
            });
        // Ports that are dialled at one address share one state, which counts once.
        if seen.insert((&endpoint.uid, endpoint.address)) {
            shown.ejected |= endpoint.state.is_ejected(now);
            shown.in_flight = shown.in_flight.saturating_add(endpoint.state.in_flight());
            shown.addresses.push(endpoint.address);
            shown.addresses.sort_unstable();
        }
    }
    endpoints
}

impl Workload {
    fn of(workload: &mesh::Workload) -> Self {
        Self {
            uid: workload.uid.clone(),
            workload_ips: workload.addresses.clone(),
            protocol: workload.protocol,
            name: workload.name.clone(),
            namespace: workload.namespace.clone(),
            service_account: workload.service_account.clone(),
            workload_name: workload.workload_name.clone(),
            workload_type: workload.workload_type.clone(),
            canonical_name: workload.canonical_name.clone(),
            canonical_revision: workload.canonical_revision.clone(),
            cluster_id: workload.cluster.clone(),
            trust_domain: workload.trust_domain.clone(),
            locality: workload.locality.clone(),
            node: workload.node.clone(),
            network: workload.network.clone(),
            status: if workload.healthy {
                "Healthy"
            } else {
                "Unhealthy"
            },
            hostname: workload.hostname.clone(),
            capacity: workload.capacity,
            host_network: workload.host_network,
            is_network_gateway: workload.network_gateway.is_some(),
            services: workload.services.keys().cloned().collect(),
        }
    }
}

impl CertificateDump {
    fn of(certificate: Certificate) -> Self {
        let certs = |infos: Vec<CertificateInfo>| infos.into_iter().map(Cert::of).collect();
        Self {
            identity: certificate.identity,
            state: certificate.state,
            cert_chain: certs(certificate.chain),
            root_certs: certs(certificate.roots),
        }
    }
}

impl Cert {
    fn of(info: CertificateInfo) -> Self {
        Self {
            pem: base64(info.pem.as_bytes()),
            serial_number: info.serial,
            valid_from: info.valid_from,
            expiration_time: info.expires,
        }
    }
}

impl ReloadDump {
    fn of((what, reload): (What, Reload)) -> (&'static str, Self) {
        let at = humantime::format_rfc3339_millis(reload.at).to_string();
        (
            what.label(),
            Self {
                at,
                ok: reload.ok,
                error: reload.error,
            },
        )
    }
}

/// RFC 4648 base64 with padding. Twelve lines are less to look after than a dependency.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |i: usize| usize::from(chunk.get(i).copied().unwrap_or(0));
        let group = byte(0) << 16 | byte(1) << 8 | byte(2);
        for (i, shift) in [18, 12, 6, 0].into_iter().enumerate() {
            let digit = ALPHABET.get(group >> shift & 63).copied().unwrap_or(b'=');
            out.push(char::from(if i <= chunk.len() { digit } else { b'=' }));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_gives_the_vectors_of_rfc_4648() {
        let vectors = ["", "f", "fo", "foo", "foob", "fooba", "foobar"].map(str::as_bytes);
        let expected = [
            "", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy",
        ];
        assert_eq!(vectors.map(base64), expected);
    }
}
