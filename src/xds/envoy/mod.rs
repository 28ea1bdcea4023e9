//! Resources of an Envoy control plane (CDS and EDS), and the mesh built from them.
//!
//! A cluster is one port of a service, identified by its name or by `discovery.clusters`. Its
//! endpoints are workloads. Assignments are stored by their EDS name, and each cluster keeps
//! the last one that it received. As in Envoy, an assignment stays while a new one is awaited,
//! and is removed only with the cluster. Of several clusters of one port, the first by name
//! serves, and a cluster that the configuration names precedes all others.

mod cluster;
mod endpoints;
mod gateways;
mod names;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem;
use std::sync::Arc;

use prost::Message;
use prost::encoding::WireType;

use self::cluster::EndpointSource;
use self::endpoints::{ENDPOINTS_MAX, Endpoints, LOCALITIES_MAX};
use self::gateways::Gateways;
pub(super) use self::names::namespace_of_host;
use self::names::{ClusterTarget, Target, cluster_target, service_of};
use super::client::{Resource, ResourceStore, Response};
use super::convert::{named_gateways, shown};
use super::interner::Interner;
use super::store::{CLUSTER, is_named};
use super::tables::{MeshStore, Tables, has_all_clusters};
use super::unknown::for_each_field;
use crate::grpc::{cluster as cds, endpoint as eds};
use crate::snapshot::mesh::{Assignment, LocalityWeight, Service, Services, Sorted, Workload};
use crate::status::Unused;

pub const ENDPOINT: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

/// Limit of the body of one resource: 100,000 endpoints of 160 bytes, the size of Istio's.
const BODY_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Limit of the endpoints of all clusters together, of some 500 bytes each.
const ALL_ENDPOINTS_MAX: usize = 1_000_000;
/// Limit of the ports of a service, as for Istio's (docs/wire-contract.md 3.2). Each added port
/// rebuilds the service.
const PORTS_MAX: usize = 1024;
/// Limit of the clusters of one port. A change of one of them visits all of them.
const RANKS_MAX: usize = 64;
/// Limit of the unused resources that the status lists individually.
const UNUSED_LISTED_MAX: usize = 100;

/// State received from discovery, by resource name.
#[derive(Debug, Default)]
pub struct ClusterStore {
    /// Services, workloads and exports.
    pub tables: Tables,
    configured_targets: BTreeMap<String, Target>,
    clusters: BTreeMap<Arc<str>, ServingCluster>,
    /// Clusters that belong to no service.
    without_service: BTreeSet<Arc<str>>,
    /// Clusters of each port of a service, the serving one first.
    targets: BTreeMap<Target, BTreeSet<Rank>>,
    assignments: BTreeMap<Arc<str>, Arc<Endpoints>>,
    clusters_by_eds_name: BTreeMap<Arc<str>, BTreeSet<Arc<str>>>,
    gateways: Gateways,
    endpoints: usize,
    interner: Interner,
    wanted_changed: bool,
}

/// Order of the clusters of one port: clusters that the configuration names first, then by
/// name.
type Rank = (bool, Arc<str>);

/// Cluster of a service's port.
#[derive(Debug)]
struct ServingCluster {
    target: Target,
    rank: Rank,
    eds: Option<Arc<str>>,
    by_locality: bool,
    endpoints: Arc<Endpoints>,
    notes: Vec<String>,
    /// Uids of its workloads in the mesh; empty while another cluster serves the port.
    uids: BTreeSet<Arc<str>>,
    gateways: Vec<Workload>,
}

impl ClusterStore {
    /// Creates an empty state. `configured` maps cluster names to the targets that the
    /// configuration gives them.
    pub fn new(configured: impl IntoIterator<Item = (String, (String, u16))>) -> Self {
        Self {
            configured_targets: configured.into_iter().collect(),
            wanted_changed: true,
            ..Self::default()
        }
    }

