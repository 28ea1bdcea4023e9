//! Load balancing of the configuration: snapshot types, and checks against the mesh.

use std::collections::HashSet;
use std::path::Path;

use crate::config::pod::Pod;
use crate::config::{Config, Discovery, Distribution, LocalityOrigin};
use crate::snapshot::builder::HBONE_PORT;
use crate::snapshot::mesh::{Locality, Mesh, Scope};
use crate::snapshot::traffic::{Position, Regions, Spill, Traffic, TrafficRule};
use crate::snapshot::{NetworkRule, NetworkTable};
use crate::wire::RegionPattern;

/// Returns the position of this gateway from the configuration, or from the pod until the mesh
/// contains its record. Only istiod sends records of pods.
pub(super) fn position(config: &Config, pod: Option<&Pod>) -> Position {
    let gateway = &config.gateway;
    let (locality, is_istiod) = (
        &gateway.locality,
        matches!(config.discovery, Discovery::Istio { .. }),
    );
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
        locality: Locality {
            region: locality.region.as_str().into(),
            zone: locality.zone.as_str().into(),
            subzone: locality.subzone.as_str().into(),
        },
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
            Some(service) => services.push((service.as_str().into(), rule)),
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
    let mut warnings = services(config, mesh, path);
    warnings.extend(regions(config, mesh, path));
    warnings
}

/// Removes distributions of objects that the mesh file contradicts, and returns an error for each:
/// those of a service of another namespace, and those whose regions have no workload, which would
/// leave the service without endpoints.
pub(super) fn remove_unusable(config: &mut Config, mesh: &Mesh) -> Vec<String> {
    let Discovery::File { path } = &config.discovery else {
        return Vec::new();
    };
    let localities = localities(mesh);
    let mut errors = Vec::new();
    config.traffic.retain(|entry| {
        let (Some(namespace), Some(host)) = (&entry.namespace, entry.service.as_deref()) else {
            return true;
        };
        let owners = mesh.services.values();
        let mut owners = owners.filter(|one| *one.hostname == *host).peekable();
        let is_foreign = owners.peek().is_some() && !owners.any(|one| one.namespace == *namespace);
        let weights = || entry.regions.iter().filter(|one| one.weight > 0);
        let has_weights = weights().next().is_some();
        let wrong = if is_foreign {
            format!(
                "{host} is not a service of namespace {namespace}, so its distribution is \
                 ignored; write a policy in the namespace of the service"
            )
        } else if has_weights && !weights().any(|one| has_workload(&one.region, &localities)) {
            format!(
                "the distribution of {host} is ignored: no workload of {} is in a region with a \
                 weight, so no endpoint would be left; write one of its regions",
                path.display()
            )
        } else {
            return true;
        };
        errors.push(format!("{}: error: {wrong}", entry.line));
        false
    });
    errors
}

fn localities(mesh: &Mesh) -> HashSet<&Locality> {
    let workloads = mesh.workloads.values();
    workloads.map(|one| &*one.locality).collect()
}

fn has_workload(region: &RegionPattern, localities: &HashSet<&Locality>) -> bool {
    let mut localities = localities.iter();
    region.part_count() == 0
        || localities.any(|at| region.matches(&at.region, &at.zone, &at.subzone))
}

/// Returns warnings about weights of regions without workloads. With weights, endpoints that no
/// entry matches get no tunnels, so one typo can leave a service without endpoints.
fn regions(config: &Config, mesh: &Mesh, path: &Path) -> Vec<String> {
    let localities = localities(mesh);
    let entries = config.traffic.iter();
    let weights = entries.flat_map(|entry| entry.regions.iter().map(|one| (&entry.line, one)));
    let unknown = weights
        .filter(|(_, one)| one.weight > 0 && !has_workload(&one.region, &localities))
        .map(|(line, one)| {
            format!(
                "{line}: warning: `traffic` has unknown region {}: no workload of {} is in it; \
                 write one of its regions",
                one.region,
                path.display()
            )
        });
    unknown.collect()
}

/// Returns warnings about entries for unknown services.
fn services(config: &Config, mesh: &Mesh, path: &Path) -> Vec<String> {
    let is_known = |host: &str| {
        let mut services = mesh.services.values();
        let mut aliases = config.names.aliases.iter();
        services.any(|service| *service.hostname == *host)
            // An alias of several services, or of one region of a service, is balanced
            // separately.
            || aliases.any(|alias| {
                alias.name.host == host && (alias.to.len() > 1 || alias.region.is_some())
            })
    };
    let entries = config.traffic.iter();
    let entries = entries.filter_map(|entry| Some((&entry.line, entry.service.as_deref()?)));
    let unknown = entries
        .filter(|(_, host)| !is_known(host))
        .map(|(line, host)| {
            format!(
                "{line}: warning: `traffic` has unknown service {host}: it is not in {}; write \
                 the hostname of one",
                path.display()
            )
        });
    unknown.collect()
}
