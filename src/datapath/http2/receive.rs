//! Received frames: the rules of RFC 9113 sections 3.4, 4, 5.1 and 6 for a server.

use std::mem;

use h2::Reason as ErrorCode;

use crate::reason::Reason;

use super::frame::{
    self, DEFAULT_FRAME_BYTES, FrameHeader, HEADER_BYTES, PREFACE, WINDOW_MAX, flag, kind, setting,
};
use super::meter::{self, FirstPeerId, PRICE_RESET};
use super::server::{ConnectionError, DataFrame, Event, FRAME_BYTES_MAX, Read, Server};
use super::streams::{StreamEnd, StreamKey};

/// Size of a DATA frame up to which a part of it is not forwarded: an alert of the TLS inside
/// then arrives as a whole.
const UNSPLIT_DATA_BYTES_MAX: usize = 64;

pub(super) const fn protocol_error(rule: &'static str) -> ConnectionError {
    ConnectionError::new(ErrorCode::PROTOCOL_ERROR, rule)
}

pub(super) const fn frame_size_error(rule: &'static str) -> ConnectionError {
    ConnectionError::new(ErrorCode::FRAME_SIZE_ERROR, rule)
}

impl Server {
    /// Receives the bytes of `input` from `start` on, until the turn is over. Appends events, whose
    /// positions are those of `input`. Returns the position of the first byte that is left.
    ///
    /// # Errors
    /// The peer has violated a rule whose violation ends the connection. GOAWAY was not sent yet.
    pub fn receive(
        &mut self,
        input: &[u8],
        start: usize,
        events: &mut Vec<Event>,
    ) -> Result<usize, ConnectionError> {
        let (mut at, mut received) = (start, Ok(()));
        mem::swap(&mut self.events, events);
        while at < input.len() && received.is_ok() && !self.meter.is_turn_over() {
            let step = self.receive_step(&input[at..], at);
            received = step.map(|bytes| at += bytes);
        }
        mem::swap(&mut self.events, events);
        received.map(|()| at)
    }

    /// Receives at least one byte of `input`, which begins at position `at`. Returns the number of
    /// bytes taken.
    fn receive_step(&mut self, input: &[u8], at: usize) -> Result<usize, ConnectionError> {
        match &mut self.read {
            Read::Preface(filled) => {
                let wanted = &PREFACE[*filled..];
                let taken = wanted.len().min(input.len());
                if wanted[..taken] != input[..taken] {
                    return Err(protocol_error("no HTTP/2 preface"));
                }
                *filled += taken;
                if taken == wanted.len() {
                    self.read = Read::Header(0);
                }
                Ok(taken)
            }
            Read::Header(filled) => {
                let taken = (HEADER_BYTES - *filled).min(input.len());
                self.header[*filled..*filled + taken].copy_from_slice(&input[..taken]);
                *filled += taken;
                if *filled == HEADER_BYTES {
                    let header = FrameHeader::parse(self.header);
                    self.start_frame(header)?;
                }
                Ok(taken)
            }
            Read::PadLength(header, key) => {
                let (header, key) = (*header, *key);
                let padding = usize::from(input[0]);
                // The pad length itself counts too.
                let Some(left) = (header.length - 1).checked_sub(padding) else {
                    return Err(protocol_error("padding longer than DATA"));
                };
                if let Some(key) = key {
                    self.release(key, 1 + padding);
                }
                self.start_data(header, key, left, padding);
                Ok(1)
            }
            Read::Data(_) => Ok(self.receive_data(input, at)),
            Read::Payload(header) => {
                let header = *header;
                let taken = (header.length - self.payload.len()).min(input.len());
                self.payload.extend_from_slice(&input[..taken]);
                if self.payload.len() == header.length {
                    self.end_payload(header)?;
                }
                Ok(taken)
            }
            Read::Skip(left) => {
                let taken = (*left).min(input.len());
                *left -= taken;
                if *left == 0 {
                    self.read = Read::Header(0);
                }
                Ok(taken)
            }
        }
    }

    /// Returns the first peer of a stream that is open, if there is one.
    fn first_peer(&self, id: u32) -> Option<FirstPeerId> {
        if !self.meter.has_first_peers() {
            return None;
        }
        let stream = self.streams.get(self.streams.find(id)?)?;
        stream.first_peer.filter(|_| !stream.is_reset())
    }

