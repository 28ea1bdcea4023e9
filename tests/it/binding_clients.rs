//! Local clients of a binding that authenticate by mutual TLS.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustix::process::Signal;
use rustls::client::ResolvesClientCert;
use rustls::pki_types::ServerName;
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, SignatureScheme};
use strait::tls;
use strait::tools::dev::{Authority, Leaf};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::bindings::echoes;
use crate::reload::reloads;
use crate::support::oracle::{self, Oracle, Plan, SideResult};
use crate::support::{
    Endpoint, GATEWAY, Gateway, Identities, Net, Settings, endpoint_port, identities, replace, run,
    until,
};
use crate::transit::{WEST_GATEWAY, start_west, west};

const CHECKOUT: &str = "spiffe://east.local/ns/shop/sa/checkout";
const OTHER: &str = "spiffe://east.local/ns/other/sa/checkout";
const WEST: &str = "spiffe://west.local/ns/shop/sa/checkout";
const NORTH: &str = "spiffe://north.local/ns/shop/sa/checkout";
const NORTH_DOMAIN: &str = "    - {name: north.local, cluster: north}\n";
const TO: &str = "to: [{cluster: east, namespaces: [shop]}]";
/// Limit of a wait for something that happens at once.
const SOON: Duration = Duration::from_secs(10);
/// Bytes of a transfer: more than all windows and buffers on the way.
const MANY: u64 = 2_000_000;
/// Limit of a transfer, whose bytes are encrypted twice by debug builds on busy machines.
const TRANSFER_MAX: Duration = Duration::from_secs(60);

/// Starts a gateway of cluster west with this endpoint behind it, and one of cluster east with a
/// binding for the peers of `to`.
async fn pair(there: Net, to: &str) -> (Gateway, Gateway, SocketAddr) {
    pair_with(there, to, NORTH_DOMAIN).await
}

/// As [`pair`], with these lines after the trust domain of cluster west.
async fn pair_with(there: Net, to: &str, trust: &str) -> (Gateway, Gateway, SocketAddr) {
    let donor = start_west(&west(there, &[(11, 1, "TCP")])).await;
    let here = Net::new();
    let address = here.address(2, 8080);
    let mut settings = Settings::new(here, identities());
    settings.more += &format!(
        "networks: [{{name: west, cluster: west, identities: [\"{WEST_GATEWAY}\"], gateways: \
         [\"{}:15008\"]}}]\nbindings: [{{cluster: west, inner: tcp, service: \
         \"echo.app.svc.cluster.local:80\", listen: \"{address}\", {to}}}]\n",
        there.ip(1)
    );
    let mut acceptor = Gateway::spawn(&settings, |folder| {
        let file = folder.join("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        let west = "    - {name: west.local, cluster: west}\n";
        std::fs::write(file, text.replace(west, &format!("{west}{trust}"))).expect("a file");
        std::fs::write(folder.join("crl.pem"), revoked(1, &[])).expect("a list");
    });
    acceptor.ready().await;
    (acceptor, donor, address)
}

/// Returns the revocation list of cluster east.
fn revoked(number: u64, leaves: &[&str]) -> String {
    let end = SystemTime::now() + Duration::from_secs(24 * 3600);
    let list = identities().east.crl(leaves, number, end);
    list.expect("a list")
}

/// Returns open connections of clients of clusters east and north.
async fn two_clients(address: SocketAddr) -> [TlsStream<TcpStream>; 2] {
    let mut clients = [connect(address, CHECKOUT).await, connect(address, NORTH).await];
    for client in &mut clients {
        echoes(client).await;
    }
    clients
}

async fn handshake(
    address: SocketAddr,
    config: Arc<ClientConfig>,
) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::IpAddress(address.ip().into());
    TlsConnector::from(config).connect(name, stream).await
}

/// Returns the connection of a client with this identity.
async fn connect(address: SocketAddr, id: &str) -> TlsStream<TcpStream> {
    let config = identities().client(id, GATEWAY);
    handshake(address, config).await.expect("a handshake")
}

/// Asserts that a connection ends without a byte and without close_notify.
async fn is_broken(stream: &mut TlsStream<TcpStream>) {
    let read = timeout(SOON, stream.read(&mut [0; 8])).await;
    read.expect("an end in time").expect_err("no clean end");
}

/// Asserts that a client is refused in the handshake for this reason.
async fn is_refused(
    gateway: &Gateway,
    address: SocketAddr,
    config: Arc<ClientConfig>,
    reason: &str,
) {
    // In TLS 1.3 a client learns of its refusal by the first read.
    if let Ok(mut stream) = handshake(address, config).await {
        is_broken(&mut stream).await;
    }
    let refused = async || gateway.refused_handshakes(reason).await;
    until(reason, refused, |&count| count == 1.0).await;
}

