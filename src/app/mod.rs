//! Wiring of the process: the order in which its parts start and stop.
//!
//! The control path (signals, certificates) runs on the main thread's runtime. Files, readiness,
//! metrics, the admin pages, discovery, DNS and each data-path worker have dedicated threads and
//! runtimes. No reload and no scrape can therefore delay a byte or a probe.

mod certificates;
mod check;
mod compare;
mod drains;
mod explain;
mod hand_over;
mod inputs;
mod listeners;
mod memory;
mod names;
mod reload;
mod routes;
mod server;
mod signals;
mod state;
mod supervise;
mod thread;
mod traces;
mod traffic;
mod transit;
mod trust;

use std::net::SocketAddr;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use arc_swap::ArcSwap;
use sd_notify::NotifyState;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::admin::{self, Limits};
use crate::config::pod::Pod;
use crate::config::{Config, Discovery, EnvoySource, Source};
use crate::datapath::DataPath;
use crate::datapath::dial::DenyList;
use crate::datapath::limits::admission::Admission;
use crate::datapath::limits::aging::Aging;
#[cfg(feature = "kubernetes")]
use crate::lifecycle::Phase;
use crate::lifecycle::{Lifecycle, StopSignals};
use crate::limits::turns::{ClusterSettings, WorkerTime};
use crate::outer::run_probes;
use crate::snapshot::Publisher;
use crate::status::{ProbeResult, Status};
use crate::telemetry::{LogHandle, Metrics, logging};
use crate::tls::{self, InboundTls};
use crate::xds::cache::Cache;
use crate::xds::dns::{self, Dns};
use crate::xds::live::LiveSource;
#[cfg(feature = "kubernetes")]
use crate::xds::live::client;
use crate::xds::stream::{self, ControlPlaneKind, Feed};

use certificates::CERTIFICATES;
use hand_over::HandOver;
use listeners::{LISTENERS, Listeners};
use reload::{Reloader, Triggers};
use server::{Sockets, bind};
use signals::ReloadSignal;
use state::{App, DISCOVERY, OBJECTS};
use supervise::{spawn_task, spawn_thread};
use thread::runtime;

pub use certificates::request_certificate;
pub use check::{check, check_without_keys};
pub use explain::{offline, publish};
pub use inputs::{Inputs, Report, control_planes};
pub use memory::Memory;

/// Interval at which a successor looks at its own readiness.
const READINESS_POLL: Duration = Duration::from_millis(50);

/// Runs the gateway until it has been asked to stop and has drained. The notice, if any, is the
/// first line of the log. With `take_over` it replaces the process that waits on this path, and
/// waits there for the one that replaces it.
///
/// # Errors
/// A file has mistakes, an address cannot be bound, the process that serves does not hand over, or
/// the system lacks threads or descriptors.
pub fn run(
    source: &Source,
    notice: Option<String>,
    take_over: Option<&Path>,
) -> anyhow::Result<()> {
    let control = runtime()?;
    let signal = control.block_on(async { ReloadSignal::new() });
    let signal = signal.context("cannot watch for signals")?;
    let mut seen = reload::fingerprints(&reload::with_contents(&[source.path().to_owned()]));
    let examined = source.examine();
    let Some(config) = examined.config.clone() else {
        return Inputs::load(source, examined).map(|_| ());
    };
    seen.extend(reload::fingerprints(&reload::named_files(&examined)));
    let log = logging::init(&config.log)?;
    if let Some(notice) = notice {
        info!("{notice}");
    }
    control.spawn_blocking(tls::gather_entropy);
    let done = control.block_on(async {
        // First, because a process with the id 1 ignores signals without a handler.
        let mut signals = StopSignals::new().context("cannot watch for signals")?;
        let hand_over = Arc::new(HandOver::begin(take_over)?);
        let front = ReadinessServer::open(&config, &hand_over)?;
        let from = source.clone();
        let loading = tokio::task::spawn_blocking(move || Inputs::load(&from, examined));
        let inputs = tokio::select! {
            name = signals.next() => {
                info!(signal = name, "stopped during startup");
                return Ok(());
            }
            inputs = loading => inputs??,
        };
        let triggers = Triggers { seen, signal };
        let front = (front, Arc::clone(&hand_over));
        let (app, certificate) = App::start(source, inputs, triggers, front, log.clone())?;
        app.run_until_stopped(signals, certificate, &hand_over).await
    });
    // Queued lines are written before the process ends; files that are still loading are not
    // awaited.
    log.close();
    control.shutdown_background();
    done
}

/// Readiness server, which starts before anything is loaded and reports the missing parts. That of
/// a successor starts when it replaces its predecessor.
struct ReadinessServer {
    status: Arc<Status>,
    lifecycle: Lifecycle,
    address: SocketAddr,
}

