//! Reasons for which a workload is no endpoint of a service. The builder, which leaves it out, and
//! the status page, which reports the reason, share one function, so they cannot disagree.

use std::sync::Arc;

use derive_more::Display;

use super::mesh::{Place, Ports, Protocol, Scope, Service, Template, Workload};
use super::remote::gateway_network;
use crate::wire::{DrainTarget, HBONE_PORT};

/// Reason for which a workload is not dialled for a service port, as far as the mesh determines it.
///
/// Reasons known only to the running gateway come in addition: ejections, and addresses on the deny
/// list.
#[derive(Clone, Debug, Display, PartialEq, Eq, PartialOrd, Ord)]
pub enum ExclusionReason {
    /// The service passes original destinations through and has no endpoints.
    #[display("the service passes original destinations through")]
    OriginalDestination,
    #[display("the service has no such port")]
    NoServicePort,
    /// The workload does not serve this port of the service.
    #[display("the workload does not serve this port")]
    NotServed,
    /// The record represents the gateway of another network (docs/wire-contract.md 3.3).
    #[display("the workload represents the gateway of another network")]
    RepresentsGateway,
    /// The workload is in this network, which is not ours.
    #[display("the workload is in network {_0}")]
    OtherNetwork(String),
    /// The workload does not speak HBONE, and the source restricts dialling to those that do.
    #[display("the workload does not support HBONE")]
    NoHbone,
    /// The workload has no IP address.
    #[display("the workload has no address")]
    NoAddress,
    /// The workload is dialled over plain TCP, and its port is unknown.
    #[display("the workload has no target port")]
    NoTargetPort,
    /// Weight of the workload is 0.
    #[display("drained (weight 0)")]
    Drained,
    /// The workload is unhealthy, and the service requires healthy endpoints.
    #[display("unhealthy")]
    Unhealthy,
    /// An operator has drained this part of the mesh.
    #[display("{_0} is evacuated (`strait drain {}`)", _0.kind())]
    Evacuated(DrainTarget),
    /// This region has weight 0 in the configuration.
    #[display("region {_0} is evacuated (weight 0 in `traffic`)")]
    NoWeight(Arc<str>),
    /// This region has no weight in the configuration, and other regions have one.
    #[display("{} no weight in `traffic`, but other regions have one", region_with_verb(_0))]
    NoRegion(Arc<str>),
    /// The workload's locality has no weight in an Envoy assignment, and others of its priority
    /// have one.
    #[display("its locality has no weight in the Envoy assignment")]
    NoLocality,
    /// The workload misses a preference that the service requires (mode STRICT).
    #[display("not in the same {_0}, which the service requires (mode STRICT)")]
    MissesPreference(Scope),
    /// The workload could be dialled, but tunnels must go through a waypoint of the service.
    #[display("tunnels go through the service's waypoint")]
    BehindWaypoint,
}

impl ExclusionReason {
    /// Describes the reason for an instance of another network.
    pub fn in_network(&self, network: &str) -> String {
        format!("in network {network}: {self}")
    }
}

/// Returns the start of a sentence about what the region of a workload has.
fn region_with_verb(region: &str) -> String {
    match region {
        "" => "the workload's region is unknown and has".to_owned(),
        region => format!("region {region} has"),
    }
}

/// Returns the target port at which a workload serves a port of a service, and whether it is ready.
/// An unhealthy workload still counts among the endpoints of its tier.
///
/// # Errors
/// The reason, of those that depend on the service, for which the workload is no endpoint at all.
pub(super) fn served(
    service: &Service,
    workload: &Workload,
    port: u16,
) -> Result<(u16, bool), ExclusionReason> {
    if service.passthrough {
        return Err(ExclusionReason::OriginalDestination);
    }
    if !service.ports.contains_key(&port) {
        return Err(ExclusionReason::NoServicePort);
    }
    let target = target_port(service, workload, port).ok_or(ExclusionReason::NotServed)?;
    if workload.protocol == Protocol::Tcp && target == 0 {
        Err(ExclusionReason::NoTargetPort)
    } else if workload.capacity == 0 {
        Err(ExclusionReason::Drained)
    } else {
        Ok((target, workload.healthy || service.allow_unhealthy))
    }
}

