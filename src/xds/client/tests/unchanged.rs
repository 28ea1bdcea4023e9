//! Tests of resources that the server sends again unchanged.

use super::*;

/// Returns a resource without a version, like istiod's clusters and policies.
fn unversioned(type_url: &str, name: &str, body: &'static str) -> Resource {
    Resource { body: Some(Bytes::from_static(body.as_bytes())), ..resource(type_url, name, "") }
}

#[test]
fn a_resource_that_is_sent_again_unchanged_is_not_decoded() {
    let (mut client, mut taken) = connected();
    let mut send = |body| {
        let sent = ["a", "b"].map(|name| unversioned(ALL, name, body));
        let answers = client.received(response(ALL, sent), &mut taken);
        (error(&answers).map(str::len), std::mem::take(&mut taken.log))
    };
    let nothing: [&str; 0] = [];
    assert_eq!(send("one"), (None, vec!["+a".into(), "+b".into()]));
    assert_eq!(send("one"), (None, nothing.map(String::from).into()));
    assert_eq!(send("two"), (None, vec!["+a".into(), "+b".into()]));
    assert_eq!(send("one"), (None, vec!["+a".into(), "+b".into()]));
    let (rejected, decoded) = send("bad");
    assert!(rejected.is_some() && decoded.is_empty());
    // The last valid version is still in force.
    assert_eq!(send("one"), (None, nothing.map(String::from).into()));
    assert_eq!(client.rejected().count(), 0);
    let held = client.usage.held();
    client.disconnected(StreamEnd::Clean);
    let first = client.connected();
    assert_eq!(first[0].initial_versions, versions(&[("a", ""), ("b", "")]));
    let sent = ["a", "b"].map(|name| unversioned(ALL, name, "one"));
    client.received(response(ALL, sent), &mut taken);
    assert_eq!((taken.log.len(), client.usage.held()), (0, held));
}

#[test]
fn a_bad_resource_that_is_sent_again_is_rejected_again() {
    let (mut client, mut taken) = connected();
    taken.has_placeholder = true;
    for _ in 0..2 {
        let sent = response(ALL, [unversioned(ALL, "a", "bad")]);
        let answers = client.received(sent, &mut taken);
        assert!(error(&answers).is_some_and(|text| text.starts_with("a: ")));
    }
    client.received(response(ALL, [unversioned(ALL, "a", "")]), &mut taken);
    assert_eq!(taken.log, ["?a", "+a"], "what stands in is no version of it");
}

#[test]
fn what_another_run_held_without_a_version_is_decoded_once() {
    let (mut client, mut taken) = client();
    assert!(client.restore(ALL, "a", "", 4));
    client.connected();
    for _ in 0..2 {
        let sent = response(ALL, [unversioned(ALL, "a", "good")]);
        client.received(sent, &mut taken);
    }
    assert_eq!(taken.log, ["+a"]);
}

#[test]
fn bodies_that_nobody_reads_are_neither_compared_nor_counted() {
    let (mut client, mut taken) = connected();
    taken.unread = true;
    for body in ["one", "quite another one"] {
        client.received(response(ALL, [unversioned(ALL, "a", body)]), &mut taken);
        assert_eq!(client.usage.held(), (1, "a".len() + 64));
    }
    assert_eq!(taken.log, ["+a"]);
    let other = Resource { body_type: SOME.into(), ..unversioned(ALL, "a", "one") };
    for bad in [other, Resource { body: None, ..unversioned(ALL, "a", "") }] {
        let answers = client.received(response(ALL, [bad]), &mut taken);
        assert!(error(&answers).is_some_and(|text| text.starts_with("a: ")));
    }
}

#[test]
fn all_resources_can_be_requested_again_although_they_are_held() {
    let (mut client, mut taken) = connected();
    want(&mut client, &mut taken, &["s"]);
    let [a, b] = ["a", "b"].map(|name| unversioned(ALL, name, "one"));
    client.received(response(ALL, [a.clone(), b]), &mut taken);
    client.received(response(SOME, [resource(SOME, "s", "1")]), &mut taken);
    assert!(client.is_synced());
    client.request_all();
    client.disconnected(StreamEnd::GoAway);
    taken.log.clear();
    // Also after a stream without a response.
    for _ in 0..2 {
        let first = client.connected();
        assert_eq!(first[0].initial_versions, versions(&[]));
        assert_eq!(first[1].initial_versions, versions(&[("s", "")]));
        assert_eq!((client.is_synced(), client.unanswered(SOME)), (false, 1));
        client.disconnected(StreamEnd::GoAway);
    }
    client.connected();
    client.received(response(SOME, [resource(SOME, "s", "1")]), &mut taken);
    client.received(response(ALL, [a]), &mut taken);
    assert_eq!(taken.log, ["+s", "-b", "+a"]);
    assert_eq!((client.is_synced(), client.unanswered(SOME)), (true, 0));
    client.disconnected(StreamEnd::Clean);
    assert_eq!(client.connected()[0].initial_versions, versions(&[("a", "")]));
}
