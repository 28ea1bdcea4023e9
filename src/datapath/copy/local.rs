//! Copying of both directions between the connection of a local client and a tunnel.
//!
//! FIN becomes END_STREAM and END_STREAM becomes FIN, each direction by itself. A side is read only
//! when the other one has taken everything, so at most one read is held in each direction, besides
//! the window of the tunnel.

use std::future::poll_fn;
use std::io::{self, IoSlice, IoSliceMut};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout_at};

use crate::datapath::handshake::SEND_BUFFER;
use crate::datapath::io::buffer::Buffer;
use crate::datapath::limits::budget::{BufferAccount, HeldBytes};
use crate::outer::Stream;
use crate::reason::{Fault, Reason};
use crate::telemetry::Record;

use super::tcp::downstream_reason;
use super::{CopyOutcome, DELIVERY_DEADLINE};

/// Limit of reads and writes of one direction per turn, after which other tunnels of the worker
/// run.
const OPERATIONS_PER_TURN: usize = 8;

/// Copies between a client above its socket and a tunnel, until both directions have ended, one
/// side broke, or no byte passed for `idle`.
pub async fn run<C: AsyncRead + AsyncWrite + Unpin>(
    (socket, client): (&TcpStream, &mut C),
    tunnel: &mut Stream,
    idle: Duration,
    account: &Arc<BufferAccount>,
    record: &mut Record,
) -> CopyOutcome {
    let (mut upload, mut download) = (Direction::new(account), Direction::new(account));
    let mut client_failed = pin!(socket.ready(Interest::ERROR));
    let (mut quiet, mut last_moved) = (pin!(sleep(idle)), Instant::now());
    // True if the reader has not received the end of the client yet, which is FIN or RST.
    let mut end_unread = false;
    let mut ended = poll_fn(|cx| {
        // Checked before any write to the client, as a failed write clears the error by which the
        // reader distinguishes RST from FIN.
        if client_failed.as_mut().poll(cx).is_ready() {
            end_unread = true;
            return Poll::Ready(Err(Reason::DownstreamReset));
        }
        let before = (record.sent_bytes(), record.received_bytes());
        // Bytes of the workload before a reset are sent before this reset fails the upload.
        let down = download.poll_download(cx, tunnel, client, record)?;
        let up = upload.poll_upload(cx, client, tunnel, record)?;
        if down.is_ready() && up.is_ready() {
            return Poll::Ready(Ok(()));
        }
        if down.is_ready()
            && let Poll::Ready(is_end) = tunnel.poll_broken(cx)
        {
            // The tunnel is no longer read, and the upload may have nothing to write. A gateway
            // may end a tunnel so once the workload has closed its connection.
            let ended = if is_end { Ok(()) } else { Err(Reason::UpstreamReset) };
            return Poll::Ready(ended);
        }
        if before != (record.sent_bytes(), record.received_bytes()) {
            last_moved = Instant::now();
        }
        // The timer is armed again only when it fires: bytes cost no access to it.
        while quiet.as_mut().poll(cx).is_ready() {
            let end = last_moved + idle;
            if end <= Instant::now() {
                return Poll::Ready(Err(Reason::IdleTimeout));
            }
            quiet.as_mut().reset(end);
        }
        Poll::Pending
    })
    .await;
    let deadline = Instant::now() + DELIVERY_DEADLINE;
    let gone = matches!(ended, Err(reason) if reason.blame() == Fault::Downstream);
    if gone && !upload.done && (end_unread || upload.ended) {
        // Bytes that a client sent before its FIN are delivered even if it reset the connection
        // afterwards. Without FIN this fails when everything has been read.
        let rest = poll_fn(|cx| upload.poll_upload(cx, client, tunnel, record));
        if let Ok(Err(reason)) = Box::pin(timeout_at(deadline, rest)).await {
            ended = Err(reason);
        }
    }
    CopyOutcome { result: ended, delivery_deadline: upload.done.then_some(deadline) }
}

/// One direction.
struct Direction<'a> {
    account: &'a Arc<BufferAccount>,
    /// Bytes that were read and not taken yet.
    pending: Bytes,
    /// Memory of `pending`, and of bytes that wait in the tunnel.
    held: Option<HeldBytes>,
    ended: bool,
    done: bool,
}

impl<'a> Direction<'a> {
    fn new(account: &'a Arc<BufferAccount>) -> Self {
        Self { account, pending: Bytes::new(), held: None, ended: false, done: false }
    }

