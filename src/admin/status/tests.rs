//! Tests of the status page.

use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::admin::tests::{Fixture, ask, fixture};
use crate::admin::{ListenerState, admin_router};
use crate::config::{
    Audience, ExposedService, HostPort, Line, Listener, ListenerProtocol, ObjectBindings, SniRoute,
    TlsRouting,
};
use crate::limits::{OwnedPool, Pool, Resource, Source};
use crate::status::{
    Discovery as Stream, GatewayRow, HostnameStatus, Rejection, ResourceType, Unused,
};
use crate::wire::sni::{RouteBy, SniPattern};

fn written(at: SystemTime) -> String {
    humantime::format_rfc3339_seconds(at).to_string()
}

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_225_600 + seconds)
}

fn stream() -> Stream {
    let rejection = Rejection {
        name: "east//Pod/app/bad".into(),
        reason: "workload.addresses[0]: 5 bytes\u{1b}[2J".into(),
        version: "7".into(),
        since: at(3540),
    };
    let addresses = ResourceType {
        name: "addresses".into(),
        synced: true,
        held: 12,
        accepted: Some(at(0)),
        version: "2026-01-01T00:00:00Z/7".into(),
        responses: 5,
        nacks: 2,
        rejected: 11,
        at_least: true,
        rejections: vec![rejection; 11],
        ..ResourceType::default()
    };
    let unused = Unused { name: "x\u{1b}".into(), why: "no service by its name".into() };
    let clusters = ResourceType {
        name: "clusters".into(),
        unused: 12,
        unused_first: vec![unused; 12],
        ..ResourceType::default()
    };
    Stream {
        address: "istiod:15012".into(),
        since: Some(at(3600)),
        why: Some("unavailable: \"gone\"".into()),
        retries: 3,
        next_try: Some(at(3662)),
        types: vec![addresses, clusters],
        saved: Some(at(3595)),
        ..Stream::default()
    }
}

fn host(name: &str, error: Option<&str>) -> HostnameStatus {
    HostnameStatus {
        name: name.into(),
        addresses: vec![[10, 0, 0, 1].into(), [10, 0, 0, 2].into()],
        more: usize::from(error.is_none()),
        answered: error.is_some().then(|| at(3600)),
        error: error.map(Into::into),
    }
}

fn listeners() -> Vec<ListenerRow> {
    let listener = |name: &str, port, sources: &[&str], protocol| Listener {
        name: name.into(),
        bind: ([0; 4], port).into(),
        line: Line::default(),
        sources: sources.iter().map(|one| one.parse().unwrap()).collect(),
        balancers: Vec::new(),
        protocol,
    };
    let row = |listener: Listener, state| ListenerRow {
        address: listener.bind,
        listener,
        state,
        error: None,
    };
    let route_by = RouteBy::default();
    let transit = crate::wire::Transit::Always;
    let hbone = ListenerProtocol::Hbone { route_by, transit };
    let hbone = listener("mesh", 15008, &[], hbone);
    let istio = ListenerProtocol::Tls(TlsRouting::Istio { routing: "istio" });
    let routes = vec![SniRoute {
        sni: vec![SniPattern::parse("*.a").unwrap(), SniPattern::Any],
        to: HostPort::parse("echo.app:80").unwrap(),
        line: Line::default(),
    }];
    let routes = ListenerProtocol::Tls(TlsRouting::Routes { routes });
    let narrow = ["10.0.0.0/8", "192.0.2.1/32"];
    vec![
        row(hbone.clone(), ListenerState::Open),
        row(listener("istio", 15443, &[], istio), ListenerState::Waiting),
        row(listener("sni", 15012, &narrow, routes), ListenerState::Open),
        row(hbone.clone(), ListenerState::Failed),
        row(hbone, ListenerState::Draining),
    ]
}

/// Returns the status page of a gateway with these issuers and pools.
async fn page_with(issuers: Vec<IssuerRow>, pools: Vec<OwnedPool>) -> Value {
    let Fixture { mut state, .. } = fixture();
    state.issuers = Arc::new(move || issuers.clone());
    state.pools = Arc::new(move || pools.clone());
    let (_, page) = ask(admin_router(state), "GET", "/status").await;
    serde_json::from_str(&page).expect("JSON")
}

#[tokio::test]
async fn the_busiest_issuers_come_first() {
    let row = |spki: &str, accepted, refused| IssuerRow {
        spki: spki.into(),
        subject: format!("CN={spki}"),
        cluster: None,
        accepted,
        refused,
    };
    let rows = vec![row("b", 1, 1), row("c", 7, 0), row("a", 2, 0)];
    let page = page_with(rows, Vec::new()).await;
    let issuers = page["issuers"].as_array().expect("a list").iter();
    let order: Vec<_> = issuers.map(|row| row["spki"].as_str().expect("text")).collect();
    assert_eq!(order, ["c", "a", "b"]);
    assert_eq!(page["shares"], json!([]));
}

