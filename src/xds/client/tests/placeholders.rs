//! Tests of placeholders for rejected resources.

use super::*;

#[test]
fn the_placeholder_of_a_rejected_resource_stays_until_the_server_removes_it() {
    let (mut client, mut taken) = connected();
    taken.has_placeholder = true;
    let twice = [resource(ALL, "twice", "1"), resource(ALL, "twice", "2")];
    let without_body = Resource { body: None, ..resource(ALL, "empty", "1") };
    let other = Resource { body_type: SOME.to_owned(), ..resource(ALL, "other", "1") };
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
