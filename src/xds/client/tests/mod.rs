//! Tests of each rule by an example; [`schedules`] tests them in combination.

mod limits;
mod on_demand;
mod schedules;
mod unchanged;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;

use super::rejected::{LISTED_MAX, NACK_BYTES_MAX, NAME_BYTES_MAX};
use super::{Client, Mode, Request, Resource, ResourceStore, Response, StreamEnd, Subscription};

const ALL: &str = "type.googleapis.com/all";
const SOME: &str = "type.googleapis.com/some";

/// Store that logs all calls. It rejects the body `bad` and bodies that start with `long`.
#[derive(Default)]
struct LoggingStore {
    /// True if rejected resources have placeholders.
    has_placeholder: bool,
    /// True if bodies are not used.
    unread: bool,
    /// True if each response is complete.
    whole: bool,
    names: BTreeSet<String>,
    log: Vec<String>,
}

impl ResourceStore for LoggingStore {
    fn upsert(&mut self, _: &'static str, resource: &Resource) -> Result<(), String> {
        let name = &resource.name;
        match resource.body.as_deref() {
            Some(b"bad") => return Err("weight: -1 is no weight; write 0 or more".to_owned()),
            Some(reason) if reason.starts_with(b"long") => {
                return Err(String::from_utf8_lossy(reason).into_owned());
            }
            _ => {}
        }
        self.names.insert(name.to_string());
        self.log.push(format!("+{name}"));
        Ok(())
    }

    fn handle_rejection(&mut self, _: &'static str, name: &str) -> bool {
        if self.has_placeholder {
            self.log.push(format!("?{name}"));
        }
        self.has_placeholder
    }

    fn uses_bodies(&self, _: &str) -> bool {
        !self.unread
    }

    fn is_complete_state(&self, _: &str, _: &Response) -> bool {
        self.whole
    }

    fn remove(&mut self, _: &'static str, name: &str) {
        self.names.remove(name);
        self.log.push(format!("-{name}"));
    }
}

const SUBSCRIPTIONS: [Subscription; 2] = [
    Subscription { type_url: ALL, mode: Mode::Wildcard },
    Subscription { type_url: SOME, mode: Mode::OnDemand },
];

fn client() -> (Client, LoggingStore) {
    (Client::new(SUBSCRIPTIONS.to_vec()), LoggingStore::default())
}

fn connected() -> (Client, LoggingStore) {
    let (mut client, taken) = client();
    assert_eq!(client.connected().len(), 2);
    (client, taken)
}

/// Wants these names of the on-demand type.
fn want(client: &mut Client, taken: &mut LoggingStore, names: &[&str]) -> Vec<Request> {
    let names = names.iter().map(|name| (*name).to_owned());
    client.set_wanted(SOME, &names.collect(), taken)
}

fn resource(type_url: &str, name: &str, version: &str) -> Resource {
    Resource {
        name: name.into(),
        version: version.into(),
        body: Some(Bytes::from_static(b"good")),
        body_type: type_url.into(),
    }
}

fn bad(type_url: &str, name: &str, version: &str) -> Resource {
    Resource { body: Some(Bytes::from_static(b"bad")), ..resource(type_url, name, version) }
}

fn response<const N: usize>(type_url: &str, resources: [Resource; N]) -> Response {
    Response {
        type_url: type_url.to_owned(),
        nonce: "n".to_owned(),
        resources: resources.into(),
        removed: Vec::new(),
    }
}

fn removal(type_url: &str, name: &str) -> Response {
    Response { removed: vec![name.to_owned()], ..response(type_url, []) }
}

/// Returns the error of the only answer; none for an ACK.
fn error(answers: &[Request]) -> Option<&str> {
    assert_eq!(answers.len(), 1);
    answers[0].error.as_deref()
}

fn versions(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    let pairs = pairs.iter();
    pairs.map(|(name, version)| ((*name).to_owned(), (*version).to_owned())).collect()
}

