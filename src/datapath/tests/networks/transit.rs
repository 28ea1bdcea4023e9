//! Permission of tunnels to leave the network.

use std::sync::Arc;
use std::time::SystemTime;

use crate::config::{ExposedService, parse_identity};
use crate::datapath::balance::{Tried, choose};
use crate::datapath::http2::tunnel::{Forwarded, Origin, Target};
use crate::datapath::identity::Peer;
use crate::datapath::listener::{Listener, ListenerRules};
use crate::datapath::policy;
use crate::datapath::route;
use crate::reason::Reason;
use crate::snapshot::builder::{Change, build};
use crate::snapshot::mesh::{Mesh, Scope, Service};
use crate::snapshot::tests::{alias, entry, hosts};
use crate::snapshot::traffic::{Traffic, TrafficRule};
use crate::snapshot::{
    Alias, Audience, ExportSet, ExposureTable, NO_LINK_FACTORS, NameTable, ServiceVisibility,
    Snapshot, TransitRule,
};
use crate::tls::Identity;
use crate::wire::sni::SniPattern;
use crate::wire::{Authority, Transit};

use super::{CLIENT, change, exposure, gateway, pod, pods, service, snapshot_with};

pub(super) fn peer(snapshot: &Snapshot, principal: &str, listener: Transit) -> Peer {
    let parts = parse_identity(principal).expect("an identity").map(Arc::from);
    let [trust_domain, namespace, service_account] = parts;
    let identity = Identity {
        uri: principal.into(),
        trust_domain,
        namespace,
        service_account,
        not_after: SystemTime::UNIX_EPOCH,
    };
    let listener = Arc::new(Listener::open_to_all(&ListenerRules::with_transit(listener)));
    let address = ([127, 0, 0, 1], 1).into();
    let peer = Peer::authenticated(identity, None, address, listener, snapshot);
    peer.expect("a trusted peer")
}

fn permit(
    snapshot: &Snapshot,
    peer: &Peer,
    to: &str,
    via_gateway: bool,
) -> Result<policy::Permit, Reason> {
    let forwarded = Forwarded { via: Some((*b"0123456789abcdef").into()), ..Forwarded::default() };
    let target = Target {
        authority: Authority::parse(to).expect("an authority"),
        origin: Origin::Workload,
        forwarded: via_gateway.then(|| Box::new(forwarded)),
    };
    let permit = policy::run(snapshot, peer, route::resolve(snapshot, peer, target)?);
    permit.map_err(|rejection| rejection.reason)
}

#[test]
fn a_tunnel_leaves_the_network_only_as_far_as_entry_listener_and_way_permit() {
    use Transit::{Always, Failover, Off};
    const GATEWAY: &str = "spiffe://west.local/ns/edge/sa/gateway";
    let mut workloads = pods("north", 1);
    workloads.extend([gateway("north", 1), gateway("west", 2)]);
    for (grant, listener, principal, via, want) in [
        (Off, Always, CLIENT, false, Off),
        (Failover, Always, CLIENT, false, Failover),
        (Failover, Off, CLIENT, false, Off),
        (Always, Failover, CLIENT, false, Failover),
        (Always, Always, CLIENT, false, Always),
        (Failover, Always, CLIENT, true, Off),
        (Failover, Always, GATEWAY, false, Off),
        (Always, Failover, CLIENT, true, Off),
        (Always, Always, CLIENT, true, Always),
        (Always, Always, GATEWAY, false, Always),
    ] {
        let rule = TrafficRule::default();
        let snapshot = snapshot_with(grant, service(&[]), workloads.clone(), rule);
        let peer = peer(&snapshot, principal, listener);
        for to in ["echo.app:80", "echo.example:80"] {
            let permit = permit(&snapshot, &peer, to, via).expect("a permit");
            let case = format!("{grant} {listener} {principal} {via} {to}");
            assert_eq!(permit.route().transit(), want, "{case}");
            let endpoints = &permit.route().endpoints().endpoints;
            assert_eq!(endpoints.is_empty(), want == Off, "{case}");
            assert_eq!(permit.route().detail().is_some(), want == Off, "{case}");
        }
    }
}

