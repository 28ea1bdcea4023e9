//! Numbers of open connections of the clients of one binding.

use std::net::IpAddr;
use std::sync::Arc;

use crate::config::Binding;
use crate::limits::{Account, Held, LimitReached, Pool, Resource, Source};

/// Open connections by client, which is an IPv4 address or an IPv6 /64.
#[derive(Debug)]
pub struct ClientConnections(Arc<Pool>);

impl Default for ClientConnections {
    fn default() -> Self {
        Self(Pool::new(Resource::BindingClients, 0))
    }
}

impl ClientConnections {
    pub fn pool(&self) -> &Arc<Pool> {
        &self.0
    }

    /// Counts one more connection of a client, until the result is dropped.
    ///
    /// # Errors
    /// The limit that is reached, in words.
    pub fn open(&self, address: IpAddr, binding: &Binding) -> Result<Held, String> {
        let account = self.account(address, binding)?;
        account.take(1).map_err(|limit| describe(&account, limit))
    }

    /// Checks that a client may open one more connection.
    pub fn check(&self, address: IpAddr, binding: &Binding) -> Result<(), String> {
        let account = self.account(address, binding)?;
        account.check(1).map_err(|limit| describe(&account, limit))
    }

    fn account(&self, address: IpAddr, binding: &Binding) -> Result<Account, String> {
        let limit = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
        self.0.set_max(limit(binding.connections));
        let account = self.0.account(&Source::prefix(address));
        let own = account.held();
        if own >= limit(binding.connections_per_client) {
            return Err(format!("open connections of the client: {own}"));
        }
        Ok(account)
    }
}

fn describe(account: &Account, limit: LimitReached) -> String {
    let (own, total) = (account.held(), account.pool().max());
    match limit {
        LimitReached::Full(_) => format!("open connections of the binding: {total}"),
        LimitReached::Share(_) => {
            format!("open connections of the client: {own}, its share of {total}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{HostPort, ObjectBindings};

    fn binding(connections: u32, connections_per_client: u32) -> Binding {
        let addresses = "127.64.0.0/10".parse().expect("a network");
        let template = ObjectBindings { addresses, clients: Vec::new(), to: Vec::new() };
        let service = HostPort::parse("echo.app:80").expect("a service");
        let local = (String::new(), ([127, 64, 0, 1], 80).into());
        let binding = template.binding((Vec::new(), service), local, Vec::new());
        Binding { connections, connections_per_client, ..binding }
    }

    #[test]
    fn a_client_and_all_clients_have_a_limit_and_an_end_makes_room() {
        let counts = ClientConnections::default();
        let binding = binding(3, 2);
        let open = |text: &str| counts.open(text.parse().expect("an address"), &binding);
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
        assert_eq!(counts.0.used(), 2);
    }

    #[test]
    fn one_client_leaves_connections_of_the_binding_to_others() {
        let counts = ClientConnections::default();
        let binding = binding(64, 64);
        let open = |last: u8| counts.open([192, 0, 2, last].into(), &binding);
        let held: Vec<_> = (0..64).map_while(|_| open(1).ok()).collect();
        assert_eq!(held.len(), 32);
        let full = open(1).expect_err("a share");
        assert_eq!(full, "open connections of the client: 32, its share of 64");
        let others: Vec<_> = (2..20).filter_map(|last| open(last).ok()).collect();
        assert_eq!(others.len(), 18);
    }
}
