//! What people look at: readiness, certificates, the last reload of each source, and what a
//! workload is called.
//!
//! Plain structs behind one lock each. Whoever knows something writes it here, the admin pages
//! read it, and nothing in the data path waits for either.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde::{Serialize, Serializer};

/// What metrics and logs say of a workload. Empty is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct WorkloadLabels {
    /// The workload's name, such as the Deployment's.
    pub workload: String,
    /// Its namespace.
    pub namespace: String,
    /// Its SPIFFE identity as the source of the mesh claims it.
    pub principal: String,
    /// The cluster that it runs in.
    pub cluster: String,
    /// `service.istio.io/canonical-name`.
    pub canonical_name: String,
    /// `service.istio.io/canonical-revision`.
    pub canonical_revision: String,
    /// The region that it runs in.
    pub region: String,
    /// The zone that it runs in.
    pub zone: String,
}

/// Owner of a pod's name. The log reads it from there, because a copy for each tunnel would cost
/// memory.
pub trait PodName: fmt::Debug + Send + Sync {
    /// Returns the name; empty if it is unknown.
    fn pod_name(&self) -> &str;
}

/// A source that is read at the start and again whenever it changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum What {
    /// `strait.yaml`.
    Config,
    /// The mesh, as discovery tells it.
    Mesh,
    /// Kubernetes' objects.
    Objects,
    /// Our own certificates and the roots of the trust domains.
    Certificates,
}

impl What {
    /// Every source, in the order of the enum. Metrics are created from it.
    pub const ALL: [Self; 4] = [Self::Config, Self::Mesh, Self::Objects, Self::Certificates];

    /// The metric label and the name in dumps.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Mesh => "mesh",
            Self::Objects => "objects",
            Self::Certificates => "certificates",
        }
    }
}

/// The last reload of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reload {
    /// Time of the attempt.
    pub at: SystemTime,
    /// Use of the content that was read. If `false`, the last good one stays.
    pub ok: bool,
    /// Reason for which it is not in use, or the parts of it that are not.
    pub error: Option<String>,
}

/// An identity that we serve with, and what proves it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Certificate {
    /// The SPIFFE identity, or `trust domain NAME` for roots of its own.
    pub identity: String,
    /// `Available`, `Initializing` or `Unavailable: …`, as istioctl shows it; where the next
    /// certificate cannot be had, `Available: …` says so.
    pub state: String,
    /// The leaf and the intermediates above it.
    pub chain: Vec<CertificateInfo>,
    /// The roots that peers are verified against.
    pub roots: Vec<CertificateInfo>,
}

/// One certificate of a chain or of a set of roots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateInfo {
    /// The certificate as PEM.
    pub pem: String,
    /// Serial number in decimal.
    pub serial: String,
    /// The start of its validity in RFC 3339.
    pub valid_from: String,
    /// The end of its validity in RFC 3339.
    pub expires: String,
}

/// A certificate revocation list in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crl {
    /// The file that it is from.
    pub file: PathBuf,
    /// The issuer's name.
    pub issuer: String,
    /// Its number, if it says one.
    pub number: Option<String>,
    /// The end of its validity.
    pub next_update: SystemTime,
}

impl fmt::Display for Crl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { issuer, file, .. } = self;
        let number = self.number.as_deref().unwrap_or("none");
        let next = humantime::format_rfc3339_seconds(self.next_update);
        let file = file.display();
        write!(f, "CRL {number} of {issuer} ({file}, nextUpdate {next})")
    }
}

/// What is known of the stream to a control plane, and of what it told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Discovery {
    /// The control plane's address.
    pub address: String,
    /// Whether there is a stream.
    pub connected: bool,
    /// Since when there is one, or none.
    #[serde(serialize_with = "rfc3339_option")]
    pub since: Option<SystemTime>,
    /// Why the last one ended, or did not come about.
    pub why: Option<String>,
    /// Streams that failed since the last one that said something.
    pub retries: u32,
    /// When the next one is tried, while there is none.
    #[serde(serialize_with = "rfc3339_option")]
    pub next_try: Option<SystemTime>,
    /// Each type of resources.
    pub types: Vec<ResourceType>,
    /// What is served from the disk, until the control plane has told all of it.
    pub from_disk: Option<String>,
    /// When the state on disk was saved.
    #[serde(serialize_with = "rfc3339_option")]
    pub saved: Option<SystemTime>,
}

