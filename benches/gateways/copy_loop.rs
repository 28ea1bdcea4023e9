//! Plain copy loop: accept, dial, `recv` and `send` in both directions, on one thread.
//!
//! It is the floor of the table: a gateway for the same bytes costs at least this much. It has no
//! TLS, no HTTP/2, no policy, no log. The bench starts its own program as this process.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::pin::Pin;
use std::str::FromStr;
use std::task::{Poll, ready};

use tokio::io::{AsyncRead, AsyncWriteExt, ReadBuf};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};

/// Limit of one read, in bytes.
const READ_BYTES: usize = 64 * 1024;

thread_local! {
    /// Shared buffer, which stays in the processor's cache.
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; READ_BYTES]);
}

/// Address to listen at, and endpoints that its connections go to in turn.
#[derive(Clone, Debug)]
pub struct Forward {
    pub listen: SocketAddr,
    pub to: Vec<SocketAddr>,
}

/// `LISTEN=TO,TO`, as an argument of the process.
impl FromStr for Forward {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let address = |text: &str| text.parse().map_err(|error| format!("{text}: {error}"));
        let (listen, to) = text.split_once('=').ok_or("no `=`")?;
        Ok(Self {
            listen: address(listen)?,
            to: to.split(',').map(address).collect::<Result<_, _>>()?,
        })
    }
}

impl std::fmt::Display for Forward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let to: Vec<String> = self.to.iter().map(ToString::to_string).collect();
        write!(f, "{}={}", self.listen, to.join(","))
    }
}

/// Copies until the process is killed.
pub async fn run(forwards: &[Forward]) {
    for Forward { listen, to } in forwards.iter().cloned() {
        let listener = TcpListener::bind(listen).await.expect("a free address");
        tokio::spawn(async move {
            for to in to.iter().cycle() {
                let (near, _) = listener.accept().await.expect("a connection");
                // The load reports how its connection ended.
                tokio::spawn(copy_both(near, *to));
            }
        });
    }
    std::future::pending().await
}

async fn copy_both(mut near: TcpStream, to: SocketAddr) -> io::Result<()> {
    let mut far = TcpStream::connect(to).await?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let (near_read, near_write) = near.split();
    let (far_read, far_write) = far.split();
    tokio::try_join!(copy(near_read, far_write), copy(far_read, near_write)).map(drop)
}

/// Copies one direction to its end.
async fn copy(mut from: ReadHalf<'_>, mut to: WriteHalf<'_>) -> io::Result<()> {
    loop {
        let rest = poll_fn(|cx| {
            BUFFER.with_borrow_mut(|bytes| {
                let mut buffer = ReadBuf::new(bytes);
                ready!(Pin::new(&mut from).poll_read(cx, &mut buffer))?;
                Poll::Ready(match buffer.filled() {
                    [] => Ok(None),
                    filled => send(&to, filled).map(Some),
                })
            })
        });
        match rest.await? {
            None => return to.shutdown().await,
            Some(rest) => to.write_all(&rest).await?,
        }
    }
}

/// Sends what the socket takes at once, and returns the rest.
fn send(to: &WriteHalf<'_>, bytes: &[u8]) -> io::Result<Vec<u8>> {
    let sent = match to.try_write(bytes) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
        sent => sent?,
    };
    Ok(bytes[sent..].to_vec())
}
