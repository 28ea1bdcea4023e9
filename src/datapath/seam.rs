//! The seam between TLS and h2: every plaintext byte of an HTTP/2 connection crosses it.
//!
//! It spends tokio's cooperative budget for what TLS serves from its own buffers, which would
//! otherwise be free: one connection with a full buffer could keep its worker to itself.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;
use tokio::task::coop;

/// A TLS stream as h2 sees it. When h2 drops it, its owner gets the stream back.
#[derive(Debug)]
pub struct Seam<S> {
    /// None only while it is dropped.
    stream: Option<S>,
    owner: Option<oneshot::Sender<S>>,
}

impl<S> Seam<S> {
    /// Wraps a TLS stream whose handshake is done; the receiver gets the stream back.
    pub fn new(stream: S) -> (Self, oneshot::Receiver<S>) {
        let (owner, returned) = oneshot::channel();
        let seam = Self {
            stream: Some(stream),
            owner: Some(owner),
        };
        (seam, returned)
    }

    fn stream(&mut self) -> io::Result<Pin<&mut S>>
    where
        S: Unpin,
    {
        self.stream
            .as_mut()
            .map(Pin::new)
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl<S> Drop for Seam<S> {
    fn drop(&mut self) {
        if let (Some(stream), Some(owner)) = (self.stream.take(), self.owner.take()) {
            // An owner that has gone needs nothing back.
            let _ = owner.send(stream);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Seam<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let budget = ready!(coop::poll_proceed(cx));
        ready!(self.stream()?.poll_read(cx, buffer))?;
        budget.made_progress();
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Seam<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.stream()?.poll_write(cx, data)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream()?.poll_write_vectored(cx, data)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream
            .as_ref()
            .is_some_and(AsyncWrite::is_write_vectored)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    /// A stream that always has a byte, as TLS has while its buffer is full.
    struct Endless;

    impl AsyncRead for Endless {
        fn poll_read(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            buffer.put_slice(b"x");
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn a_stream_that_is_always_readable_lets_other_tasks_run() {
        let (stop, mut stopped) = oneshot::channel();
        let greedy = tokio::spawn(async move {
            let (mut seam, _) = Seam::new(Endless);
            while stopped.try_recv().is_err() {
                let _ = seam.read_u8().await;
            }
        });
        tokio::task::yield_now().await;
        assert!(stop.send(()).is_ok(), "the greedy task has let us run");
        assert!(greedy.await.is_ok());
    }
}
