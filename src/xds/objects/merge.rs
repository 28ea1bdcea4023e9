//! Merge of the entries that objects describe into a configuration.
//!
//! Entries of the configuration come first: a service, a name or an address that they have is not
//! given to an object. Among objects the oldest one that claims a name or an address has it. Names
//! in services of the mesh file are given to no object of another namespace.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;

use super::entries::{BoundService, Entries, Exposed, by_age};
use super::limited::LimitedFindings;
use super::needs::{self, Needs};
use super::shares::{Shares, limit};
use super::{Objects, refusal};
use crate::config::{Config, ExposedService, HostPort, Line, ObjectBindings, vip, vip_count};
use crate::snapshot::mesh::Mesh;
use crate::yaml::{Finding, Findings};

/// Limit of the bindings of objects. Each has a socket.
const BINDINGS_MAX: usize = 256;

/// Limit of the ports of services that objects expose: 64 times the bindings, as they have no
/// socket.
const EXPOSED_MAX: usize = 16_384;

/// Service of one binding in each of its clusters; there is at least one.
type Donors<'a> = Vec<&'a BoundService>;

/// Mistake, and its remedy.
type Refusal = (String, &'static str);

/// Returns the configuration with the exposed services and bindings of the objects of its cluster,
/// and the findings about those that have no effect. `mesh` is that of the mesh file.
pub fn merge(config: &Config, objects: &Objects, mesh: &Mesh) -> (Config, Findings) {
    let needs = Needs::new(objects, config);
    let ignored = needs::without_effect(objects, config);
    let objects = by_age(&objects.entries, config);
    let mut merger = Merger::new(config, mesh);
    merger.findings.extend(ignored);
    merger.expose_all(&objects);
    let bound: Vec<_> = objects.iter().flat_map(|of| &of.bound).collect();
    merger.bind_all(&bound, &needs);
    (merger.config, Findings(merger.findings.into_vec()))
}

pub(super) fn namespaces_of_hosts(mesh: &Mesh) -> HashMap<&str, Vec<&str>> {
    let mut namespaces = HashMap::<_, Vec<_>>::new();
    for service in mesh.services.values() {
        let of = namespaces.entry(&*service.hostname).or_default();
        of.push(&*service.namespace);
    }
    namespaces
}

struct Merger<'a> {
    /// Configuration without the objects.
    own: &'a Config,
    /// Entries of that configuration, by the family of their service.
    families: HashMap<&'a str, Vec<&'a ExposedService>>,
    /// Namespaces of the services of the mesh file, by hostname.
    mesh: HashMap<&'a str, Vec<&'a str>>,
    clusters: Option<BTreeSet<String>>,
    config: Config,
    /// Hostnames and names of exposed services.
    claims: HashMap<String, NameClaim>,
    findings: LimitedFindings,
}

/// Claim to a name that peers may request.
struct NameClaim {
    /// Hostname of the service; none if the name has several.
    host: Option<String>,
    line: Line,
}

impl<'a> Merger<'a> {
    fn new(own: &'a Config, mesh: &'a Mesh) -> Self {
        let mut merger = Self {
            own,
            families: HashMap::new(),
            mesh: namespaces_of_hosts(mesh),
            clusters: own.cluster_names(),
            config: own.clone(),
            claims: HashMap::new(),
            findings: LimitedFindings::default(),
        };
        for exposed in &own.exposure.services {
            let host = &exposed.service.host;
            let family = merger.families.entry(own.names.family(host)).or_default();
            family.push(exposed);
            for name in exposed.names.iter().chain([&exposed.service]) {
                merger.claim(&name.host, Some(host), &exposed.line);
            }
        }
        for alias in &own.names.aliases {
            merger.claim(&alias.name.host, None, &alias.line);
        }
        merger
    }

    fn claim(&mut self, name: &str, host: Option<&str>, line: &Line) {
        let claim = self.claims.entry(name.to_owned());
        let claim = claim
            .or_insert_with(|| NameClaim { host: host.map(str::to_owned), line: line.clone() });
        if claim.host.as_deref() != host {
            claim.host = None;
        }
    }

    fn refuse_all(&mut self, donors: &[&BoundService], what: &str, how: &str) {
        let refusal = |one: &&BoundService| refusal(&one.namespace, &one.line, what.into(), how);
        self.findings.extend(donors.iter().map(refusal));
    }

