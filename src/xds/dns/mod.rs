//! The addresses of workloads that a source knows by a hostname: looked up while the gateway runs,
//! for every source alike. What a peer asks for is never looked up.

mod lookup;
mod schedule;

use std::collections::BTreeMap;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use self::lookup::Lookups;
use self::schedule::{Answers, Schedule};
use crate::snapshot::builder::Change;
use crate::snapshot::{Host, Publisher};
use crate::status::Status;

/// Lookups at the same time. Each takes two queries.
const LOOKUPS_MAX: usize = 64;

/// Time from one look at all hostnames to the next: each costs what all of them and the services
/// do, however little has changed.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Everything that looking names up needs, and where it tells what it learns.
#[derive(Debug)]
pub struct Dns {
    /// Which hostnames are wanted, and where their addresses go.
    pub publisher: Arc<Publisher>,
    /// Where people look.
    pub status: Arc<Status>,
    /// Who is asked; none are the servers of `/etc/resolv.conf`.
    pub servers: Vec<SocketAddr>,
}

/// Hostnames that were wanted when the snapshot was looked at last.
#[derive(Debug, Default)]
struct Wanted {
    /// Versions of the hostnames and of the rules at that time.
    at: (u64, u64),
    /// The earliest time to look again; none before the first look.
    again: Option<Instant>,
    hosts: BTreeMap<Arc<str>, Arc<Host>>,
}

/// Keeps the addresses of all hostnames that are wanted. Runs for ever, on a thread of its own:
/// with each answer that is new it builds a snapshot.
pub async fn run(dns: Dns) {
    let (mut schedule, mut wanted) = (Schedule::default(), Wanted::default());
    let mut lookups = Lookups::new(dns.servers.clone());
    let mut running = JoinSet::new();
    let mut hosts = dns.publisher.hosts();
    let mut rules = dns.publisher.reader().generation();
    loop {
        let behind = dns.follow(&mut schedule, &mut wanted);
        while running.len() < LOOKUPS_MAX
            && let Some(name) = schedule.begin(Instant::now())
        {
            let look_up = lookups.look_up(&name);
            running.spawn(async move { (name, look_up.await) });
        }
        let next = schedule.next().filter(|_| running.len() < LOOKUPS_MAX);
        tokio::select! {
            changed = hosts.changed() => if changed.is_err() {
                return;
            },
            changed = rules.changed() => if changed.is_err() {
                return;
            },
            doubts = dns.publisher.doubts().taken() => {
                for name in doubts {
                    schedule.doubt(&name, Instant::now());
                }
            }
            Some(Ok((name, answers))) = running.join_next() => {
                dns.answered(&mut schedule, &name, answers);
            }
            () = at(next) => {}
            () = at(behind) => {}
        }
    }
}

async fn at(next: Option<Instant>) {
    match next {
        Some(next) => sleep_until(next).await,
        None => pending().await,
    }
}

impl Dns {
    /// Wants what the snapshot wants now, and nothing else. Looks at it once in
    /// [`LOOK_INTERVAL`]: returns the time to come back if there is more to look at before.
    fn follow(&self, schedule: &mut Schedule, wanted: &mut Wanted) -> Option<Instant> {
        let snapshot = self.publisher.reader().snapshot();
        let at = (snapshot.hosts.version, snapshot.generation);
        if at == wanted.at {
            return None;
        }
        let (now, mut answers) = (Instant::now(), Vec::new());
        if let Some(again) = wanted.again.filter(|again| now < *again) {
            return Some(again);
        }
        let hosts = snapshot.wanted_hosts();
        for (name, host) in &hosts {
            if !wanted.hosts.contains_key(name) {
                schedule.want(name, now);
            } else if !host.has_addresses() {
                // It went and came back before we looked: the snapshot has forgotten its addresses,
                // and a lookup that finds the same ones would not tell them.
                answers.push((Arc::clone(name), schedule.addresses(name)));
            }
        }
        answers.retain(|(_, addresses)| !addresses.is_empty());
        let gone = wanted.hosts.keys();
        for name in gone.filter(|name| !hosts.contains_key(*name)) {
            schedule.forget(name, now);
            self.status.forget_host(name);
            // Nobody looks after its addresses any more.
            let known = snapshot.hosts.known.get(name);
            let stale = known.is_some_and(|host| host.has_addresses());
            answers.extend(stale.then(|| (Arc::clone(name), Arc::default())));
        }
        self.status.set_hosts_left_out(schedule.left_out());
        let again = Some(now + LOOK_INTERVAL);
        *wanted = Wanted { at, again, hosts };
        if !answers.is_empty() {
            self.publisher.update(Change {
                answers,
                ..Change::default()
            });
        }
        None
    }

