//! File of the orders.

mod simulation;

use super::*;

#[test]
fn only_orders_to_keep_are_written_and_each_is_read_back() {
    let since = humantime::parse_rfc3339("2026-01-01T00:00:00Z").unwrap();
    let order = |kind, name, is_persisted| {
        (DrainTarget::parse(kind, name).unwrap(), Drained { since, is_persisted })
    };
    let kept = [
        order("region", "us-east-2/us-east-2a", true),
        order("gateway", "192.0.2.1:15008", true),
        order("listener", "cross network", true),
    ];
    let mut all = Drains::from(kept.clone());
    all.extend([order("cluster", "west", false)]);
    assert_eq!(parse(&format(&all)), (Drains::from(kept), None));
}

#[test]
fn what_cannot_be_read_is_named_kept_and_the_rest_is_in_force() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("drains.new");
    assert_eq!(read(&path), (Drains::new(), None));
    let head = "its first line is not `strait drains 1`";
    let now = "2026-01-01T00:00:00Z";
    for (text, orders, want) in [
        ("", 0, head),
        ("strait drains 2\n", 0, head),
        (
            &format!("strait drains 1\nnow region a\n{now} zone a\n{now} region b\n"),
            1,
            "not TIME KIND NAME: line 2, 3",
        ),
        (&"x".repeat((256 << 10) + 1), 0, "it has more than 262144 bytes"),
    ] {
        fs::write(&path, text).unwrap();
        let (drains, problem) = read(&path);
        assert_eq!((drains.len(), problem.as_deref()), (orders, Some(want)));
        store(&path, &drains).unwrap();
        assert_eq!(read(&path), (drains, None));
        let kept = fs::read_to_string(folder.path().join("drains.new.unreadable"));
        assert_eq!(kept.unwrap(), text);
    }
}
