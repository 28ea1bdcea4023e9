//! Connections to one gateway, and its ejection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{debug, info};

use crate::lifecycle::Lifecycle;
use crate::reason::Reason;
use crate::snapshot::{EndpointState, FACTOR_ONE, Reader, Snapshot};
use crate::status::RemoteGatewayStatus;
use crate::tls::{InboundTls, OutboundTls};

use super::connection::{self, Connection, STREAMS_MAX, Slot};
use super::rtt::MinRtt;
use super::{AddressFilter, Failure, Target};

/// Limit of connections to one gateway: 6,400 tunnels with the limit of one connection.
const CONNECTIONS_MAX: usize = 64;
/// Limit of attempts to connect to one gateway at once.
const ATTEMPTS_MAX: usize = 8;
/// Limit of tunnels that wait for a new connection.
const WAITERS_MAX: usize = 1024;
/// Number of connections without an answer to a CONNECT after which attempts pause for
/// [`REPLACE_PAUSE`]: the gateway accepts connections and no tunnels.
const UNANSWERED_MAX: usize = 3;
/// Deadline for a new connection, from TCP to the answer to the first PING.
pub(crate) const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// Limit of a tunnel's wait for a new connection, which each connection that is opened extends.
/// Three of them fit into the time that a tunnel has for all endpoints, so that a network whose
/// gateways are silent does not use it up.
pub(crate) const CONNECTION_WAIT_MAX: Duration = Duration::from_secs(3);
/// Pause after the first failure to replace a connection that still serves. It doubles with each
/// further failure.
const REPLACE_PAUSE: Duration = Duration::from_secs(1);
const REPLACE_PAUSE_MAX: Duration = Duration::from_secs(60);

/// Gateway with its connections.
#[derive(Debug)]
pub(super) struct GatewayConnections {
    pub(super) target: Target,
    /// Least round trip time, of all connections.
    pub(super) rtt: Arc<Mutex<MinRtt>>,
    /// Factor of its weights, in units of [`FACTOR_ONE`].
    weight_factor: AtomicU32,
    connections: Mutex<Connections>,
}

#[derive(Debug, Default)]
struct Connections {
    open: Vec<Arc<Connection>>,
    /// Number of attempts to connect that are running.
    attempts: usize,
    /// Result of the last attempt, for the tunnels that wait. A failure is left out while others
    /// are running.
    result: watch::Sender<Option<Failure>>,
    waiters: usize,
    /// Time at which the last connection was opened.
    opened_at: Option<Instant>,
    /// Number of connections that were opened since the last answer to a CONNECT.
    unanswered: usize,
    replacement: Replacement,
    health: EndpointState,
    /// Start of the last attempt that failed, or time of a later ejection. Only connections that
    /// were opened afterwards prove that the gateway has recovered.
    failed_at: Option<Instant>,
    ejections: u64,
    last_error: String,
}

/// Back-off of attempts to replace a connection that still serves.
#[derive(Debug, Default)]
struct Replacement {
    /// Time of the next attempt; `None` if the last one succeeded.
    next_attempt: Option<Instant>,
    pause: Duration,
}

impl Replacement {
    fn is_due(&self) -> bool {
        self.next_attempt.is_none_or(|at| Instant::now() >= at)
    }

    fn back_off(&mut self) {
        self.pause = (2 * self.pause).clamp(REPLACE_PAUSE, REPLACE_PAUSE_MAX);
        self.next_attempt = Some(Instant::now() + self.pause);
    }
}

/// Inputs of a new connection.
#[derive(Clone, Debug)]
pub(super) struct Context {
    pub(super) tls: Arc<InboundTls>,
    pub(super) reader: Reader,
    /// Addresses that are not dialled.
    pub(super) denied: AddressFilter,
    /// Drain that waits for the connections.
    pub(super) lifecycle: Lifecycle,
}

/// Result of an attempt to connect.
type Opened = Result<(Arc<Connection>, connection::Driver), Failure>;

/// Tunnel that waits for a connection.
struct Waiter<'a>(&'a GatewayConnections);

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.connections.lock().waiters -= 1;
    }
}

impl GatewayConnections {
    pub(super) fn new(target: Target) -> Self {
        Self {
            target,
            rtt: Arc::default(),
            weight_factor: FACTOR_ONE.into(),
            connections: Mutex::default(),
        }
    }

