//! Join of the mesh with the snapshot that is built from it: each service with its workloads, and
//! for each workload whether it is dialled, or the reason why not.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::time::Instant;

use super::DenyLookup;
use crate::snapshot::mesh::{Mesh, Ports, Service, Workload};
use crate::snapshot::{
    self, Endpoint, ExclusionReason, Snapshot, exclusion_reason, location_exclusion,
};

pub(super) struct View<'a> {
    pub(super) snapshot: &'a Snapshot,
    denies: &'a DenyLookup,
    now: Instant,
    /// By `namespace/hostname`.
    by_service: HashMap<&'a str, Vec<&'a Workload>>,
}

/// Workload that belongs to a service.
pub(super) struct Member<'a> {
    pub(super) workload: &'a Workload,
    /// Service port to target port, as defined by the workload.
    pub(super) targets: &'a Ports,
    pub(super) ports: Vec<MemberPort<'a>>,
}

pub(super) struct MemberPort<'a> {
    pub(super) port: u16,
    /// Endpoint that is dialled, if there is one.
    pub(super) endpoint: Option<&'a Endpoint>,
    pub(super) ejected: bool,
    /// Reason why it is not used.
    pub(super) unused: Option<String>,
}

impl<'a> View<'a> {
    pub(super) fn new(snapshot: &'a Snapshot, denies: &'a DenyLookup, now: Instant) -> Self {
        let mut by_service: HashMap<&str, Vec<&Workload>> = HashMap::new();
        for workload in workloads(&snapshot.mesh) {
            for service in workload.services.keys() {
                by_service.entry(service).or_default().push(workload);
            }
        }
        Self { snapshot, denies, now, by_service }
    }

    pub(super) fn services(&self) -> impl Iterator<Item = &'a Service> + use<'a> {
        let services = self.snapshot.mesh.services.sorted();
        services.into_iter().map(|service| &**service)
    }

    pub(super) fn workloads(&self) -> impl Iterator<Item = &'a Workload> + use<'a> {
        workloads(&self.snapshot.mesh)
    }

    /// Returns the workloads of a service, in the order of the mesh.
    pub(super) fn members(&self, service: &Service) -> Vec<Member<'a>> {
        let key = service.key();
        let built = self.snapshot.services.get(&service.hostname);
        // Of several services with one hostname the snapshot serves one.
        let own = built.filter(|built| *built.namespace == *service.namespace);
        let mut sets = HashMap::new();
        for (&port, set) in own.into_iter().flat_map(|built| built.ports.iter()) {
            let by_uid = set.endpoints.iter().map(|one| (&**one.uid(), &**one));
            sets.insert(port, by_uid.collect::<HashMap<_, _>>());
        }
        let members = self.by_service.get(key.as_str()).into_iter().flatten();
        let members = members.filter_map(|workload| {
            let targets = workload.services.get(&*key)?;
            let ports = targets.keys().map(|&port| {
                let found = sets.get(&port).and_then(|set| set.get(&*workload.uid));
                let endpoint = found.copied();
                MemberPort {
                    port,
                    endpoint,
                    ejected: endpoint.is_some_and(|found| found.state.is_ejected(self.now)),
                    unused: self.unused_reason(service, built, workload, port, endpoint),
                }
            });
            Some(Member { workload, targets, ports: ports.collect() })
        });
        members.collect()
    }

    fn unused_reason(
        &self,
        service: &Service,
        built: Option<&Arc<snapshot::Service>>,
        workload: &Workload,
        port: u16,
        endpoint: Option<&Endpoint>,
    ) -> Option<String> {
        if let Some(why) = exclusion_reason(self.snapshot, service, workload, port) {
            let sets = built.and_then(|built| built.transit_ports.get(&port));
            let (ExclusionReason::OtherNetwork(network), Some(sets)) = (&why, sets) else {
                return Some(why.to_string());
            };
            let mut others = sets.always.endpoints.iter();
            if others.any(|one| one.remote.as_ref().is_some_and(|of| *of.network == *network)) {
                let text = format!("in network {network}, reached through its gateways by transit");
                return Some(text);
            }
            let by_location = location_exclusion(self.snapshot, service, workload, port);
            let by_location = by_location.map(|why| why.in_network(network));
            return Some(by_location.unwrap_or_else(|| why.to_string()));
        }
        let Some(endpoint) = endpoint else {
            return Some(match built {
                Some(built) => {
                    format!("the hostname belongs to the service of namespace {}", built.namespace)
                }
                None => "no service owns this hostname; see Problems".to_owned(),
            });
        };
        self.not_dialled_reason(endpoint)
    }

    /// Returns the gateways of other networks that tunnels to a service may use, each with the
    /// service port.
    pub(super) fn gateways(&self, service: &Service) -> Vec<(u16, &'a Endpoint)> {
        let built = self.snapshot.services.get(&service.hostname);
        let own = built.filter(|built| *built.namespace == *service.namespace);
        let sets = own.into_iter().flat_map(|built| built.transit_ports.iter());
        let endpoints = sets.flat_map(|(port, sets)| {
            let endpoints = sets.always.endpoints.iter();
            endpoints.map(|endpoint| (*port, &**endpoint))
        });
        let remote = endpoints.filter(|(_, endpoint)| endpoint.remote.is_some());
        let mut remote: Vec<_> = remote.collect();
        remote.sort_by_key(|(port, endpoint)| (*port, endpoint.address));
        remote
    }

    /// Returns why an endpoint is not dialled at present, apart from its weight and tier.
    pub(super) fn not_dialled_reason(&self, endpoint: &Endpoint) -> Option<String> {
        if let Some(rule) = (self.denies)(endpoint.address) {
            return Some(format!("its address is {rule}; see `dial.allow`"));
        }
        let left = endpoint.state.ejected_for(self.now)?;
        let seconds = left.as_millis().div_ceil(1000);
        Some(format!("its dials failed; ejected for {seconds}s more"))
    }
}

fn workloads(mesh: &Mesh) -> impl Iterator<Item = &Workload> {
    let workloads = mesh.workloads.sorted();
    workloads.into_iter().map(|workload| &**workload)
}
