//! Tests of the three routers, by single requests.

mod istioctl;

use std::path::Path;

use axum::body::{Body, to_bytes};
use axum::http::{Request, header};
use serde_json::{Value, json};
use tower::ServiceExt;
use tracing::Subscriber;

use super::*;
use crate::config::{ExposedService, Log, LogFormat};
use crate::explain::Answer;
use crate::snapshot::builder::Change;
use crate::snapshot::mesh::{GatewayAddress, Mesh, Place, Service, Template, Waypoint, Workload};
use crate::snapshot::tests::{entry, hosts};
use crate::snapshot::{ExposureTable, InFlight, Protocol, Publisher};
use crate::status::{Certificate, CertificateInfo, ReloadSource};
use crate::telemetry::logging;

/// State of the routers. The log exists as long as its subscriber.
pub(crate) struct Fixture {
    pub(crate) state: AdminState,
    pub(crate) publisher: Arc<Publisher>,
    pub(super) _log: Box<dyn Subscriber>,
}

/// Every configured file is one that exists.
const CONFIG: &str = "
gateway: {cluster: east, network: east}
identity: {kind: files, chain: Cargo.toml, key: Cargo.toml, roots: Cargo.toml}
trust: {domains: [{name: east.local, cluster: east}]}
listeners: [{name: cross-network, bind: '127.0.0.1:15008', protocol: hbone}]
discovery: {kind: file, path: Cargo.toml}
exposure: {default: all}
";

fn config() -> Config {
    parsed(CONFIG)
}

fn parsed(text: &str) -> Config {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("strait.yaml");
    let (config, findings) = Config::parse(&path, text);
    config.unwrap_or_else(|| panic!("{findings:?}"))
}

impl Fixture {
    /// Adds a binding to a service of cluster west.
    pub(crate) fn bind(&self, service: &str) {
        let domains = "domains: [{name: west.local, cluster: west}, ";
        let text = CONFIG.replace("domains: [", domains);
        let binding = format!("{{cluster: west, service: '{service}', listen: '127.0.0.1:8080'}}");
        let config = parsed(&format!("{text}bindings: [{binding}]\n"));
        self.state.config.store(Arc::new(config));
    }
}

pub(crate) fn fixture() -> Fixture {
    let log = Log { level: "info".into(), format: LogFormat::Text, ..Log::default() };
    let (subscriber, log) = logging::build(&log, std::io::sink, false, None).expect("a log");
    let publisher = Arc::new(Publisher::default());
    let state = AdminState {
        reader: publisher.reader(),
        publisher: Arc::clone(&publisher),
        status: Arc::new(Status::new(&["certificates", "mesh"])),
        metrics: Arc::new(Metrics::new()),
        lifecycle: Lifecycle::default(),
        log,
        config: Arc::new(ArcSwap::from_pointee(config())),
        deny_list: Arc::new(|address| address.ip().is_loopback().then_some("a loopback address")),
        pools: Arc::new(Vec::new),
        issuers: Arc::new(Vec::new),
        remote_gateways: Arc::new(Vec::new),
        bindings: Arc::new(Vec::new),
        peer_tunnels: Arc::new(Vec::new),
        explain: Arc::new(|question| {
            if question.to.as_deref() == Some("wrong") {
                return Err("write it right".to_owned());
            }
            let requested = serde_urlencoded::to_string(question).expect("a query");
            Ok(Answer { notes: vec![requested], ..Answer::default() })
        }),
        listeners: Arc::new(|| {
            let listeners = config().listeners.into_iter();
            let row = |listener: crate::config::Listener| ListenerRow {
                address: listener.bind,
                listener,
                state: ListenerState::Open,
                error: None,
            };
            listeners.map(row).collect()
        }),
        store_drains: Arc::new(|| Err("cannot write the file".to_owned())),
        follow_drains: Arc::new(|| ()),
    };
    Fixture { state, publisher, _log: Box::new(subscriber) }
}

async fn send(router: Router, request: Request<Body>) -> (StatusCode, HeaderMap, String) {
    let response = router.oneshot(request).await.expect("infallible");
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, 1 << 20).await.expect("a body");
    (parts.status, parts.headers, String::from_utf8_lossy(&body).into_owned())
}

