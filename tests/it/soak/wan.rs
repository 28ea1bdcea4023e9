//! Link between the gateways, with its faults.
//!
//! It is a relay, because namespaces of networks need root: a lost packet is the wait for its
//! retransmission, which holds up what follows. Real loss is a row of `faults::network`.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Duration;

use fastrand::Rng;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::support::Net;
use crate::support::link::{Cut, Faults, FaultyRelay};

/// Delay of each direction, and the largest addition to it.
const DELAY: Duration = Duration::from_millis(40);
const JITTER_MILLIS: u64 = 20;
/// Wait for a retransmission, and the mean number of reads from one to the next.
const RETRANSMISSION: Duration = Duration::from_millis(250);
const READS_PER_LOSS: u64 = 8;
/// Bytes of a segment.
const SEGMENT: usize = 1400;

/// State of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Impairment {
    None,
    /// Delay, jitter and losses, which break nothing.
    Loss,
    /// Every connection that carries a byte is reset.
    Resets,
}

pub struct Wan {
    state: watch::Sender<Impairment>,
    _relay: FaultyRelay,
}

impl Wan {
    /// Relays host 1 of a net to a gateway.
    pub async fn start(net: Net, to: SocketAddr, seed: u64) -> Self {
        let (state, now) = watch::channel(Impairment::None);
        let rng = Mutex::new(Rng::with_seed(seed));
        let toxics = move |_: usize| match *now.borrow() {
            Impairment::None => [Faults::default(); 2],
            Impairment::Loss => [loss(&mut rng.lock().expect("no panic")); 2],
            Impairment::Resets => [Faults::cut(0, Cut::Reset); 2],
        };
        Self { state, _relay: FaultyRelay::new(net.listen(1, 15008).await, to, toxics) }
    }

    pub async fn impair_for(&self, time: Duration, how: Impairment) {
        self.state.send_replace(how);
        // deadline: the length of a fault.
        sleep(time).await;
        self.state.send_replace(Impairment::None);
    }
}

/// Returns the faults of the next bytes.
fn loss(rng: &mut Rng) -> Faults {
    let lost = if rng.u64(..READS_PER_LOSS) == 0 { RETRANSMISSION } else { Duration::ZERO };
    let delay = DELAY + Duration::from_millis(rng.u64(..JITTER_MILLIS)) + lost;
    Faults { delay, slice: Some(SEGMENT), ..Faults::default() }
}
