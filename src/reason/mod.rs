//! Closed lists of the reasons for which a tunnel or a handshake ends.
//!
//! A reason determines the metric label, the blame, the retry on another endpoint, the answer to
//! the peer, and the log level. Stages return a reason and decide none of these.
#![warn(missing_docs)]

mod outcome;

use std::io;

use http::StatusCode;
use rustix::io::Errno;
use tracing::Level;

use crate::labels::labelled;

pub use outcome::OUTCOME_HEADER;

use Fault::{Downstream, Gateway, Upstream};

const UNKNOWN_SERVICE: &str = "unknown_service";
const NOT_AUTHORIZED: &str = "not_authorized";
const NO_ENDPOINT: &str = "no_endpoint";
const DIAL_FAILED: &str = "dial_failed";
const OVERLOADED: &str = "overloaded";
const DRAINING: &str = "draining";
const LOOP: &str = "gateway_loop";
const RESET: &str = "gateway_reset";

labelled! {
    #[with(properties: (Fault, &'static str, Option<&'static str>),
        "Returns the party to blame, the response flags, and the outcome for gateways.")]
    /// Reason for the end of a tunnel, from a rejected CONNECT to a clean close in both
    /// directions. Its label is also the `reason` field of the log.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Reason {
        /// END_STREAM and FIN ended both directions.
        Completed = ("completed", Fault::None, "-", None),
        /// The `:authority` is not an acceptable `host:port`.
        BadAuthority = ("bad_authority", Downstream, "-", None),
        /// The method is not CONNECT.
        NotConnect = ("not_connect", Downstream, "-", None),
        /// The request has more header fields, or a larger header list, than the limit.
        TooManyFields = ("too_many_fields", Downstream, "-", None),
        /// `x-strait-source` of a gateway in `trust.gateways` is malformed, or was sent twice.
        BadSource = ("bad_source", Downstream, "-", None),
        /// The ClientHello has no server name, or no route or subset has that name.
        UnknownSni = ("unknown_sni", Downstream, "CONNECT", Some(UNKNOWN_SERVICE)),
        /// The ClientHello on an Istio listener offers none of Istio's ALPN protocols.
        NoIstioAlpn = ("no_istio_alpn", Downstream, "-", None),
        /// A tunnel that is routed or checked by its inner TLS did not begin with a ClientHello, or
        /// not in time.
        NoClientHello = ("no_hello", Downstream, "CONNECT", None),
        /// The server name inside the tunnel does not belong to the service of its authority.
        SniMismatch = ("sni_mismatch", Downstream, "CONNECT", None),
        /// No service of the snapshot has this name or address.
        UnknownService = ("unknown_service", Downstream, "CONNECT", Some(UNKNOWN_SERVICE)),
        /// The service is not exposed to any peer.
        NotExposed = ("not_exposed", Downstream, "DENY", Some(NOT_AUTHORIZED)),
        /// The service is exposed, but not to this peer.
        NotForPeer = ("not_for_peer", Downstream, "DENY", Some(NOT_AUTHORIZED)),
        /// No link leads from the peer's cluster to this one.
        NotLinked = ("not_linked", Downstream, "DENY", Some(NOT_AUTHORIZED)),
        /// An Istio authorization policy denies the tunnel.
        PolicyDenied = ("policy_denied", Downstream, "DENY", Some(NOT_AUTHORIZED)),
        /// The service has no usable endpoint.
        NoEndpoint = ("no_endpoint", Upstream, "CONNECT", Some(NO_ENDPOINT)),
        /// The control plane's drop overload policy selected this tunnel.
        DropOverload = ("drop_overload", Gateway, "CONNECT", Some(OVERLOADED)),
        /// The service's waypoint is unknown or has no endpoint. The waypoint is never bypassed.
        NoWaypoint = ("no_waypoint", Upstream, "CONNECT", Some(NO_ENDPOINT)),
        /// The address of every endpoint is on the deny list.
        DialDenied = ("dial_denied", Gateway, "CONNECT", Some(DIAL_FAILED)),
        /// Every endpoint that was tried refused the connection.
        DialRefused = ("dial_refused", Upstream, "CONNECT", Some(DIAL_FAILED)),
        /// No endpoint answered within the dial budget.
        DialTimeout = ("dial_timeout", Upstream, "CONNECT", Some(DIAL_FAILED)),
        /// No endpoint answered within `limits.connect_timeout` of the service's exposure.
        ConnectTimeout = ("connect_timeout", Upstream, "CONNECT", Some(DIAL_FAILED)),
        /// Every dial failed, for another network error.
        DialFailed = ("dial_failed", Upstream, "CONNECT", Some(DIAL_FAILED)),
        /// This host is out of ports, descriptors or memory, or the peer's connection is at its
        /// limit of tunnels.
        Overloaded = ("overloaded", Gateway, "CONNECT", Some(OVERLOADED)),
        /// The peer, its cluster or its address has used its share of the descriptors.
        OverShare = ("over_share", Downstream, "CONNECT", Some(OVERLOADED)),
        /// The service has its limit of concurrent tunnels, by `limits.tunnels` of its exposure.
        TunnelLimit = ("tunnel_limit", Gateway, "CONNECT", Some(OVERLOADED)),
        /// At least three quarters of the memory limit of this process are in use.
        MemoryFull = ("memory_full", Gateway, "CONNECT", Some(OVERLOADED)),
        /// Tunnels with the same ClientHello are already in flight: a route leads back to a
        /// gateway.
        Loop = ("loop", Gateway, "CONNECT", None),
        /// The tunnel has already passed this gateway, or too many gateways of other networks.
        GatewayLoop = ("gateway_loop", Gateway, "CONNECT", Some(LOOP)),
        /// No HBONE connection to a gateway of another network could be opened.
        GatewayUnreachable = ("gateway_unreachable", Upstream, "CONNECT", Some(DIAL_FAILED)),
        /// The certificate of a gateway of another network is not that of the expected gateway.
        GatewayUntrusted = ("gateway_untrusted", Upstream, "CONNECT", Some(DIAL_FAILED)),
        /// A gateway of another network rejected the certificate of this gateway, by a TLS alert.
        PeerRejectedUs = ("peer_rejected_us", Gateway, "CONNECT", Some(DIAL_FAILED)),
        /// A gateway of another network ended its connection or reset the stream by an error before
        /// it answered the CONNECT, which is not repeated.
        GatewayReset = ("gateway_reset", Upstream, "CONNECT", Some(RESET)),
        /// A gateway of another network has no endpoint for the service, or did not reach one in
        /// time.
        RemoteUnavailable = ("remote_unavailable", Upstream, "CONNECT", Some(NO_ENDPOINT)),
        /// A gateway of another network does not know the service, or does not expose it to this
        /// gateway.
        RemoteRejected = ("remote_rejected", Upstream, "CONNECT", Some(UNKNOWN_SERVICE)),
        /// A gateway of another network is overloaded or draining, or all its connections are in
        /// use.
        RemoteBusy = ("remote_busy", Upstream, "CONNECT", Some(OVERLOADED)),
        /// The certificate of the workload behind a binding is not that of an expected workload.
        WorkloadUntrusted = ("workload_untrusted", Upstream, "CONNECT", None),
        /// The workload behind a binding did not open the HBONE connection in the tunnel, or
        /// rejected its CONNECT.
        WorkloadUnreachable = ("workload_unreachable", Upstream, "CONNECT", None),
        /// The binding, or the address of the client, has its maximum number of connections.
        BindingFull = ("binding_full", Downstream, "CONNECT", None),
        /// The buffers of all tunnels are at their limit. New tunnels are rejected, and the stalled
        /// tunnels with most buffered bytes are reset.
        BuffersFull = ("buffers_full", Gateway, "CONNECT", Some(OVERLOADED)),
        /// The peer sent more than 64 KiB before the answer.
        EarlyData = ("early_data", Downstream, "-", None),
        /// The first peer of the tunnel sent more frames through a gateway than its tunnels account
        /// for.
        CreditExhausted = ("credit_exhausted", Downstream, "-", None),
        /// The peer sent trailers on a tunnel (RFC 9113 section 8.5).
        Malformed = ("malformed", Downstream, "-", None),
        /// The peer reset the stream with CANCEL or NO_ERROR.
        DownstreamCancelled = ("downstream_cancelled", Fault::None, "-", None),
        /// The peer reset the stream with another code.
        DownstreamReset = ("downstream_reset", Downstream, "-", None),
        /// The peer's connection ended while the tunnel was open.
        DownstreamLost = ("downstream_lost", Downstream, "-", None),
        /// The endpoint reset the connection, or the connection failed.
        UpstreamReset = ("upstream_reset", Upstream, "-", None),
        /// The endpoint sent no byte within 5 s of a complete ClientHello of the peer.
        EndpointSilent = ("endpoint_silent", Upstream, "-", None),
        /// The tunnel was open at the drain deadline.
        DrainDeadline = ("drain_deadline", Gateway, "-", Some(DRAINING)),
        /// No byte passed for `limits.idle_timeout` of the service's exposure or `idle` of the
        /// binding.
        IdleTimeout = ("idle_timeout", Gateway, "-", None),
        /// The tunnel was open for `limits.max_duration` of the service's exposure.
        MaxDuration = ("max_duration", Gateway, "-", None),
        /// A change of trust, exposure or policy revoked the tunnel's permission.
        Revoked = ("revoked", Gateway, "DENY", Some(NOT_AUTHORIZED)),
        /// A bug in this gateway caused a panic.
        Panic = ("panic", Gateway, "-", None),
    }
}

