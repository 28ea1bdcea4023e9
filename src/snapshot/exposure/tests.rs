//! Tests of exposure rules.

use std::time::{Duration, Instant};

use super::*;
use crate::snapshot::tests::{entry, hosts};

fn name(text: &str) -> Authority {
    Authority::parse(text).expect("a valid authority")
}

fn caller<'a>(trust_domain: &'a str, namespace: &'a str, account: &'a str) -> Caller<'a> {
    Caller { trust_domain, namespace, service_account: account, ..Caller::UNKNOWN }
}

fn audience(cluster: &str, namespaces: &[&str], accounts: &[(&str, &str)]) -> Audience {
    Audience {
        anyone: false,
        cluster: (!cluster.is_empty()).then(|| cluster.into()),
        namespaces: namespaces.iter().map(|&name| name.into()).collect(),
        service_accounts: accounts.iter().map(|&(ns, sa)| (ns.into(), sa.into())).collect(),
    }
}

fn trust() -> TrustSet {
    TrustSet::new([("west.local", "west"), ("north.local", "north")])
}

impl ExposureTable {
    fn evaluate(
        &self,
        caller: Caller<'_>,
        trust: &TrustSet,
        host: &str,
        port: u16,
    ) -> Result<(), Reason> {
        let entries = self.entries(host).iter().filter(|entry| entry.applies_to(port));
        admitting(entries, caller, trust).map(|_| ())
    }

    fn evaluate_alias(
        &self,
        caller: Caller<'_>,
        trust: &TrustSet,
        requested: &Authority,
    ) -> Result<(), Reason> {
        admitting(self.entries_with_alias(requested), caller, trust).map(|_| ())
    }
}

#[test]
fn all_keys_of_an_entry_hold_and_values_and_entries_are_alternatives() {
    let mut table = ExposureTable::new(false);
    let to = vec![
        audience("west", &["shop", "cart"], &[("shop", "checkout"), ("cart", "cart")]),
        audience("north", &[], &[]),
    ];
    table.add(entry("echo.app:80", to));
    let judge = |caller, port| table.evaluate(caller, &trust(), "echo.app", port);
    assert_eq!(judge(caller("west.local", "shop", "checkout"), 80), Ok(()));
    assert_eq!(judge(caller("west.local", "cart", "cart"), 80), Ok(()));
    assert_eq!(judge(caller("north.local", "any", "one"), 80), Ok(()));
    assert_eq!(judge(caller("west.local", "cart", "checkout"), 80), Err(Reason::NotForPeer));
    assert_eq!(judge(caller("west.local", "other", "checkout"), 80), Err(Reason::NotForPeer));
    assert_eq!(judge(caller("evil.local", "shop", "checkout"), 80), Err(Reason::NotForPeer));
    assert_eq!(judge(caller("north.local", "any", "one"), 81), Err(Reason::NotExposed));
}

#[test]
fn an_alias_opens_the_service_only_to_those_whom_its_entry_names() {
    let mut table = ExposureTable::new(false);
    for (cluster, name) in [("west", "west.global:80"), ("north", "north.global:8080")] {
        let to = vec![audience(cluster, &[], &[])];
        table.add(ExposedService { names: hosts(&[name]), ..entry("echo.app:80", to) });
    }
    let judge = |domain, requested: &str| {
        table.evaluate_alias(caller(domain, "a", "b"), &trust(), &name(requested))
    };
    assert_eq!(judge("west.local", "west.global:80"), Ok(()));
    assert_eq!(judge("west.local", "north.global:8080"), Err(Reason::NotForPeer));
    assert_eq!(judge("north.local", "north.global:8080"), Ok(()));
    let own = table.evaluate(caller("west.local", "a", "b"), &trust(), "echo.app", 80);
    assert_eq!(own, Ok(()));
    assert_eq!(judge("west.local", "other.global:80"), Err(Reason::NotExposed));
    assert_eq!(table.alias(&name("north.global:8080")), Some(("echo.app", 80)));
}

#[test]
fn a_name_without_port_stands_for_every_port_of_the_service() {
    let mut table = ExposureTable::new(false);
    let to = vec![audience("west", &[], &[])];
    table.add(ExposedService { names: hosts(&["echo.global"]), ..entry("echo.app", to) });
    for port in [80, 443] {
        let requested = name(&format!("echo.global:{port}"));
        assert_eq!(table.alias(&requested), Some(("echo.app", port)));
        let west = caller("west.local", "a", "b");
        let verdict = table.evaluate_alias(west, &trust(), &requested);
        assert_eq!(verdict, Ok(()));
    }
}

#[test]
fn anyone_is_the_trust_set_and_who_has_no_identity() {
    let mut table = ExposureTable::new(false);
    let to = |anyone| vec![Audience { anyone, ..Audience::default() }];
    table.add(ExposedService { names: hosts(&["open.global"]), ..entry("open.app", to(true)) });
    table.add(entry("closed.app", to(false)));
    let judge = |caller, host: &str| table.evaluate(caller, &trust(), host, 1);
    let of = |domain| caller(domain, "a", "b");
    let open = |caller| judge(caller, "open.app");
    assert_eq!(open(of("west.local")), Ok(()));
    assert_eq!(open(of("evil.local")), Err(Reason::NotForPeer));
    assert_eq!(open(Caller::UNKNOWN), Ok(()));
    let alias = table.evaluate_alias(Caller::UNKNOWN, &trust(), &name("open.global:1"));
    assert_eq!(alias, Ok(()));
    let closed = |caller| judge(caller, "closed.app");
    assert_eq!(closed(of("west.local")), Ok(()));
    assert_eq!(closed(Caller::UNKNOWN), Err(Reason::NotForPeer));
}

#[test]
fn counts_of_many_entries_of_one_service_are_kept_in_linear_time() {
    let table = || {
        let mut table = ExposureTable::new(false);
        for _ in 0..50_000 {
            let to = vec![audience("west", &[], &[])];
            table
                .add(ExposedService { names: hosts(&["echo.global"]), ..entry("echo.app:80", to) });
        }
        table
    };
    let (old, mut new) = (table(), table());
    let began = Instant::now();
    new.keep_counts(&old);
    // 0.1 s without optimization; a scan per entry takes a minute.
    assert!(began.elapsed() < Duration::from_secs(10));
    for (old, new) in old.entries("echo.app").iter().zip(new.entries("echo.app")) {
        assert!(Arc::ptr_eq(&old.open, &new.open), "{}", new.index);
    }
    let requested = name("echo.global:80");
    let aliases = new.entries_with_alias(&requested);
    for (old, new) in old.entries("echo.app").iter().zip(aliases) {
        assert!(Arc::ptr_eq(&old.open, &new.open), "{}", new.index);
    }
}
