//! CONNECT request to a gateway, and its answer.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use tokio::time::{Instant, sleep_until, timeout};

use crate::reason::{OUTCOME_HEADER, Reason};
use crate::wire::{LOAD_HEADER, VIA_HEADER, Via};

use super::Failure;
use super::connection::Slot;
use super::stream::{Held, Stream};

/// Header with the identity of the peer that the first gateway has verified.
pub const SOURCE_HEADER: &str = "x-strait-source";

/// Limit of the wait for the answer, within which the gateway dials. The caller shortens it where
/// another gateway can be tried.
const ANSWER_DEADLINE: Duration = Duration::from_secs(5);
/// Limit of the wait for the end of a connection, whose cause its task notes after the errors of
/// the streams.
const END_DEADLINE: Duration = Duration::from_secs(1);
/// Limit of an encoded header block, that of earlier versions of Strait. Envoy accepts 60 KiB.
const HEADER_BLOCK_MAX: usize = 32 * 1024;
/// Limit of a field's octets in HPACK besides its name and value: kind and two lengths.
const FIELD_OVERHEAD: usize = 8;

#[derive(Clone, Debug)]
pub struct Request {
    authority: String,
    headers: HeaderMap,
    /// Upper bound of the encoded header block.
    encoded: usize,
}

/// Answer 200 to a request.
#[derive(Debug)]
pub struct Answer {
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
    /// The gateway has not processed it: another connection may succeed.
    Unprocessed(Failure),
    /// No PING was acknowledged: the connection is dead, and another one may succeed.
    Silent(Failure),
    /// The gateway has not answered in time.
    Unanswered(Failure),
    /// The gateway has ended the connection or the stream by an error. Another connection might end
    /// in the same way.
    Broken(Failure),
    /// The gateway has answered.
    Processed(Failure),
    /// The request cannot be encoded.
    Unsent(Failure),
}

impl Request {
    /// Creates a request for `HOSTNAME:PORT` of a service that has passed the gateways of `via`.
    pub fn new(authority: String, via: &Via) -> Self {
        let encoded = encoded_max(b":authority", authority.as_bytes()) + FIELD_OVERHEAD;
        let mut request = Self { authority, headers: HeaderMap::new(), encoded };
        request.set(VIA_HEADER, via.to_string().as_bytes());
        request
    }

    /// Sets a header once. Returns false if HTTP does not allow the value, or the header block
    /// could become too large for the gateway.
    pub fn set(&mut self, name: &'static str, value: &[u8]) -> bool {
        let encoded = self.encoded + encoded_max(name.as_bytes(), value);
        match HeaderValue::from_bytes(value) {
            Ok(value) if encoded <= HEADER_BLOCK_MAX => {
                self.encoded = encoded;
                self.headers.insert(HeaderName::from_static(name), value);
                true
            }
            _ => false,
        }
    }

    pub(super) fn authority(&self) -> &str {
        &self.authority
    }

    fn to_http(&self) -> Result<http::Request<()>, http::Error> {
        let uri = http::Uri::builder().authority(&*self.authority).build()?;
        let mut request = http::Request::builder().method(Method::CONNECT).uri(uri).body(())?;
        *request.headers_mut() = self.headers.clone();
        Ok(request)
    }
}

/// Returns an upper bound of the octets of a field in HPACK. The h2 crate encodes each string by
/// the code of RFC 7541 appendix B, which takes up to 30 bits for an octet.
fn encoded_max(name: &[u8], value: &[u8]) -> usize {
    let bits = |octet: &u8| match octet {
        b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' => 8,
        b' ' | b'%' | b'&' | b'*' | b',' | b'-' | b'.' | b'/' | b':' | b';' | b'=' | b'_' => 8,
        b'\\' => 19,
        b'!'..=b'~' => 15,
        b'\t' => 24,
        _ => 30,
    };
    let bits: usize = name.iter().chain(value).map(bits).sum();
    FIELD_OVERHEAD + bits.div_ceil(8)
}

/// Asks for a tunnel on a connection.
pub(super) async fn send(
    slot: Slot,
    request: &Request,
    deadline: Instant,
) -> Result<(Stream, Option<HeaderValue>), Refused> {
    let connect = request.to_http().map_err(|error| {
        let detail = format!("{}: {error}", request.authority);
        Refused::Unsent(Failure::new(Reason::RemoteRejected, detail))
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
            return Err(Refused::Silent(failure));
        }
        () = sleep_until(end) => {
            let detail = "the gateway did not answer the CONNECT in time";
            return Err(Refused::Unanswered(Failure::new(Reason::RemoteUnavailable, detail)));
        }
    };
    let response = match response {
        Ok(response) => response,
        Err(error) => return Err(refused(&slot, &error).await),
    };
    state.answered();
    if response.status() == StatusCode::OK {
        let load = response.headers().get(LOAD_HEADER).cloned();
        let stream = Stream::new(send, response.into_body(), Held::Slot(slot));
        return Ok((stream, load));
    }
    let outcome = response.headers().get(OUTCOME_HEADER).map(HeaderValue::as_bytes);
    let reason = Reason::of_answer(response.status(), outcome);
    let label = String::from_utf8_lossy(outcome.unwrap_or(b"none"));
    let status = response.status().as_u16();
    let detail = format!("the gateway answered {status}, outcome {}", label.escape_debug());
    Err(Refused::Processed(Failure::new(reason, detail)))
}

/// Interprets a reset of the stream or the end of the connection before the answer.
///
/// REFUSED_STREAM, and GOAWAY with NO_ERROR for streams above the last one, are what a draining
/// gateway sends (RFC 9113 section 8.7). A CONNECT whose connection was closed without an error has
/// delivered no byte. After an error the request itself may be the cause, and is not repeated.
async fn refused(slot: &Slot, error: &h2::Error) -> Refused {
    let (state, code) = (slot.state(), error.reason());
    let is_unprocessed = code == Some(h2::Reason::REFUSED_STREAM)
        || error.is_go_away() && code == Some(h2::Reason::NO_ERROR);
    if error.is_reset() && !is_unprocessed {
        let detail = format!("the gateway reset the CONNECT: {error}");
        if !error.is_remote() {
            // The answer is malformed, and the reset is ours.
            return Refused::Processed(Failure::new(Reason::RemoteUnavailable, detail));
        }
        return Refused::Broken(Failure::new(Reason::GatewayReset, detail));
    }
    state.retire();
    if is_unprocessed {
        return unprocessed(Reason::RemoteBusy, error);
    }
    state.note_error(error);
    let _ = timeout(END_DEADLINE, state.suspected()).await;
    if state.is_broken() {
        let detail = format!("the gateway's connection: {error}");
        return Refused::Broken(Failure::new(Reason::GatewayReset, detail));
    }
    unprocessed(Reason::GatewayUnreachable, error)
}

fn unprocessed(reason: Reason, error: &h2::Error) -> Refused {
    Refused::Unprocessed(Failure::new(reason, format!("the gateway's connection: {error}")))
}
