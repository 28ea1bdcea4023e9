//! `strait doctor`: each planted fault is found, and named with its remedy.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, SanType};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::Value;
use strait::tls::{IdentityMaterial, server_config_any_client};
use strait::tools::dev::{Authority, Issuer, Leaf};
use tempfile::TempDir;
use time::OffsetDateTime;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UdpSocket};
use tokio_rustls::TlsAcceptor;

use crate::support::{CommandOutput, done_with, run, write};

const OWN: &str = "spiffe://east.local/ns/edge/sa/gateway";
const OTHER: &str = "spiffe://west.local/ns/edge/sa/gateway";
const HOUR: Duration = Duration::from_secs(3600);

/// Own certificate and files without a fault, and the authority of both clusters.
pub struct World {
    pub folder: TempDir,
    authority: Authority,
    east: Issuer,
    west: Issuer,
}

/// Check, result, what was found, and the remedy.
type Wanted<'a> = (&'a str, &'a str, &'a str, &'a str);

impl World {
    pub fn new() -> Self {
        let authority = Authority::new().expect("a root");
        let [east, west] =
            ["east", "west"].map(|name| authority.intermediate(name).expect("an intermediate"));
        let folder = tempfile::tempdir().expect("a folder");
        let world = Self { folder, authority, east, west };
        write(world.folder.path(), "root.crt", &world.authority.root_pem());
        write(world.folder.path(), "mesh.yaml", "services: []\nworkloads: []\n");
        world.own(&world.east.leaf(OWN).expect("a leaf"));
        world.config(&[]);
        world
    }

    fn own(&self, leaf: &Leaf) {
        write(self.folder.path(), "own.crt", &leaf.chain_pem);
        write(self.folder.path(), "own.key", &leaf.key_pem);
        let key = self.folder.path().join("own.key");
        std::fs::set_permissions(key, PermissionsExt::from_mode(0o600)).expect("a mode");
    }

    /// Writes a configuration with these replacements.
    pub fn config(&self, changes: &[(&str, &str)]) {
        let mut text = "\
gateway: {cluster: east}
identity: {kind: files, chain: own.crt, key: own.key, roots: root.crt}
trust:
  domains: [{name: east.local, cluster: east}, {name: west.local, cluster: west}]
listeners: [{name: cross-network, bind: \"127.0.0.1:15008\"}]
discovery: {kind: file, path: mesh.yaml}
admin: {bind: \"127.0.0.1:1\"}
dial: {allow: [127.0.0.0/8]}
workers: 1
"
        .to_owned();
        for (old, new) in changes {
            assert!(text.contains(old), "{old}");
            text = text.replace(old, new);
        }
        write(self.folder.path(), "strait.yaml", &text);
    }

    /// Writes a configuration with a gateway of network west.
    fn with_gateway(&self, gateway: &str, changes: &[(&str, &str)]) {
        let network =
            format!("workers: 1\nnetworks: [{{name: west, cluster: west, gateways: [{gateway}]}}]");
        self.config(&[&[("workers: 1", &*network)], changes].concat());
    }

    fn west_leaf(&self) -> Leaf {
        self.west.leaf(OTHER).expect("a leaf")
    }

    async fn doctor(&self) -> (CommandOutput, Value) {
        let args = ["doctor", "-c", "strait.yaml", "-o", "json"];
        let done = done_with(self.folder.path(), &args, |_| {}).await;
        let page = serde_json::from_str(&done.stdout);
        let page = page.unwrap_or_else(|error| panic!("{error}: {done:?}"));
        (done, page)
    }

    /// Fails if the command does not find the fault, or its exit code is not that of the result.
    async fn finds(&self, wanted: Wanted<'_>) {
        let (done, page) = self.doctor().await;
        assert!(has(&page, wanted), "{wanted:?}: {page:#}");
        if wanted.1 == "failure" {
            assert_eq!((done.code, &page["ok"]), (Some(1), &Value::Bool(false)), "{page:#}");
        }
    }
}

fn has(page: &Value, (check, result, found, remedy): Wanted<'_>) -> bool {
    let checks = page["checks"].as_array().expect("checks");
    checks.iter().any(|one| {
        let text = |key: &str| one[key].as_str().unwrap_or_default();
        text("check") == check
            && text("result") == result
            && text("found").contains(found)
            && text("remedy").contains(remedy)
    })
}

/// Serves HTTP/2 behind TLS, until the test ends.
async fn serve(config: Arc<ServerConfig>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("its address");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = TlsAcceptor::from(Arc::clone(&config));
            tokio::spawn(async move {
                let stream = match acceptor.accept(stream).into_fallible().await {
                    Ok(stream) => stream,
                    // The client reads the alert before the connection ends.
                    Err((_, mut stream)) => {
                        let _ = stream.read_to_end(&mut Vec::new()).await;
                        return;
                    }
                };
                let Ok(mut http2) = h2::server::handshake(stream).await else { return };
                while let Some(Ok(_)) = http2.accept().await {}
            });
        }
    });
    address
}

