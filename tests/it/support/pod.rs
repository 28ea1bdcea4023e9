//! Pod as Istio creates it: a cleared environment, with only the variables, arguments and files of
//! Istio's gateways.

use tempfile::TempDir;

use super::istiod::{NAME, TOKEN};
use super::{Gateway, Net, Settings, identities};

/// Arguments in the template of istiod's east-west gateways, in its order.
const ARGUMENTS: &[&str] = &[
    "proxy",
    "waypoint",
    "--domain",
    "istio-system.svc.cluster.local",
    "--serviceCluster",
    "eastwest.istio-system",
    "--proxyLogLevel",
    "warning",
    "--proxyComponentLogLevel",
    "misc:error",
    "--log_output_level",
    "default:info",
];

/// Creates the files of a pod, in a folder that is used as its root.
fn root() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (file, text) in [
        ("var/run/secrets/istio/root-cert.pem", &*identities().root),
        ("var/run/secrets/tokens/istio-token", TOKEN),
        ("etc/istio/pod/labels", "topology.istio.io/network=\"east\"\n"),
    ] {
        let path = folder.path().join(file);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        std::fs::write(path, text).expect("a file");
    }
    for volume in ["var/lib/istio/data", "etc/istio/proxy"] {
        std::fs::create_dir_all(folder.path().join(volume)).expect("a folder");
    }
    folder
}

/// Returns addresses that no real pod configures. Tests need them because their pods share the
/// ports of one machine.
pub fn addresses(net: Net) -> String {
    let ip = net.ip(1);
    format!(
        "listeners: [{{name: cross-network, bind: \"{ip}:15008\"}}]\n\
         admin: {{bind: \"{ip}:15000\"}}\n\
         metrics: {{bind: \"{ip}:15020\"}}\n\
         readiness: {{bind: \"{ip}:15021\"}}\n\
         dial: {{allow: [\"127.0.0.0/8\"]}}\n"
    )
}

/// Starts a gateway at host 1 that istiod programs from host 2. `more` is added to [`addresses`] in
/// its `strait.yaml`.
pub fn spawn(net: Net, more: &str) -> Gateway {
    spawn_with(net, more, &[])
}

/// As [`spawn`], with more variables.
pub fn spawn_with(net: Net, more: &str, variables: &[(&str, &str)]) -> Gateway {
    spawn_over(net, &(addresses(net) + more), variables)
}

/// As [`spawn`], with this `strait.yaml`.
pub fn spawn_file(net: Net, overlay: &str) -> Gateway {
    spawn_over(net, overlay, &[])
}

fn spawn_over(net: Net, overlay: &str, variables: &[(&str, &str)]) -> Gateway {
    let folder = root();
    std::fs::write(folder.path().join("strait.yaml"), overlay).expect("a file");
    start(folder, net, variables)
}

/// Restarts the pod's container after it has ended.
pub async fn restarted(mut gateway: Gateway, net: Net) -> Gateway {
    gateway.signal(rustix::process::Signal::KILL);
    gateway.exited().await;
    start(gateway.folder, net, &[])
}

/// Starts the container of a pod with these volumes.
fn start(folder: TempDir, net: Net, variables: &[(&str, &str)]) -> Gateway {
    let address = net.address(2, 15012).to_string();
    let config = format!("{{\"discoveryAddress\":\"{address}\",\"proxyMetadata\":{{}}}}");
    let settings = Settings::new(net, identities());
    Gateway::spawn_in(folder, &settings, |command| {
        command.env_clear();
        command.args(ARGUMENTS).args(["-c", "strait.yaml"]);
        command.envs([
            ("PILOT_CERT_PROVIDER", "istiod"),
            ("CA_ADDR", &address),
            ("POD_NAME", "eastwest-7d9f"),
            ("POD_NAMESPACE", "istio-system"),
            ("INSTANCE_IP", "10.0.0.9"),
            ("SERVICE_ACCOUNT", "eastwest"),
            ("HOST_IP", "10.0.0.1"),
            ("ISTIO_CPU_LIMIT", "2"),
            ("PROXY_CONFIG", &config),
            ("ISTIO_META_CLUSTER_ID", "east"),
            ("ISTIO_META_REQUESTED_NETWORK_VIEW", "east"),
            ("ISTIO_META_INTERCEPTION_MODE", "REDIRECT"),
            ("ISTIO_META_WORKLOAD_NAME", "eastwest"),
            ("TRUST_DOMAIN", "east.local"),
            ("TRUST_DOMAINS", "west.local"),
            ("ISTIOD_SAN", NAME),
            ("XDS_HEADER_x-tenant", "blue"),
        ]);
        command.envs(variables.iter().copied());
    })
}
