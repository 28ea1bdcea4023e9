//! Shares of pools under greedy sources.

mod simulation;

use std::time::{Duration, Instant};

use super::*;

const MAX: usize = 1600;

fn peer(cluster: &str, principal: &str) -> Source {
    Source::cluster(&cluster.into()).identity(&principal.into())
}

fn behind(gateway: &Source, cluster: &str, principal: &str) -> Source {
    gateway.behind(&cluster.into()).identity(&principal.into())
}

/// Takes units until the source is refused.
fn fill(pool: &std::sync::Arc<Pool>, source: &Source) -> Vec<Held> {
    let account = pool.account(source);
    std::iter::from_fn(|| account.take(1).ok()).collect()
}

#[test]
fn a_lone_identity_takes_half_and_a_prefix_too() {
    let pool = Pool::new(Resource::Descriptors, MAX);
    assert_eq!(fill(&pool, &peer("west", "a")).len(), MAX / 2);
    let prefix = Source::prefix([192, 0, 2, 1].into());
    assert_eq!(fill(&pool, &prefix).len(), MAX / 2);
    assert!(pool.used() == 0 && pool.nodes_len() == 0);
}

#[test]
fn one_first_peer_leaves_half_of_its_gateways_share_to_others() {
    let pool = Pool::new(Resource::Descriptors, MAX);
    let gateway = peer("west", "gateway");
    let greedy = fill(&pool, &behind(&gateway, "west", "greedy"));
    assert!((380..=400).contains(&greedy.len()), "{}", greedy.len());
    let same_cluster = fill(&pool, &behind(&gateway, "west", "quiet"));
    assert!(same_cluster.len() >= 50, "{}", same_cluster.len());
    let other_cluster = fill(&pool, &behind(&gateway, "north", "quiet"));
    assert!(other_cluster.len() >= 50, "{}", other_cluster.len());
    assert!(pool.account(&gateway).take(1).is_ok(), "the gateway itself");
}

#[test]
fn all_that_a_gateway_invents_stays_within_its_share() {
    let pool = Pool::new(Resource::Descriptors, MAX);
    let gateway = peer("west", "gateway");
    let mut held = Vec::new();
    for at in 0..2000 {
        held.extend(fill(&pool, &behind(&gateway, &format!("c{at}"), "one")));
        let invented = behind(&gateway, "c", &format!("i{at}"));
        held.extend(fill(&pool, &invented));
    }
    let all = pool.account(&gateway).held();
    assert!(all == held.len() && all <= MAX / 2, "{all}");
    let other = fill(&pool, &peer("north", "a"));
    assert!(other.len() >= MAX / 8, "{}", other.len());
    assert!(pool.account(&peer("west", "b")).take(1).is_ok());
    // Two nodes for each invented cluster that holds something, and no other.
    assert!(pool.nodes_len() <= 2 * held.len() + 4, "{}", pool.nodes_len());
}

#[test]
fn amounts_by_cluster_add_up_and_have_a_label_for_each_kind_without_cluster() {
    let pool = Pool::new(Resource::Descriptors, MAX);
    let gateway = peer("west", "gateway");
    let binding = Source::binding(&"pay".into());
    let _held = [
        (peer("west", "a"), 5),
        (gateway.clone(), 1),
        (behind(&gateway, "north", "a"), 7),
        (behind(&gateway, "south", "a"), 2),
        (peer("east", "a"), 3),
        (Source::prefix([192, 0, 2, 1].into()), 4),
        (Source::prefix([192, 0, 2, 2].into()), 4),
        (binding.client([192, 0, 2, 3].into()), 6),
        (binding.identity(&"a".into()), 1),
    ]
    .map(|(source, amount)| pool.account(&source).charge(amount));
    let by_cluster: Vec<_> = pool.held_by_cluster().into_iter().collect();
    let want = [("bindings", 7), ("east", 3), ("first_peers", 9), ("prefixes", 8), ("west", 6)];
    assert_eq!(by_cluster, want.map(|(cluster, held)| (cluster.to_owned(), held)));
    let sum: i64 = by_cluster.iter().map(|(_, held)| held).sum();
    assert_eq!(usize::try_from(sum), Ok(pool.used()));
}

