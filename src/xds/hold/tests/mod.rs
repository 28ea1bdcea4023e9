//! Tests of the hold with the client, the recorder and the store of istiod's resources.

mod simulation;

use super::*;
use crate::grpc::workload as proto;
use crate::xds::cache::Recorder;
use crate::xds::client::Resource;
use crate::xds::client::{Client, Mode, Response, StreamEnd, Subscription};
use crate::xds::store::Store;
use crate::xds::tests::{self as samples, policy, resource, workload};

const TIME: Duration = Duration::from_secs(600);

fn service(index: usize) -> Resource {
    let hostname = format!("s{index}.app");
    let from = proto::Service { namespace: "app".into(), hostname, ..proto::Service::default() };
    samples::service(from)
}

fn export(index: usize) -> Resource {
    resource(CLUSTER, &format!("inbound-vip|80|tcp|s{index}.app"), "1", &())
}

struct Gateway {
    client: Client,
    recorder: Recorder,
}

impl Gateway {
    /// Returns a gateway that has received nothing.
    fn new(hold: Hold) -> Self {
        let wildcard = |type_url| Subscription { type_url, mode: Mode::Wildcard };
        let client = Client::new([ADDRESS, AUTHORIZATION, CLUSTER].map(wildcard).into());
        let mut recorder = Recorder::new(Box::<Store>::default());
        recorder.hold = hold;
        Self { client, recorder }
    }

    /// Returns a gateway that is connected and holds services, exports, a workload and a policy.
    fn with(services: usize, time: Duration) -> Self {
        let mut gateway = Self::new(Hold::new(time));
        gateway.connect();
        let addresses = (0..services).map(service);
        gateway.send(ADDRESS, addresses.chain([workload("w", "1")]).collect(), Vec::new());
        gateway.send(AUTHORIZATION, vec![policy(0, 80, "1")], Vec::new());
        gateway.send(CLUSTER, (0..services).map(export).collect(), Vec::new());
        gateway.recorder.store.set_policies_received();
        gateway
    }

    fn connect(&mut self) {
        self.client.disconnected(StreamEnd::Clean);
        self.client.connected();
        self.recorder.hold.connected();
    }

    fn send(&mut self, url: &str, resources: Vec<Resource>, gone: Vec<String>) {
        let nonce = "n".to_owned();
        let response = Response { type_url: url.to_owned(), nonce, resources, removed: gone };
        let answers = self.client.received(response, &mut self.recorder);
        assert!(answers.iter().all(|answer| answer.error.is_none()), "{answers:?}");
    }

    /// Removes the first services, with the workload.
    fn remove_services(&mut self, count: usize) {
        let names = (0..count).map(|index| format!("app/s{index}.app"));
        self.send(ADDRESS, Vec::new(), names.chain(["w".to_owned()]).collect());
    }

    fn remove_policy(&mut self) {
        self.send(AUTHORIZATION, Vec::new(), vec!["app/p".to_owned()]);
    }

    /// Returns the numbers of services, workloads, exports and policies in force.
    fn in_force(&mut self) -> [usize; 4] {
        // The store returns policies only after a change.
        self.recorder.store.handle_rejection(AUTHORIZATION, "probe");
        let policies = self.recorder.store.take_policies().expect("a change").len() - 1;
        self.recorder.store.remove(AUTHORIZATION, "probe");
        let tables = self.recorder.store.tables();
        let mesh = tables.mesh();
        let exports = tables.export_count();
        [mesh.services.len(), mesh.workloads.len(), exports, policies]
    }

    fn due_in(&self) -> Option<Duration> {
        self.recorder.hold.due().map(|due| due - Instant::now())
    }
}

