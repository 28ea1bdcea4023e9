//! GET `/peers`: gateways of other networks, and links between this cluster and others.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{IssuerRow, Parameters, gateway_to_json, list, text};
use crate::admin::AdminState;
use crate::admin::text::{Text, key};
use crate::config::Config;
use crate::snapshot::{EndpointSet, FACTOR_ONE, Snapshot};
use crate::status::RemoteGatewayStatus;
use crate::wire::UNKNOWN_CLUSTER;

/// Limit of listed loads.
const LOADS_MAX: usize = 1000;

/// Answers with the page as text or JSON.
pub(in crate::admin) async fn peers(
    State(state): State<AdminState>,
    Query(parameters): Query<Parameters>,
) -> Response {
    // On a blocking thread, because a large mesh takes long.
    let made = tokio::task::spawn_blocking(move || page(&state)).await;
    let Ok(page) = made else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    match parameters.format.as_deref() {
        Some("json") => axum::Json(page).into_response(),
        _ => to_text(&page, parameters.color.is_some()).into_response(),
    }
}

fn page(state: &AdminState) -> Value {
    let (snapshot, config) = (state.reader.snapshot(), state.config.load_full());
    let gateways = (state.remote_gateways)();
    let issuers = (state.issuers)();
    json!({
        "cluster": config.gateway.cluster,
        "network": snapshot.network(),
        "links": links(&config, &snapshot, &gateways, &issuers),
        "budgets": budgets(state),
        "peers": tunnels(&snapshot, &gateways, (state.peer_tunnels)()),
        "gateways": gateways.into_iter().map(gateway_to_json).collect::<Vec<_>>(),
        "loads": loads(&snapshot, &(state.bindings)()),
    })
}

/// Returns a row for each gateway and service port that tunnels have used lately, and for each
/// gateway of a binding, up to a limit.
fn loads(snapshot: &Snapshot, bindings: &[(Arc<str>, Arc<EndpointSet>)]) -> Vec<Value> {
    let now = Instant::now();
    let services = snapshot.services.iter();
    let sets = services.flat_map(|(host, service)| {
        let sets = service.transit_ports.iter();
        sets.map(move |(port, sets)| (format!("{host}:{port}"), &sets.always))
    });
    let bound = bindings.iter().map(|(name, set)| (name.to_string(), set));
    let rows = bound.chain(sets).flat_map(|(service, set)| {
        let endpoints = set.endpoints.iter().zip(&set.candidates);
        endpoints.filter_map(move |(endpoint, candidate)| {
            let state = &endpoint.state;
            let free = state.free_capacity(now);
            free.or_else(|| state.share(now))?;
            Some(json!({
                "gateway": endpoint.address.to_string(),
                "service": service,
                "counted": candidate.instances,
                "free": free.map(|hundredths| f64::from(hundredths) / 100.0),
                "dial": format!("{}ms", state.mean_dial_millis()),
                "dialMilliseconds": state.mean_dial_millis(),
                "factor": f64::from(candidate.factor(|| now)) / f64::from(FACTOR_ONE),
            }))
        })
    });
    rows.take(LOADS_MAX).collect()
}

