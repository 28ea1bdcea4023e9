//! Configurations of the gateways, for Strait and for Envoy.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::common::process::Process;
use crate::envoy::Envoy;
use crate::support::{ECHO, GATEWAY, Gateway, Net, Settings, identities};
use crate::world::{BINDING, DESCRIPTORS};

const WEST_GATEWAY: &str = "spiffe://west.local/ns/istio-system/sa/eastwest";
/// Service that the first gateway exposes, and the gateway of the other network does not.
pub const SECRET: &str = "secret.app.svc.cluster.local:80";
/// Service whose endpoints do not listen.
pub const DEAD: &str = "dead.app.svc.cluster.local:80";
/// Service of a noisy cluster, whose endpoint the attacker runs.
pub const NOISE: &str = "noise.app.svc.cluster.local:80";
/// Last byte of the address of its endpoint.
pub const NOISE_HOST: u8 = 12;
/// Number of endpoints of [`DEAD`].
const DEAD_ENDPOINTS: usize = 400;

/// Envoy with the endpoint, as `make floods` attacks it, and in front of another gateway, as
/// `make bench` measures it.
const ENVOY: &str = include_str!("../floods/envoy.yaml");
const ENVOY_TRANSIT: &str = include_str!("../gateways/envoy_transit.yaml");

/// Program of a gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Program {
    Strait(PathBuf),
    Envoy(PathBuf),
}

/// Gateway of network west.
pub struct Next {
    pub net: Net,
    /// Net of the endpoint.
    pub endpoint: Net,
    pub descriptors: u32,
}

/// Running gateway, killed on drop.
pub enum Running {
    Strait(Gateway),
    Envoy(Envoy),
}

impl Program {
    /// Starts the only gateway, in the net of the endpoint.
    pub async fn alone(&self, net: Net) -> Running {
        match self {
            Self::Strait(program) => Running::Strait(Gateway::start(&alone(net, program)).await),
            Self::Envoy(program) => {
                let yaml = with_other_services(ENVOY, net);
                let leaf = identities().leaf(GATEWAY);
                let template = (yaml.as_str(), &names(net)[..]);
                Running::Envoy(Envoy::start(program, net, 1, &leaf, template).await)
            }
        }
    }

    /// Starts a gateway of network west.
    pub async fn next(&self, next: &Next) -> Running {
        match self {
            Self::Strait(program) => {
                let mut gateway = Gateway::spawn(&west(next, program), become_west);
                gateway.ready().await;
                Running::Strait(gateway)
            }
            Self::Envoy(program) => {
                let yaml = ENVOY.replace("spiffe://west.local/", "spiffe://east.local/");
                let leaf = identities().leaf(WEST_GATEWAY);
                let template = (yaml.as_str(), &names(next.endpoint)[..]);
                // Envoy inherits the limit.
                let limit = getrlimit(Resource::Nofile);
                let few = Rlimit { current: Some(next.descriptors.into()), ..limit };
                setrlimit(Resource::Nofile, few).expect("fewer descriptors");
                let envoy = Envoy::start(program, next.net, 1, &leaf, template).await;
                setrlimit(Resource::Nofile, limit).expect("more descriptors");
                Running::Envoy(envoy)
            }
        }
    }

    /// Starts a gateway whose service is behind gateways of network west. Envoy uses the first one.
    pub async fn first(&self, net: Net, next: &[Net]) -> Running {
        match self {
            Self::Strait(program) => {
                Running::Strait(Gateway::start(&east(net, next, program)).await)
            }
            Self::Envoy(program) => {
                let leaf = identities().leaf(GATEWAY);
                let yaml = with_binding(ENVOY_TRANSIT);
                let names = [("NEXT", next[0].ip(1).to_string())];
                let template = (yaml.as_str(), &names[..]);
                Running::Envoy(Envoy::start(program, net, 1, &leaf, template).await)
            }
        }
    }
}

