//! Tunnels of the victim that stay open, of which none may end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::support::try_echo;
use crate::victim::Way;

/// Number of tunnels.
pub const TUNNELS: usize = 20;
/// Pause between two messages of a tunnel.
const PAUSE: Duration = Duration::from_millis(200);

/// Open tunnels, which end on drop.
pub struct HeldTunnels {
    ended: Arc<AtomicUsize>,
    _running: JoinSet<()>,
}

impl HeldTunnels {
    /// Opens the tunnels.
    pub async fn open(way: Way) -> Self {
        let way = Arc::new(way);
        let ended = Arc::new(AtomicUsize::new(0));
        let mut running = JoinSet::new();
        for _ in 0..TUNNELS {
            let mut tunnel = way.open().await.expect("a tunnel of the victim");
            let (ended, way) = (Arc::clone(&ended), Arc::clone(&way));
            running.spawn(async move {
                while try_echo(&mut tunnel).await.is_ok() {
                    sleep(PAUSE).await;
                }
                ended.fetch_add(1, Ordering::Relaxed);
                drop(way);
            });
        }
        Self { ended, _running: running }
    }

    /// Returns the number of tunnels that have ended.
    pub fn ended(&self) -> usize {
        self.ended.load(Ordering::Relaxed)
    }
}
