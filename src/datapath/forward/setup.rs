//! Streams of CONNECT requests until their tunnel is open.
//!
//! The task that opens a tunnel and the connection that owns its stream share a [`Setup`]. The
//! task answers by commands, which the connection carries out in its next turn.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::mem::{swap, take};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use atomic_waker::AtomicWaker;
use bytes::{Bytes, BytesMut};

use crate::datapath::limits::budget::BufferAccount;
use crate::datapath::policy::Permit;
use crate::limits::turns;
use crate::reason::{OUTCOME_HEADER, Reason};
use crate::wire::{LOAD_HEADER, ServiceLoad};

use super::open::Open;
use crate::datapath::http2::streams::StreamKey;

/// Limit of bytes that a peer may send before it is answered: the first flight of an inner TLS
/// connection.
const EARLY_BYTES_MAX: usize = 64 * 1024;

/// Limit of commands, events and wake-ups of which an idle connection keeps the memory, each.
pub const ENTRIES_KEPT: usize = 64;

/// Command of a task to the connection that owns its stream.
#[derive(Debug)]
pub enum Command {
    /// Answers with this status, and with a header field. 200 opens the tunnel; any other ends the
    /// stream.
    Respond(StreamKey, u16, Option<Field>),
    Reset(StreamKey, h2::Reason),
    /// Hands an open tunnel over.
    Open(StreamKey, Box<Open>),
}

pub type Field = (&'static str, Cow<'static, str>);

/// Commands to one connection, and its tunnels that were woken.
#[derive(Debug)]
pub struct Mailbox {
    /// None once the connection has ended.
    commands: Mutex<Option<VecDeque<Command>>>,
    woken: Mutex<Vec<StreamKey>>,
    task: AtomicWaker,
}

impl Default for Mailbox {
    fn default() -> Self {
        Self {
            commands: Mutex::new(Some(VecDeque::new())),
            woken: Mutex::default(),
            task: AtomicWaker::new(),
        }
    }
}

impl Mailbox {
    /// Registers the task of the connection for all later commands and wake-ups.
    pub fn register(&self, cx: &Context<'_>) {
        self.task.register(cx.waker());
    }

    /// Sends a command. Returns it if the connection has ended.
    fn send(&self, command: Command) -> Result<(), Command> {
        match &mut *lock(&self.commands) {
            Some(commands) => commands.push_back(command),
            None => return Err(command),
        }
        self.task.wake();
        Ok(())
    }

    /// Takes the first command that was sent and not taken. The memory of many is freed with the
    /// last one.
    pub fn take_command(&self) -> Option<Command> {
        let mut commands = lock(&self.commands);
        let commands = commands.as_mut()?;
        if commands.is_empty() && commands.capacity() > ENTRIES_KEPT {
            *commands = VecDeque::new();
        }
        commands.pop_front()
    }

    /// Rejects all later commands. Returns those that were not taken.
    pub fn close(&self) -> VecDeque<Command> {
        lock(&self.commands).take().unwrap_or_default()
    }

    /// Exchanges the streams that were woken for an empty list, whose memory is used for the next.
    pub fn swap_woken(&self, empty: &mut Vec<StreamKey>) {
        swap(&mut *lock(&self.woken), empty);
    }
}

/// Waker of one open tunnel, which wakes its connection.
#[derive(Debug)]
pub struct TunnelWaker {
    key: StreamKey,
    mailbox: Arc<Mailbox>,
}

impl TunnelWaker {
    pub fn create(key: StreamKey, mailbox: &Arc<Mailbox>) -> Waker {
        let mailbox = Arc::clone(mailbox);
        Waker::from(Arc::new(Self { key, mailbox }))
    }
}

impl Wake for TunnelWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        lock(&self.mailbox.woken).push(self.key);
        self.mailbox.task.wake();
    }
}

/// State of a stream whose tunnel is not open yet.
#[derive(Debug)]
pub struct Setup {
    state: Mutex<SetupState>,
    pub account: Arc<BufferAccount>,
}

#[derive(Debug, Default)]
struct SetupState {
    /// Bytes of the peer, which keep their window.
    early: BytesMut,
    has_ended: bool,
    failed: Option<Reason>,
    task: Option<Waker>,
}

impl Setup {
    pub fn new(account: Arc<BufferAccount>, has_ended: bool) -> Self {
        let state = SetupState { has_ended, ..SetupState::default() };
        Self { state: Mutex::new(state), account }
    }

    pub fn receive(&self, bytes: &[u8]) {
        self.account.charge(bytes.len());
        self.update(|state| state.early.extend_from_slice(bytes));
    }