    fn upsert_cluster(&mut self, resource: &Resource) -> Result<(), String> {
        let name = &resource.name;
        let (target, is_configured) = match cluster_target(name, &self.configured_targets) {
            ClusterTarget::Serves { target, is_configured } => (target, is_configured),
            ClusterTarget::Subset => return Ok(()),
            ClusterTarget::Unknown => {
                self.without_service.insert(Arc::clone(name));
                return Ok(());
            }
        };
        let body = body(resource)?;
        for_each_field(body, |number, wire, value| match (number, wire) {
            (LOAD_ASSIGNMENT, WireType::LengthDelimited) => check_limit(value),
            _ => Ok(()),
        })?;
        let message = cds::Cluster::decode(body).map_err(|error| error.to_string())?;
        is_named(&resource.name, "cluster.name", &message.name)?;
        let read = cluster::cluster(message, &mut self.interner)?;
        self.check_port_limits(&target, &(!is_configured, Arc::clone(name)))?;
        let old = self.clusters.get(name);
        let (eds, endpoints) = match read.source {
            EndpointSource::Eds(eds) => {
                let known = self.assignments.get(&*eds).cloned();
                // The previous endpoints stay until the new ones arrive.
                let before = || Some(Arc::clone(&old.filter(|old| old.eds.is_some())?.endpoints));
                (Some(Arc::from(eds)), known.or_else(before).unwrap_or_default())
            }
            EndpointSource::Inline(endpoints) => (None, Arc::new(endpoints)),
            EndpointSource::Unknown => (None, Arc::default()),
        };
        let before = old.map_or(0, |old| old.endpoints.list.len());
        self.replace_endpoint_count(before, endpoints.list.len())?;
        let old = self.clusters.remove(name);
        self.set_eds_user(name, old.as_ref().and_then(|old| old.eds.clone()), false);
        self.set_eds_user(name, eds.clone(), true);
        let rank = (!is_configured, Arc::clone(name));
        let (uids, gateways) = old.map(|old| (old.uids, old.gateways)).unwrap_or_default();
        let serving = ServingCluster {
            target: target.clone(),
            rank: rank.clone(),
            eds,
            by_locality: read.by_locality,
            endpoints,
            notes: read.notes,
            uids,
            gateways,
        };
        self.clusters.insert(Arc::clone(name), serving);
        self.targets.entry(target.clone()).or_default().insert(rank);
        self.tables.add_export(name);
        self.update_port(&target);
        Ok(())
    }

    fn remove_cluster(&mut self, name: &str) {
        self.without_service.remove(name);
        let Some(old) = self.clusters.remove(name) else {
            return;
        };
        self.endpoints -= old.endpoints.list.len();
        self.set_eds_user(name, old.eds, false);
        self.tables.remove_export(name);
        if let Some(ranks) = self.targets.get_mut(&old.target) {
            ranks.remove(&old.rank);
            if ranks.is_empty() {
                self.targets.remove(&old.target);
            }
        }
        for uid in &old.uids {
            self.tables.remove_workload(uid);
        }
        self.gateways.replace(&old.gateways, &[], &mut self.tables);
        self.update_port(&old.target);
    }

    fn upsert_assignment(&mut self, resource: &Resource) -> Result<(), String> {
        let body = body(resource)?;
        check_limit(body)?;
        let message = eds::ClusterLoadAssignment::decode(body);
        let message = message.map_err(|error| error.to_string())?;
        is_named(&resource.name, "cluster_name", &message.cluster_name)?;
        let read = Arc::new(endpoints::endpoints(message, &mut self.interner)?);
        let users = self.clusters_by_eds_name.get(&resource.name).cloned().unwrap_or_default();
        let before = users.iter().filter_map(|name| self.clusters.get(name));
        let before = before.map(|serving| serving.endpoints.list.len()).sum();
        self.replace_endpoint_count(before, read.list.len() * users.len())?;
        for name in users {
            if let Some(serving) = self.clusters.get_mut(&name) {
                serving.endpoints = Arc::clone(&read);
                let target = serving.target.clone();
                self.update_port(&target);
            }
        }
        self.assignments.insert(Arc::clone(&resource.name), read);
        Ok(())
    }

    /// Records whether a cluster uses the endpoints of this EDS name.
    fn set_eds_user(&mut self, cluster: &str, eds: Option<Arc<str>>, does: bool) {
        let Some(eds) = eds else {
            return;
        };
        let users = self.clusters_by_eds_name.entry(Arc::clone(&eds)).or_default();
        if does {
            users.insert(cluster.into())
        } else {
            users.remove(cluster)
        };
        if users.is_empty() {
            self.clusters_by_eds_name.remove(&eds);
        }
        self.wanted_changed = true;
    }

    /// Checks the limits for one more cluster of a port. The cost of a cluster grows with the
    /// number of clusters of its port.
    fn check_port_limits(&self, target: &Target, rank: &Rank) -> Result<(), String> {
        let Some(ranks) = self.targets.get(target) else {
            let (host, _) = target;
            return match self.ports_of(host).count() {
                PORTS_MAX.. => Err(format!(
                    "cluster.name: {} has {PORTS_MAX} ports, which is the limit",
                    shown(host)
                )),
                _ => Ok(()),
            };
        };
        match ranks.len() {
            RANKS_MAX.. if !ranks.contains(rank) => Err(format!(
                "cluster.name: {RANKS_MAX} clusters serve this port, which is the limit"
            )),
            _ => Ok(()),
        }
    }

