//! Weights of gateways by exceeded budgets of links.

use tokio::time::Instant;

use crate::snapshot::{FACTOR_ONE, InFlight, LinkFactors};
use crate::status::ReducedLink;

use super::{always, assert_shares_with, gateway, pods, spread, two_networks};

fn reduced(from: &str, to: &str, weight_percent: u8) -> ReducedLink {
    ReducedLink { from: from.into(), is_own: from == "east", to: to.into(), weight_percent }
}

#[test]
fn an_exceeded_budget_leaves_a_part_of_the_weight_for_peers_of_its_link_alone() {
    let mut workloads = [pods("east", 2), pods("west", 4), pods("north", 2)].concat();
    workloads.extend([gateway("west", 1), gateway("west", 2), gateway("north", 3)]);
    let snapshot = spread(workloads);
    let set = always(&snapshot);
    let links = [reduced("south", "west", 25), reduced("east", "north", 50)];
    let assert_shares = |from: &str, west: f64, north: f64| {
        let sum = 2.0 + 2.0 * west + north;
        let want = [
            ("10.0.0.1:15008", 1.0 / sum),
            ("10.0.0.2:15008", 1.0 / sum),
            ("192.0.2.1:15008", west / sum),
            ("192.0.2.2:15008", west / sum),
            ("192.0.2.3:15008", north / sum),
        ];
        assert_shares_with(set, &LinkFactors::of_peer(&links, from), &want);
    };
    assert_shares("south", 0.5, 2.0);
    assert_shares("north", 2.0, 2.0);
    assert_shares("east", 2.0, 1.0);
    // Clients of bindings without an identity use that of this gateway.
    assert_shares("", 2.0, 1.0);
}

#[test]
fn tunnels_of_other_peers_in_flight_leave_a_reduced_weight_at_its_percentage() {
    let snapshot = two_networks([1, 1], 1);
    let set = always(&snapshot);
    let links = LinkFactors::of_peer(&[reduced("south", "west", 25)], "south");
    let open = |place: usize, count: usize| -> Vec<_> {
        let state = &set.endpoints[place].state;
        (0..count).map(|_| InFlight::new(state)).collect()
    };
    let want = [("10.0.0.1:15008", 0.8), ("192.0.2.1:15008", 0.2)];
    let _even = [open(0, 10), open(1, 10)];
    assert_shares_with(set, &links, &want);
    let _more = open(1, 10);
    assert_shares_with(set, &links, &want);
}

#[test]
fn gateways_of_one_link_are_compared_by_tunnels_in_flight() {
    let snapshot = two_networks([1, 4], 2);
    let set = always(&snapshot);
    let links = LinkFactors::of_peer(&[reduced("south", "west", 25)], "south");
    let _open = InFlight::new(&set.endpoints[1].state);
    // The busy gateway loses the draws in which the other one is the second or the first.
    let want = [
        ("10.0.0.1:15008", 0.5),
        ("192.0.2.1:15008", 0.25 * 0.75),
        ("192.0.2.2:15008", 0.25 * 1.25),
    ];
    assert_shares_with(set, &links, &want);
}

#[tokio::test(start_paused = true)]
async fn a_low_percentage_of_a_low_weight_is_exact() {
    let snapshot = two_networks([1, 100], 1);
    let set = always(&snapshot);
    let slow = &set.endpoints[1].state;
    slow.record_share(FACTOR_ONE / 4, Instant::now());
    let links = LinkFactors::of_peer(&[reduced("south", "west", 1)], "south");
    // A quarter of 100 instances, of which 1 %.
    let want = [("10.0.0.1:15008", 0.8), ("192.0.2.1:15008", 0.2)];
    assert_shares_with(set, &links, &want);
}

#[test]
fn a_budget_of_the_only_network_leaves_the_service_available() {
    let snapshot = two_networks([0, 2], 1);
    let links = LinkFactors::of_peer(&[reduced("south", "west", 1)], "south");
    assert_shares_with(always(&snapshot), &links, &[("192.0.2.1:15008", 1.0)]);
}
