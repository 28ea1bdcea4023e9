//! Connections to the gateways of another network that a thousand sources need.

use std::sync::Arc;
use std::time::{Duration, Instant};

use strait::tools::hbone::Client;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::common::print_uncaptured;
use crate::common::table::{head, line};
use crate::gateways::Program;
use crate::support::process::http;
use crate::support::{ECHO, GATEWAY, identities, try_echo};
use crate::world::{Build, Topology, World};

const SOURCES: u32 = 1000;
/// Further tunnels of each source, after which most have used both gateways.
const MORE: u32 = 7;
/// Number of sources that open a connection or a tunnel at the same time.
const CONCURRENT: usize = 64;
/// Time after which the gateway's allocator has returned freed pages.
const SETTLE: Duration = Duration::from_secs(3);
const COLUMNS: [&str; 6] = [
    "build",
    "connections after 1, 8 tunnels of each",
    "opened per second",
    "CPU for each",
    "memory before, after 1, after 8",
    "memory per connection",
];

/// Connections to next gateways, and private dirty memory of the first gateway.
struct Sample {
    connections: u32,
    kib: u64,
}

/// Measures those builds of which all gateways are Strait.
pub async fn table(builds: &[Build]) -> String {
    let mut report = format!(
        "
## {SOURCES} sources, two next gateways

Each source is an identity with a connection of its own to the first gateway, and opens tunnels of
one echo, {CONCURRENT} sources at a time. All gateways share one processor. CPU and memory are
those of the first gateway; CPU includes one tunnel. Memory is its private dirty pages
{} s after the last tunnel has ended.

",
        SETTLE.as_secs()
    );
    report += &head(&COLUMNS);
    let is_strait = |program: &Program| matches!(program, Program::Strait(_));
    for build in builds.iter().filter(|it| is_strait(&it.first) && is_strait(&it.next)) {
        let row = measure(build).await;
        print_uncaptured(&row);
        report += &row;
    }
    report
}

async fn measure(build: &Build) -> String {
    let world = World::start(build, Topology::TwoNext).await;
    let clients = connect(&world).await;
    let before = sample(&world).await;
    let (begun, cpu) = (Instant::now(), world.first.cpu());
    open_tunnels(&clients).await;
    let (time, cpu) = (begun.elapsed(), world.first.cpu() - cpu);
    let one = sample(&world).await;
    for _ in 0..MORE {
        open_tunnels(&clients).await;
    }
    let eight = sample(&world).await;
    let opened = one.connections.max(1);
    let grown = eight.kib.saturating_sub(before.kib);
    line(&[
        build.name.clone(),
        format!("{}, {}", one.connections, eight.connections),
        format!("{:.0}", f64::from(one.connections) / time.as_secs_f64()),
        format!("{} µs", (cpu / opened).as_micros()),
        format!("{}, {}, {} KiB", before.kib, one.kib, eight.kib),
        format!("{} KiB", grown / u64::from(eight.connections.max(1))),
    ])
}

/// Connects all sources to the first gateway.
async fn connect(world: &World) -> Vec<Arc<Client>> {
    let address = world.address;
    all(0..SOURCES, move |source| async move {
        let id = format!("spiffe://west.local/ns/shop/sa/source-{source}");
        let tls = identities().client(&id, GATEWAY);
        Arc::new(Client::connect(address, &tls).await.expect("a connection of a source"))
    })
    .await
}

/// Opens one tunnel of each source, and ends it after an echo.
async fn open_tunnels(clients: &[Arc<Client>]) {
    all(clients.to_vec(), |client| async move {
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel of a source");
        try_echo(&mut tunnel).await.expect("an open tunnel");
        tunnel.shutdown().await.expect("an open tunnel");
        tunnel.read_to_end(&mut Vec::new()).await.expect("a clean end");
    })
    .await;
}

/// Runs a task for each input, [`CONCURRENT`] at a time.
async fn all<I, T, F>(inputs: impl IntoIterator<Item = I>, task: impl Fn(I) -> F) -> Vec<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let (turns, mut running) = (Arc::new(Semaphore::new(CONCURRENT)), JoinSet::new());
    for input in inputs {
        let turn = Arc::clone(&turns).acquire_owned().await.expect("an open semaphore");
        let future = task(input);
        running.spawn(async move {
            let output = future.await;
            drop(turn);
            output
        });
    }
    running.join_all().await
}

async fn sample(world: &World) -> Sample {
    sleep(SETTLE).await;
    let mut admin = world.address;
    admin.set_port(15000);
    let (_, text) = http(admin, "GET", "/stats/prometheus").await;
    let of_gateway = |line: &str| {
        line.strip_prefix("strait_remote_gateway_connections{")?
            .rsplit_once(' ')?
            .1
            .parse::<u32>()
            .ok()
    };
    Sample {
        connections: text.lines().filter_map(of_gateway).sum(),
        kib: world.first.private_dirty() / 1024,
    }
}
