//! Merge of the entries that objects describe into a configuration.
//!
//! Entries of the configuration come first: a service, a name or an address that they have is not
//! given to an object.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::entries::{BoundService, is_own};
use super::{Objects, limit_findings};
use crate::config::{Config, ExposedService, Line, vip};
use crate::yaml::{Finding, Findings, Severity};

/// Limit of the bindings of objects. Each has a socket.
const BINDINGS_MAX: usize = 256;

/// Returns the configuration with the exposed services and bindings of the objects of its cluster,
/// and the findings about those that have no effect.
pub fn merge(config: &Config, objects: &Objects) -> (Config, Findings) {
    let mut merger = Merger {
        own: config,
        clusters: config.cluster_names(),
        config: config.clone(),
        names: BTreeMap::new(),
        findings: Vec::new(),
    };
    let entries = &objects.entries;
    for (owner, service) in &entries.services {
        if is_own(owner, config) {
            merger.expose(service.clone());
        }
    }
    let bound = entries
        .bound
        .iter()
        .filter(|(owner, _)| is_own(owner, config));
    let bound: Vec<_> = bound.map(|(_, one)| one).collect();
    merger.bind_all(&bound);
    (merger.config, Findings(limit_findings(merger.findings)))
}

struct Merger<'a> {
    /// Configuration without the objects.
    own: &'a Config,
    clusters: Option<BTreeSet<String>>,
    config: Config,
    /// Namespaces of the objects that have given a local name, by the name.
    names: BTreeMap<String, Arc<str>>,
    findings: Vec<Finding>,
}

