//! What can be asked of `strait load`, and the plan that it makes.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use rustls::NamedGroup;

use super::units;

/// A kind of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Up,
    Down,
    Rr,
    Churn,
    Handshake,
    Idle,
    Stall,
    Mixed,
}

/// What every kind of work needs.
#[derive(Clone, Debug, clap::Args)]
struct Common {
    /// The gateway.
    #[arg(long, value_name = "HOST:PORT")]
    to: String,
    /// What tunnels ask for; of several, each tunnel takes the next one.
    #[arg(long, value_name = "HOST:PORT", required_unless_present = "sni")]
    authority: Vec<String>,
    /// Use bare connections in place of tunnels, each with a ClientHello of this name first.
    ///
    /// For TLS listeners, to endpoints by `serve --after-hello`. Of several names, each connection
    /// takes the next one. The ALPN protocol is `istio`.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["authority", "double"])]
    sni: Vec<String>,
    /// Our certificate chain.
    #[arg(long, value_name = "FILE", required_unless_present = "sni")]
    chain: Option<PathBuf>,
    /// Its key.
    #[arg(long, value_name = "FILE", required_unless_present = "sni")]
    key: Option<PathBuf>,
    /// Roots by which the other side is judged; any SPIFFE identity under them will do.
    #[arg(long, value_name = "FILE", required_unless_present = "sni")]
    roots: Option<PathBuf>,
    /// Carry the streams in a second mTLS connection, one through each connection's tunnel.
    #[arg(long)]
    double: bool,
    /// What the inner tunnels ask for, if not the same as the outer one.
    #[arg(long, value_name = "HOST:PORT", requires = "double")]
    inner_authority: Vec<String>,
    /// Certificate chain of the inner connections, if not that of the outer ones.
    #[arg(long, value_name = "FILE", requires_all = ["double", "inner_key"])]
    inner_chain: Option<PathBuf>,
    /// Its key.
    #[arg(long, value_name = "FILE", requires_all = ["double", "inner_chain"])]
    inner_key: Option<PathBuf>,
    /// Roots by which the inner server is judged, if not the same.
    #[arg(long, value_name = "FILE", requires = "double")]
    inner_roots: Option<PathBuf>,
    /// Connections to the gateway.
    #[arg(long, value_name = "N", default_value = "1")]
    connections: NonZeroUsize,
    /// For how long, after everything is open.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = units::seconds)]
    seconds: Duration,
    /// Window of each HTTP/2 stream [default: 4MiB, stall: 64KiB].
    #[arg(long, value_name = "SIZE", value_parser = units::window)]
    window: Option<NonZeroU32>,
    /// The one key exchange to offer; else those that peers know, the post-quantum one first.
    #[arg(long, value_enum, value_name = "GROUP")]
    key_exchange: Option<KeyExchange>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// A key exchange of TLS. Gateways do not agree by themselves on one, and their costs differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum KeyExchange {
    X25519,
    /// The post-quantum hybrid.
    #[value(name = "x25519mlkem768")]
    X25519MlKem768,
}

/// A certificate with its key, and the roots that others are judged by, as PEM files.
#[derive(Clone, Debug)]
pub(super) struct Files {
    pub(super) chain: PathBuf,
    pub(super) key: PathBuf,
    pub(super) roots: PathBuf,
}

/// Arguments of `up` and `down`.
#[derive(Debug, clap::Args)]
pub(super) struct Bulk {
    #[command(flatten)]
    common: Common,
    /// Streams of each connection.
    #[arg(long, value_name = "N", default_value = "1")]
    streams: NonZeroUsize,
    /// Bytes of each tunnel, such as 64KiB; without it, tunnels do not end.
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    size: Option<NonZeroU64>,
    /// Tunnels per second, over all streams; without it, each follows the last one.
    #[arg(long, value_name = "N", requires = "size")]
    rate: Option<NonZeroU64>,
}

/// Arguments of `rr`, `churn` and `mixed`.
#[derive(Debug, clap::Args)]
pub(super) struct Requests {
    #[command(flatten)]
    common: Common,
    /// Streams of each connection.
    #[arg(long, value_name = "N", default_value = "1")]
    streams: NonZeroUsize,
    #[command(flatten)]
    request: Request,
}

/// Arguments of `handshake`.
#[derive(Debug, clap::Args)]
pub(super) struct Handshakes {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    request: Request,
}

#[derive(Debug, clap::Args)]
struct Request {
    /// Bytes of a request, and of its answer, such as 64KiB.
    #[arg(long, value_name = "SIZE", default_value = "128", value_parser = units::request_size)]
    size: NonZeroU64,
    /// Requests per second, over all streams; latency then counts from when each was due.
    /// Without it, each request follows the last one's answer.
    #[arg(long, value_name = "N")]
    rate: Option<NonZeroU64>,
}

/// Arguments of `idle`.
#[derive(Debug, clap::Args)]
pub(super) struct Idle {
    #[command(flatten)]
    held: Held,
    /// Send so much through every fourth stream first, and read it back; needs an echo.
    #[arg(long, value_name = "SIZE", value_parser = units::request_size)]
    burst: Option<NonZeroU64>,
}

/// Arguments of `stall`, and some of `idle`.
#[derive(Debug, clap::Args)]
pub(super) struct Held {
    #[command(flatten)]
    common: Common,
    /// Streams of each connection.
    #[arg(long, value_name = "N", default_value = "1")]
    streams: NonZeroUsize,
}

