//! Attacks by one source with a valid certificate, or by local clients of a binding.

use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use strait::tools::hbone::{Client, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{interval, sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::gateways::{DEAD, SECRET};
use crate::noise::Noise;
use crate::support::raw;
use crate::support::{ECHO, GATEWAY, identities, try_echo};
use crate::world::Topology;

const ATTACKER: &str = "spiffe://west.local/ns/shop/sa/attacker";
/// Pause after an attempt to connect that has failed.
pub const RETRY: Duration = Duration::from_millis(50);
const CONNECT: [(&str, &[u8]); 2] = [(":method", b"CONNECT"), (":authority", ECHO.as_bytes())];

/// Addresses that an attacker reaches.
#[derive(Clone, Copy, Debug)]
pub struct Reach {
    pub gateway: SocketAddr,
    pub binding: SocketAddr,
    /// Address at which a noisy cluster has its endpoint.
    pub noise: SocketAddr,
}

type Running = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Listener that the victim uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entrance {
    Hbone,
    /// The binding, at an address of its own.
    Binding,
}

/// Attack, which never ends by itself.
pub struct Attack {
    pub name: &'static str,
    pub topology: Topology,
    pub victim: Entrance,
    pub run: Run,
}

/// Work of an attacker.
#[derive(Clone, Copy)]
pub enum Run {
    Attack(fn(Reach) -> Running),
    Noise(Noise),
}

impl Run {
    /// Runs until it is dropped. Reports when its effects may be measured.
    pub async fn begin(self, reach: Reach, ready: oneshot::Sender<()>) {
        match self {
            Self::Attack(run) => {
                let _ = ready.send(());
                run(reach).await;
            }
            Self::Noise(noise) => noise.run(reach, ready).await,
        }
    }
}

/// All attacks, in the order of the report.
pub const ATTACKS: [Attack; 12] = [
    Attack {
        name: "1-byte DATA on 3 connections with 40 streams, to another network",
        topology: Topology::Two,
        victim: Entrance::Hbone,
        run: Run::Attack(|at| Box::pin(small_writes(at.gateway))),
    },
    Attack {
        name: "60 clients of a plaintext binding with 1-byte writes",
        topology: Topology::Two,
        victim: Entrance::Hbone,
        run: Run::Attack(|at| Box::pin(binding_writes(at.binding))),
    },
    Attack {
        name: "1,000 abandoned CONNECTs/s to another network",
        topology: Topology::Two,
        victim: Entrance::Hbone,
        run: Run::Attack(|at| Box::pin(abandoned(at.gateway))),
    },
    Attack {
        name: "500 CONNECTs/s that only the next gateway refuses",
        topology: Topology::Two,
        victim: Entrance::Hbone,
        run: Run::Attack(|at| Box::pin(refused(at.gateway))),
    },
    Attack {
        name: "200 CONNECTs/s with 14 KB of obs-text in baggage",
        topology: Topology::Two,
        victim: Entrance::Hbone,
        run: Run::Attack(|at| Box::pin(obs_text(at.gateway))),
    },
    Attack {
        name: "6,900 tunnels of one peer to another network",
        topology: Topology::Two,
        victim: Entrance::Hbone,
        run: Run::Attack(|at| Box::pin(hold(at.gateway, 69))),
    },
    Attack {
        name: "200 CONNECTs/s with 14 KB of obs-text in baggage, beside clients of a binding",
        topology: Topology::Two,
        victim: Entrance::Binding,
        run: Run::Attack(|at| Box::pin(obs_text(at.gateway))),
    },
    Attack {
        name: "6,900 tunnels of one peer to another network, beside clients of a binding",
        topology: Topology::Two,
        victim: Entrance::Binding,
        run: Run::Attack(|at| Box::pin(hold(at.gateway, 69))),
    },
    Attack {
        name: "6,900 connections of one client of a binding, beside other clients",
        topology: Topology::Two,
        victim: Entrance::Binding,
        run: Run::Attack(|at| Box::pin(hold_binding(at.binding, 6900))),
    },
    Attack {
        name: "1,900 tunnels of one first peer, 2,048 descriptors at the next gateway",
        topology: Topology::TwoWithFewDescriptors,
        victim: Entrance::Hbone,
        run: Run::Attack(|at| Box::pin(hold(at.gateway, 19))),
    },
    Attack {
        name: "300 connections with 15 bytes of a record",
        topology: Topology::One,
        victim: Entrance::Hbone,
        run: Run::Attack(|at| Box::pin(partial_records(at.gateway))),
    },
    Attack {
        name: "20 CONNECTs each second to a service of 400 dead endpoints",
        topology: Topology::One,
        victim: Entrance::Hbone,
        run: Run::Attack(|at| Box::pin(dead(at.gateway))),
    },
];

fn tls() -> Arc<ClientConfig> {
    identities().client(ATTACKER, GATEWAY)
}

/// Connects until it succeeds.
async fn connect(address: SocketAddr) -> Client {
    let tls = tls();
    loop {
        match Client::connect(address, &tls).await {
            Ok(client) => return client,
            Err(_) => sleep(RETRY).await,
        }
    }
}

async fn small_writes(address: SocketAddr) {
    let mut running = JoinSet::new();
    for _ in 0..3 {
        running.spawn(async move {
            loop {
                let client = Arc::new(connect(address).await);
                let mut tunnels = JoinSet::new();
                for _ in 0..40 {
                    let client = Arc::clone(&client);
                    tunnels.spawn(async move {
                        if let Ok(tunnel) = client.tunnel(ECHO).await {
                            single_bytes(tunnel).await;
                        }
                    });
                }
                tunnels.join_all().await;
                sleep(RETRY).await;
            }
        });
    }
    running.join_all().await;
}

async fn single_bytes(stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite) {
    let (mut read, mut write) = tokio::io::split(stream);
    let writes = async {
        while write.write_all(b"e").await.is_ok() && write.flush().await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    let reads = async {
        let mut buffer = [0; 4096];
        while read.read(&mut buffer).await.is_ok_and(|count| count > 0) {}
    };
    tokio::select! {
        () = writes => {}
        () = reads => {}
    }
}

async fn binding_writes(address: SocketAddr) {
    let mut running = JoinSet::new();
    for _ in 0..60 {
        running.spawn(async move {
            loop {
                if let Ok(stream) = TcpStream::connect(address).await {
                    let _ = stream.set_nodelay(true);
                    single_bytes(stream).await;
                }
                sleep(RETRY).await;
            }
        });
    }
    running.join_all().await;
}

/// Opens a stream each millisecond, and resets that of the millisecond before.
async fn abandoned(address: SocketAddr) {
    raw_rounds(address, Duration::from_millis(1), |stream| {
        let mut bytes = raw::headers(stream, &CONNECT);
        if stream > 1 {
            let cancel = [0, 0, 0, 8];
            bytes.extend(raw::frame(raw::RST_STREAM, 0, stream - 2, &cancel));
        }
        bytes
    })
    .await;
}

/// Sends obs-text without Huffman coding, which a next hop may expand to three times its size.
async fn obs_text(address: SocketAddr) {
    raw_rounds(address, Duration::from_millis(5), |stream| {
        let baggage: (&str, &[u8]) = ("baggage", &[0xff; 14 * 1024]);
        let mut bytes = raw::headers(stream, &[CONNECT[0], CONNECT[1], baggage]);
        bytes.extend(raw::frame(raw::DATA, 1, stream, &[]));
        bytes
    })
    .await;
}

/// Sends the frames of a new stream at each interval, on a connection of hand-written HTTP/2.
async fn raw_rounds(address: SocketAddr, every: Duration, round: fn(u32) -> Vec<u8>) {
    loop {
        if let Ok(stream) = preface(address, tls()).await {
            send_rounds(stream, every, |stream| {
                let bytes = round(*stream);
                *stream += 2;
                bytes
            })
            .await;
        }
        sleep(RETRY).await;
    }
}

/// Sends frames at each interval until the connection ends. `round` returns them, and advances the
/// number of the next stream.
pub async fn send_rounds(
    stream: TlsStream<TcpStream>,
    every: Duration,
    mut round: impl FnMut(&mut u32) -> Vec<u8>,
) {
    let (mut read, mut write) = tokio::io::split(stream);
    let writes = async {
        let (mut tick, mut stream) = (interval(every), 1);
        loop {
            tick.tick().await;
            if write.write_all(&round(&mut stream)).await.is_err() || write.flush().await.is_err() {
                return;
            }
        }
    };
    let reads = async {
        let mut buffer = vec![0; 64 * 1024];
        while read.read(&mut buffer).await.is_ok_and(|count| count > 0) {}
    };
    tokio::select! {
        () = writes => {}
        () = reads => {}
    }
}

/// Connects by TLS, and sends the preface and SETTINGS of HTTP/2.
pub async fn preface(
    address: SocketAddr,
    tls: Arc<ClientConfig>,
) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let name = ServerName::IpAddress(Ipv4Addr::UNSPECIFIED.into());
    let mut stream = TlsConnector::from(tls).connect(name, stream).await?;
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await?;
    let settings = raw::frame(raw::SETTINGS, 0, 0, &[]);
    stream.write_all(&settings).await?;
    let acknowledged = raw::frame(raw::SETTINGS, 1, 0, &[]);
    stream.write_all(&acknowledged).await?;
    stream.flush().await?;
    Ok(stream)
}

async fn refused(address: SocketAddr) {
    requests(address, Duration::from_millis(2), (SECRET, 1)).await;
}

async fn dead(address: SocketAddr) {
    requests(address, Duration::from_secs(1), (DEAD, 20)).await;
}

/// Opens a number of tunnels to a service at each interval, and keeps none of them.
async fn requests(address: SocketAddr, every: Duration, (service, count): (&'static str, usize)) {
    let mut running = JoinSet::new();
    let mut client = Arc::new(connect(address).await);
    let mut tick = interval(every);
    loop {
        tick.tick().await;
        if client.is_closed() {
            client = Arc::new(connect(address).await);
        }
        for _ in 0..count {
            let client = Arc::clone(&client);
            running.spawn(async move {
                if let Ok(mut tunnel) = client.tunnel(service).await {
                    let _ = tunnel.shutdown().await;
                }
            });
        }
        while running.try_join_next().is_some() {}
    }
}

/// Holds 100 tunnels on each of these connections.
async fn hold(address: SocketAddr, connections: usize) {
    let mut held: Vec<(Client, Vec<Tunnel>)> = Vec::new();
    for _ in 0..connections {
        let client = connect(address).await;
        let mut tunnels = Vec::new();
        for _ in 0..100 {
            match timeout(Duration::from_secs(1), client.tunnel(ECHO)).await {
                Ok(Ok(tunnel)) => tunnels.push(tunnel),
                _ => break,
            }
        }
        held.push((client, tunnels));
    }
    std::future::pending().await
}

/// Holds connections to a binding that have echoed once.
async fn hold_binding(address: SocketAddr, connections: usize) {
    let mut held = Vec::new();
    for _ in 0..connections {
        if let Ok(mut stream) = TcpStream::connect(address).await {
            let _ = timeout(Duration::from_secs(1), try_echo(&mut stream)).await;
            held.push(stream);
        }
    }
    std::future::pending().await
}

/// Sends the header of a record of 16 KiB with ten of its bytes, on each connection.
async fn partial_records(address: SocketAddr) {
    let mut held = JoinSet::new();
    for _ in 0..300 {
        held.spawn(async move {
            loop {
                if partial_record(address).await.is_err() {
                    sleep(RETRY).await;
                }
            }
        });
    }
    held.join_all().await;
}

async fn partial_record(address: SocketAddr) -> std::io::Result<()> {
    let mut stream = preface(address, tls()).await?;
    let (socket, _) = stream.get_mut();
    let header = [23, 3, 3, 0x40, 0x11];
    socket.write_all(&header).await?;
    socket.write_all(&[0; 10]).await?;
    let mut rest = Vec::new();
    socket.read_to_end(&mut rest).await.map(|_| ())
}
