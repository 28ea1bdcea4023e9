//! Expansion of workloads with several addresses, as in a dual-stack cluster, or with a hostname
//! and no address. The mesh has one such workload per address, each with the full weight, so that
//! every address has its own health and tunnels in flight. Records of gateways of other networks
//! are not expanded: a gateway has one weight, however many addresses it has.
//!
//! Resolution of hostnames is elsewhere: this module only receives answers. The cost of a change
//! depends on what it touches.

use std::collections::{BTreeSet, HashSet};
use std::mem;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Shards;
use super::mesh::{Mesh, Workload};
use super::remote::gateway_network;

/// Hostnames of workloads, with their known addresses.
#[derive(Clone, Debug, Default)]
pub struct Hosts {
    /// Counter of changes of hostnames, of the workloads that have one, or of waypoints.
    pub version: u64,
    pub known: Shards<Arc<str>, Arc<Host>>,
    /// Mesh as received from the source.
    pub(super) received: Mesh,
    /// Number of received workloads that are replaced by others.
    spread: usize,
}

/// Hostname with its workloads and addresses.
#[derive(Clone, Debug, Default)]
pub struct Host {
    workloads: BTreeSet<Arc<str>>,
    /// Addresses; none before the first answer.
    addresses: Arc<[IpAddr]>,
}

pub type Answer = (Arc<str>, Arc<[IpAddr]>);

impl Host {
    /// Returns true if any answer is in force.
    pub fn has_addresses(&self) -> bool {
        !self.addresses.is_empty()
    }
}