    /// Checks the rules for frames of all types, and charges for all but DATA.
    fn check_frame(&mut self, header: FrameHeader) -> Result<(), ConnectionError> {
        if header.length > FRAME_BYTES_MAX {
            return Err(frame_size_error("frame above SETTINGS_MAX_FRAME_SIZE"));
        }
        if header.kind != kind::DATA {
            let first_peer = self.first_peer(header.stream);
            let charged = self.meter.charge(meter::price(header), first_peer);
            self.settle(charged)?;
        }
        if !self.has_settings && (header.kind != kind::SETTINGS || header.has(flag::ACK)) {
            return Err(protocol_error("no SETTINGS after the preface"));
        }
        if let Some((headers, _)) = &self.block
            && (header.kind != kind::CONTINUATION || header.stream != headers.stream)
        {
            return Err(protocol_error("header block interrupted by another frame"));
        }
        Ok(())
    }

    /// Charges for a frame, and checks what its header alone decides.
    fn start_frame(&mut self, header: FrameHeader) -> Result<(), ConnectionError> {
        self.check_frame(header)?;
        match header.kind {
            kind::DATA => return self.start_data_frame(header),
            kind::HEADERS | kind::PRIORITY | kind::RST_STREAM | kind::CONTINUATION
                if header.stream == 0 =>
            {
                return Err(protocol_error("stream frame on stream 0"));
            }
            kind::SETTINGS | kind::PING | kind::GOAWAY if header.stream != 0 => {
                return Err(protocol_error("connection frame on a stream"));
            }
            kind::CONTINUATION if self.block.is_none() => {
                return Err(protocol_error("CONTINUATION without HEADERS"));
            }
            kind::PUSH_PROMISE => return Err(protocol_error("PUSH_PROMISE from a client")),
            kind::HEADERS | kind::CONTINUATION => self.check_block_size(header)?,
            kind::GOAWAY if header.length < 8 => {
                return Err(frame_size_error("GOAWAY shorter than 8 bytes"));
            }
            kind::SETTINGS if header.has(flag::ACK) && header.length != 0 => {
                return Err(frame_size_error("SETTINGS acknowledgement with a payload"));
            }
            kind::SETTINGS if !header.length.is_multiple_of(6) => {
                return Err(frame_size_error("SETTINGS with half an entry"));
            }
            kind::PING if header.length != 8 => {
                return Err(frame_size_error("PING not of 8 bytes"));
            }
            kind::RST_STREAM | kind::WINDOW_UPDATE if header.length != 4 => {
                return Err(frame_size_error("frame not of 4 bytes"));
            }
            // RST_STREAM must not be sent for an idle stream (RFC 9113 section 6.4).
            kind::PRIORITY if header.length != 5 && self.is_idle(header.stream) => {
                return Err(frame_size_error("PRIORITY not of 5 bytes"));
            }
            kind::PRIORITY if header.length != 5 => {
                self.skip(header.length);
                return self.reject_stream(header.stream, ErrorCode::FRAME_SIZE_ERROR);
            }
            kind::SETTINGS
            | kind::PING
            | kind::RST_STREAM
            | kind::WINDOW_UPDATE
            | kind::PRIORITY => {}
            // Unknown types are ignored (RFC 9113 section 5.5). GOAWAY carries debug data.
            _ => {
                self.peer_is_leaving |= header.kind == kind::GOAWAY;
                self.skip(header.length);
                return Ok(());
            }
        }
        self.payload.clear();
        self.read = Read::Payload(header);
        if header.length == 0 {
            self.end_payload(header)?;
        }
        Ok(())
    }

    fn skip(&mut self, bytes: usize) {
        self.read = match bytes {
            0 => Read::Header(0),
            left => Read::Skip(left),
        };
    }

    /// Charges for a DATA frame. The streams of a first peer without credit are reset by that.
    fn charge_data(
        &mut self,
        key: Option<StreamKey>,
        length: usize,
    ) -> Result<(), ConnectionError> {
        let stream = key.and_then(|key| self.streams.get(key));
        let stream = stream.filter(|stream| !stream.is_reset());
        let first_peer = stream.and_then(|stream| stream.first_peer);
        let is_open = stream.is_some_and(|stream| !stream.has_received_end());
        let charged = self.meter.received_data(length, is_open, first_peer);
        self.settle(charged)
    }