/// Party to blame for the end of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Normal end.
    None,
    /// Peer that dialled this gateway.
    Downstream,
    /// Endpoint that this gateway dialled.
    Upstream,
    /// This gateway or its operator.
    Gateway,
}

impl Reason {
    /// Returns the reason of a failed connect.
    pub fn of_dial(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset => Self::DialRefused,
            io::ErrorKind::TimedOut => Self::DialTimeout,
            // No local port, memory or descriptor is left: the endpoint is not at fault.
            io::ErrorKind::AddrNotAvailable | io::ErrorKind::OutOfMemory => Self::Overloaded,
            _ => match error.raw_os_error().map(Errno::from_raw_os_error) {
                Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS) => Self::Overloaded,
                _ => Self::DialFailed,
            },
        }
    }

    /// Returns the party to blame.
    pub const fn blame(self) -> Fault {
        self.properties().0
    }

    /// Returns true if the same tunnel may try another endpoint of the service.
    ///
    /// True only for failed tries: no byte of the tunnel was sent, and another endpoint may
    /// succeed. After a loop, only the first gateway of the tunnel may.
    pub const fn is_retriable(self) -> bool {
        matches!(
            self,
            Self::PolicyDenied
                | Self::DialDenied
                | Self::GatewayUnreachable
                | Self::GatewayUntrusted
                | Self::PeerRejectedUs
                | Self::RemoteRejected
                | Self::RemoteBusy
        ) || self.ejects_endpoint()
    }

    /// Returns true if a failed dial for this reason counts against the endpoint. A gateway of
    /// another network that fails is ejected by itself, for all services.
    pub const fn ejects_endpoint(self) -> bool {
        matches!(
            self,
            Self::DialRefused
                | Self::DialTimeout
                | Self::DialFailed
                | Self::GatewayLoop
                | Self::RemoteUnavailable
                | Self::WorkloadUntrusted
                | Self::WorkloadUnreachable
        )
    }

    /// Returns true if the alert StraitTunnelsFail counts this reason: it is the fault of the
    /// endpoints or of this gateway. Ends that the configuration of this or another gateway asks
    /// for do not count. A peer can cause the first two of them by what it asks for.
    pub const fn is_failure(self) -> bool {
        let is_configured = matches!(
            self,
            Self::TunnelLimit
                | Self::RemoteRejected
                | Self::DropOverload
                | Self::DrainDeadline
                | Self::IdleTimeout
                | Self::MaxDuration
                | Self::Revoked
        );
        matches!(self.blame(), Upstream | Gateway) && !is_configured
    }

    /// Returns the status of a CONNECT that is rejected for this reason, before 200 was sent.
    ///
    /// Unknown service, not exposed, not for this peer, not linked, no endpoint and no waypoint
    /// have identical answers. A peer therefore cannot probe which services exist. Istio's
    /// authorization is evaluated only for services that are exposed to the peer; its answer is
    /// ztunnel's. Reasons that normally arise after 200 return 503.
    pub const fn status(self) -> StatusCode {
        match self {
            Self::BadAuthority | Self::BadSource => StatusCode::BAD_REQUEST,
            Self::PolicyDenied => StatusCode::UNAUTHORIZED,
            Self::NotConnect => StatusCode::METHOD_NOT_ALLOWED,
            Self::TooManyFields => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Returns the RST_STREAM code that a CONNECT gets instead of an answer: if the drain left no
    /// time to try, or the peer sent too much early data or has used up its frame credit.
    pub const fn reset_before_answer(self) -> Option<h2::Reason> {
        match self {
            Self::DrainDeadline => Some(h2::Reason::REFUSED_STREAM),
            Self::EarlyData | Self::CreditExhausted => Some(h2::Reason::ENHANCE_YOUR_CALM),
            _ => None,
        }
    }

    /// Returns the RST_STREAM code for a tunnel that is rejected after 200 was sent. It is the same
    /// for all reasons, to disclose nothing to the peer (RFC 9113 section 8.5,
    /// docs/wire-contract.md 1.5), unless the peer violated HTTP/2.
    pub fn reset_after_answer(self) -> h2::Reason {
        match self {
            Self::Malformed => self.reset_code(),
            _ => h2::Reason::CONNECT_ERROR,
        }
    }

    /// Returns the TLS alert for a ClientHello that is rejected for this reason, before it was
    /// forwarded to an endpoint.
    ///
    /// As in [`Reason::status`], reasons that would reveal which services exist share one alert:
    /// unrecognized_name (RFC 6066 section 3). All others are handshake_failure (RFC 8446 section
    /// 6.2).
    pub const fn alert(self) -> u8 {
        match self {
            Self::UnknownSni
            | Self::NoIstioAlpn
            | Self::UnknownService
            | Self::NotExposed
            | Self::NotForPeer
            | Self::NotLinked
            | Self::NoEndpoint
            | Self::NoWaypoint => 112,
            _ => 40,
        }
    }

    /// Returns the RST_STREAM code for a tunnel that fails for this reason after 200 was sent.
    ///
    /// RFC 9113 section 8.5: a TCP error of the upstream is CONNECT_ERROR. Section 8.1.1: a
    /// malformed request is PROTOCOL_ERROR. Peers treat CANCEL and NO_ERROR as a clean end of
    /// file, so they are never used for a tunnel that did not end cleanly.
    pub fn reset_code(self) -> h2::Reason {
        match self.blame() {
            _ if self == Self::Malformed => h2::Reason::PROTOCOL_ERROR,
            _ if self == Self::CreditExhausted => h2::Reason::ENHANCE_YOUR_CALM,
            Upstream => h2::Reason::CONNECT_ERROR,
            Fault::None | Downstream | Gateway => h2::Reason::INTERNAL_ERROR,
        }
    }

    /// Returns the value of Istio's `response_flags` label (docs/wire-contract.md 6.1).
    pub const fn response_flags(self) -> &'static str {
        self.properties().1
    }

    /// Returns the level of the access log line.
    ///
    /// Ends by a limit of time are INFO, because the configuration asks for them. Resets and losses
    /// by the peer are INFO: Envoy ends every tunnel of double HBONE by a reset with
    /// INTERNAL_ERROR, after its last byte.
    pub fn level(self) -> Level {
        match self {
            Self::Completed
            | Self::DownstreamCancelled
            | Self::DownstreamReset
            | Self::DownstreamLost
            | Self::IdleTimeout
            | Self::MaxDuration => Level::INFO,
            Self::Panic => Level::ERROR,
            _ => Level::WARN,
        }
    }
}