impl ReadinessServer {
    fn open(config: &Config, hand_over: &HandOver) -> anyhow::Result<Self> {
        let mut pending = vec![CERTIFICATES, DISCOVERY, LISTENERS];
        pending.extend(config.exposure.kubernetes.as_ref().map(|_| OBJECTS));
        let status = Arc::new(Status::new(&pending));
        let lifecycle = Lifecycle::default();
        let socket = bind("readiness.bind", config.readiness.bind, &hand_over.sockets)?;
        let address = socket.local_addr()?;
        let router = admin::readiness_router(Arc::clone(&status), lifecycle.clone());
        // On a dedicated thread, so that nothing delays a probe.
        let times = (&hand_over.ports, &lifecycle, &status);
        server::spawn("strait-readiness", socket, router, Limits::PROBES, times)?;
        Ok(Self { status, lifecycle, address })
    }
}

impl App {
    /// Starts everything except the data path: first state, then sockets, then their servers. The
    /// data path waits for the certificate that the receiver announces.
    fn start(
        source: &Source,
        inputs: Inputs,
        triggers: Triggers,
        (front, hand_over): (ReadinessServer, Arc<HandOver>),
        log: LogHandle,
    ) -> anyhow::Result<(Self, oneshot::Receiver<()>)> {
        let config = Arc::new(inputs.config.clone());
        let metrics = Arc::new(Metrics::new());
        if let Some(drops) = log.drops() {
            metrics.count_log_drops(drops);
        }
        traces::start(&metrics)?;
        let publisher = Arc::new(Publisher::default());
        let sockets = Sockets::bind(&config, &hand_over.sockets)?;
        let others: Vec<_> = sockets.addresses().chain([front.address]).collect();
        let configured = config.limits.buffers;
        let memory = Memory::measure(Path::new("/"));
        let mut data_path = DataPath::new(
            publisher.reader(),
            InboundTls::new(tls::rejecting_server_config()?),
            Arc::clone(&metrics),
            front.lifecycle,
            Admission::new(raise_descriptor_limit()),
            configured.unwrap_or_else(|| memory.buffers()),
            DenyList::new(config.dial.allow.clone(), others.to_vec()),
        );
        let limits = &config.limits;
        data_path.aging = Aging::new(limits.connection_age, limits.worker_load).map(Arc::new);
        let clusters = limits.clusters.iter().map(|one| {
            (one.name.clone(), ClusterSettings { weight: one.weight, bytes: one.bytes })
        });
        data_path.turns = Arc::new(WorkerTime::new(clusters.collect()));
        let data_path = Arc::new(data_path);
        let from = Arc::clone(&hand_over.sockets);
        let listeners =
            Listeners::new((&data_path, &front.status), others, config.drain.deadline, from);
        memory::adapt(&data_path, memory, configured);
        let live = config.kubernetes().map(|api| {
            let Pod { cluster, network, .. } = source.who(&config);
            let cache = api.cache.clone().map(|file| Cache { file, cluster, network });
            Arc::new(LiveSource::new(api).with_cache(cache))
        });
        let app = Self {
            config: Arc::new(ArcSwap::new(config)),
            live,
            data_path,
            status: front.status,
            publisher,
            listeners: Arc::new(listeners),
            reconnected: Arc::default(),
        };
        drains::restore(&app);
        let (first, certificate) = oneshot::channel();
        let certificates = certificates::start(&app, source, first);
        let reloader =
            Reloader::start(source.clone(), &app, inputs, triggers, certificates, log.clone())?;
        sockets.serve(&app, &log, &hand_over.ports)?;
        let budget = Arc::clone(&app.data_path.budget);
        let own = (&Handle::current(), &app.status);
        spawn_task(own, "buffer budget", async move { budget.run().await });
        spawn_task(own, "metrics", async move { metrics.run().await });
        spawn_task(own, "memory", memory::watch(Arc::clone(&app.data_path), configured));
        app.start_probes();
        app.start_watches()?;
        app.start_discovery(source)?;
        app.start_dns()?;
        spawn_thread(&app.status, "strait-files", reloader.run())?;
        Ok((app, certificate))
    }

    /// Starts probes of gateways of other networks, by the current configuration.
    fn start_probes(&self) {
        let (pool, metrics) = (self.data_path.outer.clone(), Arc::clone(&self.data_path.metrics));
        let config = Arc::clone(&self.config);
        let settings = move || {
            let dial = &config.load().dial;
            Some((dial.probe_interval?, dial.probe_authority.as_ref().map(ToString::to_string)))
        };
        let count = move |result: ProbeResult| metrics.gateway_probes.inc(result.label());
        let own = (&Handle::current(), &self.status);
        spawn_task(own, "gateway probes", run_probes(pool, settings, count));
    }