    /// Starts a DATA frame: charges the windows (RFC 9113 sections 5.2 and 6.1).
    fn start_data_frame(&mut self, header: FrameHeader) -> Result<(), ConnectionError> {
        let id = header.stream;
        if id == 0 || self.is_idle(id) {
            return Err(protocol_error("DATA on an idle stream"));
        }
        let mut key = self.streams.find(id);
        self.charge_data(key, header.length)?;
        let length = u32::try_from(header.length).unwrap_or(u32::MAX);
        match self.windows.receive(length) {
            Ok(None) => {}
            Ok(Some(increment)) => frame::push_window_update(&mut self.control, 0, increment),
            Err(_) => {
                let rule = "DATA beyond the window of the connection";
                return Err(ConnectionError::new(ErrorCode::FLOW_CONTROL_ERROR, rule));
            }
        }
        let refused = match key.and_then(|key| self.streams.get_mut(key)) {
            None if self.resets.contains(id) => None,
            None => Some(ErrorCode::STREAM_CLOSED),
            // The driver has not removed the stream yet.
            Some(stream) if stream.is_reset() => {
                key = None;
                let is_ours = self.resets.contains(id);
                (!is_ours).then_some(ErrorCode::STREAM_CLOSED)
            }
            Some(stream) if stream.has_received_end() => Some(ErrorCode::STREAM_CLOSED),
            Some(stream) => {
                stream.receive_window -= i64::from(length);
                (stream.receive_window < 0).then_some(ErrorCode::FLOW_CONTROL_ERROR)
            }
        };
        if let Some(code) = refused {
            self.reject_stream(id, code)?;
            key = None;
        }
        if header.has(flag::PADDED) {
            if header.length == 0 {
                return Err(frame_size_error("padded DATA without a pad length"));
            }
            self.read = Read::PadLength(header, key);
        } else {
            self.start_data(header, key, header.length, 0);
        }
        Ok(())
    }

    fn start_data(
        &mut self,
        header: FrameHeader,
        key: Option<StreamKey>,
        left: usize,
        padding: usize,
    ) {
        self.payload.clear();
        let ends = header.has(flag::END_STREAM);
        let data = DataFrame { key, left, padding, ends };
        if left == 0 {
            return self.end_data(&data);
        }
        self.read = Read::Data(data);
    }

    /// Forwards DATA as it arrives. Small frames are forwarded as a whole.
    fn receive_data(&mut self, input: &[u8], at: usize) -> usize {
        let Read::Data(data) = &mut self.read else {
            return 0;
        };
        let taken = data.left.min(input.len());
        data.left -= taken;
        let is_last = data.left == 0;
        if let Some(key) = data.key {
            let length = self.payload.len() + taken + data.left;
            if length > UNSPLIT_DATA_BYTES_MAX || is_last && self.payload.is_empty() {
                let bytes = at..at + taken;
                self.events.push(Event::Data { key, bytes });
            } else {
                self.payload.extend_from_slice(&input[..taken]);
                if is_last {
                    let bytes = self.payload.as_slice().into();
                    self.events.push(Event::SmallData { key, bytes });
                }
            }
        }
        if is_last {
            let Read::Data(data) = mem::replace(&mut self.read, Read::Header(0)) else {
                return taken;
            };
            self.end_data(&data);
        }
        taken
    }

    fn end_data(&mut self, data: &DataFrame) {
        self.skip(data.padding);
        if data.ends
            && let Some(key) = data.key
            && self.streams.get(key).is_some()
        {
            self.streams.end(key, StreamEnd::Received);
            self.events.push(Event::End(key));
        }
    }

    /// Returns true if no stream with this identifier was opened yet.
    fn is_idle(&self, id: u32) -> bool {
        id.is_multiple_of(2) || id > self.last_stream
    }

    /// Resets a stream for an error of the peer. A stream that is gone is reset too, and charged:
    /// the peer believes that it is open.
    pub(super) fn reject_stream(
        &mut self,
        id: u32,
        code: ErrorCode,
    ) -> Result<(), ConnectionError> {
        match self.streams.find(id).filter(|&key| self.is_open(key)) {
            Some(key) => {
                self.reset(key, code);
                self.events.push(Event::Reset(key, Reason::DownstreamReset));
            }
            None if self.resets.contains(id) => {}
            None => {
                let charged = self.meter.charge(PRICE_RESET, None);
                self.settle(charged)?;
                self.push_reset(id, code);
            }
        }
        Ok(())
    }

    fn end_payload(&mut self, header: FrameHeader) -> Result<(), ConnectionError> {
        self.read = Read::Header(0);
        let payload = mem::take(&mut self.payload);
        let ended = match header.kind {
            kind::HEADERS => self.receive_headers(header, &payload),
            kind::CONTINUATION => self.receive_continuation(header, &payload),
            kind::SETTINGS => self.receive_settings(header, &payload),
            kind::PING if header.has(flag::ACK) => {
                self.receive_pong(&payload);
                Ok(())
            }
            kind::PING => {
                frame::push(&mut self.control, kind::PING, flag::ACK, 0, &payload);
                Ok(())
            }
            kind::RST_STREAM => self.receive_reset(header.stream, &payload),
            kind::WINDOW_UPDATE => self.receive_window_update(header.stream, &payload),
            kind::PRIORITY => {
                let is_open = self.streams.find(header.stream).is_some();
                if is_open && is_self_dependent(header.stream, &payload) {
                    self.reject_stream(header.stream, ErrorCode::PROTOCOL_ERROR)
                } else {
                    Ok(())
                }
            }
            _ => Ok(()),
        };
        if payload.capacity() <= DEFAULT_FRAME_BYTES {
            self.payload = payload;
        }
        ended
    }

