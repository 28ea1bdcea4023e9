//! GET `/status`: state of the gateway as text or JSON. The text is made from the JSON.

mod exposure;
pub(super) mod peers;
mod problems;
#[cfg(test)]
mod tests;
mod text;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::rows::{IssuerRow, ListenerRow};
use super::view::{Member, View, key_of};
use super::{AdminState, pending};
use crate::config::{Config, Discovery};
use crate::snapshot::Snapshot;
use crate::snapshot::mesh::Service;
use crate::status::{Certificate, Crl, ReloadSource, RemoteGatewayStatus, ResourceUsage};

use exposure::{AnonymousAccess, exposed_to};

/// Maximum number of services, or of endpoints of one service, without `?all`.
const SERVICES_MAX: usize = 50;
/// Maximum number of holders of one resource.
const HOLDERS_SHOWN: usize = 10;

/// Query parameters: `?service=NAME`, `?all`, `?format=json` and, for a terminal, `?color`.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Parameters {
    service: Option<String>,
    all: Option<String>,
    format: Option<String>,
    color: Option<String>,
}

/// Answers with the page as text or JSON; 404 for a service that the mesh does not have.
pub(super) async fn status(
    State(state): State<AdminState>,
    Query(parameters): Query<Parameters>,
) -> Response {
    // On a blocking thread, because a large mesh takes long.
    let made = tokio::task::spawn_blocking(move || answer(&state, &parameters));
    made.await.unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())
}

fn answer(state: &AdminState, parameters: &Parameters) -> Response {
    let wanted = parameters.service.as_deref();
    let limit = parameters.all.as_ref().map_or(SERVICES_MAX, |_| usize::MAX);
    let page = page(state, wanted, limit);
    if let Some(wanted) = wanted.filter(|_| page["services"]["total"] == 0) {
        let text = if has_no_mesh(&page) {
            "there is no mesh yet; see `strait status`\n".to_owned()
        } else {
            format!(
                "unknown service {wanted:?}; write a name, a hostname, NAMESPACE/ and either, or \
                 an alias\n"
            )
        };
        return (StatusCode::NOT_FOUND, text).into_response();
    }
    match parameters.format.as_deref() {
        Some("json") => axum::Json(page).into_response(),
        None | Some("text") => {
            text::page(&page, wanted.is_some(), parameters.color.is_some()).into_response()
        }
        Some(other) => {
            let text = format!("invalid format {other:?}; write `text` or `json`\n");
            (StatusCode::BAD_REQUEST, text).into_response()
        }
    }
}

/// Returns the page. Endpoints are listed if services are requested by name.
fn page(state: &AdminState, wanted: Option<&str>, limit: usize) -> Value {
    let snapshot = state.reader.snapshot();
    let config = state.config.load_full();
    let status = &state.status;
    let pending = pending(status, &state.lifecycle);
    let listeners = (state.listeners)();
    let source = source(state, &config);
    let reloads = status.reloads().into_iter();
    // The status of the stream has more details about a control plane.
    let reloads =
        reloads.filter(|(what, _)| *what != ReloadSource::Mesh || source["stream"].is_null());
    let reloads = reloads.map(|(what, reload)| {
        let (at, error) = (rfc3339(reload.at), reload.error);
        // In use, except for the parts that the error names.
        json!({ "what": what.label(), "at": at, "inUse": reload.ok, "error": error })
    });
    let certificates = status.certificates().into_iter();
    let crls = status.crls().into_iter();
    let gateways = (state.remote_gateways)().into_iter();
    let mut issuers = (state.issuers)();
    issuers.sort_by(|one, other| {
        let count = |row: &IssuerRow| row.accepted.saturating_add(row.refused);
        let order = count(other).cmp(&count(one));
        order.then_with(|| one.spki.cmp(&other.spki))
    });
    let position = &snapshot.balancing.position;
    let mut page = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "at": rfc3339(SystemTime::now()),
        "ready": pending.is_empty(),
        "pending": pending,
        "cluster": config.gateway.cluster,
        "network": snapshot.network(),
        "locality": {
            "region": position.locality.region,
            "zone": position.locality.zone,
            "subzone": position.locality.subzone,
            // Key, variable, label or record that contains it; empty if unknown.
            "origin": position.origin,
        },
        "snapshot": snapshot.version,
        "mesh": {
            "services": snapshot.mesh.services.len(),
            "workloads": snapshot.mesh.workloads.len(),
            "policies": snapshot.policies.len(),
        },
        "source": source,
        "evacuated": evacuated(&snapshot).collect::<Vec<_>>(),
        "certificates": certificates.map(certificate_to_json).collect::<Vec<_>>(),
        "crls": crls.map(crl_to_json).collect::<Vec<_>>(),
        "issuers": issuers,
        "gateways": gateways.map(gateway_to_json).collect::<Vec<_>>(),
        "reloads": reloads.collect::<Vec<_>>(),
        "hosts": status.hosts(),
        "listeners": listeners,
        "shares": shares(state),
        "services": services(state, &snapshot, &listeners, wanted, limit),
    });
    page["problems"] = problems::find(&page, &config, &snapshot, status).into();
    page
}

