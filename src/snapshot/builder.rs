//! Builder of snapshots: a pure function of the previous snapshot and a change.

use std::sync::Arc;

use super::hosts::Answer;
use super::mesh::Mesh;
use super::traffic::{Override, Position, Traffic};
use super::update;
use super::{
    Enforcement, ExportSet, ExposureTable, NameTable, NetworkTable, Policies, ServiceVisibility,
    Snapshot, TrustSet,
};
use crate::config::{Config, Listener};

/// Parts of a snapshot that may change at once. A `None` part stays as it was.
#[derive(Debug, Default)]
pub struct Change {
    /// Mesh, and the network whose endpoints are local.
    pub mesh: Option<(Mesh, Arc<str>)>,
    /// Hostnames of workloads, each with all its addresses.
    pub answers: Vec<Answer>,
    pub trust: Option<TrustSet>,
    pub exposure: Option<ExposureTable>,
    pub names: Option<NameTable>,
    pub exports: Option<ExportSet>,
    /// Services that Kubernetes objects export or keep local, and the linked clusters.
    pub scope: Option<ServiceVisibility>,
    /// Presence of TLS listeners.
    pub has_passthrough: Option<bool>,
    /// True if a listener's rules changed, after which open tunnels are authorized again.
    pub listeners: bool,
    /// Istio's authorization policies.
    pub policies: Option<Policies>,
    pub enforcement: Option<Enforcement>,
    /// Cluster and locality of this gateway.
    pub position: Option<Position>,
    /// Load balancing of the configuration.
    pub traffic: Option<Traffic>,
    /// Other networks of the configuration.
    pub networks: Option<NetworkTable>,
    /// Operator override. It holds until it is reverted.
    pub overrides: Option<Override>,
}

impl Change {
    /// Returns the parts that a configuration alone determines.
    pub fn of(config: &Config) -> Self {
        Self {
            exposure: Some(ExposureTable::of(config)),
            names: Some(NameTable::of(config)),
            has_passthrough: Some(config.listeners.iter().any(Listener::is_tls)),
            enforcement: Some(config.policy.istio),
            traffic: Some(Traffic::of(&config.traffic)),
            networks: Some(NetworkTable::of(config)),
            ..Self::default()
        }
    }
}

/// Builds the next snapshot. The cost depends on the change. Unchanged endpoints keep their state.
pub fn build(old: &Snapshot, change: Change) -> Snapshot {
    let mut next = old.clone();
    next.version += 1;
    next.trust = replaced(&old.trust, change.trust);
    next.exposure = replaced(
        &old.exposure,
        change.exposure.map(|mut exposure| {
            exposure.keep_counts(&old.exposure);
            exposure
        }),
    );
    next.names = replaced(&old.names, change.names);
    next.exports = replaced(&old.exports, change.exports);
    next.scope = replaced(&old.scope, change.scope);
    next.has_passthrough = change.has_passthrough.unwrap_or(old.has_passthrough);
    next.policies = replaced(&old.policies, change.policies);
    next.enforcement = change.enforcement.unwrap_or(old.enforcement);
    let mut moved = next.has_other_exposure(old)
        || change.listeners
        || (&next.trust, &next.exports, &next.scope) != (&old.trust, &old.exports, &old.scope)
        || !Arc::ptr_eq(&next.policies, &old.policies)
        || next.enforcement != old.enforcement;
    next.balancing = match (change.position, change.traffic, change.overrides) {
        (None, None, None) => Arc::clone(&old.balancing),
        (position, traffic, order) => {
            let next = old.balancing.with_changes(position, traffic, order);
            replaced(&old.balancing, Some(next))
        }
    };
    next.networks = replaced(&old.networks, change.networks);
    // Hostnames of gateways are looked up for the first binding.
    moved |= !Arc::ptr_eq(&next.networks, &old.networks);
    let (received, network) = change.mesh.unzip();
    let received = with_configured_gateways(received, old, &next);
    next.mesh = next.hosts.follow(&old.mesh, received, change.answers);
    if let Some(located) = next.balancing.with_own_locality(&next.hosts.received) {
        next.balancing = Arc::new(located);
    }
    let common = next.balancing.only("");
    next.common_balancing = replaced(&old.common_balancing, Some(common));
    let network = network.unwrap_or_else(|| old.network().into());
    moved |= update::apply(&mut next, old, network);
    next.generation += u64::from(moved);
    next
}

