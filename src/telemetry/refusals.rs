//! Last refusals of tunnels and connections, counted by reason, peer and requested name.
//!
//! Metrics have no label for what a peer requests, and log lines are limited. This table answers
//! who is refused what, and why. It is bounded for each peer and in all, so that no peer can fill
//! it or displace more than its own entries.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;

use super::labels::Source;
use crate::limits;

/// Maximum number of entries.
const ENTRIES_MAX: usize = 256;
/// Maximum number of entries of peers without an identity, which anyone can be.
const UNVERIFIED_MAX: usize = ENTRIES_MAX / 2;
/// Maximum number of entries of one identity, of one first peer behind a gateway, or of one address
/// without an identity.
const PEER_MAX: usize = 8;

/// Common properties of the refusals of one entry. Texts are empty if they are unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Refused {
    /// Label of the reason, or of the limit.
    pub reason: &'static str,
    pub listener: Arc<str>,
    /// Identity of the first peer behind a gateway.
    pub first_peer: Box<str>,
    pub authority: Box<str>,
    /// Requested server name.
    pub sni: Box<str>,
}

#[derive(Clone, Debug)]
pub struct Refusals {
    pub refused: Refused,
    pub identity: Option<Arc<str>>,
    /// Cluster of the peer; empty if unknown.
    pub cluster: Arc<str>,
    /// Number since the entry was created.
    pub count: u64,
    pub last: SystemTime,
    /// Address of the peer of the last one.
    pub address: IpAddr,
    /// Details of the last one.
    pub error: Option<Box<str>>,
    /// Position of the last one in the order of all refusals.
    order: u64,
}

/// Entries by peer and by what was refused.
#[derive(Debug, Default)]
pub(crate) struct RefusalTable(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    by_key: HashMap<(limits::Source, Refused), Refusals>,
    /// Number of refusals so far.
    order: u64,
}

impl RefusalTable {
    /// Counts the refusal of a tunnel of `source`.
    pub(super) fn add(&self, source: &Source, refused: Refused, error: Option<&str>) {
        let address = source.address.ip();
        let identity = (!source.principal.is_empty()).then(|| Arc::clone(&source.principal));
        let verified = identity
            .as_ref()
            .map(|identity| limits::Source::cluster(&source.counted_cluster).identity(identity));
        let peer = match verified {
            Some(gateway) if !refused.first_peer.is_empty() => {
                gateway.identity(&Arc::from(&*refused.first_peer))
            }
            Some(peer) => peer,
            None => limits::Source::prefix(address),
        };
        self.count(peer, refused, error, || Refusals {
            identity,
            cluster: Arc::clone(&source.cluster),
            ..Refusals::new(address)
        });
    }

    /// Counts the refusal of a connection from `address`, whose peer was not verified.
    pub(super) fn add_connection(&self, address: IpAddr, reason: &'static str, error: &str) {
        let refused = Refused { reason, ..Refused::default() };
        let error = (!error.is_empty()).then_some(error);
        self.count(limits::Source::prefix(address), refused, error, || Refusals::new(address));
    }

    fn count(
        &self,
        peer: limits::Source,
        refused: Refused,
        error: Option<&str>,
        new: impl FnOnce() -> Refusals,
    ) {
        let mut entries = self.0.lock();
        entries.order += 1;
        let order = entries.order;
        let key = (peer, refused);
        if !entries.by_key.contains_key(&key) {
            entries.make_room(&key.0);
        }
        let new = || Refusals { refused: key.1.clone(), ..new() };
        let entry = entries.by_key.entry(key.clone()).or_insert_with(new);
        entry.count += 1;
        entry.last = SystemTime::now();
        entry.order = order;
        entry.error = error.map(Into::into);
    }

    /// Returns all entries, the most frequent first.
    pub(crate) fn list(&self) -> Vec<Refusals> {
        let mut list: Vec<_> = self.0.lock().by_key.values().cloned().collect();
        list.sort_unstable_by_key(|entry| (std::cmp::Reverse(entry.count), entry.order));
        list
    }
}

impl Entries {
    /// Removes the oldest entry of those that share the limit which one more of `peer` exceeds.
    fn make_room(&mut self, peer: &limits::Source) {
        let is_unverified = |of: &limits::Source| of.principal().is_none();
        let (mut own, mut unverified) = (0, 0);
        for (of, _) in self.by_key.keys() {
            own += usize::from(of == peer);
            unverified += usize::from(is_unverified(of));
        }
        let is_candidate: &dyn Fn(&limits::Source) -> bool = if own >= PEER_MAX {
            &|of| of == peer
        } else if is_unverified(peer) && unverified >= UNVERIFIED_MAX {
            &is_unverified
        } else if self.by_key.len() >= ENTRIES_MAX {
            &|_| true
        } else {
            return;
        };
        let candidates = self.by_key.iter().filter(|((of, _), _)| is_candidate(of));
        let oldest = candidates.min_by_key(|(_, entry)| entry.order);
        if let Some(key) = oldest.map(|(key, _)| key.clone()) {
            self.by_key.remove(&key);
        }
    }
}

