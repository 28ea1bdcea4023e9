//! Sockets of the responder: UDP, and TCP with limits of clients and time. Clients that
//! `dns.clients` does not list are refused, by answers no larger than their queries.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use ipnet::IpNet;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{debug, error};

use crate::config::Config;
use crate::limits::{OwnedPool, Places, Rate, Rates, Resource, Source};

use super::answer::{Transport, answer, refuse};
use super::names::Names;

/// Limit of open TCP connections of listed clients. A further one ends the oldest of the prefix
/// with the most.
const CLIENTS_MAX: usize = 64;
/// Limit of open TCP connections of other clients.
const OTHERS_MAX: usize = 16;
/// Answers per second to one prefix of listed clients, which may be a resolver for many pods.
const ANSWERS_PER_SECOND: u32 = 2_000;
/// Refusals per second to one prefix of other clients.
const REFUSALS_PER_SECOND: u32 = 10;
/// Limit of prefixes with a rate of their own.
const PREFIXES_MAX: usize = 4096;
/// Deadline for one query over TCP, and for its answer.
const QUERY_DEADLINE: Duration = Duration::from_secs(5);
/// Deadline for a TCP connection, after which waiting clients get its place.
const CONNECTION_DEADLINE: Duration = Duration::from_secs(30);
/// Limit of a query over UDP: larger than EDNS that this responder announces.
const QUERY_BYTES_MAX: usize = 4096;
/// Pause after an error of a socket, such as too many open files.
const ERROR_PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub struct Sockets {
    udp: UdpSocket,
    tcp: TcpListener,
}

impl Sockets {
    pub fn new(tcp: TcpListener, udp: UdpSocket) -> io::Result<Self> {
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        Ok(Self { udp, tcp })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }
}

/// Responder: the state that all sockets share.
#[derive(Debug)]
pub struct Responder {
    config: Arc<ArcSwap<Config>>,
    last: ArcSwap<Table>,
    listed: Group,
    others: Group,
}

/// Names and clients of the configuration in use.
#[derive(Debug)]
struct Table {
    config: Arc<Config>,
    names: Names,
    clients: Vec<IpNet>,
}

/// Limits of the listed clients, or of all others.
#[derive(Debug)]
struct Group {
    rates: Mutex<Rates>,
    places: Arc<Places>,
}

impl Table {
    fn new(config: Arc<Config>) -> Self {
        Self { names: Names::new(&config), clients: config.dns_clients(), config }
    }
}

impl Group {
    fn new(per_second: u32, places: usize) -> Self {
        Self {
            rates: Mutex::new(Rates::new(Rate::new(per_second, 2 * per_second), PREFIXES_MAX)),
            places: Places::new(Resource::DnsClients, places),
        }
    }
}

impl Responder {
    /// Creates the responder for the configuration in use.
    pub fn new(config: Arc<ArcSwap<Config>>) -> Self {
        Self {
            last: ArcSwap::from_pointee(Table::new(config.load_full())),
            config,
            listed: Group::new(ANSWERS_PER_SECOND, CLIENTS_MAX),
            others: Group::new(REFUSALS_PER_SECOND, OTHERS_MAX),
        }
    }

    /// Returns the pools of TCP clients: of those that are listed, and of all others.
    pub fn pools(&self) -> [OwnedPool; 2] {
        [(&self.listed, "dns.clients"), (&self.others, "other clients")]
            .map(|(group, of)| OwnedPool::new(group.places.pool(), Some(of.to_owned())))
    }

    fn table(&self) -> Arc<Table> {
        let now = self.config.load();
        if !Arc::ptr_eq(&now, &self.last.load().config) {
            self.last.store(Arc::new(Table::new(Arc::clone(&now))));
        }
        self.last.load_full()
    }

    fn group(&self, table: &Table, client: IpAddr) -> &Group {
        if table.clients.iter().any(|net| net.contains(&client)) {
            &self.listed
        } else {
            &self.others
        }
    }

    /// Returns the answer to a query of a client, if it has credit for one.
    fn answer(&self, query: &[u8], client: IpAddr, transport: Transport) -> Option<Vec<u8>> {
        let (table, client) = (self.table(), client.to_canonical());
        let group = self.group(&table, client);
        let (source, now) = (Source::prefix(client), Instant::now());
        let has_credit = group.rates.lock().of(&source, now).spend(1, now);
        if !has_credit {
            return None;
        }
        if std::ptr::eq(group, &self.listed) {
            answer(&table.names, query, transport)
        } else {
            refuse(query)
        }
    }
}

/// Answers queries until the process ends.
pub async fn run(sockets: Vec<Sockets>, shared: Arc<Responder>) {
    let mut tasks = JoinSet::new();
    for Sockets { udp, tcp } in sockets {
        let sockets = net::UdpSocket::from_std(udp).and_then(|udp| {
            let tcp = net::TcpListener::from_std(tcp)?;
            Ok((udp, tcp))
        });
        match sockets {
            Ok((udp, tcp)) => {
                tasks.spawn(serve_udp(udp, Arc::clone(&shared)));
                tasks.spawn(serve_tcp(tcp, Arc::clone(&shared)));
            }
            Err(error) => error!(%error, "cannot answer DNS queries"),
        }
    }
    while tasks.join_next().await.is_some() {}
}

async fn serve_udp(socket: net::UdpSocket, shared: Arc<Responder>) {
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
        if let Some(answer) = shared.answer(query, client.ip(), Transport::Udp) {
            // A full send buffer drops the answer, as a network would.
            let _ = socket.try_send_to(&answer, client);
        }
    }
}

async fn serve_tcp(listener: net::TcpListener, shared: Arc<Responder>) {
    let mut connections = JoinSet::new();
    loop {
        match listener.accept().await {
            Ok((stream, client)) => {
                let client = client.ip().to_canonical();
                let group = shared.group(&shared.table(), client);
                let Some(place) = group.places.take_or_replace(&Source::prefix(client)) else {
                    continue;
                };
                let shared = Arc::clone(&shared);
                connections.spawn(async move {
                    let served = serve_client(stream, client, &shared);
                    tokio::select! {
                        _ = timeout(CONNECTION_DEADLINE, served) => {}
                        () = place.evicted() => {}
                    }
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
async fn serve_client(
    mut stream: net::TcpStream,
    client: IpAddr,
    shared: &Responder,
) -> io::Result<()> {
    loop {
        let exchange = async {
            let length = stream.read_u16().await?;
            let mut query = vec![0; usize::from(length)];
            stream.read_exact(&mut query).await?;
            let answer = shared.answer(&query, client, Transport::Tcp);
            let answer = answer.ok_or(io::ErrorKind::InvalidData)?;
            let length = u16::try_from(answer.len()).map_err(io::Error::other)?;
            let framed = [&length.to_be_bytes()[..], &answer].concat();
            stream.write_all(&framed).await
        };
        timeout(QUERY_DEADLINE, exchange).await??;
    }
}
