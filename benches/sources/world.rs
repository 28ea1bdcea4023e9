//! Gateways under attack, each a process with one worker, with the endpoint behind them.

use std::net::{IpAddr, SocketAddr};

use tokio::net::{TcpListener, TcpSocket};

use crate::common::machine::{CPU_OF_GATEWAYS, processors};
use crate::common::process::Process;
use crate::gateways::{NOISE_HOST, Next, Program, Running};
use crate::support::{Endpoint, Net};

/// Limit of descriptors, more than the tunnels of all attackers need.
pub const DESCRIPTORS: u32 = 16_384;
/// Limit of descriptors of a gateway that an attacker can fill.
const FEW_DESCRIPTORS: u32 = 2_048;
/// Port of the binding.
pub const BINDING: u16 = 8080;

/// Gateways of a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    /// One gateway with the endpoint.
    One,
    /// A gateway whose service is behind that of another network, and a binding to it.
    Two,
    /// As [`Self::Two`], where the second gateway has few descriptors.
    TwoWithFewDescriptors,
    /// As [`Self::Two`], where the other network has two gateways.
    TwoNext,
}

/// Programs of a scenario.
#[derive(Clone, Debug)]
pub struct Build {
    pub name: String,
    pub first: Program,
    /// Program of the gateways of the other network.
    pub next: Program,
}

/// Running gateways and their endpoint. All end on drop.
pub struct World {
    /// HBONE listener that the victim and attackers use.
    pub address: SocketAddr,
    /// Plaintext listener of the binding.
    pub binding: SocketAddr,
    /// Address of the endpoint.
    pub endpoint: SocketAddr,
    /// Address of the endpoint of a noisy cluster.
    pub noise: SocketAddr,
    /// Address of the victim at the binding. Attackers have the default one of the host.
    pub client: IpAddr,
    pub first: Process,
    _gateways: Vec<Running>,
    _endpoint: Endpoint,
}

impl Build {
    /// Returns whether the scenario says something about these programs. Envoy as the next gateway
    /// of Strait has no shares of its own, so that one peer may take all its descriptors.
    pub fn applies_to(&self, topology: Topology) -> bool {
        match topology {
            Topology::One => self.first == self.next,
            Topology::TwoWithFewDescriptors => {
                matches!(self.first, Program::Envoy(_)) || self.first == self.next
            }
            Topology::Two | Topology::TwoNext => true,
        }
    }
}

impl World {
    /// Starts the gateways.
    pub async fn start(build: &Build, topology: Topology) -> Self {
        let net = Net::new();
        let endpoint = net.address(11, 9000);
        let running_endpoint = Endpoint::echo_or_endless(listen(endpoint));
        let (descriptors, count) = match topology {
            Topology::One => (DESCRIPTORS, 0),
            Topology::Two => (DESCRIPTORS, 1),
            Topology::TwoWithFewDescriptors => (FEW_DESCRIPTORS, 1),
            Topology::TwoNext => (DESCRIPTORS, 2),
        };
        let (mut gateways, mut nets) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let next = Next { net: Net::new(), endpoint: net, descriptors };
            gateways.push(build.next.next(&next).await);
            nets.push(next.net);
        }
        let here = if nets.is_empty() { net } else { Net::new() };
        gateways.push(if nets.is_empty() {
            build.first.alone(here).await
        } else {
            build.first.first(here, &nets).await
        });
        let processes: Vec<_> = gateways.iter().map(Running::process).collect();
        if processors() > 1 {
            processes.iter().for_each(|one| one.pin(CPU_OF_GATEWAYS));
        }
        Self {
            address: here.address(1, 15008),
            binding: here.address(1, BINDING),
            endpoint,
            noise: here.address(NOISE_HOST, 9000),
            client: here.ip(21),
            first: processes[processes.len() - 1],
            _gateways: gateways,
            _endpoint: running_endpoint,
        }
    }
}

/// Listens for all streams of an attacker at once. A dropped handshake would cost a gateway a
/// second.
pub fn listen(address: SocketAddr) -> TcpListener {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(address).expect("a free address");
    socket.listen(DESCRIPTORS).expect("a listener")
}
