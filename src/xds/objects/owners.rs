//! Owners of endpoint addresses: the namespaces whose services may use an address of our
//! network.
//!
//! An author of EndpointSlices in one namespace can write any address into them
//! (CVE-2021-25740), so a slice alone proves nothing. An address belongs to the namespace with the
//! best evidence for it, and services of other namespaces do not use it. On equal evidence the
//! namespace that had it before keeps it, and without one no namespace has it. The address of a
//! node is that of several namespaces, each with ports of its own. Clusters are not distinguished,
//! because a slice names its cluster itself and the address is dialled either way.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::limit_findings;
use super::names::{Key, OwnedKey};
use super::slice::{Pod, Slice};
use super::view::ObjectIndex;
use crate::config::DefaultExposure;
use crate::snapshot::mesh::{Mesh, Workload};
use crate::yaml::{Finding, Place};

/// Evidence that an address belongs to a namespace, the weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Evidence {
    /// A slice lists the address, with or without a pod. Its author may have invented the pod.
    Slice,
    /// Kubernetes gave the address to a Service, or put the pod into the slice of a Service
    /// with a selector. A tenant can write the labels of such a slice too, until Kubernetes
    /// removes it.
    Kubernetes,
    /// A Pod has the address by its status, which its kubelet writes and no tenant.
    Pod,
    /// The mesh file, which an operator writes.
    File,
}

/// Claim of a namespace to an address.
#[derive(Clone, Debug)]
pub(super) struct Claim<'a> {
    pub(super) namespace: &'a str,
    /// Best evidence.
    evidence: Evidence,
    /// Evidence for the whole address.
    whole: Option<Evidence>,
    /// Evidence for ports of a node's address.
    ports: BTreeMap<u16, Evidence>,
    /// Object with the best evidence; none for the mesh file.
    pub(super) place: Option<&'a Place>,
}

impl Claim<'_> {
    /// Returns the evidence for a port of the address.
    fn at(&self, port: u16) -> Option<Evidence> {
        self.whole.max(self.ports.get(&port).copied())
    }
}

/// Address that an endpoint uses: a port of a node's address, or any other address as a whole, with
/// port 0.
type EndpointAddress = (IpAddr, u16);

/// Namespaces that have the addresses of endpoints, and services that have VIPs. Each keeps what it
/// has against later claims with equal evidence.
#[derive(Clone, Debug, Default)]
pub struct AddressHolders {
    endpoints: HashMap<EndpointAddress, Arc<str>>,
    pub(super) vips: HashMap<IpAddr, OwnedKey>,
}

/// Reason for which a namespace may not use an address.
#[derive(Clone, Copy, Debug)]
pub(super) enum Refusal<'c, 'a> {
    /// The address belongs to another namespace, by better evidence.
    Owned(&'c Claim<'a>),
    /// Another namespace had the address before, and the evidence is equal.
    Held(&'c Claim<'a>),
    /// Another namespace claims the address with equal evidence, and none had it before.
    Equal(&'c Claim<'a>),
}

/// Slice with the properties of its service.
struct SliceEntry<'a> {
    slice: &'a Slice,
    key: Key<'a>,
    cluster: &'a str,
    /// True if its endpoints are in our network. Endpoints of other networks are never dialled.
    is_here: bool,
    /// True if the service is exposed, by an export of its cluster or, in ours, by the
    /// configuration.
    is_exposed: bool,
}

/// All claims to the addresses of our network.
pub(super) struct AddressOwners<'a> {
    claims: HashMap<IpAddr, Vec<Claim<'a>>>,
    /// Addresses of nodes.
    nodes: HashSet<IpAddr>,
    held: &'a AddressHolders,
    listed: Vec<SliceEntry<'a>>,
}

