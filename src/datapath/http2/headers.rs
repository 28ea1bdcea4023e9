//! Received header blocks: HEADERS and CONTINUATION (RFC 9113 sections 4.3, 6.2 and 6.10).

use h2::Reason as ErrorCode;

use crate::reason::Reason;

use super::frame::{FrameHeader, flag};
use super::receive::{frame_size_error, is_self_dependent, protocol_error};
use super::server::{ConnectionError, Event, Server};
use super::streams::StreamEnd;
use super::{meter, request};

/// Limit of an encoded header block. Decoded lists may have 16 KiB, which Huffman codes of rare
/// octets expand to 60 KiB. A peer that expands one field so is answered on its stream.
const HEADER_BLOCK_BYTES: usize = 64 * 1024;

impl Server {
    pub(super) fn check_block_size(&self, header: FrameHeader) -> Result<(), ConnectionError> {
        let before = self.block.as_ref().map_or(0, |(_, block)| block.len());
        if before + header.length > HEADER_BLOCK_BYTES {
            let rule = "header block above 64 KiB";
            return Err(ConnectionError::new(ErrorCode::ENHANCE_YOUR_CALM, rule));
        }
        Ok(())
    }

    pub(super) fn receive_headers(
        &mut self,
        header: FrameHeader,
        payload: &[u8],
    ) -> Result<(), ConnectionError> {
        let mut block = payload;
        if header.has(flag::PADDED) {
            let Some((padding, rest)) = block.split_first() else {
                return Err(frame_size_error("padded HEADERS without a pad length"));
            };
            let Some(left) = rest.len().checked_sub(usize::from(*padding)) else {
                return Err(protocol_error("padding longer than HEADERS"));
            };
            block = &rest[..left];
        }
        let mut is_self_dependent_stream = false;
        if header.has(flag::PRIORITY) {
            let Some((priority, rest)) = block.split_at_checked(5) else {
                return Err(frame_size_error("HEADERS without its priority"));
            };
            is_self_dependent_stream = is_self_dependent(header.stream, priority);
            block = rest;
        }
        if !header.has(flag::END_HEADERS) {
            self.block = Some((header, block.to_vec()));
            return Ok(());
        }
        self.end_block(header, block)?;
        if is_self_dependent_stream {
            return self.reject_stream(header.stream, ErrorCode::PROTOCOL_ERROR);
        }
        Ok(())
    }

    pub(super) fn receive_continuation(
        &mut self,
        header: FrameHeader,
        payload: &[u8],
    ) -> Result<(), ConnectionError> {
        let Some((headers, mut block)) = self.block.take() else {
            return Ok(());
        };
        block.extend_from_slice(payload);
        if header.has(flag::END_HEADERS) {
            return self.end_block(headers, &block);
        }
        self.block = Some((headers, block));
        Ok(())
    }

    /// Decodes a complete header block, which changes the dynamic table even if the request is
    /// ignored.
    fn end_block(&mut self, header: FrameHeader, block: &[u8]) -> Result<(), ConnectionError> {
        let id = header.stream;
        if id.is_multiple_of(2) {
            return Err(protocol_error("stream of a client with an even identifier"));
        }
        let request = request::decode(&mut self.decoder, block).map_err(|_| {
            ConnectionError::new(ErrorCode::COMPRESSION_ERROR, "invalid header block")
        })?;
        if id <= self.last_stream {
            return self.receive_trailers(id);
        }
        self.last_stream = id;
        if self.is_after_goaway(id) {
            return Ok(());
        }
        if self.streams.is_full() {
            self.push_reset(id, ErrorCode::REFUSED_STREAM);
            return Ok(());
        }
        let Ok(request) = request else {
            self.push_reset(id, ErrorCode::PROTOCOL_ERROR);
            return Ok(());
        };
        let key = self.streams.insert(id, self.peer_window);
        let ended = header.has(flag::END_STREAM);
        if ended {
            self.streams.end(key, StreamEnd::Received);
        }
        self.events.push(Event::Request {
            key,
            request,
            ended,
            price: meter::request_price(block.len()),
        });
        Ok(())
    }

    /// Rejects a header block on a stream that is open: a tunnel carries DATA only (RFC 9113
    /// section 8.5).
    fn receive_trailers(&mut self, id: u32) -> Result<(), ConnectionError> {
        let stream = self.streams.find(id);
        match stream.and_then(|key| Some((key, self.streams.get(key)?))) {
            _ if self.resets.contains(id) => {}
            Some((key, stream)) if !stream.is_reset() && stream.has_received_end() => {
                self.reset(key, ErrorCode::STREAM_CLOSED);
                self.events.push(Event::Reset(key, Reason::DownstreamReset));
            }
            Some((key, stream)) if !stream.is_reset() => {
                self.reset(key, ErrorCode::PROTOCOL_ERROR);
                self.events.push(Event::Reset(key, Reason::Malformed));
            }
            _ => {
                let rule = "HEADERS on a closed stream";
                return Err(ConnectionError::new(ErrorCode::STREAM_CLOSED, rule));
            }
        }
        Ok(())
    }
}