/// Returns the port at which `workload` serves port `port` of `service`. Scans the workload's few
/// services, which avoids formatting the key `namespace/hostname`.
pub(super) fn target_port(service: &Service, workload: &Workload, port: u16) -> Option<u16> {
    let is_its = |key: &str| {
        let hostname = key.strip_prefix(&*service.namespace);
        let hostname = hostname.and_then(|rest| rest.strip_prefix('/'));
        hostname == Some(&*service.hostname)
    };
    let mut services = workload.services.iter();
    let (_, ports) = services.find(|(key, _)| is_its(key))?;
    ports.get(&port).copied()
}

/// Evaluates the part of `exclusion_reason` that depends on the workload alone and excludes it
/// from all services (docs/wire-contract.md 3.3).
pub(super) fn workload_exclusion(
    workload: &Workload,
    network: &str,
    hbone_only: bool,
) -> Option<ExclusionReason> {
    if gateway_network(workload).is_some() {
        Some(ExclusionReason::RepresentsGateway)
    } else if let Some(network) = remote_network(workload, network) {
        Some(ExclusionReason::OtherNetwork(network.to_owned()))
    } else if is_split_horizon(workload) {
        Some(ExclusionReason::RepresentsGateway)
    } else if hbone_only && !has_hbone_port(workload) {
        Some(ExclusionReason::NoHbone)
    } else if workload.addresses.is_empty() {
        Some(ExclusionReason::NoAddress)
    } else {
        None
    }
}

/// Returns whether a workload represents all instances of a service behind a gateway of their
/// network.
pub(super) fn is_split_horizon(workload: &Workload) -> bool {
    workload.uid.split('/').nth(1) == Some("SplitHorizonWorkload")
}

/// Returns the network of a workload that is an instance in another network than ours, which is
/// `own`. Workloads of one network are dialled directly, whichever their clusters are.
pub(super) fn remote_network<'a>(workload: &'a Workload, own: &str) -> Option<&'a str> {
    let of_gateway = || match &workload.network_gateway.as_deref()?.place {
        Place::Address(network, _) => Some(network.as_str()),
        Place::Name(_) => None,
    };
    let own_label = Some(&*workload.network).filter(|network| !network.is_empty());
    let network = own_label.or_else(of_gateway)?;
    (!network.is_empty() && *network != *own).then_some(network)
}

/// Returns whether a workload is dialled over HBONE for a port of a service, at `target`.
///
/// Istiod sends the pods of waypoints and gateways with `tunnel_protocol: NONE`. Ztunnel
/// nevertheless dials a waypoint over HBONE, at the endpoints of service port 15008. Accepting
/// another target port would let a Service turn any port of a pod into HBONE. Policies would then
/// evaluate neither the port nor the source.
pub(super) fn speaks_hbone(workload: &Template, port: u16, target: u16) -> bool {
    workload.protocol == Protocol::Hbone || (port, target) == (HBONE_PORT, HBONE_PORT)
}

