//! HBONE client: one TLS connection with many tunnels.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::Context as _;
use bytes::Bytes;
use h2::client::{Builder, SendRequest};
use http::{Method, Request, StatusCode};
use rustls::pki_types::ServerName;
use rustls::{CipherSuite, ClientConfig, NamedGroup};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

use crate::tls::explain_error;

use super::Tunnel;

/// HBONE connection to a gateway, or to an endpoint through a tunnel.
///
/// Dropping it closes the connection and all its tunnels.
#[derive(Debug)]
pub struct Client {
    send: SendRequest<Bytes>,
    driver: ConnectionTask,
    pub(crate) negotiated: Option<(NamedGroup, CipherSuite)>,
}

/// Task that drives the connection, aborted on drop.
#[derive(Debug)]
struct ConnectionTask(JoinHandle<Result<(), h2::Error>>);

#[derive(Debug, Error)]
pub enum ConnectError {
    /// TCP or TLS failed, including a TLS alert from the server.
    #[error("connection failed: {0}")]
    Io(#[from] io::Error),
    /// HTTP/2 failed, or the server reset the stream.
    #[error("tunnel failed: {0}")]
    Http2(#[from] h2::Error),
    #[error("tunnel rejected: status {0}")]
    Status(StatusCode),
    #[error("tunnel failed: {0}")]
    Authority(#[from] http::Error),
}

/// Flow-control windows of ztunnel's client: 4 MiB for a stream, 16 MiB for a connection.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;

impl Client {
    /// Connects to `address`.
    ///
    /// # Errors
    /// TCP, TLS or HTTP/2 failed. With TLS 1.3, a server rejects the client certificate only
    /// after the handshake, so the first tunnel fails.
    pub async fn connect(
        address: SocketAddr,
        tls: &Arc<ClientConfig>,
    ) -> Result<Self, ConnectError> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Self::connect_over(stream, tls).await
    }

    /// Connects over an open byte stream, such as a tunnel.
    pub async fn connect_over<S>(stream: S, tls: &Arc<ClientConfig>) -> Result<Self, ConnectError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let mut settings = Builder::new();
        settings
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW);
        Self::with_settings(stream, tls, &settings).await
    }

    /// Connects like [`Client::connect_over`], with the given HTTP/2 settings.
    pub async fn with_settings<S>(
        stream: S,
        tls: &Arc<ClientConfig>,
        settings: &Builder,
    ) -> Result<Self, ConnectError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        // The name is never sent: verification uses SPIFFE identities.
        let name = ServerName::IpAddress(IpAddr::V4(Ipv4Addr::UNSPECIFIED).into());
        let connected = TlsConnector::from(Arc::clone(tls)).connect(name, stream).await;
        let stream = connected.map_err(explain)?;
        let (_, session) = stream.get_ref();
        let group = session.negotiated_key_exchange_group();
        let suite = session.negotiated_cipher_suite();
        let agreed = group.zip(suite).map(|(group, suite)| (group.name(), suite.suite()));
        let (send, connection) = settings.handshake(stream).await?;
        Ok(Self { send, driver: ConnectionTask(tokio::spawn(connection)), negotiated: agreed })
    }

    /// Opens a tunnel to `authority`. Waits until the connection allows another stream.
    pub async fn tunnel(&self, authority: &str) -> Result<Tunnel, ConnectError> {
        let uri = http::Uri::builder().authority(authority).build()?;
        self.request(Request::builder().method(Method::CONNECT).uri(uri).body(())?).await
    }

    /// Sends any request, and returns its stream as a tunnel if the response is 200.
    pub async fn request(&self, request: Request<()>) -> Result<Tunnel, ConnectError> {
        let mut ready = self.send.clone().ready().await?;
        let (response, send) = ready.send_request(request, false)?;
        let response = response.await?;
        match response.status() {
            StatusCode::OK => Ok(Tunnel::new(send, response.into_body())),
            status => Err(ConnectError::Status(status)),
        }
    }

    /// Waits until the connection ends, by GOAWAY or otherwise.
    pub async fn wait_closed(self) -> Result<(), ConnectError> {
        // Without a handle, the connection would close itself.
        let _send = self.send;
        self.driver.join().await
    }

    /// Closes the connection once its tunnels have ended: GOAWAY, close_notify, and the end of
    /// the byte stream below.
    pub async fn close(self) -> Result<(), ConnectError> {
        let Self { send, driver, .. } = self;
        drop(send);
        driver.join().await
    }

    /// Returns the server's current limit of concurrent tunnels on this connection.
    pub fn max_tunnels(&self) -> usize {
        self.send.current_max_send_streams()
    }

    pub fn is_closed(&self) -> bool {
        self.driver.0.is_finished()
    }
}

/// Returns the first address of a gateway, which a tool has as `--to HOST:PORT`.
pub(crate) async fn resolve(to: &str) -> anyhow::Result<SocketAddr> {
    let resolved = tokio::net::lookup_host(to).await;
    let mut resolved =
        resolved.with_context(|| format!("cannot resolve `{to}`; write --to HOST:PORT"))?;
    resolved.next().with_context(|| format!("`{to}` has no address"))
}

/// Replaces the error of rustls about a certificate, which has the fields of its cause.
fn explain(error: io::Error) -> io::Error {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref());
    match cause {
        Some(cause @ rustls::Error::InvalidCertificate(_)) => {
            let detail = explain_error(cause);
            io::Error::other(format!("invalid peer certificate: {detail}"))
        }
        _ => error,
    }
}

impl ConnectionTask {
    async fn join(mut self) -> Result<(), ConnectError> {
        match (&mut self.0).await {
            Ok(ended) => Ok(ended?),
            Err(stopped) => Err(io::Error::other(stopped).into()),
        }
    }
}

impl Drop for ConnectionTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}
