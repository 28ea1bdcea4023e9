//! One schedule: a sequence of connections with random actions of all sides.

use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;
use std::time::Duration;

use anyhow::{Result, ensure};
use fastrand::Rng;
use socket2::SockRef;

use super::super::rig::{PREFACE, Pending, Rig, TestGateway, drain, fill};
use super::super::wire::{Frame, Received, SETTINGS};
use super::oracle::{Closed, Far, Oracle, Phase, Stream};
use super::wrong::Fault;
use super::*;

const STEPS: usize = 800;
/// Limit of steps in which a peer reads nothing. Control frames stay far below their limit.
const STALLED_MAX: usize = 25;
/// Limit of open streams, so that actions often meet the same one.
const STREAMS_MAX: usize = 6;
/// Bytes that streams carry, at an offset for each stream and direction.
const PATTERN_BYTES: usize = 1 << 20;

static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut rng = Rng::with_seed(0);
    (0..2 * PATTERN_BYTES).map(|_| rng.u8(..)).collect()
});

/// Returns bytes of the peer's direction of a stream; of the endpoint's with an identifier that is
/// one higher.
pub(super) fn pattern(id: u32, start: usize, length: usize) -> &'static [u8] {
    let start = (id as usize * 7_919 + start) % PATTERN_BYTES;
    &PATTERN[start..start + length]
}

/// Endpoint of a tunnel. Its socket is gone once it has closed it.
pub(super) struct Endpoint {
    pub(super) socket: Option<UnixStream>,
    pub(super) is_stalled: bool,
    pub(super) has_end: bool,
}

impl Endpoint {
    /// Returns true if bytes of the gateway wait in the socket.
    fn has_unread(&self) -> bool {
        let mut byte = [MaybeUninit::uninit()];
        let socket = self.socket.as_ref().map(SockRef::from);
        socket.is_some_and(|socket| matches!(socket.peek(&mut byte), Ok(1..)))
    }
}

pub(super) struct Schedule<'a> {
    gateway: &'a TestGateway,
    fault: Fault,
    counts: &'a mut Counts,
    pub(super) rng: Rng,
    pub(super) rig: Rig,
    pub(super) oracle: Oracle,
    pub(super) endpoints: BTreeMap<u32, Endpoint>,
    /// Steps since the peer stopped to read.
    stalled: usize,
    /// The peer has ended the connection.
    pub(super) has_left: bool,
    log: Vec<String>,
}

impl<'a> Schedule<'a> {
    pub(super) fn new(
        gateway: &'a TestGateway,
        seed: u64,
        fault: Fault,
        counts: &'a mut Counts,
    ) -> Self {
        Self {
            gateway,
            fault,
            counts,
            rng: Rng::with_seed(seed),
            rig: Rig::new(gateway),
            oracle: Oracle::new(),
            endpoints: BTreeMap::new(),
            stalled: 0,
            has_left: false,
            log: Vec::new(),
        }
    }

    /// Returns the actions of the last connection.
    pub(super) fn log(&self) -> String {
        self.log.join("\n")
    }

    pub(super) fn note(&mut self, event: Event, detail: impl std::fmt::Debug) {
        *self.counts.entry(event).or_default() += 1;
        self.log.push(format!("{event:?} {detail:?}"));
    }

    pub(super) async fn run(&mut self) -> Result<()> {
        self.connect().await?;
        for _ in 0..STEPS {
            if !self.rig.is_running() {
                self.end().await?;
                self.connect().await?;
            }
            self.take_step().await?;
        }
        self.rig.peer.end();
        self.has_left = true;
        self.read_all().await?;
        self.end().await
    }

    async fn connect(&mut self) -> Result<()> {
        self.rig = Rig::new(self.gateway);
        self.oracle = Oracle::new();
        self.endpoints.clear();
        self.log.clear();
        (self.stalled, self.has_left) = (0, false);
        self.rig.peer.send(PREFACE);
        self.send(Frame::new(SETTINGS, 0, 0, &[]));
        self.settle().await
    }