fn client_of(leaf: &Leaf) -> Arc<ClientConfig> {
    let material = identities().material(leaf);
    tls::client_config(&material, &[GATEWAY]).expect("a client")
}

/// Returns a certificate of the audience that expired an hour ago.
fn expired() -> Leaf {
    let past = SystemTime::now() - Duration::from_secs(2 * 3600);
    let leaf = identities().east.leaf_with(|params| {
        let uri = CHECKOUT.try_into().expect("a URI");
        params.subject_alt_names = vec![rcgen::SanType::URI(uri)];
        params.not_before = past.into();
        params.not_after = (past + Duration::from_secs(3600)).into();
    });
    leaf.expect("a leaf")
}

/// Client without a certificate.
#[derive(Debug)]
struct NoCertificate;

impl ResolvesClientCert for NoCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

#[test]
fn a_client_of_the_audience_reaches_the_service_with_every_byte_and_both_ends() {
    run(async {
        let there = Net::new();
        let oracle = Oracle::new();
        let _endpoint = oracle.endpoint(there.listen(11, endpoint_port()).await);
        let (acceptor, _donor, address) = pair(there, TO).await;
        let directions = [(MANY, MANY), (MANY, 0), (0, MANY), (1, MANY), (MANY, 1)];
        for (id, (up, down)) in directions.into_iter().enumerate() {
            let plan = Plan { up, down, ..Plan::both(id as u64, 0) };
            let stream = connect(address, CHECKOUT).await;
            let client = timeout(TRANSFER_MAX, oracle::drive(stream, plan)).await;
            let client = client.expect("an end in time");
            assert_eq!(client, SideResult::complete(down), "{plan:?}");
            oracle.whole(plan, client).await;
        }
        let completed = async || acceptor.tunnels("completed").await;
        until("completed", completed, |&count| count == 5.0).await;
        acceptor.logged(&format!("src.identity=\"{CHECKOUT}\"")).await;
    });
}

#[test]
fn other_clients_are_refused_before_a_byte_reaches_the_service() {
    run(async {
        let there = Net::new();
        let endpoint = Endpoint::echo(there.listen(11, endpoint_port()).await);
        let (acceptor, _donor, address) = pair(there, TO).await;
        // Verified clients outside the audience.
        for (count, id) in [(1.0, OTHER), (2.0, WEST)] {
            is_broken(&mut connect(address, id).await).await;
            let refused = async || acceptor.tunnels("not_for_peer").await;
            until("not_for_peer", refused, |&found| found == count).await;
            acceptor.logged(&format!("src.identity=\"{id}\"")).await;
        }
        // Certificates that no HBONE listener accepts either.
        let authority = Authority::new().expect("an authority");
        let foreign = Identities::from_authority(&authority).leaf(CHECKOUT);
        is_refused(&acceptor, address, client_of(&foreign), "unknown_issuer").await;
        is_refused(&acceptor, address, client_of(&expired()), "expired").await;
        let mut anonymous = ClientConfig::clone(&identities().client(CHECKOUT, GATEWAY));
        anonymous.client_auth_cert_resolver = Arc::new(NoCertificate);
        is_refused(&acceptor, address, Arc::new(anonymous), "no_certificate").await;
        // Plain TCP.
        let mut plain = TcpStream::connect(address).await.expect("a connection");
        plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.expect("a request");
        let mut answer = Vec::new();
        let _ = timeout(SOON, plain.read_to_end(&mut answer)).await.expect("an end");
        assert!(answer.len() <= 7, "an alert at most: {answer:?}");
        assert_eq!(endpoint.accepted(), 0);
        echoes(&mut connect(address, CHECKOUT).await).await;
    });
}