impl Refusals {
    fn new(address: IpAddr) -> Self {
        Self {
            refused: Refused::default(),
            identity: None,
            cluster: Arc::default(),
            count: 0,
            last: SystemTime::UNIX_EPOCH,
            address,
            error: None,
            order: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::source;
    use super::*;

    fn refused(authority: &str) -> Refused {
        Refused { reason: "not_exposed", authority: authority.into(), ..Refused::default() }
    }

    fn peer(principal: &str, address: [u8; 4]) -> Source {
        Source { principal: principal.into(), address: (address, 4000).into(), ..source() }
    }

    #[test]
    fn refusals_of_one_kind_are_one_entry_and_the_most_frequent_comes_first() {
        let table = RefusalTable::default();
        let peer = peer("spiffe://west.local/ns/shop/sa/checkout", [192, 0, 2, 1]);
        table.add(&peer, refused("rare.test:80"), None);
        for error in ["first", "last"] {
            table.add(&peer, refused("often.test:80"), Some(error));
        }
        table.add_connection(peer.address.ip(), "bad_certificate", "");
        let list = table.list();
        let counts = list.iter().map(|entry| (&*entry.refused.authority, entry.count));
        let expected = [("often.test:80", 2), ("rare.test:80", 1), ("", 1)];
        assert_eq!(counts.collect::<Vec<_>>(), expected);
        assert_eq!(list[0].error.as_deref(), Some("last"));
        assert_eq!(list[0].identity.as_deref(), Some(&*peer.principal));
        assert_eq!(list[2].identity, None, "a handshake verifies nobody");
        assert!(list.iter().all(|entry| entry.last > SystemTime::UNIX_EPOCH));
    }

    #[test]
    fn a_peer_displaces_its_own_entries_alone() {
        let table = RefusalTable::default();
        table.add(&peer("spiffe://quiet", [192, 0, 2, 1]), refused("quiet.test:80"), None);
        let noisy = peer("spiffe://noisy", [192, 0, 2, 2]);
        for name in 0..10_000 {
            table.add(&noisy, refused(&format!("{name}.test:80")), None);
        }
        let list = table.list();
        assert_eq!(list.len(), 1 + PEER_MAX);
        assert!(list.iter().any(|entry| &*entry.refused.authority == "quiet.test:80"));
        assert!(list.iter().any(|entry| &*entry.refused.authority == "9999.test:80"));
    }

    #[test]
    fn first_peers_behind_a_gateway_displace_their_own_entries_alone() {
        let table = RefusalTable::default();
        let gateway = peer("spiffe://north.local/ns/istio-system/sa/gateway", [192, 0, 2, 1]);
        let from = |first: &str, name: &str| Refused { first_peer: first.into(), ..refused(name) };
        table.add(&gateway, from("spiffe://quiet", "quiet.test:80"), None);
        for name in 0..1000 {
            table.add(&gateway, from("spiffe://noisy", &format!("{name}.test:80")), None);
        }
        let list = table.list();
        assert_eq!(list.len(), 1 + PEER_MAX);
        assert!(list.iter().any(|entry| &*entry.refused.first_peer == "spiffe://quiet"));
    }

    #[test]
    fn peers_without_an_identity_leave_half_of_the_table_to_the_others() {
        let table = RefusalTable::default();
        for index in 0..UNVERIFIED_MAX {
            let identity = format!("spiffe://west.local/ns/a/sa/{index}");
            table.add(&peer(&identity, [192, 0, 2, 1]), refused("a.test:80"), None);
        }
        for [third, fourth] in (0..=u16::MAX).map(u16::to_be_bytes) {
            table.add_connection([198, 18, third, fourth].into(), "files", "");
        }
        let verified = table.list().into_iter().filter(|entry| entry.identity.is_some());
        assert_eq!(verified.count(), UNVERIFIED_MAX);
        for index in 0..10 * ENTRIES_MAX {
            let identity = format!("spiffe://north.local/ns/a/sa/{index}");
            table.add(&peer(&identity, [192, 0, 2, 1]), refused("a.test:80"), None);
        }
        assert_eq!(table.list().len(), ENTRIES_MAX);
    }
}
