//! PINGs to gateways behind slow and dead links.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use super::robustness::{stop_auto_advance, usable};
use super::*;

/// Forwards a connection to a gateway, whose bytes `download` passes on.
async fn link<D>(
    to: SocketAddr,
    download: impl FnOnce(OwnedReadHalf, OwnedWriteHalf) -> D + Send + 'static,
) -> (SocketAddr, JoinSet<()>)
where
    D: Future<Output = io::Result<()>> + Send,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let (near, _) = listener.accept().await.expect("a connection");
        let far = TcpStream::connect(to).await.expect("a gateway");
        // With Nagle's algorithm, bytes would wait for ACKs in real time.
        for socket in [&near, &far] {
            socket.set_nodelay(true).expect("an option");
        }
        let ((mut from_near, to_near), (from_far, mut to_far)) =
            (near.into_split(), far.into_split());
        let upload = async { tokio::io::copy(&mut from_near, &mut to_far).await };
        let _: (io::Result<u64>, io::Result<()>) =
            tokio::join!(upload, download(from_far, to_near));
    });
    (address, tasks)
}

/// Bytes of a slow link.
const CHUNK: usize = 8 * 1024;

/// Passes on bytes by [`CHUNK`] each second.
async fn slowly(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> io::Result<()> {
    let mut chunk = [0; CHUNK];
    loop {
        let count = from.read(&mut chunk).await?;
        if count == 0 {
            return Ok(());
        }
        to.write_all(&chunk[..count]).await?;
        if count == CHUNK {
            sleep(Duration::from_secs(1)).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_dead_connection_with_tunnels_ends_soon_after_its_last_byte() {
    let _busy = stop_auto_advance();
    let (world, gateway) = World::with(Answer::Echo).await;
    let delay = Duration::from_secs(3);
    let (kill, is_dying) = watch::channel(false);
    let dying = async move |mut from: OwnedReadHalf, mut to: OwnedWriteHalf| {
        let mut chunk = [0; CHUNK];
        loop {
            let count = from.read(&mut chunk).await?;
            if *is_dying.borrow() {
                sleep(delay).await;
                to.write_all(&chunk[..1]).await?;
                return std::future::pending().await;
            }
            to.write_all(&chunk[..count]).await?;
        }
    };
    let (address, _link) = link(gateway.address, dying).await;
    let opened = world.open_at(address, remote("west", &[])).await;
    let _stream = opened.expect("a tunnel");
    kill.send_replace(true);
    let since = Instant::now();
    while usable(&world) == 1 {
        assert!(since.elapsed() < Duration::from_secs(60), "it ends");
        tokio::time::advance(Duration::from_secs(1)).await;
        for _ in 0..200 {
            tokio::task::yield_now().await;
        }
    }
    // The PING after 10 s, the last byte, 20 s of silence, and the steps of PING and test.
    let (time, earliest) = (since.elapsed(), Duration::from_secs(10 + 20) + delay);
    let latest = earliest + Duration::from_secs(4);
    assert!((earliest..=latest).contains(&time), "{time:?}");
}

#[tokio::test(start_paused = true)]
async fn a_connection_whose_pong_waits_behind_data_stays_in_use() {
    let _busy = stop_auto_advance();
    let world = World::new();
    let (gateway, _stop) = world.stoppable().await;
    let (address, _link) = link(gateway.address, slowly).await;
    let opened = world.open_at(address, remote("west", &[])).await;
    let mut stream = opened.expect("a tunnel");
    let bytes = vec![7; 50 * CHUNK];
    let mut rest = &bytes[..];
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(60) {
        // What the sockets do not take at once has to wait for the slow link.
        while let Ok(taken) = stream.try_write(&[IoSlice::new(rest)], |_| ())
            && taken > 0
        {
            rest = &rest[taken..];
            if rest.is_empty() {
                stream.shut_down().expect("an open tunnel");
            }
        }
        tokio::time::advance(Duration::from_secs(1)).await;
        for _ in 0..200 {
            tokio::task::yield_now().await;
        }
        assert_eq!(world.pool.status()[0].state, "ready", "{:?}", since.elapsed());
    }
    let read = timeout(SOON, read_to_end(&mut stream)).await;
    assert!(read.expect("an end").expect("a clean end") == bytes);
}

#[tokio::test(start_paused = true)]
async fn a_dead_connection_costs_the_next_tunnel_two_seconds() {
    let world = World::new();
    let (gateway, stop) = world.stoppable().await;
    let _old = world.open(&gateway).await.expect("a tunnel");
    stop.send_replace(Stop::Silence);
    tokio::time::advance(Duration::from_secs(5)).await;
    let since = Instant::now();
    let mut new = world.open(&gateway).await.expect("a tunnel");
    let time = since.elapsed();
    assert!(time <= Duration::from_secs(3), "{time:?}");
    assert_eq!(gateway.connections(), 2);
    echoes(&mut new, b"hello").await;
}
