//! Tunnels to services whose endpoints fail, in virtual time and without sockets.

use std::collections::HashSet;

use tokio::time::{advance, sleep_until};

use super::*;
use crate::config;
use crate::datapath::DataPath;
use crate::datapath::balance::{FAILED_DIALS_MAX, choose_next};
use crate::datapath::dial::{DIAL_TIMEOUT, DenyList, TOTAL_DIAL_TIMEOUT};
use crate::datapath::forward::tries::Tries;
use crate::outer::Failure;
use crate::reason::Reason;
use crate::snapshot::mesh::Locality;
use crate::snapshot::tests::{alias, echo};
use crate::snapshot::{Alias, Caller, DialAdmission, NameTable};
use crate::telemetry::Record;

/// Service of equal endpoints, some of which refuse each dial or never answer.
struct World {
    data_path: Arc<DataPath>,
    set: Arc<EndpointSet>,
    dead: HashSet<Arc<str>>,
    is_silent: bool,
    dials: usize,
}

fn deadline() -> Instant {
    Instant::now() + TOTAL_DIAL_TIMEOUT
}

fn tries() -> Tries {
    Tries::new(true, deadline())
}

impl World {
    fn new(endpoints: usize, dead: usize) -> Self {
        fastrand::seed(27);
        let endpoint = |index: usize| endpoint(&index.to_string(), 1, None);
        Self {
            data_path: data_path_of(Publisher::default().reader(), DenyList::default()),
            set: Arc::new(EndpointSet::new((0..endpoints).map(endpoint))),
            dead: (0..dead).map(|index| index.to_string().into()).collect(),
            is_silent: false,
            dials: 0,
        }
    }

    /// Returns a service whose endpoints here never answer, and that of another network does. Those
    /// here are drawn first.
    fn silent(endpoints: usize) -> Self {
        let silent = (0..endpoints).map(|index| endpoint(&index.to_string(), 10_000, None));
        let set = EndpointSet::new(silent.chain([endpoint("west", 1, Some("west"))]));
        Self { set: Arc::new(set), is_silent: true, ..Self::new(0, endpoints) }
    }

    fn record(&self) -> Record {
        let source = Arc::clone(&peer(SystemTime::now()).source);
        Record::new(&Arc::new(Metrics::new()), &source, "echo.app:80")
    }

    /// Picks and dials as `forward::establish` does. Endpoints that answer a dial do so at once.
    async fn open(&mut self, tries: &mut Tries) -> Result<Arc<Endpoint>, Reason> {
        let (mut record, mut reason) = (self.record(), Reason::NoEndpoint);
        let deadline = deadline();
        while Instant::now() < deadline {
            tries.admit(&self.set, deadline, &mut record)?;
            let Some(endpoint) = choose_next(&self.set, &tries.tried, NO_LINK_FACTORS) else {
                return Err(reason);
            };
            tries.begin(&endpoint);
            let end = tries.deadline(&self.data_path, &self.set, &endpoint, deadline);
            endpoint.state.begin_dial(Instant::now());
            self.dials += 1;
            if !self.dead.contains(endpoint.uid()) {
                endpoint.state.record_dial(Duration::from_millis(1));
                if endpoint.remote.is_none() {
                    self.set.dial_succeeded(&endpoint, Instant::now());
                }
                return Ok(endpoint);
            }
            reason = Reason::DialRefused;
            if self.is_silent {
                reason = Reason::DialTimeout;
                sleep_until(end.min(Instant::now() + DIAL_TIMEOUT)).await;
            }
            let failure = Failure::new(reason, "failed");
            tries.next(&self.data_path, failure, &self.set, endpoint, &mut record)?;
        }
        Err(reason)
    }

    /// Returns the number of endpoints that serve some tunnels, none of which may fail.
    async fn served(&mut self, tunnels: usize) -> usize {
        let mut served = HashSet::new();
        for _ in 0..tunnels {
            served.insert(Arc::clone(self.tunnel().await.expect("a tunnel").uid()));
        }
        served.len()
    }

