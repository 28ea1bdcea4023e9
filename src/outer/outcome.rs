//! `x-strait-outcome`: category of a rejected CONNECT, sent to peers in `trust.gateways`.

use http::StatusCode;

use crate::reason::Reason;

/// Response header with the outcome. Other peers must not learn which services exist, and do not
/// get it.
pub const OUTCOME_HEADER: &str = "x-strait-outcome";

const UNKNOWN_SERVICE: &str = "unknown_service";
const NOT_AUTHORIZED: &str = "not_authorized";
const NO_ENDPOINT: &str = "no_endpoint";
const DIAL_FAILED: &str = "dial_failed";
const OVERLOADED: &str = "overloaded";
const DRAINING: &str = "draining";
const LOOP: &str = "gateway_loop";
const RESET: &str = "gateway_reset";

/// Returns the outcome of a CONNECT that is rejected for a reason, if there is one.
pub const fn outcome_of(reason: Reason) -> Option<&'static str> {
    Some(match reason {
        Reason::UnknownService | Reason::UnknownSni | Reason::RemoteRejected => UNKNOWN_SERVICE,
        Reason::NotExposed
        | Reason::NotForPeer
        | Reason::NotLinked
        | Reason::PolicyDenied
        | Reason::Revoked => NOT_AUTHORIZED,
        Reason::NoEndpoint | Reason::NoWaypoint | Reason::RemoteUnavailable => NO_ENDPOINT,
        Reason::DialDenied
        | Reason::DialRefused
        | Reason::DialTimeout
        | Reason::ConnectTimeout
        | Reason::DialFailed
        | Reason::GatewayUnreachable
        | Reason::GatewayUntrusted
        | Reason::PeerRejectedUs => DIAL_FAILED,
        Reason::Overloaded
        | Reason::OverShare
        | Reason::TunnelLimit
        | Reason::MemoryFull
        | Reason::BuffersFull
        | Reason::DropOverload
        | Reason::RemoteBusy => OVERLOADED,
        Reason::DrainDeadline => DRAINING,
        Reason::GatewayLoop => LOOP,
        Reason::GatewayReset => RESET,
        _ => return None,
    })
}

/// Returns the reason behind the answer of a gateway. Without the header, 503 means that the
/// gateway has no endpoint: Envoy and ztunnel send it for every failure.
pub(super) fn reason_of(status: StatusCode, outcome: Option<&[u8]>) -> Reason {
    let outcome = outcome.and_then(|outcome| std::str::from_utf8(outcome).ok());
    match outcome {
        Some(UNKNOWN_SERVICE | NOT_AUTHORIZED) => Reason::RemoteRejected,
        Some(NO_ENDPOINT | DIAL_FAILED) => Reason::RemoteUnavailable,
        Some(OVERLOADED | DRAINING) => Reason::RemoteBusy,
        Some(LOOP) => Reason::GatewayLoop,
        Some(RESET) => Reason::GatewayReset,
        _ if status == StatusCode::TOO_MANY_REQUESTS => Reason::RemoteBusy,
        _ if status.is_server_error() => Reason::RemoteUnavailable,
        _ => Reason::RemoteRejected,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_says_what_the_next_gateway_may_do() {
        for (rejected, seen) in [
            (Reason::UnknownService, Reason::RemoteRejected),
            (Reason::NotForPeer, Reason::RemoteRejected),
            (Reason::PolicyDenied, Reason::RemoteRejected),
            (Reason::NoEndpoint, Reason::RemoteUnavailable),
            (Reason::DialRefused, Reason::RemoteUnavailable),
            (Reason::GatewayUnreachable, Reason::RemoteUnavailable),
            (Reason::OverShare, Reason::RemoteBusy),
            (Reason::DrainDeadline, Reason::RemoteBusy),
            (Reason::GatewayLoop, Reason::GatewayLoop),
            (Reason::GatewayReset, Reason::GatewayReset),
        ] {
            let outcome = outcome_of(rejected).map(str::as_bytes);
            assert!(outcome.is_some(), "{rejected}");
            assert_eq!(reason_of(rejected.status(), outcome), seen, "{rejected}");
        }
    }

    #[test]
    fn without_the_header_the_status_decides() {
        for (status, seen) in [
            (400, Reason::RemoteRejected),
            (401, Reason::RemoteRejected),
            (404, Reason::RemoteRejected),
            (429, Reason::RemoteBusy),
            (500, Reason::RemoteUnavailable),
            (503, Reason::RemoteUnavailable),
        ] {
            let status = StatusCode::from_u16(status).expect("a status");
            assert_eq!(reason_of(status, None), seen, "{status}");
            assert_eq!(reason_of(status, Some(b"news")), seen, "{status}");
        }
    }
}