/// Returns a row for each direction between this cluster and each other one that the trust set,
/// the links or a gateway names.
fn links(
    config: &Config,
    snapshot: &Snapshot,
    gateways: &[RemoteGatewayStatus],
    issuers: &[IssuerRow],
) -> Vec<Value> {
    let own = &*config.gateway.cluster;
    let configured = config.links.as_deref();
    let trust = &config.trust;
    let linked = configured.into_iter().flatten();
    let linked = linked.filter(|link| link.from == own || link.to == own);
    let domains = trust.domains.iter().map(|domain| &*domain.cluster);
    let clusters: BTreeSet<&str> = domains
        .chain(trust.clusters.iter().map(|cluster| &*cluster.name))
        .chain(linked.flat_map(|link| [&*link.from, &*link.to]))
        .chain(gateways.iter().map(|gateway| &*gateway.cluster))
        .filter(|cluster| !["", own, UNKNOWN_CLUSTER].contains(cluster))
        .collect();
    let rows = clusters.into_iter().flat_map(|cluster| {
        let to_us = snapshot.scope.linked.as_ref();
        let to_us = to_us.is_none_or(|linked| linked.contains(cluster));
        let is_ours = |from: &str, to: &str| (from, to) == (own, cluster);
        let from_us =
            configured.is_none_or(|links| links.iter().any(|link| is_ours(&link.from, &link.to)));
        let behind = gateways.iter().filter(|gateway| *gateway.cluster == *cluster);
        let ready = behind.clone().filter(|gateway| gateway.state == "ready");
        let tunnels: usize = behind.clone().map(|gateway| gateway.streams).sum();
        let of_cluster = |row: &&IssuerRow| row.cluster.as_deref() == Some(cluster);
        let issuers = issuers.iter().filter(of_cluster);
        let accepted: u64 = issuers.clone().map(|row| row.accepted).sum();
        let refused: u64 = issuers.map(|row| row.refused).sum();
        [
            json!({
                "from": cluster,
                "to": own,
                "linked": to_us,
                // Known only if the issuers determine the clusters.
                "accepted": (!trust.clusters.is_empty()).then_some(accepted),
                "refused": (!trust.clusters.is_empty()).then_some(refused),
            }),
            json!({
                "from": own,
                "to": cluster,
                "linked": from_us,
                "gateways": behind.count(),
                "ready": ready.count(),
                "tunnels": tunnels,
            }),
        ]
    });
    rows.collect()
}

/// Returns a row for each link with a budget.
fn budgets(state: &AdminState) -> Vec<Value> {
    let rows = state.metrics.link_usages().into_iter();
    let rows = rows.map(|usage| {
        json!({
            "from": usage.from,
            "to": usage.to,
            "used": usage.used,
            "budget": usage.budget,
            "usedBytes": usage.used,
            "budgetBytes": usage.budget,
            "weight": format!("{}%", usage.weight_percent),
            "weightPercent": usage.weight_percent,
        })
    });
    rows.collect()
}

/// Open tunnels between this gateway and one identity.
#[derive(Default)]
struct Tunnels {
    /// Tunnels that the identity has opened here.
    inbound: usize,
    /// Tunnels through gateways with the identity.
    outbound: usize,
}

/// Returns a row for each identity of a gateway of another network with a connection or tunnels.
/// Replicas share an identity.
fn tunnels(
    snapshot: &Snapshot,
    gateways: &[RemoteGatewayStatus],
    inbound: Vec<(Arc<str>, usize)>,
) -> Vec<Value> {
    let mut rows: BTreeMap<Arc<str>, Tunnels> = BTreeMap::new();
    for gateway in gateways {
        if let Some(identity) = &gateway.identity {
            rows.entry(Arc::clone(identity)).or_default().outbound += gateway.streams;
        }
    }
    for (identity, open) in inbound {
        if snapshot.is_gateway(&identity) || snapshot.trust.is_gateway(&identity) {
            rows.entry(identity).or_default().inbound = open;
        }
    }
    let rows = rows.into_iter();
    rows.map(|(identity, Tunnels { inbound, outbound })| {
        json!({"identity": identity, "in": inbound, "out": outbound})
    })
    .collect()
}

fn write_budgets(text: &mut Text, budgets: &[Value]) {
    if budgets.is_empty() {
        return;
    }
    text.heading("Budgets of links, in bytes of the current period", "");
    text.table(
        budgets,
        &[
            ("FROM", &key("from")),
            ("TO", &key("to")),
            ("USED", &key("used")),
            ("BUDGET", &key("budget")),
            ("WEIGHT", &key("weight")),
        ],
    );
}

