//! Simulation of a gateway among 160 clusters in virtual time. Snapshots, picks and ejections are
//! those of the product; connections are events of the simulation.
//!
//! A gateway of another network that does not answer delays the tunnels that wait for a connection
//! to it, as in `outer`. Unless clusters have [`Loads`], tunnels that open end before the next
//! pick, so the picks are independent and their counts have a multinomial distribution.

mod loads;
mod model;
mod slow;

use std::collections::{HashMap, HashSet};
use std::io::Write as _;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use loads::Loads;
use model::{BINS, FAILING, FAILING_GATEWAYS, Model, REGIONS, bin_of, cluster_of, host, region_of};
use tokio::time::Instant;

use super::chi_square::p_value;
use super::{FAR, data_path_of, peer, target_of};
use crate::datapath::balance::{self, Pick, Tried};
use crate::datapath::dial::{DenyList, TOTAL_DIAL_TIMEOUT, remote};
use crate::datapath::identity::Peer;
use crate::datapath::policy::{self, Permit};
use crate::datapath::{DataPath, route};
use crate::outer::{CONNECT_DEADLINE, CONNECTION_WAIT_MAX, MinRtt, Ranks, Target};
use crate::snapshot::builder::Change;
use crate::snapshot::traffic::Position;
use crate::snapshot::{NO_LINK_FACTORS, Publisher, TrustSet};

const NETWORK: &str = "net-000";
/// Number of services. A debug build simulates them in 13 s.
const SERVICES: usize = 10_000;
/// Time between two events.
const TICK: Duration = Duration::from_millis(100);
const TICKS_PER_SECOND: usize = 10;
/// New tunnels of each tick.
const TUNNELS: usize = 100;
/// Significance level: one correct sample in a million is rejected. The seeds are fixed.
const P_MIN: f64 = 1e-6;
/// Bound of a region's count in [`SPAN`], in standard deviations. That of a binomial count is at
/// most the root of the expected count.
const DEVIATIONS_MAX: f64 = 5.0;
/// Seconds over which the counts of a region are compared.
const SPAN: usize = 5;

/// Tunnels of one second, by the time of their CONNECT.
struct Window {
    /// Opened tunnels by bin.
    opened: Vec<u32>,
    /// Expected number of tunnels by bin.
    expected: Vec<f64>,
    /// All tunnels.
    tunnels: u32,
    /// Waits for gateways that do not answer.
    delays: u32,
    /// Tunnels without any endpoint in time.
    failed: u32,
}

struct Tunnel {
    /// Index of its window.
    second: usize,
    tried: Tried,
    deadline: Instant,
}

/// Tunnel that waits for a connection to a gateway, at most until `end`.
struct Waiting {
    end: Instant,
    tunnel: Tunnel,
    pick: Pick,
    target: Target,
}

struct Simulation {
    model: Model,
    publisher: Publisher,
    data_path: Arc<DataPath>,
    peer: Arc<Peer>,
    /// True if the gateways of the failing region answer.
    is_region_up: bool,
    /// Attempts to connect, with their ends.
    attempts: HashMap<Target, Instant>,
    /// Gateways to which no attempt has succeeded since they failed.
    broken: HashSet<Target>,
    waiting: Vec<Waiting>,
    ranks: Ranks,
    /// Round trip times as gateways keep them.
    rtts: HashMap<Target, MinRtt>,
    /// Gateways that tunnels have used.
    used: HashSet<Target>,
    /// Round trip time of one gateway of each network in the failing region, if it is slow.
    slow_rtt: Option<Duration>,
    /// Time that a PING waits behind the bytes of tunnels, as often as its gateway is busy.
    queue: Option<Duration>,
    /// Loads that clusters advertise.
    loads: Option<Loads>,
    /// New tunnels of each tick.
    tunnels: usize,
    /// Number of changes of the shares of these gateways.
    changes: usize,
    windows: Vec<Window>,
    /// Wall time of each update.
    updates: Vec<Duration>,
}

