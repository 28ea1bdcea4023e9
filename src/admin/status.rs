//! GET `/status`: state of the gateway as text or JSON.

use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::listeners::{AnonymousAccess, ListenerRow};
use super::place::LocalityRow;
use super::reach::exposed_to;
use super::view::{Member, View, key_of};
use super::{AdminState, DescriptorUsage, IssuerRow, pending, text};
use crate::config::{Config, Discovery};
use crate::snapshot::Snapshot;
use crate::snapshot::mesh::Service;
use crate::status::{self, Certificate, ReloadSource, ResourceType};

/// Maximum number of services, or of endpoints of one service, without `?all`.
const SERVICES_MAX: usize = 50;
/// Maximum number of collisions: tenants can cause any number of them.
const COLLISIONS_SHOWN: usize = 10;

/// Maximum number of conflicts of objects.
const CONFLICTS_SHOWN: usize = 20;

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
    let limit = match parameters.all {
        Some(_) => usize::MAX,
        None => SERVICES_MAX,
    };
    let page = Page::of(state, wanted, limit);
    if let (Some(wanted), 0) = (wanted, page.services.total) {
        let text = match page.has_no_mesh() {
            true => "there is no mesh yet; see `strait status`\n".to_owned(),
            false => format!(
                "unknown service {wanted:?}; write a name, a hostname, NAMESPACE/ and either, or \
                 an alias\n"
            ),
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

/// Content of the page.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Page {
    pub(super) version: &'static str,
    #[serde(serialize_with = "status::rfc3339")]
    pub(super) at: SystemTime,
    pub(super) ready: bool,
    pub(super) pending: Vec<String>,
    pub(super) problems: Vec<String>,
    pub(super) cluster: String,
    pub(super) network: String,
    pub(super) locality: LocalityRow,
    pub(super) snapshot: u64,
    /// Sizes of the mesh.
    pub(super) mesh: Counts,
    pub(super) listeners: Vec<ListenerRow>,
    pub(super) source: Source,
    /// Regions that an operator has evacuated.
    pub(super) evacuated: Vec<String>,
    pub(super) certificates: Vec<CertificateRow>,
    pub(super) crls: Vec<CrlRow>,
    /// Issuers of peers' certificates.
    pub(super) issuers: Vec<IssuerRow>,
    pub(super) reloads: Vec<ReloadRow>,
    /// Hostnames that discovery sent instead of addresses.
    pub(super) hosts: status::HostnameStatuses,
    /// Descriptors of the data path and their holders.
    pub(super) descriptors: DescriptorUsage,
    pub(super) services: Services,
}

/// Sizes of a mesh.
#[derive(Debug, Serialize)]
pub(super) struct Counts {
    pub(super) services: usize,
    pub(super) workloads: usize,
    pub(super) policies: usize,
}

/// Source of the mesh.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Source {
    pub(super) kind: &'static str,
    /// File or address.
    pub(super) place: String,
    /// State of the stream, if the source is a control plane.
    pub(super) stream: Option<status::Discovery>,
}

/// Own certificate, or the roots of a trust domain.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CertificateRow {
    pub(super) identity: String,
    pub(super) state: String,
    pub(super) serial: String,
    /// RFC 3339.
    pub(super) expires: String,
}

/// Certificate revocation list.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CrlRow {
    pub(super) issuer: String,
    pub(super) number: Option<String>,
    pub(super) file: String,
    #[serde(serialize_with = "status::rfc3339")]
    pub(super) next_update: SystemTime,
    pub(super) stale: bool,
}

/// Last reload of a source.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ReloadRow {
    pub(super) what: &'static str,
    #[serde(serialize_with = "status::rfc3339")]
    pub(super) at: SystemTime,
    /// True if the content is in use, except for the parts that `error` names.
    pub(super) in_use: bool,
    pub(super) error: Option<String>,
}

/// Requested services, up to the limit.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Services {
    pub(super) total: usize,
    pub(super) list: Vec<ServiceRow>,
}

/// Service.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ServiceRow {
    pub(super) service: String,
    pub(super) ports: Vec<u16>,
    /// Workloads that are used for at least one port, out of `total`.
    pub(super) used: usize,
    pub(super) total: usize,
    pub(super) tunnels: u32,
    pub(super) exposed_to: Vec<String>,
    /// Only if one service was requested.
    pub(super) endpoints: Vec<EndpointRow>,
    /// Number of further endpoints beyond the limit.
    pub(super) more: usize,
}

/// Workload of a service, for one port.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EndpointRow {
    pub(super) port: u16,
    pub(super) uid: String,
    /// Address that is dialled.
    pub(super) address: Option<String>,
    pub(super) weight: u32,
    pub(super) tunnels: u32,
    /// Reason why it is not used.
    pub(super) unused: Option<String>,
}

impl Page {
    /// Returns true if the source has sent nothing yet.
    pub(super) fn has_no_mesh(&self) -> bool {
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
        let pending = pending(&state.status, &state.lifecycle);
        let listeners = state.listeners.rows();
        let strangers = AnonymousAccess::new(&snapshot, &listeners);
        let services = Services::of(&view, &strangers, wanted, limit);
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
            source: Source::of(&config, state.status.discovery()),
            evacuated: evacuated(&snapshot).collect(),
            certificates: state
                .status
                .certificates()
                .into_iter()
                .map(CertificateRow::of)
                .collect(),
            crls: state.status.crls().into_iter().map(CrlRow::of).collect(),
            issuers: state.issuers.rows(),
            reloads: Vec::new(),
            hosts: state.status.hosts(),
            listeners,
            descriptors: state.holders.most(),
            services,
        };
        for (what, reload) in state.status.reloads() {
            // The status of the stream has more details about a control plane.
            if what != ReloadSource::Mesh || page.source.stream.is_none() {
                page.reloads.push(ReloadRow {
                    what: what.label(),
                    at: reload.at,
                    in_use: reload.ok,
                    error: reload.error,
                });
            }
        }
        page.problems = problems(&page);
        if config.trust.skip_validation {
            let problem = "`trust.skip_validation`: peers of any trust domain are accepted";
            page.problems.push(problem.to_owned());
        }
        page.problems.extend(roots_without_crl(&state.status));
        page.problems.extend(missing_waypoints(&snapshot));
        page.problems.extend(conflicts(state.status.conflicts()));
        page.problems.extend(collisions(&snapshot));
        page
    }
}

