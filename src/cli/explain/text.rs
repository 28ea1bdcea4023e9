//! Rendering of an explanation as text for a terminal.

use crate::cli::text::{Text, or_dash};
use crate::explain::{Answer, EndpointRow, EntryRow, GroupRow, LookupRow};

/// Probability below which 0 is printed: the endpoint serves only if no other is left.
const NEGLIGIBLE_PROBABILITY: f64 = 1e-9;
/// Advice after the number of rows that are not listed.
const SEE_ALL: &str = "; see all by --all";

/// Renders the whole answer.
pub(super) fn page(answer: &Answer) -> String {
    let mut page = Page(Text::default());
    let (peer, listener) = (&answer.peer, &answer.listener);
    if let Some(identity) = &peer.identity {
        page.field("Peer", identity);
        page.continuation(&peer.description);
    } else if !peer.description.is_empty() {
        page.field("Peer", &peer.description);
    }
    let protocol = &listener.protocol;
    page.field("Listener", &format!("{} ({protocol})", listener.name));
    for lookup in &answer.lookups {
        page.write_lookup(lookup);
    }
    page.groups(answer);
    page.endpoints(answer);
    for note in &answer.notes {
        page.field("Note", note);
    }
    page.field("Outcome", &answer.outcome.description);
    for other in &answer.outcome.or {
        page.continuation(&format!("or, by random choice: {}", other.description));
    }
    page.0.finish()
}

struct Page(Text);

impl Page {
    fn field(&mut self, what: &str, text: &str) {
        self.0.line(&format!("{what:<10}{text}"));
    }

    fn continuation(&mut self, text: &str) {
        self.field("", text);
    }

    fn write_lookup(&mut self, lookup: &LookupRow) {
        self.field("Requested", &lookup.requested);
        if let Some(from) = &lookup.from {
            self.continuation(from);
        }
        if let Some(route) = &lookup.route {
            let (service, port) = (&route.service, route.port);
            self.field("Service", &format!("{service} port {port}: {}", route.description));
            if route.route_by == "strict" || (route.route_by == "sni" && lookup.from.is_none()) {
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
        let rule = &lookup.rule;
        self.field(if rule.allowed { "Allowed" } else { "Rejected" }, &rule.description);
        for entry in &rule.entries {
            self.continuation(&describe_entry(entry));
        }
        if let Some(change) = &rule.change {
            self.field("Change", change);
        }
    }

    fn groups(&mut self, answer: &Answer) {
        if let Some(transit) = &answer.transit {
            self.field("Transit", transit);
        }
        let is_plain = |group: &GroupRow| group.tier == "all" && group.place.is_none();
        if answer.groups.iter().all(is_plain) && answer.groups.len() < 2 {
            return;
        }
        self.0.line("");
        let spill = answer.spill.as_ref();
        let spill = spill.map(|spill| format!("a tier spills below {spill} ready"));
        let latency = answer.by_latency.then(|| "dial latency counts as load".to_owned());
        let notes: Vec<_> = spill.into_iter().chain(latency).collect();
        self.field("Tiers", &notes.join("; "));
        self.0.table(
            &answer.groups,
            &[
                ("SHARE", &|group| percent(group.share)),
                ("TIER", &|group| group.tier.clone()),
                ("PLACE", &|group| or_dash(group.place.as_ref().or(group.waypoint.as_ref()))),
                ("WEIGHT", &|group| or_dash(group.weight)),
                ("READY", &|group| match group.all {
                    Some(all) => format!("{} of {all}", group.ready),
                    None => group.ready.to_string(),
                }),
            ],
        );
    }

    /// Writes the certificates that endpoints of other networks have to present.
    fn certificates(&mut self, answer: &Answer) {
        let is_remote = |row: &&EndpointRow| row.gateway_certificate.is_some();
        let remote: Vec<_> = answer.endpoints.iter().filter(is_remote).cloned().collect();
        if remote.is_empty() {
            return;
        }
        self.0.line("");
        self.field("Verified", "before a byte of the client is forwarded");
        self.0.table(
            &remote,
            &[
                ("ADDRESS", &|row| row.address.clone()),
                ("NETWORK", &|row| or_dash(row.network.as_ref())),
                ("GATEWAY", &|row| or_dash(row.gateway_certificate.as_ref())),
                ("WORKLOAD", &|row| or_dash(row.workload_certificate.as_ref())),
            ],
        );
    }

    /// Writes the endpoints that can be picked, and the workloads that cannot.
    fn endpoints(&mut self, answer: &Answer) {
        if !answer.endpoints.is_empty() {
            self.0.line("");
            self.field("Endpoints", "with the probability of the next pick");
            let tier = |row: &EndpointRow| {
                let group = answer.groups.get(row.group);
                group.map_or_else(String::new, |group| group.tier.clone())
            };
            let locality = |row: &EndpointRow| {
                or_dash(Some(&row.locality).filter(|locality| !locality.is_empty()))
            };
            let weight = |row: &EndpointRow| match row.factor {
                1.0 => row.weight.to_string(),
                factor => format!("{} x {factor:.2}", row.weight),
            };
            self.0.table(
                &answer.endpoints,
                &[
                    ("PROBABILITY", &|row| percent(row.probability)),
                    ("ADDRESS", &|row| row.address.clone()),
                    ("WORKLOAD", &|row| row.workload.to_string()),
                    ("LOCALITY", &locality),
                    ("TIER", &tier),
                    ("WEIGHT", &weight),
                    ("TUNNELS", &|row| row.tunnels.to_string()),
                    ("STATE", &state),
                ],
            );
            self.0.more(answer.more_endpoints, SEE_ALL);
            self.certificates(answer);
        }
        if !answer.unused.is_empty() {
            self.0.line("");
            self.field("Not used", "");
            self.0.table(
                &answer.unused,
                &[("WORKLOAD", &|row| row.workload.to_string()), ("WHY", &|row| row.why.clone())],
            );
            self.0.more(answer.more_unused, SEE_ALL);
        }
        if !answer.endpoints.is_empty() || !answer.unused.is_empty() {
            self.0.line("");
        }
    }
}

fn describe_entry(entry: &EntryRow) -> String {
    let line = entry.line.map(|line| match &entry.file {
        Some(file) => format!(" ({file}:{line})"),
        None => format!(" (line {line})"),
    });
    let to = if entry.to.is_empty() { "nobody".to_owned() } else { entry.to.join("; ") };
    let line = line.unwrap_or_default();
    format!("exposure.services[{}]{line}: {to}", entry.index)
}

fn state(endpoint: &EndpointRow) -> String {
    let refused = endpoint.refused.clone();
    let ejected = endpoint.ejected.map(|left| format!("ejected for {left}s more"));
    let audited = endpoint.audited.as_ref().map(|why| format!("only logged: {why}"));
    let description: Vec<_> = [refused, ejected, audited].into_iter().flatten().collect();
    if description.is_empty() {
        return "ready".to_owned();
    }
    description.join("; ")
}

fn percent(part: f64) -> String {
    match part {
        part if part < NEGLIGIBLE_PROBABILITY => "0".to_owned(),
        part if part < 0.0005 => "<0.1%".to_owned(),
        part => format!("{:.1}%", part * 100.0),
    }
}
