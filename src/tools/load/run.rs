//! State of a run that all its slots share, and its cost.

use std::cell::Cell;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;

use super::args::{Plan, Work};
use super::pace::Schedule;
use super::tally::Counters;
use super::target::Target;

/// Bytes of a chunk: four TLS records, and the most that a tunnel takes at once.
const CHUNK_BYTES: usize = 64 * 1024;

/// State that every slot of a run shares.
pub(super) struct RunState {
    pub(super) plan: Plan,
    pub(super) target: Rc<Target>,
    pub(super) pace: Schedule,
    pub(super) tally: Counters,
    pub(super) request: Bytes,
    /// Bytes that endless streams send repeatedly.
    pub(super) chunk: Bytes,
    /// Number of idle streams that have begun.
    pub(super) idle: Cell<u64>,
}

#[derive(Default)]
pub(super) struct RunCost {
    /// Time from when everything was open until the last operation ended.
    pub(super) time: Duration,
    /// CPU time of this process in that time.
    pub(super) cpu: Duration,
    /// True if a signal ended the run early.
    pub(super) interrupted: bool,
}

impl RunState {
    pub(super) async fn new(plan: Plan) -> anyhow::Result<Self> {
        let size = plan.size.map_or(0, NonZeroU64::get);
        let request = match plan.work {
            Work::Rr | Work::Mixed | Work::Churn | Work::Handshake | Work::Idle => {
                usize::try_from(size)?
            }
            _ => 0,
        };
        Ok(Self {
            target: Rc::new(Target::new(&plan).await?),
            pace: Schedule::new(plan.seconds, plan.rate),
            tally: Counters::new()?,
            request: incompressible_bytes(request),
            chunk: incompressible_bytes(CHUNK_BYTES),
            idle: Cell::default(),
            plan,
        })
    }
}

/// Returns incompressible bytes that are the same in every run.
fn incompressible_bytes(count: usize) -> Bytes {
    let mut bytes = vec![0; count];
    fastrand::Rng::with_seed(0).fill(&mut bytes);
    bytes.into()
}
