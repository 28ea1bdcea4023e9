//! Noise: a cluster that does 10 and 100 times what the victim does, from one connection and from a
//! thousand, with a service of its own.

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use strait::tools::hbone::{Client, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Mutex, Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::attacks::{Attack, Entrance, RETRY, Reach, Run, preface, send_rounds};
use crate::gateways::NOISE;
use crate::support::raw;
use crate::support::{Endpoint, GATEWAY, identities};
use crate::victim::REQUESTS_PER_SECOND;
use crate::world::{Topology, listen};

const NOISY: &str = "spiffe://east.local/ns/shop/sa/noisy";
/// Interval in which work begins. The work of one begins at once, as that of real peers does.
const TICK: Duration = Duration::from_millis(5);
/// Limit of the work that has not ended.
const AT_ONCE: usize = 1000;
/// Tunnels of the only connection, or of all connections, that requests and bytes use.
const TUNNELS: usize = 64;
const REQUEST: [u8; 64] = [b'e'; 64];
const CHUNK: usize = 16 * 1024;

/// Amount of work that the noisy cluster has completed: tunnels, requests, KiB in each direction,
/// handshakes, or requests that it has abandoned.
pub static DONE: AtomicU64 = AtomicU64::new(0);

/// Kind of work of the noisy cluster.
#[derive(Clone, Copy, Debug)]
pub enum Work {
    /// New tunnels with one request each.
    Tunnels,
    /// Requests of 64 bytes on open tunnels.
    Requests,
    /// Bytes of open tunnels in both directions, as many as the gateway takes.
    Bytes,
    /// New connections without tunnels.
    Handshakes,
    /// CONNECT requests that are reset at once.
    Abandoned,
}

/// Work of the noisy cluster, its rate, and its number of connections.
#[derive(Clone, Copy, Debug)]
pub struct Noise {
    work: Work,
    /// Multiple of what the victim does. Bytes have no rate.
    times: u32,
    connections: usize,
}

/// All noise, in the order of the report.
pub const NOISE_ROWS: [Attack; 16] = [
    row("10 times as many new tunnels, 1 connection", Work::Tunnels, 10, 1),
    row("10 times as many new tunnels, 1,000 connections", Work::Tunnels, 10, 1000),
    row("100 times as many new tunnels, 1 connection", Work::Tunnels, 100, 1),
    row("100 times as many new tunnels, 1,000 connections", Work::Tunnels, 100, 1000),
    row("10 times as many requests, 1 connection", Work::Requests, 10, 1),
    row("10 times as many requests, 1,000 connections", Work::Requests, 10, 1000),
    row("100 times as many requests, 1 connection", Work::Requests, 100, 1),
    row("100 times as many requests, 1,000 connections", Work::Requests, 100, 1000),
    row("all bytes, 1 connection", Work::Bytes, 0, 1),
    row("all bytes, 1,000 connections", Work::Bytes, 0, 1000),
    row("a handshake for each of its tunnels", Work::Handshakes, 1, 0),
    row("10 handshakes for each of its tunnels", Work::Handshakes, 10, 0),
    row("10 times as many abandoned requests, 1 connection", Work::Abandoned, 10, 1),
    row("10 times as many abandoned requests, 1,000 connections", Work::Abandoned, 10, 1000),
    row("100 times as many abandoned requests, 1 connection", Work::Abandoned, 100, 1),
    row("100 times as many abandoned requests, 1,000 connections", Work::Abandoned, 100, 1000),
];

const fn row(name: &'static str, work: Work, times: u32, connections: usize) -> Attack {
    let run = Run::Noise(Noise { work, times, connections });
    Attack { name, topology: Topology::One, victim: Entrance::Hbone, run }
}

impl Noise {
    /// Makes noise. Reports when its connections are open.
    pub async fn run(self, reach: Reach, ready: oneshot::Sender<()>) {
        let (gateway, _endpoint) = (reach.gateway, Endpoint::echo(listen(reach.noise)));
        let rate = self.times * REQUESTS_PER_SECOND;
        let tls = identities().client(NOISY, GATEWAY);
        match self.work {
            Work::Tunnels => {
                let clients = connect_all(gateway, &tls, self.connections).await;
                let _ = ready.send(());
                paced(rate, |turn| tunnel(Arc::clone(&clients[turn % clients.len()]))).await;
            }
            Work::Requests => {
                let clients = connect_all(gateway, &tls, self.connections).await;
                let tunnels = open_all(&clients, self.connections.max(TUNNELS)).await;
                let _ = ready.send(());
                let tunnels: Vec<_> =
                    tunnels.into_iter().map(|it| Arc::new(Mutex::new(it))).collect();
                paced(rate, |turn| request(Arc::clone(&tunnels[turn % tunnels.len()]))).await;
            }
            Work::Bytes => {
                let clients = connect_all(gateway, &tls, self.connections).await;
                let tunnels = open_all(&clients, self.connections.max(TUNNELS)).await;
                let _ = ready.send(());
                tunnels.into_iter().map(bytes).collect::<JoinSet<_>>().join_all().await;
            }
            Work::Handshakes => {
                let _ = ready.send(());
                paced(rate, |_| handshake(gateway, Arc::clone(&tls))).await;
            }
            Work::Abandoned => {
                let each = rate / u32::try_from(self.connections).expect("few");
                let mut running = JoinSet::new();
                for _ in 0..self.connections {
                    let stream = preface(gateway, Arc::clone(&tls)).await.ok();
                    running.spawn(abandoned((gateway, Arc::clone(&tls)), stream, each));
                }
                let _ = ready.send(());
                running.join_all().await;
            }
        }
    }
}

/// Begins work at a rate, in total per second, while less than [`AT_ONCE`] has not ended.
async fn paced<F>(rate: u32, mut begin: impl FnMut(usize) -> F) -> Infallible
where
    F: Future<Output = ()> + Send + 'static,
{
    let room = Arc::new(Semaphore::new(AT_ONCE));
    let (mut running, mut turn, mut tick) = (JoinSet::new(), 0, interval(TICK));
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let per_tick = f64::from(rate) * TICK.as_secs_f64();
    let mut owed = 0.0;
    loop {
        tick.tick().await;
        owed += per_tick;
        while owed >= 1.0 {
            owed -= 1.0;
            let Ok(permit) = Arc::clone(&room).try_acquire_owned() else { continue };
            let work = begin(turn);
            turn += 1;
            running.spawn(async move {
                work.await;
                drop(permit);
            });
        }
        while running.try_join_next().is_some() {}
    }
}

/// Opens connections, one after the other.
async fn connect_all(
    gateway: SocketAddr,
    tls: &Arc<ClientConfig>,
    count: usize,
) -> Vec<Arc<Client>> {
    let mut clients = Vec::new();
    while clients.len() < count {
        match Client::connect(gateway, tls).await {
            Ok(client) => clients.push(Arc::new(client)),
            Err(_) => sleep(RETRY).await,
        }
    }
    clients
}

/// Opens tunnels, evenly on these connections.
async fn open_all(clients: &[Arc<Client>], count: usize) -> Vec<Tunnel> {
    let mut tunnels = Vec::new();
    while tunnels.len() < count {
        match clients[tunnels.len() % clients.len()].tunnel(NOISE).await {
            Ok(tunnel) => tunnels.push(tunnel),
            Err(_) => sleep(RETRY).await,
        }
    }
    tunnels
}

async fn tunnel(client: Arc<Client>) {
    if let Ok(mut tunnel) = client.tunnel(NOISE).await {
        let is_done = echo(&mut tunnel).await.is_ok();
        let _ = tunnel.shutdown().await;
        let _ = tunnel.read_to_end(&mut Vec::new()).await;
        count(u64::from(is_done));
    }
}

fn count(done: u64) {
    DONE.fetch_add(done, Ordering::Relaxed);
}

async fn request(tunnel: Arc<Mutex<Tunnel>>) {
    let is_done = echo(&mut *tunnel.lock().await).await.is_ok();
    count(u64::from(is_done));
}

async fn echo(tunnel: &mut Tunnel) -> io::Result<()> {
    tunnel.write_all(&REQUEST).await?;
    tunnel.flush().await?;
    tunnel.read_exact(&mut [0; REQUEST.len()]).await?;
    Ok(())
}

async fn bytes(tunnel: Tunnel) {
    let (mut read, mut write) = tokio::io::split(tunnel);
    let writes = async { while write.write_all(&[0; CHUNK]).await.is_ok() {} };
    let reads = async {
        let (mut buffer, mut bytes) = (vec![0; CHUNK], 0);
        while let Ok(read @ 1..) = read.read(&mut buffer).await {
            bytes += read as u64;
            count(bytes / 1024);
            bytes %= 1024;
        }
    };
    tokio::join!(writes, reads);
}

async fn handshake(gateway: SocketAddr, tls: Arc<ClientConfig>) {
    let name = ServerName::IpAddress(Ipv4Addr::UNSPECIFIED.into());
    if let Ok(stream) = TcpStream::connect(gateway).await
        && let Ok(mut stream) = TlsConnector::from(tls).connect(name, stream).await
    {
        // The first bytes of the gateway prove that it has the certificate of the client.
        count(u64::from(stream.read_u8().await.is_ok()));
    }
}

/// Opens streams at a rate, and resets each at once. Connects again after the end of a connection.
async fn abandoned(
    (gateway, tls): (SocketAddr, Arc<ClientConfig>),
    mut first: Option<TlsStream<TcpStream>>,
    rate: u32,
) {
    let every = (Duration::from_secs(1) / rate).max(TICK);
    let per_tick = (TICK * rate).as_secs().max(1);
    let connect: [(&str, &[u8]); 2] = [(":method", b"CONNECT"), (":authority", NOISE.as_bytes())];
    loop {
        let stream = match first.take() {
            Some(stream) => Ok(stream),
            None => preface(gateway, Arc::clone(&tls)).await,
        };
        if let Ok(stream) = stream {
            send_rounds(stream, every, |stream| {
                let mut frames = Vec::new();
                for _ in 0..per_tick {
                    frames.extend(raw::headers(*stream, &connect));
                    frames.extend(raw::frame(raw::RST_STREAM, 0, *stream, &[0, 0, 0, 8]));
                    *stream += 2;
                }
                count(per_tick);
                frames
            })
            .await;
        }
        sleep(RETRY).await;
    }
}
