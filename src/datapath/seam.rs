//! The seam between TLS and h2: every plaintext byte of an HTTP/2 connection crosses it.
//!
//! It meters the frames, and it spends tokio's cooperative budget for them: what TLS serves from
//! its own buffers would otherwise be free, and one connection with full buffers, or with a
//! thousand tiny frames in one of them, could keep its worker to itself.
//!
//! It also gathers: h2 flushes after each DATA frame, which would be a TLS record and a system
//! call each. Small frames share a record, large ones are made into records at once, and what a
//! turn of the connection writes leaves together, at the end of the turn.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::task::coop;

use super::buffer::{BUFFER_BYTES, Buffer};
use super::meter::Meter;
use super::seal::Seal;

/// A TLS stream as h2 sees it.
#[derive(Debug)]
pub struct Seam<S>(Arc<Mutex<Crossing<S>>>);

/// What the owner of a connection keeps of its seam.
#[derive(Debug)]
pub struct Owner<S> {
    crossing: Arc<Mutex<Crossing<S>>>,
    /// Told once when the connection's credit is used up.
    pub exhausted: Arc<Notify>,
}

/// The stream, and what is known of the bytes that cross. Both halves live in one task, so the
/// lock is never contended.
#[derive(Debug)]
struct Crossing<S> {
    stream: S,
    meter: Meter,
    exhausted: Arc<Notify>,
    /// Set once the credit is used up: nothing more is read.
    closed: bool,
    /// The end of the stream, until it is told.
    end: Option<io::Result<()>>,
    /// What h2 has written and TLS has not taken.
    gathered: Option<Gathered>,
    /// Bytes that TLS has taken since all that it had was last sent.
    sealed: usize,
    /// The peer takes no more for now.
    blocked: bool,
}

/// The first bytes of a buffer.
#[derive(Debug)]
struct Gathered {
    buffer: Buffer,
    size: usize,
}

/// More than this is not copied to stand beside other frames in a TLS record.
const GATHERED_MAX: usize = 2 * 1024;
/// Bytes for which a turn makes TLS records before they are sent.
const SEALED_MAX: usize = 256 * 1024;
/// Slices that are taken at once: h2 writes the head of a frame and its payload.
const SLICES_MAX: usize = 3;

/// Frames for one unit of the cooperative budget, of which a turn has 128.
const FRAMES_PER_UNIT: u32 = 4;

impl<S> Seam<S> {
    /// Wraps a TLS stream whose handshake is done.
    pub fn new(stream: S) -> (Self, Owner<S>) {
        let exhausted = Arc::new(Notify::new());
        let crossing = Arc::new(Mutex::new(Crossing {
            stream,
            meter: Meter::new(),
            exhausted: Arc::clone(&exhausted),
            closed: false,
            end: None,
            gathered: None,
            sealed: 0,
            blocked: false,
        }));
        (
            Self(Arc::clone(&crossing)),
            Owner {
                crossing,
                exhausted,
            },
        )
    }
}

impl<S> Owner<S> {
    /// Runs a future of the connection; what it writes leaves at the end of each of its turns.
    pub async fn run<F>(&self, future: F) -> F::Output
    where
        F: Future,
        S: Seal,
    {
        let mut future = pin!(future);
        poll_fn(|cx| {
            let done = future.as_mut().poll(cx);
            let mut crossing = lock(&self.crossing);
            if let Poll::Ready(Err(error)) = crossing.poll_flush(cx) {
                // h2 learns of it by its next read.
                crossing.end = Some(Err(error));
                cx.waker().wake_by_ref();
            }
            done
        })
        .await
    }

    /// The stream, once h2 has dropped its side of the seam.
    pub fn into_stream(self) -> Option<S> {
        let crossing = Arc::into_inner(self.crossing)?;
        let crossing = crossing
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        Some(crossing.stream)
    }
}

/// A panic in here ends the connection's task, and nobody else holds the lock.
fn lock<S>(crossing: &Mutex<Crossing<S>>) -> MutexGuard<'_, Crossing<S>> {
    crossing.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S: AsyncRead + Unpin> Crossing<S> {
    fn poll_read(
        &mut self,
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
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, buffer));
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

impl<S: Seal> Crossing<S> {
    /// Takes all of it: few bytes into the buffer, more of them into TLS records at once.
    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.blocked || self.sealed + self.gathered() >= SEALED_MAX {
            ready!(self.poll_flush(cx))?;
        }
        let slices = &slices[..slices.len().min(SLICES_MAX)];
        let count = slices.iter().map(|slice| slice.len()).sum();
        for slice in slices {
            self.meter.sent(slice);
        }
        if count > GATHERED_MAX || self.gathered() + count > BUFFER_BYTES {
            self.seal(slices)?;
        } else {
            self.gather(slices);
        }
        Poll::Ready(Ok(count))
    }

    /// Bytes that were gathered.
    fn gathered(&self) -> usize {
        self.gathered.as_ref().map_or(0, |gathered| gathered.size)
    }

    fn gather(&mut self, slices: &[IoSlice<'_>]) {
        let gathered = self.gathered.get_or_insert_with(|| Gathered {
            buffer: Buffer::borrow(),
            size: 0,
        });
        for slice in slices {
            let end = gathered.size + slice.len();
            gathered.buffer.bytes()[gathered.size..end].copy_from_slice(slice);
            gathered.size = end;
        }
    }

    /// Makes TLS records of what was gathered and what comes after it.
    fn seal(&mut self, slices: &[IoSlice<'_>]) -> io::Result<()> {
        let mut all = [IoSlice::new(&[]); SLICES_MAX + 1];
        let mut gathered = self.gathered.take();
        if let Some(Gathered { buffer, size }) = &mut gathered {
            all[0] = IoSlice::new(&buffer.bytes()[..*size]);
        }
        all[1..=slices.len()].copy_from_slice(slices);
        self.sealed += all.iter().map(|slice| slice.len()).sum::<usize>();
        self.stream.seal(&all[..=slices.len()])
    }

    /// Sends all that was written.
    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.gathered.is_some() {
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

impl<S: AsyncRead + Unpin> AsyncRead for Seam<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        lock(&self.0).poll_read(cx, buffer)
    }
}

impl<S: Seal> AsyncWrite for Seam<S> {
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

    /// Does nothing: the [`Owner`] flushes at the end of the turn.
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

    use super::super::seal::Plain;
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
        let _ = greedy.await;
        assert!(owner.into_stream().is_some(), "the stream comes back");
    }

    #[tokio::test]
    async fn what_one_turn_writes_leaves_together_at_its_end() {
        let (ours, mut theirs) = duplex(1 << 20);
        let (mut seam, owner) = Seam::new(Plain::new(ours));
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
        let (mut seam, owner) = Seam::new(Plain::new(ours));
        let sent: Vec<u8> = (0..300_000_u32)
            .map(|at| (at / 7).to_be_bytes()[3])
            .collect();
        let expected = sent.clone();
        let writer = tokio::spawn(async move {
            let write = owner.run(async {
                let mut at = 0;
                while at < sent.len() {
                    // As h2 does: a header and its payload, of which any part may be taken.
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
        let (mut seam, owner) = Seam::new(Plain::new(ours));
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
            (SEALED_MAX..SEALED_MAX + data.len()).contains(&taken),
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
        let (mut seam, owner) = Seam::new(Plain::new(ours));
        owner
            .run(seam.write_all(b"lost"))
            .await
            .expect("room in the buffer");
        assert!(seam.read_u8().await.is_err());
    }
}
