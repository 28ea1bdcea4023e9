//! Small sections: gateway, policy, DNS, dialling, limits, served addresses, drain and log.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use serde_json::json;

use super::define::{
    ByteRate, DrainTime, Hostname, LagTime, MaybeEmpty, NewFile, NonEmpty, OneOrMore, ServicePort,
    Size, TunnelTime, form, matching, percent, repeated, section, whole, words,
};
use super::level::{Access, Directives};
use super::names::HostPort;
use crate::yaml::Value;

/// Default of `admin.bind`, Istio's port: the admin pages need no password, so they must not be
/// reachable from other hosts.
pub const ADMIN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 15000);

/// Default of `metrics.bind`, Istio's port, on all addresses because Prometheus is another host.
pub const METRICS: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 15020);

/// Default of `readiness.bind`, Istio's port, on all addresses because the kubelet and load
/// balancers are other hosts.
pub const READINESS: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 15021);

/// Default of `drain.lag`: a load balancer that probes every 2 s and removes a gateway after two
/// failures has done so after 5 s.
pub const DRAIN_LAG: Duration = Duration::from_secs(5);

/// Default of `drain.deadline`: with the lag it stays below Kubernetes' grace period of 30 s.
pub const DRAIN_DEADLINE: Duration = Duration::from_secs(20);

section! {
    /// The cluster, network and locality of this gateway.
    pub struct Gateway at "gateway", check(origin) {
        /// Cluster of the gateway. With `trust.clusters` it cannot be `unknown`, the cluster of
        /// peers whose issuer has no entry.
        cluster: String = required("east");
        /// Network of the gateway. Endpoints of this network are dialled directly, those of other
        /// networks through their gateways.
        network: String = default(cluster.clone(), "the value of `gateway.cluster`");
        /// Locality, with which `traffic` and the preferences of services compare endpoints.
        /// `strait status` names the source of the locality in force.
        locality: Locality = default(
            Locality::default(),
            "with `discovery.kind: istio` that of istiod's record of the pod, else that of the \
             pod, else unknown"
        );
        /// Source of the locality.
        locality_origin: LocalityOrigin = aside(|_| LocalityOrigin::Unknown);
    }
}

section! {
    /// A region, a zone of it and a subzone; empty parts are unknown.
    pub struct Locality at "gateway.locality" or default,
        derive(Eq, PartialOrd, Ord, Hash)
    {
        /// Region, such as `us-east-2`.
        region: Arc<str> as MaybeEmpty = default(Arc::default());
        /// Zone, such as `us-east-2a`.
        zone: Arc<str> as MaybeEmpty = default(Arc::default());
        /// Subzone, such as a rack.
        subzone: Arc<str> as MaybeEmpty = default(Arc::default());
    }
}

/// Source of the gateway's locality.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LocalityOrigin {
    /// Nothing names a locality.
    Unknown,
    /// `gateway.locality` of the file.
    Configuration,
    /// A variable or a label of the pod. The control plane's record of the pod is better.
    Pod(String),
}

/// Notes the source of the locality. Values without a line are the pod's.
#[expect(clippy::unnecessary_wraps, reason = "a check may refuse what was read")]
fn origin(mut gateway: Gateway, value: Value<'_>) -> Option<Gateway> {
    let place = value.child("gateway", "locality").map(Value::place);
    gateway.locality_origin = match place {
        Some(_) if gateway.locality == Locality::default() => LocalityOrigin::Unknown,
        Some(place) if place.line == 0 => LocalityOrigin::Pod(place.to_string()),
        Some(_) => LocalityOrigin::Configuration,
        None => LocalityOrigin::Unknown,
    };
    Some(gateway)
}

section! {
    /// Enforcement of authorization policies.
    pub struct Policy at "policy" or default, derive(Copy, Eq), planned("files") {
        /// Treatment of Istio's authorization policies, from istiod or the mesh file. With
        /// `discovery.kind: envoy` and `kubernetes` there are no policies, and only `off` is
        /// accepted.
        istio: Enforcement = default(Enforcement::Off);
    }
}

words! {
    /// Treatment of authorization policies.
    pub enum Enforcement or Off {
        /// Policies are not evaluated, as in an Envoy in this place.
        Off = "off",
        /// Violations are logged and counted, and let through.
        Audit = "audit",
        /// Violations are rejected with 401, and their open tunnels are reset.
        Enforce = "enforce",
    }
}

