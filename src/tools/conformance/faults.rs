//! Clients that are silent, break off or never read.

use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::tools::hbone::{Client, Tunnel};

use super::case::{Case, Group, script};
use super::peer::{Peer, Target, session};
use super::raw;
use super::tls::ALERT;

/// Limit of the time that a client may take for its handshake, and for its first request.
const SILENCE_MAX: Duration = Duration::from_secs(40);
/// Beginning of a ClientHello of 512 bytes.
const PARTIAL_HELLO: [u8; 12] = [22, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3, 0];
/// Number of tunnels whose client never reads.
const STALLED: u32 = 64;
/// Bytes that one of them may take: windows, and the buffers of two sockets.
const TAKEN_MAX: usize = 64 << 20;

pub(super) fn cases() -> Vec<Case> {
    const GROUP: Group = Group::Faults;
    let opening = |name: &str, bytes: &'static [u8]| {
        script(GROUP, "deadlines", name, move |to| closes(to, bytes))
    };
    vec![
        opening("silence after TCP", &[]),
        opening("a part of a ClientHello, then silence", &PARTIAL_HELLO),
        opening("HTTP/2 without TLS", raw::PREFACE),
        opening("HTTP/1.1 without TLS", b"GET / HTTP/1.1\r\nHost: conformance\r\n\r\n"),
        opening("65,536 bytes of 0", &[0; 65_536]),
        script(GROUP, "deadlines", "silence after TLS", silence_after_tls),
        script(GROUP, "ends", "reset of TCP within a frame", broken_frame),
        script(GROUP, "ends", "FIN without close_notify, with an open tunnel", fin),
        script(GROUP, "buffers", "64 tunnels that are never read", never_read),
    ]
}

/// Sends bytes in place of TLS, and waits until the gateway ends the connection. It may send an
/// alert before.
async fn closes(to: Target, bytes: &[u8]) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect(to.address).await?;
    // The gateway may end the connection before it has read everything.
    let _ = stream.write_all(bytes).await;
    let mut rest = Vec::new();
    let end = timeout(SILENCE_MAX, stream.read_to_end(&mut rest)).await;
    let _ = end.with_context(|| format!("still open after {SILENCE_MAX:?}"))?;
    ensure!(matches!(rest.first(), None | Some(&ALERT)), "{} bytes and no alert", rest.len());
    Ok(())
}

async fn silence_after_tls(to: Target) -> anyhow::Result<()> {
    let mut stream = session(to.address, &to.tls).await?;
    let mut rest = Vec::new();
    let end = timeout(SILENCE_MAX, stream.read_to_end(&mut rest)).await;
    end.map(drop).with_context(|| format!("still open after {SILENCE_MAX:?}"))
}

/// Opens a tunnel on a new connection, which the fault of another one must not affect.
async fn serves(to: &Target) -> anyhow::Result<()> {
    let client = Client::connect(to.address, &to.tls).await.context("a new connection")?;
    let mut tunnel = client.tunnel(&to.names.echo).await.context("a tunnel")?;
    tunnel.write_all(b"x").await?;
    ensure!(tunnel.read_u8().await? == b'x', "another byte than the one sent");
    Ok(())
}

async fn broken_frame(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::connect(&to, &[]).await?;
    peer.open(&to, 1).await?;
    let data = raw::frame(raw::DATA, 0, 1, &[b'x'; 1000]);
    peer.write(data.get(..500).unwrap_or_default()).await?;
    peer.socket().set_zero_linger()?;
    drop(peer);
    serves(&to).await
}

async fn fin(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::connect(&to, &[]).await?;
    peer.open(&to, 1).await?;
    socket2::SockRef::from(peer.socket()).shutdown(std::net::Shutdown::Write)?;
    // The connection ends: a client that is gone keeps no tunnel.
    while peer.next().await?.is_some() {}
    serves(&to).await
}

async fn never_read(to: Target) -> anyhow::Result<()> {
    let client = Client::connect(to.address, &to.tls).await?;
    let mut tunnels = Vec::new();
    for _ in 0..STALLED {
        let mut tunnel = client.tunnel(&to.names.echo).await?;
        fill(&mut tunnel, Duration::from_millis(100)).await?;
        tunnels.push(tunnel);
    }
    for tunnel in tunnels.iter_mut().take(1) {
        fill(tunnel, Duration::from_secs(1)).await?;
    }
    serves(&to).await
}

/// Writes until the tunnel takes nothing more for this time.
async fn fill(tunnel: &mut Tunnel, time: Duration) -> anyhow::Result<()> {
    let mut taken = 0;
    while let Ok(Ok(count)) = timeout(time, tunnel.write(&[b's'; 64 * 1024])).await {
        taken += count;
        ensure!(taken < TAKEN_MAX, "the gateway takes {taken} bytes that nobody reads");
    }
    Ok(())
}
