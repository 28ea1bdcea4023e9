//! HTTP/1.1 server for the three ports, hardened against slow clients.
//!
//! Two of the ports are open to the network and serve probes. A client that holds connections
//! open or sends its request byte by byte must not make readiness fail. Each connection therefore
//! has one request, deadlines and one of few slots. At the limit, the oldest connection of the
//! source with the most is closed. `axum::serve` has neither deadlines nor a limit.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet, yield_now};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::io::InspectWriter;

use crate::limits::prefix;

/// Limits of one port.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of concurrent connections.
    connections: usize,
    head: Duration,
    /// Maximum time without a byte written to the client. Reading the request does not restart
    /// it.
    write_timeout: Duration,
    /// Deadline for the whole connection. A dump of a large mesh is long, and clients read it
    /// slowly.
    connection: Duration,
}

impl Limits {
    /// Limits of the admin port, where clients read a dump of a large mesh slowly. A port has a
    /// handful of clients: kubelet, one or two scrapers, an operator.
    pub const PAGES: Self = Self {
        connections: 64,
        head: Duration::from_secs(5),
        write_timeout: Duration::from_secs(30),
        connection: Duration::from_secs(600),
    };

    /// Limits of the ports that are open to the network. Prometheus gives up after 10 s by
    /// default.
    pub const PROBES: Self = Self {
        write_timeout: Duration::from_secs(5),
        connection: Duration::from_secs(30),
        ..Self::PAGES
    };
}

/// Size in bytes of the socket send buffer, which the kernel doubles for its own use. By default
/// it would grow to megabytes for a slow client, and a container's memory limit includes them.
const SEND_BUFFER: usize = 128 * 1024;

/// Maximum size in bytes of a request head, and of a body that a handler may read.
const MAX_REQUEST: usize = 64 * 1024;

/// Pause after a failed accept: without descriptors, an immediate retry would fail in a busy
/// loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time for answers in flight when the process closes.
const CLOSE_GRACE: Duration = Duration::from_millis(500);

