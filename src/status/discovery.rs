//! State of the stream to a control plane.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::rfc3339;

/// State of the stream to a control plane, and of the resources received from it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Discovery {
    pub address: String,
    pub connected: bool,
    /// Start of the current state, connected or not.
    #[serde(with = "rfc3339::option")]
    pub since: Option<SystemTime>,
    /// Reason for the end of the last stream, or for which it could not be opened.
    pub why: Option<String>,
    /// Failed attempts since the start, or since a response was last received.
    pub retries: u32,
    /// Time of the next attempt, if the stream is not open.
    #[serde(with = "rfc3339::option")]
    pub next_try: Option<SystemTime>,
    pub types: Vec<ResourceType>,
    /// Description of the state restored from disk, until the control plane has sent all of it.
    pub from_disk: Option<String>,
    #[serde(with = "rfc3339::option")]
    pub saved: Option<SystemTime>,
    /// Error of the last write of the state to disk, if it failed.
    #[serde(skip)]
    pub save_error: Option<String>,
    pub hold: Option<HeldRemovals>,
}

/// Mass removal by the control plane or the API server that is held: what it removes stays in
/// force.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct HeldRemovals {
    pub removals: usize,
    pub services: usize,
    #[serde(default)]
    pub workloads: usize,
    /// Number of removed clusters. Under istiod they are the export set.
    pub clusters: usize,
    /// Number of removed objects of an API server, if that has removed them.
    #[serde(default)]
    pub objects: usize,
    /// Names of the first clusters, services, workloads or objects.
    pub first: Vec<String>,
    /// Names of all of them, and `HOST:PORT` of the clusters; of objects, those of their services.
    #[serde(skip)]
    pub names: HashSet<String>,
    /// Start of the hold; 1970 from a gateway that does not report it.
    #[serde(with = "rfc3339", default = "epoch")]
    pub since: SystemTime,
    #[serde(with = "rfc3339")]
    pub until: SystemTime,
}

fn epoch() -> SystemTime {
    SystemTime::UNIX_EPOCH
}

impl HeldRemovals {
    /// Limit of [`Self::first`].
    pub const FIRST_MAX: usize = 10;

    /// Returns what has removed the resources.
    pub fn by(&self) -> &'static str {
        if self.objects > 0 { "the API server" } else { "the control plane" }
    }

    /// Says that the hold keeps something, such as a service.
    pub fn describe(&self, what: &str) -> String {
        let [since, until] = [self.since, self.until].map(humantime::format_rfc3339_seconds);
        let by = self.by();
        format!("{what}: removed by {by}, kept by `discovery.hold` since {since} until {until}")
    }
}

impl fmt::Display for HeldRemovals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { removals, services, workloads, clusters, objects, first, .. } = self;
        let [since, until] = [self.since, self.until].map(humantime::format_rfc3339_seconds);
        let more = (services + workloads + clusters + objects).saturating_sub(first.len());
        write!(f, "{removals} removals by {}", self.by())?;
        if *objects == 0 {
            write!(f, " (services: {services}, workloads: {workloads}, clusters: {clusters})")?;
        }
        let first = first.join(", ");
        write!(f, " are held from {since} until {until}, and these stay in force: {first}")?;
        if more > 0 {
            write!(f, " and {more} more")?;
        }
        write!(f, "; `strait release` applies the removals")
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceType {
    /// Display name, such as `addresses`.
    pub name: Cow<'static, str>,
    /// True if readiness does not wait for this type.
    pub synced: bool,
    pub held: usize,
    /// Time of the last response that was accepted as a whole.
    #[serde(with = "rfc3339::option")]
    pub accepted: Option<SystemTime>,
    /// System version of the last response that was accepted as a whole; empty if it had none.
    pub version: String,
    /// Number of responses accepted as a whole.
    pub responses: u64,
    /// Number of other responses.
    pub nacks: u64,
    pub rejected: usize,
    /// True if `rejected` is a lower bound: of unlisted rejections only the largest number in one
    /// message is counted.
    pub at_least: bool,
    /// First rejected resources, by name.
    pub rejections: Vec<Rejection>,
    /// Number of accepted resources, or parts of them, that are not used.
    pub unused: usize,
    pub unused_first: Vec<Unused>,
}

impl ResourceType {
    pub fn rejected_count(&self) -> String {
        format!("{}{}", if self.at_least { "at least " } else { "" }, self.rejected)
    }
}

/// Accepted resource that is not used, or not as it specifies.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Unused {
    pub name: String,
    /// Unused part, and the reason.
    pub why: String,
}

/// Resource whose last version was rejected.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rejection {
    /// Name of the resource; empty if it has no usable name.
    pub name: String,
    /// Invalid field, and the error.
    pub reason: String,
    pub version: String,
    /// Time of the first rejection for this reason.
    #[serde(with = "rfc3339")]
    pub since: SystemTime,
}

impl Discovery {
    pub fn connect(&mut self, at: SystemTime) {
        (self.connected, self.since, self.next_try) = (true, Some(at), None);
    }

    /// Records that the stream ended or could not be opened; the next attempt follows after
    /// `wait`.
    pub fn disconnect(&mut self, why: String, at: SystemTime, wait: Duration) {
        if self.connected || self.since.is_none() {
            self.since = Some(at);
        }
        self.connected = false;
        self.why = Some(why);
        self.retries = self.retries.saturating_add(1);
        self.next_try = at.checked_add(wait);
    }

    /// Records the answer to a response of a type: accepted as a whole, or not.
    pub fn record_answer(&mut self, name: &str, version: &str, accepted: bool) {
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

    /// Replaces the state of the types. A rejection keeps its time if its reason is unchanged.
    /// Each type keeps the counts of [`record_answer`](Self::record_answer).
    pub fn set_types(&mut self, mut types: Vec<ResourceType>) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hold_without_its_start_is_read() {
        let text = r#"{"removals": 1, "services": 1, "clusters": 0, "first": ["a"],
            "until": "2026-11-27T19:00:00Z"}"#;
        let hold: HeldRemovals = serde_json::from_str(text).expect("a hold");
        assert_eq!((hold.since, hold.removals), (SystemTime::UNIX_EPOCH, 1));
    }
}
