//! Gateway that a control plane programs.

use std::path::Path;

use prost::Message as _;
use strait::grpc::workload::{Address, Service, address};
use strait::xds::store::{ADDRESS, CLUSTER};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::istiod::{BUILT_IN, Istiod, NAME, programmed};
use crate::support::wds::{HOSTNAME, SERVICE, bytes, ports, service, workload};
use crate::support::{ECHO, Endpoint, Gateway, Net, Settings, broken, identities, run, until};

/// Starts a gateway of cluster east whose control plane is at host 2 of its net, by this name.
pub fn gateway(net: Net, name: &str) -> Gateway {
    spawn(&Settings::new(net, identities()), name)
}

pub fn spawn(settings: &Settings<'_>, name: &str) -> Gateway {
    spawn_with(settings, name, |_| {})
}

/// The same with a cache, that starts with `state` in it.
fn cached(net: Net, state: &[u8]) -> Gateway {
    let settings = Settings::new(net, identities());
    spawn_with(&settings, &format!("{NAME}, cache: state"), |folder| {
        std::fs::write(folder.join("state"), state).expect("a cache");
    })
}

pub fn spawn_with(settings: &Settings<'_>, name: &str, prepare: impl FnOnce(&Path)) -> Gateway {
    let keys = format!("roots: root.crt, token: token, san: {name}");
    programmed(settings, "istio", &keys, prepare)
}

pub async fn asks(gateway: &Gateway) -> Result<(), String> {
    let client = gateway.client(identities()).await;
    let mut tunnel = client.tunnel(ECHO).await.map_err(|error| error.to_string())?;
    tunnel.write_all(b"hello").await.expect("a request");
    let mut answer = [0; 5];
    tunnel.read_exact(&mut answer).await.expect("an answer");
    assert_eq!(&answer, b"hello");
    Ok(())
}

#[test]
fn endpoints_come_and_go_as_the_control_plane_says() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, NAME);
        until(
            "readiness",
            async || gateway.readiness().await,
            |(status, says)| *status == 500 && says.contains("discovery (addresses, "),
        )
        .await;
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        istiod.put(ADDRESS, "a", &workload("a", bytes(net.ip(11))));
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        let first = Endpoint::echo(net.listen(11, 15008).await);
        let second = Endpoint::echo(net.listen(12, 15008).await);
        asks(&gateway).await.expect("a tunnel");
        assert_eq!((first.accepted(), second.accepted()), (1, 0));

        // In this order, a gateway with the second change also has the first.
        istiod.remove(ADDRESS, "a");
        istiod.put(ADDRESS, "b", &workload("b", bytes(net.ip(12))));
        let _ = until(
            "the second endpoint",
            async || asks(&gateway).await.map(|()| second.accepted()),
            |requested| requested.as_ref().is_ok_and(|&accepted| accepted > 0),
        )
        .await;
        let before = first.accepted();
        asks(&gateway).await.expect("a tunnel");
        assert_eq!(first.accepted(), before, "the first endpoint is gone");
        let nodes = istiod.requests().into_iter().filter_map(|request| request.node);
        assert!(nodes.count() >= 1, "the first requests say who asks");
        assert_eq!(istiod.rejections(), [""; 0]);
    });
}

#[test]
fn what_is_rejected_is_named_and_the_rest_of_the_push_is_live() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, NAME);
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = Istiod::default();
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        istiod.put_all(
            ADDRESS,
            &[
                (SERVICE, service().encode_to_vec()),
                ("bad", workload("bad", vec![1; 5]).encode_to_vec()),
                ("good", workload("good", bytes(net.ip(11))).encode_to_vec()),
            ],
        );
        let rejections = async || istiod.rejections();
        let rejections = until("a NACK", rejections, |rejections| !rejections.is_empty()).await;
        assert!(
            rejections[0].contains("bad: ") && rejections[0].contains("address"),
            "{rejections:?}"
        );
        // The answer is sent first, and consecutive messages make one snapshot.
        let live = until("the good ones", async || asks(&gateway).await, Result::is_ok);
        live.await.expect("a tunnel");
        let dump = async || gateway.http(15000, "GET", "/config_dump").await.1;
        until("the status", dump, |dump| dump.contains("bad: ")).await;

        istiod.put(ADDRESS, "bad", &workload("bad", bytes(net.ip(11))));
        let rejected = async || gateway.http(15000, "GET", "/config_dump").await.1;
        until("the status", rejected, |dump| !dump.contains("bad: ")).await;
        assert_eq!(istiod.rejections().len(), 1);
    });
}

