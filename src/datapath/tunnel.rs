//! One CONNECT stream: what it asks for, its answer, and the tunnel that it becomes.
//!
//! h2's handles are wrapped so that a stream can only end in ways that its peer reads rightly:
//! whatever is dropped too early is reset by a code that nobody takes for a clean end.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::Response;

use crate::reason::Reason;
use crate::wire::Authority;

use super::budget::{Account, Charged};
use super::buffer::compact;

/// What a peer may send before it is answered: the first flight of an inner TLS connection.
const EARLY_BYTES_MAX: usize = 64 * 1024;

/// The payload of a DATA frame that fills a TLS record: 16 KiB (RFC 8446 section 5.1) without the
/// frame's head.
pub const RECORD_DATA_BYTES: usize = 16 * 1024 - 9;

/// The code of a tunnel that was answered and leads nowhere, whatever the reason: what a peer may
/// not learn looks alike (RFC 9113 section 8.5, contract 10).
pub const NOWHERE: h2::Reason = h2::Reason::CONNECT_ERROR;

/// What a tunnel asks for.
#[derive(Debug)]
pub struct Target {
    pub(super) authority: Authority,
    pub(super) origin: Origin,
}

impl Target {
    /// The authority, for the route to own, and where the tunnel is said to come from.
    pub fn into_parts(self) -> (Authority, Origin) {
        (self.authority, self.origin)
    }
}

/// What a peer says of where a tunnel comes from. Anybody can say it: the route decides whether it
/// is believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// From a workload: nothing is said, or nothing that we know.
    Workload,
    /// From a waypoint, which has done its work.
    Waypoint,
    /// From an ingress gateway.
    Gateway,
}

/// A CONNECT that was not answered yet. Dropped without an answer, it is reset.
#[derive(Debug)]
pub struct Requested {
    incoming: Incoming,
    respond: Answer,
}

/// The receiving half of a stream. What it holds is on the tunnel's account until it is released.
#[derive(Debug)]
struct Incoming {
    receive: RecvStream,
    account: Arc<Account>,
    unreleased: usize,
    /// What came before the answer.
    early: VecDeque<Bytes>,
}

impl Incoming {
    /// The next bytes, on the account; none at END_STREAM or trailers.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Reason>> {
        self.receive.poll_data(cx).map(|data| match data {
            Some(Ok(bytes)) => {
                self.unreleased += bytes.len();
                self.account.take(bytes.len());
                Ok(Some(bytes))
            }
            Some(Err(error)) => Err(reason_of(&error)),
            None => Ok(None),
        })
    }

    fn release(&mut self, bytes: usize) -> Result<(), h2::Error> {
        self.unreleased -= bytes;
        self.account.give_back(bytes);
        self.receive.flow_control().release_capacity(bytes)
    }

    /// Takes in what the peer sends before there is an endpoint, until that is more than `most`
    /// bytes.
    fn poll_early(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<Reason> {
        // Its end and its errors are found again once the stream is a tunnel.
        while let Poll::Ready(Ok(Some(bytes))) = self.poll(cx) {
            self.early.push_back(bytes);
            compact(&mut self.early);
            if self.unreleased > most {
                return Poll::Ready(Reason::EarlyData);
            }
        }
        let evicted = self.account.poll_gated(cx, |_| Poll::<()>::Pending);
        evicted.map(|_| Reason::BuffersFull)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        self.account.give_back(self.unreleased);
    }
}

/// The answer's half of a CONNECT, which resets the stream if it is dropped too early.
#[derive(Debug)]
struct Answer {
    respond: SendResponse<Charged>,
    given: bool,
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.given {
            self.respond.send_reset(h2::Reason::INTERNAL_ERROR);
        }
    }
}

impl Requested {
    /// A CONNECT whose headers were read, with the account of its tunnel.
    pub fn new(receive: RecvStream, respond: SendResponse<Charged>, account: Arc<Account>) -> Self {
        Self {
            incoming: Incoming {
                receive,
                account,
                unreleased: 0,
                early: VecDeque::new(),
            },
            respond: Answer {
                respond,
                given: false,
            },
        }
    }

    /// Answers 200. From here on the stream is a tunnel.
    ///
    /// # Errors
    /// The stream has gone.
    pub fn accept(mut self) -> Result<Tunnel, Reason> {
        self.respond.given = true;
        match self.respond.respond.send_response(Response::new(()), false) {
            Ok(send) => Ok(Tunnel {
                send,
                incoming: self.incoming,
                sent_all: false,
                received_all: false,
                malformed: false,
            }),
            Err(error) => Err(reason_of(&error)),
        }
    }

    /// Refuses with an empty body, or by a reset: REFUSED_STREAM where the drain left no time to
    /// try, ENHANCE_YOUR_CALM where too much came too early.
    ///
    /// Gives the reason back.
    pub fn refuse(mut self, reason: Reason) -> Reason {
        self.respond.given = true;
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
        // A stream that has gone needs no answer.
        let _ = self.respond.respond.send_response(response, true);
        reason
    }

    /// Waits until the stream must not go on: its peer has reset it, lost its connection or sent
    /// too much too early, or we are short of memory.
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

/// A CONNECT that was answered 200. Dropped before both directions have ended, it is reset by a
/// code that no peer reads as a clean end.
#[derive(Debug)]
pub struct Tunnel {
    send: SendStream<Charged>,
    incoming: Incoming,
    sent_all: bool,
    received_all: bool,
    /// Trailers came, which h2 gives once.
    malformed: bool,
}

impl Tunnel {
    /// The next bytes from the peer; none at its END_STREAM.
    ///
    /// # Errors
    /// The stream or its connection has broken, or the peer has sent trailers.
    pub fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Reason>> {
        let early = &mut self.incoming.early;
        if let Some(bytes) = early.pop_front() {
            if early.is_empty() {
                // The queue's own memory goes too: an idle tunnel keeps none.
                *early = VecDeque::new();
            }
            return Poll::Ready(Ok(Some(bytes)));
        }
        match ready!(self.incoming.poll(cx)) {
            Ok(None) => self.poll_end(cx).map_ok(|()| None),
            received => Poll::Ready(received),
        }
    }

