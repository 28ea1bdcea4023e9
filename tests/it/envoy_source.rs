//! Gateway that an Envoy control plane programs, by CDS and EDS.

use prost::Message as _;
use strait::grpc::cluster::Cluster;
use strait::grpc::cluster::cluster::{ClusterDiscoveryType, DiscoveryType};
use strait::grpc::endpoint::cluster_load_assignment::{Policy, policy::DropOverload};
use strait::grpc::number::FractionalPercent;
use strait::xds::envoy::ENDPOINT;
use strait::xds::store::CLUSTER;

use crate::istio::asks;
use crate::support::eds::{
    CLUSTER_NAME, assignment, by_locality, cluster, endpoint, unhealthy, weighted, zone,
};
use crate::support::istiod::{Istiod, NAME, programmed};
use crate::support::{Endpoint, Gateway, Net, Settings, endpoint_port, identities, run, until};

/// Returns the settings of the gateway for its control plane, which is at host 2 of its net.
fn keys() -> String {
    format!("roots: root.crt, token: token, san: {NAME}")
}

fn gateway(net: Net, more: &str) -> Gateway {
    let settings = Settings::new(net, identities());
    programmed(&settings, "envoy", &format!("{}{more}", keys()), |_| {})
}

/// Sends these hosts as the endpoints.
fn tell(control: &Istiod, net: Net, name: &str, hosts: &[u8]) {
    let at = |host: &u8| endpoint(net.address(*host, endpoint_port()));
    let endpoints = hosts.iter().map(at).collect();
    control.put(ENDPOINT, name, &assignment(name, vec![zone("a", None, 0, endpoints)]));
}

/// Waits until tunnels reach this endpoint.
async fn reaches(gateway: &Gateway, endpoint: &Endpoint) {
    let before = endpoint.accepted();
    let requested = async || asks(gateway).await.map(|()| endpoint.accepted());
    let reached =
        |requested: &Result<usize, String>| requested.as_ref().is_ok_and(|now| *now > before);
    until("the endpoint", requested, reached).await.expect("a tunnel");
}

async fn refuses(gateway: &Gateway) {
    let requested = async || asks(gateway).await;
    until("a refusal", requested, Result::is_err).await.expect_err("a refusal");
}

async fn status(gateway: &Gateway) -> String {
    gateway.run_command(&["status"]).await.1
}

#[test]
fn endpoints_come_and_go_as_eds_says_and_stay_until_it_says_so() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, ", node: {id: gw-1, cluster: edge}");
        let pending = async || gateway.readiness().await;
        let waits = |(status, says): &(u16, String)| {
            *status == 500 && says.contains("discovery (clusters)")
        };
        until("readiness", pending, waits).await;
        let first = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let second = Endpoint::echo(net.listen(12, endpoint_port()).await);
        let control = Istiod::envoy_dialect();
        control.put(CLUSTER, CLUSTER_NAME, &cluster(CLUSTER_NAME, "echo-endpoints"));
        tell(&control, net, "echo-endpoints", &[11]);
        let _serving = control.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        asks(&gateway).await.expect("it is ready with its endpoints");
        assert_eq!((first.accepted(), second.accepted()), (1, 0));
        let node = control.requests()[0].node.clone().expect("a node");
        assert_eq!((&*node.id, &*node.cluster), ("gw-1", "edge"));

        tell(&control, net, "echo-endpoints", &[12]);
        reaches(&gateway, &second).await;
        // The removal of a name says nothing about its endpoints. A cluster that gets its endpoints
        // from another name keeps the old ones until new ones arrive.
        control.remove(ENDPOINT, "echo-endpoints");
        control.put(CLUSTER, CLUSTER_NAME, &cluster(CLUSTER_NAME, "others"));
        let requested = async || {
            let requests = control.requests().into_iter();
            requests.flat_map(|one| one.resource_names_subscribe).collect::<Vec<_>>()
        };
        until("the name", requested, |names| names.contains(&"others".to_owned())).await;
        asks(&gateway).await.expect("a tunnel");
        tell(&control, net, "others", &[11]);
        reaches(&gateway, &first).await;

        let sick = vec![unhealthy(net.address(11, endpoint_port()))];
        let sick = assignment("others", vec![zone("a", None, 0, sick)]);
        control.put(ENDPOINT, "others", &sick);
        refuses(&gateway).await;
        tell(&control, net, "others", &[11, 12]);
        reaches(&gateway, &second).await;
        assert_eq!(control.rejections(), [""; 0]);
    });
}

