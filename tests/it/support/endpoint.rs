//! Endpoints that speak plain TCP.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// A running endpoint, gone with all its connections when it is dropped.
pub struct Endpoint {
    accepted: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

impl Endpoint {
    /// Gives every connection to `handle`.
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
        Self {
            accepted,
            _tasks: tasks,
        }
    }

    /// An endpoint that sends back what it gets, and ends when its client does.
    pub fn echo(listener: TcpListener) -> Self {
        Self::new(listener, |mut stream| async move {
            let (mut read, mut write) = stream.split();
            if tokio::io::copy(&mut read, &mut write).await.is_ok() {
                let _ = tokio::io::AsyncWriteExt::shutdown(&mut write).await;
            }
        })
    }

    /// Connections so far.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }
}

/// Closes a connection by RST.
pub fn reset(stream: TcpStream) {
    let _ = socket2::SockRef::from(&stream).set_linger(Some(std::time::Duration::ZERO));
}
