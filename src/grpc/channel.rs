//! Connection to a control plane, or to a collector of traces: TCP, TLS and HTTP/2.
//!
//! TLS verifies the server before any request is sent; the configuration can disable it. Roots
//! are read again for each connection and the token for each call, because both are replaced at
//! run time.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore};
use socket2::{SockRef, TcpKeepalive};
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;
use tonic::metadata::{Ascii, MetadataKey, MetadataValue};
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use super::goaway::{GoAwayCode, GoAwayObserver};
use crate::config::{ControlPlane, Roots};

/// Deadline for TCP connect and TLS handshake together (docs/wire-contract.md 3.1).
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// Idle time before a PING, and the deadline for its acknowledgement; then the connection is closed
/// (docs/wire-contract.md 3.1).
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_DEADLINE: Duration = Duration::from_secs(10);
/// TCP keepalive (docs/wire-contract.md 3.1).
const KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(300))
    .with_interval(Duration::from_secs(75))
    .with_retries(9);
/// Limit of a token's size; a larger file is not a token.
const TOKEN_BYTES_MAX: u64 = 64 * 1024;

#[derive(Debug, Error)]
pub enum ChannelError {
    #[error("{}: {cause}", file.display())]
    File { file: PathBuf, cause: String },
    #[error("invalid server name `{0}`; write a DNS name or an IP address")]
    ServerName(String),
    /// TCP, TLS or HTTP/2 failed.
    #[error("{0}")]
    Transport(String),
}

/// Connects to the control plane. `goaway` records a GOAWAY from the server.
pub async fn connect(plane: &ControlPlane, goaway: GoAwayCode) -> Result<Channel, ChannelError> {
    let tls = match plane.roots {
        Roots::Plaintext => None,
        _ => Some(TlsConnector::from(client_config(plane).await?)),
    };
    let name = server_name(plane)?;
    let authority = plane.address.to_string();
    let scheme = if tls.is_some() { "https" } else { "http" };
    let endpoint = endpoint(&authority, scheme)?;
    let connector = service_fn(move |_: Uri| {
        let connected = handshake(authority.clone(), tls.clone(), name.clone());
        let goaway = goaway.clone();
        async move {
            let connected = connected.await?;
            Ok::<_, io::Error>(TokioIo::new(GoAwayObserver::new(connected, goaway)))
        }
    });
    endpoint
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_DEADLINE)
        .keep_alive_while_idle(true)
        .connect_with_connector(connector)
        .await
        .map_err(|error| ChannelError::Transport(error_chain(&error)))
}

/// Returns a channel by TLS that connects for its first call and after each loss. It sends no PING,
/// which servers limit.
pub fn connect_lazily(plane: ControlPlane, deadline: Duration) -> Result<Channel, ChannelError> {
    let name = server_name(&plane)?;
    let authority = plane.address.to_string();
    let endpoint = endpoint(&authority, "https")?.timeout(deadline);
    let connector = service_fn(move |_: Uri| {
        let (plane, authority, name) = (plane.clone(), authority.clone(), name.clone());
        async move {
            let tls = client_config(&plane).await.map_err(io::Error::other)?;
            let connected = handshake(authority, Some(tls.into()), name).await?;
            Ok::<_, io::Error>(TokioIo::new(connected))
        }
    });
    Ok(endpoint.connect_with_connector_lazy(connector))
}

/// Returns the name that the certificate of a server must have.
fn server_name(plane: &ControlPlane) -> Result<ServerName<'static>, ChannelError> {
    let name = plane.san.as_deref().unwrap_or(&plane.address.host);
    ServerName::try_from(name.to_owned()).map_err(|_| ChannelError::ServerName(name.to_owned()))
}

/// Returns the endpoint of a server, whose requests have this scheme. The connector uses TLS.
fn endpoint(authority: &str, scheme: &str) -> Result<Endpoint, ChannelError> {
    let uri = |scheme| Uri::try_from(format!("{scheme}://{authority}"));
    let (Ok(target), Ok(origin)) = (uri("http"), uri(scheme)) else {
        return Err(ChannelError::ServerName(authority.to_owned()));
    };
    Ok(Endpoint::from(target).origin(origin))
}

/// Adds credentials to a call's metadata: the current content of the token file, the cluster,
/// and the headers from the configuration.
pub async fn add_credentials<T>(
    control_plane: &ControlPlane,
    cluster: &str,
    call: &mut tonic::Request<T>,
) -> Result<(), ChannelError> {
    if let Some(file) = &control_plane.token {
        let token = read_file(file.clone(), TOKEN_BYTES_MAX).await?;
        call.metadata_mut().insert("authorization", bearer(file, &token)?);
    }
    if let Ok(cluster) = cluster.parse() {
        call.metadata_mut().insert("clusterid", cluster);
    }
    for (name, value) in &control_plane.headers {
        // The configuration reader has checked both; invalid ones are skipped here.
        let name = MetadataKey::<Ascii>::from_bytes(name.as_bytes());
        if let (Ok(name), Ok(mut value)) = (name, MetadataValue::try_from(value)) {
            value.set_sensitive(true);
            call.metadata_mut().insert(name, value);
        }
    }
    Ok(())
}

