//! Actions of the peer, lawful or not.

use super::super::rig::CONNECT;
use super::super::wire::{
    ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, Frame, GOAWAY, HANDSHAKE, HEADERS, PADDED,
    PING, PRIORITIZED, PRIORITY, PUSH_PROMISE, RST_STREAM, SETTINGS, WINDOW_UPDATE,
};
use super::oracle::{Closed, Far, INTERNAL_ERROR, MALFORMED, Phase, Stream};
use super::schedule::{Schedule, pattern};
use super::wrong::INITIAL_WINDOWS_MAX;
use super::*;

const UPDATE_MAX: u32 = u32::MAX >> 1;

impl Schedule<'_> {
    /// Sends a request, or a header block on an open stream.
    pub(super) fn request(&mut self) {
        let id = self.oracle.last + 2 - (self.oracle.last + 1) % 2;
        let ends = |it: bool| if it { END_STREAM } else { 0 };
        match self.rng.u8(..16) {
            0 | 1 => {
                if let Some(id) = self.stream(Stream::is_live) {
                    self.note(Event::Trailers, id);
                    self.send(Frame::new(HEADERS, END_HEADERS | END_STREAM, id, CONNECT));
                }
            }
            2 => {
                self.note(Event::ConnectMalformed, id);
                self.send(Frame::new(HEADERS, END_HEADERS, id, MALFORMED));
            }
            _ if !self.has_room() => {}
            3..6 => {
                self.note(Event::ConnectInParts, id);
                let (first, rest) = CONNECT.split_at(self.rng.usize(..CONNECT.len()));
                let (second, third) = rest.split_at(self.rng.usize(..=rest.len()));
                let flags = ends(self.rng.u8(..8) == 0);
                self.send(Frame::new(HEADERS, flags, id, first));
                self.send(Frame::new(CONTINUATION, 0, id, second));
                self.send(Frame::new(CONTINUATION, END_HEADERS, id, third));
            }
            6..9 => {
                self.note(Event::ConnectPadded, id);
                let payload = [&[3][..], &[0, 0, 0, 0, 16], CONNECT, &[0; 3]].concat();
                let flags = END_HEADERS | PADDED | PRIORITIZED;
                self.send(Frame::new(HEADERS, flags, id, &payload));
            }
            9 => {
                self.note(Event::ConnectWithEnd, id);
                self.send(Frame::new(HEADERS, END_HEADERS | END_STREAM, id, CONNECT));
            }
            _ => {
                self.note(Event::Connect, id);
                self.send(Frame::new(HEADERS, END_HEADERS, id, CONNECT));
            }
        }
    }

    /// Sends DATA, mostly where it is permitted.
    pub(super) fn data(&mut self) {
        match self.rng.u8(..40) {
            what @ 0..8 => self.forbidden_data(what),
            _ => self.allowed_data(),
        }
    }

    pub(super) fn allowed_data(&mut self) {
        let can_send = |it: &Stream| it.is_live() && !it.peer_ended && it.allowance > 300;
        let Some(id) = self.stream(can_send) else {
            return;
        };
        let allowed = self.allowance(id);
        let large = self.rng.usize(65..=65_000).min(allowed - 300);
        let small = self.rng.usize(1..=64);
        let (event, length, flags) = match self.rng.u8(8..40) {
            8..15 => (Event::SmallData, small, 0),
            15..26 => (Event::LargeData, large, 0),
            26..30 => (Event::PaddedData, small, PADDED),
            30..33 => (Event::EmptyData, 0, 0),
            33..37 => (Event::DataWithEnd, small, END_STREAM),
            _ => (Event::EmptyEnd, 0, END_STREAM),
        };
        self.note(event, (id, length));
        let bytes = pattern(id, self.oracle.streams[&id].sent, length);
        let payload = match flags {
            PADDED => [&[9], bytes, &[0; 9]].concat(),
            _ => bytes.to_vec(),
        };
        self.send(Frame::new(DATA, flags, id, &payload));
    }

    fn forbidden_data(&mut self, what: u8) {
        let closed = |closed| move |it: &Stream| it.closed == closed && it.phase != Phase::Never;
        let (event, id) = match what {
            0 => {
                let ended = |it: &Stream| it.is_live() && it.peer_ended;
                (Event::DataAfterEnd, self.stream(ended))
            }
            1..3 => (Event::DataAfterReset, self.stream(closed(Closed::ByPeer))),
            3..5 => (Event::DataIgnored, self.stream(closed(Closed::ByGateway))),
            _ => {
                // The endpoint of an open tunnel takes bytes, whose window may be announced before
                // the last byte arrives.
                let fits = |it: &Stream| it.is_live() && !it.peer_ended && it.phase != Phase::Open;
                let Some(id) = self.stream(fits) else {
                    return;
                };
                self.note(Event::DataBeyondWindow, id);
                self.send_data(id, self.allowance(id) + 1);
                return;
            }
        };
        if let Some(id) = id {
            self.note(event, id);
            self.send(Frame::new(DATA, 0, id, b"late"));
        }
    }

    /// Returns the number of bytes that the peer may still send.
    fn allowance(&self, id: u32) -> usize {
        usize::try_from(self.oracle.streams[&id].allowance).expect("a positive window")
    }

    fn send_data(&mut self, id: u32, mut left: usize) {
        while left > 0 {
            let length = left.min(65_536);
            let bytes = pattern(id, self.oracle.streams[&id].sent, length);
            self.send(Frame::new(DATA, 0, id, bytes));
            left -= length;
        }
    }

    /// Sends more than a task waits for. The task then rejects the stream.
    pub(super) async fn send_too_much(&mut self, id: u32) {
        let stream = &self.oracle.streams[&id];
        if stream.peer_ended || stream.allowance < 70_000 {
            return;
        }
        self.note(Event::TooMuchEarlyData, id);
        self.send_data(id, 64 * 1024 + 1);
        self.rig.pump().await;
        let reason = self.rig.cancelled(id).await;
        assert_eq!(reason, Some(Reason::EarlyData));
        if let Some(super::super::rig::Pending::Requested(connect)) = self.rig.pending.remove(&id) {
            connect.reject(Reason::EarlyData);
        }
        self.oracle.abort(id, 11);
    }

    /// Sends a frame other than HEADERS and DATA, or a record.
    pub(super) fn control(&mut self) {
        match self.rng.u8(..40) {
            what @ 0..18 => self.stream_frame(what),
            what => self.connection_frame(what),
        }
    }

    fn stream_frame(&mut self, what: u8) {
        let gone = |it: &Stream| it.closed != Closed::No && it.phase != Phase::Never;
        let id = match what {
            0..14 => self.stream(Stream::is_live),
            _ => self.stream(gone),
        };
        let Some(id) = id else {
            return;
        };
        match what {
            0..3 => {
                let code = [8, 0, 2, 99][self.rng.usize(..4)];
                self.frame(Event::Reset, RST_STREAM, 0, id, &[0, 0, 0, code]);
            }
            3..7 => self.window(Event::StreamWindow, id),
            7..9 => self.frame(Event::ZeroWindow, WINDOW_UPDATE, 0, id, &[0; 4]),
            9 | 10 => {
                if self.rig.peer.is_reading() && self.oracle.streams[&id].window() > 0 {
                    let most = UPDATE_MAX.to_be_bytes();
                    self.frame(Event::WindowAboveLimit, WINDOW_UPDATE, 0, id, &most);
                }
            }
            11 | 12 => {
                let [a, b, c, d] = id.to_be_bytes();
                self.frame(Event::PriorityOfItself, PRIORITY, 0, id, &[a, b, c, d, 1]);
            }
            13 => self.frame(Event::PriorityOfWrongLength, PRIORITY, 0, id, &[0; 4]),
            14..16 => self.frame(Event::ResetOfClosed, RST_STREAM, 0, id, &[0, 0, 0, 8]),
            _ => self.window(Event::WindowOfClosed, id),
        }
    }

    fn connection_frame(&mut self, what: u8) {
        match what {
            18..22 => self.window(Event::ConnectionWindow, 0),
            22..26 => self.initial_window(),
            26 => {
                let other = [0, 1, 0, 0, 16, 0, 0, 99, 1, 2, 3, 4];
                self.frame(Event::OtherSettings, SETTINGS, 0, 0, &other);
            }
            27 => self.frame(Event::SettingsAck, SETTINGS, ACK, 0, &[]),
            28 | 29 => {
                let bytes = self.rng.u64(..).to_be_bytes();
                self.frame(Event::Ping, PING, 0, 0, &bytes);
            }
            30 | 31 => {
                let payload = self.oracle.ping.unwrap_or(*b"unknown.");
                self.frame(Event::Pong, PING, ACK, 0, &payload);
            }
            32 => {
                let id = self.oracle.last + self.rng.u32(1..9);
                self.frame(Event::Priority, PRIORITY, 0, id, &[0, 0, 0, 0, 7]);
            }
            33 | 34 => self.frame(Event::UnknownFrame, 0x42, 0xff, 7, &[7; 300]),
            35 | 36 => {
                self.note(Event::EmptyRecord, ());
                self.rig.peer.send(&[]);
            }
            37 => self.frame(Event::PeerGoaway, GOAWAY, 0, 0, &[0; 8]),
            _ => {
                let is_requested = self.rng.bool();
                self.note(Event::KeyUpdate, is_requested);
                let message = [24, 0, 0, 1, u8::from(is_requested)];
                self.rig.peer.send_record(HANDSHAKE, &message);
                if is_requested {
                    self.oracle.request_key_update();
                }
            }
        }
    }

    fn frame(&mut self, event: Event, kind: u8, flags: u8, id: u32, payload: &[u8]) {
        self.note(event, (kind, flags, id, payload.len()));
        self.send(Frame::new(kind, flags, id, payload));
    }

    fn window(&mut self, event: Event, id: u32) {
        let most = [10, 2_000, 100_000][self.rng.usize(..3)];
        let increment = self.rng.u32(1..most).to_be_bytes();
        self.frame(event, WINDOW_UPDATE, 0, id, &increment);
    }

    fn initial_window(&mut self) {
        let before = self.oracle.initial_window;
        let value = [0, 1, 1_000, 65_535, INITIAL_WINDOWS_MAX][self.rng.usize(..5)];
        let event = match i64::from(value) < before {
            true => Event::InitialWindowShrinks,
            false => Event::InitialWindow,
        };
        let [a, b, c, d] = value.to_be_bytes();
        self.frame(event, SETTINGS, 0, 0, &[0, 4, a, b, c, d]);
    }

    /// Sends a frame that ends the connection by an error.
    pub(super) fn violate(&mut self) {
        let idle = (self.oracle.last | 1) + 2;
        let open = self.stream(|it| it.is_live() && !it.peer_ended);
        let id = open.unwrap_or(0);
        if self.rng.bool() {
            let (kind, flags, id, length) = [
                (PING, 0, 0, 7),
                (SETTINGS, 0, 0, 5),
                (SETTINGS, ACK, 0, 6),
                (WINDOW_UPDATE, 0, 0, 3),
                (RST_STREAM, 0, idle, 5),
                (GOAWAY, 0, 0, 7),
                (0x42, 0, 0, 65_537),
                (PRIORITY, 0, idle, 6),
            ][self.rng.usize(..8)];
            let payload = vec![0; length];
            return self.frame(Event::WrongLength, kind, flags, id, &payload);
        }
        let overflow = UPDATE_MAX.to_be_bytes();
        let can_overflow = self.oracle.window() > 0 && self.rig.peer.is_reading();
        let (kind, flags, id, payload): (u8, u8, u32, &[u8]) = match self.rng.u8(..20) {
            0 => (WINDOW_UPDATE, 0, 0, &[0; 4]),
            1 | 2 if can_overflow => (WINDOW_UPDATE, 0, 0, &overflow),
            3 => (DATA, 0, 0, b"x"),
            4 => (DATA, 0, idle, b"x"),
            5 => (HEADERS, END_HEADERS, idle + 1, CONNECT),
            6 => (RST_STREAM, 0, idle, &[0; 4]),
            7 => (WINDOW_UPDATE, 0, idle, &[0, 0, 0, 1]),
            8 => (CONTINUATION, END_HEADERS, idle, CONNECT),
            9 => (PUSH_PROMISE, END_HEADERS, idle, CONNECT),
            10 => (SETTINGS, 0, 1, &[]),
            11 => (PING, 0, 1, &[0; 8]),
            12 => (SETTINGS, 0, 0, &[0, 2, 0, 0, 0, 2]),
            13 => (SETTINGS, 0, 0, &[0, 5, 0, 0, 0, 1]),
            14 => (SETTINGS, 0, 0, &[0, 4, 0x80, 0, 0, 0]),
            15 => (HEADERS, END_HEADERS, idle, b"\x80"),
            16 if id != 0 => (DATA, PADDED, id, b"\x02x"),
            17 if id != 0 => (DATA, PADDED, id, b""),
            18 => {
                self.send(Frame::new(HEADERS, 0, idle, &[0; 65_536]));
                (CONTINUATION, END_HEADERS, idle, &[0])
            }
            _ => {
                let Some(id) = self.stream(|it| it.closed == Closed::Done) else {
                    return;
                };
                (HEADERS, END_HEADERS, id, CONNECT)
            }
        };
        let length = payload.len();
        self.note(Event::ForbiddenFrame, (kind, flags, id, length));
        self.send(Frame::new(kind, flags, id, payload));
    }

    /// Ends tunnels, or starts the end of the connection.
    pub(super) fn shut(&mut self) {
        let is_open = |it: &Stream| it.is_live() && it.phase == Phase::Open;
        match self.rng.u8(..8) {
            0 | 1 => {
                if let Some(id) = self.stream(is_open)
                    && let Some(connection) = self.rig.connection()
                    && let Some(key) = connection.downstream.server.find(id)
                {
                    connection.revoke(key, "on purpose".to_owned());
                    self.note(Event::Revoked, id);
                    self.oracle.abort(id, INTERNAL_ERROR);
                }
            }
            2 | 3 => {
                let streams = self.oracle.streams.values();
                let ids = self.oracle.streams.iter().filter(|(_, it)| is_open(it));
                let ids: Vec<u32> = ids.map(|(id, _)| *id).collect();
                if streams.clone().any(Stream::is_ambiguous) || streams.clone().any(is_unread) {
                    return;
                }
                if let Some(connection) = self.rig.connection() {
                    connection.end_all(Reason::DrainDeadline);
                    self.note(Event::AllEnded, &ids);
                    for id in ids {
                        self.oracle.abort(id, INTERNAL_ERROR);
                    }
                }
            }
            4 | 5 => {
                let is_sent = self.oracle.is_ping_sent;
                if let Some(connection) = self.rig.connection() {
                    assert_eq!(connection.downstream.server.ping(), !is_sent, "one PING at a time");
                    self.note(Event::KeepalivePing, is_sent);
                    if !is_sent {
                        self.oracle.ping();
                    }
                }
            }
            _ if self.oracle.is_drain_announced() => {
                self.frame(Event::ShutDownConfirmed, PING, ACK, 0, b"drained?");
            }
            _ if !self.oracle.is_goaway_sent() => {
                if let Some(connection) = self.rig.connection() {
                    connection.downstream.server.shut_down_gracefully();
                    self.note(Event::ShutDown, ());
                    self.oracle.shut_down();
                }
            }
            _ => {}
        }
    }

    /// Ends the connection, by close_notify or FIN.
    pub(super) fn leave(&mut self) {
        self.note(Event::CloseNotify, ());
        match self.rng.bool() {
            true => self.rig.peer.send_record(21, &[1, 0]),
            false => self.rig.peer.end(),
        }
        self.has_left = true;
    }
}

/// Returns true for a stream whose endpoint has left before the gateway could read that.
fn is_unread(stream: &Stream) -> bool {
    stream.closed == Closed::No && stream.far == Far::Left && !stream.gateway_ended
}
