//! Arguments of `strait load`, and the [`Plan`] that results from them.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use derive_more::{Deref, Display};
use rustls::NamedGroup;
use serde::Serialize;

use super::units;
use crate::config::IdentityFiles;
use crate::output::Output;

/// Kind of work, of a run or of one stream.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq, Serialize)]
#[display(rename_all = "lowercase")]
#[serde(rename_all = "lowercase")]
pub(super) enum Work {
    Up,
    Down,
    Rr,
    Churn,
    Handshake,
    Idle,
    Stall,
    /// Requests, with one stream of each of the next two kinds on every connection.
    Mixed,
    /// Sends to an echo and reads back, as fast as possible.
    FullDuplex,
    /// Sends two windows to an echo and never reads.
    StalledEcho,
}

/// Arguments of every kind of work.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Common {
    /// Address of the gateway.
    #[arg(long, value_name = "HOST:PORT")]
    pub(super) to: String,
    /// Authority of the tunnels; if repeated, each tunnel takes the next one.
    #[arg(long, value_name = "HOST:PORT", required_unless_present = "sni")]
    pub(super) authority: Vec<String>,
    /// Use bare connections instead of tunnels, each beginning with a ClientHello of this name.
    ///
    /// For TLS listeners, with endpoints by `serve --after-hello`. If repeated, each connection
    /// takes the next name. The ALPN protocol is `istio`.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["authority", "double"])]
    pub(super) sni: Vec<String>,
    /// Certificate chain of the client.
    #[arg(long, value_name = "FILE", required_unless_present = "sni")]
    chain: Option<PathBuf>,
    /// Key of the certificate.
    #[arg(long, value_name = "FILE", required_unless_present = "sni")]
    key: Option<PathBuf>,
    /// Roots for the server's certificate; any SPIFFE identity under them is accepted.
    #[arg(long, value_name = "FILE", required_unless_present = "sni")]
    roots: Option<PathBuf>,
    /// Carry the streams in a second mTLS connection, one through each connection's tunnel.
    #[arg(long)]
    pub(super) double: bool,
    /// Authority of the inner tunnels, if not that of the outer one.
    #[arg(long, value_name = "HOST:PORT", requires = "double")]
    pub(super) inner_authority: Vec<String>,
    /// Certificate chain of the inner connections, if not that of the outer ones.
    #[arg(long, value_name = "FILE", requires_all = ["double", "inner_key"])]
    inner_chain: Option<PathBuf>,
    /// Key of the inner certificate.
    #[arg(long, value_name = "FILE", requires_all = ["double", "inner_chain"])]
    inner_key: Option<PathBuf>,
    /// Roots for the inner server's certificate, if not those of the outer connections.
    #[arg(long, value_name = "FILE", requires = "double")]
    inner_roots: Option<PathBuf>,
    /// Number of connections to the gateway.
    #[arg(long, value_name = "N", default_value = "1")]
    pub(super) connections: NonZeroUsize,
    /// Duration, from when everything is open.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = units::seconds)]
    pub(super) seconds: Duration,
    /// Window of each HTTP/2 stream [default: 4MiB, stall: 64KiB].
    #[arg(long, value_name = "SIZE", value_parser = units::window)]
    window: Option<NonZeroU32>,
    /// The only key exchange to offer; without it all supported ones, the post-quantum one first.
    #[arg(long, value_enum, value_name = "GROUP")]
    key_exchange: Option<KeyExchange>,
    #[command(flatten)]
    pub(super) output: Output,
}

/// TLS key exchange. Gateways negotiate different ones by default, and their costs differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum KeyExchange {
    X25519,
    /// The post-quantum hybrid.
    #[value(name = "x25519mlkem768")]
    X25519MlKem768,
}

/// Arguments of `up` and `down`.
#[derive(Debug, clap::Args)]
pub(super) struct BulkArgs {
    #[command(flatten)]
    pub(super) common: StreamArgs,
    /// Bytes of each tunnel, such as 64KiB; without it, tunnels do not end.
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    pub(super) size: Option<NonZeroU64>,
    /// Tunnels per second, over all streams; without it, each follows the previous one.
    #[arg(long, value_name = "N", requires = "size")]
    pub(super) rate: Option<NonZeroU64>,
}

/// Arguments of `rr`, `churn` and `mixed`.
#[derive(Debug, clap::Args)]
pub(super) struct RequestArgs {
    #[command(flatten)]
    pub(super) common: StreamArgs,
    #[command(flatten)]
    pub(super) request: Request,
}

/// Arguments of `handshake`.
#[derive(Debug, clap::Args)]
pub(super) struct HandshakeArgs {
    #[command(flatten)]
    pub(super) common: Common,
    #[command(flatten)]
    pub(super) request: Request,
}

#[derive(Debug, clap::Args)]
pub(super) struct Request {
    /// Bytes of a request, and of its answer, such as 64KiB.
    #[arg(long, value_name = "SIZE", default_value = "128", value_parser = units::request_size)]
    pub(super) size: NonZeroU64,
    /// Requests per second, over all streams; latency is then measured from when each was due.
    /// Without it, each request follows the previous answer.
    #[arg(long, value_name = "N")]
    pub(super) rate: Option<NonZeroU64>,
}

