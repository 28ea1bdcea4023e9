//! Connections to one gateway, and its ejection.
//!
//! Each source has connections of its own, so that none can end or fill those of others. The health
//! of the gateway, and the number of attempts to connect, are common to all.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{debug, info};

use crate::lifecycle::Lifecycle;
use crate::limits::turns::{self, Work};
use crate::limits::{self, LimitReached, OwnedPool, Resource, Source};
use crate::reason::Reason;
#[cfg(test)]
use crate::snapshot::EndpointState;
use crate::snapshot::{FACTOR_ONE, Reader};
use crate::status::GatewayRow;
use crate::tls::InboundTls;

use super::connection::{self, CONNECT_DEADLINE, Connection, Slot};
use super::rtt::MinRtt;
use super::sources::{Connections, Loss, PLACES_MAX};
use super::{AddressFilter, Failure, OpenError, Target};

/// Limit of connections to one gateway, of up to 24 KiB each without tunnels. One cluster may have
/// 1,500 sources.
pub(super) const CONNECTIONS_MAX: usize = 2048;
/// Limit of attempts to connect to one gateway at once. Others wait for their turn.
const ATTEMPTS_MAX: usize = 32;
/// Limit of a tunnel's wait for a new connection, which each connection that is opened extends.
/// Three of them fit into the time that a tunnel has for all endpoints, so that a network whose
/// gateways are silent does not use it up.
pub(crate) const CONNECTION_WAIT_MAX: Duration = Duration::from_secs(3);
/// Limit of a tunnel's wait for a place while the limit of connections is reached. Another gateway
/// may have one.
const ROOM_WAIT_MAX: Duration = Duration::from_secs(1);
/// Pause after which a tunnel that cannot start an attempt looks again.
const ROOM_PAUSE: Duration = Duration::from_millis(100);
/// Time for which the loss of a connection by one source counts, until another source loses one.
const LOSS_TIME: Duration = Duration::from_secs(60);
/// The same for a CONNECT that was not answered. A gateway may need as long to find out that all
/// endpoints of a service are dead.
pub(super) const SILENCE_TIME: Duration = Duration::from_secs(10);
/// Time for which a failure of the gateway proves that it can be ejected.
const PROOF_TIME: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct GatewayConnections {
    pub(super) target: Target,
    /// Least round trip time, of all connections.
    pub(super) rtt: Arc<Mutex<MinRtt>>,
    /// Factor of its weights, in units of [`FACTOR_ONE`].
    pub(super) weight_factor: AtomicU32,
    /// Tunnels of each source.
    places: Arc<limits::Pool>,
    /// Connections of each source.
    pub(super) room: Arc<limits::Pool>,
    /// Attempts to connect that may run.
    turns: Semaphore,
    pub(super) connections: Mutex<Connections>,
}

/// Inputs of a new connection.
#[derive(Clone, Debug)]
pub(super) struct Context {
    pub(super) tls: Arc<InboundTls>,
    pub(super) reader: Reader,
    /// Check of addresses before they are dialled.
    pub(super) filter: AddressFilter,
    /// Drain that waits for the connections.
    pub(super) lifecycle: Lifecycle,
    pub(super) descriptors: Arc<limits::Pool>,
}

type Opened = Result<(Arc<Connection>, connection::Driver), Failure>;

/// Result of a look for a place.
enum Picked {
    Slot(Slot),
    Wait(Wait),
}

struct Wait {
    result: watch::Receiver<Option<Failure>>,
    /// Limit of the wait.
    end: Instant,
    /// Cause for which no attempt of the source runs.
    blocked: Option<Blocked>,
}

/// Cause for which a source starts no attempt to connect.
enum Blocked {
    /// Another source tries whether the gateway has recovered.
    Tried,
    /// The limit of connections is reached.
    Full(LimitReached),
}

struct Waiter<'a>(&'a GatewayConnections, &'a Source);

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut connections = self.0.connections.lock();
        connections.waiters -= 1;
        connections.of(self.1).waiters -= 1;
        connections.prune(self.1);
    }
}