#[tokio::test]
async fn the_largest_holders_of_each_resource_come_first() {
    let descriptors = Pool::new(Resource::Descriptors, 100);
    let tunnels = Pool::new(Resource::Tunnels, usize::MAX);
    let bound = Pool::new(Resource::BindingClients, 8);
    let west = Source::cluster(&"west".into());
    let address = Source::prefix([10, 0, 0, 1].into());
    let _held = [
        descriptors.account(&west.identity(&"a".into())).charge(10),
        descriptors.account(&address).charge(2),
        tunnels.account(&west).charge(4),
    ];
    let all = [(&bound, Some("pay")), (&descriptors, None), (&tunnels, None)];
    let all = all.map(|(pool, of)| OwnedPool::new(pool, of.map(ToOwned::to_owned)));
    let page = page_with(Vec::new(), all.to_vec()).await;
    let holder = |source: &str, held: u32| json!({ "source": source, "held": held });
    let holders =
        [holder("cluster west", 10), holder("identity a", 10), holder("source 10.0.0.1", 2)];
    let want = json!([
        { "resource": "descriptors", "of": null, "used": 12, "max": 100, "holders": holders },
        {
            "resource": "tunnels", "of": null, "used": 4, "max": null,
            "holders": [holder("cluster west", 4)],
        },
    ]);
    assert_eq!(page["shares"], want);
}

#[test]
fn exposure_says_to_whom_and_by_which_rule() {
    use crate::snapshot::builder::Change;
    use crate::snapshot::tests::entry;
    use crate::snapshot::{Audience, ExportSet, ExposureTable, Publisher};
    let reported = |table: ExposureTable, exports: &[(&str, u16)]| {
        let publisher = Publisher::default();
        publisher.update(Change {
            mesh: Some((crate::admin::tests::mesh(), "east".into())),
            exposure: Some(table),
            exports: Some(exports.iter().copied().collect::<ExportSet>()),
            ..Change::default()
        });
        let snapshot = publisher.reader().snapshot();
        let access = AnonymousAccess::new(&snapshot, &[]);
        exposed_to(&snapshot, &access, snapshot.mesh.services.sorted()[0])
    };
    assert_eq!(reported(ExposureTable::new(false), &[]), ["nobody"]);
    assert_eq!(reported(ExposureTable::new(true), &[]), ["the trust set (exposure.default)"]);
    assert_eq!(
        reported(ExposureTable::new(false), &[("echo.app", 81), ("echo.app", 99)]),
        ["the trust set on port 81 (export set)"]
    );
    let to = vec![
        Audience {
            cluster: Some("west".into()),
            namespaces: vec!["a".into(), "b".into()],
            service_accounts: vec![("a".into(), "x".into())],
            ..Audience::default()
        },
        Audience { anyone: true, ..Audience::default() },
    ];
    let exposed = |to| {
        let mut table = ExposureTable::new(true);
        table.add(entry("echo.app:80", to));
        table
    };
    assert_eq!(
        reported(exposed(to), &[("echo.app", 81)]),
        [
            "cluster west, namespace a or b, account a/x on port 80",
            "every peer of the trust set on port 80"
        ]
    );
    assert_eq!(reported(exposed(vec![]), &[]), ["nobody: its `to` is empty"]);
    let mut of_other = ExposureTable::new(true);
    let to = vec![Audience { anyone: true, ..Audience::default() }];
    let namespace = Some("other".into());
    of_other.add(ExposedService { namespace, ..entry("echo.app", to) });
    assert_eq!(
        reported(of_other, &[]),
        ["nobody: `exposure` selects the service of namespace other"]
    );
}

fn gateway(state: &'static str, error: &str) -> GatewayRow {
    let (address, rtt) = (([192, 0, 2, 1], 15008).into(), Duration::from_micros(20_500));
    GatewayRow {
        state: state.into(),
        connections: 1,
        sources: 2,
        tunnels: 7,
        error: error.into(),
        identity: Some("spiffe://west.local/ns/g/sa/g".into()),
        expires: Some(at(7200)),
        ..GatewayRow::new(address, ["west-net", "west"], Some(rtt), 80)
    }
}

/// Sets something of each kind that the status has.
fn fill(status: &crate::status::Status) {
    status.set_discovery(|discovery| *discovery = stream());
    status.set_certificate(crate::admin::tests::certificate());
    let crl = |issuer: &str, number: Option<&str>| Crl {
        file: "west.crl".into(),
        issuer: issuer.into(),
        number: number.map(Into::into),
        next_update: at(0) - Duration::from_secs(1_000_000_000),
    };
    *status.crls.lock() = vec![crl("CN=west", Some("7")), crl("CN=east", None)];
    status.set_reload(ReloadSource::Config, Err("line 3".into()));
    status.set_reload(ReloadSource::Objects, Ok(Some("a part".into())));
    status.set_reload(ReloadSource::Certificates, Ok(None));
    for new in [host("a.example", None), host("db.example", Some("timed out"))] {
        status.set_host(&new.name.clone(), |host| *host = new);
    }
    status.set_hosts_left_out(3);
    *status.conflicts.lock() = vec!["o.yaml:1: warning: a claim".into()];
    *status.unlisted_roots.lock() = vec!["CN=root".into()];
}

