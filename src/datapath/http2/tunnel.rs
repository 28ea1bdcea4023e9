//! CONNECT stream: its target, its answer, and the tunnel that it becomes.
//!
//! The types wrap h2's handles so that a stream can only end in ways that its peer interprets
//! correctly. A handle that is dropped too early resets the stream with INTERNAL_ERROR, which no
//! peer takes for a clean end.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::Response;

use crate::datapath::io::buffer::compact;
use crate::datapath::limits::budget::{BufferAccount, ChargedBytes};
use crate::reason::Reason;
use crate::wire::Authority;

/// Limit of bytes that a peer may send before it is answered: the first flight of an inner TLS
/// connection.
const EARLY_BYTES_MAX: usize = 64 * 1024;

/// Payload of a DATA frame that fills a TLS record: 16 KiB (RFC 8446 section 5.1) without the
/// frame's head.
pub const RECORD_DATA_BYTES: usize = 16 * 1024 - 9;

/// Reset code of a tunnel that was answered and then rejected. It is the same for all reasons, to
/// disclose nothing to the peer (RFC 9113 section 8.5, docs/wire-contract.md 1.5).
pub const REJECTED_TUNNEL_RESET: h2::Reason = h2::Reason::CONNECT_ERROR;

/// Target of a tunnel.
#[derive(Debug)]
pub struct Target {
    pub(crate) authority: Authority,
    pub(crate) origin: Origin,
}

impl Target {
    /// Returns the authority and the claimed origin.
    pub fn into_parts(self) -> (Authority, Origin) {
        (self.authority, self.origin)
    }
}

/// Origin of a tunnel as claimed by the peer. Any peer can claim it; the route decides whether
/// it is trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A workload: the header is absent or unknown.
    Workload,
    /// A waypoint, which has already applied its policies.
    Waypoint,
    /// An ingress gateway.
    Gateway,
}

/// CONNECT that was not answered yet. Resets the stream if dropped without an answer.
#[derive(Debug)]
pub struct PendingConnect {
    incoming: ReceiveHalf,
    respond: ResponseHalf,
}

/// Receiving half of a stream. Its bytes are on the tunnel's account until they are released.
#[derive(Debug)]
struct ReceiveHalf {
    receive: RecvStream,
    account: Arc<BufferAccount>,
    unreleased: usize,
    /// Bytes received before the answer.
    unread: VecDeque<Bytes>,
}

impl ReceiveHalf {
    /// Receives the next bytes, on the account; none at END_STREAM or trailers.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Reason>> {
        self.receive.poll_data(cx).map(|data| match data {
            Some(Ok(bytes)) => {
                self.unreleased += bytes.len();
                self.account.charge(bytes.len());
                Ok(Some(bytes))
            }
            Some(Err(error)) => Err(reason_of(&error)),
            None => Ok(None),
        })
    }

    fn release(&mut self, bytes: usize) -> Result<(), h2::Error> {
        self.unreleased -= bytes;
        self.account.release(bytes);
        self.receive.flow_control().release_capacity(bytes)
    }

    /// Receives the bytes that the peer sends before there is an endpoint. Completes once they
    /// exceed `most`, or if memory runs short.
    fn poll_early(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<Reason> {
        // The end of the stream and errors are returned again once the stream is a tunnel.
        while let Poll::Ready(Ok(Some(bytes))) = self.poll(cx) {
            self.unread.push_back(bytes);
            compact(&mut self.unread);
            if self.unreleased > most {
                return Poll::Ready(Reason::EarlyData);
            }
        }
        let evicted = self.account.poll_gated(cx, |_| Poll::<()>::Pending);
        evicted.map(|_| Reason::BuffersFull)
    }
}

impl Drop for ReceiveHalf {
    fn drop(&mut self) {
        self.account.release(self.unreleased);
    }
}

/// Answering half of a CONNECT, which resets the stream if it is dropped too early.
#[derive(Debug)]
struct ResponseHalf {
    respond: SendResponse<ChargedBytes>,
    answered: bool,
}

impl Drop for ResponseHalf {
    fn drop(&mut self) {
        if !self.answered {
            self.respond.send_reset(h2::Reason::INTERNAL_ERROR);
        }
    }
}

impl PendingConnect {
    /// Wraps a CONNECT whose headers were read, with the account of its tunnel.
    pub fn new(
        receive: RecvStream,
        respond: SendResponse<ChargedBytes>,
        account: Arc<BufferAccount>,
    ) -> Self {
        Self {
            incoming: ReceiveHalf {
                receive,
                account,
                unreleased: 0,
                unread: VecDeque::new(),
            },
            respond: ResponseHalf {
                respond,
                answered: false,
            },
        }
    }