/// Runs a connection of a source until it ends.
async fn drive(
    gateway: Weak<GatewayConnections>,
    source: Source,
    context: Context,
    driver: connection::Driver,
) {
    turns::set_work(Work::Gateway);
    let drain = context.lifecycle.drain_scope();
    let forget = || {
        if let Some(gateway) = gateway.upgrade() {
            gateway.forget(&source, None);
        }
    };
    let replace = || {
        if let Some(gateway) = gateway.upgrade().filter(|_| !drain.is_draining()) {
            gateway.replace(&source, &context);
        }
    };
    let error = driver.run(&drain, forget, replace).await;
    if let Some(gateway) = gateway.upgrade() {
        let address = gateway.target.address;
        debug!(%address, error, "connection to a gateway of another network ended");
        gateway.forget(&source, Some(error));
    }
}

impl GatewayConnections {
    pub(super) fn new(target: Target) -> Self {
        Self {
            target,
            rtt: Arc::default(),
            weight_factor: FACTOR_ONE.into(),
            places: limits::Pool::new(Resource::GatewayTunnels, PLACES_MAX),
            room: limits::Pool::new(Resource::GatewayConnections, CONNECTIONS_MAX),
            turns: Semaphore::new(ATTEMPTS_MAX),
            connections: Mutex::default(),
        }
    }

    pub(super) fn pools(&self) -> [OwnedPool; 2] {
        [&self.places, &self.room]
            .map(|pool| OwnedPool::new(pool, Some(self.target.address.to_string())))
    }

    fn failure(&self, reason: Reason, why: &str) -> Failure {
        Failure::new(reason, why).at(self.target.address)
    }

    /// Takes a place on a connection of the source, and opens one if there is none.
    pub(super) async fn take(
        self: &Arc<Self>,
        source: &Source,
        context: &Context,
        deadline: Instant,
    ) -> Result<Slot, Failure> {
        let charge = self.places.account(source).take(1);
        let charge = charge.map_err(|full| self.failure(Reason::RemoteBusy, &full.to_string()))?;
        let (since, mut failure) = (Instant::now(), None);
        loop {
            let Wait { mut result, end, blocked } =
                match self.pick((source, context), (since, failure))? {
                    Picked::Slot(slot) => return Ok(slot.charge(charge)),
                    Picked::Wait(wait) => wait,
                };
            let _waiter = Waiter(self, source);
            let (end, now) = (end.min(deadline), Instant::now());
            let next = match blocked {
                Some(_) => end.min(now + ROOM_PAUSE),
                None => end,
            };
            failure = match timeout_at(next, result.changed()).await {
                Ok(_) => result.borrow().clone(),
                Err(_) if Instant::now() < end => None,
                Err(_) => Some(self.missed(blocked, (end < deadline).then_some(since))),
            };
        }
    }

    /// Returns the failure of a tunnel that has waited in vain. If its own deadline was not too
    /// short, and no connection was opened since, it proves a failure of the gateway.
    fn missed(&self, blocked: Option<Blocked>, since: Option<Instant>) -> Failure {
        if let Some(Blocked::Full(full)) = blocked {
            let reason = match full {
                LimitReached::Full(Resource::Descriptors) => Reason::Overloaded,
                LimitReached::Share(Resource::Descriptors) => Reason::OverShare,
                _ => Reason::RemoteBusy,
            };
            return self.failure(reason, &full.to_string());
        }
        if let Some(since) = since {
            let mut connections = self.connections.lock();
            if connections.opened_at.is_none_or(|at| at < since) {
                connections.proved_at = Some(Instant::now());
            }
        }
        self.failure(Reason::GatewayUnreachable, "no connection in time")
    }

    /// Takes a place, or counts one more waiter. A tunnel that has waited since a time in vain
    /// fails if there is still no place.
    fn pick(
        self: &Arc<Self>,
        (source, context): (&Source, &Context),
        (since, failure): (Instant, Option<Failure>),
    ) -> Result<Picked, Failure> {
        let tls = context.tls.outbound();
        let snapshot = context.reader.load();
        let mut connections = self.connections.lock();
        let own = connections.of(source);
        own.retire_unverified(&self.target, &snapshot);
        if let Some(slot) = own.take(tls.as_ref()) {
            // A tunnel never waits for the replacement of a connection that still serves.
            let is_alone = own.attempts == 0;
            if slot.state().is_aged(tls.as_ref()) && is_alone && connections.replacement.is_due() {
                let _ = self.connect(&mut connections, (source, context));
            }
            return Ok(Picked::Slot(slot));
        }
        let wait = match failure {
            Some(failure) => {
                connections.last_error.clone_from(&failure.detail);
                Err(connections.judge(failure, since))
            }
            None => self.wait(&mut connections, (source, context), since),
        };
        if wait.is_err() {
            connections.prune(source);
        }
        wait.map(Picked::Wait)
    }