pub(crate) async fn ask(router: Router, method: &str, uri: &str) -> (StatusCode, String) {
    let request = Request::builder().method(method).uri(uri).header("host", "127.0.0.1:15000");
    let (status, _, body) = send(router, request.body(Body::empty()).expect("a request")).await;
    (status, body)
}

#[tokio::test]
async fn readiness_names_what_is_pending() {
    let Fixture { state, .. } = fixture();
    let router = readiness_router(Arc::clone(&state.status), state.lifecycle.clone());
    let (status, body) = ask(router.clone(), "GET", "/healthz/ready").await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(body, "not ready, pending: certificates, mesh\n");
    state.status.clear_pending("certificates");
    state.status.clear_pending("mesh");
    let (status, body) = ask(router, "GET", "/healthz/ready").await;
    assert_eq!((status, body.as_str()), (StatusCode::OK, "ready\n"));
}

#[tokio::test(start_paused = true)]
async fn readiness_fails_as_soon_as_the_process_is_on_its_way_out() {
    let Fixture { state, .. } = fixture();
    state.status.clear_pending("certificates");
    state.status.clear_pending("mesh");
    let router = admin_router(state.clone());
    let (status, body) = ask(router.clone(), "POST", "/quitquitquit").await;
    assert_eq!((status, body.as_str()), (StatusCode::OK, "shutting down\n"));
    let hour = Duration::from_secs(3600);
    let life = state.lifecycle.clone();
    let running = tokio::spawn(async move { life.run(hour, hour).await });
    let mut phases = state.lifecycle.phases();
    crate::lifecycle::wait_for_phase(&mut phases, Phase::Lag).await;
    let (status, body) = ask(router, "GET", "/ready").await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(body, "not ready, pending: draining\n");
    running.abort();
}

#[tokio::test]
async fn metrics_come_in_the_format_that_the_scraper_names() {
    let Fixture { state, .. } = fixture();
    let scrape = async |accept: Option<&str>, path: &str| {
        let mut request = Request::builder().uri(path);
        if let Some(accept) = accept {
            request = request.header("accept", accept);
        }
        let router = metrics_router(Arc::clone(&state.metrics));
        let (status, headers, body) =
            send(router, request.body(Body::empty()).expect("a request")).await;
        assert_eq!(status, StatusCode::OK);
        let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        (kind.unwrap_or_default().to_owned(), body)
    };
    let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2";
    let (kind, body) = scrape(Some(prometheus), "/metrics").await;
    assert_eq!(kind, "application/openmetrics-text; version=1.0.0; charset=utf-8");
    assert!(body.contains("# TYPE strait_tunnels counter\n") && body.ends_with("# EOF\n"));
    for accept in [None, Some("*/*")] {
        let (kind, body) = scrape(accept, "/stats/prometheus").await;
        assert_eq!(kind, "text/plain; version=0.0.4; charset=utf-8");
        assert!(body.contains("# TYPE strait_tunnels_total counter\n"));
    }
}

#[tokio::test]
async fn the_log_level_is_read_changed_and_reset() {
    let fixture = fixture();
    let router = admin_router(fixture.state.clone());
    for (uri, level) in [
        ("/logging", "info"),
        ("/logging?level=debug", "debug"),
        ("/logging?level=warn,h2=off", "warn,h2=off"),
        ("/logging?reset", "info"),
        ("/logging?level=h2=trace", "info,h2=trace"),
        ("/logging?level=error&reset", "error"),
    ] {
        let (status, body) = ask(router.clone(), "POST", uri).await;
        let expected = format!("current log level is {level}\n");
        assert_eq!((status, body), (StatusCode::OK, expected), "{uri}");
    }
}

#[tokio::test]
async fn a_wrong_level_is_answered_with_the_right_words() {
    let fixture = fixture();
    let router = admin_router(fixture.state.clone());
    let (status, body) = ask(router, "POST", "/logging?level=loud").await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(body.contains("off, error, warn, info, debug, trace"), "{body}");
    assert_eq!(fixture.state.log.current(), "info");
}

#[tokio::test]
async fn what_changes_something_is_never_a_get() {
    let Fixture { state, .. } = fixture();
    for uri in ["/logging?level=debug", "/quitquitquit"] {
        let (status, _) = ask(admin_router(state.clone()), "GET", uri).await;
        assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED, "{uri}");
    }
    assert_eq!(state.log.current(), "info");
}

