//! Faults of a gateway of another network: alone, where a tunnel ends with the typed outcome, and
//! beside a second gateway, where no tunnel fails.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::RecvStream;
use h2::server::{Connection, SendResponse};
use http::{Request, Response};
use strait::tls::{self, TrustedDomain};
use strait::tools::dev::Leaf;
use strait::tools::hbone::{Client, ConnectError};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::bindings::{bound, connect};
use crate::support::{
    ECHO, Gateway, Net, Settings, determine_clusters_by_issuers, echoes, identities, run, try_echo,
};

const WEST_GATEWAY: &str = "spiffe://west.local/ns/istio-system/sa/eastwest";
/// Service of a network with the faulty gateway alone.
const ALONE: &str = "secret.app.svc.cluster.local:80";
/// Service behind both gateways, as [`ECHO`].
const TWIN: &str = "twin.app.svc.cluster.local:80";
const TUNNELS: usize = 20;
/// Tunnels on one connection of Envoy, and of the pool (docs/wire-contract.md 1.2).
const STREAMS: u32 = 100;
/// Number of gateways of a network that all reject.
const MANY: u8 = 12;
/// Time from the first CONNECT of a connection to its silence.
const SILENT_AFTER: Duration = Duration::from_secs(1);

/// Fault of a gateway.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// GOAWAY after each CONNECT, which is served.
    GoAway,
    /// GOAWAY in place of an answer, and the end of the connection.
    AbruptGoAway,
    /// One connection is accepted, and no other.
    OneConnection,
    /// A CONNECT is not answered.
    Slow,
    /// The first CONNECT is answered. After that nothing is read, and no new handshake is answered.
    Silent,
    /// The certificate is that of another account.
    Identity,
    /// The certificate is signed for another cluster.
    Issuer,
    /// The certificate has expired.
    Expired,
    /// The certificate of the peer is rejected.
    RejectsUs,
    /// 503 with this outcome.
    Reject(Option<&'static str>),
    /// 503 with this outcome for [`ECHO`] alone.
    RejectEcho(&'static str),
    /// 200 with this load.
    Load(&'static str),
}

/// Running gateway of network west, which echoes unless it has a fault.
struct Remote {
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
}

/// State that the connections of a gateway share.
#[derive(Default)]
struct Shared {
    connections: AtomicUsize,
    requests: AtomicUsize,
    is_silent: AtomicBool,
}

impl Remote {
    /// Starts one gateway, or several alike at the first hosts of `net`.
    async fn start(net: Net, fault: Fault, count: u8) -> Self {
        let name = if fault == Fault::RejectsUs { "south.local" } else { "east.local" };
        let trusted = TrustedDomain { name: name.into(), issuers: None, roots: None };
        let material = identities().material(&leaf(fault));
        let config = tls::endpoint_server_config(&material, vec![trusted]);
        let acceptor = TlsAcceptor::from(config.expect("a configuration"));
        let mut tasks = JoinSet::new();
        let shared = Arc::<Shared>::default();
        for host in 1..=count {
            let listener = net.listen(host, 15008).await;
            tasks.spawn(accept(listener, acceptor.clone(), fault, Arc::clone(&shared)));
        }
        Self { shared, _tasks: tasks }
    }
}

fn leaf(fault: Fault) -> Leaf {
    let identities = identities();
    let past = time::OffsetDateTime::UNIX_EPOCH;
    let leaf = match fault {
        Fault::Identity => identities.west.leaf("spiffe://west.local/ns/other/sa/gateway"),
        Fault::Issuer => identities.east.leaf(WEST_GATEWAY),
        Fault::Expired => identities.west.leaf_with(|params| {
            let uri = WEST_GATEWAY.try_into().expect("a URI");
            params.subject_alt_names = vec![rcgen::SanType::URI(uri)];
            params.not_before = past;
            params.not_after = past + Duration::from_secs(1);
        }),
        _ => identities.west.leaf(WEST_GATEWAY),
    };
    leaf.expect("a leaf")
}

async fn accept(listener: TcpListener, acceptor: TlsAcceptor, fault: Fault, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let count = shared.connections.fetch_add(1, Ordering::SeqCst);
        if fault == Fault::OneConnection && count > 0 {
            continue;
        }
        let (acceptor, shared) = (acceptor.clone(), Arc::clone(&shared));
        connections.spawn(async move {
            if shared.is_silent.load(Ordering::SeqCst) {
                std::future::pending::<()>().await;
            }
            match acceptor.accept(stream).into_fallible().await {
                Ok(stream) => serve(stream, fault, &shared).await,
                // An end with unread bytes would be a reset, which can overtake the alert.
                Err((_, mut stream)) => {
                    let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
                }
            }
        });
    }
}

async fn serve(stream: TlsStream<TcpStream>, fault: Fault, shared: &Shared) {
    let mut settings = h2::server::Builder::new();
    settings.max_concurrent_streams(STREAMS);
    let handshake: Result<Connection<_, Bytes>, _> = settings.handshake(stream).await;
    let Ok(mut http2) = handshake else { return };
    let mut tunnels = JoinSet::new();
    while let Some(Ok((request, respond))) = http2.accept().await {
        shared.requests.fetch_add(1, Ordering::SeqCst);
        let is_echo = request.uri().authority().is_some_and(|of| of == ECHO);
        match fault {
            Fault::AbruptGoAway => {
                http2.abrupt_shutdown(h2::Reason::NO_ERROR);
                tunnels.spawn(hold(respond));
            }
            Fault::Slow => {
                tunnels.spawn(hold(respond));
            }
            Fault::Reject(outcome) => reject(respond, outcome),
            Fault::RejectEcho(outcome) if is_echo => reject(respond, Some(outcome)),
            Fault::Silent => {
                tunnels.spawn(echo(request, respond));
                // The tunnel is used before the silence begins.
                let _ = tokio::time::timeout(SILENT_AFTER, http2.accept()).await;
                shared.is_silent.store(true, Ordering::SeqCst);
                std::future::pending::<()>().await;
            }
            Fault::Load(load) => {
                let answer = Response::builder().header("x-strait-load", load);
                let answer = answer.body(()).expect("an answer");
                tunnels.spawn(echo_after(answer, request, respond));
            }
            _ => {
                tunnels.spawn(echo(request, respond));
                if fault == Fault::GoAway {
                    http2.graceful_shutdown();
                }
            }
        }
    }
}

fn reject(mut respond: SendResponse<Bytes>, outcome: Option<&str>) {
    let mut answer = Response::builder().status(503);
    if let Some(outcome) = outcome {
        answer = answer.header("x-strait-outcome", outcome);
    }
    let answer = answer.body(()).expect("an answer");
    let _ = respond.send_response(answer, true);
}

/// Leaves a request without an answer.
async fn hold(mut respond: SendResponse<Bytes>) {
    std::future::pending::<()>().await;
    respond.send_reset(h2::Reason::CANCEL);
}

async fn echo(request: Request<RecvStream>, respond: SendResponse<Bytes>) {
    echo_after(Response::new(()), request, respond).await;
}

async fn echo_after(
    answer: Response<()>,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) {
    let (Ok(mut send), mut receive) = (respond.send_response(answer, false), request.into_body())
    else {
        return;
    };
    while let Some(Ok(bytes)) = receive.data().await {
        let _ = receive.flow_control().release_capacity(bytes.len());
        // The tests send less than a window.
        let _ = send.send_data(bytes, false);
    }
    let _ = send.send_data(Bytes::new(), true);
}

/// Gateway of network east. [`ECHO`] and [`TWIN`] are behind both gateways of network west, and
/// [`ALONE`] behind the faulty one, as the only gateway of network north. If there are many faulty
/// ones, they are the gateways of west and north, and the good one is that of network south.
struct Rig {
    gateway: Gateway,
    client: Client,
    /// Address of a binding for [`ECHO`].
    bound: SocketAddr,
    remotes: [Remote; 2],
}

impl Rig {
    async fn start(fault: Fault) -> Self {
        Self::start_with(fault, 1).await
    }

    async fn start_with(fault: Fault, faulty_count: u8) -> Self {
        let (faulty, good) = (Net::new(), Net::new());
        let remotes = [
            Remote::start(faulty, fault, faulty_count).await,
            Remote::start(good, Fault::None, 1).await,
        ];
        let mut settings = Settings::new(Net::new(), identities());
        settings.mesh = mesh();
        settings.exposure = [ECHO, TWIN, ALONE].map(exposure).concat();
        let bound = bound(settings.net);
        let faulty: Vec<_> = (1..=faulty_count).map(|host| faulty.address(host, 15008)).collect();
        settings.more += &networks(&faulty, good.address(1, 15008));
        settings.more += &format!(
            "bindings: [{{cluster: west, service: \"{ECHO}\", listen: \"{bound}\", inner: tcp}}]\n"
        );
        let mut gateway = Gateway::spawn(&settings, |folder| {
            if fault == Fault::Issuer {
                let identities = identities();
                let clusters = [("east", &identities.east), ("west", &identities.west)];
                determine_clusters_by_issuers(folder, &clusters);
            }
        });
        gateway.ready().await;
        let client = gateway.client(identities()).await;
        Self { gateway, client, bound, remotes }
    }

    /// Asserts that no tunnel to [`ECHO`] fails.
    async fn no_tunnel_fails(&self) {
        self.open(ECHO, TUNNELS).await;
    }

    /// Opens tunnels to a service behind both gateways, of which none fails.
    async fn open(&self, service: &str, count: usize) {
        for at in 0..count {
            let opened = self.client.tunnel(service).await;
            let mut tunnel = opened.unwrap_or_else(|error| panic!("tunnel {at}: {error}"));
            echoes(&mut tunnel).await;
        }
    }

    /// Asserts that a tunnel to the service behind the faulty gateway alone ends for this reason,
    /// with this text in the log.
    async fn is_rejected(&self, reason: &str, text: &str) {
        let refused = self.client.tunnel(ALONE).await;
        let is_503 = matches!(&refused, Err(ConnectError::Status(status)) if *status == 503);
        assert!(is_503, "{refused:?}\n{}", self.gateway.log());
        let ends = self.gateway.tunnels_by_reason().await;
        assert_eq!(ends.get(reason), Some(&1.0), "{ends:?}\n{}", self.gateway.log());
        self.gateway.logged(text).await;
    }

    async fn failed_dials(&self) -> f64 {
        self.gateway.metric("strait_dials_total{result=\"failed\"}").await
    }
}

fn mesh() -> String {
    let service = |name: &str| {
        format!(
            "  - {{name: {name}, namespace: app, hostname: {name}.app.svc.cluster.local, vips: [],
     ports: {{80: 9000}}}}\n"
        )
    };
    let instance = |name: &str, network: &str, capacity: u32| {
        format!(
            "  - {{uid: \"{network}/{name}\", name: {name}-0, namespace: app, serviceAccount: echo,
     trustDomain: west.local, clusterId: west, network: {network}, workloadIps: [\"10.0.0.1\"],
     protocol: HBONE, capacity: {capacity}, workloadName: {name},
     services: {{app/{name}.app.svc.cluster.local: {{80: 9000}}}}}}\n"
        )
    };
    let services = ["echo", "twin", "secret"].map(service).concat();
    // Almost all tunnels try network west first.
    let instances = [
        instance("echo", "west", 1000),
        instance("echo", "south", 1),
        instance("twin", "west", 1),
        instance("secret", "north", 1),
    ]
    .concat();
    format!("services:\n{services}policies: []\nworkloads:\n{instances}")
}

