//! Tables that the configuration alone determines: names, exposure and addresses never dialled.

use crate::config::{self, Config, DefaultExposure, Listener, ServiceSubset};
use crate::datapath::dial::DenyList;
use crate::snapshot::{Alias, Exposure, ExposureTable, NameTable, Subset, SubsetPart};

/// Returns the name table of the configuration.
pub(super) fn name_table(config: &Config) -> NameTable {
    let aliases = config.names.aliases.iter();
    let aliases = aliases.map(|named| (named.name.host.clone(), alias(config, named)));
    let subsets = config.exposure.services.iter().flat_map(|exposed| {
        let host = exposed.service.host.as_str();
        exposed.subsets.iter().map(move |of| {
            let alias = Alias::new(host, None, vec![(host.into(), None)], None, None);
            let key = format!("{host}@{}", of.name);
            (key, alias.with_subset(subset(config, host, of)))
        })
    });
    let (hosts, aliases): (Vec<_>, Vec<_>) = aliases.chain(subsets).unzip();
    let suffixes = config.names.suffixes.iter().map(String::as_str);
    NameTable::new(suffixes, hosts.iter().map(String::as_str).zip(aliases))
}

/// Converts a subset of a service.
fn subset(config: &Config, host: &str, of: &ServiceSubset) -> Subset {
    let part = |of: &ServiceSubset, weight| SubsetPart {
        name: of.name.as_str().into(),
        labels: of
            .labels
            .iter()
            .map(|(key, value)| (key.as_str().into(), value.as_str().into()))
            .collect(),
        weight,
    };
    let shares = of.split.iter();
    let shares = shares.filter_map(|share| {
        let of = find_subset(config, host, &share.subset)?;
        Some(part(of, share.weight))
    });
    let own = of.split.is_empty().then(|| part(of, 1));
    Subset { name: of.name.as_str().into(), parts: shares.chain(own).collect() }
}

fn find_subset<'a>(config: &'a Config, host: &str, name: &str) -> Option<&'a ServiceSubset> {
    let services = config.exposure.services.iter();
    let mut services = services.filter(|exposed| exposed.service.host == host);
    services.find_map(|exposed| exposed.subset(name))
}

/// Converts an alias of the configuration.
pub(super) fn alias(config: &Config, alias: &config::Alias) -> Alias {
    let host = alias.to.first().map_or("", |target| &*target.host);
    let of = alias.subset.as_ref();
    let of = of.and_then(|name| find_subset(config, host, name));
    let to = alias.to.iter();
    let consumers = alias.consumers.as_ref();
    let consumers = consumers.map(|list| list.iter().map(|one| one.as_str().into()).collect());
    let named = Alias::new(
        &alias.name.host,
        alias.name.port,
        to.map(|target| (target.host.as_str().into(), target.port)).collect(),
        consumers,
        alias.region.as_deref().map(Into::into),
    );
    match of {
        Some(of) => named.with_subset(subset(config, host, of)),
        None => named,
    }
}

/// Returns the exposure table of the configuration.
pub(super) fn exposure_table(config: &Config) -> ExposureTable {
    let table = ExposureTable::new(config.exposure.default == DefaultExposure::All);
    let mut table = table.with_transit(config.exposure.transit.iter().cloned());
    for (index, entry) in config.exposure.services.iter().enumerate() {
        let exposure = Exposure {
            index,
            port: entry.service.port,
            namespace: entry.namespace.as_deref().map(Into::into),
            audiences: entry.to.clone(),
            exposes_workloads: entry.workloads,
            route_by: entry.route_by,
            transit: entry.transit,
            limits: entry.limits,
            is_of_object: entry.is_of_object,
            ..Exposure::default()
        };
        // A name without a port has the port of the service.
        let names = entry.names.iter();
        let names = names.map(|name| (name.host.as_str(), name.port.or(exposure.port)));
        table.add_entry(&entry.service.host, &exposure, names);
    }
    let routes = config.listeners.iter().flat_map(Listener::routes);
    table.add_passthrough_hosts(routes.map(|route| route.to.host.as_str()));
    table
}

/// Returns the addresses that are never dialled.
pub(super) fn deny_list(config: &Config) -> DenyList {
    let own = config.listeners.iter().map(|listener| listener.bind);
    DenyList::new(config.dial.allow.clone(), own.collect())
}