#[test]
fn first_requests_carry_the_node_and_what_was_accepted() {
    let (mut client, mut taken) = connected();
    let sent = [resource(ALL, "a", "1"), resource(ALL, "b", "1"), bad(ALL, "never-good", "1")];
    client.received(response(ALL, sent), &mut taken);
    let sent = [bad(ALL, "a", "2"), resource(ALL, "b", "2")];
    client.received(response(ALL, sent), &mut taken);
    client.disconnected(StreamEnd::Clean);
    let expected = Request {
        type_url: ALL.into(),
        initial_versions: versions(&[("a", "1"), ("b", "2")]),
        with_node: true,
        ..Request::default()
    };
    assert_eq!(client.connected()[0], expected);
}

#[test]
fn each_response_has_one_answer_with_its_own_nonce() {
    let (mut client, mut taken) = connected();
    for (nonce, sent) in [("7", resource(ALL, "a", "1")), ("3", bad(ALL, "a", "2"))] {
        let nonce = nonce.to_owned();
        let response = Response { nonce: nonce.clone(), ..response(ALL, [sent]) };
        let [answer] = &client.received(response, &mut taken)[..] else {
            panic!("one answer");
        };
        let expected = Request {
            type_url: ALL.into(),
            nonce,
            error: answer.error.clone(),
            ..Request::default()
        };
        assert_eq!(*answer, expected);
    }
    client.disconnected(StreamEnd::Status);
    assert!(client.connected().iter().all(|first| first.nonce.is_empty()));
}

#[test]
fn a_response_without_a_nonce_applies_and_has_no_answer() {
    let (mut client, mut taken) = connected();
    let response = Response { nonce: String::new(), ..response(ALL, [resource(ALL, "a", "1")]) };
    assert_eq!(client.received(response, &mut taken), []);
    assert_eq!(taken.log, ["+a"]);
}

#[test]
fn a_nack_names_each_rejected_resource_while_the_others_apply() {
    let (mut client, mut taken) = connected();
    let sent = [bad(ALL, "x", "4"), resource(ALL, "a", "1"), bad(ALL, "y", "5")];
    let answers = client.received(response(ALL, sent), &mut taken);
    let why = "weight: -1 is no weight; write 0 or more";
    let both = format!("x: {why}; y: {why}");
    assert_eq!(error(&answers), Some(&*both));
    assert_eq!(taken.log, ["+a"]);
    let rejected: Vec<_> = client.rejected().collect();
    assert_eq!(rejected, [(ALL, "x", why, "4"), (ALL, "y", why, "5")]);
}

#[test]
fn what_a_response_gets_wrong_is_rejected_by_name() {
    let good = || resource(ALL, "a", "2");
    let no_body = Resource { body: None, ..good() };
    let other = Resource { body_type: "type.googleapis.com/x".into(), ..good() };
    let long = "l".repeat(NAME_BYTES_MAX + 1);
    let both = Response { removed: vec!["a".to_owned()], ..response(ALL, [good()]) };
    for (sent, named, reason) in [
        (response(ALL, [good(), good()]), "a", "sent twice in one response"),
        (both, "a", "both sent and removed in one response"),
        (response(ALL, [no_body]), "a", "it has no body"),
        (
            response(ALL, [other]),
            "a",
            "body: type \"type.googleapis.com/x\", want type.googleapis.com/all",
        ),
        (response(ALL, [resource(ALL, "", "2")]), "(no name)", "it has no name"),
        (response(ALL, [resource(ALL, "*", "2")]), "*", "the name `*` is reserved"),
        (
            response(ALL, [resource(ALL, &long, "2")]),
            &long[1..],
            "name: 2049 bytes, want at most 2048",
        ),
    ] {
        let (mut client, mut taken) = connected();
        client.received(response(ALL, [resource(ALL, "a", "1")]), &mut taken);
        let answers = client.received(sent, &mut taken);
        assert_eq!(error(&answers), Some(&*format!("{named}: {reason}")));
        assert_eq!(client.rejected().count(), 1);
        assert_eq!(taken.log, ["+a"], "{reason}");
        client.disconnected(StreamEnd::Clean);
        let held = &client.connected()[0].initial_versions;
        assert_eq!(*held, versions(&[("a", "1")]), "{reason}");
    }
}

