//! Pipes for splicing bytes from socket to socket without copying them to user space.
//!
//! A pipe is borrowed from a thread-local pool while it holds bytes, like a buffer. A pipe that
//! still holds bytes when its tunnel ends is closed and never reused.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::datapath::limits::admission::Admission;
use crate::datapath::limits::descriptors::PipeEnd;

/// Capacity of a pipe. With 1 MiB the kernel buffers 28 MiB of a writer whose reader stalls instead
/// of 12: endpoints are read so fast that their receive windows grow.
pub const PIPE_BYTES: usize = 512 * 1024;
/// Limit of pipes in the process: 32 MiB, and 128 descriptors. An unprivileged user may have 64 MiB
/// in pipes (`pipe-user-pages-soft`), and two processes run during an upgrade.
const PIPES_MAX: usize = 64;
/// Limit of spare pipes of a thread. Few are in use at once, and other threads need the rest.
const SPARES_MAX: usize = 4;

/// Excludes SPLICE_F_MORE: like a cork, it delays small segments by up to 200 ms.
const FLAGS: SpliceFlags = SpliceFlags::NONBLOCK.union(SpliceFlags::MOVE);

const PEEK: RecvFlags = RecvFlags::PEEK.union(RecvFlags::DONTWAIT);

static PIPES: Semaphore = Semaphore::const_new(PIPES_MAX);
/// True once this host has refused to splice, as some sandboxes do. Bytes are copied from then
/// on.
static SPLICE_UNAVAILABLE: AtomicBool = AtomicBool::new(false);

thread_local! {
    static SPARES: RefCell<Vec<Ends>> = const { RefCell::new(Vec::new()) };
}

/// Both ends of a pipe, counted while they are open.
#[derive(Debug)]
struct Ends {
    read: OwnedFd,
    write: OwnedFd,
    _held: ([PipeEnd; 2], SemaphorePermit<'static>),
}

impl Ends {
    /// Creates a pipe, unless the process has reached a limit of pipes or descriptors.
    fn new(admission: &Admission) -> Option<Self> {
        let counted = PIPES.try_acquire().ok()?;
        let descriptors = [admission.pool.pipe_end()?, admission.pool.pipe_end()?];
        let (read, write) = pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC).ok()?;
        // A limit of the host may refuse a size. The default capacity costs only time.
        let mut sizes = [PIPE_BYTES, PIPE_BYTES / 2, PIPE_BYTES / 4].into_iter();
        let _ = sizes.find(|bytes| fcntl_setpipe_size(&write, *bytes).is_ok());
        Some(Self { read, write, _held: (descriptors, counted) })
    }
}

/// Pipe that returns to the thread's pool on drop if it is empty.
#[derive(Debug)]
pub struct Pipe {
    ends: Option<Ends>,
    filled: usize,
}

impl Pipe {
    /// Borrows or creates an empty pipe; returns none at the limits, or if splicing is
    /// unavailable.
    pub fn borrow(admission: &Admission) -> Option<Self> {
        if SPLICE_UNAVAILABLE.load(Ordering::Relaxed) {
            return None;
        }
        let spare = SPARES.with_borrow_mut(Vec::pop);
        let ends = Some(spare.or_else(|| Ends::new(admission))?);
        Some(Self { ends, filled: 0 })
    }

    /// Returns the number of bytes in the pipe.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Moves available bytes from the socket into the pipe. Returns their number; 0 is the end
    /// of the stream, and none means that the next bytes have to be copied. The pipe must be empty:
    /// a full pipe would look like a socket without data.
    ///
    /// # Errors
    /// `WouldBlock` if the socket has no data, or if this host does not splice (the caller tries
    /// again and then copies). Any other error is the socket's.
    pub fn read_from(&mut self, from: &TcpStream) -> io::Result<Option<usize>> {
        use io::ErrorKind::*;
        let (Some(ends), 0) = (&self.ends, self.filled) else {
            return Err(InvalidInput.into());
        };
        // At urgent data (RFC 9293 section 3.8.5) a splice ends as if there were no bytes, or no
        // further ones. A read skips it.
        let is_at_urgent = || matches!(recv(from, &mut [0], PEEK), Ok((_, 1..)));
        let moved = from.try_io(Interest::READABLE, || {
            match splice(from, None, &ends.write, None, PIPE_BYTES, FLAGS) {
                Ok(0) | Err(Errno::AGAIN) if is_at_urgent() => Ok(None),
                moved => Ok(Some(moved?)),
            }
        });
        match moved {
            Ok(moved) => {
                self.filled = moved.unwrap_or_default();
                Ok(moved)
            }
            Err(error) if matches!(error.kind(), Unsupported | InvalidInput | PermissionDenied) => {
                SPLICE_UNAVAILABLE.store(true, Ordering::Relaxed);
                Err(WouldBlock.into())
            }
            Err(error) => Err(error),
        }
    }