impl Running {
    pub fn process(&self) -> Process {
        let (Self::Strait(Gateway { folder, .. }) | Self::Envoy(Envoy { folder, .. })) = self;
        Process::child(&folder.path().display().to_string())
    }
}

fn settings(net: Net, program: &Path) -> Settings<'static> {
    let mut settings = Settings::new(net, identities());
    settings.program = PathBuf::from(program);
    settings.more += "workers: 1\n";
    settings.descriptors = DESCRIPTORS;
    settings
}

/// Settings of the only gateway.
fn alone(net: Net, program: &Path) -> Settings<'static> {
    let mut settings = settings(net, program).endpoints(&[(11, 1, "TCP")]);
    settings.mesh += &dead_workloads(net);
    settings.mesh += &workload(net.ip(NOISE_HOST), "noise");
    let services = ["dead", "noise"].map(|name| {
        format!(
            "  - {{name: {name}, namespace: app, hostname: {name}.app.svc.cluster.local, vips: [],
     ports: {{80: 9000}}}}\n"
        )
    });
    let services = format!("services:\n{}", services.concat());
    settings.mesh = settings.mesh.replacen("services:\n", &services, 1);
    for (service, cluster) in [(DEAD, "west"), (NOISE, "east")] {
        let to = format!("to: [{{cluster: {cluster}}}]");
        let _ = writeln!(settings.exposure, "    - {{service: \"{service}\", {to}}}");
    }
    settings.more += "limits: {buffers: 32MiB}\n";
    settings
}

/// Settings of a gateway whose services are behind those of network west, and of a binding whose
/// own limits no client reaches.
fn east(net: Net, there: &[Net], program: &Path) -> Settings<'static> {
    let mut settings = settings(net, program).endpoints(&[(99, 1, "TCP")]);
    settings.mesh = in_west(&settings.mesh);
    let transit = "to: [{cluster: west}]\n      transit: always";
    settings.exposure = settings.exposure.replace("to: [{cluster: west}]", transit);
    let _ = writeln!(
        settings.exposure,
        "    - {{service: \"{SECRET}\", to: [{{cluster: west}}], transit: always}}"
    );
    let gateway = |net: &Net| format!("{:?}", net.address(1, 15008).to_string());
    let gateways: Vec<_> = there.iter().map(gateway).collect();
    let own = net.address(1, BINDING);
    let _ = writeln!(
        settings.more,
        "networks: [{{name: west, cluster: west, identities: [\"{WEST_GATEWAY}\"], gateways: \
         [{}]}}]\nbindings: [{{cluster: west, service: \"{ECHO}\", listen: \"{own}\", inner: tcp, \
         connections: {DESCRIPTORS}, connections_per_client: {DESCRIPTORS}}}]",
        gateways.join(", ")
    );
    settings
}

/// Settings of a gateway of network west, which exposes its endpoint to both clusters.
fn west(next: &Next, program: &Path) -> Settings<'static> {
    let mut settings = settings(next.endpoint, program).endpoints(&[(11, 1, "TCP")]);
    settings.net = next.net;
    settings.descriptors = next.descriptors;
    settings.mesh = in_west(&settings.mesh);
    let both = "cluster: east}, {cluster: west";
    settings.exposure = settings.exposure.replace("cluster: west", both);
    settings
}

fn in_west(mesh: &str) -> String {
    let west = "clusterId: west, network: west";
    mesh.replace("clusterId: east, network: east", west).replace("vips: [east/", "vips: [west/")
}

/// Makes the files in a folder those of a gateway of network west that trusts the first one.
fn become_west(folder: &Path) {
    let leaf = identities().leaf(WEST_GATEWAY);
    let file = |name: &str| folder.join(name);
    let config = std::fs::read_to_string(file("strait.yaml")).expect("a configuration");
    let own = "gateway: {cluster: west, network: west}";
    let config = config.replace("gateway: {cluster: east, network: east}", own);
    let trust = format!("trust:\n  gateways: [\"{GATEWAY}\"]\n");
    let config = config.replace("trust:\n", &trust);
    std::fs::write(file("strait.yaml"), config).expect("a configuration");
    std::fs::write(file("gateway.crt"), &leaf.chain_pem).expect("a certificate");
    std::fs::write(file("gateway.key"), &leaf.key_pem).expect("a key");
}