section! {
    /// Resolution of workloads that discovery knows by a hostname, and a responder for the names
    /// of bindings.
    pub struct Dns at "dns" or default, check(check_dns) {
        /// DNS servers. An answer counts for its TTL, between 1 s and 5 min, and is refreshed at
        /// once if an address of it cannot be dialled. While lookups fail, the last good answer
        /// stays. At most 10,000 names and 64 addresses of each are kept; a namespace has at most
        /// half of the names that others leave. Names in requests of peers are never looked up.
        servers: Vec<SocketAddr> = default(Vec::new(), "those of `/etc/resolv.conf`");
        /// Address, or several, at which this gateway answers queries for `bindings[].names` over
        /// UDP and TCP. TCP has at most 64 clients, each for at most 30 s; a further one ends the
        /// oldest of the address with the most. An address, or IPv6 /64, has 2,000 answers a
        /// second. A wildcard may answer over UDP from another address than was asked.
        listen: Vec<SocketAddr> as OneOrMore<SocketAddr> = default(
            Vec::new(), "no queries are answered");
        /// Networks whose queries are answered. Those of others are refused.
        clients: Vec<IpNet> as NonEmpty<IpNet> = default(
            Vec::new(),
            "loopback, and the `clients` of all bindings; one for every address adds none");
        /// Families of names, such as `*.global`. Of a family only the names of bindings exist, and
        /// others are answered with NXDOMAIN. Queries for names outside are refused, so that a
        /// resolver has to send only those of the families here.
        families: Vec<String> as Vec<Family> = default(Vec::new());
        /// Network of VIPs, which names of bindings have whose `listen` is a wildcard. The host has
        /// to route it to itself. A VIP is derived from the name and stays the same.
        vips: IpNet = default(VIPS);
    }
}

/// Default of `dns.vips`: reserved addresses, which Istio allocates VIPs from too.
const VIPS: IpNet = IpNet::new_assert(IpAddr::V4(Ipv4Addr::new(240, 0, 0, 0)), 4);

/// Rejects networks in which names would soon share a VIP. Warns of wildcards, whose UDP answers
/// the kernel sends from the address of the route to the client.
fn check_dns(dns: Dns, value: Value<'_>) -> Option<Dns> {
    let mut listen = dns.listen.iter();
    if let Some(any) = listen.find(|address| address.ip().is_unspecified()) {
        let what = format!(
            "contains {any}: where a host has several addresses, UDP answers may come from another \
             one than was asked, and clients ignore them"
        );
        value.at("dns", "listen").warning(what, "the addresses that clients ask");
    }
    let bits = dns.vips.max_prefix_len() - dns.vips.prefix_len();
    if bits < 8 {
        let what = format!("is {}, which has fewer than 256 addresses", dns.vips);
        value.at("dns", "vips").error(what, "a larger network");
        return None;
    }
    Some(dns)
}

form! {
    /// A family of names.
    Family => String, "`*.NAME`, such as `*.global`",
        matching("^[*][.]"),
        |value, wanted| value.parsed(wanted, |text| Hostname::parse(text.strip_prefix("*.")?)),
        |family| json!(format!("*.{family}"));
}

section! {
    /// Addresses that may be dialled.
    pub struct Dial at "dial" or default, planned("try", "budget") {
        /// Networks that are removed from the deny list: loopback, link-local, multicast, metadata
        /// services (`fd00:ec2::/32` included), `240.0.0.0/4`, Teredo, and IPv6 addresses that
        /// embed one of these (IPv4-mapped, IPv4-translated, NAT64, 6to4, ISATAP). The gateway's
        /// own listeners are never dialled.
        allow: Vec<IpNet> = default(Vec::new());
        /// Time between two probes of a gateway of another network that has no connection, varied
        /// by a tenth. A probe is a TLS handshake and a PING of HTTP/2. One probe per second
        /// starts, so many gateways are probed less often.
        probe_interval: Option<Duration> as Option<TunnelTime> = default(
            None,
            "gateways are not probed: peers see each probe as a connection of this gateway"
        );
        /// Service that every gateway of another network serves. A probe also opens a tunnel to it,
        /// as this gateway itself, and closes it without a byte. A gateway that does not answer 200
        /// within 5 s is ejected, as one that fails a health check is in Envoy.
        probe_authority: Option<HostPort> as Option<ServicePort> = default(
            None,
            "a probe asks for no tunnel"
        );
    }
}

