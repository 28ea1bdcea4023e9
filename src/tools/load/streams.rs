//! Work that consists of streams, which last until the time is over.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll, Waker};

use anyhow::bail;
use bytes::Bytes;

use super::args::Work;
use super::flow::LoadStream;
use super::ops;
use super::run::RunState;
use super::serve;
use super::target::add;
use super::watchdog::DeadlineGuard;

/// Interval of the idle streams that carry a burst.
const BURST_EVERY: u64 = 4;

/// Result of a stream that ends only with an error.
type UntilError = anyhow::Result<Infallible>;

/// Runs one stream until the time is over.
pub(super) async fn run_stream(
    run: &RunState,
    job: Work,
    tunnel: &mut LoadStream,
    watchdog: &mut DeadlineGuard,
) -> anyhow::Result<()> {
    let mut left = Bytes::new();
    let flow = async {
        match job {
            Work::Up => up(run, tunnel, watchdog, &mut left).await,
            Work::Down => down(run, tunnel, watchdog).await,
            Work::FullDuplex => full_duplex(run, tunnel, watchdog, &mut left).await,
            Work::Stall => stall(tunnel).await,
            Work::StalledEcho => stalled_echo(run, tunnel).await,
            _ => idle(run, tunnel).await,
        }
    };
    tokio::select! {
        biased;
        () = run.pace.wait_for_end() => {}
        broken = flow => return broken.map(|never| match never {}),
    }
    match job {
        Work::Up => {
            // The sink ends when it has all bytes. Only then they count as delivered.
            watchdog.guard(ops::close_both_directions(tunnel)).await
        }
        Work::Stall => {
            add(&run.tally.received, drain_received(tunnel));
            Ok(())
        }
        _ => Ok(()),
    }
}

async fn up(
    run: &RunState,
    tunnel: &mut LoadStream,
    watchdog: &mut DeadlineGuard,
    left: &mut Bytes,
) -> UntilError {
    loop {
        let part = poll_fn(|cx| send_more(run, tunnel, cx, left));
        watchdog.guard(part).await?;
    }
}

/// Sends the rest of a chunk, or a new one.
fn send_more(
    run: &RunState,
    tunnel: &mut LoadStream,
    cx: &mut Context<'_>,
    left: &mut Bytes,
) -> Poll<io::Result<()>> {
    if left.is_empty() {
        *left = run.chunk.clone();
    }
    let before = left.len();
    let sent = tunnel.poll_send(cx, left);
    add(&run.tally.sent, (before - left.len()) as u64);
    sent
}

async fn down(run: &RunState, tunnel: &mut LoadStream, watchdog: &mut DeadlineGuard) -> UntilError {
    ops::request_bytes(tunnel, serve::ENDLESS).await?;
    loop {
        match watchdog.guard(tunnel.chunk()).await? {
            Some(bytes) => add(&run.tally.received, bytes.len() as u64),
            None => bail!("the tunnel ended early; check that its endpoint is a source"),
        }
    }
}

/// Moves bytes in both directions. Progress in either one restarts the deadline.
async fn full_duplex(
    run: &RunState,
    tunnel: &mut LoadStream,
    watchdog: &mut DeadlineGuard,
    left: &mut Bytes,
) -> UntilError {
    loop {
        let part = poll_fn(|cx| -> Poll<io::Result<_>> {
            // Reads first: an echo that cannot send stops reading.
            if let Poll::Ready(chunk) = tunnel.poll_chunk(cx)? {
                return Poll::Ready(Ok(chunk));
            }
            match send_more(run, tunnel, cx, left)? {
                Poll::Ready(()) => Poll::Ready(Ok(Some(Bytes::new()))),
                Poll::Pending => Poll::Pending,
            }
        });
        match watchdog.guard(part).await? {
            Some(bytes) => add(&run.tally.received, bytes.len() as u64),
            None => bail!("the tunnel ended"),
        }
    }
}

async fn stall(tunnel: &mut LoadStream) -> UntilError {
    ops::request_bytes(tunnel, serve::ENDLESS).await?;
    Err(tunnel.wait_for_failure().await.into())
}

/// Sends two windows of a stream and never reads. One half fills our window, and the other half
/// stays in the gateway and the endpoint. Sending until nothing more fits would measure something
/// else: some gateways let one stream use most of their connection's window.
async fn stalled_echo(run: &RunState, tunnel: &mut LoadStream) -> UntilError {
    ops::send(run, tunnel, 2 * u64::from(run.plan.stream_window())).await?;
    Err(tunnel.wait_for_failure().await.into())
}

async fn idle(run: &RunState, tunnel: &mut LoadStream) -> UntilError {
    let number = run.idle.get();
    run.idle.set(number + 1);
    if number.is_multiple_of(BURST_EVERY) && !run.request.is_empty() {
        ops::exchange(run, tunnel).await?;
    }
    match tunnel.chunk().await? {
        Some(_) => bail!("bytes received on an idle tunnel"),
        None => bail!("the tunnel ended"),
    }
}

/// Returns the number of bytes that arrived and were not read. Nothing else runs meanwhile, so no
/// further bytes arrive.
fn drain_received(tunnel: &mut LoadStream) -> u64 {
    let mut cx = Context::from_waker(Waker::noop());
    let mut bytes = 0;
    while let Poll::Ready(Ok(Some(chunk))) = tunnel.poll_chunk(&mut cx) {
        bytes += chunk.len() as u64;
    }
    bytes
}
