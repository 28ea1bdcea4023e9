//! DNS resolution of workloads that a source identifies by hostname.
//!
//! Lookups run in the background for all sources alike. Hostnames that peers request are never
//! looked up.

mod lookup;
mod schedule;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{info, warn};

use self::lookup::DnsClient;
use self::schedule::{Answers, LOOKUPS_MAX, Schedule};
use super::sleep_until_some;
use crate::snapshot::builder::Change;
use crate::snapshot::{Publisher, WantedHost};
use crate::status::Status;

/// Minimum interval between two scans of all hostnames. The cost of a scan is proportional to
/// all hostnames and services, however little has changed.
const SCAN_INTERVAL: Duration = Duration::from_secs(1);

/// Inputs and outputs of DNS resolution.
#[derive(Debug)]
pub struct Dns {
    /// Source of the wanted hostnames and destination of their addresses.
    pub publisher: Arc<Publisher>,
    pub status: Arc<Status>,
    /// DNS servers; if empty, those of `/etc/resolv.conf`.
    pub servers: Vec<SocketAddr>,
}

/// Hostnames that the snapshot referred to at the last scan.
#[derive(Debug, Default)]
struct WantedHosts {
    /// Versions of the hostnames and of the rules at that scan.
    versions: (u64, u64),
    /// Earliest time of the next scan; none before the first one.
    next_scan: Option<Instant>,
    hosts: BTreeMap<Arc<str>, WantedHost>,
}

/// Looks up the addresses of a name once.
pub async fn look_up(servers: &[SocketAddr], name: &str) -> Result<Vec<IpAddr>, String> {
    let answers = DnsClient::new(servers.to_vec()).look_up(name).await;
    let (mut addresses, mut error) = (Vec::new(), None);
    for answer in answers {
        match answer {
            Ok(answer) => addresses.extend(answer.addresses),
            Err(failure) => error = Some(failure),
        }
    }
    if addresses.is_empty() {
        return Err(error.unwrap_or_else(|| "it has no address".to_owned()));
    }
    Ok(addresses)
}

/// Keeps the addresses of all wanted hostnames up to date. Runs forever, on a thread of its own
/// because each changed answer builds a snapshot.
pub async fn run(dns: Dns) {
    let (mut schedule, mut wanted) = (Schedule::default(), WantedHosts::default());
    let mut lookups = DnsClient::new(dns.servers.clone());
    let mut running = JoinSet::new();
    let mut hosts = dns.publisher.hosts_version();
    let mut rules = dns.publisher.reader().generation();
    loop {
        let next_scan = dns.scan_wanted_hosts(&mut schedule, &mut wanted);
        while running.len() < LOOKUPS_MAX
            && let Some(name) = schedule.start_next_lookup(Instant::now())
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
            refresh_requests = dns.publisher.refresh_requests().take_all() => {
                for name in refresh_requests {
                    schedule.request_refresh(&name, Instant::now());
                }
            }
            Some(Ok((name, answers))) = running.join_next() => {
                dns.apply_answers(&mut schedule, &name, answers);
            }
            () = sleep_until_some(next) => {}
            () = sleep_until_some(next_scan) => {}
        }
    }
}

impl Dns {
    /// Schedules exactly the hostnames that the snapshot refers to, at most once per
    /// [`SCAN_INTERVAL`]. Returns the time of the next scan if a change has to wait for it.
    fn scan_wanted_hosts(
        &self,
        schedule: &mut Schedule,
        wanted: &mut WantedHosts,
    ) -> Option<Instant> {
        let snapshot = self.publisher.reader().snapshot();
        let at = (snapshot.hosts.version, snapshot.generation);
        if at == wanted.versions {
            return None;
        }
        let (now, mut answers) = (Instant::now(), Vec::new());
        if let Some(again) = wanted.next_scan.filter(|again| now < *again) {
            return Some(again);
        }
        let hosts = snapshot.wanted_hosts();
        for (name, WantedHost { host, owners }) in &hosts {
            let old = wanted.hosts.get(name);
            if old.is_none_or(|old| old.owners != *owners) {
                schedule.add(name, owners);
            }
            if old.is_some() && !host.has_addresses() {
                // The hostname was removed and added again since the last scan. The snapshot
                // has lost its addresses, and a lookup with the same result would not report a
                // change.
                answers.push((Arc::clone(name), schedule.addresses(name)));
            }
        }
        answers.retain(|(_, addresses)| !addresses.is_empty());
        let gone = wanted.hosts.keys();
        for name in gone.filter(|name| !hosts.contains_key(*name)) {
            schedule.remove(name);
            self.status.forget_host(name);
            // No lookup refreshes these addresses any longer.
            let stale = snapshot.hosts.known.get(name).is_some_and(|host| host.has_addresses());
            answers.extend(stale.then(|| (Arc::clone(name), Arc::default())));
        }
        schedule.admit(now);
        self.status.set_hosts_left_out(schedule.left_out());
        let again = Some(now + SCAN_INTERVAL);
        *wanted = WantedHosts { versions: at, next_scan: again, hosts };
        if !answers.is_empty() {
            self.publisher.update(Change { answers, ..Change::default() });
        }
        None
    }

