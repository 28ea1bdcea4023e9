//! Probes of gateways without connections, so that each has a state before its first tunnel.
//!
//! A probe is an attempt to connect as those of tunnels, whose result changes the same health. It
//! may also open a tunnel without a byte. It ends its connection at once, and never closes those of
//! others to have room. One probe starts per second at most, whatever the number of gateways.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::limits::{self as ledger, Resource, Source};
use crate::reason::Reason;
use crate::snapshot::Reader;
use crate::status::ProbeResult;
use crate::tls::InboundTls;
use crate::wire::Via;

use super::connection::{self, CONNECT_DEADLINE, Slot};
use super::gateway::GatewayConnections;
use super::request::{self, Refused, Request};
use super::sources::Replacement;
use super::{AddressFilter, Failure, Pool, Target};

/// Least pause between the starts of two probes, and the largest addition to it.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_JITTER_MILLIS: u64 = 250;
/// Deadline for the end of the tunnel of a probe, and for that of its connection.
const CLOSE_DEADLINE: Duration = Duration::from_secs(1);
/// Room of [`reach`], which needs two places.
const REACH_ROOM: usize = 16;

/// Probes the gateways of the current snapshot until a drain begins. `settings` returns the current
/// time between two probes of a gateway, or `None` for no probes, and the authority of their
/// CONNECT, if there is one. `count` gets each result.
pub async fn run(
    pool: Pool,
    settings: impl Fn() -> Option<(Duration, Option<String>)>,
    count: impl Fn(ProbeResult) + Clone + Send + 'static,
) {
    let drain = pool.context().lifecycle.drain_scope();
    loop {
        let pause = PAUSE + Duration::from_millis(fastrand::u64(..=PAUSE_JITTER_MILLIS));
        tokio::select! {
            () = sleep(pause) => {}
            () = drain.draining() => return,
        }
        let Some((interval, authority)) = settings() else { continue };
        let Some(next) = pool.next_to_probe(interval) else { continue };
        let (pool, count) = (pool.clone(), count.clone());
        // A task that nothing ends, because the gateway counts it as an attempt.
        tokio::spawn(async move {
            if let Some(result) = next.probe(&pool, authority).await {
                count(result);
            }
        });
    }
}

#[derive(Debug)]
pub struct Reached {
    pub identity: Arc<str>,
    /// First expiry in its chain.
    pub not_after: SystemTime,
}

/// Connects to a gateway as a tunnel does, and ends the connection once it is usable.
///
/// # Errors
/// The gateway cannot be reached, is another one, or rejects our certificate.
pub async fn reach(
    target: &Target,
    tls: &InboundTls,
    from: (&Reader, &AddressFilter),
) -> Result<Reached, Failure> {
    let source = Source::cluster(&Arc::from(""));
    let room = ledger::Pool::new(Resource::GatewayConnections, REACH_ROOM);
    let charges = [(); 2].map(|()| room.account(&source).take(1));
    let [Ok(place), Ok(descriptor)] = charges else {
        return Err(Failure::new(Reason::Overloaded, "no room for a connection"));
    };
    let (connection, _) =
        connection::open((target, Arc::default()), tls, from, [place, descriptor]).await?;
    let peer = &connection.state.peer;
    Ok(Reached { identity: Arc::clone(&peer.identity.uri), not_after: peer.not_after() })
}

impl Pool {
    /// Returns the gateway whose probe is due for longest, and sets the time of its next one. None
    /// without a certificate.
    pub(super) fn next_to_probe(&self, interval: Duration) -> Option<Arc<GatewayConnections>> {
        let context = self.context();
        context.tls.outbound()?;
        let (snapshot, now) = (context.reader.load(), Instant::now());
        let used = snapshot.remote_gateways();
        let used = used.filter(|(address, gateway)| snapshot.is_gateway_used(gateway, *address));
        let due = used.filter_map(|(address, gateway)| {
            let target = Target { address, gateway };
            let due = match self.known(&target) {
                Some(known) => known.probe_due(now, interval)?,
                None => None,
            };
            // Replicas that start at once probe in different orders.
            Some(((due, fastrand::u32(..)), target))
        });
        let (_, target) = due.min_by_key(|(due, _)| *due)?;
        let next = self.gateway(&target);
        let varied = interval.mul_f64(0.9 + 0.2 * fastrand::f64());
        let mut connections = next.connections.lock();
        connections.probe_at = Some(now + varied);
        connections.probe_interval = interval;
        drop(connections);
        Some(next)
    }
}