/// Adds the gateways of the configuration to a mesh as received, or, if they have changed, to the
/// last one.
fn with_configured_gateways(
    received: Option<Mesh>,
    old: &Snapshot,
    next: &Snapshot,
) -> Option<Mesh> {
    let is_changed = next.networks != old.networks;
    let mut mesh = received.or_else(|| is_changed.then(|| old.hosts.received.clone()))?;
    for gateway in old.networks.records().filter(|_| is_changed) {
        let last = old.hosts.received.workloads.get(&gateway.uid);
        let now = mesh.workloads.get(&gateway.uid);
        if last.zip(now).is_some_and(|(last, now)| Arc::ptr_eq(last, now)) {
            mesh.workloads.remove(&gateway.uid);
        }
    }
    for gateway in next.networks.records() {
        let known = old.hosts.received.workloads.get(&gateway.uid);
        let known = known.filter(|known| ***known == gateway).cloned();
        let uid = Arc::clone(&gateway.uid);
        mesh.workloads.insert(uid, known.unwrap_or_else(|| Arc::new(gateway)));
    }
    Some(mesh)
}

fn replaced<T: PartialEq>(old: &Arc<T>, new: Option<T>) -> Arc<T> {
    match new {
        Some(new) if new != **old => Arc::new(new),
        _ => Arc::clone(old),
    }
}

#[cfg(test)]
mod tests {
    use crate::snapshot::Service;
    use crate::snapshot::mesh::{self, Protocol};
    use std::net::IpAddr;

    use super::*;
    use crate::snapshot::tests::samples;
    use crate::wire::HBONE_PORT;

    fn workload(uid: &str, ip: &str) -> mesh::Workload {
        let template = mesh::Template { protocol: Protocol::Hbone, ..mesh::Template::default() };
        let addresses = [ip.parse().expect("an address")].into();
        mesh::Workload { addresses, ..samples::workload(uid, "echo", template) }
    }

    fn mesh(workloads: Vec<mesh::Workload>) -> Mesh {
        let service = mesh::Service {
            vips: vec![
                ("east".into(), "240.0.0.1".parse().expect("an address")),
                ("west".into(), "240.0.0.2".parse().expect("an address")),
            ],
            ..samples::service("echo")
        };
        Mesh::new([service], workloads)
    }

    fn change(mesh: &mut Mesh, change: impl FnOnce(&mut mesh::Service)) {
        let mut service = mesh::Service::clone(mesh.services.values().next().expect("a service"));
        change(&mut service);
        *mesh = Mesh {
            workloads: mesh.workloads.clone(),
            hbone_only: mesh.hbone_only,
            ..Mesh::new([service], [])
        };
    }

    fn gateway() -> mesh::GatewayAddress {
        mesh::GatewayAddress {
            place: mesh::Place::Name("app/gateway.app".into()),
            port: HBONE_PORT,
        }
    }

    fn built(old: &Snapshot, mesh: Mesh) -> Snapshot {
        build(old, Change { mesh: Some((mesh, "east".into())), ..Change::default() })
    }

    fn echo(snapshot: &Snapshot) -> &Service {
        snapshot.services.get("echo.app").expect("a service")
    }

    fn addresses(snapshot: &Snapshot) -> Vec<String> {
        let set = &echo(snapshot).ports[&80];
        set.endpoints.iter().map(|endpoint| endpoint.address.to_string()).collect()
    }

