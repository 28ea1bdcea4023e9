//! Model test of a connection: random schedules from a seed, run against the real turns.
//!
//! Peer, tasks and endpoints take random actions, lawful or not. After each, the messages of the
//! gateway must be those of a plain implementation of the rules, and nothing may be missing. The
//! same schedules must catch each of the deliberately wrong servers.

mod oracle;
mod peer;
mod schedule;
mod wrong;

use std::collections::BTreeMap;

use self::schedule::Schedule;
use self::wrong::Fault;
use super::rig::TestGateway;
use crate::reason::Reason;
use crate::tests::events;

const SEEDS: u64 = 256;
/// Minimum number of kinds of events that occur at least `COMMON_MIN` times over all seeds.
const COMMON_KINDS: usize = 30;
const COMMON_MIN: usize = 1_000;
/// Minimum number of events of each kind over all seeds.
const EACH_MIN: usize = 50;

events! {
    // Requests.
    Connect,
    ConnectWithEnd,
    ConnectInParts,
    ConnectPadded,
    ConnectMalformed,
    /// A header block on an open stream.
    Trailers,
    // DATA.
    SmallData,
    LargeData,
    PaddedData,
    EmptyData,
    DataWithEnd,
    EmptyEnd,
    DataAfterEnd,
    DataAfterReset,
    /// DATA on a stream that the gateway has reset.
    DataIgnored,
    DataBeyondWindow,
    // Other frames of the peer.
    Reset,
    ResetOfClosed,
    StreamWindow,
    WindowOfClosed,
    ConnectionWindow,
    ZeroWindow,
    WindowAboveLimit,
    InitialWindow,
    /// An initial window below the one before.
    InitialWindowShrinks,
    OtherSettings,
    SettingsAck,
    Ping,
    Pong,
    Priority,
    PriorityOfItself,
    PriorityOfWrongLength,
    UnknownFrame,
    PeerGoaway,
    WrongLength,
    ForbiddenFrame,
    // Records.
    KeyUpdate,
    EmptyRecord,
    CloseNotify,
    // Tasks.
    Accepted,
    Opened,
    Rejected,
    Refused,
    RefusedTunnel,
    TaskDropped,
    /// A task answers a stream that has ended.
    AnsweredLate,
    TooMuchEarlyData,
    // Events of the connection.
    Revoked,
    AllEnded,
    KeepalivePing,
    ShutDown,
    ShutDownConfirmed,
    // Endpoints.
    EndpointSends,
    EndpointSendsMuch,
    EndpointEnds,
    EndpointLeaves,
    EndpointResets,
    EndpointStalls,
    EndpointReads,
    // Slow sides.
    PeerStalls,
    PeerReadsSome,
    PeerReads,
    /// Another size of reads and writes of the gateway's socket.
    Pieces,
    Waited,
}

type Counts = BTreeMap<Event, usize>;

#[tokio::test(start_paused = true)]
async fn whatever_happens_the_gateway_sends_what_the_rules_say() {
    let (gateway, mut counts) = (TestGateway::new(), Counts::new());
    for seed in 0..SEEDS {
        let mut schedule = Schedule::new(&gateway, seed, Fault::Nothing, &mut counts);
        if let Err(error) = schedule.run().await {
            panic!("seed {seed}: {error:#}\n{}", schedule.log());
        }
    }
    let count = |event: &Event| counts.get(event).copied().unwrap_or(0);
    let events = Event::ALL.iter().copied();
    let rare: Vec<_> = events.filter(|event| count(event) < EACH_MIN).collect();
    assert!(rare.is_empty(), "too rare: {rare:?} of {counts:?}");
    let is_common = |event: &&Event| count(event) >= COMMON_MIN;
    let common = Event::ALL.iter().filter(is_common).count();
    assert!(common >= COMMON_KINDS, "only {common}: {counts:?}");
}

#[tokio::test(start_paused = true)]
async fn each_wrong_server_is_caught_by_the_same_schedules() {
    let gateway = TestGateway::new();
    for fault in Fault::WRONG {
        let (mut counts, mut is_caught) = (Counts::new(), false);
        for seed in 0..SEEDS {
            let mut schedule = Schedule::new(&gateway, seed, fault, &mut counts);
            is_caught = schedule.run().await.is_err();
            if is_caught {
                break;
            }
        }
        assert!(is_caught, "{fault:?} passes for right");
    }
}