labelled! {
    #[with(pub description: &'static str, "Returns a description for the operator.")]
    /// Reason for which a connection was refused before it could open a tunnel. Its
    /// label is also the `reason` field of the log (docs/wire-contract.md 4.2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum HandshakeRefusal {
        /// The peer presented no certificate.
        NoCertificate = ("no_certificate", "the peer presented no certificate"),
        /// The certificate could not be parsed.
        BadEncoding = ("bad_encoding", "the certificate cannot be read"),
        /// The chain does not lead to a root of the peer's trust domain.
        UnknownIssuer = ("unknown_issuer",
            "the chain does not lead to a root of the peer's trust domain"),
        /// A certificate of the chain has expired.
        Expired = ("expired", "a certificate of the chain has expired"),
        /// A certificate of the chain is not valid yet.
        NotYetValid = ("not_yet_valid", "a certificate of the chain is not valid yet"),
        /// The leaf is a CA certificate.
        CaAsLeaf = ("ca_as_leaf", "the certificate is a CA certificate"),
        /// KeyUsage or ExtendedKeyUsage does not allow client authentication.
        BadKeyUsage = ("bad_key_usage", "the certificate's key usage does not permit this"),
        /// A signature does not verify or uses an unsupported algorithm.
        BadSignature = ("bad_signature", "a signature is invalid or uses an unsupported algorithm"),
        /// The leaf has no URI SAN.
        NoUriSan = ("no_uri_san", "the certificate has no URI SAN"),
        /// The leaf has more than one SAN of the URI type.
        ManyUriSans = ("many_uri_sans", "the certificate has more than one URI SAN"),
        /// The URI SAN is not `spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT`.
        BadSpiffeId = ("bad_spiffe_id",
            "the URI SAN is not spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT"),
        /// The trust domain is outside the configured set.
        UntrustedDomain = ("untrusted_domain", "the peer's identity is not accepted here"),
        /// By the configuration, the issuer belongs to no cluster or may not sign for the trust
        /// domain.
        UntrustedIssuer = ("untrusted_issuer",
            "the issuer of the certificate is not accepted here"),
        /// A revocation list contains a certificate of the chain.
        Revoked = ("revoked", "a certificate of the chain is revoked"),
        /// The revocation list of an issuer is past its nextUpdate.
        StaleCrl = ("stale_crl", "the revocation list of an issuer is stale"),
        /// The revocation list of an issuer is absent, or not signed by that issuer.
        UnknownRevocation = ("unknown_revocation", "an issuer has no usable revocation list"),
        /// A connection of a load balancer did not begin with a valid PROXY header.
        NoProxyHeader = ("no_proxy_header", "the load balancer sent no valid PROXY header"),
        /// The PROXY header, the handshake or the HTTP/2 preface did not complete in time.
        Timeout = ("timeout", "the handshake timed out"),
        /// The limit of concurrent handshakes was reached, and this one was the oldest of the
        /// source with the most.
        Evicted = ("evicted", "the limit of concurrent handshakes was reached"),
        /// The peer or its cluster has used its share of the descriptors.
        OverShare = ("over_share", "the peer or its cluster has used its share of the descriptors"),
        /// The client did not offer ALPN `h2`.
        NoAlpn = ("no_alpn", "the peer does not offer ALPN h2"),
        /// The client does not support TLS 1.3.
        TlsVersion = ("tls_version", "the peer does not support TLS 1.3"),
        /// The peer rejected the certificate of this gateway, by a TLS alert.
        PeerRejectedUs = ("peer_rejected_us", "the peer rejected the certificate of this gateway"),
        /// Any other failure: no TLS, a lost connection, a malformed message.
        Other = ("other", "the handshake failed"),
    }
}

labelled! {
    /// Reason for which a connection of a peer is sent GOAWAY, so that the peer connects elsewhere.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RetirementReason {
        /// It has reached its age.
        Age = "age",
        /// Its worker has more load than others.
        WorkerLoad = "worker_load",
    }
}

#[cfg(test)]
mod tests;
