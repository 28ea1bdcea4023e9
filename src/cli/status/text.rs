//! Status page as text.

use std::time::SystemTime;

use serde::Deserialize;

use crate::admin::pages::{DrainedRow, GatewayRow, ServiceRow, ServiceRows, StatusPage};
use crate::cli::text::{BOLD, GREEN, RED, Text, ago, or_dash, until};
use crate::labels::{count, join};
use crate::status::{Discovery, HostnameStatus, ResourceType};

/// Maximum number of rejected resources of each type; the dump has more of them.
const REJECTIONS_SHOWN: usize = 10;
/// Maximum number of hostnames, and of routes of listeners.
const ROWS_SHOWN: usize = 50;
/// Maximum number of gateways of other networks.
const GATEWAYS_SHOWN: usize = 50;
/// Maximum number of issuers.
const ISSUERS_SHOWN: usize = 20;

/// Part of a listener that is shown: keys of the configuration, the address and the state.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Listener {
    name: String,
    address: String,
    protocol: String,
    route_by: Option<String>,
    routing: Option<String>,
    routes: Vec<Route>,
    /// Service of a binding.
    service: Option<String>,
    /// Clusters of a binding.
    cluster: Vec<String>,
    /// Hostnames of a binding.
    names: Vec<String>,
    /// Clients of a binding.
    to: Vec<Client>,
    sources: Vec<String>,
    state: String,
}

#[derive(Debug, Deserialize)]
struct Route {
    sni: Vec<String>,
    to: String,
}

/// Entry of a binding's `to`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Client {
    anyone: bool,
    cluster: Option<String>,
    namespaces: Vec<String>,
    service_accounts: Vec<String>,
}

/// Formats the page. `one` is true if services were requested by name.
pub(super) fn page(page: &StatusPage<Listener>, one: bool, color: bool) -> String {
    let mut text = Text::new(color);
    summary(&mut text, page);
    if one {
        for service in &page.services.list {
            write_service(&mut text, service);
        }
        return text.finish();
    }
    if !page.problems.is_empty() {
        text.line("");
        text.raw_line(&text.paint(RED, "Problems"));
        for problem in &page.problems {
            text.line(&format!("  {problem}"));
        }
    }
    if !page.drained.is_empty() {
        text.heading("Operator", "`strait drain KIND NAME --undo` puts it back");
    }
    for DrainedRow { kind, name, since, persisted } in &page.drained {
        let end = if *persisted { "kept over restarts" } else { "until a restart" };
        let (since, ago) = (humantime::format_rfc3339_seconds(*since), ago(page.at, *since));
        let is = if kind == "listener" { "drained" } else { "evacuated" };
        text.line(&format!("  {kind} {name} is {is} since {since} ({ago}), {end}"));
    }
    listeners(&mut text, &page.listeners);
    text.heading("Discovery", &format!("{} {}", page.source.kind, page.source.place));
    if let Some(stream) = &page.source.stream {
        write_stream(&mut text, stream, page.at);
    }
    certificates(&mut text, page);
    gateways(&mut text, &page.gateways, GATEWAYS_SHOWN);
    inputs(&mut text, page);
    services(&mut text, &page.services);
    text.finish()
}

fn summary(text: &mut Text, page: &StatusPage<Listener>) {
    let state = if page.ready {
        text.paint(GREEN, "ready")
    } else {
        format!("{}, pending: {}", text.paint(RED, "not ready"), page.pending.join(", "))
    };
    text.raw_line(&format!("{} {}  {state}", text.paint(BOLD, "strait"), page.version));
    let mesh = if page.has_no_mesh() {
        "no mesh yet".to_owned()
    } else {
        let services = count(page.mesh.services, "service");
        let workloads = count(page.mesh.workloads, "workload");
        let policies = match page.mesh.policies {
            1 => "1 policy".to_owned(),
            many => format!("{many} policies"),
        };
        format!("snapshot {}: {services}, {workloads}, {policies}", page.snapshot)
    };
    let own = &page.locality;
    let locality = match &*own.origin {
        "" => "locality unknown".to_owned(),
        origin => {
            let parts = format!("{}/{}/{}", own.region, own.zone, own.subzone);
            format!("locality {} ({origin})", parts.trim_end_matches('/'))
        }
    };
    let (cluster, network) = (&page.cluster, &page.network);
    text.line(&format!("cluster {cluster}, network {network}, {locality}; {mesh}"));
}

