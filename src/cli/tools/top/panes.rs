//! Panes of `strait top`: the tables of the dashboard.

use std::time::{Duration, SystemTime};

use serde::de::IgnoredAny;

use crate::admin::pages::{
    DashboardEvent, GatewayRow, LinkRow, LinkTraffic, LoadRow, PeersPage, RefusalRow, ServiceRow,
};
use crate::cli::text::{ago, or_dash, until};
use crate::labels::{count, escape_control, join};

/// Age of the oldest refusal that is shown, as on the dashboard.
const REFUSALS_AGE: Duration = Duration::from_secs(900);

/// State that is shown. No list of listeners is.
#[derive(Debug)]
pub(super) struct Shown {
    pub(super) event: DashboardEvent<IgnoredAny>,
    /// Selected service, with its endpoints, once these are known. They are only asked for if its
    /// tab is shown.
    pub(super) service: Option<ServiceRow>,
}

/// Judgement of a cell, which is its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Plain,
    Good,
    Warn,
    Bad,
}

#[derive(Debug)]
pub(super) struct Cell {
    pub(super) text: String,
    pub(super) mark: Mark,
}

/// Table of a pane. `none` is its text without rows.
#[derive(Debug)]
pub(super) struct Grid {
    pub(super) title: String,
    pub(super) none: &'static str,
    pub(super) header: &'static [&'static str],
    pub(super) rows: Vec<Vec<Cell>>,
}

/// Tables under one tab. A row of the first one is selected.
#[derive(Debug)]
pub(super) struct Pane {
    pub(super) name: &'static str,
    pub(super) grids: Vec<Grid>,
}

/// Returns the panes, in the order of the dashboard.
pub(super) fn panes(shown: &Shown) -> [Pane; 6] {
    let pane = |name, grids| Pane { name, grids };
    let peers = &shown.event.peers;
    let mut services = vec![services(shown), endpoints(shown)];
    services.extend((!peers.loads.is_empty()).then(|| loads(&peers.loads)));
    [
        pane("Networks", vec![gateways(&peers.gateways), links(peers)]),
        pane("Services", services),
        pane("Tunnels", vec![sources(shown), peer_gateways(peers)]),
        pane("Refusals", vec![refusals(shown)]),
        pane("Certificates", vec![certificates(shown)]),
        pane("Drains", vec![drains(shown)]),
    ]
}

fn marked(mark: Mark, text: impl ToString) -> Cell {
    Cell { text: escape_control(&text.to_string()), mark }
}

fn plain(text: impl ToString) -> Cell {
    marked(Mark::Plain, text)
}

fn good_or(mark: Mark, is_good: bool, text: impl ToString) -> Cell {
    marked(if is_good { Mark::Good } else { mark }, text)
}

fn percent(part: usize, whole: usize) -> String {
    format!("{}%", (100 * part + whole / 2).checked_div(whole).unwrap_or(0))
}

fn grid<T>(
    title: impl Into<String>,
    none: &'static str,
    header: &'static [&'static str],
    rows: impl IntoIterator<Item = T>,
    cells: impl Fn(T) -> Vec<Cell>,
) -> Grid {
    Grid { title: title.into(), none, header, rows: rows.into_iter().map(cells).collect() }
}

fn gateways(rows: &[GatewayRow]) -> Grid {
    let header = &[
        "GATEWAY",
        "NETWORK",
        "CLUSTER",
        "STATE",
        "RTT",
        "SHARE",
        "TUNNELS",
        "CONNECTIONS",
        "EJECTIONS",
        "LAST ERROR",
    ];
    let none = "there is no gateway of another network";
    grid("Gateways of other networks", none, header, rows, |row| {
        let mark = match &*row.state {
            "ready" | "healthy" | "idle" => Mark::Good,
            "connecting" => Mark::Warn,
            _ => Mark::Bad,
        };
        vec![
            plain(row.address),
            plain(&row.network),
            plain(&row.cluster),
            marked(mark, &row.state),
            plain(or_dash(row.rtt.as_ref())),
            plain(&row.share),
            plain(row.tunnels),
            plain(row.connections),
            plain(row.ejections),
            plain(if row.error.is_empty() { "-" } else { &row.error }),
        ]
    })
}

