//! Load balancing of the configuration: snapshot types, and checks against the mesh.

use std::collections::HashSet;
use std::iter;
use std::path::Path;
use std::sync::Arc;

use crate::config::pod::Pod;
use crate::config::{Config, Discovery, Distribution, LocalityOrigin};
use crate::snapshot::mesh::{Locality, Mesh, Scope};
use crate::snapshot::traffic::{Position, Regions, Spill, Traffic, TrafficRule};
use crate::snapshot::{NetworkRule, NetworkTable};
use crate::wire::HBONE_PORT;
use crate::wire::RegionPattern;
use crate::xds::objects::limit_findings;
use crate::yaml::Finding;

/// Returns the position of this gateway from the configuration, or from the pod until the mesh
/// contains its record. Only istiod sends records of pods.
pub(super) fn position(config: &Config, pod: Option<&Pod>) -> Position {
    let gateway = &config.gateway;
    let is_istiod = matches!(config.discovery, Discovery::Istio { .. });
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

/// Returns the balancing rules of the configuration.
pub(super) fn traffic_rules(config: &Config) -> Traffic {
    let (mut services, mut default_rule) = (Vec::new(), TrafficRule::default());
    for entry in &config.traffic {
        let preferences: Option<&[Scope]> = entry.distribution.map(|named| match named {
            Distribution::Close => &[Scope::Network, Scope::Region, Scope::Zone][..],
            Distribution::Network => &[Scope::Network],
            Distribution::Region => &[Scope::Network, Scope::Region],
            Distribution::Any => &[],
        });
        let weights = entry.regions.iter();
        let rule = TrafficRule {
            namespace: entry.namespace.clone(),
            preferences,
            spill: entry.spill_below.map(Spill::below),
            regions: Regions::new(weights.map(|one| (one.region.clone(), one.weight))),
            by_latency: entry.latency,
        };
        match &entry.service {
            Some(service) => {
                let others = entry
                    .alias_namespaces
                    .iter()
                    .map(|of| TrafficRule { namespace: Some(Arc::clone(of)), ..rule.clone() });
                let others: Vec<_> = others.collect();
                let rules = iter::once(rule).chain(others);
                services.extend(rules.map(|rule| (service.as_str().into(), rule)));
            }
            None => default_rule = rule,
        }
    }
    Traffic::new(services, default_rule)
}

/// Returns the other networks of the configuration.
pub(super) fn networks(config: &Config) -> NetworkTable {
    let networks = config.networks.iter().map(|network| {
        let gateways = network.gateways.iter().map(|gateway| {
            let port = gateway.port.unwrap_or(HBONE_PORT);
            (gateway.host.as_str().into(), port)
        });
        let identities = network.identities.iter();
        let rule = NetworkRule {
            cluster: network.cluster.as_deref().unwrap_or_default().into(),
            identities: identities.map(|one| one.as_str().into()).collect(),
            gateways: gateways.collect(),
        };
        (network.name.as_str().into(), rule)
    });
    let domains = config.trust.domains.iter();
    let domains = domains.map(|domain| (&*domain.name, &*domain.cluster));
    let table = NetworkTable::from_iter(networks).with_domains(domains);
    table.with_bindings(!config.bindings.is_empty())
}

/// Returns warnings about entries for services and regions that the mesh file does not have.
pub(super) fn unknown_names(config: &Config, mesh: &Mesh) -> Vec<String> {
    let Discovery::File { path } = &config.discovery else {
        return Vec::new();
    };
    let services = limit_findings(services(config, mesh, path));
    let regions = limit_findings(regions(config, mesh, path));
    let all = services.iter().chain(&regions);
    all.map(ToString::to_string).collect()
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
