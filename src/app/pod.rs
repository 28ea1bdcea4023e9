//! What the environment says of the pod that we are, by the names that Istio gives its proxies.

use std::env;
use std::path::{Path, PathBuf};

use crate::config::{self, Gateway};
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

/// Where Istio mounts the socket of a SPIFFE Workload API.
const WORKLOAD_API: &str = "/var/run/secrets/workload-spiffe-uds/socket";

/// The socket of the Workload API: the one that is written, else that of the environment.
pub(super) fn workload_api(written: Option<&Path>) -> PathBuf {
    let of_environment = || {
        let text = env::var("SPIFFE_ENDPOINT_SOCKET").ok()?;
        config::unix_socket(&text)
    };
    let written = written.map(ToOwned::to_owned).or_else(of_environment);
    written.unwrap_or_else(|| WORKLOAD_API.into())
}
