//! HBONE connection to a workload inside a tunnel, with one stream.
//!
//! It is not shared: a shared one would send all tunnels to the workload that the gateway has
//! picked for the first.

use std::io::{self, IoSliceMut};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::client::{Builder, Connection, SendRequest};
use http::{Request, StatusCode};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::client::TlsStream;

use crate::lifecycle::Lifecycle;
use crate::reason::Reason;
use crate::snapshot::Reader;
use crate::tls::InboundTls;

use super::connection::{HEADER_LIST_MAX, State, handshake};
use super::stream::{Held, Servers};
use super::verify::{ExpectedWorkloads, ServerIdentity, Verified};
use super::{Failure, Stream};

/// Flow-control window of the stream, which the connection shares with it. Bytes that wait for a
/// slow client also fill the window of the tunnel outside.
const WINDOW: u32 = 256 * 1024;
/// Limit of bytes that wait for the tunnel.
const SEND_BUFFER: usize = 128 * 1024;
/// Deadline from the ClientHello to the answer of the workload.
const OPEN_DEADLINE: Duration = Duration::from_secs(5);
/// Time to send the end of the connection, once its stream has ended. The end of a drain cuts it.
const CLOSE_DEADLINE: Duration = Duration::from_secs(30);

/// Service and workloads at the end of a tunnel.
#[derive(Clone, Copy, Debug)]
pub struct InnerTarget<'a> {
    /// `HOST:PORT` of the service.
    pub authority: &'a str,
    /// Cluster that the certificate of the workload leads to.
    pub cluster: &'a str,
    /// Workloads that may be at the end of the tunnel.
    pub workloads: &'a ExpectedWorkloads,
}

/// Tunnel as the byte stream below a connection. Once both have ended, it delivers what was sent.
pub(super) struct Carrier<F> {
    pub(super) tunnel: Option<Stream>,
    /// Charges bytes until they have left for the socket.
    pub(super) charge: F,
    pub(super) tasks: Lifecycle,
}

/// Opens an HBONE connection inside a tunnel, verifies the workload, and asks it for the service.
/// A drain of `tasks` waits until the connection has sent everything.
///
/// # Errors
/// [`Reason::WorkloadUntrusted`] or [`Reason::WorkloadUnreachable`]. No byte of the client was
/// sent.
pub async fn open_inner<F, C>(
    (mut tunnel, charge): (Stream, F),
    target: &InnerTarget<'_>,
    (tls, reader): (&InboundTls, &Reader),
    (tasks, deadline): (&Lifecycle, Instant),
) -> Result<Stream, Failure>
where
    F: Fn(usize) -> C + Send + Unpin + 'static,
    C: Send + 'static,
{
    // The far gateway reads CANCEL as the end of the connection inside, as ztunnel's.
    tunnel.cancel_on_drop();
    let deadline = deadline.min(Instant::now() + OPEN_DEADLINE);
    let gateway = tunnel.servers().gateway;
    let opened = async {
        let carrier = Carrier { tunnel: Some(tunnel), charge, tasks: tasks.clone() };
        let (connection, workload) = connect(carrier, target, (tls, reader)).await?;
        let verified = (gateway, Arc::new(workload));
        request(connection, target.authority, verified, tasks).await
    };
    let opened = timeout_at(deadline, opened).await;
    opened.unwrap_or_else(|_| Err(unreachable("no answer in time")))
}

pub(super) type Http2<S> = Connection<TlsStream<S>, Bytes>;

pub(super) async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
    carrier: S,
    target: &InnerTarget<'_>,
    (tls, reader): (&InboundTls, &Reader),
) -> Result<((SendRequest<Bytes>, Http2<S>), Verified), Failure> {
    let own = tls.outbound();
    let own = own.ok_or_else(|| unreachable("this gateway has no certificate yet"))?;
    let check = |server: ServerIdentity<'_>| {
        server.check_workload(target.workloads, (target.cluster, &reader.load()))
    };
    let reasons = [Reason::WorkloadUntrusted, Reason::WorkloadUnreachable];
    let opened = handshake(carrier, &own, (tls, reader), check, reasons).await;
    let (stream, verified) = opened.map_err(|failure| failure.at("the workload"))?;
    let mut settings = Builder::new();
    settings
        .enable_push(false)
        .initial_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_header_list_size(HEADER_LIST_MAX)
        .max_send_buffer_size(SEND_BUFFER);
    let connection = settings.handshake(stream).await;
    Ok((connection.map_err(unreachable)?, verified))
}

/// Asks for the service, and leaves the connection to a task once it is open.
pub(super) async fn request<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    (mut send, http2): (SendRequest<Bytes>, Http2<S>),
    authority: &str,
    (gateway, workload): (Arc<State>, Arc<Verified>),
    tasks: &Lifecycle,
) -> Result<Stream, Failure> {
    let request = Request::connect(authority).body(()).map_err(unreachable)?;
    let mut http2 = Box::pin(http2);
    let answered = async {
        let (response, send) = send.send_request(request, false)?;
        Ok::<_, h2::Error>((response.await?, send))
    };
    let (response, stream) = tokio::select! {
        biased;
        answered = answered => answered.map_err(unreachable)?,
        ended = &mut http2 => {
            let error = ended.err().map(|error| error.to_string());
            return Err(unreachable(error.as_deref().unwrap_or("connection closed")));
        }
    };
    let status = response.status();
    if status != StatusCode::OK {
        return Err(unreachable(format!("answered {status}")));
    }
    let (ended, mut has_ended) = oneshot::channel::<()>();
    let chain = Arc::clone(&workload.chain);
    tasks.spawn_closing(async move {
        tokio::select! {
            _ = &mut http2 => return,
            _ = chain.wait_trust_lost() => return,
            _ = &mut has_ended => {}
        }
        // GOAWAY and close_notify. Without them the drop resets the tunnel.
        let _ = timeout(CLOSE_DEADLINE, http2).await;
    });
    let servers = Servers { gateway, workload: Some(workload) };
    Ok(Stream::new(stream, response.into_body(), Held::Own { _ended: ended, servers }))
}

fn unreachable(detail: impl ToString) -> Failure {
    Failure::new(Reason::WorkloadUnreachable, detail.to_string()).at("the workload")
}

impl<F: Unpin> AsyncRead for Carrier<F> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Some(stream) = &mut self.tunnel else {
            return Poll::Ready(Ok(()));
        };
        ready!(stream.poll_read_ready(cx))?;
        let room = IoSliceMut::new(buffer.initialize_unfilled());
        let count = stream.try_read(&mut [room])?;
        buffer.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl<F, C> AsyncWrite for Carrier<F>
where
    F: Fn(usize) -> C + Unpin,
    C: Send + 'static,
{
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let Self { tunnel, charge, .. } = &mut *self;
        let Some(stream) = tunnel else {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        };
        stream.poll_write(cx, bytes, &*charge)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ended = self.tunnel.as_mut().map(Stream::shut_down);
        Poll::Ready(ended.unwrap_or(Ok(())))
    }
}

impl<F> Drop for Carrier<F> {
    fn drop(&mut self) {
        let stream = self.tunnel.take().filter(Stream::is_shut_down);
        if let (Some(stream), Ok(_)) = (stream, Handle::try_current()) {
            let delivery = stream.deliver(Instant::now() + CLOSE_DEADLINE);
            self.tasks.spawn_closing(delivery);
        }
    }
}
