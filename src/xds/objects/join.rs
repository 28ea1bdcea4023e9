//! Merge of the objects of all clusters into this gateway's mesh.
//!
//! A service with the same namespace and name may be in several clusters. Its name in this
//! cluster, `NAME.NAMESPACE.svc.cluster.local`, refers to the endpoints here. Once a cluster
//! exports it, a global service has the endpoints of all exporting clusters. If only this
//! cluster exports it, both are the same, and the names of one lead to the other.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::Objects;
use super::addresses::{AddressClaims, AddressHolders};
use super::claims::Evidence;
use super::entries::by_age;
use super::findings;
use super::limited::LimitedFindings;
use super::members::{ServedEndpoint, ServicePorts, Site, WorkloadMerger, with_services};
use super::names::{Key, LOCAL_SUFFIX, host, name};
use super::needs::Needs;
use super::ports::Ports;
use super::service::{DeclaredScope, Service};
use super::slice::Slice;
use super::view::ObjectIndex;
use super::waypoints::{self, NamedWaypoint};
use crate::config::Config;
use crate::snapshot::ServiceVisibility;
use crate::snapshot::mesh::{self, Mesh, Protocol, Scope, Waypoint};
use crate::yaml::{Finding, Findings};

/// Suffixes of a global service: MCS's, which has the addresses of the import, and that of
/// Istio's ambient mode.
const GLOBAL_SUFFIXES: [&str; 2] = ["svc.clusterset.local", "mesh.internal"];

/// Result of [`join()`].
#[derive(Debug)]
pub struct JoinResult {
    /// Mesh with the services and endpoints of the objects.
    pub mesh: Mesh,
    /// Exported services, services that stay local, and linked clusters.
    pub scope: ServiceVisibility,
    /// Warnings.
    pub warnings: Findings,
    /// Claims to addresses and pods that other claims override.
    pub conflicts: Findings,
    /// Holders of the addresses, for the next join.
    pub holders: AddressHolders,
}

/// Returns the names that a service may have in a mesh.
pub(super) fn names(key: Key<'_>) -> impl Iterator<Item = Arc<str>> {
    GLOBAL_SUFFIXES.into_iter().chain([LOCAL_SUFFIX]).map(move |suffix| name(key, suffix))
}

/// Joins a mesh with objects according to the cluster, network and exposure of a configuration.
/// `held` are the holders of the addresses by the last join; none at the start.
pub fn join(mesh: &Mesh, objects: &Objects, config: &Config, held: &AddressHolders) -> JoinResult {
    let mut warnings = LimitedFindings::default();
    let view = ObjectIndex::new(objects, config, &mut warnings);
    let claims = AddressClaims::new(&view, mesh, held);
    let needs = Needs::new(objects, config);
    let mut joining = Joiner {
        view: &view,
        needs: &needs,
        mesh: mesh.clone(),
        members: WorkloadMerger::default(),
        claims: &claims,
        global_services_of: HashMap::new(),
        scope: ServiceVisibility::of_links(config),
        warnings,
        reported_slices: HashSet::new(),
    };
    joining.scope.closed = view.closed_namespaces().map(|name| (&**name).into()).collect();
    for bound in by_age(&objects.entries, config).into_iter().flat_map(|of| &of.bound) {
        if let Some(rule) = needs.excludes_name(&bound.service.host) {
            let names = [&bound.name, &bound.service.host].map(|name| name.as_str().into());
            joining.scope.unneeded.extend(names.map(|name| (name, Arc::clone(rule))));
        }
    }
    for key in view.keys() {
        joining.join(key);
    }
    let mut joined = joining.finish();
    joined.conflicts.0.extend(waypoints::findings(&view, mesh));
    joined
}

/// Intermediate state of [`join()`].
struct Joiner<'a> {
    view: &'a ObjectIndex<'a>,
    needs: &'a Needs<'a>,
    mesh: Mesh,
    members: WorkloadMerger<'a>,
    claims: &'a AddressClaims<'a>,
    /// Global services that workloads of the mesh file serve too, by their own service.
    global_services_of: HashMap<Arc<str>, Vec<Arc<str>>>,
    scope: ServiceVisibility,
    warnings: LimitedFindings,
    /// Slices with a warning that none of their ports is a port of their service.
    reported_slices: HashSet<*const Slice>,
}

