//! Status page as text, aligned, and coloured for a terminal.
//!
//! Names and reasons come from control planes and files. Control characters are escaped, because
//! they could control the terminal.

use std::time::SystemTime;

use super::DescriptorUsage;
use super::columns::{self, escape_control};
use super::issuers;
use super::listeners::ListenerRow;
use super::status::{Counts, CrlRow, Page, ServiceRow, format_rejected};
use crate::status::{Discovery, Unused};

/// Maximum number of rejected resources of each type; the dump has more of them.
const REJECTIONS_SHOWN: usize = 10;
/// Maximum number of hostnames.
const HOSTS_SHOWN: usize = 50;
/// Maximum number of routes of listeners.
const ROUTES_SHOWN: usize = 50;

/// Formats the page. `one` is true if services were requested by name.
pub(super) fn page(page: &Page, one: bool, color: bool) -> String {
    let mut text = Text {
        out: String::new(),
        color,
    };
    text.summary(page);
    if !one {
        text.problems(page);
        text.evacuated(page);
        text.listeners(page);
        text.source(page);
        text.certificates(page);
        text.issuers(page);
        text.files(page);
        text.hosts(page);
        text.holders(&page.descriptors);
    }
    text.services(page, one);
    text.out
}

struct Text {
    out: String,
    color: bool,
}

const GREEN: &str = "32";
const RED: &str = "31";
const BOLD: &str = "1";

impl Text {
    fn line(&mut self, line: &str) {
        self.out.push_str(line.trim_end());
        self.out.push('\n');
    }

    fn paint(&self, color: &str, text: &str) -> String {
        match self.color {
            true => format!("\x1b[{color}m{text}\x1b[0m"),
            false => text.to_owned(),
        }
    }

    fn heading(&mut self, heading: &str, rest: &str) {
        let heading = self.paint(BOLD, heading);
        self.line("");
        self.line(&format!("{heading}  {}", escape_control(rest)));
    }

    fn summary(&mut self, page: &Page) {
        let state = match page.ready {
            true => self.paint(GREEN, "ready"),
            false => self.paint(RED, "not ready"),
        };
        let pending = match page.ready {
            true => String::new(),
            false => format!(", pending: {}", page.pending.join(", ")),
        };
        let strait = self.paint(BOLD, "strait");
        self.line(&format!("{strait} {}  {state}{pending}", page.version));
        let Page {
            cluster,
            network,
            locality,
            snapshot,
            mesh,
            ..
        } = page;
        let Counts {
            services,
            workloads,
            policies,
        } = mesh;
        let mesh = match page.has_no_mesh() {
            true => "no mesh yet".to_owned(),
            false => {
                let services = count(*services, "service", "services");
                let workloads = count(*workloads, "workload", "workloads");
                let policies = count(*policies, "policy", "policies");
                format!("snapshot {snapshot}: {services}, {workloads}, {policies}")
            }
        };
        let known = format!("cluster {cluster}, network {network}, {locality}; {mesh}");
        self.line(&escape_control(&known));
    }

    fn problems(&mut self, page: &Page) {
        if page.problems.is_empty() {
            return;
        }
        let heading = self.paint(RED, "Problems");
        self.line("");
        self.line(&heading);
        for problem in &page.problems {
            self.line(&format!("  {}", escape_control(problem)));
        }
    }

    /// Writes the operator's evacuations.
    fn evacuated(&mut self, page: &Page) {
        if page.evacuated.is_empty() {
            return;
        }
        self.heading("Operator", "until a restart");
        for region in &page.evacuated {
            let undo = format!("`strait drain region {region} --undo` puts it back");
            self.line(&format!(
                "  {} is evacuated; {}",
                escape_control(region),
                escape_control(&undo)
            ));
        }
    }

    fn listeners(&mut self, page: &Page) {
        self.heading("Listeners", "");
        let rows = page.listeners.iter().map(ListenerRow::columns);
        let header = ["NAME", "ADDRESS", "PROTOCOL", "ROUTED", "SOURCES", "STATE"];
        self.table("  ", header, rows.collect());
        let mut opens: Vec<_> = page
            .listeners
            .iter()
            .flat_map(ListenerRow::reachable_services)
            .collect();
        let more = opens.len().saturating_sub(ROUTES_SHOWN);
        opens.truncate(ROUTES_SHOWN);
        let header = ["THROUGH", "ASKED FOR BY", "REACHED", "BY"];
        self.table("  ", header, opens);
        if more > 0 {
            self.line(&format!("  and {more} more, see `strait status --json`"));
        }
    }

