//! Comparison of the configuration with the mesh: warnings that need both.
//!
//! None of them is an error. Tenants create services, and the name of one must not prevent the
//! operator's configuration from being used.

use std::net::SocketAddr;

use crate::config::{Config, Discovery, Enforcement, HostPort, MeshFile};
use crate::datapath::dial::DenyList;
use crate::snapshot::builder::{self, Change};
use crate::snapshot::mesh::Mesh;
use crate::snapshot::{BoundEndpoints, Service, Snapshot, Subset, SubsetPart};
use crate::wire::HBONE_PORT;
use crate::yaml::{Finding, Place};

use super::{names, routes, traffic, transit};

/// Returns the warnings. The change makes the snapshot from an empty one. Missing
/// services are reported only if the mesh is in a file: under a control plane they may appear
/// later.
pub(super) fn run(config: &Config, mesh: &Mesh, change: Change) -> Vec<Finding> {
    // Weights and preferences exclude endpoints that exist.
    let change = Change { traffic: None, ..change };
    let snapshot = builder::build(&Snapshot::default(), change);
    let mut warnings = names::check_aliases(config, &snapshot);
    warnings.extend(check_gateways(config));
    let Discovery::File(MeshFile { path }) = &config.discovery else {
        warnings.extend(transit::received(config));
        return warnings;
    };
    for exposed in &config.exposure.services {
        let at = &exposed.line.0;
        let host = &exposed.service.host;
        if snapshot.service_by_name(host).is_none() {
            let of = exposed.namespace.iter();
            let of: String = of.map(|of| format!("namespace {of} in ")).collect();
            let what = format!("{host} is not a service of {of}{}", path.display());
            warnings.push(Finding::warning(at, what, "the hostname of one"));
        }
        let names = exposed.names.iter();
        for name in names.filter(|name| snapshot.services.contains_key(&*name.host)) {
            let what = format!("the name {} is that of another service, which it hides", name.host);
            warnings.push(Finding::warning(at, what, "a name that no service has"));
        }
    }
    warnings.extend(traffic::unknown_names(config, mesh));
    warnings.extend(subset_warnings(config, &snapshot));
    warnings.extend(check_dialable(config, &snapshot));
    warnings.extend(transit::check_grants(config, &snapshot));
    warnings.extend(transit::unverifiable_gateways(path, &snapshot));
    warnings.extend(check_bindings(config, &snapshot));
    warnings.extend(routes::check_routes(config, &snapshot));
    warnings.extend(names::check_names(config, &snapshot));
    let policies = &snapshot.policies;
    if !policies.is_empty() && config.policy.istio == Enforcement::Off {
        let place = Place { file: path.clone(), line: 0 };
        let count = policies.len();
        let what = format!("its {count} authorization policies are not enforced at this gateway");
        let how = "`policy: {istio: enforce}` if they are to be";
        warnings.push(Finding::warning(&place, what, how));
    }
    warnings
}

/// Returns warnings about labels of subsets that select nothing of their service.
fn subset_warnings(config: &Config, snapshot: &Snapshot) -> Vec<Finding> {
    let mut warnings = Vec::new();
    for exposed in &config.exposure.services {
        let Some(service) = snapshot.service_by_name(&exposed.service.host) else {
            continue;
        };
        let labels = exposed.subsets.iter();
        let labels = labels.flat_map(|of| of.labels.iter().map(move |label| (&of.name, label)));
        for (subset, (key, value)) in labels {
            let part = SubsetPart {
                name: subset.as_str().into(),
                labels: vec![(key.clone(), value.clone())],
                weight: 1,
            };
            let of_label = Subset { name: subset.as_str().into(), parts: [part].into() };
            if !snapshot.has_subset(service, &of_label) {
                let what = format!(
                    "the label `{key}: {value}` of subset {subset} selects no workload of {} in \
                     this network, and no other network as a whole",
                    exposed.service.host
                );
                warnings.push(Finding::warning(&exposed.line.0, what, "a label that one has"));
            }
        }
    }
    warnings
}

