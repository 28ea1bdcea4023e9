//! Weights of gateways by the loads that they advertise.

use std::time::Duration;

use tokio::time::advance;

use super::*;
use crate::wire::ServiceLoad;

/// Records what the gateway at 192.0.2.`at` advertises.
fn advertise(set: &EndpointSet, at: u8, ready: u32, free_percent: u32) {
    let address = ([192, 0, 2, at], 15008).into();
    let mut endpoints = set.endpoints.iter();
    let endpoint = endpoints.find(|one| one.address == address);
    let load = ServiceLoad { ready, free_percent };
    let endpoint = endpoint.expect("a gateway");
    endpoint.record_load(load, Instant::now());
}

fn shares(set: &EndpointSet) -> Vec<f64> {
    pick_probabilities(set, NO_LINK_FACTORS, Instant::now())
}

/// Returns the predicted share of the gateway as a multiple of that of the own network's pod.
fn ratio(set: &EndpointSet) -> f64 {
    let shares = shares(set);
    shares[1] / shares[0]
}

#[tokio::test(start_paused = true)]
async fn free_capacity_replaces_the_count_and_the_count_returns_when_it_expires() {
    let snapshot = two_networks([4, 4], 2);
    let pods = ["10.0.0.1:15008", "10.0.0.2:15008", "10.0.0.3:15008", "10.0.0.4:15008"];
    let shares = |direct, first, second| {
        let through = [("192.0.2.1:15008", first), ("192.0.2.2:15008", second)];
        let direct = pods.map(|at| (at, direct));
        [&direct[..], &through].concat()
    };
    let set = always(&snapshot);
    assert_shares(set, &shares(0.125, 0.25, 0.25));
    // 2 of 4 instances are left, and the first gateway has half of its own capacity.
    advertise(set, 1, 2, 50);
    advertise(set, 2, 2, 100);
    let sum = 4.0 + 0.5 + 1.0;
    assert_shares(set, &shares(1.0 / sum, 0.5 / sum, 1.0 / sum));
    // The next snapshot keeps what was advertised.
    let change = Change { exposure: Some(exposure(Transit::Failover)), ..Change::default() };
    let next = build(&snapshot, change);
    assert_shares(always(&next), &shares(1.0 / sum, 0.5 / sum, 1.0 / sum));
    advance(Duration::from_secs(60)).await;
    assert_shares(set, &shares(0.125, 0.25, 0.25));
}

#[tokio::test(start_paused = true)]
async fn a_load_changes_a_weight_by_a_factor_of_four_at_most() {
    let snapshot = two_networks([1, 4], 1);
    let set = always(&snapshot);
    assert!((ratio(set) - 4.0).abs() < 1e-9);
    for (ready, free_percent, want) in [
        (0, 100, 1.0),
        (4, 0, 1.0),
        (4, 10, 1.0),
        (4, 50, 2.0),
        (8, 100, 8.0),
        (u32::MAX, 100, 16.0),
    ] {
        advance(Duration::from_secs(60)).await;
        advertise(set, 1, ready, free_percent);
        let got = ratio(set);
        assert!((got - want).abs() < 1e-9, "{ready} {free_percent}: {got}");
    }
}

#[tokio::test(start_paused = true)]
async fn tunnels_in_flight_are_compared_by_the_changed_weights() {
    let snapshot = two_networks([1, 4], 1);
    let set = always(&snapshot);
    advertise(set, 1, 1, 100);
    // One tunnel each is the same load as none, because both weights are 1.
    let _open: Vec<_> = set.endpoints.iter().map(|one| InFlight::new(&one.state)).collect();
    assert_shares(set, &[("10.0.0.1:15008", 0.5), ("192.0.2.1:15008", 0.5)]);
    let _more = InFlight::new(&set.endpoints[1].state);
    assert_shares(set, &[("10.0.0.1:15008", 0.75), ("192.0.2.1:15008", 0.25)]);
}

#[tokio::test(start_paused = true)]
async fn a_load_beyond_all_bounds_is_forgotten_as_soon_as_the_largest_valid_one() {
    let after = |ready| {
        let snapshot = two_networks([4, 4], 2);
        async move {
            let (set, mut ratios) = (always(&snapshot), Vec::new());
            advertise(set, 1, ready, 100);
            for _ in 0..10 {
                advance(Duration::from_secs(1)).await;
                advertise(set, 1, 4, 100);
                ratios.push(shares(set));
            }
            ratios
        }
    };
    let last = |ratios: &[Vec<f64>]| ratios.last().cloned();
    let (absurd, largest) = (after(u32::MAX).await, after(16).await);
    assert_eq!(absurd, largest);
    assert_ne!(largest.first(), last(&largest).as_ref(), "the load counts");
}
