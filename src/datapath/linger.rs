//! Closing a socket without losing what we sent last.
//!
//! TCP answers data that nobody reads by a reset. A reset drops what is on its way or unsent: an
//! alert, a GOAWAY, the last bytes of a tunnel. What the other kernel has acknowledged, FIN
//! included, is in its receive queue, and Linux lets the application read that after a reset.

use std::io;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout};

use super::buffer::{BUFFER_BYTES, Buffer};
use super::unsent::unsent;

/// Limits of the wait for the other side's end: a time, and bytes that are dropped meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    time: Duration,
    bytes_max: u64,
}

/// For peers: a few round trips between far regions, and what they may still have sent, which is
/// a certificate chain or window updates for all their tunnels.
pub const PEER: Patience = Patience {
    time: Duration::from_secs(1),
    bytes_max: 16 * 1024,
};

/// Bytes of an endpoint that are dropped for one tunnel whose peer has gone. An endpoint may have
/// to write before it reads on; what it writes has no reader any more.
const DISCARDED_MAX: usize = 256 * 1024;
/// Pauses between questions to the kernel whether the endpoint has acknowledged all: a round trip
/// within a cluster at first, then longer and longer. A kernel may delay acknowledgements by 40 ms.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(256);
/// The time for a delivery that cannot be observed: several round trips between far regions.
const UNOBSERVED: Duration = Duration::from_secs(1);

/// Lets a socket that was to close by RST close by FIN, and deliver what was written before.
pub fn gently(stream: &TcpStream) {
    // It fails only for a socket that is gone.
    let _: io::Result<()> = SockRef::from(stream).set_linger(None);
}

/// Sends FIN, then reads and drops what the other side sends until it closes too, or patience ends.
pub async fn close(mut stream: TcpStream, patience: Patience) {
    let drain = async {
        stream.shutdown().await?;
        tokio::io::copy(&mut stream.take(patience.bytes_max), &mut tokio::io::sink()).await
    };
    // Another side that does not close in time, or has gone, changes nothing for us.
    let _ = timeout(patience.time, drain).await;
}

/// Closes the socket of an endpoint whose peer has gone, once the endpoint's kernel has all that
/// was written, FIN included. What it has not acknowledged by `deadline` is taken back by RST.
///
/// The close may itself be a reset, as the endpoint may still send. It comes after the last
/// acknowledgement, so all is in the endpoint's receive queue by then.
///
/// If the count of unacknowledged bytes is unavailable, the socket is closed by FIN after a second.
pub async fn deliver(stream: TcpStream, deadline: Instant) {
    // From here on FIN is true: a process that is stopped meanwhile still delivers.
    gently(&stream);
    let unobserved = deadline.min(Instant::now() + UNOBSERVED);
    let (mut pause, mut room) = (PAUSE_MIN, DISCARDED_MAX);
    loop {
        room -= discard(&stream, room);
        let left = unsent(&stream);
        if matches!(left, Ok(0)) || left.is_err() && Instant::now() >= unobserved {
            return;
        }
        if Instant::now() >= deadline {
            let _: io::Result<()> = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
            return;
        }
        sleep_until(deadline.min(Instant::now() + pause)).await;
        pause = (4 * pause).min(PAUSE_MAX);
    }
}

/// Reads and drops what is there, at most `most` bytes. Returns how many there were.
fn discard(stream: &TcpStream, most: usize) -> usize {
    let (mut buffer, mut count) = (Buffer::borrow(), 0);
    while count < most {
        let room = (most - count).min(BUFFER_BYTES);
        match stream.try_read(&mut buffer.bytes()[..room]) {
            Ok(read @ 1..) => count += read,
            // Its end, its reset, or nothing for now.
            _ => break,
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
        // Little room, so that most of what is written waits for a reader.
        SockRef::from(&listener)
            .set_recv_buffer_size(1)
            .expect("a buffer");
        let address = listener.local_addr().expect("an address");
        let near = TcpStream::connect(address).await.expect("a connection");
        (near, listener.accept().await.expect("a connection").0)
    }

    /// Writes as much as the kernel takes, and FIN.
    fn fill(near: &TcpStream) -> usize {
        let mut written = 0;
        while let Ok(bytes) = near.try_write(&[7; 16 * 1024]) {
            written += bytes;
        }
        let shut = SockRef::from(near).shutdown(std::net::Shutdown::Write);
        shut.expect("an open socket");
        written
    }

    #[tokio::test(start_paused = true)]
    async fn what_an_endpoint_does_not_take_is_taken_back_at_the_deadline() {
        let (near, mut far) = pair().await;
        let written = fill(&near);
        let start = Instant::now();
        deliver(near, start + Duration::from_secs(30)).await;
        assert_eq!(start.elapsed(), Duration::from_secs(30));
        let (mut got, mut read) = (Vec::new(), Ok(1));
        while let Ok(1..) = read {
            read = far.read_buf(&mut got).await;
        }
        let error = read.expect_err("no clean end");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        assert!(got.len() < written, "{} of {written}", got.len());
    }

    #[tokio::test]
    async fn an_endpoint_that_reads_late_and_writes_first_gets_every_byte_and_fin() {
        let (near, mut far) = pair().await;
        let written = fill(&near);
        let deadline = Instant::now() + Duration::from_secs(30);
        let delivered = tokio::spawn(deliver(near, deadline));
        far.write_all(&[1; DISCARDED_MAX / 2]).await.expect("room");
        assert!(!delivered.is_finished());
        let read = far.read_to_end(&mut Vec::new()).await;
        assert_eq!(read.expect("a clean end"), written);
        delivered.await.expect("no panic");
        assert!(Instant::now() < deadline);
    }
}
