//! Waypoints that Services name, and their validation.
//!
//! A tunnel to a service is dialled to its waypoint. Without validation, a tenant could expose
//! any HBONE workload by naming its Service as waypoint. A Service of another namespace, or one
//! that stays in its cluster, is used only if its own labels declare it a waypoint. A service
//! without a usable waypoint has no endpoint.

use super::limit_findings;
use super::meta::WAYPOINT_LABEL;
use super::names::{Key, LOCAL_SUFFIX, name};
use super::service::Service;
use super::view::ObjectIndex;
use crate::snapshot::mesh::{GatewayAddress, Mesh, Place, Waypoint};
use crate::wire::HBONE_PORT;
use crate::yaml::Finding;

/// Waypoint that a Service of our cluster names.
#[derive(Clone, Copy, Debug)]
pub(super) struct NamedWaypoint<'a> {
    key: Key<'a>,
    is_usable: bool,
}

impl<'a> NamedWaypoint<'a> {
    /// Finds the waypoint that a Service or its namespace names.
    pub(super) fn find(view: &ObjectIndex<'a>, service: &'a Service) -> Option<Self> {
        let (key, own) = (view.waypoint(service)?, view.own_cluster());
        let is_waypoint = view.service(key, own).is_some_and(|of| of.meta.is_waypoint());
        let is_near = *key.0 == *service.meta.namespace && !view.is_local(key, own);
        let is_usable = is_waypoint || is_near;
        Some(Self { key, is_usable })
    }

    /// Returns the waypoint for a mesh. An unusable one has weight 0: it is never picked, and
    /// its service is never dialled directly.
    pub(super) fn waypoint(self) -> Waypoint {
        let gateway = GatewayAddress {
            place: Place::Name(name(self.key, LOCAL_SUFFIX).to_string()),
            port: HBONE_PORT,
        };
        let weight = u32::from(self.is_usable);
        Waypoint { gateway, weight }
    }
}

/// Returns a finding for each Service with an unusable waypoint. Services of the mesh file are
/// left out, because their waypoint comes from that file.
pub(super) fn findings(view: &ObjectIndex<'_>, mesh: &Mesh) -> Vec<Finding> {
    let mut keys = view.keys();
    keys.retain(|key| !mesh.services.contains_key(&*name(*key, LOCAL_SUFFIX)));
    let services = keys.into_iter().filter_map(|key| view.service(key, view.own_cluster()));
    let found = services.filter_map(|service| {
        let named = NamedWaypoint::find(view, service).filter(|named| !named.is_usable)?;
        let (namespace, waypoint) = named.key;
        let why = if *namespace == *service.meta.namespace {
            "stays in its cluster"
        } else {
            "is of another namespace"
        };
        let what = format!(
            "tunnels to {}/{} are rejected: its waypoint {namespace}/{waypoint} {why}, and is not \
             a Service with the label `{WAYPOINT_LABEL}`",
            service.meta.namespace, service.meta.name
        );
        let how = "the name of a waypoint, or the service with its waypoint into the mesh file";
        Some(Finding::warning(&service.meta.place, what, how).of(&service.meta.namespace))
    });
    limit_findings(found)
}