/// Everything that a run is told.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) work: Work,
    pub(super) to: String,
    pub(super) authorities: Vec<String>,
    /// Names for bare connections; empty where there are tunnels.
    pub(super) server_names: Vec<String>,
    /// None where there are bare connections.
    pub(super) files: Option<Files>,
    /// The inner connection's files and authorities, where there is one. No authority of its own
    /// stands for the outer one.
    pub(super) inner: Option<(Files, Vec<String>)>,
    pub(super) connections: usize,
    /// Streams of each connection, without the two further ones of `mixed`.
    pub(super) streams: usize,
    /// Bytes of an operation, or of a burst; none where there is neither.
    pub(super) size: Option<NonZeroU64>,
    /// Operations per second, over all streams; none is the closed loop.
    pub(super) rate: Option<NonZeroU64>,
    pub(super) time: Duration,
    /// Bytes of each stream's window.
    window: Option<NonZeroU32>,
    /// The only one to offer.
    pub(super) key_exchange: Option<NamedGroup>,
    pub(super) json: bool,
}

impl KeyExchange {
    fn group(self) -> NamedGroup {
        match self {
            Self::X25519 => NamedGroup::X25519,
            Self::X25519MlKem768 => NamedGroup::X25519MLKEM768,
        }
    }
}

impl Common {
    fn plan(
        &self,
        work: Work,
        streams: NonZeroUsize,
        size: Option<NonZeroU64>,
        rate: Option<NonZeroU64>,
    ) -> Plan {
        let own = |own: &Option<PathBuf>, outer: &Option<PathBuf>| {
            own.as_ref().or(outer.as_ref()).cloned()
        };
        let inner = files(
            own(&self.inner_chain, &self.chain),
            own(&self.inner_key, &self.key),
            own(&self.inner_roots, &self.roots),
        );
        Plan {
            work,
            to: self.to.clone(),
            authorities: self.authority.clone(),
            server_names: self.sni.clone(),
            files: files(self.chain.clone(), self.key.clone(), self.roots.clone()),
            inner: inner
                .filter(|_| self.double)
                .map(|inner| (inner, self.inner_authority.clone())),
            connections: self.connections.get(),
            streams: streams.get(),
            size,
            rate,
            time: self.seconds,
            window: self.window,
            key_exchange: self.key_exchange.map(KeyExchange::group),
            json: self.json,
        }
    }
}

/// All three files; none where one of them was not named.
pub(super) fn files(
    chain: Option<PathBuf>,
    key: Option<PathBuf>,
    roots: Option<PathBuf>,
) -> Option<Files> {
    Some(Files {
        chain: chain?,
        key: key?,
        roots: roots?,
    })
}

impl Bulk {
    pub(super) fn plan(&self, work: Work) -> Plan {
        self.common.plan(work, self.streams, self.size, self.rate)
    }
}

impl Requests {
    pub(super) fn plan(&self, work: Work) -> Plan {
        let Request { size, rate } = self.request;
        self.common.plan(work, self.streams, Some(size), rate)
    }
}

impl Handshakes {
    pub(super) fn plan(&self, work: Work) -> Plan {
        let Request { size, rate } = self.request;
        self.common.plan(work, NonZeroUsize::MIN, Some(size), rate)
    }
}

impl Idle {
    pub(super) fn plan(&self, work: Work) -> Plan {
        let Held { common, streams } = &self.held;
        common.plan(work, *streams, self.burst, None)
    }
}

impl Held {
    pub(super) fn plan(&self, work: Work) -> Plan {
        self.common.plan(work, self.streams, None, None)
    }
}

/// As ztunnel's client has it.
const WINDOW: u32 = 4 << 20;
/// HTTP/2's own default: a reader that never reads needs no more.
const STALL_WINDOW: u32 = 64 << 10;
/// As ztunnel's client has it.
const CONNECTION_WINDOW_MIN: u32 = 16 << 20;
/// The most that HTTP/2 allows, 2^31 - 1.
const CONNECTION_WINDOW_MAX: u32 = i32::MAX.unsigned_abs();

impl Plan {
    /// The window of each stream, in bytes.
    pub(super) fn stream_window(&self) -> u32 {
        let default = match self.work {
            Work::Stall => STALL_WINDOW,
            _ => WINDOW,
        };
        self.window.map_or(default, NonZeroU32::get)
    }

    /// The window of each connection, in bytes: room for all streams to be full but one.
    pub(super) fn connection_window(&self) -> u32 {
        let streams = u32::try_from(self.streams).unwrap_or(u32::MAX);
        let all = self
            .stream_window()
            .saturating_mul(streams.saturating_add(2));
        all.clamp(CONNECTION_WINDOW_MIN, CONNECTION_WINDOW_MAX)
    }
}

impl Work {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Down => "down",
            Self::Rr => "rr",
            Self::Churn => "churn",
            Self::Handshake => "handshake",
            Self::Idle => "idle",
            Self::Stall => "stall",
            Self::Mixed => "mixed",
        }
    }
}

/// The example in a command's help.
pub(super) fn example(command: &str, more: &str) -> String {
    format!(
        "Example:\n  strait load {command} --to 10.0.0.1:15008 --authority echo.global:80 \
         --chain client.crt \\\n    --key client.key --roots root.crt {more}"
    )
}
