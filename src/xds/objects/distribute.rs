//! Merge of the distributions that objects describe into a configuration.
//!
//! An entry that is unusable never displaces another one: the name has to be that of a service of
//! the object's namespace, or of an alias of several services of which one is, and weights have to
//! leave an endpoint.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::entries::by_age;
use super::limited::LimitedFindings;
use super::merge::namespaces_of_hosts;
use super::shares::limit;
use super::{Objects, refusal};
use crate::config::{Alias, Config, Discovery, Distribution, Line, TrafficRule};
use crate::snapshot::ExposureTable;
use crate::snapshot::mesh::{Locality, Mesh, UNKNOWN_NAMESPACE};
use crate::xds::envoy::namespace_of_host;
use crate::yaml::{Finding, Findings};

/// Limit of the entries of `traffic` that objects describe: 16 times the bindings, as an entry has
/// no socket.
const DISTRIBUTIONS_MAX: usize = 4096;

/// Adds the distributions of the objects of the own cluster to a configuration. Returns the
/// findings about those that have no effect. `mesh` is the joined mesh, if it comes from files.
pub fn distribute(config: &mut Config, objects: &Objects, mesh: Option<&Mesh>) -> Findings {
    let objects = by_age(&objects.entries, config);
    let entries: Vec<_> = objects.iter().flat_map(|of| &of.traffic).collect();
    if entries.is_empty() {
        return Findings::default();
    }
    let mut distributor = Distributor {
        exposed: ExposureTable::of(config),
        config,
        mesh: mesh.map(MeshIndex::new),
        known: HashMap::new(),
        findings: LimitedFindings::default(),
    };
    config.traffic.iter().for_each(|one| distributor.note(one));
    let mut added = Vec::new();
    for traffic in entries {
        match distributor.distribution(traffic) {
            Ok(one) => added.extend(one),
            Err(refused) => distributor.refuse(traffic, refused),
        }
    }
    let (added, beyond) = limit(added, DISTRIBUTIONS_MAX, namespace_of);
    for one in &beyond {
        let what = format!(
            "objects have more than {DISTRIBUTIONS_MAX} distributions, and namespace {} has the \
             most of them",
            namespace_of(one)
        );
        distributor.refuse(one, (what, "the others into `traffic`"));
    }
    let findings = Findings(distributor.findings.into_vec());
    config.traffic.extend(added);
    findings
}

/// Namespace to which an entry is limited, if it is, and its line.
type KnownEntry = (Option<Arc<str>>, Line);

struct Distributor<'a> {
    config: &'a Config,
    exposed: ExposureTable,
    mesh: Option<MeshIndex<'a>>,
    /// Entries of each service, by the namespace to which they are limited.
    known: HashMap<String, Vec<KnownEntry>>,
    findings: LimitedFindings,
}

/// Mesh of files, by what distributions are compared with.
struct MeshIndex<'a> {
    /// Namespaces of the services of a hostname.
    owners: HashMap<&'a str, Vec<&'a str>>,
    /// Localities of the workloads of a service, by `namespace/hostname`.
    localities: HashMap<&'a str, HashSet<&'a Locality>>,
}