/// Serves as a gateway with this certificate, which trusts these roots.
async fn gateway(leaf: &Leaf, roots: &str) -> SocketAddr {
    serve(server_config(leaf, roots)).await
}

fn server_config(leaf: &Leaf, roots: &str) -> Arc<ServerConfig> {
    let own = IdentityMaterial::from_pem(&leaf.chain_pem, &leaf.key_pem, roots);
    server_config_any_client(&own.expect("an identity")).expect("a configuration")
}

pub async fn closed_port() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    listener.local_addr().expect("its address")
}

fn id(params: &mut CertificateParams, id: &str) {
    params.subject_alt_names = vec![SanType::URI(id.try_into().expect("a URI"))];
}

#[test]
fn without_a_fault_every_check_is_ok() {
    run(async {
        let world = World::new();
        let address = gateway(&world.west_leaf(), &world.authority.root_pem()).await;
        world.with_gateway(&format!("\"{address}\""), &[]);
        let (done, page) = world.doctor().await;
        assert_eq!((done.code, &page["ok"]), (Some(0), &Value::Bool(true)), "{page:#}");
        for wanted in [
            ("configuration", "ok", "strait.yaml", ""),
            ("certificate", "ok", OWN, ""),
            ("roots", "ok", "west.local", ""),
            ("clock", "ok", "", ""),
            ("gateway", "ok", OTHER, ""),
            ("gateway", "ok", "path MTU ", ""),
            ("running gateway", "ok", "none answers", ""),
        ] {
            assert!(has(&page, wanted), "{wanted:?}: {page:#}");
        }
        let args = ["doctor", "-c", "strait.yaml"];
        let text = done_with(world.folder.path(), &args, |_| {}).await;
        assert_eq!(text.code, Some(0), "{text:?}");
        let line = format!("ok      certificate: {OWN}, valid until ");
        assert!(text.stdout.contains(&line), "{}", text.stdout);
        assert!(text.stdout.contains("\n0 failures, "), "{}", text.stdout);
    });
}

#[test]
fn faults_of_the_own_certificate_are_found() {
    type Change = fn(&mut CertificateParams);
    let cases: [(Change, Wanted<'_>); 5] = [
        (
            |params| params.not_after = params.not_before,
            ("certificate", "failure", "(expired)", "have a new one issued"),
        ),
        (
            |params| params.not_before = OffsetDateTime::now_utc() + HOUR,
            ("clock", "failure", "see certificate", "by NTP"),
        ),
        (
            |params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth],
            ("certificate", "failure", "(bad_key_usage)", "client and server authentication"),
        ),
        (
            |params| params.subject_alt_names.clear(),
            ("certificate", "failure", "(no_uri_san)", "needs one URI SAN"),
        ),
        (
            |params| {
                params.not_before = OffsetDateTime::now_utc() - 100 * HOUR;
                params.not_after = OffsetDateTime::now_utc() + HOUR;
            },
            ("certificate", "warning", "less than a quarter", "renew it"),
        ),
    ];
    run(async {
        let world = World::new();
        for (change, wanted) in cases {
            let leaf = world.east.leaf_with(|params| {
                id(params, OWN);
                change(params);
            });
            world.own(&leaf.expect("a leaf"));
            world.finds(wanted).await;
        }
        let leaf = world.east.leaf(OWN).expect("a leaf");
        world.own(&leaf);
        write(world.folder.path(), "own.key", &world.west_leaf().key_pem);
        let wanted = ("certificate", "failure", "does not match", "both from one issuance");
        world.finds(wanted).await;
        let other = Authority::new().expect("a root").intermediate("east");
        world.own(&other.expect("an intermediate").leaf(OWN).expect("a leaf"));
        let wanted = ("certificate", "failure", "(unknown_issuer)", "each issuer below the roots");
        world.finds(wanted).await;
    });
}

