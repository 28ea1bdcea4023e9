//! Received records of an HBONE connection, as a part of its turns.

use std::io::IoSlice;
use std::ops::Range;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite};

use super::downstream::ConnectionEnd;
use super::turn::HboneConnection;
use crate::datapath::http2::server::{ConnectionError, Event};
use crate::datapath::http2::streams::StreamKey;
use crate::tls::record::Content;

/// Limit of slices in one write to an endpoint.
const SLICES_MAX: usize = 32;
/// Limit of the turns in which a connection that is lost receives the rest.
const REST_TURNS: usize = 4;

impl<S: AsyncRead + AsyncWrite + Unpin> HboneConnection<S> {
    /// Reads the peer once, unless records are left, and forwards what it sent. Returns true if
    /// there may be more.
    ///
    /// # Errors
    /// The connection has to end. Everything before the violation was forwarded.
    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>) -> Result<bool, ConnectionEnd> {
        if !self.has_unread {
            if self.is_read_closed {
                return Ok(false);
            }
            match self.input.poll_read(cx, &mut self.socket) {
                Poll::Pending => return Ok(false),
                Poll::Ready(Ok(0)) => self.is_read_closed = true,
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => return Err(ConnectionEnd::Lost(error)),
            }
        }
        let opened = self.open_records();
        self.handle_events();
        if self.unread.is_empty() {
            self.input.release_if_empty();
        }
        opened.map(|()| true)
    }

    /// Forwards what the peer has sent before its end, once a write has failed. A peer that closes
    /// with its last stream resets the connection if anything is sent to it meanwhile, and the end
    /// of that stream may not have been read.
    pub(super) fn receive_rest(&mut self, cx: &mut Context<'_>, end: &ConnectionEnd) {
        if !matches!(end, ConnectionEnd::Lost(_)) {
            return;
        }
        for _ in 0..REST_TURNS {
            self.downstream.server.meter.begin_turn(false);
            if !matches!(self.poll_read(cx), Ok(true)) {
                return;
            }
        }
    }

    /// Processes the records that were received, until the turn is over.
    fn open_records(&mut self) -> Result<(), ConnectionEnd> {
        loop {
            let server = &mut self.downstream.server;
            self.has_unread = server.meter.is_turn_over();
            if self.has_unread {
                return Ok(());
            }
            if self.unread.is_empty() {
                if !self.open_record()? {
                    return Ok(());
                }
                continue;
            }
            let input = &self.input.bytes()[..self.unread.end];
            let received = server.receive(input, self.unread.start, &mut self.events);
            self.unread.start = received.map_err(ConnectionEnd::Http2)?;
        }
    }

    /// Opens the next record. Returns false if it is incomplete, or nothing may follow.
    fn open_record(&mut self) -> Result<bool, ConnectionEnd> {
        let opened = self.input.open(&mut self.downstream.layer);
        let Some(record) = opened.map_err(ConnectionEnd::Record)? else {
            return Ok(false);
        };
        let meter = &mut self.downstream.server.meter;
        let charged = match record.content {
            Content::KeyUpdate { .. } => meter.received_key_update(),
            _ => meter.received_record(record.payload.len()),
        };
        // Records belong to no stream, and are charged to the connection alone.
        charged.map_err(|_| ConnectionEnd::Http2(ConnectionError::EXHAUSTED))?;
        match record.content {
            Content::ApplicationData => self.unread = record.payload,
            Content::KeyUpdate { requested } => {
                self.downstream.is_key_update_requested |= requested;
            }
            Content::CloseNotify => {
                self.is_read_closed = true;
                return Ok(false);
            }
            Content::Nothing => {}
        }
        Ok(true)
    }

    /// Forwards DATA of a stream, together with its DATA in later events.
    pub(super) fn forward(
        &mut self,
        key: StreamKey,
        bytes: Range<usize>,
        later: &mut [Event],
        input: &[u8],
    ) {
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        slices[0] = IoSlice::new(&input[bytes]);
        let mut count = 1;
        for event in later.iter_mut().take(SLICES_MAX - 1) {
            match event {
                Event::Data { key: of, bytes } if *of == key => {
                    slices[count] = IoSlice::new(&input[bytes.clone()]);
                    count += 1;
                    *event = Event::Handled;
                }
                Event::SmallData { key: of, .. } | Event::End(of) | Event::Reset(of, _)
                    if *of == key =>
                {
                    break;
                }
                _ => {}
            }
        }
        self.receive_data(key, &slices[..count]);
    }
}
