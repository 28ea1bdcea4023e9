//! Read buffer below TLS: one system call reads several records.
//!
//! rustls reads 4 KiB at a time, a quarter of a record. This reader requests four records from
//! the socket, and serves rustls from memory. An idle connection holds no buffer.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::buffer::Buffer;

/// Limit of one read. The decryption still finds this much in the processor's cache.
const READ_BYTES_MAX: usize = 64 * 1024;

/// Byte stream with buffered reads and unbuffered writes.
#[derive(Debug)]
pub struct ReadAhead<S> {
    stream: S,
    ahead: Option<BufferedBytes>,
}

/// Bytes that were read from the stream and not consumed: `from..to` of the buffer.
#[derive(Debug)]
struct BufferedBytes {
    buffer: Buffer,
    from: usize,
    to: usize,
}

impl<S> ReadAhead<S> {
    /// Wraps a stream.
    pub fn new(stream: S) -> Self {
        Self {
            stream,
            ahead: None,
        }
    }

    /// Returns the stream. Discards buffered bytes.
    pub fn into_inner(self) -> S {
        self.stream
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ReadAhead<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        wanted: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut ahead = match self.ahead.take() {
            Some(ahead) => ahead,
            None => {
                let mut buffer = Buffer::borrow();
                let mut read = ReadBuf::new(&mut buffer.bytes()[..READ_BYTES_MAX]);
                ready!(Pin::new(&mut self.stream).poll_read(cx, &mut read))?;
                let to = read.filled().len();
                BufferedBytes {
                    buffer,
                    from: 0,
                    to,
                }
            }
        };
        let count = wanted.remaining().min(ahead.to - ahead.from);
        wanted.put_slice(&ahead.buffer.bytes()[ahead.from..ahead.from + count]);
        ahead.from += count;
        self.ahead = (ahead.from < ahead.to).then_some(ahead);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ReadAhead<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let [data] = data {
            // The system call for a single slice is cheaper.
            return Pin::new(&mut self.stream).poll_write(cx, data);
        }
        Pin::new(&mut self.stream).poll_write_vectored(cx, data)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test]
    async fn pieces_come_in_order_and_an_empty_buffer_goes_back() {
        let (mut theirs, ours) = duplex(1 << 20);
        let sent: Vec<u8> = (0..100_000_u32).map(|at| at.to_be_bytes()[3]).collect();
        let mut ahead = ReadAhead::new(ours);
        theirs.write_all(&sent).await.expect("a write");
        let mut got = vec![0; sent.len()];
        for piece in got.chunks_mut(4096) {
            ahead.read_exact(piece).await.expect("a piece");
        }
        assert!(got == sent);
        assert!(
            ahead.ahead.is_none(),
            "nothing is held while nothing is there"
        );
        theirs.write_all(b"last").await.expect("a write");
        drop(theirs);
        let mut rest = Vec::new();
        ahead.read_to_end(&mut rest).await.expect("the end");
        assert_eq!(rest, b"last");
    }

    #[tokio::test]
    async fn a_stream_with_nothing_to_read_holds_no_buffer() {
        let (_theirs, ours) = duplex(1 << 20);
        let mut ahead = ReadAhead::new(ours);
        let mut one = [0];
        let mut read = std::pin::pin!(ahead.read(&mut one));
        let waits = std::future::poll_fn(|cx| Poll::Ready(read.as_mut().poll(cx).is_pending()));
        assert!(waits.await);
        assert!(ahead.ahead.is_none());
    }
}
