//! Tests of the HTTP/2 server against scripted peers, in memory and with a paused clock.

pub(crate) mod chi_square;
mod dials;
mod networks;
#[path = "../../../tests/fuzz/targets/plain.rs"]
pub(crate) mod plain;
mod shares;
mod simulation;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use plain::PlainRecords;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::accept::ConnectionResources;
use super::forward::connection;
use super::handshake::{HandshakeError, Transport};
use super::http2::tunnel::{Forwarded, Origin, Target};
use super::identity::Peer;
use super::limits::admission::Admission;
use super::limits::descriptors;
use super::limits::load::LoadGuard;
use super::listener::{Listener, ListenerRules};
use super::{DataPath, dial};
use crate::config::parse_identity;
use crate::lifecycle::Lifecycle;
use crate::reason::HandshakeRefusal;
use crate::snapshot::builder::{Change, build};
use crate::snapshot::mesh::{Mesh, Protocol, Template, Workload};
use crate::snapshot::{
    Endpoint, EndpointSet, EndpointState, NO_LINK_FACTORS, Publisher, Reader, RemoteGateway,
    Snapshot,
};
use crate::telemetry::{Metrics, Source};
use crate::tls::record::{HEADER_BYTES, PLAINTEXT_MAX, RecordLayer, TRAILER_BYTES};
use crate::tls::tests::samples::{MATERIAL, trusting};
use crate::tls::{Identity, InboundTls};
use crate::wire::{Authority, Transit};

const BUFFERS: usize = 1 << 20;
/// Time to the end of a certificate that does not expire.
pub(crate) const FAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Returns the size of the future that an async function of two arguments returns.
pub(crate) fn future_size<A, B, F: Future>(_: impl Fn(A, B) -> F) -> usize {
    size_of::<F>()
}

/// Returns both ends of a TCP connection.
pub(crate) async fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let address = listener.local_addr().expect("an address");
    let near = TcpStream::connect(address).await.expect("a connection");
    (near, listener.accept().await.expect("a connection").0)
}

/// Waits until the other end of a connection within this process sends keepalive probes every 10
/// seconds: its timer is shown as number 2, with hundredths of a second. While its bytes are not
/// acknowledged, another timer is shown.
pub(crate) async fn kept_alive_by_other_end(near: &TcpStream) {
    let port = |address: std::io::Result<std::net::SocketAddr>| {
        format!(":{:04X}", address.expect("an address").port())
    };
    let (local, remote) = (port(near.peer_addr()), port(near.local_addr()));
    let begun = std::time::Instant::now();
    loop {
        let table = std::fs::read_to_string("/proc/net/tcp").expect("the table of sockets");
        let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let mut ends = rows.filter(|row| row[1].ends_with(&local) && row[2].ends_with(&remote));
        let timer = ends.next().expect("the other end")[5].split_once(':').expect("a timer");
        if timer.0 == "02" && u32::from_str_radix(timer.1, 16).expect("a time") <= 1000 {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "no keepalive: {timer:?}");
        tokio::task::yield_now().await;
    }
}

fn data_path() -> Arc<DataPath> {
    data_path_of(Publisher::default().reader(), dial::DenyList::default())
}

/// Returns a data path that reads these snapshots.
pub(crate) fn data_path_of(reader: Reader, deny: dial::DenyList) -> Arc<DataPath> {
    let tls = trusting(&MATERIAL, &[]);
    let metrics = Arc::new(Metrics::new());
    Arc::new(DataPath::new(
        reader,
        InboundTls::new(tls),
        metrics,
        Lifecycle::default(),
        Admission::new(1024),
        BUFFERS,
        deny,
    ))
}

/// Returns a peer of cluster west, whose certificate ends at this time.
pub(crate) fn peer(not_after: SystemTime) -> Arc<Peer> {
    let source = Source {
        address: ([192, 0, 2, 1], 1).into(),
        listener: Arc::default(),
        principal: "spiffe://w/ns/n/sa/c".into(),
        trust_domain: "w".into(),
        namespace: "n".into(),
        service_account: "c".into(),
        cluster: "west".into(),
        counted_cluster: "west".into(),
    };
    Arc::new(Peer {
        source: Arc::new(source),
        not_after,
        listener: Arc::default(),
        server_name: None,
        holders: None,
        issuer: None,
        chain: None,
        handshake: None,
        balanced: None,
    })
}

/// Returns a peer with this identity, at a listener with this limit of transit.
pub(crate) fn peer_of(snapshot: &Snapshot, principal: &str, listener: Transit) -> Peer {
    let parts = parse_identity(principal).expect("an identity").map(Arc::from);
    let [trust_domain, namespace, service_account] = parts;
    let identity = Identity {
        uri: principal.into(),
        trust_domain,
        namespace,
        service_account,
        not_after: SystemTime::UNIX_EPOCH,
    };
    let listener = Arc::new(Listener::open_to_all(&ListenerRules::with_transit(listener)));
    let address = ([127, 0, 0, 1], 1).into();
    let peer = Peer::authenticated(identity, None, address, listener, snapshot);
    peer.expect("a trusted peer")
}