#[test]
fn a_cluster_that_is_removed_takes_its_service_and_no_other() {
    run(async {
        let net = Net::new();
        let service = "\"echo.app.svc.cluster.local:80\"";
        let more = format!(", clusters: [{{cluster: legacy, service: {service}}}]");
        let mut gateway = gateway(net, &more);
        let endpoint = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let own = Endpoint::echo(net.listen(12, endpoint_port()).await);
        let control = Istiod::envoy_dialect();
        // A cluster named in the configuration takes precedence over one named like the service.
        let static_one = Cluster {
            name: "legacy".to_owned(),
            cluster_discovery_type: Some(ClusterDiscoveryType::Type(DiscoveryType::Static.into())),
            load_assignment: Some(assignment(
                "legacy",
                vec![zone(
                    "a",
                    None,
                    0,
                    vec![crate::support::eds::endpoint(net.address(12, endpoint_port()))],
                )],
            )),
            ..Cluster::default()
        };
        control.put(CLUSTER, "legacy", &static_one);
        control.put(CLUSTER, CLUSTER_NAME, &cluster(CLUSTER_NAME, ""));
        control.put(CLUSTER, "PassthroughCluster", &cluster("PassthroughCluster", ""));
        tell(&control, net, CLUSTER_NAME, &[11]);
        let _serving = control.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        reaches(&gateway, &own).await;
        assert_eq!(endpoint.accepted(), 0);
        let shown = status(&gateway).await;
        for want in [
            "Discovery  envoy ",
            "not used of clusters: PassthroughCluster: no service for this name",
            "`legacy` serves this port",
        ] {
            assert!(shown.contains(want), "{want} in {shown}");
        }
        control.remove(CLUSTER, "legacy");
        reaches(&gateway, &endpoint).await;
        control.remove(CLUSTER, CLUSTER_NAME);
        refuses(&gateway).await;
        let unknown = async || gateway.tunnels("unknown_service").await;
        until("its reason", unknown, |&count| count > 0.5).await;
        assert_eq!(control.rejections(), [""; 0]);
    });
}

#[test]
fn what_is_rejected_is_named_and_its_last_good_version_stays() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, "");
        let endpoint = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let control = Istiod::envoy_dialect();
        control.put(CLUSTER, CLUSTER_NAME, &cluster(CLUSTER_NAME, ""));
        tell(&control, net, CLUSTER_NAME, &[11]);
        let _serving = control.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        let mut bad = zone("a", None, 0, Vec::new());
        bad.priority = 500;
        control.put(ENDPOINT, CLUSTER_NAME, &assignment(CLUSTER_NAME, vec![bad]));
        let rejections = async || control.rejections();
        let rejections = until("a NACK", rejections, |rejections| !rejections.is_empty()).await;
        let want = format!("{CLUSTER_NAME}: endpoints[0].priority: 500, want at most 128");
        assert_eq!(rejections, [want.as_str()]);
        let shown = async || status(&gateway).await;
        let is_named = |shown: &String| shown.contains(&format!("rejected of endpoints: {want}"));
        until("the status", shown, is_named).await;
        reaches(&gateway, &endpoint).await;
        tell(&control, net, CLUSTER_NAME, &[11]);
        until("the status", shown, |shown| !shown.contains("rejected of")).await;
    });
}

#[test]
fn what_was_received_stays_in_force_while_the_control_plane_is_away() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, "");
        let endpoint = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let control = Istiod::envoy_dialect();
        control.put(CLUSTER, CLUSTER_NAME, &cluster(CLUSTER_NAME, ""));
        tell(&control, net, CLUSTER_NAME, &[11]);
        let serving = control.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        serving.stop().await;
        gateway.logged("no stream to the control plane").await;
        reaches(&gateway, &endpoint).await;
        assert_eq!(gateway.readiness().await.0, 200);

        let (sent, requested) = (control.sent(), control.requests().len());
        let _serving = control.serve(net.address(2, 15012), identities()).await;
        // Two initial requests and the acknowledgements of two responses.
        let answers = async || control.requests().len();
        until("its return", answers, |&now| now >= requested + 4).await;
        assert_eq!(control.sent(), sent, "nothing is sent again");
        let firsts = &control.requests()[requested..];
        let claims = firsts.iter().map(|one| one.initial_resource_versions.len());
        assert_eq!(claims.sum::<usize>(), 2);
        reaches(&gateway, &endpoint).await;
    });
}

