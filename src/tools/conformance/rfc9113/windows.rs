//! Sections 4.2, 5.2, 6.5.3, 6.9 and 6.9.2: windows while bytes are in flight.

use std::time::Duration;

use anyhow::{Context, ensure};

use crate::tools::conformance::case::{Case, Group, script};
use crate::tools::conformance::outcome::FLOW_CONTROL_ERROR;
use crate::tools::conformance::outcome::Outcome::{Closed, Connection, Ignored, Stream};
use crate::tools::conformance::peer::{Limits, Peer, Target};
use crate::tools::conformance::raw::{self, initial_window};

/// Limit of a window (section 6.9.1).
const WINDOW_MAX: u32 = (1 << 31) - 1;

pub(super) fn cases() -> Vec<Case> {
    const GROUP: Group = Group::Http2;
    vec![
        script(GROUP, "5.2", "bytes stay within the window of a stream", stream_window),
        script(GROUP, "6.9.2", "window below zero by SETTINGS", negative_window),
        script(GROUP, "6.9.2", "initial window of 0", no_window),
        script(GROUP, "6.9", "window of the connection limits all streams", connection_window),
        script(GROUP, "6.9.1", "window of the largest size", largest_window),
        script(GROUP, "4.2", "frames stay within the peer's maximum", frame_size),
        script(GROUP, "6.9", "bytes above the gateway's window", above_their_window),
    ]
}

fn window_update(stream: u32, bytes: u32) -> Vec<u8> {
    raw::frame(raw::WINDOW_UPDATE, 0, stream, &bytes.to_be_bytes())
}

impl Peer {
    /// Connects with this initial window, and opens stream 1.
    async fn with_window(to: &Target, bytes: u32) -> anyhow::Result<Self> {
        let mut peer = Self::connect(to, &initial_window(bytes)[9..]).await?;
        peer.open(to, 1).await?;
        Ok(peer)
    }

    async fn request(&mut self, stream: u32, bytes: usize) -> anyhow::Result<()> {
        for part in vec![b'x'; bytes].chunks(Limits::DEFAULT.frame as usize) {
            self.write(&raw::frame(raw::DATA, 0, stream, part)).await?;
        }
        Ok(())
    }

    async fn receive(&mut self, stream: u32, bytes: usize) -> anyhow::Result<()> {
        let mut left = bytes;
        while left > 0 {
            let next = self.until(|frame| frame.kind == raw::DATA && frame.stream == stream);
            let frame = next.await.with_context(|| format!("{left} bytes are missing"))?;
            let rest = left.checked_sub(frame.payload.len());
            left =
                rest.with_context(|| format!("{} bytes above the window", frame.payload.len()))?;
        }
        Ok(())
    }

    /// Fails if bytes are sent although the window has no room for those that the endpoint has.
    async fn receive_none(&mut self) -> anyhow::Result<()> {
        // deadline: that nothing is sent can only be waited for.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let outcome = self.outcome(&[Ignored]).await?;
        ensure!(outcome == Ignored, "{outcome}, expected no bytes");
        Ok(())
    }
}

async fn stream_window(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::with_window(&to, 1000).await?;
    peer.request(1, 5000).await?;
    peer.receive(1, 1000).await?;
    for bytes in [1, 10, 989] {
        peer.write(&window_update(1, bytes)).await?;
        peer.receive(1, bytes as usize).await?;
    }
    peer.write(&window_update(1, WINDOW_MAX)).await?;
    peer.receive(1, 3000).await
}

/// Checks section 6.9.2: a window that becomes negative by SETTINGS is counted up from there.
async fn negative_window(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::with_window(&to, 3000).await?;
    peer.request(1, 8000).await?;
    peer.receive(1, 3000).await?;
    // 3,000 were sent under the old window, which leaves 1,000 - 3,000.
    peer.write(&initial_window(1000)).await?;
    peer.write(&window_update(1, 1999)).await?;
    peer.receive_none().await?;
    peer.write(&window_update(1, 2)).await?;
    peer.receive(1, 1).await?;
    peer.write(&initial_window(3000)).await?;
    peer.receive(1, 2000).await?;
    // Twice in one frame: the last value counts.
    let both = [&initial_window(0)[9..], &initial_window(5000)[9..]].concat();
    peer.write(&raw::frame(raw::SETTINGS, 0, 0, &both)).await?;
    peer.receive(1, 2000).await
}

async fn no_window(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::with_window(&to, 0).await?;
    peer.request(1, 1).await?;
    peer.receive_none().await?;
    peer.write(&initial_window(1)).await?;
    peer.receive(1, 1).await
}

async fn connection_window(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::with_window(&to, WINDOW_MAX).await?;
    // The connection's window is not changed by SETTINGS, and is 65,535 (section 6.9.2).
    peer.request(1, 60_000).await?;
    peer.receive(1, 60_000).await?;
    peer.open(&to, 3).await?;
    peer.request(3, 10_000).await?;
    peer.receive(3, 5_535).await?;
    peer.write(&initial_window(1 << 30)).await?;
    peer.write(&window_update(3, 1 << 20)).await?;
    peer.receive_none().await?;
    peer.write(&window_update(0, 65)).await?;
    peer.receive(3, 65).await?;
    peer.write(&window_update(0, 1 << 20)).await?;
    peer.receive(3, 4_400).await
}

async fn largest_window(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::with_window(&to, WINDOW_MAX).await?;
    peer.write(&window_update(0, WINDOW_MAX - 65_535)).await?;
    for _ in 0..4 {
        peer.request(1, 50_000).await?;
        peer.receive(1, 50_000).await?;
    }
    // 200,000 bytes were used: the windows may grow by them, and not by one more.
    peer.write(&window_update(1, 200_000)).await?;
    peer.write(&window_update(0, 200_000)).await?;
    peer.request(1, 1).await?;
    peer.receive(1, 1).await?;
    peer.write(&window_update(1, 2)).await?;
    expect_flow_control_error(&mut peer).await
}

/// Checks section 4.2: no frame exceeds the size that the peer allows, which is 16,384.
async fn frame_size(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::with_window(&to, 1 << 30).await?;
    peer.write(&window_update(0, 1 << 30)).await?;
    for _ in 0..4 {
        peer.request(1, 60_000).await?;
    }
    let mut left = 240_000;
    while left > 0 {
        let frame = peer.until(|frame| frame.kind == raw::DATA).await?;
        let length = frame.payload.len();
        ensure!(length <= 16_384, "a frame of {length} bytes");
        left -= length.min(left);
    }
    Ok(())
}

/// Checks section 6.9: bytes above the gateway's window are an error. The endpoint stops reading,
/// as nothing takes its own bytes.
async fn above_their_window(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::with_window(&to, 0).await?;
    let data = raw::frame(raw::DATA, 0, 1, &[b'x'; 16_384]);
    // More than the kernel's buffers of both sockets, both ways, and the largest common window.
    for _ in 0..3072 {
        if peer.write(&data).await.is_err() {
            break;
        }
    }
    expect_flow_control_error(&mut peer).await
}

async fn expect_flow_control_error(peer: &mut Peer) -> anyhow::Result<()> {
    let outcome = peer.outcome(&[]).await?;
    let allowed = [Stream(FLOW_CONTROL_ERROR), Connection(FLOW_CONTROL_ERROR), Closed];
    ensure!(allowed.contains(&outcome), "{outcome}, expected an error of flow control");
    Ok(())
}
