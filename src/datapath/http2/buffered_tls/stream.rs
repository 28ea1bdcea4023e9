//! Adapter between TLS and h2, through which all plaintext of an HTTP/2 connection passes.
//!
//! It meters the frames and spends tokio's cooperative budget on them. Reads from the TLS buffer
//! are free otherwise: one connection with full buffers, or with a thousand tiny frames in one
//! buffer, could occupy its worker.
//!
//! It also coalesces writes. h2 flushes after each DATA frame, at the cost of a TLS record and a
//! system call each. Small frames share a record, large ones are sealed at once, and the writes
//! of one poll of the connection are sent together at its end.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::task::coop;

use crate::datapath::http2::meter::FrameMeter;
use crate::datapath::io::buffer::{BUFFER_BYTES, Buffer};

use super::seal::BufferedWrite;

/// TLS stream as used by h2.
#[derive(Debug)]
pub struct BufferedTls<S>(Arc<Mutex<BufferedTlsState<S>>>);

/// Second handle of the stream, for the owner of the connection.
#[derive(Debug)]
pub struct BufferedTlsOwner<S> {
    crossing: Arc<Mutex<BufferedTlsState<S>>>,
    /// Notified once when the connection's credit is used up.
    pub exhausted: Arc<Notify>,
}

/// Stream with the state of metering and buffering. Both handles live in one task, so the lock
/// is never contended.
#[derive(Debug)]
struct BufferedTlsState<S> {
    stream: S,
    meter: FrameMeter,
    exhausted: Arc<Notify>,
    /// True once the credit is used up; nothing more is read.
    closed: bool,
    /// End of the stream, until it is returned to h2.
    pending_end: Option<io::Result<()>>,
    /// Bytes written by h2 that TLS has not taken.
    pending_write: Option<WriteBuffer>,
    /// Number of bytes that TLS has taken since the last complete flush.
    sealed: usize,
    /// True if the last flush was blocked by the peer.
    blocked: bool,
}

/// Buffer with its number of valid bytes.
#[derive(Debug)]
struct WriteBuffer {
    buffer: Buffer,
    size: usize,
}

/// Limit of a write that is copied in order to share a TLS record with other frames.
const COALESCED_WRITE_MAX: usize = 2 * 1024;
/// Limit of bytes that are sealed in one poll before they are sent.
const SEALED_BYTES_MAX: usize = 256 * 1024;
/// Limit of slices in one write: h2 writes the head of a frame and its payload.
const SLICES_MAX: usize = 3;

/// Number of frames per unit of the cooperative budget. A poll has 128 units.
const FRAMES_PER_UNIT: u32 = 4;

impl<S> BufferedTls<S> {
    /// Wraps a TLS stream whose handshake is done.
    pub fn new(stream: S) -> (Self, BufferedTlsOwner<S>) {
        let exhausted = Arc::new(Notify::new());
        let crossing = Arc::new(Mutex::new(BufferedTlsState {
            stream,
            meter: FrameMeter::new(),
            exhausted: Arc::clone(&exhausted),
            closed: false,
            pending_end: None,
            pending_write: None,
            sealed: 0,
            blocked: false,
        }));
        (
            Self(Arc::clone(&crossing)),
            BufferedTlsOwner {
                crossing,
                exhausted,
            },
        )
    }
}

impl<S> BufferedTlsOwner<S> {
    /// Runs a future of the connection, and flushes its writes at the end of each poll.
    pub async fn run<F>(&self, future: F) -> F::Output
    where
        F: Future,
        S: BufferedWrite,
    {
        let mut future = pin!(future);
        poll_fn(|cx| {
            let done = future.as_mut().poll(cx);
            let mut crossing = lock(&self.crossing);
            if let Poll::Ready(Err(error)) = crossing.poll_flush(cx) {
                // h2 receives the error with its next read.
                crossing.pending_end = Some(Err(error));
                cx.waker().wake_by_ref();
            }
            done
        })
        .await
    }

    /// Returns the stream, once h2 has dropped its handle.
    pub fn into_stream(self) -> Option<S> {
        let crossing = Arc::into_inner(self.crossing)?;
        let crossing = crossing
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        Some(crossing.stream)
    }
}