    async fn take_step(&mut self) -> Result<()> {
        let is_stalled = !self.rig.peer.is_reading();
        self.stalled = if is_stalled { self.stalled + 1 } else { 0 };
        if self.stalled > STALLED_MAX {
            self.note(Event::PeerReads, ());
            return self.read_all().await;
        }
        match self.rng.u8(..100) {
            0..14 => self.request(),
            14..36 => self.data(),
            36..52 => self.control(),
            52..54 => self.violate(),
            54..70 => self.task().await,
            70..73 => self.shut(),
            73..90 => self.endpoint(),
            90..99 => self.slow().await?,
            _ => self.leave(),
        }
        // Some actions meet in one turn of the connection.
        if self.rng.u8(..8) == 0 && self.is_calm() {
            self.allowed_data();
        }
        self.settle().await
    }

    /// Returns true if no stream is about to end.
    fn is_calm(&self) -> bool {
        let mut streams = self.oracle.streams.values();
        !self.oracle.is_fatal && !self.has_left && streams.all(|stream| !stream.is_ambiguous())
    }

    /// Sends a frame, cut into records.
    pub(super) fn send(&mut self, frame: Frame) {
        self.oracle.receive(&frame);
        let Some(frame) = self.fault.change_input(&frame) else {
            return;
        };
        let bytes = frame.encode();
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let most = if self.rng.u8(..4) == 0 { 30 } else { 16_384 };
            let (now, later) = rest.split_at(rest.len().min(self.rng.usize(1..=most)));
            self.rig.peer.send(now);
            rest = later;
        }
    }

    /// Returns a random stream that fits.
    pub(super) fn stream(&mut self, fits: impl Fn(&Stream) -> bool) -> Option<u32> {
        let streams = self.oracle.streams.iter();
        let fitting = streams.filter(|(_, stream)| fits(stream));
        let ids: Vec<u32> = fitting.map(|(id, _)| *id).collect();
        self.rng.choice(ids)
    }

    /// Returns the number of streams that are open.
    pub(super) fn open_streams(&self) -> usize {
        let streams = self.oracle.streams.values();
        streams.filter(|it| it.closed == Closed::No).count()
    }

    pub(super) fn has_room(&self) -> bool {
        self.open_streams() < STREAMS_MAX
    }

    /// Lets the peer read everything.
    pub(super) async fn read_all(&mut self) -> Result<()> {
        self.rig.peer.set_room(usize::MAX);
        self.settle().await
    }

    /// Runs everything until nothing moves, and checks it.
    pub(super) async fn settle(&mut self) -> Result<()> {
        loop {
            self.rig.pump().await;
            if !self.rig.is_running() {
                self.rig.peer.set_room(usize::MAX);
                self.oracle.close();
                self.rig.pump().await;
            }
            let has_received = self.receive()?;
            if !self.read_endpoints()? && !has_received {
                break;
            }
        }
        ensure!(
            !self.rig.is_running() || self.rig.peer.is_read(),
            "bytes of the peer are not read"
        );
        if !self.rig.peer.is_reading() {
            return Ok(());
        }
        let endpoints = &self.endpoints;
        self.oracle.check_quiet(|id| {
            let endpoint = endpoints.get(&id)?;
            endpoint.socket.as_ref()?;
            Some((!endpoint.is_stalled, endpoint.has_end))
        })?;
        let is_ended = self.oracle.is_fatal || self.has_left;
        if is_ended || self.oracle.must_end() {
            ensure!(self.rig.is_closed(), "the connection goes on");
        } else if !self.oracle.may_end() {
            ensure!(self.rig.is_running(), "the connection has ended");
        }
        Ok(())
    }

    /// Checks what the gateway has sent. Returns false if there was nothing.
    fn receive(&mut self) -> Result<bool> {
        let mut received = self.rig.peer.receive();
        self.fault.change_output(&mut received);
        for id in std::mem::take(&mut self.rig.requests) {
            let phase = self.oracle.streams.get(&id).map(|stream| stream.phase);
            ensure!(phase == Some(Phase::Requested), "request {id}: {phase:?}");
            received.extend(self.fault.early_answer(id));
        }
        for message in &received {
            let bytes = |id, start, length| pattern(id + 1, start, length).to_vec();
            if let Err(error) = self.oracle.check(message, bytes) {
                let shown = match message {
                    Received::Frame(frame) => {
                        let (kind, id, length) = (frame.kind, frame.stream, frame.payload.len());
                        format!("frame {kind} of {length} bytes on {id}")
                    }
                    other => format!("{other:?}"),
                };
                return Err(error.context(shown));
            }
        }
        Ok(!received.is_empty())
    }

    /// Reads the endpoints that do not stall. Returns false if they had nothing.
    fn read_endpoints(&mut self) -> Result<bool> {
        let mut has_read = false;
        for (id, endpoint) in &mut self.endpoints {
            let Some(socket) = endpoint.socket.as_mut().filter(|_| !endpoint.is_stalled) else {
                continue;
            };
            let mut bytes = Vec::new();
            let has_end = drain(socket, &mut bytes);
            if self.fault == Fault::LosesByteOfPeer {
                bytes.pop();
            }
            let Some(stream) = self.oracle.streams.get_mut(id) else {
                continue;
            };
            has_read |= !bytes.is_empty() || has_end && !endpoint.has_end;
            endpoint.has_end |= has_end;
            let sent = pattern(*id, stream.taken, bytes.len());
            ensure!(sent == bytes, "wrong bytes for the endpoint of {id}");
            stream.taken += bytes.len();
            ensure!(stream.taken <= stream.sent, "bytes that nobody sent");
        }
        Ok(has_read)
    }

    /// Checks the endpoints at the end of a connection: a peer that ended its direction was
    /// promised delivery (docs/wire-contract.md 1.6).
    async fn end(&mut self) -> Result<()> {
        ensure!(self.rig.is_closed(), "the connection goes on");
        for endpoint in self.endpoints.values_mut() {
            endpoint.is_stalled = false;
        }
        while self.read_endpoints()? {
            self.rig.pump().await;
        }
        for (id, endpoint) in &self.endpoints {
            let stream = &self.oracle.streams[id];
            if endpoint.socket.is_none() {
                continue;
            }
            ensure!(endpoint.has_end, "the endpoint of {id} is open");
            let is_promised = stream.peer_ended && stream.closed != Closed::ByGateway;
            ensure!(
                !is_promised || stream.taken == stream.sent,
                "stream {id} has lost bytes after END_STREAM: {stream:?}"
            );
        }
        // Tasks that deliver last bytes end within 30 s.
        self.rig.wait(Duration::from_secs(60)).await;
        Ok(())
    }

    /// Lets a side stop, go on, or move by other pieces, or the clock advance.
    async fn slow(&mut self) -> Result<()> {
        let is_reading = self.rig.peer.is_reading();
        match self.rng.u8(..8) {
            0..3 if is_reading => {
                self.note(Event::PeerStalls, ());
                self.rig.peer.set_room(0);
            }
            0..3 => {
                let room = self.rng.usize(1..60_000);
                self.note(Event::PeerReadsSome, room);
                self.rig.peer.set_room(room);
            }
            3..5 if !is_reading => {
                self.note(Event::PeerReads, ());
                self.read_all().await?;
            }
            5..7 => {
                let piece = |rng: &mut Rng| match rng.u8(..3) {
                    0 => rng.usize(50..500),
                    1 => rng.usize(500..20_000),
                    _ => usize::MAX,
                };
                let pieces = (piece(&mut self.rng), piece(&mut self.rng));
                self.note(Event::Pieces, pieces);
                self.rig.peer.set_pieces(pieces.0, pieces.1);
            }
            _ => {
                let time = Duration::from_millis(self.rng.u64(1..2_000));
                self.note(Event::Waited, time);
                self.rig.wait(time).await;
            }
        }
        Ok(())
    }

    /// Lets a task answer its stream.
    async fn task(&mut self) {
        let ids: Vec<u32> = self.rig.pending.keys().copied().collect();
        let Some(id) = self.rng.choice(ids) else {
            return;
        };
        let stream = &self.oracle.streams[&id];
        let is_requested = matches!(self.rig.pending[&id], Pending::Requested(_));
        if stream.closed != Closed::No {
            self.note(Event::AnsweredLate, id);
            match self.rng.bool() && is_requested {
                true => assert!(self.rig.accept(id).is_err()),
                false => drop(self.rig.pending.remove(&id)),
            }
            return;
        }
        match (is_requested, self.rng.u8(..16)) {
            (true, 0..10) => {
                self.note(Event::Accepted, id);
                self.rig.accept(id).expect("an open stream");
                self.oracle.answer(id, 200);
                if self.rng.bool() {
                    self.open(id);
                }
            }
            (false, 0..13) => self.open(id),
            (true, 10) => self.drop_task(id),
            (true, 11..13) => self.reject(id),
            (true, 13) => {
                self.note(Event::Refused, id);
                if let Some(Pending::Requested(connect)) = self.rig.pending.remove(&id) {
                    connect.refuse_stream();
                }
                self.oracle.abort(id, 7);
            }
            (true, _) => self.send_too_much(id).await,
            (false, 13) => self.drop_task(id),
            (false, _) => {
                self.note(Event::RefusedTunnel, id);
                if let Some(Pending::Answered(tunnel)) = self.rig.pending.remove(&id) {
                    tunnel.refuse(Reason::NoEndpoint);
                }
                self.oracle.abort(id, 10);
            }
        }
    }

    fn drop_task(&mut self, id: u32) {
        self.note(Event::TaskDropped, id);
        self.rig.pending.remove(&id);
        self.oracle.abort(id, 2);
    }

    fn open(&mut self, id: u32) {
        let buffer = self.rng.bool().then_some(8 * 1024);
        self.note(Event::Opened, (id, buffer));
        let socket = self.rig.open(id, buffer).expect("an open stream");
        let stream = self.oracle.streams.get_mut(&id).expect("a stream");
        (stream.phase, stream.far) = (Phase::Open, Far::Open);
        self.endpoints.insert(
            id,
            Endpoint { socket: Some(socket), is_stalled: self.rng.u8(..4) == 0, has_end: false },
        );
    }

    fn reject(&mut self, id: u32) {
        let reasons = [Reason::UnknownService, Reason::PolicyDenied, Reason::BadAuthority];
        let reason = reasons[self.rng.usize(..3)];
        self.note(Event::Rejected, (id, reason));
        if let Some(Pending::Requested(connect)) = self.rig.pending.remove(&id) {
            connect.reject(reason);
        }
        self.oracle.answer(id, reason.status().as_u16());
    }

    /// Acts at an endpoint.
    fn endpoint(&mut self) {
        let has_socket = |endpoint: &Endpoint| endpoint.socket.is_some();
        let endpoints = self.endpoints.iter();
        let ids = endpoints
            .filter(|(id, it)| has_socket(it) && self.oracle.streams[*id].closed == Closed::No);
        let ids: Vec<u32> = ids.map(|(id, _)| *id).collect();
        let Some(id) = self.rng.choice(ids) else {
            return;
        };
        let what = self.rng.u8(..20);
        let is_open = self.oracle.streams[&id].far == Far::Open;
        let Some(endpoint) = self.endpoints.get_mut(&id) else {
            return;
        };
        match what {
            0..8 if is_open => self.produce(id, what < 3),
            8..11 if is_open => {
                if let Some(socket) = &endpoint.socket {
                    socket.shutdown(Shutdown::Write).expect("an open socket");
                }
                self.oracle.streams.get_mut(&id).expect("a stream").far = Far::Ended;
                self.note(Event::EndpointEnds, id);
            }
            11..14 if is_open => {
                let stream = self.oracle.streams.get_mut(&id).expect("a stream");
                let has_unread = endpoint.has_unread();
                if !has_unread && stream.sent > stream.taken {
                    // The gateway holds these bytes, and meets the end of both directions in
                    // either order.
                    return;
                }
                endpoint.socket = None;
                stream.far = if has_unread { Far::Reset } else { Far::Left };
                let event = match has_unread {
                    true => Event::EndpointResets,
                    false => Event::EndpointLeaves,
                };
                self.note(event, id);
            }
            _ => {
                endpoint.is_stalled ^= true;
                let event = match endpoint.is_stalled {
                    true => Event::EndpointStalls,
                    false => Event::EndpointReads,
                };
                self.note(event, id);
            }
        }
    }

    /// Lets an endpoint send.
    fn produce(&mut self, id: u32, sends_much: bool) {
        let (event, most) = match sends_much {
            true => (Event::EndpointSendsMuch, 150_000),
            false => (Event::EndpointSends, 3_000),
        };
        let stream = self.oracle.streams.get_mut(&id).expect("a stream");
        let bytes = pattern(id + 1, stream.produced, self.rng.usize(1..most));
        if let Some(socket) = self.endpoints.get_mut(&id).and_then(|it| it.socket.as_mut()) {
            stream.produced += fill(socket, bytes);
        }
        self.note(event, (id, bytes.len()));
    }
}
