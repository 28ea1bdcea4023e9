//! Two gateways, their endpoints, and what is compared between the start and the end.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use crate::istio::spawn_with;
use crate::support::clock::Clock;
use crate::support::istiod::NAME;
use crate::support::link::{Cut, Faults as LinkFaults, FaultyRelay};
use crate::support::oracle::{End, Oracle, SideResult, is_consistent};
use crate::support::{ECHO, Endpoint, Gateway, Net, Settings, identities, mounted, replace, until};
use crate::transit;

use super::control_plane::ControlPlane;
use super::faults::{Fault, Faults};
use super::load::Ended;
use super::wan::{Impairment, Wan};

/// Ages of the peers' connections at both gateways: they end in turn, and no tunnel may notice.
const AGES: &str = "limits: {connection_age: 3s}\n";

/// Service whose only endpoint is behind the gateway of the other network.
pub const REMOTE: &str = "secret.app.svc.cluster.local:80";
/// Gauges that are those of the start once all tunnels have ended.
const GAUGES: [&str; 6] = [
    "strait_buffered_bytes",
    "strait_connections_open",
    "strait_remote_gateway_tunnels",
    "strait_share_used",
    "strait_tunnels_open",
    "strait_xds_held_removals",
];

pub struct World {
    pub east: Gateway,
    pub west: Gateway,
    /// Link to the gateway that cuts some of its connections.
    pub link: SocketAddr,
    settings: Settings<'static>,
    west_settings: Settings<'static>,
    control_plane: ControlPlane,
    wan: Wan,
    /// Clock of the first gateway, if the machine can set one.
    clock: Option<Clock>,
    /// Replaced processes whose tunnels have not ended yet.
    drained: Vec<Gateway>,
    oracle: Oracle,
    /// Two endpoints of [`ECHO`] and that of [`REMOTE`].
    endpoints: Vec<Option<Endpoint>>,
    places: [SocketAddr; 3],
    /// Number of versions of the certificate so far.
    certificates: usize,
    _link: FaultyRelay,
    _socket: TempDir,
}

/// Values that have to be the same at the start and at the end.
pub struct Measured(BTreeMap<String, f64>);

impl World {
    pub async fn start(seed: u64) -> Self {
        let (net, west_net, link_net) = (Net::new(), Net::new(), Net::new());
        let socket = tempfile::tempdir().expect("a folder");
        let clock = Clock::new("clocks that are set in the soak");
        let mut settings = east_settings(net, link_net, socket.path());
        settings.inside = clock.as_ref().map_or_else(Vec::new, Clock::enter);
        let mut west_settings = transit::west(west_net, &[(11, 1, "TCP")]);
        west_settings.exposure = west_settings.exposure.replace(ECHO, REMOTE);
        west_settings.more += AGES;
        let west = transit::start_west(&west_settings).await;
        let wan = Wan::start(link_net, west.address, seed).await;
        let control_plane = ControlPlane::start(net).await;
        let mut east = spawn_east(&settings);
        east.ready().await;
        let link = FaultyRelay::new(net.listen(2, 0).await, east.address, cut);
        let oracle = Oracle::new();
        let places = [net.address(11, 15008), net.address(12, 15008), west_net.address(11, 9000)];
        let mut world = Self {
            east,
            west,
            link: link.address,
            settings,
            west_settings,
            control_plane,
            wan,
            clock,
            drained: Vec::new(),
            oracle,
            endpoints: vec![None, None, None],
            places,
            certificates: 0,
            _link: link,
            _socket: socket,
        };
        for place in 0..places.len() {
            world.open(place).await;
        }
        world
    }

    /// Opens an endpoint. Its connections are reset when it is dropped.
    async fn open(&mut self, place: usize) {
        let listen = async || tokio::net::TcpListener::bind(self.places[place]).await;
        // The runtime closes the listener before it only when the task has run once more.
        let listener = until("a listener", listen, Result::is_ok).await.expect("a listener");
        let oracle = self.oracle.clone();
        let endpoint = Endpoint::new(listener, move |stream| {
            let oracle = oracle.clone();
            async move {
                let socket = socket2::SockRef::from(&stream).try_clone().expect("a descriptor");
                socket.set_linger(Some(Duration::ZERO)).expect("an open connection");
                oracle.answer(stream).await;
                // A connection that has broken needs no linger.
                let _ = socket.set_linger(None);
            }
        });
        self.endpoints[place] = Some(endpoint);
    }