#[tokio::test]
async fn every_endpoint_of_the_index_exists() {
    let fixture = fixture();
    let router = admin_router(fixture.state.clone());
    let (status, index) = ask(router.clone(), "GET", "/").await;
    assert_eq!(status, StatusCode::OK);
    let mut count = 0;
    for line in index.lines() {
        let mut words = line.split_whitespace();
        if let (Some(method @ ("GET" | "POST")), Some(path)) = (words.next(), words.next()) {
            let (status, _) = ask(router.clone(), method, path).await;
            assert!(status != StatusCode::NOT_FOUND, "{line}");
            assert!(status != StatusCode::METHOD_NOT_ALLOWED, "{line}");
            count += 1;
        }
    }
    assert_eq!(count, 19);
}

#[tokio::test]
async fn a_web_page_that_a_rebound_name_serves_gets_nothing() {
    let fixture = fixture();
    let request = Request::builder()
        .method("POST")
        .uri("/quitquitquit")
        .header("host", "evil.example:15000")
        .body(Body::empty())
        .expect("a request");
    let (status, _, _) = send(admin_router(fixture.state.clone()), request).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
}

pub(super) fn mesh() -> Mesh {
    let ports = [(80, 8080), (81, 8081)];
    let workload = Workload {
        uid: "east//Pod/app/echo-1".into(),
        addresses: ["10.0.0.1".parse().expect("an address")].into(),
        healthy: true,
        capacity: 3,
        services: [("app/echo.app".into(), ports.into())].into(),
        template: Template {
            namespace: "app".into(),
            service_account: "echo".into(),
            trust_domain: "east.local".into(),
            cluster: "east".into(),
            network: "east".into(),
            protocol: Protocol::Hbone,
            ..Template::default()
        }
        .into(),
        ..Workload::default()
    };
    let service = Service {
        name: "echo".into(),
        namespace: "app".into(),
        hostname: "echo.app".into(),
        vips: vec![("east".into(), "10.96.0.1".parse().expect("an address"))],
        ports: ports.into(),
        ..Service::default()
    };
    Mesh::new([service], [workload])
}

#[tokio::test]
async fn conflicts_of_objects_are_problems_and_only_the_first_are_shown() {
    let Fixture { state, _log, .. } = fixture();
    let conflicts = (0..22).map(|line| format!("o.yaml:{line}: warning: a claim"));
    *state.status.conflicts.lock() = conflicts.collect();
    let (_, page) = ask(admin_router(state.clone()), "GET", "/status").await;
    assert_eq!(page.matches("\"o.yaml:").count(), 20, "{page}");
    assert!(page.contains("\"2 more objects conflict; see `strait check`\""), "{page}");
    state.status.conflicts.lock().clear();
    let (_, page) = ask(admin_router(state), "GET", "/status").await;
    assert!(page.contains("\"problems\":[],"), "{page}");
}

/// Serial number of typical length: 159 bits, in decimal.
pub(super) const SERIAL: &str = "271676055104741785552467469040731750696653685944";

pub(super) fn certificate() -> Certificate {
    let info = CertificateInfo {
        pem: "foobar".into(),
        serial: SERIAL.into(),
        valid_from: "2026-01-01T00:00:00Z".into(),
        expires: "2026-01-02T00:00:00Z".into(),
    };
    Certificate {
        identity: "spiffe://east.local/ns/a/sa/b".into(),
        state: "Available".into(),
        chain: vec![info],
        ..Certificate::default()
    }
}

