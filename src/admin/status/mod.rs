//! GET `/status`: state of the gateway as text or JSON.

mod exposure;
mod listeners;
mod problems;
#[cfg(test)]
mod tests;
mod text;

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::view::{Member, View, key_of};
use super::{AdminState, pending};
use crate::config::{Config, Discovery};
use crate::snapshot::mesh::Service;
use crate::snapshot::traffic::Position;
use crate::snapshot::{Locality, Snapshot};
use crate::status::{self, Certificate, ReloadSource};

use exposure::{AnonymousAccess, exposed_to};

pub use listeners::{ListenerRow, ListenerState};

/// Maximum number of services, or of endpoints of one service, without `?all`.
const SERVICES_MAX: usize = 50;
/// Maximum number of holders of descriptors on the page.
pub const HOLDERS_SHOWN: usize = 10;

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
    made.await
        .unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())
}

fn answer(state: &AdminState, parameters: &Parameters) -> Response {
    let wanted = parameters.service.as_deref();
    let limit = parameters.all.as_ref().map_or(SERVICES_MAX, |_| usize::MAX);
    let page = Page::of(state, wanted, limit);
    if let (Some(wanted), 0) = (wanted, page.services.total) {
        let text = if page.has_no_mesh() {
            "there is no mesh yet; see `strait status`\n".to_owned()
        } else {
            format!(
                "the mesh has no service {wanted:?}; write its name, its hostname, NAMESPACE/ and \
                 either, or another name of it\n"
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
            let text = format!("format is {other:?}; write `text` or `json`\n");
            (StatusCode::BAD_REQUEST, text).into_response()
        }
    }
}

/// Content of the page.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Page {
    version: &'static str,
    #[serde(serialize_with = "status::rfc3339")]
    at: SystemTime,
    ready: bool,
    pending: Vec<String>,
    problems: Vec<String>,
    cluster: String,
    network: String,
    locality: LocalityRow,
    snapshot: u64,
    /// Sizes of the mesh.
    mesh: Counts,
    listeners: Vec<ListenerRow>,
    source: Source,
    /// Regions that an operator has evacuated.
    evacuated: Vec<String>,
    certificates: Vec<CertificateRow>,
    crls: Vec<CrlRow>,
    /// Issuers of peers' certificates.
    issuers: Vec<IssuerRow>,
    reloads: Vec<ReloadRow>,
    /// Hostnames that discovery sent instead of addresses.
    hosts: status::HostnameStatuses,
    /// Descriptors of the data path and their holders.
    descriptors: DescriptorUsage,
    services: Services,
}

/// Locality of the gateway.
#[derive(Debug, Serialize)]
struct LocalityRow {
    #[serde(flatten)]
    locality: Locality,
    /// Key, variable, label or record that contains it; empty if unknown.
    origin: Arc<str>,
}

impl LocalityRow {
    fn of(position: &Position) -> Self {
        Self {
            locality: position.locality.clone(),
            origin: Arc::clone(&position.origin),
        }
    }
}

impl fmt::Display for LocalityRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.origin.is_empty() {
            return f.write_str("locality unknown");
        }
        let Locality {
            region,
            zone,
            subzone,
        } = &self.locality;
        let place = [&**region, zone, subzone].join("/");
        write!(
            f,
            "locality {} ({})",
            place.trim_end_matches('/'),
            self.origin
        )
    }
}

/// Issuer of peers' certificates.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct IssuerRow {
    /// SHA-256 of the SubjectPublicKeyInfo.
    pub spki: String,
    /// Subject.
    pub subject: String,
    /// Cluster by `trust.clusters`; none without that key, or if the issuer is refused.
    pub cluster: Option<String>,
    /// Number of connections accepted since the start.
    pub accepted: u64,
    /// Number of handshakes refused because of the issuer.
    pub refused: u64,
}

/// Usage of the descriptor pool.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DescriptorUsage {
    /// Number of descriptors in use.
    pub used: usize,
    /// Maximum number of descriptors.
    pub max: usize,
    /// Clusters, identities and source addresses with the most descriptors, and their numbers.
    pub holders: Vec<(String, usize)>,
}

/// Sizes of a mesh.
#[derive(Debug, Serialize)]
struct Counts {
    services: usize,
    workloads: usize,
    policies: usize,
}

/// Source of the mesh.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Source {
    kind: &'static str,
    /// File or address.
    place: String,
    /// State of the stream, if the source is a control plane.
    stream: Option<status::Discovery>,
}

/// Own certificate, or the roots of a trust domain.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct CertificateRow {
    identity: String,
    state: String,
    serial: String,
    /// RFC 3339.
    expires: String,
}

