//! Many peer clusters at once, each with its own trust domain and intermediate.

use std::fmt::Write as _;

use strait::tls::{self, IdentityMaterial};
use strait::tools::dev::Authority;
use strait::tools::hbone::{Client, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{ECHO, Endpoint, GATEWAY, Gateway, Identities, Net, Settings};
use crate::support::{broken, replace, run, until};

/// Number of peer clusters. Nothing is exposed to the last one.
const CLUSTERS: usize = 200;
/// Limit of the gateway's memory for a connection with a tunnel, including TLS, HTTP/2 and metrics.
const BYTES_MAX: u64 = 96 * 1024;

/// Returns the identity of a client of a cluster.
fn caller(cluster: usize) -> String {
    format!("spiffe://c{cluster}.local/ns/shop/sa/checkout")
}

/// Returns a client of a cluster, with a certificate of that cluster's intermediate.
async fn client(
    gateway: &Gateway,
    authority: &Authority,
    cluster: usize,
) -> Result<Client, String> {
    let issuer = authority.intermediate(&format!("c{cluster}"));
    let leaf = issuer.and_then(|issuer| issuer.leaf(&caller(cluster)));
    let leaf = leaf.expect("a leaf");
    let root = authority.root_pem();
    let material =
        IdentityMaterial::from_pem(&leaf.chain_pem, &leaf.key_pem, &root).expect("material");
    let tls = tls::client_config(&material, &[GATEWAY]).expect("a client");
    let connected = Client::connect(gateway.address, &tls).await;
    connected.map_err(|error| error.to_string())
}

async fn echoes(tunnel: &mut Tunnel, cluster: usize) {
    let reported = caller(cluster);
    tunnel.write_all(reported.as_bytes()).await.expect("a request");
    let mut answer = vec![0; reported.len()];
    tunnel.read_exact(&mut answer).await.expect("an answer");
    assert_eq!(answer, reported.as_bytes());
}

/// Asserts that a client of an unlisted trust domain is refused, at the latest by its first read.
async fn is_refused(gateway: &Gateway, client: Result<Client, String>, count: f64) {
    if let Ok(client) = client {
        client.tunnel(ECHO).await.expect_err("a refused handshake");
    }
    let refused = async || gateway.refused_handshakes("untrusted_domain").await;
    until("the count", refused, |&now| (now - count).abs() < 0.5).await;
}

/// Returns the number of clusters with one closed tunnel.
async fn closed(gateway: &Gateway) -> usize {
    let text = gateway.scrape().await;
    let closed = text.lines();
    let closed = closed.filter(|line| line.starts_with("istio_tcp_connections_closed"));
    let closed: Vec<_> = closed.filter(|line| line.ends_with(" 1")).collect();
    let has_one = |cluster: &usize| {
        let label = format!("source_cluster=\"c{cluster}\"");
        closed.iter().any(|line| line.contains(&label))
    };
    (0..CLUSTERS).filter(has_one).count()
}

#[test]
fn two_hundred_clusters_are_distinguished() {
    run(async {
        let authority = Authority::new().expect("a root");
        let identities = Identities::from_authority(&authority);
        let net = Net::new();
        let mut settings = Settings::new(net, &identities).endpoints(&[(11, 1, "HBONE")]);
        let to = (0..CLUSTERS - 1).map(|cluster| format!("{{cluster: c{cluster}}}"));
        let to = to.collect::<Vec<_>>().join(", ");
        settings.exposure = format!("    - service: \"{ECHO}\"\n      to: [{to}]\n");
        let mut domains = String::new();
        for cluster in 0..CLUSTERS {
            let _ = writeln!(domains, "    - {{name: c{cluster}.local, cluster: c{cluster}}}");
        }
        let west = "    - {name: west.local, cluster: west}\n";
        let mut gateway = Gateway::spawn(&settings, |folder| {
            let file = folder.join("strait.yaml");
            let text = std::fs::read_to_string(&file).expect("a configuration");
            std::fs::write(file, text.replace(west, &domains)).expect("a configuration");
        });
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        gateway.ready().await;
        let before = gateway.private_dirty();

        let mut clients = Vec::new();
        for cluster in 0..CLUSTERS {
            let connected = client(&gateway, &authority, cluster).await;
            clients.push(connected.expect("a connection"));
        }
        let mut tunnels = Vec::new();
        for (cluster, client) in clients[..CLUSTERS - 1].iter().enumerate() {
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            echoes(&mut tunnel, cluster).await;
            tunnels.push(tunnel);
        }
        let refused = clients[CLUSTERS - 1].tunnel(ECHO).await;
        let refused = refused.expect_err("exposed to the others only").to_string();
        assert!(refused.contains("503"), "{refused}");
        is_refused(&gateway, client(&gateway, &authority, CLUSTERS).await, 1.0).await;
        let each = gateway.private_dirty().saturating_sub(before) / CLUSTERS as u64;
        assert!(each < BYTES_MAX, "{each} bytes for each cluster");

        // One cluster leaves the set, which does not affect the others.
        let file = gateway.file("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        let without = text.replace("    - {name: c7.local, cluster: c7}\n", "");
        replace(&file, &without.replace("{cluster: c7}, ", ""));
        let mut left = tunnels.remove(7);
        assert_eq!(broken(&mut left).await, Some(h2::Reason::INTERNAL_ERROR));
        is_refused(&gateway, client(&gateway, &authority, 7).await, 2.0).await;
        for (index, tunnel) in tunnels.iter_mut().enumerate() {
            echoes(tunnel, if index < 7 { index } else { index + 1 }).await;
        }
        drop(tunnels);
        until("the metrics", async || closed(&gateway).await, |&count| count == CLUSTERS - 1).await;
    });
}
