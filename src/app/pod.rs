//! What the environment says of the pod that we are, by the names that Istio gives its proxies.

use std::path::{Path, PathBuf};
use std::{env, fs};

use crate::config::{self, Gateway};
use crate::xds::stream::Pod;

/// What ztunnel calls itself where it does not know its address: a control plane wants a valid one.
const NO_ADDRESS: &str = "1.1.1.1";

/// Where Kubernetes writes the pod's labels, in a container that Istio starts.
const LABELS: &str = "/etc/istio/pod/labels";
/// The version of Istio that the wire contract was read from.
const DIALECT: &str = "1.31.0";

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
        gateway: gateway_name(fs::read_to_string(LABELS).unwrap_or_default().as_str())
            .unwrap_or_else(|| get("ISTIO_META_WORKLOAD_NAME", "")),
        istio_version: get("ISTIO_META_ISTIO_VERSION", &get("ISTIO_VERSION", DIALECT)),
    }
}

/// The Gateway's name among the pod's labels, a line of `key="value"` each. The Deployment that
/// istiod makes for a Gateway has the same name.
fn gateway_name(labels: &str) -> Option<String> {
    let mut labels = labels.lines().filter_map(|line| line.split_once('='));
    let (_, value) = labels.find(|(key, _)| *key == "gateway.networking.k8s.io/gateway-name")?;
    Some(value.trim_matches('"').to_owned())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gateway_is_named_by_a_label() {
        let labels = "app=\"a\"\ngateway.networking.k8s.io/gateway-name=\"eastwest\"\n";
        assert_eq!(gateway_name(labels).as_deref(), Some("eastwest"));
        assert_eq!(gateway_name("app=\"eastwest\""), None);
    }
}
