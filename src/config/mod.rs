//! `strait.yaml`: how this gateway behaves. What the mesh is comes from discovery.
//!
//! [`Config::load`] gives a [`Config`] in which everything that one file can say about itself has
//! been checked, or all [`Findings`] at once. What is inside the files that it names (certificates,
//! the mesh) is checked by whoever reads those.

mod aliases;
mod auto;
mod checks;
mod crl;
mod defaults;
mod exposure;
mod headers;
mod identity;
mod layers;
mod level;
mod links;
mod listeners;
mod names;
pub mod pod;
mod read;
mod serialize;
mod sources;
#[cfg(test)]
mod tests;
mod traffic;
mod trust;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use serde::{Serialize, Serializer};

use crate::wire::sni::RouteBy;
use crate::yaml::{Document, Findings, Place};

pub use aliases::{Alias, Names, SUFFIXES};
pub use auto::{AutoExport, Selector};
use serialize::{
    account_names, human_duration, lossy_path, lossy_path_option, lossy_paths, names_only,
};

pub use crl::{Crl, CrlPolicy};
pub use identity::parse_identity;
pub use layers::Source;
pub use level::{Access, Directives};
pub use links::Link;
pub use listeners::{Line, Listener, ListenerProtocol, SniRoute, TlsRouting};
pub use names::HostPort;
pub use sources::{NamedCluster, NodeNames, unix_socket};
pub use traffic::{Distribution, RegionWeight, Traffic};
pub use trust::{Issuer, IssuerCluster, Trust, TrustDomain, UnknownIssuers};

/// Default of `admin.bind`, Istio's port: the admin pages need no password, so they must not be
/// reachable from other hosts.
pub const ADMIN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 15000);

/// Default of `metrics.bind`, Istio's port, on all addresses because Prometheus is another host.
pub const METRICS: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 15020);

/// Default of `readiness.bind`, Istio's port, on all addresses because the kubelet and load
/// balancers are other hosts.
pub const READINESS: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 15021);

/// Default of `drain.lag`: a load balancer that probes every two seconds and wants two failures
/// has taken us out after five.
pub const DRAIN_LAG: Duration = Duration::from_secs(5);

/// Default of `drain.deadline`: with the lag it stays below Kubernetes' grace period of 30 s.
pub const DRAIN_DEADLINE: Duration = Duration::from_secs(20);

/// Default of `identity.trust_domain`, Istio's.
pub const TRUST_DOMAIN: &str = "cluster.local";

/// Default of `identity.ttl`, Istio's `SECRET_TTL`. Its authority refuses to sign for longer than
/// it is allowed, rather than to sign for less (contract 4).
pub const CERTIFICATE_TTL: Duration = Duration::from_secs(24 * 60 * 60);

/// Everything that `strait.yaml` says, checked.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Config {
    /// The file that this was read from.
    #[serde(serialize_with = "lossy_path")]
    pub file: PathBuf,
    /// Where this gateway stands. Required: who is local cannot be guessed.
    pub gateway: Gateway,
    /// What this gateway shows to its peers. Required.
    pub identity: Identity,
    /// Whom this gateway talks to. Required, with at least one domain: an empty set would refuse
    /// everybody, and a set that means everybody cannot be written.
    pub trust: Trust,
    /// Where peers connect. Required, at least one: nothing is opened that was not asked for.
    pub listeners: Vec<Listener>,
    /// Where the mesh is learned from. Required.
    pub discovery: Discovery,
    /// Which services peers may reach. By default none.
    pub exposure: Exposure,
    /// Clusters that may use this gateway. By default every one that `trust` names.
    pub links: Option<Vec<Link>>,
    /// Under which names besides their hostnames services are reached. By default [`SUFFIXES`].
    pub names: Names,
    /// What is done about authorization policies. By default nothing.
    pub policy: Policy,
    /// Which endpoints are preferred. Default: what the services themselves say.
    pub traffic: Vec<Traffic>,
    /// Who is asked for the addresses of hostnames. By default the system's.
    pub dns: Dns,
    /// Which addresses may be dialled in spite of the deny list. By default none.
    pub dial: Dial,
    /// How much of this host strangers and slow readers may take. By default by the host's size.
    pub limits: Limits,
    /// Data-path threads. Default 0, one per core: the data path is what this process is for.
    pub workers: usize,
    /// The admin pages. Default [`ADMIN`].
    pub admin: Bind,
    /// Prometheus metrics. Default [`METRICS`].
    pub metrics: Binds,
    /// The readiness probe. Default [`READINESS`].
    pub readiness: Bind,
    /// How this process stops. Default [`DRAIN_LAG`] and [`DRAIN_DEADLINE`].
    pub drain: Drain,
    /// What is logged. Default `info`, as text.
    pub log: Log,
}

