//! Reasons for which a workload is no endpoint of a service port in a snapshot.

use crate::snapshot::exclusion::{served, speaks_hbone, target_port, workload_exclusion};
use crate::snapshot::mesh::{Service, Workload};
use crate::snapshot::tiers::Ranking;
use crate::snapshot::{ExclusionReason, Snapshot};

/// Returns the reason for which `workload` is no endpoint of port `port` of `service` in this
/// snapshot, or `None` if it is one.
pub fn exclusion_reason(
    snapshot: &Snapshot,
    service: &Service,
    workload: &Workload,
    port: u16,
) -> Option<ExclusionReason> {
    let (network, hbone_only) = (snapshot.network(), snapshot.mesh.hbone_only);
    let behind = || (!service.waypoints.is_empty()).then_some(ExclusionReason::BehindWaypoint);
    let lacks_hbone = || {
        let target = target_port(service, workload, port);
        hbone_only && target.is_some_and(|target| !speaks_hbone(workload, port, target))
    };
    workload_exclusion(workload, network, hbone_only)
        .or_else(|| lacks_hbone().then_some(ExclusionReason::NoHbone))
        .or_else(|| match served(service, workload, port) {
            Ok((_, is_ready)) => (!is_ready).then_some(ExclusionReason::Unhealthy),
            Err(why) => Some(why),
        })
        .or_else(|| location_exclusion(snapshot, service, workload, port))
        .or_else(behind)
}

/// Returns the reason for which the location of a workload excludes it from port `port` of
/// `service`, also for an instance of another network.
pub fn location_exclusion(
    snapshot: &Snapshot,
    service: &Service,
    workload: &Workload,
    port: u16,
) -> Option<ExclusionReason> {
    let (host, network) = (&service.hostname, snapshot.network());
    let drained = snapshot.balancing.drained_service(service).cloned();
    drained.map(ExclusionReason::Evacuated).or_else(|| {
        Ranking::new(service, port, host, network, &snapshot.balancing).exclusion(workload)
    })
}
