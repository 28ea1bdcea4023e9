//! Stage 5: resolves a target against the snapshot.

use std::sync::Arc;

use crate::reason::Reason;
use crate::snapshot::mesh;
use crate::snapshot::{EndpointSet, LookupResult, MatchedBy, Service, ServicePort, Snapshot};
use crate::wire::{Authority, Host, Transit};

use super::binding::Binding;
use super::first_peer::FirstPeer;
use super::http2::tunnel::{Forwarded, Origin, Target};
use super::identity::Peer;
use super::listener::{ListenerTarget, reason_if_unknown};

/// Service port with the endpoints for its tunnels: the service's own, or those of one of its
/// waypoints.
#[derive(Debug)]
pub struct Route {
    pub(super) authority: Authority,
    service: Arc<Service>,
    port: u16,
    pub(super) matched_by: MatchedBy,
    pub(super) endpoints: Arc<EndpointSet>,
    by_waypoint: bool,
    passthrough: bool,
    granted_by_listener: bool,
    origin: Origin,
    pub(super) forwarded: Option<Box<Forwarded>>,
    /// Permission to leave the network; `Off` before policy evaluation.
    pub(super) transit: Transit,
    /// First peer of a tunnel that a trusted gateway has forwarded.
    pub(super) first_peer: Option<Box<FirstPeer>>,
    /// Binding of a local client.
    pub(super) binding: Option<Arc<Binding>>,
}

impl Route {
    /// Creates a route without endpoints.
    fn new(found: LookupResult<'_>, target: Target) -> Self {
        Self {
            authority: target.authority,
            service: Arc::clone(found.service),
            port: found.port,
            matched_by: found.matched_by,
            endpoints: Arc::default(),
            by_waypoint: false,
            passthrough: false,
            granted_by_listener: false,
            origin: target.origin,
            forwarded: target.forwarded,
            transit: Transit::Off,
            first_peer: None,
            binding: None,
        }
    }

    /// Creates the route of a binding, through gateways of its clusters.
    pub fn of_binding(snapshot: &Snapshot, binding: Arc<Binding>) -> Self {
        let (service, port) = (&binding.service, binding.port);
        let found = LookupResult { service, port, matched_by: MatchedBy::Service };
        let host = Host::Name((*service.hostname).into());
        let authority = Authority { host, port };
        let target = Target { authority, origin: Origin::Workload, forwarded: None };
        let endpoints = binding.endpoints.load(snapshot);
        let route = Self::new(found, target);
        Self { endpoints, binding: Some(binding), granted_by_listener: true, ..route }
    }

    /// Returns the binding that leads a local client to the service, if there is one.
    pub fn binding(&self) -> Option<&Arc<Binding>> {
        self.binding.as_ref()
    }

    /// Returns the authority that the peer requested.
    pub fn requested(&self) -> &Authority {
        &self.authority
    }

    /// Returns how the requested authority matched the service.
    pub fn matched_by(&self) -> &MatchedBy {
        &self.matched_by
    }

    /// Returns the service.
    pub fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// Returns the port of the service.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the hostname of the service and its port.
    pub fn service_port(&self) -> ServicePort<'_> {
        ServicePort { host: &self.service.hostname, port: self.port }
    }

    /// Returns the endpoints to dial.
    pub fn endpoints(&self) -> &Arc<EndpointSet> {
        &self.endpoints
    }

    /// Returns the drop categories of the service port with their rates in parts per million, in
    /// order.
    pub fn drops(&self) -> &[(Arc<str>, u32)] {
        let assignments = &self.service.definition.assignments;
        assignments.get(&self.port).map_or(&[], |one| &one.drops)
    }

    /// Returns the origin that the peer claims.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// Returns whether the service requires its waypoint for this tunnel.
    pub fn requires_waypoint(&self) -> bool {
        self.by_waypoint
    }

    /// Returns whether the tunnel belongs to a TLS listener.
    pub fn is_passthrough(&self) -> bool {
        self.passthrough
    }

    /// Returns whether the configuration opens the service to the clients of the listener: by a
    /// route of a TLS listener, or by its binding, whose clients were checked before.
    pub fn is_granted_by_listener(&self) -> bool {
        self.granted_by_listener
    }

    /// Returns whether the tunnel bypasses the waypoints of its service, because the peer's
    /// `x-istio-source` is trusted.
    pub fn bypasses_waypoints(&self) -> bool {
        !self.by_waypoint && !self.service.definition.waypoints.is_empty()
    }

    /// Returns the reason for a tunnel without an endpoint.
    pub fn reason_without_endpoint(&self) -> Reason {
        if self.by_waypoint {
            Reason::NoWaypoint
        } else if self.is_at_hop_limit() {
            Reason::GatewayLoop
        } else {
            Reason::NoEndpoint
        }
    }
}