#[tokio::test(start_paused = true)]
async fn a_mass_removal_after_a_reconnect_waits_and_so_do_the_policies() {
    let mut gateway = Gateway::with(12, TIME);
    gateway.connect();
    gateway.remove_policy();
    gateway.remove_services(12);
    gateway.send(CLUSTER, Vec::new(), Vec::new());
    assert_eq!(gateway.in_force(), [12, 1, 12, 1]);
    assert_eq!(gateway.client.held(ADDRESS), 0);
    assert_eq!(gateway.due_in(), Some(TIME));
    assert_eq!(gateway.recorder.hold.take_change(), Some(14));
    gateway.send(ADDRESS, vec![workload("other", "1")], Vec::new());
    assert_eq!(gateway.recorder.hold.take_change(), None, "what is held is as before");
    gateway.send(ADDRESS, vec![service(0)], vec!["other".to_owned()]);
    assert_eq!(gateway.recorder.hold.take_change(), Some(0), "one less, and one more");
    assert!(gateway.recorder.release());
    assert_eq!(gateway.recorder.hold.take_change(), Some(-14));
    assert_eq!(gateway.in_force(), [1, 0, 12, 0]);
    assert_eq!((gateway.due_in(), gateway.recorder.release()), (None, false));
}

#[tokio::test(start_paused = true)]
async fn another_mass_removal_waits_for_its_own_time() {
    let mut gateway = Gateway::with(24, TIME);
    gateway.connect();
    gateway.remove_services(24);
    tokio::time::advance(TIME / 2).await;
    // The same names again have no new time.
    gateway.connect();
    gateway.remove_services(24);
    assert_eq!(gateway.due_in(), Some(TIME / 2));
    // All but two return, and go again.
    gateway.send(ADDRESS, (2..24).map(service).collect(), Vec::new());
    gateway.connect();
    gateway.send(ADDRESS, Vec::new(), Vec::new());
    let names = (2..24).map(|index| format!("app/s{index}.app"));
    gateway.send(ADDRESS, Vec::new(), names.collect());
    assert_eq!(gateway.due_in(), Some(TIME));
    assert_eq!(gateway.in_force()[0], 24);
}

#[tokio::test(start_paused = true)]
async fn other_removals_apply_at_once() {
    for (services, removed, time, seconds, left) in [
        // Fewer than ten, not more than half, after the minute, and without a hold.
        (12, 9, TIME, 0, 3),
        (20, 10, TIME, 0, 10),
        (12, 12, TIME, 61, 0),
        (12, 12, Duration::ZERO, 0, 0),
    ] {
        let mut gateway = Gateway::with(services, time);
        gateway.connect();
        gateway.send(ADDRESS, Vec::new(), Vec::new());
        tokio::time::advance(Duration::from_secs(seconds)).await;
        gateway.remove_services(removed);
        assert_eq!(gateway.in_force()[..2], [left, 0], "{removed} of {services}");
        assert_eq!(gateway.due_in(), None);
    }
}

#[tokio::test(start_paused = true)]
async fn workloads_that_others_replace_go_at_once() {
    let names = |from: usize, count| (from..from + count).map(|index| format!("w{index}"));
    for (removed, new, left) in [(12, 0, 21), (10, 0, 11), (20, 0, 21), (20, 11, 12), (20, 9, 30)] {
        let mut gateway = Gateway::with(2, TIME);
        let all = names(0, 20).map(|name| workload(&name, "1"));
        gateway.send(ADDRESS, all.collect(), Vec::new());
        gateway.connect();
        let others = names(20, new).map(|name| workload(&name, "1"));
        gateway.send(ADDRESS, others.collect(), names(0, removed).collect());
        assert_eq!(gateway.in_force()[..2], [2, left], "{removed} gone, {new} new");
    }
}

