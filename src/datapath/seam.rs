//! The seam between TLS and h2: every plaintext byte of an HTTP/2 connection crosses it.
//!
//! It meters the frames, and it spends tokio's cooperative budget for them: what TLS serves from
//! its own buffers would otherwise be free, and one connection with full buffers, or with a
//! thousand tiny frames in one of them, could keep its worker to itself.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Notify, oneshot};
use tokio::task::coop;

use super::meter::Meter;

/// A TLS stream as h2 sees it. When h2 drops it, its owner gets the stream back.
#[derive(Debug)]
pub struct Seam<S> {
    /// None only while it is dropped.
    stream: Option<S>,
    owner: Option<oneshot::Sender<S>>,
    meter: Meter,
    exhausted: Arc<Notify>,
    /// Set once the credit is used up: nothing more is read.
    closed: bool,
    /// The end of the stream, until it is told.
    end: Option<io::Result<()>>,
}

/// What the owner of a connection keeps of its seam.
#[derive(Debug)]
pub struct Owner<S> {
    /// Gets the stream back.
    pub returned: oneshot::Receiver<S>,
    /// Told once when the connection's credit is used up.
    pub exhausted: Arc<Notify>,
}

/// Frames for one unit of the cooperative budget, of which a turn has 128.
const FRAMES_PER_UNIT: u32 = 4;

impl<S> Seam<S> {
    /// Wraps a TLS stream whose handshake is done.
    pub fn new(stream: S) -> (Self, Owner<S>) {
        let (owner, returned) = oneshot::channel();
        let exhausted = Arc::new(Notify::new());
        let seam = Self {
            stream: Some(stream),
            owner: Some(owner),
            meter: Meter::new(),
            exhausted: Arc::clone(&exhausted),
            closed: false,
            end: None,
        };
        (
            seam,
            Owner {
                returned,
                exhausted,
            },
        )
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
        if self.closed {
            // The owner has been woken and ends the connection; there is nothing to wait for.
            return Poll::Pending;
        }
        if let Some(end) = self.end.take() {
            return Poll::Ready(end);
        }
        let budget = ready!(coop::poll_proceed(cx));
        let before = buffer.filled().len();
        let read = ready!(self.stream()?.poll_read(cx, buffer));
        budget.made_progress();
        if read.is_err() || buffer.filled().len() == before {
            // Told one turn late: h2 forgets that a stream has ended when its connection does, and
            // the tunnels whose last bytes came together with this end shall have seen theirs.
            self.end = Some(read);
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        match self.meter.received(&buffer.filled()[before..]) {
            Ok(frames) => {
                spend(cx, frames / FRAMES_PER_UNIT);
                Poll::Ready(Ok(()))
            }
            Err(_) => {
                self.closed = true;
                self.exhausted.notify_one();
                Poll::Pending
            }
        }
    }
}

/// Spends budget for work that is done after this read. What is overspent is this turn's loss.
fn spend(cx: &mut Context<'_>, units: u32) {
    for _ in 0..units {
        let Poll::Ready(unit) = coop::poll_proceed(cx) else {
            return;
        };
        unit.made_progress();
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Seam<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(self.stream()?.poll_write(cx, data))?;
        self.meter.sent(&data[..written]);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(self.stream()?.poll_write_vectored(cx, data))?;
        let mut left = written;
        for slice in data {
            let part = &slice[..left.min(slice.len())];
            self.meter.sent(part);
            left -= part.len();
        }
        Poll::Ready(Ok(written))
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

    /// A stream that always has bytes, as TLS has while its buffer is full: a preface, and then
    /// the same nine bytes over and over, which are a frame.
    struct Endless {
        frame: [u8; 9],
        at: usize,
    }

    impl Endless {
        fn new(kind: u8, flags: u8) -> Self {
            // The preface, 24 bytes, ends in the middle of a repetition.
            Self {
                frame: [0, 0, 0, kind, flags, 0, 0, 0, 1],
                at: 3,
            }
        }
    }

    impl AsyncRead for Endless {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            buffer.put_slice(&[self.frame[self.at % 9]]);
            self.at += 1;
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_is_always_readable_lets_other_tasks_run() {
        let (stop, mut stopped) = oneshot::channel();
        let greedy = tokio::spawn(async move {
            // Empty DATA with END_STREAM costs nothing.
            let (mut seam, _owner) = Seam::new(Endless::new(0, 1));
            while stopped.try_recv().is_err() {
                let _ = seam.read_u8().await;
            }
        });
        tokio::task::yield_now().await;
        assert!(stop.send(()).is_ok(), "the greedy task has let us run");
        assert!(greedy.await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_used_up_its_credit_is_read_no_more_and_its_owner_is_told() {
        let ping = 6;
        let (mut seam, owner) = Seam::new(Endless::new(ping, 0));
        let greedy = tokio::spawn(async move { while seam.read_u8().await.is_ok() {} });
        owner.exhausted.notified().await;
        assert!(!greedy.is_finished());
        greedy.abort();
        assert!(owner.returned.await.is_ok(), "the stream comes back");
    }
}