section! {
    /// Limits of resources.
    pub struct Limits at "limits" or default, derive(Eq) {
        /// Bytes that all tunnels together may hold for slow readers.
        buffers: Option<usize> as Option<Size> = default(
            None,
            "a quarter of the memory of the process, by its cgroup or the machine's size; less \
             while memory is short"
        );
        /// Age at which an HBONE connection of a peer is sent GOAWAY, so that its next tunnels use
        /// a new connection, which another replica may accept. Open tunnels continue. The age
        /// varies by a tenth; at most a hundredth of the connections, or one, retires per second,
        /// and two of each peer.
        connection_age: Option<Duration> as Option<TunnelTime> = default(
            None,
            "connections do not age"
        );
        /// Load of a worker, in percent of the mean of all workers, above which it retires HBONE
        /// connections of peers, as those that reach `connection_age`, until it is not. The load is
        /// the number of connections and tunnels, by which workers get new connections. Connections
        /// are examined every 10 s.
        worker_load: Option<u32> as Option<MeanPercent> = default(
            None,
            "connections stay on their workers: clients may fail requests after GOAWAY"
        );
        /// Clusters with more or less of the workers' time than others while time is short, or with
        /// a limit of bytes.
        clusters: Vec<ClusterLimits> = default(Vec::new());
    }
}

section! {
    /// Limits of a cluster. Clusters that need more time than there is get it by their weights, and
    /// the identities of a cluster get equal parts.
    pub struct ClusterLimits at "limits.clusters[]", derive(Eq),
        compare(|_, read| repeated(read, |one| one.name.clone()))
    {
        /// Name of the cluster.
        name: String = required("west");
        /// Weight. That of a cluster without an entry is 10.
        weight: u32 as TimeWeight = default(10);
        /// Bytes per second of its tunnels on HBONE listeners, both directions together. Beyond
        /// them the tunnels of a connection pause, for at most 10 s at a time; nothing is reset.
        bytes: Option<u32> as Option<ByteRate> = default(None, "no limit");
    }
}

form! {
    /// Percentage of a mean.
    MeanPercent => u32, "a whole percentage from 110% to 1000%, such as `150%`",
        matching("^0*[1-9][0-9]{2,3}%$"),
        |value, wanted| percent(value, wanted, 110..=1000),
        |percent| json!(format!("{percent}%"));
}

form! {
    /// Weight of a cluster.
    TimeWeight => u32, "a whole number from 1 to 100", whole(1_u32, 100_u32),
        |value, _| value.number(1, 100), |weight| json!(weight);
}

section! {
    /// Admin pages.
    pub struct Admin at "admin" or default, derive(Copy, Eq) {
        /// Address, on loopback only: the pages have no password. With port 0 the kernel chooses.
        bind: SocketAddr = default(ADMIN);
    }
}

section! {
    /// Prometheus metrics.
    pub struct Metrics at "metrics" or default, derive(Eq) {
        /// Address, or several.
        bind: Vec<SocketAddr> as OneOrMore<SocketAddr> = default(vec![METRICS]);
    }
}

section! {
    /// Readiness probe.
    pub struct Readiness at "readiness" or default, derive(Copy, Eq) {
        /// Address of the probe.
        bind: SocketAddr = default(READINESS);
    }
}

section! {
    /// Termination of the process.
    pub struct Drain at "drain" or default, derive(Eq) {
        /// Time for which connections are still accepted after readiness fails.
        lag: Duration as LagTime = default(DRAIN_LAG);
        /// Time for which open tunnels continue after that.
        deadline: Duration as DrainTime = default(DRAIN_DEADLINE);
        /// File that keeps the orders of `strait drain --persist` over restarts.
        file: Option<PathBuf> as Option<NewFile> = default(None, "nothing is stored");
    }
}

section! {
    /// The log and the access log.
    pub struct Log at "log" or default {
        /// Level, or a list such as `info,strait::datapath=debug`. A list has one level without
        /// target, for all targets that it does not name.
        level: String as Level = default("info".to_owned());
        /// Tunnels with a line in the access log.
        access: Access = default(Access::All);
        /// Format of the lines.
        format: LogFormat = default(LogFormat::Text);
    }
}

words! {
    /// Format of log lines.
    pub enum LogFormat {
        /// Text for people.
        Text = "text",
        /// One JSON object in each line.
        Json = "json",
    }
}

form! {
    /// The level of the log.
    Level => String,
        "a level (`off`, `error`, `warn`, `info`, `debug`, `trace`) or a list such as \
         `info,strait::datapath=debug`",
        "string", level, |level| json!(level);
}

fn level(value: Value<'_>, wanted: &str) -> Option<String> {
    let read = value.parsed(wanted, |text| Directives::parse(text).ok())?;
    if !read.has_default {
        let what = format!("is `{}`, which silences everything else", read.text);
        value.error(what, format!("`info,{}`", read.text));
        return None;
    }
    Some(read.text)
}
