//! Workloads of the endpoints of all slices. Entries for the same pod from several slices,
//! control planes or the mesh file are merged into one workload.
//!
//! Slices are merged only within one namespace of one cluster. Addresses, network and protocol
//! of a slice have no effect on the endpoints of another namespace.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use super::addresses::is_for;
use super::slice::SliceEndpoint;
use crate::snapshot::mesh::{Locality, Mesh, Protocol, Template, Workload};

/// Limit of addresses per workload; the first ones are kept. A pod has one per family, but a
/// tenant's slices can list any number for one pod.
const ADDRESSES_MAX: usize = 16;

/// Service ports to target ports, by the `namespace/hostname` of services.
pub(super) type ServicePorts = BTreeMap<Arc<str>, BTreeMap<u16, u16>>;

/// Location and protocol of the endpoints of a slice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Site<'a> {
    pub(super) cluster: &'a str,
    pub(super) network: &'a str,
    pub(super) namespace: &'a str,
    pub(super) region: &'a str,
    pub(super) protocol: Protocol,
}

#[derive(Debug)]
pub(super) struct ServedEndpoint<'a> {
    pub(super) site: Site<'a>,
    pub(super) backend: &'a SliceEndpoint,
    /// Addresses that it may use, of which the first [`ADDRESSES_MAX`] count.
    pub(super) addresses: Vec<IpAddr>,
    pub(super) services: Arc<[Arc<str>]>,
    /// Pairs of service port and endpoint port.
    pub(super) ports: Vec<(u16, u16)>,
}

/// Workload as merged so far.
#[derive(Debug)]
struct MergedWorkload {
    workload: Workload,
    served: ServicePorts,
    is_ready: bool,
    is_serving: bool,
    is_terminating: bool,
}

/// Workloads merged so far, indexed by uid and by address.
#[derive(Debug, Default)]
pub(super) struct WorkloadMerger<'a> {
    members: Vec<MergedWorkload>,
    by_uid: HashMap<Arc<str>, usize>,
    /// First workload at each place. Any number of pods can share the address of their node.
    by_place: HashMap<Place<'a>, usize>,
    /// Endpoints that are not known to be pods. They are merged after all pods, so that one at the
    /// place of a pod is that pod.
    unnamed: Vec<ServedEndpoint<'a>>,
}

/// Place of endpoints of one namespace of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Place<'a> {
    cluster: &'a str,
    namespace: &'a str,
    network: &'a str,
    at: IpAddr,
}

impl<'a> WorkloadMerger<'a> {
    pub(super) fn add(&mut self, mut endpoint: ServedEndpoint<'a>) {
        endpoint.addresses.truncate(ADDRESSES_MAX);
        if endpoint.backend.own_pod(endpoint.site.namespace).is_some() {
            self.merge(&endpoint);
        } else {
            self.unnamed.push(endpoint);
        }
    }

    fn merge(&mut self, endpoint: &ServedEndpoint<'a>) {
        let ServedEndpoint { site, backend, addresses: own, .. } = endpoint;
        let index = self.index_of(endpoint);
        let Some(member) = self.members.get_mut(index) else {
            return;
        };
        member.is_ready |= backend.is_ready;
        member.is_serving |= backend.is_serving;
        member.is_terminating &= backend.is_terminating;
        for service in &*endpoint.services {
            let served = member.served.entry(Arc::clone(service)).or_default();
            for (port, target) in &endpoint.ports {
                served.entry(*port).or_insert(*target);
            }
        }
        // Addresses were checked in the network of their slice, and have no meaning in another
        // one.
        if *member.workload.network != *site.network {
            return;
        }
        let mut addresses = member.workload.addresses.to_vec();
        for address in own {
            if addresses.len() < ADDRESSES_MAX && !addresses.contains(address) {
                addresses.push(*address);
            }
        }
        member.workload.addresses = addresses[..].into();
        for place in places(*site, own) {
            self.by_place.entry(place).or_insert(index);
        }
    }

    /// Returns the index of an endpoint's workload, which may be new. A pod is found by its uid,
    /// any other endpoint also by its place.
    fn index_of(&mut self, endpoint: &ServedEndpoint<'a>) -> usize {
        let ServedEndpoint { site, backend, addresses: own, .. } = endpoint;
        let uid: Arc<str> = uid(*site, backend, own).into();
        let is_pod = backend.own_pod(site.namespace).is_some();
        let mut there = places(*site, own).filter(|_| !is_pod);
        let known = self.by_uid.get(&uid).copied();
        let known = known.or_else(|| there.find_map(|place| self.by_place.get(&place).copied()));
        let index = known.unwrap_or(self.members.len());
        if known.is_none() {
            self.members.push(member(*site, backend, &uid));
        }
        self.by_uid.insert(uid, index);
        index
    }