fn exposure(service: &str) -> String {
    format!("    - {{service: \"{service}\", to: [{{cluster: west}}], transit: always}}\n")
}

fn networks(faulty: &[SocketAddr], good: SocketAddr) -> String {
    let network = |name: &str, gateways: &[SocketAddr]| {
        let gateways: Vec<_> = gateways.iter().map(|one| format!("\"{one}\"")).collect();
        format!(
            "  - {{name: {name}, cluster: west, identities: [\"{WEST_GATEWAY}\"],
     gateways: [{}]}}\n",
            gateways.join(", ")
        )
    };
    let of_echo = match faulty {
        [one] => network("west", &[*one, good]),
        many => network("west", many) + &network("south", &[good]),
    };
    format!("networks:\n{of_echo}{}", network("north", faulty))
}

/// Checks a fault that each tunnel meets.
async fn check(fault: Fault, reason: &str, text: &str) {
    let rig = Rig::start(fault).await;
    rig.no_tunnel_fails().await;
    assert!(rig.failed_dials().await >= 1.0, "{fault:?} was not met");
    rig.is_rejected(reason, text).await;
}

#[test]
fn a_graceful_goaway_costs_no_tunnel() {
    run(async {
        let rig = Rig::start(Fault::GoAway).await;
        let mut open = Vec::new();
        for _ in 0..TUNNELS {
            let mut tunnel = rig.client.tunnel(ALONE).await.expect("a tunnel");
            echoes(&mut tunnel).await;
            open.push(tunnel);
        }
        rig.no_tunnel_fails().await;
        for tunnel in &mut open {
            echoes(tunnel).await;
        }
    });
}