impl Window {
    fn new() -> Self {
        Self { opened: vec![0; BINS], expected: vec![0.0; BINS], tunnels: 0, delays: 0, failed: 0 }
    }

    /// Returns the opened and the expected number of tunnels to a region.
    fn of_region(&self, region: usize) -> (f64, f64) {
        let bins = self.opened.iter().zip(&self.expected).enumerate();
        let bins = bins.filter(|(bin, _)| region_of(*bin) == region);
        bins.fold((0.0, 0.0), |sum, (_, (opened, expected))| {
            (sum.0 + f64::from(*opened), sum.1 + expected)
        })
    }

    fn is_within_bound(&self, region: usize) -> bool {
        let (opened, expected) = self.of_region(region);
        (opened - expected).abs() <= DEVIATIONS_MAX * expected.sqrt()
    }
}

impl Simulation {
    /// Builds the first snapshot, with this number of services.
    fn new(services: usize) -> Self {
        let model = Model::new(services);
        let publisher = Publisher::default();
        let data_path = data_path_of(publisher.reader(), DenyList::default());
        publisher.update(Change {
            trust: Some(TrustSet::new([("w", "west"), ("east.local", "net-000")])),
            exposure: Some(model.exposure()),
            traffic: Some(model.traffic()),
            position: Some(Position { cluster: NETWORK.into(), ..Position::default() }),
            ..Change::default()
        });
        let mut new = Self {
            model,
            publisher,
            data_path,
            peer: peer(SystemTime::now() + FAR),
            is_region_up: true,
            attempts: HashMap::new(),
            broken: HashSet::new(),
            waiting: Vec::new(),
            ranks: Ranks::default(),
            rtts: HashMap::new(),
            used: HashSet::new(),
            slow_rtt: None,
            queue: None,
            loads: None,
            tunnels: TUNNELS,
            changes: 0,
            windows: Vec::new(),
            updates: Vec::new(),
        };
        new.publish();
        new
    }

    fn publish(&mut self) {
        let change =
            Change { mesh: Some((self.model.mesh.clone(), NETWORK.into())), ..Change::default() };
        let start = std::time::Instant::now();
        self.publisher.update(change);
        self.updates.push(start.elapsed());
    }

    /// Runs for some seconds. Each begins with an update of the mesh.
    async fn run(&mut self, seconds: usize) {
        for _ in 0..seconds {
            if self.windows.len().is_multiple_of(slow::COMPARISON) {
                self.compare_gateways();
            }
            self.windows.push(Window::new());
            self.model.churn();
            self.publish();
            for _ in 0..TICKS_PER_SECOND {
                tokio::time::advance(TICK).await;
                self.end_attempts();
                if let Some(loads) = &mut self.loads {
                    loads.end_tunnels(Instant::now());
                }
                for _ in 0..self.tunnels {
                    self.open();
                }
            }
        }
    }

    /// Opens a tunnel to a random service.
    fn open(&mut self) {
        let service = self.model.random_service();
        let second = self.windows.len() - 1;
        let window = &mut self.windows[second];
        window.tunnels += 1;
        self.model.add_shares(service, self.is_region_up, &mut window.expected);
        let tunnel = Tunnel {
            second,
            tried: Tried::default(),
            deadline: Instant::now() + TOTAL_DIAL_TIMEOUT,
        };
        let permit = self.permit(service);
        self.forward(permit, tunnel);
    }

    fn permit(&self, service: usize) -> Permit {
        let target = target_of(&format!("{}:80", host(service)), None);
        let snapshot = self.data_path.reader.load();
        let route = route::resolve(&snapshot, &self.peer, target).expect("a route");
        policy::run(&snapshot, &self.peer, route).expect("a permit")
    }

