//! Status page as text.

use std::time::{Duration, SystemTime};

use super::listeners::sources;
use super::{CertificateRow, CrlRow, ListenerRow, Page, ReloadRow, ServiceRow, Services};
use crate::admin::text::{BOLD, GREEN, RED, Text, join, or_dash};
use crate::status::{Discovery, HostnameStatus, ResourceType, Unused};

/// Maximum number of rejected resources of each type; the dump has more of them.
const REJECTIONS_SHOWN: usize = 10;
/// Maximum number of hostnames, and of routes of listeners.
const ROWS_SHOWN: usize = 50;
/// Maximum number of issuers.
const ISSUERS_SHOWN: usize = 20;
/// Limit of a table whose rows are limited already.
const ALL: usize = usize::MAX;

/// Formats the page. `one` is true if services were requested by name.
pub(super) fn page(page: &Page, one: bool, color: bool) -> String {
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
    if !page.evacuated.is_empty() {
        text.heading("Operator", "until a restart");
    }
    for region in &page.evacuated {
        let undo = format!("`strait drain region {region} --undo` puts it back");
        text.line(&format!("  {region} is evacuated; {undo}"));
    }
    listeners(&mut text, &page.listeners);
    let source = &page.source;
    text.heading("Discovery", &format!("{} {}", source.kind, source.place));
    if let Some(stream) = &source.stream {
        write_stream(&mut text, stream, page.at);
    }
    certificates(&mut text, page);
    inputs(&mut text, page);
    let usage = &page.descriptors;
    if !usage.holders.is_empty() {
        let used = format!("{} of {} used", usage.used, usage.max);
        text.heading("Descriptors", &used);
        text.table(
            ALL,
            &usage.holders,
            &[
                ("HOLDER", &|(name, _)| name.clone()),
                ("DESCRIPTORS", &|(_, held)| held.to_string()),
            ],
        );
    }
    services(&mut text, &page.services);
    text.finish()
}

fn summary(text: &mut Text, page: &Page) {
    let state = if page.ready {
        text.paint(GREEN, "ready")
    } else {
        let pending = page.pending.join(", ");
        format!("{}, pending: {pending}", text.paint(RED, "not ready"))
    };
    let strait = text.paint(BOLD, "strait");
    text.raw_line(&format!("{strait} {}  {state}", page.version));
    let (snapshot, counts) = (page.snapshot, &page.mesh);
    let mesh = if page.has_no_mesh() {
        "no mesh yet".to_owned()
    } else {
        let services = count(counts.services, "service", "services");
        let workloads = count(counts.workloads, "workload", "workloads");
        let policies = count(counts.policies, "policy", "policies");
        format!("snapshot {snapshot}: {services}, {workloads}, {policies}")
    };
    let (cluster, network, locality) = (&page.cluster, &page.network, &page.locality);
    text.line(&format!(
        "cluster {cluster}, network {network}, {locality}; {mesh}"
    ));
}

fn listeners(text: &mut Text, listeners: &[ListenerRow]) {
    text.heading("Listeners", "");
    text.table(
        ALL,
        listeners,
        &[
            ("NAME", &|row| row.listener.name.clone()),
            ("ADDRESS", &|row| row.address.to_string()),
            ("PROTOCOL", &|row| row.protocol().to_owned()),
            ("ROUTED", &ListenerRow::routing),
            ("SOURCES", &|row| {
                sources(&row.listener).unwrap_or_else(|| "every address".to_owned())
            }),
            ("STATE", &|row| row.state.to_string()),
        ],
    );
    let opens = listeners.iter().flat_map(ListenerRow::reachable_services);
    let opens: Vec<_> = opens.collect();
    text.table(
        ROWS_SHOWN,
        &opens,
        &[
            ("THROUGH", &|row| row.listener.to_owned()),
            ("ASKED FOR BY", &|row| row.asked.clone()),
            ("REACHED", &|row| row.reached.clone()),
            ("BY", &|row| row.peers.clone()),
        ],
    );
}

