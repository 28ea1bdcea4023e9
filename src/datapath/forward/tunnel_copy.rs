//! Copy of one tunnel, with exact TCP semantics, as parts of its connection's turns.
//!
//! END_STREAM becomes FIN and FIN becomes END_STREAM, each direction by itself. A reset on one
//! side becomes a reset on the other. Back-pressure is end to end: window is given back to the
//! peer only when the endpoint took the bytes. The endpoint is read only as far as the window of
//! the peer allows. An idle tunnel holds no buffer.

use std::io::{self, IoSlice, IoSliceMut};
use std::task::{Context, Poll, Waker};

use tokio::time::Instant;

use crate::datapath::copy::backlog::Backlog;
use crate::datapath::copy::progress::InnerProgress;
use crate::datapath::copy::{ANSWER_DEADLINE, DELIVERY_DEADLINE, SILENT};
use crate::datapath::http2::output::{Output, ReadBytes, ReadRoom};
use crate::datapath::http2::streams::StreamKey;
use crate::datapath::io::acks::AckWatch;
use crate::datapath::limits::loop_detection::{self, InFlight};
use crate::reason::Reason;
use crate::telemetry::Record;
use crate::wire::ServerAnswer;
use crate::wire::client_hello::{ClientHelloScanner, OfferedProtocol};

use super::downstream::{Downstream, Pace};
use super::open::{End, Open};

/// Limit of reads of an endpoint that has reset its connection, for the bytes before the reset.
const LAST_READS: usize = 8;

/// Open tunnel with the state of its copy.
#[derive(Debug)]
pub struct TunnelCopy {
    pub key: StreamKey,
    /// True while the connection has listed it for its next step.
    pub is_queued: bool,
    open: Open,
    waker: Waker,
    backlog: Backlog,
    /// Answer that is awaited, if the first bytes are a ClientHello.
    awaited: Option<Box<AwaitedAnswer>>,
    progress: InnerProgress,
    /// Number of bytes since the endpoint last blocked, counted up to one window.
    unblocked_bytes: u32,
    /// Position of the output after the last byte of the endpoint.
    last_output: usize,
    acks: AckWatch,
    flags: Flags,
}

// A tunnel is one allocation. Size classes of the allocator are 512 and 640 bytes.
const _: () = assert!(size_of::<TunnelCopy>() <= 512);

/// Answer of the endpoint to a ClientHello.
#[derive(Debug, Default)]
struct AwaitedAnswer {
    hello: ClientHelloScanner,
    protocol: OfferedProtocol,
    answer: Option<ServerAnswer>,
    /// Entry in the loop detection, once the random has arrived.
    loop_entry: Option<InFlight>,
    /// True if the gateway of another network judges the endpoint.
    is_remote: bool,
    /// Time at which the endpoint had taken all of it.
    since: Option<Instant>,
}

impl AwaitedAnswer {
    /// Reads bytes of the peer. Returns false if they are no ClientHello.
    ///
    /// # Errors
    /// The tunnel is routed in a loop.
    fn read(&mut self, slices: &[IoSlice<'_>], record: &mut Record) -> Result<bool, Reason> {
        if self.is_remote && self.loop_entry.is_some() {
            return Ok(true);
        }
        if slices.iter().any(|slice| self.hello.push(slice).is_none()) {
            return Ok(false);
        }
        if self.loop_entry.is_none()
            && let Some(random) = self.hello.random()
        {
            self.loop_entry = Some(loop_detection::register(random, record)?);
        }
        Ok(true)
    }

    /// Returns the number of bytes up to the end of the ClientHello, if the endpoint owes an answer
    /// to it.
    fn hello_bytes(&self) -> Option<usize> {
        self.hello.end().filter(|_| !self.is_remote)
    }

    /// Returns the deadline, or the time of the next check before the endpoint has taken the
    /// ClientHello.
    fn due(&self) -> Option<Instant> {
        self.hello_bytes()?;
        Some(self.since.unwrap_or_else(Instant::now) + ANSWER_DEADLINE)
    }
}

/// Progress of both directions.
#[derive(Clone, Copy, Debug, Default)]
struct Flags {
    /// The first bytes of the peer have arrived.
    has_first_bytes: bool,
    /// The peer has sent END_STREAM.
    received_end: bool,
    /// The endpoint was sent FIN.
    sent_fin: bool,
    /// The endpoint has sent FIN.
    endpoint_ended: bool,
    /// The last read of the endpoint filled all of its room.
    reads_much: bool,
    has_failed: bool,
    /// The endpoint has bytes that the window does not admit.
    has_unread: bool,
    /// The endpoint's socket has keepalive.
    is_kept_alive: bool,
    /// The endpoint was sent bytes or FIN since everything was found acknowledged.
    may_owe_acks: bool,
}

/// Result of a step that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The tunnel waits, and its waker is registered.
    Waits,
    /// The endpoint has more bytes.
    HasMore,
    /// Both directions have ended.
    Done,
}

