//! `strait status` and `strait dump` for a gateway that a control plane programs.

use prost::Message as _;
use serde_json::Value;
use strait::grpc::security::{self, Authorization, Clause, Match, Rule};
use strait::grpc::workload::{
    Address, GatewayAddress, NetworkAddress, TunnelProtocol, Workload, WorkloadStatus, address,
    gateway_address,
};
use strait::xds::store::{ADDRESS, AUTHORIZATION};

use crate::istio::{asks, gateway};
use crate::support::istiod::{Istiod, NAME};
use crate::support::wds::{HOSTNAME, SERVICE, bytes, service, workload};
use crate::support::{Endpoint, Gateway, Net, identities, run, until};

/// The JSON of `strait status`, and its exit code.
async fn json(gateway: &Gateway) -> (i32, Value) {
    let (code, stdout, stderr) = gateway.run_command(&["status", "-o", "json"]).await;
    let json = serde_json::from_str(&stdout);
    (code, json.unwrap_or_else(|error| panic!("{error}: {stdout}{stderr}")))
}

/// A policy about sources of the range `address/8`.
fn policy(address: Vec<u8>) -> Authorization {
    let range = security::Address { address: address.into(), length: 8 };
    let one = Match { source_ips: vec![range], ..Match::default() };
    let clauses = vec![Clause { matches: vec![one] }];
    Authorization {
        name: "p".into(),
        namespace: "other".into(),
        scope: 1,
        rules: vec![Rule { clauses }],
        ..Authorization::default()
    }
}

/// A workload of the service, changed.
fn changed(uid: &str, ip: Vec<u8>, change: impl FnOnce(&mut Workload)) -> Address {
    let mut of = workload(uid, ip);
    if let Some(address::Type::Workload(workload)) = &mut of.r#type {
        change(workload);
    }
    of
}

/// A service `app/other` with an address of no length that exists.
fn bad_service() -> Address {
    Address {
        r#type: service().r#type.map(|of| match of {
            address::Type::Service(mut service) => {
                service.hostname = "other".into();
                service.addresses[0].address = vec![1; 5].into();
                address::Type::Service(service)
            }
            other => other,
        }),
    }
}

#[test]
fn half_of_a_first_push_is_bad_and_the_status_says_what_and_why() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, NAME);
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = Istiod::default();
        istiod.put_all(
            ADDRESS,
            &[
                (SERVICE, service().encode_to_vec()),
                ("bad", workload("bad", vec![1; 5]).encode_to_vec()),
                ("app/other", bad_service().encode_to_vec()),
                ("good", workload("good", bytes(net.ip(11))).encode_to_vec()),
            ],
        );
        istiod.put(AUTHORIZATION, "other/p", &policy(vec![10; 5]));
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        asks(&gateway).await.expect("the good ones are live");

        let rejections = istiod.rejections().join("; ");
        let wanted = [
            ("bad", "workload.addresses[0]"),
            ("app/other", "service.addresses[0].address"),
            ("other/p", "authorization.rules[0].clauses[0].matches[0].source_ips"),
        ];
        for (name, field) in wanted {
            assert!(rejections.contains(&format!("{name}: {field}")), "{rejections}");
        }
        let (code, text, _) = gateway.run_command(&["status"]).await;
        assert_eq!(code, 0, "what is good is served: {text}");
        assert!(text.contains("  2 of addresses are rejected\n"), "{text}");
        assert!(text.contains("  1 of authorizations are rejected\n"), "{text}");
        for ((name, field), kind) in wanted.iter().zip(["addresses", "addresses", "authorizations"])
        {
            let line = format!("  rejected of {kind}: {name}: {field}");
            assert!(text.contains(&line), "{line} in\n{text}");
        }
        let (_, page) = json(&gateway).await;
        let addresses = &page["source"]["stream"]["types"][0];
        let counts = ["held", "rejected"].map(|key| addresses[key].as_u64());
        assert_eq!(counts, [Some(2), Some(2)], "{addresses}");
        let url = format!("{{url=\"{ADDRESS}\"}}");
        for (metric, value) in [("nacks_total", 1.0), ("resources", 2.0), ("rejected", 2.0)] {
            let seen = gateway.metric(&format!("strait_xds_{metric}{url}")).await;
            assert!((seen - value).abs() < 0.5, "{metric}: {seen}");
        }

        istiod.put(ADDRESS, "bad", &workload("bad", bytes(net.ip(12))));
        istiod.remove(ADDRESS, "app/other");
        istiod.put(AUTHORIZATION, "other/p", &policy(vec![10; 4]));
        let problems = async || json(&gateway).await.1["problems"].clone();
        until("no problem", problems, |problems| problems.as_array().is_some_and(Vec::is_empty))
            .await;
    });
}

