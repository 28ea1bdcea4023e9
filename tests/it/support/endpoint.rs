//! Endpoints that speak plain TCP.

use std::future::Future;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Byte with which a client makes [`Endpoint::echo_or_endless`] send endlessly.
pub const ENDLESS: u8 = b'f';

/// Byte with which a client makes [`Endpoint::reporting`] reset the connection.
pub const RESET: u8 = b'r';

/// Running endpoint. It ends on drop, with all its connections.
pub struct Endpoint {
    accepted: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

impl Endpoint {
    /// Passes every connection to `handle`.
    pub fn new<F, H>(listener: TcpListener, handle: F) -> Self
    where
        F: Fn(TcpStream) -> H + Send + 'static,
        H: Future<Output = ()> + Send + 'static,
    {
        let accepted = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&accepted);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                connections.spawn(handle(stream));
            }
        });
        Self { accepted, _tasks: tasks }
    }

    /// Starts an endpoint that echoes, and ends when its client does.
    pub fn echo(listener: TcpListener) -> Self {
        Self::new(listener, echo)
    }

    /// As [`Endpoint::echo`], after sending its name.
    pub fn named(listener: TcpListener, name: u8) -> Self {
        Self::new(listener, move |mut stream| async move {
            if stream.write_u8(name).await.is_ok() {
                echo(stream).await;
            }
        })
    }

    /// As [`Endpoint::echo`], but a connection that begins with [`ENDLESS`] receives an endless
    /// stream.
    pub fn echo_or_endless(listener: TcpListener) -> Self {
        Self::new(listener, |mut stream| async move {
            let mut first = [0];
            if matches!(stream.peek(&mut first).await, Ok(1)) && first == [ENDLESS] {
                let _ = stream.read_u8().await;
                while stream.write_all(&[0; 16 * 1024]).await.is_ok() {}
            } else {
                echo(stream).await;
            }
        })
    }

    /// Starts an endpoint that reads each connection to its end, and reports it. It resets one that
    /// begins with [`RESET`].
    pub fn reporting(listener: TcpListener) -> (Self, mpsc::Receiver<Result<(), ErrorKind>>) {
        let (ended, ends) = mpsc::channel(16);
        let endpoint = Self::new(listener, move |mut stream| {
            let ended = ended.clone();
            async move {
                let end = match stream.read_u8().await {
                    Ok(RESET) => return reset(stream),
                    Ok(_) => stream.read_to_end(&mut Vec::new()).await,
                    Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(0),
                    // A reset that overtakes the first byte.
                    Err(error) => Err(error),
                };
                let _ = ended.send(end.map(|_| ()).map_err(|error| error.kind())).await;
            }
        });
        (endpoint, ends)
    }

    /// Returns the number of connections so far.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }
}

async fn echo(mut stream: TcpStream) {
    let (mut read, mut write) = stream.split();
    if tokio::io::copy(&mut read, &mut write).await.is_ok() {
        let _ = write.shutdown().await;
    }
}

/// Closes a connection by RST.
pub fn reset(stream: TcpStream) {
    let _ = socket2::SockRef::from(&stream).set_linger(Some(std::time::Duration::ZERO));
}
