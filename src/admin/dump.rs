//! GET `/config_dump`: state of the data path in the format of ztunnel's dump, which `istioctl
//! ztunnel-config` reads (docs/wire-contract.md 6.3). Data that is specific to this gateway is
//! under `strait` and in additional keys of istioctl's objects.
//!
//! A mesh can have 100,000 workloads, so the answer is written while it is sent.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::status::evacuated;
use super::view::{Member, View, key_of};
use super::{AdminState, policies, stream};
use crate::snapshot::Protocol;
use crate::snapshot::mesh::{self, Locality, Place};
use crate::status::{Certificate, CertificateInfo};

/// Answers with the dump as indented JSON.
pub(super) async fn config_dump(State(state): State<AdminState>) -> Response {
    let body = stream::body(move |pieces| {
        let snapshot = state.reader.snapshot();
        let view = View::new(&snapshot, &state.deny_list, Instant::now());
        serde_json::to_writer_pretty(pieces, &Dump(&state, &view)).map_err(io::Error::from)
    });
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// GET `/certs`: answers with the certificates of the dump.
pub(super) async fn certs(State(state): State<AdminState>) -> Response {
    axum::Json(json!({ "certificates": certificates(&state) })).into_response()
}

/// The whole dump. Its parts are created while they are written.
struct Dump<'a>(&'a AdminState, &'a View<'a>);

impl Serialize for Dump<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(state, view) = self;
        let snapshot = view.snapshot;
        let mut dump = serializer.serialize_map(None)?;
        dump.serialize_entry("version", &json!({ "version": env!("CARGO_PKG_VERSION") }))?;
        dump.serialize_entry("config", &**state.config.load())?;
        dump.serialize_entry("strait", &strait_section(state, view))?;
        let services = || view.services().map(|service| Service::of(service, view));
        dump.serialize_entry("services", &LazyList(services))?;
        let workloads = || view.workloads().map(Workload::of);
        dump.serialize_entry("workloads", &LazyList(workloads))?;
        let policies = || {
            let policies = snapshot.policies.iter();
            policies.map(|one| policies::Policy::of(one))
        };
        dump.serialize_entry("policies", &LazyList(policies))?;
        dump.serialize_entry("certificates", &certificates(state))?;
        // Tunnels are not listed individually: see `inFlight` of the endpoints.
        dump.serialize_entry("workloadState", &json!({}))?;
        let nothing = json!({ "services": [], "workloads": [], "policies": [] });
        dump.serialize_entry("staticConfig", &nothing)?;
        dump.end()
    }
}

/// Returns the data that istioctl does not know.
fn strait_section(state: &AdminState, view: &View<'_>) -> Value {
    let reloads = state.status.reloads().into_iter();
    let reloads: BTreeMap<_, _> = reloads
        .map(|(what, reload)| {
            let at = humantime::format_rfc3339_millis(reload.at).to_string();
            let error = reload.error;
            (
                what.label(),
                json!({ "at": at, "ok": reload.ok, "error": error }),
            )
        })
        .collect();
    json!({
        "snapshot": view.snapshot.version,
        "generation": view.snapshot.generation,
        "network": view.snapshot.network(),
        "evacuated": evacuated(view.snapshot).collect::<Vec<_>>(),
        "pending": state.status.list_pending(),
        "discovery": state.status.discovery(),
        "reloads": reloads,
        "listeners": state.listeners.rows(),
    })
}

/// List whose elements are created while it is written.
struct LazyList<F>(F);

impl<F, I> Serialize for LazyList<F>
where
    F: Fn() -> I,
    I: Iterator<Item: Serialize>,
{
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(None)?;
        for item in (self.0)() {
            list.serialize_element(&item)?;
        }
        list.end()
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Service<'a> {
    name: &'a str,
    namespace: &'a str,
    hostname: &'a str,
    vips: Vec<String>,
    ports: &'a BTreeMap<u16, u16>,
    /// All workloads of the service by uid, used or not.
    endpoints: BTreeMap<&'a str, Endpoint<'a>>,
    subject_alt_names: &'a [String],
    waypoint: Option<Gateway>,
    weighted_waypoints: Vec<WeightedWaypoint>,
    load_balancer: LoadBalancer,
    canonical: bool,
}

/// Gateway or waypoint.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Gateway {
    /// `namespace/hostname` or `network/ip`.
    destination: String,
    hbone_mtls_port: u16,
}

#[derive(Debug, Serialize)]
struct WeightedWaypoint {
    destination: Gateway,
    weight: u32,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct LoadBalancer {
    routing_preferences: Vec<String>,
    mode: &'static str,
    health_policy: &'static str,
}

/// Workload of a service. The live state is an addition to istioctl's keys.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Endpoint<'a> {
    workload_uid: &'a str,
    service: String,
    port: BTreeMap<u16, u16>,
    status: &'static str,
    weight: u32,
    ejected: bool,
    in_flight: u32,
    addresses: Vec<SocketAddr>,
    /// Reason why it is not used, by service port.
    unused: BTreeMap<u16, String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Workload<'a> {
    uid: &'a str,
    workload_ips: &'a [IpAddr],
    waypoint: Option<Gateway>,
    network_gateway: Option<Gateway>,
    protocol: Protocol,
    network_mode: &'static str,
    name: &'a str,
    namespace: &'a str,
    trust_domain: &'a str,
    service_account: &'a str,
    network: &'a str,
    workload_name: &'a str,
    workload_type: &'a str,
    canonical_name: &'a str,
    canonical_revision: &'a str,
    hostname: &'a str,
    node: &'a str,
    status: &'static str,
    cluster_id: &'a str,
    locality: &'a Locality,
    services: Vec<&'a str>,
    capacity: u32,
    authorization_policies: &'a [Arc<str>],
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
    /// Base64 of the PEM text, as istioctl expects it.
    pem: String,
    serial_number: String,
    valid_from: String,
    expiration_time: String,
}