pub(super) fn to_text(page: &Value, color: bool) -> String {
    let mut text = Text::new(color);
    text.heading("Links", "");
    let state = |row: &Value| {
        let state = if row["linked"] == true { "linked" } else { "not linked" };
        state.to_owned()
    };
    text.table(
        list(&page["links"]),
        &[
            ("FROM", &key("from")),
            ("TO", &key("to")),
            ("STATE", &state),
            ("GATEWAYS", &key("gateways")),
            ("READY", &key("ready")),
            ("TUNNELS", &key("tunnels")),
            ("ACCEPTED", &key("accepted")),
            ("REFUSED", &key("refused")),
        ],
    );
    write_budgets(&mut text, list(&page["budgets"]));
    let peers = list(&page["peers"]);
    if !peers.is_empty() {
        text.heading("Tunnels of peer gateways", "");
        text.table(
            peers,
            &[("IDENTITY", &key("identity")), ("IN", &key("in")), ("OUT", &key("out"))],
        );
    }
    text::gateways(&mut text, page, usize::MAX);
    let loads = list(&page["loads"]);
    if !loads.is_empty() {
        text.heading("Services behind gateways, used in the last minute", "");
        text.table(
            loads,
            &[
                ("GATEWAY", &key("gateway")),
                ("SERVICE", &key("service")),
                ("COUNTED", &key("counted")),
                ("FREE", &key("free")),
                ("TIME TO 200", &key("dial")),
                ("WEIGHT X", &key("factor")),
            ],
        );
    }
    if list(&page["gateways"]).is_empty() {
        text.line("");
        text.line("no gateways of other networks are known");
    }
    text.finish()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::admin::admin_router;
    use crate::admin::tests::{ask, fixture};
    use crate::config::{Link, LinkBudget};
    use crate::snapshot::builder::Change;
    use crate::snapshot::{BoundEndpoints, NetworkRule, NetworkTable, ServiceVisibility, TrustSet};
    use crate::wire::ServiceLoad;

    fn gateway() -> RemoteGatewayStatus {
        let address = ([192, 0, 2, 1], 15008).into();
        RemoteGatewayStatus {
            state: "ready",
            connections: 1,
            streams: 7,
            rtt: Some(Duration::from_millis(20)),
            identity: Some("spiffe://west.local/ns/g/sa/g".into()),
            ..RemoteGatewayStatus::unused(address, &"west-net".into(), &"west".into())
        }
    }

    #[tokio::test]
    async fn gateways_and_both_directions_of_each_link_are_listed() {
        let mut fixture = fixture();
        let other = ([192, 0, 2, 2], 15008).into();
        fixture.state.remote_gateways = Arc::new(move || {
            let unused = RemoteGatewayStatus::unused(other, &"west-net".into(), &"west".into());
            vec![gateway(), unused]
        });
        fixture.state.peer_tunnels = Arc::new(|| {
            let gateway = "spiffe://north.local/ns/g/sa/g".into();
            vec![(gateway, 3), ("spiffe://north.local/ns/a/sa/pod".into(), 9)]
        });
        let mut config = Config::clone(&fixture.state.config.load());
        let link = |from: &str, to: &str| Link {
            from: from.to_owned(),
            to: to.to_owned(),
            exposes: Vec::new(),
            budget: None,
        };
        config.links = Some(vec![link("north", "east"), link("west", "north")]);
        fixture.state.config.store(Arc::new(config));
        let visibility = ServiceVisibility {
            linked: Some(HashSet::from(["north".into(), "east".into()])),
            ..ServiceVisibility::default()
        };
        fixture.publisher.update(Change {
            scope: Some(visibility),
            trust: Some(TrustSet::default().with_gateways(["spiffe://north.local/ns/g/sa/g"])),
            ..Change::default()
        });
        let router = admin_router(fixture.state.clone());
        let (status, page) = ask(router.clone(), "GET", "/peers?format=json").await;
        assert_eq!(status, StatusCode::OK);
        let page: Value = serde_json::from_str(&page).expect("JSON");
        let links = list(&page["links"]).iter().map(|row| {
            let row = (&row["from"], &row["to"], &row["linked"], &row["tunnels"]);
            format!("{} {} {} {}", row.0, row.1, row.2, row.3)
        });
        let want = [
            "\"north\" \"east\" true null",
            "\"east\" \"north\" false 0",
            "\"west\" \"east\" false null",
            "\"east\" \"west\" false 7",
        ];
        assert_eq!(links.collect::<Vec<_>>(), want);
        assert_eq!(
            (&page["gateways"][0]["rtt"], &page["gateways"][1]["state"]),
            (&json!("20ms"), &json!("idle"))
        );
        let row = &page["gateways"][0];
        assert_eq!((&row["rttMicroseconds"], &row["sharePercent"]), (&json!(20_000), &json!(100)));
        assert_eq!(page["gateways"][1]["rttMicroseconds"], Value::Null);
        let (_, text) = ask(router, "GET", "/peers").await;
        let lines: Vec<_> = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        for want in [
            "east west not linked 2 1 7 - -",
            "spiffe://north.local/ns/g/sa/g 3 0",
            "spiffe://west.local/ns/g/sa/g 0 7",
            "192.0.2.1:15008 west-net ready 20ms 100% 7 0 spiffe://west.local/ns/g/sa/g -",
        ] {
            assert!(lines.iter().any(|line| line == want), "{want}\n{text}");
        }
        assert!(!text.contains("/sa/pod"), "{text}");
    }

    #[tokio::test]
    async fn loads_and_dial_times_of_the_gateways_of_bindings_are_listed() {
        let mut fixture = fixture();
        let gateway = NetworkRule {
            cluster: "west".into(),
            gateways: [("192.0.2.1".into(), 15008)].into(),
            ..NetworkRule::default()
        };
        fixture.publisher.update(Change {
            networks: Some(NetworkTable::from_iter([("west".into(), gateway)])),
            ..Change::default()
        });
        let bound = BoundEndpoints::new(["west".into()], "echo.app".into(), 80);
        let endpoints = bound.load(&fixture.state.reader.snapshot());
        let state = Arc::clone(&endpoints.endpoints[0].state);
        fixture.state.bindings =
            Arc::new(move || vec![("binding echo.app:80".into(), Arc::clone(&endpoints))]);
        let router = admin_router(fixture.state.clone());
        let (_, unused) = ask(router.clone(), "GET", "/peers").await;
        assert!(!unused.contains("echo.app:80"), "{unused}");
        state.record_dial(Duration::from_millis(80));
        let load = ServiceLoad { ready: 8, free_percent: 50 };
        state.record_load(load, Instant::now());
        let (_, text) = ask(router, "GET", "/peers").await;
        let words: Vec<_> = text.split_whitespace().collect();
        let row = "192.0.2.1:15008 binding echo.app:80 1 4.0 80ms";
        assert!(words.join(" ").contains(row), "{text}");
    }

    #[tokio::test]
    async fn budgets_are_listed_with_their_usage() {
        let fixture = fixture();
        let budget =
            LinkBudget { bytes: 1 << 20, period: Duration::from_secs(60), excess_weight: Some(10) };
        let link = Link {
            from: "west".to_owned(),
            to: "north".to_owned(),
            exposes: Vec::new(),
            budget: Some(budget),
        };
        let metrics = &fixture.state.metrics;
        metrics.set_link_budgets(Some(&[link]), "east");
        let (_, text) = ask(admin_router(fixture.state.clone()), "GET", "/peers").await;
        let words: Vec<_> = text.split_whitespace().collect();
        let row = "west north 0 1048576 100%";
        assert!(words.join(" ").contains(row), "{text}");
    }
}
