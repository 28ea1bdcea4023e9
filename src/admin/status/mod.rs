//! GET `/status`: state of the gateway.

mod exposure;
pub(super) mod peers;
mod problems;
pub(super) mod refusals;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use tokio::time::Instant;

use super::pages::{
    CertificateRow, CrlRow, DrainedRow, IssuerRow, ListenerRow, LocalityRow, MeshCounts,
    ServiceEndpointRow, ServiceRow, ServiceRows, SourceRow, StatusPage,
};
use super::view::{Member, View};
use super::{AdminState, pending};
use crate::config::{Config, Discovery};
use crate::snapshot::Snapshot;
use crate::snapshot::mesh::Service;
use crate::status::{Certificate, Crl, ReloadSource, ResourceUsage};
use crate::wire::DrainTarget;

use exposure::{AnonymousAccess, exposed_to};

/// Maximum number of services, or of endpoints of one service, without `?all`.
pub(super) const SERVICES_MAX: usize = 50;
/// Maximum number of holders of one resource.
const HOLDERS_SHOWN: usize = 10;

/// Query parameters: `?service=NAME` and `?all`.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Parameters {
    service: Option<String>,
    all: Option<String>,
    #[serde(flatten)]
    form: Form,
}

/// Query parameters of the form, of which there is only JSON.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Form {
    format: Option<String>,
    text: Option<String>,
}

impl Form {
    /// Returns the refusal of a request for another form than JSON, with the command that prints
    /// text.
    pub(super) fn refusal(&self, command: &str) -> Option<Response> {
        let is_json = self.format.as_deref().is_none_or(|format| format == "json");
        if is_json && self.text.is_none() {
            return None;
        }
        let text = format!("this page is JSON; `{command}` prints it as text\n");
        Some((StatusCode::BAD_REQUEST, text).into_response())
    }
}

/// Answers with the page; 404 for a service that the mesh does not have.
pub(super) async fn status(
    State(state): State<AdminState>,
    Query(parameters): Query<Parameters>,
) -> Response {
    // On a blocking thread, because a large mesh takes long.
    let made = tokio::task::spawn_blocking(move || answer(&state, &parameters));
    made.await.unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())
}

fn answer(state: &AdminState, parameters: &Parameters) -> Response {
    if let Some(refusal) = parameters.form.refusal("strait status") {
        return refusal;
    }
    let wanted = parameters.service.as_deref();
    let limit = parameters.all.as_ref().map_or(SERVICES_MAX, |_| usize::MAX);
    let page = page(state, wanted, limit);
    if let Some(wanted) = wanted.filter(|_| page.services.total == 0) {
        let text = if page.has_no_mesh() {
            "there is no mesh yet; see `strait status`\n".to_owned()
        } else {
            format!(
                "unknown service {wanted:?}; write a name, a hostname, NAMESPACE/ and either, or \
                 an alias\n"
            )
        };
        return (StatusCode::NOT_FOUND, text).into_response();
    }
    axum::Json(page).into_response()
}

/// Returns the page. Endpoints are listed if services are requested by name.
pub(super) fn page(state: &AdminState, wanted: Option<&str>, limit: usize) -> StatusPage {
    let snapshot = state.reader.snapshot();
    let config = state.config.load_full();
    let status = &state.status;
    let pending = pending(status, &state.lifecycle);
    let listeners = (state.listeners)();
    let mut issuers = (state.issuers)();
    issuers.sort_by(|one, other| {
        let count = |row: &IssuerRow| row.accepted.saturating_add(row.refused);
        let order = count(other).cmp(&count(one));
        order.then_with(|| one.spki.cmp(&other.spki))
    });
    let position = &snapshot.balancing.position;
    let locality = &position.locality;
    let mut page = StatusPage {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        at: SystemTime::now(),
        ready: pending.is_empty(),
        pending,
        problems: Vec::new(),
        cluster: config.gateway.cluster.clone(),
        network: snapshot.network().to_owned(),
        locality: LocalityRow {
            region: locality.region.to_string(),
            zone: locality.zone.to_string(),
            subzone: locality.subzone.to_string(),
            origin: position.origin.to_string(),
        },
        snapshot: snapshot.version,
        mesh: MeshCounts {
            services: snapshot.mesh.services.len(),
            workloads: snapshot.mesh.workloads.len(),
            policies: snapshot.policies.len(),
        },
        source: source(state, &config),
        evacuated: evacuated(&snapshot).collect(),
        drained: drained(&snapshot).collect(),
        certificates: status.certificates().into_iter().map(certificate_row).collect(),
        crls: status.crls.lock().clone().into_iter().map(crl_row).collect(),
        issuers,
        gateways: (state.remote_gateways)(),
        reloads: Vec::new(),
        hosts: status.hosts(),
        shares: shares(state),
        services: services(state, &snapshot, &listeners, wanted, limit),
        listeners,
    };
    let reloads = status.reloads().into_iter();
    // The status of the stream has more details about a control plane.
    let has_stream = page.source.stream.is_some();
    let reloads = reloads.filter(|(what, _)| *what != ReloadSource::Mesh || !has_stream);
    page.reloads = reloads.map(|(_, reload)| reload).collect();
    page.problems = problems::find(&page, &config, &snapshot, status);
    page
}

