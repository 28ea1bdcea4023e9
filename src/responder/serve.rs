//! Sockets of the responder: UDP, and TCP with limits of clients and time.

use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{debug, error};

use crate::config::Config;

use super::answer::{Transport, answer};
use super::names::Names;

/// Limit of open TCP connections. More clients wait in the listen backlog.
const CLIENTS_MAX: usize = 64;
/// Deadline for one query over TCP, and for its answer.
const QUERY_DEADLINE: Duration = Duration::from_secs(5);
/// Deadline for a TCP connection, after which waiting clients get its place.
const CONNECTION_DEADLINE: Duration = Duration::from_secs(30);
/// Limit of a query over UDP: larger than EDNS that this responder announces.
const QUERY_BYTES_MAX: usize = 4096;
/// Pause after an error of a socket, such as too many open files.
const ERROR_PAUSE: Duration = Duration::from_millis(100);

/// Bound sockets of one address.
#[derive(Debug)]
pub struct Sockets {
    udp: UdpSocket,
    tcp: TcpListener,
}

impl Sockets {
    /// Creates the sockets from a listening one for TCP, whose port UDP uses too.
    ///
    /// # Errors
    /// The address is in use by UDP.
    pub fn bind(tcp: TcpListener) -> io::Result<Self> {
        let udp = UdpSocket::bind(tcp.local_addr()?)?;
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        Ok(Self { udp, tcp })
    }

    /// Returns the address.
    ///
    /// # Errors
    /// The socket has failed.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }
}

/// Names of the configuration in use.
struct Source {
    config: Arc<ArcSwap<Config>>,
    last: ArcSwap<(Arc<Config>, Names)>,
}

impl Source {
    fn new(config: Arc<ArcSwap<Config>>) -> Self {
        let now = config.load_full();
        let names = Names::new(&now);
        Self {
            last: ArcSwap::from_pointee((now, names)),
            config,
        }
    }

    fn answer(&self, query: &[u8], transport: Transport) -> Option<Vec<u8>> {
        let now = self.config.load();
        if !Arc::ptr_eq(&now, &self.last.load().0) {
            let names = Names::new(&now);
            self.last.store(Arc::new((Arc::clone(&now), names)));
        }
        answer(&self.last.load().1, query, transport)
    }
}

/// Answers queries until the process ends.
pub async fn run(sockets: Vec<Sockets>, config: Arc<ArcSwap<Config>>) {
    let source = Arc::new(Source::new(config));
    let clients = Arc::new(Semaphore::new(CLIENTS_MAX));
    let mut tasks = JoinSet::new();
    for Sockets { udp, tcp } in sockets {
        let sockets = net::UdpSocket::from_std(udp).and_then(|udp| {
            let tcp = net::TcpListener::from_std(tcp)?;
            Ok((udp, tcp))
        });
        match sockets {
            Ok((udp, tcp)) => {
                tasks.spawn(serve_udp(udp, Arc::clone(&source)));
                tasks.spawn(serve_tcp(tcp, Arc::clone(&source), Arc::clone(&clients)));
            }
            Err(error) => error!(%error, "cannot answer DNS queries"),
        }
    }
    while tasks.join_next().await.is_some() {}
}

async fn serve_udp(socket: net::UdpSocket, source: Arc<Source>) {
    let mut query = vec![0; QUERY_BYTES_MAX];
    loop {
        let (length, client) = match socket.recv_from(&mut query).await {
            Ok(received) => received,
            // Also the ICMP error of an answer to a client that is gone.
            Err(error) => {
                debug!(%error, "cannot receive a DNS query");
                sleep(ERROR_PAUSE).await;
                continue;
            }
        };
        let query = query.get(..length).unwrap_or_default();
        if let Some(answer) = source.answer(query, Transport::Udp) {
            // A full send buffer drops the answer, as a network would.
            let _ = socket.try_send_to(&answer, client);
        }
    }
}

async fn serve_tcp(listener: net::TcpListener, source: Arc<Source>, clients: Arc<Semaphore>) {
    let mut connections = JoinSet::new();
    while let Ok(place) = Arc::clone(&clients).acquire_owned().await {
        match listener.accept().await {
            Ok((stream, _)) => {
                let source = Arc::clone(&source);
                connections.spawn(async move {
                    let served = serve_client(stream, &source);
                    let _ = timeout(CONNECTION_DEADLINE, served).await;
                    drop(place);
                });
            }
            Err(error) => {
                debug!(%error, "cannot accept a DNS client");
                sleep(ERROR_PAUSE).await;
            }
        }
        while connections.try_join_next().is_some() {}
    }
}

/// Answers the queries of a connection, each behind its length (RFC 7766), until it ends or a
/// deadline passes.
async fn serve_client(mut stream: net::TcpStream, source: &Source) -> io::Result<()> {
    loop {
        let exchange = async {
            let length = stream.read_u16().await?;
            let mut query = vec![0; usize::from(length)];
            stream.read_exact(&mut query).await?;
            let answer = source.answer(&query, Transport::Tcp);
            let answer = answer.ok_or(io::ErrorKind::InvalidData)?;
            let length = u16::try_from(answer.len()).map_err(io::Error::other)?;
            let framed = [&length.to_be_bytes()[..], &answer].concat();
            stream.write_all(&framed).await
        };
        timeout(QUERY_DEADLINE, exchange).await??;
    }
}