    fn source(&mut self, page: &Page) {
        let source = &page.source;
        self.heading("Discovery", &format!("{} {}", source.kind, source.place));
        if let Some(stream) = &source.stream {
            self.stream(stream, page.at);
        }
    }

    fn stream(&mut self, stream: &Discovery, now: SystemTime) {
        let since = stream.since.map_or_else(String::new, |since| {
            format!(" since {} ({})", time(since), ago(now, since))
        });
        let state = match stream.connected {
            true => format!("connected{since}"),
            false => format!("not connected{since}"),
        };
        self.line(&format!("  {state}"));
        if let Some(why) = stream.why.as_deref().filter(|_| !stream.connected) {
            self.line(&format!("  {}", escape_control(why)));
            let next = stream
                .next_try
                .and_then(|next| next.duration_since(now).ok());
            let next = next.map_or_else(
                || "now".to_owned(),
                |wait| format!("in {}s", wait.as_millis().div_ceil(1000)),
            );
            self.line(&format!("  tried {} times, next {next}", stream.retries));
        }
        if let Some(saved) = stream.saved {
            let (saved, ago) = (time(saved), ago(now, saved));
            self.line(&format!("  state on disk of {saved} ({ago})"));
        }
        let rows = stream.types.iter().map(|kind| {
            let synced = if kind.synced { "synced" } else { "pending" };
            let accepted = kind
                .accepted
                .map_or_else(|| "never".to_owned(), |at| ago(now, at));
            let version = match kind.version.as_str() {
                "" => format!("({} responses)", kind.responses),
                version => escape_control(version),
            };
            [
                kind.name.to_owned(),
                synced.to_owned(),
                kind.held.to_string(),
                format_rejected(kind),
                kind.nacks.to_string(),
                version,
                accepted,
            ]
        });
        let header = [
            "TYPE",
            "STATE",
            "HELD",
            "REJECTED",
            "NACKS",
            "VERSION",
            "LAST ACCEPTED",
        ];
        self.table("  ", header, rows.collect());
        self.rejections(stream, now);
    }

    fn rejections(&mut self, stream: &Discovery, now: SystemTime) {
        for kind in &stream.types {
            for rejection in kind.rejections.iter().take(REJECTIONS_SHOWN) {
                let name = match rejection.name.as_str() {
                    "" => "(no name)",
                    name => name,
                };
                let (reason, version) = (&rejection.reason, &rejection.version);
                let since = ago(now, rejection.since);
                let version = match version.as_str() {
                    "" => String::new(),
                    version => format!("version {version}, "),
                };
                let kind = kind.name;
                let line = format!("rejected of {kind}: {name}: {reason} ({version}{since})");
                self.line(&format!("  {}", escape_control(&line)));
            }
            self.more(kind.rejected);
            for Unused { name, why } in kind.unused_first.iter().take(REJECTIONS_SHOWN) {
                let line = format!("not used of {}: {name}: {why}", kind.name);
                self.line(&format!("  {}", escape_control(&line)));
            }
            self.more(kind.unused);
        }
    }

    fn more(&mut self, all: usize) {
        if let more @ 1.. = all.saturating_sub(REJECTIONS_SHOWN) {
            self.line(&format!("  and {more} more, see `strait dump`"));
        }
    }

    fn certificates(&mut self, page: &Page) {
        self.heading("Certificates", "");
        let rows = page.certificates.iter().map(|certificate| {
            let expires = &certificate.expires;
            let left = humantime::parse_rfc3339(expires).map(|at| until(page.at, at));
            let left = left.map_or_else(|_| expires.clone(), |left| format!("{left} ({expires})"));
            [
                certificate.identity.clone(),
                certificate.state.clone(),
                certificate.serial.clone(),
                left,
            ]
        });
        let rows = rows.chain(page.crls.iter().map(CrlRow::columns));
        let header = ["IDENTITY", "STATE", "SERIAL", "EXPIRES"];
        self.table("  ", header, rows.collect());
    }

    fn issuers(&mut self, page: &Page) {
        if let lines @ [_, ..] = &issuers::lines(&page.issuers)[..] {
            self.heading("Issuers of peers", "");
            lines.iter().for_each(|line| self.line(line));
        }
    }

    fn files(&mut self, page: &Page) {
        if page.reloads.is_empty() {
            return;
        }
        self.heading("Changes read", "");
        let rows = page.reloads.iter().map(|reload| {
            let result = match (&reload.error, reload.in_use) {
                (None, _) => "in use",
                (Some(_), true) => "in use except for a part, see Problems",
                (Some(_), false) => "rejected, see Problems; the previous state is in use",
            };
            let result = result.to_owned();
            [reload.what.to_owned(), ago(page.at, reload.at), result]
        });
        self.table("  ", ["SOURCE", "READ", "RESULT"], rows.collect());
    }