    fn receive_settings(
        &mut self,
        header: FrameHeader,
        payload: &[u8],
    ) -> Result<(), ConnectionError> {
        if header.has(flag::ACK) {
            self.measure_rtt();
            return Ok(());
        }
        self.has_settings = true;
        // Only the last value counts (RFC 9113 section 6.5.3), so all streams are visited once.
        let mut window = None;
        for entry in payload.chunks_exact(6) {
            let [n0, n1, v0, v1, v2, v3] = entry else {
                continue;
            };
            let value = u32::from_be_bytes([*v0, *v1, *v2, *v3]);
            match u16::from_be_bytes([*n0, *n1]) {
                setting::ENABLE_PUSH if value > 1 => {
                    return Err(protocol_error("SETTINGS_ENABLE_PUSH above 1"));
                }
                setting::MAX_FRAME_SIZE if !(1 << 14..1 << 24).contains(&value) => {
                    return Err(protocol_error("SETTINGS_MAX_FRAME_SIZE out of bounds"));
                }
                setting::INITIAL_WINDOW_SIZE if i64::from(value) > WINDOW_MAX => {
                    let rule = "SETTINGS_INITIAL_WINDOW_SIZE above 2^31 - 1";
                    return Err(ConnectionError::new(ErrorCode::FLOW_CONTROL_ERROR, rule));
                }
                setting::INITIAL_WINDOW_SIZE => window = Some(value),
                // Responses do not use the dynamic table; a smaller one has to be confirmed.
                setting::HEADER_TABLE_SIZE if value < 4096 => self.owes_table_update = true,
                _ => {}
            }
        }
        if let Some(window) = window {
            self.set_peer_window(window)?;
        }
        frame::push(&mut self.control, kind::SETTINGS, flag::ACK, 0, &[]);
        Ok(())
    }

    fn receive_reset(&mut self, id: u32, payload: &[u8]) -> Result<(), ConnectionError> {
        if self.is_idle(id) {
            return Err(protocol_error("RST_STREAM on an idle stream"));
        }
        let code = ErrorCode::from(first_u32(payload));
        if let Some(key) = self.streams.find(id)
            && self.is_open(key)
        {
            self.streams.end(key, StreamEnd::Reset);
            self.events.push(Event::Reset(key, reason_of_code(code)));
        }
        Ok(())
    }

    fn receive_window_update(&mut self, id: u32, payload: &[u8]) -> Result<(), ConnectionError> {
        let increment = i64::from(first_u32(payload) & 0x7fff_ffff);
        if id == 0 {
            self.windows.send += increment;
            if increment == 0 {
                return Err(protocol_error("WINDOW_UPDATE of 0"));
            }
            if self.windows.send > WINDOW_MAX {
                let rule = "window of the connection above 2^31 - 1";
                return Err(ConnectionError::new(ErrorCode::FLOW_CONTROL_ERROR, rule));
            }
            return Ok(());
        }
        if self.is_idle(id) {
            return Err(protocol_error("WINDOW_UPDATE on an idle stream"));
        }
        let Some(key) = self.streams.find(id) else {
            return Ok(());
        };
        let Some(stream) = self.streams.get_mut(key).filter(|it| !it.is_reset()) else {
            return Ok(());
        };
        stream.send_window += increment;
        if increment == 0 {
            return self.reject_stream(id, ErrorCode::PROTOCOL_ERROR);
        }
        if stream.send_window > WINDOW_MAX {
            return self.reject_stream(id, ErrorCode::FLOW_CONTROL_ERROR);
        }
        if stream.is_blocked && stream.send_window > 0 {
            stream.is_blocked = false;
            self.events.push(Event::Writable(key));
        }
        Ok(())
    }
}

/// Returns the first four bytes as a number, or 0.
fn first_u32(payload: &[u8]) -> u32 {
    payload.first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes))
}

/// Returns true if a stream's priority makes it depend on itself.
pub(super) fn is_self_dependent(id: u32, priority: &[u8]) -> bool {
    first_u32(priority) & 0x7fff_ffff == id
}

/// Returns the reason of a reset by the peer. Peers reset by CANCEL or NO_ERROR when they abandon
/// a tunnel (docs/wire-contract.md 1.6).
fn reason_of_code(code: ErrorCode) -> Reason {
    match code {
        ErrorCode::CANCEL | ErrorCode::NO_ERROR => Reason::DownstreamCancelled,
        _ => Reason::DownstreamReset,
    }
}
