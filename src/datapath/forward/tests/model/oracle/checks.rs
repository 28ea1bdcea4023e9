//! Checks of the gateway's messages by the state of the oracle.

use anyhow::{Result, bail, ensure};

use super::super::super::wire::{
    ACK, DATA, END_HEADERS, END_STREAM, Frame, GOAWAY, HEADERS, PING, RST_STREAM, Received,
    SETTINGS, WINDOW_UPDATE,
};
use super::{
    CONNECT_ERROR, Closed, Far, KEEPALIVE, Oracle, PEER_FRAME_MAX, Phase, ResetBy, STREAM_WINDOW,
    STREAM_WINDOW_MAX, Stream,
};

impl Oracle {
    /// Checks a message of the gateway. `expected` returns bytes of an endpoint.
    pub(in super::super) fn check(
        &mut self,
        message: &Received,
        expected: impl Fn(u32, usize, usize) -> Vec<u8>,
    ) -> Result<()> {
        ensure!(!self.has_alert, "a message after the alert");
        let frame = match message {
            Received::Frame(frame) => frame,
            Received::KeyUpdate => {
                ensure!(self.key_updates_requested > 0, "an extra KeyUpdate");
                self.key_updates_requested -= 1;
                self.is_key_update_due = false;
                return Ok(());
            }
            Received::Alert(alert) => {
                ensure!(*alert == [1, 0], "alert {alert:?}");
                self.has_alert = true;
                return Ok(());
            }
        };
        match (frame.kind, frame.stream) {
            (DATA, _) => self.check_data(frame, expected),
            (HEADERS, id) => self.check_answer(id, frame),
            (RST_STREAM, id) => self.check_reset(id, frame.number(0)),
            (WINDOW_UPDATE, 1..) => self.check_update(frame),
            (SETTINGS | PING | GOAWAY | WINDOW_UPDATE, _) => self.check_due(frame),
            _ => bail!("{frame:?}"),
        }
    }

    fn check_due(&mut self, frame: &Frame) -> Result<()> {
        let mut due = self.due.pop_front();
        if let Some(keepalive) = &mut due
            && keepalive.payload == KEEPALIVE
            && let Ok(payload) = <[u8; 8]>::try_from(&frame.payload[..])
        {
            keepalive.payload = payload.to_vec();
            self.ping = Some(payload);
        }
        ensure!(due.as_ref() == Some(frame), "{frame:?}, not {due:?}");
        let is_ack = |frame: &Frame| frame.kind == SETTINGS && frame.has(ACK);
        if is_ack(frame) && !self.due.iter().any(is_ack) {
            for stream in self.streams.values_mut() {
                stream.limit = stream.credit.max(stream.received as i64);
            }
        }
        Ok(())
    }

    fn check_data(
        &mut self,
        frame: &Frame,
        expected: impl Fn(u32, usize, usize) -> Vec<u8>,
    ) -> Result<()> {
        let (id, length) = (frame.stream, frame.payload.len());
        let Some(stream) = self.streams.get_mut(&id) else {
            bail!("DATA on stream {id}");
        };
        ensure!(stream.is_answered, "DATA before the answer of stream {id}");
        ensure!(!stream.gateway_ended, "DATA after END_STREAM on {id}");
        ensure!(stream.reset != ResetBy::Seen, "DATA after RST_STREAM on {id}");
        ensure!(!stream.is_reset_settled, "DATA on {id}, which was reset");
        ensure!(length <= PEER_FRAME_MAX, "a frame of {length} bytes");
        let bytes = expected(id, stream.received, length);
        ensure!(bytes == frame.payload, "wrong bytes of stream {id}");
        stream.received += length;
        self.received += length as i64;
        ensure!(stream.received <= stream.produced, "bytes of nobody");
        ensure!(
            length == 0 || stream.received as i64 <= stream.limit,
            "{} bytes on stream {id} with {}",
            stream.received,
            stream.limit
        );
        ensure!(self.received <= self.credit, "the connection has no window");
        if frame.has(END_STREAM) {
            let has_ended = matches!(stream.far, Far::Ended | Far::Left);
            ensure!(has_ended, "END_STREAM of stream {id}");
            ensure!(stream.received == stream.produced, "END_STREAM too early");
            stream.gateway_ended = true;
        }
        Ok(())
    }