#[test]
fn a_tunnel_at_the_limit_of_gateways_has_the_endpoints_of_this_network() {
    let remote = [gateway("west", 1), pod("west", 1)];
    let any = TrafficRule { preferences: Some(&[]), ..TrafficRule::default() };
    for (hops, here, want) in
        [(2, 1, Ok(2)), (2, 0, Ok(1)), (3, 1, Ok(1)), (3, 0, Err(Reason::GatewayLoop))]
    {
        let workloads = [&pods("east", here)[..], &remote].concat();
        let snapshot = snapshot_with(Transit::Always, service(&[]), workloads, any.clone());
        let peer = peer(&snapshot, CLIENT, Transit::Always);
        let via = ["0123456789abcdef"; 3][..hops].join(",");
        let forwarded = Forwarded { via: Some(via.into_bytes().into()), ..Forwarded::default() };
        let target = Target {
            authority: Authority::parse("echo.app:80").expect("an authority"),
            origin: Origin::Workload,
            forwarded: Some(Box::new(forwarded)),
        };
        let route = route::resolve(&snapshot, &peer, target).expect("a route");
        let permit = policy::run(&snapshot, &peer, route).expect("a permit");
        let route = permit.route();
        let got = match route.endpoints().endpoints.len() {
            0 => Err(route.reason_without_endpoint()),
            count => Ok(count),
        };
        assert_eq!(got, want, "{hops} gateways, {here} pods");
    }
}

#[test]
fn an_open_tunnel_to_another_network_ends_with_the_grant_of_transit() {
    let mut workloads = [pods("east", 1), pods("west", 1)].concat();
    workloads.push(gateway("west", 1));
    let rule = TrafficRule::default();
    let first = snapshot_with(Transit::Failover, service(&[]), workloads, rule);
    let peer = peer(&first, CLIENT, Transit::Always);
    let grant = |is_remote: bool| {
        let permit = permit(&first, &peer, "echo.app:80", false).expect("a permit");
        let mut endpoints = permit.route().endpoints().endpoints.iter();
        let endpoint = endpoints.find(|one| one.remote.is_some() == is_remote);
        let endpoint = Arc::clone(endpoint.expect("an endpoint"));
        permit.into_grant(endpoint)
    };
    let (here, there) = (grant(false), grant(true));
    let next = |transit| {
        let change = Change { exposure: Some(exposure(transit)), ..Change::default() };
        build(&first, change)
    };
    for (transit, is_kept) in [(Transit::Always, true), (Transit::Off, false)] {
        let next = next(transit);
        assert_eq!(next.generation, first.generation + 1);
        assert_eq!(policy::still_allowed(&next, &peer, &here), Ok(()));
        let judged = policy::still_allowed(&next, &peer, &there);
        assert_eq!(judged.is_ok(), is_kept, "{transit}");
    }
    let service = next(Transit::Off);
    let service = service.services.get("echo.app").expect("a service");
    assert!(service.transit_ports.is_empty());
    assert_eq!(*service.other_networks, [Arc::from("west")]);
}

#[test]
fn an_endpoint_of_an_alias_has_the_authority_of_its_own_service() {
    let mut twin = service(&[]);
    (twin.name, twin.hostname) = ("twin".into(), "twin.app".into());
    twin.ports = [(81, 8080)].into();
    let mut of_twin = pod("west", 2);
    of_twin.services = [("app/twin.app".into(), [(81, 8080)].into())].into();
    let workloads = [pod("west", 1), of_twin, gateway("west", 1)];
    let both = Alias::new(alias("both.example:80", &["echo.app", "twin.app:81"]), None);
    let change = Change {
        mesh: Some((Mesh::new([service(&[]), twin], workloads), "east".into())),
        exposure: Some(exposure(Transit::Always)),
        names: Some(NameTable::new([], [("both.example", both)])),
        ..Change::default()
    };
    let snapshot = build(&Snapshot::default(), change);
    let derived = snapshot.derived_services.values().next().expect("one");
    let set = derived.endpoints_by(80, Transit::Always).expect("a set");
    let endpoints = set.endpoints.iter();
    let mut authorities: Vec<_> = endpoints.map(|one| one.remote_authority()).collect();
    authorities.sort_unstable();
    let want = ["echo.app:80", "twin.app:81"].map(|text| Some(text.to_owned()));
    assert_eq!(authorities, want);
}

#[test]
fn a_service_with_the_preference_any_uses_all_networks_alike() {
    let workloads = [pods("east", 1), pods("west", 2), vec![gateway("west", 1)]].concat();
    let share_here = |preferences: Option<Vec<Scope>>, every: Option<&'static [Scope]>| {
        let service = Service { preferences, ..service(&[]) };
        let every = TrafficRule { preferences: every, ..TrafficRule::default() };
        let change = Change {
            traffic: Some(Traffic::new([], every)),
            ..change(Transit::Always, service, workloads.clone(), TrafficRule::default())
        };
        super::shares_by_network(super::always(&build(&Snapshot::default(), change)))[0]
    };
    let close: &[Scope] = &[Scope::Network, Scope::Region, Scope::Zone];
    for (of_service, every, want) in [
        (None, None, 1.0),
        (None, Some(close), 1.0),
        (None, Some(&[][..]), 1.0 / 3.0),
        (Some(vec![]), None, 1.0 / 3.0),
        (Some(vec![]), Some(close), 1.0 / 3.0),
        (Some(vec![Scope::Network]), Some(&[][..]), 1.0),
    ] {
        let got = share_here(of_service.clone(), every);
        assert!((got - want).abs() < 0.01, "{of_service:?} {every:?}: {got}");
    }
}