/// What [`Source::examine`] found out about a file.
#[derive(Debug, Default)]
pub struct Examined {
    /// The configuration; there is one exactly when no finding is an error, see also
    /// [`Source::examine_without_keys`].
    pub config: Option<Config>,
    /// What is wrong, and what is worth a look.
    pub findings: Findings,
    /// The section `identity`, if nothing is wrong with it.
    pub identity: Option<Identity>,
    /// The section `trust`, if nothing is wrong with it.
    pub trust: Option<Trust>,
    /// Where that section stands.
    pub trust_place: Option<Place>,
    /// The section `discovery`, if nothing is wrong with it.
    pub discovery: Option<Discovery>,
    /// What `exposure.files` names, if nothing is wrong with that section.
    pub objects: Vec<PathBuf>,
    /// The other files that it names, each with the place that does. They need not exist.
    pub named: Vec<(PathBuf, Place)>,
    /// Those of certificates, keys and tokens that do not exist.
    pub absent: Vec<(PathBuf, Place)>,
}

/// Where this gateway stands.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gateway {
    /// The cluster's name. Required.
    pub cluster: String,
    /// The network's name. Default: the cluster's name, as one network per cluster is the rule.
    pub network: String,
    /// Its locality. Default: that of the pod, else unknown; near are then endpoints of which it
    /// is unknown too.
    pub locality: Locality,
    /// The source of the locality.
    pub locality_origin: LocalityOrigin,
}

/// The source of the gateway's locality.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub enum LocalityOrigin {
    /// Nothing names a locality.
    #[default]
    Unknown,
    /// `gateway.locality` of the file.
    Configuration,
    /// A variable or a label of the pod. The control plane's record of the pod is better.
    Pod(String),
}

/// Where something runs; each part is empty when unknown.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Locality {
    /// The region, such as `us-east-2`.
    pub region: String,
    /// The zone, such as `us-east-2a`.
    pub zone: String,
    /// The subzone, such as a rack.
    pub subzone: String,
}

/// Where this gateway's certificate comes from.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Identity {
    /// From files, watched for change.
    Files(IdentityFiles),
    /// From Istio's certificate authority, which signs for a key of ours.
    IstioCa(IstioCa),
    /// From a SPIFFE Workload API, which has the key as well.
    Spiffe {
        /// The socket of the API. Default: what the environment says, else the one that Istio
        /// mounts.
        #[serde(serialize_with = "lossy_path_option")]
        socket: Option<PathBuf>,
    },
}

impl Identity {
    /// The word for it in `strait.yaml`.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Files(_) => "files",
            Self::IstioCa(_) => "istio-ca",
            Self::Spiffe { .. } => "spiffe",
        }
    }
}

/// A certificate that Istio's authority signs, for the identity
/// `spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/ACCOUNT`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct IstioCa {
    /// Where the authority is.
    #[serde(flatten)]
    pub plane: ControlPlane,
    /// The trust domain. Default [`TRUST_DOMAIN`].
    pub trust_domain: String,
    /// The namespace. Default: what the environment says of the pod.
    pub namespace: Option<String>,
    /// The service account. Default: what the environment says of the pod.
    pub service_account: Option<String>,
    /// For how long a certificate is asked. Default [`CERTIFICATE_TTL`].
    #[serde(serialize_with = "human_duration")]
    pub ttl: Duration,
    /// The directory that key and chain are kept in, for a start without the authority. Default:
    /// none is kept.
    #[serde(serialize_with = "lossy_path_option")]
    pub cache: Option<PathBuf>,
}

/// A certificate in files. All three are required, and relative to the file that names them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct IdentityFiles {
    /// The leaf and its intermediates, PEM.
    #[serde(serialize_with = "lossy_path")]
    pub chain: PathBuf,
    /// The leaf's private key, PEM.
    #[serde(serialize_with = "lossy_path")]
    pub key: PathBuf,
    /// The roots that peers are verified against, PEM.
    #[serde(serialize_with = "lossy_path")]
    pub roots: PathBuf,
}