    /// Adds the exposed services of objects, with an entry for each port. Those beyond the limit
    /// stay closed, whatever else exports them.
    fn expose_all(&mut self, objects: &[&Entries]) {
        let services = objects.iter().flat_map(|of| &of.services);
        let services: Vec<_> = services.filter_map(|one| self.check_exposed(one)).collect();
        let wanted = services.iter().map(|one| (Arc::clone(&one.namespace), one.ports.len()));
        let mut shares = Shares::divide(EXPOSED_MAX, wanted);
        for one in services {
            let ports = one.ports.iter();
            let used = ports.take_while(|_| shares.use_up(&one.namespace, 1));
            let (used, beyond) = one.ports.split_at(used.count());
            let entries = used.iter().map(|port| one.entry(*port));
            self.config.exposure.services.extend(entries);
            if !beyond.is_empty() {
                let what = format!(
                    "objects expose more than {EXPOSED_MAX} ports of services, and namespace {} \
                     has the most of them",
                    one.namespace
                );
                let how = "the others into `exposure.services`";
                self.findings.push(refusal(&one.namespace, &one.line, what, how));
            }
            if used.is_empty() {
                self.config.exposure.services.push(one.closed().entry(None));
            }
        }
    }

    /// Returns the part of an exposed service that may be used, and records its names.
    fn check_exposed(&mut self, one: &Exposed) -> Option<Exposed> {
        let mut one = one.clone();
        let own = self.families.get(self.own.names.family(&one.host));
        let mut other = None;
        one.ports.retain(|port| {
            let mut own = own.into_iter().flatten();
            let own = own.find(|own| own.service.port.zip(*port).is_none_or(|(a, b)| a == b));
            other = other.or_else(|| own.map(|own| (*port, own)));
            own.is_none()
        });
        if let Some((port, own)) = other {
            let host = one.host.clone();
            let service = HostPort { host, port };
            let what = format!("{service} has an entry on {}, which counts alone", own.line);
            let warning = Finding::warning(&one.line.0, what, "one of both");
            self.findings.push(warning.of(&one.namespace));
        }
        if one.ports.is_empty() {
            return None;
        }
        if let Some(known) = &self.clusters {
            let clusters = mem::take(&mut one.clusters).into_iter();
            let (known, unknown): (_, Vec<_>) =
                clusters.partition(|cluster| known.contains(cluster));
            one.clusters = known;
            for cluster in unknown {
                let what = format!("{cluster} is not a cluster of `trust`");
                let how = "one that it names";
                self.findings.push(refusal(&one.namespace, &one.line, what, how));
            }
        }
        if let Err((what, how)) = self.check_alias(&one) {
            one.alias = None;
            self.findings.push(refusal(&one.namespace, &one.line, what, how));
        }
        for name in one.alias.iter().chain([&one.host]) {
            self.claim(name, Some(&one.host), &one.line);
        }
        Some(one)
    }

    /// Checks that the alias of an exposed service is not the name of another service.
    fn check_alias(&self, one: &Exposed) -> Result<(), Refusal> {
        let Some(alias) = &one.alias else {
            return Ok(());
        };
        self.check_name("alias", alias, &one.namespace)?;
        let mut claim = self.claims.get(alias).into_iter();
        match claim.find(|claim| claim.host.as_ref() != Some(&one.host)) {
            Some(claim) => {
                let what = format!("the alias {alias} is that of {}", claim.line);
                Err((what, "another `alias`"))
            }
            None => Ok(()),
        }
    }

    /// Checks that an object of a namespace may give a name: one of a family, which names no other
    /// namespace and is no hostname of one.
    fn check_name(&self, kind: &str, name: &str, namespace: &str) -> Result<(), Refusal> {
        let family = self.own.names.family(name);
        let named = family.split_once('.').map(|(_, namespace)| namespace);
        if family == name || named.is_some_and(|of| of != namespace) {
            let what = format!("the {kind} {name} may be another service");
            let how = "an `alias` that is the name of none in this namespace, or `NAME.global`";
            return Err((what, how));
        }
        let owners = self.mesh.get(name).filter(|_| named.is_none());
        match owners.into_iter().flatten().find(|of| **of != namespace) {
            Some(of) => {
                let what = format!("the {kind} {name} is the hostname of a service of {of}");
                Err((what, "another `alias`"))
            }
            None => Ok(()),
        }
    }