    /// Takes a place on a connection, and opens one if there is none.
    pub(super) async fn take(
        self: &Arc<Self>,
        context: &Context,
        deadline: Instant,
    ) -> Result<Slot, Failure> {
        let (since, mut failure) = (Instant::now(), None);
        loop {
            let (mut result, _waiter) = match self.pick(context, (since, failure))? {
                Picked::Slot(slot) => return Ok(slot),
                Picked::Wait(result) => (result, Waiter(self)),
            };
            let end = deadline.min(Instant::now() + CONNECTION_WAIT_MAX);
            failure = match timeout_at(end, result.changed()).await {
                Ok(_) => result.borrow().clone(),
                Err(_) => {
                    let detail = format!("{}: no connection in time", self.target.address);
                    Some(Failure::new(Reason::GatewayUnreachable, detail))
                }
            };
        }
    }

    /// Takes a place, or counts one more waiter. A tunnel that has waited since a time in vain
    /// fails if there is still no place.
    fn pick(
        self: &Arc<Self>,
        context: &Context,
        (since, failure): (Instant, Option<Failure>),
    ) -> Result<Picked, Failure> {
        let tls = context.tls.outbound();
        let mut connections = self.connections.lock();
        connections.retire_unverified(&self.target, &context.reader.load());
        if let Some(slot) = connections.take(tls.as_ref()) {
            // A tunnel never waits for the replacement of a connection that still serves.
            let is_aged = slot.state().is_aged(tls.as_ref());
            if is_aged && connections.attempts == 0 && connections.replacement.is_due() {
                self.connect(&mut connections, context);
            }
            return Ok(Picked::Slot(slot));
        }
        if let Some(failure) = failure {
            connections.last_error.clone_from(&failure.detail);
            return Err(connections.judge(failure, since));
        }
        let attempts = connections.useful_attempts().map_err(|detail| {
            let detail = format!("{}: {detail}", self.target.address);
            Failure::new(Reason::RemoteBusy, detail)
        })?;
        if connections.attempts < attempts {
            self.connect(&mut connections, context);
        }
        connections.waiters += 1;
        Ok(Picked::Wait(connections.result.subscribe()))
    }

    /// Starts a task that opens a connection. A tunnel that no longer waits does not stop it.
    fn connect(self: &Arc<Self>, connections: &mut Connections, context: &Context) {
        let (gateway, inputs) = (Arc::clone(self), context.clone());
        self.attempt(connections, context, async move {
            let of = (&gateway.target, Arc::clone(&gateway.rtt));
            let reader = (&inputs.reader, &inputs.denied);
            connection::open(of, &inputs.tls, reader).await
        });
    }

    /// Counts an attempt to connect until it has succeeded, failed, panicked or taken too long.
    fn attempt(
        self: &Arc<Self>,
        connections: &mut Connections,
        context: &Context,
        open: impl Future<Output = Opened> + Send + 'static,
    ) {
        connections.attempts += 1;
        let (gateway, context, started) = (Arc::clone(self), context.clone(), Instant::now());
        tokio::spawn(async move {
            // A task of its own, whose panic ends the attempt and not this task.
            let open = tokio::spawn(timeout(CONNECT_DEADLINE, open));
            let fail = |why: &str| {
                let detail = format!("{}: {why}", gateway.target.address);
                Err(Failure::new(Reason::GatewayUnreachable, detail))
            };
            let opened = match open.await {
                Ok(Ok(opened)) => opened,
                Ok(Err(_)) => fail("no HBONE connection within 5 s"),
                Err(panicked) => fail(&panicked.to_string()),
            };
            gateway.finish(opened, started, &context);
        });
    }