/// Adds links, one of them with a budget, and the gateways of another network.
fn link(state: &mut AdminState) {
    use crate::config::{Link, LinkBudget};
    let mut config = Config::clone(&state.config.load());
    let budget =
        LinkBudget { bytes: 1 << 20, period: Duration::from_secs(60), excess_weight: Some(10) };
    let link = |from: &str, to: &str, budget| Link {
        from: from.into(),
        to: to.into(),
        exposes: Vec::new(),
        budget,
    };
    let links = vec![link("north", "east", None), link("west", "north", Some(budget))];
    state.metrics.set_link_budgets(Some(&links), "east");
    config.links = Some(links);
    state.config.store(Arc::new(config));
    state.remote_gateways = Arc::new(|| vec![gateway("ready", ""), gateway("failed", "refused")]);
}

/// Returns the listener of a binding that could not be opened.
fn failed_binding() -> ListenerRow {
    let template = ObjectBindings {
        addresses: "127.64.0.0/10".parse().unwrap(),
        clients: vec!["10.0.0.0/8".parse().unwrap()],
        to: vec![Audience { anyone: true, ..Audience::default() }],
    };
    let service = HostPort::parse("pay.app:80").unwrap();
    let local = ("pay.global".to_owned(), ([127, 64, 0, 1], 80).into());
    let binding =
        template.binding((vec!["west".to_owned()], service), local, vec![Line::default()]);
    ListenerRow {
        listener: Listener::from(&binding),
        address: binding.listen,
        state: ListenerState::Failed,
        error: Some("in use".into()),
    }
}

/// Returns a gateway with something of each kind to show.
fn full() -> Fixture {
    use crate::snapshot::builder::Change;
    use crate::snapshot::tests::{entry, hosts};
    use crate::snapshot::{ExposureTable, Network, NetworkTable};
    let mut fixture = fixture();
    let Fixture { state, publisher, .. } = &mut fixture;
    let mut exposure = ExposureTable::new(false);
    let west = Audience { cluster: Some("west".into()), ..Audience::default() };
    exposure.add(entry("echo.app:80", vec![west]));
    let rule = Network {
        cluster: Some("west".into()),
        gateways: hosts(&["192.0.2.1:15008"]),
        ..Network::default()
    };
    publisher.update(Change {
        mesh: Some((crate::admin::tests::mesh(), "east".into())),
        exposure: Some(exposure),
        networks: Some(NetworkTable::from_iter([("west".into(), rule)])),
        ..Change::default()
    });
    fill(&state.status);
    link(state);
    state.issuers = Arc::new(|| {
        let row = |spki: &str, cluster: Option<&str>, accepted| IssuerRow {
            spki: spki.into(),
            subject: format!("CN={spki}"),
            cluster: cluster.map(Into::into),
            accepted,
            refused: 1,
        };
        vec![row("a", None, 1), row("b", Some("west"), 9)]
    });
    let pool = Pool::new(Resource::Descriptors, 100);
    let held = pool.account(&Source::cluster(&"west".into())).charge(10);
    state.pools = Arc::new(move || {
        let _ = &held;
        vec![OwnedPool::new(&pool, Some("pay".into()))]
    });
    state.listeners = Arc::new(|| listeners().into_iter().chain([failed_binding()]).collect());
    fixture
}

/// Requests a page of the full gateway, and replaces what differs between runs.
async fn full_page(path: &str) -> Value {
    let Fixture { state, _log, .. } = full();
    let (_, page) = ask(admin_router(state), "GET", path).await;
    let mut page: Value = serde_json::from_str(&page).expect("JSON");
    if page["at"].is_string() {
        page["at"] = written(at(3660)).into();
        page["source"]["place"] = "mesh.yaml".into();
        for reload in page["reloads"].as_array_mut().expect("a list") {
            reload["at"] = written(at(3600)).into();
        }
    }
    page
}

#[tokio::test(start_paused = true)]
async fn pages_have_all_recorded_keys() {
    for (path, recorded) in [
        ("/status", include_str!("pages/status.json")),
        ("/status?service=echo", include_str!("pages/service.json")),
        ("/peers", include_str!("pages/peers.json")),
    ] {
        let page = full_page(path).await;
        let recorded: Value = serde_json::from_str(recorded).expect("JSON");
        assert_eq!(page, recorded, "{path}: {page:#}");
    }
}