    /// Starts discovery, if the mesh comes from a control plane. It has a dedicated thread:
    /// processing 100,000 workloads must not delay signals, readiness and the budget.
    fn start_discovery(&self, source: &Source) -> anyhow::Result<()> {
        let config = self.config.load();
        let (xds, kind) = match &config.discovery {
            Discovery::File(_) => {
                self.status.clear_pending(DISCOVERY);
                return Ok(());
            }
            // The reloader applies its objects.
            Discovery::Kubernetes(_) => return Ok(()),
            Discovery::Istio(xds) => (xds, ControlPlaneKind::Istio),
            Discovery::Envoy(EnvoySource { xds, node, clusters, .. }) => {
                let kind = ControlPlaneKind::Envoy {
                    node: node.clone(),
                    locality: config.gateway.locality.clone(),
                    clusters: clusters.clone(),
                };
                (xds, kind)
            }
        };
        let discovery = stream::run(Feed {
            plane: xds.plane.clone(),
            kind,
            cache: xds.cache.clone(),
            hold: xds.hold,
            pod: source.who(&config),
            publisher: Arc::clone(&self.publisher),
            status: Arc::clone(&self.status),
            metrics: Arc::clone(&self.data_path.metrics),
            pending: DISCOVERY,
            connected: Arc::clone(&self.reconnected),
        });
        let live = self.live.clone();
        let after_objects = async move {
            // Objects restrict what a control plane exports.
            if let Some(live) = live {
                live.applied().await;
            }
            discovery.await;
        };
        spawn_thread(&self.status, "strait-discovery", after_objects).map(drop)
    }

    /// Starts the watches of an API server, if there are any.
    #[cfg(feature = "kubernetes")]
    fn start_watches(&self) -> anyhow::Result<()> {
        let config = self.config.load();
        let Some((api, live)) = config.kubernetes().zip(self.live.clone()) else {
            return Ok(());
        };
        let lifecycle = self.data_path.lifecycle.clone();
        let may_write = move || lifecycle.phase() == Phase::Running;
        let kubeconfig = api.kubeconfig.clone();
        let reported = (Arc::clone(&self.status), Arc::clone(&self.data_path.metrics));
        let watches = async move {
            let saved = live.restore();
            tokio::spawn(Arc::clone(&live).write(saved, reported));
            client::run(kubeconfig, live, may_write).await;
        };
        spawn_thread(&self.status, "strait-kubernetes", watches).map(drop)
    }

    /// A configuration that needs watches was rejected.
    #[cfg(not(feature = "kubernetes"))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "as with the feature")]
    fn start_watches(&self) -> anyhow::Result<()> {
        Ok(())
    }

    /// Starts lookups of the hostnames in the mesh, whatever its source.
    fn start_dns(&self) -> anyhow::Result<()> {
        let names = dns::run(Dns {
            publisher: Arc::clone(&self.publisher),
            status: Arc::clone(&self.status),
            servers: self.config.load().dns.servers.clone(),
        });
        spawn_thread(&self.status, "strait-dns", names).map(drop)
    }

    /// Opens the data path, waits for a signal or `/quitquitquit`, and completes the drain.
    async fn run_until_stopped(
        self,
        mut signals: StopSignals,
        certificate: oneshot::Receiver<()>,
        hand_over: &Arc<HandOver>,
    ) -> anyhow::Result<()> {
        let lifecycle = self.data_path.lifecycle.clone();
        let on_signal = lifecycle.clone();
        tokio::spawn(async move {
            loop {
                let name = signals.next().await;
                info!(signal = name, phase = ?on_signal.phase(), "stopping");
                hand_over::notify(&[NotifyState::Stopping]);
                on_signal.stop();
            }
        });
        let drain = self.config.load().drain.clone();
        let mut stopped = pin!(lifecycle.run(drain.lag, drain.deadline));
        let left = tokio::select! {
            biased;
            opened = self.open_data_path(certificate, hand_over) => {
                opened?;
                stopped.await
            }
            left = &mut stopped => left,
        };
        self.data_path.metrics.close();
        traces::flush(&self.data_path.metrics).await;
        info!(left, "stopped");
        Ok(())
    }

