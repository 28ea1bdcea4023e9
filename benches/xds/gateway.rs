//! A real gateway that a control plane programs, and the control plane, on a thread of its own.

use std::net::SocketAddr;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use strait::grpc::workload::address;
use strait::xds::store::ADDRESS;
use tokio::sync::oneshot;

use crate::mesh::{self, Mesh};
use crate::support::istiod::{Istiod, NAME, TOKEN};
use crate::support::{Gateway, Net, Settings, identities};

/// The host of a control plane, and of the one endpoint that answers.
const ISTIOD: u8 = 2;
const ENDPOINT: u8 = 11;
/// The service that is exposed.
const HOSTNAME: &str = "echo.app.svc.cluster.local";

/// A control plane that serves until it is dropped.
pub struct Control {
    pub istiod: Istiod,
    pub address: SocketAddr,
    _stop: oneshot::Sender<()>,
}

impl Control {
    /// Serves a mesh, to which one service is added whose endpoint is in `net`.
    pub fn start(net: Net, mesh: Mesh) -> Self {
        let istiod = Istiod::default();
        let mut resources = mesh.resources();
        resources.push(mesh::named("echo", HOSTNAME, vec![240, 0, 0, 1]));
        let std::net::IpAddr::V4(ip) = net.ip(ENDPOINT) else {
            panic!("an IPv4 address");
        };
        let service = format!("app/{HOSTNAME}");
        let workload = mesh::workload(usize::MAX, &service, ip.octets().into());
        let uid = workload.uid.clone();
        resources.push((uid, mesh::encoded(address::Type::Workload(workload))));
        let resources = resources.iter().map(|(name, body)| (&**name, body.clone()));
        istiod.put_all(ADDRESS, &resources.collect::<Vec<_>>());
        let address = net.address(ISTIOD, 15012);
        let (stop, stopped) = oneshot::channel();
        let (ready, is_ready) = mpsc::channel();
        let serving = istiod.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            runtime.expect("a runtime").block_on(async {
                let _serving = serving.serve(address, identities()).await;
                ready.send(()).expect("somebody who waits");
                // It ends when its sender is dropped.
                let _ = stopped.await;
            });
        });
        is_ready.recv().expect("a control plane");
        Self {
            istiod,
            address,
            _stop: stop,
        }
    }
}

/// What a gateway with a mesh took.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// From the moment in which the control plane had its first message on the way.
    pub serving: Duration,
    pub bytes: u64,
}

/// A gateway that is told a mesh.
pub struct Running {
    pub gateway: Gateway,
    pub control: Control,
    pub net: Net,
}

impl Running {
    /// Starts both, and waits until the gateway is ready. Returns how long that took.
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
        let running = Self {
            gateway,
            control,
            net,
        };
        (running, took)
    }

    /// Kills the gateway and the control plane, and starts the gateway again, with its cache alone.
    /// Returns the time from the start of the process until it is ready.
    pub async fn restarted(self) -> Duration {
        let Self { mut gateway, .. } = self;
        drop(self.control);
        // Until it is gone it would answer in the place of the next one.
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

    /// Where the one endpoint listens.
    pub fn endpoint(&self) -> SocketAddr {
        self.net.address(ENDPOINT, 15008)
    }

    /// Memory once the first state has been worked off: changes go on meanwhile, as they do.
    pub async fn memory(&self, mesh: Mesh, settle: Duration) -> u64 {
        let ends = Instant::now() + settle;
        for index in 0.. {
            if Instant::now() > ends {
                break;
            }
            let (name, body) = mesh.workload(index % mesh.workloads, 2);
            self.control.istiod.put_all(ADDRESS, &[(&name, body)]);
            // deadline: changes come at this pace, and jemalloc gives back with time.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.gateway.private_dirty()
    }
}

/// Waits until a gateway is ready. Returns how long that took.
async fn ready(gateway: &Gateway) -> Duration {
    let began = Instant::now();
    while gateway.readiness().await.0 != 200 {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "{}",
            gateway.log()
        );
        // deadline: another process can only be asked again and again, and has work to do.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    began.elapsed()
}