#[tokio::test(start_paused = true)]
async fn the_dump_shows_the_mesh_with_live_state_and_the_certificates() {
    let Fixture { state, publisher, _log } = fixture();
    publisher.update(Change { mesh: Some((mesh(), "east".into())), ..Change::default() });
    let endpoint_state = {
        let snapshot = state.reader.load();
        let service = snapshot.services.get("echo.app").expect("a service");
        Arc::clone(&service.ports[&80].candidates[0].state)
    };
    let _in_flight = InFlight::new(&endpoint_state);
    endpoint_state.eject(tokio::time::Instant::now());
    state.status.set_reload(ReloadSource::Mesh, Err("line 3".into()));
    state.status.set_certificate(certificate());
    let (status, body) = ask(admin_router(state), "GET", "/config_dump").await;
    assert_eq!(status, StatusCode::OK);
    let dump: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!((&dump["strait"]["snapshot"], &dump["policies"]), (&json!(1), &json!([])));
    assert_eq!(dump["config"]["gateway"]["cluster"], "east");
    let service = &dump["services"][0];
    assert_eq!(service["vips"], json!(["east/10.96.0.1"]));
    assert_eq!(
        service["endpoints"]["east//Pod/app/echo-1"],
        json!({
            "workloadUid": "east//Pod/app/echo-1",
            "service": "app/echo.app",
            "port": {"80": 8080, "81": 8081},
            "status": "Healthy",
            "weight": 3,
            "ejected": true,
            "inFlight": 1,
            "addresses": ["10.0.0.1:15008"],
            "unused": {
                "80": "its dials failed; ejected for 5s more",
                "81": "its dials failed; ejected for 5s more",
            },
        })
    );
    let workload = &dump["workloads"][0];
    assert_eq!(workload["protocol"], "HBONE");
    assert_eq!(workload["clusterId"], "east");
    assert_eq!(workload["workloadIps"], json!(["10.0.0.1"]));
    assert_eq!(workload["status"], "Healthy");
    assert_eq!(
        dump["certificates"][0],
        json!({
            "identity": "spiffe://east.local/ns/a/sa/b",
            "state": "Available",
            "certChain": [{
                "pem": "Zm9vYmFy",
                "serialNumber": SERIAL,
                "validFrom": "2026-01-01T00:00:00Z",
                "expirationTime": "2026-01-02T00:00:00Z",
            }],
            "rootCerts": [],
        })
    );
    assert_eq!(dump["strait"]["reloads"]["mesh"]["ok"], false);
    assert_eq!(dump["strait"]["reloads"]["mesh"]["error"], "line 3");
}

#[tokio::test]
async fn the_status_has_all_services_or_one_and_refuses_what_it_does_not_know() {
    let Fixture { state, publisher, _log } = fixture();
    let mut mesh = mesh();
    for index in 0..60 {
        let hostname: Arc<str> = format!("s{index}.app").into();
        let service = Service { hostname: Arc::clone(&hostname), ..Service::default() };
        mesh.services.insert(hostname, Arc::new(service));
    }
    publisher.update(Change { mesh: Some((mesh, "east".into())), ..Change::default() });
    let page = async |query: &str| {
        let path = format!("/status{query}");
        ask(admin_router(state.clone()), "GET", &path).await
    };
    let (status, first) = page("").await;
    assert_eq!(status, StatusCode::OK);
    let first: Value = serde_json::from_str(&first).expect("JSON");
    assert_eq!(first["ready"], false);
    assert_eq!(first["pending"], json!(["certificates", "mesh"]));
    assert_eq!(first["source"]["kind"], "file");
    let services = &first["services"];
    assert_eq!(services["total"], 61);
    assert_eq!(services["list"].as_array().map(Vec::len), Some(50));
    assert!(page("?all").await.1.contains("/s59.app\""));
    for name in ["echo", "echo.app", "app/echo", "app/ECHO.app"] {
        let (_, page) = page(&format!("?service={name}")).await;
        let used = r#""address":"10.0.0.1:15008","weight":3,"tunnels":0,"unused":null"#;
        assert!(page.contains(used), "{name}: {page}");
    }
    let (status, text) = page("?service=other/echo").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert!(text.contains("unknown service \"other/echo\""), "{text}");
    let (_, json) = page("?format=json&service=echo").await;
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["ready"], false);
    assert_eq!(json["services"]["list"][0]["endpoints"][0]["uid"], "east//Pod/app/echo-1");
}