    /// Answers 200. From here on the stream is a tunnel.
    ///
    /// # Errors
    /// The stream is closed.
    pub fn accept(mut self) -> Result<Tunnel, Reason> {
        self.respond.answered = true;
        match self.respond.respond.send_response(Response::new(()), false) {
            Ok(send) => Ok(Tunnel {
                send,
                incoming: self.incoming,
                sent_all: false,
                received_all: false,
                received_trailers: false,
            }),
            Err(error) => Err(reason_of(&error)),
        }
    }

    /// Rejects with an empty body, or by a reset: REFUSED_STREAM if the drain left no time to
    /// try, ENHANCE_YOUR_CALM if the peer sent too much early data. Returns the reason.
    pub fn reject(mut self, reason: Reason) -> Reason {
        self.respond.answered = true;
        let reset = match reason {
            Reason::DrainDeadline => Some(h2::Reason::REFUSED_STREAM),
            Reason::EarlyData => Some(h2::Reason::ENHANCE_YOUR_CALM),
            _ => None,
        };
        if let Some(code) = reset {
            self.respond.respond.send_reset(code);
            return reason;
        }
        let mut response = Response::new(());
        *response.status_mut() = reason.status();
        // A stream that is closed needs no answer.
        let _ = self.respond.respond.send_response(response, true);
        reason
    }

    /// Waits until the stream has to end: the peer has reset it, lost its connection or sent too
    /// much early data, or memory runs short.
    pub async fn cancelled(&mut self) -> Reason {
        poll_fn(|cx| {
            if let Poll::Ready(reset) = self.respond.respond.poll_reset(cx) {
                return Poll::Ready(match reset {
                    Ok(code) => reason_of_code(code),
                    Err(error) => reason_of(&error),
                });
            }
            self.incoming.poll_early(cx, EARLY_BYTES_MAX)
        })
        .await
    }
}

/// CONNECT that was answered 200. If it is dropped before both directions have ended, it resets
/// the stream with a code that no peer takes for a clean end.
#[derive(Debug)]
pub struct Tunnel {
    send: SendStream<ChargedBytes>,
    incoming: ReceiveHalf,
    sent_all: bool,
    received_all: bool,
    /// True once trailers were received, which h2 returns only once.
    received_trailers: bool,
}

impl Tunnel {
    /// Receives the next bytes from the peer; none at its END_STREAM.
    ///
    /// # Errors
    /// The stream or its connection has failed, or the peer has sent trailers.
    pub fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Reason>> {
        let early = &mut self.incoming.unread;
        if let Some(bytes) = early.pop_front() {
            if early.is_empty() {
                // An empty queue would keep its memory while the tunnel is idle.
                *early = VecDeque::new();
            }
            return Poll::Ready(Ok(Some(bytes)));
        }
        match ready!(self.incoming.poll(cx)) {
            Ok(None) => self.poll_end(cx).map_ok(|()| None),
            received => Poll::Ready(received),
        }
    }