/// Arguments of `idle`.
#[derive(Debug, clap::Args)]
pub(super) struct Idle {
    #[command(flatten)]
    pub(super) common: StreamArgs,
    /// Bytes to send through every fourth stream first, and to read back; needs an echo.
    #[arg(long, value_name = "SIZE", value_parser = units::request_size)]
    pub(super) burst: Option<NonZeroU64>,
}

/// Arguments of `stall`, and some of those of all but `handshake`.
#[derive(Debug, clap::Args)]
pub(super) struct StreamArgs {
    #[command(flatten)]
    pub(super) common: Common,
    /// Number of streams of each connection.
    #[arg(long, value_name = "N", default_value = "1")]
    pub(super) streams: NonZeroUsize,
}

/// Complete parameters of a run.
#[derive(Clone, Debug, Deref)]
pub(super) struct Plan {
    pub(super) work: Work,
    #[deref]
    common: Common,
    /// Number of streams of each connection, without the two extra ones of `mixed`.
    pub(super) streams: usize,
    /// Bytes of an operation or a burst; none if the work has neither.
    pub(super) size: Option<NonZeroU64>,
    /// Operations per second, over all streams; none means a closed loop.
    pub(super) rate: Option<NonZeroU64>,
}

impl StreamArgs {
    /// Returns the plan of a kind of work with these further arguments.
    pub(super) fn plan(
        &self,
        work: Work,
        size: Option<NonZeroU64>,
        rate: Option<NonZeroU64>,
    ) -> Plan {
        Plan { work, common: self.common.clone(), streams: self.streams.get(), size, rate }
    }
}

impl Common {
    /// Returns the only key exchange to offer, if there is one.
    pub(super) fn key_exchange(&self) -> Option<NamedGroup> {
        self.key_exchange.map(|only| match only {
            KeyExchange::X25519 => NamedGroup::X25519,
            KeyExchange::X25519MlKem768 => NamedGroup::X25519MLKEM768,
        })
    }

    /// Returns the files of the connections to the gateway; none for bare connections.
    pub(super) fn files(&self) -> Option<IdentityFiles> {
        files(self.chain.clone(), self.key.clone(), self.roots.clone())
    }

    pub(super) fn inner_files(&self) -> Option<IdentityFiles> {
        let or_outer = |own: &Option<PathBuf>, outer: &Option<PathBuf>| {
            own.as_ref().or(outer.as_ref()).cloned()
        };
        let inner = files(
            or_outer(&self.inner_chain, &self.chain),
            or_outer(&self.inner_key, &self.key),
            or_outer(&self.inner_roots, &self.roots),
        );
        inner.filter(|_| self.double)
    }
}

/// Returns all three files, or none if one of them is missing.
pub(super) fn files(
    chain: Option<PathBuf>,
    key: Option<PathBuf>,
    roots: Option<PathBuf>,
) -> Option<IdentityFiles> {
    Some(IdentityFiles { chain: chain?, key: key?, roots: roots? })
}

impl RequestArgs {
    pub(super) fn plan(&self, work: Work) -> Plan {
        let Request { size, rate } = self.request;
        self.common.plan(work, Some(size), rate)
    }
}

/// Default window of a stream, in bytes, as in ztunnel's client.
const WINDOW: u32 = 4 << 20;
/// Default window of a stream of `stall`, in bytes, about HTTP/2's own default. A stream that is
/// never read needs no more.
const STALL_WINDOW: u32 = 64 << 10;
/// Lower limit of a connection's window, in bytes, as in ztunnel's client.
const CONNECTION_WINDOW_MIN: u32 = 16 << 20;
/// Upper limit of a window in HTTP/2, 2^31 - 1 (RFC 9113 section 6.9.1).
const CONNECTION_WINDOW_MAX: u32 = i32::MAX.unsigned_abs();

impl Plan {
    /// Returns the window of each stream, in bytes.
    pub(super) fn stream_window(&self) -> u32 {
        let default = match self.work {
            Work::Stall => STALL_WINDOW,
            _ => WINDOW,
        };
        self.window.map_or(default, NonZeroU32::get)
    }

    /// Returns the window of each connection, in bytes: the sum of the windows of its streams, with
    /// the two extra ones of `mixed`, so that full streams do not block the others.
    pub(super) fn connection_window(&self) -> u32 {
        let streams = u32::try_from(self.streams).unwrap_or(u32::MAX);
        let all = self.stream_window().saturating_mul(streams.saturating_add(2));
        all.clamp(CONNECTION_WINDOW_MIN, CONNECTION_WINDOW_MAX)
    }
}

/// Returns the example in a command's help.
pub(super) fn example(command: &str, more: &str) -> String {
    format!(
        "Example:\n  strait load {command} --to 10.0.0.1:15008 --authority echo.global:80 \
         --chain client.crt \\\n    --key client.key --roots root.crt {more}"
    )
}