impl Hosts {
    pub(super) fn workloads<'a>(
        &'a self,
        host: &'a Host,
    ) -> impl Iterator<Item = &'a Arc<Workload>> {
        host.workloads.iter().filter_map(|uid| self.received.workloads.get(uid))
    }

    /// Returns the received workload that `shown` represents, or represented before the number of
    /// its addresses changed.
    pub fn source_of(&self, shown: &Workload) -> Option<&Workload> {
        let received = |uid: &str| self.received.workloads.get(uid).map(|of| &**of);
        received(&shown.uid).or_else(|| {
            let (uid, address) = shown.uid.rsplit_once('/')?;
            let is_at = |of: &IpAddr| address.parse() == Ok(*of);
            shown.addresses.first().filter(|of| is_at(of))?;
            received(uid)
        })
    }

    /// Applies an update of the source, if any, and answers. `shown` is the result of the previous
    /// call. Returns the mesh with one workload per address.
    pub(super) fn follow(
        &mut self,
        shown: &Mesh,
        received: Option<Mesh>,
        answers: Vec<Answer>,
    ) -> Mesh {
        let old = self.received.clone();
        let received = received.unwrap_or_else(|| old.clone());
        self.received = received.clone();
        // Both meshes are the same as long as no workload is expanded.
        let was_plain = self.spread == 0;
        let mut mesh = received.clone();
        if !was_plain {
            mesh.workloads = shown.workloads.clone();
        }
        let (mut left, mut is_moved) = (HashSet::new(), false);
        for (uid, before, after) in received.workloads.changes(&old.workloads, Arc::ptr_eq) {
            let is_spread = |one: &Arc<Workload>| one.addresses.len() > 1 || host_of(one).is_some();
            let spread = [before, after].map(|one| one.is_some_and(is_spread));
            if was_plain && spread == [false, false] {
                continue;
            }
            self.spread = self.spread - usize::from(spread[0]) + usize::from(spread[1]);
            if let Some(before) = before {
                self.hide(&mut mesh, before);
            }
            let (from, to) = (before.and_then(|of| host_of(of)), after.and_then(|of| host_of(of)));
            is_moved |= from.is_some() || to.is_some();
            if from != to {
                from.inspect(|host| self.set_named(host, uid, false));
                to.inspect(|host| self.set_named(host, uid, true));
                left.extend(from);
            }
            if let Some(after) = after {
                self.show(&mut mesh, after);
            }
        }
        for host in left {
            let is_left = |host: &Arc<Host>| host.workloads.is_empty();
            if self.known.get(host).is_some_and(is_left) {
                self.known.remove(host);
            }
        }
        self.version += u64::from(is_moved);
        for (name, addresses) in answers {
            self.answer(&mut mesh, name, addresses);
        }
        if self.spread == 0 {
            mesh.workloads = received.workloads;
        }
        mesh
    }

    /// Records that other hostnames may be needed.
    pub(super) fn reconsider(&mut self) {
        self.version += u64::from(!self.known.is_empty());
    }

    fn set_named(&mut self, name: &Arc<str>, uid: &Arc<str>, is_named: bool) {
        let mut host = self.host(name);
        if is_named {
            host.workloads.insert(Arc::clone(uid));
        } else {
            host.workloads.remove(uid);
        }
        self.known.insert(Arc::clone(name), Arc::new(host));
    }

    fn host(&self, name: &str) -> Host {
        let host = self.known.get(name);
        host.map(|host| Host::clone(host)).unwrap_or_default()
    }

    fn answer(&mut self, mesh: &mut Mesh, name: Arc<str>, addresses: Arc<[IpAddr]>) {
        // A late answer for a hostname that is no longer needed.
        if !self.known.contains_key(&name) {
            return;
        }
        let mut host = self.host(&name);
        let received = host.workloads.iter();
        let received = received.filter_map(|uid| self.received.workloads.get(uid).cloned());
        let received: Vec<_> = received.collect();
        for workload in &received {
            self.hide(mesh, workload);
        }
        host.addresses = addresses;
        self.known.insert(name, Arc::new(host));
        for workload in &received {
            self.show(mesh, workload);
        }
    }

    /// Removes the workloads that represent a received one.
    fn hide(&self, mesh: &mut Mesh, workload: &Arc<Workload>) {
        for address in self.addresses(workload) {
            let uid = uid_at(&workload.uid, *address);
            // Workloads that the source itself sent under this uid stay.
            if !self.received.workloads.contains_key(&*uid) {
                mesh.workloads.remove(&*uid);
            }
        }
        mesh.workloads.remove(&workload.uid);
    }

    /// Adds the workloads that represent a received one. With at most one address it is the
    /// workload itself. A gateway of another network stays one workload with all its addresses.
    fn show(&self, mesh: &mut Mesh, workload: &Arc<Workload>) {
        let addresses = self.addresses(workload);
        let uid = Arc::clone(&workload.uid);
        if addresses.is_empty() {
            mesh.workloads.insert(uid, Arc::clone(workload));
            return;
        }
        if gateway_network(workload).is_some() {
            let at = Workload { addresses: addresses.into(), ..Workload::clone(workload) };
            mesh.workloads.insert(uid, Arc::new(at));
            return;
        }
        // If no workload was expanded before, the mesh has it as received.
        mesh.workloads.remove(&uid);
        for address in addresses {
            let uid = uid_at(&workload.uid, *address);
            if self.received.workloads.contains_key(&*uid) {
                continue;
            }
            let at = Workload {
                uid: Arc::clone(&uid),
                own_name: Some(workload.name().into()),
                addresses: [*address].into(),
                ..Workload::clone(workload)
            };
            mesh.workloads.insert(uid, Arc::new(at));
        }
    }

    /// Returns the addresses that a workload is expanded to: its own, or those of its hostname.
    /// Empty if the workload represents itself.
    fn addresses<'a>(&'a self, workload: &'a Workload) -> &'a [IpAddr] {
        if workload.addresses.len() > 1 {
            return &workload.addresses;
        }
        let host = host_of(workload).and_then(|name| self.known.get(name));
        host.map_or(&[], |host| &host.addresses)
    }
}

/// Returns the hostname of a workload without an address.
fn host_of(workload: &Workload) -> Option<&Arc<str>> {
    let is_by_name = workload.addresses.is_empty() && !workload.hostname.is_empty();
    is_by_name.then_some(&workload.hostname)
}

fn uid_at(uid: &str, address: IpAddr) -> Arc<str> {
    format!("{uid}/{address}").into()
}

