//! Tunnels to services whose endpoints fail, in virtual time and without sockets.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, advance};

use crate::datapath::DataPath;
use crate::datapath::balance::{FAILED_DIALS_MAX, choose_next};
use crate::datapath::dial::DenyList;
use crate::datapath::forward::tries::Tries;
use crate::outer::Failure;
use crate::reason::Reason;
use crate::snapshot::mesh::{Protocol, Workload};
use crate::snapshot::{Endpoint, EndpointSet, EndpointState, NO_LINK_FACTORS, Publisher};
use crate::telemetry::{Metrics, Record};

use super::{data_path_of, peer};

/// Service of equal endpoints, some of which refuse each dial.
struct World {
    data_path: Arc<DataPath>,
    set: EndpointSet,
    dead: HashSet<Arc<str>>,
    dials: usize,
}

impl World {
    fn new(endpoints: usize, dead: usize) -> Self {
        let endpoint = |index: usize| {
            let definition = Workload { uid: index.to_string().into(), ..Workload::default() };
            Arc::new(Endpoint {
                definition: Arc::new(definition),
                address: ([192, 0, 2, 1], 15008).into(),
                protocol: Protocol::Hbone,
                remote: None,
                weight: 1,
                state: Arc::new(EndpointState::default()),
            })
        };
        fastrand::seed(27);
        Self {
            data_path: data_path_of(Publisher::new().reader(), DenyList::default()),
            set: EndpointSet::new((0..endpoints).map(endpoint)),
            dead: (0..dead).map(|index| index.to_string().into()).collect(),
            dials: 0,
        }
    }

    fn record(&self) -> Record {
        let source = Arc::clone(&peer(SystemTime::now()).source);
        Record::new(&Arc::new(Metrics::new()), &source, "echo.app:80")
    }

    /// Picks and dials as `forward::establish` does, with an immediate answer to each dial.
    fn open(&mut self, tries: &mut Tries) -> Result<Arc<Endpoint>, Reason> {
        let (mut record, mut reason) = (self.record(), Reason::NoEndpoint);
        loop {
            tries.admit(&self.set, &mut record)?;
            let Some(endpoint) = choose_next(&self.set, &tries.tried, NO_LINK_FACTORS) else {
                return Err(reason);
            };
            tries.begin(&endpoint);
            endpoint.state.begin_dial(Instant::now());
            self.dials += 1;
            if !self.dead.contains(endpoint.uid()) {
                endpoint.state.record_dial(Duration::from_millis(1));
                self.set.dial_succeeded(&endpoint, Instant::now());
                return Ok(endpoint);
            }
            reason = Reason::DialRefused;
            let failure = Failure::new(reason, "refused");
            tries.next(&self.data_path, failure, &self.set, endpoint, &mut record)?;
        }
    }

    fn tunnel(&mut self) -> Result<Arc<Endpoint>, Reason> {
        self.open(&mut Tries::new(true))
    }
}

#[tokio::test(start_paused = true)]
async fn a_tunnel_to_a_dead_service_dials_five_endpoints_and_no_endpoint_twice_soon() {
    let mut world = World::new(400, 400);
    for tunnel in 1..=80 {
        assert_eq!(world.tunnel().unwrap_err(), Reason::DialRefused);
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
            assert!(world.tunnel().is_err());
        }
        advance(Duration::from_secs(1)).await;
        let mut probe = Tries::new(true);
        let mut record = world.record();
        assert_eq!(probe.admit(&world.set, &mut record), Ok(()));
        let before = world.dials;
        for _ in 0..100 {
            assert_eq!(world.tunnel().unwrap_err(), Reason::DialFailed);
        }
        assert_eq!(world.dials, before, "while another tunnel dials");
        world.dead.clear();
        assert!(world.open(&mut probe).is_ok());
        let served: HashSet<_> = (0..8 * endpoints)
            .map(|_| Arc::clone(world.tunnel().expect("a tunnel").uid()))
            .collect();
        assert!(served.len() > endpoints / 2, "{} of {endpoints}", served.len());
    }
}

#[tokio::test(start_paused = true)]
async fn a_tunnel_that_is_cancelled_while_it_dials_lets_another_one_dial() {
    let mut world = World::new(4, 4);
    for _ in 0..5 {
        assert!(world.tunnel().is_err());
    }
    advance(Duration::from_secs(1)).await;
    let (mut first, mut second, mut record) = (Tries::new(true), Tries::new(true), world.record());
    assert_eq!(first.admit(&world.set, &mut record), Ok(()));
    let refused = second.admit(&world.set, &mut record);
    assert_eq!(refused, Err(Reason::DialFailed));
    drop(first);
    assert_eq!(Tries::new(true).admit(&world.set, &mut record), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn with_nine_tenths_of_the_endpoints_dead_few_tunnels_fail_after_the_first_second() {
    for per_second in [2, 20, 200] {
        let mut world = World::new(400, 360);
        let pause = Duration::from_secs(1) / per_second;
        // The first second lasts for ten tunnels if these are rare.
        for _ in 0..per_second.max(10) {
            let _ = world.tunnel();
            advance(pause).await;
        }
        let (count, mut failed, mut dead) = (2_000, 0, world.dials);
        for _ in 0..count {
            failed += u32::from(world.tunnel().is_err());
            advance(pause).await;
        }
        dead = world.dials - dead;
        assert!(failed * 100 <= count, "{failed} of {count}, {per_second}/s, {dead} dials");
    }
}

#[tokio::test(start_paused = true)]
async fn endpoints_behind_denied_addresses_leave_the_draw_too() {
    let world = World::new(400, 400);
    let (mut tries, mut record) = (Tries::new(true), world.record());
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
