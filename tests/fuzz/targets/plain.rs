//! Peer of `RecordLayer::plaintext`, for the fuzz targets and the unit tests of the data path.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{HEADER_BYTES, PLAINTEXT_MAX, TRAILER_BYTES};

/// Content type of application data.
const APPLICATION_DATA: u8 = 23;
/// Limit of one read.
const READ_BYTES: usize = 16 * 1024;

/// Stream that frames written bytes as unencrypted records, and unwraps records when it reads.
#[derive(Debug)]
pub(crate) struct PlainRecords<S> {
    stream: S,
    received: BytesMut,
    payload: BytesMut,
    unsent: BytesMut,
}

impl<S> PlainRecords<S> {
    /// Wraps a stream.
    pub(crate) fn new(stream: S) -> Self {
        Self {
            stream,
            received: BytesMut::new(),
            payload: BytesMut::new(),
            unsent: BytesMut::new(),
        }
    }

    /// Unwraps the complete records. Alerts are dropped.
    fn unwrap_records(&mut self) {
        while let [_, _, _, high, low, ..] = *self.received {
            let bytes = HEADER_BYTES + usize::from(u16::from_be_bytes([high, low]));
            if self.received.len() < bytes {
                return;
            }
            let record = self.received.split_to(bytes);
            let payload = HEADER_BYTES..bytes.saturating_sub(TRAILER_BYTES);
            if record.get(payload.end) == Some(&APPLICATION_DATA) {
                self.payload.extend_from_slice(&record[payload]);
            }
        }
    }
}

/// Appends `payload` to `out` as one record.
pub(crate) fn push_record(out: &mut BytesMut, payload: &[u8]) {
    let length = u16::try_from(payload.len() + TRAILER_BYTES).unwrap_or(u16::MAX);
    let [high, low] = length.to_be_bytes();
    out.extend_from_slice(&[APPLICATION_DATA, 3, 3, high, low]);
    out.extend_from_slice(payload);
    out.extend_from_slice(&[APPLICATION_DATA]);
    out.resize(out.len() + TRAILER_BYTES - 1, 0);
}

impl<S: AsyncRead + Unpin> AsyncRead for PlainRecords<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while this.payload.is_empty() {
            let mut bytes = [0; READ_BYTES];
            let mut read = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut read))?;
            if read.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            this.received.extend_from_slice(read.filled());
            this.unwrap_records();
        }
        let count = buffer.remaining().min(this.payload.len());
        buffer.put_slice(&this.payload.split_to(count));
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PlainRecords<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.as_mut().poll_flush(cx))?;
        let count = data.len().min(PLAINTEXT_MAX);
        push_record(&mut self.unsent, &data[..count]);
        // The record is sent now or with the next call.
        if let Poll::Ready(Err(error)) = self.as_mut().poll_flush(cx) {
            return Poll::Ready(Err(error));
        }
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while !this.unsent.is_empty() {
            let sent = ready!(Pin::new(&mut this.stream).poll_write(cx, &this.unsent))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            this.unsent.advance(sent);
        }
        Pin::new(&mut this.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.as_mut().poll_flush(cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