/// Certificate revocation list.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct CrlRow {
    issuer: String,
    number: Option<String>,
    file: String,
    #[serde(serialize_with = "status::rfc3339")]
    next_update: SystemTime,
    stale: bool,
}

/// Last reload of a source.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ReloadRow {
    what: &'static str,
    #[serde(serialize_with = "status::rfc3339")]
    at: SystemTime,
    /// True if the content is in use, except for the parts that `error` names.
    in_use: bool,
    error: Option<String>,
}

/// Requested services, up to the limit.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Services {
    total: usize,
    list: Vec<ServiceRow>,
}

/// Service.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ServiceRow {
    service: String,
    ports: Vec<u16>,
    /// Workloads that are used for at least one port, out of `total`.
    used: usize,
    total: usize,
    tunnels: u32,
    exposed_to: Vec<String>,
    /// Only if one service was requested.
    endpoints: Vec<EndpointRow>,
    /// Number of further endpoints beyond the limit.
    more: usize,
}

/// Workload of a service, for one port.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct EndpointRow {
    port: u16,
    uid: String,
    /// Address that is dialled.
    address: Option<String>,
    weight: u32,
    tunnels: u32,
    /// Reason why it is not used.
    unused: Option<String>,
}

impl Page {
    /// Returns true if the source has sent nothing yet.
    fn has_no_mesh(&self) -> bool {
        let waits = self
            .pending
            .iter()
            .any(|what| what.starts_with("discovery"));
        waits && self.mesh.services == 0 && self.mesh.workloads == 0
    }

    fn of(state: &AdminState, wanted: Option<&str>, limit: usize) -> Self {
        let snapshot = state.reader.snapshot();
        let view = View::new(&snapshot, &state.deny_list, Instant::now());
        let config = state.config.load_full();
        let status = &state.status;
        let pending = pending(status, &state.lifecycle);
        let listeners = (state.listeners)();
        let access = AnonymousAccess::new(&snapshot, &listeners);
        let services = Services::of(&view, &access, wanted, limit);
        let source = Source::of(&config, status.discovery());
        let reloads = status.reloads().into_iter();
        // The status of the stream has more details about a control plane.
        let reloads =
            reloads.filter(|(what, _)| *what != ReloadSource::Mesh || source.stream.is_none());
        let reloads = reloads.map(|(what, reload)| ReloadRow {
            what: what.label(),
            at: reload.at,
            in_use: reload.ok,
            error: reload.error,
        });
        let certificates = status.certificates().into_iter();
        let mut page = Self {
            version: env!("CARGO_PKG_VERSION"),
            at: SystemTime::now(),
            ready: pending.is_empty(),
            pending,
            problems: Vec::new(),
            cluster: config.gateway.cluster.clone(),
            network: snapshot.network().to_owned(),
            locality: LocalityRow::of(&snapshot.balancing.position),
            snapshot: snapshot.version,
            mesh: Counts {
                services: snapshot.mesh.services.len(),
                workloads: snapshot.mesh.workloads.len(),
                policies: snapshot.policies.len(),
            },
            evacuated: evacuated(&snapshot).collect(),
            certificates: certificates.map(CertificateRow::of).collect(),
            crls: status.crls().into_iter().map(CrlRow::of).collect(),
            issuers: issuers(state),
            reloads: reloads.collect(),
            source,
            hosts: status.hosts(),
            listeners,
            descriptors: (state.holders)(),
            services,
        };
        page.problems = problems::list(&page, &config, &snapshot, status);
        page
    }
}

/// Returns the issuers of peers' certificates, those with the most connections first.
fn issuers(state: &AdminState) -> Vec<IssuerRow> {
    let mut rows = (state.issuers)();
    rows.sort_by(|one, other| {
        let count = |row: &IssuerRow| row.accepted.saturating_add(row.refused);
        let order = count(other).cmp(&count(one));
        order.then_with(|| one.spki.cmp(&other.spki))
    });
    rows
}

/// Returns the regions that an operator has evacuated, in their configuration syntax.
pub(super) fn evacuated(snapshot: &Snapshot) -> impl Iterator<Item = String> {
    let regions = snapshot.balancing.evacuated.iter();
    regions.map(ToString::to_string)
}

impl Source {
    fn of(config: &Config, stream: Option<status::Discovery>) -> Self {
        let (kind, place) = match &config.discovery {
            Discovery::File { path } => ("file", path.display().to_string()),
            Discovery::Istio { plane, .. } => ("istio", plane.address.to_string()),
            Discovery::Envoy { plane, .. } => ("envoy", plane.address.to_string()),
        };
        Self {
            kind,
            place,
            stream,
        }
    }
}

