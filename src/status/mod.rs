//! Status of the process for operators: readiness, certificates, discovery, the last reload of
//! each source, and the labels of workloads.
//!
//! Plain structs, each behind a lock of its own. Their owners write them and the admin pages read
//! them; the data path waits for neither.

mod certificate;
mod discovery;
mod link;
mod remote;
mod workload;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::SystemTime;

use derive_more::Display;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::labels::labelled;

pub use self::certificate::{Certificate, CertificateInfo};
pub use self::discovery::{Discovery, HeldRemovals, Rejection, ResourceType, Unused};
pub use self::link::{LinkUsage, ReducedLink};
pub use self::remote::{GatewayRow, ProbeResult};
pub use self::workload::{PodName, WorkloadLabels};

labelled! {
    /// Source that is read at the start and again after every change. Its label is also the name
    /// in dumps.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum ReloadSource {
        /// `strait.yaml`.
        Config = "config",
        /// The mesh, from a file.
        Mesh = "mesh",
        Objects = "objects",
        /// Our own certificates and the roots of the trust domains.
        Certificates = "certificates",
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct ResourceUsage {
    pub resource: String,
    /// Gateway, service or binding that it belongs to.
    pub of: Option<String>,
    /// Amount in use.
    pub used: usize,
    /// Maximum amount; none without a limit of its own.
    pub max: Option<usize>,
    /// Clusters, identities and addresses that hold the most.
    pub holders: Vec<Holder>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Holder {
    pub source: String,
    pub held: usize,
}

/// Result of the last reload of a source.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReloadRow {
    /// Label of the source.
    pub what: String,
    #[serde(with = "rfc3339")]
    pub at: SystemTime,
    /// True if the content is in use. If false, the last good content stays in use.
    pub in_use: bool,
    /// Reason why the content is not in use, or the parts that are not.
    pub error: Option<String>,
}

/// Certificate revocation list in use.
#[derive(Clone, Debug, Display, PartialEq, Eq)]
#[display(
    "CRL {} of {issuer} ({}, nextUpdate {})",
    number.as_deref().unwrap_or("none"),
    file.display(),
    humantime::format_rfc3339_seconds(*next_update)
)]
pub struct Crl {
    pub file: PathBuf,
    pub issuer: String,
    pub number: Option<String>,
    /// nextUpdate: end of the validity.
    pub next_update: SystemTime,
}

/// State of a hostname that discovery sent instead of addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HostnameStatus {
    pub name: String,
    /// Addresses in use: those of the last good answer.
    pub addresses: Vec<IpAddr>,
    /// Number of further addresses, which are not used.
    pub more: usize,
    #[serde(with = "rfc3339::option")]
    pub answered: Option<SystemTime>,
    /// Error of the last lookup, if it failed.
    pub error: Option<String>,
}

/// All hostnames that discovery sent instead of addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HostnameStatuses {
    /// Hostnames that are looked up, by name.
    pub list: Vec<HostnameStatus>,
    /// Number of hostnames beyond the limit, which are not looked up.
    pub left_out: usize,
}

/// State of a cache file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheStatus {
    /// Description of what is served from it.
    pub restored: Option<String>,
    /// Time of its content.
    pub saved: Option<SystemTime>,
    /// Error of the last write, if it failed.
    pub save_error: Option<String>,
}

impl CacheStatus {
    /// Notes a write.
    pub fn note(&mut self, written: Result<SystemTime, String>) {
        self.save_error = written.as_ref().err().cloned();
        self.saved = written.ok().or(self.saved);
    }
}

