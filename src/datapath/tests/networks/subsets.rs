//! Subsets with endpoints in other networks.

use super::*;
use crate::snapshot::{Subset, SubsetPart};
use crate::wire::label::REGION;

/// Returns the endpoints of a subset of 10 % of region `east` and 90 % of region `west`, which has
/// two of its six pods in this network.
fn subset(transit: Transit) -> Arc<EndpointSet> {
    let mut workloads = [pods("east", 4), pods("west", 4), pods("north", 3)].concat();
    workloads[2..4].iter_mut().for_each(|one| one.locality = Arc::new(locality("west")));
    workloads.extend([gateway("west", 1), gateway("west", 2), gateway("north", 3)]);
    let part = |region: &str, weight| SubsetPart {
        name: region.into(),
        labels: std::iter::once((REGION.into(), region.into())).collect(),
        weight,
    };
    let of = Subset { name: "mix".into(), parts: [part("east", 10), part("west", 90)].into() };
    let alias = Alias::new(alias("echo.app", &["echo.app"]), Some(of));
    let label = Arc::clone(&alias.label);
    let distribution = Some(Distribution::Network);
    let rule = TrafficRule { distribution, ..TrafficRule::default() };
    let change = Change {
        names: Some(NameTable::new([], [("echo.app@mix", alias)])),
        ..change(transit, service(&[]), workloads, rule)
    };
    let snapshot = build(&Snapshot::default(), change);
    let service = snapshot.derived_services.get(&label).expect("a service");
    Arc::clone(service.endpoints_by(80, transit).expect("a set"))
}

#[tokio::test(start_paused = true)]
async fn a_part_whose_first_tier_fails_uses_its_next_one_before_another_part() {
    let gateways = ["192.0.2.1:15008", "192.0.2.2:15008"];
    let local = ["10.0.0.1:15008", "10.0.0.2:15008"];
    // Under failover, other networks come after all parts of the own network.
    for (transit, to_local, through) in
        [(Transit::Always, 0.05, &gateways[..]), (Transit::Failover, 0.5, &[])]
    {
        let set = subset(transit);
        let first = set.endpoints.iter().filter(|one| {
            let is_west = *one.definition.locality.region == *"west";
            is_west && one.remote.is_none()
        });
        let first = Tried { endpoints: first.cloned().collect(), ..Tried::default() };
        assert_eq!(first.endpoints.len(), 2);
        let is_local = |_: &u32| {
            let chosen = choose(&set, &first, NO_LINK_FACTORS).expect("an endpoint");
            local.contains(&chosen.address.to_string().as_str())
        };
        fastrand::seed(17);
        let count = (0..10_000).filter(is_local).count();
        // Four standard deviations of a share of 10 % are 120.
        let want = if through.is_empty() { 10_000 } else { 1_000 };
        assert!(count.abs_diff(want) < 120, "{transit:?}: {count}");
        for one in &first.endpoints {
            one.state.eject(Instant::now());
        }
        let to_local = local.iter().map(|at| (*at, to_local));
        let want: Vec<_> = to_local.chain(through.iter().map(|at| (*at, 0.45))).collect();
        assert_shares(&set, &want);
    }
}