/// Hostnames with a failed dial.
#[derive(Debug, Default)]
pub struct RefreshRequests {
    names: Mutex<HashSet<Arc<str>>>,
    added: Notify,
}

/// Limit of hostnames that wait for a refresh. Others are refreshed at their next scheduled
/// lookup.
const REFRESH_REQUESTS_MAX: usize = 1024;

impl RefreshRequests {
    pub fn push(&self, name: &Arc<str>) {
        let mut names = self.names.lock();
        if names.len() < REFRESH_REQUESTS_MAX && names.insert(Arc::clone(name)) {
            self.added.notify_one();
        }
    }

    /// Waits for hostnames, and returns all of them.
    pub async fn take_all(&self) -> HashSet<Arc<str>> {
        loop {
            self.added.notified().await;
            let mut names = self.names.lock();
            if !names.is_empty() {
                return mem::take(&mut *names);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::mesh::Template;
    use super::*;

    fn workload(uid: &str, host: &str, weight: u32) -> Workload {
        Workload {
            uid: uid.into(),
            capacity: weight,
            template: Arc::new(Template { hostname: host.into(), ..Template::default() }),
            ..Workload::default()
        }
    }

    fn at(uid: &str, last: u8) -> Workload {
        Workload { addresses: [ip(last)].into(), ..workload(uid, "", 1) }
    }

    fn dual(uid: &str, last: [u8; 2]) -> Workload {
        Workload { addresses: last.map(ip).into(), ..workload(uid, "", 1) }
    }

    fn ip(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    fn answer(host: &str, last: &[u8]) -> Answer {
        (host.into(), last.iter().map(|last| ip(*last)).collect())
    }

    #[test]
    fn a_workload_is_found_after_the_number_of_its_addresses_has_changed() {
        let mut followed = Followed::default();
        let uid = |followed: &Followed, shown: &Workload| {
            followed.0.source_of(shown).map(|of| of.uid.to_string())
        };
        followed.tell(vec![at("a", 1), at("b", 3)]);
        let single = at("a", 1);
        followed.tell(vec![dual("a", [1, 2]), at("b", 3)]);
        assert_eq!(uid(&followed, &single).as_deref(), Some("a"));
        let shown = followed.1.workloads.get("a/10.0.0.2").expect("an address");
        let double = Workload::clone(shown);
        followed.tell(vec![at("a", 1), at("b", 3)]);
        assert_eq!(uid(&followed, &double).as_deref(), Some("a"));
        // No address of its own, and no workload that is known.
        assert_eq!(uid(&followed, &at("a/10.0.0.9", 2)), None);
        assert_eq!(uid(&followed, &at("c", 2)), None);
    }

    /// Hosts, and the mesh that they produce.
    #[derive(Default)]
    struct Followed(Hosts, Mesh);

    impl Followed {
        fn tell(&mut self, workloads: Vec<Workload>) {
            let mut received = self.0.received.clone();
            received.workloads = Mesh::new([], workloads).workloads;
            self.1 = self.0.follow(&self.1, Some(received), Vec::new());
        }

        fn change(&mut self, uid: &str, workload: Option<Workload>) {
            let mut received = self.0.received.clone();
            match workload {
                Some(one) => drop(received.workloads.insert(uid.into(), Arc::new(one))),
                None => drop(received.workloads.remove(uid)),
            }
            self.1 = self.0.follow(&self.1, Some(received), Vec::new());
        }

        fn answer(&mut self, host: &str, last: &[u8]) {
            self.1 = self.0.follow(&self.1, None, vec![answer(host, last)]);
        }

        /// Returns the uids of the mesh with their weights.
        fn shown(&self) -> Vec<String> {
            let shown = self.1.workloads.sorted().into_iter();
            shown.map(|one| format!("{}={}", one.uid, one.capacity)).collect()
        }

        fn names(&self) -> Vec<&str> {
            let mut names: Vec<_> = self.0.known.keys().map(|name| &**name).collect();
            names.sort_unstable();
            names
        }
    }

    #[test]
    fn a_workload_by_name_stands_once_for_each_address_of_it() {
        let mut mesh = Followed::default();
        mesh.tell(vec![at("p", 9), workload("a", "db", 2), workload("b", "db", 3)]);
        assert_eq!(mesh.shown(), ["a=2", "b=3", "p=1"], "no answer yet");
        assert_eq!((mesh.names(), mesh.0.version), (vec!["db"], 1));
        mesh.answer("db", &[1, 2]);
        let both = ["a/10.0.0.1=2", "a/10.0.0.2=2", "b/10.0.0.1=3", "b/10.0.0.2=3", "p=1"];
        assert_eq!(mesh.shown(), both);
        // Replacement of all addresses at once.
        mesh.answer("db", &[3]);
        assert_eq!(
            mesh.shown(),
            ["a/10.0.0.3=3", "b/10.0.0.3=3", "p=1"]
                .map(|one| { one.replace("a/10.0.0.3=3", "a/10.0.0.3=2") })
        );
        mesh.answer("other", &[4]);
        assert_eq!(mesh.shown().len(), 3, "nobody asked");
        mesh.change("a", None);
        mesh.change("b", None);
        assert_eq!((mesh.shown(), mesh.names()), (vec!["p=1".to_owned()], vec![]));
        assert_eq!(mesh.0.version, 3);
    }

    #[test]
    fn a_workload_of_several_addresses_stands_once_for_each_of_them() {
        let mut mesh = Followed::default();
        mesh.tell(vec![at("p", 9)]);
        mesh.change("a", Some(dual("a", [1, 2])));
        assert_eq!(mesh.shown(), ["a/10.0.0.1=1", "a/10.0.0.2=1", "p=1"]);
        mesh.change("a", Some(dual("a", [2, 3])));
        assert_eq!(mesh.shown(), ["a/10.0.0.2=1", "a/10.0.0.3=1", "p=1"]);
        mesh.change("a", Some(at("a", 2)));
        assert_eq!(mesh.shown(), ["a=1", "p=1"]);
        assert_eq!((mesh.names().len(), mesh.0.spread), (0, 0));
        mesh.tell(vec![dual("a", [1, 2])]);
        mesh.tell(Vec::new());
        assert_eq!((mesh.shown().len(), mesh.0.spread), (0, 0));
    }

    #[test]
    fn what_is_received_anew_keeps_its_addresses_and_takes_the_rest() {
        let mut mesh = Followed::default();
        mesh.tell(vec![workload("a", "db", 1)]);
        mesh.answer("db", &[1]);
        // Full reload of a file: nothing is shared with the previous mesh.
        mesh.tell(vec![workload("a", "db", 5), at("p", 9)]);
        assert_eq!(mesh.shown(), ["a/10.0.0.1=5", "p=1"]);
        // The hostname moves to another workload in one change.
        mesh.tell(vec![workload("b", "db", 1), at("p", 9)]);
        assert_eq!(mesh.shown(), ["b/10.0.0.1=1", "p=1"]);
        mesh.change("b", Some(workload("b", "new", 1)));
        assert_eq!((mesh.shown(), mesh.names()), (vec!["b=1".into(), "p=1".into()], vec!["new"]));
        // A workload with its own address needs no hostname.
        mesh.change("b", Some(at("b", 7)));
        assert_eq!((mesh.shown(), mesh.names()), (vec!["b=1".into(), "p=1".into()], vec![]));
        mesh.change("p", None);
        assert_eq!(mesh.shown(), ["b=1"]);
    }

    #[test]
    fn what_the_source_itself_calls_so_is_never_replaced() {
        let mut mesh = Followed::default();
        mesh.tell(vec![workload("a", "db", 1), Workload { capacity: 7, ..at("a/10.0.0.1", 8) }]);
        mesh.answer("db", &[1, 2]);
        assert_eq!(mesh.shown(), ["a/10.0.0.1=7", "a/10.0.0.2=1"]);
        mesh.answer("db", &[3]);
        assert_eq!(mesh.shown(), ["a/10.0.0.1=7", "a/10.0.0.3=1"]);
    }

    #[test]
    fn a_mesh_without_names_is_shared_as_received() {
        let mut mesh = Followed::default();
        let many = (0..100).map(|last| at(&format!("w{last}"), last));
        mesh.tell(many.collect());
        let shared = |mesh: &Followed| {
            let changes = mesh.1.workloads.changes(&mesh.0.received.workloads, |_, _| false);
            changes.is_empty()
        };
        assert!(shared(&mesh));
        mesh.change("by-name", Some(workload("by-name", "db", 1)));
        mesh.answer("db", &[1]);
        assert!(!shared(&mesh));
        mesh.change("by-name", None);
        assert!(shared(&mesh));
    }

    /// Returns the result computed from scratch: from the last update and the answers to it.
    fn plainly(received: &[Workload], answers: &HashMap<String, Vec<u8>>) -> Vec<String> {
        let mut shown = Vec::new();
        for one in received {
            let none = Vec::new();
            let known = answers.get(&*one.hostname).unwrap_or(&none);
            let weight = one.capacity;
            if one.addresses.len() > 1 {
                let addresses = one.addresses.iter();
                shown.extend(addresses.map(|ip| format!("{}/{ip}={weight}", one.uid)));
                continue;
            }
            if known.is_empty() || !one.addresses.is_empty() {
                shown.push(format!("{}={weight}", one.uid));
                continue;
            }
            let at = |last: &u8| format!("{}/{}={weight}", one.uid, ip(*last));
            shown.extend(known.iter().map(at));
        }
        shown.sort_unstable();
        shown
    }

    #[test]
    fn any_row_of_changes_shows_what_a_plain_reading_does() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut mesh = Followed::default();
        let mut answers: HashMap<String, Vec<u8>> = HashMap::new();
        let mut received: Vec<Workload> = Vec::new();
        for step in 0..20_000 {
            for _ in 0..random.u8(0..3) {
                let uid = format!("w{}", random.u8(0..6));
                received.retain(|one| *one.uid != *uid);
                let weight = random.u32(1..3);
                match random.u8(0..6) {
                    0 => {}
                    1 => received.push(at(&uid, 200)),
                    5 => received.push(dual(&uid, [200, 201])),
                    host => received.push(workload(&uid, &format!("h{host}"), weight)),
                }
            }
            // Some updates share nothing with the previous one, as on a full reload of a file.
            let mut next = mesh.0.received.clone();
            let fresh = Mesh::new([], received.clone()).workloads;
            if random.u8(0..4) == 0 {
                next.workloads = fresh;
            } else {
                for (uid, _, after) in fresh.changes(&mesh.0.received.workloads, |a, b| a == b) {
                    match after {
                        Some(after) => drop(next.workloads.insert(Arc::clone(uid), after.clone())),
                        None => drop(next.workloads.remove(&**uid)),
                    }
                }
            }
            let host = format!("h{}", random.u8(2..5));
            let mut last: Vec<_> = (0..random.u8(1..4)).map(|_| random.u8(0..5)).collect();
            last.sort_unstable();
            last.dedup();
            let stated = random.bool().then(|| answer(&host, &last));
            answers.retain(|host, _| received.iter().any(|one| *one.hostname == **host));
            if stated.is_some() && received.iter().any(|one| *one.hostname == *host) {
                answers.insert(host, last);
            }
            mesh.1 = mesh.0.follow(&mesh.1, Some(next), stated.into_iter().collect());
            assert_eq!(mesh.shown(), plainly(&received, &answers), "step {step}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn refresh_requests_are_reported_once_and_are_bounded() {
        let requests = RefreshRequests::default();
        for name in ["db", "db", "cache"] {
            requests.push(&name.into());
        }
        assert_eq!(requests.take_all().await.len(), 2);
        for name in 0..2 * REFRESH_REQUESTS_MAX {
            requests.push(&name.to_string().into());
        }
        assert_eq!(requests.take_all().await.len(), REFRESH_REQUESTS_MAX);
        let more = tokio::time::timeout(std::time::Duration::from_secs(1), requests.take_all());
        assert!(more.await.is_err(), "there is none");
    }
}