impl<'a> AddressOwners<'a> {
    /// Collects the claims of objects and of a mesh file.
    pub(super) fn new(view: &ObjectIndex<'a>, mesh: &'a Mesh, held: &'a AddressHolders) -> Self {
        let network = &*view.config.gateway.network;
        let of_mesh = here(mesh, network).filter(|one| one.host_network);
        let of_mesh = of_mesh.flat_map(|one| one.addresses.iter().copied());
        let mut owners = Self {
            claims: HashMap::new(),
            nodes: view.node_addresses().chain(of_mesh).collect(),
            held,
            listed: Vec::new(),
        };
        owners.note_mesh(mesh, network);
        for key in view.keys() {
            let Some(service) = view.service(key, view.own_cluster()) else {
                continue;
            };
            for ip in &service.ips {
                let place = Some(&service.meta.place);
                owners.add_claim(*ip, key.0, (Evidence::Kubernetes, None), place);
            }
        }
        for pod in view.pods().filter(|pod| !pod.host_network) {
            let (namespace, place) = (&*pod.meta.namespace, Some(&pod.meta.place));
            for ip in &pod.addresses {
                owners.add_claim(*ip, namespace, (Evidence::Pod, None), place);
            }
        }
        let listed = listed(view);
        for one in listed.iter().filter(|one| one.is_here) {
            owners.note_slice(view, one);
        }
        Self { listed, ..owners }
    }

    fn note_mesh(&mut self, mesh: &'a Mesh, network: &str) {
        for workload in here(mesh, network) {
            let ports = workload.services.iter();
            let ports = ports.flat_map(|(_, ports)| ports.iter().map(|(_, target)| *target));
            let ports: Vec<_> = ports.collect();
            let ports = workload.host_network.then_some(&*ports);
            for ip in &workload.addresses {
                for namespace in namespaces(workload) {
                    self.add_claim(*ip, namespace, (Evidence::File, ports), None);
                }
            }
        }
        for service in mesh.services.values() {
            let vips = service.vips.iter();
            for (_, ip) in vips.filter(|(of, _)| of.is_empty() || of == network) {
                self.add_claim(*ip, &service.namespace, (Evidence::File, None), None);
            }
        }
    }

    fn note_slice(&mut self, view: &ObjectIndex<'a>, listed: &SliceEntry<'a>) {
        let (slice, namespace) = (listed.slice, listed.key.0);
        let is_kept_up = is_controller_managed(view, listed);
        let ports: Vec<_> = slice.ports.iter().map(|port| port.number).collect();
        // Without a port that can be read it may mean all ports.
        let ports = Some(&*ports).filter(|ports| !ports.is_empty());
        for backend in &slice.endpoints {
            let evidence = match backend.own_pod(namespace) {
                Some(_) if is_kept_up => Evidence::Kubernetes,
                Some(_) | None => Evidence::Slice,
            };
            for ip in &backend.addresses {
                self.add_claim(*ip, namespace, (evidence, ports), Some(&slice.place));
            }
        }
    }

    /// Adds a claim to an address or, if it is that of a node, to these ports of it.
    fn add_claim(
        &mut self,
        ip: IpAddr,
        namespace: &'a str,
        (evidence, ports): (Evidence, Option<&[u16]>),
        place: Option<&'a Place>,
    ) {
        let claims = self.claims.entry(ip).or_default();
        let known = claims.iter().position(|one| one.namespace == namespace);
        let known = known.unwrap_or_else(|| {
            claims.push(Claim { namespace, evidence, whole: None, ports: BTreeMap::new(), place });
            claims.len() - 1
        });
        let Some(claim) = claims.get_mut(known) else {
            return;
        };
        if evidence > claim.evidence {
            (claim.evidence, claim.place) = (evidence, place);
        }
        match ports.filter(|_| self.nodes.contains(&ip)) {
            None => claim.whole = claim.whole.max(Some(evidence)),
            Some(ports) => {
                for port in ports {
                    let known = claim.ports.entry(*port).or_insert(evidence);
                    *known = evidence.max(*known);
                }
            }
        }
    }

    /// Returns whether an address is that of a node.
    pub(super) fn is_node(&self, ip: IpAddr) -> bool {
        self.nodes.contains(&ip)
    }