    /// Counts one more waiter, and starts an attempt to connect if it needs one.
    fn wait(
        self: &Arc<Self>,
        connections: &mut Connections,
        (source, context): (&Source, &Context),
        since: Instant,
    ) -> Result<Wait, Failure> {
        let useful = connections.useful_attempts(source);
        let useful = useful.map_err(|why| self.failure(Reason::RemoteBusy, &why))?;
        let mut blocked = None;
        if connections.of(source).attempts < useful {
            blocked = self.connect(connections, (source, context)).err();
        }
        let failed = connections.failure.as_ref().filter(|(at, _)| *at >= since);
        if let (Some(Blocked::Tried), Some((_, failure))) = (&blocked, failed) {
            return Err(connections.judge(failure.clone(), since));
        }
        connections.waiters += 1;
        let own = connections.of(source);
        own.waiters += 1;
        blocked = blocked.filter(|_| own.attempts == 0);
        let limit = match blocked {
            Some(Blocked::Full(_)) => ROOM_WAIT_MAX,
            _ => CONNECTION_WAIT_MAX,
        };
        Ok(Wait {
            result: own.result.subscribe(),
            end: own.opened_at.map_or(since, |at| at.max(since)) + limit,
            blocked,
        })
    }

    /// Starts a task that opens a connection for a source. A tunnel that no longer waits does not
    /// stop it. At a limit, connections that were idle for longest make room.
    fn connect(
        self: &Arc<Self>,
        connections: &mut Connections,
        (source, context): (&Source, &Context),
    ) -> Result<(), Blocked> {
        // After a failure, one attempt finds out whether the gateway has recovered.
        if connections.replacement.next_attempt.is_some() && connections.attempts > 0 {
            return Err(Blocked::Tried);
        }
        let mut charge = |pool| connections.charge(pool, source).map_err(Blocked::Full);
        let charges = [charge(&self.room)?, charge(&context.descriptors)?];
        let (gateway, inputs) = (Arc::clone(self), context.clone());
        self.attempt(connections, (source, context), async move {
            turns::set_work(Work::Gateway);
            let of = (&gateway.target, Arc::clone(&gateway.rtt));
            let reader = (&inputs.reader, &inputs.filter);
            connection::open(of, &inputs.tls, reader, charges).await
        });
        Ok(())
    }

    /// Counts an attempt to connect until it has succeeded, failed or panicked.
    fn attempt(
        self: &Arc<Self>,
        connections: &mut Connections,
        (source, context): (&Source, &Context),
        open: impl Future<Output = Opened> + Send + 'static,
    ) {
        connections.attempts += 1;
        connections.of(source).attempts += 1;
        let (gateway, context, started) = (Arc::clone(self), context.clone(), Instant::now());
        let (source, open) = (source.clone(), turns::of(source, open));
        tokio::spawn(async move {
            let opened = gateway.run_attempt(open, started).await;
            gateway.finish(opened, source, started, &context);
        });
    }

    /// Runs an attempt to connect, once fewer than [`ATTEMPTS_MAX`] others run.
    pub(super) async fn run_attempt(
        &self,
        open: impl Future<Output = Opened> + Send + 'static,
        queued: Instant,
    ) -> Opened {
        let Ok(Ok(_turn)) = timeout(CONNECT_DEADLINE, self.turns.acquire()).await else {
            let why = "too many connections are being opened";
            return Err(self.failure(Reason::RemoteBusy, why));
        };
        let failure = self.connections.lock().failure.clone();
        if let Some((_, failure)) = failure.filter(|(at, _)| *at > queued) {
            return Err(failure);
        }
        // A task of its own, whose panic ends the attempt and not this task.
        tokio::spawn(open).await.unwrap_or_else(|panicked| {
            Err(self.failure(Reason::GatewayUnreachable, &panicked.to_string()))
        })
    }