#[test]
fn a_nack_is_bounded_and_says_how_many_it_leaves_out() {
    let (mut client, mut taken) = connected();
    let long = |at: usize| Resource {
        body: Some(Bytes::from(format!("long{}", "ä".repeat(4000)))),
        ..resource(ALL, &format!("r{at}"), "1")
    };
    let sent = (0..100).map(long).collect();
    let sent = Response { resources: sent, ..response(ALL, []) };
    let answers = client.received(sent, &mut taken);
    let error = error(&answers).expect("a NACK");
    assert!(error.len() <= NACK_BYTES_MAX && error.len() > NACK_BYTES_MAX / 2);
    let named = error.matches(": long").count();
    assert!(error.ends_with(&format!("; and {} more", 100 - named)));
    assert_eq!(client.rejected().count(), 100);
}

#[test]
fn rejections_are_kept_for_people_up_to_a_limit() {
    let (mut client, mut taken) = connected();
    let sent = (0..LISTED_MAX + 10).map(|at| bad(ALL, &format!("r{at}"), "1"));
    let sent = Response { resources: sent.collect(), ..response(ALL, []) };
    client.received(sent, &mut taken);
    assert_eq!(client.rejected().count(), LISTED_MAX);
    client.received(response(ALL, [resource(ALL, "r0", "2")]), &mut taken);
    client.received(response(ALL, [bad(ALL, "r1", "7")]), &mut taken);
    assert_eq!(client.rejected().count(), LISTED_MAX - 1);
    let (.., version) = client.rejected().next().expect("many");
    assert_eq!(version, "7", "r1 is first");
}

#[test]
fn a_good_version_a_removal_or_a_new_stream_clears_a_rejection() {
    let rejecting = || {
        let (mut client, mut taken) = connected();
        client.received(response(ALL, [bad(ALL, "a", "1")]), &mut taken);
        assert_eq!(client.rejected().count(), 1);
        (client, taken)
    };
    for sent in [response(ALL, [resource(ALL, "a", "2")]), removal(ALL, "a")] {
        let (mut client, mut taken) = rejecting();
        client.received(response(ALL, []), &mut taken);
        assert_eq!(client.rejected().count(), 1);
        client.received(sent, &mut taken);
        assert_eq!(client.rejected().count(), 0);
    }
    let (mut client, mut taken) = rejecting();
    client.disconnected(StreamEnd::Clean);
    client.connected();
    assert_eq!(client.rejected().count(), 1, "nothing came yet");
    client.received(response(ALL, []), &mut taken);
    assert_eq!(client.rejected().count(), 0);
}

#[test]
fn the_removal_of_what_is_not_held_is_fine() {
    let (mut client, mut taken) = connected();
    assert_eq!(error(&client.received(removal(ALL, "a"), &mut taken)), None);
    assert!(taken.log.is_empty());
}

#[test]
fn removals_come_before_what_is_new() {
    let (mut client, mut taken) = connected();
    client.received(response(ALL, [resource(ALL, "old", "1")]), &mut taken);
    let sent =
        Response { removed: vec!["old".to_owned()], ..response(ALL, [resource(ALL, "new", "1")]) };
    client.received(sent, &mut taken);
    assert_eq!(taken.log, ["+old", "-old", "+new"]);
}

#[test]
fn a_type_that_we_did_not_subscribe_to_is_nacked_and_changes_nothing() {
    let (mut client, mut taken) = connected();
    let other = "type.googleapis.com/other";
    let sent = response(other, [resource(other, "a", "1")]);
    let answers = client.received(sent, &mut taken);
    assert_eq!(error(&answers), Some("no subscription to this type"));
    assert_eq!((&*answers[0].type_url, &*answers[0].nonce), (other, "n"));
    assert!(taken.log.is_empty());
}

