//! Tunnels, by docs/wire-contract.md 1.2 to 1.6.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use crate::tools::hbone::{Client, ConnectError, Tunnel};

use super::case::{Case, Group, script};
use super::outcome::Outcome::{Status, Stream};
use super::peer::{METHOD, Peer, RESULT_DEADLINE, Target};
use super::raw;

/// Number of tunnels that ztunnel opens in one connection.
const TUNNELS: u32 = 100;
const MIB: usize = 1 << 20;
/// Bytes that no peer accepts in the header fields of a request.
const LARGE_FIELD: usize = 17 * 1024;

pub(super) fn cases() -> Vec<Case> {
    const GROUP: Group = Group::Tunnels;
    vec![
        script(GROUP, "1.2", "PING while a tunnel is full", ping_beside_bytes),
        script(GROUP, "1.2", "100 tunnels of one connection", many_tunnels),
        script(GROUP, "1.2", "a tunnel that is not read stops no other", stalled_tunnel),
        script(GROUP, "1.3", "unknown fields", unknown_fields),
        script(GROUP, "1.3", "17 KiB of baggage", large_baggage),
        script(GROUP, "1.3", "bytes before the answer", early_bytes),
        script(GROUP, "1.4", "upper case in the authority", |to| async move {
            let upper = to.names.echo.to_uppercase();
            let client = client(&to).await?;
            echo(client.tunnel(&upper).await?, b"upper").await
        }),
        script(GROUP, "1.5", "unknown authority, twice, and a tunnel", rejections),
        script(GROUP, "1.5", "GET", get),
        script(GROUP, "1.6", "1 MiB each way, client ends first", half_close),
        script(GROUP, "1.6", "RST_STREAM leaves other tunnels open", reset),
        script(GROUP, "1.6", "END_STREAM with the last byte", end_with_data),
    ]
}

async fn client(to: &Target) -> Result<Client, ConnectError> {
    Client::connect(to.address, &to.tls).await
}

/// Sends bytes, receives them, and ends both directions.
async fn echo(mut tunnel: Tunnel, bytes: &[u8]) -> anyhow::Result<()> {
    let whole = async {
        tunnel.write_all(bytes).await?;
        tunnel.shutdown().await?;
        let mut received = Vec::new();
        tunnel.read_to_end(&mut received).await?;
        ensure!(received == bytes, "{} other bytes than those sent", received.len());
        Ok(())
    };
    timeout(RESULT_DEADLINE, whole).await.context("no end of the tunnel in time")?
}

async fn ping_beside_bytes(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::connect(&to, &raw::initial_window(0)[9..]).await?;
    peer.open(&to, 1).await?;
    // No more than a window of the default size, of which nothing comes back.
    for _ in 0..3 {
        peer.write(&raw::frame(raw::DATA, 0, 1, &[b'x'; 16_384])).await?;
    }
    peer.write(&raw::frame(raw::PING, 0, 0, b"conforms")).await?;
    let ack = peer.until(|frame| frame.kind == raw::PING && frame.flags & raw::ACK != 0).await?;
    ensure!(ack.payload == b"conforms", "another payload: {ack:?}");
    Ok(())
}

async fn many_tunnels(to: Target) -> anyhow::Result<()> {
    let client = client(&to).await?;
    let mut tunnels = Vec::new();
    for number in 0..TUNNELS {
        let opened = timeout(RESULT_DEADLINE, client.tunnel(&to.names.echo)).await;
        let opened = opened.with_context(|| format!("tunnel {number} waits"))?;
        tunnels.push(opened.with_context(|| format!("tunnel {number}"))?);
    }
    for (number, tunnel) in tunnels.into_iter().enumerate() {
        let bytes = format!("tunnel {number}");
        echo(tunnel, bytes.as_bytes()).await.with_context(|| bytes.clone())?;
    }
    Ok(())
}

async fn stalled_tunnel(to: Target) -> anyhow::Result<()> {
    let client = client(&to).await?;
    let mut stalled = client.tunnel(&to.names.echo).await?;
    let fill = async {
        loop {
            if stalled.write_all(&[b's'; 64 * 1024]).await.is_err() {
                return;
            }
        }
    };
    // deadline: the tunnel is full once it takes nothing more.
    let _ = timeout(Duration::from_secs(1), fill).await;
    for number in 0..3 {
        let other = timeout(RESULT_DEADLINE, client.tunnel(&to.names.echo)).await;
        let other = other.context("a new tunnel waits for the stalled one")??;
        echo(other, &vec![b'o'; MIB / 4]).await.with_context(|| format!("tunnel {number}"))?;
    }
    Ok(())
}

