//! Loss of a gateway or endpoint, in each way in which its clients may see it, and the time until
//! clients are served again.

use std::any::Any;
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use rustix::process::Signal;
use socket2::{Domain, Socket, Type};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, timeout};

use super::Gateway;
use super::process::WAIT_MAX;

/// Loss of a gateway of another network.
#[derive(Clone, Copy, Debug)]
pub enum Loss {
    /// Its address refuses connections.
    Refused,
    /// Its process is stopped: connections stay open, and the kernel accepts more of them.
    Silent,
    /// Its address drops each SYN.
    Unreachable,
}

impl Loss {
    pub const ALL: [Self; 3] = [Self::Refused, Self::Silent, Self::Unreachable];
}

/// Loses a gateway, until the result is dropped.
pub async fn lose(mut gateway: Gateway, loss: Loss) -> Box<dyn Any> {
    if matches!(loss, Loss::Silent) {
        gateway.signal(Signal::STOP);
        return Box::new(gateway);
    }
    gateway.signal(Signal::KILL);
    gateway.exited().await;
    match loss {
        Loss::Unreachable => Box::new(drop_syns(gateway.address).await),
        Loss::Refused | Loss::Silent => Box::new(()),
    }
}

/// Starts an attempt every 100 ms, beside those that wait, until one succeeds. Returns the time
/// that this took.
pub async fn first_success<F>(attempt: impl Fn() -> F) -> Duration
where
    F: Future<Output = bool> + Send + 'static,
{
    let start = Instant::now();
    let mut attempts = JoinSet::new();
    // deadline: new clients come continually.
    let mut next = interval(Duration::from_millis(100));
    while start.elapsed() < WAIT_MAX {
        tokio::select! {
            _ = next.tick() => drop(attempts.spawn(attempt())),
            Some(Ok(true)) = attempts.join_next() => return start.elapsed(),
        }
    }
    panic!("no success");
}

/// Listens at an address without a backlog: the kernel accepts one connection, which is not read,
/// and drops further SYNs.
pub async fn drop_syns(address: SocketAddr) -> (Socket, Option<TcpStream>) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    // Connections of an earlier listener may still end.
    socket.set_reuse_address(true).expect("an option");
    socket.bind(&address.into()).expect("an address");
    socket.listen(0).expect("a listener");
    // A client of the earlier listener may be the first one.
    let first = timeout(Duration::from_secs(1), TcpStream::connect(address)).await;
    (socket, first.ok().and_then(Result::ok))
}
