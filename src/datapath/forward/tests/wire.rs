//! Peer's side of a connection in memory, and the frames and records on it.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use bytes::{Buf, BytesMut};

use super::*;
use crate::datapath::tests::plain::push_record;
use crate::tls::record::{HEADER_BYTES, TRAILER_BYTES};

pub(super) use crate::datapath::http2::frame::flag::{
    ACK, END_HEADERS, END_STREAM, PADDED, PRIORITY as PRIORITIZED,
};
pub(super) use crate::datapath::http2::frame::kind::*;

/// Content types of records (RFC 8446 section 5.1).
const ALERT: u8 = 21;
pub(super) const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;

/// Frame of either side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: u8,
    pub(super) flags: u8,
    pub(super) stream: u32,
    pub(super) payload: Vec<u8>,
}

impl Frame {
    pub(super) fn new(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Self {
        Self { kind, flags, stream, payload: payload.to_vec() }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let [.., a, b, c] = self.payload.len().to_be_bytes();
        let [s0, s1, s2, s3] = self.stream.to_be_bytes();
        let header = [a, b, c, self.kind, self.flags, s0, s1, s2, s3];
        [&header, self.payload.as_slice()].concat()
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Returns the number at `start` of the payload.
    pub(super) fn number(&self, start: usize) -> u32 {
        let bytes = self.payload[start..start + 4].try_into();
        u32::from_be_bytes(bytes.expect("four bytes"))
    }
}

/// Message of the gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Received {
    Frame(Frame),
    KeyUpdate,
    Alert([u8; 2]),
}

/// State of the link between a peer and the gateway.
#[derive(Debug, Default)]
struct Link {
    to_gateway: BytesMut,
    from_gateway: BytesMut,
    /// Number of bytes that the gateway may still write.
    room: usize,
    /// Limits of one read and one write of the gateway.
    read_max: usize,
    write_max: usize,
    has_ended: bool,
    /// Bytes that arrive while the gateway writes next, which fails.
    last: Option<Vec<u8>>,
    is_reset: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

/// Gateway's end of the link.
#[derive(Clone, Debug)]
pub(super) struct GatewayEnd(Rc<RefCell<Link>>);

/// Peer's end of the link.
#[derive(Debug)]
pub(super) struct PeerEnd {
    link: Rc<RefCell<Link>>,
    /// Bytes of frames that are not complete.
    frames: BytesMut,
}

pub(super) fn link() -> (GatewayEnd, PeerEnd) {
    let link = Rc::new(RefCell::new(Link {
        room: usize::MAX,
        read_max: usize::MAX,
        write_max: usize::MAX,
        ..Link::default()
    }));
    let peer = PeerEnd { link: Rc::clone(&link), frames: BytesMut::new() };
    (GatewayEnd(link), peer)
}

impl PeerEnd {
    /// Sends bytes as one record.
    pub(super) fn send(&self, bytes: &[u8]) {
        self.edit(|link| push_record(&mut link.to_gateway, bytes));
    }

    /// Sends a record of another type.
    pub(super) fn send_record(&self, kind: u8, payload: &[u8]) {
        let mut record = BytesMut::new();
        push_record(&mut record, payload);
        let at = HEADER_BYTES + payload.len();
        record[at] = kind;
        self.send_raw(&record);
    }

    /// Sends bytes that may be a part of a record.
    pub(super) fn send_raw(&self, bytes: &[u8]) {
        self.edit(|link| link.to_gateway.extend_from_slice(bytes));
    }

    /// Sends FIN.
    pub(super) fn end(&self) {
        self.edit(|link| link.has_ended = true);
    }

    /// Sends bytes and RST while the gateway writes next.
    pub(super) fn reset_at_next_write(&self, bytes: &[u8]) {
        self.edit(|link| link.last = Some(bytes.to_vec()));
    }

    /// Sets the number of bytes that the gateway may write.
    pub(super) fn set_room(&self, room: usize) {
        self.edit(|link| link.room = room);
    }

    /// Sets the limits of one read and one write of the gateway.
    pub(super) fn set_pieces(&self, read_max: usize, write_max: usize) {
        self.edit(|link| (link.read_max, link.write_max) = (read_max, write_max));
    }

    /// Returns true if the gateway may write all that it has.
    pub(super) fn is_reading(&self) -> bool {
        self.link.borrow().room > usize::MAX / 2
    }

    /// Returns true if the gateway has taken everything that was sent.
    pub(super) fn is_read(&self) -> bool {
        self.link.borrow().to_gateway.is_empty()
    }

    fn edit(&self, change: impl FnOnce(&mut Link)) {
        let mut link = self.link.borrow_mut();
        change(&mut link);
        let wakers = [link.reader.take(), link.writer.take()];
        drop(link);
        wakers.into_iter().flatten().for_each(Waker::wake);
    }

    /// Receives the messages that are complete.
    pub(super) fn receive(&mut self) -> Vec<Received> {
        let mut received = Vec::new();
        let mut link = self.link.borrow_mut();
        while let [_, _, _, high, low, ..] = *link.from_gateway {
            let bytes = HEADER_BYTES + usize::from(u16::from_be_bytes([high, low]));
            if link.from_gateway.len() < bytes {
                break;
            }
            let record = link.from_gateway.split_to(bytes);
            let (payload, trailer) = record[HEADER_BYTES..].split_at(bytes - HEADER_BYTES - 17);
            assert_eq!(trailer.len(), TRAILER_BYTES);
            match (trailer[0], payload) {
                (APPLICATION_DATA, _) => self.frames.extend_from_slice(payload),
                (HANDSHAKE, [24, 0, 0, 1, 0]) => received.push(Received::KeyUpdate),
                (ALERT, &[level, code]) => received.push(Received::Alert([level, code])),
                other => panic!("a record of {other:?}"),
            }
            while let Some(frame) = split_frame(&mut self.frames) {
                received.push(Received::Frame(frame));
            }
        }
        received
    }
}

fn split_frame(bytes: &mut BytesMut) -> Option<Frame> {
    let &[a, b, c, kind, flags, s0, s1, s2, s3] = bytes.first_chunk()?;
    let end = 9 + u32::from_be_bytes([0, a, b, c]) as usize;
    if bytes.len() < end {
        return None;
    }
    let frame = bytes.split_to(end);
    Some(Frame::new(kind, flags, u32::from_be_bytes([s0, s1, s2, s3]), &frame[9..]))
}

impl AsyncRead for GatewayEnd {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut link = self.0.borrow_mut();
        if link.to_gateway.is_empty() && link.is_reset {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        if link.to_gateway.is_empty() && !link.has_ended {
            link.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let room = buffer.remaining().min(link.read_max);
        let count = room.min(link.to_gateway.len());
        buffer.put_slice(&link.to_gateway[..count]);
        link.to_gateway.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for GatewayEnd {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut link = self.0.borrow_mut();
        if let Some(bytes) = link.last.take() {
            push_record(&mut link.to_gateway, &bytes);
            link.is_reset = true;
        }
        if link.is_reset {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        let count = data.len().min(link.room).min(link.write_max);
        if count == 0 {
            link.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        if link.room != usize::MAX {
            link.room -= count;
        }
        link.from_gateway.extend_from_slice(&data[..count]);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