    /// Adds a new connection, which replaces those that are aged.
    fn finish(self: &Arc<Self>, opened: Opened, started: Instant, context: &Context) {
        let mut connections = self.connections.lock();
        connections.attempts -= 1;
        let (connection, driver) = match opened {
            Ok(opened) => opened,
            Err(failure) => return connections.note_failure(failure, started),
        };
        connections.add(connection);
        drop(connections);
        let (gateway, context) = (Arc::downgrade(self), context.clone());
        let (lifecycle, drain) = (context.lifecycle.clone(), context.lifecycle.drain_scope());
        // It may still send bytes of tunnels that have ended.
        lifecycle.spawn_closing(async move {
            let forget = || {
                if let Some(gateway) = gateway.upgrade() {
                    gateway.forget(None);
                }
            };
            let replace = || {
                if let Some(gateway) = gateway.upgrade().filter(|_| !drain.is_draining()) {
                    gateway.replace(&context);
                }
            };
            let error = driver.run(&drain, forget, replace).await;
            if let Some(gateway) = gateway.upgrade() {
                let address = gateway.target.address;
                debug!(%address, error, "connection to a gateway of another network ended");
                gateway.forget(Some(error));
            }
        });
    }

    /// Notes the answer to a CONNECT on a connection that was opened at this time. Failures before
    /// are forgotten.
    pub(super) fn answered(&self, opened: Instant) {
        let mut connections = self.connections.lock();
        connections.unanswered = 0;
        if connections.failed_at.is_some_and(|at| at <= opened) {
            connections.failed_at = None;
            connections.health = EndpointState::new();
            connections.replacement = Replacement::default();
        }
    }

    /// Opens a connection in place of a retired one, so that the next tunnel need not wait for it.
    fn replace(self: &Arc<Self>, context: &Context) {
        let mut connections = self.connections.lock();
        connections.open.retain(|one| !one.state.is_retired());
        let is_alone = connections.open.is_empty() && connections.attempts == 0;
        if is_alone && connections.replacement.is_due() {
            self.connect(&mut connections, context);
        }
    }

    /// Forgets retired connections, with the cause of the last end.
    fn forget(&self, why: Option<String>) {
        let mut connections = self.connections.lock();
        connections.open.retain(|one| !one.state.is_retired());
        if let Some(why) = why {
            connections.last_error = why;
        }
    }

    /// Returns true if the last attempt to connect has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.connections.lock().replacement.next_attempt.is_some()
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

    /// Starts an attempt to connect that panics.
    #[cfg(test)]
    pub(super) fn simulate_panic(self: &Arc<Self>, context: &Context) {
        let mut connections = self.connections.lock();
        self.attempt(&mut connections, context, async { panic!("simulated") });
    }

    /// Forgets failures, as after a successful attempt.
    #[cfg(test)]
    pub(super) fn simulate_connection(&self) {
        self.connections.lock().health = EndpointState::new();
    }

    /// Ejects the gateway: 5 s at first, doubling to 5 min.
    pub(super) fn eject(&self) {
        let mut connections = self.connections.lock();
        let now = Instant::now();
        if !connections.health.is_ejected(now) {
            let time = connections.health.eject(now);
            connections.failed_at = Some(now);
            connections.ejections += 1;
            let (address, network) = (self.target.address, &*self.target.gateway.network);
            let error = &*connections.last_error;
            info!(%address, network, ?time, error, "gateway of another network ejected");
        }
    }

    /// Returns true if it has no state to keep.
    pub(super) fn is_unused(&self) -> bool {
        let connections = self.connections.lock();
        connections.open.is_empty()
            && connections.attempts == 0
            && !connections.health.is_ejected(Instant::now())
    }

    /// Returns the least round trip time, if it has a usable connection.
    pub(super) fn rtt(&self) -> Option<Duration> {
        let connections = self.connections.lock();
        let mut open = connections.open.iter();
        let is_usable = open.any(|one| !one.state.is_unusable());
        is_usable.then(|| self.rtt.lock().least())
    }

    /// Returns the factor of its weights, in units of [`FACTOR_ONE`].
    pub(super) fn weight_factor(&self) -> u32 {
        self.weight_factor.load(Ordering::Relaxed)
    }

    pub(super) fn set_weight_factor(&self, weight_factor: u32) {
        self.weight_factor.store(weight_factor, Ordering::Relaxed);
    }