    /// Returns the reason why services of a namespace may not use a port of an address that it
    /// claims; none if they may. The port matters only at the address of a node.
    ///
    /// Claims with equal evidence exclude each other, exposed or not. Otherwise a tenant could
    /// expose an address to more peers than its owner does.
    pub(super) fn refusal(
        &self,
        ip: IpAddr,
        port: u16,
        namespace: &str,
    ) -> Option<Refusal<'_, 'a>> {
        let claims = self.claims.get(&ip).filter(|claims| claims.len() > 1)?;
        let own = claims.iter().find(|one| one.namespace == namespace);
        let own = own.and_then(|one| one.at(port)).unwrap_or(Evidence::Slice);
        let others = || claims.iter().filter(|one| one.namespace != namespace);
        // An address without proof is no port of a node that others have proven to use.
        let better = |other: &&Claim<'a>| {
            let at = if own == Evidence::Slice { Some(other.evidence) } else { other.at(port) };
            at > Some(own)
        };
        let best = others().filter(better).max_by_key(|one| one.evidence);
        if let Some(other) = best {
            return Some(Refusal::Owned(other));
        }
        let mut equal = others().filter(|one| one.at(port) == Some(own));
        if own == Evidence::File {
            return None;
        }
        let first = equal.clone().next()?;
        match self.holder(ip, port) {
            Some(holder) if holder == namespace => None,
            holder => Some(match equal.find(|one| Some(one.namespace) == holder) {
                Some(one) => Refusal::Held(one),
                None => Refusal::Equal(first),
            }),
        }
    }

    /// Returns the addresses of an endpoint that services of a namespace may use, and the pairs of
    /// service port and endpoint port that they may use at all of these.
    pub(super) fn usable(
        &self,
        namespace: &str,
        addresses: &[IpAddr],
        ports: &[(u16, u16)],
    ) -> (Vec<IpAddr>, Vec<(u16, u16)>) {
        let has_port = |ip: &IpAddr| {
            let mut ports = ports.iter();
            ports.any(|(_, target)| self.may_use(namespace, *ip, *target))
        };
        let may_use = |ip: &&IpAddr| match self.is_node(**ip) {
            true => has_port(ip),
            false => self.refusal(**ip, 0, namespace).is_none(),
        };
        let own: Vec<_> = addresses.iter().filter(may_use).copied().collect();
        let is_everywhere =
            |(_, target): &&(u16, u16)| own.iter().all(|ip| self.may_use(namespace, *ip, *target));
        let ports = ports.iter().filter(is_everywhere).copied().collect();
        (own, ports)
    }

    /// Returns whether services of a namespace may use a port of one of its addresses, if that is
    /// the address of a node.
    pub(super) fn may_use(&self, namespace: &str, ip: IpAddr, port: u16) -> bool {
        !self.is_node(ip) || self.refusal(ip, port, namespace).is_none()
    }

    /// Returns the namespace that had an address before.
    fn holder(&self, ip: IpAddr, port: u16) -> Option<&'a str> {
        let of = |port| self.held.endpoints.get(&(ip, port)).map(|of| &**of);
        // An address that was not known to be that of a node had a holder as a whole.
        of(if self.is_node(ip) { port } else { 0 }).or_else(|| of(0))
    }

    /// Returns the namespace that has each address, with the services that have `vips`.
    pub(super) fn holders(&self, vips: HashMap<IpAddr, OwnedKey>) -> AddressHolders {
        let mut names: HashMap<&str, Arc<str>> = HashMap::new();
        let mut endpoints = HashMap::new();
        for (ip, claims) in &self.claims {
            for claim in claims {
                let whole = claim.whole.is_some().then_some(0);
                let ports = claim.ports.keys().copied().chain(whole);
                // The mesh file needs no holder, and its namespaces share.
                for port in ports.filter(|port| claim.at(*port) != Some(Evidence::File)) {
                    if self.refusal(*ip, port, claim.namespace).is_none() {
                        let name = names.entry(claim.namespace);
                        let name = name.or_insert_with(|| claim.namespace.into());
                        endpoints.insert((*ip, port), Arc::clone(name));
                    }
                }
            }
        }
        AddressHolders { endpoints, vips }
    }

    /// Returns a claim of another namespace to an address that no tenant can forge; none if the
    /// namespace has such a claim itself.
    pub(super) fn proven_elsewhere(&self, ip: IpAddr, namespace: &str) -> Option<&Claim<'a>> {
        let claims = self.claims.get(&ip)?;
        let mut proven = claims.iter().filter(|one| one.evidence >= Evidence::Kubernetes);
        let is_own = proven.clone().any(|one| one.namespace == namespace);
        proven.next().filter(|_| !is_own)
    }

    /// Returns a finding for each slice that names pods of other namespaces. Slices of exposed
    /// services also have one for addresses that they may not use, or for host names.
    pub(super) fn findings(&self) -> Vec<Finding> {
        let found = self.listed.iter().flat_map(|listed| {
            let address = self.refused_address(listed).or_else(|| host_name(listed));
            foreign_pod(listed).into_iter().chain(address)
        });
        limit_findings(found)
    }

    fn refused_address(&self, listed: &SliceEntry<'a>) -> Option<Finding> {
        if !listed.is_here || !listed.is_exposed {
            return None;
        }
        let (namespace, name) = listed.key;
        let addresses = listed.slice.endpoints.iter().flat_map(|one| &one.addresses);
        let ports = listed.slice.ports.iter().map(|port| port.number);
        let used = addresses.flat_map(|ip| {
            let ports = ports.clone().filter(|_| self.is_node(*ip));
            let whole = (!self.is_node(*ip)).then_some(0);
            ports.chain(whole).map(|port| (*ip, port))
        });
        let refused = |(ip, port)| Some(((ip, port), self.refusal(ip, port, namespace)?));
        let mut refused = used.filter_map(refused);
        let ((ip, port), refusal) = refused.next()?;
        let ip = match port {
            0 => ip.to_string(),
            port => SocketAddr::new(ip, port).to_string(),
        };
        let others = match refused.count() {
            0 => String::new(),
            others => format!(" (and {others} more)"),
        };
        let why = refusal.to_string();
        let what = format!("the address {ip}{others} of {namespace}/{name} is not used: {why}");
        let how = match refusal {
            Refusal::Held(of) | Refusal::Equal(of)
                if port == 0 && of.evidence == Evidence::Kubernetes =>
            {
                "a workload of the mesh file, the Pod that has it, or the Node that has it"
            }
            _ => {
                "addresses of pods of the slice's namespace that Kubernetes keeps up to date, or a \
                 workload of the mesh file"
            }
        };
        Some(Finding::warning(&listed.slice.place, what, how).of(namespace))
    }
}

