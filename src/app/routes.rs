//! TLS listeners beside the mesh: what would lead nowhere.

use crate::config::{Config, ListenerProtocol, SniRoute, TlsRouting};
use crate::snapshot::{Caller, Snapshot};
use crate::wire::{Authority, Host};

/// Warns of routes to services that the mesh does not have, and of listeners by Istio's names where
/// no service is exposed to anyone.
pub(super) fn dead_ends(config: &Config, snapshot: &Snapshot) -> Vec<String> {
    let routes = config.listeners.iter().flat_map(|one| one.routes());
    let wrong = routes.filter_map(|route| Some((route.line.0, wrong(snapshot, route)?)));
    let file = config.file.display();
    let mut warnings: Vec<_> = wrong
        .map(|(line, wrong)| format!("{file}:{line}: warning: {wrong}"))
        .collect();
    let mut audiences = config.exposure.services.iter().flat_map(|one| &one.to);
    if !audiences.any(|audience| audience.anyone) {
        let istio = config.listeners.iter().filter(|listener| {
            matches!(
                &listener.protocol,
                ListenerProtocol::Tls(TlsRouting::Istio { .. })
            )
        });
        warnings.extend(istio.map(|listener| {
            format!(
                "{file}:{}: warning: listener `{}` leads nowhere: its peers have no identity, \
                 and no service is exposed to them; write `to: [{{anyone: true}}]` for one",
                listener.line.0, listener.name
            )
        }));
    }
    warnings
}

fn wrong(snapshot: &Snapshot, route: &SniRoute) -> Option<String> {
    let host = route.to.host.as_str();
    let asked = |port| Authority {
        host: Host::Name(host.into()),
        port,
    };
    // Its peers have no identity, and see the names that everybody sees.
    let found = |port| snapshot.find(Caller::UNKNOWN, &asked(port)).is_some();
    if route.to.port.is_some_and(found) {
        return None;
    }
    Some(match snapshot.called(host) {
        Some(_) => format!(
            "{} is no port of the service; write one that it has",
            route.to
        ),
        None => format!("{host} is no service of the mesh; write the hostname of one"),
    })
}