    #[test]
    fn only_local_healthy_undrained_workloads_are_endpoints() {
        let mut plain = workload("plain", "10.0.0.2");
        plain.protocol = Protocol::Tcp;
        let mut remote = workload("remote", "10.0.0.3");
        remote.network = "west".into();
        let mut unhealthy = workload("unhealthy", "10.0.0.4");
        unhealthy.healthy = false;
        let mut drained = workload("drained", "10.0.0.5");
        drained.capacity = 0;
        let mut here = workload("here", "10.0.0.6");
        here.network = "east".into();
        let mut through = workload("through", "10.0.0.7");
        through.network_gateway = Some(Arc::new(gateway()));
        let mut nowhere = workload("nowhere", "10.0.0.8");
        nowhere.addresses = Default::default();
        let workloads = vec![
            workload("hbone", "10.0.0.1"),
            plain,
            remote,
            unhealthy,
            drained,
            here,
            through,
            nowhere,
            workload("NetworkGateway/east/10.0.0.9/15008", "10.0.0.9"),
            workload("east/SplitHorizonWorkload/gw/gw/10.0.0.9/app/echo.app", "10.0.0.9"),
        ];
        let snapshot = built(&Snapshot::default(), mesh(workloads));
        assert_eq!(
            addresses(&snapshot),
            ["10.0.0.1:15008", "10.0.0.6:15008", "10.0.0.2:8080", "10.0.0.7:15008"]
        );
    }

    #[test]
    fn endpoints_without_hbone_are_passed_over_where_the_source_says_so() {
        let mut plain = workload("plain", "10.0.0.2");
        plain.protocol = Protocol::Tcp;
        let mut mesh = mesh(vec![workload("hbone", "10.0.0.1"), plain]);
        mesh.hbone_only = true;
        let snapshot = built(&Snapshot::default(), mesh);
        assert_eq!(addresses(&snapshot), ["10.0.0.1:15008"]);
    }

    #[test]
    fn tls_listeners_dial_every_endpoint_at_its_target_port_and_judge_it_by_that() {
        let mut plain = workload("plain", "10.0.0.2");
        plain.protocol = Protocol::Tcp;
        let mut mesh = mesh(vec![workload("hbone", "10.0.0.1"), plain]);
        mesh.hbone_only = true;
        let next = |old: &Snapshot, mesh: &Mesh, has_passthrough| {
            let change = Change {
                mesh: Some((mesh.clone(), "east".into())),
                has_passthrough,
                ..Change::default()
            };
            build(old, change)
        };
        let without = next(&Snapshot::default(), &mesh, None);
        assert!(echo(&without).passthrough_ports.is_empty());
        let before = Arc::clone(&echo(&without).ports[&80].endpoints[0]);
        let first = next(&without, &mesh, Some(true));
        let passthrough =
            |snapshot: &Snapshot| echo(snapshot).passthrough_ports[&80].endpoints.clone();
        let dialled: Vec<_> = passthrough(&first).iter().map(|one| one.address).collect();
        let wanted = ["10.0.0.1:8080", "10.0.0.2:8080"].map(|text| text.parse().expect("one"));
        assert_eq!(dialled, wanted);
        assert_eq!(addresses(&first), ["10.0.0.1:15008"]);
        let tunnelled = &echo(&first).ports[&80].endpoints[0];
        assert!(Arc::ptr_eq(&tunnelled.state, &before.state));
        assert!(!Arc::ptr_eq(&tunnelled.state, &passthrough(&first)[0].state));
        change(&mut mesh, |service| service.allow_unhealthy = true);
        let second = next(&first, &mesh, None);
        assert!(Arc::ptr_eq(&passthrough(&second)[0].state, &passthrough(&first)[0].state));
    }