impl fmt::Display for Refusal<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Owned(of) | Self::Held(of) | Self::Equal(of)) = self;
        let namespace = of.namespace;
        let by = of.place.map_or_else(|| "the mesh file".to_owned(), ToString::to_string);
        match self {
            Self::Owned(_) => write!(f, "it belongs to namespace {namespace} by {by}"),
            Self::Held(_) => write!(
                f,
                "namespace {namespace} has had it for longer by {by}, with equal evidence"
            ),
            Self::Equal(one) if one.evidence == Evidence::Slice => write!(
                f,
                "namespace {namespace} lists it too at {by}, and neither has evidence for it"
            ),
            Self::Equal(_) => {
                write!(f, "namespace {namespace} lists it too at {by}, with equal evidence")
            }
        }
    }
}

/// Returns whether the controller of Kubernetes reverts changes of a slice by others. It finds
/// the slices of a Service with a selector by the service name label of this cluster (see
/// [`super::slice`]). It does not see copies or objects that claim to be of another cluster.
fn is_controller_managed<'a>(view: &ObjectIndex<'a>, listed: &SliceEntry<'a>) -> bool {
    let (slice, own) = (listed.slice, view.own_cluster());
    let is_own = !slice.is_copy && listed.cluster == own;
    let service = view.service(listed.key, own);
    is_own && slice.is_managed && service.is_some_and(|service| service.has_selector)
}