    /// Accepts connections once there is a certificate, or, beside a predecessor, once everything
    /// else is ready.
    async fn open_data_path(
        &self,
        certificate: oneshot::Receiver<()>,
        hand_over: &Arc<HandOver>,
    ) -> anyhow::Result<()> {
        certificate.await?;
        if hand_over.has_predecessor() {
            let ready = timeout(hand_over::START_DEADLINE, self.wait_until_only_listeners_lack());
            ready.await.with_context(|| format!("not ready: {:?}", self.status.list_pending()))?;
            hand_over.ask()?;
        }
        let config = self.config.load();
        self.listeners.open(config.workers)?;
        self.status.clear_pending(LISTENERS);
        hand_over.complete(self)?;
        let listeners = config.all_listeners();
        let binds = listeners.iter().map(|listener| listener.bind.to_string());
        let metrics = config.metrics.bind.iter().map(ToString::to_string);
        let snapshot = self.data_path.reader.load();
        info!(
            listeners = binds.collect::<Vec<_>>().join(","),
            metrics = metrics.collect::<Vec<_>>().join(","), readiness = %config.readiness.bind,
            admin = %config.admin.bind, identity = config.identity.kind(),
            cluster = config.gateway.cluster,
            services = snapshot.mesh.services.len(), workloads = snapshot.mesh.workloads.len(),
            version = snapshot.version, "ready"
        );
        Ok(())
    }
}

impl App {
    /// Waits until only the listeners are missing for readiness.
    async fn wait_until_only_listeners_lack(&self) {
        while self.status.list_pending() != [LISTENERS] {
            sleep(READINESS_POLL).await;
        }
    }
}

/// Raises the soft limit of open files to the hard limit, because a tunnel needs two sockets.
/// Returns the limit in effect.
pub fn raise_descriptor_limit() -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let current_max = Rlimit { current: maximum, maximum };
    match setrlimit(Resource::Nofile, current_max) {
        Ok(()) => maximum.unwrap_or(u64::MAX),
        Err(error) => {
            warn!(%error, ?current, ?maximum, "cannot raise the limit of open files");
            current.unwrap_or(u64::MAX)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::pod::{Environment, Flags};
    use crate::config::{DefaultExposure, Log};
    use crate::tools::dev::Authority;

    #[tokio::test]
    async fn the_file_over_a_pod_may_go_and_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let authority = Authority::new().unwrap();
        let issuer = authority.intermediate("east").unwrap();
        let leaf = issuer.leaf("spiffe://cluster.local/ns/a/sa/b").unwrap();
        std::fs::create_dir_all(at("etc/certs")).unwrap();
        let root = authority.root_pem();
        for (file, text) in [
            ("etc/certs/cert-chain.pem", &*leaf.chain_pem),
            ("etc/certs/key.pem", &leaf.key_pem),
            ("etc/certs/root-cert.pem", &root),
            ("mesh.yaml", "services: []\nworkloads: []\n"),
        ] {
            std::fs::write(at(file), text).unwrap();
        }
        let usual = at("strait.yaml");
        let bind = "{bind: '127.0.0.1:0'}";
        let text = format!(
            "exposure: {{default: all}}\nadmin: {bind}\nmetrics: {bind}\nreadiness: {bind}\n\
             listeners: [{{name: cross-network, bind: '127.0.0.1:0'}}]\n"
        );
        std::fs::write(&usual, &text).unwrap();
        let mesh = at("mesh.yaml").to_string_lossy().into_owned();
        let environment = Environment::new([("LOCAL_XDS_PATH".into(), mesh)], folder.path());
        let source = Source::pod(environment, &Flags::default(), None, &usual);
        let seen = reload::fingerprints([&usual]);
        let examined = source.examine();
        let hand_over = Arc::new(HandOver::begin(None).unwrap());
        let front = ReadinessServer::open(examined.config.as_ref().unwrap(), &hand_over).unwrap();
        let inputs = Inputs::load(&source, examined).unwrap();
        let built = logging::build(&Log::default(), std::io::sink, false, None);
        let (_subscriber, log) = built.unwrap();
        let signal = ReloadSignal::new().unwrap();
        let triggers = Triggers { seen, signal };
        let (app, _data) = App::start(&source, inputs, triggers, (front, hand_over), log).unwrap();
        for want in [DefaultExposure::None, DefaultExposure::All, DefaultExposure::None] {
            match want {
                DefaultExposure::All => std::fs::write(&usual, &text).unwrap(),
                DefaultExposure::None => std::fs::remove_file(&usual).unwrap(),
            }
            let applied = async {
                while app.config.load().exposure.default != want {
                    // deadline: the state of a thread can only be polled.
                    sleep(Duration::from_millis(10)).await;
                }
            };
            let applied = timeout(Duration::from_secs(10), applied).await;
            applied.unwrap_or_else(|_| panic!("{want:?}: {:?}", app.status.reloads()));
        }
    }
}