/// Returns the regions that an operator has evacuated, in their configuration syntax.
pub(super) fn evacuated(snapshot: &Snapshot) -> impl Iterator<Item = String> {
    let regions = snapshot.balancing.evacuated.iter();
    regions.map(ToString::to_string)
}

/// Formats the number of rejected resources of a type.
pub(super) fn format_rejected(kind: &ResourceType) -> String {
    let at_least = if kind.at_least { "at least " } else { "" };
    format!("{at_least}{}", kind.rejected)
}

/// Returns the problems, which exist even if the gateway is ready.
fn problems(page: &Page) -> Vec<String> {
    let mut problems = Vec::new();
    if let Some(stream) = &page.source.stream {
        if !stream.connected {
            let why = stream
                .why
                .as_deref()
                .unwrap_or("no stream was attempted yet");
            problems.push(format!("no stream to the control plane: {why}"));
        }
        problems.extend(stream.from_disk.clone());
        for kind in stream.types.iter().filter(|kind| kind.rejected > 0) {
            let count = format_rejected(kind);
            problems.push(format!("{count} of {} are rejected", kind.name));
        }
    }
    for reload in &page.reloads {
        if let Some(error) = &reload.error {
            let lines = error.lines();
            problems.extend(lines.map(|line| format!("{}: {line}", reload.what)));
        }
    }
    problems.extend(hostname_problems(&page.hosts));
    for crl in page.crls.iter().filter(|crl| crl.stale) {
        let (issuer, file) = (&crl.issuer, &crl.file);
        problems.push(format!(
            "the revocation list of {issuer} in {file} is stale"
        ));
    }
    for certificate in &page.certificates {
        let expires = humantime::parse_rfc3339(&certificate.expires);
        if expires.is_ok_and(|expires| expires <= page.at) {
            problems.push(format!(
                "the certificate of {} has expired",
                certificate.identity
            ));
        } else if certificate.state != "Available" {
            let CertificateRow {
                identity, state, ..
            } = certificate;
            problems.push(format!("the certificate of {identity}: {state}"));
        }
    }
    problems
}

/// Returns the problems of hostnames that have no address or an outdated one.
fn hostname_problems(hosts: &status::HostnameStatuses) -> Vec<String> {
    let mut problems = Vec::new();
    let mut failing = hosts.list.iter().filter(|host| host.error.is_some());
    if let Some(first) = failing.next() {
        let others = match failing.count() {
            0 => String::new(),
            others => format!("; so do those of {others} more"),
        };
        let why = first.error.as_deref().unwrap_or_default();
        problems.push(format!("lookups of {} fail: {why}{others}", first.name));
    }
    if hosts.left_out > 0 {
        let count = hosts.left_out;
        problems.push(format!(
            "{count} hostnames are not looked up: there are too many"
        ));
    }
    problems
}

/// Returns the trusted roots whose peers are refused because `trust.crl` has no list of the root.
fn roots_without_crl(status: &status::Status) -> impl Iterator<Item = String> {
    let roots = status.unlisted_roots().into_iter();
    roots.map(|root| format!("`trust.crl` has no list of {root}: peers below {root} are refused"))
}

/// Limits the claims of objects that have no effect because of other claims.
fn conflicts(mut all: Vec<String>) -> Vec<String> {
    let more = all.len().saturating_sub(CONFLICTS_SHOWN);
    all.truncate(CONFLICTS_SHOWN);
    if more > 0 {
        all.push(format!("{more} more objects conflict; see `strait check`"));
    }
    all
}

/// Reports services whose tunnels are all rejected, because their waypoint is missing.
fn missing_waypoints(snapshot: &Snapshot) -> Option<String> {
    let services = snapshot.mesh.services.sorted().into_iter();
    let mut lost = services.filter(|service| snapshot.lacks_waypoint(service));
    let first = lost.next()?;
    let others = match lost.count() {
        0 => String::new(),
        others => format!("; so are those of {others} more"),
    };
    Some(format!(
        "tunnels to {} are refused: its waypoint {} is unknown or has no HBONE endpoint{others}",
        key_of(first),
        first.waypoint_names()
    ))
}

/// Returns the hostnames and VIPs that several services claim, with the one that is used. Claims
/// that the configuration decides by a namespace are omitted.
fn collisions(snapshot: &Snapshot) -> Vec<String> {
    let open = snapshot.collisions().filter(|one| !one.is_intended());
    let mut collisions: Vec<_> = open.map(|one| one.to_string()).collect();
    collisions.sort_unstable();
    let more = collisions.len().saturating_sub(COLLISIONS_SHOWN);
    collisions.truncate(COLLISIONS_SHOWN);
    if more > 0 {
        let what = "hostnames and VIPs are claimed by several services";
        collisions.push(format!("{more} more {what}"));
    }
    collisions
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
    /// Returns the row in the table of certificates.
    pub(super) fn columns(&self) -> [String; 4] {
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
        strangers: &AnonymousAccess<'_>,
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
            let exposed_to = exposed_to(view.snapshot, strangers, service);
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
        let mut seen = std::collections::HashSet::new();
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