/// Status of the process; share it in an `Arc`.
#[derive(Debug, Default)]
pub struct Status {
    pending: Mutex<Vec<(Cow<'static, str>, Vec<&'static str>)>>,
    discovery: Mutex<Option<Discovery>>,
    certificates: Mutex<BTreeMap<String, Certificate>>,
    pub crls: Mutex<Vec<Crl>>,
    /// Subjects of the trusted roots whose peers are refused because `trust.crl` has no list of the
    /// root.
    pub unlisted_roots: Mutex<Vec<String>>,
    reloads: Mutex<BTreeMap<ReloadSource, ReloadRow>>,
    /// Claims of objects that have no effect because of other claims.
    pub conflicts: Mutex<Vec<String>>,
    /// Problem of the file of drains that restarts keep.
    pub drain_problem: Mutex<Option<String>>,
    /// True while a successor starts, which would not learn of an order to drain.
    pub is_handing_over: AtomicBool,
    hosts: Mutex<(BTreeMap<String, HostnameStatus>, usize)>,
    /// Cache file of the objects of an API server.
    pub objects_cache: Mutex<CacheStatus>,
    /// Removals by an API server that are held.
    pub held_objects: Mutex<Option<HeldRemovals>>,
    /// Request of an operator to make the removals by the control plane that are held.
    pub release: Notify,
    /// The same for those by an API server.
    pub release_objects: Notify,
}

impl Status {
    /// Creates the status of a process that is not ready until each of `pending` is.
    pub fn new(pending: &[&'static str]) -> Self {
        Self {
            pending: Mutex::new(pending.iter().map(|&name| (name.into(), Vec::new())).collect()),
            ..Self::default()
        }
    }

    /// Removes `what` from the conditions of readiness.
    pub fn clear_pending(&self, what: &str) {
        self.pending.lock().retain(|(name, _)| name != what);
    }

    /// Adds `what` to the conditions of readiness.
    pub fn pending(&self, what: impl Into<Cow<'static, str>>) {
        let (what, mut pending) = (what.into(), self.pending.lock());
        if !pending.iter().any(|(name, _)| *name == what) {
            pending.push((what, Vec::new()));
        }
    }

    /// Sets the missing parts of `what`, if readiness waits for it.
    pub fn missing(&self, what: &str, parts: Vec<&'static str>) {
        let mut pending = self.pending.lock();
        if let Some((_, missing)) = pending.iter_mut().find(|(name, _)| name == what) {
            *missing = parts;
        }
    }

    /// Returns the conditions that readiness waits for, in the order in which they were added;
    /// empty when ready. Missing parts are appended: `discovery (addresses, clusters)`.
    pub fn list_pending(&self) -> Vec<String> {
        let shown = |(name, missing): &(Cow<'_, str>, Vec<&str>)| {
            if missing.is_empty() {
                name.to_string()
            } else {
                format!("{name} ({})", missing.join(", "))
            }
        };
        self.pending.lock().iter().map(shown).collect()
    }

    /// Changes the state of the stream to a control plane. The first call creates it.
    pub fn set_discovery(&self, change: impl FnOnce(&mut Discovery)) {
        change(self.discovery.lock().get_or_insert_default());
    }

    /// Returns the state of the stream to a control plane; none if discovery uses a file.
    pub fn discovery(&self) -> Option<Discovery> {
        self.discovery.lock().clone()
    }

    /// Returns the removals that are held: those by the control plane, then those by an API server.
    pub fn held(&self) -> [Option<HeldRemovals>; 2] {
        let of_plane = self.discovery.lock().as_ref().and_then(|discovery| discovery.hold.clone());
        [of_plane, self.held_objects.lock().clone()]
    }

    pub fn set_certificate(&self, certificate: Certificate) {
        self.certificates.lock().insert(certificate.identity.clone(), certificate);
    }

    pub fn forget_certificate(&self, identity: &str) {
        self.certificates.lock().remove(identity);
    }

    pub fn certificates(&self) -> Vec<Certificate> {
        self.certificates.lock().values().cloned().collect()
    }

    /// Records the result of a reload of a source that ended now: the parts that are not in use, or
    /// the error that keeps all of it from being used.
    pub fn set_reload(&self, source: ReloadSource, result: Result<Option<String>, String>) {
        let (what, at) = (source.label().to_owned(), SystemTime::now());
        let in_use = result.is_ok();
        let reload = ReloadRow { what, at, in_use, error: result.unwrap_or_else(Some) };
        self.reloads.lock().insert(source, reload);
    }

    pub fn set_host<T>(&self, name: &str, change: impl FnOnce(&mut HostnameStatus) -> T) -> T {
        let mut hosts = self.hosts.lock();
        let new = || HostnameStatus { name: name.to_owned(), ..HostnameStatus::default() };
        change(hosts.0.entry(name.to_owned()).or_insert_with(new))
    }

    pub fn forget_host(&self, name: &str) {
        self.hosts.lock().0.remove(name);
    }

    pub fn set_hosts_left_out(&self, count: usize) {
        self.hosts.lock().1 = count;
    }

    pub fn hosts(&self) -> HostnameStatuses {
        let hosts = self.hosts.lock();
        HostnameStatuses { list: hosts.0.values().cloned().collect(), left_out: hosts.1 }
    }

    /// Returns the last reload of each source that was read at least once.
    pub fn reloads(&self) -> Vec<(ReloadSource, ReloadRow)> {
        self.reloads.lock().iter().map(|(what, reload)| (*what, reload.clone())).collect()
    }
}

/// Times of serialized structs, in RFC 3339 with seconds.
pub(crate) mod rfc3339 {
    use std::time::SystemTime;

    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(crate) fn serialize<S: Serializer>(
        at: &SystemTime,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&humantime::format_rfc3339_seconds(*at))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<SystemTime, D::Error> {
        let text = String::deserialize(from)?;
        humantime::parse_rfc3339(&text).map_err(de::Error::custom)
    }