    #[test]
    fn tls_listeners_that_come_and_go_need_no_news_of_the_mesh() {
        let first = built(&Snapshot::default(), mesh(vec![workload("a", "10.0.0.1")]));
        let turned = |old: &Snapshot, has_passthrough| {
            let change = Change { has_passthrough: Some(has_passthrough), ..Change::default() };
            build(old, change)
        };
        let state = |of: &Snapshot| Arc::as_ptr(&echo(of).ports[&80].endpoints[0].state);
        let before = state(&first);
        let with = turned(&first, true);
        let passthrough = echo(&with).passthrough_ports[&80].endpoints[0].address;
        assert_eq!(passthrough, "10.0.0.1:8080".parse().expect("an address"));
        let without = turned(&with, false);
        assert!(echo(&without).passthrough_ports.is_empty());
        assert_eq!(state(&without), before);
        assert_eq!(first.generation, without.generation);
        let change = Change { listeners: true, ..Change::default() };
        assert_eq!(build(&first, change).generation, first.generation + 1);
    }

    #[test]
    fn unhealthy_endpoints_serve_where_the_service_allows_it() {
        let mut unhealthy = workload("unhealthy", "10.0.0.4");
        unhealthy.healthy = false;
        let mut mesh = mesh(vec![unhealthy]);
        change(&mut mesh, |service| service.allow_unhealthy = true);
        assert_eq!(addresses(&built(&Snapshot::default(), mesh)), ["10.0.0.4:15008"]);
    }

    #[test]
    fn a_namesake_of_a_canonical_service_has_neither_its_name_nor_a_vip() {
        let mut mesh = mesh(vec![workload("a", "10.0.0.1")]);
        let mut namesake = mesh::Service::clone(mesh.services.sorted()[0]);
        namesake.namespace = "a-first".into();
        let vip: IpAddr = "240.0.0.9".parse().expect("an address");
        namesake.vips.push((String::new(), vip));
        change(&mut mesh, |service| service.canonical = true);
        let name = "a-first/echo.app".into();
        mesh.services.insert(name, Arc::new(namesake));
        let snapshot = built(&Snapshot::default(), mesh.clone());
        assert!(snapshot.service_by_vip(vip).is_none());
        assert_eq!(snapshot.vips.len(), 1);
        let stated = snapshot.collision("echo.app").expect("a collision");
        assert_eq!(
            stated.to_string(),
            "echo.app is claimed by a-first/echo.app, and app/echo.app answers: it is the \
             canonical service"
        );
        assert_eq!(&*echo(&snapshot).namespace, "app");
        // Without the canonical service, the other one owns both names.
        mesh.services.remove("app/echo.app");
        let snapshot = built(&snapshot, mesh);
        assert_eq!(&*snapshot.service_by_vip(vip).expect("a service").namespace, "a-first");
        assert_eq!(&*echo(&snapshot).namespace, "a-first");
    }

    #[test]
    fn state_follows_uid_and_address_and_a_reused_address_starts_fresh() {
        let first = built(&Snapshot::default(), mesh(vec![workload("a", "10.0.0.1")]));
        let state = |snapshot: &Snapshot| Arc::clone(&echo(snapshot).ports[&80].endpoints[0].state);
        let kept = built(&first, mesh(vec![workload("a", "10.0.0.1")]));
        assert!(Arc::ptr_eq(&state(&first), &state(&kept)));
        let reused = built(&kept, mesh(vec![workload("b", "10.0.0.1")]));
        assert!(!Arc::ptr_eq(&state(&kept), &state(&reused)));
    }

    #[test]
    fn only_vips_of_this_network_are_kept() {
        let snapshot = built(&Snapshot::default(), mesh(vec![]));
        let vips: Vec<_> = snapshot.vips.keys().map(ToString::to_string).collect();
        assert_eq!(vips, ["240.0.0.1"]);
    }