impl TunnelCopy {
    /// Starts the copy of a tunnel whose waker wakes its connection.
    pub fn new(key: StreamKey, open: Open, waker: Waker) -> Self {
        Self {
            key,
            is_queued: false,
            backlog: Backlog::new(open.upstream.stream.account()),
            open,
            waker,
            awaited: None,
            progress: InnerProgress::default(),
            unblocked_bytes: 0,
            last_output: 0,
            acks: AckWatch::default(),
            flags: Flags::default(),
        }
    }

    pub fn tunnel(&mut self) -> &mut Open {
        &mut self.open
    }

    /// Turns keepalive on for the endpoint, unless it is on, and checks that it acknowledges what
    /// it was sent, and after its end that it has not failed. At most once per
    /// [`CHECK_INTERVAL`](crate::datapath::io::acks::CHECK_INTERVAL).
    ///
    /// # Errors
    /// The endpoint has vanished.
    pub fn check_endpoint(&mut self) -> Result<(), Reason> {
        let (flags, stream) = (&mut self.flags, &self.open.upstream.stream);
        if !std::mem::replace(&mut flags.is_kept_alive, true) {
            stream.keep_alive();
        }
        if flags.endpoint_ended
            && let Some(error) = stream.take_error()
        {
            self.open.record.set_detail(format!("the endpoint failed after its end: {error}"));
            return Err(Reason::UpstreamReset);
        }
        if flags.may_owe_acks {
            flags.may_owe_acks = stream.check_acks(&mut self.acks).map_err(|detail| {
                self.open.record.set_detail(detail);
                Reason::UpstreamReset
            })?;
        }
        Ok(())
    }

    /// Checks the limits of time. Returns the time of the next check, if there is a limit.
    pub fn check_limits(&mut self) -> Result<Option<Instant>, Reason> {
        let due = self.open.check_limits()?;
        if self.answer_due().is_some_and(|due| due <= Instant::now()) {
            if self.wait_readable()? == Step::Waits {
                self.open.record.set_detail(SILENT.to_owned());
                return Err(Reason::EndpointSilent);
            }
            // It has answered, and the peer takes nothing.
            self.awaited = None;
        }
        Ok(due.into_iter().chain(self.answer_due()).min())
    }

    /// Returns the time at which the wait for an answer of the endpoint has to be checked.
    pub fn answer_due(&self) -> Option<Instant> {
        self.awaited.as_ref()?.due()
    }

    /// Notes END_STREAM. The endpoint is sent FIN once it has taken all bytes.
    pub fn receive_end(&mut self) -> Result<Step, Reason> {
        self.flags.received_end = true;
        self.finish_upload()
    }