fn links(peers: &PeersPage) -> Grid {
    let traffic = |row: &LinkRow| match row.traffic {
        LinkTraffic::Outbound { gateways, ready, tunnels } => {
            let (tunnels, gateways) = (count(tunnels, "tunnel"), count(gateways, "gateway"));
            format!("{tunnels}, {ready} of {gateways} ready")
        }
        LinkTraffic::Inbound { accepted: Some(accepted), refused } => {
            format!("{accepted} handshakes, {} refused", refused.unwrap_or(0))
        }
        LinkTraffic::Inbound { accepted: None, .. } => "-".to_owned(),
    };
    let budget = |row: &LinkRow| {
        let of = peers.budgets.iter().find(|of| *of.from == *row.from && *of.to == *row.to);
        or_dash(of.map(|of| format!("{} of {} bytes, weight {}", of.used, of.budget, of.weight)))
    };
    let header = &["FROM", "TO", "PERMITTED", "TRAFFIC", "BUDGET"];
    grid("Links between clusters", "no other cluster is known", header, &peers.links, |row| {
        let linked = good_or(Mark::Warn, row.linked, if row.linked { "yes" } else { "no" });
        vec![plain(&row.from), plain(&row.to), linked, plain(traffic(row)), plain(budget(row))]
    })
}

fn services(shown: &Shown) -> Grid {
    let services = &shown.event.status.services;
    let title = match services.list.len() {
        listed if listed < services.total => format!("Services, {listed} of {}", services.total),
        _ => "Services".to_owned(),
    };
    let header = &["SERVICE", "PORTS", "WORKLOADS", "TUNNELS", "EXPOSED TO"];
    grid(title, "there is no service", header, &services.list, |row| {
        let mark = if row.used == 0 { Mark::Bad } else { Mark::Warn };
        let workloads = format!("{} of {}", row.used, row.total);
        vec![
            plain(&row.service),
            plain(join(&row.ports, ",")),
            good_or(mark, row.used == row.total, workloads),
            plain(row.tunnels),
            plain(row.exposed_to.join("; ")),
        ]
    })
}

/// Returns the endpoints of the selected service, with their shares of the tunnels of a port.
fn endpoints(shown: &Shown) -> Grid {
    let (name, rows, none) = match &shown.service {
        Some(service) => (&*service.service, &*service.endpoints, "there is no endpoint"),
        None => ("the selected service", [].as_slice(), "not known yet"),
    };
    let header = &["ENDPOINT", "PORT", "ADDRESS", "HEALTH", "WEIGHT", "TUNNELS", "SHARE"];
    let title = format!("Endpoints of {}", escape_control(name));
    grid(title, none, header, rows, |row| {
        let of_port = rows.iter().filter(|other| other.port == row.port);
        let sum: u32 = of_port.map(|row| row.tunnels).sum();
        let health = row.unused.as_deref().unwrap_or("in use");
        vec![
            plain(&row.uid),
            plain(row.port),
            plain(or_dash(row.address)),
            good_or(Mark::Warn, row.unused.is_none(), health),
            plain(row.weight),
            plain(row.tunnels),
            plain(percent(row.tunnels as usize, sum as usize)),
        ]
    })
}

fn loads(rows: &[LoadRow]) -> Grid {
    let header = &["SERVICE", "GATEWAY", "INSTANCES", "FREE", "DIAL", "FACTOR"];
    grid("Services behind gateways", "", header, rows, |row| {
        vec![
            plain(&row.service),
            plain(row.gateway),
            plain(row.counted),
            plain(or_dash(row.free)),
            plain(&row.dial),
            plain(row.factor),
        ]
    })
}

fn sources(shown: &Shown) -> Grid {
    let mut shares = shown.event.status.shares.iter();
    let pool = shares.find(|share| share.resource == "tunnels" && share.of.is_none());
    let (used, holders) = pool.map_or((0, [].as_slice()), |pool| (pool.used, &*pool.holders));
    let header = &["SOURCE", "TUNNELS", "PART"];
    grid("Open tunnels by source", "no tunnel is open", header, holders, |row| {
        vec![plain(&row.source), plain(row.held), plain(percent(row.held, used))]
    })
}

