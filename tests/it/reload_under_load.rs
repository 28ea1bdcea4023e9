//! A minute of repeated changes of everything that can change, under long and new tunnels. No
//! tunnel may be affected.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use strait::tls;
use strait::tools::hbone::Client;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::support::oracle::{self, Oracle, Plan, SideResult};
use crate::support::{
    CLIENT, ECHO, Endpoint, GATEWAY, Gateway, Net, Settings, identities, mounted, replace, run,
};

const MINUTE: Duration = Duration::from_secs(60);
/// Intervals of the changes: 60 certificates, 100 mesh files, 12 versions of `strait.yaml`.
const CERTIFICATES: Duration = Duration::from_secs(1);
const MESHES: Duration = Duration::from_millis(600);
const CONFIGS: Duration = Duration::from_secs(5);
const VERSIONS: u8 = 100;
/// Endpoint of the mesh's first version; each version has another host.
const FIRST_HOST: u8 = 100;

const LONG_CLIENTS: u64 = 5;
const LONG_TUNNELS: u64 = 10;
/// Rest of long tunnels, which move 16 KiB each way and rest: 65 s at least, longer than all
/// changes.
const LONG_REST: Duration = Duration::from_millis(500);
const LONG_BYTES: u64 = 130 * 16 * 1024;
/// Intervals of new tunnels, and of new connections for them.
const NEW_TUNNELS: Duration = Duration::from_millis(40);
const NEW_CLIENTS: Duration = Duration::from_millis(100);
const NEW_BYTES: u64 = 20_000;

/// Verifier of a normal client that records the serial numbers it has seen.
#[derive(Debug)]
struct Serials {
    judge: Arc<dyn ServerCertVerifier>,
    seen: Mutex<BTreeSet<Vec<u8>>>,
}

