//! Real gateway, and the control plane that programs it, on a separate thread.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use strait::grpc::discovery::{DeltaDiscoveryResponse, Resource};
use strait::grpc::workload::address;
use strait::xds::store::{ADDRESS, CLUSTER};
use tokio::sync::oneshot;

use crate::mesh::{self, Mesh};
use crate::support::istiod::{Istiod, NAME, TOKEN};
use crate::support::{Gateway, Net, Settings, identities};

/// Hosts of the control plane and of the one endpoint that answers.
const ISTIOD: u8 = 2;
const ENDPOINT: u8 = 11;
/// Service that is exposed.
const HOSTNAME: &str = "echo.app.svc.cluster.local";

/// Number of changes after which the whole set of clusters is sent again. istiod does so with each
/// push, and combines the changes of up to ten seconds into one push.
const CLUSTERS_EVERY: usize = 250;

/// Control plane that serves until it is dropped.
pub struct Control {
    pub istiod: Istiod,
    pub address: SocketAddr,
    pub changes: Changes,
    _stop: oneshot::Sender<()>,
}

/// Sequence of changes of a mesh.
#[derive(Clone)]
pub struct Changes {
    istiod: Istiod,
    mesh: Mesh,
    clusters: DeltaDiscoveryResponse,
    next: Arc<AtomicUsize>,
}

impl Changes {
    fn new(istiod: Istiod, mesh: Mesh) -> Self {
        // istiod sends no version of clusters.
        let clusters = response(CLUSTER, "", mesh.clusters());
        Self { istiod, mesh, clusters, next: Arc::default() }
    }

    /// Makes the next change.
    pub fn make(&self) {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        if index % CLUSTERS_EVERY == CLUSTERS_EVERY - 1 && !self.clusters.resources.is_empty() {
            self.istiod.push_unstored(&self.clusters);
        }
        let change = self.mesh.change(index);
        let mut push = response(ADDRESS, &format!("change-{index}"), vec![change.put]);
        push.removed_resources.extend(change.removed);
        self.istiod.push_unstored(&push);
    }
}

fn response(
    type_url: &str,
    version: &str,
    resources: Vec<mesh::Resource>,
) -> DeltaDiscoveryResponse {
    let resources = resources.into_iter().map(|(name, value)| Resource {
        name,
        version: version.to_owned(),
        resource: Some(prost_types::Any { type_url: type_url.to_owned(), value }),
        ..Resource::default()
    });
    DeltaDiscoveryResponse {
        type_url: type_url.to_owned(),
        nonce: "a change".to_owned(),
        resources: resources.collect(),
        ..DeltaDiscoveryResponse::default()
    }
}

fn put_all(istiod: &Istiod, type_url: &str, resources: &[mesh::Resource]) {
    let resources = resources.iter().map(|(name, body)| (&**name, body.clone()));
    istiod.put_all(type_url, &resources.collect::<Vec<_>>());
}

impl Control {
    /// Serves a mesh, with one additional service whose endpoint is in `net`.
    pub fn start(net: Net, mesh: Mesh) -> Self {
        let istiod = Istiod::default();
        let mut resources = mesh.resources();
        let service = format!("app/{HOSTNAME}");
        let mut echo = mesh::service("echo", HOSTNAME);
        echo.addresses = vec![mesh::vip("east", vec![240, 0, 0, 1])];
        let echo = mesh::encoded(address::Type::Service(echo));
        resources.push((service.clone(), echo));
        let std::net::IpAddr::V4(ip) = net.ip(ENDPOINT) else {
            panic!("an IPv4 address");
        };
        let uid = "east//Pod/app/echo".to_owned();
        let mut workload = mesh::workload(uid.clone(), &service);
        workload.addresses = vec![ip.octets().to_vec().into()];
        resources.push((uid, mesh::encoded(address::Type::Workload(workload))));
        put_all(&istiod, ADDRESS, &resources);
        let clusters = mesh.clusters();
        if !clusters.is_empty() {
            put_all(&istiod, CLUSTER, &clusters);
        }
        let address = net.address(ISTIOD, 15012);
        let (stop, stopped) = oneshot::channel();
        let (ready, is_ready) = mpsc::channel();
        let serving = istiod.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let _serving = serving.serve(address, identities()).await;
                ready.send(()).expect("somebody who waits");
                // The wait ends when the sender is dropped.
                let _ = stopped.await;
            });
        });
        is_ready.recv().expect("a control plane");
        Self { changes: Changes::new(istiod.clone(), mesh), istiod, address, _stop: stop }
    }
}

/// Time and memory of a gateway with a mesh.
#[derive(Clone, Copy, Debug)]
pub struct StartCost {
    /// Time from the control plane's first message.
    pub serving: Duration,
    pub bytes: u64,
}

/// Gateway with a control plane that sends a mesh.
pub struct Running {
    pub gateway: Gateway,
    pub control: Control,
    pub net: Net,
}

impl Running {
    /// Starts both, and waits until the gateway is ready. Returns that time.
    pub async fn start(mesh: Mesh, with_cache: bool) -> (Self, Duration) {
        let net = Net::new();
        let control = Control::start(net, mesh);
        let settings = Settings::new(net, identities());
        let gateway = Gateway::spawn(&settings, |folder| {
            std::fs::write(folder.join("token"), TOKEN).expect("a token");
            let cache = if with_cache { ", cache: state" } else { "" };
            let address = control.address;
            let discovery = format!(
                "{{kind: istio, address: \"{address}\", roots: root.crt, token: token, \
                 san: {NAME}{cache}}}"
            );
            let file = folder.join("strait.yaml");
            let text = std::fs::read_to_string(&file).expect("a configuration");
            let text = text.replace("{kind: file, path: mesh.yaml}", &discovery);
            std::fs::write(file, text).expect("a configuration");
        });
        while control.istiod.sent() == 0 {
            tokio::task::yield_now().await;
        }
        let took = ready(&gateway).await;
        let running = Self { gateway, control, net };
        (running, took)
    }

    /// Kills the gateway and the control plane, and restarts the gateway with only its cache.
    /// Returns the time from the start of the process until it is ready.
    pub async fn restarted(self) -> Duration {
        let Self { mut gateway, .. } = self;
        drop(self.control);
        // A process that still runs would answer instead of the new one.
        gateway.signal(rustix::process::Signal::KILL);
        gateway.exited().await;
        let Gateway { folder, .. } = gateway;
        assert!(folder.path().join("state").exists(), "a cache");
        let settings = Settings::new(self.net, identities());
        let began = Instant::now();
        let gateway = Gateway::spawn_in(folder, &settings, |command| {
            command.args(["run", "-c", "strait.yaml"]);
        });
        ready(&gateway).await;
        began.elapsed()
    }

    /// Returns the address of the one endpoint.
    pub fn endpoint(&self) -> SocketAddr {
        self.net.address(ENDPOINT, 15008)
    }

    /// Returns the memory after the first state was processed, while changes continue.
    pub async fn memory(&self, settle: Duration) -> u64 {
        let ends = Instant::now() + settle;
        while Instant::now() <= ends {
            self.control.changes.make();
            // deadline: changes come at this pace, and jemalloc returns memory over time.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.gateway.private_dirty()
    }
}

/// Waits until a gateway is ready. Returns that time.
async fn ready(gateway: &Gateway) -> Duration {
    let began = Instant::now();
    while gateway.readiness().await.0 != 200 {
        assert!(began.elapsed() < Duration::from_secs(60), "{}", gateway.log());
        // deadline: another process can only be polled, and has work to do.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    began.elapsed()
}
