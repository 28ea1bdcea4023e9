//! A tunnel as a byte stream.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use h2::{Reason, RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::runtime::Handle;
use tokio::time::timeout;

/// One CONNECT stream that was answered 200.
///
/// Reading gives end of file at the peer's END_STREAM and at nothing else; a reset is an error
/// of which [`Tunnel::reset_code`] tells the code. Shutting down sends END_STREAM. Dropping it
/// before that resets the stream with CANCEL, as a client does that has lost interest; dropping it
/// after that lets the peer's END_STREAM still come, as a kernel does for a closed socket.
#[derive(Debug)]
pub struct Tunnel {
    send: SendStream<Bytes>,
    receive: Option<RecvStream>,
    unread: Bytes,
    finished: bool,
}

/// How long, and for how many bytes, the peer's END_STREAM is waited for after a drop.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES_MAX: usize = 64 * 1024;
/// The most that is handed to h2 at once.
const WRITE_BYTES_MAX: usize = 64 * 1024;

impl Tunnel {
    pub(super) fn new(send: SendStream<Bytes>, receive: RecvStream) -> Self {
        Self {
            send,
            receive: Some(receive),
            unread: Bytes::new(),
            finished: false,
        }
    }

    /// The RST_STREAM code that an error of this stream stands for.
    pub fn reset_code(error: &io::Error) -> Option<Reason> {
        let error = error.get_ref()?.downcast_ref::<h2::Error>()?;
        error.reason().filter(|_| error.is_reset())
    }

    /// Resets the stream with `code`.
    pub fn reset(mut self, code: Reason) {
        self.finished = true;
        self.receive = None;
        self.send.send_reset(code);
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        if !self.finished {
            return self.send.send_reset(Reason::CANCEL);
        }
        if let (Some(receive), Ok(runtime)) = (self.receive.take(), Handle::try_current()) {
            runtime.spawn(timeout(LINGER, linger(receive)));
        }
    }
}

/// Reads to the peer's END_STREAM, its reset, or the limit.
async fn linger(mut receive: RecvStream) {
    let mut left = LINGER_BYTES_MAX;
    while let Some(Ok(bytes)) = receive.data().await {
        let Some(rest) = left.checked_sub(bytes.len()) else {
            return;
        };
        left = rest;
        let _ = receive.flow_control().release_capacity(bytes.len());
    }
}

fn broken(error: h2::Error) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, error)
}

impl AsyncRead for Tunnel {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self {
            receive, unread, ..
        } = &mut *self;
        // None after the end of file, which a reader may ask for again.
        let Some(stream) = receive else {
            return Poll::Ready(Ok(()));
        };
        while unread.is_empty() {
            match ready!(stream.poll_data(cx)) {
                Some(Ok(bytes)) => *unread = bytes,
                Some(Err(error)) => return Poll::Ready(Err(broken(error))),
                None => {
                    *receive = None;
                    return Poll::Ready(Ok(()));
                }
            }
        }
        let count = unread.len().min(buffer.remaining());
        buffer.put_slice(&unread[..count]);
        unread.advance(count);
        stream
            .flow_control()
            .release_capacity(count)
            .map_err(broken)?;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Tunnel {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        if data.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let wanted = data.len().min(WRITE_BYTES_MAX);
        self.send.reserve_capacity(wanted);
        let mut capacity = self.send.capacity();
        while capacity == 0 {
            capacity = match ready!(self.send.poll_capacity(cx)) {
                Some(granted) => granted.map_err(broken)?,
                None => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
            };
        }
        let count = capacity.min(wanted);
        self.send
            .send_data(Bytes::copy_from_slice(&data[..count]), false)
            .map_err(broken)?;
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.finished {
            self.finished = true;
            self.send.reserve_capacity(0);
            self.send.send_data(Bytes::new(), true).map_err(broken)?;
        }
        Poll::Ready(Ok(()))
    }
}
