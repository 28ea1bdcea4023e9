//! The resources of an Envoy control plane, CDS and EDS, and the mesh that they make.
//!
//! A cluster is a port of a service, by its name or by `discovery.clusters`; its endpoints are
//! workloads. An assignment is kept by the name that EDS has for it, and each cluster has the last
//! one that it was given: it stays while a new one is awaited, as with Envoy, and goes with the
//! cluster alone. Of several clusters of one port the first by name serves, and one that the
//! configuration names goes before.

mod cluster;
mod endpoints;
mod names;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem;
use std::sync::Arc;

use prost::Message;
use prost::encoding::WireType;

use self::cluster::Source;
use self::endpoints::{ENDPOINTS_MAX, Endpoints, LOCALITIES_MAX};
use self::names::{Meaning, Target, meaning, service_of};
use super::client::{Resource, Resources, Response};
use super::exports::{self, Exports};
use super::store::{CLUSTER, is_named};
use super::unknown::fields;
use super::wds::shown;
use super::words::Words;
use crate::grpc::{cluster as cds, endpoint as eds};
use crate::snapshot::mesh::{Assignment, Mesh, Service, Sorted, Template, Workload};
use crate::snapshot::{ExportSet, Shards};
use crate::status::Unused;

/// The type of assignments.
pub const ENDPOINT: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

/// The largest body of one resource: 100,000 endpoints of 160 bytes, which is what Istio's have.
const BODY_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Endpoints of all clusters together, of some 500 bytes each.
const ALL_ENDPOINTS_MAX: usize = 1_000_000;
/// Ports of a service, as of Istio's (contract 3.1): a service is made anew with each of them.
const PORTS_MAX: usize = 1024;
/// Clusters of one port: all of them are looked at with each change of one.
const RANKS_MAX: usize = 64;
/// What is not used, of which people are told each.
const UNUSED_KEPT: usize = 100;

/// What discovery has told, by the names of the resources.
#[derive(Debug, Default)]
pub struct Clusters {
    /// What the configuration says of clusters by their names.
    said: BTreeMap<String, Target>,
    serving: BTreeMap<Arc<str>, Serving>,
    /// Clusters that are no service's.
    nameless: BTreeSet<Arc<str>>,
    /// The clusters of each port of a service, the one that serves first.
    targets: BTreeMap<Target, BTreeSet<Rank>>,
    assignments: BTreeMap<Arc<str>, Arc<Endpoints>>,
    /// The clusters of which EDS has the endpoints, by the name that it has for them.
    users: BTreeMap<Arc<str>, BTreeSet<Arc<str>>>,
    /// How many endpoints all clusters have.
    endpoints: usize,
    services: Shards<Arc<str>, Arc<Service>>,
    workloads: Shards<Arc<str>, Arc<Workload>>,
    words: Words,
    changed: bool,
    wanted_changed: bool,
    exports: Exports,
}

/// Which of several clusters goes first: one that the configuration names, then by name.
type Rank = (bool, Arc<str>);

/// A cluster of a service's port.
#[derive(Debug)]
struct Serving {
    target: Target,
    rank: Rank,
    /// The name that EDS has for its endpoints.
    eds: Option<Arc<str>>,
    by_locality: bool,
    endpoints: Arc<Endpoints>,
    notes: Vec<String>,
    /// Its workloads in the mesh, by uid: none while another cluster serves the port.
    uids: BTreeSet<Arc<str>>,
}

impl Clusters {
    /// Nothing yet; `said` are the clusters of which the configuration says what they serve.
    pub fn new(said: impl IntoIterator<Item = (String, (String, u16))>) -> Self {
        Self {
            said: said.into_iter().collect(),
            wanted_changed: true,
            ..Self::default()
        }
    }

    /// The mesh, if it has changed since this was called last.
    pub fn take_change(&mut self) -> Option<Mesh> {
        mem::take(&mut self.changed).then(|| self.mesh())
    }

    /// The mesh.
    pub fn mesh(&self) -> Mesh {
        Mesh {
            services: self.services.clone(),
            workloads: self.workloads.clone(),
            hbone_only: false,
        }
    }

    /// The export set, which is that of clusters as Istio names those that it exports, if it has
    /// changed since this was called last.
    pub fn take_exports(&mut self) -> Option<ExportSet> {
        self.exports.take_change()
    }

    /// The names that EDS is asked for, if they may have changed since this was called last.
    pub fn take_wanted(&mut self) -> Option<BTreeSet<String>> {
        mem::take(&mut self.wanted_changed).then(|| {
            let names = self.users.keys();
            names.map(|name| name.to_string()).collect()
        })
    }