/// What is known of one type of resources.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceType {
    /// What people call it, such as `addresses`.
    pub name: &'static str,
    /// Whether a response told of them, on any stream.
    pub synced: bool,
    /// How many are held.
    pub held: usize,
    /// When a response was last accepted as a whole.
    #[serde(serialize_with = "rfc3339_option")]
    pub accepted: Option<SystemTime>,
    /// The server's version of them all, by the last response that was accepted as a whole; empty
    /// if it said none.
    pub version: String,
    /// How many responses were accepted as a whole.
    pub responses: u64,
    /// How many were not.
    pub nacks: u64,
    /// How many are rejected.
    pub rejected: usize,
    /// Whether there may be more, of which only the number of the largest message is counted.
    pub at_least: bool,
    /// The first of them, by name.
    pub rejections: Vec<Rejection>,
    /// How much was accepted and is not used.
    pub unused: usize,
    /// The first of it.
    pub unused_first: Vec<Unused>,
}

/// What was accepted and is not used, or not as it says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unused {
    /// The resource's name.
    pub name: String,
    /// What of it is not used, and why.
    pub why: String,
}

/// A resource of which the last version was rejected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rejection {
    /// Its name; empty if it has none that could be used.
    pub name: String,
    /// Which of its fields is wrong, and how.
    pub reason: String,
    /// The version that was rejected.
    pub version: String,
    /// Since when.
    #[serde(serialize_with = "rfc3339")]
    pub since: SystemTime,
}

impl Discovery {
    /// There is a stream now.
    pub fn connect(&mut self, at: SystemTime) {
        (self.connected, self.since, self.next_try) = (true, Some(at), None);
    }

    /// There is none any more, or none came about; the next one is tried after `wait`.
    pub fn disconnect(&mut self, why: String, at: SystemTime, wait: Duration) {
        if self.connected || self.since.is_none() {
            self.since = Some(at);
        }
        self.connected = false;
        self.why = Some(why);
        self.retries = self.retries.saturating_add(1);
        self.next_try = at.checked_add(wait);
    }

    /// A response of a type was answered: accepted as a whole, or not.
    pub fn answer(&mut self, name: &str, version: &str, accepted: bool) {
        let mut types = self.types.iter_mut();
        let Some(known) = types.find(|known| known.name == name) else {
            return;
        };
        if accepted {
            known.accepted = Some(SystemTime::now());
            known.version = version.to_owned();
            known.responses += 1;
        } else {
            known.nacks += 1;
        }
    }

    /// Replaces what is known of the types. What was rejected for the same reason before keeps its
    /// time, and each type what [`answer`](Self::answer) noted.
    pub fn told(&mut self, mut types: Vec<ResourceType>) {
        for new in &mut types {
            let mut old = self.types.iter();
            let Some(old) = old.find(|old| old.name == new.name) else {
                continue;
            };
            new.accepted = new.accepted.max(old.accepted);
            (new.responses, new.nacks) = (old.responses, old.nacks);
            new.version.clone_from(&old.version);
            for rejection in &mut new.rejections {
                let mut known = old.rejections.iter();
                let same =
                    known.find(|old| old.name == rejection.name && old.reason == rejection.reason);
                rejection.since = same.map_or(rejection.since, |same| same.since);
            }
        }
        self.types = types;
    }
}

/// What is known of a hostname that discovery tells instead of addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Host {
    /// The hostname.
    pub name: String,
    /// The addresses that are used: those of the last good answer.
    pub addresses: Vec<IpAddr>,
    /// How many more it has than are used.
    pub more: usize,
    /// When that answer came.
    #[serde(serialize_with = "rfc3339_option")]
    pub answered: Option<SystemTime>,
    /// Why the last lookup failed, if it did.
    pub error: Option<String>,
}

/// All hostnames that discovery tells instead of addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Hosts {
    /// Each that is looked up, by its name.
    pub list: Vec<Host>,
    /// How many are not, as there are too many.
    pub left_out: usize,
}

/// What the process knows of itself; share it in an `Arc`.
#[derive(Debug)]
pub struct Status {
    pending: Mutex<Vec<(&'static str, Vec<&'static str>)>>,
    discovery: Mutex<Option<Discovery>>,
    certificates: Mutex<BTreeMap<String, Certificate>>,
    crls: Mutex<Vec<Crl>>,
    unlisted_roots: Mutex<Vec<String>>,
    reloads: Mutex<BTreeMap<What, Reload>>,
    conflicts: Mutex<Vec<String>>,
    hosts: Mutex<(BTreeMap<String, Host>, usize)>,
}