/// Resolves the target.
///
/// # Errors
/// [`Reason::UnknownService`], [`Reason::UnknownSni`] for a subset, or [`Reason::BadSource`] if a
/// trusted gateway has sent a malformed first peer.
pub fn resolve(snapshot: &Snapshot, peer: &Peer, target: Target) -> Result<Route, Reason> {
    let first_peer = FirstPeer::read(snapshot, peer, target.forwarded())?;
    let found = snapshot.find(peer.policy_source(), &target.authority);
    let found = found.ok_or_else(|| reason_if_unknown(&target.authority))?;
    let service = found.service;
    let by_waypoint = uses_waypoint(snapshot, peer, service, &found.matched_by, target.origin);
    let endpoints = if by_waypoint {
        let picked = pick_waypoint(snapshot, service);
        picked.cloned().unwrap_or_default()
    } else {
        snapshot.endpoints(&found, false)
    };
    Ok(Route { endpoints, by_waypoint, first_peer, ..Route::new(found, target) })
}

/// Resolves the target of a TLS listener, with the endpoints for passthrough. A service with
/// waypoints gets no endpoints.
///
/// # Errors
/// As [`resolve`].
pub fn resolve_passthrough(
    snapshot: &Snapshot,
    peer: &Peer,
    target: ListenerTarget,
) -> Result<Route, Reason> {
    let ListenerTarget { authority, granted_by_listener } = target;
    let target = Target { authority, origin: Origin::Workload, forwarded: None };
    let found = snapshot.find(peer.policy_source(), &target.authority);
    let found = found.ok_or_else(|| reason_if_unknown(&target.authority))?;
    let by_waypoint = !found.service.definition.waypoints.is_empty();
    let endpoints = if by_waypoint { Arc::default() } else { snapshot.endpoints(&found, true) };
    Ok(Route {
        endpoints,
        by_waypoint,
        passthrough: true,
        granted_by_listener,
        ..Route::new(found, target)
    })
}

/// Returns whether a tunnel that bypassed the waypoints of the service could still do so.
pub fn may_bypass_waypoints(
    snapshot: &Snapshot,
    peer: &Peer,
    host: &str,
    matched_by: &MatchedBy,
    origin: Origin,
) -> bool {
    let service = snapshot.service_or_derived(host);
    service.is_none_or(|service| !uses_waypoint(snapshot, peer, service, matched_by, origin))
}

/// Returns whether a tunnel goes to a waypoint of the service instead of its endpoints
/// (docs/wire-contract.md 2.3).
///
/// Any client can send the header. It is trusted from two kinds of peers:
/// - identities in `trust.waypoints`;
/// - workloads of this cluster that implement a waypoint of the service; for an alias, a
///   waypoint of each service behind it that has one.
///
/// The cluster has to be this one: in a mesh with one trust domain, a waypoint of the same name
/// in another cluster has the same identity, but has applied other policies. The current
/// configuration determines the cluster. Without `trust.clusters` and with one cluster in
/// `trust.domains`, clusters cannot be distinguished, and only identities in `trust.waypoints`
/// are trusted.
fn uses_waypoint(
    snapshot: &Snapshot,
    peer: &Peer,
    service: &Service,
    matched_by: &MatchedBy,
    origin: Origin,
) -> bool {
    let definition = &service.definition;
    let claims_bypass = match origin {
        Origin::Workload => false,
        Origin::Waypoint => true,
        Origin::Gateway => !definition.ingress_use_waypoint,
    };
    if definition.waypoints.is_empty() || !claims_bypass {
        return !definition.waypoints.is_empty();
    }
    let principal = &*peer.source.principal;
    let is_waypoint_of =
        |of: &mesh::Service| of.waypoints.is_empty() || snapshot.is_waypoint_of(principal, of);
    let is_here = || {
        let cluster = snapshot.trust.cluster(peer.policy_source());
        let is_own = cluster == Some(&*snapshot.balancing.position.cluster);
        is_own && snapshot.trust.distinguishes_clusters()
    };
    let is_trusted_waypoint = || match matched_by {
        MatchedBy::Alias(alias) => {
            let targets = alias.to.iter();
            let mut behind = targets.filter_map(|to| snapshot.service_by_name(&to.host));
            behind.all(|service| is_waypoint_of(&service.definition))
        }
        _ => is_waypoint_of(definition),
    };
    !(snapshot.trust.is_waypoint(principal) || is_here() && is_trusted_waypoint())
}