/// Returns whether a workload is dialled over HBONE for some port of some service.
fn has_hbone_port(workload: &Workload) -> bool {
    let mut ports = workload.services.values().flat_map(Ports::iter);
    workload.protocol == Protocol::Hbone
        || ports.any(|(&port, &target)| speaks_hbone(workload, port, target))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::mesh::{
        self, Assignment, GatewayAddress, Locality, LocalityWeight, Place, Waypoint,
    };
    use crate::snapshot::tests::region_weights;
    use crate::snapshot::tests::samples;
    use crate::snapshot::traffic::{Drained, Override, Traffic, TrafficRule};
    use crate::snapshot::{Snapshot, exclusion_reason};
    use crate::wire::RegionPattern;

    fn service() -> Service {
        Service {
            namespace: "app".into(),
            hostname: "echo.app".into(),
            ports: [(80, 0), (81, 0)].into(),
            ..Service::default()
        }
    }

    fn workload() -> Workload {
        let template =
            Template { network: "east".into(), protocol: Protocol::Hbone, ..Template::default() };
        let addresses = ["10.0.0.1".parse().expect("an address")].into();
        Workload { addresses, ..samples::workload("a", "echo", template) }
    }

    fn gateway() -> GatewayAddress {
        GatewayAddress { place: Place::Name("app/gateway".into()), port: 15008 }
    }

    fn is_in(workload: &mut Workload, region: &str) {
        let region = region.into();
        let locality = Locality { region, ..Locality::default() };
        workload.locality = Arc::new(locality);
    }

    /// Returns the reason that a gateway in network `east` gives for a workload.
    fn reason_for(
        service: &Service,
        workload: &Workload,
        hbone_only: bool,
        port: u16,
    ) -> Option<ExclusionReason> {
        let mut snapshot = Snapshot::default();
        snapshot.index.network = "east".into();
        snapshot.mesh.hbone_only = hbone_only;
        let weights = region_weights(&[("here", 1), ("shut", 0)]);
        let traffic = Traffic::new([("weighed.app".into(), weights)], TrafficRule::default());
        let flooded = RegionPattern::parse("flooded").expect("a region");
        let order = Some(Override::Drain(flooded.into(), Drained::now(false)));
        let changed = snapshot.balancing.with_changes(None, Some(traffic), order);
        snapshot.balancing = Arc::new(changed);
        exclusion_reason(&snapshot, service, workload, port)
    }

    /// Returns the reason for port 80 after a change of the service or the workload.
    fn reason_after(change: impl FnOnce(&mut Service, &mut Workload)) -> Option<ExclusionReason> {
        let (mut service, mut workload) = (service(), workload());
        change(&mut service, &mut workload);
        reason_for(&service, &workload, true, 80)
    }

    #[test]
    fn what_can_be_dialled_is_used() {
        assert_eq!(reason_after(|_, _| ()), None);
        assert_eq!(reason_after(|_, workload| workload.network = "".into()), None);
        // The gateway of the own network is not needed within it.
        let through = reason_after(|_, workload| {
            workload.network_gateway = Some(Arc::new(gateway()));
        });
        assert_eq!(through, None);
        let allowed = reason_after(|service, workload| {
            service.allow_unhealthy = true;
            workload.healthy = false;
        });
        assert_eq!(allowed, None);
        let mut plain = workload();
        plain.protocol = Protocol::Tcp;
        assert_eq!(reason_for(&service(), &plain, false, 80), None);
        plain.services = [("app/echo.app".into(), [(80, 0)].into())].into();
        let without_port = reason_for(&service(), &plain, false, 80);
        assert_eq!(without_port, Some(ExclusionReason::NoTargetPort));
    }

    #[test]
    fn who_is_sent_without_hbone_is_dialled_over_it_at_the_port_of_hbone_alone() {
        let mut service = service();
        service.ports.insert(15008, 15008);
        let mut gateway = workload();
        gateway.protocol = Protocol::Tcp;
        assert_eq!(reason_for(&service, &gateway, true, 15008), Some(ExclusionReason::NoHbone));
        gateway.services = [("app/echo.app".into(), [(80, 80), (15008, 15008)].into())].into();
        assert_eq!(reason_for(&service, &gateway, true, 15008), None);
        assert_eq!(reason_for(&service, &gateway, true, 80), Some(ExclusionReason::NoHbone));
        // HBONE needs 15008 as both the service port and the target port.
        service.ports.extend([(15008, 0), (80, 0)]);
        for ports in [[(80, 8080), (15008, 8080)], [(80, 15008), (15008, 5432)]] {
            gateway.services = [("app/echo.app".into(), ports.into())].into();
            for port in [80, 15008] {
                let reported = reason_for(&service, &gateway, true, port);
                assert_eq!(reported, Some(ExclusionReason::NoHbone), "{ports:?} {port}");
            }
        }
    }

    #[test]
    fn where_a_workload_runs_may_be_why_it_is_not_used() {
        let weighed = |region: &'static str| {
            reason_after(move |service, workload| {
                service.hostname = "weighed.app".into();
                workload.services = [("app/weighed.app".into(), [(80, 8080)].into())].into();
                is_in(workload, region);
            })
        };
        assert_eq!(weighed("here"), None);
        let nowhere = weighed("").expect("a reason").to_string();
        assert!(nowhere.starts_with("the workload's region is unknown and has no weight"));
        assert_eq!(weighed("shut"), Some(ExclusionReason::NoWeight("shut".into())));
        assert_eq!(weighed("there"), Some(ExclusionReason::NoRegion("there".into())));
        let flooded = reason_after(|_, workload| is_in(workload, "flooded"));
        assert_eq!(
            flooded,
            DrainTarget::parse("region", "flooded").map(ExclusionReason::Evacuated)
        );
        let strict = |region: &'static str| {
            reason_after(move |service, workload| {
                service.preferences = Some(vec![Scope::Network, Scope::Node, Scope::Region]);
                service.strict = true;
                is_in(workload, region);
            })
        };
        assert_eq!(strict(""), None);
        assert_eq!(strict("there"), Some(ExclusionReason::MissesPreference(Scope::Region)));
        let assigned = |region: &'static str| {
            reason_after(move |service, workload| {
                let locality = Locality { region: "here".into(), ..Locality::default() };
                let assignment = Assignment {
                    overprovisioning: 140,
                    by_locality: true,
                    localities: vec![LocalityWeight { priority: 0, locality, weight: 1 }],
                    drops: Vec::new(),
                };
                service.assignments.insert(80, Arc::new(assignment));
                is_in(workload, region);
            })
        };
        assert_eq!(assigned("here"), None);
        assert_eq!(assigned("there"), Some(ExclusionReason::NoLocality));
    }

    #[test]
    fn each_reason_is_given_for_what_causes_it() {
        type Change = fn(&mut Service, &mut Workload);
        let table: [(Change, ExclusionReason); 12] = [
            (
                |service, _| {
                    let gateway = gateway();
                    service.waypoints.push(Waypoint { gateway, weight: 1 });
                },
                ExclusionReason::BehindWaypoint,
            ),
            (|service, _| service.passthrough = true, ExclusionReason::OriginalDestination),
            (|service, _| service.ports.clear(), ExclusionReason::NoServicePort),
            (
                |_, workload| workload.services = mesh::Services::default(),
                ExclusionReason::NotServed,
            ),
            (
                |_, workload| {
                    workload.network = "".into();
                    let place = Place::Address("west".to_owned(), [10, 0, 0, 9].into());
                    workload.network_gateway = Some(Arc::new(GatewayAddress { place, port: 1 }));
                },
                ExclusionReason::OtherNetwork("west".into()),
            ),
            (
                |_, workload| workload.uid = "NetworkGateway/west/10.0.0.9/15008".into(),
                ExclusionReason::RepresentsGateway,
            ),
            (
                |_, workload| workload.uid = "x/SplitHorizonWorkload/gw/gw/10.0.0.9/a/b".into(),
                ExclusionReason::RepresentsGateway,
            ),
            (
                |_, workload| workload.network = "west".into(),
                ExclusionReason::OtherNetwork("west".into()),
            ),
            (|_, workload| workload.protocol = Protocol::Tcp, ExclusionReason::NoHbone),
            (|_, workload| workload.addresses = Default::default(), ExclusionReason::NoAddress),
            (|_, workload| workload.healthy = false, ExclusionReason::Unhealthy),
            (|_, workload| workload.capacity = 0, ExclusionReason::Drained),
        ];
        for (change, want) in table {
            assert_eq!(reason_after(change), Some(want));
        }
        let other = reason_for(&service(), &workload(), true, 81);
        assert_eq!(other, Some(ExclusionReason::NotServed));
    }
}