/// Serves the router of port `name` until `end`.
pub async fn serve(
    name: &str,
    limits: Limits,
    listener: TcpListener,
    router: Router,
    end: impl Future<Output = ()>,
) {
    let router = router.layer(DefaultBodyLimit::max(MAX_REQUEST));
    let mut connections = Connections::default();
    tokio::pin!(end);
    loop {
        let accepted = tokio::select! {
            () = &mut end => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, client)) => {
                connections.evict_to(limits.connections);
                let served = connection(limits, stream, router.clone());
                connections.add(prefix(client.ip()), served);
                // Otherwise a long queue evicts connections before their first turn.
                yield_now().await;
            }
            Err(error) => {
                tracing::warn!(port = name, %error, "cannot accept connections on an HTTP port");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    let _ = timeout(CLOSE_GRACE, connections.ended()).await;
}

/// Serves one request. Errors are ignored, because they affect only the client.
async fn connection(limits: Limits, stream: TcpStream, router: Router) {
    // On failure the connection uses the default size.
    let _ = SockRef::from(&stream).set_send_buffer_size(SEND_BUFFER);
    let began = Instant::now();
    let last_write = Arc::new(Mutex::new(began));
    let record = Arc::clone(&last_write);
    // hyper copies whole bodies for a stream without vectored writes; this one has them.
    let stream = InspectWriter::new(stream, move |_: &[u8]| {
        *record.lock() = Instant::now();
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .keep_alive(false)
        .max_buf_size(MAX_REQUEST)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    tokio::pin!(served);
    loop {
        let last = *last_write.lock();
        let due = (last + limits.write_timeout).min(began + limits.connection);
        if due <= Instant::now() || timeout_at(due, &mut served).await.is_ok() {
            return;
        }
    }
}

/// Open connections. Dropping it closes all.
#[derive(Debug, Default)]
struct Connections {
    tasks: JoinSet<()>,
    /// Connections with the prefixes of their clients, oldest first.
    order: VecDeque<(IpAddr, AbortHandle)>,
}

impl Connections {
    fn add(&mut self, source: IpAddr, connection: impl Future<Output = ()> + Send + 'static) {
        self.order.push_back((source, self.tasks.spawn(connection)));
    }

    /// Closes connections until `limit` permits one more: the oldest one of the source with the
    /// most. Among sources with the same number, closes the oldest of all.
    ///
    /// If new connections waited instead, 64 slow clients could block every probe for the length
    /// of a deadline.
    fn evict_to(&mut self, limit: usize) {
        while self.tasks.try_join_next().is_some() {}
        self.order.retain(|(_, handle)| !handle.is_finished());
        while self.order.len() >= limit {
            let mut held = HashMap::<_, usize>::new();
            for (source, _) in &self.order {
                *held.entry(*source).or_default() += 1;
            }
            let most = held.values().max();
            let oldest = self.order.iter().position(|(source, _)| held.get(source) == most);
            let Some((_, evicted)) = oldest.and_then(|place| self.order.remove(place)) else {
                break;
            };
            evicted.abort();
        }
    }

    async fn ended(&mut self) {
        while self.tasks.join_next().await.is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpSocket;
    use tokio::sync::watch;

    use super::*;
    use crate::lifecycle::{Phase, wait_for_phase};

    const DEADLINE: Duration = Duration::from_secs(10);
    /// Size in bytes that exceeds all socket buffers.
    const LARGE: usize = 64 << 20;
    const LARGE_REQUEST: &[u8] = b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n";

    async fn server(limits: Limits) -> (SocketAddr, watch::Sender<Phase>, JoinSet<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let (phase, mut phases) = watch::channel(Phase::Running);
        let end = async move { wait_for_phase(&mut phases, Phase::Closing).await };
        let router = Router::new()
            .route("/", get("hello\n"))
            .route("/large", get(async || vec![0_u8; LARGE]))
            .route("/stuck", get(std::future::pending::<&'static str>));
        let mut tasks = JoinSet::new();
        tasks.spawn(serve("test", limits, listener, router, end));
        (address, phase, tasks)
    }

    /// Sends `request` and returns all received bytes, even if the connection is lost.
    async fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.expect("a connection");
        stream.write_all(request.as_bytes()).await.expect("sent");
        rest(stream).await
    }

    async fn rest(mut stream: TcpStream) -> String {
        let mut answer = Vec::new();
        let _ = timeout(DEADLINE, stream.read_to_end(&mut answer)).await.expect("closed in time");
        String::from_utf8_lossy(&answer).into_owned()
    }

    const HELLO: &str = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";

    #[tokio::test]
    async fn each_connection_has_one_request() {
        let (address, _phase, _tasks) = server(Limits::PAGES).await;
        let answer = ask(address, &HELLO.repeat(2)).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert_eq!(answer.matches("hello").count(), 1, "{answer}");
    }

    #[tokio::test]
    async fn a_request_that_never_ends_is_closed_at_its_deadline() {
        let short = Duration::from_millis(200);
        let (address, _phase, _tasks) = server(Limits { head: short, ..Limits::PAGES }).await;
        let start = Instant::now();
        assert!(!ask(address, "GET / HTTP/1.1\r\nHost:").await.contains("200 OK"));
        assert!(start.elapsed() >= short);
    }

    #[tokio::test]
    async fn an_answer_that_never_ends_is_closed_at_its_deadline() {
        let short = Duration::from_millis(200);
        let (address, _phase, _tasks) =
            server(Limits { write_timeout: short, ..Limits::PAGES }).await;
        assert_eq!(ask(address, "GET /stuck HTTP/1.1\r\nHost: localhost\r\n\r\n").await, "");
    }

    /// Reads a large answer in pieces, with one pause after the first piece and another after
    /// each further one. Returns the number of bytes received.
    async fn sip(address: SocketAddr, first: Duration, each: Duration) -> usize {
        let mut stream = TcpStream::connect(address).await.expect("a connection");
        stream.write_all(LARGE_REQUEST).await.expect("sent");
        let (mut piece, mut total) = (vec![0; 512 << 10], 0);
        while let Ok(count @ 1..) = stream.read(&mut piece).await {
            let pause = if total == 0 { first } else { each };
            total += count;
            // deadline: the reader is slow.
            sleep(pause).await;
        }
        total
    }

    #[tokio::test]
    async fn a_large_answer_has_time_while_it_is_read() {
        let limits = Limits {
            write_timeout: Duration::from_millis(500),
            connection: Duration::from_secs(60),
            ..Limits::PAGES
        };
        let (address, _phase, _tasks) = server(limits).await;
        let (start, short) = (Instant::now(), Duration::from_millis(10));
        assert!(sip(address, short, short).await > LARGE);
        assert!(start.elapsed() > limits.write_timeout, "longer than one pause");
        assert!(sip(address, 3 * limits.write_timeout, Duration::ZERO).await < LARGE);
        let hasty = Limits { connection: Duration::from_millis(200), ..limits };
        let (address, _phase, _tasks) = server(hasty).await;
        assert!(sip(address, short, short).await < LARGE);
    }

    #[tokio::test]
    async fn idle_connections_beyond_the_limit_give_way_to_a_probe() {
        let (address, _phase, _tasks) = server(Limits { connections: 4, ..Limits::PAGES }).await;
        let mut idle = Vec::new();
        for _ in 0..8 {
            idle.push(TcpStream::connect(address).await.expect("a connection"));
        }
        let start = Instant::now();
        assert!(ask(address, HELLO).await.contains("hello"));
        assert!(start.elapsed() < Limits::PAGES.head);
    }

    #[tokio::test]
    async fn idle_connections_of_one_source_end_no_answer_to_another_one() {
        let (address, _phase, _tasks) = server(Limits::PAGES).await;
        let mut reader = TcpStream::connect(address).await.expect("a connection");
        reader.write_all(LARGE_REQUEST).await.expect("sent");
        reader.read_exact(&mut [0; 16]).await.expect("the begin of the answer");
        let mut idle = Vec::new();
        for _ in 0..200 {
            let socket = TcpSocket::new_v4().expect("a socket");
            socket.bind("127.0.0.2:0".parse().expect("an address")).expect("a source");
            idle.push(socket.connect(address).await.expect("a connection"));
        }
        // With the reader, 63 of them have a place.
        let last_evicted = idle.swap_remove(200 - Limits::PAGES.connections);
        assert_eq!(rest(last_evicted).await, "");
        assert!(rest(reader).await.len() >= LARGE);
    }

    #[tokio::test]
    async fn a_queue_beyond_the_limit_is_answered() {
        use std::io::Write as _;
        let (address, _phase, _tasks) = server(Limits { connections: 8, ..Limits::PAGES }).await;
        // The server has no turn before all are queued.
        let queued = [0; 64].map(|_| {
            let mut stream = std::net::TcpStream::connect(address).expect("a connection");
            stream.write_all(HELLO.as_bytes()).expect("sent");
            stream.set_nonblocking(true).expect("a mode");
            TcpStream::from_std(stream).expect("a stream")
        });
        for stream in queued {
            assert!(rest(stream).await.contains("hello"));
        }
    }

    #[tokio::test]
    async fn a_head_beyond_the_limit_is_refused() {
        let (address, _phase, _tasks) = server(Limits::PAGES).await;
        let long = format!("GET / HTTP/1.1\r\nHost: localhost\r\nX: {}", "x".repeat(MAX_REQUEST));
        let answer = ask(address, &long).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431 "), "{answer}");
    }

    #[tokio::test]
    async fn the_server_ends_when_the_process_closes() {
        let (address, phase, mut tasks) = server(Limits::PAGES).await;
        phase.send_replace(Phase::Draining);
        assert!(ask(address, HELLO).await.contains("hello"));
        phase.send_replace(Phase::Closing);
        timeout(DEADLINE, tasks.join_next()).await.expect("ended in time");
        assert!(TcpStream::connect(address).await.is_err());
    }
}