fn write_stream(text: &mut Text, stream: &Discovery, now: SystemTime) {
    let since = stream.since.map_or_else(String::new, |since| {
        format!(" since {} ({})", time(since), ago(now, since))
    });
    let not = if stream.connected { "" } else { "not " };
    text.line(&format!("  {not}connected{since}"));
    if let Some(why) = stream.why.as_deref().filter(|_| !stream.connected) {
        text.line(&format!("  {why}"));
        let next = stream.next_try;
        let next = next.and_then(|next| next.duration_since(now).ok());
        let next = next.map_or_else(
            || "now".to_owned(),
            |wait| format!("in {}s", wait.as_millis().div_ceil(1000)),
        );
        text.line(&format!("  tried {} times, next {next}", stream.retries));
    }
    if let Some(saved) = stream.saved {
        let (saved, ago) = (time(saved), ago(now, saved));
        text.line(&format!("  state on disk of {saved} ({ago})"));
    }
    text.table(
        ALL,
        &stream.types,
        &[
            ("TYPE", &|kind| kind.name.to_owned()),
            ("STATE", &|kind| {
                if kind.synced { "synced" } else { "pending" }.to_owned()
            }),
            ("HELD", &|kind| kind.held.to_string()),
            ("REJECTED", &super::problems::format_rejected),
            ("NACKS", &|kind| kind.nacks.to_string()),
            ("VERSION", &|kind| match kind.version.as_str() {
                "" => format!("({} responses)", kind.responses),
                version => version.to_owned(),
            }),
            ("LAST ACCEPTED", &|kind| ago_or_never(now, kind.accepted)),
        ],
    );
    for kind in &stream.types {
        rejections(text, kind, now);
    }
}

fn rejections(text: &mut Text, kind: &ResourceType, now: SystemTime) {
    let see = ", see `strait dump`";
    let name_of_kind = kind.name;
    for rejection in kind.rejections.iter().take(REJECTIONS_SHOWN) {
        let name = match rejection.name.as_str() {
            "" => "(no name)",
            name => name,
        };
        let (reason, since) = (&rejection.reason, ago(now, rejection.since));
        let version = match rejection.version.as_str() {
            "" => String::new(),
            version => format!("version {version}, "),
        };
        text.line(&format!(
            "  rejected of {name_of_kind}: {name}: {reason} ({version}{since})"
        ));
    }
    text.more(kind.rejected.saturating_sub(REJECTIONS_SHOWN), see);
    for Unused { name, why } in kind.unused_first.iter().take(REJECTIONS_SHOWN) {
        text.line(&format!("  not used of {name_of_kind}: {name}: {why}"));
    }
    text.more(kind.unused.saturating_sub(REJECTIONS_SHOWN), see);
}