/// Returns warnings about exposed services whose tunnels could not be dialled at present.
fn check_dialable(config: &Config, snapshot: &Snapshot) -> Vec<Finding> {
    let mut warnings = Vec::new();
    let network = config.gateway.network.as_str();
    let deny = DenyList::of(config);
    for exposed in &config.exposure.services {
        let HostPort { host, port } = &exposed.service;
        let Some(service) = snapshot.service_by_name(host) else {
            continue;
        };
        let is_exposed_port = |of: &u16| port.is_none_or(|only| only == *of);
        let sets = service.ports.iter().filter(|(of, _)| is_exposed_port(of));
        let remote = service.transit_ports.iter().filter(|(of, _)| is_exposed_port(of));
        let remote = remote.map(|(_, sets)| &sets.always);
        let sets = sets.map(|(_, set)| set.get()).chain(remote);
        // One endpoint represents all: they are in one network and dialled in the same way.
        let endpoint = sets.flat_map(|set| &set.endpoints).next();
        let denied = |address| {
            let how = if deny.is_own(address) {
                "write the address of a workload"
            } else {
                "see `dial.allow`"
            };
            Some((deny.denies(address)?, how))
        };
        let wrong = match (port, endpoint.map(|endpoint| denied(endpoint.address))) {
            (Some(port), _) if !service.ports.contains_key(port) => {
                format!("has no port {port}; write one that it has")
            }
            // The addresses of hostnames are known only at run time.
            (_, None) if is_by_name(&snapshot.mesh, service) => continue,
            (_, None) => format!("has no endpoint in network {network} that can be dialled"),
            (_, Some(Some((rule, how)))) => {
                format!("has an endpoint at {rule}, which is never dialled; {how}")
            }
            (_, Some(None)) => continue,
        };
        warnings.push(Finding::warning(&exposed.line.0, format!("{host} {wrong}"), ""));
    }
    warnings
}

/// Returns warnings about gateways of other networks that are never dialled. The addresses of
/// hostnames are known only at run time.
fn check_gateways(config: &Config) -> Vec<Finding> {
    let deny = DenyList::of(config);
    let gateways = config.networks.iter().flat_map(|network| {
        let gateways = network.gateways.iter();
        gateways.map(move |gateway| (network, gateway))
    });
    let denied = gateways.filter_map(|(network, gateway)| {
        let port = gateway.port.unwrap_or(HBONE_PORT);
        let address = SocketAddr::new(gateway.host.parse().ok()?, port);
        let rule = deny.denies(address)?;
        let how = if deny.is_own(address) {
            "write the address of a gateway of that network"
        } else {
            "see `dial.allow`"
        };
        let name = &network.name;
        let what = format!(
            "the gateway {gateway} of network {name} is {rule}, which is never dialled; {how}"
        );
        Some(Finding::warning(&network.line.0, what, ""))
    });
    denied.collect()
}

/// Returns warnings about bindings without a gateway. The addresses of hostnames are known only at
/// run time.
fn check_bindings(config: &Config, snapshot: &Snapshot) -> Vec<Finding> {
    let gateways = config.networks.iter().filter(|network| !network.gateways.is_empty());
    let configured: Vec<_> = gateways.filter_map(|one| one.cluster.as_deref()).collect();
    let mut warnings = Vec::new();
    for binding in &config.bindings {
        for cluster in &binding.cluster {
            let host = binding.service.host.as_str().into();
            let port = binding.service.port.unwrap_or_default();
            let endpoints = BoundEndpoints::new([cluster.as_str().into()], host, port);
            let is_known = configured.contains(&&**cluster);
            if !is_known && endpoints.load(snapshot).endpoints.is_empty() {
                let service = &binding.service;
                let what = format!("the binding of {service} has no gateway of cluster {cluster}");
                let how = format!(
                    "`{{name: NETWORK, cluster: {cluster}, gateways: [\"HOST:15008\"]}}` into \
                     `networks`"
                );
                warnings.push(Finding::warning(&binding.line.0, what, &how));
            }
        }
    }
    warnings
}

/// Returns true if a workload of the service has a hostname instead of addresses.
fn is_by_name(mesh: &Mesh, service: &Service) -> bool {
    let key = service.key();
    mesh.workloads.values().any(|one| {
        let by_name = one.addresses.is_empty() && !one.hostname.is_empty();
        by_name && one.services.get(key.as_str()).is_some()
    })
}
