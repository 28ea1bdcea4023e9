//! The channel to a control plane: TCP, TLS that is verified before anything is said, HTTP/2. TLS
//! is left out where the configuration says so.
//!
//! Roots and token are read anew for each connection and each call: both are replaced while we run.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
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

use super::goaway::{GoAway, Watched};
use crate::config::{ControlPlane, Roots};

/// The time for TCP and TLS together (contract 3.1).
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// A silent connection is asked by PING, and given up (contract 3.1).
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_DEADLINE: Duration = Duration::from_secs(10);
/// TCP keepalive: idle time, interval, and how many are lost (contract 3.1).
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(300), Duration::from_secs(75), 9);
/// A token longer than this is something else.
const TOKEN_BYTES_MAX: u64 = 64 * 1024;

/// Why there is no channel, or no call on it.
#[derive(Debug, Error)]
pub enum ChannelError {
    /// A file that is needed cannot be used.
    #[error("{}: {what}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The name to verify the server by is none.
    #[error("`{0}` is no name to verify a server by")]
    Name(String),
    /// TCP, TLS or HTTP/2 failed.
    #[error("{0}")]
    Transport(String),
}

/// Connects to the control plane. A GOAWAY of the server is noted in `goaway`.
///
/// # Errors
/// The roots cannot be read, the server cannot be reached, or it is not who it should be.
pub async fn connect(plane: &ControlPlane, goaway: GoAway) -> Result<Channel, ChannelError> {
    let tls = match plane.roots {
        Roots::Plaintext => None,
        _ => Some(TlsConnector::from(tls(plane).await?)),
    };
    let name = plane.san.as_deref().unwrap_or(&plane.address.host);
    let name =
        ServerName::try_from(name.to_owned()).map_err(|_| ChannelError::Name(name.to_owned()))?;
    let authority = plane.address.to_string();
    let scheme = if tls.is_some() { "https" } else { "http" };
    let connector = service_fn({
        let authority = authority.clone();
        move |_: Uri| {
            let connected = handshake(authority.clone(), tls.clone(), name.clone());
            let goaway = goaway.clone();
            async move {
                let late = |_| io::Error::other(format!("no TLS within {CONNECT_DEADLINE:?}"));
                let connected = timeout(CONNECT_DEADLINE, connected).await;
                let connected = connected.map_err(late)??;
                Ok::<_, io::Error>(TokioIo::new(Watched::new(connected, goaway)))
            }
        }
    });
    let uri = |scheme| Uri::try_from(format!("{scheme}://{authority}"));
    let (Ok(target), Ok(origin)) = (uri("http"), uri(scheme)) else {
        return Err(ChannelError::Name(authority));
    };
    Endpoint::from(target)
        .origin(origin)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_DEADLINE)
        .keep_alive_while_idle(true)
        .connect_with_connector(connector)
        .await
        .map_err(|error| ChannelError::Transport(chain(&error)))
}

/// Says in a call's metadata who we are: the token as it is in its file now, our cluster, and what
/// the configuration adds.
///
/// # Errors
/// The token's file cannot be read, or holds no token.
pub async fn introduce<T>(
    plane: &ControlPlane,
    cluster: &str,
    call: &mut tonic::Request<T>,
) -> Result<(), ChannelError> {
    if let Some(file) = &plane.token {
        let token = read(file.clone(), TOKEN_BYTES_MAX).await?;
        call.metadata_mut()
            .insert("authorization", bearer(file, &token)?);
    }
    if let Ok(cluster) = cluster.parse() {
        call.metadata_mut().insert("clusterid", cluster);
    }
    for (name, value) in &plane.headers {
        // The configuration was checked for both.
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
        _ => Err(ChannelError::File {
            file: file.to_owned(),
            what: "holds no token".to_owned(),
        }),
    }
}

/// Reads a small file.
async fn read(file: PathBuf, most: u64) -> Result<Vec<u8>, ChannelError> {
    let path = file.clone();
    let read = aside(move || read_now(&path, most));
    let what = match read.await {
        Ok(Ok(bytes)) => return Ok(bytes),
        Ok(Err(error)) => error.to_string(),
        Err(what) => what,
    };
    Err(ChannelError::File { file, what })
}