    /// Adds the bindings of services, if the configuration has addresses for them. One that is not
    /// needed keeps its name, so that no other namespace gets its clients.
    fn bind_all(&mut self, bound: &[&BoundService], needs: &Needs<'_>) {
        let Some(template) = self.own.exposure.bindings.as_ref() else {
            for one in bound {
                let what = format!("no binding of {} is opened", one.service);
                let how = "`exposure: {bindings: {addresses: NETWORK}}`";
                let warning = Finding::warning(&one.line.0, what, how);
                self.findings.push(warning.of(&one.namespace));
            }
            return;
        };
        let mut bindings = Vec::<Donors<'_>>::new();
        let mut by_port = HashMap::<(&str, Option<u16>), usize>::new();
        let mut by_name = HashMap::<&str, &BoundService>::new();
        for one in bound {
            let key = (&*one.name, one.service.port);
            let donors = by_port.get(&key).map_or(&[][..], |index| &bindings[*index]);
            match self.check_binding(one, by_name.get(key.0).copied(), donors) {
                Ok(()) => {
                    by_name.entry(key.0).or_insert(one);
                    if let Some(rule) = needs.excludes_name(&one.service.host) {
                        let what = format!("no binding of {} is opened: {rule}", one.service);
                        let warning = Finding::warning(&one.line.0, what, "");
                        self.findings.push(warning.of(&one.namespace));
                        continue;
                    }
                    let index = *by_port.entry(key).or_insert(bindings.len());
                    if index == bindings.len() {
                        bindings.push(Vec::new());
                    }
                    bindings[index].push(one);
                }
                Err((what, how)) => {
                    self.findings.push(refusal(&one.namespace, &one.line, what, how));
                }
            }
        }
        let (bindings, beyond) =
            limit(bindings, BINDINGS_MAX, |donors| Arc::clone(&donors[0].namespace));
        for donors in beyond {
            let what = format!(
                "objects have more than {BINDINGS_MAX} bindings, and namespace {} has the most of \
                 them",
                donors[0].namespace
            );
            self.refuse_all(&donors, &what, "the others into `bindings`");
        }
        self.open_all(&bindings, template);
    }

    /// Adds bindings at free addresses of the template's network.
    fn open_all(&mut self, bindings: &[Donors<'_>], template: &ObjectBindings) {
        let addresses = addresses(bindings, template.addresses);
        for donors in bindings {
            let (one, name) = (donors[0], &donors[0].name);
            let port = one.service.port.unwrap_or_default();
            let listen = addresses.get(name.as_str());
            let listen = listen.map(|ip| SocketAddr::new(*ip, port));
            match listen.filter(|listen| !self.config.is_occupied(*listen)) {
                Some(listen) => {
                    let clusters = donors.iter().map(|donor| donor.cluster.clone()).collect();
                    let service = (clusters, one.service.clone());
                    let local = (name.clone(), listen);
                    let lines = donors.iter().map(|donor| donor.line.clone()).collect();
                    let binding = template.binding(service, local, lines);
                    self.config.bindings.push(binding);
                }
                None => {
                    let what = format!("{name} has no free address for port {port}");
                    let how = "a larger network into `exposure.bindings.addresses`";
                    self.refuse_all(donors, &what, how);
                }
            }
        }
    }

    /// Checks that a service may be one of the donors of a binding. `first` is the first service
    /// that has given the local name.
    fn check_binding(
        &self,
        one: &BoundService,
        first: Option<&BoundService>,
        donors: &[&BoundService],
    ) -> Result<(), Refusal> {
        let BoundService { cluster, service, name, namespace, .. } = one;
        self.check_name("local name", name, namespace)?;
        if let Some(other) = first.filter(|first| first.namespace != *namespace) {
            let other = &other.namespace;
            let what = format!("the local name {name} is that of an object in {other}");
            return Err((what, "another `alias`"));
        }
        let known = self.clusters.as_ref();
        if known.is_some_and(|known| !known.contains(cluster)) {
            let what = format!("{cluster} is not a cluster of `trust`");
            return Err((what, "one that it names"));
        }
        if *cluster == self.own.gateway.cluster {
            let what = format!("{cluster} is the cluster of this gateway");
            return Err((what, "another cluster"));
        }
        let mut own = self.own.bindings.iter();
        let own = own.find(|own| own.names.contains(name));
        let other = first.filter(|first| first.service.host != service.host);
        if let Some(line) = own.map(|own| &own.line).or_else(|| other.map(|other| &other.line)) {
            let what = format!("the local name {name} is that of {line}");
            return Err((what, "another `alias`"));
        }
        if donors.iter().any(|donor| donor.cluster == *cluster) {
            let what = format!("{service} of {cluster} is given twice");
            return Err((what, "it once"));
        }
        Ok(())
    }
}

/// Returns the addresses of the local names of bindings. The older of two names with equal hashes
/// has the address of the hash. Namespaces share the addresses of a small network.
fn addresses<'a>(bindings: &[Donors<'a>], network: IpNet) -> BTreeMap<&'a str, IpAddr> {
    let is_one = network.prefix_len() == network.max_prefix_len();
    let only = is_one.then_some(network.addr());
    let count = usize::try_from(vip_count(network)).unwrap_or(usize::MAX);
    let places = if is_one { usize::MAX } else { count };
    let mut seen = HashSet::new();
    let names = bindings.iter().map(|donors| donors[0]);
    let names = names.filter(|of| seen.insert(&of.name)).collect();
    let (names, _) = limit(names, places, |of| Arc::clone(&of.namespace));
    let mut taken = BTreeSet::new();
    let address = |of: &'a BoundService| {
        let ip = only.or_else(|| vip(network, &of.name, &mut taken))?;
        Some((&*of.name, ip))
    };
    names.into_iter().filter_map(address).collect()
}
