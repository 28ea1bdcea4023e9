//! Merge of the entries that objects describe into a configuration.
//!
//! Entries of the configuration come first: a service, a name or an address that they have is not
//! given to an object.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;

use super::entries::{BoundService, is_own};
use super::shares::Shares;
use super::{Objects, limit_findings};
use crate::config::{Config, ExposedService, Line, ObjectBindings, vip};
use crate::yaml::{Finding, Findings, Severity};

/// Limit of the bindings of objects. Each has a socket.
const BINDINGS_MAX: usize = 256;

/// Service of one binding in each of its clusters; there is at least one.
type Donors<'a> = Vec<&'a BoundService>;

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

    /// Reports each service of a binding.
    fn refuse_all(&mut self, donors: &[&BoundService], what: &str, how: &str) {
        for one in donors {
            self.refuse(&one.line, what.to_owned(), how);
        }
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
        let Some(template) = self.own.exposure.bindings.as_ref() else {
            for one in bound {
                let what = format!("no binding of {} is opened", one.service);
                let how = "`exposure: {bindings: {addresses: NETWORK}}`";
                self.findings.push(Finding::warning(&one.line.0, what, how));
            }
            return;
        };
        let (mut donors, mut shares) = (Vec::<Donors<'_>>::new(), Shares::new(BINDINGS_MAX));
        for one in bound {
            match self.check_binding(one, &mut donors) {
                Ok(Some(known)) => known.push(one),
                Ok(None) => {
                    donors.push(vec![one]);
                    let namespace = Arc::clone(&one.namespace);
                    self.names.insert(one.name.clone(), Arc::clone(&namespace));
                    if let Some(most) = shares.take(namespace) {
                        let newest = donors.iter().rposition(|of| of[0].namespace == most);
                        let what = format!(
                            "objects have more than {BINDINGS_MAX} bindings, and namespace {most} \
                             has the most of them"
                        );
                        let removed = newest.map(|newest| donors.remove(newest));
                        self.refuse_all(
                            &removed.unwrap_or_default(),
                            &what,
                            "the others into `bindings`",
                        );
                    }
                }
                Err((what, how)) => self.refuse(&one.line, what, how),
            }
        }
        self.open_all(&donors, template);
    }

    /// Adds bindings at free addresses of the template's network.
    fn open_all(&mut self, bindings: &[Donors<'_>], template: &ObjectBindings) {
        let addresses = addresses(bindings, template.addresses);
        for donors in bindings {
            let (one, name) = (donors[0], &donors[0].name);
            let listen = addresses.get(name.as_str()).map(|ip| {
                let port = one.service.port.unwrap_or_default();
                SocketAddr::new(*ip, port)
            });
            match listen.filter(|listen| !self.config.is_occupied(*listen)) {
                Some(listen) => {
                    let clusters = donors.iter().map(|donor| donor.cluster.clone()).collect();
                    let service = (clusters, one.service.clone());
                    let local = (name.clone(), listen);
                    let binding = template.binding(service, local, one.line.clone());
                    self.config.bindings.push(binding);
                }
                None => {
                    let what = format!("{name} has no free address for port {}", one.service);
                    let how = "a larger network into `exposure.bindings.addresses`";
                    self.refuse_all(donors, &what, how);
                }
            }
        }
    }

    /// Returns the binding of which a service is another donor; none if it needs a new one.
    ///
    /// # Errors
    /// The mistake, and its remedy.
    fn check_binding<'d, 'b>(
        &self,
        one: &BoundService,
        bindings: &'d mut [Donors<'b>],
    ) -> Result<Option<&'d mut Donors<'b>>, (String, &'static str)> {
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
        let mut own = self.own.bindings.iter();
        let own = own.find(|own| own.names.contains(name));
        let same_name = || {
            bindings
                .iter()
                .map(|of| of[0])
                .filter(|of| of.name == *name)
        };
        let other = same_name().find(|other| other.service.host != service.host);
        if let Some(line) = own.map(|own| &own.line).or(other.map(|other| &other.line)) {
            let what = format!("the local name {name} is that of {line}");
            return Err((what, "another `alias`"));
        }
        let mut known = bindings.iter_mut();
        let known = known.find(|of| of[0].name == *name && of[0].service == *service);
        if let Some(donors) = &known
            && donors.iter().any(|donor| donor.cluster == *cluster)
        {
            let what = format!("{service} of {cluster} is given twice");
            return Err((what, "it once"));
        }
        Ok(known)
    }
}

/// Returns the addresses of the local names of bindings, in turns of their namespaces: the names of
/// one do not use up a small network.
fn addresses<'a>(bindings: &[Donors<'a>], network: IpNet) -> BTreeMap<&'a str, IpAddr> {
    let names = bindings.iter().map(|of| (&of[0].namespace, &*of[0].name));
    let names: BTreeSet<_> = names.collect();
    let mut turns = BTreeMap::<_, usize>::new();
    let names = names.into_iter().map(|(namespace, name)| {
        let turn = turns.entry(namespace).or_default();
        *turn += 1;
        (*turn, name)
    });
    let names: BTreeSet<_> = names.collect();
    let is_one = network.prefix_len() == network.max_prefix_len();
    let only = is_one.then_some(network.addr());
    let mut taken = BTreeSet::new();
    let address = |(_, name)| Some((name, only.or_else(|| vip(network, name, &mut taken))?));
    names.into_iter().filter_map(address).collect()
}