/// Where the mesh is learned from.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Discovery {
    /// From a mesh file, watched for change.
    File {
        /// The file, relative to the one that names it. Required.
        #[serde(serialize_with = "lossy_path")]
        path: PathBuf,
    },
    /// From istiod: workloads and services by WDS over delta ADS.
    Istio {
        /// Where istiod is.
        #[serde(flatten)]
        plane: ControlPlane,
        /// The file that its last good state is kept in, for a start without it. Default: none is
        /// kept.
        #[serde(serialize_with = "lossy_path_option")]
        cache: Option<PathBuf>,
    },
    /// From any control plane of Envoy's: clusters and endpoints by CDS and EDS over delta ADS.
    Envoy {
        /// Where it is.
        #[serde(flatten)]
        plane: ControlPlane,
        /// As for istiod.
        #[serde(serialize_with = "lossy_path_option")]
        cache: Option<PathBuf>,
        /// Who we are to it.
        node: NodeNames,
        /// The clusters whose own names do not say which service they are. Default: none.
        clusters: Vec<NamedCluster>,
    },
}

/// A control plane that is spoken to by gRPC, over TLS unless its roots say otherwise.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ControlPlane {
    /// Its address, with a port. Required.
    pub address: HostPort,
    /// The roots that it is verified by. Required.
    pub roots: Roots,
    /// The file with our token, read anew for each call. Default: none is sent.
    #[serde(serialize_with = "lossy_path_option")]
    pub token: Option<PathBuf>,
    /// The name that its certificate has to have. Default: the host of the address.
    pub san: Option<String>,
    /// Metadata that is sent with each call besides `clusterid`, by its name in lower case: what
    /// a proxy in front of the control plane wants to see. Default: none.
    #[serde(serialize_with = "names_only")]
    pub headers: Vec<(String, String)>,
}

/// The roots that a control plane is verified by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Roots {
    /// Of a PEM file, read anew for each connection.
    File(PathBuf),
    /// Of a PEM text.
    Pem(String),
    /// Those of the system, found anew for each connection.
    System,
    /// None: there is no TLS, and whoever is at the address is believed.
    Plaintext,
}

impl fmt::Display for Roots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(file) => file.display().fmt(f),
            Self::Pem(_) => f.write_str("PEM"),
            Self::System => f.write_str("SYSTEM"),
            Self::Plaintext => f.write_str("none, by plaintext"),
        }
    }
}

impl Serialize for Roots {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// How much of this host strangers and slow readers may take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Bytes that all tunnels together may hold. Default: a quarter of what this process
    /// may use, by its cgroup or by the machine's size.
    pub buffers: Option<usize>,
}

/// Which services peers may reach through this gateway, and under which names.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Exposure {
    /// What holds for services without an entry. Default: [`DefaultExposure::None`].
    pub default: DefaultExposure,
    /// The entries. Default: none.
    pub services: Vec<ExposedService>,
    /// Files of Kubernetes objects, and directories of such. Default: none.
    #[serde(serialize_with = "lossy_paths")]
    pub files: Vec<PathBuf>,
    /// Which of the Services in them are exported besides those that say so. Default: none.
    pub auto: Vec<AutoExport>,
}

/// What holds for services without an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DefaultExposure {
    /// Nobody may reach them: what a mesh has is not what it shares.
    #[default]
    None,
    /// Every peer of the trust set may reach them.
    All,
}

/// One service that some peers may reach.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExposedService {
    /// The service; without port, all its ports. Required.
    pub service: HostPort,
    /// The namespace of the service: no other namespace can have the hostname then. Default: that
    /// of the service that answers to the hostname.
    pub namespace: Option<String>,
    /// Who may reach it: a peer that any entry admits. Default: nobody, with a warning.
    pub to: Vec<Audience>,
    /// Names that it is reached under besides its own. A name given without port has the
    /// service's port here. Default: none.
    pub names: Vec<HostPort>,
    /// Whether its workloads are reached at their addresses too. Default: no.
    pub workloads: bool,
    /// By what tunnels to it are routed; all entries of a port of a service agree. Default: as
    /// their listener does.
    #[serde(serialize_with = "exposure::word")]
    pub route_by: Option<RouteBy>,
    /// The line of the entry, for findings that only show once the mesh is known.
    #[serde(skip)]
    pub line: u64,
}