impl GatewayConnections {
    /// Returns the time at which a probe was due, `Some(None)` for the first one. None is due while
    /// the gateway is ejected, or while a connection or an attempt shows its state. An interval
    /// that has become shorter applies at once.
    fn probe_due(&self, now: Instant, interval: Duration) -> Option<Option<Instant>> {
        let connections = self.connections.lock();
        let is_shown = connections.attempts > 0
            || connections.health.is_ejected(now)
            || connections.open().any(|one| !one.state.is_unusable());
        let at = connections.probe_at;
        let is_due = at.is_none_or(|at| at <= now || at - now > interval.mul_f64(1.1));
        (is_due && !is_shown).then_some(at)
    }

    /// Probes the gateway, charged to the own identity. None if a tunnel tries it meanwhile.
    pub(super) async fn probe(
        self: Arc<Self>,
        pool: &Pool,
        authority: Option<String>,
    ) -> Option<ProbeResult> {
        let context = pool.context();
        let identity = context.tls.outbound()?.identity.clone();
        let cluster = context.reader.load().balancing.position.cluster.clone();
        let source = Source::cluster(&cluster).identity(&identity);
        let charges = [&self.room, &context.descriptors].map(|pool| pool.account(&source).take(1));
        let [Ok(room), Ok(descriptor)] = charges else { return Some(ProbeResult::Skipped) };
        {
            let mut connections = self.connections.lock();
            if connections.attempts > 0 {
                return None;
            }
            connections.attempts += 1;
        }
        let (gateway, inputs, started) = (Arc::clone(&self), context.clone(), Instant::now());
        let open = async move {
            let of = (&gateway.target, Arc::clone(&gateway.rtt));
            let reader = (&inputs.reader, &inputs.filter);
            connection::open(of, &inputs.tls, reader, [room, descriptor]).await
        };
        let (connection, driver) = match self.run_attempt(open, started).await {
            Ok(opened) => opened,
            Err(failure) => return Some(self.note_failed_probe(failure, started)),
        };
        let request = authority.map(|authority| {
            let own = pool.own_hash(&context.reader.load());
            let via = own.and_then(|own| Via::default().with(own));
            Request::new(authority, &via.unwrap_or_default())
        });
        let (drain, mut running) = (context.lifecycle.drain_scope(), JoinSet::new());
        running.spawn(async move { driver.run(&drain, || (), || ()).await });
        let result = match connection.try_take() {
            Some(slot) => self.ask(slot, request, started).await,
            None => {
                let what = format!("{}: grants no stream", self.target.address);
                self.note_failed_probe(Failure::new(Reason::RemoteBusy, what), started)
            }
        };
        connection.state.retire();
        drop(connection);
        let _ = timeout(CLOSE_DEADLINE, running.join_next()).await;
        Some(result)
    }

    /// Asks for the tunnel of a probe, if there is one, and notes the result. Any answer but 200
    /// ejects the gateway, also one that concerns the service alone: the operator has named what a
    /// gateway must serve, and Envoy's health checks fail by any other status too.
    async fn ask(&self, slot: Slot, request: Option<Request>, started: Instant) -> ProbeResult {
        let (opened, is_asked) = (slot.state().epoch, request.is_some());
        if is_asked {
            // It can be connected to: tunnels do not wait for the answer to this CONNECT.
            self.connections.lock().replacement = Replacement::default();
        }
        if let Some(request) = request
            && let Err(failure) = connect(slot, &request).await
        {
            let place = format!("{}: CONNECT to {}", self.target.address, request.authority());
            self.note_failed_probe(failure.at(place), started);
            self.eject();
            return ProbeResult::Failed;
        }
        let mut connections = self.connections.lock();
        connections.attempts -= 1;
        connections.probed(opened, is_asked);
        ProbeResult::Healthy
    }

    /// Notes a probe that failed. Only a failure of the gateway ejects it, as for tunnels. A
    /// certificate that is rejected may be rejected by all gateways, and none is ejected for it
    /// before a tunnel needs one.
    pub(super) fn note_failed_probe(&self, failure: Failure, started: Instant) -> ProbeResult {
        let mut connections = self.connections.lock();
        connections.attempts -= 1;
        let failure = connections.judge(failure, started);
        connections.note_cause(&failure, started);
        drop(connections);
        if !failure.is_of_gateway() {
            return ProbeResult::Skipped;
        }
        if failure.reason != Reason::PeerRejectedUs {
            self.eject();
        }
        ProbeResult::Failed
    }
}

/// Opens a tunnel, and closes it without a byte.
async fn connect(slot: Slot, request: &Request) -> Result<(), Failure> {
    match request::send(slot, request, Instant::now() + CONNECT_DEADLINE).await {
        Ok((mut stream, _)) => {
            if stream.shut_down().is_ok() {
                stream.deliver(Instant::now() + CLOSE_DEADLINE).await;
            }
            Ok(())
        }
        Err(
            Refused::Unprocessed(failure)
            | Refused::Silent(failure)
            | Refused::Unanswered(failure)
            | Refused::Broken(failure)
            | Refused::Processed(failure)
            | Refused::Unsent(failure),
        ) => Err(failure),
    }
}