#[test]
fn a_control_plane_beside_the_gateway_may_speak_in_plaintext() {
    run(async {
        let net = Net::new();
        let settings = Settings::new(net, identities());
        let mut gateway = programmed(&settings, "envoy", "tls: off", |_| {});
        let endpoint = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let control = Istiod::envoy_dialect();
        control.put(CLUSTER, CLUSTER_NAME, &cluster(CLUSTER_NAME, ""));
        tell(&control, net, CLUSTER_NAME, &[11]);
        let _serving = control.serve_plaintext(net.address(2, 15012)).await;
        gateway.ready().await;
        gateway.logged("`discovery.tls` is `off`").await;
        reaches(&gateway, &endpoint).await;
    });
}

#[test]
fn a_start_without_a_control_plane_serves_the_cached_state() {
    run(async {
        let net = Net::new();
        let cached = |state: Vec<u8>| {
            let settings = Settings::new(net, identities());
            let keys = format!("{}, cache: state", keys());
            programmed(&settings, "envoy", &keys, |folder| {
                std::fs::write(folder.join("state"), state).expect("a cache");
            })
        };
        let mut first = cached(Vec::new());
        let endpoint = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let control = Istiod::envoy_dialect();
        control.put(CLUSTER, CLUSTER_NAME, &cluster(CLUSTER_NAME, ""));
        tell(&control, net, CLUSTER_NAME, &[11]);
        let serving = control.serve(net.address(2, 15012), identities()).await;
        first.ready().await;
        let state = async || std::fs::read(first.file("state")).expect("the cache");
        let state = until("the cache", state, |state| !state.is_empty()).await;
        serving.stop().await;
        first.kill().await;

        let mut second = cached(state);
        second.ready().await;
        second.logged("serving the cached state").await;
        reaches(&second, &endpoint).await;
        let sent = control.sent();
        let _serving = control.serve(net.address(2, 15012), identities()).await;
        let shown = async || second.http(15000, "GET", "/config_dump").await.1;
        let is_back = |dump: &String| !dump.contains("no control plane yet");
        until("its return", shown, is_back).await;
        assert_eq!(control.sent(), sent, "nothing is sent again");
        control.remove(CLUSTER, CLUSTER_NAME);
        refuses(&second).await;
    });
}

#[test]
fn floods_of_changes_end_in_the_last_one() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, "");
        let first = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let control = Istiod::envoy_dialect();
        control.put(CLUSTER, CLUSTER_NAME, &cluster(CLUSTER_NAME, ""));
        let others: Vec<_> = (0..2_000).map(|index| format!("s{index}.app:80")).collect();
        let bodies = others.iter().map(|name| (&**name, cluster(name, "").encode_to_vec()));
        control.put_all(CLUSTER, &bodies.collect::<Vec<_>>());
        let endpoints = vec![zone("a", None, 0, vec![endpoint(net.address(9, 1))])];
        let bodies = others
            .iter()
            .map(|name| (&**name, assignment(name, endpoints.clone()).encode_to_vec()));
        control.put_all(ENDPOINT, &bodies.collect::<Vec<_>>());
        tell(&control, net, CLUSTER_NAME, &[]);
        let serving = control.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        for turn in 0..30_u8 {
            tell(&control, net, CLUSTER_NAME, &[100 + turn]);
            control.remove(CLUSTER, &others[usize::from(turn)]);
        }
        tell(&control, net, CLUSTER_NAME, &[11]);
        reaches(&gateway, &first).await;
        serving.stop().await;
        let shown = status(&gateway).await;
        let held = (2_001 - 30).to_string();
        let row = |name: &str| {
            let mut lines = shown.lines().map(str::split_whitespace);
            let row = lines.find_map(|mut words| (words.next() == Some(name)).then_some(words));
            row.expect("a row").nth(1).map(str::to_owned)
        };
        assert_eq!(row("clusters"), Some(held.clone()));
        assert_eq!(row("endpoints"), Some(held));
        assert_eq!(control.rejections(), [""; 0]);
    });
}

/// Returns the number of tunnels that each of the endpoints gets, of `count`.
async fn shared(gateway: &Gateway, endpoints: &[&Endpoint], count: usize) -> Vec<usize> {
    let before: Vec<_> = endpoints.iter().map(|one| one.accepted()).collect();
    for _ in 0..count {
        asks(gateway).await.expect("a tunnel");
    }
    let now = endpoints.iter().zip(before);
    now.map(|(one, before)| one.accepted() - before).collect()
}

