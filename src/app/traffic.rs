//! Position of this gateway, and checks of the load balancing of the configuration against the
//! mesh.

use std::collections::HashSet;
use std::path::Path;

use crate::config::pod::Pod;
use crate::config::{Config, Discovery, LocalityOrigin, MeshFile};
use crate::snapshot::mesh::{Locality, Mesh};
use crate::snapshot::traffic::Position;
use crate::wire::RegionPattern;
use crate::xds::objects::limit_findings;
use crate::yaml::Finding;

/// Returns the position of this gateway from the configuration, or from the pod until the mesh
/// contains its record. Only istiod sends records of pods.
pub(super) fn position(config: &Config, pod: Option<&Pod>) -> Position {
    let gateway = &config.gateway;
    let is_istiod = matches!(config.discovery, Discovery::Istio(_));
    let (origin, is_final) = match &gateway.locality_origin {
        LocalityOrigin::Unknown => ("", false),
        LocalityOrigin::Configuration => ("gateway.locality", true),
        LocalityOrigin::Pod(by) => (by.as_str(), false),
    };
    let record = pod.filter(|_| is_istiod && !is_final);
    Position {
        origin: origin.into(),
        own_uid: record.and_then(|pod| Some(pod.record.as_deref()?.into())),
        cluster: config.gateway.cluster.as_str().into(),
        locality: gateway.locality.clone(),
    }
}

/// Returns warnings about entries for services and regions that the mesh file does not have.
pub(super) fn unknown_names(config: &Config, mesh: &Mesh) -> Vec<Finding> {
    let Discovery::File(MeshFile { path }) = &config.discovery else {
        return Vec::new();
    };
    let services = limit_findings(services(config, mesh, path));
    let regions = limit_findings(regions(config, mesh, path));
    [services, regions].concat()
}

/// Returns warnings about weights of regions without workloads. With weights, endpoints that no
/// entry matches get no tunnels, so one typo can leave a service without endpoints.
fn regions(config: &Config, mesh: &Mesh, path: &Path) -> Vec<Finding> {
    let workloads = mesh.workloads.values();
    let localities: HashSet<&Locality> = workloads.map(|one| &*one.locality).collect();
    let has_workload = |region: &RegionPattern| {
        let mut localities = localities.iter();
        region.part_count() == 0
            || localities.any(|at| region.matches(&at.region, &at.zone, &at.subzone))
    };
    let entries = config.traffic.iter();
    let weights = entries.flat_map(|entry| entry.regions.iter().map(move |one| (entry, one)));
    let unknown = weights.filter(|(_, one)| one.weight > 0 && !has_workload(&one.region)).map(
        |(entry, one)| {
            let what = format!(
                "`traffic` has unknown region {}: no workload of {} is in it",
                one.region,
                path.display()
            );
            let namespace = entry.namespace.as_deref().unwrap_or_default();
            Finding::warning(&entry.line.0, what, "one of its regions").of(namespace)
        },
    );
    unknown.collect()
}

/// Returns warnings about entries for unknown services.
fn services(config: &Config, mesh: &Mesh, path: &Path) -> Vec<Finding> {
    let services = mesh.services.values();
    let hostnames: HashSet<&str> = services.map(|service| &*service.hostname).collect();
    let is_known = |host: &str| {
        let mut aliases = config.names.aliases.iter();
        hostnames.contains(host)
            // An alias of several services, or of one region of a service, is balanced
            // separately.
            || aliases.any(|alias| {
                alias.name.host == host && (alias.to.len() > 1 || alias.region.is_some())
            })
    };
    let entries = config.traffic.iter();
    let entries = entries.filter_map(|entry| Some((entry, entry.service.as_deref()?)));
    let unknown = entries.filter(|(_, host)| !is_known(host)).map(|(entry, host)| {
        let what = format!("`traffic` has unknown service {host}: it is not in {}", path.display());
        let namespace = entry.namespace.as_deref().unwrap_or_default();
        Finding::warning(&entry.line.0, what, "the hostname of one").of(namespace)
    });
    unknown.collect()
}
