//! Names beside the mesh: what would lead nowhere, or elsewhere than it seems.

use crate::config::{Alias, Config};
use crate::snapshot::Snapshot;

/// What is wrong with the aliases, and with entries of `exposure` that another one hides, as errors
/// and warnings. The snapshot is that of the mesh and of the configuration.
pub(super) fn findings(config: &Config, snapshot: &Snapshot) -> (Vec<String>, Vec<String>) {
    let (mut errors, mut warnings) = (Vec::new(), Vec::new());
    let file = config.file.display();
    for alias in &config.names.aliases {
        let (at, host) = (format!("{file}:{}", alias.line.0), &alias.name.host);
        if snapshot.services.contains_key(host.as_str()) {
            errors.push(format!(
                "{at}: error: the alias {host} is a service's own name, which it hides; write a \
                 name that no service has"
            ));
        }
        let wrong = dead_ends(alias, snapshot).into_iter();
        warnings.extend(wrong.map(|wrong| format!("{at}: warning: the alias {host} {wrong}")));
    }
    for entry in &config.exposure.services {
        let own = &*entry.service.host;
        let Some(service) = snapshot.called(own) else {
            continue;
        };
        let host = &*service.hostname;
        if host != own && snapshot.exposure.has_entry(host) {
            warnings.push(format!(
                "{file}:{}: warning: {own} is the service {host}, which has entries of its own \
                 that count alone; write {host} here too",
                entry.line
            ));
        }
    }
    (errors, warnings)
}

/// What of an alias leads nowhere.
fn dead_ends(alias: &Alias, snapshot: &Snapshot) -> Vec<String> {
    let mut wrong = Vec::new();
    for target in &alias.to {
        let port = target.port.or(alias.name.port);
        match snapshot.called(&target.host) {
            None => wrong.push(format!(
                "leads to {}, which is no service of the mesh; write the hostname of one",
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
    if let Some(region) = alias.region.as_ref().filter(|_| wrong.is_empty()) {
        let services = alias.to.iter().filter_map(|to| snapshot.called(&to.host));
        let sets = services.flat_map(|service| service.ports.values());
        let mut endpoints = sets.flat_map(|set| &set.endpoints);
        if !endpoints.any(|one| *one.definition.locality.region == **region) {
            wrong.push(format!(
                "is for region {region}, in which no endpoint is; write one that the mesh names"
            ));
        }
    }
    wrong
}
