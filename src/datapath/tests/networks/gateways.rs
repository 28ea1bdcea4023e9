//! Gateways with several addresses, and changes of gateways under open tunnels.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::*;
use crate::datapath::DataPath;
use crate::datapath::balance::eject_after_failed_dial;
use crate::datapath::dial::{DenyList, TOTAL_DIAL_TIMEOUT, remote};
use crate::datapath::forward::tries::Tries;
use crate::datapath::limits::admission::Admission;
use crate::lifecycle::Lifecycle;
use crate::limits::Source;
use crate::outer::tests::ResettingGateway;
use crate::outer::{Failure, Request, Target};
use crate::snapshot::Endpoint;
use crate::telemetry::{Metrics, Record};
use crate::wire::Via;

const IPV6: &str = "2001:db8::1";

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn others(endpoint: &Endpoint) -> Vec<String> {
    let remote = endpoint.remote.as_ref().expect("a gateway");
    let others = remote.other_addresses.iter();
    others.map(ToString::to_string).collect()
}

fn updated(before: &Snapshot, workloads: Vec<Workload>) -> Snapshot {
    let change = Change {
        mesh: Some((Mesh::new([service(&[])], workloads), "east".into())),
        ..Change::default()
    };
    build(before, change)
}

#[test]
fn a_gateway_with_several_addresses_has_the_share_of_one() {
    let mut dual = gateway("west", 1);
    dual.addresses = [address("192.0.2.1"), address(IPV6)].into();
    let mut workloads = [pods("east", 2), pods("west", 2)].concat();
    workloads.extend([dual, gateway("west", 2)]);
    let snapshot = spread(workloads);
    let set = always(&snapshot);
    let want = [
        ("10.0.0.1:15008", 0.25),
        ("10.0.0.2:15008", 0.25),
        ("192.0.2.2:15008", 0.25),
        ("[2001:db8::1]:15008", 0.25),
    ];
    assert_shares(set, &want);
    let mut endpoints = set.endpoints.iter();
    let dual = endpoints.find(|one| one.address.is_ipv6()).expect("one");
    assert_eq!(others(dual), ["192.0.2.1:15008"]);
}

/// Returns istiod's record of an address of a gateway.
fn record(ip: &str) -> Workload {
    Workload {
        uid: format!("NetworkGateway/west/{ip}/0").into(),
        addresses: [address(ip)].into(),
        ..gateway("west", 1)
    }
}

fn changed(mut one: Workload, change: impl FnOnce(&mut Template)) -> Workload {
    let mut template = Template::clone(&one.template);
    change(&mut template);
    one.template = template.into();
    one
}

#[test]
fn records_of_istiod_for_both_families_of_a_gateway_stay_apart_in_later_updates() {
    let (instances, dual) = (pods("west", 2), [record("192.0.2.1"), record(IPV6)]);
    let snapshot = spread([&instances[..], &dual].concat());
    let [joined] = &always(&snapshot).endpoints[..] else {
        panic!("{:?}", always(&snapshot));
    };
    assert_eq!(others(joined), ["192.0.2.1:15008"]);
    let v4_alone = updated(&snapshot, [&instances[..], &dual[..1]].concat());
    assert_shares(always(&v4_alone), &[("192.0.2.1:15008", 1.0)]);
}

#[test]
fn records_of_two_dual_stack_gateways_are_paired_by_address_whatever_is_ready() {
    let instances = pods("west", 2);
    let ips = ["192.0.2.9", "2001:db8::9", "192.0.2.10", "2001:db8::a"];
    let paired = |unready: Option<&str>| {
        let mut records = ips.map(record);
        let unready = unready.map(address);
        for one in &mut records {
            one.healthy = one.addresses.first() != unready.as_ref();
        }
        let snapshot = spread([&instances[..], &records].concat());
        let shown = |one: &Arc<Endpoint>| (one.address.ip().to_string(), others(one).join(","));
        let mut all: Vec<_> = always(&snapshot).endpoints.iter().map(shown).collect();
        all.sort();
        all
    };
    let want =
        |want: [(&str, &str); 2]| want.map(|(one, other)| (one.to_owned(), other.to_owned()));
    let second = ("2001:db8::a", "192.0.2.10:15008");
    let both = want([("2001:db8::9", "192.0.2.9:15008"), second]);
    assert_eq!(paired(None), both);
    let v4_alone = want([("192.0.2.9", ""), second]);
    assert_eq!(paired(Some("2001:db8::9")), v4_alone);
    let v6_alone = want([("2001:db8::9", ""), second]);
    assert_eq!(paired(Some("192.0.2.9")), v6_alone);
}