    pub fn end(&self) {
        self.update(|state| state.has_ended = true);
    }

    /// Notes that the stream or its connection has ended. The first reason is kept.
    pub fn fail(&self, reason: Reason) {
        self.update(|state| {
            state.failed.get_or_insert(reason);
        });
    }

    /// Takes the bytes that are kept; true if END_STREAM follows them.
    pub fn take_early(&self) -> (BytesMut, bool) {
        let mut state = lock(&self.state);
        let early = take(&mut state.early);
        self.account.release(early.len());
        (early, state.has_ended)
    }

    fn update(&self, change: impl FnOnce(&mut SetupState)) {
        let mut state = lock(&self.state);
        change(&mut state);
        if let Some(task) = state.task.take() {
            task.wake();
        }
    }

    /// Polls the state. Completes if the stream has failed, the tunnel is evicted, or `poll`
    /// completes.
    fn poll<R>(
        &self,
        cx: &Context<'_>,
        poll: impl FnOnce(&mut SetupState) -> Poll<R>,
    ) -> Poll<Result<R, Reason>> {
        let mut state = lock(&self.state);
        if let Some(reason) = state.failed {
            return Poll::Ready(Err(reason));
        }
        if let Poll::Ready(done) = poll(&mut state) {
            return Poll::Ready(Ok(done));
        }
        state.task = Some(cx.waker().clone());
        drop(state);
        let evicted = self.account.poll_gated(cx, |_| Poll::<()>::Pending);
        evicted.map(|_| Err(Reason::BuffersFull))
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        let held = lock(&self.state).early.len();
        self.account.release(held);
    }
}

/// Share of a connection in a [`Setup`]. Its drop ends the task of the stream, also when a panic
/// ends the connection.
#[derive(Debug)]
pub struct SetupGuard(pub Arc<Setup>);

impl Drop for SetupGuard {
    fn drop(&mut self) {
        self.0.fail(if std::thread::panicking() { Reason::Panic } else { Reason::DownstreamLost });
    }
}

/// Locks state that one thread uses. A panic under the lock ends the connection.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stream without an open tunnel. Resets the stream if it is dropped.
#[derive(Debug)]
struct SetupStream {
    key: StreamKey,
    setup: Arc<Setup>,
    mailbox: Arc<Mailbox>,
    /// True if the peer is in `trust.gateways`, and may learn why it is rejected and the load of a
    /// service.
    is_for_gateway: bool,
    /// True once the stream was answered finally or handed over.
    is_done: bool,
}

impl SetupStream {
    fn reset(&mut self, code: h2::Reason) {
        self.is_done = true;
        // A connection that has ended has no stream to reset.
        let _ = self.mailbox.send(Command::Reset(self.key, code));
    }

    async fn cancelled(&self, most: usize) -> Reason {
        let setup = &self.setup;
        let failed = poll_fn(|cx| {
            setup.poll(cx, |state| {
                if state.early.len() > most {
                    Poll::Ready(Reason::EarlyData)
                } else {
                    Poll::Pending
                }
            })
        });
        failed.await.unwrap_or_else(|reason| reason)
    }
}

impl Drop for SetupStream {
    fn drop(&mut self) {
        if !self.is_done {
            self.reset(h2::Reason::INTERNAL_ERROR);
        }
    }
}

/// CONNECT that was not answered yet. Resets the stream if dropped without an answer.
#[derive(Debug)]
pub struct PendingConnect(SetupStream);

impl PendingConnect {
    /// Creates the task's handle of a stream. A gateway gets the outcome of a rejection, or the
    /// load of the service.
    pub fn new(
        key: StreamKey,
        setup: Arc<Setup>,
        mailbox: Arc<Mailbox>,
        is_for_gateway: bool,
    ) -> Self {
        Self(SetupStream { key, setup, mailbox, is_for_gateway, is_done: false })
    }

    /// Returns true if the peer is in `trust.gateways`.
    pub fn is_for_gateway(&self) -> bool {
        self.0.is_for_gateway
    }

    /// Charges what the stream holds to the source of its permitted tunnel, which differs from the
    /// peer if there is a first peer.
    ///
    /// # Errors
    /// [`Reason::BuffersFull`] if the source holds too much for another tunnel.
    pub fn charge_to(&self, permit: &Permit) -> Result<(), Reason> {
        let account = &self.0.setup.account;
        let has_first_peer = permit.route().first_peer().is_some();
        if let Some(holders) = permit.holders().filter(|_| has_first_peer) {
            account.move_to(holders.source());
            turns::charge_to(holders.source());
        }
        account.check_room()
    }

