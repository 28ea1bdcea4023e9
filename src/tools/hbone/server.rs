//! HBONE endpoint that terminates inner tunnels, as a ztunnel does beside the workload.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::{Builder, SendResponse};
use http::{Method, Request, Response, StatusCode};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, BufReader, copy, sink};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use super::Tunnel;

/// CONNECT request that an endpoint has accepted.
#[derive(Debug)]
pub struct IncomingTunnel {
    pub authority: String,
    pub tunnel: Tunnel,
}

const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
/// Limit of the wait for the peer's close.
const CLOSE_DEADLINE: Duration = Duration::from_secs(1);
/// Bytes to read from a socket at once; rustls alone reads 4 KiB at a time.
const READ_BYTES: usize = 64 * 1024;
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;

/// Serves HBONE on `listener`: answers every CONNECT with 200 and passes it to `handle` in its
/// own task. Returns only if the listener fails. Dropping the future closes all its connections.
pub async fn serve<F, H>(listener: TcpListener, tls: Arc<ServerConfig>, handle: F)
where
    F: Fn(IncomingTunnel) -> H + Clone + Send + 'static,
    H: Future<Output = ()> + Send + 'static,
{
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        let Ok((stream, mut rest)) = duplicate(stream) else { continue };
        let (tls, handle) = (TlsAcceptor::from(Arc::clone(&tls)), handle.clone());
        let stream = BufReader::with_capacity(READ_BYTES, stream);
        connections.spawn(async move {
            if let Ok(Ok(stream)) = timeout(HANDSHAKE_DEADLINE, tls.accept(stream)).await {
                // The error concerns only the peer of this connection.
                let _ = connection(stream, handle).await;
                // Closing a socket with unread bytes, such as those of the peer's close_notify,
                // would reset the connection.
                let _ = timeout(CLOSE_DEADLINE, copy(&mut rest, &mut sink())).await;
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

/// Returns a second handle of the socket, for what arrives after the end of HTTP/2.
fn duplicate(stream: TcpStream) -> io::Result<(TcpStream, TcpStream)> {
    let stream = stream.into_std()?;
    let rest = stream.try_clone()?;
    Ok((TcpStream::from_std(stream)?, TcpStream::from_std(rest)?))
}

async fn connection<S, F, H>(stream: S, handle: F) -> Result<(), h2::Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
    F: Fn(IncomingTunnel) -> H,
    H: Future<Output = ()> + Send + 'static,
{
    let mut settings = Builder::new();
    settings.initial_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW);
    let mut connection = settings.handshake::<_, Bytes>(stream).await?;
    let mut tunnels = JoinSet::new();
    while let Some(request) = connection.accept().await {
        let (request, respond) = request?;
        if let Some(incoming) = accept(request, respond) {
            tunnels.spawn(handle(incoming));
        }
        while tunnels.try_join_next().is_some() {}
    }
    // The peer may close after its last byte, which a tunnel has not read yet.
    while tunnels.join_next().await.is_some() {}
    Ok(())
}

fn accept(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) -> Option<IncomingTunnel> {
    let is_connect = request.method() == Method::CONNECT;
    let mut response = Response::new(());
    if !is_connect {
        *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
    }
    let authority = request.uri().authority().map(ToString::to_string).unwrap_or_default();
    let send = respond.send_response(response, !is_connect).ok()?;
    is_connect.then(|| IncomingTunnel { authority, tunnel: Tunnel::new(send, request.into_body()) })
}
