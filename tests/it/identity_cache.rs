//! A pod's key and certificate on disk: restarts of its container without istiod.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::{Duration, Instant};

use strait::xds::store::{ADDRESS, CLUSTER};

use crate::istio::asks;
use crate::support::ca::Mode;
use crate::support::istiod::Istiod;
use crate::support::wds::{HOSTNAME, SERVICE, bytes, service, workload};
use crate::support::{Endpoint, Gateway, Net, RESTART_MAX, identities, pod, run, until};

const KEY: &str = "etc/istio/proxy/strait-identity/identity.json";
const MESH: &str = "var/lib/istio/data/strait-mesh";

fn istiod(net: Net) -> Istiod {
    let istiod = Istiod::default();
    istiod.put(ADDRESS, SERVICE, &service());
    istiod.put(ADDRESS, "a", &workload("a", bytes(net.ip(11))));
    istiod.put(CLUSTER, &format!("inbound-vip|80|tcp|{HOSTNAME}"), &());
    istiod
}

/// Starts a pod and waits until it has stored everything that a restart needs.
async fn kept(net: Net) -> Gateway {
    let mut gateway = pod::spawn(net, "");
    gateway.ready().await;
    let files = async || [KEY, MESH].map(|file| gateway.file(file).exists());
    until("what is kept", files, |files| *files == [true; 2]).await;
    gateway
}

#[test]
fn a_restarted_container_is_ready_within_five_seconds_without_istiod() {
    run(async {
        let net = Net::new();
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = istiod(net);
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        let first = kept(net).await;
        let key = first.file(KEY);
        let mode = key.metadata().expect("metadata").mode() & 0o777;
        assert_eq!(mode, 0o600);
        serving.stop().await;

        let began = Instant::now();
        let mut second = pod::restarted(first, net).await;
        second.ready().await;
        let took = began.elapsed();
        assert!(took < RESTART_MAX, "{took:?}: {}", second.log());
        second.logged("serving with the certificate on disk").await;
        asks(&second).await.expect("a tunnel without istiod");
        let fetched = "strait_certificate_fetches_total{result=\"ok\"}";
        assert!(second.metric(fetched).await < 0.5, "nothing was issued");
        second.logged("cannot obtain a new certificate").await;
        assert_eq!(second.readiness().await.0, 200);

        let requested = istiod.ca.requests().len();
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let issued = async || istiod.ca.requests().len();
        until("a new certificate", issued, |&now| now > requested).await;
    });
}

#[test]
fn an_expired_key_is_removed_from_the_disk_while_the_authority_refuses() {
    run(async {
        let net = Net::new();
        let istiod = istiod(net);
        istiod.ca.lives(Duration::from_secs(120), Duration::from_secs(5));
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let gateway = kept(net).await;
        istiod.ca.set(Mode::Refuses);
        gateway.logged("the certificate on disk is removed").await;
        assert!(!gateway.file(KEY).exists());
    });
}

#[test]
fn a_directory_that_is_open_to_others_is_not_used_and_the_pod_starts_with_istiod() {
    run(async {
        let net = Net::new();
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = istiod(net);
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        let first = kept(net).await;
        let folder = first.file(KEY).parent().expect("a folder").to_owned();
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(folder, open).expect("a mode");
        serving.stop().await;
        let mut second = pod::restarted(first, net).await;
        second.logged("the certificate on disk is not used").await;
        second.logged("its mode is 0755").await;
        second.logged("cannot obtain a new certificate").await;
        assert_eq!(second.readiness().await.0, 500);

        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        second.ready_within(Duration::from_secs(20)).await;
        second.logged("cannot store the certificate on disk").await;
        asks(&second).await.expect("a tunnel");
    });
}

#[test]
fn a_pod_without_a_certificate_asks_again_as_soon_as_discovery_is_back() {
    run(async {
        let net = Net::new();
        let istiod = istiod(net);
        istiod.ca.set(Mode::Refuses);
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut gateway = pod::spawn(net, "");
        let failures = async || gateway.log().matches("cannot obtain a new certificate").count();
        // The waits are 0.4 s at least, and twice as long each time: the next one is 6.4 s or more.
        let deadline = tokio::time::Instant::now() + Duration::from_secs(40);
        while failures().await < 5 {
            assert!(tokio::time::Instant::now() < deadline, "{}", gateway.log());
            // deadline: the log of another process can only be polled.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        istiod.ca.set(Mode::Signs);
        serving.stop().await;
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        gateway.ready_within(Duration::from_secs(5)).await;
    });
}
