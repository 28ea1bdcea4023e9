//! A hundred readers that never read, from an endpoint that always sends.

use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::attacker::Peer;
use crate::common::process::Peak;
use crate::gateway::{Kind, Running};
use crate::row::{REST, WARM_UP, victim_violation};
use crate::support::ENDLESS;
use crate::victim::{Latency, Victim, Way};

pub const READERS: u32 = 100;
/// Window of each reader's stream.
pub const WINDOW: u32 = 64 * 1024;
/// Limit of issue 3: memory that a reader may hold beyond its tunnel.
const HELD_MAX: u64 = 300 * 1024;

/// Cost of the readers.
pub struct Readers {
    /// Bytes held for each reader, with its connection and tunnel, if the endpoint is idle.
    pub idle: u64,
    /// The same if the endpoint always sends.
    pub endless: u64,
    pub rest: Latency,
    pub under: Latency,
}

/// Measures tunnels to an idle endpoint, and then to one that always sends.
pub async fn run(kind: &Kind, time: Duration) -> Readers {
    let (idle, _) = peak_memory(kind, b'i', time).await;
    let (endless, (rest, under)) = peak_memory(kind, ENDLESS, time).await;
    Readers { idle, endless, rest, under }
}

/// Returns the peak of memory for each reader of a fresh gateway, and the latency of the victim.
async fn peak_memory(kind: &Kind, first: u8, time: Duration) -> (u64, (Latency, Latency)) {
    let gateway = Running::start(kind).await;
    let victim = Victim::start(Way::hbone(gateway.address).await);
    sleep(WARM_UP).await;
    let at_rest = Instant::now();
    sleep(REST).await;
    let (rested, memory) = (Instant::now(), gateway.process.private_dirty());
    let mut readers = Vec::new();
    for _ in 0..READERS {
        let connected = Peer::connect(gateway.address, WINDOW).await;
        let (mut peer, reading) = connected.expect("a reader");
        peer.tunnel().await.expect("a tunnel");
        // From here on nothing is read, not even from the socket.
        reading.abort();
        readers.push(peer);
    }
    // The measurement begins after the handshakes of the other readers.
    let (begun, peak) = (Instant::now(), Peak::of(gateway.process));
    for peer in &mut readers {
        peer.data(&[first]).await.expect("a first byte");
    }
    sleep(time).await;
    let ended = Instant::now();
    let grown = peak.bytes().saturating_sub(memory);
    let requests = victim.finish().await;
    let latency = (requests.latency(at_rest, rested), requests.latency(begun, ended));
    (grown / u64::from(READERS), latency)
}

impl Readers {
    /// Returns the number of bytes that each reader holds beyond its tunnel.
    pub fn beyond(&self) -> u64 {
        self.endless.saturating_sub(self.idle)
    }

    /// Returns the missed limits; empty if there are none.
    pub fn misses(&self) -> Vec<String> {
        let memory = (self.beyond() >= HELD_MAX).then(|| "memory".to_owned());
        memory.into_iter().chain(victim_violation(self.rest, self.under)).collect()
    }
}
