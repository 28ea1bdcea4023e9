//! Closing of sockets without loss of the last bytes that were sent.
//!
//! TCP answers data that is not read by a reset. A reset drops bytes in flight or unsent: an
//! alert, a GOAWAY, the last bytes of a tunnel. Bytes that the other kernel has acknowledged, FIN
//! included, are in its receive queue. Linux lets the application read them after a reset.

use std::io;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout};

use crate::sock_diag::TcpCounters;

use super::buffer::{BUFFER_BYTES, Buffer};

pub const ALERT_DEADLINE: Duration = Duration::from_secs(1);
/// Limit of the wait for a peer's close: a few round trips between far regions.
pub const PEER_CLOSE_DEADLINE: Duration = Duration::from_secs(1);
/// Limit of bytes from a peer that are discarded meanwhile: a certificate chain or window updates
/// for all its tunnels.
const PEER_BYTES_MAX: u64 = 16 * 1024;

/// Limit of bytes from an endpoint that are discarded for one tunnel whose peer has disconnected.
/// An endpoint may have to write before it reads on; its bytes have no reader any more.
const DISCARDED_MAX: usize = 256 * 1024;
/// Bounds of the pause between checks that the endpoint has acknowledged everything: a round trip
/// within a cluster at first, growing from there. A kernel may delay acknowledgements by 40 ms.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(256);
/// Time for a delivery that cannot be observed: several round trips between far regions.
const UNOBSERVED_DELIVERY: Duration = Duration::from_secs(1);

/// Disables the reset on close: the socket closes by FIN, and delivers the bytes written before.
pub fn disable_reset_on_close(stream: &TcpStream) {
    // Fails only if the socket is gone.
    let _: io::Result<()> = SockRef::from(stream).set_linger(None);
}

/// Makes the socket close by a reset, which drops the bytes written before.
pub fn reset_on_close(stream: &TcpStream) {
    // Fails only if the socket is gone.
    let _: io::Result<()> = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

/// Sends FIN, then discards input until the peer closes or a limit is reached. Closes once the
/// peer has everything, or after `time` by a reset. Otherwise the kernel would keep the rest for
/// minutes, on nobody's account.
pub async fn close_gracefully(mut stream: TcpStream, time: Duration) {
    let deadline = Instant::now() + time;
    let drain = async {
        stream.shutdown().await?;
        let mut input = (&mut stream).take(PEER_BYTES_MAX);
        tokio::io::copy(&mut input, &mut tokio::io::sink()).await
    };
    // The result does not matter: the socket is closed even if the peer is late or gone.
    let _ = timeout(PEER_CLOSE_DEADLINE, drain).await;
    deliver(stream, deadline).await;
}

/// Writes an alert, and closes once the peer has read it.
pub async fn close_with_alert(mut stream: TcpStream, alert: &[u8]) {
    disable_reset_on_close(&stream);
    if let Ok(Ok(())) = timeout(ALERT_DEADLINE, stream.write_all(alert)).await {
        close_gracefully(stream, PEER_CLOSE_DEADLINE).await;
    }
}

/// Closes a socket whose FIN was sent, such as that of an endpoint whose peer has disconnected,
/// once the other kernel has acknowledged everything, FIN included. At `deadline`, unacknowledged
/// bytes are dropped by RST.
///
/// The close may itself be a reset, as the other side may still send. It follows the last
/// acknowledgement, so all bytes are in the receive queue of the other side by then.
///
/// If the count of unacknowledged bytes is unavailable, the socket is closed by FIN after a
/// second.
pub async fn deliver(stream: TcpStream, deadline: Instant) {
    // FIN is correct from here on: if the process is stopped, the kernel still delivers.
    disable_reset_on_close(&stream);
    let unobserved = deadline.min(Instant::now() + UNOBSERVED_DELIVERY);
    let (mut pause, mut room) = (PAUSE_MIN, DISCARDED_MAX);
    loop {
        room -= discard(&stream, room);
        let left = TcpCounters::of(&stream).map(|counters| counters.unacknowledged);
        if matches!(left, Ok(0)) || left.is_err() && Instant::now() >= unobserved {
            return;
        }
        if Instant::now() >= deadline {
            reset_on_close(&stream);
            return;
        }
        sleep_until(deadline.min(Instant::now() + pause)).await;
        pause = (4 * pause).min(PAUSE_MAX);
    }
}

/// Discards input, at most `most` bytes. Returns the number of discarded bytes.
fn discard(stream: &TcpStream, most: usize) -> usize {
    let (mut buffer, mut count) = (Buffer::borrow(), 0);
    while count < most {
        let room = (most - count).min(BUFFER_BYTES);
        match stream.try_read(&mut buffer.bytes()[..room]) {
            Ok(read @ 1..) => count += read,
            // End of the stream, a reset, or nothing for now.
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
        // A small buffer, so that most of the written bytes wait for a reader.
        SockRef::from(&listener).set_recv_buffer_size(1).expect("a buffer");
        let address = listener.local_addr().expect("an address");
        let near = TcpStream::connect(address).await.expect("a connection");
        (near, listener.accept().await.expect("a connection").0)
    }

    /// Writes as much as the kernel takes, then FIN. Returns the number of bytes written.
    fn fill(near: &TcpStream) -> usize {
        let mut written = 0;
        while let Ok(bytes) = near.try_write(&[7; 16 * 1024]) {
            written += bytes;
        }
        let shut = SockRef::from(near).shutdown(std::net::Shutdown::Write);
        shut.expect("an open socket");
        written
    }

    /// Asserts that a reset has dropped some of the written bytes.
    async fn assert_taken_back(far: &mut TcpStream, written: usize) {
        let (mut got, mut read) = (Vec::new(), Ok(1));
        while let Ok(1..) = read {
            read = far.read_buf(&mut got).await;
        }
        let error = read.expect_err("no clean end");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        assert!(got.len() < written, "{} of {written}", got.len());
    }

    #[tokio::test(start_paused = true)]
    async fn what_an_endpoint_does_not_take_is_taken_back_at_the_deadline() {
        let (near, mut far) = pair().await;
        let written = fill(&near);
        let start = Instant::now();
        deliver(near, start + Duration::from_secs(30)).await;
        assert_eq!(start.elapsed(), Duration::from_secs(30));
        assert_taken_back(&mut far, written).await;
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_peer_does_not_take_of_a_connection_that_is_closed_is_taken_back() {
        let (near, mut far) = pair().await;
        let written = fill(&near);
        let start = Instant::now();
        close_gracefully(near, PEER_CLOSE_DEADLINE).await;
        assert_eq!(start.elapsed(), PEER_CLOSE_DEADLINE);
        assert_taken_back(&mut far, written).await;
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