#[tokio::test(start_paused = true)]
async fn each_of_three_silent_gateways_gets_a_part_of_the_time() {
    let gateway_of = |workloads| {
        let snapshot = spread(workloads);
        Arc::clone(always(&snapshot))
    };
    let gateways = (1..=3).map(|at| gateway("west", at));
    let three = gateway_of([pods("west", 1), gateways.collect()].concat());
    let one = gateway_of([pods("west", 1), vec![gateway("west", 1)]].concat());
    let own = data_path();
    let deadline = Instant::now() + TOTAL_DIAL_TIMEOUT;
    let only = remote::deadline_of_try(&own, &one, &one.endpoints[0], &Tried::default(), deadline);
    assert_eq!(only, deadline);
    let twice = EndpointSet::new(three.endpoints.iter().chain(&three.endpoints).cloned());
    let first =
        remote::deadline_of_try(&own, &twice, &three.endpoints[0], &Tried::default(), deadline);
    assert_eq!(first - Instant::now(), TOTAL_DIAL_TIMEOUT / 3);
    for (index, endpoint) in three.endpoints.iter().enumerate() {
        let left = deadline - Instant::now();
        let tried = Tried { endpoints: three.endpoints[..index].to_vec(), ..Tried::default() };
        let end = remote::deadline_of_try(&own, &three, endpoint, &tried, deadline);
        assert_eq!(end - Instant::now(), left / (3 - u32::try_from(index).unwrap()));
        tokio::time::advance(end - Instant::now()).await;
    }
    assert_eq!(Instant::now(), deadline, "the last one has the rest");
    let short = Instant::now() + Duration::from_secs(2);
    let first =
        remote::deadline_of_try(&own, &three, &three.endpoints[0], &Tried::default(), short);
    let half = first - Instant::now();
    assert_eq!(half, Duration::from_secs(1), "half of a short time");
    let none = remote::deadline_of_try(
        &own,
        &three,
        &three.endpoints[0],
        &Tried::default(),
        Instant::now(),
    );
    assert_eq!(none, Instant::now());
}