    /// What of a type is held and not used: how much that is, and the first of it.
    pub fn unused(&self, type_url: &str) -> (usize, Vec<Unused>) {
        let unused = |name: &str, why: &str| Unused {
            name: name.to_owned(),
            why: why.to_owned(),
        };
        let mut first = Vec::new();
        let mut put = |one| {
            if first.len() < UNUSED_KEPT {
                first.push(one);
            }
        };
        let mut count = 0;
        if type_url == CLUSTER {
            count += self.nameless.len();
            for (name, serving) in &self.serving {
                let other = self.other(serving);
                let other = other.map(|first| format!("{} serves this port", shown(&first)));
                let notes = serving.notes.iter().cloned().chain(other);
                for note in notes {
                    put(unused(name, &note));
                    count += 1;
                }
            }
            for name in self.nameless.iter().take(UNUSED_KEPT) {
                put(unused(name, NAMELESS));
            }
            return (count, first);
        }
        for (name, serving) in &self.serving {
            count += serving.endpoints.unused_count;
            for why in &serving.endpoints.unused {
                put(unused(name, why));
            }
        }
        (count, first)
    }

    /// The cluster that serves in the place of this one, if there is one.
    fn other(&self, serving: &Serving) -> Option<Arc<str>> {
        let (_, first) = self.targets.get(&serving.target)?.first()?;
        (*first != serving.rank.1).then(|| Arc::clone(first))
    }

    fn upsert_cluster(&mut self, resource: &Resource) -> Result<(), String> {
        let name = &resource.name;
        let (target, is_said) = match meaning(name, &self.said) {
            Meaning::Serves { target, is_said } => (target, is_said),
            Meaning::Subset => return Ok(()),
            Meaning::Nothing => {
                self.nameless.insert(Arc::clone(name));
                return Ok(());
            }
        };
        let body = body(resource)?;
        fields(body, |number, wire, value| match (number, wire) {
            (LOAD_ASSIGNMENT, WireType::LengthDelimited) => few(value),
            _ => Ok(()),
        })?;
        let message = cds::Cluster::decode(body).map_err(|error| error.to_string())?;
        is_named(resource, "cluster.name", &message.name)?;
        let read = cluster::cluster(message, &mut self.words)?;
        self.has_room(&target, &(!is_said, Arc::clone(name)))?;
        let old = self.serving.get(name);
        let (eds, endpoints) = match read.source {
            Source::Eds(eds) => {
                let known = self.assignments.get(&*eds).cloned();
                // Until they are told, those of before stay.
                let before = || Some(Arc::clone(&old.filter(|old| old.eds.is_some())?.endpoints));
                (
                    Some(Arc::from(eds)),
                    known.or_else(before).unwrap_or_default(),
                )
            }
            Source::Own(endpoints) => (None, Arc::new(endpoints)),
            Source::Unknown => (None, Arc::default()),
        };
        let before = old.map_or(0, |old| old.endpoints.list.len());
        self.count(before, endpoints.list.len())?;
        let old = self.serving.remove(name);
        self.uses(name, old.as_ref().and_then(|old| old.eds.clone()), false);
        self.uses(name, eds.clone(), true);
        let rank = (!is_said, Arc::clone(name));
        let serving = Serving {
            target: target.clone(),
            rank: rank.clone(),
            eds,
            by_locality: read.by_locality,
            endpoints,
            notes: read.notes,
            uids: old.map(|old| old.uids).unwrap_or_default(),
        };
        self.serving.insert(Arc::clone(name), serving);
        self.targets.entry(target.clone()).or_default().insert(rank);
        self.exports.insert(name);
        self.serve(&target);
        Ok(())
    }

    fn remove_cluster(&mut self, name: &str) {
        self.nameless.remove(name);
        let Some(old) = self.serving.remove(name) else {
            return;
        };
        self.endpoints -= old.endpoints.list.len();
        self.uses(name, old.eds, false);
        self.exports.remove(name);
        if let Some(ranks) = self.targets.get_mut(&old.target) {
            ranks.remove(&old.rank);
            if ranks.is_empty() {
                self.targets.remove(&old.target);
            }
        }
        for uid in &old.uids {
            self.changed |= self.workloads.remove(uid).is_some();
        }
        self.serve(&old.target);
    }