    /// The same for optional times.
    pub(crate) mod option {
        use std::time::SystemTime;

        use serde::{Deserialize, Deserializer, Serialize, Serializer};

        #[derive(Deserialize, Serialize)]
        struct Time(#[serde(with = "super")] SystemTime);

        pub(crate) fn serialize<S: Serializer>(
            at: &Option<SystemTime>,
            serializer: S,
        ) -> Result<S::Ok, S::Error> {
            at.map(Time).serialize(serializer)
        }

        pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
            from: D,
        ) -> Result<Option<SystemTime>, D::Error> {
            Ok(Option::<Time>::deserialize(from)?.map(|Time(at)| at))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn readiness_waits_for_each_name_and_can_be_lost_again() {
        let status = Status::new(&["certificates", "mesh"]);
        status.clear_pending("certificates");
        status.clear_pending("never named");
        assert_eq!(status.list_pending(), ["mesh"]);
        status.clear_pending("mesh");
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
        status.clear_pending("discovery");
        assert_eq!(status.list_pending(), ["listeners"]);
    }

    #[test]
    fn a_rejection_keeps_its_time_while_its_reason_stays() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let rejected = |reason: &str, seconds, accepted: Option<u64>| {
            vec![ResourceType {
                name: "addresses".into(),
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
        discovery.set_types(rejected("port", 1, Some(1)));
        discovery.set_types(rejected("port", 2, None));
        assert_eq!(since(&discovery), at(1));
        assert_eq!(discovery.types[0].accepted, Some(at(1)));
        discovery.set_types(rejected("address", 3, None));
        assert_eq!(since(&discovery), at(3));
        discovery.record_answer("addresses", "v1", true);
        discovery.record_answer("addresses", "v2", false);
        discovery.record_answer("clusters", "v3", true);
        discovery.set_types(rejected("address", 4, None));
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
        status.set_reload(ReloadSource::Mesh, Ok(None));
        status.set_reload(ReloadSource::Mesh, Err("line 3: unknown key".into()));
        status.set_reload(ReloadSource::Config, Ok(None));
        let reloads = status.reloads();
        let shown: Vec<_> = reloads
            .iter()
            .map(|(what, reload)| (what.label(), reload.in_use, reload.error.as_deref()))
            .collect();
        assert_eq!(shown, [("config", true, None), ("mesh", false, Some("line 3: unknown key"))]);
    }
}