/// Mistake, and its remedy.
type Refusal = (String, &'static str);

/// Returns the namespace of an object's distribution.
fn namespace_of(traffic: &TrafficRule) -> Arc<str> {
    traffic.namespace.clone().unwrap_or_default()
}

impl Distributor<'_> {
    /// Records an entry, beside which others of its service are not used.
    fn note(&mut self, entry: &TrafficRule) {
        let service = entry.service.clone().unwrap_or_default();
        let of_service = self.known.entry(service).or_default();
        of_service.push((entry.namespace.clone(), entry.line.clone()));
    }

    fn refuse(&mut self, traffic: &TrafficRule, (what, how): Refusal) {
        self.findings.push(refusal(&namespace_of(traffic), &traffic.line, what, how));
    }

    /// Returns the distribution of a name, under the hostname of its service; none if that has one.
    /// Only services of the object's namespace use it. A namespace that only a control plane has is
    /// compared by [`Traffic`](crate::snapshot::traffic::Traffic).
    fn distribution(&mut self, traffic: &TrafficRule) -> Result<Option<TrafficRule>, Refusal> {
        let name = traffic.service.clone().unwrap_or_default();
        let namespace = traffic.namespace.as_deref().unwrap_or_default();
        let (service, behind) = self.services_of(&name, namespace);
        let all = match &behind[..] {
            [one] => {
                self.check_namespace(namespace, one)?;
                vec![namespace]
            }
            several => self.alias_namespaces(&name, namespace, several)?,
        };
        self.check_weights(traffic, &all, &behind)?;
        let alias_namespaces = all.iter().filter(|of| **of != namespace);
        let alias_namespaces: Vec<Arc<str>> = alias_namespaces.map(|of| (*of).into()).collect();
        let is_its = |of: &Option<Arc<str>>| of.as_deref().is_none_or(|of| all.contains(&of));
        let mut others = self.known.get(&service).into_iter().flatten();
        if let Some((_, line)) = others.find(|(of, _)| is_its(of)) {
            let what = format!("{service} has an entry on {line}, which counts alone");
            let warning = Finding::warning(&traffic.line.0, what, "one of both");
            self.findings.push(warning.of(namespace));
            return Ok(None);
        }
        let at = &self.config.gateway.locality;
        let is_unknown = at.region.is_empty() || at.zone.is_empty();
        let is_later = matches!(self.config.discovery, Discovery::Istio(_));
        if traffic.distribution == Some(Distribution::Close) && is_unknown && !is_later {
            let what = "TOPOLOGY needs the gateway's locality".to_owned();
            let how = "`gateway: {locality: {region: REGION, zone: ZONE}}`";
            let warning = Finding::warning(&traffic.line.0, what, how);
            self.findings.push(warning.of(namespace));
        }
        let distribution =
            TrafficRule { service: Some(service), alias_namespaces, ..traffic.clone() };
        self.note(&distribution);
        Ok(Some(distribution))
    }

    /// Returns the hostname under which a name is balanced, and those of the services behind it. A
    /// name of `exposure` or an alias has the hostname of its service. An alias of several
    /// services, or of one region, has its own name. A name that objects of another namespace give
    /// is that of a service of the mesh.
    fn services_of(&self, name: &str, namespace: &str) -> (String, Vec<String>) {
        let of_object = self.exposed.namespace_of_alias(name);
        let may_use = of_object.is_none_or(|of| of == namespace);
        let exposed = self.exposed.hosts_with_alias(name).next().filter(|_| may_use);
        let aliases = self.config.names.aliases.iter();
        let aliases = aliases.filter(|alias| alias.name.host == name);
        let is_plain = |alias: &&Alias| alias.to.len() == 1 && alias.region.is_none();
        let plain = aliases.clone().find(is_plain);
        let plain = plain.and_then(|alias| alias.to.first());
        match exposed.or_else(|| plain.map(|target| &*target.host)) {
            Some(host) => (host.to_owned(), vec![host.to_owned()]),
            None => {
                let several = aliases.flat_map(|alias| &alias.to);
                let several: Vec<_> = several.map(|to| to.host.clone()).collect();
                let own = || vec![name.to_owned()];
                let behind = Some(several).filter(|all| !all.is_empty());
                (name.to_owned(), behind.unwrap_or_else(own))
            }
        }
    }

    /// Rejects a service of another namespace.
    fn check_namespace(&self, namespace: &str, host: &str) -> Result<(), Refusal> {
        self.check_known(host)?;
        if self.namespace_of(host).is_some_and(|of| of != namespace) {
            return Err(foreign(host, namespace));
        }
        let owners = self.owners(host);
        if owners.is_some_and(|owners| !owners.contains(&namespace)) {
            let what = format!(
                "{host} is not a service of namespace {namespace}, so its distribution is ignored"
            );
            return Err((what, "a policy in the namespace of the service"));
        }
        Ok(())
    }

    /// Returns the namespaces of the services behind an alias of several, which has a distribution
    /// of its own.
    ///
    /// # Errors
    /// One of them is unknown, or an alias with this name has no service of `namespace`.
    fn alias_namespaces<'b>(
        &'b self,
        name: &str,
        namespace: &str,
        behind: &'b [String],
    ) -> Result<Vec<&'b str>, Refusal> {
        let known = |host: &'b String| -> Vec<&'b str> {
            match (self.namespace_of(host), self.owners(host)) {
                (Some(of), _) => vec![of],
                (None, owners) => owners.into_iter().flatten().copied().collect(),
            }
        };
        let mut all: Vec<&str> = Vec::new();
        for host in behind {
            self.check_known(host)?;
            let of = known(host);
            if of.is_empty() {
                return Err(foreign(host, namespace));
            }
            all.extend(of);
        }
        let aliases = self.config.names.aliases.iter();
        let mut aliases = aliases.filter(|alias| alias.name.host == name);
        let is_foreign = |alias: &Alias| {
            let mut hosts =
                behind.iter().filter(|host| alias.to.iter().any(|to| to.host == **host));
            !hosts.any(|host| known(host).contains(&namespace))
        };
        if let Some(alias) = aliases.find(|alias| is_foreign(alias)) {
            let host = alias.to.first().map_or(name, |to| &to.host);
            return Err(foreign(host, namespace));
        }
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }

    /// Rejects a host whose namespace nothing states.
    fn check_known(&self, host: &str) -> Result<(), Refusal> {
        let is_envoy = matches!(self.config.discovery, Discovery::Envoy(_));
        if is_envoy && namespace_of_host(host) == UNKNOWN_NAMESPACE {
            let what = format!("an Envoy control plane has no namespace for {host}");
            return Err((what, "an entry of `traffic`, or the name in Kubernetes"));
        }
        Ok(())
    }

    /// Returns the namespaces of a hostname, by the mesh of files.
    fn owners(&self, host: &str) -> Option<&Vec<&str>> {
        self.mesh.as_ref().and_then(|mesh| mesh.owners.get(host))
    }

    /// Rejects weights that would leave the services without endpoints, by the mesh of files.
    fn check_weights(
        &self,
        traffic: &TrafficRule,
        namespaces: &[&str],
        behind: &[String],
    ) -> Result<(), Refusal> {
        let mut weights = traffic.regions.iter().filter(|one| one.weight > 0).peekable();
        let (Some(mesh), Some(_)) = (&self.mesh, weights.peek()) else {
            return Ok(());
        };
        let of = |host: &String| {
            let names = namespaces.iter().map(|of| format!("{of}/{host}"));
            let found = names.filter_map(|name| mesh.localities.get(&*name));
            found.flatten().collect::<Vec<_>>()
        };
        let localities: Vec<_> = behind.iter().flat_map(of).collect();
        let is_used = |at: &&&Locality| {
            let mut weights = weights.clone();
            weights.any(|one| one.region.matches(&at.region, &at.zone, &at.subzone))
        };
        if localities.is_empty() || localities.iter().any(is_used) {
            return Ok(());
        }
        let name = traffic.service.as_deref().unwrap_or_default();
        let what = format!(
            "the distribution of {name} is ignored: no workload of it is in a region with a \
             weight, so no endpoint would be left"
        );
        Err((what, "one of its regions"))
    }

    /// Returns the namespace of a service by its entry of `exposure`, or by its hostname if that is
    /// of a family.
    fn namespace_of<'a>(&'a self, host: &'a str) -> Option<&'a str> {
        let family = self.config.names.family(host);
        let by_name = || Some(family.split_once('.')?.1).filter(|_| family != host);
        self.exposed.namespace(host).or_else(by_name)
    }
}

/// Returns the refusal of a policy for a service that may belong to another namespace.
fn foreign(host: &str, namespace: &str) -> Refusal {
    let what = format!("{host} may be a service of another namespace than {namespace}");
    (what, "a policy in the namespace of the service")
}

impl<'a> MeshIndex<'a> {
    fn new(mesh: &'a Mesh) -> Self {
        let mut index = Self { owners: namespaces_of_hosts(mesh), localities: HashMap::new() };
        for workload in mesh.workloads.values() {
            for (service, _) in workload.services.iter() {
                let localities = index.localities.entry(service).or_default();
                localities.insert(&workload.locality);
            }
        }
        index
    }
}