    fn upsert_assignment(&mut self, resource: &Resource) -> Result<(), String> {
        let body = body(resource)?;
        few(body)?;
        let message = eds::ClusterLoadAssignment::decode(body);
        let message = message.map_err(|error| error.to_string())?;
        is_named(resource, "cluster_name", &message.cluster_name)?;
        let read = Arc::new(endpoints::endpoints(message, &mut self.words)?);
        let users = self.users.get(&resource.name).cloned().unwrap_or_default();
        let before = users.iter().filter_map(|name| self.serving.get(name));
        let before = before.map(|serving| serving.endpoints.list.len()).sum();
        self.count(before, read.list.len() * users.len())?;
        for name in users {
            if let Some(serving) = self.serving.get_mut(&name) {
                serving.endpoints = Arc::clone(&read);
                let target = serving.target.clone();
                self.serve(&target);
            }
        }
        self.assignments.insert(Arc::clone(&resource.name), read);
        Ok(())
    }

    /// Notes that a cluster has its endpoints from EDS by this name, or has so no more.
    fn uses(&mut self, cluster: &str, eds: Option<Arc<str>>, does: bool) {
        let Some(eds) = eds else {
            return;
        };
        let users = self.users.entry(Arc::clone(&eds)).or_default();
        match does {
            true => users.insert(cluster.into()),
            false => users.remove(cluster),
        };
        if users.is_empty() {
            self.users.remove(&eds);
        }
        self.wanted_changed = true;
    }

    /// Whether one more cluster of a port is taken, which costs by how many there are already.
    fn has_room(&self, target: &Target, rank: &Rank) -> Result<(), String> {
        let Some(ranks) = self.targets.get(target) else {
            let (host, _) = target;
            return match self.ports_of(host).count() {
                PORTS_MAX.. => Err(format!(
                    "cluster.name: {} has {PORTS_MAX} ports already, and no more are taken",
                    shown(host)
                )),
                _ => Ok(()),
            };
        };
        match ranks.len() {
            RANKS_MAX.. if !ranks.contains(rank) => Err(format!(
                "cluster.name: {RANKS_MAX} clusters are of this port already, and no more are taken"
            )),
            _ => Ok(()),
        }
    }

    /// The ports of a host, with the clusters of each.
    fn ports_of(&self, host: &str) -> impl Iterator<Item = (&Target, &BTreeSet<Rank>)> {
        let ports = (host.to_owned(), 0)..=(host.to_owned(), u16::MAX);
        self.targets.range(ports)
    }

    /// Notes how many endpoints there are in place of others.
    fn count(&mut self, before: usize, after: usize) -> Result<(), String> {
        let all = self.endpoints - before + after;
        if all > ALL_ENDPOINTS_MAX && all > self.endpoints {
            return Err(format!(
                "endpoints: {all} with these, and at most {ALL_ENDPOINTS_MAX} are taken"
            ));
        }
        self.endpoints = all;
        Ok(())
    }

    /// Makes the mesh have what the clusters of a port say of it now.
    fn serve(&mut self, target: &Target) {
        let ranks = self.targets.get(target).cloned().unwrap_or_default();
        for (place, (_, name)) in ranks.iter().enumerate() {
            let Some(mut serving) = self.serving.remove(name) else {
                continue;
            };
            let workloads = match place {
                0 => workloads(name, &serving),
                _ => Vec::new(),
            };
            let uids = workloads.iter().map(|one| Arc::clone(&one.uid)).collect();
            let old = mem::replace(&mut serving.uids, uids);
            for gone in old.difference(&serving.uids) {
                self.changed |= self.workloads.remove(gone).is_some();
            }
            for new in workloads {
                let old = self.workloads.get(&new.uid);
                if old.is_none_or(|old| **old != new) {
                    self.workloads.insert(Arc::clone(&new.uid), Arc::new(new));
                    self.changed = true;
                }
            }
            self.serving.insert(Arc::clone(name), serving);
        }
        self.define(&target.0);
    }

    /// Makes the mesh have the service of a host, with the ports of its clusters, or none.
    fn define(&mut self, host: &str) {
        let ports = self.ports_of(host);
        let (mut numbers, mut assignments) = (BTreeMap::new(), BTreeMap::new());
        for ((_, port), ranks) in ports {
            numbers.insert(*port, 0);
            let first = ranks.first().and_then(|(_, name)| self.serving.get(name));
            assignments.extend(first.map(|first| (*port, Arc::new(balanced(first)))));
        }
        let (namespace, name) = service_of(host);
        let key: Arc<str> = format!("{namespace}/{host}").into();
        if numbers.is_empty() {
            self.changed |= self.services.remove(&key).is_some();
            return;
        }
        let new = Service {
            name: name.into(),
            namespace: namespace.into(),
            hostname: host.into(),
            ports: numbers,
            assignments,
            ..Service::default()
        };
        if self.services.get(&key).is_none_or(|old| **old != new) {
            self.services.insert(key, Arc::new(new));
            self.changed = true;
        }
    }
}

