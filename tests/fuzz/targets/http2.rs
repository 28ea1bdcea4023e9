//! Scripted HTTP/2 connection through the real handler, under a clock that only the script
//! advances.
//!
//! The peer's side is in memory. The endpoint is an echo on a loopback socket, so that tunnels
//! carry bytes and end in every way.

use std::net::TcpListener as StdListener;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use strait::datapath::accept::{ConnectionResources, WorkerLoad};
use strait::datapath::forward::connection;
use strait::datapath::handshake::Transport;
use strait::datapath::identity::Peer;
use strait::datapath::limits::admission::Admission;
use strait::datapath::limits::budget::BufferBudget;
use strait::datapath::limits::pool::Holder;
use strait::datapath::{DataPath, dial};
use strait::lifecycle::Lifecycle;
use strait::outer::Pool;
use strait::snapshot::builder::Change;
use strait::snapshot::mesh::Mesh;
use strait::snapshot::{Audience, Exposure, ExposureTable, Publisher, TrustSet};
use strait::telemetry::{Metrics, Source};
use strait::tls::record::RecordLayer;
use strait::tls::record::plain::PlainRecords;
use strait::tls::{self, IdentityMaterial, InboundTls, PeerTrust, ServerTls};
use strait::tools::dev;
use strait::xds;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf, duplex, split};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Builder;
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{advance, timeout};

use super::frames::PREFACE;
use super::script::{self, PeerFlags, Step};

/// Limit of buffers in bytes, more than a script can make a gateway hold.
const BUFFERS: usize = 64 << 20;

/// Limit of a connection after the peer's last byte. Without an answer to a PING, it ends within 30
/// s (10 s to the PING, 20 s for the answer); a GOAWAY has one second more.
const END: Duration = Duration::from_secs(32);
/// Limit of tunnels after their peer has gone: its bytes are delivered within 30 s, and a dial
/// takes at most 10 s.
const TUNNELS_END: Duration = Duration::from_secs(45);
/// Limit of the output per input. Each frame of the peer, of nine bytes or more, causes at most a
/// few small ones, and each byte of a tunnel is echoed once.
const OUTPUT_PER_INPUT: usize = 16;
/// Output for our SETTINGS, PINGs, and GOAWAY.
const OUTPUT_BYTES: usize = 16 * 1024;
/// Limit of loopback's delay, in real time, when everything else is done.
const LOOPBACK: Duration = Duration::from_secs(5);
/// Number of turns of the runtime in which a frame is answered.
const TURNS: usize = 4;

/// Checks that the gateway survives this peer, and releases it in bounded time.
pub fn http2(data: &[u8]) {
    let (mode, steps) = script::read(data);
    let mut runtime = Builder::new_current_thread();
    let runtime = runtime.enable_all().start_paused(true).build();
    runtime.expect("a runtime").block_on(run(mode, &steps));
}

async fn run(mode: PeerFlags, steps: &[Step]) {
    let echo = echo().try_clone().expect("a listener");
    let echo = tokio::spawn(answer(TcpListener::from_std(echo).expect("a listener")));
    let gateway = gateway();
    let (ours, theirs) = duplex(if mode.reads() { 1 << 20 } else { 32 * 1024 });
    let mut served = serve(&gateway, ours, mode.has_expired());
    let (read, mut write) = split(PlainRecords::new(theirs));
    let reads = mode.reads().then(|| tokio::spawn(count(read)));

    let sent = send(mode, steps, &mut write).await;
    let left = if mode.leaves() {
        drop(write.shutdown().await);
        None
    } else {
        Some(write)
    };
    // deadline: that the connection ends in bounded time is what is tested
    if timeout(END, &mut served).await.is_err() {
        wait(|| served.is_finished(), "the connection goes on").await;
    }
    drop(left);
    if let Some(reads) = reads {
        let received = reads.await.expect("no panic");
        let most = OUTPUT_BYTES + OUTPUT_PER_INPUT * sent;
        assert!(received <= most, "{sent} bytes made {received}");
    }
    advance(TUNNELS_END).await;
    wait(|| gateway.lifecycle.tasks() == 0, "a tunnel goes on").await;
    assert_eq!(Arc::strong_count(&gateway), 1, "nobody holds the gateway");
    echo.abort();
}

/// Waits for events that only loopback can still delay.
async fn wait(done: impl Fn() -> bool, what: &str) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < LOOPBACK, "{what}");
        yield_now().await;
    }
}