/// Returns true if the source has sent nothing yet.
fn has_no_mesh(page: &Value) -> bool {
    let mut pending = list(&page["pending"]).iter().filter_map(Value::as_str);
    let mesh = &page["mesh"];
    pending.any(|what| what.starts_with("discovery"))
        && mesh["services"] == 0
        && mesh["workloads"] == 0
}

/// Returns the elements of a JSON list; none of another value.
fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn rfc3339(at: SystemTime) -> String {
    humantime::format_rfc3339_seconds(at).to_string()
}

/// Returns the regions that an operator has evacuated, in their configuration syntax.
pub(super) fn evacuated(snapshot: &Snapshot) -> impl Iterator<Item = String> {
    let regions = snapshot.balancing.evacuated.iter();
    regions.map(ToString::to_string)
}

/// Returns the source of the mesh, with the state of the stream to a control plane.
fn source(state: &AdminState, config: &Config) -> Value {
    let (kind, place) = match &config.discovery {
        Discovery::File { path } => ("file", path.display().to_string()),
        Discovery::Istio { plane, .. } => ("istio", plane.address.to_string()),
        Discovery::Envoy { plane, .. } => ("envoy", plane.address.to_string()),
    };
    json!({ "kind": kind, "place": place, "stream": state.status.discovery() })
}

fn certificate_to_json(certificate: Certificate) -> Value {
    let problem = certificate.renewal_problem(SystemTime::now());
    // For roots only, the first that expires.
    let root = certificate.roots.into_iter();
    let root = root.min_by(|one, other| one.expires.cmp(&other.expires));
    let leaf = certificate.chain.into_iter().next().or(root);
    let leaf = leaf.unwrap_or_default();
    json!({
        "identity": certificate.identity,
        "state": certificate.state,
        "serial": leaf.serial,
        "expires": leaf.expires,
        "renewalProblem": problem,
    })
}

fn gateway_to_json(row: RemoteGatewayStatus) -> Value {
    json!({
        "address": row.address.to_string(),
        "network": row.network,
        "cluster": row.cluster,
        "state": row.state,
        "connections": row.connections,
        "sources": row.sources,
        "tunnels": row.streams,
        "rtt": row.rtt.map(|time| humantime::format_duration(time).to_string()),
        "rttMicroseconds": row.rtt.map(|time| time.as_micros()),
        "share": format!("{}%", row.share_percent),
        "sharePercent": row.share_percent,
        "ejections": row.ejections,
        "error": row.last_error,
        "identity": row.identity,
        "expires": row.not_after.map(rfc3339),
    })
}

/// Returns the usage of each resource that a source holds some of.
fn shares(state: &AdminState) -> Vec<ResourceUsage> {
    let usages = (state.pools)().into_iter().map(|pool| pool.usage(HOLDERS_SHOWN));
    usages.filter(|usage| !usage.holders.is_empty()).collect()
}

fn crl_to_json(crl: Crl) -> Value {
    json!({
        "issuer": crl.issuer,
        "number": crl.number,
        "file": crl.file.display().to_string(),
        "nextUpdate": rfc3339(crl.next_update),
        "stale": crl.next_update <= SystemTime::now(),
    })
}

