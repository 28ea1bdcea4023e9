//! Explanation of tunnels to services with instances in another network.

use super::*;
use crate::datapath::balance;
use crate::snapshot::RemoteGateway;

/// Returns the reason for which a real tunnel is rejected before the dial; none if it has an
/// endpoint.
fn rejection(of: &Generated) -> Option<Reason> {
    let (peer, target) = (of.peer(), of.target());
    let own = || Some(OWN_HASH);
    let looped = remote::check_loop(own, target.forwarded());
    let route = looped.and_then(|()| route::resolve(&of.snapshot, &peer, target));
    let permit =
        route.map_err(Into::into).and_then(|route| policy::run(&of.snapshot, &peer, route));
    match permit {
        Err(Rejection { reason, .. }) => Some(reason),
        Ok(permit) => match balance::pick(permit, &Tried::default(), &of.link_factors()) {
            Err(permit) => Some(permit.route().reason_without_endpoint()),
            // The generated gateways fail in no other way.
            Ok(pick) => {
                let endpoints = &pick.route().endpoints.endpoints;
                let remote = |one: &Arc<Endpoint>| one.remote.clone();
                let is_unknown = |of: Arc<RemoteGateway>| !of.is_verifiable();
                let mut remote = endpoints.iter().map(remote);
                let is_untrusted = remote.all(|of| of.is_some_and(is_unknown));
                is_untrusted.then_some(Reason::GatewayUntrusted)
            }
        },
    }
}

/// Listeners, entries and peers that are gateways limit transit; regions are drained.
#[test]
fn in_300_meshes_with_remote_tiers_shares_and_rejections_are_those_of_real_tunnels() {
    let (mut compared, mut rejected, mut drained, mut looped) = (0, 0, 0, 0);
    let (mut reduced, mut subsets, mut loaded) = (0, 0, 0);
    for seed in 100_000.. {
        let of = Generated::new(seed);
        let answer = of.explained();
        let reason = rejection(&of).map(|reason| reason.label().to_owned());
        looped += usize::from(reason.as_deref() == Some("gateway_loop"));
        let is_predicted = answer.outcome.all().any(|one| one.reason == reason);
        let outcome = &answer.outcome;
        assert!(is_predicted, "seed {seed}: {reason:?}, not {outcome:?}");
        let Some(transit) = &answer.transit else {
            continue;
        };
        rejected += usize::from(transit.starts_with("off") && reason.is_some());
        if reaches_other_network(&answer) {
            let p = fit(seed, Fault::Nothing).expect("an endpoint");
            assert!(p > P_MIN, "seed {seed}: p is {p}");
            drained += usize::from(!of.snapshot.balancing.evacuated.is_empty());
            reduced += usize::from(answer.notes.iter().any(|note| note.contains("budget")));
            let to = of.question.to.as_deref();
            subsets += usize::from(to == Some("subset.example:80"));
            loaded += usize::from(is_loaded(&answer));
            compared += 1;
        }
        if compared == 300 {
            break;
        }
    }
    assert!(rejected > 30, "{rejected} are rejected because transit is off");
    assert!(drained > 10, "{drained} have a drained region");
    assert!(looped > 30, "{looped} end as a gateway loop");
    assert!(reduced > 30, "{reduced} have a link with an exceeded budget");
    assert!(subsets > 20, "{subsets} are for a subset");
    assert!(loaded > 100, "{loaded} have a gateway with a load");
}
