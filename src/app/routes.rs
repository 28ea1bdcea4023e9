//! TLS listeners beside the mesh: what would lead nowhere.

use crate::config::{Config, ListenerProtocol, SniRoute, TlsRouting};
use crate::snapshot::mesh::Mesh;

/// Warns of routes to services that the mesh does not have, and of listeners by Istio's names where
/// no service is exposed to anyone.
pub(super) fn dead_ends(config: &Config, mesh: &Mesh) -> Vec<String> {
    let routes = config.listeners.iter().flat_map(|one| one.routes());
    let wrong = routes.filter_map(|route| Some((route.line.0, wrong(config, mesh, route)?)));
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

fn wrong(config: &Config, mesh: &Mesh, route: &SniRoute) -> Option<String> {
    let host = &route.to.host;
    let mut aliases = config.exposure.services.iter().flat_map(|one| &one.names);
    if aliases.any(|name| name.overlaps(&route.to)) {
        return None;
    }
    let mut services = mesh.services.values();
    let service = services.find(|service| *service.hostname == **host);
    let has_port = |port: u16| service.map(|service| service.ports.contains_key(&port));
    match route.to.port.and_then(has_port) {
        Some(true) => None,
        Some(false) => Some(format!(
            "{} is no port of the service; write one that it has",
            route.to
        )),
        None => Some(format!(
            "{host} is no service of the mesh; write the hostname of one"
        )),
    }
}
