//! GET `/config_dump`: state of the data path in the format of ztunnel's dump, which `istioctl
//! ztunnel-config` reads (docs/wire-contract.md 6.3). Data that is specific to this gateway is
//! under `strait` and in additional keys of istioctl's objects.
//!
//! A mesh can have 100,000 workloads, so the answer is written while it is sent.

use std::collections::{BTreeMap, HashSet};
use std::io;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::status::evacuated;
use super::view::{Member, View};
use super::{AdminState, stream};
use crate::snapshot::Endpoint;
use crate::snapshot::mesh::{GatewayAddress, Service, Workload};
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
        let services = || view.services().map(|service| service_to_json(service, view));
        dump.serialize_entry("services", &LazyList(services))?;
        let workloads = || view.workloads().map(workload_to_json);
        dump.serialize_entry("workloads", &LazyList(workloads))?;
        dump.serialize_entry("policies", &LazyList(|| snapshot.policies.iter()))?;
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
            (what.label(), json!({ "at": at, "ok": reload.in_use, "error": error }))
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
        "listeners": (state.listeners)(),
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
        serializer.collect_seq((self.0)())
    }
}

fn service_to_json(service: &Service, view: &View<'_>) -> Value {
    let vips = service.vips.iter();
    let vips: Vec<_> = vips.map(|(network, ip)| format!("{network}/{ip}")).collect();
    let members = view.members(service).into_iter();
    // All workloads of the service, used or not.
    let endpoints: BTreeMap<_, _> =
        members.map(|member| (&*member.workload.uid, endpoint_to_json(&member, service))).collect();
    let waypoints = service.waypoints.iter();
    let weighted: Vec<_> = waypoints
        .map(|one| json!({ "destination": gateway_to_json(&one.gateway), "weight": one.weight }))
        .collect();
    let preferences = service.preferences.iter().flatten();
    let preferences: Vec<_> = preferences.map(|one| format!("{one:?}")).collect();
    let mode = match (service.passthrough, service.strict, preferences.is_empty()) {
        (true, ..) => "Passthrough",
        (_, true, _) => "Strict",
        (.., false) => "Failover",
        _ => "Standard",
    };
    let health = if service.allow_unhealthy { "AllowAll" } else { "OnlyHealthy" };
    let gateways = view.gateways(service);
    let gateways: Vec<_> = gateways.iter().map(remote_gateway_to_json).collect();
    json!({
        "gateways": gateways,
        "name": service.name,
        "namespace": service.namespace,
        "hostname": service.hostname,
        "vips": vips,
        "ports": service.ports,
        "endpoints": endpoints,
        "subjectAltNames": service.subject_alt_names,
        "waypoint": service.waypoints.first().map(|one| gateway_to_json(&one.gateway)),
        "weightedWaypoints": weighted,
        "loadBalancer": {
            "routingPreferences": preferences,
            "mode": mode,
            "healthPolicy": health,
        },
        "canonical": service.canonical,
    })
}

/// Converts a gateway of another network, with its part of the instances of a service port.
fn remote_gateway_to_json((port, endpoint): &(u16, &Endpoint)) -> Value {
    let remote = endpoint.remote.as_deref();
    json!({
        "port": port,
        "network": remote.map(|remote| &remote.network),
        "cluster": remote.map(|remote| &remote.cluster),
        "identities": remote.map(|remote| &remote.identities),
        "address": endpoint.address,
        "weight": endpoint.weight,
        "inFlight": endpoint.state.in_flight(),
    })
}

/// Converts a gateway or waypoint. Its destination is `namespace/hostname` or `network/ip`.
fn gateway_to_json(gateway: &GatewayAddress) -> Value {
    json!({ "destination": gateway.place.to_string(), "hboneMtlsPort": gateway.port })
}

/// Converts a workload of a service. The live state is an addition to istioctl's keys.
fn endpoint_to_json(member: &Member<'_>, service: &Service) -> Value {
    let (mut ejected, mut in_flight, mut addresses) = (false, 0_u32, Vec::new());
    let mut unused = BTreeMap::new();
    let mut seen = HashSet::new();
    for port in &member.ports {
        // Ports that are dialled at one address share one state, which is counted once.
        if let Some(found) = port.endpoint.filter(|found| seen.insert(found.address)) {
            ejected |= port.ejected;
            in_flight = in_flight.saturating_add(found.state.in_flight());
            addresses.push(found.address);
        }
        unused.extend(port.unused.as_ref().map(|why| (port.port, why)));
    }
    addresses.sort_unstable();
    json!({
        "workloadUid": member.workload.uid,
        "service": service.key(),
        "port": member.targets.to_map(),
        "status": health_of(member.workload),
        "weight": member.workload.capacity,
        "ejected": ejected,
        "inFlight": in_flight,
        "addresses": addresses,
        "unused": unused,
    })
}

fn health_of(workload: &Workload) -> &'static str {
    if workload.healthy { "Healthy" } else { "Unhealthy" }
}

fn workload_to_json(workload: &Workload) -> Value {
    let network_mode = if workload.host_network { "HostNetwork" } else { "Standard" };
    let services: Vec<_> = workload.services.keys().collect();
    json!({
        "uid": workload.uid,
        "workloadIps": *workload.addresses,
        "waypoint": null,
        "networkGateway": workload.network_gateway.as_deref().map(gateway_to_json),
        "protocol": workload.protocol,
        "networkMode": network_mode,
        "name": workload.name(),
        "namespace": workload.namespace,
        "trustDomain": workload.trust_domain,
        "serviceAccount": workload.service_account,
        "network": workload.network,
        "workloadName": workload.workload_name,
        "workloadType": workload.workload_type,
        "canonicalName": workload.canonical_name,
        "canonicalRevision": workload.canonical_revision,
        "hostname": workload.hostname,
        "node": workload.node,
        "status": health_of(workload),
        "clusterId": workload.cluster,
        "locality": workload.locality,
        "services": services,
        "capacity": workload.capacity,
        "authorizationPolicies": workload.policies,
    })
}

fn certificates(state: &AdminState) -> Vec<Value> {
    let certificates = state.status.certificates().into_iter();
    certificates.map(certificate_to_json).collect()
}

fn certificate_to_json(certificate: Certificate) -> Value {
    let certs = |infos: &[CertificateInfo]| -> Vec<_> {
        let infos = infos.iter();
        infos
            .map(|info| {
                json!({
                    // istioctl expects base64 of the PEM text.
                    "pem": BASE64_STANDARD.encode(&info.pem),
                    "serialNumber": info.serial,
                    "validFrom": info.valid_from,
                    "expirationTime": info.expires,
                })
            })
            .collect()
    };
    json!({
        "identity": certificate.identity,
        "state": certificate.state,
        "certChain": certs(&certificate.chain),
        "rootCerts": certs(&certificate.roots),
    })
}