/// What people are told of a cluster that is no service's.
const NAMELESS: &str = "no service by its name; write one in `discovery.clusters`, or name the \
                        cluster `HOST:PORT` or as Istio does";
/// The field of a cluster that has its own endpoints, and those of an assignment in which
/// localities and their endpoints are.
const LOAD_ASSIGNMENT: u32 = 33;
const LOCALITY_ENDPOINTS: u32 = 2;
const LB_ENDPOINTS: u32 = 2;

impl Resources for Clusters {
    fn upsert(&mut self, type_url: &'static str, resource: &Resource) -> Result<(), String> {
        match type_url {
            CLUSTER => self.upsert_cluster(resource),
            ENDPOINT => self.upsert_assignment(resource),
            _ => Err(format!("resources of type {type_url} are not kept here")),
        }
    }

    fn rejected(&mut self, _type_url: &'static str, _name: &str) -> bool {
        false
    }

    /// istiod may be read as an Envoy control plane too.
    fn is_whole(&self, type_url: &str, response: &Response) -> bool {
        type_url == CLUSTER && exports::is_whole(response)
    }

    /// The clusters of an assignment that is gone keep its endpoints: nobody says that they have
    /// none now.
    fn remove(&mut self, type_url: &'static str, name: &str) {
        match type_url {
            CLUSTER => self.remove_cluster(name),
            ENDPOINT => drop(self.assignments.remove(name)),
            _ => {}
        }
    }
}

/// The body of a resource, if its size is sensible.
fn body(resource: &Resource) -> Result<&[u8], String> {
    let body = resource.body.as_deref().unwrap_or_default();
    match body.len() {
        bytes if bytes > BODY_BYTES_MAX => Err(format!(
            "resource: {bytes} bytes, and at most {BODY_BYTES_MAX} are taken"
        )),
        _ => Ok(body),
    }
}

/// Whether an assignment has no more localities and endpoints than are taken: each has two bytes
/// on the wire and hundreds once it is decoded.
fn few(assignment: &[u8]) -> Result<(), String> {
    let (mut localities, mut all) = (0, 0);
    fields(assignment, |number, wire, locality| {
        if (number, wire) != (LOCALITY_ENDPOINTS, WireType::LengthDelimited) {
            return Ok(());
        }
        localities += 1;
        fields(locality, |number, _, _| {
            all += usize::from(number == LB_ENDPOINTS);
            Ok(())
        })?;
        if localities > LOCALITIES_MAX {
            return Err(format!(
                "endpoints: at most {LOCALITIES_MAX} localities are taken"
            ));
        }
        if all > ENDPOINTS_MAX {
            return Err(format!(
                "endpoints: at most {ENDPOINTS_MAX} of them are taken"
            ));
        }
        Ok(())
    })
}

/// The workloads of a cluster.
fn workloads(cluster: &str, serving: &Serving) -> Vec<Workload> {
    let (host, port) = &serving.target;
    let (namespace, _) = service_of(host);
    let key: Arc<str> = format!("{namespace}/{host}").into();
    // Endpoints that share a template share the one with the service, too.
    let mut templates = HashMap::new();
    let list = serving.endpoints.list.iter();
    let made = list.map(|(address, workload, target)| {
        let base = (Arc::as_ptr(&workload.template), *target);
        let template = templates.entry(base).or_insert_with(|| {
            let ports = Sorted::from([(*port, *target)]);
            let template = Template {
                services: Sorted::from([(Arc::clone(&key), ports)]),
                ..Template::clone(&workload.template)
            };
            Arc::new(template)
        });
        Workload {
            uid: format!("{cluster}/{address}").into(),
            template: Arc::clone(template),
            ..workload.clone()
        }
    });
    made.collect()
}

/// How the endpoints of a cluster are balanced.
fn balanced(serving: &Serving) -> Assignment {
    let Endpoints {
        overprovisioning,
        localities,
        drops,
        ..
    } = &*serving.endpoints;
    let localities = localities.iter();
    let localities =
        localities.map(|((priority, of), weight)| (*priority, (**of).clone(), *weight));
    Assignment {
        overprovisioning: *overprovisioning,
        by_locality: serving.by_locality,
        localities: localities.collect(),
        drops: drops.clone(),
    }
}
