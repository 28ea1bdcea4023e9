//! Descriptions of the peers that may reach a service.

use super::listeners::AnonymousAccess;
use crate::snapshot::mesh::Service;
use crate::snapshot::{Exposure, Snapshot};

/// Describes the peers that may reach a service, by the rules of `exposure` and of TLS listeners.
pub(super) fn exposed_to(
    snapshot: &Snapshot,
    strangers: &AnonymousAccess<'_>,
    service: &Service,
) -> Vec<String> {
    if let Some(namespace) = snapshot.required_namespace(&service.hostname)
        && *namespace != *service.namespace
    {
        return vec![format!(
            "nobody: `exposure` selects the service of namespace {namespace}"
        )];
    }
    let (by_rules, by_listeners) = (by_exposure(snapshot, service), strangers.of(service));
    match (by_rules, by_listeners.is_empty()) {
        (Ok(mut said), _) => {
            said.extend(by_listeners);
            said
        }
        (Err(nobody), true) => vec![nobody],
        (Err(_), false) => by_listeners,
    }
}

/// Describes the peers that may reach a service by `exposure`, exports and objects.
///
/// # Errors
/// No peer may reach it, with the reason.
fn by_exposure(snapshot: &Snapshot, service: &Service) -> Result<Vec<String>, String> {
    let host = &*service.hostname;
    if snapshot.scope.local.contains(host) {
        return Err("nobody: it is private to its cluster".to_owned());
    }
    let entries = snapshot.exposure.entries(&snapshot.exposure_host(host));
    if !entries.is_empty() {
        let said: Vec<_> = entries.iter().flat_map(of_entry).collect();
        return match said.is_empty() {
            true => Err("nobody: its `to` is empty".to_owned()),
            false => Ok(said),
        };
    }
    let mut audiences = Vec::new();
    let ports = service.ports.keys();
    let exported = ports.filter(|port| snapshot.is_exported(host, **port));
    let exported: Vec<_> = exported.map(ToString::to_string).collect();
    if snapshot.scope.exported.contains(host) {
        audiences.push("the trust set (exported)".to_owned());
    } else if !exported.is_empty() {
        let ports = exported.join(", ");
        audiences.push(format!("the trust set on port {ports} (export set)"));
    }
    if snapshot.is_exposed_by_default(host) {
        audiences.push("the trust set (exposure.default)".to_owned());
    }
    match audiences.is_empty() {
        true if snapshot.exposure.exposes_all() => {
            Err("nobody: it is visible only in its namespace".to_owned())
        }
        true => Err("nobody".to_owned()),
        false => Ok(audiences),
    }
}

fn of_entry(entry: &Exposure) -> impl Iterator<Item = String> {
    let port = entry.port.map(|port| format!(" on port {port}"));
    let port = port.unwrap_or_default();
    let workloads = match entry.exposes_workloads {
        true => ", its workloads too",
        false => "",
    };
    let audiences = entry.audiences.iter();
    audiences.map(move |to| format!("{to}{port}{workloads}"))
}