fn peer_gateways(peers: &PeersPage) -> Grid {
    let header = &["IDENTITY", "FROM IT", "THROUGH IT"];
    grid("Open tunnels with other gateways", "there is none", header, &peers.peers, |row| {
        vec![plain(&row.identity), plain(row.inbound), plain(row.outbound)]
    })
}

fn refusals(shown: &Shown) -> Grid {
    let now = shown.event.status.at;
    let rows = shown.event.refusals.refusals.iter();
    let age = |row: &RefusalRow| now.duration_since(row.last).unwrap_or_default();
    let recent = rows.filter(|row| age(row) <= REFUSALS_AGE);
    let peer = |row: &RefusalRow| {
        let of = row.identity.as_deref().map_or_else(|| row.address.to_string(), str::to_owned);
        row.first_peer.as_ref().map_or_else(|| of.clone(), |first| format!("{of} for {first}"))
    };
    let header = &["REASON", "COUNT", "LAST", "PEER", "REQUESTED", "ERROR", "EXPLAINED BY"];
    let title = "Refusals of the last 15 minutes, the most frequent first";
    grid(title, "nothing was refused", header, recent, |row| {
        vec![
            plain(&row.reason),
            plain(row.count),
            plain(ago(now, row.last)),
            plain(peer(row)),
            plain(or_dash(row.authority.as_ref().or(row.sni.as_ref()))),
            plain(or_dash(row.error.as_ref())),
            plain(or_dash(row.explain.as_ref())),
        ]
    })
}

fn certificates(shown: &Shown) -> Grid {
    let (status, now) = (&shown.event.status, shown.event.status.at);
    let row = |of: &str, kind: String, state, end: Option<SystemTime>, problem: Option<&String>| {
        let left = match end {
            None => plain("-"),
            Some(end) => good_or(Mark::Bad, end > now, until(now, end)),
        };
        let ends = plain(or_dash(end.map(humantime::format_rfc3339_seconds)));
        vec![plain(of), plain(kind), state, ends, left, plain(or_dash(problem))]
    };
    let own = status.certificates.iter().map(|it| {
        let is_own = it.identity.starts_with("spiffe:");
        let kind = if is_own { "own certificate" } else { "first root to end" };
        let state = good_or(Mark::Bad, it.state == "Available", &it.state);
        let end = humantime::parse_rfc3339(&it.expires).ok();
        row(&it.identity, kind.to_owned(), state, end, it.renewal_problem.as_ref())
    });
    let remote = shown.event.peers.gateways.iter().filter(|it| it.expires.is_some()).map(|it| {
        let identity = it.identity.as_deref().unwrap_or("-");
        row(identity, format!("gateway {}", it.address), plain("presented"), it.expires, None)
    });
    let lists = status.crls.iter().map(|it| {
        let state = good_or(Mark::Bad, !it.stale, if it.stale { "stale" } else { "in use" });
        let kind = format!("revocation list {}", it.file);
        row(&it.issuer, kind, state, Some(it.next_update), None)
    });
    let header = &["OF", "KIND", "STATE", "ENDS", "LEFT", "PROBLEM"];
    let rows = own.chain(remote).chain(lists);
    let title = "Certificates, roots and revocation lists";
    grid(title, "there is no certificate", header, rows, |row| row)
}

fn drains(shown: &Shown) -> Grid {
    let status = &shown.event.status;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_.:/-".contains(c);
    let header = &["NAME", "KIND", "SINCE", "A RESTART", "ENDED BY"];
    let title = "Drained by an operator";
    grid(title, "nothing is drained", header, &status.drained, |row| {
        let is_word = !row.name.starts_with('-') && row.name.chars().all(is_plain);
        let command = format!("strait drain {} {} --undo", row.kind, row.name);
        vec![
            plain(&row.name),
            plain(&row.kind),
            plain(ago(status.at, row.since)),
            plain(if row.persisted { "keeps it" } else { "ends it" }),
            plain(or_dash(is_word.then_some(command))),
        ]
    })
}
