//! Addresses of our network that objects and the mesh file claim: those of endpoints, which belong
//! to namespaces, and VIPs, which lead to services.
//!
//! The address of a node is that of several namespaces, each with ports of its own. VIPs of
//! Services come before those of ServiceImports, because Kubernetes allocates each clusterIP once.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use super::claims::{At, Claim, Claims, Evidence, Holders};
use super::names::Key;
use super::slice::Slice;
use super::view::ObjectIndex;
use crate::snapshot::mesh::{Mesh, Workload};
use crate::yaml::Place;

/// Namespaces that have the addresses of endpoints, and services that have VIPs. Each keeps what it
/// has against later claims with equal evidence.
#[derive(Clone, Debug, Default)]
pub struct AddressHolders {
    endpoints: Holders,
    vips: Holders,
}

pub(super) struct AddressClaims<'a> {
    pub(super) endpoints: Claims<'a>,
    pub(super) vips: Claims<'a>,
    nodes: HashSet<IpAddr>,
}

/// Claims as they are collected.
struct Collector<'a> {
    nodes: HashSet<IpAddr>,
    endpoints: Vec<Claim<'a>>,
    vips: Vec<Claim<'a>>,
}

impl<'a> AddressClaims<'a> {
    /// Collects the claims of objects and of a mesh file.
    pub(super) fn new(view: &ObjectIndex<'a>, mesh: &'a Mesh, held: &'a AddressHolders) -> Self {
        let network = &*view.config.gateway.network;
        let of_mesh = here(mesh, network).filter(|one| one.host_network);
        let of_mesh = of_mesh.flat_map(|one| one.addresses.iter().copied());
        let nodes = view.node_addresses().chain(of_mesh).collect();
        let mut collector = Collector { nodes, endpoints: Vec::new(), vips: Vec::new() };
        collector.add_mesh(mesh, network);
        collector.add_objects(view);
        let Collector { nodes, endpoints, mut vips } = collector;
        let endpoints = Claims::new(endpoints, &held.endpoints);
        for (key, import) in view.imports() {
            let place = Some(&import.meta.place);
            for ip in &import.ips {
                let at = (*ip, 0);
                vips.push(Claim { at, by: key, evidence: Evidence::Import, place });
                // A tunnel to the address of an endpoint of another namespace stays there.
                let owner = endpoints.proven_elsewhere(*ip, key.0);
                vips.extend(owner.map(|of| Claim { evidence: Evidence::Managed, ..of }));
            }
        }
        Self { endpoints, vips: Claims::new(vips, &held.vips), nodes }
    }

    /// Returns the addresses that endpoints of a slice use: ports of a node's address, or any other
    /// address as a whole.
    pub(super) fn used(
        &self,
        ip: IpAddr,
        ports: impl Iterator<Item = u16>,
    ) -> impl Iterator<Item = At> {
        let is_node = self.nodes.contains(&ip);
        let whole = (!is_node).then_some(0);
        ports.filter(move |_| is_node).chain(whole).map(move |port| (ip, port))
    }