    /// Picks and dials, as `forward::establish` does.
    fn forward(&mut self, mut permit: Permit, tunnel: Tunnel) {
        while Instant::now() < tunnel.deadline {
            let Ok(pick) = balance::pick(permit, &tunnel.tried, NO_LINK_FACTORS) else {
                break;
            };
            if remote::avoid(&self.data_path, &pick.route().endpoints, pick.endpoint()) {
                permit = pick.into_permit();
                continue;
            }
            let target = remote::target(pick.endpoint());
            match target.filter(|target| !self.answers(target)) {
                Some(target) => self.wait(tunnel, pick, target),
                None => self.opened(pick, tunnel.second),
            }
            return;
        }
        self.windows[tunnel.second].failed += 1;
    }

    fn answers(&self, target: &Target) -> bool {
        let cluster = cluster_of(target.address).expect("a gateway");
        self.is_region_up || cluster % REGIONS != FAILING
    }

    /// Waits for a connection. Tunnels share one attempt.
    fn wait(&mut self, tunnel: Tunnel, pick: Pick, target: Target) {
        if !self.attempts.contains_key(&target) {
            self.data_path.outer.simulate_attempt(&target, true);
            let end = Instant::now() + CONNECT_DEADLINE;
            self.attempts.insert(target.clone(), end);
        }
        self.broken.insert(target.clone());
        self.windows[tunnel.second].delays += 1;
        let end = tunnel.deadline.min(Instant::now() + CONNECTION_WAIT_MAX);
        self.waiting.push(Waiting { end, tunnel, pick, target });
    }

    /// Ends the attempts that are due, and the waits for them.
    fn end_attempts(&mut self) {
        let now = Instant::now();
        let due = |(target, end): (&Target, &Instant)| (*end <= now).then(|| target.clone());
        let ended: Vec<_> = self.attempts.iter().filter_map(due).collect();
        for target in &ended {
            self.attempts.remove(target);
            self.data_path.outer.simulate_attempt(target, false);
        }
        let is_due = |one: &Waiting| ended.contains(&one.target) || one.end <= now;
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        let (ended, left): (Vec<_>, Vec<_>) = waiting.partition(is_due);
        self.waiting = left;
        for one in ended {
            self.end_wait(one);
        }
    }

    fn end_wait(&mut self, ended: Waiting) {
        let Waiting { mut tunnel, pick, target, .. } = ended;
        if self.answers(&target) && Instant::now() < tunnel.deadline {
            self.opened(pick, tunnel.second);
            return;
        }
        if remote::has_alternative(&self.data_path, &pick.route().endpoints, &target) {
            self.data_path.outer.eject(&target);
        }
        let endpoint = Arc::clone(pick.endpoint());
        let permit = pick.into_permit();
        balance::eject_after_failed_dial(&endpoint, &self.data_path.metrics);
        tunnel.tried.endpoints.push(endpoint);
        self.forward(permit, tunnel);
    }

    fn opened(&mut self, pick: Pick, second: usize) {
        let endpoint = pick.endpoint();
        endpoint.state.restore(Instant::now());
        if let Some(target) = remote::target(endpoint) {
            let share = self.ranks.weight_factor(&target);
            endpoint.state.record_share(share, Instant::now());
            if self.broken.remove(&target) {
                self.data_path.outer.simulate_connection(&target);
            }
            self.used.insert(target);
        }
        self.windows[second].opened[bin_of(endpoint.address)] += 1;
        if let Some(loads) = &mut self.loads {
            loads.open(pick, Instant::now());
        }
    }

    /// Returns the sum of some windows.
    fn sum(&self, seconds: Range<usize>) -> Window {
        let mut sum = Window::new();
        for window in &self.windows[seconds] {
            for bin in 0..BINS {
                sum.opened[bin] += window.opened[bin];
                sum.expected[bin] += window.expected[bin];
            }
            sum.tunnels += window.tunnels;
            sum.delays += window.delays;
            sum.failed += window.failed;
        }
        sum
    }