#[tokio::test]
async fn a_denied_address_and_a_namesake_are_reported() {
    let Fixture { state, publisher, _log } = fixture();
    let mut mesh = mesh();
    let mut workload = Workload::clone(mesh.workloads.sorted()[0]);
    workload.addresses = ["127.0.0.1".parse().expect("an address")].into();
    let services = ["app/echo.app", "zeta/echo.app"].map(|name| (name.into(), [(80, 8080)].into()));
    workload.services = services.into();
    let uid = Arc::clone(&workload.uid);
    mesh.workloads.insert(uid, Arc::new(workload));
    let mut namesake = Service::clone(mesh.services.sorted()[0]);
    namesake.namespace = "zeta".into();
    let mut own = Service::clone(mesh.services.sorted()[0]);
    own.canonical = true;
    mesh.services.insert("app/echo.app".into(), Arc::new(own));
    mesh.services.insert("zeta/echo.app".into(), Arc::new(namesake));
    publisher.update(Change { mesh: Some((mesh, "east".into())), ..Change::default() });
    let (_, text) = ask(admin_router(state), "GET", "/status?service=echo").await;
    assert!(text.contains("\"its address is a loopback address; see `dial.allow`"), "{text}");
    assert!(text.contains("\"the hostname belongs to the service of namespace app"), "{text}");
    assert!(text.contains(r#""used":0,"total":1,"#), "{text}");
}

#[tokio::test(start_paused = true)]
async fn a_service_is_found_by_what_peers_ask_for_and_one_behind_nothing_is_a_problem() {
    let Fixture { state, publisher, _log } = fixture();
    state.status.pending("discovery");
    let router = || admin_router(state.clone());
    let (status, text) = ask(router(), "GET", "/status").await;
    assert_eq!(status, StatusCode::OK);
    assert!(text.contains(r#""pending":["certificates","mesh","discovery"]"#), "{text}");
    let unknown = ask(router(), "GET", "/status?service=echo").await;
    let no_mesh = "there is no mesh yet; see `strait status`\n";
    assert_eq!(unknown, (StatusCode::NOT_FOUND, no_mesh.to_owned()));
    let mut exposure = ExposureTable::new(false);
    let names = hosts(&["echo.global"]);
    exposure.add(ExposedService { names, ..entry("echo.app:80", Vec::new()) });
    let mut lost = (**mesh().services.sorted()[0]).clone();
    let gateway = GatewayAddress { place: Place::Name("app/nobody.app".into()), port: 15008 };
    lost.waypoints = vec![Waypoint { gateway, weight: 1 }];
    publisher.update(Change {
        mesh: Some((Mesh::new([lost], []), "east".into())),
        exposure: Some(exposure),
        ..Change::default()
    });
    for name in ["echo.app:80", "app/echo:80", "Echo.global:80", "echo.global"] {
        let (status, text) = ask(router(), "GET", &format!("/status?service={name}")).await;
        assert_eq!(status, StatusCode::OK, "{name}: {text}");
    }
    let (status, _) = ask(router(), "GET", "/status?service=other.global:80").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    state.status.set_reload(ReloadSource::Mesh, Err("a:1: x\na:2: y".into()));
    let (_, text) = ask(router(), "GET", "/status").await;
    let lost = "\"tunnels to app/echo.app are rejected: its waypoint app/nobody.app is unknown";
    assert!(text.contains(lost), "{text}");
    let page: Value = serde_json::from_str(&text).expect("JSON");
    let problems = page["problems"].as_array().expect("a list").iter();
    let of_mesh = problems.filter_map(Value::as_str).filter(|one| one.starts_with("mesh: "));
    assert_eq!(of_mesh.collect::<Vec<_>>(), ["mesh: a:1: x", "mesh: a:2: y"]);
}

#[tokio::test]
async fn a_request_for_text_names_the_command_that_prints_it() {
    let Fixture { state, _log, .. } = fixture();
    for (path, command) in [
        ("/status", "strait status"),
        ("/peers", "strait status peers"),
        ("/refusals", "strait status refusals"),
    ] {
        for form in ["format=xml", "format=text", "text", "text="] {
            let answer = ask(admin_router(state.clone()), "GET", &format!("{path}?{form}")).await;
            let want = format!("this page is JSON; `{command}` prints it as text\n");
            assert_eq!(answer, (StatusCode::BAD_REQUEST, want), "{path} {form}");
        }
        let answer = ask(admin_router(state.clone()), "GET", &format!("{path}?format=json")).await;
        assert_eq!(answer.0, StatusCode::OK, "{path}");
    }
}