    /// Moves bytes to the tunnel. Ready once END_STREAM was sent.
    fn poll_upload(
        &mut self,
        cx: &mut Context<'_>,
        client: &mut (impl AsyncRead + Unpin),
        tunnel: &mut Stream,
        record: &mut Record,
    ) -> Poll<Result<(), Reason>> {
        let lost = |_: io::Error| Reason::UpstreamReset;
        let gone = |error: io::Error| downstream_reason(error.kind());
        for _ in 0..OPERATIONS_PER_TURN {
            if self.done {
                return Poll::Ready(Ok(()));
            }
            if !self.pending.is_empty() {
                if !self.send(cx, tunnel, record).map_err(lost)? {
                    return Poll::Pending;
                }
            } else if self.ended {
                tunnel.shut_down().map_err(lost)?;
                self.done = true;
            } else {
                let mut buffer = Buffer::borrow();
                let mut room = ReadBuf::new(buffer.bytes());
                ready!(Pin::new(&mut *client).poll_read(cx, &mut room)).map_err(gone)?;
                let read = room.filled();
                self.ended = read.is_empty();
                if !self.ended {
                    let sent = or_blocked(self.write(tunnel, read)).map_err(lost)?;
                    record.add_received(sent as u64);
                    self.keep(&read[sent..], 0);
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn write(&self, tunnel: &mut Stream, bytes: &[u8]) -> io::Result<usize> {
        tunnel.try_write(&[IoSlice::new(bytes)], |bytes| self.account.share(bytes))
    }

    /// Sends bytes that the tunnel did not take before. Returns false if it takes none now.
    fn send(
        &mut self,
        cx: &mut Context<'_>,
        tunnel: &mut Stream,
        record: &mut Record,
    ) -> io::Result<bool> {
        let sent = or_blocked(self.write(tunnel, &self.pending))?;
        if sent == 0 {
            return match tunnel.poll_write_ready(cx) {
                Poll::Ready(ready) => ready.map(|()| true),
                Poll::Pending => Ok(false),
            };
        }
        record.add_received(sent as u64);
        self.took(sent, 0);
        Ok(true)
    }

    /// Moves bytes to the client. Ready once FIN was sent.
    fn poll_download(
        &mut self,
        cx: &mut Context<'_>,
        tunnel: &mut Stream,
        client: &mut (impl AsyncWrite + Unpin),
        record: &mut Record,
    ) -> Poll<Result<(), Reason>> {
        for _ in 0..OPERATIONS_PER_TURN {
            ready!(self.download_once(cx, tunnel, client, record))?;
            if self.done {
                return Poll::Ready(Ok(()));
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Performs one read or write.
    fn download_once(
        &mut self,
        cx: &mut Context<'_>,
        tunnel: &mut Stream,
        client: &mut (impl AsyncWrite + Unpin),
        record: &mut Record,
    ) -> Poll<Result<(), Reason>> {
        let mut client = Pin::new(client);
        if self.done {
            return Poll::Ready(Ok(()));
        }
        let lost = |_: io::Error| Reason::UpstreamReset;
        let gone = |error: io::Error| downstream_reason(error.kind());
        // Takes over and charges what has arrived, also while the client takes nothing.
        let readable = tunnel.poll_read_ready(cx);
        let flushed = client.as_mut().poll_flush(cx);
        // Only TLS has bytes to flush, of unknown number.
        let sealed = if flushed.is_pending() { SEND_BUFFER } else { 0 };
        self.hold(self.pending.len() + tunnel.held() + sealed);
        ready!(flushed).map_err(gone)?;
        if !self.pending.is_empty() {
            let sent = or_pending(client.poll_write(cx, &self.pending)).map_err(gone)?;
            record.add_sent(sent as u64);
            self.took(sent, tunnel.held());
        } else if self.ended {
            ready!(client.poll_shutdown(cx)).map_err(gone)?;
            self.done = true;
        } else {
            ready!(readable).map_err(lost)?;
            if self.account.must_pause_reads() {
                return Poll::Pending;
            }
            let mut buffer = Buffer::borrow();
            let room = IoSliceMut::new(buffer.bytes());
            let count = tunnel.try_read(&mut [room]).map_err(lost)?;
            let read = &buffer.bytes()[..count];
            self.ended = read.is_empty();
            let sent = or_pending(client.poll_write(cx, read)).map_err(gone)?;
            record.add_sent(sent as u64);
            self.keep(&read[sent..], tunnel.held());
        }
        Poll::Ready(Ok(()))
    }

    /// Keeps bytes that were not taken, besides those that wait in the tunnel.
    fn keep(&mut self, rest: &[u8], in_tunnel: usize) {
        // Frees the allocation too: an idle connection keeps nothing.
        self.pending = Bytes::copy_from_slice(rest);
        self.hold(rest.len() + in_tunnel);
    }

    fn took(&mut self, sent: usize, in_tunnel: usize) {
        self.pending.advance(sent);
        if self.pending.is_empty() {
            self.pending = Bytes::new();
            self.hold(in_tunnel);
        }
    }

    fn hold(&mut self, bytes: usize) {
        if bytes != self.held.as_ref().map_or(0, HeldBytes::bytes) {
            self.held = (bytes > 0).then(|| self.account.hold(bytes));
        }
    }
}

/// Returns 0 for a pending operation.
fn or_pending(done: Poll<io::Result<usize>>) -> io::Result<usize> {
    match done {
        Poll::Ready(done) => done,
        Poll::Pending => Ok(0),
    }
}

/// Returns 0 for an operation that would block.
fn or_blocked(done: io::Result<usize>) -> io::Result<usize> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::gauge::Gauge;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::net::TcpListener;
    use tokio::task::yield_now;
    use tokio::time::timeout;
    use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

    use super::*;
    use crate::datapath::limits::budget::BufferBudget;
    use crate::datapath::tests::{FAR, peer};
    use crate::limits::Source;
    use crate::outer::tests::echo_tunnel;
    use crate::telemetry::Metrics;
    use crate::tls::{self, IdentityMaterial, TrustedDomain};
    use crate::tools::dev::Authority;

    const ID: &str = "spiffe://east.local/ns/shop/sa/checkout";
    /// Limit of a wait for something that happens at once.
    const SOON: Duration = Duration::from_secs(10);
    /// Bytes that fit into the send buffer of TLS.
    const BYTES: usize = 20_000;

    /// Returns a TLS connection over a pipe that takes few bytes.
    async fn tls_pair() -> (server::TlsStream<DuplexStream>, client::TlsStream<DuplexStream>) {
        let authority = Authority::new().unwrap();
        let leaf = authority.intermediate("east").unwrap().leaf(ID).unwrap();
        let root = authority.root_pem();
        let own = IdentityMaterial::from_pem(&leaf.chain_pem, &leaf.key_pem, &root).unwrap();
        let domain = TrustedDomain { name: "east.local".into(), issuers: None, roots: None };
        let server = TlsAcceptor::from(tls::endpoint_server_config(&own, vec![domain]).unwrap());
        let client = TlsConnector::from(tls::client_config(&own, &[ID]).unwrap());
        let (near, far) = duplex(64);
        let name = "gateway".try_into().unwrap();
        let (server, client) = tokio::join!(server.accept(near), client.connect(name, far));
        let mut server = server.unwrap();
        server.get_mut().1.set_buffer_limit(Some(SEND_BUFFER));
        (server, client.unwrap())
    }

    #[tokio::test]
    async fn the_send_buffer_of_tls_is_charged_until_the_client_reads() {
        let (_gateway, mut tunnel) = echo_tunnel().await;
        let (mut server, mut client) = tls_pair().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).await;
        let socket = socket.unwrap();
        let budget = Arc::new(BufferBudget::new(1 << 20, Gauge::default()));
        let account = budget.account(&Source::prefix([192, 0, 2, 1].into()));
        let source = Arc::clone(&peer(std::time::SystemTime::now() + FAR).source);
        let mut record = Record::new(&Arc::new(Metrics::new()), &source, "echo.app:80");
        let ends = (&socket, &mut server);
        let copy = run(ends, &mut tunnel, 2 * SOON, &account, &mut record);
        let reads = async {
            client.write_all(&[7; BYTES]).await.unwrap();
            client.flush().await.unwrap();
            while budget.held() < SEND_BUFFER {
                yield_now().await;
            }
            client.read_exact(&mut [0; BYTES]).await.unwrap();
            while budget.held() > 0 {
                yield_now().await;
            }
        };
        let charged = timeout(SOON, async {
            tokio::select! {
                outcome = copy => panic!("{outcome:?}"),
                () = reads => {}
            }
        });
        charged.await.expect("a charge, and its end");
    }
}