#[test]
fn an_abrupt_goaway_is_gateway_unreachable_and_another_gateway_takes_the_tunnel() {
    let text = "the gateway's connection";
    run(check(Fault::AbruptGoAway, "gateway_unreachable", text));
}

#[test]
fn a_gateway_with_100_streams_in_use_and_no_second_connection_is_replaced() {
    run(async {
        let rig = Rig::start(Fault::OneConnection).await;
        let mut open = Vec::new();
        // Only a second connection to the faulty gateway fails.
        while rig.failed_dials().await == 0.0 {
            assert!(open.len() < 250, "the faulty gateway has a place for each tunnel");
            let mut tunnel = rig.client.tunnel(ECHO).await.expect("a tunnel");
            echoes(&mut tunnel).await;
            open.push(tunnel);
        }
        assert!(open.len() > STREAMS as usize, "{} tunnels are open", open.len());
        rig.no_tunnel_fails().await;
        let text = "gateway_unreachable";
        rig.is_rejected("gateway_unreachable", text).await;
        for tunnel in &mut open {
            echoes(tunnel).await;
        }
    });
}

#[test]
fn a_slow_200_is_remote_unavailable_after_5_seconds() {
    let text = "the gateway did not answer the CONNECT in time";
    run(check(Fault::Slow, "remote_unavailable", text));
}