    /// Merges the workloads into a mesh. An existing workload of the namespace with the same
    /// uid, or with an address in its network, keeps its own fields. It serves the additional
    /// services.
    ///
    /// `may_use` returns whether a namespace may use a port of an address of our network. Slices of
    /// one workload can list different ports at different addresses, so each address is compared
    /// with the ports of all of them.
    pub(super) fn into_mesh(
        mut self,
        own_network: &str,
        mesh: &mut Mesh,
        may_use: impl Fn(&str, IpAddr, u16) -> bool,
    ) {
        for endpoint in std::mem::take(&mut self.unnamed) {
            self.merge(&endpoint);
        }
        self.set_health();
        if self.members.is_empty() {
            return;
        }
        let mut known: HashMap<_, Vec<_>> = HashMap::new();
        for (uid, workload) in mesh.workloads.iter() {
            for address in workload.addresses.iter() {
                let network =
                    if workload.network.is_empty() { own_network } else { &workload.network };
                let there = known.entry((network.to_owned(), *address)).or_default();
                there.push(Arc::clone(uid));
            }
        }
        for mut member in self.members {
            let mut new = member.workload;
            let namespace = Arc::clone(&new.namespace);
            let may_use = |ip: &IpAddr, port| may_use(&namespace, *ip, port);
            if *new.network == *own_network {
                let ports = member.served.values().flat_map(|ports| ports.values());
                let addresses = new.addresses.iter().copied();
                let used = addresses.filter(|ip| ports.clone().all(|port| may_use(ip, *port)));
                new.addresses = used.collect();
            }
            let at = new.addresses.iter().filter_map(|address| {
                let key = (new.network.to_string(), *address);
                known.get(&key)
            });
            let mut at = at.flatten().filter(|uid| {
                let workload = mesh.workloads.get(&***uid);
                workload.is_some_and(|workload| is_for(workload, &new.namespace))
            });
            let uid = match mesh.workloads.get(&*new.uid) {
                Some(_) => Arc::clone(&new.uid),
                None => at.next().unwrap_or(&new.uid).clone(),
            };
            let workload = match mesh.workloads.get(&*uid) {
                Some(known) => {
                    let is_here = known.network.is_empty() || *known.network == *own_network;
                    let addresses = known.addresses.iter().filter(|_| is_here);
                    for ports in member.served.values_mut() {
                        ports.retain(|_, port| addresses.clone().all(|ip| may_use(ip, *port)));
                    }
                    with_services(Workload::clone(known), member.served)
                }
                None => with_services(new, member.served),
            };
            mesh.workloads.insert(uid, Arc::new(workload));
        }
    }

    /// Sets the health of all workloads. Ready ones are healthy. If no workload of a service is
    /// ready, those that still serve while terminating are healthy, as in Kubernetes.
    fn set_health(&mut self) {
        let ready = self.members.iter().filter(|member| member.is_ready);
        let ready: BTreeSet<_> = ready.flat_map(|member| member.served.keys().cloned()).collect();
        for member in &mut self.members {
            let is_last = member.served.keys().any(|service| !ready.contains(service));
            member.workload.healthy = member.is_ready || (member.is_serving && is_last);
            // An unhealthy workload that terminates gets no traffic even from services that
            // accept unhealthy endpoints.
            let is_left = member.workload.healthy || !member.is_terminating;
            member.workload.capacity = u32::from(is_left);
        }
    }
}

/// Adds services and ports to a workload. Existing entries take precedence.
pub(super) fn with_services(mut workload: Workload, served: ServicePorts) -> Workload {
    let known = workload.services.iter();
    let mut services: BTreeMap<_, _> =
        known.map(|(service, ports)| (Arc::clone(service), ports.to_map())).collect();
    for (service, ports) in served {
        let known = services.entry(service).or_default();
        for (port, target) in ports {
            known.entry(port).or_insert(target);
        }
    }
    let services = services.into_iter();
    let services = services.map(|(service, ports)| (service, ports.into_iter().collect()));
    workload.services = services.collect();
    workload
}

fn member(site: Site<'_>, backend: &SliceEndpoint, uid: &Arc<str>) -> MergedWorkload {
    let pod = backend.own_pod(site.namespace);
    let workload = Workload {
        uid: Arc::clone(uid),
        own_name: Workload::own_name(uid, pod.map_or("", |pod| &**pod)),
        node: Arc::clone(&backend.node),
        template: Template {
            namespace: site.namespace.into(),
            cluster: site.cluster.into(),
            network: site.network.into(),
            protocol: site.protocol,
            locality: Arc::new(Locality {
                region: site.region.into(),
                zone: Arc::clone(&backend.zone),
                subzone: Arc::default(),
            }),
            ..Template::default()
        }
        .into(),
        ..Workload::default()
    };
    MergedWorkload {
        workload,
        served: ServicePorts::new(),
        is_ready: false,
        is_serving: false,
        is_terminating: true,
    }
}

/// Returns the uid of an endpoint. A pod has the uid that Istio would build. Any other endpoint
/// is identified by its location, so that its uid does not depend on the service that lists it.
fn uid(site: Site<'_>, backend: &SliceEndpoint, own: &[IpAddr]) -> String {
    let Site { cluster, network, namespace, .. } = site;
    if let Some(name) = backend.own_pod(namespace) {
        return format!("{cluster}//Pod/{namespace}/{name}");
    }
    let first = own.first().map(ToString::to_string).unwrap_or_default();
    format!("{cluster}//Endpoint/{namespace}/{network}/{first}")
}

fn places<'a>(site: Site<'a>, own: &[IpAddr]) -> impl Iterator<Item = Place<'a>> {
    own.iter().map(move |at| Place {
        cluster: site.cluster,
        namespace: site.namespace,
        network: site.network,
        at: *at,
    })
}