fn bearer(file: &Path, token: &[u8]) -> Result<MetadataValue<Ascii>, ChannelError> {
    let token = String::from_utf8_lossy(token);
    let value = MetadataValue::try_from(format!("Bearer {}", token.trim()));
    match value {
        Ok(mut value) if !token.trim().is_empty() => {
            value.set_sensitive(true);
            Ok(value)
        }
        _ => {
            Err(ChannelError::File { file: file.to_owned(), cause: "contains no token".to_owned() })
        }
    }
}

/// Reads a file of at most `most` bytes.
async fn read_file(file: PathBuf, limit: u64) -> Result<Vec<u8>, ChannelError> {
    let path = file.clone();
    let read = run_blocking(move || read_blocking(&path, limit));
    let what = match read.await {
        Ok(Ok(bytes)) => return Ok(bytes),
        Ok(Err(error)) => error.to_string(),
        Err(what) => what,
    };
    Err(ChannelError::File { file, cause: what })
}

/// Runs a blocking read on another thread, with a deadline. A mount that hangs would otherwise
/// block the admin pages.
async fn run_blocking<T: Send + 'static>(
    read: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    match timeout(CONNECT_DEADLINE, tokio::task::spawn_blocking(read)).await {
        Ok(read) => read.map_err(|error| error.to_string()),
        Err(_) => Err("read timed out".to_owned()),
    }
}

fn read_blocking(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let metadata = fs::metadata(path)?;
    let refused = || io::Error::other(format!("not a regular file of at most {most} bytes"));
    if !metadata.is_file() {
        return Err(refused());
    }
    // It may grow while it is read.
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).is_ok_and(|length| length <= most) {
        Ok(bytes)
    } else {
        Err(refused())
    }
}

/// Limit of the size of the roots: a mesh's bundle has a few KiB for each root.
const ROOTS_BYTES_MAX: u64 = 1024 * 1024;

async fn client_config(plane: &ControlPlane) -> Result<Arc<ClientConfig>, ChannelError> {
    let failed =
        |what: String| ChannelError::File { file: plane.roots.to_string().into(), cause: what };
    let roots = match &plane.roots {
        Roots::File(file) => parse_roots(&read_file(file.clone(), ROOTS_BYTES_MAX).await?),
        Roots::Pem(text) => parse_roots(text.as_bytes()),
        Roots::System => run_blocking(system_roots).await,
        Roots::Plaintext => Ok(RootCertStore::empty()),
    };
    let roots = roots.map_err(failed)?;
    if roots.is_empty() {
        return Err(failed("contains no certificate".to_owned()));
    }
    let provider = Arc::new(aws_lc_rs::default_provider());
    // As without the feature `kubernetes`, whose HTTP client brings TLS 1.2.
    let mut tls = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| ChannelError::Transport(error.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    tls.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(tls))
}

/// Returns the certificates of a PEM text as roots.
pub fn parse_roots(pem: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let certificate = certificate.map_err(|error| format!("invalid PEM: {error}"))?;
        let added = roots.add(certificate);
        added.map_err(|error| format!("contains an unusable root: {error}"))?;
    }
    Ok(roots)
}

/// Returns the errors in the current files of a control plane, each with the file's path.
pub fn check_files(plane: &ControlPlane) -> Vec<(PathBuf, ChannelError)> {
    let error_in = |file: &Path, most, check: fn(&[u8]) -> Result<(), String>| {
        let read = read_blocking(file, most).map_err(|error| error.to_string());
        let what = read.and_then(|bytes| check(&bytes)).err()?;
        let file = file.to_owned();
        Some((file.clone(), ChannelError::File { file, cause: what }))
    };
    let root = match &plane.roots {
        Roots::File(file) => error_in(file, ROOTS_BYTES_MAX, |pem| {
            if parse_roots(pem)?.is_empty() {
                Err("contains no certificate".to_owned())
            } else {
                Ok(())
            }
        }),
        Roots::Pem(_) | Roots::System | Roots::Plaintext => None,
    };
    let token = plane.token.as_ref();
    let token = token.and_then(|file| {
        error_in(file, TOKEN_BYTES_MAX, |token| {
            let bearer = bearer(Path::new(""), token);
            bearer.map(drop).map_err(|_| "contains no token".to_owned())
        })
    });
    root.into_iter().chain(token).collect()
}

/// Loads the system's roots: `SSL_CERT_FILE`, else the distribution's bundle. Unusable
/// certificates are skipped.
pub fn system_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

async fn handshake(
    authority: String,
    tls: Option<TlsConnector>,
    name: ServerName<'static>,
) -> io::Result<Either<TlsStream<TcpStream>, TcpStream>> {
    let connected = async {
        let stream = TcpStream::connect(authority).await?;
        stream.set_nodelay(true)?;
        SockRef::from(&stream).set_tcp_keepalive(&KEEPALIVE)?;
        match tls {
            Some(tls) => tls.connect(name, stream).await.map(Either::Left),
            None => Ok(Either::Right(stream)),
        }
    };
    let late = |_| io::Error::other(format!("connect timed out after {CONNECT_DEADLINE:?}"));
    timeout(CONNECT_DEADLINE, connected).await.map_err(late)?
}

/// Formats an error with its causes. Transport errors carry no detail of their own.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}
