//! `strait load serve`: the endpoint behind the gateway.
//!
//! An echo sends the received bytes back, and a sink drops them; both end when their client does. A
//! source first reads the number of bytes to send, as eight bytes in big-endian order, and ends
//! after it has sent them.

use std::future::Future;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::{Buf, Bytes, BytesMut};
use clap::ValueEnum;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::spawn_local;
use tokio::time::sleep;

use crate::labels::printed;
use crate::lifecycle::StopSignals;
use crate::tls::{self, IdentityMaterial};
use crate::tools::conformance::endpoint;
use crate::tools::hbone::{self, IncomingTunnel};

use super::alert::HELLO_RESPONSE;
use super::args;
use super::flow::{LoadStream, PassthroughStream};

/// Arguments of `strait load serve`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8080")]
    bind: SocketAddr,
    /// Handling of a connection, or of a tunnel.
    #[arg(long, value_enum, default_value_t = Mode::Echo)]
    mode: Mode,
    /// Drop and answer a ClientHello first; connections by `--sni` begin with one.
    #[arg(long = "after-hello", conflicts_with = "hbone")]
    answers_client_hello: bool,
    /// Serve HBONE tunnels, as a workload's ztunnel does; without it plain TCP.
    #[arg(long, requires_all = ["chain", "key", "roots"])]
    hbone: bool,
    /// Certificate chain, with --hbone.
    #[arg(long, value_name = "FILE", requires = "hbone")]
    chain: Option<PathBuf>,
    /// Key of the certificate.
    #[arg(long, value_name = "FILE", requires = "hbone")]
    key: Option<PathBuf>,
    /// Roots for the clients' certificates; any identity under them is accepted.
    #[arg(long, value_name = "FILE", requires = "hbone")]
    roots: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Send received bytes back: for rr, churn, handshake, mixed and idle.
    Echo,
    /// Send received bytes back, and end at other times on request: for `strait conformance`.
    Scripted,
    /// Drop received bytes: for up.
    Sink,
    /// Send as many bytes as requested: for down and stall.
    Source,
}

const EXAMPLES: &str = "Examples:
  strait load serve --mode source --bind 10.0.0.1:8080
  strait load serve --mode echo --bind 10.0.0.1:15008 --hbone \\
    --chain endpoint.crt --key endpoint.key --roots root.crt";

/// Length of the order that a source reads first: the number of bytes to send.
pub(super) const ORDER_BYTES: usize = size_of::<u64>();
/// Order for an endless stream.
pub(super) const ENDLESS: u64 = u64::MAX;

/// Bytes that a source sends repeatedly.
const CHUNK_BYTES: usize = 256 * 1024;
/// Length of the listen backlog. Gateways may dial for all their tunnels at once.
const BACKLOG: u32 = 4096;
/// Pause after a failed accept, until descriptors are free again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until a signal arrives.
pub(super) async fn serve(args: &Args) -> anyhow::Result<()> {
    let mut stop = StopSignals::new()?;
    let listener = listen(args.bind).with_context(|| format!("cannot listen on {}", args.bind))?;
    let address = listener.local_addr()?;
    let mode = args.mode;
    let chunk = Bytes::from(vec![0; CHUNK_BYTES]);
    let files = args::files(args.chain.clone(), args.key.clone(), args.roots.clone());
    let serving: Pin<Box<dyn Future<Output = ()>>> = match files {
        Some(files) => {
            let tls = tls::server_config_any_client(&IdentityMaterial::load(&files)?)?;
            let handle = move |IncomingTunnel { tunnel, .. }: IncomingTunnel| {
                let chunk = chunk.clone();
                // The client reports how its tunnel ended.
                async move {
                    let _ = match mode {
                        Mode::Scripted => endpoint::serve(tunnel).await,
                        _ => serve_stream(mode, LoadStream::Tunnel(tunnel), &chunk).await,
                    };
                }
            };
            Box::pin(hbone::serve(listener, tls, handle))
        }
        None => Box::pin(serve_plain(mode, args.answers_client_hello, listener, chunk)),
    };
    let protocol = if args.hbone { "HBONE" } else { "plain TCP" };
    let name = mode.to_possible_value();
    let name = name.as_ref().map_or("", |value| value.get_name());
    let mut out = io::stdout();
    let line = writeln!(out, "listening on {address}: {name} by {protocol}; Ctrl-C ends it");
    printed(line.and_then(|()| out.flush()))?;
    tokio::select! {
        () = serving => bail!("the listener failed"),
        _ = stop.next() => Ok(()),
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

async fn serve_plain(mode: Mode, after_hello: bool, listener: TcpListener, chunk: Bytes) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let chunk = chunk.clone();
        spawn_local(async move {
            // The client reports how its connection ended.
            let _ = serve_socket(mode, after_hello, stream, &chunk).await;
        });
    }
}

async fn serve_socket(
    mode: Mode,
    after_hello: bool,
    mut stream: TcpStream,
    chunk: &Bytes,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    if after_hello {
        skip_client_hello(&mut stream).await?;
        stream.write_all(&HELLO_RESPONSE).await?;
    }
    match mode {
        Mode::Scripted => endpoint::serve(stream).await,
        _ => {
            serve_stream(mode, LoadStream::Bare(PassthroughStream::of_server(stream)), chunk).await
        }
    }
}

/// Serves a tunnel or a connection, other than a scripted one.
async fn serve_stream(mode: Mode, mut stream: LoadStream, chunk: &Bytes) -> io::Result<()> {
    match mode {
        Mode::Echo => {
            while let Some(bytes) = stream.chunk().await? {
                stream.send(bytes).await?;
            }
        }
        Mode::Sink | Mode::Scripted => while stream.chunk().await?.is_some() {},
        Mode::Source => {
            let mut left = read_order(&mut stream).await?;
            while left > 0 {
                let mut part = chunk.clone();
                part.truncate(usize::try_from(left).unwrap_or(usize::MAX));
                left -= part.len() as u64;
                stream.send(part).await?;
            }
        }
    }
    stream.shutdown().await?;
    // Unread bytes would turn the close of a socket into a reset.
    while stream.chunk().await?.is_some() {}
    Ok(())
}

/// Reads the number of bytes to send.
async fn read_order(stream: &mut LoadStream) -> io::Result<u64> {
    let mut order = BytesMut::new();
    while order.len() < ORDER_BYTES {
        let bytes = stream.chunk().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        order.extend_from_slice(&bytes);
    }
    Ok(order.get_u64())
}

/// Reads one TLS record, which holds the whole ClientHello: type, version, length, and that many
/// bytes.
async fn skip_client_hello(stream: &mut TcpStream) -> io::Result<()> {
    let mut head = [0; 5];
    stream.read_exact(&mut head).await?;
    let [_, _, _, high, low] = head;
    let mut rest = stream.take(u16::from_be_bytes([high, low]).into());
    tokio::io::copy(&mut rest, &mut tokio::io::sink()).await?;
    Ok(())
}