impl Status {
    /// A process that is not ready until each of `pending` is.
    pub fn new(pending: &[&'static str]) -> Self {
        Self {
            pending: Mutex::new(pending.iter().map(|&name| (name, Vec::new())).collect()),
            discovery: Mutex::default(),
            certificates: Mutex::default(),
            crls: Mutex::default(),
            unlisted_roots: Mutex::default(),
            reloads: Mutex::default(),
            conflicts: Mutex::default(),
            hosts: Mutex::default(),
        }
    }

    /// Says that readiness no longer waits for `what`.
    pub fn ready(&self, what: &'static str) {
        lock(&self.pending).retain(|(name, _)| *name != what);
    }

    /// Says that readiness waits for `what` (again).
    pub fn pending(&self, what: &'static str) {
        let mut pending = lock(&self.pending);
        if !pending.iter().any(|(name, _)| *name == what) {
            pending.push((what, Vec::new()));
        }
    }

    /// Says what is missing of `what`, if readiness waits for it at all.
    pub fn missing(&self, what: &'static str, parts: Vec<&'static str>) {
        let mut pending = lock(&self.pending);
        if let Some((_, missing)) = pending.iter_mut().find(|(name, _)| *name == what) {
            *missing = parts;
        }
    }

    /// What readiness waits for, in the order in which it was named; empty when ready. What is
    /// missing of something stands behind it: `discovery (addresses, clusters)`.
    pub fn list_pending(&self) -> Vec<String> {
        let shown = |(name, missing): &(&str, Vec<&str>)| match missing.is_empty() {
            true => (*name).to_owned(),
            false => format!("{name} ({})", missing.join(", ")),
        };
        lock(&self.pending).iter().map(shown).collect()
    }

    /// Changes what is known of the stream to a control plane; from the first call on there is one.
    pub fn set_discovery(&self, change: impl FnOnce(&mut Discovery)) {
        change(lock(&self.discovery).get_or_insert_default());
    }

    /// What is known of the stream to a control plane, if there is to be one.
    pub fn discovery(&self) -> Option<Discovery> {
        lock(&self.discovery).clone()
    }

    /// Replaces what is known of one identity.
    pub fn set_certificate(&self, certificate: Certificate) {
        lock(&self.certificates).insert(certificate.identity.clone(), certificate);
    }

    /// Forgets an identity that we do not have any more.
    pub fn forget_certificate(&self, identity: &str) {
        lock(&self.certificates).remove(identity);
    }

    /// What is known of each identity, in their order.
    pub fn certificates(&self) -> Vec<Certificate> {
        lock(&self.certificates).values().cloned().collect()
    }

    /// Replaces the revocation lists.
    pub fn set_crls(&self, crls: Vec<Crl>) {
        *lock(&self.crls) = crls;
    }

    /// Returns the revocation lists.
    pub fn crls(&self) -> Vec<Crl> {
        lock(&self.crls).clone()
    }

    /// Replaces the subjects of the trusted roots below which peers are refused for want of a
    /// revocation list.
    pub fn set_unlisted_roots(&self, roots: Vec<String>) {
        *lock(&self.unlisted_roots) = roots;
    }

    /// Returns the subjects of the trusted roots below which peers are refused for want of a
    /// revocation list.
    pub fn unlisted_roots(&self) -> Vec<String> {
        lock(&self.unlisted_roots).clone()
    }

    /// Notes that `what` was read just now, and how that went.
    pub fn set_reload(&self, what: What, result: Result<(), String>) {
        let error = result.err();
        let reload = Reload {
            at: SystemTime::now(),
            ok: error.is_none(),
            error,
        };
        lock(&self.reloads).insert(what, reload);
    }

    /// Replaces the claims of objects that other claims keep from having effect.
    pub fn set_conflicts(&self, conflicts: Vec<String>) {
        *lock(&self.conflicts) = conflicts;
    }

    /// Returns the claims of objects that other claims keep from having effect.
    pub fn conflicts(&self) -> Vec<String> {
        lock(&self.conflicts).clone()
    }

    /// Notes that `what` was read just now and is in use, but for what `left` says.
    pub fn set_reload_in_part(&self, what: What, left: String) {
        let reload = Reload {
            at: SystemTime::now(),
            ok: true,
            error: Some(left),
        };
        lock(&self.reloads).insert(what, reload);
    }

    /// Changes what is known of a hostname; returns what the change does.
    pub fn set_host<T>(&self, name: &str, change: impl FnOnce(&mut Host) -> T) -> T {
        let mut hosts = lock(&self.hosts);
        let new = || Host {
            name: name.to_owned(),
            ..Host::default()
        };
        change(hosts.0.entry(name.to_owned()).or_insert_with(new))
    }

    /// Forgets a hostname that nobody wants any more.
    pub fn forget_host(&self, name: &str) {
        lock(&self.hosts).0.remove(name);
    }

    /// Says how many hostnames are not looked up.
    pub fn set_hosts_left_out(&self, count: usize) {
        lock(&self.hosts).1 = count;
    }

    /// What is known of the hostnames.
    pub fn hosts(&self) -> Hosts {
        let hosts = lock(&self.hosts);
        Hosts {
            list: hosts.0.values().cloned().collect(),
            left_out: hosts.1,
        }
    }

    /// The last reload of each source that was read at least once.
    pub fn reloads(&self) -> Vec<(What, Reload)> {
        lock(&self.reloads)
            .iter()
            .map(|(what, reload)| (*what, reload.clone()))
            .collect()
    }
}

/// A time as people and programs read it.
pub(crate) fn rfc3339<S: Serializer>(at: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_rfc3339_seconds(*at))
}

