//! Numbers of open connections of the clients of one binding.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;

use super::pool::source;

/// Open connections by client, which is an IPv4 address or an IPv6 /64.
#[derive(Debug, Default)]
pub struct ClientConnections(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    total: usize,
    by_client: HashMap<IpAddr, usize>,
}

/// Maximum numbers of open connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientLimits {
    /// Connections of all clients.
    pub total: usize,
    /// Connections of one client.
    pub each: usize,
}

/// Open connection of a client. It is no longer counted after the drop.
#[derive(Debug)]
pub struct ClientConnection {
    counts: Arc<ClientConnections>,
    client: IpAddr,
}

impl ClientConnections {
    /// Counts one more connection of a client.
    ///
    /// # Errors
    /// The limit that is reached, in words.
    pub fn open(
        self: &Arc<Self>,
        address: IpAddr,
        limits: ClientLimits,
    ) -> Result<ClientConnection, String> {
        let client = source(address);
        let mut counts = self.0.lock();
        counts.check(client, limits)?;
        *counts.by_client.entry(client).or_default() += 1;
        counts.total += 1;
        let counts = Arc::clone(self);
        Ok(ClientConnection { counts, client })
    }

    /// Checks that a client may open one more connection.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn check(&self, address: IpAddr, limits: ClientLimits) -> Result<(), String> {
        self.0.lock().check(source(address), limits)
    }
}

impl Counts {
    fn check(&self, client: IpAddr, limits: ClientLimits) -> Result<(), String> {
        if self.total >= limits.total {
            let total = limits.total;
            return Err(format!("open connections of the binding: {total}"));
        }
        let own = self.by_client.get(&client).copied().unwrap_or_default();
        if own >= limits.each {
            return Err(format!("open connections of the client: {own}"));
        }
        Ok(())
    }
}

impl Drop for ClientConnection {
    fn drop(&mut self) {
        let mut counts = self.counts.0.lock();
        counts.total -= 1;
        if let Entry::Occupied(mut own) = counts.by_client.entry(self.client) {
            *own.get_mut() -= 1;
            if *own.get() == 0 {
                own.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_and_all_clients_have_a_limit_and_an_end_makes_room() {
        let counts = Arc::new(ClientConnections::default());
        let limits = ClientLimits { total: 3, each: 2 };
        let open = |text: &str| counts.open(text.parse().expect("an address"), limits);
        let first = open("2001:db8::1").expect("room");
        let _second = open("2001:db8::2").expect("room");
        let full = open("2001:db8::3").expect_err("the /64 is one client");
        assert_eq!(full, "open connections of the client: 2");
        let third = open("192.0.2.1").expect("room");
        let full = open("192.0.2.2").expect_err("no room");
        assert_eq!(full, "open connections of the binding: 3");
        drop(third);
        open("192.0.2.2").expect("room");
        drop(first);
        let _again = open("2001:db8::3").expect("room");
        assert_eq!(counts.0.lock().total, 2);
        assert_eq!(counts.0.lock().by_client.len(), 1);
    }
}