/// Returns the workloads of a mesh file in our network.
fn here<'a>(mesh: &'a Mesh, network: &str) -> impl Iterator<Item = &'a Workload> {
    let workloads = mesh.workloads.values().map(|one| &**one);
    workloads.filter(move |one| one.network.is_empty() || *one.network == *network)
}

/// Returns the namespaces of a mesh file's workload: its own and those of its services.
fn namespaces(workload: &Workload) -> impl Iterator<Item = &str> {
    let services = workload.services.keys();
    let services = services.filter_map(|service| Some(service.split_once('/')?.0));
    services.chain([&*workload.namespace])
}

/// Returns whether a workload of a mesh file belongs to a namespace.
pub(super) fn is_for(workload: &Workload, namespace: &str) -> bool {
    namespaces(workload).any(|of| of == namespace)
}

fn listed<'a>(view: &ObjectIndex<'a>) -> Vec<SliceEntry<'a>> {
    let config = view.config;
    let entries = config.exposure.services.iter();
    let entries: HashSet<_> = entries.filter_map(|one| key_of(&one.service.host)).collect();
    let entry = |key, cluster, slice, is_exposed| SliceEntry {
        slice,
        key,
        cluster,
        is_here: *view.network(cluster, slice) == *config.gateway.network,
        is_exposed,
    };
    let mut all = Vec::new();
    for key in view.keys() {
        let exporters: HashSet<_> = view.exporters(key).into_iter().collect();
        let is_entered = config.exposure.default == DefaultExposure::All || entries.contains(&key);
        all.extend(view.slices(key).map(|(cluster, slice)| {
            let is_own = cluster == view.own_cluster() && !view.is_local(key, cluster);
            let is_exposed = exporters.contains(cluster) || (is_entered && is_own);
            entry(key, cluster, slice, is_exposed)
        }));
    }
    // Invalid slices serve nothing, but their addresses remain unavailable to others.
    let bad = view.bad_slices();
    all.extend(bad.map(|(key, cluster, slice)| entry(key, cluster, slice, false)));
    all
}

/// Returns the namespace and name of the service with a Kubernetes hostname.
fn key_of(host: &str) -> Option<Key<'_>> {
    let (name, rest) = host.split_once('.')?;
    let (namespace, _) = rest.split_once('.')?;
    Some((namespace, name))
}

fn foreign_pod(listed: &SliceEntry<'_>) -> Option<Finding> {
    let (namespace, name) = listed.key;
    let backends = listed.slice.endpoints.iter();
    let mut foreign = backends.filter(|one| one.own_pod(namespace).is_none());
    let (of, pod): &Pod = foreign.find_map(|one| one.pod.as_ref())?;
    let what = format!(
        "an endpoint of {namespace}/{name} names the pod {of}/{pod}, which is ignored: a slice \
         names pods of its own namespace only"
    );
    Some(Finding::warning(&listed.slice.place, what, "no such `targetRef`").of(namespace))
}

fn host_name(listed: &SliceEntry<'_>) -> Option<Finding> {
    if !listed.is_here || !listed.is_exposed {
        return None;
    }
    let (namespace, name) = listed.key;
    let hosts = listed.slice.endpoints.iter().map(|one| &one.host);
    let host = hosts.clone().find(|host| !host.is_empty())?;
    let what = format!(
        "the endpoint {host} of {namespace}/{name} is not used: the answer to a host name could be \
         an address of another namespace"
    );
    let how = "a workload with this `hostname` into the mesh file, which an operator writes";
    Some(Finding::warning(&listed.slice.place, what, how).of(namespace))
}
