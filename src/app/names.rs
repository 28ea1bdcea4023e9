//! Warnings about aliases and names that lead nowhere in the mesh, or to an unexpected service.

use std::iter;

use crate::config::{Alias, Config, Discovery};
use crate::snapshot::{self, Audience, Snapshot};
use crate::yaml::Finding;

/// Returns warnings about aliases, and about entries of `exposure` that another one hides. The
/// snapshot contains the mesh and the configuration.
pub(super) fn check_names(config: &Config, snapshot: &Snapshot) -> Vec<Finding> {
    let mut warnings = Vec::new();
    for alias in &config.names.aliases {
        let (at, host) = (&alias.line.0, &alias.name.host);
        if snapshot.services.contains_key(host.as_str()) {
            let what = format!("the alias {host} is a service's own name, which it hides");
            warnings.push(Finding::warning(at, what, "a name that no service has"));
        }
        let wrong = missing_targets(config, alias, snapshot).into_iter();
        warnings.extend(wrong.map(|wrong| about(alias, &wrong)));
    }
    for entry in &config.exposure.services {
        let own = &*entry.service.host;
        let Some(service) = snapshot.service_by_name(own) else {
            continue;
        };
        let host = &*service.hostname;
        if host != own && snapshot.exposure.has_entry(host) {
            let what = format!(
                "{own} is the service {host}, which has entries of its own that count alone"
            );
            warnings.push(Finding::warning(&entry.line.0, what, &format!("{host} here too")));
        }
    }
    warnings
}

/// Returns warnings about aliases whose consumers may not reach a service behind them. A control
/// plane may export a service, so under one only services with an entry of their own are checked.
pub(super) fn check_aliases(config: &Config, snapshot: &Snapshot) -> Vec<Finding> {
    let is_from_file = matches!(config.discovery, Discovery::File(_));
    let aliases = config.names.aliases.iter();
    let good = aliases
        .filter(|alias| !is_from_file || missing_targets(config, alias, snapshot).is_empty());
    let warnings = good.flat_map(|alias| {
        let wrong = unlinked_consumers(config, alias, snapshot).into_iter();
        let wrong = wrong.chain(unexposed_targets(config, alias, snapshot, is_from_file));
        wrong.map(|wrong| about(alias, &wrong)).collect::<Vec<_>>()
    });
    warnings.collect()
}

fn about(alias: &Alias, wrong: &str) -> Finding {
    let what = format!("the alias {} {wrong}", alias.name.host);
    Finding::warning(&alias.line.0, what, "")
}

/// Returns the problems of consumers whose clusters have no link to this one.
fn unlinked_consumers(config: &Config, alias: &Alias, snapshot: &Snapshot) -> Vec<String> {
    let linked = |of: &String| {
        let linked = snapshot.scope.linked.as_ref();
        linked.is_none_or(|linked| linked.contains(of.as_str()))
    };
    let consumers = alias.consumers.iter().flatten();
    let own = &config.gateway.cluster;
    let wrong = consumers.filter(|of| !linked(of)).map(|of| {
        format!(
            "is for {of}, which has no link to this cluster; add {{from: {of}, to: {own}}} to \
             `links`"
        )
    });
    wrong.collect()
}

/// Returns the problems of services behind an alias that are exposed to no peer of a consumer.
fn unexposed_targets(
    config: &Config,
    alias: &Alias,
    snapshot: &Snapshot,
    is_from_file: bool,
) -> Vec<String> {
    let consumers: Vec<_> = match &alias.consumers {
        Some(consumers) => consumers.iter().map(|of| Some(of.as_str())).collect(),
        None => vec![None],
    };
    let mut wrong = Vec::new();
    for target in &alias.to {
        let port = target.port.or(alias.name.port);
        let service = snapshot.service_by_name(&target.host);
        let host = service.map_or(&*target.host, |service| &*service.hostname);
        let exposed = |of: &&Option<&str>| is_exposed(snapshot, host, port, **of, is_from_file);
        for consumer in consumers.iter().filter(|of| !exposed(of)) {
            let how = remedy(config, snapshot, host, port, *consumer);
            wrong.push(match consumer {
                Some(of) => format!("is for {of}, whose peers may not reach {target}; {how}"),
                None => format!("leads to {target}, which no peer may reach; {how}"),
            });
        }
    }
    wrong
}

