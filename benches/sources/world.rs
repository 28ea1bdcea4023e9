//! Gateways under attack, each a process with one worker, with the endpoint behind them.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use tokio::net::{TcpListener, TcpSocket};

use crate::common::machine::{CPU_OF_GATEWAYS, processors};
use crate::common::process::Process;
use crate::support::{ECHO, Endpoint, GATEWAY, Gateway, Net, Settings, identities};

const WEST_GATEWAY: &str = "spiffe://west.local/ns/istio-system/sa/eastwest";
/// Service that the first gateway exposes, and the gateway of the other network does not.
pub const SECRET: &str = "secret.app.svc.cluster.local:80";
/// Service whose endpoints do not listen.
pub const DEAD: &str = "dead.app.svc.cluster.local:80";
/// Number of endpoints of [`DEAD`].
const DEAD_ENDPOINTS: usize = 400;
/// Limit of descriptors, more than the tunnels of all attackers need.
const DESCRIPTORS: u32 = 16_384;
/// Limit of descriptors of a gateway that an attacker can fill.
const FEW_DESCRIPTORS: u32 = 2_048;

/// Gateways of a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    /// One gateway with the endpoint.
    One,
    /// A gateway whose service is behind that of another network, and a binding to it.
    Two,
    /// As [`Self::Two`], where the second gateway has few descriptors.
    TwoWithFewDescriptors,
}

/// Running gateways and their endpoint. All end on drop.
pub struct World {
    /// HBONE listener that the victim and attackers use.
    pub address: SocketAddr,
    /// Plaintext listener of the binding.
    pub binding: SocketAddr,
    pub first: Process,
    _gateways: Vec<Gateway>,
    _endpoint: Endpoint,
}

impl World {
    /// Starts the gateways from this program.
    pub async fn start(program: &Path, topology: Topology) -> Self {
        let (net, mut gateways) = (Net::new(), Vec::new());
        let endpoint = Endpoint::echo_or_endless(listen(net.address(11, 9000)));
        let first = match topology {
            Topology::One => {
                let mut settings = settings(net, program);
                settings = settings.endpoints(&[(11, 1, "TCP")]);
                settings.mesh += &dead_service(net);
                settings.mesh = dead_first(&settings.mesh);
                let dead = DEAD;
                let _ = writeln!(
                    settings.exposure,
                    "    - {{service: \"{dead}\", to: [{{cluster: west}}]}}"
                );
                settings.more += "limits: {buffers: 32MiB}\n";
                Gateway::start(&settings).await
            }
            Topology::Two | Topology::TwoWithFewDescriptors => {
                let mut second = west(net, program);
                if topology == Topology::TwoWithFewDescriptors {
                    second.descriptors = FEW_DESCRIPTORS;
                }
                let mut gateway = Gateway::spawn(&second, become_west);
                gateway.ready().await;
                gateways.push(gateway);
                Gateway::start(&east(Net::new(), net, program)).await
            }
        };
        let address = first.address;
        gateways.push(first);
        let processes: Vec<_> = gateways.iter().map(process).collect();
        if processors() > 1 {
            processes.iter().for_each(|one| one.pin(CPU_OF_GATEWAYS));
        }
        let mut binding = address;
        binding.set_port(8080);
        Self {
            address,
            binding,
            first: processes[processes.len() - 1],
            _gateways: gateways,
            _endpoint: endpoint,
        }
    }
}

fn process(gateway: &Gateway) -> Process {
    Process::child(&gateway.folder.path().display().to_string())
}

fn settings(net: Net, program: &Path) -> Settings<'static> {
    let mut settings = Settings::new(net, identities());
    settings.program = PathBuf::from(program);
    settings.more += "workers: 1\n";
    settings.descriptors = DESCRIPTORS;
    settings
}

/// Settings of a gateway whose services are behind that of network west.
fn east(net: Net, there: Net, program: &Path) -> Settings<'static> {
    let mut settings = settings(net, program).endpoints(&[(99, 1, "TCP")]);
    settings.mesh = in_west(&settings.mesh);
    let transit = "to: [{cluster: west}]\n      transit: always";
    settings.exposure = settings.exposure.replace("to: [{cluster: west}]", transit);
    let _ = writeln!(
        settings.exposure,
        "    - {{service: \"{SECRET}\", to: [{{cluster: west}}], transit: always}}"
    );
    let (gateway, own) = (there.address(1, 15008), net.address(1, 8080));
    let _ = writeln!(
        settings.more,
        "networks: [{{name: west, cluster: west, identities: [\"{WEST_GATEWAY}\"], gateways: \
         [\"{gateway}\"]}}]\nbindings: [{{cluster: west, service: \"{ECHO}\", listen: \"{own}\"}}]"
    );
    settings
}

/// Settings of a gateway of network west, which exposes its endpoint to both clusters.
fn west(net: Net, program: &Path) -> Settings<'static> {
    let mut settings = settings(net, program).endpoints(&[(11, 1, "TCP")]);
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

/// Returns the workloads of [`DEAD`], on addresses where nobody listens.
fn dead_service(net: Net) -> String {
    let mut text = String::new();
    for index in 0..DEAD_ENDPOINTS {
        let (high, low) = (100 + index / 200, 1 + index % 200);
        let ip = format!("127.{high}.{}.{low}", net.ip(1).to_string().len());
        let _ = writeln!(
            text,
            "  - {{uid: \"east/{ip}\", namespace: app, clusterId: east, network: east,
     workloadIps: [\"{ip}\"], protocol: TCP,
     services: {{app/dead.app.svc.cluster.local: {{80: 9000}}}}}}"
        );
    }
    text
}

fn dead_first(mesh: &str) -> String {
    let dead = "services:
  - {name: dead, namespace: app, hostname: dead.app.svc.cluster.local, vips: [],
     ports: {80: 9000}}
";
    mesh.replacen("services:\n", dead, 1)
}

/// Listens for all streams of an attacker at once. A dropped handshake would cost a gateway a
/// second.
fn listen(address: SocketAddr) -> TcpListener {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(address).expect("a free address");
    socket.listen(DESCRIPTORS).expect("a listener")
}