async fn unknown_fields(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::connect(&to, &[]).await?;
    let fields = [
        METHOD,
        to.names.authority(),
        ("baggage", b"k8s.cluster.name=conformance,unknown=1"),
        ("forwarded", b"for=\"10.0.0.1:4000\";host=conformance"),
        ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("x-conformance", b"1"),
    ];
    peer.write(&raw::headers(1, &fields)).await?;
    match peer.outcome(&[Status(200)]).await? {
        Status(200) => Ok(()),
        other => bail!("{other}, expected status 200"),
    }
}

/// Too many bytes are an error of the stream: other tunnels of the connection go on.
async fn large_baggage(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::connect(&to, &[]).await?;
    peer.open(&to, 1).await?;
    let fields = [METHOD, to.names.authority(), ("baggage", &[b'a'; LARGE_FIELD])];
    let block = raw::block(&fields);
    let (first, rest) = block.split_at(16_384);
    peer.write(&raw::frame(raw::HEADERS, 0, 3, first)).await?;
    peer.write(&raw::frame(raw::CONTINUATION, raw::END_HEADERS, 3, rest)).await?;
    match peer.outcome(&[Status(431)]).await? {
        Status(200 | 400..=499) | Stream(_) => {}
        other => bail!("{other}, expected an answer or a reset of the stream"),
    }
    peer.write(&raw::frame(raw::DATA, 0, 1, b"x")).await?;
    let data = peer.until(|frame| frame.kind == raw::DATA && frame.stream == 1).await;
    data.context("the other tunnel").map(drop)
}

async fn early_bytes(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::connect(&to, &[]).await?;
    let data = raw::frame(raw::DATA, 0, 1, b"early");
    peer.write(&[raw::headers(1, &to.names.connect()), data].concat()).await?;
    let mut received = Vec::new();
    while received.len() < 5 {
        let frame = peer.until(|frame| matches!(frame.kind, raw::DATA | raw::RST_STREAM)).await?;
        ensure!(frame.kind == raw::DATA, "RST_STREAM");
        received.extend(frame.payload);
    }
    ensure!(received == b"early", "other bytes than those sent");
    Ok(())
}

async fn rejections(to: Target) -> anyhow::Result<()> {
    let client = client(&to).await?;
    for _ in 0..2 {
        let answer = timeout(RESULT_DEADLINE, client.tunnel(&to.names.unknown)).await;
        match answer.context("no answer")? {
            Ok(_) => bail!("an unknown authority is answered with 200"),
            Err(ConnectError::Status(status)) if status.as_u16() >= 400 => {}
            Err(ConnectError::Http2(error)) if error.is_reset() => {}
            Err(error) => return Err(error).context("the connection ended"),
        }
    }
    echo(client.tunnel(&to.names.echo).await?, b"after").await
}

async fn get(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::connect(&to, &[]).await?;
    let fields = [
        (":method", b"GET".as_slice()),
        (":scheme", b"https"),
        (":path", b"/"),
        to.names.authority(),
    ];
    peer.write(&raw::headers(1, &fields)).await?;
    match peer.outcome(&[Status(405)]).await? {
        Status(400..=499) | Stream(_) => Ok(()),
        other => bail!("{other}, expected a status of 4xx"),
    }
}

async fn half_close(to: Target) -> anyhow::Result<()> {
    let client = client(&to).await?;
    let tunnel = client.tunnel(&to.names.echo).await?;
    let bytes: Vec<u8> = (0..MIB).map(|at| (at / 251).to_le_bytes()[0]).collect();
    let (mut read, mut write) = tokio::io::split(tunnel);
    let send = async {
        write.write_all(&bytes).await?;
        write.shutdown().await
    };
    let mut received = Vec::new();
    let both = async { tokio::try_join!(send, read.read_to_end(&mut received)) };
    timeout(RESULT_DEADLINE, both).await.context("no end of the tunnel in time")??;
    ensure!(received == bytes, "{} other bytes than those sent", received.len());
    Ok(())
}

async fn reset(to: Target) -> anyhow::Result<()> {
    let client = client(&to).await?;
    let kept = client.tunnel(&to.names.echo).await?;
    for _ in 0..10 {
        let mut reset = client.tunnel(&to.names.echo).await?;
        reset.write_all(b"lost").await?;
        // A drop before the end resets the stream.
        drop(reset);
    }
    echo(kept, b"kept").await
}

async fn end_with_data(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::connect(&to, &[]).await?;
    peer.open(&to, 1).await?;
    peer.write(&raw::frame(raw::DATA, raw::END_STREAM, 1, b"last")).await?;
    let mut received = Vec::new();
    loop {
        let frame = peer.until(|frame| matches!(frame.kind, raw::DATA | raw::RST_STREAM)).await?;
        ensure!(frame.kind == raw::DATA, "RST_STREAM in place of END_STREAM");
        received.extend(frame.payload);
        if frame.flags & raw::END_STREAM != 0 {
            break;
        }
    }
    ensure!(received == b"last", "other bytes than those sent");
    Ok(())
}