#[tokio::test]
async fn a_gateway_that_ends_each_connect_of_two_sources_by_an_error_is_ejected() {
    let gateway = ResettingGateway::start().await;
    let (target, authority, reader) = (gateway.target.clone(), gateway.authority, gateway.reader());
    let loopback = vec!["127.0.0.0/8".parse().expect("a network")];
    let own = DataPath::new(
        reader,
        gateway.tls,
        Arc::new(Metrics::new()),
        Lifecycle::default(),
        Admission::new(1024),
        1 << 20,
        DenyList::new(loopback, Vec::new()),
    );
    let endpoint = |target: &Target| {
        Arc::new(Endpoint {
            definition: Arc::default(),
            address: target.address,
            protocol: Protocol::Hbone,
            remote: Some(Arc::clone(&target.gateway)),
            weight: 1,
            state: Arc::default(),
        })
    };
    let other = Target { address: ([192, 0, 2, 1], 15008).into(), ..target.clone() };
    let set = EndpointSet::new([&target, &other].map(endpoint));
    let identity = |name: &str| Source::cluster(&"east".into()).identity(&name.into());
    // The second first peer could be an invention of the gateway.
    let first_peer = |name: &str| identity("a").behind(&"west".into()).identity(&name.into());
    for (source, is_ejected) in [
        (identity("a"), false),
        (identity("a"), false),
        (first_peer("b"), false),
        (first_peer("c"), false),
        (identity("b"), true),
    ] {
        let at = (&set, &*set.endpoints[0]);
        let deadline = Instant::now() + TOTAL_DIAL_TIMEOUT;
        let request = Request::new(authority.to_owned(), &Via::default());
        let failure = remote::send(&own, at, (&target, &source), &request, deadline).await;
        let failure = failure.expect_err("a reset");
        assert_eq!(failure.reason, Reason::GatewayReset, "{failure:?}");
        assert_eq!(own.outer.is_ejected(&target), is_ejected, "{source}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_service_returns_to_a_recovered_gateway_however_often_it_was_ejected() {
    let snapshot = two_networks([0, 1], 2);
    let set = always(&snapshot);
    let endpoint = &set.endpoints[0];
    let target = remote::target(endpoint).expect("a gateway");
    let own = data_path();
    let second = Duration::from_secs(1);
    for _ in 0..4 {
        own.outer.eject(&target);
        assert!(remote::avoid(&own, set, endpoint));
        assert!(!remote::avoid(&own, set, endpoint), "it is the last one");
        tokio::time::advance(6 * second).await;
        own.outer.simulate_connection(&target);
        assert!(!endpoint.state.is_ejected(Instant::now()));
        assert!(!remote::avoid(&own, set, endpoint));
    }
}

#[tokio::test(start_paused = true)]
async fn a_suspended_endpoint_that_fails_as_the_last_one_is_ejected() {
    let snapshot = two_networks([0, 1], 2);
    let set = always(&snapshot);
    let (endpoint, state) = (&set.endpoints[0], &set.endpoints[0].state);
    let own = data_path();
    own.outer.eject(&remote::target(endpoint).expect("a gateway"));
    assert!(remote::avoid(&own, set, endpoint));
    for is_first in [true, false] {
        let is_ejected = eject_after_failed_dial(endpoint, &own.metrics);
        assert_eq!(is_ejected, is_first, "once for all tunnels that fail");
        let left = state.ejected_for(Instant::now());
        assert_eq!(left, Some(Duration::from_secs(5)));
    }
    assert!(!remote::avoid(&own, set, endpoint));
    assert!(!state.is_suspended(Instant::now()), "it stays ejected");
}

/// Fails a try of an endpoint.
fn fail(
    (own, tries): (&DataPath, &mut Tries),
    reason: Reason,
    (set, endpoint): (&EndpointSet, Arc<Endpoint>),
) -> Result<(), Reason> {
    let source = Arc::clone(&crate::datapath::tests::peer(SystemTime::now()).source);
    let mut record = Record::new(&Arc::new(Metrics::new()), &source, "echo.app:80");
    let detail = String::new();
    tries.next(own, Failure { reason, detail }, set, endpoint, &mut record)
}

#[tokio::test(start_paused = true)]
async fn three_rejections_leave_out_the_gateways_of_one_cluster_in_a_network_and_no_others() {
    let gateways =
        |network, places: std::ops::Range<u8>| places.map(move |at| gateway(network, at));
    let second_cluster = gateways("west", 20..24)
        .map(|one| changed(one, |template| template.cluster = "west-2".into()));
    let gateways = gateways("west", 1..11).chain(gateways("north", 30..32));
    let instances = [pods("east", 5), pods("west", 1), pods("north", 1)].concat();
    let snapshot = spread([instances, gateways.chain(second_cluster).collect()].concat());
    let set = always(&snapshot);
    let own = data_path();
    let tried = |reason| {
        let (mut tries, mut counts) =
            (Tries::new(true, Instant::now() + TOTAL_DIAL_TIMEOUT), BTreeMap::new());
        while let Some(endpoint) = choose(set, &tries.tried, NO_LINK_FACTORS).cloned() {
            let cluster = Arc::clone(&endpoint.definition.cluster);
            *counts.entry(cluster.to_string()).or_insert(0) += 1;
            assert_eq!(fail((&own, &mut tries), reason, (set, endpoint)), Ok(()));
        }
        counts.into_values().collect::<Vec<_>>()
    };
    let (rejected, all) = ([3, 2, 3, 3], [5, 2, 10, 4]);
    for (reason, want) in [
        (Reason::RemoteRejected, rejected),
        (Reason::PolicyDenied, rejected),
        (Reason::RemoteBusy, rejected),
        (Reason::RemoteUnavailable, rejected),
        (Reason::GatewayUnreachable, all),
    ] {
        assert_eq!(tried(reason), want, "{reason}: east, north, west, west-2");
    }
}

#[tokio::test(start_paused = true)]
async fn only_the_first_gateway_of_a_looped_tunnel_tries_another_endpoint() {
    let snapshot = two_networks([0, 1], 2);
    let set = always(&snapshot);
    let own = data_path();
    for is_from_client in [false, true] {
        let mut tries = Tries::new(is_from_client, Instant::now() + TOTAL_DIAL_TIMEOUT);
        let endpoint = Arc::clone(&set.endpoints[0]);
        let retries = fail((&own, &mut tries), Reason::GatewayLoop, (set, endpoint)).is_ok();
        assert_eq!(retries, is_from_client);
        let is_ejected = set.endpoints[0].state.is_ejected(Instant::now());
        assert_eq!(is_ejected, is_from_client);
    }
}

#[test]
fn the_addresses_of_a_hostname_are_gateways_by_pairs_in_any_order_of_the_answer() {
    let rule = Network { gateways: hosts(&["gw.example.com:15008"]), ..Network::default() };
    let first = build(
        &spread(pods("west", 2)),
        Change {
            networks: Some([("west".into(), rule)].into_iter().collect()),
            ..Change::default()
        },
    );
    let answered = |before: &Snapshot, addresses: [&str; 3]| {
        let addresses = addresses.map(address).into();
        let change =
            Change { answers: vec![("gw.example.com".into(), addresses)], ..Change::default() };
        build(before, change)
    };
    let second = answered(&first, ["192.0.2.9", "192.0.2.8", IPV6]);
    let third = answered(&second, [IPV6, "192.0.2.8", "192.0.2.9"]);
    for snapshot in [&second, &third] {
        let want = [("192.0.2.9:15008", 0.5), ("[2001:db8::1]:15008", 0.5)];
        assert_shares(always(snapshot), &want);
        let mut endpoints = always(snapshot).endpoints.iter();
        let dual = endpoints.find(|one| one.address.is_ipv6()).expect("one");
        assert_eq!(others(dual), ["192.0.2.8:15008"]);
    }
    let state = |snapshot| Arc::as_ptr(&always(snapshot).endpoints[0].state);
    assert_eq!(state(&second), state(&third));
}

#[test]
fn the_generation_moves_with_a_new_gateway_and_a_new_identity_of_a_gateway() {
    let records = |change: &dyn Fn(&mut Workload)| {
        let mut workloads = pods("west", 2);
        let mut one = gateway("west", 1);
        change(&mut one);
        workloads.push(one);
        workloads
    };
    let first = spread(records(&|_| ()));
    let moved = |workloads| updated(&first, workloads).generation - first.generation;
    assert_eq!(moved(records(&|_| ())), 0);
    assert_eq!(moved(records(&|one| one.healthy = false)), 0);
    assert_eq!(moved(records(&|one| one.cluster = "north".into())), 1);
    assert_eq!(moved(records(&|one| one.addresses = [address(IPV6)].into())), 1);
    assert_eq!(moved(pods("west", 2)), 0);
    let two = [records(&|_| ()), vec![gateway("west", 2)]].concat();
    assert_eq!(moved(two), 1);

    let endpoint = &always(&first).endpoints[0];
    let known = endpoint.remote.as_ref().expect("a gateway");
    let identities = |snapshot: &Snapshot| {
        let now = snapshot.current_gateway(known, endpoint.address);
        now.identities.join(",")
    };
    assert_eq!(identities(&first), "spiffe://west.local/ns/edge/sa/gateway");
    let renamed = updated(&first, records(&|one| one.service_account = "other".into()));
    assert_eq!(renamed.generation, first.generation + 1);
    assert_eq!(identities(&renamed), "spiffe://west.local/ns/edge/sa/other");
    let rule = Network {
        identities: ["spiffe://west.local/ns/edge/sa/configured".into()].into(),
        ..Network::default()
    };
    let table: NetworkTable = [("west".into(), rule)].into_iter().collect();
    let configured = build(&first, Change { networks: Some(table), ..Change::default() });
    assert_eq!(configured.generation, first.generation + 1);
    assert_eq!(identities(&configured), "spiffe://west.local/ns/edge/sa/configured");
    // Without a record, a gateway still has to prove the same.
    assert_eq!(
        identities(&updated(&first, pods("west", 2))),
        "spiffe://west.local/ns/edge/sa/gateway"
    );
}
