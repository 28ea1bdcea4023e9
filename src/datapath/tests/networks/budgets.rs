//! Weights of gateways by exceeded budgets of links.

use super::*;
use crate::snapshot::FACTOR_ONE;
use crate::status::ReducedLink;

fn reduced(from: &str, to: &str, weight_percent: u8) -> ReducedLink {
    ReducedLink { from: from.into(), is_own: from == "east", to: to.into(), weight_percent }
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
