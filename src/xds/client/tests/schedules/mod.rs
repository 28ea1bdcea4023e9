//! Model test of the client: random schedules from a seed, run against a model server.
//!
//! After each step the client must hold exactly what a plain implementation of the rules holds,
//! and each request must match the rules. Once the server is quiet, the client holds the
//! server's resources. No clock is needed, because delays are values to compare.

mod oracle;
mod server;
mod world;
mod wrong;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use bytes::Bytes;

use self::world::World;
use self::wrong::Fault;
use crate::tests::events;
use crate::xds::client::{
    Client, Mode, Request, Resource, ResourceStore, Response, SHARED_PLACEHOLDER, StreamEnd,
    Subscription,
};

const ADDRESS: &str = "type.googleapis.com/istio.workload.Address";
const POLICY: &str = "type.googleapis.com/istio.security.Authorization";
const DEMAND: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

/// Subscriptions of the client.
const TYPES: [Subscription; 3] = [
    Subscription { type_url: ADDRESS, mode: Mode::Wildcard },
    Subscription { type_url: POLICY, mode: Mode::Wildcard },
    Subscription { type_url: DEMAND, mode: Mode::OnDemand },
];

/// Limit of claimed names and versions in bytes, for some seven of them.
const CLAIMS_MAX: usize = 140;

const SEEDS: u64 = 256;
/// Minimum number of events of each kind over all seeds.
const EACH_MIN: usize = 1_000;

fn subscription(type_url: &str) -> Option<Subscription> {
    TYPES.into_iter().find(|one| one.type_url == type_url)
}

events! {
    // Changes at the server.
    Added,
    Updated,
    MadeInvalid,
    RolledBack,
    Deleted,
    /// The server reads and sends nothing for a while.
    Silent,
    // Properties of received responses.
    FirstOfItsType,
    Empty,
    Good,
    HalfBad,
    WithRemovals,
    RemovesUnknown,
    UnknownType,
    SentTwice,
    SentAndRemoved,
    NoName,
    NameOfAll,
    LongName,
    NoBody,
    OtherBody,
    /// More than 64 resources.
    Huge,
    /// The response was in flight for at least `SLOW` steps.
    Slow,
    /// A nonce that an earlier stream has used.
    NonceReused,
    Acked,
    Nacked,
    /// A NACK that leaves some names out.
    NackCut,
    // Stream events.
    Connected,
    /// A type holds more than can be claimed.
    InitialVersionsOmitted,
    /// The first response after `Unclaimed` does not name a held resource.
    RemovedByAbsence,
    ConnectFailed,
    EndedCleanly,
    EndedByStatus,
    EndedIdle,
    RequestLost,
    AnswerLost,
    ResponseLost,
    ReceivedAfterTheEnd,
    // Changes of wanted names.
    Wanted,
    WantedWithoutStream,
    WantedAgain,
    Unsubscribed,
    ForgottenWithoutStream,
    /// A resource arrives that is no longer wanted.
    Unwanted,
    /// A restart with the state that the previous process wrote to disk.
    Restarted,
}

type Counts = BTreeMap<Event, usize>;

/// Store of accepted resources: names and versions.
#[derive(Clone, Debug, Default)]
struct Store {
    held: BTreeMap<&'static str, BTreeMap<String, String>>,
    /// True if a placeholder exists for policies that cannot be held.
    unplaced: bool,
}

impl ResourceStore for Store {
    fn upsert(&mut self, type_url: &'static str, resource: &Resource) -> Result<(), String> {
        validate(resource)?;
        let held = self.held.entry(type_url).or_default();
        held.insert(resource.name.to_string(), resource.version.to_string());
        Ok(())
    }

    /// Keeps placeholders for policies only, without a version.
    fn handle_rejection(&mut self, type_url: &'static str, name: &str) -> bool {
        if name == SHARED_PLACEHOLDER {
            self.unplaced |= type_url == POLICY;
        } else if type_url == POLICY {
            let held = self.held.entry(type_url).or_default();
            let before = held.insert(name.to_owned(), String::new());
            assert!(before.is_none(), "{name} was taken before");
        }
        type_url == POLICY
    }

    fn remove(&mut self, type_url: &'static str, name: &str) {
        if name == SHARED_PLACEHOLDER {
            assert!(type_url == POLICY && self.unplaced, "nothing stands in");
            self.unplaced = false;
            return;
        }
        let held = self.held.entry(type_url).or_default();
        assert!(held.remove(name).is_some(), "{name} was never taken");
    }
}

/// Validates a resource as a decoder would.
fn validate(resource: &Resource) -> Result<(), String> {
    match resource.body.as_deref() {
        Some(body) if body.starts_with(b"good") => Ok(()),
        _ => {
            let name = &resource.name;
            Err(format!("workload.capacity: {name} is no number from 0 to 4294967295; write 1"))
        }
    }
}

#[test]
fn whatever_happens_the_machine_holds_what_the_server_has() {
    let mut counts = Counts::new();
    for seed in 0..SEEDS {
        let mut world = World::new(seed, Fault::Nothing, &mut counts);
        if let Err(error) = world.run() {
            panic!("seed {seed}, {}: {error:#}", world.position());
        }
    }
    let count = |event: &&Event| counts.get(event).copied().unwrap_or(0);
    let rare: Vec<_> = Event::ALL
        .iter()
        .filter(|event| count(event) < EACH_MIN)
        .map(|event| (event, count(&event)))
        .collect();
    assert!(rare.is_empty(), "too rare: {rare:?}");
}

#[test]
fn each_wrong_machine_is_caught_by_the_same_schedules() {
    for fault in Fault::WRONG {
        let mut counts = Counts::new();
        let caught = (0..SEEDS).any(|seed| World::new(seed, fault, &mut counts).run().is_err());
        assert!(caught, "{fault:?} passes for right");
    }
}