/// Locks the state. A panic under the lock ends the connection's task, the only user of the
/// lock.
fn lock<S>(crossing: &Mutex<BufferedTlsState<S>>) -> MutexGuard<'_, BufferedTlsState<S>> {
    crossing.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S: AsyncRead + Unpin> BufferedTlsState<S> {
    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.closed {
            // The owner has been notified and ends the connection, so no wake-up is needed.
            return Poll::Pending;
        }
        if let Some(end) = self.pending_end.take() {
            return Poll::Ready(end);
        }
        let budget = ready!(coop::poll_proceed(cx));
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, buffer));
        budget.made_progress();
        if read.is_err() || buffer.filled().len() == before {
            // The end is returned one poll later. h2 discards the end of streams when their
            // connection ends, and tunnels whose last bytes came with this end have to receive
            // theirs first.
            self.pending_end = Some(read);
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        match self.meter.received(&buffer.filled()[before..]) {
            Ok(frames) => {
                spend_budget(cx, frames / FRAMES_PER_UNIT);
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

/// Spends budget for work after this read. Nothing is carried over if the budget is exceeded.
fn spend_budget(cx: &mut Context<'_>, units: u32) {
    for _ in 0..units {
        let Poll::Ready(unit) = coop::poll_proceed(cx) else {
            return;
        };
        unit.made_progress();
    }
}

impl<S: BufferedWrite> BufferedTlsState<S> {
    /// Accepts all bytes: gathers small writes in the buffer, and seals large ones at once.
    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.blocked || self.sealed + self.gathered() >= SEALED_BYTES_MAX {
            ready!(self.poll_flush(cx))?;
        }
        let slices = &slices[..slices.len().min(SLICES_MAX)];
        let count = slices.iter().map(|slice| slice.len()).sum();
        for slice in slices {
            self.meter.sent(slice);
        }
        if count > COALESCED_WRITE_MAX || self.gathered() + count > BUFFER_BYTES {
            self.seal(slices)?;
        } else {
            self.gather(slices);
        }
        Poll::Ready(Ok(count))
    }

    /// Returns the number of gathered bytes.
    fn gathered(&self) -> usize {
        self.pending_write
            .as_ref()
            .map_or(0, |gathered| gathered.size)
    }

    fn gather(&mut self, slices: &[IoSlice<'_>]) {
        let gathered = self.pending_write.get_or_insert_with(|| WriteBuffer {
            buffer: Buffer::borrow(),
            size: 0,
        });
        for slice in slices {
            let end = gathered.size + slice.len();
            gathered.buffer.bytes()[gathered.size..end].copy_from_slice(slice);
            gathered.size = end;
        }
    }

    /// Seals the gathered bytes, followed by `slices`.
    fn seal(&mut self, slices: &[IoSlice<'_>]) -> io::Result<()> {
        let mut all = [IoSlice::new(&[]); SLICES_MAX + 1];
        let mut gathered = self.pending_write.take();
        if let Some(WriteBuffer { buffer, size }) = &mut gathered {
            all[0] = IoSlice::new(&buffer.bytes()[..*size]);
        }
        all[1..=slices.len()].copy_from_slice(slices);
        self.sealed += all.iter().map(|slice| slice.len()).sum::<usize>();
        self.stream.write_buffered(&all[..=slices.len()])
    }

    /// Sends all written bytes.
    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.pending_write.is_some() {
            self.seal(&[])?;
        }
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.blocked = flushed.is_pending();
        if !self.blocked {
            self.sealed = 0;
        }
        flushed
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for BufferedTls<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        lock(&self.0).poll_read(cx, buffer)
    }
}

impl<S: BufferedWrite> AsyncWrite for BufferedTls<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        lock(&self.0).poll_write(cx, &[IoSlice::new(data)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        lock(&self.0).poll_write(cx, data)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Does nothing: the [`BufferedTlsOwner`] flushes at the end of the poll.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut crossing = lock(&self.0);
        ready!(crossing.poll_flush(cx))?;
        Pin::new(&mut crossing.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::sync::oneshot;

    use super::super::seal::PlainStream;
    use super::*;

    /// Stream that always has bytes, like TLS with a full buffer: a preface, then the same nine
    /// bytes repeatedly, which are a frame.
    struct Endless {
        frame: [u8; 9],
        at: usize,
    }

    impl Endless {
        fn new(kind: u8, flags: u8) -> Self {
            // The preface has 24 bytes, so it ends in the middle of a repetition.
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
            let (mut seam, _owner) = BufferedTls::new(Endless::new(0, 1));
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
        let (mut seam, owner) = BufferedTls::new(Endless::new(ping, 0));
        let greedy = tokio::spawn(async move { while seam.read_u8().await.is_ok() {} });
        owner.exhausted.notified().await;
        assert!(!greedy.is_finished());
        greedy.abort();
        let _ = greedy.await;
        assert!(owner.into_stream().is_some(), "the stream comes back");
    }

    #[tokio::test]
    async fn what_one_turn_writes_leaves_together_at_its_end() {
        let (ours, mut theirs) = duplex(1 << 20);
        let (mut seam, owner) = BufferedTls::new(PlainStream::new(ours));
        let mut read = [0; 8];
        seam.write_all(b"one").await.expect("room");
        seam.flush().await.expect("nothing to do");
        let early = tokio::time::timeout(std::time::Duration::ZERO, theirs.read(&mut read));
        assert!(early.await.is_err(), "h2's own flush sends nothing");
        owner.run(seam.write_all(b" two")).await.expect("room");
        let count = theirs.read(&mut read).await.expect("both");
        assert_eq!(&read[..count], b"one two");
        drop(seam);
        assert!(owner.into_stream().is_some_and(|_| true));
    }

    #[tokio::test]
    async fn more_than_a_buffer_passes_in_order_and_a_full_stream_holds_it_up() {
        let (ours, mut theirs) = duplex(1000);
        let (mut seam, owner) = BufferedTls::new(PlainStream::new(ours));
        let sent: Vec<u8> = (0..300_000_u32)
            .map(|at| (at / 7).to_be_bytes()[3])
            .collect();
        let expected = sent.clone();
        let writer = tokio::spawn(async move {
            let write = owner.run(async {
                let mut at = 0;
                while at < sent.len() {
                    // Like h2: a header with its payload; the stream may take any part of them.
                    let (head, payload) = sent[at..].split_at((sent.len() - at).min(9));
                    let payload = &payload[..payload.len().min(50_000)];
                    at += seam
                        .write_vectored(&[IoSlice::new(head), IoSlice::new(payload)])
                        .await?;
                }
                seam.shutdown().await
            });
            write.await
        });
        let mut got = Vec::new();
        theirs.read_to_end(&mut got).await.expect("all of it");
        writer.await.expect("no panic").expect("a write");
        assert!(got == expected);
    }

    #[tokio::test]
    async fn what_nobody_reads_is_bounded_and_after_a_stall_nothing_more_is_taken() {
        let (ours, _silent) = duplex(1000);
        let (mut seam, owner) = BufferedTls::new(PlainStream::new(ours));
        let data = vec![7; 100_000];
        let mut taken = 0;
        let first_turn = owner.run(poll_fn(|cx| {
            while let Poll::Ready(count) = Pin::new(&mut seam).poll_write(cx, &data) {
                taken += count.expect("an open stream");
            }
            Poll::Ready(())
        }));
        first_turn.await;
        assert!(
            (SEALED_BYTES_MAX..SEALED_BYTES_MAX + data.len()).contains(&taken),
            "{taken}"
        );
        let second_turn = owner.run(poll_fn(|cx| {
            Poll::Ready(Pin::new(&mut seam).poll_write(cx, b"one more").is_pending())
        }));
        assert!(second_turn.await);
    }

    #[tokio::test]
    async fn a_stream_that_fails_at_the_flush_fails_the_next_read() {
        let (ours, theirs) = duplex(1000);
        drop(theirs);
        let (mut seam, owner) = BufferedTls::new(PlainStream::new(ours));
        owner
            .run(seam.write_all(b"lost"))
            .await
            .expect("room in the buffer");
        assert!(seam.read_u8().await.is_err());
    }
}