    async fn tunnel(&mut self) -> Result<Arc<Endpoint>, Reason> {
        self.open(&mut tries()).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_tunnel_to_a_dead_service_dials_five_endpoints_and_no_endpoint_twice_soon() {
    let mut world = World::new(400, 400);
    for tunnel in 1..=80 {
        assert_eq!(world.tunnel().await.unwrap_err(), Reason::DialRefused);
        assert_eq!(world.dials, tunnel * usize::from(FAILED_DIALS_MAX));
    }
    let mut states = world.set.endpoints.iter().map(|one| &one.state);
    assert!(states.all(|state| state.is_ejected(Instant::now())));
}

#[tokio::test(start_paused = true)]
async fn while_all_dials_fail_one_tunnel_dials_and_the_first_success_ends_it() {
    for endpoints in [1, 2, 4, 400] {
        let mut world = World::new(endpoints, endpoints);
        for _ in 0..5 {
            assert!(world.tunnel().await.is_err());
        }
        advance(Duration::from_secs(1)).await;
        let mut probe = tries();
        let mut record = world.record();
        assert_eq!(probe.admit(&world.set, deadline(), &mut record), Ok(()));
        let before = world.dials;
        for _ in 0..100 {
            assert_eq!(world.tunnel().await.unwrap_err(), Reason::DialFailed);
        }
        assert_eq!(world.dials, before, "while another tunnel dials");
        world.dead.clear();
        assert!(world.open(&mut probe).await.is_ok());
        let served = world.served(8 * endpoints).await;
        assert!(served > endpoints / 2, "{served} of {endpoints}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_tunnel_that_is_cancelled_while_it_dials_lets_another_one_dial() {
    let mut world = World::new(4, 4);
    for _ in 0..5 {
        assert!(world.tunnel().await.is_err());
    }
    advance(Duration::from_secs(1)).await;
    let (mut first, mut second, mut record) = (tries(), tries(), world.record());
    assert_eq!(first.admit(&world.set, deadline(), &mut record), Ok(()));
    let refused = second.admit(&world.set, deadline(), &mut record);
    assert_eq!(refused, Err(Reason::DialFailed));
    drop(first);
    assert_eq!(tries().admit(&world.set, deadline(), &mut record), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn with_nine_tenths_of_the_endpoints_dead_few_tunnels_fail_after_the_first_second() {
    for per_second in [2, 20, 200] {
        let mut world = World::new(400, 360);
        let pause = Duration::from_secs(1) / per_second;
        // The first second lasts for ten tunnels if these are rare.
        for _ in 0..per_second.max(10) {
            let _ = world.tunnel().await;
            advance(pause).await;
        }
        let (count, mut failed, mut dead) = (2_000, 0, world.dials);
        for _ in 0..count {
            failed += u32::from(world.tunnel().await.is_err());
            advance(pause).await;
        }
        dead = world.dials - dead;
        assert!(failed * 100 <= count, "{failed} of {count}, {per_second}/s, {dead} dials");
    }
}

#[tokio::test(start_paused = true)]
async fn endpoints_behind_denied_addresses_leave_the_draw_too() {
    let world = World::new(400, 400);
    let (mut tries, mut record) = (tries(), world.record());
    let mut dials = 0;
    while let Some(endpoint) = choose_next(&world.set, &tries.tried, NO_LINK_FACTORS) {
        dials += 1;
        let failure = Failure::new(Reason::DialDenied, "denied");
        let state = Arc::clone(&endpoint.state);
        let next = tries.next(&world.data_path, failure, &world.set, endpoint, &mut record);
        assert_eq!(next, Ok(()));
        assert!(state.is_suspended(Instant::now()), "no judgement of the endpoint");
    }
    assert_eq!(dials, usize::from(FAILED_DIALS_MAX));
}

#[tokio::test(start_paused = true)]
async fn endpoints_that_never_answer_leave_time_for_another_network() {
    for endpoints in [1, 5, 400] {
        let mut world = World::silent(endpoints);
        let start = Instant::now();
        let served = world.tunnel().await.expect("a tunnel");
        assert!(served.remote.is_some());
        assert!(start.elapsed() <= TOTAL_DIAL_TIMEOUT - Duration::from_secs(3), "{endpoints}");
    }
    let world = World::silent(1);
    // A whole dial comes first, as one lost SYN has to fit.
    for (time, here) in [(1, 1), (2, 2), (4, 2), (10, 7)] {
        let end = Instant::now() + Duration::from_secs(time);
        let tries = Tries::new(true, end);
        let end = tries.deadline(&world.data_path, &world.set, &world.set.endpoints[0], end);
        assert_eq!(end - Instant::now(), Duration::from_secs(here), "of {time} s");
    }
}

#[tokio::test(start_paused = true)]
async fn a_quiet_service_dials_silent_endpoints_seldom_and_one_at_a_time() {
    let mut world = World::silent(400);
    for _ in 0..3 {
        world.tunnel().await.expect("a tunnel");
    }
    let mut delayed = 0;
    for _ in 0..600 {
        advance(Duration::from_secs(1)).await;
        let (start, before) = (Instant::now(), world.dials);
        let served = world.tunnel().await.expect("a tunnel");
        assert!(served.remote.is_some() && world.dials - before <= 2);
        assert!(start.elapsed() <= DIAL_TIMEOUT);
        delayed += u32::from(!start.elapsed().is_zero());
    }
    assert!((1..=600 / 5).contains(&delayed), "{delayed}");
    world.dead.clear();
    let mut here = false;
    for _ in 0..60 {
        advance(Duration::from_secs(1)).await;
        here |= world.tunnel().await.expect("a tunnel").remote.is_none();
    }
    assert!(here, "the own network has recovered");
}

/// Returns the next snapshot, in which `echo.app` has these pods, and its alias those of one
/// region.
fn with_pods(before: &Snapshot, pods: std::ops::Range<u8>) -> Snapshot {
    let pod = |at: u8| Workload {
        uid: at.to_string().into(),
        addresses: [[10, 0, 0, at].into()].into(),
        healthy: true,
        capacity: 1,
        services: [("app/echo.app".into(), [(80, 8080)].into())].into(),
        template: Arc::new(Template {
            locality: Arc::new(Locality { region: "near".into(), ..Locality::default() }),
            ..Template::default()
        }),
        ..Workload::default()
    };
    let near = config::Alias { region: Some("near".into()), ..alias("echo.near", &["echo.app"]) };
    let alias = Alias::new(near, None);
    let change = Change {
        mesh: Some((Mesh::new([echo(&[])], pods.map(pod)), "east".into())),
        names: Some(NameTable::new([], [("echo.near", alias)])),
        ..Change::default()
    };
    build(before, change)
}

fn set(snapshot: &Snapshot, requested: &str) -> Arc<EndpointSet> {
    let requested = Authority::parse(requested).expect("an authority");
    let found = snapshot.find(Caller::UNKNOWN, &requested).expect("a service");
    snapshot.endpoints(&found, false)
}

#[tokio::test(start_paused = true)]
async fn a_service_whose_endpoints_change_keeps_the_results_of_its_dials() {
    for name in ["echo.app:80", "echo.near:80"] {
        let mut snapshot = with_pods(&Snapshot::default(), 0..40);
        let mut world = World { set: set(&snapshot, name), ..World::new(0, 60) };
        for at in 1..=3 {
            // The tunnel still has the set of before.
            snapshot = with_pods(&snapshot, at..40 + at);
            assert_eq!(world.tunnel().await.unwrap_err(), Reason::DialRefused);
            world.set = set(&snapshot, name);
            advance(Duration::from_secs(1)).await;
        }
        let (mut probe, mut record) = (tries(), world.record());
        assert_eq!(probe.admit(&world.set, deadline(), &mut record), Ok(()));
        snapshot = with_pods(&snapshot, 4..44);
        world.set = set(&snapshot, name);
        let before = world.dials;
        assert_eq!(world.tunnel().await.unwrap_err(), Reason::DialFailed);
        assert_eq!(world.dials, before, "while another tunnel dials");
        world.dead.clear();
        let good = world.open(&mut probe).await.expect("a tunnel");
        let served = world.served(400).await;
        assert!(served > 30, "{served} of 40");
        let last_good = world.set.last_good().map(|one| Arc::as_ptr(&one.state));
        assert_eq!(last_good, Some(Arc::as_ptr(&good.state)));
        world.set = set(&with_pods(&snapshot, 50..60), name);
        assert!(world.set.last_good().is_none(), "it has left");
    }
}

#[tokio::test(start_paused = true)]
async fn a_service_of_another_namespace_starts_without_results_of_dials() {
    let snapshot = with_pods(&Snapshot::default(), 0..10);
    let mut world = World { set: set(&snapshot, "echo.app:80"), ..World::new(0, 10) };
    for _ in 0..2 {
        assert!(world.tunnel().await.is_err());
        advance(Duration::from_secs(1)).await;
    }
    assert!(matches!(world.set.admit_dial(Instant::now()), DialAdmission::Probe(_)));
    let other = crate::snapshot::mesh::Service { namespace: "other".into(), ..echo(&[]) };
    let mesh = Mesh::new([other], []);
    let change = Change { mesh: Some((mesh, "east".into())), ..Change::default() };
    let moved = set(&build(&snapshot, change), "echo.app:80");
    assert!(matches!(moved.admit_dial(Instant::now()), DialAdmission::Free));
}
