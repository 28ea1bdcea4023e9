//! The two gateways under attack, each a fresh process with one worker, and their endpoint.

use std::net::SocketAddr;
use std::path::PathBuf;

use tokio::net::{TcpListener, TcpSocket};

use crate::common::machine::{CPU_OF_GATEWAYS, processors};
use crate::common::process::Process;
use crate::envoy::Envoy;
use crate::support::{Endpoint, GATEWAY, Gateway, Net, Settings, identities};

/// Limit of descriptors, more than all streams of all attackers need.
const DESCRIPTORS: u32 = 16_384;

/// Kind of gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    Strait,
    /// Program and version.
    Envoy(PathBuf, String),
}

impl Kind {
    pub fn name(&self) -> String {
        match self {
            Self::Strait => "Strait".to_owned(),
            Self::Envoy(_, version) => format!("Envoy {version}"),
        }
    }
}

/// Running gateway with its endpoint. Both end on drop.
pub struct Running {
    pub address: SocketAddr,
    pub process: Process,
    _endpoint: Endpoint,
    _gateway: Program,
}

#[expect(dead_code, reason = "held for what their drops do")]
enum Program {
    Strait(Gateway),
    Envoy(Envoy),
}

impl Running {
    pub async fn start(kind: &Kind) -> Self {
        let net = Net::new();
        let endpoint = Endpoint::echo_or_endless(listen(net.address(11, 9000)));
        let (program, name) = match kind {
            Kind::Strait => {
                let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
                settings.more += "workers: 1\n";
                settings.descriptors = DESCRIPTORS;
                let gateway = Gateway::start(&settings).await;
                let folder = gateway.folder.path().display().to_string();
                (Program::Strait(gateway), folder)
            }
            Kind::Envoy(program, _) => {
                let names = [
                    ("AUTHORITY", "echo.global:80\", \"echo.app.svc.cluster.local:80".to_owned()),
                    ("APPLICATION", net.ip(11).to_string()),
                ];
                let leaf = identities().leaf(GATEWAY);
                let yaml = (include_str!("envoy.yaml"), &names[..]);
                let envoy = Envoy::start(program, net, 1, &leaf, yaml).await;
                // Envoy is the only child with this argument, and only one runs at a time.
                (Program::Envoy(envoy), "--disable-hot-restart".to_owned())
            }
        };
        let process = Process::child(&name);
        if processors() > 1 {
            process.pin(CPU_OF_GATEWAYS);
        }
        Self { address: net.address(1, 15008), process, _endpoint: endpoint, _gateway: program }
    }
}

/// Listens for all attackers' streams at once. A listener that drops a TCP handshake would make a
/// gateway wait for a second, and the victim with it.
fn listen(address: SocketAddr) -> TcpListener {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(address).expect("a free address");
    socket.listen(DESCRIPTORS).expect("a listener")
}
