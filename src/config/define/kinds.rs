//! Types of values that several sections use.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use bytesize::ByteSize;
use ipnet::IpNet;
use serde_json::{Value as Json, json};

use super::{Shape, Type, choice, form, scalar};
use crate::config::names::{HostPort, is_segment};
use crate::wire::Transit;
use crate::wire::sni::RouteBy;
use crate::yaml::Value;

/// Upper bound of `workers`: more than the cores of any known machine.
const WORKERS_MAX: u16 = 1024;

/// Lower bound of `limits.buffers`: less would not hold the bytes of one busy connection.
const BUFFERS_MIN: u64 = 1 << 20;

/// Upper bound of `drain.lag`: Kubernetes kills the process long before.
const LAG_MAX: Duration = Duration::from_secs(60 * 60);

/// Upper bound of `drain.deadline`. A process may keep its tunnels for hours beside its successor.
const DRAIN_MAX: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Bounds of an idle timeout.
const IDLE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(7 * 24 * 60 * 60));

/// Upper bound of a number of connections: more than the files of a process.
const CONNECTIONS_MAX: u32 = 1 << 20;

/// Bounds of a certificate's lifetime: less cannot be renewed in time.
const TTL: (Duration, Duration) =
    (Duration::from_secs(60), Duration::from_secs(365 * 24 * 60 * 60));

/// Bounds of a tunnel's limits of time: less than a second would end tunnels between two requests.
const TUNNEL_TIME: (Duration, Duration) = (Duration::from_secs(1), TTL.1);

/// Bounds of `connect_timeout`: the gateway's own for all endpoints of a tunnel is 10 s.
const CONNECT_TIME: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(10));

/// JSON types of text: an unquoted number or boolean is its characters.
pub(in crate::config) const TEXT: [&str; 3] = ["string", "number", "boolean"];

scalar! {
    String => String, "text", TEXT,
        |value, _| value.text().map(str::to_owned), |text| json!(text);
    bool => bool, "`true` or `false`", "boolean",
        |value, _| value.flag(), |flag| json!(flag);
    SocketAddr => SocketAddr,
        "an address and a port, such as `\"127.0.0.1:15000\"` or `\"[::]:15008\"`",
        matching(":[0-9]{1,5}$"),
        |value, wanted| value.parsed(wanted, |text| text.parse().ok()),
        |address| json!(address.to_string());
    IpNet => IpNet, "a network in CIDR form, such as `127.0.0.0/8`",
        matching("^[0-9A-Fa-f:.]+/[0-9]{1,3}$"),
        network, |network| json!(network.to_string());
}

/// Reads a network, and warns of bits after the prefix, which have no effect.
fn network(value: Value<'_>, wanted: &str) -> Option<IpNet> {
    let network: IpNet = value.parsed(wanted, |text| text.parse().ok())?;
    if network != network.trunc() {
        let what = format!("is `{network}`, whose address has bits after the prefix");
        value.warning(what, format!("`{}`, or a longer prefix", network.trunc()));
    }
    Some(network)
}