    /// Returns the state for the status page.
    pub(super) fn status(&self) -> RemoteGatewayStatus {
        let connections = self.connections.lock();
        let newest = connections.open.last().map(|one| &one.state);
        let streams = connections.open.iter().map(|one| one.state.streams());
        let state = match (newest, connections.attempts) {
            _ if connections.health.is_ejected(Instant::now()) => "ejected",
            (Some(state), _) if state.is_unusable() => "silent",
            (Some(_), _) => "ready",
            (None, 1..) => "connecting",
            (None, 0) if connections.last_error.is_empty() => "idle",
            (None, 0) => "failed",
        };
        RemoteGatewayStatus {
            address: self.target.address,
            network: Arc::clone(&self.target.gateway.network),
            cluster: Arc::clone(&self.target.gateway.cluster),
            state,
            connections: connections.open.len(),
            streams: streams.sum(),
            rtt: newest.map(|_| self.rtt.lock().least()),
            share_percent: self.weight_factor() * 100 / FACTOR_ONE,
            ejections: connections.ejections,
            last_error: connections.last_error.clone(),
            identity: newest.map(|state| Arc::clone(&state.peer.identity.uri)),
            not_after: newest.map(|state| state.peer.not_after()),
        }
    }
}

/// Result of a look for a place.
enum Picked {
    Slot(Slot),
    Wait(watch::Receiver<Option<Failure>>),
}

impl Connections {
    /// Adds a new connection. It replaces those that are aged, or take no tunnels at all.
    fn add(&mut self, new: Arc<Connection>) {
        let tls = &new.state.tls;
        let is_used = |one: &Arc<Connection>| !one.state.is_aged(Some(tls)) && one.has_places();
        self.open.retain(is_used);
        self.open.push(new);
        self.opened_at = Some(Instant::now());
        self.unanswered += 1;
        self.result.send_replace(None);
    }

    /// Notes an attempt that failed.
    fn note_failure(&mut self, failure: Failure, started: Instant) {
        self.last_error.clone_from(&failure.detail);
        self.replacement.back_off();
        self.failed_at = self.failed_at.max(Some(started));
        if self.attempts == 0 {
            let failure = self.judge(failure, started);
            self.result.send_replace(Some(failure));
        }
    }

    /// Returns the failure of an attempt or a wait with its reason. If a connection was opened
    /// meanwhile, the gateway is not unreachable.
    fn judge(&self, failure: Failure, since: Instant) -> Failure {
        if self.opened_at.is_some_and(|at| at >= since) {
            return Failure::new(Reason::RemoteBusy, failure.detail);
        }
        failure
    }

    /// Returns the number of attempts that should run for one more waiter. After a failure it is
    /// one.
    ///
    /// # Errors
    /// The tunnel cannot wait.
    fn useful_attempts(&self) -> Result<usize, String> {
        if self.waiters >= WAITERS_MAX {
            return Err(format!("{WAITERS_MAX} tunnels wait for a connection"));
        }
        let room = CONNECTIONS_MAX.saturating_sub(self.open.len());
        if room == 0 && self.attempts == 0 {
            return Err(format!(
                "all tunnels of {CONNECTIONS_MAX} connections are in use"
            ));
        }
        let is_recent = |at: Instant| at.elapsed() < REPLACE_PAUSE;
        let is_useless = self.unanswered >= UNANSWERED_MAX
            && self.opened_at.is_some_and(is_recent)
            && self.open.iter().all(|one| one.state.streams() == 0);
        if is_useless && self.attempts == 0 {
            return Err("its connections take no tunnels".to_owned());
        }
        let has_failed = self.replacement.next_attempt.is_some();
        let most = if has_failed { 1 } else { ATTEMPTS_MAX };
        let useful = (self.waiters + 1).div_ceil(STREAMS_MAX).min(most);
        Ok(if is_useless { 0 } else { useful.min(room) })
    }

    /// Forgets retired connections, and retires those whose certificate has expired or no longer
    /// proves the gateway.
    fn retire_unverified(&mut self, target: &Target, snapshot: &Snapshot) {
        self.open.retain(|one| {
            let peer = &one.state.peer;
            let checked = || peer.server().check_gateway(&target.gateway, snapshot);
            if peer.not_after() <= SystemTime::now() || checked().is_err() {
                one.state.retire();
            }
            !one.state.is_retired()
        });
    }

    /// Takes a place, on an aged connection only if no other has one.
    fn take(&self, tls: Option<&Arc<OutboundTls>>) -> Option<Slot> {
        let (aged, fresh): (Vec<_>, Vec<_>) =
            self.open.iter().partition(|one| one.state.is_aged(tls));
        fresh.into_iter().chain(aged).find_map(Connection::try_take)
    }
}