    /// Tells END_STREAM from trailers, behind the last bytes. Trailers are no end: RFC 9113 section
    /// 8.5 allows DATA alone on a tunnel and makes any other frame a stream error.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Reason>> {
        if !self.malformed {
            let trailers = ready!(self.incoming.receive.poll_trailers(cx));
            self.malformed = trailers.map_err(|error| reason_of(&error))?.is_some();
        }
        if self.malformed {
            return Poll::Ready(Err(Reason::Malformed));
        }
        self.received_all = true;
        Poll::Ready(Ok(()))
    }

    /// The next bytes from the peer, before the tunnel is copied; none at its END_STREAM.
    ///
    /// # Errors
    /// The stream or its connection has broken, or we are short of memory.
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

    /// Puts bytes back that were received last and not released: they come first again.
    pub fn unread(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.incoming.early.push_front(bytes);
        }
    }

    /// As [`Requested::cancelled`], for a tunnel whose endpoint is not there yet. It may send as
    /// much as its window lets it: that was promised by 200, and is on its account.
    pub async fn cancelled(&mut self) -> Reason {
        poll_fn(|cx| {
            if let Poll::Ready(reason) = self.poll_reset(cx) {
                return Poll::Ready(reason);
            }
            self.incoming.poll_early(cx, usize::MAX)
        })
        .await
    }

    /// Ends a tunnel that leads nowhere: by [`NOWHERE`], unless the peer broke HTTP/2. Gives the
    /// reason back.
    pub fn refuse(mut self, reason: Reason) -> Reason {
        self.send.send_reset(match reason {
            Reason::Malformed => reason.reset_code(),
            _ => NOWHERE,
        });
        (self.sent_all, self.received_all) = (true, true);
        reason
    }

    /// Gives receive window back, once the other side has taken the bytes.
    ///
    /// # Errors
    /// The stream or its connection has broken.
    pub fn release(&mut self, bytes: usize) -> Result<(), Reason> {
        self.incoming
            .release(bytes)
            .map_err(|error| self.cause(&error))
    }

    /// How much may be sent now, at most `most`; waits for window if there is none.
    ///
    /// # Errors
    /// The stream or its connection has broken.
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
                Some(Err(error)) => return Poll::Ready(Err(self.cause(&error))),
                None => return Poll::Ready(Err(self.reset_by_peer())),
            }
        }
    }

    /// Gives up a reservation: an idle tunnel that held one would take window from busy ones.
    pub fn release_capacity(&mut self) {
        self.send.reserve_capacity(0);
    }

    /// Sends bytes for which [`Tunnel::poll_capacity`] found capacity. They keep `size` bytes of
    /// memory, which is charged until the last of them is written.
    ///
    /// # Errors
    /// The stream or its connection has broken.
    pub fn send(&mut self, mut bytes: Bytes, size: usize) -> Result<(), Reason> {
        while !bytes.is_empty() {
            let frame = bytes.split_to(bytes.len().min(RECORD_DATA_BYTES));
            // Frames leave in their order, and all of them keep the one buffer.
            let size = if bytes.is_empty() { size } else { 0 };
            let frame = self.incoming.account.hold(frame, size);
            self.send
                .send_data(frame, false)
                .map_err(|error| self.cause(&error))?;
        }
        Ok(())
    }

    /// Ends our direction by END_STREAM.
    ///
    /// # Errors
    /// The stream or its connection has broken.
    pub fn finish(&mut self) -> Result<(), Reason> {
        self.send.reserve_capacity(0);
        let end = self.incoming.account.hold(Bytes::new(), 0);
        self.send
            .send_data(end, true)
            .map_err(|error| self.cause(&error))?;
        self.sent_all = true;
        Ok(())
    }

    /// Waits for a reset by the peer. It shares its waker with [`Tunnel::poll_capacity`]: both
    /// are to be polled from one task.
    pub fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<Reason> {
        self.send.poll_reset(cx).map(|reset| match reset {
            Ok(code) => reason_of_code(code),
            Err(error) => reason_of(&error),
        })
    }

    /// The account of what the tunnel holds.
    pub fn account(&self) -> &Arc<Account> {
        &self.incoming.account
    }

    /// Why an operation failed. h2 says of a stream that was reset only that it is closed.
    fn cause(&mut self, error: &h2::Error) -> Reason {
        match reason_of(error) {
            Reason::DownstreamLost => self.reset_by_peer(),
            reason => reason,
        }
    }

    /// The reset by which the peer closed the stream, if that is what it did.
    fn reset_by_peer(&mut self) -> Reason {
        match self
            .send
            .poll_reset(&mut Context::from_waker(Waker::noop()))
        {
            Poll::Ready(Ok(code)) => reason_of_code(code),
            Poll::Ready(Err(_)) | Poll::Pending => Reason::DownstreamLost,
        }
    }

    /// Ends a tunnel that did not end by itself.
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

/// Peers reset by CANCEL or NO_ERROR when they have lost interest (contract 1.5).
fn reason_of_code(code: h2::Reason) -> Reason {
    match code {
        h2::Reason::CANCEL | h2::Reason::NO_ERROR => Reason::DownstreamCancelled,
        _ => Reason::DownstreamReset,
    }
}
