//! Tests of complete responses, in which absence means removal.

use super::*;

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
