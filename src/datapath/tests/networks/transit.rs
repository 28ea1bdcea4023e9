//! Permission of tunnels to leave the network.

use super::*;
use crate::datapath::policy;

fn permit(
    snapshot: &Snapshot,
    peer: &Peer,
    to: &str,
    via_gateway: bool,
) -> Result<policy::Permit, Reason> {
    let forwarded = Forwarded { via: Some((*b"0123456789abcdef").into()), ..Forwarded::default() };
    let target = target_of(to, via_gateway.then_some(forwarded));
    let permit = policy::run(snapshot, peer, route::resolve(snapshot, peer, target)?);
    permit.map_err(|rejection| rejection.reason)
}

#[test]
fn an_open_tunnel_to_another_network_ends_with_the_grant_of_transit() {
    let mut workloads = [pods("east", 1), pods("west", 1)].concat();
    workloads.push(gateway("west", 1));
    let rule = TrafficRule::default();
    let first = snapshot_with(Transit::Failover, service(&[]), workloads, rule);
    let peer = peer_of(&first, CLIENT, Transit::Always);
    let grant = |is_remote: bool| {
        let permit = permit(&first, &peer, "echo.app:80", false).expect("a permit");
        let mut endpoints = permit.route().endpoints.endpoints.iter();
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
fn only_a_tunnel_that_policy_permits_has_endpoints_built() {
    let (echo, rule) = (service(&[]), TrafficRule::default());
    let snapshot = snapshot_with(Transit::Off, echo, pods("east", 1), rule);
    let is_built = || {
        let service = snapshot.services.get("echo.app").expect("a service");
        service.ports[&80].is_built()
    };
    let north = peer_of(&snapshot, "spiffe://north.local/ns/shop/sa/checkout", Transit::Off);
    let refused = permit(&snapshot, &north, "echo.app:80", false);
    assert_eq!((refused.err(), is_built()), (Some(Reason::NotForPeer), false));
    let west = peer_of(&snapshot, CLIENT, Transit::Off);
    let permit = permit(&snapshot, &west, "echo.app:80", false).expect("a permit");
    assert_eq!((permit.route().endpoints.endpoints.len(), is_built()), (1, true));
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
    let share_here = |preferences: Option<Vec<Scope>>, every: Option<Distribution>| {
        let service = Service { preferences, ..service(&[]) };
        let every = TrafficRule { distribution: every, ..TrafficRule::default() };
        let change = Change {
            traffic: Some(Traffic::new([], every)),
            ..change(Transit::Always, service, workloads.clone(), TrafficRule::default())
        };
        shares_by_network(always(&build(&Snapshot::default(), change)))[0]
    };
    let (close, any) = (Some(Distribution::Close), Some(Distribution::Any));
    for (of_service, every, want) in [
        (None, None, 1.0),
        (None, close, 1.0),
        (None, any, 1.0 / 3.0),
        (Some(vec![]), None, 1.0 / 3.0),
        (Some(vec![]), close, 1.0 / 3.0),
        (Some(vec![Scope::Network]), any, 1.0),
    ] {
        let got = share_here(of_service.clone(), every);
        assert!((got - want).abs() < 0.01, "{of_service:?} {every:?}: {got}");
    }
}
