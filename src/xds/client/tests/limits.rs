//! Tests of the limits of held and claimed resources.

use super::*;
use crate::grpc::security;
use crate::snapshot::authorization::Attributes;
use crate::snapshot::{Policies, PolicyRejection, mesh};
use crate::xds::client::usage::Limits;
use crate::xds::store::{AUTHORIZATION, Store};
use crate::xds::tables::MeshStore as _;
use prost::Message as _;

#[test]
fn what_would_be_too_much_to_claim_is_sent_anew_and_nothing_is_dropped_before() {
    let limits = Limits { initial_versions_bytes: 30, ..Limits::default() };
    let mut client = Client::with_limits(SUBSCRIPTIONS.to_vec(), limits);
    let mut taken = LoggingStore::default();
    client.connected();
    want(&mut client, &mut taken, &["wanted"]);
    let sent = ["a", "b", "c"].map(|name| resource(ALL, name, "1"));
    client.received(response(ALL, sent), &mut taken);
    for _ in 0..2 {
        // The second stream breaks before its first response.
        client.disconnected(StreamEnd::Clean);
        let first = client.connected();
        assert_eq!(first[0].initial_versions, versions(&[]));
        assert_eq!(first[1].initial_versions, versions(&[("wanted", "")]));
        assert_eq!(client.held(ALL), 3);
    }
    taken.log.clear();
    let answers =
        client.received(response(ALL, [bad(ALL, "a", "2"), resource(ALL, "d", "1")]), &mut taken);
    assert!(error(&answers).is_some_and(|text| text.starts_with("a: ")));
    taken.log.sort_unstable();
    assert_eq!(taken.log, ["+d", "-b", "-c"], "what is wrong stays");
    client.received(response(ALL, [resource(ALL, "d", "2")]), &mut taken);
    assert_eq!(client.held(ALL), 2, "only the first response has all there is");
    client.disconnected(StreamEnd::Clean);
    client.received(response(ALL, []), &mut taken);
    assert_eq!(client.held(ALL), 2);
    let first = client.connected();
    assert_eq!(first[0].initial_versions, versions(&[("a", "1"), ("d", "2")]));
}

#[test]
fn what_is_beyond_the_limits_is_rejected_and_what_is_held_can_change() {
    let limits = Limits { entries: 2, bytes: 1000, ..Limits::default() };
    let mut client = Client::with_limits(SUBSCRIPTIONS.to_vec(), limits);
    let mut taken = LoggingStore::default();
    client.connected();
    want(&mut client, &mut taken, &["wanted"]);
    let sent = [bad(ALL, "bad", "1"), resource(ALL, "a", "1"), resource(ALL, "b", "1")];
    let answers = client.received(response(ALL, sent), &mut taken);
    let error_text = error(&answers).expect("a NACK");
    assert!(error_text.ends_with("b: 2 resources are held, which is the limit"));
    assert_eq!(want(&mut client, &mut taken, &["another", "wanted"]), []);
    assert!(!client.restore(ALL, "b", "1", 0));
    let mut restored = Client::with_limits(SUBSCRIPTIONS.to_vec(), limits);
    assert!(!restored.restore(ALL, "a", "1", 1000));
    assert!(restored.restore(ALL, "a", "1", 900));
    assert!(!restored.restore(ALL, "b", "1", 100));
    let sent = response(ALL, [resource(ALL, "a", "2")]);
    assert_eq!(error(&client.received(sent, &mut taken)), None);
    client.received(removal(ALL, "a"), &mut taken);
    let long = "v".repeat(900);
    let sent = response(ALL, [resource(ALL, "b", &long)]);
    let answers = client.received(sent, &mut taken);
    assert!(error(&answers).is_some_and(|text| text.contains("over the limit of 1000")));
    let sent = response(ALL, [resource(ALL, "b", "1")]);
    assert_eq!(error(&client.received(sent, &mut taken)), None);
    assert_eq!(taken.log, ["+a", "+a", "-a", "+b"]);
    want(&mut client, &mut taken, &[]);
    client.received(removal(ALL, "b"), &mut taken);
    assert_eq!(client.usage.held(), (0, 0));
}

#[test]
fn no_more_names_are_wanted_than_a_first_request_has_room_for() {
    let limits = Limits { wanted: 50, initial_versions_bytes: 30, ..Limits::default() };
    let mut client = Client::with_limits(SUBSCRIPTIONS.to_vec(), limits);
    let mut taken = LoggingStore::default();
    want(&mut client, &mut taken, &["a1", "a2", "a3", "a4"]);
    let first = &client.connected()[1];
    assert_eq!(first.subscribe, ["a1", "a2", "a3"]);
    assert_eq!(first.initial_versions, versions(&[]), "too much to claim");
    want(&mut client, &mut taken, &["a2", "a3", "a4"]);
    client.disconnected(StreamEnd::Clean);
    assert_eq!(client.connected()[1].subscribe, ["a2", "a3", "a4"]);
}

