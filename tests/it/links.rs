//! Tests of the relay: each fault has its effect, and no other.

use std::cell::Cell;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt, duplex};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use crate::support::link::{Cut, Faults, FaultyRelay, direction};
use crate::support::{DEADLINE, Endpoint, Net, bytes, reset, run};

const ID: u64 = 1;
const SIZE: u64 = 100_000;
/// Time without bytes after a silent cut.
const SILENCE: Duration = Duration::from_millis(100);

/// Records every write, with its time.
#[derive(Default)]
struct Writes(Vec<(Instant, Vec<u8>)>);

impl AsyncWrite for Writes {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.0.push((Instant::now(), bytes.to_vec()));
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Returns the writes that result from a single write of `all`.
async fn writes(all: &[u8], toxic: Faults) -> Vec<(Instant, Vec<u8>)> {
    let mut writes = Writes::default();
    direction(all, &mut writes, || toxic).await.expect("an end");
    let together = writes.0.iter().flat_map(|(_, bytes)| bytes);
    assert!(together.eq(all), "every byte, in order");
    writes.0
}

#[tokio::test(start_paused = true)]
async fn a_slice_bounds_every_write() {
    for slice in [1, 7, 16 * 1024] {
        let toxic = Faults { slice: Some(slice), ..Faults::default() };
        let sliced = writes(&bytes::range(ID, 0, SIZE), toxic).await;
        let sizes: Vec<_> = sliced.iter().map(|(_, bytes)| bytes.len()).collect();
        assert!(sizes.iter().all(|&size| size <= slice), "{slice}");
        assert!(sizes.contains(&slice), "{slice}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_delay_holds_up_each_chunk_but_not_the_next() {
    const DELAY: Duration = Duration::from_millis(300);
    let toxic = Faults { delay: DELAY, ..Faults::default() };
    let (mut near, far) = duplex(100);
    let start = Instant::now();
    let mut writes = Writes::default();
    let send = async {
        for _ in 0..10 {
            near.write_all(b"chunk").await.expect("room");
            // deadline: ten chunks that are apart in time.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        drop(near);
    };
    let (ended, ()) = tokio::join!(direction(far, &mut writes, || toxic), send);
    ended.expect("an end");
    // The end is delayed too.
    assert_eq!(start.elapsed(), DELAY + Duration::from_millis(100));
    let times: Vec<_> = writes.0.iter().map(|&(at, _)| (at - start).as_millis()).collect();
    assert_eq!(times, [300, 310, 320, 330, 340, 350, 360, 370, 380, 390]);
}

#[tokio::test(start_paused = true)]
async fn faults_that_change_hold_for_connections_that_are_open() {
    let delay = Cell::new(Duration::ZERO);
    let (mut near, far) = duplex(100);
    let start = Instant::now();
    let mut writes = Writes::default();
    let send = async {
        for millis in [0, 300] {
            delay.set(Duration::from_millis(millis));
            near.write_all(b"chunk").await.expect("room");
            // deadline: the clock is paused, and the chunks are apart in time.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        drop(near);
    };
    let toxic = || Faults { delay: delay.get(), ..Faults::default() };
    let (ended, ()) = tokio::join!(direction(far, &mut writes, toxic), send);
    ended.expect("an end");
    let times: Vec<_> = writes.0.iter().map(|&(at, _)| (at - start).as_millis()).collect();
    assert_eq!(times, [0, 310]);
}

#[tokio::test(start_paused = true)]
async fn a_limit_is_bytes_a_second() {
    let toxic = Faults { limit: Some(20_000), ..Faults::default() };
    let start = Instant::now();
    let limited = writes(&bytes::range(ID, 0, SIZE), toxic).await;
    let seconds = start.elapsed().as_secs_f64();
    assert!((4.9..5.5).contains(&seconds), "{seconds} s");
    let first = limited.iter().filter(|(at, _)| *at - start < Duration::from_secs(1));
    let bytes: usize = first.map(|(_, bytes)| bytes.len()).sum();
    assert!((18_000..21_000).contains(&bytes), "{bytes} in the first second");
}

/// Returns the bytes through a link with a cut direction to the endpoint, and their end.
async fn through(toxic: Faults) -> (u64, io::Result<usize>) {
    let net = Net::new();
    let listener = net.listen(2, 0).await;
    let to = listener.local_addr().expect("an address");
    let link = FaultyRelay::new(net.listen(1, 0).await, to, move |_| [toxic, Faults::default()]);
    let mut near = TcpStream::connect(link.address).await.expect("a connection");
    let (mut far, _) = listener.accept().await.expect("a connection");
    let send = async {
        // A link that was cut by a reset accepts no more.
        let _ = bytes::send(&mut near, ID, 0, SIZE).await;
        let _ = near.shutdown().await;
    };
    let receive = async {
        let mut got = Vec::new();
        let end = loop {
            // Silence shows only in time, and only after the bytes that do arrive.
            let silent = toxic.cut == Some((got.len() as u64, Cut::Silence));
            let patience = if silent { SILENCE } else { DEADLINE };
            let read = timeout(patience, far.read_buf(&mut got)).await;
            match read.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                Ok(1..) => {}
                end => break end,
            }
        };
        let length = got.len() as u64;
        assert!(got == bytes::range(ID, 0, length), "right bytes");
        (length, end)
    };
    tokio::join!(send, receive).1
}

#[test]
fn a_cut_comes_after_its_bytes_and_as_configured() {
    run(async {
        for after in [1, 5000, 16 * 1024, SIZE - 1] {
            let (bytes, end) = through(Faults::cut(after, Cut::End)).await;
            assert_eq!((bytes, end.ok()), (after, Some(0)), "FIN");
            let (bytes, end) = through(Faults::cut(after, Cut::Silence)).await;
            let end = end.map_err(|error| error.kind());
            assert_eq!((bytes, end), (after, Err(io::ErrorKind::TimedOut)), "silence");
            let (bytes, end) = through(Faults::cut(after, Cut::Reset)).await;
            let end = end.map_err(|error| error.kind());
            assert_eq!(end, Err(io::ErrorKind::ConnectionReset), "RST");
            assert!(bytes <= after);
        }
        let (bytes, end) = through(Faults::cut(SIZE + 1, Cut::Reset)).await;
        assert_eq!((bytes, end.ok()), (SIZE, Some(0)), "never as far as its cut");
    });
}

#[test]
fn a_half_close_and_a_reset_pass_through() {
    run(async {
        let net = Net::new();
        let endpoint = net.listen(2, 0).await;
        let to = endpoint.local_addr().expect("an address");
        let link = FaultyRelay::new(net.listen(1, 0).await, to, |_| [Faults::default(); 2]);
        let _endpoint = Endpoint::new(endpoint, |mut stream| async move {
            bytes::expect(&mut stream, ID, 0, SIZE).await.expect("all");
            bytes::expect_end(&mut stream).await;
            bytes::send(&mut stream, ID, 0, SIZE).await.expect("all");
        });
        let mut near = TcpStream::connect(link.address).await.expect("a connection");
        bytes::send(&mut near, ID, 0, SIZE).await.expect("all");
        near.shutdown().await.expect("our end");
        bytes::expect(&mut near, ID, 0, SIZE).await.expect("all after our end");
        bytes::expect_end(&mut near).await;

        let listener = net.listen(3, 0).await;
        let to = listener.local_addr().expect("an address");
        let link = FaultyRelay::new(net.listen(1, 0).await, to, |_| [Faults::default(); 2]);
        let near = TcpStream::connect(link.address).await.expect("a connection");
        let (mut far, _) = listener.accept().await.expect("a connection");
        reset(near);
        let end = far.read(&mut [0; 1]).await.expect_err("a reset");
        assert_eq!(end.kind(), io::ErrorKind::ConnectionReset);
    });
}
