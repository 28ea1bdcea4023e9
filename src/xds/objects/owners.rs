//! Owners of endpoint addresses: the namespaces whose services may use an address of our
//! network.
//!
//! An author of EndpointSlices in one namespace can write any address into them
//! (CVE-2021-25740), so a slice alone proves nothing. An address belongs to the namespaces with
//! evidence for it, and services of other namespaces do not use it. An address without evidence
//! is used only if a single namespace lists it. Clusters are not distinguished, because a slice
//! names its cluster itself and the address is dialled either way.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use super::limit_findings;
use super::names::Key;
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
    /// with a selector. Pods of several namespaces share an address only if it is their node's.
    Kubernetes,
    /// The mesh file, which an operator writes.
    File,
}

/// Claim of a namespace to an address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim<'a> {
    pub(super) namespace: &'a str,
    evidence: Evidence,
    /// Object with the best evidence; none for the mesh file.
    pub(super) place: Option<&'a Place>,
}

/// Reason for which a namespace may not use an address.
#[derive(Clone, Copy, Debug)]
pub(super) enum Refusal<'a> {
    /// The address belongs to another namespace.
    Owned(Claim<'a>),
    /// Another namespace lists the address too, and no claim to it is proven.
    Unproven(Claim<'a>),
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
    listed: Vec<SliceEntry<'a>>,
}

impl<'a> AddressOwners<'a> {
    /// Collects the claims of objects and of a mesh file.
    pub(super) fn new(view: &ObjectIndex<'a>, mesh: &'a Mesh) -> Self {
        let mut owners = Self {
            claims: HashMap::new(),
            listed: Vec::new(),
        };
        owners.note_mesh(mesh, &view.config.gateway.network);
        for key in view.keys() {
            let Some(service) = view.service(key, view.own_cluster()) else {
                continue;
            };
            for ip in &service.ips {
                owners.add_claim(*ip, key.0, Evidence::Kubernetes, Some(&service.meta.place));
            }
        }
        let listed = listed(view);
        for one in listed.iter().filter(|one| one.is_here) {
            owners.note_slice(view, one);
        }
        Self { listed, ..owners }
    }

    fn note_mesh(&mut self, mesh: &'a Mesh, network: &str) {
        let is_here = |of: &str| of.is_empty() || of == network;
        for workload in mesh.workloads.values().filter(|one| is_here(&one.network)) {
            for ip in &workload.addresses {
                for namespace in namespaces(workload) {
                    self.add_claim(*ip, namespace, Evidence::File, None);
                }
            }
        }
        for service in mesh.services.values() {
            for (_, ip) in service.vips.iter().filter(|(of, _)| is_here(of)) {
                self.add_claim(*ip, &service.namespace, Evidence::File, None);
            }
        }
    }

    fn note_slice(&mut self, view: &ObjectIndex<'a>, listed: &SliceEntry<'a>) {
        let (slice, namespace) = (listed.slice, listed.key.0);
        let is_kept_up = is_controller_managed(view, listed);
        for backend in &slice.endpoints {
            let evidence = match backend.own_pod(namespace) {
                Some(_) if is_kept_up => Evidence::Kubernetes,
                Some(_) | None => Evidence::Slice,
            };
            for ip in &backend.addresses {
                self.add_claim(*ip, namespace, evidence, Some(&slice.place));
            }
        }
    }

    fn add_claim(
        &mut self,
        ip: IpAddr,
        namespace: &'a str,
        evidence: Evidence,
        place: Option<&'a Place>,
    ) {
        let claims = self.claims.entry(ip).or_default();
        let new = Claim {
            namespace,
            evidence,
            place,
        };
        match claims.iter_mut().find(|one| one.namespace == namespace) {
            Some(known) if evidence > known.evidence => *known = new,
            Some(_) => {}
            None => claims.push(new),
        }
    }

    /// Returns the reason why services of a namespace may not use an address that it claims;
    /// none if they may.
    ///
    /// Without evidence, several claims exclude each other, exposed or not. Otherwise a tenant
    /// could expose an address to more peers than its owner does.
    pub(super) fn refusal(&self, ip: IpAddr, namespace: &str) -> Option<Refusal<'a>> {
        let claims = self.claims.get(&ip).filter(|claims| claims.len() > 1)?;
        let best = claims.iter().map(|one| one.evidence).max()?;
        if best == Evidence::Slice {
            let other = claims.iter().find(|one| one.namespace != namespace);
            return other.copied().map(Refusal::Unproven);
        }
        let mut owners = claims.iter().filter(|one| one.evidence == best);
        if owners.clone().any(|one| one.namespace == namespace) {
            None
        } else {
            owners.next().copied().map(Refusal::Owned)
        }
    }

    /// Returns a claim of another namespace to an address that no tenant can forge; none if the
    /// namespace has such a claim itself.
    pub(super) fn proven_elsewhere(&self, ip: IpAddr, namespace: &str) -> Option<Claim<'a>> {
        let claims = self.claims.get(&ip)?;
        let mut proven = claims
            .iter()
            .filter(|one| one.evidence >= Evidence::Kubernetes);
        let is_own = proven.clone().any(|one| one.namespace == namespace);
        proven.next().copied().filter(|_| !is_own)
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
        let mut refused = addresses.filter_map(|ip| Some((ip, self.refusal(*ip, namespace)?)));
        let (ip, refusal) = refused.next()?;
        let others = match refused.count() {
            0 => String::new(),
            others => format!(" (and {others} more)"),
        };
        let why = match refusal {
            Refusal::Owned(Claim {
                namespace,
                place: Some(place),
                ..
            }) => format!("it belongs to namespace {namespace} by {place}"),
            Refusal::Owned(Claim { namespace, .. }) => {
                format!("it belongs to namespace {namespace} by the mesh file")
            }
            Refusal::Unproven(Claim {
                namespace, place, ..
            }) => {
                let at = place
                    .map(|place| format!(" at {place}"))
                    .unwrap_or_default();
                format!("namespace {namespace} lists it too{at}, and neither has evidence for it")
            }
        };
        let what = format!("the address {ip}{others} of {namespace}/{name} is not used: {why}");
        let how = "addresses of pods of the slice's namespace that Kubernetes keeps up to date, or \
                   a workload of the mesh file";
        Some(Finding::warning(&listed.slice.place, what, how).of(namespace))
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
    let entries: HashSet<_> = entries
        .filter_map(|one| key_of(&one.service.host))
        .collect();
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