/// Returns the snapshot of a service that a control plane exports, under these rules. The service
/// has a pod here and one in another network.
fn exported(rules: &[(Option<&str>, Option<&str>, Transit)], is_ready: bool) -> Snapshot {
    let mut workloads = [pods("east", 1), pods("west", 1), vec![gateway("west", 1)]].concat();
    workloads[0].healthy = is_ready;
    let rules = rules.iter().map(|(service, namespace, transit)| TransitRule {
        service: service.map(|name| SniPattern::parse(name).expect("a pattern")),
        namespace: namespace.map(Into::into),
        transit: *transit,
        ..TransitRule::default()
    });
    let table = ExposureTable::new(false).with_transit(rules);
    let rule = TrafficRule::default();
    let change = Change {
        exposure: Some(table),
        exports: Some([("echo.app", 80)].into_iter().collect()),
        ..change(Transit::Off, service(&[]), workloads, rule)
    };
    build(&Snapshot::default(), change)
}

#[test]
fn an_export_has_the_transit_of_the_most_specific_rule() {
    use Transit::{Always, Failover, Off};
    let (host, wildcard) = (Some("echo.app"), Some("*.app"));
    for (rules, want) in [
        (&[][..], Off),
        (&[(None, None, Failover)], Failover),
        (&[(None, None, Always), (None, Some("app"), Failover)], Failover),
        (&[(None, None, Always), (None, Some("shop"), Failover)], Always),
        (&[(None, Some("app"), Always), (wildcard, None, Failover)], Failover),
        (&[(wildcard, None, Always), (host, None, Off)], Off),
        (&[(None, Some("app"), Off), (Some("*.shop"), None, Always)], Off),
    ] {
        let snapshot = exported(rules, true);
        for (listener, via, want) in [
            (Always, false, want),
            (Failover, false, want.min(Failover)),
            (Off, false, Off),
            (Always, true, if want == Failover { Off } else { want }),
        ] {
            let peer = peer(&snapshot, CLIENT, listener);
            let permit = permit(&snapshot, &peer, "echo.app:80", via).expect("a permit");
            assert_eq!(permit.route().transit(), want, "{rules:?} {listener} {via}");
        }
    }
}

#[test]
fn a_global_service_fails_over_by_the_default() {
    for (is_ready, want) in [(true, None), (false, Some("west"))] {
        let snapshot = exported(&[(None, None, Transit::Failover)], is_ready);
        let peer = peer(&snapshot, CLIENT, Transit::Always);
        let permit = permit(&snapshot, &peer, "echo.app:80", false).expect("a permit");
        let endpoints = permit.route().endpoints();
        let picked = choose(endpoints, &Tried::default(), NO_LINK_FACTORS);
        let picked = picked.expect("an endpoint");
        let network = picked.remote.as_ref().map(|remote| &*remote.network);
        assert_eq!(network, want, "{is_ready}");
    }
}

#[test]
fn an_entry_has_its_own_transit_or_that_of_a_rule() {
    use Transit::{Always, Failover, Off};
    for (own, rule, want) in [
        (None, Failover, Failover),
        (Some(Off), Failover, Off),
        (Some(Always), Off, Always),
        (None, Off, Off),
    ] {
        let mut snapshot = exported(&[], true);
        for to in ["echo.app:80", "echo.example:80"] {
            let entry = ExposedService {
                names: hosts(&["echo.example"]),
                transit: own,
                ..entry("echo.app", vec![Audience::default()])
            };
            let default = TransitRule { transit: rule, ..TransitRule::default() };
            let mut table = ExposureTable::new(false).with_transit([default]);
            table.add(entry);
            let change = Change { exposure: Some(table), ..Change::default() };
            snapshot = build(&snapshot, change);
            let peer = peer(&snapshot, CLIENT, Always);
            let permit = permit(&snapshot, &peer, to, false).expect("a permit");
            assert_eq!(permit.route().transit(), want, "{own:?} {rule} {to}");
        }
    }
}

#[test]
fn a_service_that_only_a_link_exposes_stays_in_its_network() {
    let mut snapshot = exported(&[(None, None, Transit::Always)], true);
    let patterns = vec![SniPattern::Any];
    let change = Change {
        exports: Some(ExportSet::default()),
        scope: Some(ServiceVisibility {
            by_link: [("west".into(), patterns)].into(),
            ..ServiceVisibility::default()
        }),
        ..Change::default()
    };
    snapshot = build(&snapshot, change);
    let peer = peer(&snapshot, CLIENT, Transit::Always);
    let permit = permit(&snapshot, &peer, "echo.app:80", false).expect("a permit");
    assert_eq!(permit.route().transit(), Transit::Off);
}
