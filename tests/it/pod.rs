//! A gateway as Istio starts it: a cleared environment, and nothing but the variables, arguments
//! and files that its pods get.

use std::path::Path;

use strait::xds::store::{ADDRESS, CLUSTER};
use tempfile::TempDir;

use crate::istio::{HOSTNAME, SERVICE, asks, bytes, service, workload};
use crate::support::istiod::{Istiod, NAME, TOKEN};
use crate::support::{Endpoint, Gateway, Net, Settings, identities, replace, run, until};

/// As the template of istiod's east-west gateways has them, in its order.
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

/// The files of a pod, in a folder that stands for its root.
fn root() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (file, text) in [
        ("var/run/secrets/istio/root-cert.pem", &*identities().root),
        ("var/run/secrets/tokens/istio-token", TOKEN),
        (
            "etc/istio/pod/labels",
            "topology.istio.io/network=\"east\"\n",
        ),
    ] {
        let path = folder.path().join(file);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        std::fs::write(path, text).expect("a file");
    }
    std::fs::create_dir_all(folder.path().join("var/lib/istio/data")).expect("a folder");
    folder
}

/// What no pod has to say, and a test does: the pods of a machine share its ports.
fn addresses(net: Net) -> String {
    let ip = net.ip(1);
    format!(
        "listeners: [{{name: cross-network, bind: \"{ip}:15008\"}}]\n\
         admin: {{bind: \"{ip}:15000\"}}\n\
         metrics: {{bind: \"{ip}:15020\"}}\n\
         readiness: {{bind: \"{ip}:15021\"}}\n\
         dial: {{allow: [\"127.0.0.0/8\"]}}\n"
    )
}

fn spawn(net: Net) -> Gateway {
    let folder = root();
    std::fs::write(folder.path().join("strait.yaml"), addresses(net)).expect("a file");
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
    })
}

#[test]
fn a_pod_gets_its_certificate_and_services_and_carries_tunnels_without_a_file() {
    run(async {
        let net = Net::new();
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        istiod.put(ADDRESS, "a", &workload("a", bytes(net.ip(11))));
        istiod.put(CLUSTER, &format!("inbound-vip|80|tcp|{HOSTNAME}"), &());
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut gateway = spawn(net);
        gateway.ready().await;
        asks(&gateway).await.expect("a tunnel");

        let ignored = "arguments that mean nothing here: --domain --serviceCluster \
                       --proxyComponentLogLevel";
        gateway.logged(ignored).await;
        let calls = istiod.calls();
        let said = |name| calls[0].get(name).and_then(|value| value.to_str().ok());
        assert_eq!(
            (said("clusterid"), said("x-tenant")),
            (Some("east"), Some("blue"))
        );
        let node = istiod
            .requests()
            .into_iter()
            .find_map(|request| request.node);
        let id = node.expect("a node").id;
        let domain = "istio-system.svc.cluster.local";
        assert_eq!(
            id,
            format!("waypoint~10.0.0.9~eastwest-7d9f.istio-system~{domain}")
        );
        let state = async || gateway.file("var/lib/istio/data/strait-mesh").exists();
        until("the cache", state, |&exists| exists).await;
    });
}

#[test]
fn the_file_over_a_pod_is_watched() {
    run(async {
        let net = Net::new();
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        istiod.put(ADDRESS, "a", &workload("a", bytes(net.ip(11))));
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut gateway = spawn(net);
        gateway.ready().await;
        asks(&gateway).await.expect_err("nothing is exported");

        let write = |text: &str| {
            let text = format!("{}{text}", addresses(net));
            replace(Path::new(&gateway.file("strait.yaml")), &text);
        };
        write("exposure: {services: [{service: nowhere}]}\nlog: {x: 1}\n");
        gateway.logged("unknown key `x` in `log`").await;
        write(&format!(
            "exposure: {{services: [{{service: {HOSTNAME}, to: [{{cluster: west.local}}]}}]}}\n"
        ));
        until("the exposure", async || asks(&gateway).await, Result::is_ok)
            .await
            .expect("a tunnel");
    });
}