/// Reads away from this thread, where a mount that hangs would stop admin pages.
async fn aside<T: Send + 'static>(read: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    match timeout(CONNECT_DEADLINE, tokio::task::spawn_blocking(read)).await {
        Ok(read) => read.map_err(|error| error.to_string()),
        Err(_) => Err("cannot be read in time".to_owned()),
    }
}

fn read_now(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let metadata = fs::metadata(path)?;
    match metadata.is_file() && metadata.len() <= most {
        true => fs::read(path),
        false => Err(io::Error::other("is no file of a sensible size")),
    }
}

/// Roots beyond this are something else: a mesh's bundle has a few KiB for each.
const ROOTS_BYTES_MAX: u64 = 1024 * 1024;

async fn tls(plane: &ControlPlane) -> Result<Arc<ClientConfig>, ChannelError> {
    let failed = |what: String| ChannelError::File {
        file: plane.roots.to_string().into(),
        what,
    };
    let roots = match &plane.roots {
        Roots::File(file) => parsed(&read(file.clone(), ROOTS_BYTES_MAX).await?),
        Roots::Pem(text) => parsed(text.as_bytes()),
        Roots::System => aside(system).await,
        Roots::Plaintext => Ok(RootCertStore::empty()),
    };
    let roots = roots.map_err(failed)?;
    if roots.is_empty() {
        return Err(failed("holds no certificate".to_owned()));
    }
    let provider = Arc::new(aws_lc_rs::default_provider());
    let mut tls = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| ChannelError::Transport(error.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    tls.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(tls))
}

fn parsed(pem: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let certificate = certificate.map_err(|error| format!("is not PEM: {error}"))?;
        let added = roots.add(certificate);
        added.map_err(|error| format!("holds a root that cannot be used: {error}"))?;
    }
    Ok(roots)
}

/// What is wrong with the files of a control plane as they are now, each with its error.
pub fn check(plane: &ControlPlane) -> Vec<(PathBuf, ChannelError)> {
    let judged = |file: &Path, most, judge: fn(&[u8]) -> Result<(), String>| {
        let read = read_now(file, most).map_err(|error| error.to_string());
        let what = read.and_then(|bytes| judge(&bytes)).err()?;
        let file = file.to_owned();
        Some((file.clone(), ChannelError::File { file, what }))
    };
    let root = match &plane.roots {
        Roots::File(file) => judged(file, ROOTS_BYTES_MAX, |pem| match parsed(pem)?.is_empty() {
            true => Err("holds no certificate".to_owned()),
            false => Ok(()),
        }),
        Roots::Pem(_) | Roots::System | Roots::Plaintext => None,
    };
    let token = plane.token.as_ref();
    let token = token.and_then(|file| {
        judged(file, TOKEN_BYTES_MAX, |token| {
            let bearer = bearer(Path::new(""), token);
            bearer.map(drop).map_err(|_| "holds no token".to_owned())
        })
    });
    root.into_iter().chain(token).collect()
}

/// The system's roots: `SSL_CERT_FILE`, else the bundle of its distribution. It may have some that
/// are of no use to us.
fn system() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

async fn handshake(
    authority: String,
    tls: Option<TlsConnector>,
    name: ServerName<'static>,
) -> io::Result<Either<TlsStream<TcpStream>, TcpStream>> {
    let stream = TcpStream::connect(authority).await?;
    stream.set_nodelay(true)?;
    let (time, interval, retries) = KEEPALIVE;
    let keepalive = TcpKeepalive::new()
        .with_time(time)
        .with_interval(interval)
        .with_retries(retries);
    SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
    match tls {
        Some(tls) => tls.connect(name, stream).await.map(Either::Left),
        None => Ok(Either::Right(stream)),
    }
}

/// An error with its causes: those of the transport say nothing by themselves.
pub fn chain(error: &dyn std::error::Error) -> String {
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
