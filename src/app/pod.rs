//! What the environment says of the pod that we are, by the names that Istio gives its proxies.

use std::env;

use crate::config::Gateway;
use crate::xds::stream::Pod;

/// What ztunnel calls itself where it does not know its address: a control plane wants a valid one.
const NO_ADDRESS: &str = "1.1.1.1";

/// The pod, by its environment; what that does not say is taken from the configuration.
pub(super) fn of_environment(gateway: &Gateway) -> Pod {
    let get = |name: &str, default: &str| {
        let value = env::var(name).ok().filter(|value| !value.is_empty());
        value.unwrap_or_else(|| default.to_owned())
    };
    Pod {
        name: get("POD_NAME", "strait"),
        namespace: get("POD_NAMESPACE", "istio-system"),
        ip: get("INSTANCE_IP", NO_ADDRESS),
        service_account: get("SERVICE_ACCOUNT", "default"),
        cluster: get("ISTIO_META_CLUSTER_ID", &gateway.cluster),
        network: gateway.network.clone(),
    }
}