#[test]
fn priorities_are_left_gradually_and_weights_of_places_and_endpoints_count() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, "");
        let near = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let far = Endpoint::echo(net.listen(12, endpoint_port()).await);
        let at = |host| net.address(host, endpoint_port());
        let control = Istiod::envoy_dialect();
        control.put(CLUSTER, CLUSTER_NAME, &by_locality(cluster(CLUSTER_NAME, "")));
        let received = |near: Vec<_>, far: Vec<_>| {
            let zones = vec![zone("a", Some(1), 0, near), zone("b", Some(1), 1, far)];
            control.put(ENDPOINT, CLUSTER_NAME, &assignment(CLUSTER_NAME, zones));
        };
        received(vec![endpoint(at(11))], vec![endpoint(at(12))]);
        let _serving = control.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        assert_eq!(shared(&gateway, &[&near, &far], 20).await, [20, 0]);

        // Half of the first priority is ready: 70 % of the tunnels stay there. The bounds are five
        // standard deviations.
        let shown = async || gateway.http(15000, "GET", "/config_dump").await.1;
        received(vec![endpoint(at(11)), unhealthy(at(13))], vec![endpoint(at(12))]);
        let there = |dump: &String| dump.contains(&at(13).ip().to_string());
        until("the change", shown, there).await;
        let [stay, go] = shared(&gateway, &[&near, &far], 200).await[..] else {
            panic!("two endpoints");
        };
        assert!((108..=172).contains(&stay) && stay + go == 200, "{stay} and {go}");

        // All of it is gone.
        received(vec![unhealthy(at(11))], vec![endpoint(at(12))]);
        until("the change", shown, |dump| !there(dump)).await;
        assert_eq!(shared(&gateway, &[&near, &far], 20).await, [0, 20]);

        // One priority, localities of weight 1 and 3. In the second, one endpoint of two has all
        // weight.
        let places = vec![
            zone("a", Some(1), 0, vec![endpoint(at(11))]),
            zone("b", Some(3), 0, vec![weighted(at(12), 1_000_000), weighted(at(14), 1)]),
        ];
        control.put(ENDPOINT, CLUSTER_NAME, &assignment(CLUSTER_NAME, places));
        let there = |dump: &String| dump.contains(&at(14).ip().to_string());
        until("the change", shown, there).await;
        let [one, three] = shared(&gateway, &[&near, &far], 200).await[..] else {
            panic!("two endpoints");
        };
        assert!((119..=181).contains(&three) && one + three == 200, "{one} and {three}");
        assert_eq!(control.rejections(), [""; 0]);
    });
}

#[test]
fn a_part_of_the_tunnels_is_refused_where_the_control_plane_wants_that() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, "");
        let _endpoint = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let dropping = |percent| {
            let at = net.address(11, endpoint_port());
            let zones = vec![zone("a", None, 0, vec![endpoint(at)])];
            let mut assignment = assignment(CLUSTER_NAME, zones);
            let overload = DropOverload {
                category: "too much".to_owned(),
                drop_percentage: Some(FractionalPercent {
                    numerator: percent,
                    ..FractionalPercent::default()
                }),
            };
            assignment.policy =
                Some(Policy { drop_overloads: vec![overload], ..Policy::default() });
            assignment
        };
        let control = Istiod::envoy_dialect();
        control.put(CLUSTER, CLUSTER_NAME, &cluster(CLUSTER_NAME, ""));
        control.put(ENDPOINT, CLUSTER_NAME, &dropping(30));
        let _serving = control.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        let mut refused = 0;
        for _ in 0..200 {
            match asks(&gateway).await {
                Ok(()) => {}
                Err(why) => {
                    assert!(why.contains("503"), "{why}");
                    refused += 1;
                }
            }
        }
        // 60 is expected; the bounds are five standard deviations.
        assert!((28..=92).contains(&refused), "{refused} of 200");
        let counted = gateway.tunnels("drop_overload").await;
        assert!((counted - f64::from(refused)).abs() < 0.5, "{counted}");
        gateway.logged("reason=\"drop_overload\" error=\"dropped by drop_overloads").await;
        control.put(ENDPOINT, CLUSTER_NAME, &dropping(100));
        refuses(&gateway).await;
        asks(&gateway).await.expect_err("all are refused");
        assert_eq!(control.rejections(), [""; 0]);
    });
}