impl<'a> Joiner<'a> {
    fn join(&mut self, key: Key<'a>) {
        let own = self.view.own_cluster();
        let service = self.view.service(key, own);
        let is_known =
            service.is_some() || self.mesh.services.contains_key(&*name(key, LOCAL_SUFFIX));
        let mut exporters = self.view.exporters(key);
        self.check_exports(key, is_known, &mut exporters);
        self.check_needs(key, &mut exporters);
        let is_exported = exporters.contains(&own);
        let is_kept = self.view.is_local(key, own);
        let has_others = exporters.iter().any(|cluster| *cluster != own);
        let is_global = has_others || self.view.import(key).is_some();
        let is_only =
            service.is_some_and(|one| one.declared == DeclaredScope::GlobalOnly && !is_kept);
        let globals = || GLOBAL_SUFFIXES.iter().map(|suffix| host(key, suffix).into());
        if is_exported {
            self.scope.exported.insert(host(key, LOCAL_SUFFIX).into());
        }
        if is_kept {
            self.scope.local.insert(host(key, LOCAL_SUFFIX).into());
        }
        match (is_kept && !is_global, exporters.is_empty()) {
            (true, _) => self.scope.local.extend(globals()),
            (false, false) => self.scope.exported.extend(globals()),
            (false, true) => {}
        }
        if is_only && is_global {
            self.add_global_service(key, &exporters, &[LOCAL_SUFFIX], service);
            return;
        }
        if let Some(service) = service {
            self.add_local_service(key, service);
        }
        if is_global {
            self.add_global_service(key, &exporters, &GLOBAL_SUFFIXES, service);
            if is_exported {
                let globals = GLOBAL_SUFFIXES.iter().map(|suffix| name(key, suffix));
                self.global_services_of.insert(name(key, LOCAL_SUFFIX), globals.collect());
            }
        }
    }

    /// Warns of exports of unknown services, and of services that stay in their cluster. Under
    /// a control plane, unknown services are not reported, because the objects are not the full
    /// list.
    fn check_exports(&mut self, key: Key<'a>, is_known: bool, exporters: &mut Vec<&'a str>) {
        let own = self.view.own_cluster();
        let Some(export) = self.view.export(key, own) else {
            return;
        };
        let (namespace, service) = key;
        let place = &export.meta.place;
        if self.view.is_local(key, own) {
            let what = format!(
                "the export of {namespace}/{service} has no effect: the Service stays in its \
                 cluster"
            );
            let how = "the Service without that label";
            self.warnings.push(Finding::warning(place, what, how).of(namespace));
        } else if !is_known && self.view.config.discovery.is_of_objects() {
            let what =
                format!("the export of {namespace}/{service} has no effect: no such Service");
            let how = "the name of one";
            self.warnings.push(Finding::warning(place, what, how).of(namespace));
            exporters.retain(|cluster| *cluster != own);
        }
    }

    /// Removes the other clusters of a service that is not needed from them.
    fn check_needs(&mut self, key: Key<'a>, exporters: &mut Vec<&'a str>) {
        let own = self.view.own_cluster();
        let labels = self.view.metadata(key).map(|meta| &meta.labels);
        let has_others = exporters.iter().any(|cluster| *cluster != own);
        let Some(rule) = self.needs.excludes(labels).filter(|_| has_others) else {
            return;
        };
        exporters.retain(|cluster| *cluster == own);
        let hosts = GLOBAL_SUFFIXES.into_iter().chain([LOCAL_SUFFIX]);
        let hosts = hosts.map(|suffix| (host(key, suffix).into(), Arc::clone(rule)));
        self.scope.unneeded.extend(hosts);
        if let Some(meta) = self.view.metadata(key).next() {
            let (namespace, name) = key;
            let what = format!(
                "the endpoints of {namespace}/{name} in other clusters are not used: {rule}"
            );
            self.warnings.push(Finding::warning(&meta.place, what, "").of(namespace));
        }
    }

    fn add_local_service(&mut self, key: Key<'a>, service: &'a Service) {
        let mut ports = Ports::default();
        let host = host(key, LOCAL_SUFFIX);
        ports.add(&service.ports, &host, &service.meta, &mut self.warnings);
        let preferences = service.preferences.clone();
        let ips = self.claims.vips_of(key, &service.ips, Evidence::Assigned);
        self.add_service(key, LOCAL_SUFFIX, &ports, preferences, &ips);
        let own = self.view.own_cluster();
        self.add_endpoints(key, &[own], &[name(key, LOCAL_SUFFIX)], &ports);
    }