/// Returns what a CONNECT for an authority asks for, with the headers of gateways.
pub(crate) fn target_of(authority: &str, forwarded: Option<Forwarded>) -> Target {
    Target {
        authority: Authority::parse(authority).expect("an authority"),
        origin: Origin::Workload,
        forwarded: forwarded.map(Box::new),
    }
}

/// Returns an HBONE endpoint, or the gateway of a network.
pub(crate) fn endpoint(uid: &str, weight: u32, network: Option<&str>) -> Arc<Endpoint> {
    let definition = Workload { uid: uid.into(), capacity: 1, ..Workload::default() };
    let remote = network.map(|network| {
        Arc::new(RemoteGateway {
            network: network.into(),
            cluster: network.into(),
            identities: [].into(),
            other_addresses: [].into(),
        })
    });
    Arc::new(Endpoint {
        definition: Arc::new(definition),
        address: ([192, 0, 2, 1], 15008).into(),
        protocol: Protocol::Hbone,
        remote,
        weight,
        state: Arc::new(EndpointState::default()),
    })
}

/// Returns the sum of the samples that begin with `name`.
pub(crate) fn metric(data_path: &DataPath, name: &str) -> u64 {
    let metrics = data_path.metrics.encode();
    let lines = metrics.lines().filter(|line| line.starts_with(name));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

/// Takes the descriptor of a connection.
pub(crate) fn descriptor(data_path: &DataPath) -> descriptors::Descriptor {
    let source = data_path.admission.pool.register_listener().source([192, 0, 2, 1].into());
    source.connection().expect("a descriptor")
}

/// Serves one end of a connection, and returns the scripted end.
fn serve(not_after: SystemTime) -> (JoinHandle<Result<(), HandshakeError>>, Peers) {
    serve_by(data_path(), not_after)
}

fn serve_by(
    data_path: Arc<DataPath>,
    not_after: SystemTime,
) -> (JoinHandle<Result<(), HandshakeError>>, Peers) {
    let (ours, theirs) = duplex(1 << 20);
    let served = tokio::spawn(async move {
        let held =
            ConnectionResources { load: LoadGuard::default(), descriptor: descriptor(&data_path) };
        let transport = Box::new(Transport {
            socket: ours,
            layer: RecordLayer::plaintext(),
            received: Vec::new(),
        });
        let served = connection::serve_stream(&data_path, transport, &held, peer(not_after));
        served.await.map(|_| ())
    });
    (served, PlainRecords::new(theirs))
}

/// The scripted end of a connection.
type Peers = PlainRecords<DuplexStream>;

type Client = (h2::client::SendRequest<Bytes>, h2::client::Connection<Peers>);

async fn client(stream: Peers) -> Client {
    h2::client::handshake(stream).await.expect("HTTP/2")
}

/// Returns a CONNECT to a service that does not exist.
fn connect() -> http::Request<()> {
    let request = http::Request::connect("unknown:80").body(());
    request.expect("a request")
}

/// Reads the head of a short frame, and its payload.
async fn read_frame(stream: &mut Peers) -> ([u8; 9], Vec<u8>) {
    let mut head = [0; 9];
    stream.read_exact(&mut head).await.expect("a frame");
    let mut payload = vec![0; usize::from(head[2])];
    stream.read_exact(&mut payload).await.expect("its payload");
    (head, payload)
}

async fn send_preface(stream: &mut Peers) {
    let sent = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    sent.expect("a preface");
}

#[tokio::test(start_paused = true)]
async fn a_peer_without_preface_is_refused_after_5_seconds() {
    let (served, _silent) = serve(SystemTime::now() + FAR);
    let start = Instant::now();
    let refused = served.await.expect("no panic").expect_err("a refusal");
    assert_eq!(refused.refusal, HandshakeRefusal::Timeout);
    assert_eq!(start.elapsed(), Duration::from_secs(5));
}

#[tokio::test(start_paused = true)]
async fn a_preface_at_a_byte_a_second_is_refused_after_5_seconds_too() {
    let (served, mut theirs) = serve(SystemTime::now() + FAR);
    let start = Instant::now();
    let slow = tokio::spawn(async move {
        for byte in *b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" {
            if theirs.write_u8(byte).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
    let refused = served.await.expect("no panic").expect_err("a refusal");
    assert_eq!(refused.refusal, HandshakeRefusal::Timeout);
    assert_eq!(start.elapsed(), Duration::from_secs(5));
    slow.await.expect("a peer that was left");
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_does_not_speak_http2_is_refused() {
    let (served, mut theirs) = serve(SystemTime::now() + FAR);
    theirs.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.expect("a write");
    let refused = served.await.expect("no panic").expect_err("a refusal");
    assert_eq!(refused.refusal, HandshakeRefusal::Other);
}

#[tokio::test(start_paused = true)]
async fn a_connection_without_a_connect_is_closed_after_30_seconds() {
    let (served, theirs) = serve(SystemTime::now() + FAR);
    let (_send, connection) = client(theirs).await;
    let start = Instant::now();
    connection.await.expect("GOAWAY NO_ERROR");
    assert_eq!(start.elapsed(), Duration::from_secs(30));
    served.await.expect("no panic").expect("an end");
}

#[tokio::test(start_paused = true)]
async fn a_used_connection_that_answers_pings_lives_on() {
    let (served, theirs) = serve(SystemTime::now() + FAR);
    let (mut send, connection) = client(theirs).await;
    let connection = tokio::spawn(connection);
    let (answer, _) = send.send_request(connect(), true).expect("a stream");
    let status = answer.await.expect("an answer").status();
    assert_eq!(status, http::StatusCode::SERVICE_UNAVAILABLE);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert!(!connection.is_finished() && !served.is_finished());
}

#[tokio::test(start_paused = true)]
async fn while_the_buffers_are_full_new_tunnels_are_refused() {
    let data_path = data_path();
    let stalled = data_path.budget.account(&crate::limits::Source::prefix([192, 0, 2, 1].into()));
    stalled.charge(BUFFERS + 1);
    let (_served, theirs) = serve_by(Arc::clone(&data_path), SystemTime::now() + FAR);
    let (mut send, connection) = client(theirs).await;
    tokio::spawn(connection);
    for (reason, count) in [("buffers_full", 1), ("unknown_service", 1)] {
        let (answer, _) = send.send_request(connect(), true).expect("a stream");
        let status = answer.await.expect("an answer").status();
        assert_eq!(status, http::StatusCode::SERVICE_UNAVAILABLE);
        let of = format!("strait_tunnels_total{{reason=\"{reason}\",");
        assert_eq!(metric(&data_path, &of), count, "{reason}");
        stalled.release(BUFFERS);
    }
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_answers_no_ping_is_gone_within_30_seconds() {
    let (served, theirs) = serve(SystemTime::now() + FAR);
    let (mut send, mut connection) = client(theirs).await;
    let (answer, _) = send.send_request(connect(), true).expect("a stream");
    let driven = tokio::select! {
        answer = answer => answer.is_ok(),
        _ = &mut connection => false,
    };
    assert!(driven, "the connection has had its first CONNECT");
    // From here on the peer's connection is not polled.
    let start = Instant::now();
    served.await.expect("no panic").expect("an end");
    assert_eq!(start.elapsed(), Duration::from_secs(30));
}

#[tokio::test(start_paused = true)]
async fn a_peer_whose_certificate_expires_receives_goaway() {
    let (served, theirs) = serve(SystemTime::now() - Duration::from_secs(1));
    let (_send, connection) = client(theirs).await;
    let start = Instant::now();
    connection.await.expect("GOAWAY NO_ERROR");
    assert_eq!(start.elapsed(), Duration::ZERO);
    served.await.expect("no panic").expect("an end");
}

#[tokio::test(start_paused = true)]
async fn a_peer_whose_certificate_has_expired_opens_no_more_tunnels() {
    const HEADERS: u8 = 1;
    const END_HEADERS: u8 = 4;
    let (served, mut theirs) = serve(SystemTime::now() - Duration::from_secs(1));
    // The peer does not answer the PING that follows the first GOAWAY.
    send_preface(&mut theirs).await;
    theirs.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.expect("SETTINGS");
    let block = b"\x00\x07:method\x07CONNECT\x00\x0a:authority\x04a:80";
    let length = u8::try_from(block.len()).expect("short");
    theirs.write_all(&[0, 0, length, HEADERS, END_HEADERS, 0, 0, 0, 1]).await.expect("HEADERS");
    theirs.write_all(block).await.expect("a CONNECT");
    let (mut refused, mut answered) = (false, false);
    while !refused {
        let (head, payload) = read_frame(&mut theirs).await;
        answered |= head[3] == HEADERS;
        refused |= head[3] == 3 && payload == [0, 0, 0, 7];
    }
    assert!(!answered, "REFUSED_STREAM and no answer");
    served.abort();
}

#[tokio::test(start_paused = true)]
async fn our_settings_are_those_of_the_contract() {
    let (_served, mut theirs) = serve(SystemTime::now() + FAR);
    send_preface(&mut theirs).await;
    let (head, settings) = read_frame(&mut theirs).await;
    assert_eq!((head[3], settings.len() % 6), (4, 0), "SETTINGS");
    let value = |id: u16| {
        let found = settings.chunks(6).find(|one| one[..2] == id.to_be_bytes());
        found.map(|one| u32::from_be_bytes([one[2], one[3], one[4], one[5]]))
    };
    const MAX_CONCURRENT_STREAMS: u16 = 3;
    const INITIAL_WINDOW_SIZE: u16 = 4;
    const MAX_FRAME_SIZE: u16 = 5;
    const MAX_HEADER_LIST_SIZE: u16 = 6;
    assert_eq!(value(MAX_CONCURRENT_STREAMS), Some(256));
    assert_eq!(value(INITIAL_WINDOW_SIZE), Some(256 * 1024));
    assert_eq!(value(MAX_FRAME_SIZE), Some(64 * 1024));
    assert_eq!(value(MAX_HEADER_LIST_SIZE), Some(16 * 1024));
}