impl Merger<'_> {
    /// Reports an entry, or a part of one, that is not used.
    fn refuse(&mut self, line: &Line, what: String, how: &str) {
        self.findings.push(Finding {
            severity: Severity::PassedOver,
            ..Finding::warning(&line.0, what, how)
        });
    }

    /// Adds an exposed service.
    fn expose(&mut self, mut entry: ExposedService) {
        let family = self.own.names.family(&entry.service.host).to_owned();
        let own = self.own.exposure.services.iter().find(|own| {
            let ports = own.service.port.zip(entry.service.port);
            self.own.names.family(&own.service.host) == family
                && ports.is_none_or(|(one, other)| one == other)
        });
        if let Some(own) = own {
            let what = format!(
                "{} has an entry on {}, which counts alone",
                entry.service, own.line
            );
            let warning = Finding::warning(&entry.line.0, what, "one of both");
            return self.findings.push(warning);
        }
        let line = entry.line.clone();
        if let Some(clusters) = self.clusters.clone() {
            let (known, unknown): (Vec<_>, Vec<_>) = entry.to.into_iter().partition(|to| {
                let mut cluster = to.cluster.iter();
                cluster.all(|cluster| clusters.contains(cluster))
            });
            entry.to = known;
            for cluster in unknown.into_iter().filter_map(|to| to.cluster) {
                let what = format!("{cluster} is not a cluster of `trust`");
                self.refuse(&line, what, "one that it names");
            }
        }
        if let Some(name) = entry.names.first().cloned()
            && !self.may_be_alias(&name.host, &entry)
        {
            entry.names.clear();
            let what = format!("the alias {} may be another service", name.host);
            self.refuse(
                &line,
                what,
                "the name of none in this namespace, or `NAME.global`",
            );
        }
        self.config.exposure.services.push(entry);
    }

    /// Returns whether a name cannot be that of another service. It belongs to a family, and names
    /// no other namespace, whose service it would hide.
    fn may_be_alias(&self, name: &str, entry: &ExposedService) -> bool {
        self.may_be_name(name, entry.namespace.as_deref())
            && !self.is_other_service(name, &entry.service.host)
    }

    /// Returns whether an object of this namespace may give a name: one of a family, which names no
    /// other namespace.
    fn may_be_name(&self, name: &str, namespace: Option<&str>) -> bool {
        let family = self.own.names.family(name);
        let named = family.split_once('.').map(|(_, namespace)| namespace);
        family != name && named.is_none_or(|of| namespace == Some(of))
    }

    /// Returns whether the configuration gives a name to another service than this one.
    fn is_other_service(&self, name: &str, service: &str) -> bool {
        let mut exposed = self.config.exposure.services.iter();
        let mut aliases = self.own.names.aliases.iter();
        exposed.any(|other| {
            let mut names = other.names.iter();
            other.service.host != service
                && (other.service.host == name || names.any(|own| own.host == name))
        }) || aliases.any(|alias| alias.name.host == name)
    }

    /// Adds the bindings of services, if the configuration has addresses for them.
    fn bind_all(&mut self, bound: &[&BoundService]) {
        let Some(template) = self.own.exposure.bindings.clone() else {
            for one in bound {
                let what = format!("no binding of {} is opened", one.service);
                let how = "`exposure: {bindings: {addresses: NETWORK}}`";
                self.findings.push(Finding::warning(&one.line.0, what, how));
            }
            return;
        };
        let network = template.addresses;
        let mut taken = BTreeSet::new();
        let names: BTreeSet<_> = bound.iter().map(|one| one.name.as_str()).collect();
        let address = |name| {
            let is_one = network.prefix_len() == network.max_prefix_len();
            let only = is_one.then_some(network.addr());
            Some((name, only.or_else(|| vip(network, name, &mut taken))?))
        };
        let addresses: BTreeMap<&str, IpAddr> = names.into_iter().filter_map(address).collect();
        for one in bound {
            let port = one.service.port.unwrap_or_default();
            let listen = addresses.get(one.name.as_str());
            let listen = listen.map(|ip| SocketAddr::new(*ip, port));
            match self.check_binding(one, listen) {
                Ok(Place::Donor(index)) => {
                    let donors = self.config.bindings.get_mut(index);
                    donors
                        .into_iter()
                        .for_each(|of| of.cluster.push(one.cluster.clone()));
                }
                Ok(Place::New(listen)) => {
                    let service = (one.cluster.clone(), one.service.clone());
                    let local = (one.name.clone(), listen);
                    let binding = template.binding(service, local, one.line.clone());
                    self.config.bindings.push(binding);
                    let namespace = Arc::clone(&one.namespace);
                    self.names.insert(one.name.clone(), namespace);
                }
                Err((what, how)) => self.refuse(&one.line, what, how),
            }
        }
    }

    /// Returns the place of a service among the bindings, or the mistake and its remedy.
    fn check_binding(
        &self,
        one: &BoundService,
        listen: Option<SocketAddr>,
    ) -> Result<Place, (String, &'static str)> {
        let BoundService {
            cluster,
            service,
            name,
            namespace,
            ..
        } = one;
        if !self.may_be_name(name, Some(namespace)) {
            let what = format!("the local name {name} may be another service");
            let how = "an `alias` that is the name of none in this namespace, or `NAME.global`";
            return Err((what, how));
        }
        let mut owner = self.names.get(name).into_iter();
        if let Some(other) = owner.find(|other| *other != namespace) {
            let what = format!("the local name {name} is that of an object in {other}");
            return Err((what, "another `alias`"));
        }
        if self
            .clusters
            .as_ref()
            .is_some_and(|known| !known.contains(cluster))
        {
            let what = format!("{cluster} is not a cluster of `trust`");
            return Err((what, "one that it names"));
        }
        if *cluster == self.own.gateway.cluster {
            let what = format!("{cluster} is the cluster of this gateway");
            return Err((what, "another cluster"));
        }
        let own = self.own.bindings.len();
        let bindings = self.config.bindings.iter().enumerate();
        for (index, other) in bindings.filter(|(_, other)| other.names.contains(name)) {
            if index < own || other.service.host != service.host {
                let what = format!("the local name {name} is that of {}", other.line);
                return Err((what, "another `alias`"));
            }
            if other.service == *service {
                let donor = Place::Donor(index);
                let is_new = !other.cluster.contains(cluster);
                let twice = || (format!("{service} of {cluster} is given twice"), "it once");
                return is_new.then_some(donor).ok_or_else(twice);
            }
        }
        if self.config.bindings.len() >= own + BINDINGS_MAX {
            let what = format!("there are more than {BINDINGS_MAX} bindings");
            return Err((what, "the others into `bindings`"));
        }
        match listen.filter(|listen| !self.config.is_occupied(*listen)) {
            Some(listen) => Ok(Place::New(listen)),
            None => {
                let what = format!("{name} has no free address for port {service}");
                Err((what, "a larger network into `exposure.bindings.addresses`"))
            }
        }
    }
}

/// Place of a service among the bindings.
enum Place {
    /// Another cluster of this binding.
    Donor(usize),
    /// A new binding at this address.
    New(SocketAddr),
}