impl<'a> Service<'a> {
    fn of(service: &'a mesh::Service, view: &View<'a>) -> Self {
        let vip = |(network, ip): &(String, IpAddr)| format!("{network}/{ip}");
        let members = view.members(service);
        let endpoints = members.into_iter().map(|member| {
            let uid = &*member.workload.uid;
            (uid, Endpoint::of(member, key_of(service)))
        });
        let weighted = |waypoint: &mesh::Waypoint| WeightedWaypoint {
            destination: Gateway::of(&waypoint.gateway),
            weight: waypoint.weight,
        };
        let waypoints = &service.waypoints;
        Self {
            name: &service.name,
            namespace: &service.namespace,
            hostname: &service.hostname,
            vips: service.vips.iter().map(vip).collect(),
            ports: &service.ports,
            endpoints: endpoints.collect(),
            subject_alt_names: &service.subject_alt_names,
            waypoint: waypoints.first().map(|one| Gateway::of(&one.gateway)),
            weighted_waypoints: waypoints.iter().map(weighted).collect(),
            load_balancer: LoadBalancer::of(service),
            canonical: service.canonical,
        }
    }
}

impl Gateway {
    fn of(gateway: &mesh::GatewayAddress) -> Self {
        Self {
            destination: match &gateway.place {
                Place::Name(name) => name.clone(),
                Place::Address(network, ip) => format!("{network}/{ip}"),
            },
            hbone_mtls_port: gateway.port,
        }
    }
}

impl LoadBalancer {
    fn of(service: &mesh::Service) -> Self {
        let preferences = &service.preferences;
        Self {
            routing_preferences: preferences.iter().map(|one| format!("{one:?}")).collect(),
            mode: match (service.passthrough, service.strict, preferences.is_empty()) {
                (true, ..) => "Passthrough",
                (_, true, _) => "Strict",
                (.., false) => "Failover",
                _ => "Standard",
            },
            health_policy: match service.allow_unhealthy {
                true => "AllowAll",
                false => "OnlyHealthy",
            },
        }
    }
}

impl<'a> Endpoint<'a> {
    fn of(member: Member<'a>, service: String) -> Self {
        let mut endpoint = Self {
            workload_uid: &member.workload.uid,
            service,
            port: member
                .targets
                .iter()
                .map(|(port, target)| (*port, *target))
                .collect(),
            status: status_of(member.workload),
            weight: member.workload.capacity,
            ejected: false,
            in_flight: 0,
            addresses: Vec::new(),
            unused: BTreeMap::new(),
        };
        let mut seen = HashSet::new();
        for port in member.ports {
            // Ports that are dialled at one address share one state, which is counted once.
            if let Some(found) = port.endpoint.filter(|found| seen.insert(found.address)) {
                endpoint.ejected |= port.ejected;
                endpoint.in_flight = endpoint.in_flight.saturating_add(found.state.in_flight());
                endpoint.addresses.push(found.address);
            }
            endpoint
                .unused
                .extend(port.unused.map(|why| (port.port, why)));
        }
        endpoint.addresses.sort_unstable();
        endpoint
    }
}

fn status_of(workload: &mesh::Workload) -> &'static str {
    match workload.healthy {
        true => "Healthy",
        false => "Unhealthy",
    }
}

impl<'a> Workload<'a> {
    fn of(workload: &'a mesh::Workload) -> Self {
        let mesh::Workload {
            uid,
            addresses: workload_ips,
            ..
        } = workload;
        Self {
            uid,
            workload_ips,
            waypoint: None,
            network_gateway: workload.network_gateway.as_deref().map(Gateway::of),
            protocol: workload.protocol,
            network_mode: match workload.host_network {
                true => "HostNetwork",
                false => "Standard",
            },
            name: workload.name(),
            namespace: &workload.namespace,
            trust_domain: &workload.trust_domain,
            service_account: &workload.service_account,
            network: &workload.network,
            workload_name: &workload.workload_name,
            workload_type: &workload.workload_type,
            canonical_name: &workload.canonical_name,
            canonical_revision: &workload.canonical_revision,
            hostname: &workload.hostname,
            node: &workload.node,
            status: status_of(workload),
            cluster_id: &workload.cluster,
            locality: &workload.locality,
            services: workload.services.keys().map(|name| &**name).collect(),
            capacity: workload.capacity,
            authorization_policies: &workload.policies,
        }
    }
}

fn certificates(state: &AdminState) -> Vec<CertificateDump> {
    let certificates = state.status.certificates().into_iter();
    certificates.map(CertificateDump::of).collect()
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

/// Encodes RFC 4648 base64 with padding. Twelve lines are cheaper than a dependency.
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