    /// Adds a service with the endpoints of all clusters that export it.
    fn add_global_service(
        &mut self,
        key: Key<'a>,
        exporters: &[&'a str],
        suffixes: &[&str],
        own: Option<&'a Service>,
    ) {
        let shown = host(key, GLOBAL_SUFFIXES[0]);
        let mut ports = Ports::default();
        let mut preferences = None;
        for cluster in exporters {
            let Some(service) = self.view.service(key, cluster) else {
                continue;
            };
            ports.add(&service.ports, &shown, &service.meta, &mut self.warnings);
            preferences = preferences.or_else(|| service.preferences.clone());
        }
        let import = self.view.import(key);
        if let Some(import) = import {
            ports.add(&import.ports, &shown, &import.meta, &mut self.warnings);
        }
        if own.is_none() && exporters.contains(&self.view.own_cluster()) {
            // The Service of this cluster is in the mesh file, which has no port names.
            let known = self.mesh.services.get(&name(key, LOCAL_SUFFIX));
            ports.add_numbers(known.into_iter().flat_map(|known| &known.ports));
        }
        let ips = import.map_or(&[][..], |import| &import.ips);
        let mut ips = self.claims.vips_of(key, ips, Evidence::Import);
        if *suffixes == [LOCAL_SUFFIX] {
            let own = own.map_or(&[][..], |own| &own.ips);
            ips.extend(self.claims.vips_of(key, own, Evidence::Assigned));
        }
        for (index, suffix) in suffixes.iter().enumerate() {
            let ips = if index == 0 { &*ips } else { &[] };
            self.add_service(key, suffix, &ports, preferences.clone(), ips);
        }
        if ports.targets.is_empty() {
            self.warn_of_no_ports(key, exporters);
        }
        let names: Vec<_> = suffixes.iter().map(|suffix| name(key, suffix)).collect();
        self.add_endpoints(key, exporters, &names, &ports);
    }

    /// Warns of slices whose service has no ports.
    fn warn_of_no_ports(&mut self, key: Key<'a>, exporters: &[&'a str]) {
        let mut slices = self.view.slices(key);
        let slice = slices.find(|(cluster, _)| exporters.contains(cluster));
        if let Some((cluster, slice)) = slice {
            let what = format!(
                "the endpoints of {}/{} in cluster {cluster} are not used: neither a Service nor a \
                 ServiceImport defines its ports",
                key.0, key.1
            );
            let how = "a Service or a ServiceImport with its ports";
            self.warnings.push(Finding::warning(&slice.place, what, how).of(key.0));
        }
    }

    /// Warns of endpoints that serve no port of their service. A slice is reported once,
    /// although its service may have several names.
    fn warn_of_other_ports(&mut self, (namespace, name): Key<'a>, slice: &'a Slice) {
        if !self.reported_slices.insert(slice) {
            return;
        }
        let what = format!(
            "the endpoints of {namespace}/{name} here are not used: none of their ports has the \
             name of one of its ports"
        );
        let how = "the Service's names into `ports[].name`";
        self.warnings.push(Finding::warning(&slice.place, what, how).of(namespace));
    }

    /// Adds a service, or adds ports and addresses to an existing one.
    fn add_service(
        &mut self,
        key: Key<'a>,
        suffix: &str,
        ports: &Ports<'_>,
        preferences: Option<Vec<Scope>>,
        ips: &[IpAddr],
    ) {
        let hostname: Arc<str> = host(key, suffix).into();
        let network = &self.view.config.gateway.network;
        let name = name(key, suffix);
        let known = self.mesh.services.get(&name).map(|known| mesh::Service::clone(known));
        let mut service = known.unwrap_or_else(|| mesh::Service {
            name: key.1.into(),
            namespace: key.0.into(),
            hostname: Arc::clone(&hostname),
            waypoints: self.waypoint(key, suffix).into_iter().collect(),
            preferences,
            ..mesh::Service::default()
        });
        for (port, target) in &ports.targets {
            service.ports.entry(*port).or_insert(*target);
        }
        for ip in ips {
            let vip = (network.clone(), *ip);
            if !service.vips.contains(&vip) {
                service.vips.push(vip);
            }
        }
        self.mesh.services.insert(name, Arc::new(service));
    }

