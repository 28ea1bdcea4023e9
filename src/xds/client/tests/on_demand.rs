//! Tests of subscription by name.

use super::*;

fn change(subscribe: &[&str], unsubscribe: &[&str]) -> Request {
    Request {
        type_url: SOME.into(),
        subscribe: subscribe.iter().map(|name| (*name).to_owned()).collect(),
        unsubscribe: unsubscribe.iter().map(|name| (*name).to_owned()).collect(),
        ..Request::default()
    }
}

#[test]
fn nothing_is_a_star_that_comes_and_goes() {
    let expected = Request { with_node: true, ..change(&["*"], &["*"]) };
    assert_eq!(client().0.connected()[1], expected);
}

#[test]
fn names_are_wanted_by_requests_of_their_own() {
    let (mut client, mut taken) = connected();
    assert_eq!(want(&mut client, &mut taken, &["a"]), [change(&["a"], &[])]);
    let again = want(&mut client, &mut taken, &["a", "*", ""]);
    assert_eq!(again, [], "it is wanted already, and those have no use");
    for type_url in [ALL, "other"] {
        let names = ["a".to_owned()].into();
        assert_eq!(client.set_wanted(type_url, &names, &mut taken), []);
    }
    let answers = client.received(response(SOME, [resource(SOME, "a", "1")]), &mut taken);
    assert!(answers[0].subscribe.is_empty());
    assert_eq!(want(&mut client, &mut taken, &["b"]), [change(&["b"], &[]), change(&[], &["a"])]);
    assert_eq!(taken.log, ["+a", "-a"]);
    // The resource was sent before the server processed the unsubscription.
    client.received(response(SOME, [resource(SOME, "a", "2")]), &mut taken);
    assert_eq!(client.held(SOME), 0);
    want(&mut client, &mut taken, &[]);
    assert_eq!(client.usage.held(), (0, 0));
}

#[test]
fn what_is_wanted_without_a_stream_is_asked_for_on_the_next_one() {
    let (mut client, mut taken) = client();
    let names = ["a", "b", "d"];
    assert_eq!(want(&mut client, &mut taken, &names), []);
    client.connected();
    client.received(response(SOME, [resource(SOME, "a", "1")]), &mut taken);
    client.disconnected(StreamEnd::Clean);
    assert_eq!(want(&mut client, &mut taken, &names[..2]), []);
    let expected = Request {
        initial_versions: versions(&[("a", "1"), ("b", "")]),
        with_node: true,
        ..change(&names[..2], &[])
    };
    assert_eq!(client.connected()[1], expected);
}

#[test]
fn a_name_is_answered_by_a_resource_by_a_removal_and_by_a_rejection() {
    let (mut client, mut taken) = connected();
    want(&mut client, &mut taken, &["bad", "gone", "here", "silent"]);
    assert_eq!(client.unanswered(SOME), 4);
    let sent = Response {
        removed: vec!["gone".to_owned()],
        ..response(SOME, [bad(SOME, "bad", "1"), resource(SOME, "here", "1")])
    };
    client.received(sent, &mut taken);
    assert_eq!(client.unanswered(SOME), 1);
    client.disconnected(StreamEnd::Clean);
    assert_eq!(client.unanswered(SOME), 1);
    want(&mut client, &mut taken, &["here"]);
    assert_eq!(client.unanswered(SOME), 0);
}

#[test]
fn of_what_was_read_from_the_disk_stays_what_is_wanted() {
    let (mut client, mut taken) = client();
    for name in ["a", "b"] {
        assert!(client.restore(SOME, name, "1", 0));
    }
    want(&mut client, &mut taken, &["a"]);
    assert_eq!(taken.log, ["-b"]);
    assert_eq!(client.unanswered(SOME), 0, "it is held");
    let first = &client.connected()[1];
    assert_eq!(first.initial_versions, versions(&[("a", "1")]));
    assert_eq!(first.subscribe, ["a"]);
}