    /// Returns the request if its stream is still open. A peer may reset a stream in the same
    /// flight, as in a rapid reset (CVE-2023-44487).
    pub fn if_open(mut self) -> Result<Self, Reason> {
        let failed = lock(&self.0.setup.state).failed;
        match failed {
            Some(reason) => {
                self.0.is_done = true;
                Err(reason)
            }
            None => Ok(self),
        }
    }

    /// Answers 200, with the load of the service for a gateway. From here on the stream is a
    /// tunnel.
    pub fn accept(self, load: Option<ServiceLoad>) -> Result<AnsweredConnect, Reason> {
        let stream = self.0;
        if let Some(reason) = lock(&stream.setup.state).failed {
            return Err(reason);
        }
        let load = load.filter(|_| stream.is_for_gateway);
        let field = load.map(|load| (LOAD_HEADER, load.to_string().into()));
        let answer = Command::Respond(stream.key, 200, field);
        match stream.mailbox.send(answer) {
            Ok(()) => Ok(AnsweredConnect(stream)),
            Err(_) => Err(Reason::DownstreamLost),
        }
    }

    /// Rejects with an empty body, or by a reset. Returns the reason.
    pub fn reject(mut self, reason: Reason) -> Reason {
        match reason.reset_before_answer() {
            Some(code) => self.0.reset(code),
            None => {
                self.0.is_done = true;
                let status = reason.status().as_u16();
                // A stream that is closed needs no answer.
                let outcome = reason.outcome().filter(|_| self.0.is_for_gateway);
                let field = outcome.map(|outcome| (OUTCOME_HEADER, outcome.into()));
                let answer = Command::Respond(self.0.key, status, field);
                let _ = self.0.mailbox.send(answer);
            }
        }
        reason
    }

    /// Resets a stream that was never processed, so that the peer may try it elsewhere.
    pub fn refuse_stream(mut self) {
        self.0.reset(h2::Reason::REFUSED_STREAM);
    }

    /// Waits until the stream has to end: the peer has reset it, lost its connection or sent too
    /// much early data, or memory runs short.
    pub async fn cancelled(&self) -> Reason {
        self.0.cancelled(EARLY_BYTES_MAX).await
    }
}

/// CONNECT that was answered 200 and has no endpoint yet. Resets the stream if it is dropped, with
/// a code that no peer takes for a clean end.
#[derive(Debug)]
pub struct AnsweredConnect(SetupStream);

impl AnsweredConnect {
    /// Receives the next bytes from the peer; none at its END_STREAM.
    ///
    /// # Errors
    /// The stream or its connection has failed, or memory runs short.
    pub async fn receive(&self) -> Result<Option<Bytes>, Reason> {
        let setup = &self.0.setup;
        poll_fn(|cx| {
            setup.poll(cx, |state| {
                if !state.early.is_empty() {
                    Poll::Ready(Some(state.early.split().freeze()))
                } else if state.has_ended {
                    Poll::Ready(None)
                } else {
                    Poll::Pending
                }
            })
        })
        .await
    }

    /// Puts back bytes that were received last, so that they are received again.
    pub fn unread(&self, bytes: &[u8]) {
        let mut state = lock(&self.0.setup.state);
        let mut early = BytesMut::from(bytes);
        early.extend_from_slice(&state.early);
        state.early = early;
    }

    /// As [`PendingConnect::cancelled`], for a tunnel without an endpoint yet. The peer may send as
    /// much as its window permits: the answer 200 allowed it, and the bytes are on its account.
    pub async fn cancelled(&self) -> Reason {
        self.0.cancelled(usize::MAX).await
    }

    /// Resets a tunnel that was rejected after its answer. Returns the reason.
    pub fn refuse(mut self, reason: Reason) -> Reason {
        self.0.reset(reason.reset_after_answer());
        reason
    }

    /// Hands the open tunnel over to its connection.
    ///
    /// # Errors
    /// The stream or its connection has ended, for this reason. Returns the tunnel.
    pub fn open(mut self, open: Box<Open>) -> Result<(), (Box<Open>, Reason)> {
        self.0.is_done = true;
        let failed = lock(&self.0.setup.state).failed;
        if let Some(reason) = failed {
            return Err((open, reason));
        }
        match self.0.mailbox.send(Command::Open(self.0.key, open)) {
            Err(Command::Open(_, open)) => Err((open, Reason::DownstreamLost)),
            _ => Ok(()),
        }
    }

    /// Returns the account of the tunnel's memory.
    pub fn account(&self) -> &Arc<BufferAccount> {
        &self.0.setup.account
    }
}
