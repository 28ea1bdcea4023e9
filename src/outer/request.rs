//! CONNECT request to a gateway, and its answer.

use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use tokio::time::{Instant, sleep_until};

use crate::reason::Reason;
use crate::wire::{LOAD_HEADER, VIA_HEADER, Via};

use super::Failure;
use super::connection::Slot;
use super::outcome::{OUTCOME_HEADER, reason_of};
use super::stream::{Held, Stream};

/// Header with the identity of the peer that the first gateway has verified.
pub const SOURCE_HEADER: &str = "x-strait-source";

/// Limit of the wait for the answer, within which the gateway dials. The caller shortens it where
/// another gateway can be tried.
const ANSWER_DEADLINE: std::time::Duration = std::time::Duration::from_secs(5);

/// CONNECT request.
#[derive(Clone, Debug)]
pub struct Request {
    authority: String,
    headers: HeaderMap,
}

/// Answer 200 to a request.
#[derive(Debug)]
pub struct Answer {
    /// Tunnel.
    pub stream: Stream,
    /// `x-strait-load` as received.
    pub load: Option<HeaderValue>,
    /// Factor of the gateway's weights by its round trip time, in units of
    /// [`FACTOR_ONE`](crate::snapshot::FACTOR_ONE).
    pub weight_factor: u32,
}

/// Request that did not open a tunnel.
#[derive(Debug)]
pub(super) enum Refused {
    /// The gateway has not processed it, or its connection is dead: another connection may succeed.
    Unprocessed(Failure),
    /// The request was not sent, or the gateway has not answered in time.
    Unanswered(Failure),
    /// The gateway has answered.
    Processed(Failure),
}

impl Request {
    /// Creates a request for `HOSTNAME:PORT` of a service that has passed the gateways of `via`.
    pub fn new(authority: String, via: &Via) -> Self {
        let mut request = Self {
            authority,
            headers: HeaderMap::new(),
        };
        request.set(VIA_HEADER, via.to_string().as_bytes());
        request
    }

    /// Sets a header. A value that HTTP does not allow is omitted.
    pub fn set(&mut self, name: &'static str, value: &[u8]) {
        if let Ok(value) = HeaderValue::from_bytes(value) {
            self.headers.insert(HeaderName::from_static(name), value);
        }
    }

    fn to_http(&self) -> Result<http::Request<()>, http::Error> {
        let uri = http::Uri::builder().authority(&*self.authority).build()?;
        let mut request = http::Request::builder()
            .method(Method::CONNECT)
            .uri(uri)
            .body(())?;
        *request.headers_mut() = self.headers.clone();
        Ok(request)
    }
}

/// Asks for a tunnel on a connection.
pub(super) async fn send(
    slot: Slot,
    request: &Request,
    deadline: Instant,
) -> Result<(Stream, Option<HeaderValue>), Refused> {
    let connect = request.to_http().map_err(|error| {
        let detail = format!("{}: {error}", request.authority);
        Refused::Unanswered(Failure::new(Reason::RemoteRejected, detail))
    })?;
    let state = slot.state();
    state.probe_if_quiet();
    let sent = slot.sender().send_request(connect, false);
    let (response, send) = sent.map_err(|error| {
        // GOAWAY, or the end of the connection.
        state.retire();
        unprocessed(Reason::GatewayUnreachable, &error)
    })?;
    let end = deadline.min(Instant::now() + ANSWER_DEADLINE);
    let response = tokio::select! {
        biased;
        // A connection that has ended is suspect too, and its error says more.
        response = response => response,
        () = state.suspected() => {
            let detail = "the connection is silent, PING not acknowledged";
            let failure = Failure::new(Reason::GatewayUnreachable, detail);
            return Err(Refused::Unprocessed(failure));
        }
        () = sleep_until(end) => {
            let detail = "the gateway did not answer the CONNECT in time";
            return Err(Refused::Unanswered(Failure::new(Reason::RemoteUnavailable, detail)));
        }
    };
    let response = response.map_err(|error| refused(&slot, &error))?;
    state.answered();
    if response.status() == StatusCode::OK {
        let load = response.headers().get(LOAD_HEADER).cloned();
        let stream = Stream::new(send, response.into_body(), Held::Slot(slot));
        return Ok((stream, load));
    }
    let outcome = response.headers().get(OUTCOME_HEADER);
    let outcome = outcome.map(HeaderValue::as_bytes);
    let reason = reason_of(response.status(), outcome);
    let label = String::from_utf8_lossy(outcome.unwrap_or(b"none"));
    let status = response.status().as_u16();
    let detail = format!(
        "the gateway answered {status}, outcome {}",
        label.escape_debug()
    );
    Err(Refused::Processed(Failure::new(reason, detail)))
}

/// Interprets a reset of the stream or the end of the connection before the answer.
fn refused(slot: &Slot, error: &h2::Error) -> Refused {
    let is_unprocessed = error.reason() == Some(h2::Reason::REFUSED_STREAM) || error.is_go_away();
    if error.is_reset() && !is_unprocessed {
        let detail = format!("the gateway reset the CONNECT: {error}");
        return Refused::Processed(Failure::new(Reason::RemoteUnavailable, detail));
    }
    // REFUSED_STREAM is what a draining gateway sends (RFC 9113 section 8.7). A CONNECT whose
    // connection was lost has delivered no byte.
    slot.state().retire();
    let reason = if is_unprocessed {
        Reason::RemoteBusy
    } else {
        Reason::GatewayUnreachable
    };
    unprocessed(reason, error)
}

fn unprocessed(reason: Reason, error: &h2::Error) -> Refused {
    Refused::Unprocessed(Failure::new(
        reason,
        format!("the gateway's connection: {error}"),
    ))
}