#[tokio::test(start_paused = true)]
async fn services_and_unusable_resources_replace_no_workload() {
    let kinds: [fn(usize) -> Resource; 2] =
        [service, |index| Resource { name: format!("x{index}").into(), ..service(index) }];
    for other in kinds {
        let mut gateway = Gateway::with(2, TIME);
        let names = || (0..20).map(|index| format!("w{index}"));
        let all = names().map(|name| workload(&name, "1"));
        gateway.send(ADDRESS, all.collect(), Vec::new());
        gateway.connect();
        let response = Response {
            type_url: ADDRESS.to_owned(),
            nonce: "n".to_owned(),
            resources: (2..22).map(other).collect(),
            removed: names().collect(),
        };
        gateway.client.received(response, &mut gateway.recorder);
        assert_eq!(gateway.in_force()[1], 21);
    }
}

#[tokio::test(start_paused = true)]
async fn removals_in_parts_apply_up_to_half_of_the_services() {
    let mut gateway = Gateway::with(30, TIME);
    gateway.connect();
    for part in 0..6 {
        let names = (0..5).map(|index| format!("app/s{}.app", part * 5 + index));
        gateway.send(ADDRESS, Vec::new(), names.collect());
    }
    assert_eq!(gateway.in_force(), [15, 1, 30, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_removed_policy_waits_for_the_end_of_the_first_minute_and_no_longer() {
    let mut gateway = Gateway::with(12, TIME);
    gateway.connect();
    gateway.remove_policy();
    gateway.send(ADDRESS, Vec::new(), Vec::new());
    gateway.send(CLUSTER, Vec::new(), Vec::new());
    assert_eq!((gateway.in_force()[3], gateway.due_in()), (1, Some(WINDOW)));
    assert_eq!(gateway.recorder.hold.mass_times(), None);
    tokio::time::advance(WINDOW).await;
    assert!(gateway.recorder.release());
    assert_eq!(gateway.in_force(), [12, 1, 12, 0]);

    gateway.send(AUTHORIZATION, vec![policy(0, 80, "2")], Vec::new());
    gateway.remove_policy();
    assert_eq!(gateway.in_force()[3], 0, "later, it is obeyed at once");

    let mut gateway = Gateway::with(12, TIME);
    gateway.remove_policy();
    assert_eq!(gateway.in_force()[3], 0, "no policy was there before the stream");
}

#[tokio::test(start_paused = true)]
async fn a_policy_that_goes_before_or_after_the_services_is_held_with_them() {
    let seconds = Duration::from_secs;
    // After the minute of the services; on the next stream; and before them.
    for (before, services_at, reconnects) in [(false, 0, false), (false, 0, true), (true, 5, false)]
    {
        let mut gateway = Gateway::with(12, TIME);
        gateway.connect();
        for type_url in [ADDRESS, CLUSTER, AUTHORIZATION] {
            gateway.send(type_url, Vec::new(), Vec::new());
        }
        if before {
            gateway.remove_policy();
        }
        tokio::time::advance(seconds(services_at)).await;
        gateway.remove_services(12);
        tokio::time::advance(seconds(70)).await;
        if reconnects {
            gateway.connect();
            gateway.send(ADDRESS, Vec::new(), Vec::new());
            gateway.send(CLUSTER, Vec::new(), Vec::new());
        }
        if !before {
            gateway.remove_policy();
        }
        let case = (before, services_at, reconnects);
        assert_eq!(gateway.in_force(), [12, 1, 12, 1], "{case:?}");
        assert_eq!(gateway.due_in(), Some(TIME - seconds(70)), "{case:?}");
        assert!(gateway.recorder.release());
        assert_eq!(gateway.in_force(), [0, 0, 12, 0], "{case:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_policy_that_waits_at_the_end_of_its_stream_waits_for_the_minute_of_the_next() {
    let mut gateway = Gateway::with(12, TIME);
    gateway.connect();
    gateway.remove_policy();
    tokio::time::advance(2 * WINDOW).await;
    gateway.connect();
    gateway.send(CLUSTER, Vec::new(), Vec::new());
    assert_eq!(gateway.due_in(), Some(WINDOW));
    gateway.remove_services(12);
    assert_eq!(gateway.due_in(), Some(TIME));
    assert_eq!(gateway.in_force(), [12, 1, 12, 1]);
}

#[tokio::test(start_paused = true)]
async fn policies_whose_removals_wait_were_there_before_the_stream() {
    let mut gateway = Gateway::with(12, TIME);
    gateway.connect();
    gateway.remove_policy();
    gateway.connect();
    gateway.send(ADDRESS, Vec::new(), Vec::new());
    gateway.send(CLUSTER, Vec::new(), Vec::new());
    gateway.send(AUTHORIZATION, vec![policy(0, 80, "2")], Vec::new());
    gateway.remove_policy();
    gateway.remove_services(12);
    assert_eq!(gateway.in_force(), [12, 1, 12, 1]);
}

#[tokio::test(start_paused = true)]
async fn what_is_sent_again_leaves_the_hold() {
    let mut gateway = Gateway::with(12, TIME);
    gateway.connect();
    gateway.remove_services(12);
    gateway.send(ADDRESS, (0..11).map(service).collect(), Vec::new());
    assert!(gateway.recorder.release());
    assert_eq!(gateway.in_force()[..2], [11, 0]);
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_version_of_a_removed_policy_denies() {
    let mut gateway = Gateway::with(12, TIME);
    gateway.connect();
    gateway.remove_policy();
    let resources = vec![policy(0, 70_000, "2")];
    let type_url = AUTHORIZATION.to_owned();
    let response = Response { type_url, nonce: "n".into(), resources, removed: Vec::new() };
    let answers = gateway.client.received(response, &mut gateway.recorder);
    assert!(answers[0].error.is_some());
    assert!(gateway.recorder.store.has_placeholder(AUTHORIZATION, "app/p"));
    gateway.recorder.release();
    assert!(gateway.recorder.store.has_placeholder(AUTHORIZATION, "app/p"));
}

#[tokio::test(start_paused = true)]
async fn a_hold_lasts_over_reconnects_until_the_control_plane_has_had_its_minute() {
    let mut gateway = Gateway::with(12, TIME);
    gateway.connect();
    gateway.remove_services(12);
    tokio::time::advance(2 * TIME).await;
    gateway.connect();
    assert_eq!(gateway.due_in(), None, "no response yet");
    assert_eq!(gateway.in_force()[0], 12);
    gateway.send(ADDRESS, vec![service(0)], Vec::new());
    assert_eq!(gateway.due_in(), Some(WINDOW));
    assert!(gateway.recorder.release());
    assert_eq!(gateway.in_force()[0], 1);
}

#[tokio::test(start_paused = true)]
async fn a_control_plane_cannot_collect_held_resources_without_bound() {
    let mut gateway = Gateway::with(12, TIME);
    gateway.connect();
    for round in 0..50 {
        let services = (0..12).map(|index| service(round * 12 + index));
        gateway.send(ADDRESS, services.collect(), Vec::new());
        let names = (0..12).map(|index| format!("app/s{}.app", round * 12 + index));
        gateway.send(ADDRESS, Vec::new(), names.collect());
        gateway.connect();
    }
    // Of the first removal: services, workload, exports, policy.
    assert!(gateway.recorder.hold.removed().len() <= 26);
    assert!(gateway.in_force()[0] <= 26);
}

#[tokio::test(start_paused = true)]
async fn removals_from_a_mesh_that_has_just_arrived_are_compared_with_all_of_it() {
    let mut gateway = Gateway::with(0, TIME);
    for part in 0..10 {
        let services = (0..10).map(|index| service(part * 10 + index));
        gateway.send(ADDRESS, services.collect(), Vec::new());
    }
    gateway.remove_services(12);
    assert_eq!(gateway.in_force()[0], 88);
    // One that comes and goes is not counted twice.
    for _ in 0..60 {
        gateway.send(ADDRESS, vec![service(0)], Vec::new());
        gateway.send(ADDRESS, Vec::new(), vec!["app/s0.app".to_owned()]);
    }
    assert_eq!((gateway.in_force()[0], gateway.due_in()), (88, None));
}