    /// Writes the hostnames, failing ones first.
    fn hosts(&mut self, page: &Page) {
        let hosts = &page.hosts;
        if hosts.list.is_empty() {
            return;
        }
        self.heading("Hostnames", "");
        let mut list: Vec<_> = hosts.list.iter().collect();
        list.sort_by_key(|host| host.error.is_none());
        let rows = list.into_iter().take(HOSTS_SHOWN).map(|host| {
            let addresses: Vec<_> = host.addresses.iter().map(ToString::to_string).collect();
            let more = if host.more > 0 { " and more" } else { "" };
            let answered = host.answered.map(|at| ago(page.at, at));
            [
                host.name.clone(),
                answered.unwrap_or_else(|| "never".to_owned()),
                host.error.clone().unwrap_or_else(|| "-".to_owned()),
                addresses.join(",") + more,
            ]
        });
        let header = ["NAME", "ANSWERED", "LAST ERROR", "ADDRESSES"];
        self.table("  ", header, rows.collect());
        let more = hosts.list.len().saturating_sub(HOSTS_SHOWN);
        if more > 0 {
            self.line(&format!("  and {more} more, see `strait status --json`"));
        }
    }

    fn holders(&mut self, of: &DescriptorUsage) {
        if let lines @ [_, ..] = &of.lines()[..] {
            self.heading("Descriptors", &format!("{} of {} used", of.used, of.max));
            lines.iter().for_each(|line| self.line(line));
        }
    }

    fn services(&mut self, page: &Page, one: bool) {
        if one {
            for service in &page.services.list {
                self.service(service);
            }
            return;
        }
        self.heading("Services", "");
        let rows = page.services.list.iter().map(|service| {
            let ports: Vec<_> = service.ports.iter().map(ToString::to_string).collect();
            [
                service.service.clone(),
                ports.join(","),
                format!("{} of {}", service.used, service.total),
                service.tunnels.to_string(),
                service.exposed_to.join("; "),
            ]
        });
        let header = [
            "SERVICE",
            "PORTS",
            "ENDPOINTS USED",
            "TUNNELS",
            "EXPOSED TO",
        ];
        self.table("  ", header, rows.collect());
        let (shown, total) = (page.services.list.len(), page.services.total);
        if shown < total {
            let see = "see one by `strait status SERVICE`, all by --all";
            self.line(&format!("  {shown} of {total} services; {see}"));
        }
    }

    /// Writes one service with its endpoints.
    fn service(&mut self, service: &ServiceRow) {
        self.heading("Service", &service.service);
        for who in &service.exposed_to {
            self.line(&format!("  exposed to {}", escape_control(who)));
        }
        let ServiceRow { used, total, .. } = service;
        let total = count(*total, "workload", "workloads");
        self.line(&format!("  {used} of {total} used"));
        let rows = service.endpoints.iter().map(|endpoint| {
            let unused = endpoint.unused.as_ref();
            [
                endpoint.port.to_string(),
                endpoint.uid.clone(),
                endpoint.address.clone().unwrap_or_else(|| "-".to_owned()),
                endpoint.weight.to_string(),
                endpoint.tunnels.to_string(),
                unused.map_or_else(|| "used".to_owned(), |why| format!("not used: {why}")),
            ]
        });
        let header = ["PORT", "WORKLOAD", "ADDRESS", "WEIGHT", "TUNNELS", "STATE"];
        self.table("  ", header, rows.collect());
        if service.more > 0 {
            self.line(&format!("  and {} more; see all by --all", service.more));
        }
    }

    /// Writes a table with columns as wide as their widest cell.
    fn table<const N: usize>(&mut self, indent: &str, header: [&str; N], rows: Vec<[String; N]>) {
        if rows.is_empty() {
            self.line(&format!("{indent}none"));
            return;
        }
        for line in columns::lines(indent, header, rows) {
            self.line(&line);
        }
    }
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

fn until(now: SystemTime, at: SystemTime) -> String {
    match at.duration_since(now) {
        Ok(left) => format!("in {}", span(left.as_secs())),
        Err(_) => ago(now, at),
    }
}

/// Formats the two largest units of a duration.
fn span(seconds: u64) -> String {
    let exact = humantime::format_duration(std::time::Duration::from_secs(seconds)).to_string();
    let units: Vec<_> = exact.split(' ').take(2).collect();
    units.join(" ")
}

#[cfg(test)]
mod tests;