fn serve(gateway: &Arc<DataPath>, stream: DuplexStream, has_expired: bool) -> JoinHandle<()> {
    let gateway = Arc::clone(gateway);
    tokio::spawn(async move {
        let source = gateway.admission.pool.register_listener();
        let descriptor = source.source([192, 0, 2, 1].into()).connection();
        let descriptor = descriptor.expect("a descriptor");
        let peer = peer(has_expired, descriptor.holder().clone());
        let held = ConnectionResources {
            load: WorkerLoad::default().add(),
            descriptor,
        };
        let transport = Box::new(Transport {
            socket: stream,
            layer: RecordLayer::plaintext(),
            received: Vec::new(),
        });
        // A rejection is a valid end like any other.
        drop(connection::serve_stream(&gateway, transport, &held, peer).await);
    })
}

/// Plays the script until its end or that of the connection. Returns the bytes sent.
async fn send(
    mode: PeerFlags,
    steps: &[Step],
    write: &mut WriteHalf<PlainRecords<DuplexStream>>,
) -> usize {
    let mut sent = PREFACE.len();
    if write.write_all(PREFACE).await.is_err() {
        return sent;
    }
    turn().await;
    for step in steps {
        match step {
            Step::Wait(time) => advance(*time).await,
            Step::Send(bytes) => {
                let cut = if mode.trickles() {
                    1
                } else {
                    bytes.len().max(1)
                };
                for part in bytes.chunks(cut) {
                    // deadline: a gateway that has closed, or that waits for us to read
                    let written = timeout(Duration::from_secs(1), write.write_all(part)).await;
                    if !matches!(written, Ok(Ok(()))) {
                        return sent;
                    }
                    sent += part.len();
                    yield_now().await;
                }
            }
        }
        turn().await;
    }
    sent
}

/// Runs all tasks and polls the sockets, while the clock stands still.
async fn turn() {
    for _ in 0..TURNS {
        yield_now().await;
    }
}

async fn count(mut read: ReadHalf<PlainRecords<DuplexStream>>) -> usize {
    let (mut received, mut buffer) = (0, vec![0; 16 * 1024]);
    while let Ok(bytes @ 1..) = read.read(&mut buffer).await {
        received += bytes;
    }
    received
}

/// Returns a gateway with a service that echoes, one that may not be dialled, one whose endpoint is
/// missing, and one that is not exposed.
fn gateway() -> Arc<DataPath> {
    let publisher = Publisher::new();
    let mut exposure = ExposureTable::new(false);
    let anyone = Exposure {
        audiences: vec![Audience {
            anyone: true,
            ..Audience::default()
        }],
        ..Exposure::default()
    };
    exposure.add_entry("echo.app", &anyone, [("alias.app", Some(80))]);
    exposure.add_entry("denied.app", &anyone, []);
    exposure.add_entry("refused.app", &anyone, []);
    publisher.update(Change {
        mesh: Some((mesh().clone(), "east".into())),
        trust: Some(TrustSet::new([("west.local", "west")])),
        exposure: Some(exposure),
        ..Change::default()
    });
    let loopback = "127.0.0.0/8".parse().expect("a network");
    let metrics = Arc::new(Metrics::new());
    let tls = Arc::new(InboundTls::new(tls().clone()));
    Arc::new(DataPath {
        outer: Pool::new(Arc::clone(&tls), publisher.reader()),
        reader: publisher.reader(),
        tls,
        budget: Arc::new(BufferBudget::new(
            BUFFERS,
            metrics.set_buffer_limit(BUFFERS),
        )),
        metrics,
        lifecycle: Lifecycle::new(),
        admission: Admission::new(1024),
        deny: dial::DenyList::new(vec![loopback], Vec::new()),
    })
}

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        let port = echo().local_addr().expect("an address").port();
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

fn peer(has_expired: bool, holder: Holder) -> Arc<Peer> {
    let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
    let source = Source {
        address: ([192, 0, 2, 1], 1).into(),
        principal: "spiffe://west.local/ns/n/sa/c".into(),
        trust_domain: "west.local".into(),
        namespace: "n".into(),
        service_account: "c".into(),
        cluster: "west".into(),
        counted_cluster: "west".into(),
    };
    Arc::new(Peer {
        source: Arc::new(source),
        not_after: if has_expired {
            now - hour
        } else {
            now + 24 * hour
        },
        listener: Arc::default(),
        server_name: None,
        holder: Some(holder),
        issuer: None,
        chain: None,
    })
}

/// One listener for all executions, because ports are scarce.
fn echo() -> &'static StdListener {
    static ECHO: OnceLock<StdListener> = OnceLock::new();
    ECHO.get_or_init(|| {
        let listener = StdListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("a listener");
        listener
    })
}

async fn answer(listener: TcpListener) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(echo_one(stream));
    }
}

/// Echoes, and ends depending on the number of bytes: by FIN, by RST, or by leaving first.
async fn echo_one(mut stream: TcpStream) {
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
