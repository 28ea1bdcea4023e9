//! Long idle times in virtual time, and the keepalive of endpoints in them.

use socket2::SockRef;
use tokio::io::AsyncWriteExt;
use tokio::time::sleep;

use super::panic::Client;
use super::rig::mesh;
use super::*;
use crate::datapath::forward::passthrough::{self, ConnectionGuards, PassthroughConnection};
use crate::datapath::listener::ListenerTarget;
use crate::datapath::tests::{kept_alive_by_other_end, tcp_pair};

const HELLO: &[u8] = b"a ClientHello that nothing reads";
/// More than a socket receives whose process does not read, and less than it may hold unsent.
const LAST: usize = 192 * 1024;
const HOUR: Duration = Duration::from_secs(3600);

/// Returns the listener of a service with one endpoint, and a gateway in front of it.
async fn endpoint(service: &str) -> (TcpListener, Arc<DataPath>, Publisher) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let address = listener.local_addr().expect("an address");
    let publisher = Publisher::default();
    publisher.update(Change { has_passthrough: Some(true), ..mesh([(service, address)]) });
    let loopback = "127.0.0.0/8".parse().expect("a network");
    let deny = DenyList::new(vec![loopback], Vec::new());
    let data_path = data_path_of(publisher.reader(), deny);
    (listener, data_path, publisher)
}

#[tokio::test(start_paused = true)]
async fn the_endpoint_of_a_tunnel_is_kept_alive_from_the_next_ping_on() {
    let (listener, data_path, _publisher) = endpoint("echo").await;
    let mut client = Client::connect(&data_path).await;
    for _ in 0..2 {
        let mut tunnel = client.tunnel(&listener).await;
        tunnel.exchange().await;
        sleep(Duration::from_secs(11)).await;
        kept_alive_by_other_end(&tunnel.far).await;
        tunnel.exchange().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_fails_after_its_end_is_noticed_with_the_next_ping() {
    let (listener, data_path, _publisher) = endpoint("echo").await;
    let mut client = Client::connect(&data_path).await;
    let mut tunnel = client.tunnel(&listener).await;
    tunnel.exchange().await;
    tunnel.far.shutdown().await.expect("an open connection");
    let end = tunnel.receive.data().await.expect("END_STREAM").expect("no reset");
    assert!(end.is_empty() && tunnel.receive.is_end_stream());
    SockRef::from(&tunnel.far).set_linger(Some(Duration::ZERO)).expect("an open socket");
    drop(tunnel.far);
    let reset = "strait_tunnels_total{reason=\"upstream_reset\",";
    assert_eq!(metric(&data_path, reset), 0);
    sleep(Duration::from_secs(11)).await;
    assert_eq!(metric(&data_path, reset), 1);
}

/// Returns a connection of a TLS listener that leads to `istiod`.
fn connection(data_path: &Arc<DataPath>, stream: TcpStream) -> Box<PassthroughConnection> {
    let descriptor = descriptor(data_path);
    let peer = Arc::new(Peer {
        holders: Some(descriptor.holders().clone()),
        ..Peer::unauthenticated(([127, 0, 0, 1], 1).into(), Arc::default(), None)
    });
    let record = Record::for_client_hello(&data_path.metrics, &peer.source, None);
    Box::new(PassthroughConnection {
        random: [7; 32],
        tunnel: NewTunnel::new(data_path, &peer, record),
        stream,
        client_hello: HELLO.to_vec(),
        target: Ok(ListenerTarget {
            authority: Authority::parse("istiod.app:80").expect("an authority"),
            granted_by_listener: true,
        }),
        guards: ConnectionGuards {
            resources: ConnectionResources { load: LoadGuard::default(), descriptor },
            counted: data_path.metrics.connection_opened(),
            of_binding: None,
        },
    })
}

/// Accepts the connection of an endpoint, and reads the ClientHello.
async fn greeted(listener: &TcpListener) -> TcpStream {
    let (mut server, _) = listener.accept().await.expect("a connection");
    let mut hello = vec![0; HELLO.len()];
    server.read_exact(&mut hello).await.expect("a hello");
    assert_eq!(hello, HELLO);
    server
}

/// Reads the last bytes ten seconds after the end. Returns their number, and those of what lives
/// before and afterwards.
async fn read_late<T>(
    side: &mut TcpStream,
    data_path: &DataPath,
    live: impl Fn() -> T,
) -> (usize, [T; 2]) {
    sleep(Duration::from_secs(10)).await;
    assert_eq!(metric(data_path, "strait_tunnels_total{reason=\"completed\","), 1);
    let before = live();
    let read = side.read_to_end(&mut Vec::new()).await;
    sleep(Duration::from_secs(1)).await;
    (read.expect("a clean end"), [before, live()])
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_takes_the_last_bytes_late_keeps_the_place_of_its_tunnel() {
    let (listener, data_path, _publisher) = endpoint("echo").await;
    let mut client = Client::connect(&data_path).await;
    let mut tunnel = client.tunnel(&listener).await;
    tunnel.far.shutdown().await.expect("an open connection");
    tunnel.send.send_data(vec![7; LAST].into(), true).expect("an open tunnel");
    // That of the connection lives on.
    let tasks = || data_path.lifecycle.tasks();
    assert_eq!(read_late(&mut tunnel.far, &data_path, tasks).await, (LAST, [2, 1]));
}

#[tokio::test(start_paused = true)]
async fn a_client_that_takes_the_last_bytes_late_keeps_its_connection_open() {
    let (listener, data_path, _publisher) = endpoint("istiod").await;
    let (mut client, stream) = tcp_pair().await;
    let served = tokio::spawn(passthrough::run(connection(&data_path, stream)));
    let mut server = greeted(&listener).await;
    client.shutdown().await.expect("an open connection");
    server.write_all(&[7; LAST]).await.expect("an open connection");
    drop(server);
    let open = || metric(&data_path, "strait_connections_open");
    assert_eq!(read_late(&mut client, &data_path, open).await, (LAST, [1, 0]));
    served.await.expect("no panic");
}

/// The listener at 15012 forwards TLS to istiod, whose streams may be silent for hours.
#[tokio::test(start_paused = true)]
async fn a_connection_through_15012_survives_hours_of_silence() {
    let (listener, data_path, _publisher) = endpoint("istiod").await;
    let (mut client, stream) = tcp_pair().await;
    let served = tokio::spawn(passthrough::run(connection(&data_path, stream)));
    let mut server = greeted(&listener).await;
    for silence in [Duration::ZERO, HOUR, 12 * HOUR] {
        sleep(silence).await;
        server.write_all(b"push").await.expect("an open connection");
        let mut push = [0; 4];
        client.read_exact(&mut push).await.expect("a push");
        client.write_all(b"ack").await.expect("an open connection");
        let mut ack = [0; 3];
        server.read_exact(&mut ack).await.expect("an ACK");
        assert!(!served.is_finished());
        if !silence.is_zero() {
            kept_alive_by_other_end(&server).await;
        }
    }
    drop((client, server));
    served.await.expect("no panic");
}