form! {
    /// Text that may be empty.
    MaybeEmpty => Arc<str>, "text", TEXT,
        |value, _| value.text_or_empty().map(Into::into), |text| json!(text);
    /// A namespace or service account: a segment of a SPIFFE path.
    Segment => String, "one name of letters, digits, `-`, `_` and `.`",
        json!({"type": TEXT, "pattern": "^[A-Za-z0-9._-]+$"}),
        |value, wanted| value.parsed(wanted, |text| is_segment(text).then(|| text.to_owned())),
        |text| json!(text);
    /// A service account with its namespace.
    Account => (String, String), "`NAMESPACE/NAME`, such as `shop/checkout`",
        matching("^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$"),
        |value, wanted| value.parsed(wanted, |text| {
            let (namespace, name) = text.split_once('/')?;
            let is_account = is_segment(namespace) && is_segment(name);
            is_account.then(|| (namespace.to_owned(), name.to_owned()))
        }),
        |(namespace, name)| json!(format!("{namespace}/{name}"));
    /// A file or directory that exists.
    ExistingPath => PathBuf, "a path, relative to the file that names it",
        "string", |value, _| value.existing_path(), |out| path(out);
    /// A file of certificates, a key or a token, which need not exist where no gateway runs.
    Credential => PathBuf, "the path of a file, relative to the file that names it",
        "string", |value, _| value.credential_path(), |out| path(out);
    /// A file that the gateway writes.
    NewFile => PathBuf, "the path of a file in an existing directory", "string",
        |value, _| value.new_path(), |out| path(out);
    /// A directory that the gateway writes to.
    NewFolder => PathBuf, "the path of a directory in an existing directory",
        "string", |value, _| value.new_folder(), |out| path(out);
    /// A host with a port.
    Address => HostPort,
        "a host and a port, such as `istiod.istio-system.svc:15012`", matching(":[0-9]{1,5}$"),
        |value, wanted| value.parsed(wanted, |text| {
            HostPort::parse(text).ok().filter(|address| address.port.is_some())
        }),
        |address| json!(address);
    /// A hostname with a port.
    ServicePort => HostPort,
        "the hostname and port of a service, such as `echo.app.mesh.internal:80`",
        matching(":[0-9]{1,5}$"),
        |value, wanted| value.parsed(wanted, |text| {
            let named = HostPort::parse(text).ok().filter(|named| !named.is_address());
            named.filter(|named| named.port.is_some())
        }),
        |named| json!(named);
    /// A hostname without port.
    Hostname => String, "a hostname without port and wildcard, such as `echo.app`",
        "string",
        |value, wanted| value.parsed(wanted, Hostname::parse), |host| json!(host);
    /// A hostname, with or without port.
    Service => HostPort,
        "`HOST:PORT` or `HOST`, such as `echo.app.svc.cluster.local:80`", "string",
        service, |named| json!(named);
    /// The number of threads.
    Workers => usize, "a whole number from 0 to 1024", whole(0_u32, WORKERS_MAX),
        |value, _| value.number(0, WORKERS_MAX).map(Into::into), |number| json!(number);
    /// A limit of connections.
    Connections => u32, "a whole number from 1 to 1048576", whole(1_u32, CONNECTIONS_MAX),
        |value, _| value.number(1, CONNECTIONS_MAX), |number| json!(number);
    /// A weight.
    Weight => u32, "a whole number from 0 to 4294967295", whole(0_u32, u32::MAX),
        |value, _| value.number(0, u32::MAX), |number| json!(number);
    /// A percentage.
    Percent => u8, "a whole percentage from 0% to 100%, such as `70%`",
        matching("^0*([0-9]{1,2}|100)%$"),
        |value, wanted| percent(value, wanted, 0..=100), |percent| json!(percent);
    /// A number of bytes.
    Size => usize, "a size of at least 1MiB, such as `256MiB` or `1.5GiB`",
        json!({"type": ["string", "integer"], "minimum": BUFFERS_MIN}),
        size, |bytes| json!(bytes);
    /// A number of bytes per second.
    ByteRate => u32, "a size from 1MiB to 4095MiB per second, such as `100MiB`",
        json!({"type": ["string", "integer"], "minimum": BUFFERS_MIN}),
        size, |bytes| json!(bytes);
    /// A duration before a drain.
    LagTime => Duration, "a duration of at most 1h, such as `5s` or `1m 30s`",
        time(),
        |value, wanted| time_within(value, wanted, (Duration::ZERO, LAG_MAX)), duration;
    /// A duration of a drain, or of held removals.
    DrainTime => Duration, "a duration of at most 7d, such as `20s` or `8h`",
        time(),
        |value, wanted| time_within(value, wanted, (Duration::ZERO, DRAIN_MAX)), duration;
    /// A time without a byte.
    IdleTime => Duration, "a duration from 1s to 7d, such as `1h`", time(),
        |value, wanted| time_within(value, wanted, IDLE), duration;
    /// The lifetime of a certificate.
    Ttl => Duration, "a duration from 1m to 365d, such as `24h`", time(),
        |value, wanted| time_within(value, wanted, TTL), duration;
    /// A number of tunnels, or a weight of which none is 0.
    Positive => u32, "a whole number from 1 to 4294967295", whole(1_u32, u32::MAX),
        |value, _| value.number(1, u32::MAX), |number| json!(number);
    /// A limit of time of open tunnels.
    TunnelTime => Duration, "a duration from 1s to 365d, such as `5m`", time(),
        |value, wanted| time_within(value, wanted, TUNNEL_TIME), duration;
    /// A limit of time of dials.
    ConnectTime => Duration, "a duration from 1ms to 10s, such as `2s`", time(),
        |value, wanted| time_within(value, wanted, CONNECT_TIME), duration;
}

/// Reads a whole percentage between two bounds.
pub(in crate::config) fn percent<T: FromStr + PartialOrd>(
    value: Value<'_>,
    wanted: &str,
    bounds: RangeInclusive<T>,
) -> Option<T> {
    value.parsed(wanted, |text| {
        let digits = text.strip_suffix('%')?;
        let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit());
        digits.parse().ok().filter(|percent| is_plain && bounds.contains(percent))
    })
}

/// Reads a number of bytes of at least [`BUFFERS_MIN`].
fn size<T: TryFrom<u64>>(value: Value<'_>, wanted: &str) -> Option<T> {
    value.parsed(wanted, |text| {
        let bytes: ByteSize = text.parse().ok()?;
        T::try_from(bytes.as_u64()).ok().filter(|_| bytes.as_u64() >= BUFFERS_MIN)
    })
}

/// Returns the JSON Schema of whole numbers between two bounds, which are included.
pub(in crate::config) fn whole(min: impl Into<u64>, max: impl Into<u64>) -> Json {
    json!({"type": "integer", "minimum": min.into(), "maximum": max.into()})
}

/// Returns the JSON Schema of text that has a pattern.
pub(in crate::config) fn matching(pattern: &str) -> Json {
    json!({"type": "string", "pattern": pattern})
}