    /// Forwards bytes of the peer. The rest that the endpoint does not take is copied.
    ///
    /// # Errors
    /// The endpoint has failed, or the tunnel is routed in a loop.
    pub fn receive(
        &mut self,
        slices: &[IoSlice<'_>],
        downstream: &mut Downstream,
    ) -> Result<(), Reason> {
        for slice in slices {
            self.progress.record_peer_bytes(slice);
        }
        self.await_answer(slices)?;
        let count: usize = slices.iter().map(|slice| slice.len()).sum();
        let mut taken = 0;
        if self.backlog.bytes().is_empty() {
            taken = match self.open.upstream.stream.try_write(slices) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                Err(_) => return Err(self.read_last(downstream)),
                Ok(taken) => taken,
            };
            self.took(taken, downstream);
        }
        if taken < count {
            self.note_blocked();
            let source = self.open.upstream.source();
            let budget = (&self.open.data_path.budget, source);
            self.backlog.push(budget, slices, taken);
            self.check_eviction()?;
            return self.write_backlog(downstream).map(|_| ());
        }
        Ok(())
    }

    /// Awaits an answer if the first bytes of the peer are those of a ClientHello.
    fn await_answer(&mut self, slices: &[IoSlice<'_>]) -> Result<(), Reason> {
        let record = &mut self.open.record;
        if let Some(awaited) = &mut self.awaited {
            if !awaited.read(slices, record)? {
                self.awaited = None;
            }
        } else if !self.flags.has_first_bytes && slices.iter().any(|slice| !slice.is_empty()) {
            self.flags.has_first_bytes = true;
            let is_remote = self.open.upstream.grant.endpoint.remote.is_some();
            let mut awaited = AwaitedAnswer { is_remote, ..AwaitedAnswer::default() };
            if awaited.read(slices, record)? {
                let first = slices.first().map_or(&[][..], |slice| slice);
                awaited.protocol = OfferedProtocol::read(first, awaited.hello_bytes());
                self.awaited = Some(Box::new(awaited));
            }
        }
        Ok(())
    }

    /// Counts bytes that the endpoint has taken, and gives their window back.
    fn took(&mut self, bytes: usize, downstream: &mut Downstream) {
        if bytes == 0 {
            return;
        }
        let mut grows = false;
        if downstream.pace == Pace::Paused {
            downstream.server.withhold(self.key, bytes);
        } else {
            grows = downstream.server.release(self.key, bytes);
        }
        downstream.moved += bytes;
        self.flags.may_owe_acks = true;
        self.open.record.add_received(bytes as u64);
        if let Some(awaited) = &mut self.awaited
            && awaited.since.is_none()
            && let Some(hello) = awaited.hello_bytes()
            && self.open.record.received_bytes() >= hello as u64
        {
            awaited.since = Some(Instant::now());
        }
        let count = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.unblocked_bytes = self.unblocked_bytes.saturating_add(count);
        grows |= self.unblocked_bytes >= downstream.server.window(self.key);
        if grows && downstream.pace == Pace::Free {
            self.unblocked_bytes = 0;
            downstream.server.grow(self.key);
        }
    }

    /// Counts anew after the endpoint has blocked. Small tails that wait to become few frames are
    /// no sign of a slow endpoint.
    fn note_blocked(&mut self) {
        if !self.open.upstream.stream.is_gathering() {
            self.unblocked_bytes = 0;
        }
    }

    /// Writes the backlog, and registers the waker for the rest.
    fn write_backlog(&mut self, downstream: &mut Downstream) -> Result<Step, Reason> {
        while !self.backlog.bytes().is_empty() {
            let stream = &mut self.open.upstream.stream;
            match stream.try_write(&[IoSlice::new(self.backlog.bytes())]) {
                Ok(taken) => {
                    self.backlog.advance(taken);
                    self.took(taken, downstream);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.note_blocked();
                    let mut cx = Context::from_waker(&self.waker);
                    match self.open.upstream.stream.poll_write_ready(&mut cx) {
                        Poll::Pending => return Ok(Step::Waits),
                        Poll::Ready(Ok(())) => {}
                        Poll::Ready(Err(_)) => return Err(self.read_last(downstream)),
                    }
                }
                Err(_) => return Err(self.read_last(downstream)),
            }
        }
        self.finish_upload()
    }

    /// Sends FIN once the peer has ended its direction and nothing is left.
    fn finish_upload(&mut self) -> Result<Step, Reason> {
        let flags = &mut self.flags;
        if flags.received_end && !flags.sent_fin && self.backlog.bytes().is_empty() {
            let ended = self.open.upstream.stream.shut_down();
            ended.map_err(|_| Reason::UpstreamReset)?;
            flags.sent_fin = true;
            flags.may_owe_acks = true;
        }
        Ok(if flags.sent_fin && flags.endpoint_ended { Step::Done } else { Step::Waits })
    }

    /// Performs what the waker announced: writes the backlog, and reads the endpoint once.
    ///
    /// # Errors
    /// The endpoint has failed, or the tunnel is evicted.
    pub fn step(&mut self, downstream: &mut Downstream) -> Result<Step, Reason> {
        self.is_queued = false;
        self.check_eviction()?;
        // The endpoint is read first: its bytes before a reset are sent before this reset fails
        // the write.
        let read = self.read(downstream)?;
        let written = self.write_backlog(downstream)?;
        match (read, written) {
            (_, Step::Done) => Ok(Step::Done),
            (read, _) => Ok(read),
        }
    }

    /// Performs the part of a step that needs no room in the output.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn step_blocked(&mut self, downstream: &mut Downstream) -> Result<Step, Reason> {
        self.check_eviction()?;
        match self.wait_readable()? {
            // A write could fail by a reset that bytes precede, which are read first.
            Step::HasMore => Ok(Step::Waits),
            _ => self.write_backlog(downstream),
        }
    }