#[test]
fn changes_of_a_subscription_are_cut_for_a_server_to_take_them() {
    let (mut client, mut taken) = connected();
    let names: Vec<_> = (0..2_500).map(|at| format!("n{at}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let sent = want(&mut client, &mut taken, &names);
    let counts: Vec<_> = sent.iter().map(|one| one.subscribe.len()).collect();
    assert_eq!(counts, [1_000, 1_000, 500]);
    let sent = want(&mut client, &mut taken, &[]);
    let counts: Vec<_> = sent.iter().map(|one| one.unsubscribe.len()).collect();
    assert_eq!(counts, [1_000, 1_000, 500]);
}

#[test]
fn what_is_rejected_beyond_the_list_is_counted_until_the_next_stream() {
    let mut client = Client::new(SUBSCRIPTIONS.to_vec());
    let mut taken = LoggingStore::default();
    client.connected();
    let many = |count: usize| Response {
        resources: (0..count).map(|at| bad(ALL, &at.to_string(), "1")).collect(),
        ..response(ALL, [])
    };
    // The same rejections again do not add up.
    for count in [1000, 1002, 1003, 1001] {
        client.received(many(count), &mut taken);
    }
    assert_eq!((client.rejected().count(), client.unlisted_rejections(ALL)), (1000, 3));
    client.disconnected(StreamEnd::Clean);
    assert_eq!(client.unlisted_rejections(ALL), 3);
    client.connected();
    client.received(many(1), &mut taken);
    assert_eq!((client.rejected().count(), client.unlisted_rejections(ALL)), (1, 0));
}

/// Returns a client for policies with a limit of entries, and its store.
fn policies(entries: usize) -> (Client, Store) {
    let wildcard = Subscription { type_url: AUTHORIZATION, mode: Mode::Wildcard };
    let limits = Limits { entries, ..Limits::default() };
    let mut client = Client::with_limits(vec![wildcard], limits);
    client.connected();
    (client, Store::default())
}

/// Returns a policy that matches nothing, so that only a placeholder can reject.
fn policy(name: &str) -> Resource {
    let message = security::Authorization {
        name: name.rsplit('/').next().unwrap().to_owned(),
        namespace: "app".to_owned(),
        action: security::Action::Deny.into(),
        ..security::Authorization::default()
    };
    Resource { body: Some(message.encode_to_vec().into()), ..resource(AUTHORIZATION, name, "1") }
}

/// Publishes the policies as the stream would. Returns whether a tunnel is rejected.
fn publish(client: &Client, store: &mut Store, policies: &mut Policies) -> bool {
    if client.is_synced() {
        store.set_policies_received();
    }
    if let Some(new) = store.take_policies() {
        *policies = new;
    }
    let attributes =
        Attributes { peer: None, source: None, destination: [10, 0, 0, 2].into(), port: None };
    let verdict = policies.evaluate(&mesh::Workload::default(), &attributes);
    assert_eq!(verdict.refusal == Some(PolicyRejection::NotReceived), !client.is_synced());
    verdict.refusal.is_some()
}

#[test]
fn a_policy_that_has_no_place_refuses_everything_until_a_stream_tells_all_without_one() {
    let long = format!("app/{}", "p".repeat(NAME_BYTES_MAX));
    for (entries, name) in [(1, "app/q"), (9, ""), (9, "*"), (9, &*long)] {
        let (mut client, mut store) = policies(entries);
        let mut known = Policies::default();
        let mut reported = |client: &mut Client, response| {
            let answers = client.received(response, &mut store);
            let refuses = publish(client, &mut store, &mut known);
            (error(&answers).is_some(), refuses)
        };
        let first = response(AUTHORIZATION, [policy("app/p")]);
        assert_eq!(reported(&mut client, first), (false, false));
        let beyond = response(AUTHORIZATION, [policy(name)]);
        assert_eq!(reported(&mut client, beyond), (true, true), "{name:.9}");
        // On the same stream, it is unknown whether the policy has been removed.
        let quiet = response(AUTHORIZATION, []);
        assert_eq!(reported(&mut client, quiet.clone()), (false, true));
        for (again, refuses) in [(true, true), (false, false), (false, false)] {
            client.disconnected(StreamEnd::Clean);
            client.connected();
            let response =
                if again { response(AUTHORIZATION, [policy(name)]) } else { quiet.clone() };
            assert_eq!(reported(&mut client, response), (again, refuses), "{name:.9}");
        }
        assert_eq!(client.usage.held().0, 1);
    }
}

#[test]
fn policies_stay_pending_if_the_first_response_exceeds_the_limit() {
    for (entries, name) in [(0, "app/p"), (9, "")] {
        let (mut client, mut store) = policies(entries);
        let mut known = Policies::default();
        for _ in 0..2 {
            let sent = response(AUTHORIZATION, [policy(name)]);
            client.received(sent, &mut store);
            assert!(!client.is_synced());
            assert!(publish(&client, &mut store, &mut known));
        }
        client.received(response(AUTHORIZATION, []), &mut store);
        assert!(client.is_synced());
        assert!(publish(&client, &mut store, &mut known), "it has not gone");
    }
}