    /// Returns whether this machine can cause a fault.
    pub fn is_possible(&self, fault: Fault) -> bool {
        self.clock.is_some() || !matches!(fault, Fault::Clock(_))
    }

    /// Causes a fault. Returns once it is over.
    pub async fn apply(&mut self, fault: Fault, pause: Duration) {
        match fault {
            Fault::Mesh => {
                self.control_plane.change();
                change(&self.west.file("mesh.yaml"), "capacity: 1,", "capacity: 2,");
            }
            Fault::MeshFileGone => move_for(&self.west.file("mesh.yaml"), pause).await,
            Fault::ControlPlaneCut => self.control_plane.cut(),
            Fault::ControlPlaneGone => self.control_plane.leave_for(pause).await,
            Fault::ControlPlaneEmpty => {
                self.control_plane.lose_mesh_for(pause, &self.east).await;
            }
            Fault::Config => {
                let file = self.east.file("strait.yaml");
                change(&file, "default: none\n", "default: none\n\n");
            }
            Fault::Certificate => {
                self.certificates += 1;
                let version = format!("..{}", self.certificates);
                mounted::swap(self.east.folder.path(), &version, identities());
            }
            Fault::Hangup => self.east.signal(Signal::HUP),
            Fault::TakeOver => self.take_over().await,
            Fault::FailedTakeOver => {
                let mut bad = Gateway::spawn(&self.settings, |folder| {
                    std::fs::write(folder.join("mesh.yaml"), "services: 1\n").expect("a file");
                });
                assert!(!bad.exited().await.success(), "an invalid mesh was accepted");
            }
            Fault::Pause => stop_for(&self.east, pause).await,
            Fault::PauseWest => stop_for(&self.west, pause).await,
            Fault::Clock(offset) => {
                let clock = self.clock.as_ref().expect("a clock");
                clock.set(offset);
                // deadline: the length of a fault.
                sleep(pause).await;
                clock.set("+0");
            }
            Fault::LossyLink => self.wan.impair_for(pause, Impairment::Loss).await,
            Fault::LinkResets => self.wan.impair_for(pause, Impairment::Resets).await,
            Fault::EndpointReset(place) => {
                self.endpoints[place] = None;
                self.open(place).await;
            }
            Fault::EndpointGone(place) => {
                self.endpoints[place] = None;
                // deadline: the length of a fault.
                sleep(pause).await;
                self.open(place).await;
            }
            Fault::WestKilled => {
                self.west.signal(Signal::KILL);
                self.west.exited().await;
                self.west = transit::start_west(&self.west_settings).await;
            }
            Fault::DrainEndpoint => {
                let address = self.places[0].ip().to_string();
                self.drain_for(["endpoint", &address], pause).await;
            }
            Fault::DrainListener => self.drain_for(["listener", "cross-network"], pause).await,
        }
    }

    /// Drains a part of the mesh, or a listener, and puts it back.
    async fn drain_for(&self, what: [&str; 2], time: Duration) {
        for undo in [&[][..], &["--undo"]] {
            let order = [&["drain"], &what[..], undo].concat();
            let (code, text, error) = self.east.run_command(&order).await;
            assert_eq!(code, 0, "{order:?}: {text}{error}");
            if undo.is_empty() {
                // deadline: the length of a fault.
                sleep(time).await;
            }
        }
    }

    async fn take_over(&mut self) {
        let next = spawn_east(&self.settings);
        next.logged("took over from the process that served").await;
        self.certificates = 0;
        self.drained.push(std::mem::replace(&mut self.east, next));
        self.drained.retain_mut(Gateway::is_running);
    }

    /// Compares both sides of all tunnels, and asks for the fault behind each break.
    pub fn compare(&self, tunnels: &[Ended], faults: &Faults, errors: &mut Vec<String>) {
        for tunnel in tunnels {
            // None of an endpoint that ended with its connection.
            let endpoint = self.oracle.known(tunnel.plan.id);
            let is_whole =
                tunnel.is_complete() && endpoint == Some(SideResult::complete(tunnel.plan.up));
            let is_wrong = match (tunnel.side, endpoint) {
                (Some(client), Some(endpoint)) => !is_consistent(client, endpoint),
                (Some(client), None) => !matches!(client.end, End::Clean | End::Broken(_)),
                (None, _) => false,
            };
            if is_wrong || !is_whole && faults.explain(tunnel).is_none() {
                errors.push(format!("{tunnel:?}, endpoint: {endpoint:?}"));
            }
        }
        errors.extend(self.oracle.errors());
    }