    fn apply_answers(&self, schedule: &mut Schedule, name: &Arc<str>, answers: Answers) {
        let Some(outcome) = schedule.apply_answers(name, answers, Instant::now()) else {
            return;
        };
        let is_new = self.status.set_host(name, |host| {
            let is_new = outcome.error.is_some() && host.error.is_none();
            if let Some(addresses) = &outcome.new_addresses {
                host.addresses = addresses.to_vec();
            }
            host.more = outcome.omitted;
            host.error.clone_from(&outcome.error);
            if outcome.error.is_none() {
                host.answered = Some(SystemTime::now());
            }
            is_new
        });
        // Only the first of consecutive failures is logged: an unreachable server fails all
        // names repeatedly.
        if let Some(error) = outcome.error.filter(|_| is_new) {
            warn!(%name, %error, "hostname lookup failed; the last known addresses stay");
        }
        if let Some(addresses) = outcome.new_addresses {
            info!(%name, ?addresses, "hostname addresses changed");
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

    use super::schedule::FamilyAnswer;
    use super::*;
    use crate::snapshot::ExposureTable;
    use crate::snapshot::mesh::{Mesh, Template, Workload};

    fn mesh(hosts: &[&str]) -> Mesh {
        let workload = |host: &&str| Workload {
            uid: format!("uid-of-{host}").into(),
            capacity: 1,
            services: [("app/db.app".into(), [(80, 8080)].into())].into(),
            template: Template { hostname: (*host).into(), ..Template::default() }.into(),
            ..Workload::default()
        };
        Mesh::new([], hosts.iter().map(workload))
    }

    fn dns() -> Dns {
        Dns {
            publisher: Arc::new(Publisher::default()),
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
    async fn a_row_of_changes_is_looked_at_once_a_second_and_none_is_lost() {
        let (dns, mut schedule, mut wanted) = (dns(), Schedule::default(), WantedHosts::default());
        assert_eq!(dns.scan_wanted_hosts(&mut schedule, &mut wanted), None);
        tell(&dns, &["a"]);
        assert_eq!(dns.scan_wanted_hosts(&mut schedule, &mut wanted), None, "at once");
        assert!(schedule.start_next_lookup(Instant::now()).is_some());
        let again = Instant::now() + SCAN_INTERVAL;
        for hosts in [&["a", "b"][..], &["b"], &["b", "c"]] {
            tell(&dns, hosts);
            assert_eq!(dns.scan_wanted_hosts(&mut schedule, &mut wanted), Some(again));
            assert_eq!(schedule.start_next_lookup(Instant::now()), None);
        }
        tokio::time::advance(SCAN_INTERVAL).await;
        assert_eq!(dns.scan_wanted_hosts(&mut schedule, &mut wanted), None);
        let mut begun =
            [(); 2].map(|()| schedule.start_next_lookup(Instant::now()).expect("a hostname"));
        begun.sort_unstable();
        assert_eq!(begun.each_ref().map(|name| &**name), ["b", "c"]);
        tokio::time::advance(SCAN_INTERVAL).await;
        assert_eq!(dns.scan_wanted_hosts(&mut schedule, &mut wanted), None, "all is seen");
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
        let (mut schedule, mut known) = (Schedule::default(), WantedHosts::default());
        tell(&dns, &["db"]);
        dns.scan_wanted_hosts(&mut schedule, &mut known);
        let name = schedule.start_next_lookup(Instant::now()).expect("a hostname");
        let found = FamilyAnswer {
            addresses: vec!["10.0.0.1".parse().expect("an address")],
            ttl: Duration::from_secs(60),
        };
        dns.apply_answers(&mut schedule, &name, [Ok(found), Ok(FamilyAnswer::default())]);
        let want = ["uid-of-db/10.0.0.1"];
        assert_eq!(shown(), want);
        tell(&dns, &[]);
        tell(&dns, &["db"]);
        assert_eq!(shown(), ["uid-of-db"], "the snapshot starts anew");
        tokio::time::advance(SCAN_INTERVAL).await;
        dns.scan_wanted_hosts(&mut schedule, &mut known);
        assert_eq!(shown(), want);
    }
}