#[test]
fn nothing_is_dropped_because_a_stream_ended() {
    let (mut client, mut taken) = connected();
    client.received(response(ALL, [resource(ALL, "a", "1")]), &mut taken);
    client.disconnected(StreamEnd::Status);
    let late = client.received(removal(ALL, "a"), &mut taken);
    assert_eq!(late, [], "its stream is over");
    assert_eq!((client.held(ALL), &taken.log[..]), (1, &["+a".to_owned()][..]));
    client.connected();
    client.received(removal(ALL, "a"), &mut taken);
    assert_eq!((client.held(ALL), taken.log.len()), (0, 2));
}

#[test]
fn synced_is_after_the_first_useful_response_of_each_wildcard_type() {
    let (mut client, mut taken) = connected();
    assert_eq!(client.pending().collect::<Vec<_>>(), [ALL]);
    client.received(response(SOME, []), &mut taken);
    client.received(response(ALL, [bad(ALL, "a", "1")]), &mut taken);
    assert!(!client.is_synced());
    let half_bad = [bad(ALL, "a", "2"), resource(ALL, "b", "2")];
    client.received(response(ALL, half_bad), &mut taken);
    assert!(client.is_synced() && client.pending().next().is_none());
    client.received(response(ALL, [bad(ALL, "a", "3")]), &mut taken);
    client.disconnected(StreamEnd::Connect);
    assert!(client.is_synced());
}

#[test]
fn what_was_read_from_the_disk_is_claimed_and_can_be_removed() {
    let (mut client, mut taken) = client();
    assert!(client.restore(ALL, "a", "1", 0));
    assert!(!client.restore("other", "a", "1", 0) && !client.restore(ALL, "*", "1", 0));
    assert!(!client.is_synced());
    let first = client.connected();
    assert_eq!(first[0].initial_versions, versions(&[("a", "1")]));
    client.received(removal(ALL, "a"), &mut taken);
    assert_eq!(taken.log, ["-a", "-"]);
}

#[test]
fn a_type_is_subscribed_to_once() {
    let twice = [SUBSCRIPTIONS, SUBSCRIPTIONS].concat();
    assert_eq!(Client::new(twice).connected().len(), 2);
}

#[test]
fn waits_double_up_to_15_s_until_an_end_is_harmless() {
    let (mut client, _) = client();
    let mut wait = |end| u64::try_from(client.disconnected(end).as_millis()).unwrap();
    let growing: Vec<_> = (0..13).map(|_| wait(StreamEnd::Connect)).collect();
    let expected = [10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 10_240];
    assert_eq!(growing[..11], expected);
    assert_eq!(growing[11..], [15_000; 2]);
    for end in [StreamEnd::Harmless, StreamEnd::GoAway, StreamEnd::Clean] {
        assert_eq!([wait(end), wait(end), wait(StreamEnd::Status)], [10, 10, 20]);
        assert_eq!(wait(StreamEnd::Connect), 40);
    }
    // A stream does not reset the backoff by having been useful (docs/wire-contract.md 3.1).
    client.connected();
    assert_eq!(client.disconnected(StreamEnd::Status), Duration::from_millis(80));
}

#[test]
fn a_grpc_status_is_an_end_by_its_code_and_message() {
    for (code, message, end) in [
        (0, "", StreamEnd::Clean),
        (1, "", StreamEnd::Harmless),
        (2, "", StreamEnd::Harmless),
        (4, "", StreamEnd::Harmless),
        (14, "x: transport is closing", StreamEnd::Harmless),
        (14, "received prior goaway: NO_ERROR", StreamEnd::GoAway),
        (14, "no such host", StreamEnd::Status),
        (16, "transport is closing", StreamEnd::Status),
        (99, "", StreamEnd::Status),
    ] {
        assert_eq!(StreamEnd::from_status(code, message), end, "{code} {message}");
    }
}

