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

/// Age at which the endpoint's socket gets keepalive. Few tunnels reach it, and the timer is freed.
const KEEPALIVE_AGE: Duration = Duration::from_secs(1);

/// Detail of a tunnel whose endpoint has missed [`ANSWER_DEADLINE`].
pub const SILENT: &str = "the endpoint sent no byte within 5 s of the ClientHello";

/// First seconds of a tunnel whose peer has sent a ClientHello. They end at [`KEEPALIVE_AGE`] if it
/// is answered by then, otherwise at [`ANSWER_DEADLINE`].
struct Start {
    timer: Pin<Box<Sleep>>,
    /// The endpoint had not answered at [`KEEPALIVE_AGE`].
    is_late: bool,
    /// Entry of the ClientHello in the loop detection, until the endpoint answers.
    loop_entry: Option<InFlight>,
}

impl Start {
    fn new(loop_entry: Option<InFlight>) -> Self {
        Self { timer: Box::pin(sleep(KEEPALIVE_AGE)), is_late: false, loop_entry }
    }

    /// Returns true if they are over.
    fn poll(&mut self, cx: &mut Context<'_>, has_answered: bool) -> bool {
        if has_answered {
            self.loop_entry = None;
        }
        while self.timer.as_mut().poll(cx).is_ready() {
            if has_answered || self.is_late {
                return true;
            }
            self.is_late = true;
            let end = self.timer.deadline() + (ANSWER_DEADLINE - KEEPALIVE_AGE);
            self.timer.as_mut().reset(end);
        }
        false
    }
}