impl ServerCertVerifier for Serials {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let (_, certificate) = x509_parser::parse_x509_certificate(leaf).expect("a certificate");
        let serial = certificate.raw_serial().to_vec();
        self.seen.lock().expect("a lock").insert(serial);
        let judge = &self.judge;
        judge.verify_server_cert(leaf, intermediates, name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.judge.verify_tls12_signature(message, leaf, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.judge.verify_tls13_signature(message, leaf, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.judge.supported_verify_schemes()
    }
}

/// Gateway with an endpoint for each version of its mesh, and the results of its clients.
struct Scene {
    net: Net,
    gateway: Gateway,
    oracle: Oracle,
    tls: Arc<ClientConfig>,
    serials: Arc<Serials>,
    _endpoints: Vec<Endpoint>,
}

impl Scene {
    async fn start() -> Self {
        let net = Net::new();
        let mut settings = mesh(net, 0);
        settings.exposure = exposure(0);
        let mut gateway = Gateway::spawn(&settings, mounted::mount);
        gateway.ready().await;
        let oracle = Oracle::new();
        let mut endpoints = Vec::new();
        for version in 0..=VERSIONS {
            let listener = net.listen(FIRST_HOST + version, 9000).await;
            endpoints.push(oracle.endpoint(listener));
        }
        let material = identities().material(&identities().leaf(CLIENT));
        let serials = Arc::new(Serials {
            judge: tls::server_verifier(&material, &[GATEWAY]),
            seen: Mutex::default(),
        });
        let mut tls = ClientConfig::clone(&identities().client(CLIENT, GATEWAY));
        let verifier = Arc::clone(&serials);
        tls.dangerous().set_certificate_verifier(verifier);
        Self { net, gateway, oracle, tls: Arc::new(tls), serials, _endpoints: endpoints }
    }

    async fn client(&self) -> Client {
        let connected = Client::connect(self.gateway.address, &self.tls).await;
        connected.expect("a connection")
    }

    /// Opens the long tunnels; they run until after the minute.
    async fn long_tunnels(&self) -> JoinSet<(Plan, SideResult)> {
        let mut tunnels = JoinSet::new();
        for number in 0..LONG_CLIENTS {
            let client = Arc::new(self.client().await);
            for id in number * LONG_TUNNELS..(number + 1) * LONG_TUNNELS {
                let plan = Plan { rest: LONG_REST, ..Plan::both(id, LONG_BYTES) };
                let tunnel = client.tunnel(ECHO).await.expect("a long tunnel");
                let client = Arc::clone(&client);
                tunnels.spawn(async move {
                    let side = oracle::drive(tunnel, plan).await;
                    drop(client);
                    (plan, side)
                });
            }
        }
        tunnels
    }

    /// Opens new tunnels for a minute.
    async fn new_tunnels(&self, start: Instant) -> Vec<(Plan, SideResult)> {
        let mut clients = JoinSet::new();
        let mut opened = 0;
        every(start, NEW_CLIENTS, async |_| {
            let mut plans = Vec::new();
            // A machine that was late has to open more now.
            while NEW_TUNNELS * opened <= start.elapsed() {
                let id = LONG_CLIENTS * LONG_TUNNELS + u64::from(opened);
                plans.push(Plan::both(id, NEW_BYTES));
                opened += 1;
            }
            let client = self.client().await;
            clients.spawn(async move {
                let mut tunnels = Vec::new();
                for plan in plans {
                    tunnels.push((plan, oracle::tunnel(&client, plan).await));
                }
                client.close().await.expect("a clean end");
                tunnels
            });
        })
        .await;
        clients.join_all().await.concat()
    }

    async fn certificates(&self, start: Instant) {
        every(start, CERTIFICATES, async |turn| {
            let version = format!("..{}", turn + 1);
            mounted::swap(self.gateway.folder.path(), &version, identities());
        })
        .await;
    }

    async fn meshes(&self, start: Instant) {
        every(start, MESHES, async |turn| {
            let version = u8::try_from(turn + 1).expect("a version");
            let mesh = mesh(self.net, version).mesh;
            replace(&self.gateway.file("mesh.yaml"), &mesh);
        })
        .await;
    }

    async fn configs(&self, start: Instant) {
        let file = self.gateway.file("strait.yaml");
        let first = std::fs::read_to_string(&file).expect("a file");
        every(start, CONFIGS, async |turn| {
            let next = first.replace(&exposure(0), &exposure(turn + 1));
            assert_eq!(next == first, turn % 2 == 1);
            replace(&file, &next);
        })
        .await;
    }

    /// Returns the number of reloads of this kind.
    async fn reloads(&self, what: &str, result: &str) -> f64 {
        let name = format!("strait_reload_total{{what=\"{what}\",result=\"{result}\"}}");
        self.gateway.metric(&name).await
    }
}

/// A mesh whose service has one endpoint, another one in each version.
fn mesh(net: Net, version: u8) -> Settings<'static> {
    Settings::new(net, identities()).endpoints(&[(FIRST_HOST + version, 1, "TCP")])
}

/// Two exposed services, in an order that changes with each turn.
fn exposure(turn: u32) -> String {
    let mut entries = [ECHO, "secret.app.svc.cluster.local:80"]
        .map(|service| format!("    - {{service: \"{service}\", to: [{{cluster: west}}]}}\n"));
    if turn % 2 == 1 {
        entries.reverse();
    }
    entries.concat()
}

/// Takes a step at each multiple of `period`, for a minute. Late steps are caught up.
async fn every(start: Instant, period: Duration, mut step: impl AsyncFnMut(u32)) {
    let mut turn = 0;
    while period * turn < MINUTE {
        // deadline: the rate of changes is what is tested.
        sleep_until(start + period * turn).await;
        step(turn).await;
        turn += 1;
    }
}

#[test]
#[expect(clippy::print_stdout, reason = "figures are for people to see")]
fn a_minute_of_changes_fails_no_tunnel() {
    run(async {
        let scene = Scene::start().await;
        let mut long = scene.long_tunnels().await;
        let start = Instant::now();
        let (new, ..) = tokio::join!(
            scene.new_tunnels(start),
            scene.certificates(start),
            scene.meshes(start),
            scene.configs(start),
        );
        let rate = new.len() as f64 / start.elapsed().as_secs_f64();
        let ended = long.try_join_next();
        assert!(ended.is_none(), "a long tunnel has ended: {ended:?}");
        let mut tunnels = long.join_all().await;
        tunnels.extend(new);

        let (mut bytes, mut versions) = (0, BTreeSet::new());
        for &(plan, side) in &tunnels {
            scene.oracle.whole(plan, side).await;
            versions.insert(scene.oracle.ended(plan.id).await.0);
            bytes += plan.up + plan.down;
        }
        scene.gateway.wait_until_open(0, 0).await;
        let completed = ("completed".to_owned(), tunnels.len() as f64);
        assert_eq!(scene.gateway.tunnels_by_reason().await, [completed].into());

        let serials = scene.serials.seen.lock().expect("a lock").len();
        let mut reloads = String::new();
        for what in ["certificates", "mesh", "config"] {
            let (good, bad) = (scene.reloads(what, "ok").await, scene.reloads(what, "error").await);
            reloads += &format!(", {what} {good} ({bad} refused)");
        }
        println!(
            "{} tunnels, {rate:.1} new ones a second, {bytes} bytes; seen: {serials} serials, \
             {} mesh versions; reloads{reloads}",
            tunnels.len(),
            versions.len()
        );
        assert!(rate >= 20.0, "{rate} new tunnels a second");
        assert!(serials >= 50, "{serials} serials");
        assert!(versions.len() >= 90, "{} mesh versions", versions.len());
    });
}