/// Returns a waypoint or gateway of another network.
fn elsewhere() -> GatewayAddress {
    let address = NetworkAddress {
        network: "west".into(),
        address: vec![10, 9, 0, 1].into(),
        ..NetworkAddress::default()
    };
    GatewayAddress {
        destination: Some(gateway_address::Destination::Address(address)),
        hbone_mtls_port: 15008,
    }
}

/// Sends the service, two good endpoints, one dead, and one for each reason not to be used.
fn put_all_kinds(istiod: &Istiod, net: Net) {
    let ip = || bytes(net.ip(13));
    let put = |uid: &str, change: fn(&mut Workload)| {
        istiod.put(ADDRESS, uid, &changed(uid, ip(), change));
    };
    istiod.put(ADDRESS, SERVICE, &service());
    istiod.put(ADDRESS, "first", &workload("first", bytes(net.ip(11))));
    istiod.put(ADDRESS, "second", &workload("second", bytes(net.ip(12))));
    put("unhealthy", |one| one.status = WorkloadStatus::Unhealthy.into());
    put("drained", |one| one.capacity = Some(0));
    put("plain", |one| one.tunnel_protocol = TunnelProtocol::None.into());
    put("elsewhere", |one| one.network = "west".into());
    put("nowhere", |one| one.addresses.clear());
    put("through", |one| {
        one.network = "west".into();
        one.network_gateway = Some(elsewhere());
    });
    put("denied", |one| one.addresses = vec![vec![169, 254, 1, 1].into()]);
    put("other-port", |one| {
        let list = one.services.values_mut().next().expect("a service");
        list.ports[0].service_port = 81;
    });
    put("dead", |_| ());
}

#[test]
fn each_endpoint_that_is_not_used_says_why() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, NAME);
        let _first = Endpoint::echo(net.listen(11, 15008).await);
        let _second = Endpoint::echo(net.listen(12, 15008).await);
        let istiod = Istiod::default();
        put_all_kinds(&istiod, net);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        let page = async || {
            // Nothing listens at the dead endpoint: a tunnel that picks it retries with the next.
            asks(&gateway).await.expect("a tunnel");
            gateway.run_command(&["status", "echo"]).await.1
        };
        let page = until("an ejection", page, |page| page.contains("ejected for")).await;
        for (uid, why) in [
            ("first", "used"),
            ("second", "used"),
            ("unhealthy", "not used: unhealthy"),
            ("drained", "not used: drained (weight 0)"),
            ("plain", "not used: the workload does not support HBONE"),
            ("elsewhere", "not used: the workload is in network west"),
            ("nowhere", "not used: the workload has no address"),
            ("through", "not used: the workload is in network west"),
            ("denied", "not used: its address is a link-local address; see `dial.allow`"),
            ("other-port", "not used: the service has no such port"),
            ("dead", "not used: its dials failed; ejected for "),
        ] {
            let mut lines = page.lines();
            let line = lines.find(|line| line.split_whitespace().nth(1) == Some(uid));
            let line = line.unwrap_or_else(|| panic!("{uid} in\n{page}"));
            assert!(line.contains(&format!("  {why}")), "{line}");
        }
        assert!(page.contains("  exposed to cluster west on port 80\n"), "{page}");
        let (code, _, stderr) = gateway.run_command(&["status", "nothing"]).await;
        assert_eq!(code, 1);
        assert!(stderr.contains("unknown service \"nothing\""), "{stderr}");

        let (code, dump, _) = gateway.run_command(&["dump"]).await;
        let dump: Value = serde_json::from_str(&dump).expect("JSON");
        assert_eq!(code, 0);
        assert_eq!(dump["workloads"].as_array().map(Vec::len), Some(11));
        assert_eq!(dump["services"][0]["hostname"], HOSTNAME);
        let endpoints = &dump["services"][0]["endpoints"];
        assert_eq!(endpoints["drained"]["unused"]["80"], "drained (weight 0)");
    });
}

#[test]
fn a_gateway_without_its_control_plane_is_not_ready_and_says_why() {
    run(async {
        let gateway = gateway(Net::new(), NAME);
        gateway.logged("no stream to the control plane").await;
        let (code, text, _) = gateway.run_command(&["status"]).await;
        assert_eq!(code, 1);
        let first = "not ready, pending: discovery (addresses, authorizations, clusters)\n";
        assert!(text.contains(first), "{text}");
        assert!(text.contains("  no stream to the control plane: "), "{text}");
        assert!(text.contains("  not connected since "), "{text}");
        assert!(text.contains("  tried "), "{text}");
        assert!(text.contains(", next in "), "{text}");
        let connected = gateway.metric("strait_xds_connected").await;
        assert!(connected.abs() < 0.5);
    });
}
