//! GET `/peers`: gateways of other networks, and links between this cluster and others.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use tokio::time::Instant;

use super::Form;
use crate::admin::AdminState;
use crate::admin::pages::{IssuerRow, LinkRow, LinkTraffic, LoadRow, PeerTunnels, PeersPage};
use crate::config::Config;
use crate::snapshot::{EndpointSet, FACTOR_ONE, Snapshot};
use crate::status::GatewayRow;
use crate::wire::UNKNOWN_CLUSTER;

/// Limit of listed loads.
const LOADS_MAX: usize = 1000;

pub(in crate::admin) async fn peers(
    State(state): State<AdminState>,
    Query(form): Query<Form>,
) -> Response {
    if let Some(refusal) = form.refusal("strait status peers") {
        return refusal;
    }
    // On a blocking thread, because a large mesh takes long.
    match tokio::task::spawn_blocking(move || page(&state)).await {
        Ok(page) => axum::Json(page).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Returns the page.
pub(in crate::admin) fn page(state: &AdminState) -> PeersPage {
    let (snapshot, config) = (state.reader.snapshot(), state.config.load_full());
    let gateways = (state.remote_gateways)();
    let issuers = (state.issuers)();
    PeersPage {
        cluster: config.gateway.cluster.clone(),
        network: snapshot.network().to_owned(),
        links: links(&config, &snapshot, &gateways, &issuers),
        budgets: state.metrics.budgets.usages(),
        peers: tunnels(&snapshot, &gateways, (state.peer_tunnels)()),
        loads: loads(&snapshot, &(state.bindings)()),
        gateways,
    }
}

/// Returns a row for each gateway and service port that tunnels have used lately, and for each
/// gateway of a binding, up to a limit.
fn loads(snapshot: &Snapshot, bindings: &[(Arc<str>, Arc<EndpointSet>)]) -> Vec<LoadRow> {
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
            Some(LoadRow {
                gateway: endpoint.address,
                service: service.clone(),
                counted: candidate.instances,
                free: free.map(|hundredths| f64::from(hundredths) / 100.0),
                dial: format!("{}ms", state.mean_dial_millis()),
                dial_milliseconds: state.mean_dial_millis(),
                factor: f64::from(candidate.factor(|| now)) / f64::from(FACTOR_ONE),
            })
        })
    });
    rows.take(LOADS_MAX).collect()
}

/// Returns a row for each direction between this cluster and each other one that the trust set,
/// the links or a gateway names.
fn links(
    config: &Config,
    snapshot: &Snapshot,
    gateways: &[GatewayRow],
    issuers: &[IssuerRow],
) -> Vec<LinkRow> {
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
        let tunnels: usize = behind.clone().map(|gateway| gateway.tunnels).sum();
        let of_cluster = |row: &&IssuerRow| row.cluster.as_deref() == Some(cluster);
        let issuers = issuers.iter().filter(of_cluster);
        let accepted: u64 = issuers.clone().map(|row| row.accepted).sum();
        let refused: u64 = issuers.map(|row| row.refused).sum();
        let row = |from: &str, to: &str, linked, traffic| LinkRow {
            from: from.to_owned(),
            to: to.to_owned(),
            linked,
            traffic,
        };
        // Known only if the issuers determine the clusters.
        let known = !trust.clusters.is_empty();
        let inbound = LinkTraffic::Inbound {
            accepted: known.then_some(accepted),
            refused: known.then_some(refused),
        };
        let (gateways, ready) = (behind.count(), ready.count());
        let outbound = LinkTraffic::Outbound { gateways, ready, tunnels };
        [row(cluster, own, to_us, inbound), row(own, cluster, from_us, outbound)]
    });
    rows.collect()
}

/// Returns a row for each identity of a gateway of another network with a connection or tunnels.
fn tunnels(
    snapshot: &Snapshot,
    gateways: &[GatewayRow],
    inbound: Vec<(Arc<str>, usize)>,
) -> Vec<PeerTunnels> {
    let mut rows: BTreeMap<Arc<str>, PeerTunnels> = BTreeMap::new();
    let mut row = |identity: &Arc<str>, inbound, outbound| {
        let identity = Arc::clone(identity);
        let row = rows.entry(Arc::clone(&identity)).or_default();
        row.identity = identity;
        row.inbound += inbound;
        row.outbound += outbound;
    };
    for gateway in gateways {
        if let Some(identity) = &gateway.identity {
            row(identity, 0, gateway.tunnels);
        }
    }
    for (identity, open) in inbound {
        if snapshot.is_gateway(&identity) || snapshot.trust.is_gateway(&identity) {
            row(&identity, open, 0);
        }
    }
    rows.into_values().collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Arc;
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;
    use crate::admin::admin_router;
    use crate::admin::tests::{ask, fixture};
    use crate::config::{Link, LinkBudget};
    use crate::snapshot::builder::Change;
    use crate::snapshot::tests::hosts;
    use crate::snapshot::{BoundEndpoints, Network, NetworkTable, ServiceVisibility, TrustSet};
    use crate::wire::ServiceLoad;

    fn gateway() -> GatewayRow {
        let (address, rtt) = (([192, 0, 2, 1], 15008).into(), Duration::from_millis(20));
        GatewayRow {
            state: "ready".to_owned(),
            connections: 1,
            tunnels: 7,
            identity: Some("spiffe://west.local/ns/g/sa/g".into()),
            ..GatewayRow::new(address, ["west-net", "west"], Some(rtt), 100)
        }
    }

    #[tokio::test]
    async fn gateways_and_both_directions_of_each_link_are_listed() {
        let mut fixture = fixture();
        let other = ([192, 0, 2, 2], 15008).into();
        fixture.state.remote_gateways = Arc::new(move || {
            vec![gateway(), GatewayRow::new(other, ["west-net", "west"], None, 100)]
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
        let links = page["links"].as_array().expect("a list").iter().map(|row| {
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
        let outbound = json!({
            "from": "east", "to": "west", "linked": false, "gateways": 2, "ready": 1, "tunnels": 7,
        });
        assert_eq!(page["links"][3], outbound);
        let tunnels = json!([
            { "identity": "spiffe://north.local/ns/g/sa/g", "in": 3, "out": 0 },
            { "identity": "spiffe://west.local/ns/g/sa/g", "in": 0, "out": 7 },
        ]);
        assert_eq!(page["peers"], tunnels);
    }

    #[tokio::test]
    async fn loads_and_dial_times_of_the_gateways_of_bindings_are_listed() {
        let mut fixture = fixture();
        let gateway = Network {
            cluster: Some("west".into()),
            gateways: hosts(&["192.0.2.1:15008"]),
            ..Network::default()
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
        let page: Value = serde_json::from_str(&text).expect("JSON");
        let row = &page["loads"][0];
        assert_eq!(
            [&row["gateway"], &row["service"], &row["counted"], &row["free"], &row["dial"]],
            [
                &json!("192.0.2.1:15008"),
                &json!("binding echo.app:80"),
                &json!(1),
                &json!(4.0),
                &json!("80ms")
            ]
        );
        assert_eq!(row["dialMilliseconds"], 80);
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
        let page: Value = serde_json::from_str(&text).expect("JSON");
        let want = json!([{
            "from": "west", "to": "north", "used": 0, "budget": 1_048_576, "usedBytes": 0,
            "budgetBytes": 1_048_576, "weight": "100%", "weightPercent": 100,
        }]);
        assert_eq!(page["budgets"], want);
    }
}
