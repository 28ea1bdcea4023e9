//! Rendering of an explanation as text for a terminal.

use crate::admin::columns::{self, escape_control};
use crate::explain::{Answer, EndpointRow, EntryRow, GroupRow, LookupRow};

/// Limit below which odds are printed as 0: the endpoint serves only if no other is left.
const NEGLIGIBLE_PROBABILITY: f64 = 1e-9;

/// Renders the whole answer.
pub(super) fn page(answer: &Answer) -> String {
    let mut page = Page(String::new());
    let (peer, listener) = (&answer.peer, &answer.listener);
    if let Some(identity) = &peer.identity {
        page.field("Peer", identity);
        page.continuation(&peer.said);
    } else if !peer.said.is_empty() {
        page.field("Peer", &peer.said);
    }
    let protocol = &listener.protocol;
    page.field("Listener", &format!("{} ({protocol})", listener.name));
    for leg in &answer.legs {
        page.write_leg(leg);
    }
    page.groups(answer);
    page.endpoints(answer);
    page.unused(answer);
    for note in &answer.notes {
        page.field("Note", note);
    }
    page.field("Outcome", &answer.outcome.said);
    for other in &answer.outcome.or {
        page.continuation(&format!("or, by random choice: {}", other.said));
    }
    page.0
}

struct Page(String);

impl Page {
    fn line(&mut self, text: &str) {
        self.0.push_str(text.trim_end());
        self.0.push('\n');
    }

    fn field(&mut self, what: &str, text: &str) {
        self.line(&format!("{what:<10}{}", escape_control(text)));
    }

    fn continuation(&mut self, text: &str) {
        self.field("", text);
    }

    fn write_leg(&mut self, leg: &LookupRow) {
        self.field("Asked", &leg.asked);
        if let Some(from) = &leg.from {
            self.continuation(from);
        }
        if let Some(route) = &leg.route {
            let (service, port) = (&route.service, route.port);
            self.field("Service", &format!("{service} port {port}: {}", route.said));
            if route.route_by == "strict" || (route.route_by == "sni" && leg.from.is_none()) {
                let what = match &*route.route_by {
                    "sni" => "the server name inside the tunnel decides where it goes (sni)",
                    _ => "the server name inside the tunnel must match the authority (strict)",
                };
                self.continuation(what);
            }
            if let Some(waypoint) = &route.waypoint {
                self.field("Waypoint", waypoint);
            }
        }
        let rule = &leg.rule;
        let verdict = match rule.allowed {
            true => "Allowed",
            false => "Refused",
        };
        self.field(verdict, &rule.said);
        for entry in &rule.entries {
            self.continuation(&describe_entry(entry));
        }
        if let Some(change) = &rule.change {
            self.field("Change", change);
        }
    }

    fn groups(&mut self, answer: &Answer) {
        let is_plain = |group: &GroupRow| group.tier == "all" && group.place.is_none();
        if answer.groups.iter().all(is_plain) && answer.groups.len() < 2 {
            return;
        }
        self.line("");
        let spill = answer.spill.as_ref();
        let spill = spill.map(|spill| format!("a tier spills below {spill} ready"));
        let latency = answer
            .by_latency
            .then(|| "dial latency counts as load".to_owned());
        let notes: Vec<_> = spill.into_iter().chain(latency).collect();
        self.field("Tiers", &notes.join("; "));
        let rows = answer.groups.iter().map(|group| {
            let place = group.place.as_ref().or(group.waypoint.as_ref());
            [
                percent(group.share),
                group.tier.clone(),
                place.map_or_else(|| "-".to_owned(), Clone::clone),
                group
                    .weight
                    .map_or_else(|| "-".to_owned(), |weight| weight.to_string()),
                match group.all {
                    Some(all) => format!("{} of {all}", group.ready),
                    None => group.ready.to_string(),
                },
            ]
        });
        self.table(
            ["SHARE", "TIER", "PLACE", "WEIGHT", "READY"],
            rows.collect(),
        );
    }

    fn endpoints(&mut self, answer: &Answer) {
        if answer.endpoints.is_empty() {
            return;
        }
        self.line("");
        self.field("Endpoints", "with the probability of the next pick");
        let rows = answer.endpoints.iter().map(|endpoint| {
            let group = answer.groups.get(endpoint.group);
            let locality = match endpoint.locality.is_empty() {
                true => "-".to_owned(),
                false => endpoint.locality.clone(),
            };
            [
                percent(endpoint.odds),
                endpoint.address.clone(),
                endpoint.workload.to_string(),
                locality,
                group.map_or_else(String::new, |group| group.tier.clone()),
                endpoint.weight.to_string(),
                endpoint.tunnels.to_string(),
                state(endpoint),
            ]
        });
        let header = [
            "ODDS", "ADDRESS", "WORKLOAD", "LOCALITY", "TIER", "WEIGHT", "TUNNELS", "STATE",
        ];
        self.table(header, rows.collect());
        if answer.more_endpoints > 0 {
            let more = answer.more_endpoints;
            self.line(&format!("  and {more} more; see all by --all"));
        }
    }

    fn unused(&mut self, answer: &Answer) {
        if !answer.unused.is_empty() {
            self.line("");
            self.field("Not used", "");
            let rows = answer.unused.iter();
            let rows = rows.map(|one| [one.workload.to_string(), one.why.clone()]);
            self.table(["WORKLOAD", "WHY"], rows.collect());
            if answer.more_unused > 0 {
                let more = answer.more_unused;
                self.line(&format!("  and {more} more; see all by --all"));
            }
        }
        if !answer.endpoints.is_empty() || !answer.unused.is_empty() {
            self.line("");
        }
    }

    fn table<const N: usize>(&mut self, header: [&str; N], rows: Vec<[String; N]>) {
        for line in columns::lines("  ", header, rows) {
            self.line(&line);
        }
    }
}

fn describe_entry(entry: &EntryRow) -> String {
    let line = entry.line.map(|line| format!(" (line {line})"));
    let to = match entry.to.is_empty() {
        true => "nobody".to_owned(),
        false => entry.to.join("; "),
    };
    let line = line.unwrap_or_default();
    format!("exposure.services[{}]{line}: {to}", entry.index)
}

fn state(endpoint: &EndpointRow) -> String {
    let refused = endpoint.refused.clone();
    let ejected = endpoint
        .ejected
        .map(|left| format!("ejected for {left}s more"));
    let audited = endpoint.audited.as_ref();
    let audited = audited.map(|why| format!("only logged: {why}"));
    let said: Vec<_> = [refused, ejected, audited].into_iter().flatten().collect();
    match said.is_empty() {
        true => "ready".to_owned(),
        false => said.join("; "),
    }
}

fn percent(part: f64) -> String {
    match part {
        part if part < NEGLIGIBLE_PROBABILITY => "0".to_owned(),
        part if part < 0.0005 => "<0.1%".to_owned(),
        part => format!("{:.1}%", part * 100.0),
    }
}
