//! Work that consists of streams, which last until the time is over.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll, Waker};

use anyhow::bail;
use bytes::Bytes;

use super::flow::Flow;
use super::ops;
use super::serve;
use super::slot::{Job, Run};
use super::target::add;
use super::watchdog::Watchdog;

/// Interval of the idle streams that carry a burst.
const BURST_EVERY: u64 = 4;

/// Result of a stream that ends only with an error.
type Endless = anyhow::Result<Infallible>;

/// Runs one stream until the time is over.
///
/// # Errors
/// The stream broke, ended, or made no progress.
pub(super) async fn stream(
    run: &Run,
    job: Job,
    tunnel: &mut Flow,
    watchdog: &mut Watchdog,
) -> anyhow::Result<()> {
    let mut left = Bytes::new();
    let flow = async {
        match job {
            Job::Up => up(run, tunnel, watchdog, &mut left).await,
            Job::Down => down(run, tunnel, watchdog).await,
            Job::Pump => pump(run, tunnel, watchdog, &mut left).await,
            Job::Stall => stall(tunnel).await,
            Job::Clog => clog(run, tunnel).await,
            _ => idle(run, tunnel).await,
        }
    };
    tokio::select! {
        biased;
        () = run.pace.over() => {}
        broken = flow => return broken.map(|never| match never {}),
    }
    match job {
        Job::Up => {
            // The sink ends when it has all bytes. Only then they count as delivered.
            watchdog.guard(ops::end(tunnel)).await
        }
        Job::Stall => {
            add(&run.tally.received, waiting(tunnel));
            Ok(())
        }
        _ => Ok(()),
    }
}

async fn up(run: &Run, tunnel: &mut Flow, watchdog: &mut Watchdog, left: &mut Bytes) -> Endless {
    loop {
        let part = poll_fn(|cx| send_more(run, tunnel, cx, left));
        watchdog.guard(part).await?;
    }
}

/// Sends the rest of a chunk, or a new one.
fn send_more(
    run: &Run,
    tunnel: &mut Flow,
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

async fn down(run: &Run, tunnel: &mut Flow, watchdog: &mut Watchdog) -> Endless {
    ops::order(tunnel, serve::ENDLESS).await?;
    loop {
        match watchdog.guard(tunnel.chunk()).await? {
            Some(bytes) => add(&run.tally.received, bytes.len() as u64),
            None => bail!("the tunnel ended; is a source behind it?"),
        }
    }
}

/// Moves bytes in both directions. Progress in either one restarts the deadline.
async fn pump(run: &Run, tunnel: &mut Flow, watchdog: &mut Watchdog, left: &mut Bytes) -> Endless {
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

async fn stall(tunnel: &mut Flow) -> Endless {
    ops::order(tunnel, serve::ENDLESS).await?;
    Err(tunnel.broken().await.into())
}

/// Sends two windows of a stream and never reads. One half fills our window, and the other half
/// stays in the gateway and the endpoint. Sending until nothing more fits would measure something
/// else: some gateways let one stream use most of their connection's window.
async fn clog(run: &Run, tunnel: &mut Flow) -> Endless {
    ops::send(run, tunnel, 2 * u64::from(run.plan.stream_window())).await?;
    Err(tunnel.broken().await.into())
}

async fn idle(run: &Run, tunnel: &mut Flow) -> Endless {
    let number = run.idle.get();
    run.idle.set(number + 1);
    if number.is_multiple_of(BURST_EVERY) && !run.request.is_empty() {
        ops::exchange(run, tunnel).await?;
    }
    match tunnel.chunk().await? {
        Some(_) => bail!("bytes came on an idle tunnel"),
        None => bail!("the tunnel ended"),
    }
}

/// Returns the number of bytes that arrived and were not read. Nothing else runs meanwhile, so no
/// further bytes arrive.
fn waiting(tunnel: &mut Flow) -> u64 {
    let mut cx = Context::from_waker(Waker::noop());
    let mut bytes = 0;
    while let Poll::Ready(Ok(Some(chunk))) = tunnel.poll_chunk(&mut cx) {
        bytes += chunk.len() as u64;
    }
    bytes
}