fn listeners(text: &mut Text, listeners: &[Listener]) {
    text.heading("Listeners", "");
    let routed = |row: &Listener| match (&row.route_by, &row.routing) {
        (None, None) if row.service.is_some() => "to one service".to_owned(),
        (None, None) => "by its routes".to_owned(),
        (None, Some(routing)) => routing.clone(),
        (Some(route_by), _) => format!("by {route_by}"),
    };
    let sources = |row: &Listener| match &*row.sources {
        [] => "every address".to_owned(),
        sources => sources.join(", "),
    };
    let state = |row: &Listener| match &*row.state {
        "waiting" => "waits for a certificate".to_owned(),
        "failed" => "failed, see Problems".to_owned(),
        state => state.to_owned(),
    };
    text.table(
        listeners,
        &[
            ("NAME", &|row| row.name.clone()),
            ("ADDRESS", &|row| row.address.clone()),
            ("PROTOCOL", &|row| row.protocol.clone()),
            ("ROUTED", &routed),
            ("SOURCES", &sources),
            ("STATE", &state),
        ],
    );
    let in_use = listeners.iter().filter(|row| ["open", "waiting"].contains(&&*row.state));
    let reachable: Vec<_> = in_use.flat_map(reachable_services).collect();
    text.table_up_to(
        ROWS_SHOWN,
        &reachable,
        &[
            ("THROUGH", &|[through, ..]| through.clone()),
            ("ASKED FOR BY", &|[_, requested, ..]| requested.clone()),
            ("REACHED", &|[.., reached, _]| reached.clone()),
            ("BY", &|[.., by]| by.clone()),
        ],
    );
}

/// Returns the rows of the services that are reachable through a listener: its name, what is
/// requested, what is reached, and by whom.
fn reachable_services(listener: &Listener) -> Vec<[String; 4]> {
    let from = match &*listener.sources {
        [] => String::new(),
        sources => format!(" from {}", sources.join(", ")),
    };
    let row = |requested: &str, reached: &str, by: &str| {
        [&listener.name, requested, reached, &format!("{by}{from}")].map(ToOwned::to_owned)
    };
    if listener.route_by.is_some() {
        return vec![row("any authority", "services by their exposure", "the trust set")];
    }
    if listener.routing.is_some() {
        return vec![row("outbound_.PORT_._.HOST", "services exposed to anyone", "anyone")];
    }
    if let Some(service) = &listener.service {
        let reached = format!("{service} of {}", listener.cluster.join(", "));
        let requested = match &*listener.names {
            [] => "any connection".to_owned(),
            names => format!("any connection, as {}", names.join(", ")),
        };
        let clients = match &*listener.to {
            [] => "anyone".to_owned(),
            clients => join(clients.iter().map(audience), "; "),
        };
        return vec![row(&requested, &reached, &clients)];
    }
    listener.routes.iter().map(|route| row(&route.sni.join(", "), &route.to, "anyone")).collect()
}

/// Formats an entry of a binding's `to`.
fn audience(to: &Client) -> String {
    if to.anyone {
        return "the trust set".to_owned();
    }
    let cluster = to.cluster.as_ref().map(|cluster| format!("cluster {cluster}"));
    let named = [("namespace", &to.namespaces), ("account", &to.service_accounts)];
    let named = named.into_iter().filter(|(_, values)| !values.is_empty());
    let named = named.map(|(name, values)| format!(", {name} {}", values.join(" or ")));
    cluster.unwrap_or_else(|| "any cluster".to_owned()) + &named.collect::<String>()
}