/// Returns the requested services, up to the limit.
fn services(
    state: &AdminState,
    snapshot: &Snapshot,
    listeners: &[ListenerRow],
    wanted: Option<&str>,
    limit: usize,
) -> Value {
    let view = View::new(snapshot, &state.deny_list, Instant::now());
    let access = AnonymousAccess::new(snapshot, listeners);
    let wanted_host = wanted.map(without_port);
    let aliased: Vec<_> =
        wanted_host.map_or_else(Vec::new, |name| hosts_named(snapshot, &name.to_ascii_lowercase()));
    let is_wanted = |service: &&Service| {
        let is_its = |name| matches_name(service, name) || aliased.contains(&service.hostname);
        wanted_host.is_none_or(is_its)
    };
    let services: Vec<_> = view.services().filter(is_wanted).collect();
    let total = services.len();
    let rows = services.into_iter().take(limit).map(|service| {
        let exposed_to = exposed_to(snapshot, &access, service);
        service_to_json(service, &view, exposed_to, wanted.map_or(0, |_| limit))
    });
    json!({ "total": total, "list": rows.collect::<Vec<_>>() })
}

/// Returns the hostnames of the services with this name, hostname or alias.
fn hosts_named(snapshot: &Snapshot, name: &str) -> Vec<Arc<str>> {
    let exposed = snapshot.exposure.hosts_with_alias(name);
    let aliases = snapshot.names.aliases_of(name).iter();
    let targets = aliases.flat_map(|alias| &alias.to);
    let hosts = exposed.chain(targets.map(|target| &*target.host)).chain([name]);
    let services = hosts.filter_map(|host| snapshot.service_by_name(host));
    services.map(|service| Arc::clone(&service.hostname)).collect()
}

/// Removes the port from a name.
fn without_port(name: &str) -> &str {
    match name.rsplit_once(':') {
        Some((host, port)) if port.parse::<u16>().is_ok() => host,
        _ => name,
    }
}

/// Compares with the name or hostname, with or without `NAMESPACE/`.
fn matches_name(service: &Service, name: &str) -> bool {
    let (namespace, name) = match name.split_once('/') {
        Some((namespace, name)) => (Some(namespace), name),
        None => (None, name),
    };
    namespace.is_none_or(|namespace| *service.namespace == *namespace)
        && (*service.name == *name || service.hostname.eq_ignore_ascii_case(name))
}

/// Returns the row of a service, with at most `endpoints` endpoints.
fn service_to_json(
    service: &Service,
    view: &View<'_>,
    exposed_to: Vec<String>,
    endpoints: usize,
) -> Value {
    let members = view.members(service);
    let is_used = |member: &&Member<'_>| member.ports.iter().any(|port| port.unused.is_none());
    let mut seen = HashSet::new();
    let found = members.iter().flat_map(|member| &member.ports);
    let found = found.filter_map(|port| port.endpoint);
    let gateways = view.gateways(service);
    let found = found.chain(gateways.iter().map(|(_, gateway)| *gateway));
    // Ports that are dialled at one address share one state, which is counted once.
    let found = found.filter(|found| seen.insert(Arc::as_ptr(&found.state)));
    let tunnels: u32 = found.map(|found| found.state.in_flight()).sum();
    let count: usize = members.iter().map(|member| member.ports.len()).sum();
    let count = count + gateways.len();
    let rows = members.iter().flat_map(|member| {
        let ports = member.ports.iter();
        ports.map(|port| {
            json!({
                "port": port.port,
                "uid": member.workload.uid,
                "address": port.endpoint.map(|found| found.address.to_string()),
                "weight": member.workload.capacity,
                "tunnels": port.endpoint.map_or(0, |found| found.state.in_flight()),
                "unused": port.unused,
            })
        })
    });
    let gateways = gateways.iter().map(|(port, gateway)| {
        json!({
            "port": port,
            "uid": gateway.uid(),
            "address": gateway.address.to_string(),
            "weight": gateway.weight,
            "tunnels": gateway.state.in_flight(),
            "unused": view.not_dialled_reason(gateway),
        })
    });
    let rows = rows.chain(gateways);
    json!({
        "service": key_of(service),
        "ports": service.ports.keys().collect::<Vec<_>>(),
        // Workloads that are used for at least one port, out of `total`.
        "used": members.iter().filter(is_used).count(),
        "total": members.len(),
        "tunnels": tunnels,
        "exposedTo": exposed_to,
        "endpoints": rows.take(endpoints).collect::<Vec<_>>(),
        // Number of further endpoints beyond the limit.
        "more": if endpoints == 0 { 0 } else { count.saturating_sub(endpoints) },
    })
}
