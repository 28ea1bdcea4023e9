//! HBONE connection in bounded turns: it reads the peer, forwards DATA, reads the endpoints and
//! sends.
//!
//! The connection owns its socket and its open tunnels, so bytes cross from one to the other
//! without a wake-up. Each turn is bounded, and other tasks of the worker run in between.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustls::AlertDescription;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use super::downstream::{ConnectionEnd, Downstream, Pace};
use super::limit_timer::LimitTimer;
use super::open::{End, Open};
use super::tunnel_copy::{Step, TunnelCopy};
use crate::datapath::handshake::Transport;
use crate::datapath::io::buffer::BUFFER_BYTES;
use crate::datapath::limits::budget::{BufferAccount, BufferSource};
use crate::limits::turns::{self, ClusterTime};
use crate::reason::Reason;

use super::setup::{Command, ENTRIES_KEPT, Mailbox, Setup, SetupGuard, TunnelWaker};
use crate::datapath::http2::input::Input;
use crate::datapath::http2::request::Request;
use crate::datapath::http2::server::Event;
use crate::datapath::http2::streams::StreamKey;

/// Limit of rounds in one turn, after which other tasks of the worker run. The work of received
/// frames limits a turn, too: [`FrameMeter`](crate::datapath::http2::meter::FrameMeter).
const ROUNDS: usize = 4;
/// Limit of tunnels that are served between two reads of the peer.
const TUNNELS_PER_ROUND: usize = 16;

/// New request for the connection's driver.
#[derive(Debug)]
pub struct NewRequest {
    pub key: StreamKey,
    pub request: Request,
    /// State that the stream's task shares with the connection.
    pub setup: Arc<Setup>,
    /// Price of its header block.
    pub price: u64,
}

#[derive(Debug)]
enum StreamState {
    /// A task opens it.
    Setup(SetupGuard),
    Open(Box<TunnelCopy>),
}

/// Connection with its socket, streams and tunnels.
#[derive(Debug)]
pub struct HboneConnection<S> {
    pub(super) socket: S,
    pub(super) input: Input,
    /// Rest of the record that was opened last: plaintext that the next turn receives.
    pub(super) unread: Range<usize>,
    /// HTTP/2 state, send buffer and record protection.
    pub downstream: Downstream,
    /// Commands and wake-ups.
    pub mailbox: Arc<Mailbox>,
    /// By the slot of the stream.
    tunnels: Vec<Option<StreamState>>,
    ready: VecDeque<StreamKey>,
    /// Number of tunnels at the front of `ready` that wait for nothing but room in the output.
    blocked: usize,
    /// Empty list, of which only the memory is kept.
    woken: Vec<StreamKey>,
    pub(super) events: Vec<Event>,
    requests: Vec<NewRequest>,
    /// Generation of the snapshot that the tunnels were last checked against.
    pub generation: u64,
    /// Source of the peer, for accounts.
    source: BufferSource,
    /// Account of the buffers that the peer makes the connection hold, created when it first does.
    held: Option<Arc<BufferAccount>>,
    /// Bytes on that account.
    charged: usize,
    limit_timer: LimitTimer,
    /// Cluster of the peer, if it has a limit of bytes, and the end of a pause.
    cluster: Option<Arc<ClusterTime>>,
    pause: LimitTimer,
    /// Records may be left that were received and not processed. Those that came with the handshake
    /// are.
    pub(super) has_unread: bool,
    /// The peer has sent close_notify or FIN.
    pub(super) is_read_closed: bool,
}

impl<S: AsyncRead + AsyncWrite + Unpin> HboneConnection<S> {
    /// Creates a connection after its handshake. `cluster` is that of its peer, if it has a limit
    /// of bytes.
    pub fn new(
        transport: Transport<S>,
        source: BufferSource,
        cluster: Option<Arc<ClusterTime>>,
    ) -> Self {
        let Transport { socket, layer, received } = transport;
        let mut connection = Self {
            socket,
            input: Input::with(&received),
            unread: 0..0,
            downstream: Downstream::new(layer),
            mailbox: Arc::default(),
            tunnels: Vec::new(),
            ready: VecDeque::new(),
            blocked: 0,
            woken: Vec::new(),
            events: Vec::new(),
            requests: Vec::new(),
            generation: u64::MAX,
            source,
            held: None,
            charged: 0,
            limit_timer: LimitTimer::default(),
            cluster,
            pause: LimitTimer::default(),
            has_unread: true,
            is_read_closed: false,
        };
        // A new connection has no turn ahead of those that pause.
        connection.charge_cluster(0);
        connection
    }

