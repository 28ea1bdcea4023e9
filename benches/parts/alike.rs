//! Durations of rejections that a peer must not be able to distinguish: for unknown services,
//! services exposed to nobody, and services exposed to others, in turn.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::{ClientConfig, ClientConnection, RootCertStore};
use strait::config::{self, ExposedService, HostPort, Line, TlsRouting};
use strait::datapath::listener::Listener;
use strait::snapshot::builder::Change;
use strait::snapshot::mesh::{Mesh, Service};
use strait::snapshot::{Audience, ExposureTable, TrustSet};
use strait::tools::hbone::{Client, ConnectError};
use strait::wire::sni::{RouteBy, SniPattern};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Mutex;

use crate::gateway::{Running, runtime, tls_listener};
use crate::handshake::Identities;
use crate::mesh;

/// Number of rejections of each kind.
const EACH: usize = 5_000;
/// Limit of the difference between the medians of one form.
const BAR: Duration = Duration::from_micros(50);

const UNKNOWN: &str = "nowhere.app";
const NOT_EXPOSED: &str = "secret.app";
const NOT_FOR_PEER: &str = "north.app";
/// Service whose tunnels are routed by the server name inside them.
const ROUTED_BY_SNI: &str = "door.app:80";

/// Prints the table; fails if medians differ too much.
#[expect(clippy::print_stdout, reason = "this is what it is run for")]
pub fn print() -> ExitCode {
    let forms = runtime().block_on(forms());
    println!("refusals, {EACH} of each by turns               median µs    p99 µs");
    let mut apart = false;
    for (form, kinds) in forms {
        let mut medians = Vec::new();
        for (kind, mut times) in kinds {
            times.sort_unstable();
            let at = |part: usize| times[times.len() * part / 100];
            let micros = |time: Duration| time.as_secs_f64() * 1e6;
            medians.push(at(50));
            let what = format!("{form}: {kind}");
            println!("{what:<44} {:>9.1} {:>9.1}", micros(at(50)), micros(at(99)));
        }
        let spread = medians.iter().max().zip(medians.iter().min());
        let spread = spread.map_or(Duration::ZERO, |(most, least)| *most - *least);
        let verdict = if spread <= BAR { "ok" } else { "MISS" };
        apart |= spread > BAR;
        println!("{:<44} {:>9.1} {verdict:>9}", "  apart", spread.as_secs_f64() * 1e6);
    }
    if apart { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

type Times = Vec<(&'static str, Vec<Duration>)>;

async fn forms() -> Vec<(&'static str, Times)> {
    let identities = Identities::new();
    let gateway = Running::with(identities.server(), change(), listeners());
    let clients = Clients::new(gateway.addresses[0], identities.client());
    let named =
        [("unknown", UNKNOWN), ("not exposed", NOT_EXPOSED), ("not for this peer", NOT_FOR_PEER)];
    let authority = named.map(|(kind, host)| (kind, format!("{host}:80")));
    let inside = named.map(|(kind, host)| (kind, hello(host)));
    let istio = named.map(|(kind, host)| (kind, hello(&format!("outbound_.80_._.{host}"))));
    let routes = [
        ("no route", hello("nowhere.example")),
        ("a route to what is unknown", hello("gone.example")),
    ];
    vec![
        (
            "HBONE",
            measure_alternating(&authority, async |authority| {
                let refused = clients.next().await.tunnel(authority).await;
                let status = match refused.expect_err("a refusal") {
                    ConnectError::Status(status) => status,
                    error => panic!("{authority} is not refused: {error}"),
                };
                assert_eq!(status, 503);
            })
            .await,
        ),
        (
            "HBONE, by the name inside",
            measure_alternating(&inside, async |hello| {
                let tunnel = clients.next().await.tunnel(ROUTED_BY_SNI).await;
                let mut tunnel = tunnel.expect("a tunnel");
                tunnel.write_all(hello).await.expect("a hello");
                let refused = tunnel.read_u8().await;
                assert!(refused.is_err(), "it is open");
            })
            .await,
        ),
        (
            "TLS, Istio's names",
            measure_alternating(&istio, async |hello| {
                alert(&gateway, 1, hello).await;
            })
            .await,
        ),
        (
            "TLS, routes",
            measure_alternating(&routes, async |hello| alert(&gateway, 2, hello).await).await,
        ),
    ]
}

/// Client that changes its identity before the gateway treats it as a flood. Tunnels do not refund
/// the cost of rejections.
struct Clients {
    address: SocketAddr,
    config: Arc<ClientConfig>,
    current: Mutex<(usize, Option<Arc<Client>>)>,
}

impl Clients {
    /// Number of tunnels of one client.
    const TUNNELS: usize = 500;

    fn new(address: SocketAddr, config: Arc<ClientConfig>) -> Self {
        Self { address, config, current: Mutex::new((0, None)) }
    }

    async fn next(&self) -> Arc<Client> {
        let mut current = self.current.lock().await;
        current.0 += 1;
        if current.0 % Self::TUNNELS == 1 {
            let client = Client::connect(self.address, &self.config).await;
            current.1 = Some(Arc::new(client.expect("a connection")));
        }
        Arc::clone(current.1.as_ref().expect("a client"))
    }
}

/// Causes rejections of each kind in turn, starting with another kind each time. The first rounds
/// do not count.
async fn measure_alternating<T>(kinds: &[(&'static str, T)], refuse: impl AsyncFn(&T)) -> Times {
    const WARM: usize = 100;
    let mut times: Times = kinds.iter().map(|(kind, _)| (*kind, Vec::new())).collect();
    for round in 0..WARM + EACH {
        for turn in 0..kinds.len() {
            let kind = (round + turn) % kinds.len();
            let begun = Instant::now();
            refuse(&kinds[kind].1).await;
            if round >= WARM {
                times[kind].1.push(begun.elapsed());
            }
        }
    }
    times
}

/// Opens a connection on which this ClientHello is answered by an alert.
async fn alert(gateway: &Running, listener: usize, hello: &[u8]) {
    let stream = TcpStream::connect(gateway.addresses[listener]).await;
    let mut stream = stream.expect("a connection");
    stream.write_all(hello).await.expect("a hello");
    let mut alert = Vec::new();
    stream.read_to_end(&mut alert).await.expect("a clean end");
    assert_eq!(alert, [21, 3, 3, 0, 2, 2, 112], "unrecognized_name");
}

/// Returns a ClientHello with this server name and Istio's protocol.
pub fn hello(name: &str) -> Vec<u8> {
    let mut config = ClientConfig::builder()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    config.alpn_protocols = vec![b"istio".to_vec()];
    let name = name.to_owned().try_into().expect("a name");
    let mut client = ClientConnection::new(Arc::new(config), name).expect("a client");
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).expect("a hello");
    bytes
}

fn change() -> Change {
    let service = |host: &str| Service {
        name: host.into(),
        namespace: "app".into(),
        hostname: host.into(),
        ports: [(80, 8080)].into(),
        ..Service::default()
    };
    let hosts = [NOT_EXPOSED, NOT_FOR_PEER, "door.app"];
    let mut table = ExposureTable::new(false);
    let exposed = |service, cluster: &str| ExposedService {
        to: vec![Audience { cluster: Some(cluster.into()), ..Audience::default() }],
        ..ExposedService::new(mesh::host(service))
    };
    table.add(exposed(NOT_FOR_PEER, "north"));
    let route_by = Some(RouteBy::Sni);
    table.add(ExposedService { route_by, ..exposed("door.app", "west") });
    Change {
        mesh: Some((Mesh::new(hosts.map(service), []), mesh::NETWORK.into())),
        trust: Some(TrustSet::new([("west.local", "west"), ("north.local", "north")])),
        exposure: Some(table),
        has_passthrough: Some(true),
        ..Change::default()
    }
}

/// Returns one HBONE listener, and both forms of TLS listeners.
fn listeners() -> Vec<Listener> {
    let route = config::SniRoute {
        sni: vec![SniPattern::Exact("gone.example".into())],
        to: HostPort::parse("gone.app:80").expect("a target"),
        line: Line::default(),
    };
    vec![
        Listener::default(),
        tls_listener(TlsRouting::Istio { routing: "istio" }),
        tls_listener(TlsRouting::Routes { routes: vec![route] }),
    ]
}
