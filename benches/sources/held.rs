//! Tunnels of the victim that stay open, of which none may end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use strait::tools::hbone::Client;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::support::{CLIENT, ECHO, GATEWAY, identities, try_echo};

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
    /// Opens the tunnels on a connection of their own.
    pub async fn open(address: SocketAddr) -> Self {
        let tls = identities().client(CLIENT, GATEWAY);
        let client = Client::connect(address, &tls).await.expect("a victim");
        let client = Arc::new(client);
        let ended = Arc::new(AtomicUsize::new(0));
        let mut running = JoinSet::new();
        for _ in 0..TUNNELS {
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel of the victim");
            let (ended, client) = (Arc::clone(&ended), Arc::clone(&client));
            running.spawn(async move {
                while try_echo(&mut tunnel).await.is_ok() {
                    sleep(PAUSE).await;
                }
                ended.fetch_add(1, Ordering::Relaxed);
                drop(client);
            });
        }
        Self { ended, _running: running }
    }

    /// Returns the number of tunnels that have ended.
    pub fn ended(&self) -> usize {
        self.ended.load(Ordering::Relaxed)
    }
}