    /// Asserts that the picks of some seconds have the expected shares, over all of them by
    /// gateway, and in each span by region.
    #[track_caller]
    fn assert_shares(&self, seconds: Range<usize>) {
        let sum = self.sum(seconds.clone());
        let bins = sum.expected.iter().zip(&sum.opened);
        let bins: Vec<_> = bins.map(|(expected, opened)| (*expected, f64::from(*opened))).collect();
        let p = p_value(&bins);
        assert!(p > P_MIN, "p is {p} in seconds {seconds:?}");
        for start in seconds.step_by(SPAN) {
            let span = self.sum(start..start + SPAN);
            for region in 0..usize::from(REGIONS) {
                let counts = span.of_region(region);
                assert!(span.is_within_bound(region), "r{region} at {start}: {counts:?}");
            }
        }
    }

    /// Returns the seconds from `from` until the failing region has its share in all spans.
    fn recovery(&self, from: usize) -> usize {
        let region = usize::from(FAILING);
        let last = self.windows.len() - SPAN;
        let mut spans = (from..=last).rev();
        let outside = spans.find(|at| !self.sum(*at..at + SPAN).is_within_bound(region));
        outside.map_or(0, |at| at + 1 - from)
    }
}

/// Returns the resident memory of the process in MiB.
fn resident_mib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("our memory");
    let pages: u64 = text.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number");
    pages * 4096 / (1024 * 1024)
}

/// A region of 20 clusters stops answering after 20 s; the control plane reports it 20 s later. It
/// returns after 30 s.
#[tokio::test(start_paused = true)]
async fn tunnels_leave_a_region_that_fails_within_seconds_and_return_without_oscillation() {
    fastrand::seed(160);
    let memory = resident_mib();
    let mut simulation = Simulation::new(SERVICES);
    let memory = resident_mib().saturating_sub(memory);
    simulation.run(20).await;
    simulation.assert_shares(0..20);
    assert_eq!(simulation.sum(0..20).delays, 0);

    simulation.is_region_up = false;
    simulation.run(20).await;
    // Tunnels wait for the first attempts, and then at most one for each gateway and ejection.
    let first = simulation.sum(20..28).delays;
    let later = simulation.sum(28..40).delays;
    assert!(later <= FAILING_GATEWAYS, "{later} waits after the first attempts");
    simulation.assert_shares(30..40);
    simulation.model.report_region(false);
    simulation.run(10).await;
    simulation.assert_shares(40..50);
    assert_eq!(simulation.sum(40..50).delays, 0);

    simulation.is_region_up = true;
    simulation.model.report_region(true);
    simulation.run(60).await;
    let recovery = simulation.recovery(50);
    assert!(recovery <= 30, "the region has its share after {recovery} s");
    simulation.assert_shares(80..110);
    let all = simulation.sum(0..110);
    assert_eq!(all.failed, 0, "of {}", all.tunnels);

    simulation.updates[1..].sort_unstable();
    let [build, updates @ ..] = &simulation.updates[..] else {
        panic!("no update");
    };
    let _ = writeln!(
        std::io::stderr(),
        "{SERVICES} services: {memory} MiB, built in {build:?}; update of 60 records: median {:?}, \
         maximum {:?}; {first} waits until the region was ejected, then {later}; its share \
         returned after {recovery} s",
        updates[updates.len() / 2],
        updates[updates.len() - 1],
    );
}

/// Without other tunnels each gateway is tried for the first time. A service has three of them in
/// the region.
#[tokio::test(start_paused = true)]
async fn a_lone_tunnel_leaves_a_silent_network_for_an_endpoint_elsewhere() {
    fastrand::seed(161);
    let mut simulation = Simulation::new(200);
    simulation.is_region_up = false;
    simulation.windows.push(Window::new());
    for _ in 0..200 {
        simulation.open();
        for _ in 0..120 {
            tokio::time::advance(TICK).await;
            simulation.end_attempts();
        }
    }
    let all = simulation.sum(0..1);
    assert!(all.delays > 10, "{} waits", all.delays);
    assert_eq!((all.failed, simulation.waiting.len()), (0, 0));
}
