//! `strait.yaml`: the behaviour of this gateway. The mesh comes from discovery.
//!
//! [`Source::examine`] returns a [`Config`] that is checked as far as one file allows, or all
//! findings at once. The contents of the files that it names (certificates, the mesh) are checked
//! by their readers. Keys are defined by `section!`, from which the reader, the JSON Schema and
//! `docs/configuration.md` come.
#![warn(missing_docs)]

mod aliases;
pub mod arguments;
mod audience;
mod auto;
mod bindings;
mod checks;
mod define;
mod discovery;
mod exposure;
mod identity;
mod layers;
mod level;
mod line;
mod links;
mod listeners;
mod names;
mod networks;
pub mod pod;
pub mod reference;
mod sections;
mod subsets;
#[cfg(test)]
mod tests;
mod traffic;
mod transit;
mod trust;
mod vips;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use ipnet::IpNet;

use crate::yaml::{Document, Fields, Findings, Place, Value};

pub use aliases::{Alias, Names, SUFFIXES};
pub use audience::Audience;
pub use auto::{AutoExport, Selector};
pub use bindings::{Binding, ExpectedWorkloads, Inner, ObjectBindings};
use define::{NewFile, NonEmpty, Workers, section};
pub use discovery::{
    ControlPlane, Discovery, EnvoySource, KubernetesApi, MeshFile, NamedCluster, NodeNames, Roots,
    Tls, XdsSource,
};
pub use exposure::{DefaultExposure, ExposedService, Exposure, ServiceLimits};
pub use identity::{
    CERTIFICATE_TTL, Identity, IdentityFiles, IstioCa, TRUST_DOMAIN, WorkloadApi, parse_identity,
    unix_socket,
};
pub use layers::Source;
pub use level::{Access, Directives};
pub use line::Line;
pub use links::{Link, LinkBudget};
pub use listeners::{Listener, ListenerProtocol, SniRoute, TlsRouting};
pub use names::HostPort;
pub use networks::Network;
pub use sections::{
    ADMIN, Admin, ClusterLimits, DRAIN_DEADLINE, DRAIN_LAG, Dial, Dns, Drain, Enforcement, Gateway,
    Limits, Locality, LocalityOrigin, Log, LogFormat, METRICS, Metrics, Policy, READINESS,
    Readiness,
};
pub use subsets::{ServiceSubset, SubsetShare};
pub use traffic::{Distribution, ProxyProtocol, RegionWeight, TrafficRule};
pub use transit::TransitRule;
pub use trust::{
    Crl, CrlPolicy, Issuer, IssuerCluster, Trust, TrustDomain, UnknownIssuers, VERIFY_DEPTH,
};
pub use vips::{vip, vip_count};