    /// Adds a new connection, which replaces those that are aged.
    fn finish(
        self: &Arc<Self>,
        opened: Opened,
        source: Source,
        started: Instant,
        context: &Context,
    ) {
        let mut connections = self.connections.lock();
        connections.attempts -= 1;
        connections.of(&source).attempts -= 1;
        let (connection, driver) = match opened {
            Ok(opened) => opened,
            Err(failure) => {
                connections.note_failure(&source, failure, started);
                return connections.prune(&source);
            }
        };
        connections.add(&source, connection);
        drop(connections);
        // It may still send bytes of tunnels that have ended.
        let running = drive(Arc::downgrade(self), source.clone(), context.clone(), driver);
        context.lifecycle.spawn_closing(turns::of(&source, running));
    }

    /// Notes that a CONNECT of a source, or its connection, has ended by an error before the
    /// answer. The source itself may be the cause, unless another one has lost a CONNECT too, and
    /// none was answered meanwhile.
    pub(super) fn note_loss(&self, lost: (&Source, &str), failure: Failure) -> OpenError {
        self.lose(lost, failure, |before, now| {
            before.source != now.source && now.at - before.at < LOSS_TIME
        })
    }

    /// Notes that a CONNECT was not answered in time. Its source or the endpoints of its service
    /// may be the cause, unless another source has just waited for another service in vain too, and
    /// none was answered meanwhile.
    pub(super) fn note_silence(&self, lost: (&Source, &str), failure: Failure) -> OpenError {
        self.lose(lost, failure, |before, now| {
            let is_other = before.source != now.source && before.authority != now.authority;
            is_other && now.at - before.at < SILENCE_TIME
        })
    }

    /// Notes a CONNECT without an answer. The gateway is the cause if `proves` it by the last loss,
    /// or if it has answered none since it was ejected.
    fn lose(
        &self,
        (source, authority): (&Source, &str),
        failure: Failure,
        proves: impl Fn(&Loss, &Loss) -> bool,
    ) -> OpenError {
        let mut connections = self.connections.lock();
        let at = Instant::now();
        connections.last_error.clone_from(&failure.detail);
        let loss = Loss { source: source.verified().clone(), authority: authority.to_owned(), at };
        let is_proved = connections.lost.as_ref().is_some_and(|before| proves(before, &loss));
        connections.lost = Some(loss);
        if is_proved || connections.is_mute {
            connections.proved_at = Some(at);
            return OpenError::Gateway(failure);
        }
        OpenError::Tunnel(failure)
    }

    /// Returns a failure with its cause: the gateway only if the last attempt to connect has
    /// failed, or if it has recently failed otherwise, which a source alone cannot cause.
    pub(super) fn classify(&self, failure: Failure) -> OpenError {
        let connections = self.connections.lock();
        let proved = connections.proved_at;
        let has_failed = connections.replacement.next_attempt.is_some()
            || proved.is_some_and(|at| at.elapsed() < PROOF_TIME);
        if failure.is_of_gateway() && has_failed {
            return OpenError::Gateway(failure);
        }
        OpenError::Tunnel(failure)
    }

    /// Notes a failure that the gateway alone can have caused.
    pub(super) fn note_proof(&self) {
        let mut connections = self.connections.lock();
        (connections.proved_at, connections.was_silent) = (Some(Instant::now()), true);
    }

    /// Opens a connection in place of a retired one, so that the next tunnel need not wait for it.
    fn replace(self: &Arc<Self>, source: &Source, context: &Context) {
        let mut connections = self.connections.lock();
        let own = connections.of(source);
        own.open.retain(|one| !one.state.is_retired());
        let is_alone = own.open.is_empty() && own.attempts == 0;
        if is_alone && connections.replacement.is_due() {
            let _ = self.connect(&mut connections, (source, context));
        }
        connections.prune(source);
    }

    /// Forgets retired connections of a source, with the cause of the last end.
    fn forget(&self, source: &Source, why: Option<String>) {
        let mut connections = self.connections.lock();
        let own = connections.of(source);
        own.open.retain(|one| !one.state.is_retired());
        connections.prune(source);
        if let Some(why) = why {
            let is_shown = connections.healthy_until.is_some() && why == connection::CLOSED;
            connections.healthy_until = is_shown.then(|| connections.confirmed(Instant::now()));
            connections.last_error = why;
        }
    }