/// Writes our certificates, the revocation lists, and the issuers of peers' certificates.
fn certificates(text: &mut Text, page: &Page) {
    text.heading("Certificates", "");
    let left = |row: &CertificateRow| {
        let left = humantime::parse_rfc3339(&row.expires).map(|at| until(page.at, at));
        left.map_or_else(
            |_| row.expires.clone(),
            |left| format!("{left} ({})", row.expires),
        )
    };
    let own = page.certificates.iter().map(|row| {
        let (identity, state) = (row.identity.clone(), row.state.clone());
        [identity, state, row.serial.clone(), left(row)]
    });
    let rows: Vec<_> = own.chain(page.crls.iter().map(CrlRow::cells)).collect();
    text.table(
        ALL,
        &rows,
        &[
            ("IDENTITY", &|row| row[0].clone()),
            ("STATE", &|row| row[1].clone()),
            ("SERIAL", &|row| row[2].clone()),
            ("EXPIRES", &|row| row[3].clone()),
        ],
    );
    if page.issuers.is_empty() {
        return;
    }
    text.heading("Issuers of peers", "");
    text.table(
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

/// Writes the reloads, and the hostnames with failing ones first.
fn inputs(text: &mut Text, page: &Page) {
    let now = page.at;
    if !page.reloads.is_empty() {
        text.heading("Changes read", "");
        let result = |row: &ReloadRow| {
            let result = match (&row.error, row.in_use) {
                (None, _) => "in use",
                (Some(_), true) => "in use but for a part, see Problems",
                (Some(_), false) => "refused, see Problems; what was read before is in use",
            };
            result.to_owned()
        };
        text.table(
            ALL,
            &page.reloads,
            &[
                ("SOURCE", &|row| row.what.to_owned()),
                ("READ", &|row| ago(now, row.at)),
                ("RESULT", &result),
            ],
        );
    }
    if page.hosts.list.is_empty() {
        return;
    }
    text.heading("Hostnames", "");
    let mut hosts: Vec<&HostnameStatus> = page.hosts.list.iter().collect();
    hosts.sort_by_key(|host| host.error.is_none());
    text.table(
        ROWS_SHOWN,
        &hosts,
        &[
            ("NAME", &|host| host.name.clone()),
            ("ANSWERED", &|host| ago_or_never(now, host.answered)),
            ("LAST ERROR", &|host| or_dash(host.error.as_ref())),
            ("ADDRESSES", &|host| {
                let more = if host.more > 0 { " and more" } else { "" };
                join(&host.addresses, ",") + more
            }),
        ],
    );
}

fn services(text: &mut Text, services: &Services) {
    text.heading("Services", "");
    text.table(
        ALL,
        &services.list,
        &[
            ("SERVICE", &|row| row.service.clone()),
            ("PORTS", &|row| join(&row.ports, ",")),
            ("ENDPOINTS USED", &|row| {
                format!("{} of {}", row.used, row.total)
            }),
            ("TUNNELS", &|row| row.tunnels.to_string()),
            ("EXPOSED TO", &|row| row.exposed_to.join("; ")),
        ],
    );
    let (shown, total) = (services.list.len(), services.total);
    if shown < total {
        let see = "see one by `strait status SERVICE`, all by --all";
        text.line(&format!("  {shown} of {total} services; {see}"));
    }
}

/// Writes one service with its endpoints.
fn write_service(text: &mut Text, service: &ServiceRow) {
    text.heading("Service", &service.service);
    for who in &service.exposed_to {
        text.line(&format!("  exposed to {who}"));
    }
    let total = count(service.total, "workload", "workloads");
    text.line(&format!("  {} of {total} used", service.used));
    text.table(
        ALL,
        &service.endpoints,
        &[
            ("PORT", &|row| row.port.to_string()),
            ("WORKLOAD", &|row| row.uid.clone()),
            ("ADDRESS", &|row| or_dash(row.address.as_ref())),
            ("WEIGHT", &|row| row.weight.to_string()),
            ("TUNNELS", &|row| row.tunnels.to_string()),
            ("STATE", &|row| match &row.unused {
                Some(why) => format!("not used: {why}"),
                None => "used".to_owned(),
            }),
        ],
    );
    text.more(service.more, "; see all by --all");
}

fn count(of: usize, one: &str, more: &str) -> String {
    format!("{of} {}", if of == 1 { one } else { more })
}

fn time(at: SystemTime) -> String {
    humantime::format_rfc3339_seconds(at).to_string()
}

fn ago(now: SystemTime, at: SystemTime) -> String {
    match now.duration_since(at).unwrap_or_default().as_secs() {
        0 => "just now".to_owned(),
        seconds => format!("{} ago", span(seconds)),
    }
}

fn ago_or_never(now: SystemTime, at: Option<SystemTime>) -> String {
    at.map_or_else(|| "never".to_owned(), |at| ago(now, at))
}

fn until(now: SystemTime, at: SystemTime) -> String {
    match at.duration_since(now) {
        Ok(left) => format!("in {}", span(left.as_secs())),
        Err(_) => ago(now, at),
    }
}

/// Formats the two largest units of a duration.
fn span(seconds: u64) -> String {
    let exact = humantime::format_duration(Duration::from_secs(seconds)).to_string();
    let units: Vec<_> = exact.split(' ').take(2).collect();
    units.join(" ")
}
