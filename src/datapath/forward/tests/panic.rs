//! A panic in the task of one connection: that connection ends, and no other.

use std::io;
use std::net::TcpListener as StdListener;
use std::sync::Mutex;

use bytes::Bytes;
use h2::client::{self, SendRequest};
use h2::{RecvStream, SendStream};
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::io::{DuplexStream, duplex};
use tokio::task::JoinHandle;

use super::rig::mesh;
use super::*;
use crate::config::{Log, LogFormat};
use crate::datapath::forward::connection::serve_stream;
use crate::datapath::tests::plain::PlainRecords;
use crate::telemetry::logging;

const DEADLINE: Duration = Duration::from_secs(10);

/// Socket whose next read panics once `panics` is set.
#[derive(Debug)]
struct Panicking {
    stream: DuplexStream,
    panics: Arc<AtomicBool>,
}

impl AsyncRead for Panicking {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        assert!(!self.panics.load(Ordering::Relaxed), "on purpose");
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Panicking {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Client of a connection that the gateway serves.
pub(super) struct Client {
    send: SendRequest<Bytes>,
    panics: Arc<AtomicBool>,
    served: JoinHandle<()>,
    ended: JoinHandle<Result<(), h2::Error>>,
}

impl Client {
    pub(super) async fn connect(data_path: &Arc<DataPath>) -> Self {
        let (ours, theirs) = duplex(64 * 1024);
        let panics = Arc::new(AtomicBool::new(false));
        let socket = Panicking { stream: ours, panics: Arc::clone(&panics) };
        let served = data_path.lifecycle.spawn(serve(Arc::clone(data_path), socket));
        let (send, connection) = client::handshake(PlainRecords::new(theirs)).await.unwrap();
        Self { send, panics, served, ended: tokio::spawn(connection) }
    }

    fn request(&mut self, authority: &str) -> (client::ResponseFuture, SendStream<Bytes>) {
        let request = http::Request::connect(authority).body(()).unwrap();
        self.send.send_request(request, false).unwrap()
    }

    pub(super) async fn tunnel(&mut self, listener: &TcpListener) -> Echo {
        let (answer, send) = self.request("echo.app:80");
        let (far, answer) = tokio::join!(listener.accept(), answer);
        let answer = answer.unwrap();
        assert_eq!(answer.status(), http::StatusCode::OK);
        Echo { send, receive: answer.into_body(), far: far.unwrap().0 }
    }
}

/// Tunnel with its endpoint.
pub(super) struct Echo {
    pub(super) send: SendStream<Bytes>,
    pub(super) receive: RecvStream,
    pub(super) far: TcpStream,
}

impl Echo {
    /// Sends bytes through the tunnel and back.
    pub(super) async fn exchange(&mut self) {
        let bytes = b"there and back";
        self.send.send_data(bytes[..].into(), false).unwrap();
        let mut received = [0; 14];
        self.far.read_exact(&mut received).await.unwrap();
        assert_eq!(received, *bytes);
        assert_eq!(self.far.try_write(bytes).unwrap(), bytes.len());
        let back = self.receive.data().await.unwrap().unwrap();
        assert_eq!(back, bytes[..]);
    }
}

async fn serve(data_path: Arc<DataPath>, socket: Panicking) {
    let held =
        ConnectionResources { load: LoadGuard::default(), descriptor: descriptor(&data_path) };
    let peer = Arc::new(Peer {
        holders: Some(held.descriptor.holders().clone()),
        ..(*peer(SystemTime::now() + FAR)).clone()
    });
    let transport =
        Box::new(Transport { socket, layer: RecordLayer::plaintext(), received: Vec::new() });
    drop(serve_stream(&data_path, transport, &held, peer).await);
}

/// Returns a listener that accepts nothing, and the connections that fill its queue. A dial to it
/// waits.
fn silent() -> (Socket, Vec<Socket>, SocketAddr) {
    let tcp = || Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let listener = tcp();
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    listener.bind(&SockAddr::from(any)).unwrap();
    listener.listen(0).unwrap();
    let address = listener.local_addr().unwrap();
    let fill = |_| {
        let socket = tcp();
        socket.set_nonblocking(true).unwrap();
        let _ = socket.connect(&address);
        socket
    };
    let filling = (0..4).map(fill).collect();
    (listener, filling, address.as_socket().unwrap())
}

async fn until(what: &str, mut is_met: impl FnMut() -> bool) {
    let wait = async {
        while !is_met() {
            yield_now().await;
        }
    };
    timeout(DEADLINE, wait).await.unwrap_or_else(|_| panic!("{what}"));
}

/// Log in memory.
#[derive(Clone, Debug, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> tracing_subscriber::fmt::MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[tokio::test]
async fn a_panic_ends_one_connection_and_counts_and_resets_its_tunnels() {
    let log = Log { level: "info".into(), format: LogFormat::Json, ..Log::default() };
    let lines = Lines::default();
    let (subscriber, _handle) = logging::build(&log, lines.clone(), false, None).unwrap();
    let _default = tracing::subscriber::set_default(subscriber);

    let echo = TcpListener::from_std({
        let listener = StdListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        listener
    })
    .unwrap();
    let (_silent, _filling, silent) = silent();
    let publisher = Publisher::default();
    let endpoint = echo.local_addr().unwrap();
    publisher.update(mesh([("echo", endpoint), ("silent", silent)]));
    let loopback = "127.0.0.0/8".parse().unwrap();
    let deny = DenyList::new(vec![loopback], Vec::new());
    let data_path = data_path_of(publisher.reader(), deny);

    let mut broken = Client::connect(&data_path).await;
    let mut other = Client::connect(&data_path).await;
    let mut first = broken.tunnel(&echo).await;
    let mut second = other.tunnel(&echo).await;
    first.exchange().await;
    second.exchange().await;
    let (waiting, _send) = broken.request("silent.app:80");
    // Two owners of connections, and the task of this tunnel.
    until("a dial waits", || data_path.lifecycle.tasks() == 3).await;
    assert_eq!(metric(&data_path, "strait_connections_open"), 2);
    assert_eq!(metric(&data_path, "strait_tunnels_open"), 2);

    broken.panics.store(true, Ordering::Relaxed);
    first.send.send_data(b"more"[..].into(), false).unwrap();
    let served = timeout(DEADLINE, broken.served).await.unwrap();
    assert!(served.unwrap_err().is_panic());
    until("the dial is given up", || data_path.lifecycle.tasks() == 1).await;
    let reset = timeout(DEADLINE, first.far.read(&mut [0; 16])).await.unwrap();
    assert_eq!(reset.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    assert!(first.receive.data().await.unwrap().is_err());
    assert!(waiting.await.is_err());
    assert!(timeout(DEADLINE, broken.ended).await.unwrap().is_ok(), "no panic");
    let panics = "strait_tunnels_total{reason=\"panic\"";
    assert_eq!(metric(&data_path, panics), 2);
    assert_eq!(metric(&data_path, "strait_connections_open"), 1);
    assert_eq!(metric(&data_path, "strait_tunnels_open"), 1);
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    let logged = text.lines().filter(|line| line.contains("\"reason\":\"panic\""));
    assert_eq!(logged.count(), 2, "{text}");

    second.exchange().await;
    assert!(!other.served.is_finished() && !other.ended.is_finished());
}
