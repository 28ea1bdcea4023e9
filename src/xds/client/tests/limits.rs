//! What is held, and what is claimed, up to its limits.

use super::*;
use crate::xds::client::usage::Limits;

#[test]
fn what_would_be_too_much_to_claim_is_told_anew_and_nothing_is_dropped_before() {
    let limits = Limits {
        claims: 30,
        ..Limits::default()
    };
    let mut client = Client::with_limits(SUBSCRIPTIONS.to_vec(), limits);
    let mut taken = Taken::default();
    client.connected();
    want(&mut client, &mut taken, &["wanted"]);
    let sent = ["a", "b", "c"].map(|name| resource(ALL, name, "1"));
    client.received(response(ALL, sent), &mut taken);
    for _ in 0..2 {
        // The second stream is one that broke before it said anything.
        client.disconnected(End::Clean);
        let first = client.connected();
        assert_eq!(first[0].initial_versions, versions(&[]));
        assert_eq!(first[1].initial_versions, versions(&[("wanted", "")]));
        assert_eq!(client.held(ALL), 3);
    }
    taken.log.clear();
    let answers = client.received(
        response(ALL, [bad(ALL, "a", "2"), resource(ALL, "d", "1")]),
        &mut taken,
    );
    assert!(error(&answers).is_some_and(|text| text.starts_with("a: ")));
    taken.log.sort_unstable();
    assert_eq!(taken.log, ["+d", "-b", "-c"], "what is wrong stays");
    client.received(response(ALL, [resource(ALL, "d", "2")]), &mut taken);
    assert_eq!(
        client.held(ALL),
        2,
        "only the first response has all there is"
    );
    client.disconnected(End::Clean);
    client.received(response(ALL, []), &mut taken);
    assert_eq!(client.held(ALL), 2);
    let first = client.connected();
    assert_eq!(
        first[0].initial_versions,
        versions(&[("a", "1"), ("d", "2")])
    );
}

#[test]
fn what_is_beyond_the_limits_is_rejected_and_what_is_held_can_change() {
    let limits = Limits {
        entries: 2,
        bytes: 1000,
        ..Limits::default()
    };
    let mut client = Client::with_limits(SUBSCRIPTIONS.to_vec(), limits);
    let mut taken = Taken::default();
    client.connected();
    want(&mut client, &mut taken, &["wanted"]);
    let sent = [
        bad(ALL, "bad", "1"),
        resource(ALL, "a", "1"),
        resource(ALL, "b", "1"),
    ];
    let answers = client.received(response(ALL, sent), &mut taken);
    let error_text = error(&answers).expect("a NACK");
    assert!(error_text.ends_with("b: 2 resources are held, which is the limit"));
    assert_eq!(want(&mut client, &mut taken, &["another", "wanted"]), []);
    assert!(!client.restore(ALL, "b", "1", &[]));
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
fn many_aliases_count_and_the_same_one_counts_once() {
    let limits = Limits {
        entries: 9,
        bytes: 1000,
        ..Limits::default()
    };
    let mut client = Client::with_limits(SUBSCRIPTIONS.to_vec(), limits);
    let mut taken = Taken::default();
    client.connected();
    want(&mut client, &mut taken, &["alias"]);
    let mut sent = with_alias("a", "alias");
    sent.aliases = vec!["alias".to_owned(); 1000];
    let answers = client.received(response(SOME, [sent.clone()]), &mut taken);
    assert_eq!(error(&answers), None);
    sent.aliases = (0..20).map(|at| at.to_string()).collect();
    let answers = client.received(response(SOME, [sent]), &mut taken);
    assert!(error(&answers).is_some_and(|text| text.contains("over the limit")));
    assert_eq!(client.held(SOME), 1);
}

#[test]
fn no_more_names_are_wanted_than_a_first_request_has_room_for() {
    let limits = Limits {
        wanted: 50,
        claims: 30,
        ..Limits::default()
    };
    let mut client = Client::with_limits(SUBSCRIPTIONS.to_vec(), limits);
    let mut taken = Taken::default();
    want(&mut client, &mut taken, &["a1", "a2", "a3", "a4"]);
    let first = &client.connected()[1];
    assert_eq!(first.subscribe, ["a1", "a2", "a3"]);
    assert_eq!(first.initial_versions, versions(&[]), "too much to claim");
    want(&mut client, &mut taken, &["a2", "a3", "a4"]);
    client.disconnected(End::Clean);
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
