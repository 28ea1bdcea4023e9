//! `x-strait-outcome`: category of a rejected CONNECT, sent to peers in `trust.gateways`.

use http::StatusCode;

use super::{
    DIAL_FAILED, DRAINING, LOOP, NO_ENDPOINT, NOT_AUTHORIZED, OVERLOADED, RESET, Reason,
    UNKNOWN_SERVICE,
};

/// Response header with the outcome. Other peers must not learn which services exist, and do not
/// get it.
pub const OUTCOME_HEADER: &str = "x-strait-outcome";

impl Reason {
    /// Returns the outcome of a CONNECT that is rejected for a reason, if there is one.
    pub const fn outcome(self) -> Option<&'static str> {
        self.properties().2
    }

    /// Returns the reason behind the answer of a gateway. Without the header, 503 means that the
    /// gateway has no endpoint: Envoy and ztunnel send it for every failure.
    pub fn of_answer(status: StatusCode, outcome: Option<&[u8]>) -> Self {
        let outcome = outcome.and_then(|outcome| std::str::from_utf8(outcome).ok());
        match outcome {
            Some(UNKNOWN_SERVICE | NOT_AUTHORIZED) => Self::RemoteRejected,
            Some(NO_ENDPOINT | DIAL_FAILED) => Self::RemoteUnavailable,
            Some(OVERLOADED | DRAINING) => Self::RemoteBusy,
            Some(LOOP) => Self::GatewayLoop,
            Some(RESET) => Self::GatewayReset,
            _ if status == StatusCode::TOO_MANY_REQUESTS => Self::RemoteBusy,
            _ if status.is_server_error() => Self::RemoteUnavailable,
            _ => Self::RemoteRejected,
        }
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
            let outcome = rejected.outcome().map(str::as_bytes);
            assert!(outcome.is_some(), "{rejected}");
            assert_eq!(Reason::of_answer(rejected.status(), outcome), seen, "{rejected}");
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
            assert_eq!(Reason::of_answer(status, None), seen, "{status}");
            assert_eq!(Reason::of_answer(status, Some(b"news")), seen, "{status}");
        }
    }
}
