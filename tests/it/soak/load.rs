//! Peers that connect, open tunnels and use them, until the load ends.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use strait::tools::hbone::{Client, Tunnel};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::support::oracle::{self, Plan, SideResult};
use crate::support::{CLIENT, ECHO, GATEWAY, identities};

use super::Planted;
use super::world::{REMOTE, World};

/// Peer of the cluster of the gateway.
const LOCAL: &str = "spiffe://east.local/ns/shop/sa/front";
const OTHER: &str = "spiffe://west.local/ns/bank/sa/teller";
/// Identities of the peers, and whether they connect through the link that cuts.
const PEERS: [(&str, bool); 7] = [
    (CLIENT, false),
    (CLIENT, false),
    (OTHER, false),
    (LOCAL, false),
    (LOCAL, false),
    (CLIENT, true),
    (OTHER, true),
];
/// Limit of tunnels of a connection, and of bytes of a tunnel in each direction.
const TUNNELS_MAX: usize = 4;
const BYTES_MAX: u64 = 128 * 1024;
/// Limit of the rest after each 16 KiB. One peer has tunnels of up to 20 s.
const REST_MAX: u64 = 100;
const LONG_REST: Duration = Duration::from_secs(2);
/// End of the names of the first tunnels, which are those of no other tunnel.
const WARM_UP: u64 = 1 << 56;
/// Connections of each identity at the start, so that each worker has one.
const WARM_UP_CONNECTIONS: usize = 4;
/// Limit of a wait for the gateway.
const PATIENCE: Duration = Duration::from_secs(45);

/// Tunnel that has ended, or did not open.
#[derive(Debug)]
pub struct Ended {
    pub plan: Plan,
    pub service: &'static str,
    pub is_linked: bool,
    pub at: Instant,
    /// Result of the client; `None` if the tunnel did not open.
    pub side: Option<SideResult>,
    #[expect(dead_code, reason = "shown in findings")]
    pub error: String,
}

pub struct Load {
    stop: Arc<AtomicBool>,
    tasks: JoinSet<Vec<Ended>>,
    /// Gateway at which a tunnel stays open, if a leak is planted.
    leaks_at: Option<SocketAddr>,
}

/// Peer that opens tunnels.
struct Peer {
    address: SocketAddr,
    id: &'static str,
    is_linked: bool,
    is_long: bool,
    rng: Rng,
    next_id: Arc<AtomicU64>,
    /// The first tunnel gets a wrong byte.
    is_wrong: bool,
}

impl Ended {
    pub fn is_complete(&self) -> bool {
        self.side == Some(SideResult::complete(self.plan.down))
    }
}

impl Load {
    pub fn start(world: &World, seed: u64, planted: Planted) -> Self {
        let (stop, next_id) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let mut tasks = JoinSet::new();
        for (number, (id, is_linked)) in PEERS.into_iter().enumerate() {
            let peer = Peer {
                address: if is_linked { world.link } else { world.east.address },
                id,
                is_linked,
                is_long: number == 0,
                rng: Rng::with_seed(seed.wrapping_mul(PEERS.len() as u64) + number as u64),
                next_id: Arc::clone(&next_id),
                is_wrong: planted == Planted::WrongByte && number == 1,
            };
            tasks.spawn(peer.run(Arc::clone(&stop)));
        }
        let leaks_at = (planted == Planted::Leak).then_some(world.east.address);
        Self { stop, tasks, leaks_at }
    }

    /// Ends the load. Returns all tunnels, and the one that stays open if a leak is planted.
    pub async fn end(self) -> (Vec<Ended>, Option<(Client, Tunnel)>) {
        self.stop.store(true, Ordering::Relaxed);
        let tunnels = self.tasks.join_all().await.into_iter().flatten().collect();
        let Some(gateway) = self.leaks_at else { return (tunnels, None) };
        // After the faults, which would end it.
        let tls = identities().client(CLIENT, GATEWAY);
        let client = Client::connect(gateway, &tls).await.expect("a connection");
        let tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        (tunnels, Some((client, tunnel)))
    }
}

/// Has each identity use both services, so that what the gateways open at the first use is open:
/// connections between them, and sockets of each worker.
pub async fn warm_up(world: &World) {
    let (mut clients, mut number) = (Vec::new(), WARM_UP);
    for id in [CLIENT, OTHER, LOCAL].repeat(WARM_UP_CONNECTIONS) {
        let client = world.east.client_as(identities(), id).await;
        for service in [ECHO, REMOTE] {
            number -= 1;
            let tunnel = client.tunnel(service).await.expect("a tunnel");
            let side = oracle::drive(tunnel, Plan::both(number, 1)).await;
            assert_eq!(side, SideResult::complete(1));
        }
        clients.push(client);
    }
    drop(clients);
    world.east.wait_until_open(0, 0).await;
}

impl Peer {
    async fn run(mut self, stop: Arc<AtomicBool>) -> Vec<Ended> {
        let tls = identities().client(self.id, GATEWAY);
        let mut ended = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let connected = timeout(PATIENCE, Client::connect(self.address, &tls)).await;
            match connected.map_err(|_| "no connection in time".to_owned()) {
                Ok(Ok(client)) => ended.extend(self.use_connection(client).await),
                Ok(Err(error)) => ended.push(self.not_open(format!("connection: {error}"))),
                Err(error) => ended.push(self.not_open(error)),
            }
            // deadline: the pace of the load.
            sleep(Duration::from_millis(self.rng.u64(..50))).await;
        }
        ended
    }

    fn not_open(&mut self, error: String) -> Ended {
        let (plan, service) = self.plan();
        Ended { plan, service, is_linked: self.is_linked, at: Instant::now(), side: None, error }
    }

    fn plan(&mut self) -> (Plan, &'static str) {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (up, down) = (self.rng.u64(..BYTES_MAX), self.rng.u64(..BYTES_MAX));
        let rest =
            if self.is_long { LONG_REST } else { Duration::from_millis(self.rng.u64(..REST_MAX)) };
        (Plan { id, up, down, rest }, *self.rng.choice([ECHO, REMOTE].iter()).expect("a service"))
    }

    async fn use_connection(&mut self, client: Client) -> Vec<Ended> {
        let mut running = JoinSet::new();
        let client = Arc::new(client);
        for _ in 0..self.rng.usize(1..=TUNNELS_MAX) {
            let ((plan, service), is_linked) = (self.plan(), self.is_linked);
            let is_wrong = std::mem::take(&mut self.is_wrong);
            let client = Arc::clone(&client);
            running.spawn(async move {
                let (side, error) = use_tunnel(&client, service, plan, is_wrong).await;
                Ended { plan, service, is_linked, at: Instant::now(), side, error }
            });
        }
        running.join_all().await
    }
}

async fn use_tunnel(
    client: &Client,
    service: &str,
    plan: Plan,
    is_wrong: bool,
) -> (Option<SideResult>, String) {
    let mut tunnel = match timeout(PATIENCE, client.tunnel(service)).await {
        Ok(Ok(tunnel)) => tunnel,
        Ok(Err(error)) => return (None, error.to_string()),
        Err(_) => return (None, "no answer in time".to_owned()),
    };
    let side = async {
        if is_wrong {
            use tokio::io::AsyncWriteExt as _;
            tunnel.write_all(&plan.head()).await.expect("an open tunnel");
            return oracle::resume(tunnel, Plan { id: plan.id + 1, ..plan }).await;
        }
        oracle::drive(tunnel, plan).await
    };
    match timeout(PATIENCE, side).await {
        Ok(side) => (Some(side), String::new()),
        Err(_) => (None, "no end in time".to_owned()),
    }
}
