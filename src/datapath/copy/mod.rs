//! Stage 10: copying of both directions of a tunnel, with exact TCP semantics.
//!
//! [`bidirectional`] copies the tunnels of TLS listeners and of bindings. Those of streams are
//! copied by [`tunnel_copy`](super::forward::tunnel_copy), which uses [`backlog`] and [`progress`].

pub mod backlog;
pub mod bidirectional;
pub mod progress;

use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

use crate::reason::Reason;

use super::limits::loop_detection::InFlight;

/// End of a tunnel.
#[derive(Debug)]
pub struct CopyOutcome {
    /// Clean end, or the reason for which the tunnel broke. The caller then resets both sides.
    pub result: Result<(), Reason>,
    /// Deadline for the endpoint to take what it was sent. `None` unless it was sent FIN and
    /// everything that the peer sent.
    pub delivery_deadline: Option<Instant>,
}

impl CopyOutcome {
    /// Returns the outcome of a tunnel that neither side ended.
    pub fn broken(reason: Reason) -> Self {
        Self { result: Err(reason), delivery_deadline: None }
    }
}

/// Time for an endpoint to take what a peer sent before it disconnected, until the endpoint's
/// kernel has acknowledged FIN.
pub const DELIVERY_DEADLINE: Duration = Duration::from_secs(30);

/// Deadline for the first byte of an endpoint that was sent a ClientHello. A TLS server answers at
/// once; later bytes may take any time.
pub const ANSWER_DEADLINE: Duration = Duration::from_secs(5);

/// Detail of a tunnel whose endpoint has missed [`ANSWER_DEADLINE`].
pub const SILENT: &str = "the endpoint sent no byte within 5 s of the ClientHello";

/// Timer of the limit of time without a byte.
struct IdleTimer {
    limit: Duration,
    timer: Pin<Box<Sleep>>,
    /// Number of bytes at the last poll.
    bytes: u64,
    last_moved: Instant,
}

impl IdleTimer {
    fn new(limit: Duration) -> Self {
        Self { limit, timer: Box::pin(sleep(limit)), bytes: 0, last_moved: Instant::now() }
    }

    /// Returns true if the limit has passed. The timer is armed again only when it fires: bytes
    /// cost no access to it.
    fn poll(&mut self, cx: &mut Context<'_>, bytes: u64) -> bool {
        if self.bytes != bytes {
            (self.bytes, self.last_moved) = (bytes, Instant::now());
        }
        while self.timer.as_mut().poll(cx).is_ready() {
            let end = self.last_moved + self.limit;
            if end <= Instant::now() {
                return true;
            }
            self.timer.as_mut().reset(end);
        }
        false
    }
}

/// First seconds of a tunnel whose peer has sent a ClientHello. The endpoint has to answer in them,
/// and its socket gets keepalive after them.
struct Start {
    timer: IdleTimer,
    /// Entry of the ClientHello in the loop detection, until the endpoint answers.
    loop_entry: Option<InFlight>,
}

impl Start {
    fn new(loop_entry: Option<InFlight>) -> Self {
        Self { timer: IdleTimer::new(ANSWER_DEADLINE), loop_entry }
    }

    /// Returns true if they are over.
    fn poll(&mut self, cx: &mut Context<'_>, has_answered: bool) -> bool {
        if has_answered {
            self.loop_entry = None;
        }
        self.timer.poll(cx, 0)
    }
}
