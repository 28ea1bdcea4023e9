//! rustls' records over a socket: all sizes, pieces of a byte, and updates of keys at any point.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};

use rustls::ClientConfig;
use strait::tools::hbone::Client;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::client::TlsStream;

use crate::support::oracle::{Oracle, Plan, drive};
use crate::support::raw::session;
use crate::support::{
    CLIENT, ECHO, Endpoint, GATEWAY, Gateway, Net, Settings, bytes, identities, run,
};

/// Overhead of a sealed record: header, content type, tag.
const RECORD_OVERHEAD: usize = 5 + 1 + 16;
/// Limits of rustls for `max_fragment_size`.
const FRAGMENT_MIN: usize = 32;
const FRAGMENT_MAX: usize = 16 * 1024 + 5;

async fn start(net: Net) -> (Gateway, Oracle) {
    let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    (Gateway::start(&settings).await, Oracle::new())
}

/// Opens a connection over `stream` whose records have at most `fragment` bytes.
async fn connect(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    fragment: usize,
) -> Client {
    let mut tls = ClientConfig::clone(&identities().client(CLIENT, GATEWAY));
    tls.max_fragment_size = Some(fragment);
    let client = Client::connect_over(stream, &Arc::new(tls)).await;
    client.expect("a connection")
}

async fn socket(gateway: &Gateway) -> TcpStream {
    let socket = TcpStream::connect(gateway.address).await;
    let socket = socket.expect("a connection");
    socket.set_nodelay(true).expect("a socket");
    socket
}

/// Runs one tunnel with `bytes` in each direction.
async fn exchange(client: &Client, oracle: &Oracle, id: u64, bytes: u64) {
    let plan = Plan::both(id, bytes);
    let tunnel = client.tunnel(ECHO).await.expect("a tunnel");
    let side = drive(tunnel, plan).await;
    oracle.whole(plan, side).await;
}

#[test]
fn records_of_every_size_are_opened() {
    run(async {
        let net = Net::new();
        let (gateway, oracle) = start(net).await;
        let _endpoint = oracle.endpoint(net.listen(11, 9000).await);
        let small = FRAGMENT_MIN..FRAGMENT_MIN + 100;
        let edges = [256, 512, 1024, 2048, 4096, 8192, FRAGMENT_MAX];
        let edges = edges.into_iter().flat_map(|edge| edge - 2..=edge);
        for (id, fragment) in (0..).zip(small.chain(edges)) {
            let client = connect(socket(&gateway).await, fragment).await;
            exchange(&client, &oracle, id, 40_000).await;
            client.close().await.expect("a clean end");
        }
    });
}

/// Socket that accepts at most `bytes` of each write.
struct Pieces {
    socket: TcpStream,
    bytes: usize,
}

impl AsyncRead for Pieces {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Pieces {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let piece = &data[..data.len().min(self.bytes)];
        Pin::new(&mut self.socket).poll_write(cx, piece)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[test]
fn records_that_arrive_in_pieces_of_every_size_are_opened() {
    run(async {
        let net = Net::new();
        let (gateway, oracle) = start(net).await;
        let _endpoint = oracle.endpoint(net.listen(11, 9000).await);
        for bytes in 1..=2 * RECORD_OVERHEAD {
            let socket = socket(&gateway).await;
            let client = connect(Pieces { socket, bytes }, FRAGMENT_MIN).await;
            exchange(&client, &oracle, bytes as u64, 1000).await;
            client.close().await.expect("a clean end");
        }
    });
}

/// TLS session that updates its keys, and requests the gateway's, before every eighth write.
struct KeyUpdates {
    session: TlsStream<TcpStream>,
    random: fastrand::Rng,
    updates: Arc<AtomicU32>,
}

impl AsyncRead for KeyUpdates {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.session).poll_read(cx, buffer)
    }
}

impl AsyncWrite for KeyUpdates {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.random.u8(..8) == 0 {
            let updated = self.session.get_mut().1.refresh_traffic_keys();
            updated.expect("TLS 1.3");
            self.updates.fetch_add(1, Ordering::Relaxed);
        }
        // Short writes, so that many updates stand between the parts of a frame.
        let piece = self.random.usize(1..4000).min(data.len());
        Pin::new(&mut self.session).poll_write(cx, &data[..piece])
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.session).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.session).poll_shutdown(cx)
    }
}

#[test]
fn keys_that_rustls_updates_at_any_point_open_every_byte() {
    const TUNNELS: u64 = 4;
    const BYTES: u64 = 1 << 20;
    run(async {
        let net = Net::new();
        let (gateway, _) = start(net).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let updates = Arc::new(AtomicU32::new(0));
        let stream = KeyUpdates {
            session: session(&gateway).await,
            random: fastrand::Rng::with_seed(1),
            updates: Arc::clone(&updates),
        };
        let handshake = h2::client::handshake(stream).await;
        let (mut send, connection) = handshake.expect("a connection");
        tokio::spawn(connection);
        let mut tunnels = JoinSet::new();
        for id in 0..TUNNELS {
            let request = http::Request::connect(ECHO).body(()).expect("a request");
            send = send.ready().await.expect("room for a stream");
            let opened = send.send_request(request, false).expect("a stream");
            let (response, mut sending) = opened;
            tunnels.spawn(async move {
                let mut body = response.await.expect("an answer").into_body();
                let sent = bytes::range(id, 0, BYTES);
                let all = sending.send_data(sent.clone().into(), true);
                all.expect("an open stream");
                let mut received = Vec::new();
                while let Some(data) = body.data().await {
                    let data = data.expect("no reset");
                    received.extend_from_slice(&data);
                    let taken = body.flow_control().release_capacity(data.len());
                    taken.expect("received bytes");
                }
                assert!(received == sent, "tunnel {id}");
            });
        }
        tunnels.join_all().await;
        let updates = updates.load(Ordering::Relaxed);
        assert!(updates > 100, "{updates}");
        assert_eq!(gateway.metric("strait_connections_total").await, 1.0);
    });
}