#[test]
fn identities_behind_a_gateway_share_the_floor_of_their_cluster() {
    let pool = Pool::new(Resource::Descriptors, MAX);
    let gateway = peer("west", "gateway");
    let mut held = Vec::new();
    for at in 0..2000 {
        let invented = behind(&gateway, "greedy", &format!("i{at}"));
        held.extend(pool.account(&invented).take(1));
    }
    assert!(held.len() <= MAX / 3 + 8, "{}", held.len());
    let quiet = fill(&pool, &behind(&gateway, "quiet", "a"));
    assert!(quiet.len() >= 8, "{}", quiet.len());
}

#[test]
fn a_quiet_identity_of_a_busy_cluster_gets_its_floor() {
    let pool = Pool::new(Resource::Descriptors, MAX);
    let fill_one = |at| fill(&pool, &peer("west", &format!("busy{at}")));
    let held: Vec<_> = (0..20).flat_map(fill_one).collect();
    assert!(held.len() < MAX / 4 * 3, "{}", held.len());
    assert_eq!(fill(&pool, &peer("west", "quiet")).len(), 8);
}

#[test]
fn a_large_amount_needs_as_much_free() {
    let pool = Pool::new(Resource::BufferedBytes, 10 << 20);
    let account = pool.account(&peer("west", "a"));
    let held = account.take(4 << 20).expect("room");
    let more = account.take(2 << 20).expect("less than half is held");
    let full = LimitReached::Full(Resource::BufferedBytes);
    assert_eq!(account.take(5 << 20).err(), Some(full));
    let share = LimitReached::Share(Resource::BufferedBytes);
    assert_eq!(account.take(1).err(), Some(share));
    drop(held);
    assert_eq!((account.held(), pool.used()), (2 << 20, 2 << 20));
    drop(more);
    assert_eq!((account.held(), pool.used()), (0, 0));
}

#[test]
fn an_amount_is_held_by_its_source_and_the_parents_of_that() {
    let pool = Pool::new(Resource::Handshakes, MAX);
    let address = Source::prefix([192, 0, 2, 1].into());
    let held = [pool.account(&peer("north", "c")).charge(8), pool.account(&address).charge(4)];
    let held_by = |source: &Source| pool.account(source).held();
    assert_eq!(held_by(&peer("north", "c")), 8);
    assert_eq!(held_by(&Source::cluster(&"north".into())), 8);
    assert_eq!((held_by(&address), pool.used()), (4, 12));
    drop(held);
    assert_eq!(pool.used(), 0);
}

#[test]
fn sources_have_names_and_ipv6_hosts_are_a_64() {
    let gateway = peer("west", "gw");
    let binding = Source::binding(&"db".into());
    let names = [
        (gateway.clone(), "identity gw"),
        (behind(&gateway, "south", "a"), "identity a behind identity gw"),
        (gateway.behind(&"south".into()), "cluster south behind identity gw"),
        (Source::prefix("2001:db8::1:2".parse().unwrap()), "source 2001:db8::/64"),
        (Source::prefix("::ffff:192.0.2.1".parse().unwrap()), "source 192.0.2.1"),
        (binding.client([10, 0, 0, 1].into()), "source 10.0.0.1 of binding db"),
        (binding.identity(&"a".into()), "identity a of binding db"),
    ];
    for (source, name) in names {
        assert_eq!(source.to_string(), name);
    }
    assert_eq!(behind(&gateway, "south", "a").root(), &Source::cluster(&"west".into()));
}