#[test]
fn a_gateway_that_answers_no_connect_delays_no_tunnel_after_its_ejection() {
    run(async {
        let rig = Rig::start(Fault::Slow).await;
        while rig.failed_dials().await == 0.0 {
            rig.open(ECHO, 1).await;
        }
        // Its ejection ends after 5 s, and one tunnel tries it again.
        let since = Instant::now();
        while rig.failed_dials().await < 2.0 {
            let started = Instant::now();
            rig.open(ECHO, 1).await;
            let time = started.elapsed();
            assert!(time < Duration::from_secs(1), "{time:?}");
            assert!(since.elapsed() < Duration::from_secs(60), "no retry");
            // deadline: the retry comes at the end of the ejection.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
}

#[test]
fn a_silent_gateway_is_unreachable_once_a_ping_is_late() {
    run(async {
        let rig = Rig::start(Fault::Silent).await;
        let mut open = Vec::new();
        for service in [ALONE, ECHO, ECHO] {
            let mut tunnel = rig.client.tunnel(service).await.expect("a tunnel");
            echoes(&mut tunnel).await;
            open.push(tunnel);
        }
        // deadline: a connection is quiet after a further second, and a new tunnel sends a PING.
        tokio::time::sleep(SILENT_AFTER + Duration::from_millis(1500)).await;
        rig.no_tunnel_fails().await;
        let text = "no connection in time";
        rig.is_rejected("gateway_unreachable", text).await;
    });
}

#[test]
fn a_gateway_with_another_identity_is_untrusted() {
    let text = "is not an identity of this gateway";
    run(check(Fault::Identity, "gateway_untrusted", text));
}

#[test]
fn a_gateway_with_the_issuer_of_another_cluster_is_untrusted() {
    let text = "belongs to cluster east, not to west";
    run(check(Fault::Issuer, "gateway_untrusted", text));
}

#[test]
fn a_gateway_with_an_expired_certificate_is_untrusted() {
    run(check(Fault::Expired, "gateway_untrusted", "expired"));
}

#[test]
fn a_gateway_that_rejects_our_certificate_is_a_reason_of_its_own() {
    let text = "received fatal alert: CertificateUnknown";
    run(check(Fault::RejectsUs, "peer_rejected_us", text));
}

#[test]
fn an_outcome_becomes_the_reason_and_another_gateway_takes_the_tunnel() {
    run(async {
        for (outcome, reason) in [
            (None, "remote_unavailable"),
            (Some("no_endpoint"), "remote_unavailable"),
            (Some("unknown_service"), "remote_rejected"),
            (Some("overloaded"), "remote_busy"),
        ] {
            let label = outcome.unwrap_or("none");
            let text = format!("the gateway answered 503, outcome {label}");
            check(Fault::Reject(outcome), reason, &text).await;
        }
    });
}

/// Of this many tunnels, each of two gateways has a fifth at least, but for one case in a million.
const SHARED_TUNNELS: usize = 60;

#[test]
fn an_outcome_ejects_the_gateway_for_a_service_for_all_or_for_none() {
    run(async {
        let many = 12.0..=48.0;
        for (fault, failed, served) in [
            (Fault::RejectEcho("no_endpoint"), 1.0..=1.0, many.clone()),
            (Fault::RejectEcho("unknown_service"), many.clone(), many),
            (Fault::Expired, 1.0..=1.0, 0.0..=0.0),
        ] {
            let rig = Rig::start(fault).await;
            let requests = || rig.remotes[0].shared.requests.load(Ordering::SeqCst);
            rig.open(ECHO, SHARED_TUNNELS).await;
            let of_echo = rig.failed_dials().await;
            assert!(failed.contains(&of_echo), "{fault:?}: {of_echo}");
            let before = requests();
            rig.open(TWIN, SHARED_TUNNELS).await;
            let of_twin = (requests() - before) as f64;
            assert!(served.contains(&of_twin), "{fault:?}: {of_twin}");
            // The ejection lasts 5 s.
            assert_eq!(rig.failed_dials().await, of_echo, "{fault:?}");
        }
    });
}

#[test]
fn many_gateways_that_reject_cost_three_connects_and_another_network_takes_the_tunnel() {
    run(async {
        let fault = Fault::Reject(Some("unknown_service"));
        let rig = Rig::start_with(fault, MANY).await;
        rig.no_tunnel_fails().await;
        let rejected = rig.failed_dials().await;
        assert!((1.0..=3.0 * TUNNELS as f64).contains(&rejected), "{rejected}");
        let text = "the gateway answered 503, outcome unknown_service";
        rig.is_rejected("remote_rejected", text).await;
        assert_eq!(rig.failed_dials().await - rejected, 3.0);
        // A binding uses north too, whose instances of the service are unknown.
        let mut client = connect(rig.bound).await;
        try_echo(&mut client).await.expect("an open connection");
        assert!(rig.failed_dials().await - rejected <= 9.0);
    });
}

#[test]
fn a_malformed_load_is_counted_and_changes_no_weight() {
    run(async {
        let rig = Rig::start(Fault::Load("ready=1000, free=2")).await;
        let _open = rig.client.tunnel(ALONE).await.expect("a tunnel");
        let malformed = "strait_remote_loads_malformed_total";
        assert_eq!(rig.gateway.metric(malformed).await, 1.0);
        let (_, page, _) = rig.gateway.run_command(&["status", "peers"]).await;
        let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(page.contains(&format!("{ALONE} 1 - ")), "{page}");
    });
}