    /// Returns true if the gateway is ejected, or if a tunnel tries it again after its ejection.
    pub(super) fn is_ejected(&self) -> bool {
        let connections = self.connections.lock();
        let is_tried = connections.health.was_ejected() && connections.attempts > 0;
        is_tried || connections.health.is_ejected(Instant::now())
    }

    /// Starts or ends an attempt to connect that opens no socket.
    #[cfg(test)]
    pub(super) fn simulate_attempt(&self, is_running: bool) {
        self.connections.lock().attempts = usize::from(is_running);
    }

    #[cfg(test)]
    pub(super) fn simulate_limits(&self, places: usize, connections: usize) {
        self.places.set_max(places);
        self.room.set_max(connections);
    }

    /// Starts an attempt to connect that panics.
    #[cfg(test)]
    pub(super) fn simulate_panic(self: &Arc<Self>, source: &Source, context: &Context) {
        let mut connections = self.connections.lock();
        let panic = async { panic!("simulated") };
        self.attempt(&mut connections, (source, context), panic);
    }

    /// Forgets failures, as after a successful attempt.
    #[cfg(test)]
    pub(super) fn simulate_connection(&self) {
        self.connections.lock().health = EndpointState::default();
    }

    /// Ejects the gateway: 5 s at first, doubling to 5 min.
    pub(super) fn eject(&self) {
        let mut connections = self.connections.lock();
        let now = Instant::now();
        if !connections.health.is_ejected(now) {
            let time = connections.health.eject(now);
            connections.failed_at = Some(now);
            connections.is_mute = true;
            connections.ejections += 1;
            (connections.probe_at, connections.healthy_until) = (Some(now + time), None);
            let (address, network) = (self.target.address, &*self.target.gateway.network);
            let error = &*connections.last_error;
            info!(%address, network, ?time, error, "gateway of another network ejected");
        }
    }

    /// Returns true if it has no state to keep.
    pub(super) fn is_unused(&self) -> bool {
        let connections = self.connections.lock();
        connections.by_source.is_empty()
            && connections.attempts == 0
            && !connections.health.is_ejected(Instant::now())
    }

    /// Returns the least round trip time, if it has a usable connection.
    pub(super) fn rtt(&self) -> Option<Duration> {
        let connections = self.connections.lock();
        let is_usable = connections.open().any(|one| !one.state.is_unusable());
        is_usable.then(|| self.rtt.lock().least())
    }

    /// Returns the factor of its weights, in units of [`FACTOR_ONE`].
    pub(super) fn weight_factor(&self) -> u32 {
        self.weight_factor.load(Ordering::Relaxed)
    }

    pub(super) fn status(&self) -> GatewayRow {
        let connections = self.connections.lock();
        let newest = connections.open().max_by_key(|one| one.state.epoch);
        let newest = newest.map(|one| &one.state);
        let (now, healthy_until) = (Instant::now(), connections.healthy_until);
        let state = match (newest, connections.attempts) {
            _ if connections.health.is_ejected(now) => "ejected",
            (Some(state), _) if state.is_unusable() => "silent",
            (Some(_), _) => "ready",
            (None, 1..) => "connecting",
            (None, 0) if healthy_until.is_some_and(|until| now < until) => "healthy",
            // The last error was before the probe.
            (None, 0) if healthy_until.is_some() || connections.last_error.is_empty() => "idle",
            (None, 0) => "failed",
        };
        let sources = connections.by_source.values();
        let of = [&*self.target.gateway.network, &*self.target.gateway.cluster];
        let rtt = newest.map(|_| self.rtt.lock().least());
        let share = self.weight_factor() * 100 / FACTOR_ONE;
        GatewayRow {
            state: state.to_owned(),
            connections: connections.open().count(),
            sources: sources.filter(|own| !own.open.is_empty()).count(),
            tunnels: connections.open().map(|one| one.state.streams()).sum(),
            ejections: connections.ejections,
            error: connections.last_error.clone(),
            identity: newest.map(|state| Arc::clone(&state.peer.identity.uri)),
            expires: newest.map(|state| state.peer.not_after()),
            ..GatewayRow::new(self.target.address, of, rtt, share)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_future<A, B, C, D, F: Future>(_: impl Fn(A, B, C, D) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn the_task_of_an_idle_connection_stays_small() {
        // Excludes HTTP/2 and TLS, which are boxed once.
        let size = size_of_future(drive);
        assert!(size <= 2048, "{size}");
    }
}