    /// Returns the addresses of an endpoint that services of a namespace may use, and the pairs of
    /// service port and endpoint port that they may use at all of these.
    pub(super) fn usable(
        &self,
        namespace: &str,
        addresses: &[IpAddr],
        ports: &[(u16, u16)],
    ) -> (Vec<IpAddr>, Vec<(u16, u16)>) {
        let may_use = |ip: &&IpAddr| {
            let mut used = self.used(**ip, ports.iter().map(|(_, target)| *target));
            used.any(|at| self.endpoints.has((namespace, ""), at))
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
        !self.nodes.contains(&ip) || self.endpoints.has((namespace, ""), (ip, port))
    }

    /// Returns the addresses of an object with this evidence that lead to its service.
    pub(super) fn vips_of(&self, key: Key<'_>, ips: &[IpAddr], by: Evidence) -> Vec<IpAddr> {
        let leads = |ip: &&IpAddr| {
            let at = (**ip, 0);
            self.vips.has(key, at) && self.vips.evidence(key, at) == Some(by)
        };
        ips.iter().filter(leads).copied().collect()
    }

    pub(super) fn holders(&self) -> AddressHolders {
        AddressHolders { endpoints: self.endpoints.holders(), vips: self.vips.holders() }
    }
}

impl<'a> Collector<'a> {
    fn add_mesh(&mut self, mesh: &'a Mesh, network: &str) {
        for workload in here(mesh, network) {
            let ports = workload.services.iter();
            let ports = ports.flat_map(|(_, ports)| ports.iter().map(|(_, target)| *target));
            let ports: Vec<_> = ports.collect();
            let ports = workload.host_network.then_some(&*ports);
            let (evidence, place) = (Evidence::File, None);
            for ip in workload.addresses.iter() {
                let at = (*ip, 0);
                for of in namespaces(workload) {
                    self.add_endpoint(Claim { at, by: (of, ""), evidence, place }, ports);
                }
            }
        }
        for service in mesh.services.values() {
            let vips = service.vips.iter();
            for (_, ip) in vips.filter(|(of, _)| of.is_empty() || of == network) {
                self.add_vip(*ip, (&service.namespace, &service.name), Evidence::File, None);
            }
        }
    }

    fn add_objects(&mut self, view: &ObjectIndex<'a>) {
        for (key, service) in view.own_services() {
            for ip in &service.ips {
                self.add_vip(*ip, key, Evidence::Assigned, Some(&service.meta.place));
            }
        }
        for pod in view.pods().filter(|pod| !pod.host_network) {
            let (by, place) = ((&*pod.meta.namespace, ""), Some(&pod.meta.place));
            let claim =
                |ip: &IpAddr| Claim { at: (*ip, 0), by, evidence: Evidence::Assigned, place };
            self.endpoints.extend(pod.addresses.iter().map(claim));
        }
        for (key, cluster, slice) in view.all_slices() {
            if *view.network(cluster, slice) == *view.config.gateway.network {
                self.add_slice(view, key, cluster, slice);
            }
        }
    }

    fn add_slice(&mut self, view: &ObjectIndex<'a>, key: Key<'a>, cluster: &str, slice: &'a Slice) {
        let is_managed = view.is_managed(key, cluster, slice);
        let ports = view.claimed_ports(slice);
        // Any number of pods can have the address of their node.
        let mut addresses = HashMap::new();
        for backend in &slice.endpoints {
            let evidence = match backend.own_pod(key.0) {
                Some(_) if is_managed => Evidence::Managed,
                Some(_) | None => Evidence::Slice,
            };
            for ip in &backend.addresses {
                let best = addresses.entry(*ip).or_insert(evidence);
                *best = evidence.max(*best);
            }
        }
        for (ip, evidence) in addresses {
            let (at, by, place) = ((ip, 0), (key.0, ""), Some(&slice.place));
            self.add_endpoint(Claim { at, by, evidence, place }, ports.as_deref());
        }
    }

    /// Adds a claim to an address or, if it is that of a node, to these ports of it.
    fn add_endpoint(&mut self, claim: Claim<'a>, ports: Option<&[u16]>) {
        let ip = claim.at.0;
        let Some(ports) = ports.filter(|_| self.nodes.contains(&ip)) else {
            return self.endpoints.push(claim);
        };
        self.endpoints.extend(ports.iter().map(|port| Claim { at: (ip, *port), ..claim }));
        if claim.evidence > Evidence::OtherPort {
            self.endpoints.push(Claim { evidence: Evidence::OtherPort, ..claim });
        }
    }

    /// Adds a claim to a VIP, at which nobody else has an endpoint either.
    fn add_vip(&mut self, ip: IpAddr, by: Key<'a>, evidence: Evidence, place: Option<&'a Place>) {
        let claim = Claim { at: (ip, 0), by, evidence, place };
        self.vips.push(claim);
        self.endpoints.push(Claim { by: (by.0, ""), ..claim });
    }
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