section! {
    /// All of `strait.yaml`, checked.
    pub struct Config at "" parts Sections {
        /// The file or directory.
        file: PathBuf as NewFile = fact(|fields: &Fields<'_>| fields.file().to_owned());
        /// Cluster, network and locality of the gateway.
        gateway: Gateway = required("{cluster: east}");
        /// Source of the gateway's certificate. Issued certificates are renewed while the gateway
        /// runs, for new handshakes only. Listeners open with the first certificate.
        identity: Identity = required(
            "{kind: files, chain: certs/gateway.crt, key: certs/gateway.key, roots: \
             certs/root.crt}"
        );
        /// Trust in peers.
        trust: Trust = required("{domains: [{name: east.local}]}");
        /// Addresses on which peers connect.
        listeners: Vec<Listener> as NonEmpty<Listener> = required(
            "[{name: cross-network, bind: \"[::]:15008\"}]");
        /// Source of the mesh.
        discovery: Discovery = required("{kind: file, path: mesh.yaml}");
        /// Services that peers may reach.
        exposure: Exposure = nested();
        /// Links between clusters. With this key only peers of clusters with a link to
        /// `gateway.cluster`, and those of that cluster, may use this gateway; for others every
        /// service is unknown. The list may have the links of all clusters and be the same
        /// everywhere. `strait check` warns if no link leads to this gateway's cluster. Clients of
        /// TLS listeners have no cluster: restrict them by `listeners[].sources`.
        links: Option<Vec<Link>> = default(
            None, "peers of every cluster that `trust` names may use this gateway");
        /// Names of services besides their hostnames.
        names: Names = nested();
        /// Enforcement of authorization policies.
        policy: Policy = nested();
        /// Preferred endpoints and weights of regions.
        traffic: Vec<TrafficRule> = default(Vec::new());
        /// Gateways of other networks, besides those of the mesh.
        networks: Vec<Network> = default(Vec::new());
        /// Services of other clusters, for local clients.
        bindings: Vec<Binding> = default(Vec::new());
        /// Resolution of hostnames, and the responder for local clients.
        dns: Dns = nested();
        /// Addresses that may be dialled.
        dial: Dial = nested();
        /// Limits of resources.
        limits: Limits = nested();
        /// Number of data-path threads. 0 is one for each core.
        workers: usize as Workers = default(0);
        /// Admin pages.
        admin: Admin = nested();
        /// Prometheus metrics.
        metrics: Metrics = nested();
        /// Readiness probe.
        readiness: Readiness = nested();
        /// Termination of the process.
        drain: Drain = nested();
        /// The log and the access log.
        log: Log = nested();
    }
}

/// Outcome of [`Source::examine`].
#[derive(Clone, Debug, Default)]
pub struct Examined {
    /// The configuration; there is one exactly when no finding is an error, see also
    /// [`Source::examine_without_keys`].
    pub config: Option<Config>,
    /// Errors and warnings.
    pub findings: Findings,
    /// The section `identity`, if it is readable.
    pub identity: Option<Identity>,
    /// The section `trust`, if it is readable.
    pub trust: Option<Trust>,
    /// Place of that section.
    pub trust_place: Place,
    /// The section `discovery`, if it is readable.
    pub discovery: Option<Discovery>,
    /// The paths of `exposure.files`, if that section is readable.
    pub objects: Vec<PathBuf>,
    /// The files that the configuration names, each with its place. They need not exist.
    pub named: Vec<(PathBuf, Place)>,
    /// Those of certificates, keys and tokens that do not exist.
    pub absent: Vec<(PathBuf, Place)>,
}

impl Examined {
    /// Reads and checks a document. There is a configuration exactly when no finding is an error,
    /// except for absent files of certificates, keys and tokens.
    fn of(document: &Document) -> Self {
        let report = document.report();
        let root = Value::of_document(document, &report);
        let fields = Fields::of_document(document, &report, "gateway: {cluster: east}");
        let sections = fields.map(|mut fields| {
            fields.later(&["tracing"]);
            let sections = Sections::read(&mut fields);
            drop(fields);
            sections.check(root, &report);
            sections
        });
        let trust_place = root.find("trust").first().map(|trust| trust.place()).unwrap_or_default();
        let (named, absent) = (report.named(), report.absent());
        let findings = report.into_findings();
        let Some(sections) = sections else {
            return Self { findings, ..Self::default() };
        };
        Self {
            identity: sections.identity.clone(),
            trust: sections.trust.clone(),
            trust_place,
            discovery: sections.discovery.clone(),
            objects: sections.exposure.iter().flat_map(|one| one.files.clone()).collect(),
            config: sections.complete().filter(|_| !findings.has_errors()),
            named,
            absent,
            findings,
        }
    }
}

impl Config {
    /// Returns the API server whose objects are watched, if there is one.
    pub fn kubernetes(&self) -> Option<&KubernetesApi> {
        match &self.discovery {
            Discovery::Kubernetes(api) => Some(api),
            _ => self.exposure.kubernetes.as_ref(),
        }
    }

    /// Returns the networks whose queries the DNS responder answers.
    pub fn dns_clients(&self) -> Vec<IpNet> {
        if !self.dns.clients.is_empty() {
            return self.dns.clients.clone();
        }
        let of_bindings = self.bindings.iter().flat_map(|binding| &binding.clients);
        let of_bindings = of_bindings.filter(|net| net.prefix_len() > 0).copied();
        bindings::loopback().into_iter().chain(of_bindings).collect()
    }

    /// Reads and checks a text as the contents of `path`. There is a configuration exactly when no
    /// finding is an error.
    pub fn parse(path: &Path, text: &str) -> (Option<Self>, Findings) {
        match Document::parse(path, text) {
            Ok(document) => {
                let examined = Examined::of(&document).strict();
                (examined.config, examined.findings)
            }
            Err(findings) => (None, findings),
        }
    }

    /// Returns the listeners of the data path: those for peers, then those of bindings.
    pub fn all_listeners(&self) -> Vec<Listener> {
        let bindings = self.bindings.iter().map(Listener::from);
        self.listeners.iter().cloned().chain(bindings).collect()
    }

    /// Returns the names of the clusters that peers may belong to; none where any name may be one.
    pub fn cluster_names(&self) -> Option<BTreeSet<String>> {
        self.trust.cluster_names()
    }

    /// Returns whether an address cannot be bound beside those of the configuration.
    pub fn is_occupied(&self, address: SocketAddr) -> bool {
        let own = [self.admin.bind, self.readiness.bind];
        let others = self.metrics.bind.iter().chain(&self.dns.listen).copied();
        let listeners = self.all_listeners().into_iter().map(|one| one.bind);
        let mut all = listeners.chain(own).chain(others);
        all.any(|other| checks::addresses_overlap(address, other))
    }

    /// Gives `new` the values of this configuration for the keys that only a restart applies, and
    /// returns those that differed. Listeners, trust, exposure, links, names, policy, traffic,
    /// networks, bindings, probes of `dial`, `log.level` and `log.access` apply live.
    pub fn keep_restart_only(&self, new: &mut Self) -> Vec<&'static str> {
        fn differed<T: Clone + PartialEq>(old: &T, new: &mut T) -> bool {
            let differed = old != new;
            new.clone_from(old);
            differed
        }
        let keys = [
            ("gateway", differed(&self.gateway, &mut new.gateway)),
            ("identity", differed(&self.identity, &mut new.identity)),
            ("discovery", differed(&self.discovery, &mut new.discovery)),
            ("exposure.kubernetes", {
                let (old, new) = (&self.exposure.kubernetes, &mut new.exposure.kubernetes);
                differed(old, new)
            }),
            ("dns", differed(&self.dns, &mut new.dns)),
            ("dial.allow", differed(&self.dial.allow, &mut new.dial.allow)),
            ("limits", differed(&self.limits, &mut new.limits)),
            ("workers", differed(&self.workers, &mut new.workers)),
            ("admin", differed(&self.admin, &mut new.admin)),
            ("metrics", differed(&self.metrics, &mut new.metrics)),
            ("readiness", differed(&self.readiness, &mut new.readiness)),
            ("drain", differed(&self.drain, &mut new.drain)),
            ("log.format", differed(&self.log.format, &mut new.log.format)),
        ];
        keys.into_iter().filter(|(_, differed)| *differed).map(|(key, _)| key).collect()
    }
}