fn write_stream(text: &mut Text, stream: &Discovery, now: SystemTime) {
    let since = match stream.since {
        None => String::new(),
        Some(since) => {
            format!(" since {} ({})", humantime::format_rfc3339_seconds(since), ago(now, since))
        }
    };
    let not = if stream.connected { "" } else { "not " };
    text.line(&format!("  {not}connected{since}"));
    if let Some(why) = stream.why.as_ref().filter(|_| !stream.connected) {
        text.line(&format!("  {why}"));
        let next = stream.next_try.and_then(|next| next.duration_since(now).ok());
        let next = next.map_or_else(|| "now".to_owned(), |wait| format!("in {}s", wait.as_secs()));
        text.line(&format!("  tried {}, next {next}", count(stream.retries, "time")));
    }
    if let Some(saved) = stream.saved {
        let ago = ago(now, saved);
        let saved = humantime::format_rfc3339_seconds(saved);
        text.line(&format!("  state on disk of {saved} ({ago})"));
    }
    let synced = |kind: &ResourceType| if kind.synced { "synced" } else { "pending" }.to_owned();
    let version = |kind: &ResourceType| match &*kind.version {
        "" => format!("({})", count(kind.responses, "response")),
        version => version.to_owned(),
    };
    text.table(
        &stream.types,
        &[
            ("TYPE", &|kind| kind.name.to_string()),
            ("STATE", &synced),
            ("HELD", &|kind| kind.held.to_string()),
            ("REJECTED", &ResourceType::rejected_count),
            ("NACKS", &|kind| kind.nacks.to_string()),
            ("VERSION", &version),
            ("LAST ACCEPTED", &|kind| ago_or_never(now, kind.accepted)),
        ],
    );
    for kind in &stream.types {
        rejections(text, kind, now);
    }
}

fn rejections(text: &mut Text, kind: &ResourceType, now: SystemTime) {
    let (of, see) = (&kind.name, ", see `strait dump`");
    for rejection in kind.rejections.iter().take(REJECTIONS_SHOWN) {
        let name = if rejection.name.is_empty() { "(no name)" } else { &rejection.name };
        let version = match &*rejection.version {
            "" => String::new(),
            version => format!("version {version}, "),
        };
        let (reason, since) = (&rejection.reason, ago(now, rejection.since));
        text.line(&format!("  rejected of {of}: {name}: {reason} ({version}{since})"));
    }
    text.more(kind.rejected.saturating_sub(REJECTIONS_SHOWN), see);
    for unused in kind.unused_first.iter().take(REJECTIONS_SHOWN) {
        text.line(&format!("  not used of {of}: {}: {}", unused.name, unused.why));
    }
    text.more(kind.unused.saturating_sub(REJECTIONS_SHOWN), see);
}

/// Writes our certificates, the revocation lists, and the issuers of peers' certificates.
fn certificates(text: &mut Text, page: &StatusPage<Listener>) {
    text.heading("Certificates", "");
    let own = page.certificates.iter().map(|row| {
        let expires = match humantime::parse_rfc3339(&row.expires) {
            Ok(end) => format!("{} ({})", until(page.at, end), row.expires),
            Err(_) => row.expires.clone(),
        };
        [row.identity.clone(), row.state.clone(), row.serial.clone(), expires]
    });
    let crls = page.crls.iter().map(|row| {
        let name = format!("CRL of {} ({})", row.issuer, row.file);
        let state = if row.stale { "Stale" } else { "Available" };
        let number = row.number.clone().unwrap_or_default();
        let next = humantime::format_rfc3339_seconds(row.next_update);
        [name, state.to_owned(), number, next.to_string()]
    });
    text.table(
        &own.chain(crls).collect::<Vec<_>>(),
        &[
            ("IDENTITY", &|[identity, ..]| identity.clone()),
            ("STATE", &|[_, state, ..]| state.clone()),
            ("SERIAL", &|[_, _, serial, _]| serial.clone()),
            ("EXPIRES", &|[.., expires]| expires.clone()),
        ],
    );
    if page.issuers.is_empty() {
        return;
    }
    text.heading("Issuers of peers", "");
    text.table_up_to(
        ISSUERS_SHOWN,
        &page.issuers,
        &[
            ("SPKI SHA-256", &|row| row.spki.clone()),
            ("SUBJECT", &|row| row.subject.clone()),
            ("CLUSTER", &|row| or_dash(row.cluster.as_ref())),
            ("ACCEPTED", &|row| row.accepted.to_string()),
            ("REFUSED", &|row| row.refused.to_string()),
        ],
    );
}

/// Writes at most `max` gateways of other networks.
pub(super) fn gateways(text: &mut Text, gateways: &[GatewayRow], max: usize) {
    if gateways.is_empty() {
        return;
    }
    text.heading("Gateways of other networks", "");
    let expires = |row: &GatewayRow| or_dash(row.expires.map(humantime::format_rfc3339_seconds));
    text.table_up_to(
        max,
        gateways,
        &[
            ("ADDRESS", &|row| row.address.to_string()),
            ("NETWORK", &|row| row.network.clone()),
            ("STATE", &|row| row.state.clone()),
            ("RTT", &|row| or_dash(row.rtt.as_ref())),
            ("SHARE", &|row| row.share.clone()),
            ("TUNNELS", &|row| row.tunnels.to_string()),
            ("EJECTIONS", &|row| row.ejections.to_string()),
            ("IDENTITY", &|row| or_dash(row.identity.as_ref())),
            ("EXPIRES", &expires),
            ("LAST ERROR", &|row| row.error.clone()),
        ],
    );
}