#[test]
fn a_reload_ends_the_connections_that_it_no_longer_permits() {
    run(async {
        let there = Net::new();
        let _endpoint = Endpoint::echo(there.listen(11, endpoint_port()).await);
        let both = "to: [{cluster: east, namespaces: [shop]}, {cluster: north}]";
        let (acceptor, _donor, address) = pair(there, both).await;
        let [mut east, mut north] = two_clients(address).await;
        let file = acceptor.file("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        let revoked = async || acceptor.tunnels("revoked").await;
        // Another audience.
        replace(&file, &text.replace(both, "to: [{cluster: north}]"));
        is_broken(&mut east).await;
        until("revoked", revoked, |&count| count == 1.0).await;
        echoes(&mut north).await;
        is_broken(&mut connect(address, CHECKOUT).await).await;
        // Another trust domain.
        let text = text.replace(NORTH_DOMAIN, "");
        replace(&file, &text.replace(both, "to: [{anyone: true}]"));
        is_broken(&mut north).await;
        until("revoked", revoked, |&count| count == 2.0).await;
        // Lost trust ends connections before the new audience is in force.
        reloads(&acceptor, "config", "ok", 2.0).await;
        let mut east = connect(address, CHECKOUT).await;
        echoes(&mut east).await;
        // Plain TCP, which admits no connection that began with an identity.
        replace(&file, &text.replace(both, "clients: [127.0.0.0/8]"));
        is_broken(&mut east).await;
        reloads(&acceptor, "config", "ok", 3.0).await;
        let mut plain = TcpStream::connect(address).await.expect("a connection");
        echoes(&mut plain).await;
        // And back, by which a client without identity ends.
        replace(&file, &text.replace(both, "to: [{anyone: true}]"));
        let end = timeout(SOON, plain.read(&mut [0; 5])).await;
        end.expect("an end in time").expect_err("no clean end");
    });
}

#[test]
fn a_client_of_a_cluster_without_a_link_is_refused_like_a_peer() {
    run(async {
        let there = Net::new();
        let _endpoint = Endpoint::echo(there.listen(11, endpoint_port()).await);
        let (acceptor, _donor, address) = pair(there, "to: [{anyone: true}]").await;
        let [mut east, mut north] = two_clients(address).await;
        let file = acceptor.file("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        replace(&file, &format!("{text}links: [{{from: west, to: east}}]\n"));
        is_broken(&mut north).await;
        let revoked = async || acceptor.tunnels("revoked").await;
        until("revoked", revoked, |&count| count == 1.0).await;
        is_broken(&mut connect(address, NORTH).await).await;
        echoes(&mut east).await;
    });
}

#[test]
fn a_client_that_ends_without_close_notify_is_no_clean_end_for_the_service() {
    run(async {
        let there = Net::new();
        let listener = there.listen(11, endpoint_port()).await;
        let (_endpoint, mut ends) = Endpoint::reporting(listener);
        let (acceptor, _donor, address) = pair(there, TO).await;
        let mut stream = connect(address, CHECKOUT).await;
        stream.write_all(b"hello").await.expect("an open connection");
        acceptor.wait_until_open(1, 1).await;
        stream.get_mut().0.shutdown().await.expect("FIN");
        let end = timeout(SOON, ends.recv()).await.expect("an end in time");
        assert_eq!(end, Some(Err(std::io::ErrorKind::ConnectionReset)));
        assert_eq!(acceptor.tunnels("downstream_lost").await, 1.0);
    });
}

#[test]
fn a_revoked_client_loses_its_connection_and_its_neighbour_no_byte() {
    run(async {
        let there = Net::new();
        let _endpoint = Endpoint::echo(there.listen(11, endpoint_port()).await);
        // The root has no list.
        let trust = "  crl: {files: [crl.pem], on_missing: accept}\n";
        let (acceptor, _donor, address) = pair_with(there, TO, trust).await;
        let bad = identities().leaf(CHECKOUT);
        let mut lost = handshake(address, client_of(&bad)).await.expect("a handshake");
        let mut kept = connect(address, CHECKOUT).await;
        echoes(&mut lost).await;
        echoes(&mut kept).await;
        replace(&acceptor.file("crl.pem"), &revoked(2, &[&bad.chain_pem]));
        is_broken(&mut lost).await;
        let ended = async || acceptor.tunnels("revoked").await;
        until("revoked", ended, |&count| count == 1.0).await;
        is_refused(&acceptor, address, client_of(&bad), "revoked").await;
        echoes(&mut kept).await;
        echoes(&mut connect(address, CHECKOUT).await).await;
    });
}

#[test]
fn a_drain_keeps_open_connections_with_an_identity_until_its_deadline() {
    run(async {
        let there = Net::new();
        let _endpoint = Endpoint::echo(there.listen(11, endpoint_port()).await);
        let (mut acceptor, _donor, address) = pair(there, TO).await;
        let mut stream = connect(address, CHECKOUT).await;
        echoes(&mut stream).await;
        acceptor.signal(Signal::TERM);
        let refused = async || TcpStream::connect(address).await.is_err();
        until("refused connections", refused, |&is| is).await;
        echoes(&mut stream).await;
        is_broken(&mut stream).await;
        assert!(acceptor.exited().await.success());
        let log = acceptor.log();
        assert!(log.contains("reason=\"drain_deadline\""), "{log}");
        assert!(log.contains("stopped left=0"), "{log}");
    });
}

#[test]
fn an_idle_connection_with_an_identity_is_reset() {
    run(async {
        let there = Net::new();
        let _endpoint = Endpoint::echo(there.listen(11, endpoint_port()).await);
        let (acceptor, _donor, address) = pair(there, &format!("{TO}, idle: 1s")).await;
        let mut stream = connect(address, CHECKOUT).await;
        echoes(&mut stream).await;
        is_broken(&mut stream).await;
        let ended = async || acceptor.tunnels("idle_timeout").await;
        until("idle_timeout", ended, |&count| count == 1.0).await;
    });
}