impl CertificateRow {
    fn of(certificate: Certificate) -> Self {
        // For roots only, the first that expires.
        let root = certificate.roots.into_iter();
        let root = root.min_by(|one, other| one.expires.cmp(&other.expires));
        let leaf = certificate.chain.into_iter().next().or(root);
        let leaf = leaf.unwrap_or_default();
        Self {
            identity: certificate.identity,
            state: certificate.state,
            serial: leaf.serial,
            expires: leaf.expires,
        }
    }
}

impl CrlRow {
    /// Returns the cells in the table of certificates.
    fn cells(&self) -> [String; 4] {
        let state = if self.stale { "Stale" } else { "Available" };
        [
            format!("CRL of {} ({})", self.issuer, self.file),
            state.to_owned(),
            self.number.clone().unwrap_or_default(),
            humantime::format_rfc3339_seconds(self.next_update).to_string(),
        ]
    }

    fn of(crl: status::Crl) -> Self {
        Self {
            issuer: crl.issuer,
            number: crl.number,
            file: crl.file.display().to_string(),
            stale: crl.next_update <= SystemTime::now(),
            next_update: crl.next_update,
        }
    }
}

impl Services {
    fn of(
        view: &View<'_>,
        access: &AnonymousAccess<'_>,
        wanted: Option<&str>,
        limit: usize,
    ) -> Self {
        let wanted_host = wanted.map(without_port);
        let aliased: Vec<_> = wanted_host.map_or_else(Vec::new, |name| {
            hosts_named(view.snapshot, &name.to_ascii_lowercase())
        });
        let is_wanted = |service: &&Service| {
            let is_its = |name| matches_name(service, name) || aliased.contains(&service.hostname);
            wanted_host.is_none_or(is_its)
        };
        let mut services: Vec<_> = view.services().filter(is_wanted).collect();
        let total = services.len();
        services.truncate(limit);
        let rows = services.into_iter();
        let rows = rows.map(|service| {
            let exposed_to = exposed_to(view.snapshot, access, service);
            ServiceRow::of(service, view, exposed_to, wanted.map(|_| limit))
        });
        Self {
            total,
            list: rows.collect(),
        }
    }
}

/// Returns the hostnames of the services with this name, hostname or alias.
fn hosts_named(snapshot: &Snapshot, name: &str) -> Vec<Arc<str>> {
    let exposed = snapshot.exposure.hosts_with_alias(name);
    let aliases = snapshot.names.aliases_of(name).iter();
    let targets = aliases.flat_map(|alias| alias.targets());
    let hosts = exposed
        .chain(targets.map(|(host, _)| &**host))
        .chain([name]);
    let services = hosts.filter_map(|host| snapshot.service_by_name(host));
    services
        .map(|service| Arc::clone(&service.hostname))
        .collect()
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

impl ServiceRow {
    /// Creates the row, with at most `endpoints` endpoints.
    fn of(
        service: &Service,
        view: &View<'_>,
        exposed_to: Vec<String>,
        endpoints: Option<usize>,
    ) -> Self {
        let members = view.members(service);
        let is_used = |member: &&Member<'_>| member.ports.iter().any(|port| port.unused.is_none());
        let used = members.iter().filter(is_used).count();
        let total = members.len();
        let mut seen = HashSet::new();
        let found = members.iter().flat_map(|member| &member.ports);
        let found = found.filter_map(|port| port.endpoint);
        // Ports that are dialled at one address share one state, which is counted once.
        let found = found.filter(|found| seen.insert((found.uid(), found.address)));
        let tunnels = found.map(|found| found.state.in_flight()).sum();
        let rows: usize = members.iter().map(|member| member.ports.len()).sum();
        let more = endpoints.map_or(0, |limit| rows.saturating_sub(limit));
        let rows = members.into_iter().flat_map(EndpointRow::for_member);
        Self {
            service: key_of(service),
            ports: service.ports.keys().copied().collect(),
            used,
            total,
            tunnels,
            exposed_to,
            endpoints: rows.take(endpoints.unwrap_or(0)).collect(),
            more,
        }
    }
}

impl EndpointRow {
    fn for_member(member: Member<'_>) -> impl Iterator<Item = Self> {
        let (uid, weight) = (&member.workload.uid, member.workload.capacity);
        member.ports.into_iter().map(move |port| Self {
            port: port.port,
            uid: uid.to_string(),
            address: port.endpoint.map(|found| found.address.to_string()),
            weight,
            tunnels: port.endpoint.map_or(0, |found| found.state.in_flight()),
            unused: port.unused,
        })
    }
}
