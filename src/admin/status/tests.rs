//! Tests of the status page as text.

use std::time::Duration;

use super::*;
use crate::admin::tests::{Fixture, ask, fixture};
use crate::admin::{ListenerState, admin_router};
use crate::config::{
    Audience, ExposedService, HostPort, Line, Listener, ListenerProtocol, ObjectBindings, SniRoute,
    TlsRouting,
};
use crate::limits::{OwnedPool, Pool, Resource, Source};
use crate::status::{
    Discovery as Stream, HostnameStatus, HostnameStatuses, Rejection, ResourceType, Unused,
};
use crate::wire::sni::{RouteBy, SniPattern};

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
        name: "addresses",
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
        name: "clusters",
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

fn service() -> Value {
    let endpoint = |uid: &str, address: Option<&str>, unused: Option<&str>| {
        json!({
            "port": 80,
            "uid": uid,
            "address": address,
            "weight": 1,
            "tunnels": u32::from(unused.is_none()),
            "unused": unused,
        })
    };
    json!({
        "service": "app/echo.app",
        "ports": [80, 81],
        "used": 1,
        "total": 2,
        "tunnels": 1,
        "exposedTo": ["cluster west on port 80", "cluster north"],
        "endpoints": [
            endpoint("a", Some("10.0.0.1:15008"), None),
            endpoint("long-uid", None, Some("unhealthy")),
        ],
        "more": 4,
    })
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

fn page() -> Value {
    let hosts = HostnameStatuses {
        list: vec![host("a.example", None), host("db.example", Some("timed out"))],
        left_out: 0,
    };
    json!({
        "version": "0.1.0",
        "at": rfc3339(at(3660)),
        "ready": false,
        "pending": ["discovery (clusters)"],
        "problems": ["11 of addresses are rejected"],
        "cluster": "east",
        "network": "net",
        "locality": { "region": "us", "zone": "a", "subzone": "", "origin": "pod" },
        "snapshot": 7,
        "mesh": { "services": 60, "workloads": 2, "policies": 0 },
        "crls": [],
        "issuers": [],
        "gateways": [],
        "listeners": listeners(),
        "shares": [],
        "source": { "kind": "istio", "place": "istiod:15012", "stream": stream() },
        "evacuated": ["us-east-2"],
        "certificates": [{
            "identity": "spiffe://east.local/ns/a/sa/b",
            "state": "Available",
            "serial": "17",
            "expires": "2026-01-02T01:01:00Z",
        }],
        "reloads": [{
            "what": "config",
            "at": rfc3339(at(0)),
            "inUse": false,
            "error": "line 3",
        }],
        "hosts": hosts,
        "services": { "total": 60, "list": [service()] },
    })
}

#[test]
fn the_page_is_aligned_and_says_when_and_why() {
    let text = text::page(&page(), false, false);
    let rejected = "  rejected of addresses: east//Pod/app/bad: workload.addresses[0]: 5 \
                    bytes\\u{1b}[2J (version 7, 2m ago)\n";
    let want = format!(
        r#"strait 0.1.0  not ready, pending: discovery (clusters)
cluster east, network net, locality us/a (pod); snapshot 7: 60 services, 2 workloads, 0 policies

Problems
  11 of addresses are rejected

Operator  until a restart
  us-east-2 is evacuated; `strait drain region us-east-2 --undo` puts it back

Listeners
  NAME   ADDRESS        PROTOCOL  ROUTED         SOURCES                   STATE
  mesh   0.0.0.0:15008  hbone     by authority   every address             open
  istio  0.0.0.0:15443  tls       istio          every address             waits for a certificate
  sni    0.0.0.0:15012  tls       by its routes  10.0.0.0/8, 192.0.2.1/32  open
  mesh   0.0.0.0:15008  hbone     by authority   every address             failed, see Problems
  mesh   0.0.0.0:15008  hbone     by authority   every address             draining
  THROUGH  ASKED FOR BY            REACHED                     BY
  mesh     any authority           services by their exposure  the trust set
  istio    outbound_.PORT_._.HOST  services exposed to anyone  anyone
  sni      *.a, *                  echo.app:80                 anyone from 10.0.0.0/8, 192.0.2.1/32

Discovery  istio istiod:15012
  not connected since 2026-01-01T01:00:00Z (1m ago)
  unavailable: "gone"
  tried 3 times, next in 2s
  state on disk of 2026-01-01T00:59:55Z (1m 5s ago)
  TYPE       STATE    HELD  REJECTED     NACKS  VERSION                 LAST ACCEPTED
  addresses  synced   12    at least 11  2      2026-01-01T00:00:00Z/7  1h 1m ago
  clusters   pending  0     0            0      (0 responses)           never
{rejected}  and 1 more, see `strait dump`
{unused}  and 2 more, see `strait dump`

Certificates
  IDENTITY                       STATE      SERIAL  EXPIRES
  spiffe://east.local/ns/a/sa/b  Available  17      in 1day (2026-01-02T01:01:00Z)

Changes read
  SOURCE  READ       RESULT
  config  1h 1m ago  rejected, see Problems; the previous state is in use

Hostnames
  NAME        ANSWERED  LAST ERROR  ADDRESSES
  db.example  1m ago    timed out   10.0.0.1,10.0.0.2
  a.example   never     -           10.0.0.1,10.0.0.2 and more

Services
  SERVICE       PORTS  ENDPOINTS USED  TUNNELS  EXPOSED TO
  app/echo.app  80,81  1 of 2          1        cluster west on port 80; cluster north
  1 of 60 services; see one by `strait status SERVICE`, all by --all
"#,
        rejected = rejected.repeat(10),
        unused = "  not used of clusters: x\\u{1b}: no service by its name\n".repeat(10),
    );
    assert_eq!(text, want);
}

#[test]
fn a_binding_is_used_by_the_identities_of_its_clients() {
    let cluster = |name: &str| Audience { cluster: Some(name.to_owned()), ..Audience::default() };
    let narrow = Audience {
        namespaces: vec!["shop".to_owned(), "web".to_owned()],
        service_accounts: vec![("shop".to_owned(), "cart".to_owned())],
        ..Audience::default()
    };
    let anyone = Audience { anyone: true, ..Audience::default() };
    for (to, want) in [
        (vec![], "anyone from 10.0.0.0/8"),
        (vec![anyone], "the trust set from 10.0.0.0/8"),
        (vec![cluster("west"), cluster("north")], "cluster west; cluster north from 10.0.0.0/8"),
        (vec![narrow], "any cluster, namespace shop or web, account shop/cart from 10.0.0.0/8"),
    ] {
        let template = ObjectBindings {
            addresses: "127.64.0.0/10".parse().unwrap(),
            clients: vec!["10.0.0.0/8".parse().unwrap()],
            to,
        };
        let service = HostPort::parse("pay.app:80").unwrap();
        let local = ("pay.global".to_owned(), ([127, 64, 0, 1], 80).into());
        let binding = template.binding((vec!["west".to_owned()], service), local, Line::default());
        let mut page = page();
        page["listeners"] = json!([ListenerRow {
            listener: Listener::from(&binding),
            address: binding.listen,
            state: ListenerState::Open,
            error: None,
        }]);
        let text = text::page(&page, false, false);
        let row = format!("any connection, as pay.global  pay.app:80 of west  {want}\n");
        assert!(text.contains(&row), "{text}");
    }
}

#[test]
fn one_service_has_its_endpoints_and_why_they_are_not_used() {
    let mut page = page();
    page["ready"] = true.into();
    let text = text::page(&page, true, true);
    let want = "\u{1b}[1mstrait\u{1b}[0m 0.1.0  \u{1b}[32mready\u{1b}[0m
cluster east, network net, locality us/a (pod); snapshot 7: 60 services, 2 workloads, 0 policies

\u{1b}[1mService\u{1b}[0m  app/echo.app
  exposed to cluster west on port 80
  exposed to cluster north
  1 of 2 workloads used
  PORT  WORKLOAD  ADDRESS         WEIGHT  TUNNELS  STATE
  80    a         10.0.0.1:15008  1       1        used
  80    long-uid  -               1       0        not used: unhealthy
  and 4 more; see all by --all
";
    assert_eq!(text, want);
}

/// Returns the status page of a gateway with these issuers and pools.
async fn page_with(issuers: Vec<IssuerRow>, pools: Vec<OwnedPool>) -> String {
    let Fixture { mut state, .. } = fixture();
    state.issuers = Arc::new(move || issuers.clone());
    state.pools = Arc::new(move || pools.clone());
    ask(admin_router(state), "GET", "/status").await.1
}

#[tokio::test]
async fn issuers_are_a_table_with_the_busiest_first() {
    let row = |spki: &str, cluster: Option<&str>, accepted, refused| IssuerRow {
        spki: spki.into(),
        subject: format!("CN={spki}"),
        cluster: cluster.map(Into::into),
        accepted,
        refused,
    };
    let rows =
        vec![row("b", None, 1, 1), row("c", Some("west"), 7, 0), row("a", Some("east"), 2, 0)];
    let want = "
  SPKI SHA-256  SUBJECT  CLUSTER  ACCEPTED  REFUSED
  c             CN=c     west     7         0
  a             CN=a     east     2         0
  b             CN=b     -        1         1

";
    let text = page_with(rows, Vec::new()).await;
    assert!(text.contains(want), "{text}");
    assert!(!text.contains("Shares"), "{text}");
    let many = (0..30).map(|_| row("x", None, 1, 0)).collect();
    let text = page_with(many, Vec::new()).await;
    assert_eq!(text.matches("CN=x").count(), 20, "{text}");
    let more = "\n  and 10 more, see `strait status --json`\n";
    assert!(text.contains(more), "{text}");
}

#[tokio::test]
async fn holders_of_each_resource_are_a_table_with_the_largest_first() {
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
    let want = "Shares
  RESOURCE     OF  USED       HOLDER           HELD
  descriptors  -   12 of 100  cluster west     10
  descriptors  -   12 of 100  identity a       10
  descriptors  -   12 of 100  source 10.0.0.1  2
  tunnels      -   4          cluster west     4
";
    let text = page_with(Vec::new(), all.to_vec()).await;
    assert!(text.contains(want), "{text}");
    assert!(!text.contains("Issuers"), "{text}");
}

#[test]
fn exposure_says_to_whom_and_by_which_rule() {
    use crate::snapshot::builder::Change;
    use crate::snapshot::tests::entry;
    use crate::snapshot::{Audience, ExportSet, ExposureTable, Publisher};
    let reported = |table: ExposureTable, exports: &[(&str, u16)]| {
        let publisher = Publisher::new();
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

fn gateway(state: &'static str, error: &str) -> RemoteGatewayStatus {
    RemoteGatewayStatus {
        state,
        connections: 1,
        sources: 2,
        streams: 7,
        rtt: Some(Duration::from_micros(20_500)),
        share_percent: 80,
        last_error: error.into(),
        identity: Some("spiffe://west.local/ns/g/sa/g".into()),
        not_after: Some(at(7200)),
        ..RemoteGatewayStatus::unused(
            ([192, 0, 2, 1], 15008).into(),
            &"west-net".into(),
            &"west".into(),
        )
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
    status.set_crls(vec![crl("CN=west", Some("7")), crl("CN=east", None)]);
    status.set_reload(ReloadSource::Config, Err("line 3".into()));
    status.set_partial_reload(ReloadSource::Objects, "a part".into());
    status.set_reload(ReloadSource::Certificates, Ok(()));
    for new in [host("a.example", None), host("db.example", Some("timed out"))] {
        status.set_host(&new.name.clone(), |host| *host = new);
    }
    status.set_hosts_left_out(3);
    status.set_conflicts(vec!["o.yaml:1: warning: a claim".into()]);
    status.set_unlisted_roots(vec!["CN=root".into()]);
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
    let binding = template.binding((vec!["west".to_owned()], service), local, Line::default());
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
    use crate::snapshot::tests::entry;
    use crate::snapshot::{ExposureTable, NetworkRule, NetworkTable};
    let mut fixture = fixture();
    let Fixture { state, publisher, .. } = &mut fixture;
    let mut exposure = ExposureTable::new(false);
    let west = Audience { cluster: Some("west".into()), ..Audience::default() };
    exposure.add(entry("echo.app:80", vec![west]));
    let rule = NetworkRule {
        cluster: "west".into(),
        gateways: [("192.0.2.1".into(), 15008)].into(),
        ..NetworkRule::default()
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
        page["at"] = rfc3339(at(3660)).into();
        page["source"]["place"] = "mesh.yaml".into();
        for reload in page["reloads"].as_array_mut().expect("a list") {
            reload["at"] = rfc3339(at(3600)).into();
        }
    }
    page
}

#[tokio::test(start_paused = true)]
async fn pages_have_all_recorded_keys_and_the_recorded_text() {
    let (json, text) = (include_str!("pages/status.json"), include_str!("pages/status.txt"));
    let page = full_page("/status?format=json").await;
    assert_eq!(page, serde_json::from_str::<Value>(json).expect("JSON"), "{page:#}");
    assert_eq!(text::page(&page, false, false), text);
    let (json, text) = (include_str!("pages/service.json"), include_str!("pages/service.txt"));
    let page = full_page("/status?format=json&service=echo").await;
    assert_eq!(page, serde_json::from_str::<Value>(json).expect("JSON"), "{page:#}");
    assert_eq!(text::page(&page, true, false), text);
    let (json, text) = (include_str!("pages/peers.json"), include_str!("pages/peers.txt"));
    let page = full_page("/peers?format=json").await;
    assert_eq!(page, serde_json::from_str::<Value>(json).expect("JSON"), "{page:#}");
    assert_eq!(peers::to_text(&page, false), text);
}