    /// Returns the waypoint of a service that has endpoints in this cluster.
    fn waypoint(&self, key: Key<'a>, suffix: &str) -> Option<Waypoint> {
        let is_here =
            suffix == LOCAL_SUFFIX || self.scope.exported.contains(&*host(key, LOCAL_SUFFIX));
        let service = self.view.service(key, self.view.own_cluster())?;
        let named = NamedWaypoint::find(self.view, service).filter(|_| is_here)?;
        Some(named.waypoint())
    }

    fn add_endpoints(
        &mut self,
        key: Key<'a>,
        clusters: &[&str],
        services: &[Arc<str>],
        ports: &Ports<'_>,
    ) {
        let view = self.view;
        let clusters: HashSet<_> = clusters.iter().copied().collect();
        let services: Arc<[_]> = services.into();
        for (cluster, slice) in view.slices(key) {
            if !clusters.contains(cluster) {
                continue;
            }
            let own_region = if cluster == view.own_cluster() {
                &*view.config.gateway.locality.region
            } else {
                ""
            };
            let site = Site {
                cluster,
                network: view.network(cluster, slice),
                namespace: &slice.namespace,
                region: slice.region.as_deref().unwrap_or(own_region),
                protocol: if view.is_ambient(cluster, slice) {
                    Protocol::Hbone
                } else {
                    Protocol::Tcp
                },
            };
            let ports = ports.of_slice(&slice.ports);
            if ports.is_empty() && !slice.ports.is_empty() && !slice.endpoints.is_empty() {
                self.warn_of_other_ports(key, slice);
            }
            let is_here = *site.network == *view.config.gateway.network;
            let addressed = slice.endpoints.iter().filter(|one| one.host.is_empty());
            for backend in addressed {
                let (addresses, ports) = if is_here {
                    self.claims.usable(site.namespace, &backend.addresses, &ports)
                } else {
                    (backend.addresses.clone(), ports.clone())
                };
                if addresses.is_empty() && !backend.addresses.is_empty() {
                    continue;
                }
                let services = Arc::clone(&services);
                self.members.add(ServedEndpoint { site, backend, addresses, services, ports });
            }
        }
    }

    fn finish(mut self) -> JoinResult {
        self.add_global_services_to_workloads();
        // Warnings about the operator's entries come first, because tenants can cause any
        // number of warnings.
        let mut warnings = self.warn_of_local_entries();
        let network = &self.view.config.gateway.network;
        let claims = self.claims;
        let may_use = |namespace: &str, ip, port| claims.may_use(namespace, ip, port);
        self.members.into_mesh(network, &mut self.mesh, may_use);
        warnings.extend(self.warnings.into_vec());
        JoinResult {
            mesh: self.mesh,
            scope: self.scope,
            warnings: Findings(warnings),
            conflicts: Findings(findings::findings(self.view, claims)),
            holders: claims.holders(),
        }
    }

    /// Warns of entries of `exposure` for services that stay in their cluster.
    fn warn_of_local_entries(&self) -> Vec<Finding> {
        let config = self.view.config;
        let entries = config.exposure.services.iter();
        let kept = entries.filter(|entry| self.scope.local.contains(&*entry.service.host));
        let kept = kept.map(|entry| {
            let host = &entry.service.host;
            let what = format!("{host} is exposed to nobody: its Service stays in its cluster");
            Finding::warning(&entry.line.0, what, "the file without the entry")
        });
        kept.collect()
    }

    /// Adds global services to the workloads of the mesh file that serve their local service.
    fn add_global_services_to_workloads(&mut self) {
        if self.global_services_of.is_empty() {
            return;
        }
        let mut changed = Vec::new();
        for workload in self.mesh.workloads.values() {
            let mut served = ServicePorts::new();
            for (name, ports) in workload.services.iter() {
                for other in self.global_services_of.get(name).into_iter().flatten() {
                    served.entry(Arc::clone(other)).or_insert_with(|| ports.to_map());
                }
            }
            served.retain(|name, _| workload.services.get(name).is_none());
            if !served.is_empty() {
                changed.push(with_services(mesh::Workload::clone(workload), served));
            }
        }
        for workload in changed {
            let uid = Arc::clone(&workload.uid);
            self.mesh.workloads.insert(uid, Arc::new(workload));
        }
    }
}