    fn answered(&self, schedule: &mut Schedule, name: &Arc<str>, answers: Answers) {
        let Some(outcome) = schedule.answered(name, answers, Instant::now()) else {
            return;
        };
        let is_new = self.status.set_host(name, |host| {
            let is_new = outcome.error.is_some() && host.error.is_none();
            if let Some(addresses) = &outcome.changed {
                host.addresses = addresses.to_vec();
            }
            host.more = outcome.more;
            host.error.clone_from(&outcome.error);
            if outcome.error.is_none() {
                host.answered = Some(SystemTime::now());
            }
            is_new
        });
        // The first failure of each row: a server that is away fails all names again and again.
        if let Some(why) = outcome.error.filter(|_| is_new) {
            warn!(%name, %why, "a hostname cannot be looked up; what is known of it stays");
        }
        if let Some(addresses) = outcome.changed {
            info!(%name, ?addresses, "a hostname has other addresses");
            self.publisher.update(Change {
                answers: vec![(Arc::clone(name), addresses)],
                ..Change::default()
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::schedule::Found;
    use super::*;
    use crate::snapshot::ExposureTable;
    use crate::snapshot::mesh::{Mesh, Template, Workload};

    fn mesh(hosts: &[&str]) -> Mesh {
        let workload = |host: &&str| Workload {
            uid: format!("uid-of-{host}").into(),
            capacity: 1,
            template: Template {
                hostname: (*host).into(),
                services: [("app/db.app".into(), [(80, 8080)].into())].into(),
                ..Template::default()
            }
            .into(),
            ..Workload::default()
        };
        Mesh::new([], hosts.iter().map(workload))
    }

    fn dns() -> Dns {
        Dns {
            publisher: Arc::new(Publisher::new()),
            status: Arc::new(Status::new(&[])),
            servers: Vec::new(),
        }
    }

    fn tell(dns: &Dns, hosts: &[&str]) {
        dns.publisher.update(Change {
            mesh: Some((mesh(hosts), "east".into())),
            exposure: Some(ExposureTable::new(true)),
            ..Change::default()
        });
    }

    #[tokio::test(start_paused = true)]
    async fn istiod_8_a_row_of_changes_is_looked_at_once_a_second_and_none_is_lost() {
        let (dns, mut schedule, mut wanted) = (dns(), Schedule::default(), Wanted::default());
        assert_eq!(dns.follow(&mut schedule, &mut wanted), None);
        tell(&dns, &["a"]);
        assert_eq!(dns.follow(&mut schedule, &mut wanted), None, "at once");
        assert!(schedule.begin(Instant::now()).is_some());
        let again = Instant::now() + LOOK_INTERVAL;
        for hosts in [&["a", "b"][..], &["b"], &["b", "c"]] {
            tell(&dns, hosts);
            assert_eq!(dns.follow(&mut schedule, &mut wanted), Some(again));
            assert_eq!(schedule.begin(Instant::now()), None);
        }
        tokio::time::advance(LOOK_INTERVAL).await;
        assert_eq!(dns.follow(&mut schedule, &mut wanted), None);
        let mut begun = [(); 2].map(|()| schedule.begin(Instant::now()).expect("a hostname"));
        begun.sort_unstable();
        assert_eq!(begun.each_ref().map(|name| &**name), ["b", "c"]);
        tokio::time::advance(LOOK_INTERVAL).await;
        assert_eq!(dns.follow(&mut schedule, &mut wanted), None, "all is seen");
    }

    #[tokio::test(start_paused = true)]
    async fn a_hostname_that_goes_and_comes_back_unseen_keeps_its_addresses() {
        let dns = dns();
        let shown = || {
            let snapshot = dns.publisher.reader().snapshot();
            let workloads = snapshot.mesh.workloads.sorted();
            let uids = workloads.iter().map(|one| one.uid.to_string());
            uids.collect::<Vec<_>>()
        };
        let (mut schedule, mut known) = (Schedule::default(), Wanted::default());
        tell(&dns, &["db"]);
        dns.follow(&mut schedule, &mut known);
        let name = schedule.begin(Instant::now()).expect("a hostname");
        let found = Found {
            addresses: vec!["10.0.0.1".parse().expect("an address")],
            ttl: Duration::from_secs(60),
        };
        dns.answered(&mut schedule, &name, [Ok(found), Ok(Found::default())]);
        let want = ["uid-of-db/10.0.0.1"];
        assert_eq!(shown(), want);
        tell(&dns, &[]);
        tell(&dns, &["db"]);
        assert_eq!(shown(), ["uid-of-db"], "the snapshot starts anew");
        tokio::time::advance(LOOK_INTERVAL).await;
        dns.follow(&mut schedule, &mut known);
        assert_eq!(shown(), want);
    }
}