/// Peers that a service is exposed to. All keys that are given must hold; the values of a key are
/// alternatives. At least one key is given.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Audience {
    /// Every peer; no other key is given then.
    pub anyone: bool,
    /// Peers of this cluster, as `trust` names it.
    pub cluster: Option<String>,
    /// Peers of these namespaces; empty is every namespace.
    pub namespaces: Vec<String>,
    /// Peers with these service accounts (namespace, name); empty is every account.
    #[serde(serialize_with = "account_names")]
    pub service_accounts: Vec<(String, String)>,
}

/// What is done about authorization policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Policy {
    /// About Istio's. Default [`PolicyMode::Off`].
    pub istio: PolicyMode,
}

/// What is done about policies that discovery tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyMode {
    /// Nothing: Envoy as such a gateway does not look at them either.
    #[default]
    Off,
    /// What they refuse is logged and counted, and let through.
    Audit,
    /// What they refuse is refused.
    Enforce,
}

/// Who is asked for the addresses of workloads that discovery knows by a hostname.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Dns {
    /// The servers, of which any may be asked. Default: none, which is those of
    /// `/etc/resolv.conf`.
    pub servers: Vec<SocketAddr>,
}

/// Which addresses may be dialled.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Dial {
    /// Parts of the deny list (loopback, link-local, metadata) that are opened. Default: none.
    pub allow: Vec<IpNet>,
}

/// An address to serve on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Bind {
    /// The address; port 0 lets the kernel choose.
    pub bind: SocketAddr,
}

/// Addresses to serve on, one at least.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Binds {
    /// The addresses; port 0 lets the kernel choose.
    pub bind: Vec<SocketAddr>,
}

/// How this process stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Drain {
    /// How long connections are still accepted after readiness fails. Default [`DRAIN_LAG`].
    #[serde(serialize_with = "human_duration")]
    pub lag: Duration,
    /// How long tunnels may go on after that. Default [`DRAIN_DEADLINE`].
    #[serde(serialize_with = "human_duration")]
    pub deadline: Duration,
}

/// What is logged, and how.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Log {
    /// A level, or a list such as `info,strait::datapath=debug`, as [`Directives`] read it. One of
    /// the list is a level alone, as targets only would silence the rest. Default `info`, which
    /// has one line per tunnel.
    pub level: String,
    /// Default [`Access::All`].
    pub access: Access,
    /// Default [`LogFormat::Text`], as people read it before machines do.
    pub format: LogFormat,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

impl Default for Drain {
    fn default() -> Self {
        Self {
            lag: DRAIN_LAG,
            deadline: DRAIN_DEADLINE,
        }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self {
            level: "info".to_owned(),
            access: Access::default(),
            format: LogFormat::default(),
        }
    }
}

impl Config {
    /// Reads and checks a file. Warnings are dropped; [`Config::check`] has them.
    pub fn load(path: &Path) -> Result<Self, Findings> {
        let (config, findings) = Self::check(path);
        config.ok_or(findings)
    }

    /// Reads and checks a file, and gives the warnings also when it can be used. There is a
    /// configuration exactly when no finding is an error.
    pub fn check(path: &Path) -> (Option<Self>, Findings) {
        let examined = Source::file(path).examine();
        (examined.config, examined.findings)
    }

    /// As [`Config::check`], for a text that would stand in the file `path`.
    pub fn parse(path: &Path, text: &str) -> (Option<Self>, Findings) {
        match Document::parse(path, text) {
            Ok(document) => {
                let examined = read::config(&document).strict();
                (examined.config, examined.findings)
            }
            Err(findings) => (None, findings),
        }
    }

    /// The keys in which `new` differs and that are only read at the start. Listeners, trust,
    /// exposure, links, names, policy, traffic, the log's level and `log.access` apply live and
    /// are not among them.
    pub fn restart_only_changes(&self, new: &Self) -> Vec<&'static str> {
        let keys = [
            ("gateway", self.gateway != new.gateway),
            ("identity", self.identity != new.identity),
            ("discovery", self.discovery != new.discovery),
            ("dns", self.dns != new.dns),
            ("dial", self.dial != new.dial),
            ("limits", self.limits != new.limits),
            ("workers", self.workers != new.workers),
            ("admin", self.admin != new.admin),
            ("metrics", self.metrics != new.metrics),
            ("readiness", self.readiness != new.readiness),
            ("drain", self.drain != new.drain),
            ("log.format", self.log.format != new.log.format),
        ];
        keys.into_iter()
            .filter(|(_, changed)| *changed)
            .map(|(key, _)| key)
            .collect()
    }
}