/// Returns true if the exposure of a service admits any peer of a cluster, or any peer at all.
fn is_exposed(
    snapshot: &Snapshot,
    host: &str,
    port: Option<u16>,
    cluster: Option<&str>,
    is_from_file: bool,
) -> bool {
    let is_its = |own: &str| cluster.is_none_or(|cluster| *own == *cluster);
    let admits = |to: &Audience| to.anyone || to.cluster.as_deref().is_none_or(is_its);
    let ports = iter::once(port.unwrap_or_default());
    let by_rules = || {
        snapshot.is_exposed_to_any(host, ports, |entry| {
            port.is_none_or(|port| entry.applies_to(port)) && entry.to.iter().any(admits)
        })
    };
    // A control plane may export it.
    let is_undecided = !is_from_file && snapshot.exposure_entries(host).is_empty();
    !snapshot.is_cluster_local(host)
        && (is_undecided || snapshot.clusters_by_link(host).any(is_its) || by_rules())
}

/// Returns the remedy for an alias whose service is not exposed to a cluster.
fn remedy(
    config: &Config,
    snapshot: &Snapshot,
    host: &str,
    port: Option<u16>,
    cluster: Option<&str>,
) -> String {
    if snapshot.is_cluster_local(host) {
        return "remove the alias, or the label or annotation by which the Service stays in its \
                cluster"
            .to_owned();
    }
    let to = match cluster {
        Some(cluster) => format!("{{cluster: {cluster}}}"),
        None => "its peers".to_owned(),
    };
    let mut entries = snapshot.exposure_entries(host).iter();
    let about = entries.find(|entry| port.is_none_or(|port| entry.applies_to(port)));
    let line = about.and_then(|about| {
        let entry = config.exposure.services.get(about.index)?;
        Some((about.index, entry.line.within(&config.file)))
    });
    match line {
        Some((index, line)) => {
            format!("add {to} to `to` of exposure.services[{index}] ({line})")
        }
        None => {
            let port = port.map_or_else(String::new, |port| format!(":{port}"));
            format!("add an entry for \"{host}{port}\" with {to} in `to` to `exposure.services`")
        }
    }
}

/// Returns the problems of targets or of the region of an alias that the mesh does not have.
fn missing_targets(config: &Config, alias: &Alias, snapshot: &Snapshot) -> Vec<String> {
    let mut wrong = Vec::new();
    for target in &alias.to {
        let port = target.port.or(alias.name.port);
        match snapshot.service_by_name(&target.host) {
            None => wrong.push(format!(
                "leads to {}, which is not a service of the mesh; write the hostname of one",
                target.host
            )),
            Some(service) => {
                if let Some(port) = port.filter(|port| !service.ports.contains_key(port)) {
                    wrong.push(format!(
                        "leads to port {port} of {}, which has no such port; write one that it has",
                        target.host
                    ));
                }
            }
        }
    }
    let region = alias.region.as_deref().filter(|_| wrong.is_empty());
    if let Some(region) = region.filter(|_| !has_endpoint(config, alias, snapshot)) {
        let services = alias.to.iter().filter_map(|to| snapshot.service_by_name(&to.host));
        let names: Vec<_> = services.map(|of| of.key()).collect();
        let is_known = snapshot.mesh.workloads.values().any(|one| {
            let is_there = *one.locality.region == *region;
            let mut names = names.iter();
            is_there && names.any(|name| one.services.get(&**name).is_some())
        });
        wrong.push(if is_known {
            format!(
                "is for region {region}, which has no endpoint that its peers may use; write \
                 `transit` into the entries of its services if they are in another network"
            )
        } else {
            format!("is for region {region}, which has no endpoint; write a region of the mesh")
        });
    }
    wrong
}

/// Returns whether an alias of a region has an endpoint, in this network or in one that peers may
/// use.
fn has_endpoint(config: &Config, alias: &Alias, snapshot: &Snapshot) -> bool {
    let derived = snapshot::Alias::of(alias, &config.exposure.services);
    let Some(service) = snapshot.derived_services.get(&derived.label) else {
        return false;
    };
    service.ports.iter().any(|(port, local)| {
        let transits = snapshot.transits(service, *port).into_iter();
        let mut sets = transits.filter_map(|transit| service.endpoints_by(*port, transit));
        !local.endpoints.is_empty() || sets.any(|set| !set.endpoints.is_empty())
    })
}