#[test]
fn credit_grows_with_time_up_to_its_maximum() {
    let (start, mut rate) = (Instant::now(), Rate::new(2, 10));
    assert!(rate.spend(10, start) && !rate.spend(1, start));
    let later = start + Duration::from_millis(500);
    assert!(rate.spend(1, later) && !rate.spend(1, later));
    assert!(!rate.is_full(start + Duration::from_secs(5)));
    assert!(rate.is_full(start + Duration::from_secs(60)));
    assert!(!rate.spend(11, start + Duration::from_secs(60)));
}

#[test]
fn a_debt_is_paid_by_time_and_beyond_a_limit_forgotten() {
    let (start, mut rate) = (Instant::now(), Rate::new(1000, 100));
    let seconds = Duration::from_secs;
    let mut spend = |price, at| rate.spend_ahead(price, seconds(2), at);
    assert_eq!(spend(100, start), Duration::ZERO);
    assert_eq!(spend(500, start), Duration::from_millis(500));
    assert_eq!(spend(600, start + Duration::from_millis(100)), seconds(1));
    assert_eq!(spend(u32::MAX, start + seconds(1)), seconds(2), "at most");
    assert_eq!(spend(1, start + seconds(3)), Duration::from_millis(1));
    assert_eq!(spend(101, start + seconds(60)), Duration::from_millis(1));
}

#[test]
fn each_prefix_has_credit_of_its_own_and_a_flood_of_prefixes_shares_one() {
    let (start, mut rates) = (Instant::now(), Rates::new(Rate::new(1, 2), 4096));
    let mut spend = |address: [u8; 4], at| {
        let source = Source::prefix(address.into());
        rates.of(&source, at).spend(1, at)
    };
    let one = [192, 0, 2, 1];
    assert!(spend(one, start) && spend(one, start) && !spend(one, start));
    let flood = (0..20_000_u32).filter(|at| spend((0x0a00_0000 | at).to_be_bytes(), start));
    assert_eq!(flood.count(), 4095 + 2);
    let later = start + Duration::from_secs(10);
    assert!(spend([192, 0, 2, 2], later), "what is full is forgotten");
}

#[test]
fn a_flood_gets_its_rate_of_reports_and_the_next_report_has_the_number_of_the_refused() {
    let (start, mut rate) = (Instant::now(), Rate::new(10, 10));
    let reports = (0..100).filter(|_| rate.spend_on_report(start).is_some());
    assert_eq!(reports.count(), 10);
    let later = start + Duration::from_secs(1);
    assert_eq!(rate.spend_on_report(later), Some(90));
    assert_eq!(rate.spend_on_report(later), Some(0));
    assert_eq!(rate.take_refused(), 0);
}

#[test]
fn a_source_that_floods_takes_no_report_of_another_one_and_is_forgotten_once_it_is_quiet() {
    let (start, mut rates) = (Instant::now(), Rates::new(Rate::new(10, 10), 256));
    let [flood, other] = ["flood", "other"].map(|name| peer("west", name));
    let reports = (0..100).filter(|_| rates.of(&flood, start).spend_on_report(start).is_some());
    assert_eq!(reports.count(), 10);
    assert_eq!(rates.of(&other, start).spend_on_report(start), Some(0));
    assert_eq!(rates.sweep(start), []);
    let later = start + Duration::from_secs(1);
    assert_eq!(rates.sweep(later), [(Some(flood), 90)]);
    assert_eq!(rates.sweep(later), []);
}

#[test]
fn refused_requests_of_sources_beyond_the_table_are_reported_together() {
    let (start, mut rates) = (Instant::now(), Rates::new(Rate::new(1, 1), 256));
    let mut reports = |now| {
        let all = (0..256 + 50).map(|at| peer("west", &format!("minted-{at}")));
        all.filter(|minted| rates.of(minted, now).spend_on_report(now).is_some()).count()
    };
    assert_eq!(reports(start), 256 + 1);
    let later = start + Duration::from_secs(1);
    assert_eq!(rates.sweep(later), [(None, 49)]);
}
