//! Partitions of the link to a gateway for ten minutes of a paused clock.

use std::pin::pin;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use super::robustness::stop_auto_advance;
use super::*;

const PARTITION: Duration = Duration::from_secs(600);
/// Step of the clock, and the turns of the runtime before each: more than a handshake needs.
const STEP: Duration = Duration::from_secs(1);
const TURNS: usize = 500;

/// Directions of a link that lose all bytes: there and back.
type Lost = watch::Receiver<[bool; 2]>;

/// Relays connections to a gateway.
async fn link(to: SocketAddr, lost: Lost) -> (SocketAddr, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((near, _)) = listener.accept().await {
            let far = TcpStream::connect(to).await.expect("a gateway");
            // With Nagle's algorithm, bytes would wait for ACKs in real time.
            for socket in [&near, &far] {
                socket.set_nodelay(true).expect("an option");
            }
            let ((from_near, to_near), (from_far, to_far)) = (near.into_split(), far.into_split());
            let [there, back] = [lost.clone(), lost.clone()];
            connections.spawn(async move {
                let there = pass(from_near, to_far, || there.borrow()[0]);
                let back = pass(from_far, to_near, || back.borrow()[1]);
                let _: (io::Result<()>, io::Result<()>) = tokio::join!(there, back);
            });
        }
    });
    (address, tasks)
}

/// Passes on bytes and their end. After a loss nothing arrives, as bytes before it are missing.
async fn pass(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    is_lost: impl Fn() -> bool,
) -> io::Result<()> {
    let mut chunk = [0; 16 * 1024];
    loop {
        let count = from.read(&mut chunk).await?;
        if is_lost() {
            while from.read(&mut chunk).await? > 0 {}
            return std::future::pending().await;
        }
        if count == 0 {
            return to.shutdown().await;
        }
        to.write_all(&chunk[..count]).await?;
    }
}

/// Runs a future while the clock moves.
async fn while_time_passes<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    loop {
        for _ in 0..TURNS {
            tokio::select! {
                biased;
                done = &mut future => return done,
                () = tokio::task::yield_now() => {}
            }
        }
        tokio::time::advance(STEP).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_partition_of_ten_minutes_breaks_tunnels_by_the_next_ping_and_leaves_nothing_behind() {
    let _busy = stop_auto_advance();
    for lost in [[true, true], [true, false], [false, true]] {
        let (world, gateway) = World::with(Answer::Echo).await;
        let (cut, is_cut) = watch::channel([false; 2]);
        let (address, _link) = link(gateway.address, is_cut).await;
        let target = Target { address, gateway: Arc::new(remote("west", &[])) };
        let source = source("a");
        let open = || while_time_passes(world.try_open(&source, &target, "echo.app:80"));
        let mut before = open().await.expect("a tunnel");
        cut.send_replace(lost);
        let since = Instant::now();
        while_time_passes(read_to_end(&mut before)).await.expect_err("a break");
        let time = since.elapsed();
        // The PING after 10 s, 20 s of silence, and the steps of both.
        assert!(time <= Duration::from_secs(33), "{lost:?}: {time:?}");

        let mut tries = 0;
        while since.elapsed() < PARTITION {
            let begun = Instant::now();
            let Err(OpenError::Gateway(failure)) = open().await else {
                panic!("{lost:?}: no failure of the gateway");
            };
            assert_eq!(failure.reason, Reason::GatewayUnreachable, "{lost:?}: {failure:?}");
            assert!(begun.elapsed() <= CONNECT_DEADLINE, "{lost:?}: {:?}", begun.elapsed());
            // As for a service with another endpoint: for five minutes at last.
            world.pool.eject(&target);
            // deadline: the clock is paused, and the attempt to connect ends.
            while_time_passes(sleep(Duration::from_secs(3))).await;
            tries += 1;
        }
        assert!(tries > 60, "{tries} tunnels");
        assert_eq!(gateway.connections(), 1 + tries, "{lost:?}: an attempt for each");

        world.pool.eject(&target);
        assert!(world.pool.is_ejected(&target));
        cut.send_replace([false; 2]);
        let healed = Instant::now();
        let mut after = open().await.expect("a tunnel");
        assert!(healed.elapsed() <= Duration::from_secs(1), "{lost:?}: {:?}", healed.elapsed());
        echoes(&mut after, b"hello").await;
        assert!(!world.pool.is_ejected(&target), "{lost:?}");
    }
}