    /// Distinguishes END_STREAM from trailers after the last bytes. Trailers are not a clean
    /// end: RFC 9113 section 8.5 allows only DATA on a tunnel and makes any other frame a stream
    /// error.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Reason>> {
        if !self.received_trailers {
            let trailers = ready!(self.incoming.receive.poll_trailers(cx));
            self.received_trailers = trailers.map_err(|error| reason_of(&error))?.is_some();
        }
        if self.received_trailers {
            return Poll::Ready(Err(Reason::Malformed));
        }
        self.received_all = true;
        Poll::Ready(Ok(()))
    }

    /// Receives the next bytes from the peer before the copy starts; none at its END_STREAM.
    ///
    /// # Errors
    /// The stream or its connection has failed, or memory runs short.
    pub async fn receive(&mut self) -> Result<Option<Bytes>, Reason> {
        let account = Arc::clone(&self.incoming.account);
        poll_fn(|cx| {
            if let Poll::Ready(received) = self.poll_receive(cx) {
                return Poll::Ready(received);
            }
            let evicted = account.poll_gated(cx, |_| Poll::<()>::Pending);
            evicted.map(|_| Err(Reason::BuffersFull))
        })
        .await
    }

    /// Puts back bytes that were received last and not released, so that they are received
    /// again.
    pub fn unread(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.incoming.unread.push_front(bytes);
        }
    }

    /// As [`PendingConnect::cancelled`], for a tunnel without an endpoint yet. The peer may send as
    /// much as its window permits: the answer 200 allowed it, and the bytes are on its account.
    pub async fn cancelled(&mut self) -> Reason {
        poll_fn(|cx| {
            if let Poll::Ready(reason) = self.poll_reset(cx) {
                return Poll::Ready(reason);
            }
            self.incoming.poll_early(cx, usize::MAX)
        })
        .await
    }

    /// Resets a tunnel that was rejected after its answer: by [`REJECTED_TUNNEL_RESET`], unless the
    /// peer violated HTTP/2. Returns the reason.
    pub fn refuse(mut self, reason: Reason) -> Reason {
        self.send.send_reset(match reason {
            Reason::Malformed => reason.reset_code(),
            _ => REJECTED_TUNNEL_RESET,
        });
        (self.sent_all, self.received_all) = (true, true);
        reason
    }

    /// Releases receive window, once the other side has taken the bytes.
    ///
    /// # Errors
    /// The stream or its connection has failed.
    pub fn release(&mut self, bytes: usize) -> Result<(), Reason> {
        self.incoming
            .release(bytes)
            .map_err(|error| self.reason_of_failure(&error))
    }

    /// Returns the number of bytes that may be sent now, at most `most`; waits for window if it
    /// is 0.
    ///
    /// # Errors
    /// The stream or its connection has failed.
    pub fn poll_capacity(
        &mut self,
        cx: &mut Context<'_>,
        most: usize,
    ) -> Poll<Result<usize, Reason>> {
        self.send.reserve_capacity(most);
        loop {
            let capacity = self.send.capacity().min(most);
            if capacity > 0 {
                return Poll::Ready(Ok(capacity));
            }
            match ready!(self.send.poll_capacity(cx)) {
                Some(Ok(_)) => {}
                Some(Err(error)) => return Poll::Ready(Err(self.reason_of_failure(&error))),
                None => return Poll::Ready(Err(self.reset_by_peer())),
            }
        }
    }

    /// Cancels a reservation: on an idle tunnel it would take window from busy ones.
    pub fn release_capacity(&mut self) {
        self.send.reserve_capacity(0);
    }

    /// Sends bytes for which [`Tunnel::poll_capacity`] returned capacity. They keep `size` bytes
    /// of memory alive, which are charged until the last of them is written.
    ///
    /// # Errors
    /// The stream or its connection has failed.
    pub fn send(&mut self, mut bytes: Bytes, size: usize) -> Result<(), Reason> {
        while !bytes.is_empty() {
            let frame = bytes.split_to(bytes.len().min(RECORD_DATA_BYTES));
            // Frames are written in order and share one buffer, so the last one carries the
            // charge.
            let size = if bytes.is_empty() { size } else { 0 };
            let frame = self.incoming.account.charge_bytes(frame, size);
            self.send
                .send_data(frame, false)
                .map_err(|error| self.reason_of_failure(&error))?;
        }
        Ok(())
    }

    /// Ends the sending direction with END_STREAM.
    ///
    /// # Errors
    /// The stream or its connection has failed.
    pub fn finish(&mut self) -> Result<(), Reason> {
        self.send.reserve_capacity(0);
        let end = self.incoming.account.charge_bytes(Bytes::new(), 0);
        self.send
            .send_data(end, true)
            .map_err(|error| self.reason_of_failure(&error))?;
        self.sent_all = true;
        Ok(())
    }

    /// Waits for a reset by the peer. It shares its waker with [`Tunnel::poll_capacity`]: both
    /// have to be polled from one task.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<Reason> {
        self.send.poll_reset(cx).map(|reset| match reset {
            Ok(code) => reason_of_code(code),
            Err(error) => reason_of(&error),
        })
    }

    /// Returns the account of the tunnel's memory.
    pub fn account(&self) -> &Arc<BufferAccount> {
        &self.incoming.account
    }

    /// Returns the cause of a failed operation. h2's error for a reset stream only states that
    /// it is closed.
    fn reason_of_failure(&mut self, error: &h2::Error) -> Reason {
        match reason_of(error) {
            Reason::DownstreamLost => self.reset_by_peer(),
            reason => reason,
        }
    }

    /// Returns the reset by which the peer closed the stream, or `DownstreamLost` if it did not.
    fn reset_by_peer(&mut self) -> Reason {
        match self
            .send
            .poll_reset(&mut Context::from_waker(Waker::noop()))
        {
            Poll::Ready(Ok(code)) => reason_of_code(code),
            Poll::Ready(Err(_)) | Poll::Pending => Reason::DownstreamLost,
        }
    }

    /// Resets a tunnel that did not end by itself.
    pub fn reset(mut self, reason: Reason) {
        self.send.send_reset(reason.reset_code());
        (self.sent_all, self.received_all) = (true, true);
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        if !(self.sent_all && self.received_all) {
            self.send.send_reset(h2::Reason::INTERNAL_ERROR);
        }
    }
}

fn reason_of(error: &h2::Error) -> Reason {
    match error.reason() {
        Some(code) if error.is_reset() => reason_of_code(code),
        _ => Reason::DownstreamLost,
    }
}

/// Peers reset by CANCEL or NO_ERROR when they abandon a tunnel (docs/wire-contract.md 1.6).
fn reason_of_code(code: h2::Reason) -> Reason {
    match code {
        h2::Reason::CANCEL | h2::Reason::NO_ERROR => Reason::DownstreamCancelled,
        _ => Reason::DownstreamReset,
    }
}
