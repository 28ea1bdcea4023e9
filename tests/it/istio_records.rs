//! Records that istiod sends and ztunnel accepts, whether they can be dialled or not.

use strait::xds::store::ADDRESS;

use crate::istio::{asks, gateway};
use crate::support::istiod::{Istiod, NAME};
use crate::support::wds::{SERVICE, bytes, service, split_horizon, workload};
use crate::support::{Endpoint, Net, identities, run, until};

#[test]
fn istiod_4_the_record_of_a_remote_service_with_a_named_port_is_held() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, NAME);
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        istiod.put(ADDRESS, "a", &workload("a", bytes(net.ip(11))));
        let (uid, record) = split_horizon();
        istiod.put(ADDRESS, &uid, &record);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        asks(&gateway).await.expect("a tunnel");
        assert_eq!(istiod.rejections(), [""; 0]);
        let dump = async || gateway.http(15000, "GET", "/config_dump").await.1;
        until("the record", dump, |dump| dump.contains(&uid)).await;
    });
}
