//! Rolling updates of a service that a control plane exports.

use std::time::Duration;

use strait::grpc::workload::WorkloadStatus;
use strait::xds::store::ADDRESS;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

use crate::istio::asks;
use crate::support::istiod::Istiod;
use crate::support::wds::{SERVICE, bytes, changed, service};
use crate::support::{ECHO, Endpoint, Net, identities, pod, run, until};

/// Last octets of the pods' addresses, before and after the update.
const PODS: [(u8, u8); 3] = [(11, 21), (12, 22), (13, 23)];
/// Limit of the time from a push to the first tunnel to a new pod.
const REACHED: Duration = Duration::from_secs(2);

/// Sends the record of a pod with this status.
fn put(istiod: &Istiod, net: Net, host: u8, status: WorkloadStatus) {
    let uid = format!("pod-{host}");
    let pod = changed(&uid, bytes(net.ip(host)), |pod| pod.status = status.into());
    istiod.put(ADDRESS, &uid, &pod);
}

/// `XDS_ON_DEMAND` is ztunnel's variable. With it, istiod does not push a workload that joins a
/// subscribed service, so that a gateway that followed it would lose all endpoints.
#[test]
fn a_pod_with_xds_on_demand_follows_a_rolling_update_and_loses_no_tunnel() {
    run(async {
        let net = Net::new();
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        istiod.export(SERVICE);
        let (mut old, mut new) = (Vec::new(), Vec::new());
        for (before, after) in PODS {
            put(&istiod, net, before, WorkloadStatus::Healthy);
            old.push(Endpoint::echo(net.listen(before, 15008).await));
            new.push(Endpoint::echo(net.listen(after, 15008).await));
        }
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut gateway = pod::spawn_with(net, "", &[("XDS_ON_DEMAND", "true")]);
        gateway.ready().await;
        let client = gateway.client(identities()).await;
        let mut open = client.tunnel(ECHO).await.expect("a tunnel to an old pod");

        for ((before, after), pod) in PODS.into_iter().zip(&new) {
            put(&istiod, net, after, WorkloadStatus::Unhealthy);
            put(&istiod, net, after, WorkloadStatus::Healthy);
            let reached = async || {
                asks(&gateway).await.expect("no tunnel is lost");
                pod.accepted()
            };
            let reached = until("the new pod", reached, |&accepted| accepted > 0);
            timeout(REACHED, reached).await.expect("within 2 s");
            put(&istiod, net, before, WorkloadStatus::Unhealthy);
            istiod.remove(ADDRESS, &format!("pod-{before}"));
        }

        let accepted = || old.iter().map(Endpoint::accepted).sum::<usize>();
        let left = async || {
            let before = accepted();
            for _ in 0..10 {
                asks(&gateway).await.expect("no tunnel is lost");
            }
            accepted() - before
        };
        until("tunnels to new pods only", left, |&left| left == 0).await;
        open.write_all(b"hello").await.expect("a request");
        let mut answer = [0; 5];
        open.read_exact(&mut answer).await.expect("an answer");
        assert_eq!(&answer, b"hello");
        assert_eq!(istiod.rejections(), [""; 0]);
    });
}