    #[test]
    fn the_record_of_a_dual_stack_pod_tells_its_locality() {
        let own = |zone: &str| {
            let mut own = workload("own", "10.0.0.9");
            own.addresses =
                ["10.0.0.9", "fd00::9"].map(|ip| ip.parse().expect("an address")).into();
            own.locality =
                Arc::new(mesh::Locality { zone: zone.into(), ..mesh::Locality::default() });
            own
        };
        let position = Position { own_uid: Some("own".into()), ..Position::default() };
        let change = Change { position: Some(position.clone()), ..Change::default() };
        let zone = |snapshot: &Snapshot| snapshot.balancing.position.locality.zone.to_string();
        let first = build(&Snapshot::default(), change);
        assert_eq!(zone(&first), "");
        let second = built(&first, mesh(vec![own("a")]));
        assert_eq!(zone(&second), "a");
        assert_eq!(zone(&built(&second, mesh(vec![own("b")]))), "b");
        // Reload of the configuration, without a change of the mesh.
        let change = Change { position: Some(position), ..Change::default() };
        assert_eq!(zone(&build(&second, change)), "a");
    }

    #[test]
    fn the_generation_moves_with_policies_and_with_what_selects_them() {
        let first = built(&Snapshot::default(), mesh(vec![workload("a", "10.0.0.1")]));
        let same = built(&first, mesh(vec![workload("a", "10.0.0.1")]));
        assert_eq!(same.generation, first.generation);
        let mut selected = workload("a", "10.0.0.1");
        selected.policies = ["app/p".into()].into();
        let third = built(&same, mesh(vec![selected.clone(), workload("b", "10.0.0.2")]));
        assert_eq!(third.generation, 1);
        // Tunnels of a removed workload may still be open when it returns.
        let gone = built(&third, mesh(vec![workload("b", "10.0.0.2")]));
        assert_eq!(gone.generation, 1);
        assert_eq!(built(&gone, mesh(vec![selected])).generation, 2);
        let back = built(&gone, mesh(vec![workload("c", "10.0.0.3")]));
        assert_eq!(back.generation, 1, "nothing selects it");
        let change = |change| build(&third, change).generation;
        let enforcement = |mode| Change { enforcement: Some(mode), ..Change::default() };
        let policies = Change { policies: Some([].into_iter().collect()), ..Change::default() };
        assert_eq!(change(policies), 2, "now they are stated");
        assert_eq!(change(enforcement(Enforcement::Off)), 1);
        assert_eq!(change(enforcement(Enforcement::Enforce)), 2);
    }

    #[test]
    fn the_generation_moves_with_waypoints_and_the_visibility_of_a_service() {
        let first = mesh(vec![]);
        let before = built(&Snapshot::default(), first.clone());
        let moved = |with: fn(&mut mesh::Service)| {
            let mut mesh = first.clone();
            change(&mut mesh, with);
            built(&before, mesh).generation - before.generation
        };
        let waypoint = |service: &mut mesh::Service| {
            service.waypoints = vec![mesh::Waypoint { gateway: gateway(), weight: 1 }];
        };
        assert_eq!(moved(|_| {}), 0);
        assert_eq!(moved(|service| service.canonical = true), 0);
        assert_eq!(moved(waypoint), 1);
        assert_eq!(moved(|service| service.ingress_use_waypoint = true), 1);
        let named = |service: &mut mesh::Service| {
            service.subject_alt_names = vec!["spiffe://west.local/ns/a/sa/w".to_owned()];
        };
        assert_eq!(moved(named), 0, "tenants write them");
        assert_eq!(moved(|service| service.private = true), 1);
        let none = built(&Snapshot::default(), Mesh::default());
        let mut private = first.clone();
        change(&mut private, |service| service.private = true);
        // Tunnels of a removed service may still be open.
        assert_eq!(built(&none, private).generation, 1);
        assert_eq!(built(&none, first).generation, 0);
    }

    #[test]
    fn the_generation_moves_with_trust_and_exposure_only() {
        let first = built(&Snapshot::default(), mesh(vec![]));
        assert_eq!((first.version, first.generation), (1, 0));
        let trust = || Some(TrustSet::new([("west.local", "west")]));
        let second = build(&first, Change { trust: trust(), ..Change::default() });
        assert_eq!((second.version, second.generation), (2, 1));
        let same = build(&second, Change { trust: trust(), ..Change::default() });
        assert_eq!((same.version, same.generation), (3, 1));
        assert!(same.services.contains_key("echo.app"));
    }
}