    fn ports_of(&self, host: &str) -> impl Iterator<Item = (&Target, &BTreeSet<Rank>)> {
        let ports = (host.to_owned(), 0)..=(host.to_owned(), u16::MAX);
        self.targets.range(ports)
    }

    /// Replaces a number of endpoints in the total, within the limit.
    fn replace_endpoint_count(&mut self, before: usize, after: usize) -> Result<(), String> {
        let all = self.endpoints - before + after;
        if all > ALL_ENDPOINTS_MAX && all > self.endpoints {
            return Err(format!(
                "endpoints: {all} in all clusters, want at most {ALL_ENDPOINTS_MAX}"
            ));
        }
        self.endpoints = all;
        Ok(())
    }

    /// Updates the workloads and the service of a port in the mesh from its clusters.
    fn update_port(&mut self, target: &Target) {
        let ranks = self.targets.get(target).cloned().unwrap_or_default();
        for (place, (_, name)) in ranks.iter().enumerate() {
            let Some(mut serving) = self.clusters.remove(name) else {
                continue;
            };
            let workloads = match place {
                0 => workloads(name, &serving),
                _ => Vec::new(),
            };
            let uids = workloads.iter().map(|one| Arc::clone(&one.uid)).collect();
            let old = mem::replace(&mut serving.uids, uids);
            for gone in old.difference(&serving.uids) {
                self.tables.remove_workload(gone);
            }
            let gateways = gateway_records(&workloads);
            for new in workloads {
                self.tables.put_workload(new);
            }
            let old = mem::replace(&mut serving.gateways, gateways);
            self.gateways.replace(&old, &serving.gateways, &mut self.tables);
            self.clusters.insert(Arc::clone(name), serving);
        }
        self.update_service(&target.0);
    }

    /// Updates the service of a host in the mesh from the ports of its clusters, or removes it.
    fn update_service(&mut self, host: &str) {
        let ports = self.ports_of(host);
        let (mut numbers, mut assignments) = (BTreeMap::new(), BTreeMap::new());
        for ((_, port), ranks) in ports {
            numbers.insert(*port, 0);
            let first = ranks.first().and_then(|(_, name)| self.clusters.get(name));
            assignments.extend(first.map(|first| (*port, Arc::new(load_balancing(first)))));
        }
        let (namespace, name) = service_of(host);
        let key: Arc<str> = format!("{namespace}/{host}").into();
        if numbers.is_empty() {
            self.tables.remove_service(&key);
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
        self.tables.put_service(key, new);
    }
}

/// Reason in the status for a cluster that belongs to no service.
const NO_SERVICE_REASON: &str = "no service for this name; add it to `discovery.clusters`, or name \
                                 the cluster `HOST:PORT` or as Istio does";
/// Field numbers: the assignment in a cluster, the localities in an assignment, and the
/// endpoints in a locality.
const LOAD_ASSIGNMENT: u32 = 33;
const LOCALITY_ENDPOINTS: u32 = 2;
const LB_ENDPOINTS: u32 = 2;

impl ResourceStore for ClusterStore {
    fn upsert(&mut self, type_url: &'static str, resource: &Resource) -> Result<(), String> {
        match type_url {
            CLUSTER => self.upsert_cluster(resource),
            ENDPOINT => self.upsert_assignment(resource),
            _ => Err(format!("unsupported type {type_url}")),
        }
    }

    fn handle_rejection(&mut self, _type_url: &'static str, _name: &str) -> bool {
        false
    }

    /// An Envoy control plane may be istiod too.
    fn is_complete_state(&self, type_url: &str, response: &Response) -> bool {
        type_url == CLUSTER && has_all_clusters(response)
    }

    /// Removes a resource. Clusters keep the endpoints of a removed assignment, because the
    /// removal does not mean that they have none.
    fn remove(&mut self, type_url: &'static str, name: &str) {
        match type_url {
            CLUSTER => self.remove_cluster(name),
            ENDPOINT => drop(self.assignments.remove(name)),
            _ => {}
        }
    }
}

impl MeshStore for ClusterStore {
    fn tables(&mut self) -> &mut Tables {
        &mut self.tables
    }