#[test]
fn what_a_whole_response_does_not_name_is_gone() {
    let (mut client, mut taken) = connected();
    let sent = ["a", "b", "c"].map(|name| resource(ALL, name, "1"));
    client.received(response(ALL, sent), &mut taken);
    client.received(response(ALL, [bad(ALL, "gone", "1")]), &mut taken);
    client.received(response(ALL, [resource(ALL, "a", "2")]), &mut taken);
    assert_eq!(client.held(ALL), 3, "a partial response");

    (taken.whole, taken.log) = (true, Vec::new());
    let whole = [resource(ALL, "a", "2"), bad(ALL, "b", "2"), bad(ALL, "d", "1")];
    client.received(response(ALL, whole), &mut taken);
    assert_eq!(taken.log, ["-c", "+a"], "a bad version of b is no absence");
    assert_eq!(client.held(ALL), 2);
    let rejected: Vec<_> = client.rejected().map(|(_, name, ..)| name).collect();
    assert_eq!(rejected, ["b", "d"], "what is not named is not rejected either");

    client.received(response(ALL, []), &mut taken);
    assert_eq!((client.held(ALL), client.usage.held()), (0, (0, 0)));
}

#[test]
fn the_placeholder_of_a_rejected_resource_stays_until_the_server_removes_it() {
    let (mut client, mut taken) = connected();
    taken.has_placeholder = true;
    let twice = [resource(ALL, "twice", "1"), resource(ALL, "twice", "2")];
    let without_body = Resource { body: None, ..resource(ALL, "empty", "1") };
    let other = Resource { body_type: SOME.into(), ..resource(ALL, "other", "1") };
    client.received(response(ALL, twice), &mut taken);
    let rest = [without_body, other, bad(ALL, "bad", "1"), bad(ALL, "", "1")];
    client.received(response(ALL, rest), &mut taken);
    assert_eq!(taken.log, ["?twice", "?empty", "?other", "?bad", "?"]);
    assert_eq!(client.held(ALL), 4);

    client.disconnected(StreamEnd::Clean);
    let first = client.connected();
    let claimed = versions(&[("bad", ""), ("empty", ""), ("other", ""), ("twice", "")]);
    assert_eq!(first[0].initial_versions, claimed);
    for name in ["twice", "empty", "other", "bad"] {
        client.received(removal(ALL, name), &mut taken);
    }
    assert_eq!(taken.log[5..], ["-twice", "-", "-empty", "-other", "-bad"]);
    assert_eq!(client.usage.held(), (0, 0), "the place is given back");
}

#[test]
fn a_good_version_stays_when_a_bad_one_arrives_and_has_no_placeholder() {
    let (mut client, mut taken) = connected();
    taken.has_placeholder = true;
    client.received(response(ALL, [resource(ALL, "a", "1")]), &mut taken);
    client.received(response(ALL, [bad(ALL, "a", "2")]), &mut taken);
    assert_eq!(taken.log, ["+a"]);
    client.disconnected(StreamEnd::Clean);
    let first = client.connected();
    assert_eq!(first[0].initial_versions, versions(&[("a", "1")]));
}

#[test]
fn placeholders_of_all_rejected_resources_complete_the_first_response() {
    struct WithPlaceholders;
    impl ResourceStore for WithPlaceholders {
        fn upsert(&mut self, _: &'static str, _: &Resource) -> Result<(), String> {
            Err("not readable".to_owned())
        }
        fn handle_rejection(&mut self, type_url: &'static str, name: &str) -> bool {
            (type_url, name) == (ALL, "policy")
        }
        fn remove(&mut self, _: &'static str, _: &str) {}
    }
    let (mut client, _) = connected();
    client.received(response(ALL, [resource(ALL, "other", "1")]), &mut WithPlaceholders);
    assert!(!client.is_synced());
    client.received(response(ALL, [resource(ALL, "policy", "1")]), &mut WithPlaceholders);
    assert!(client.is_synced());
}
