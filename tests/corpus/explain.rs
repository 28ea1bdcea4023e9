//! Cases of explanations: a question about a tunnel, the configuration, the mesh, and the answer.
//!
//! The unit tests of `explain` compare answers with real picks and rejections. So a case also shows
//! where tunnels go, and in which shares.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use strait::config::{self, Config, Issuer};
use strait::datapath::dial::DenyList;
use strait::datapath::listener::{Listener, ListenerRules};
use strait::explain::{
    Answer, ConfigPositions, EndpointRow, ExplainState, LookupRow, Question, run,
};
use strait::lifecycle::DrainScope;
use strait::snapshot::builder::{Change, build};
use strait::snapshot::traffic::{Drained, Override, Position};
use strait::snapshot::{ExportSet, ServiceVisibility, Snapshot, TrustSet};
use strait::status::ReducedLink;
use strait::wire::{RegionPattern, SpkiHash};
use strait::xds;
use tokio::time::Instant;

use crate::findings::{ROOT, base, compare, each_row, partition};

/// Keys of a case that are no sections of the gateway.
const OWN: [&str; 6] = ["question", "mesh", "exports", "evacuated", "reduced", "is_full"];

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Keys {
    question: Question,
    mesh: String,
    /// Exports of the control plane: hostnames with port 80.
    #[serde(default)]
    exports: Vec<String>,
    /// Region that an operator has evacuated.
    #[serde(default)]
    evacuated: Option<String>,
    /// Links whose budgets are exceeded.
    #[serde(default)]
    reduced: Vec<Reduced>,
    /// True if the buffers of tunnels have no room.
    #[serde(default)]
    is_full: bool,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Reduced {
    from: String,
    to: String,
    percent: u8,
}

#[test]
fn answers_about_tunnels() {
    compare("explain", &base("explain"), |_, text| each_row(text, answer));
}

/// Returns the answer to the question of a case.
fn answer(text: &str) -> String {
    let (own, gateway) = partition(text, |key| OWN.contains(&key));
    let keys: Keys = serde_saphyr::from_str(&own).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let (config, findings) = Config::parse(&Path::new(ROOT).join("strait.yaml"), &gateway);
    let config = config.unwrap_or_else(|| panic!("{findings}\n{text}"));
    let snapshot = snapshot(&config, &keys);
    let own = &config.gateway.cluster;
    let reduced = keys.reduced.iter().map(|of| ReducedLink {
        from: of.from.as_str().into(),
        is_own: of.from == *own,
        to: of.to.as_str().into(),
        weight_percent: of.percent,
    });
    let listeners = config.listeners.iter();
    let listeners = listeners.map(|one| (one.name.clone(), ListenerRules::new(one)));
    let bindings = config.bindings.iter().map(|binding| {
        let listener = config::Listener::from(binding);
        Arc::new(Listener::new(&listener, DrainScope::default()))
    });
    let state = ExplainState {
        snapshot: &snapshot,
        deny: &DenyList::of(&config),
        listeners: &listeners.collect::<Vec<_>>(),
        bindings: &bindings.collect::<Vec<_>>(),
        places: &ConfigPositions::default(),
        held: &[],
        links: &reduced.collect::<Vec<_>>(),
        has_room: !keys.is_full,
        now: Instant::now(),
    };
    run(&state, &keys.question).map_or_else(|error| error, |answer| shown(&answer))
}

fn snapshot(config: &Config, keys: &Keys) -> Snapshot {
    let mesh = xds::file::parse(Path::new("mesh.yaml"), &keys.mesh);
    let (mesh, policies) = mesh.unwrap_or_else(|findings| panic!("{findings}"));
    let domains = config.trust.domains.iter().map(|one| (&*one.name, &*one.cluster));
    let clusters = config.trust.clusters.iter();
    let issuers =
        clusters.flat_map(|one| one.issuers.iter().map(|issuer| (hash(issuer), &*one.name)));
    let restricted = config.trust.domains.iter().filter_map(|domain| {
        let permitted = domain.issuers.as_ref()?.iter().map(hash).collect();
        Some((&*domain.name, Arc::new(permitted)))
    });
    let trust = TrustSet::new(domains)
        .with_issuers(issuers, false)
        .with_domain_issuers(restricted)
        .with_gateways(config.trust.gateways.iter().map(String::as_str))
        .with_waypoints(config.trust.waypoints.iter().map(String::as_str));
    let evacuated = keys.evacuated.as_deref().map(|region| {
        Override::Drain(RegionPattern::parse(region).expect("a region").into(), Drained::now(false))
    });
    let exports: ExportSet = keys.exports.iter().map(|host| (host.as_str(), 80)).collect();
    let change = Change {
        mesh: Some((mesh, config.gateway.network.as_str().into())),
        trust: Some(trust),
        policies: Some(policies),
        scope: Some(ServiceVisibility::of_links(config)),
        exports: Some(exports),
        position: Some(Position {
            cluster: config.gateway.cluster.as_str().into(),
            locality: config.gateway.locality.clone(),
            ..Position::default()
        }),
        overrides: evacuated,
        ..Change::of(config)
    };
    build(&Snapshot::default(), change)
}

fn hash(issuer: &Issuer) -> SpkiHash {
    match issuer {
        Issuer::Hash(hash) => *hash,
        Issuer::File(file) => panic!("{} instead of a hash", file.display()),
    }
}

fn shown(answer: &Answer) -> String {
    let mut shown: String =
        answer.outcome.all().map(|one| one.description.clone() + "\n").collect();
    answer.lookups.iter().for_each(|one| shown += &lookup(one));
    if let Some(transit) = &answer.transit {
        let _ = writeln!(shown, "transit: {transit}");
    }
    for group in &answer.groups {
        let _ = writeln!(shown, "{:.6} {}, {} ready", group.share, group.tier, group.ready);
    }
    answer.endpoints.iter().for_each(|one| shown += &endpoint(one));
    let mut unused: BTreeMap<_, Vec<&str>> = BTreeMap::new();
    answer.unused.iter().for_each(|row| unused.entry(&row.why).or_default().push(&row.workload));
    for (why, workloads) in unused {
        let _ = writeln!(shown, "not {}: {why}", workloads.join(", "));
    }
    for note in &answer.notes {
        let _ = writeln!(shown, "note: {note}");
    }
    shown
}

fn lookup(lookup: &LookupRow) -> String {
    let mut line = lookup.requested.clone();
    if let Some(route) = &lookup.route {
        let _ = write!(line, " is {}:{} ({})", route.service, route.port, route.description);
        route.waypoint.iter().for_each(|waypoint| _ = write!(line, ", {waypoint}"));
    }
    format!("{line}: {}\n", lookup.rule.description)
}

fn endpoint(row: &EndpointRow) -> String {
    let EndpointRow { address, protocol, probability, workload, .. } = row;
    let mut line =
        format!("{probability:.6} {address} {protocol} {workload}, weight {}", row.weight);
    if (row.factor - 1.0).abs() > 1e-9 {
        let _ = write!(line, " by {}", row.factor);
    }
    for (what, value) in [
        ("of network", row.network.as_deref()),
        ("presents", row.gateway_certificate.as_deref()),
        ("refused:", row.refused.as_deref()),
    ] {
        value.iter().for_each(|value| _ = write!(line, ", {what} {value}"));
    }
    line + "\n"
}