fn rfc3339_option<S: Serializer>(
    at: &Option<SystemTime>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match at {
        Some(at) => rfc3339(at, serializer),
        None => serializer.serialize_none(),
    }
}

/// Takes a lock. Each critical section here is one step, so data behind a poisoned lock is whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_waits_for_each_name_and_can_be_lost_again() {
        let status = Status::new(&["certificates", "mesh"]);
        status.ready("certificates");
        status.ready("never named");
        assert_eq!(status.list_pending(), ["mesh"]);
        status.ready("mesh");
        assert!(status.list_pending().is_empty());
        status.pending("mesh");
        status.pending("mesh");
        assert_eq!(status.list_pending(), ["mesh"]);
    }

    #[test]
    fn what_is_missing_of_something_stands_behind_it() {
        let status = Status::new(&["discovery", "listeners"]);
        status.missing("discovery", vec!["addresses", "clusters"]);
        status.missing("never named", vec!["x"]);
        let pending = status.list_pending();
        assert_eq!(pending, ["discovery (addresses, clusters)", "listeners"]);
        status.ready("discovery");
        assert_eq!(status.list_pending(), ["listeners"]);
    }

    #[test]
    fn a_rejection_keeps_its_time_while_its_reason_stays() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let rejected = |reason: &str, seconds, accepted: Option<u64>| {
            vec![ResourceType {
                name: "addresses",
                accepted: accepted.map(at),
                rejections: vec![Rejection {
                    name: "bad".into(),
                    reason: reason.into(),
                    version: "1".into(),
                    since: at(seconds),
                }],
                ..ResourceType::default()
            }]
        };
        let mut discovery = Discovery::default();
        let since = |discovery: &Discovery| discovery.types[0].rejections[0].since;
        discovery.told(rejected("port", 1, Some(1)));
        discovery.told(rejected("port", 2, None));
        assert_eq!(since(&discovery), at(1));
        assert_eq!(discovery.types[0].accepted, Some(at(1)));
        discovery.told(rejected("address", 3, None));
        assert_eq!(since(&discovery), at(3));
        discovery.answer("addresses", "v1", true);
        discovery.answer("addresses", "v2", false);
        discovery.answer("clusters", "v3", true);
        discovery.told(rejected("address", 4, None));
        let kind = &discovery.types[0];
        let counts = (kind.version.as_str(), kind.responses, kind.nacks);
        assert_eq!(counts, ("v1", 1, 1));
    }

    #[test]
    fn the_time_without_a_stream_is_counted_from_its_end() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let wait = Duration::from_secs(1);
        let mut discovery = Discovery::default();
        discovery.disconnect("refused".into(), at(1), wait);
        discovery.disconnect("refused".into(), at(2), wait);
        assert_eq!((discovery.since, discovery.retries), (Some(at(1)), 2));
        assert_eq!(discovery.next_try, Some(at(3)));
        discovery.connect(at(4));
        assert_eq!((discovery.since, discovery.next_try), (Some(at(4)), None));
        discovery.disconnect("reset".into(), at(9), wait);
        assert_eq!((discovery.since, discovery.connected), (Some(at(9)), false));
    }

    #[test]
    fn a_new_certificate_of_an_identity_replaces_the_old_one() {
        let status = Status::new(&[]);
        let certificate = |state: &str| Certificate {
            identity: "spiffe://east.local/ns/a/sa/b".into(),
            state: state.into(),
            ..Certificate::default()
        };
        status.set_certificate(certificate("Initializing"));
        status.set_certificate(certificate("Available"));
        assert_eq!(status.certificates(), [certificate("Available")]);
    }

    #[test]
    fn the_last_reload_of_a_source_says_why_it_failed() {
        let status = Status::new(&[]);
        status.set_reload(What::Mesh, Ok(()));
        status.set_reload(What::Mesh, Err("line 3: unknown key".into()));
        status.set_reload(What::Config, Ok(()));
        let reloads = status.reloads();
        let shown: Vec<_> = reloads
            .iter()
            .map(|(what, reload)| (what.label(), reload.ok, reload.error.as_deref()))
            .collect();
        assert_eq!(
            shown,
            [
                ("config", true, None),
                ("mesh", false, Some("line 3: unknown key"))
            ]
        );
    }
}
