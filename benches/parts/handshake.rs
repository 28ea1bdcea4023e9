//! Cost of a full handshake for the server, in memory, with a known chain and a new one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::Criterion;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};
use strait::tls::{self, IdentityMaterial, PeerTrust, ServerTls, TrustedDomain};
use strait::tools::dev;

/// Certificates of a gateway and of a peer.
pub struct Identities {
    east: IdentityMaterial,
    west: IdentityMaterial,
}

pub const GATEWAY: &str = "spiffe://east.local/ns/istio-system/sa/gateway";
pub const PEER: &str = "spiffe://west.local/ns/shop/sa/checkout";

impl Identities {
    pub fn new() -> Self {
        let authority = dev::Authority::new().expect("a root");
        let material = |cluster, id| {
            let issuer = authority.intermediate(cluster).expect("an intermediate");
            let leaf = issuer.leaf(id).expect("a leaf");
            let root = authority.root_pem();
            IdentityMaterial::from_pem(&leaf.chain_pem, &leaf.key_pem, &root).expect("material")
        };
        Self { east: material("east", GATEWAY), west: material("west", PEER) }
    }

    /// Returns a configuration that has not seen a peer yet.
    pub fn server(&self) -> ServerTls {
        let domain = TrustedDomain { name: "west.local".into(), issuers: None, roots: None };
        let trust = PeerTrust { domains: vec![domain], ..PeerTrust::default() };
        tls::listener_server_config(&self.east, &trust).expect("a configuration")
    }

    pub fn client(&self) -> Arc<ClientConfig> {
        tls::client_config(&self.west, &[GATEWAY]).expect("a configuration")
    }
}

pub fn run(criterion: &mut Criterion) {
    let identities = Identities::new();
    let client = identities.client();
    let same = identities.server().config;
    let mut group = criterion.benchmark_group("handshake");
    group.bench_function("known chain", |b| {
        b.iter_custom(|count| (0..count).map(|_| shake(&same, &client)).sum());
    });
    group.bench_function("new chain", |b| {
        b.iter_custom(|count| {
            let servers = (0..count).map(|_| identities.server());
            servers.map(|server| shake(&server.config, &client)).sum()
        });
    });
    group.finish();
}

/// Returns the server's time in one handshake.
fn shake(server: &Arc<ServerConfig>, client: &Arc<ClientConfig>) -> Duration {
    let nobody = ServerName::IpAddress(std::net::IpAddr::from([0; 4]).into());
    let mut client = ClientConnection::new(Arc::clone(client), nobody).expect("a client");
    let mut bytes = Vec::new();
    let mut time = Duration::ZERO;
    let begun = Instant::now();
    let mut server = ServerConnection::new(Arc::clone(server)).expect("a server");
    time += begun.elapsed();
    while server.is_handshaking() || client.wants_write() {
        bytes.clear();
        while client.wants_write() {
            client.write_tls(&mut bytes).expect("memory");
        }
        let begun = Instant::now();
        let mut unread = bytes.as_slice();
        while !unread.is_empty() {
            server.read_tls(&mut unread).expect("memory");
            server.process_new_packets().expect("a good client");
        }
        let mut answer = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut answer).expect("memory");
        }
        time += begun.elapsed();
        let mut unread = answer.as_slice();
        while !unread.is_empty() {
            client.read_tls(&mut unread).expect("memory");
            client.process_new_packets().expect("a good server");
        }
    }
    time
}