    /// Runs one turn. Completes when the connection has ended. [`Self::take_requests`]
    /// follows.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<ConnectionEnd> {
        self.mailbox.register(cx);
        self.downstream.server.meter.begin_turn(turns::is_shared());
        match self.poll_rounds(cx) {
            Ok(true) => turns::yield_turn(cx),
            Ok(false) => {}
            Err(end) => {
                self.receive_rest(cx, &end);
                return Poll::Ready(end);
            }
        }
        if self.limit_timer.poll(cx) {
            self.check_limits();
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// Runs the rounds of one turn. Returns true if there may be more to do at once.
    fn poll_rounds(&mut self, cx: &mut Context<'_>) -> Result<bool, ConnectionEnd> {
        let mut has_more = Ok(true);
        self.poll_pause(cx);
        for _ in 0..ROUNDS {
            has_more = self.poll_round(cx);
            let is_over = self.downstream.server.meter.is_turn_over() || turns::is_over();
            if is_over || !matches!(has_more, Ok(true)) {
                break;
            }
        }
        let moved = std::mem::take(&mut self.downstream.moved);
        if moved > 0 {
            self.charge_cluster(moved);
        }
        let has_more = has_more?;
        self.charge_buffers(cx)?;
        Ok(self.poll_pause(cx) || has_more)
    }

    /// Registers for the end of a pause. Returns true if it has just ended: the tunnels may have
    /// been woken meanwhile.
    fn poll_pause(&mut self, cx: &mut Context<'_>) -> bool {
        let has_ended = self.pause.poll(cx);
        if has_ended {
            let mut keys = self.downstream.server.keys();
            // The first ones may use up the turn before the next pause.
            let first = fastrand::usize(..=keys.len());
            keys.rotate_left(first);
            for key in keys {
                self.downstream.server.release(key, 0);
                self.enqueue(key);
            }
        }
        self.downstream.pace = match &self.cluster {
            None => Pace::Free,
            Some(_) if self.pause.is_set() => Pace::Paused,
            Some(_) => Pace::Limited,
        };
        has_ended
    }

    /// Charges bytes to the cluster of the peer. A cluster over its limit is delayed: the tunnels
    /// of this connection pause.
    fn charge_cluster(&mut self, bytes: usize) {
        let Some(cluster) = &self.cluster else { return };
        let now = Instant::now();
        let pause = cluster.charge_bytes(bytes, now.into_std());
        if pause.is_zero() {
            return;
        }
        if !self.pause.is_set() {
            cluster.add_paused(pause);
        }
        self.pause.set(Some(now + pause));
    }

    /// Runs one round. Returns true if there may be more to do at once.
    fn poll_round(&mut self, cx: &mut Context<'_>) -> Result<bool, ConnectionEnd> {
        let mut has_commands = false;
        while !has_commands && let Some(command) = self.mailbox.take_command() {
            self.run_command(command);
            has_commands = turns::is_over();
        }
        let skips_read = self.downstream.is_stalled();
        let has_read = !skips_read && self.poll_read(cx)?;
        self.downstream.write_control()?;
        self.take_woken();
        for _ in 0..TUNNELS_PER_ROUND {
            let Some(key) = self.downstream.server.take_writable() else {
                break;
            };
            self.enqueue(key);
        }
        for _ in 0..TUNNELS_PER_ROUND.min(self.ready.len()) {
            if !self.downstream.output.has_room()
                && !self.downstream.poll_flush(cx, &mut self.socket)?
            {
                break;
            }
            if let Some(key) = self.ready.pop_front() {
                self.blocked = self.blocked.saturating_sub(1);
                self.step(key, TunnelCopy::step);
                self.downstream.write_control()?;
            }
            if turns::is_over() {
                break;
            }
        }
        let is_flushed = self.downstream.poll_flush(cx, &mut self.socket)?;
        let has_blocked = !is_flushed && self.step_blocked();
        if self.downstream.server.is_finished() && is_flushed {
            return Err(ConnectionEnd::Closed);
        }
        if self.is_read_closed && !has_read && !has_commands {
            return Err(ConnectionEnd::Closed);
        }
        // A read that was skipped has registered no waker.
        let can_send = !self.ready.is_empty() || self.downstream.server.has_writable();
        Ok(has_commands || has_read || has_blocked || is_flushed && (skips_read || can_send))
    }

    /// Performs what listed tunnels need no room in the output for, while the peer takes nothing.
    /// Returns true if some are left.
    fn step_blocked(&mut self) -> bool {
        for _ in 0..TUNNELS_PER_ROUND {
            let Some(&key) = self.ready.get(self.blocked) else { break };
            self.blocked += 1;
            self.step(key, TunnelCopy::step_blocked);
        }
        self.blocked < self.ready.len()
    }

    /// Lists the tunnels that were woken.
    fn take_woken(&mut self) {
        let mut woken = std::mem::take(&mut self.woken);
        self.mailbox.swap_woken(&mut woken);
        for key in woken.drain(..) {
            if !self.enqueue(key) && self.blocked > 0 {
                // It may be one of those that waited for nothing else.
                self.step(key, TunnelCopy::step_blocked);
            }
        }
        if woken.capacity() <= ENTRIES_KEPT {
            self.woken = woken;
        }
    }

    fn run_command(&mut self, command: Command) {
        match command {
            Command::Respond(key, status, field) => {
                let field = field.as_ref().map(|(name, value)| (*name, &**value));
                self.downstream.server.respond(key, status, field);
                if status != 200 {
                    self.forget(key);
                }
            }
            Command::Reset(key, code) => {
                self.downstream.server.reset(key, code);
                self.forget(key);
            }
            Command::Open(key, open) => self.open(key, open),
        }
    }

    /// Starts the copy of a tunnel, with the bytes that the peer has sent so far.
    fn open(&mut self, key: StreamKey, mut open: Box<Open>) {
        // The answer precedes DATA. While it cannot be written, the output has no room for DATA. An
        // error occurs again at the end of the round.
        let _ = self.downstream.write_control();
        let setup = match self.tunnels.get_mut(key.slot()).and_then(Option::take) {
            Some(StreamState::Setup(setup)) if self.downstream.server.is_open(key) => setup,
            other => {
                // The stream has ended meanwhile, and another may have its slot.
                if let Some(slot) = self.tunnels.get_mut(key.slot()) {
                    *slot = other;
                }
                return open.end(End::before_copy(Reason::DownstreamLost));
            }
        };
        if open.generation != self.generation || open.peer.lost_trust().is_some() {
            let snapshot = open.data_path.reader.snapshot();
            if let Err(why) = open.reevaluate(&snapshot) {
                open.record.set_detail(why);
                let code = Reason::Revoked.reset_code();
                self.downstream.server.reset(key, code);
                self.downstream.server.remove(key);
                return open.end(End::before_copy(Reason::Revoked));
            }
        }
        let waker = TunnelWaker::create(key, &self.mailbox);
        let mut copy = Box::new(TunnelCopy::new(key, *open, waker));
        let limits = copy.check_limits();
        self.limit_timer.set(limits.ok().flatten());
        let (early, has_ended) = setup.0.take_early();
        let mut started = limits.map(drop);
        if started.is_ok() && !early.is_empty() {
            started = copy.receive(&[IoSlice::new(&early)], &mut self.downstream);
            self.limit_timer.set(copy.answer_due());
        }
        if started.is_ok() && has_ended {
            started = copy.receive_end().map(|_| ());
        }
        self.tunnels[key.slot()] = Some(StreamState::Open(copy));
        match started {
            Ok(()) => drop(self.enqueue(key)),
            Err(reason) => self.end(key, Err(reason)),
        }
    }

    /// Lists an open tunnel for its next step, once. Returns true if it was not listed.
    fn enqueue(&mut self, key: StreamKey) -> bool {
        if self.downstream.server.has(key)
            && let Some(Some(StreamState::Open(copy))) = self.tunnels.get_mut(key.slot())
            && !std::mem::replace(&mut copy.is_queued, true)
        {
            self.ready.push_back(key);
            return true;
        }
        false
    }

    /// Performs the events of what was received.
    pub(super) fn handle_events(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        let input = std::mem::take(&mut self.input);
        for at in 0..events.len() {
            let event = std::mem::replace(&mut events[at], Event::Handled);
            match event {
                Event::Handled => {}
                Event::Data { key, bytes } => {
                    self.forward(key, bytes, &mut events[at + 1..], input.bytes());
                }
                Event::SmallData { key, bytes } => {
                    self.receive_data(key, &[IoSlice::new(&bytes)]);
                }
                Event::End(key) => self.receive_end(key),
                Event::Reset(key, reason) => self.receive_reset(key, reason),
                Event::Writable(key) => drop(self.enqueue(key)),
                Event::Request { key, request, ended, price } => {
                    let setup = Arc::new(Setup::new(self.source.account(), ended));
                    self.insert(key, StreamState::Setup(SetupGuard(Arc::clone(&setup))));
                    self.requests.push(NewRequest { key, request, setup, price });
                }
            }
        }
        events.clear();
        if events.capacity() <= ENTRIES_KEPT {
            self.events = events;
        }
        self.input = input;
    }

    fn insert(&mut self, key: StreamKey, tunnel: StreamState) {
        if self.tunnels.len() <= key.slot() {
            self.tunnels.resize_with(key.slot() + 1, || None);
        }
        self.tunnels[key.slot()] = Some(tunnel);
    }

    /// Passes DATA to the tunnel of a stream. A reset may follow it in the same input.
    pub(super) fn receive_data(&mut self, key: StreamKey, slices: &[IoSlice<'_>]) {
        if !self.downstream.server.has(key) {
            return;
        }
        match self.tunnels.get_mut(key.slot()) {
            Some(Some(StreamState::Setup(setup))) => {
                for slice in slices {
                    setup.0.receive(slice);
                }
            }
            Some(Some(StreamState::Open(copy))) => {
                let received = copy.receive(slices, &mut self.downstream);
                self.limit_timer.set(copy.answer_due());
                if let Err(reason) = received {
                    self.end(key, Err(reason));
                }
            }
            _ => {}
        }
    }

    fn receive_end(&mut self, key: StreamKey) {
        match self.tunnels.get_mut(key.slot()) {
            Some(Some(StreamState::Setup(setup))) => setup.0.end(),
            Some(Some(StreamState::Open(copy))) => match copy.receive_end() {
                Ok(Step::Done) => self.end(key, Ok(())),
                Ok(_) => {}
                Err(reason) => self.end(key, Err(reason)),
            },
            _ => {}
        }
    }

    /// Ends the tunnel of a stream that was reset.
    pub(super) fn receive_reset(&mut self, key: StreamKey, reason: Reason) {
        if let Some(Some(StreamState::Setup(setup))) = self.tunnels.get(key.slot()) {
            setup.0.fail(reason);
            self.forget(key);
        } else {
            self.end(key, Err(reason));
        }
    }

    /// Performs a step of an open tunnel.
    fn step(
        &mut self,
        key: StreamKey,
        step: impl FnOnce(&mut TunnelCopy, &mut Downstream) -> Result<Step, Reason>,
    ) {
        if !self.downstream.server.is_open(key) {
            return;
        }
        let Some(Some(StreamState::Open(copy))) = self.tunnels.get_mut(key.slot()) else {
            return;
        };
        match step(copy, &mut self.downstream) {
            Ok(Step::Waits) => {}
            Ok(Step::HasMore) => drop(self.enqueue(key)),
            Ok(Step::Done) => self.end(key, Ok(())),
            Err(reason) => self.end(key, Err(reason)),
        }
    }

    /// Ends an open tunnel: its stream by a reset unless it has ended, its endpoint by
    /// [`Open::end`].
    pub fn end(&mut self, key: StreamKey, result: Result<(), Reason>) {
        if !self.downstream.server.has(key) {
            return;
        }
        if let Err(reason) = result {
            self.downstream.server.reset(key, reason.reset_code());
        }
        if let Some(StreamState::Open(copy)) = self.forget(key) {
            copy.end(result, &self.downstream.output);
        }
    }

    fn forget(&mut self, key: StreamKey) -> Option<StreamState> {
        if !self.downstream.server.has(key) {
            return None;
        }
        self.downstream.server.remove(key);
        self.tunnels.get_mut(key.slot()).and_then(Option::take)
    }

    pub fn take_requests(&mut self) -> Vec<NewRequest> {
        std::mem::take(&mut self.requests)
    }

    /// Ends all open tunnels by a reset.
    pub fn end_all(&mut self, reason: Reason) {
        for key in self.downstream.server.keys() {
            if matches!(self.tunnels.get(key.slot()), Some(Some(StreamState::Open(_)))) {
                self.end(key, Err(reason));
            }
        }
    }

    /// Ends a tunnel whose grant was revoked by the change `why`.
    pub fn revoke(&mut self, key: StreamKey, why: String) {
        if self.downstream.server.is_open(key)
            && let Some(Some(StreamState::Open(copy))) = self.tunnels.get_mut(key.slot())
        {
            copy.tunnel().record.set_detail(why);
            self.end(key, Err(Reason::Revoked));
        }
    }

    /// Ends the tunnels that have reached a limit of time, and sets the next check.
    pub fn check_limits(&mut self) {
        let (mut ended, mut next) = (Vec::new(), None::<Instant>);
        for copy in self.open_tunnels() {
            match copy.check_limits() {
                Ok(due) => next = next.into_iter().chain(due).min(),
                Err(reason) => ended.push((copy.key, reason)),
            }
        }
        for (key, reason) in ended {
            self.end(key, Err(reason));
        }
        self.limit_timer.set(next);
    }

    pub fn open_tunnels(&mut self) -> impl Iterator<Item = &mut TunnelCopy> {
        self.tunnels.iter_mut().flatten().filter_map(|tunnel| match tunnel {
            StreamState::Open(copy) => Some(&mut **copy),
            StreamState::Setup(_) => None,
        })
    }

    /// Charges the buffers that the connection holds after a turn: the send buffer while the peer
    /// does not read, and the receive buffer while it holds a part of a record.
    fn charge_buffers(&mut self, cx: &Context<'_>) -> Result<(), ConnectionEnd> {
        let output = usize::from(self.downstream.output.is_blocked()) * BUFFER_BYTES;
        // Records that are left for the next turn stay where they are.
        let input = if self.has_unread {
            usize::from(self.input.is_held()) * BUFFER_BYTES
        } else {
            self.input.park()
        };
        let held = output + input;
        if held == 0 && self.charged == 0 {
            return Ok(());
        }
        let account = self.held.get_or_insert_with(|| self.source.account());
        if held > self.charged {
            account.charge(held - self.charged);
        } else if held < self.charged {
            account.release(self.charged - held);
        }
        self.charged = held;
        match account.poll_gated(cx, |_| Poll::<()>::Pending) {
            Poll::Ready(_) => Err(ConnectionEnd::Evicted),
            Poll::Pending => Ok(()),
        }
    }

    /// Sends the last frames, and then `alert` as the last record.
    pub fn poll_close(
        &mut self,
        cx: &mut Context<'_>,
        alert: &mut Option<AlertDescription>,
    ) -> Poll<()> {
        loop {
            match self.downstream.poll_flush(cx, &mut self.socket) {
                Ok(false) => return Poll::Pending,
                Err(_) => return Poll::Ready(()),
                Ok(true) => match alert.take() {
                    None => return Poll::Ready(()),
                    Some(alert) => {
                        // A layer that has failed cannot seal an alert either.
                        let _ =
                            self.downstream.output.append_alert(alert, &mut self.downstream.layer);
                    }
                },
            }
        }
    }

    /// Ends all tunnels. Returns the socket.
    pub fn into_socket(mut self, reason: Reason) -> S {
        for tunnel in std::mem::take(&mut self.tunnels).into_iter().flatten() {
            match tunnel {
                StreamState::Setup(setup) => setup.0.fail(reason),
                StreamState::Open(copy) => copy.end(Err(reason), &self.downstream.output),
            }
        }
        for command in self.mailbox.close() {
            if let Command::Open(_, open) = command {
                open.end(End::before_copy(reason));
            }
        }
        self.socket
    }
}