/// Returns the JSON Schema of durations.
fn time() -> Json {
    matching("^(0|([0-9]+ *[A-Za-z]+ *)+)$")
}

fn time_within(
    value: Value<'_>,
    wanted: &str,
    (min, max): (Duration, Duration),
) -> Option<Duration> {
    value.parsed(wanted, |text| {
        let time = humantime::parse_duration(text).ok()?;
        (min..=max).contains(&time).then_some(time)
    })
}

impl Hostname {
    /// Parses a hostname without port.
    pub(in crate::config) fn parse(text: &str) -> Option<String> {
        let named = HostPort::parse(text).ok().filter(|named| !named.is_address());
        Some(named.filter(|named| named.port.is_none())?.host)
    }
}

/// Shows a path, which need not be UTF-8.
pub(in crate::config) fn path(path: &Path) -> Json {
    json!(path.to_string_lossy())
}

fn duration(time: &Duration) -> Json {
    json!(humantime::format_duration(*time).to_string())
}

fn service(value: Value<'_>, wanted: &str) -> Option<HostPort> {
    let text = value.text()?;
    match HostPort::parse(text) {
        Ok(name) if name.is_address() => {
            let what = format!("is `{name}`, an address, and services are known by hostnames");
            value.error(what, wanted);
            None
        }
        Ok(name) => Some(name),
        Err(error) => {
            value.error(format!("is `{text}`, which {error}"), wanted);
            None
        }
    }
}

pub(in crate::config) fn word<T: PartialEq>(variant: &T, words: &[(&str, T)]) -> Json {
    let found = words.iter().find(|(_, other)| other == variant);
    json!(found.map(|(word, _)| word))
}

/// Describes a closed list of words, each with the lines of its description.
pub(in crate::config) fn one_of(words: &[(&'static str, &[&str])]) -> Shape {
    let described = words.iter().map(|(word, about)| {
        if about.is_empty() {
            format!("`{word}`")
        } else {
            format!("`{word}`: {}", super::joined(about))
        }
    });
    let described: Vec<_> = described.collect();
    let words: Vec<_> = words.iter().map(|(word, _)| *word).collect();
    Shape::Scalar(described.join(" "), json!({"enum": words}))
}

choice! {
    RouteBy, &Self::ALL.map(|one| (one.label(), one)),
        &Self::ALL.map(|one| (one.label(), &[] as &[&str]));
    Transit, &Self::ALL.map(|one| (one.label(), one)), &[
        ("off", &["never."]),
        ("failover", &["tunnels that endpoints of the own network cannot take."]),
        ("always", &["by the distribution of the service."]),
    ];
}

impl<T: Type> Type for Option<T> {
    type Out = Option<T::Out>;

    fn read(value: Value<'_>) -> Option<Self::Out> {
        T::read(value).map(Some)
    }

    fn show(out: &Self::Out) -> Json {
        out.as_ref().map_or(Json::Null, T::show)
    }

    fn shape() -> Shape {
        T::shape()
    }
}

impl<T: Type> Type for Vec<T> {
    type Out = Vec<T::Out>;

    fn read(value: Value<'_>) -> Option<Self::Out> {
        let items: Vec<_> = value.items().collect();
        let count = items.len();
        let read = items.into_iter().map(|item| Some((T::read(item)?, item)));
        let read: Vec<_> = read.flatten().collect();
        T::compare(value, &read);
        let is_good = value.is_list() && read.len() == count;
        is_good.then(|| read.into_iter().map(|(one, _)| one).collect())
    }

    fn show(out: &Self::Out) -> Json {
        out.iter().map(T::show).collect()
    }

    fn shape() -> Shape {
        Shape::list(T::shape(), false, false)
    }
}

/// A list with at least one entry.
pub(in crate::config) struct NonEmpty<T>(std::marker::PhantomData<T>);

impl<T: Type> Type for NonEmpty<T> {
    type Out = Vec<T::Out>;

    fn read(value: Value<'_>) -> Option<Self::Out> {
        if value.is_vacant() && value.is_list() {
            value.error("is empty", "at least one entry");
            return None;
        }
        Vec::<T>::read(value)
    }

    fn show(out: &Self::Out) -> Json {
        Vec::<T>::show(out)
    }

    fn shape() -> Shape {
        Shape::list(T::shape(), true, false)
    }
}

/// One value, or a list with at least one.
pub(in crate::config) struct OneOrMore<T>(std::marker::PhantomData<T>);

impl<T: Type> Type for OneOrMore<T> {
    type Out = Vec<T::Out>;

    fn read(value: Value<'_>) -> Option<Self::Out> {
        if value.is_list() {
            NonEmpty::<T>::read(value)
        } else {
            T::read(value).map(|one| vec![one])
        }
    }

    fn show(out: &Self::Out) -> Json {
        Vec::<T>::show(out)
    }

    fn shape() -> Shape {
        Shape::list(T::shape(), true, true)
    }
}