/// Returns the regions that an operator has evacuated, in their configuration syntax.
pub(super) fn evacuated(snapshot: &Snapshot) -> impl Iterator<Item = String> {
    let targets = snapshot.balancing.evacuated.keys();
    targets.filter(|target| target.kind() == "region").map(DrainTarget::name)
}

fn drained(snapshot: &Snapshot) -> impl Iterator<Item = DrainedRow> {
    let targets = snapshot.balancing.evacuated.iter();
    targets.map(|(target, drained)| DrainedRow {
        kind: target.kind().to_owned(),
        name: target.name(),
        since: drained.since,
        persisted: drained.is_persisted,
    })
}

/// Returns the source of the mesh, with the state of the stream to a control plane.
fn source(state: &AdminState, config: &Config) -> SourceRow {
    let (kind, place) = match &config.discovery {
        Discovery::File(file) => ("file", file.path.display().to_string()),
        Discovery::Kubernetes(api) => {
            let place = api.kubeconfig.as_ref().map(|file| file.display().to_string());
            ("kubernetes", place.unwrap_or_else(|| "the API server of the pod".to_owned()))
        }
        Discovery::Istio(xds) => ("istio", xds.plane.address.to_string()),
        Discovery::Envoy(envoy) => ("envoy", envoy.xds.plane.address.to_string()),
    };
    let status = &state.status;
    SourceRow {
        kind: kind.to_owned(),
        place,
        stream: status.discovery(),
        objects_from_disk: status.objects_cache.lock().restored.clone(),
        hold: status.held_objects.lock().clone(),
    }
}

fn certificate_row(certificate: Certificate) -> CertificateRow {
    let renewal_problem = certificate.renewal_problem(SystemTime::now());
    // For roots only, the first that expires.
    let root = certificate.roots.into_iter();
    let root = root.min_by(|one, other| one.expires.cmp(&other.expires));
    let leaf = certificate.chain.into_iter().next().or(root);
    let leaf = leaf.unwrap_or_default();
    CertificateRow {
        identity: certificate.identity,
        state: certificate.state,
        serial: leaf.serial,
        expires: leaf.expires,
        renewal_problem,
    }
}

/// Returns the usage of each resource that a source holds some of.
fn shares(state: &AdminState) -> Vec<ResourceUsage> {
    let usages = (state.pools)().into_iter().map(|pool| pool.usage(HOLDERS_SHOWN));
    usages.filter(|usage| !usage.holders.is_empty()).collect()
}

fn crl_row(crl: Crl) -> CrlRow {
    CrlRow {
        issuer: crl.issuer,
        number: crl.number,
        file: crl.file.display().to_string(),
        next_update: crl.next_update,
        stale: crl.next_update <= SystemTime::now(),
    }
}

/// Returns the requested services, up to the limit.
fn services(
    state: &AdminState,
    snapshot: &Snapshot,
    listeners: &[ListenerRow],
    wanted: Option<&str>,
    limit: usize,
) -> ServiceRows {
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
        service_row(service, &view, exposed_to, wanted.map_or(0, |_| limit))
    });
    ServiceRows { total, list: rows.collect() }
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
fn service_row(
    service: &Service,
    view: &View<'_>,
    exposed_to: Vec<String>,
    endpoints: usize,
) -> ServiceRow {
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
        ports.map(|port| ServiceEndpointRow {
            port: port.port,
            uid: member.workload.uid.to_string(),
            address: port.endpoint.map(|found| found.address),
            weight: member.workload.capacity,
            tunnels: port.endpoint.map_or(0, |found| found.state.in_flight()),
            unused: port.unused.clone(),
        })
    });
    let gateways = gateways.iter().map(|(port, gateway)| ServiceEndpointRow {
        port: *port,
        uid: gateway.uid().to_string(),
        address: Some(gateway.address),
        weight: gateway.weight,
        tunnels: gateway.state.in_flight(),
        unused: view.not_dialled_reason(gateway),
    });
    ServiceRow {
        service: service.key(),
        ports: service.ports.keys().copied().collect(),
        used: members.iter().filter(is_used).count(),
        total: members.len(),
        tunnels,
        exposed_to,
        endpoints: rows.chain(gateways).take(endpoints).collect(),
        more: if endpoints == 0 { 0 } else { count.saturating_sub(endpoints) },
    }
}