    fn check_answer(&mut self, id: u32, frame: &Frame) -> Result<()> {
        let fields = self.decoder.decode(&frame.payload);
        let fields = fields.map_err(|error| anyhow::anyhow!("{error:?}"))?;
        let Some(stream) = self.streams.get_mut(&id) else {
            bail!("an answer on stream {id}");
        };
        let due = stream.status_due.take();
        let want = due.map(|status| (b":status".to_vec(), status.to_string().into_bytes()));
        ensure!(fields.first() == want.as_ref(), "{fields:?}, not {due:?}");
        ensure!(fields.len() == 1 && frame.has(END_HEADERS));
        ensure!(frame.has(END_STREAM) == (due != Some(200)));
        stream.is_answered = true;
        Ok(())
    }

    fn check_reset(&mut self, id: u32, code: u32) -> Result<()> {
        let Some(stream) = self.streams.get_mut(&id) else {
            bail!("RST_STREAM on stream {id}");
        };
        if stream.reset == ResetBy::None && stream.closed == Closed::No && stream.far == Far::Reset
        {
            ensure!(code == CONNECT_ERROR, "code {code} for an endpoint");
        } else {
            let due = stream.reset;
            ensure!(due == ResetBy::Due(code), "code {code} of {id}, not {due:?}");
        }
        stream.closed = Closed::ByGateway;
        stream.reset = ResetBy::Seen;
        Ok(())
    }

    fn check_update(&mut self, frame: &Frame) -> Result<()> {
        let (id, increment) = (frame.stream, i64::from(frame.number(0)));
        let Some(stream) = self.streams.get_mut(&id) else {
            bail!("WINDOW_UPDATE on stream {id}");
        };
        ensure!(stream.reset != ResetBy::Seen, "WINDOW_UPDATE after RST_STREAM");
        stream.allowance += increment;
        ensure!(increment > 0 && stream.allowance <= STREAM_WINDOW_MAX);
        Ok(())
    }

    /// Checks that nothing is due once the gateway waits and the peer reads. `is_drained` returns
    /// whether an endpoint reads, and whether it has received FIN.
    pub(in super::super) fn check_quiet(
        &mut self,
        is_drained: impl Fn(u32) -> Option<(bool, bool)>,
    ) -> Result<()> {
        ensure!(self.due.is_empty(), "missing: {:?}", self.due);
        ensure!(!self.is_key_update_due, "no KeyUpdate");
        self.key_updates_requested = 0;
        ensure!(self.has_alert || !self.is_fatal && !self.is_closing, "no alert");
        let window = self.window();
        let is_over = self.has_alert;
        for (id, stream) in &mut self.streams {
            ensure!(stream.status_due.is_none(), "no answer of {id}");
            let is_due = matches!(stream.reset, ResetBy::Due(_));
            ensure!(!is_due, "stream {id} misses {:?}", stream.reset);
            stream.is_reset_settled |= stream.closed == Closed::ByPeer;
            if is_over || stream.phase != Phase::Open || stream.closed != Closed::No {
                continue;
            }
            stream
                .check_quiet(is_drained(*id), window)
                .map_err(|error| error.context(format!("stream {id}: {stream:?}")))?;
        }
        Ok(())
    }
}

impl Stream {
    fn check_quiet(&mut self, endpoint: Option<(bool, bool)>, connection: i64) -> Result<()> {
        let can_send = self.window() > 0 && connection > 0;
        if self.far == Far::Reset {
            ensure!(!can_send, "no reset for its endpoint");
            return Ok(());
        }
        if can_send {
            ensure!(self.received == self.produced, "bytes of the endpoint");
            let has_ended = matches!(self.far, Far::Ended | Far::Left);
            ensure!(self.gateway_ended == has_ended, "END_STREAM");
        }
        if let Some((true, has_end)) = endpoint {
            ensure!(self.taken == self.sent, "bytes of the peer");
            ensure!(has_end == self.peer_ended, "FIN");
            // Half of a window is announced again.
            let is_open = self.peer_ended || self.allowance >= STREAM_WINDOW / 2;
            ensure!(is_open, "a window of {}", self.allowance);
        }
        let is_upload_done = self.far == Far::Left || endpoint.is_some_and(|(_, end)| end);
        if self.peer_ended && self.gateway_ended && is_upload_done {
            self.closed = Closed::Done;
        }
        Ok(())
    }
}