#[test]
fn what_the_control_plane_exports_is_exposed_until_it_is_taken_back() {
    run(async {
        let net = Net::new();
        let mut settings = Settings::new(net, identities());
        settings.exposure = "    []\n".to_owned();
        let mut gateway = spawn(&settings, NAME);
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        istiod.put(ADDRESS, "a", &workload("a", bytes(net.ip(11))));
        istiod.put(CLUSTER, &format!("inbound-vip|81|tcp|{HOSTNAME}"), &());
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        let refused = asks(&gateway).await.expect_err("only another port is exported");
        assert!(refused.contains("503"), "{refused}");

        istiod.export(SERVICE);
        until("the export", async || asks(&gateway).await, Result::is_ok).await.expect("a tunnel");
        let client = gateway.client(identities()).await;
        let mut open = client.tunnel(ECHO).await.expect("a tunnel");
        istiod.unexport(SERVICE);
        assert_eq!(broken(&mut open).await, Some(h2::Reason::INTERNAL_ERROR));
        asks(&gateway).await.expect_err("the export was taken back");
        assert!((gateway.tunnels("revoked").await - 1.0).abs() < 0.5);
    });
}

#[test]
fn what_was_received_stays_in_force_while_the_control_plane_is_away() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, NAME);
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        istiod.put(ADDRESS, "a", &workload("a", bytes(net.ip(11))));
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        asks(&gateway).await.expect("a tunnel");
        serving.stop().await;
        gateway.logged("no stream to the control plane").await;
        asks(&gateway).await.expect("a tunnel without control plane");
        assert_eq!(gateway.readiness().await.0, 200);

        let (sent, requested) = (istiod.sent(), istiod.requests().len());
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        // Three initial requests and the acknowledgements of three responses.
        until("its return", async || istiod.requests().len(), |&now| now >= requested + 6).await;
        assert_eq!(istiod.sent(), sent, "nothing is sent again");
        let first = &istiod.requests()[requested];
        assert_eq!(first.initial_resource_versions.len(), 2, "{first:?}");
        asks(&gateway).await.expect("a tunnel");
    });
}

#[test]
fn a_start_without_a_control_plane_serves_the_cached_state_and_says_so() {
    run(async {
        let net = Net::new();
        let mut first = cached(net, b"half of one");
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        istiod.put(ADDRESS, "a", &workload("a", bytes(net.ip(11))));
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        first.ready().await;
        let state = async || std::fs::read(first.file("state")).expect("the cache");
        let state = until("the cache", state, |state| state != b"half of one").await;
        serving.stop().await;
        first.kill().await;

        let mut second = cached(net, &state);
        second.ready().await;
        second.logged("serving the cached state").await;
        asks(&second).await.expect("a tunnel without control plane");
        let dump = async || second.http(15000, "GET", "/config_dump").await.1;
        assert!(dump().await.contains("no control plane yet; serving"));

        let sent = istiod.sent();
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        until("its return", dump, |dump| !dump.contains("no control plane yet")).await;
        assert_eq!(istiod.sent(), sent, "nothing is sent again");
        istiod.remove(ADDRESS, "a");
        until("the removal", async || asks(&second).await, Result::is_err)
            .await
            .expect_err("no endpoint is left");
        assert_eq!(istiod.rejections(), [""; 0]);
    });
}

#[test]
fn ten_thousand_services_are_served_from_the_cache() {
    run(async {
        const COUNT: usize = 10_000;
        let net = Net::new();
        let mut first = cached(net, b"");
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = Istiod::default();
        let other = |index: usize| {
            let name = format!("s{index}.app.svc.cluster.local");
            let service = Service {
                namespace: "app".into(),
                hostname: name.clone(),
                ports: ports(),
                ..Service::default()
            };
            let service = Address { r#type: Some(address::Type::Service(service)) };
            (format!("app/{name}"), service.encode_to_vec())
        };
        let mut all: Vec<_> = (1..COUNT).map(other).collect();
        all.push((SERVICE.to_owned(), service().encode_to_vec()));
        all.extend((0..COUNT).map(|index| {
            let uid = format!("w{index}");
            let body = workload(&uid, bytes(net.ip(11))).encode_to_vec();
            (uid, body)
        }));
        let all: Vec<_> = all.iter().map(|(name, body)| (&**name, body.clone())).collect();
        istiod.put_all(ADDRESS, &all);
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        first.ready().await;
        let size = async || std::fs::metadata(first.file("state")).expect("the cache").len();
        until("the cache", size, |&size| size > 0).await;
        let state = std::fs::read(first.file("state")).expect("the cache");
        serving.stop().await;
        first.kill().await;

        let mut second = cached(net, &state);
        second.ready().await;
        asks(&second).await.expect("a tunnel without control plane");
        let count = 2 * COUNT + BUILT_IN.len();
        second.logged(&format!("resources={count} ")).await;
    });
}

#[test]
fn a_damaged_cache_is_named_and_ignored() {
    run(async {
        let gateway = cached(Net::new(), b"not a state");
        gateway.logged("the cached state cannot be used").await;
        assert!(gateway.log().contains(&*gateway.file("state").to_string_lossy()));
        gateway.logged("no stream to the control plane").await;
        let (status, pending) = gateway.readiness().await;
        assert_eq!(status, 500);
        assert!(pending.contains("discovery"), "{pending}");
    });
}

#[test]
fn a_control_plane_with_another_name_is_shown_no_token() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net, "other.svc");
        let istiod = Istiod::default();
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        gateway.logged("no stream to the control plane").await;
        gateway.logged("certificate not valid for name").await;
        assert!(istiod.requests().is_empty());
        assert_eq!(gateway.readiness().await.0, 500);
    });
}