#[test]
fn faults_of_the_configuration_and_of_the_roots_are_found() {
    run(async {
        let world = World::new();
        world.config(&[("workers: 1", "wrokers: 1")]);
        world.finds(("configuration", "failure", "wrokers", "workers")).await;

        let expired = |params: &mut CertificateParams| params.not_after = params.not_before;
        let expired = world.authority.intermediate_with("old", expired);
        write(world.folder.path(), "old.crt", &expired.expect("a certificate").pem());
        world.config(&[("cluster: west}", "cluster: west, roots: old.crt}")]);
        world.finds(("roots", "failure", "west.local has a root in", "current root")).await;

        let expired = world.east.leaf_with(|params| {
            id(params, OWN);
            params.not_after = params.not_before;
        });
        world.own(&expired.expect("a leaf"));
        let wanted = ("clock", "warning", "after the validity of 2 certificates of", "by NTP");
        world.finds(wanted).await;
        world.own(&world.east.leaf(OWN).expect("a leaf"));

        write(world.folder.path(), "old.crt", "");
        let wanted = ("roots", "failure", "west.local has no usable root", "PEM file");
        world.finds(wanted).await;
    });
}

#[test]
fn faults_of_gateways_of_other_networks_are_found() {
    run(async {
        let world = World::new();
        let root = world.authority.root_pem();
        let foreign = Authority::new().expect("a root");
        let foreign_leaf = foreign.intermediate("west").expect("an issuer").leaf(OTHER);
        let foreign_leaf = foreign_leaf.expect("a leaf");
        let good = world.west_leaf();
        let mut no_alpn = (*server_config(&good, &root)).clone();
        no_alpn.alpn_protocols.clear();
        let plain = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let plain_address = plain.local_addr().expect("its address");
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = plain.accept().await {
                let mut received = [0; 1024];
                let _ = stream.read(&mut received).await;
                let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
            }
        });
        let east = world.east.leaf(OWN).expect("a leaf");
        let south = world.west.leaf("spiffe://south.local/ns/a/sa/b").expect("a leaf");
        for (address, found, remedy) in [
            (closed_port().await, "refused", "open the way there"),
            (plain_address, "corrupt message", "write its HBONE port"),
            (serve(Arc::new(no_alpn)).await, "ALPN h2", "write its HBONE port"),
            (gateway(&east, &root).await, "belongs to cluster east", "correct its address"),
            (gateway(&south, &root).await, "south.local", "add its trust domain"),
            (gateway(&foreign_leaf, &root).await, "unknown_issuer", "add the root of its mesh"),
            (gateway(&good, &foreign.root_pem()).await, "alert", "add the own root"),
        ] {
            world.with_gateway(&format!("\"{address}\""), &[]);
            world.finds(("gateway", "failure", found, remedy)).await;
        }
        let address = gateway(&good, &root).await;
        world.with_gateway(&format!("\"{address}\""), &[("dial: {allow: [127.0.0.0/8]}\n", "")]);
        world.finds(("gateway", "failure", &address.to_string(), "`dial.allow`")).await;
    });
}

#[test]
fn a_name_without_an_address_is_found() {
    run(async {
        let world = World::new();
        let server = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let servers = format!(
            "dial: {{allow: [127.0.0.0/8]}}\ndns: {{servers: [\"{}\"]}}",
            server.local_addr().expect("its address")
        );
        tokio::spawn(async move {
            let mut query = [0; 512];
            while let Ok((length, from)) = server.recv_from(&mut query).await {
                // An answer to the same question: no such name (RFC 1035 section 4.1.1).
                (query[2], query[3]) = (0x81, 0x83);
                let _ = server.send_to(&query[..length], from).await;
            }
        });
        let change = [("dial: {allow: [127.0.0.0/8]}", &*servers)];
        world.with_gateway("\"gateway.west.test:15008\"", &change);
        let wanted = ("dns", "failure", "gateway.west.test", "correct the name");
        world.finds(wanted).await;
    });
}

