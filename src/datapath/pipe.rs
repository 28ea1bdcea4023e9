//! Pipes through which bytes pass from socket to socket without coming into this process.
//!
//! A pipe is borrowed from the thread while something is in it, as buffers are. One that still has
//! bytes of a tunnel when that ends is closed and never lent again.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::admission::Admission;
use super::pool::PipeEnd;

/// What a pipe holds. An unprivileged user may have 64 MiB in pipes (`pipe-user-pages-soft`).
const PIPE_BYTES: usize = 256 * 1024;
/// Pipes of the process: 32 MiB, and 256 descriptors.
const PIPES_MAX: usize = 128;
/// Spare pipes of a thread.
const SPARES_MAX: usize = 8;

/// Never SPLICE_F_MORE: it holds small segments back for up to 200 ms, as a cork does.
const FLAGS: SpliceFlags = SpliceFlags::NONBLOCK.union(SpliceFlags::MOVE);

static PIPES: AtomicUsize = AtomicUsize::new(0);
/// Set once this host has refused to splice, as some sandboxes do: from then on bytes are copied.
static REFUSED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static SPARES: RefCell<Vec<Ends>> = const { RefCell::new(Vec::new()) };
}

/// Both ends of a pipe, counted while they are open.
#[derive(Debug)]
struct Ends {
    read: OwnedFd,
    write: OwnedFd,
    _held: ([PipeEnd; 2], Counted),
}

impl Ends {
    /// Makes a pipe, unless the process has enough or no descriptors for it.
    fn new(admission: &Admission) -> Option<Self> {
        let counted = Counted::new()?;
        let descriptors = [admission.pool.pipe_end()?, admission.pool.pipe_end()?];
        let (read, write) = pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC).ok()?;
        // Where it is refused the pipe stays as small as it is, which costs only time.
        let _ = fcntl_setpipe_size(&write, PIPE_BYTES);
        Some(Self {
            read,
            write,
            _held: (descriptors, counted),
        })
    }
}

/// A place among the pipes of the process.
#[derive(Debug)]
struct Counted;

impl Counted {
    fn new() -> Option<Self> {
        let free = |count: usize| (count < PIPES_MAX).then_some(count + 1);
        let taken = PIPES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, free);
        taken.ok().map(|_| Self)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        PIPES.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A pipe that goes back to the thread on drop, if it is empty then.
#[derive(Debug)]
pub struct Pipe {
    ends: Option<Ends>,
    filled: usize,
}

impl Pipe {
    /// Borrows an empty one, or makes one; none if there are too many or it cannot be.
    pub fn borrow(admission: &Admission) -> Option<Self> {
        if REFUSED.load(Ordering::Relaxed) {
            return None;
        }
        let spare = SPARES.with_borrow_mut(Vec::pop);
        let ends = Some(spare.or_else(|| Ends::new(admission))?);
        Some(Self { ends, filled: 0 })
    }

    /// Bytes that are in it.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Moves what the socket has into the pipe, which must be empty: a full one would say that the
    /// socket has nothing. Gives how much; 0 is the socket's end.
    ///
    /// # Errors
    /// The socket has nothing now, or this host does not splice (both `WouldBlock`, to be tried
    /// again), or the socket failed.
    pub fn fill(&mut self, from: &TcpStream) -> io::Result<usize> {
        use io::ErrorKind::*;
        let (Some(ends), 0) = (&self.ends, self.filled) else {
            return Err(InvalidInput.into());
        };
        let moved = from.try_io(Interest::READABLE, || {
            Ok(splice(from, None, &ends.write, None, PIPE_BYTES, FLAGS)?)
        });
        match moved {
            Ok(moved) => {
                self.filled = moved;
                Ok(moved)
            }
            Err(error) if matches!(error.kind(), Unsupported | InvalidInput | PermissionDenied) => {
                REFUSED.store(true, Ordering::Relaxed);
                Err(WouldBlock.into())
            }
            Err(error) => Err(error),
        }
    }

    /// Moves what the socket takes out of the pipe, which must not be empty. Gives how much.
    ///
    /// # Errors
    /// The socket takes nothing now (`WouldBlock`), or it failed.
    pub fn drain(&mut self, to: &TcpStream) -> io::Result<usize> {
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
        // There are no spares any more while the thread ends.
        let _ = SPARES.try_with(|spares| {
            let mut spares = spares.borrow_mut();
            if spares.len() < SPARES_MAX {
                spares.push(ends);
            }
        });
    }
}

/// The pipes that this thread has to spare.
#[cfg(test)]
pub fn spares() -> usize {
    SPARES.with_borrow(Vec::len)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
        let address = listener.local_addr().expect("an address");
        let near = TcpStream::connect(address).await.expect("a connection");
        (near, listener.accept().await.expect("a connection").0)
    }

    fn would_block(result: io::Result<usize>) -> bool {
        matches!(result, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    #[tokio::test]
    async fn bytes_and_their_end_go_through_and_only_empty_pipes_are_lent_again() {
        let admission = Admission::new(1000);
        let (mut client, from) = pair().await;
        let (mut server, to) = pair().await;
        let mut pipe = Pipe::borrow(&admission).expect("a pipe");
        assert!(would_block(pipe.fill(&from)), "nothing has come");
        client.write_all(b"some bytes").await.expect("bytes");
        from.readable().await.expect("bytes");
        assert_eq!(pipe.fill(&from).expect("bytes"), 10);
        assert!(pipe.fill(&from).is_err(), "it is not empty");
        to.writable().await.expect("room");
        assert_eq!(pipe.drain(&to).expect("room"), 10);
        let mut got = [0; 10];
        server.read_exact(&mut got).await.expect("bytes");
        assert_eq!(&got, b"some bytes");
        assert_eq!(pipe.filled(), 0);
        client.shutdown().await.expect("an end");
        loop {
            from.readable().await.expect("an end");
            match pipe.fill(&from) {
                Ok(moved) => break assert_eq!(moved, 0, "the end"),
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
        pipe.fill(&from).expect("bytes");
        drop(pipe);
        assert_eq!(spares(), 0, "it is closed with what is in it");
    }

    #[tokio::test]
    async fn without_descriptors_there_is_no_pipe() {
        assert!(Pipe::borrow(&Admission::new(1)).is_none());
    }
}
