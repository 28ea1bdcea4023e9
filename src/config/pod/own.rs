//! Names of the pod towards a control plane: those of the configuration, else of the environment.

use std::path::{Path, PathBuf};

use super::{ACCOUNT, Environment, LABELS};
use crate::config::{Config, Identity, unix_socket};

/// Address of a pod that does not know its own, as in ztunnel: a control plane needs a valid one.
pub(super) const NO_ADDRESS: &str = "1.1.1.1";
/// Version of Istio in the wire contract.
const DIALECT: &str = "1.31.0";
/// Label with the name of the Gateway, which is also that of its Deployment.
const GATEWAY_LABEL: &str = "gateway.networking.k8s.io/gateway-name";
/// Default socket of a SPIFFE Workload API, where Istio mounts it.
const WORKLOAD_API: &str = "/var/run/secrets/workload-spiffe-uds/socket";

/// The pod towards the control plane (docs/wire-contract.md 2.1 and 3.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// The pod's name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its address.
    pub ip: String,
    /// Its service account, if known.
    pub service_account: Option<String>,
    /// The cluster that it runs in.
    pub cluster: String,
    /// The network of its endpoints.
    pub network: String,
    /// The name of its Gateway, by its label; empty if unknown.
    pub gateway: String,
    /// The version of Istio that it claims.
    pub istio_version: String,
    /// The uid of its record in WDS, if the pod knows its name.
    pub record: Option<String>,
}

impl Pod {
    /// Returns the pod by the configuration, and where that is silent by the environment.
    pub fn new(environment: &Environment, config: &Config) -> Self {
        let get = |names: &[&str]| Some(environment.first(names)?.value);
        let (namespace, account) = match &config.identity {
            Identity::IstioCa(ca) => (ca.namespace.clone(), ca.service_account.clone()),
            Identity::Files(_) | Identity::Spiffe(_) => (None, None),
        };
        let or =
            |setting: Option<String>, default: &str| setting.unwrap_or_else(|| default.to_owned());
        let gateway = environment.label(LABELS, GATEWAY_LABEL);
        let gateway = gateway.map(|setting| setting.value);
        let namespace = or(namespace.or_else(|| get(&["POD_NAMESPACE"])), "istio-system");
        let cluster = &config.gateway.cluster;
        let record = |name: String| format!("{cluster}//Pod/{namespace}/{name}");
        Self {
            record: get(&["POD_NAME"]).map(record),
            name: or(get(&["POD_NAME"]), "strait"),
            namespace,
            ip: or(get(&["INSTANCE_IP"]), NO_ADDRESS),
            service_account: account.or_else(|| get(&ACCOUNT)),
            cluster: config.gateway.cluster.clone(),
            network: config.gateway.network.clone(),
            gateway: or(gateway.or_else(|| get(&["ISTIO_META_WORKLOAD_NAME"])), ""),
            istio_version: or(get(&["ISTIO_META_ISTIO_VERSION", "ISTIO_VERSION"]), DIALECT),
        }
    }

    /// Returns the identity to request from an authority. The default account is Kubernetes'.
    pub fn identity(&self, trust_domain: &str) -> String {
        let account = self.service_account.as_deref().unwrap_or("default");
        format!("spiffe://{trust_domain}/ns/{}/sa/{account}", self.namespace)
    }
}

/// Returns the socket of the Workload API: the configured one, else that of the environment.
pub fn workload_api(environment: &Environment, written: Option<&Path>) -> PathBuf {
    let setting = || unix_socket(&environment.first(&["SPIFFE_ENDPOINT_SOCKET"])?.value);
    written.map(ToOwned::to_owned).or_else(setting).unwrap_or_else(|| WORKLOAD_API.into())
}