/// Returns the names of [`ENVOY`].
fn names(net: Net) -> [(&'static str, String); 2] {
    let authority = format!("echo.global:80\", \"{ECHO}");
    [("AUTHORITY", authority), ("APPLICATION", net.ip(11).to_string())]
}

/// Adds [`DEAD`], with the retries that istiod configures by default, and [`NOISE`] to [`ENVOY`],
/// and admits both clusters.
fn with_other_services(yaml: &str, net: Net) -> String {
    let host = |name: &str, service: &str| {
        format!(
            "            - name: {name}
              domains: [\"{service}\"]
              retry_policy: {{retry_on: connect-failure, num_retries: 2}}
              routes: [{{match: {{connect_matcher: {{}}}}, route: {{cluster: {name}, timeout: 0s, \
             upgrade_configs: [{{upgrade_type: CONNECT, connect_config: {{}}}}]}}}}]\n"
        )
    };
    let endpoint = |address: SocketAddr| {
        let (ip, port) = (address.ip(), address.port());
        let socket = format!("{{address: \"{ip}\", port_value: {port}}}");
        format!("{{endpoint: {{address: {{socket_address: {socket}}}}}}}")
    };
    let limits = "max_connections: 100000, max_pending_requests: 100000, max_requests: 100000";
    let cluster = |name: &str, endpoints: &[String]| {
        format!(
            "  - name: {name}
    connect_timeout: 5s
    circuit_breakers: {{thresholds: [{{{limits}}}]}}
    load_assignment: {{cluster_name: {name}, endpoints: [{{lb_endpoints: [{}]}}]}}
",
            endpoints.join(", ")
        )
    };
    let filters = "          http_filters:";
    let hosts = host("dead", DEAD) + &host("noise", NOISE) + filters;
    let dead: Vec<_> = dead_endpoints(net).map(endpoint).collect();
    let yaml = yaml.replacen(filters, &hosts, 1).replace("spiffe://west.local/", "spiffe://");
    yaml + &cluster("dead", &dead) + &cluster("noise", &[endpoint(net.address(NOISE_HOST, 9000))])
}

/// Adds a plaintext listener to [`ENVOY_TRANSIT`], whose connections become CONNECTs.
fn with_binding(yaml: &str) -> String {
    let listener = format!(
        "  - name: binding
    address: {{socket_address: {{address: \"@HOST@\", port_value: {BINDING}}}}}
    filter_chains:
    - filters:
      - name: tcp
        typed_config:
          \"@type\": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: binding
          cluster: next
          tunneling_config: {{hostname: \"{ECHO}\"}}
  clusters:"
    );
    yaml.replacen("  clusters:", &listener, 1)
}

/// Returns the endpoints of [`DEAD`], where nobody listens.
fn dead_endpoints(net: Net) -> impl Iterator<Item = SocketAddr> {
    let third = net.ip(1).to_string().len();
    (0..DEAD_ENDPOINTS).map(move |index| {
        let (second, last) = (100 + index / 200, 1 + index % 200);
        let ip = format!("127.{second}.{third}.{last}").parse().expect("an address");
        SocketAddr::new(ip, crate::support::endpoint_port())
    })
}

/// Returns the workloads of [`DEAD`].
fn dead_workloads(net: Net) -> String {
    dead_endpoints(net).map(|address| workload(address.ip(), "dead")).collect()
}

/// Returns a workload of a service in namespace `app`.
fn workload(ip: IpAddr, service: &str) -> String {
    format!(
        "  - {{uid: \"east/{ip}\", namespace: app, clusterId: east, network: east,
     workloadIps: [\"{ip}\"], protocol: TCP,
     services: {{app/{service}.app.svc.cluster.local: {{80: 9000}}}}}}\n"
    )
}
