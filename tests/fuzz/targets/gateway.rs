//! Gateway of a fuzzed connection, and the endpoint behind it.

use std::net::TcpListener as StdListener;
use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use strait::config::{ExposedService, HostPort};
use strait::datapath::identity::Peer;
use strait::datapath::limits::admission::Admission;
use strait::datapath::limits::descriptors::Holders;
use strait::datapath::listener::Listener;
use strait::datapath::{DataPath, dial};
use strait::lifecycle::Lifecycle;
use strait::snapshot::builder::Change;
use strait::snapshot::mesh::Mesh;
use strait::snapshot::{Audience, ExposureTable, Publisher, TrustSet};
use strait::telemetry::Metrics;
use strait::tls::{self, Identity, IdentityMaterial, InboundTls, PeerTrust, ServerTls};
use strait::tools::dev;
use strait::xds;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Limit of buffers in bytes, more than a script can make a gateway hold.
const BUFFERS: usize = 64 << 20;
/// Bytes that an endpoint sends unasked: more than the windows of a connection.
const UNASKED_BYTES: usize = 300_000;

/// The gateway, and handles to its rare events.
pub struct World {
    pub data_path: Arc<DataPath>,
    pub publisher: Publisher,
    pub listener: Arc<Listener>,
}

impl World {
    /// Creates a gateway with a service that echoes, one that may not be dialled, one whose
    /// endpoint is missing, and one that is not exposed.
    pub fn new() -> Self {
        let publisher = Publisher::default();
        let mut exposure = ExposureTable::new(false);
        let host = |name| HostPort::parse(name).expect("a name");
        for (service, alias) in
            [("echo.app", Some("alias.app:80")), ("denied.app", None), ("refused.app", None)]
        {
            exposure.add(ExposedService {
                to: vec![Audience { anyone: true, ..Audience::default() }],
                names: alias.map(host).into_iter().collect(),
                ..ExposedService::new(host(service))
            });
        }
        publisher.update(Change {
            mesh: Some((mesh().clone(), "east".into())),
            trust: Some(TrustSet::new([("west.local", "west")])),
            exposure: Some(exposure),
            ..Change::default()
        });
        let loopback = "127.0.0.0/8".parse().expect("a network");
        let metrics = Arc::new(Metrics::new());
        let data_path = DataPath::new(
            publisher.reader(),
            InboundTls::new(tls().clone()),
            metrics,
            Lifecycle::default(),
            Admission::new(1024),
            BUFFERS,
            dial::DenyList::new(vec![loopback], Vec::new()),
        );
        Self { data_path: Arc::new(data_path), publisher, listener: Arc::default() }
    }
}

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        let port = endpoint().local_addr().expect("an address").port();
        let mut services = "services:\n".to_owned();
        let mut workloads = "workloads:\n".to_owned();
        for (name, ip, port) in [
            ("echo", "127.0.0.1", port),
            ("denied", "169.254.1.1", 80),
            ("refused", "127.0.0.1", 1),
            ("hidden", "127.0.0.1", port),
        ] {
            let ports = format!("{{80: {port}}}");
            services += &format!(
                "  - {{name: {name}, namespace: app, hostname: {name}.app, vips: [], \
                 ports: {ports}}}\n"
            );
            workloads += &format!(
                "  - {{uid: {name}, name: {name}, namespace: app, trustDomain: east.local, \
                 network: east, workloadIps: [{ip}], protocol: TCP, \
                 services: {{app/{name}.app: {ports}}}}}\n"
            );
        }
        let text = services + &workloads;
        let parsed = xds::file::parse(Path::new("mesh.yaml"), &text);
        let (mesh, _) = parsed.unwrap_or_else(|why| panic!("{why}"));
        mesh
    })
}

fn tls() -> &'static ServerTls {
    static TLS: OnceLock<ServerTls> = OnceLock::new();
    TLS.get_or_init(|| {
        let authority = dev::Authority::new().expect("a root");
        let east = authority.intermediate("east").expect("an intermediate");
        let leaf = east.leaf("spiffe://east.local/ns/n/sa/g").expect("a leaf");
        let roots = authority.root_pem();
        let material = IdentityMaterial::from_pem(&leaf.chain_pem, &leaf.key_pem, &roots);
        let trust = PeerTrust::default();
        tls::listener_server_config(&material.expect("material"), &trust).expect("a configuration")
    })
}

pub fn peer(
    data_path: &DataPath,
    has_expired: bool,
    holders: Holders,
    listener: Arc<Listener>,
) -> Arc<Peer> {
    let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
    let identity = Identity {
        uri: "spiffe://west.local/ns/n/sa/c".into(),
        trust_domain: "west.local".into(),
        namespace: "n".into(),
        service_account: "c".into(),
        not_after: if has_expired { now - hour } else { now + 24 * hour },
    };
    let (address, snapshot) = (([192, 0, 2, 1], 1).into(), data_path.reader.snapshot());
    let peer = Peer::authenticated(identity, None, address, listener, &snapshot);
    Arc::new(Peer { holders: Some(holders), ..peer.expect("a trusted peer") })
}

/// One listener for all executions, because ports are scarce.
pub fn endpoint() -> &'static StdListener {
    static ENDPOINT: OnceLock<StdListener> = OnceLock::new();
    ENDPOINT.get_or_init(|| {
        let listener = StdListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("a listener");
        listener
    })
}

/// Accepts connections. Counts the bytes that the endpoint sends without being asked.
pub async fn answer(listener: TcpListener, unasked: Arc<AtomicUsize>) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(answer_one(stream, Arc::clone(&unasked)));
    }
}

/// Behaves as the first byte selects: echoes, sends much, ends first, resets, or does not read.
async fn answer_one(mut stream: TcpStream, unasked: Arc<AtomicUsize>) {
    let mut first = [0];
    let Ok(1) = stream.peek(&mut first).await else {
        return;
    };
    match first[0] {
        b'b' => {
            unasked.fetch_add(UNASKED_BYTES, Relaxed);
            drop(stream.write_all(&[b'b'; UNASKED_BYTES]).await);
            drop(stream.shutdown().await);
            read_all(stream).await;
        }
        b'c' => {
            drop(stream.shutdown().await);
            read_all(stream).await;
        }
        b'd' => drop(stream.set_zero_linger()),
        b'e' => std::future::pending().await,
        _ => echo(stream).await,
    }
}

async fn read_all(mut stream: TcpStream) {
    let mut buffer = [0; 4096];
    while let Ok(1..) = stream.read(&mut buffer).await {}
}

/// Echoes, and ends depending on the number of bytes: by FIN, by RST, or by leaving first.
async fn echo(mut stream: TcpStream) {
    let (mut total, mut buffer) = (0, vec![0; 4096]);
    while let Ok(bytes @ 1..) = stream.read(&mut buffer).await {
        total += bytes;
        if total % 7 == 6 || stream.write_all(&buffer[..bytes]).await.is_err() {
            break;
        }
    }
    if total % 2 == 1 {
        drop(stream.set_zero_linger());
    }
}
