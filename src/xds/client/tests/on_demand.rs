//! What is asked for by name, and what comes with it.

use super::*;

/// A resource that is a member of others, as a workload is of its services.
fn member(name: &str, version: &str, of: &str) -> Resource {
    Resource {
        body: Some(Bytes::from(format!("of {of}"))),
        ..resource(SOME, name, version)
    }
}

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
    let expected = Request {
        with_node: true,
        ..change(&["*"], &["*"])
    };
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
        assert_eq!(client.want(type_url, &names, &mut taken), []);
    }
    let answers = client.received(response(SOME, [resource(SOME, "a", "1")]), &mut taken);
    assert!(answers[0].subscribe.is_empty());
    assert_eq!(
        want(&mut client, &mut taken, &["b"]),
        [change(&["b"], &[]), change(&["b"], &["a"])]
    );
    assert_eq!(taken.log, ["+a", "-a"]);
}

#[test]
fn what_is_wanted_without_a_stream_is_asked_for_on_the_next_one() {
    let (mut client, mut taken) = client();
    let names = ["a", "b", "net/10.0.0.1", "d"];
    assert_eq!(want(&mut client, &mut taken, &names), []);
    client.connected();
    let sent = [resource(SOME, "a", "1"), with_alias("c", "net/10.0.0.1")];
    client.received(response(SOME, sent), &mut taken);
    client.disconnected(End::Clean);
    assert_eq!(want(&mut client, &mut taken, &names[..3]), []);
    let expected = Request {
        initial_versions: versions(&[("a", "1"), ("b", ""), ("c", "1")]),
        with_node: true,
        ..change(&names[..3], &[])
    };
    assert_eq!(client.connected()[1], expected);
}

#[test]
fn members_come_and_go_with_what_they_are_members_of() {
    let (mut client, mut taken) = connected();
    want(&mut client, &mut taken, &["ns/a", "ns/b"]);
    let sent = [
        member("pod-1", "1", "ns/a"),
        member("pod-2", "1", "ns/a ns/b"),
        member("pod-3", "1", "ns/c"),
        resource(SOME, "ns/a", "1"),
    ];
    client.received(response(SOME, sent), &mut taken);
    assert_eq!(taken.log[2..4], ["+pod-3", "-pod-3"], "nobody wants it");
    assert_eq!(client.held(SOME), 3);

    client.disconnected(End::Clean);
    let claimed = versions(&[("ns/a", "1"), ("pod-1", "1"), ("pod-2", "1")]);
    assert_eq!(client.connected()[1].initial_versions, claimed);

    taken.log.clear();
    let sent = want(&mut client, &mut taken, &["ns/b"]);
    assert_eq!(sent, [change(&["ns/b"], &["ns/a", "pod-1"])]);
    assert_eq!(taken.log, ["-ns/a", "-pod-1"]);
    let sent = [member("pod-1", "2", "ns/a"), member("pod-2", "2", "ns/a")];
    client.received(response(SOME, sent), &mut taken);
    assert_eq!(client.held(SOME), 0, "pod-2 is a member of it no more");
    want(&mut client, &mut taken, &[]);
    assert_eq!(client.usage.held(), (0, 0));
}

#[test]
fn what_is_forgotten_by_one_name_stays_for_another() {
    let (mut client, mut taken) = connected();
    want(&mut client, &mut taken, &["ip", "pod"]);
    client.received(response(SOME, [with_alias("pod", "ip")]), &mut taken);
    want(&mut client, &mut taken, &["ip"]);
    assert_eq!(client.held(SOME), 1);
    want(&mut client, &mut taken, &[]);
    assert_eq!(taken.log, ["+pod", "-pod"]);
}

#[test]
fn a_name_is_answered_by_what_it_stands_for_by_a_removal_and_by_a_rejection() {
    let (mut client, mut taken) = connected();
    want(
        &mut client,
        &mut taken,
        &["bad", "gone", "here", "ip", "silent"],
    );
    assert_eq!(client.unanswered(SOME), 5);
    let sent = Response {
        removed: vec!["gone".to_owned()],
        ..response(
            SOME,
            [
                bad(SOME, "bad", "1"),
                resource(SOME, "here", "1"),
                with_alias("pod", "ip"),
            ],
        )
    };
    client.received(sent, &mut taken);
    assert_eq!(client.unanswered(SOME), 1);
    client.disconnected(End::Clean);
    assert_eq!(client.unanswered(SOME), 1);
    want(&mut client, &mut taken, &["here"]);
    assert_eq!(client.unanswered(SOME), 0);
}

#[test]
fn of_what_was_read_from_the_disk_stays_what_is_wanted() {
    let (mut client, mut taken) = client();
    let service = ["ns/a".into()];
    assert!(client.restore(SOME, "ns/a", "1", &[]));
    assert!(client.restore(SOME, "pod-1", "2", &service));
    assert!(client.restore(SOME, "ns/b", "1", &[]));
    assert!(client.restore(SOME, "pod-2", "1", &["ns/b".into()]));
    want(&mut client, &mut taken, &["ns/a"]);
    assert_eq!(taken.log, ["-ns/b", "-pod-2"]);
    assert_eq!(client.unanswered(SOME), 0, "it is held");
    let first = &client.connected()[1];
    assert_eq!(
        first.initial_versions,
        versions(&[("ns/a", "1"), ("pod-1", "2")])
    );
    assert_eq!(first.subscribe, ["ns/a"]);
}