    /// Waits until everything has ended. Returns the last values.
    pub async fn settle(&mut self, start: &Measured, patience: Duration) -> Measured {
        let deadline = Instant::now() + patience;
        loop {
            self.drained.retain_mut(Gateway::is_running);
            let mut now = self.measure().await;
            now.0.insert("replaced processes".to_owned(), self.drained.len() as f64);
            if start.differences(&now).is_empty() || Instant::now() > deadline {
                return now;
            }
            // deadline: the state of other processes can only be polled.
            sleep(Duration::from_millis(200)).await;
        }
    }

    /// Measures both gateways. Connections between them may stay open, and are not counted.
    pub async fn measure(&self) -> Measured {
        let mut values = BTreeMap::from([("replaced processes".to_owned(), 0.0)]);
        for (name, gateway) in [("east", &self.east), ("west", &self.west)] {
            let mut pooled = 0.0;
            for line in gateway.scrape().await.lines() {
                let Some((metric, value)) = line.rsplit_once(' ') else { continue };
                let value: f64 = value.parse().unwrap_or(f64::NAN);
                let base = metric.split('{').next().unwrap_or(metric);
                if base == "strait_remote_gateway_connections" {
                    pooled += value;
                } else if GAUGES.contains(&base) && value != 0.0 {
                    values.insert(format!("{name}: {metric}"), value);
                }
            }
            let descriptors = gateway.descriptors() as f64 - pooled;
            values.insert(format!("{name}: descriptors"), descriptors);
        }
        Measured(values)
    }
}

impl Measured {
    /// Returns the values that are greater at the end.
    pub fn differences(&self, end: &Self) -> Vec<String> {
        let values = end.0.iter().filter_map(|(name, value)| {
            let mut before = self.0.get(name).copied().unwrap_or(0.0);
            if name.ends_with("descriptors") {
                // Each worker opens a socket for sock_diag(7) once bytes are unacknowledged.
                before +=
                    std::thread::available_parallelism().map_or(1.0, |count| count.get() as f64);
            }
            (*value > before).then(|| format!("{name}: {before} before, {value} at the end"))
        });
        values.collect()
    }
}

/// Cuts every third connection of the link after some bytes, in either direction.
fn cut(number: usize) -> [LinkFaults; 2] {
    let mut faults = [LinkFaults::default(); 2];
    if number.is_multiple_of(3) {
        let after = 4_000 + 7_919 * number as u64 % 200_000;
        faults[number % 2] = LinkFaults::cut(after, Cut::Reset);
    }
    faults
}

async fn stop_for(gateway: &Gateway, time: Duration) {
    gateway.signal(Signal::STOP);
    // deadline: the length of a fault.
    sleep(time).await;
    gateway.signal(Signal::CONT);
}

/// Replaces a text of a file by another one, or back.
fn change(path: &Path, one: &str, other: &str) {
    let text = std::fs::read_to_string(path).expect("a file");
    let (from, to) = if text.contains(other) { (other, one) } else { (one, other) };
    replace(path, &text.replace(from, to));
}

/// Takes a file away for a time.
async fn move_for(path: &Path, time: Duration) {
    let away = path.with_extension("away");
    std::fs::rename(path, &away).expect("a file");
    // deadline: the length of a fault.
    sleep(time).await;
    std::fs::rename(&away, path).expect("a file");
}

/// Starts a gateway of network east with a mounted certificate. Its mesh is that of the control
/// plane.
fn spawn_east(settings: &Settings<'_>) -> Gateway {
    spawn_with(settings, NAME, mounted::mount)
}

/// Settings of the gateway of network east, whose next gateway is behind a link.
fn east_settings(net: Net, link: Net, folder: &Path) -> Settings<'static> {
    let mut settings = transit::east(net, &[link], transit::WEST_GATEWAY);
    let both = "to: [{cluster: east}, {cluster: west}]";
    settings.exposure = format!(
        "    - {{service: \"{ECHO}\", {both}}}\n    - {{service: \"{REMOTE}\", {both}, \
         transit: always}}\n"
    );
    settings.more = settings.more.replace("deadline: 2s", "deadline: 1h");
    settings.more += AGES;
    settings.take_over = Some(folder.join("take-over"));
    settings
}