    /// Moves bytes from the pipe to the socket. Returns their number. The pipe must not be
    /// empty.
    ///
    /// # Errors
    /// `WouldBlock` if the socket accepts no data now. Any other error is the socket's.
    pub fn write_to(&mut self, to: &TcpStream) -> io::Result<usize> {
        let (Some(ends), 1..) = (&self.ends, self.filled) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let moved = to.try_io(Interest::WRITABLE, || {
            Ok(splice(&ends.read, None, to, None, self.filled, FLAGS)?)
        })?;
        self.filled = self.filled.saturating_sub(moved);
        Ok(moved)
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        let ends = self.ends.take().filter(|_| self.filled == 0);
        let Some(ends) = ends else { return };
        // The thread-local is gone while the thread ends.
        let _ = SPARES.try_with(|spares| {
            let mut spares = spares.borrow_mut();
            if spares.len() < SPARES_MAX {
                spares.push(ends);
            }
        });
    }
}

/// Returns the number of spare pipes of this thread.
#[cfg(test)]
pub fn spares() -> usize {
    SPARES.with_borrow(Vec::len)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::datapath::tests::tcp_pair as pair;

    fn would_block(result: io::Result<Option<usize>>) -> bool {
        matches!(result, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    #[tokio::test]
    async fn bytes_and_their_end_go_through_and_only_empty_pipes_are_lent_again() {
        let admission = Admission::new(1000);
        let (mut client, from) = pair().await;
        let (mut server, to) = pair().await;
        let mut pipe = Pipe::borrow(&admission).expect("a pipe");
        assert!(would_block(pipe.read_from(&from)), "nothing has come");
        client.write_all(b"some bytes").await.expect("bytes");
        from.readable().await.expect("bytes");
        assert_eq!(pipe.read_from(&from).expect("bytes"), Some(10));
        assert!(pipe.read_from(&from).is_err(), "it is not empty");
        to.writable().await.expect("room");
        assert_eq!(pipe.write_to(&to).expect("room"), 10);
        let mut got = [0; 10];
        server.read_exact(&mut got).await.expect("bytes");
        assert_eq!(&got, b"some bytes");
        assert_eq!(pipe.filled(), 0);
        client.shutdown().await.expect("an end");
        loop {
            from.readable().await.expect("an end");
            match pipe.read_from(&from) {
                Ok(moved) => break assert_eq!(moved, Some(0), "the end"),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
        drop(pipe);
        assert_eq!(spares(), 1);

        let (mut client, from) = pair().await;
        let mut pipe = Pipe::borrow(&admission).expect("the same pipe");
        assert_eq!(spares(), 0);
        client.write_all(b"a secret").await.expect("bytes");
        from.readable().await.expect("bytes");
        pipe.read_from(&from).expect("bytes");
        drop(pipe);
        assert_eq!(spares(), 0, "it is closed with what is in it");
    }

    #[tokio::test]
    async fn the_bytes_behind_urgent_data_are_left_to_a_read() {
        let admission = Admission::new(1000);
        let (mut client, mut from) = pair().await;
        client.write_all(b"before").await.expect("bytes");
        rustix::net::send(&client, b"!", rustix::net::SendFlags::OOB).expect("an urgent byte");
        client.write_all(b"behind").await.expect("bytes");
        client.shutdown().await.expect("an end");
        from.readable().await.expect("bytes");
        let pipe = || Pipe::borrow(&admission).expect("a pipe");
        assert_eq!(pipe().read_from(&from).expect("bytes"), Some(6));
        assert_eq!(pipe().read_from(&from).expect("no end"), None);
        let mut rest = Vec::new();
        from.read_to_end(&mut rest).await.expect("an end");
        assert_eq!(rest, b"behind");
    }

    #[tokio::test]
    async fn without_descriptors_there_is_no_pipe() {
        assert!(Pipe::borrow(&Admission::new(1)).is_none());
    }
}