    /// Fails if the tunnel is evicted, and registers the waker for its eviction.
    fn check_eviction(&self) -> Result<Step, Reason> {
        let cx = Context::from_waker(&self.waker);
        let account = self.backlog.account();
        match account.map(|account| account.poll_gated(&cx, |_| Poll::<()>::Pending)) {
            Some(Poll::Ready(_)) => Err(Reason::BuffersFull),
            _ => Ok(Step::Waits),
        }
    }

    /// Reads the endpoint once, into DATA frames.
    fn read(&mut self, downstream: &mut Downstream) -> Result<Step, Reason> {
        if self.flags.endpoint_ended {
            return self.wait_readable();
        }
        if self.wait_readable()? == Step::Waits {
            return self.check_eviction();
        }
        if downstream.pace == Pace::Paused {
            self.awaited = None;
            return self.check_eviction();
        }
        let budget = &self.open.data_path.budget;
        if budget.is_short() {
            let source = self.open.upstream.source();
            let account = self.backlog.open_account(budget, source);
            if account.must_pause_reads() {
                self.awaited = None;
                return self.check_eviction();
            }
        }
        let capacity = downstream.server.capacity(self.key);
        self.flags.has_unread = capacity == 0;
        if capacity == 0 {
            // The endpoint has answered, and the peer does not read.
            self.awaited = None;
            return Ok(Step::Waits);
        }
        let read = match self.read_into(capacity, downstream) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return self.wait_readable();
            }
            Err(_) => return Err(Reason::UpstreamReset),
        };
        if read.bytes == 0 && self.flags.has_failed {
            // The write has taken the error of the socket, so that the read finds an end.
            return Err(Reason::UpstreamReset);
        }
        if read.bytes == 0 {
            self.flags.endpoint_ended = true;
            self.awaited = None;
            let ended = downstream.output.append_end(self.key.id, &mut downstream.layer);
            ended.map_err(|_| Reason::DownstreamLost)?;
            downstream.server.sent_data(self.key, 0, 1, true);
            return match self.finish_upload()? {
                Step::Done => Ok(Step::Done),
                _ => self.wait_readable(),
            };
        }
        downstream.server.sent_data(self.key, read.bytes, read.frames, false);
        downstream.moved += read.bytes;
        self.open.record.add_sent(read.bytes as u64);
        if let Some(awaited) = self.awaited.take() {
            self.open.upstream.grant.endpoint.state.record_answer();
            if let (Some(since), Some(answer)) = (awaited.since, awaited.answer) {
                let time = since.elapsed();
                self.open.record.inner_hello_answered(time, awaited.protocol, answer);
            }
        }
        self.last_output = downstream.output.written_position();
        self.flags.reads_much = !read.is_drained;
        if read.is_drained { self.wait_readable() } else { Ok(Step::HasMore) }
    }

    /// Registers the waker for the next bytes of the endpoint, and after its end for its failure.
    /// That of a socket wakes nobody: [`Self::check_endpoint`] finds it.
    fn wait_readable(&mut self) -> Result<Step, Reason> {
        let mut cx = Context::from_waker(&self.waker);
        let stream = &mut self.open.upstream.stream;
        if self.flags.endpoint_ended {
            let is_broken = stream.poll_broken(&mut cx).is_ready();
            return if is_broken { Err(Reason::UpstreamReset) } else { Ok(Step::Waits) };
        }
        match stream.poll_read_ready(&mut cx) {
            Poll::Pending => Ok(Step::Waits),
            Poll::Ready(Ok(())) => Ok(Step::HasMore),
            Poll::Ready(Err(_)) => Err(Reason::UpstreamReset),
        }
    }

    /// Reads into the output. Much more than one record is offered only to endpoints that fill it:
    /// a vectored read costs more.
    fn read_into(&mut self, capacity: usize, downstream: &mut Downstream) -> io::Result<ReadBytes> {
        let (stream, progress) = (&mut self.open.upstream.stream, &mut self.progress);
        let awaited = &mut self.awaited;
        let room = ReadRoom {
            bytes: capacity,
            records: if self.flags.reads_much { usize::MAX } else { 1 },
        };
        let Downstream { output, layer, .. } = downstream;
        output.read_from(self.key.id, room, layer, |slices| {
            let count = stream.try_read(slices)?;
            if let (Some(awaited), Some(first)) = (&mut *awaited, slices.first()) {
                let read = first.get(..count).unwrap_or(first);
                awaited.answer = (count > 0).then(|| ServerAnswer::read(read));
            }
            if let Some(last) = last_bytes(slices, count) {
                progress.record_endpoint_bytes(last);
            }
            Ok(count)
        })
    }

    /// Reads what an endpoint sent before it failed. Returns the reason of the failure.
    fn read_last(&mut self, downstream: &mut Downstream) -> Reason {
        self.flags.has_failed = true;
        let pace = std::mem::take(&mut downstream.pace);
        for _ in 0..LAST_READS {
            if !downstream.output.has_room() || !matches!(self.read(downstream), Ok(Step::HasMore))
            {
                break;
            }
        }
        downstream.pace = pace;
        Reason::UpstreamReset
    }

    pub fn end(self: Box<Self>, result: Result<(), Reason>, output: &Output) {
        let Self { mut open, backlog, progress, last_output, flags, awaited, .. } = *self;
        let silent_since = awaited.and_then(|awaited| awaited.since);
        let silence = silent_since.filter(|_| {
            // An answer that was not read is one.
            let mut cx = Context::from_waker(Waker::noop());
            open.upstream.stream.poll_read_ready(&mut cx).is_pending()
        });
        if result == Err(Reason::DownstreamCancelled) {
            open.upstream.stream.cancel_on_drop();
        }
        open.end(End {
            result,
            progress,
            is_lost: flags.has_unread || !output.has_sent(last_output),
            received_end: flags.received_end,
            delivery_deadline: flags.sent_fin.then(|| Instant::now() + DELIVERY_DEADLINE),
            backlog,
            silence: silence.map(|since| since.elapsed()),
        });
    }
}

/// Returns the part of the first `count` bytes that is in the last slice with any.
fn last_bytes<'a>(slices: &'a [IoSliceMut<'_>], mut count: usize) -> Option<&'a [u8]> {
    for slice in slices {
        if count <= slice.len() {
            return (count > 0).then(|| &slice[..count]);
        }
        count -= slice.len();
    }
    None
}