    fn take_eds_names(&mut self) -> Option<BTreeSet<String>> {
        mem::take(&mut self.wanted_changed).then(|| {
            let names = self.clusters_by_eds_name.keys();
            names.map(|name| name.to_string()).collect()
        })
    }

    fn target(&self, cluster: &str) -> Option<(String, u16)> {
        self.clusters.get(cluster).map(|serving| serving.target.clone())
    }

    fn unused(&self, type_url: &str) -> (usize, Vec<Unused>) {
        let (mut count, mut first) = (0, Vec::new());
        let mut put = |name: &Arc<str>, why: &str| {
            if first.len() < UNUSED_LISTED_MAX {
                first.push(Unused { name: name.to_string(), why: why.to_owned() });
            }
        };
        for (name, serving) in &self.clusters {
            if type_url == ENDPOINT {
                count += serving.endpoints.unused_count;
                let unused = &serving.endpoints.unused;
                unused.iter().for_each(|why| put(name, why));
                continue;
            }
            let first = self.targets.get(&serving.target).and_then(|of| of.first());
            let other = first.filter(|(_, first)| *first != serving.rank.1);
            let other = other.map(|(_, first)| format!("{} serves this port", shown(first)));
            for why in serving.notes.iter().chain(&other) {
                put(name, why);
                count += 1;
            }
        }
        if type_url == CLUSTER {
            count += self.without_service.len();
            let first = self.without_service.iter().take(UNUSED_LISTED_MAX);
            first.for_each(|name| put(name, NO_SERVICE_REASON));
        }
        (count, first)
    }
}

/// Returns the body of a resource, within the limit.
fn body(resource: &Resource) -> Result<&[u8], String> {
    let body = resource.body.as_deref().unwrap_or_default();
    match body.len() {
        bytes if bytes > BODY_BYTES_MAX => {
            Err(format!("resource: {bytes} bytes, want at most {BODY_BYTES_MAX}"))
        }
        _ => Ok(body),
    }
}

/// Checks the number of localities and endpoints of an assignment before it is decoded. Each
/// takes at least two bytes on the wire, and hundreds once decoded.
fn check_limit(assignment: &[u8]) -> Result<(), String> {
    let (mut localities, mut all) = (0, 0);
    for_each_field(assignment, |number, wire, locality| {
        if (number, wire) != (LOCALITY_ENDPOINTS, WireType::LengthDelimited) {
            return Ok(());
        }
        localities += 1;
        for_each_field(locality, |number, _, _| {
            all += usize::from(number == LB_ENDPOINTS);
            Ok(())
        })?;
        if localities > LOCALITIES_MAX {
            return Err(format!("endpoints: too many localities, want at most {LOCALITIES_MAX}"));
        }
        if all > ENDPOINTS_MAX {
            return Err(format!("endpoints: too many, want at most {ENDPOINTS_MAX}"));
        }
        Ok(())
    })
}

fn workloads(cluster: &str, serving: &ServingCluster) -> Vec<Workload> {
    let (host, port) = &serving.target;
    let (namespace, _) = service_of(host);
    let key: Arc<str> = format!("{namespace}/{host}").into();
    let mut services = HashMap::new();
    let list = serving.endpoints.list.iter();
    let made = list.map(|(endpoint, workload, target)| {
        let services = services.entry(*target).or_insert_with(|| {
            let ports = Sorted::from([(*port, *target)]);
            Services::from([(Arc::clone(&key), ports)])
        });
        Workload {
            uid: format!("{cluster}/{endpoint}").into(),
            services: services.clone(),
            ..workload.clone()
        }
    });
    made.collect()
}

/// Builds the records of the gateways that workloads name by hostname. Their uids are not those of
/// the configuration, which adds records of its own to the mesh.
fn gateway_records(workloads: &[Workload]) -> Vec<Workload> {
    let records = named_gateways(workloads.iter()).into_iter();
    let records =
        records.map(|record| Workload { uid: format!("{}/eds", record.uid).into(), ..record });
    records.collect()
}

fn load_balancing(serving: &ServingCluster) -> Assignment {
    let Endpoints { overprovisioning, localities, drops, .. } = &*serving.endpoints;
    let localities = localities.iter();
    let localities = localities.map(|((priority, of), weight)| LocalityWeight {
        priority: *priority,
        locality: (**of).clone(),
        weight: *weight,
    });
    Assignment {
        overprovisioning: *overprovisioning,
        by_locality: serving.by_locality,
        localities: localities.collect(),
        drops: drops.clone(),
    }
}
