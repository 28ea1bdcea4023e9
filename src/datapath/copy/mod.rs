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

use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};

use crate::reason::Reason;

use super::io::acks::{AckWatch, CHECK_INTERVAL};
use super::io::endpoint::keep_alive;
use super::io::side::Side;
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

/// Time for a side to take the last bytes of a tunnel or connection that has ended cleanly. Linux
/// keeps a closed socket for about as long if the other side has closed its window.
pub const LAST_BYTES_DEADLINE: Duration = Duration::from_secs(180);

/// Number of bytes from which a tunnel that has ended cleanly lasts until a side has taken them.
/// Fewer are left to the kernel, which saves two system calls for a short tunnel.
pub const LAST_BYTES_MIN: u64 = 64 * 1024;

/// Deadline for the first byte of an endpoint that was sent a ClientHello. A TLS server answers at
/// once; later bytes may take any time.
pub const ANSWER_DEADLINE: Duration = Duration::from_secs(5);

/// Age at which the endpoint's socket gets keepalive. Few tunnels reach it, and the timer is freed.
const KEEPALIVE_AGE: Duration = Duration::from_secs(1);

/// Detail of a tunnel whose endpoint has missed [`ANSWER_DEADLINE`].
pub const SILENT: &str = "the endpoint sent no byte within 5 s of the ClientHello";

/// Timer of a tunnel. An idle one has none after its first seconds.
struct Timer {
    timer: Pin<Box<Sleep>>,
    stage: Stage,
    /// Entry of the ClientHello in the loop detection, until the endpoint answers.
    loop_entry: Option<InFlight>,
    peer: AckWatch,
    endpoint: AckWatch,
}

/// Event that the timer waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The peer has sent a ClientHello, and the tunnel reaches [`KEEPALIVE_AGE`].
    Start,
    /// The endpoint had not answered by then, and reaches [`ANSWER_DEADLINE`].
    Late,
    /// The sides have to acknowledge what they were sent.
    Acks,
}

impl Timer {
    fn new(stage: Stage, time: Duration, loop_entry: Option<InFlight>) -> Self {
        let (peer, endpoint) = Default::default();
        Self { timer: Box::pin(sleep(time)), stage, loop_entry, peer, endpoint }
    }

    /// Creates the timer of a tunnel whose peer has sent a ClientHello.
    fn start(loop_entry: Option<InFlight>) -> Self {
        Self::new(Stage::Start, KEEPALIVE_AGE, loop_entry)
    }

    /// Creates the timer of a tunnel that has just moved bytes.
    fn acks() -> Self {
        Self::new(Stage::Acks, CHECK_INTERVAL, None)
    }

    /// Polls the timer of a tunnel between the socket of a peer and an endpoint. Returns false once
    /// the tunnel needs none until it moves bytes.
    ///
    /// # Errors
    /// The endpoint is silent, or a side has vanished; the reason, and its detail.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        (peer, endpoint): (&TcpStream, &mut impl Side),
        has_answered: bool,
    ) -> Result<bool, (Reason, String)> {
        if has_answered {
            self.loop_entry = None;
        }
        while self.timer.as_mut().poll(cx).is_ready() {
            let mut next = Instant::now() + CHECK_INTERVAL;
            match self.stage {
                // An answer that memory is too short to read is one.
                Stage::Late if !has_answered && endpoint.poll_read_ready(cx).is_pending() => {
                    return Err((Reason::EndpointSilent, SILENT.to_owned()));
                }
                Stage::Start if !has_answered => {
                    self.stage = Stage::Late;
                    next = self.timer.deadline() + (ANSWER_DEADLINE - KEEPALIVE_AGE);
                }
                stage => {
                    if stage != Stage::Acks {
                        endpoint.socket().into_iter().for_each(keep_alive);
                        self.stage = Stage::Acks;
                    }
                    if !self.check_acks(peer, endpoint.socket())? {
                        return Ok(false);
                    }
                }
            }
            self.timer.as_mut().reset(next);
        }
        Ok(true)
    }

    /// Returns true if one of the sides owes acknowledgements.
    fn check_acks(
        &mut self,
        peer: &TcpStream,
        endpoint: Option<&TcpStream>,
    ) -> Result<bool, (Reason, String)> {
        let peer = self.peer.check(peer).map_err(|why| (Reason::DownstreamLost, why))?;
        let endpoint = endpoint.map_or(Ok(false), |endpoint| self.endpoint.check(endpoint));
        Ok(endpoint.map_err(|why| (Reason::UpstreamReset, why))? || peer)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    use prometheus_client::metrics::gauge::Gauge;
    use tokio::io::AsyncWriteExt;
    use tokio::time::timeout;

    use super::bidirectional::{CopyLimits, InitialState, run};
    use super::*;
    use crate::datapath::identity::Peer;
    use crate::datapath::io::endpoint::EndpointStream;
    use crate::datapath::io::shared_socket::SharedSocket;
    use crate::datapath::limits::admission::Admission;
    use crate::datapath::limits::budget::BufferBudget;
    use crate::datapath::tests::tcp_pair;
    use crate::limits::Source;
    use crate::telemetry::{Metrics, Record};

    const BUFFERS: usize = 1 << 20;

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_whose_answer_memory_is_too_short_to_read_is_not_silent() {
        let [(_client, downstream), (upstream, mut server)] = [tcp_pair().await, tcp_pair().await];
        let budget = Arc::new(BufferBudget::new(BUFFERS, Gauge::default()));
        let [account, other] =
            [1, 2].map(|host| budget.account(&Source::prefix([192, 0, 2, host].into())));
        other.charge(2 * BUFFERS);
        let peer = Peer::unauthenticated(([127, 0, 0, 1], 1).into(), Arc::default(), None);
        let mut record = Record::for_client_hello(&Arc::new(Metrics::new()), &peer.source, None);
        let initial = InitialState { client_hello: b"hello".to_vec(), loop_entry: None };
        let limits = &CopyLimits { account: &account, admission: &Admission::new(1000) };
        let (mut endpoint, moved) = (EndpointStream::Tcp(upstream), AtomicU64::new(0));
        server.write_all(b"answer").await.expect("an open connection");
        let client = (&downstream, &mut SharedSocket::from(&downstream));
        let copy = run(client, &mut endpoint, Some(Box::new(initial)), limits, &mut record, &moved);
        let ended = timeout(2 * ANSWER_DEADLINE, copy).await;
        assert!(ended.is_err(), "{ended:?}");
    }
}
