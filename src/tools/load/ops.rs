//! Work that consists of operations: each succeeds or fails, and has a duration.

use std::future::poll_fn;
use std::io;
use std::num::NonZeroU64;
use std::task::{Poll, ready};

use anyhow::{anyhow, ensure};
use bytes::Bytes;

use super::args::{Plan, Work};
use super::flow::LoadStream;
use super::run::RunState;
use super::serve;
use super::target::{OpenTunnel, ReconnectingConnection, add};

pub(super) fn is_operation(job: Work, plan: &Plan) -> bool {
    match job {
        Work::Rr | Work::Churn | Work::Handshake => true,
        Work::Up | Work::Down => plan.size.is_some(),
        Work::Idle | Work::Stall | Work::Mixed | Work::FullDuplex | Work::StalledEcho => false,
    }
}

/// Runs one operation. A tunnel that it leaves in `open` is for the next operation, or for the
/// caller to end.
pub(super) async fn run_operation(
    run: &RunState,
    line: &ReconnectingConnection,
    job: Work,
    open: &mut Option<OpenTunnel>,
) -> anyhow::Result<()> {
    match job {
        Work::Rr => {
            let open = match open {
                Some(open) => open,
                None => open.insert(line.open().await?),
            };
            exchange(run, &mut open.tunnel).await
        }
        Work::Handshake => {
            let open = open.insert(line.open_on_new_connection().await?);
            exchange(run, &mut open.tunnel).await
        }
        Work::Churn => {
            let mut open = line.open().await?;
            exchange(run, &mut open.tunnel).await?;
            close_both_directions(&mut open.tunnel).await
        }
        Work::Up => upload(run, &mut line.open().await?.tunnel).await,
        Work::Down => download(run, &mut line.open().await?.tunnel).await,
        Work::Idle | Work::Stall | Work::Mixed | Work::FullDuplex | Work::StalledEcho => Ok(()),
    }
}

/// Sends a request and reads it back concurrently: an echo that cannot send stops reading.
pub(super) async fn exchange(run: &RunState, tunnel: &mut LoadStream) -> anyhow::Result<()> {
    let request = &run.request;
    let mut left = request.clone();
    let mut echoed = 0;
    poll_fn(|cx| {
        let before = left.len();
        let sent = tunnel.poll_send(cx, &mut left)?;
        add(&run.tally.sent, (before - left.len()) as u64);
        while echoed < request.len() {
            let Some(bytes) = ready!(tunnel.poll_chunk(cx))? else {
                return Poll::Ready(Err(anyhow!("the tunnel ended before the answer")));
            };
            add(&run.tally.received, bytes.len() as u64);
            if request.get(echoed..echoed + bytes.len()) != Some(&bytes) {
                return Poll::Ready(Err(anyhow!("echo differs from the request")));
            }
            echoed += bytes.len();
        }
        sent.map(Ok)
    })
    .await
}

/// Ends the sending direction, and waits for the end of the other.
pub(super) async fn close_both_directions(tunnel: &mut LoadStream) -> anyhow::Result<()> {
    tunnel.shutdown().await?;
    while tunnel.chunk().await?.is_some() {}
    Ok(())
}

async fn upload(run: &RunState, tunnel: &mut LoadStream) -> anyhow::Result<()> {
    send(run, tunnel, run.plan.size.map_or(0, NonZeroU64::get)).await?;
    close_both_directions(tunnel).await
}

pub(super) async fn send(run: &RunState, tunnel: &mut LoadStream, mut left: u64) -> io::Result<()> {
    while left > 0 {
        let mut part = run.chunk.clone();
        part.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        let count = part.len() as u64;
        tunnel.send(part).await?;
        add(&run.tally.sent, count);
        left -= count;
    }
    Ok(())
}

async fn download(run: &RunState, tunnel: &mut LoadStream) -> anyhow::Result<()> {
    let wanted = run.plan.size.map_or(0, NonZeroU64::get);
    request_bytes(tunnel, wanted).await?;
    let mut received = 0;
    while let Some(bytes) = tunnel.chunk().await? {
        add(&run.tally.received, bytes.len() as u64);
        received += bytes.len() as u64;
    }
    ensure!(
        received == wanted,
        "the tunnel ended after a different number of bytes than requested"
    );
    tunnel.shutdown().await?;
    Ok(())
}

pub(super) async fn request_bytes(tunnel: &mut LoadStream, bytes: u64) -> io::Result<()> {
    let order: [u8; serve::ORDER_BYTES] = bytes.to_be_bytes();
    tunnel.send(Bytes::copy_from_slice(&order)).await
}