/// Writes the reloads, the hostnames with failing ones first, and the shares of resources.
fn inputs(text: &mut Text, page: &StatusPage<Listener>) {
    let now = page.at;
    if !page.reloads.is_empty() {
        text.heading("Changes read", "");
        text.table(
            &page.reloads,
            &[
                ("SOURCE", &|row| row.what.clone()),
                ("READ", &|row| ago(now, row.at)),
                ("RESULT", &|row| {
                    let result = match (&row.error, row.in_use) {
                        (None, _) => "in use",
                        (_, true) => "in use except for a part, see Problems",
                        (_, false) => "rejected, see Problems; the previous state is in use",
                    };
                    result.to_owned()
                }),
            ],
        );
    }
    let mut hosts: Vec<&HostnameStatus> = page.hosts.list.iter().collect();
    if !hosts.is_empty() {
        text.heading("Hostnames", "");
        hosts.sort_by_key(|host| host.error.is_none());
        text.table_up_to(
            ROWS_SHOWN,
            &hosts,
            &[
                ("NAME", &|host| host.name.clone()),
                ("ANSWERED", &|host| ago_or_never(now, host.answered)),
                ("LAST ERROR", &|host| or_dash(host.error.as_ref())),
                ("ADDRESSES", &|host| {
                    let more = if host.more == 0 { "" } else { " and more" };
                    join(&host.addresses, ",") + more
                }),
            ],
        );
    }
    shares(text, page);
}

/// Writes the largest holders of each resource.
fn shares(text: &mut Text, page: &StatusPage<Listener>) {
    let holders = page.shares.iter();
    let holders = holders.flat_map(|usage| usage.holders.iter().map(move |one| (usage, one)));
    let holders: Vec<_> = holders.collect();
    if holders.is_empty() {
        return;
    }
    text.heading("Shares", "");
    text.table_up_to(
        ROWS_SHOWN,
        &holders,
        &[
            ("RESOURCE", &|(usage, _)| usage.resource.clone()),
            ("OF", &|(usage, _)| or_dash(usage.of.as_ref())),
            ("USED", &|(usage, _)| match usage.max {
                None => usage.used.to_string(),
                Some(max) => format!("{} of {max}", usage.used),
            }),
            ("HOLDER", &|(_, holder)| holder.source.clone()),
            ("HELD", &|(_, holder)| holder.held.to_string()),
        ],
    );
}

fn services(text: &mut Text, services: &ServiceRows) {
    text.heading("Services", "");
    text.table(
        &services.list,
        &[
            ("SERVICE", &|row| row.service.clone()),
            ("PORTS", &|row| join(&row.ports, ",")),
            ("ENDPOINTS USED", &|row| format!("{} of {}", row.used, row.total)),
            ("TUNNELS", &|row| row.tunnels.to_string()),
            ("EXPOSED TO", &|row| row.exposed_to.join("; ")),
        ],
    );
    let (shown, total) = (services.list.len(), services.total);
    if total != shown {
        let see = "see one by `strait status SERVICE`, all by --all";
        text.line(&format!("  {shown} of {total} services; {see}"));
    }
}

fn write_service(text: &mut Text, service: &ServiceRow) {
    text.heading("Service", &service.service);
    for peers in &service.exposed_to {
        text.line(&format!("  exposed to {peers}"));
    }
    text.line(&format!("  {} of {} used", service.used, count(service.total, "workload")));
    text.table(
        &service.endpoints,
        &[
            ("PORT", &|row| row.port.to_string()),
            ("WORKLOAD", &|row| row.uid.clone()),
            ("ADDRESS", &|row| or_dash(row.address)),
            ("WEIGHT", &|row| row.weight.to_string()),
            ("TUNNELS", &|row| row.tunnels.to_string()),
            ("STATE", &|row| match &row.unused {
                None => "used".to_owned(),
                Some(why) => format!("not used: {why}"),
            }),
        ],
    );
    text.more(service.more, "; see all by --all");
}

fn ago_or_never(now: SystemTime, at: Option<SystemTime>) -> String {
    at.map_or_else(|| "never".to_owned(), |at| ago(now, at))
}