#[test]
fn faults_of_the_control_plane_are_found() {
    run(async {
        let world = World::new();
        let named = |name: &str| {
            let name = name.to_owned();
            let leaf = world.east.leaf_with(|params| {
                params.subject_alt_names = vec![SanType::DnsName(name.try_into().expect("a name"))];
            });
            leaf.expect("a leaf")
        };
        let served = |leaf: &Leaf| {
            let chain = certificates(&leaf.chain_pem);
            let key = PrivateKeyDer::from_pem_slice(leaf.key_pem.as_bytes());
            let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
            let config = ServerConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .expect("versions")
                .with_no_client_auth()
                .with_single_cert(chain, key.expect("a key"));
            let mut config = config.expect("a configuration");
            config.alpn_protocols = vec![b"h2".to_vec()];
            Arc::new(config)
        };
        let good = serve(served(&named("localhost"))).await.port();
        let other = serve(served(&named("other.test"))).await.port();
        write(world.folder.path(), "foreign.crt", &Authority::new().expect("a root").root_pem());
        let closed = closed_port().await.port();
        for (port, roots, (result, found, remedy)) in [
            (good, "root.crt", ("ok", "is trusted", "")),
            (other, "root.crt", ("failure", "not valid for name", "`san`")),
            (good, "foreign.crt", ("failure", "UnknownIssuer", "into `roots`")),
            (closed, "root.crt", ("failure", "refused", "open the way")),
        ] {
            let plane = format!("{{kind: istio, address: \"localhost:{port}\", roots: {roots}}}");
            world.config(&[("{kind: file, path: mesh.yaml}", &plane)]);
            world.finds(("control plane", result, found, remedy)).await;
        }
    });
}

fn certificates(pem: &str) -> Vec<CertificateDer<'static>> {
    let certificates = CertificateDer::pem_slice_iter(pem.as_bytes());
    certificates.collect::<Result<_, _>>().expect("certificates")
}

#[test]
fn faults_of_the_host_are_found() {
    run(async {
        let world = World::new();
        world.config(&[("workers: 1", "workers: 1000\nlimits: {buffers: 1000TiB}")]);
        let (_, page) = world.doctor().await;
        for wanted in [
            ("limits", "failure", "for buffers", "lower `limits.buffers`"),
            ("limits", "warning", "1000 workers", "lower `workers`"),
        ] {
            assert!(has(&page, wanted), "{wanted:?}: {page:#}");
        }
        let program = env!("CARGO_BIN_EXE_strait");
        let command = format!("ulimit -n 300; exec {program} doctor -c strait.yaml -o json");
        let mut limited = tokio::process::Command::new("sh");
        limited.args(["-c", &command]).current_dir(world.folder.path());
        let done = limited.output().await.expect("an output");
        let page: Value = serde_json::from_slice(&done.stdout).expect("a page");
        let wanted = ("limits", "warning", "300 open files", "raise the hard limit");
        assert!(has(&page, wanted), "{page:#}");
    });
}

/// Answers every request to an admin port with a page.
pub async fn admin(page: String) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("its address");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).await;
            let length = page.len();
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{page}");
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    address
}

#[test]
fn faults_of_a_running_gateway_are_found() {
    run(async {
        let world = World::new();
        let recorded = include_str!("../../src/admin/status/pages/status.json");
        let mut page: Value = serde_json::from_str(recorded).expect("a page");
        page["ready"] = Value::Bool(false);
        page["pending"] = serde_json::json!(["discovery (addresses)"]);
        page["problems"] = serde_json::json!(["lookups of a.test fail: no such name"]);
        let types = page["source"]["stream"]["types"].as_array_mut().expect("types");
        types[0]["accepted"] = Value::Null;
        let name = types[0]["name"].as_str().expect("a name").to_owned();
        let address = admin(page.to_string()).await;
        world.config(&[("bind: \"127.0.0.1:1\"", &format!("bind: \"{address}\""))]);
        let (done, found) = world.doctor().await;
        assert_eq!(done.code, Some(1), "{found:#}");
        for wanted in [
            ("running gateway", "failure", "waits for discovery (addresses)", "strait status"),
            ("running gateway", "warning", "lookups of a.test fail", "strait status"),
            ("control plane", "failure", &*format!("has not sent {name}"), "grant the gateway"),
        ] {
            assert!(has(&found, wanted), "{wanted:?}: {found:#}");
        }
    });
}
