//! Goodness of fit between predicted pick probabilities and picks of the balancer, for seeded
//! random meshes (Pearson's chi-square).

mod bindings;
mod mesh;
mod networks;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fastrand::Rng;
use mesh::Generated;
use tokio::time::Instant;

use super::*;
use crate::datapath::balance::{Tried, choose};
use crate::datapath::dial::{DenyList, remote};
use crate::datapath::tests::chi_square::p_value;
use crate::datapath::{route, transit};
use crate::snapshot::builder::Change;
use crate::snapshot::mesh::{Mesh, Protocol, Service, Template, Workload};
use crate::snapshot::{Endpoint, InFlight, TrustSet};
use crate::wire::Transit;

const MESHES: u64 = 1_000;
const PICKS: u32 = 10_000;
/// Significance level: one correct sample in a million is rejected. With 1,000 meshes, one run
/// in a thousand would fail; the seeds are fixed.
const P_MIN: f64 = 1e-6;

/// Fault that is injected into the explanation.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Nothing,
    /// All endpoints have equal probabilities.
    Even,
    /// Shares are proportional to the weight, regardless of the tier.
    ByWeight,
    /// The most and the least probable endpoint are exchanged.
    Swapped,
}

fn explained(
    snapshot: &Snapshot,
    question: &Question,
    (transit, links): (Transit, &[ReducedLink]),
    now: Instant,
) -> Answer {
    let deny = DenyList::new(Vec::new(), Vec::new());
    let rules = ListenerRules::with_transit(transit);
    let listeners = [("cross-network".to_owned(), rules)];
    let world = ExplainState {
        snapshot,
        places: &ConfigPositions::default(),
        deny: &deny,
        listeners: &listeners,
        bindings: &[],
        links,
        held: &[],
        has_room: true,
        now,
    };
    run(&world, question).expect("a good question")
}

/// Returns whether a tunnel can be picked for an endpoint of another network.
fn reaches_other_network(answer: &Answer) -> bool {
    let mut rows = answer.endpoints.iter();
    rows.any(|row| row.network.is_some() && row.probability > 0.0)
}

/// Returns whether a weight has a factor.
fn is_loaded(answer: &Answer) -> bool {
    let mut rows = answer.endpoints.iter();
    rows.any(|row| (row.factor - 1.0).abs() > 1e-9)
}

fn distort(answer: &mut Answer, fault: Fault) {
    let rows = &mut answer.endpoints;
    let count = f64::from(u32::try_from(rows.len()).expect("few"));
    let sum: f64 = rows.iter().map(|row| f64::from(row.weight)).sum();
    match fault {
        Fault::Nothing => {}
        Fault::Even => rows.iter_mut().for_each(|row| row.probability = 1.0 / count),
        Fault::ByWeight => {
            let weight = |row: &EndpointRow| f64::from(row.weight);
            rows.iter_mut().for_each(|row| row.probability = weight(row) / sum);
        }
        Fault::Swapped => {
            if let [first, .., last] = &mut rows[..] {
                std::mem::swap(&mut first.probability, &mut last.probability);
            }
        }
    }
}

/// Counts the picks of each endpoint, by its workload and address.
fn picked(of: &Generated) -> HashMap<(Arc<str>, String), u32> {
    let peer = of.peer();
    let route = || {
        let target = of.target();
        remote::check_loop(|| Some(OWN_HASH), target.forwarded())?;
        let route = route::resolve(&of.snapshot, &peer, target)?;
        let transit = transit::evaluate(&of.snapshot, &peer, &route);
        Ok::<_, Reason>(route.with_endpoints(&of.snapshot, transit))
    };
    let links = of.link_factors();
    let mut counts: HashMap<*const Endpoint, (Arc<Endpoint>, u32)> = HashMap::new();
    let Ok(mut kept) = route() else {
        return HashMap::new();
    };
    for _ in 0..PICKS {
        if kept.by_waypoint {
            kept = route().expect("a route");
        }
        if let Some(endpoint) = choose(&kept.endpoints, &Tried::default(), &links) {
            let key = Arc::as_ptr(endpoint);
            counts.entry(key).or_insert_with(|| (Arc::clone(endpoint), 0)).1 += 1;
        }
    }
    let counts = counts.into_values();
    let key = |endpoint: &Endpoint| (Arc::clone(endpoint.uid()), endpoint.address.to_string());
    counts.map(|(endpoint, count)| (key(&endpoint), count)).collect()
}

/// Returns the p-value of a mesh's picks; none if nothing is picked.
fn fit(seed: u64, fault: Fault) -> Option<f64> {
    let of = Generated::new(seed);
    let mut answer = of.explained();
    fastrand::seed(seed);
    let counts = picked(&of);
    if answer.endpoints.is_empty() {
        assert!(counts.is_empty(), "seed {seed}: {answer:?}");
        return None;
    }
    let sum: f64 = answer.endpoints.iter().map(|row| row.probability).sum();
    assert!((sum - 1.0).abs() < 1e-9, "seed {seed}: {sum}");
    distort(&mut answer, fault);
    let bins = answer.endpoints.iter().map(|row| {
        let key = (Arc::clone(&row.workload), row.address.clone());
        let count = counts.get(&key).copied().unwrap_or(0);
        (row.probability * f64::from(PICKS), f64::from(count))
    });
    let bins: Vec<_> = bins.collect();
    let reported: f64 = bins.iter().map(|(_, count)| count).sum();
    assert_eq!(reported, f64::from(PICKS), "seed {seed}: a pick that is not reported");
    Some(p_value(&bins))
}

#[test]
fn the_probabilities_fit_the_picks_of_a_thousand_meshes() {
    let (next, tested) = (AtomicU64::new(0), AtomicU64::new(0));
    let work = || {
        while tested.load(Ordering::Relaxed) < MESHES {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if let Some(p) = fit(seed, Fault::Nothing) {
                assert!(p > P_MIN, "seed {seed}: p is {p}");
                tested.fetch_add(1, Ordering::Relaxed);
            }
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(work);
        }
    });
    let drawn = next.load(Ordering::Relaxed);
    assert!(drawn < 2 * MESHES, "too many meshes without endpoint: {drawn}");
}

#[test]
fn probabilities_that_are_wrong_are_caught() {
    for fault in [Fault::Even, Fault::ByWeight, Fault::Swapped] {
        let caught = (0..40).filter_map(|seed| fit(seed, fault)).filter(|p| *p <= P_MIN).count();
        assert!(caught >= 5, "{fault:?} is caught in {caught} of 40 meshes");
    }
}