/// Returns the endpoints of one of the service's waypoints, chosen by weight among those with
/// endpoints.
fn pick_waypoint<'a>(snapshot: &'a Snapshot, service: &'a Service) -> Option<&'a Arc<EndpointSet>> {
    let (mut sum, mut picked) = (0, None);
    // Weighted reservoir sampling: one pass, no allocation.
    for (waypoint, endpoints) in snapshot.usable_waypoints(&service.definition) {
        let weight = u64::from(waypoint.weight);
        sum += weight;
        if fastrand::u64(..sum) < weight {
            picked = Some(endpoints);
        }
    }
    picked
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::snapshot::builder::{Change, build};
    use crate::snapshot::mesh::{GatewayAddress, Place};
    use crate::snapshot::tests::{alias, samples};
    use crate::snapshot::traffic::Position;
    use crate::snapshot::{Alias, NameTable, Protocol, TrustSet};

    const WAYPOINT: &str = "spiffe://east.local/ns/app/sa/waypoint";

    fn ip(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    fn service(name: &str, waypoints: &[(Place, u32)]) -> mesh::Service {
        let waypoint = |(place, weight): &(Place, u32)| mesh::Waypoint {
            gateway: GatewayAddress { place: place.clone(), port: 15008 },
            weight: *weight,
        };
        let waypoints = waypoints.iter().map(waypoint).collect();
        mesh::Service { waypoints, ..samples::service(name) }
    }

    fn with(mut pod: mesh::Workload, change: impl FnOnce(&mut mesh::Workload)) -> mesh::Workload {
        change(&mut pod);
        pod
    }

    fn workload(service: &str, account: &str, last: u8) -> mesh::Workload {
        let template = mesh::Template {
            namespace: "app".into(),
            trust_domain: "east.local".into(),
            service_account: account.into(),
            protocol: Protocol::Hbone,
            ..mesh::Template::default()
        };
        let addresses = [ip(last)].into();
        let uid = format!("{service}-{last}");
        mesh::Workload { addresses, ..samples::workload(&uid, service, template) }
    }

    fn snapshot(services: Vec<mesh::Service>, workloads: Vec<mesh::Workload>) -> Snapshot {
        let mesh = mesh::Mesh::new(services, workloads);
        let trust = TrustSet::new([("east.local", "east"), ("west.local", "west")]);
        let change = Change {
            mesh: Some((mesh, "east".into())),
            trust: Some(trust.with_waypoints(["spiffe://west.local/ns/edge/sa/ingress"])),
            position: Some(Position { cluster: "east".into(), ..Position::default() }),
            ..Change::default()
        };
        build(&Snapshot::default(), change)
    }

    fn named(name: &str) -> Place {
        Place::Name(format!("app/{name}.app"))
    }

    #[test]
    fn a_trusted_peer_that_claims_it_bypasses_a_waypoint() {
        let behind = service("echo", &[(named("waypoint"), 1)]);
        let mut waypoint = service("waypoint", &[]);
        // Tenants control this field.
        let san = "spiffe://west.local/ns/app/sa/waypoint";
        waypoint.subject_alt_names = vec![san.to_owned()];
        let by_ingress = mesh::Service {
            name: "shown".into(),
            hostname: "shown.app".into(),
            ingress_use_waypoint: true,
            ..behind.clone()
        };
        // The waypoint of another service is not trusted for this one.
        let other = service("other", &[(named("second"), 1)]);
        let snapshot = snapshot(
            vec![behind, by_ingress, waypoint, other, service("second", &[])],
            vec![
                workload("waypoint", "waypoint", 2),
                workload("second", "second", 3),
                workload("other", "other", 4),
                // The waypoint of another cluster, with the name of ours.
                with(workload("waypoint", "waypoint", 6), |pod| {
                    pod.trust_domain = "west.local".into()
                }),
                // A pod of another namespace with the labels of the waypoint.
                with(workload("waypoint", "waypoint", 5), |pod| pod.namespace = "shop".into()),
            ],
        );
        let second = "spiffe://east.local/ns/app/sa/second";
        let behind_one = "spiffe://east.local/ns/app/sa/other";
        let ingress = "spiffe://west.local/ns/edge/sa/ingress";
        let labelled = "spiffe://east.local/ns/shop/sa/waypoint";
        let foreign = "spiffe://west.local/ns/shop/sa/checkout";
        // For each service: whether a tunnel goes to the waypoint if the peer sends no header,
        // claims to be a waypoint, or claims to be an ingress gateway.
        for (service, principal, want) in [
            ("echo.app", foreign, [true, true, true]),
            ("echo.app", WAYPOINT, [true, false, false]),
            ("echo.app", san, [true, true, true]),
            ("echo.app", labelled, [true, true, true]),
            ("echo.app", second, [true, true, true]),
            ("other.app", second, [true, false, false]),
            ("other.app", WAYPOINT, [true, true, true]),
            ("echo.app", behind_one, [true, true, true]),
            ("echo.app", ingress, [true, false, false]),
            ("shown.app", WAYPOINT, [true, false, true]),
            ("shown.app", ingress, [true, false, true]),
            ("shown.app", foreign, [true, true, true]),
            ("waypoint.app", foreign, [false, false, false]),
        ] {
            let service = snapshot.services.get(service).expect("a service");
            let origins = [Origin::Workload, Origin::Waypoint, Origin::Gateway];
            let peer = peer(&snapshot, principal);
            let matched_by = &MatchedBy::Service;
            let got =
                origins.map(|origin| uses_waypoint(&snapshot, &peer, service, matched_by, origin));
            assert_eq!(got, want, "{} {principal}", service.hostname);
        }
    }

    /// Returns a peer with this identity.
    fn peer(snapshot: &Snapshot, principal: &str) -> Peer {
        let parts = crate::config::parse_identity(principal).expect("an identity");
        let [trust_domain, namespace, service_account] = parts.map(Arc::from);
        let identity = crate::tls::Identity {
            uri: principal.into(),
            trust_domain,
            namespace,
            service_account,
            not_after: std::time::SystemTime::UNIX_EPOCH,
        };
        let address = ([127, 0, 0, 1], 1).into();
        Peer::authenticated(identity, None, address, Arc::default(), snapshot)
            .expect("a trusted peer")
    }

    #[test]
    fn with_one_trust_domain_only_waypoints_of_the_configuration_are_trusted() {
        let services = vec![service("echo", &[(named("waypoint"), 1)]), service("waypoint", &[])];
        let built = snapshot(services, vec![workload("waypoint", "waypoint", 2)]);
        let is_trusted = |trust: TrustSet| {
            let change = Change { trust: Some(trust), ..Change::default() };
            let snapshot = build(&built, change);
            let peer = peer(&snapshot, WAYPOINT);
            may_bypass_waypoints(
                &snapshot,
                &peer,
                "echo.app",
                &MatchedBy::Service,
                Origin::Waypoint,
            )
        };
        let one = || TrustSet::new([("east.local", "east")]);
        assert!(!is_trusted(one()));
        assert!(is_trusted(one().with_waypoints([WAYPOINT])));
        assert!(is_trusted(TrustSet::new([("east.local", "east"), ("west.local", "west")])));
    }

    #[test]
    fn a_peer_that_moves_to_another_cluster_goes_past_no_waypoint_any_more() {
        let services = vec![service("echo", &[(named("waypoint"), 1)]), service("waypoint", &[])];
        let before = snapshot(services, vec![workload("waypoint", "waypoint", 2)]);
        let opened = peer(&before, WAYPOINT);
        let may_bypass = |snapshot: &Snapshot| {
            let (matched_by, origin) = (&MatchedBy::Service, Origin::Waypoint);
            may_bypass_waypoints(snapshot, &opened, "echo.app", matched_by, origin)
        };
        assert!(may_bypass(&before));
        let change = Change {
            trust: Some(TrustSet::new([("east.local", "north"), ("west.local", "east")])),
            ..Change::default()
        };
        let now = build(&before, change);
        assert!(!may_bypass(&now));
    }

    #[test]
    fn a_port_beside_that_of_hbone_stays_plain() {
        let mut pod = workload("echo", "echo", 1);
        pod.protocol = Protocol::Tcp;
        let mut echo = service("echo", &[]);
        echo.ports = [(80, 0), (15008, 0)].into();
        for (ports, want) in [
            ([(80, 8080), (15008, 8080)], [Protocol::Tcp, Protocol::Tcp]),
            ([(80, 8080), (15008, 15008)], [Protocol::Tcp, Protocol::Hbone]),
        ] {
            pod.services = [("app/echo.app".into(), ports.into())].into();
            let snapshot = snapshot(vec![echo.clone()], vec![pod.clone()]);
            let service = snapshot.services.get("echo.app").expect("a service");
            let protocol = |port: u16| service.ports[&port].endpoints[0].protocol;
            assert_eq!([80, 15008].map(protocol), want);
        }
    }

    #[test]
    fn a_waypoint_goes_past_those_of_an_alias_only_if_it_is_one_of_each_service() {
        let all = |names: &[&str]| {
            let hosts: Vec<_> = names.iter().map(|name| format!("{name}.app")).collect();
            let hosts: Vec<_> = hosts.iter().map(String::as_str).collect();
            Alias::new(alias("all.global", &hosts), None)
        };
        let services = vec![
            service("one", &[(named("first"), 1)]),
            service("same", &[(named("first"), 1)]),
            service("two", &[(named("second"), 1)]),
            service("plain", &[]),
            service("first", &[]),
            service("second", &[]),
        ];
        let workloads = vec![workload("first", "waypoint", 2), workload("second", "second", 3)];
        let built = snapshot(services, workloads);
        for (names, want) in [
            (&["one", "same"][..], Some(false)),
            (&["one", "plain"], Some(false)),
            (&["one", "two"], Some(true)),
            (&["one"], Some(false)),
            (&["two"], Some(true)),
        ] {
            let table = NameTable::new([], [("all.global", all(names))]);
            let change = Change { names: Some(table), ..Change::default() };
            let snapshot = build(&built, change);
            let peer = peer(&snapshot, WAYPOINT);
            let requested = Authority::parse("all.global:80").expect("an authority");
            let found = snapshot.find(peer.policy_source(), &requested);
            let goes = found.map(|found| {
                let (service, matched_by) = (found.service, &found.matched_by);
                uses_waypoint(&snapshot, &peer, service, matched_by, Origin::Waypoint)
            });
            assert_eq!(goes, want, "{names:?}");
        }
    }

    /// Counts the addresses of the chosen waypoint endpoints over many draws.
    fn drawn(waypoints: &[(Place, u32)], others: Vec<mesh::Service>) -> Vec<(IpAddr, usize)> {
        let mut services = vec![service("echo", waypoints)];
        services.extend(others);
        let mut plain = workload("plain", "plain", 4);
        plain.protocol = Protocol::Tcp;
        let workloads = vec![
            workload("echo", "echo", 1),
            workload("one", "one", 2),
            workload("two", "two", 3),
            plain,
        ];
        let snapshot = snapshot(services, workloads);
        let mut counts = std::collections::BTreeMap::new();
        fastrand::seed(7);
        let echo = snapshot.services.get("echo.app").expect("a service");
        for _ in 0..4_000 {
            if let Some(set) = pick_waypoint(&snapshot, echo) {
                let address = set.endpoints[0].address;
                assert_eq!(address.port(), 15008);
                *counts.entry(address.ip()).or_default() += 1;
            }
        }
        counts.into_iter().collect()
    }

    #[test]
    fn waypoints_are_drawn_by_weight_among_those_with_endpoints() {
        let with_vip = |network: &str| mesh::Service {
            vips: vec![(network.to_owned(), [240, 0, 0, 1].into())],
            ..service("two", &[])
        };
        let others = || vec![service("one", &[]), service("two", &[])];
        let at = |network: &str| Place::Address(network.to_owned(), [240, 0, 0, 1].into());
        let both = drawn(&[(named("one"), 1), (named("two"), 3)], others());
        let (one, two) = (both[0].1, both[1].1);
        assert!((900..1_100).contains(&one) && one + two == 4_000, "{both:?}");
        let usable = [
            (vec![(named("one"), 0), (named("two"), 3)], others()),
            (vec![(named("gone"), 9), (named("two"), 1)], others()),
            (vec![(at("east"), 1)], vec![with_vip("east")]),
            (vec![(at(""), 1)], vec![with_vip("east")]),
        ];
        for (waypoints, others) in usable {
            assert_eq!(drawn(&waypoints, others), [(ip(3), 4_000)], "{waypoints:?}");
        }
        let elsewhere = Place::Name("other/one.app".to_owned());
        let unusable = [
            (vec![(named("gone"), 1)], others()),
            (vec![(elsewhere, 1)], others()),
            (vec![(named("one"), 0)], others()),
            (vec![(named("plain"), 1)], vec![service("plain", &[])]),
            (vec![(at("west"), 1)], vec![with_vip("west")]),
        ];
        for (waypoints, others) in unusable {
            assert_eq!(drawn(&waypoints, others), [], "{waypoints:?}");
        }
    }
}
