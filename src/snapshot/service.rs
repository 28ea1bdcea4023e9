//! Service, and the endpoint sets of its ports.
//!
//! A gateway serves a part of a mesh. A set is therefore built when it is first read, for a tunnel
//! that may use it or for a page. From then on the builder replaces it, so that no other tunnel
//! waits for a change.

use std::sync::{Arc, OnceLock};

use derive_more::Deref;

use super::endpoints::{EndpointSet, Entries};
use super::exclusion::{served, speaks_hbone};
use super::members::{Member, dialled_port};
use super::mesh::{self, Sorted};
use super::names::Alias;
use super::tiers::Ranking;
use super::traffic::Balancing;
use super::{Endpoint, Subset};
use crate::wire::DrainTarget;

/// Service and the endpoints that this gateway may dial for it.
#[derive(Debug, Default, Deref)]
pub struct Service {
    /// Definition as received from the source.
    #[deref(forward)]
    pub definition: Arc<mesh::Service>,
    /// Order of an operator that drains it, or all services behind an alias.
    pub drained: Option<DrainTarget>,
    /// Endpoints per service port, as HBONE listeners dial them. If the service has waypoints, only
    /// tunnels that come from a waypoint use them.
    pub ports: Sorted<u16, LazySet>,
    /// Endpoints per service port for TLS listeners, always at the target port
    /// (docs/wire-contract.md 1.8). Empty if there is no such listener.
    pub passthrough_ports: Sorted<u16, LazySet>,
    /// Endpoints per service port for tunnels that may leave the network. A port without instances
    /// in other networks has none, nor has any port if no entry of the exposure grants transit.
    pub transit_ports: Sorted<u16, TransitSets>,
    /// Other networks that have instances of the service.
    pub other_networks: Box<[Arc<str>]>,
}

impl Service {
    /// Returns the endpoints per service port, those for TLS listeners if `is_passthrough`.
    pub(super) fn sets(&self, is_passthrough: bool) -> &Sorted<u16, LazySet> {
        if is_passthrough { &self.passthrough_ports } else { &self.ports }
    }
}

/// Endpoints of a service port in the own network and in others.
#[derive(Clone, Debug)]
pub struct TransitSets {
    /// Endpoints of other networks take only tunnels that those of the own network cannot take.
    pub failover: Arc<EndpointSet>,
    /// Tunnels are distributed by the rules of the service.
    pub always: Arc<EndpointSet>,
}

/// Number of members from which a set is built by the builder in any case. Below it, the first
/// tunnel holds its worker up for a few milliseconds at most.
const EAGER_MEMBERS: usize = 4096;

/// Endpoint set of a service port that is built when it is first read, unless it is large.
#[derive(Debug)]
pub struct LazySet {
    set: OnceLock<Arc<EndpointSet>>,
    inputs: Arc<SetInputs>,
    port: u16,
    /// True if it is for TLS listeners.
    is_passthrough: bool,
}

impl LazySet {
    /// Returns the set of a port. If it is large or `before`, which it replaces, was built, it is
    /// built at once. It keeps the results of dials.
    pub(super) fn new(
        inputs: &Arc<SetInputs>,
        (port, is_passthrough): (u16, bool),
        before: Option<&Self>,
    ) -> Self {
        let before = before.and_then(|before| before.set.get());
        let members: usize = inputs.behind.iter().map(|of| of.members.len()).sum();
        let built = (before.is_some() || members >= EAGER_MEMBERS)
            .then(|| Arc::new(inputs.build(port, is_passthrough).with_health_of(before)));
        let set = built.map_or_else(OnceLock::new, OnceLock::from);
        Self { set, inputs: Arc::clone(inputs), port, is_passthrough }
    }

    /// Returns the set, and builds it if nobody has read it before.
    pub fn get(&self) -> &Arc<EndpointSet> {
        let build = || Arc::new(self.inputs.build(self.port, self.is_passthrough));
        self.set.get_or_init(build)
    }

    /// Returns whether no endpoint may be dialled. A set that nobody has read is not kept.
    pub fn is_empty(&self) -> bool {
        let build = || self.inputs.build(self.port, self.is_passthrough).endpoints.is_empty();
        self.set.get().map_or_else(build, |set| set.endpoints.is_empty())
    }

    #[cfg(test)]
    pub(crate) fn is_built(&self) -> bool {
        self.set.get().is_some()
    }
}

impl std::ops::Deref for LazySet {
    type Target = Arc<EndpointSet>;

    fn deref(&self) -> &Self::Target {
        self.get()
    }
}

/// Inputs of the endpoint sets of a service.
#[derive(Debug)]
pub(super) struct SetInputs {
    pub(super) definition: Arc<mesh::Service>,
    /// The service itself, or those that an alias leads to, without drained ones.
    pub(super) behind: Box<[Behind]>,
    pub(super) alias: Option<Arc<Alias>>,
    pub(super) network: Arc<str>,
    /// Of this service alone: what it keeps does not grow with the rules of others.
    pub(super) balancing: Arc<Balancing>,
    pub(super) rules: DialRules,
}

/// Rules about the ports at which workloads are dialled.
#[derive(Clone, Copy, Debug)]
pub(super) struct DialRules {
    /// True if HBONE listeners dial endpoints with HBONE only.
    pub(super) hbone_only: bool,
    /// True if there are TLS listeners.
    pub(super) has_passthrough: bool,
}

impl SetInputs {
    pub(super) fn subset(&self) -> Option<&Subset> {
        self.alias.as_ref()?.subset.as_ref()
    }

    pub(super) fn ranking(&self, port: u16) -> Ranking<'_> {
        let (of, network, balancing) = (&self.definition, &self.network, &self.balancing);
        let host = self.alias.as_ref().map_or(&*of.hostname, |alias| alias.name.host.as_str());
        Ranking::new(of, port, host, network, balancing).with_subset(self.subset())
    }

    /// Returns the endpoints of a port in the own network.
    pub(super) fn local(&self, port: u16, is_passthrough: bool) -> Entries {
        let endpoints = self.behind.iter().flat_map(|part| {
            let members = part.members.iter();
            members.filter_map(move |one| part.endpoint(one, port, self.rules, is_passthrough))
        });
        let mut endpoints: Vec<_> = endpoints.collect();
        if self.behind.len() > 1 {
            // A workload of several services is one endpoint. It is ready if it is ready for
            // any of them.
            endpoints.sort_by_key(|(one, ready)| (one.uid(), one.address, !ready));
            endpoints.dedup_by(|(one, _), (other, _)| Arc::ptr_eq(one, other));
        }
        let is_of_alias = |one: &Endpoint| {
            let alias = self.alias.as_ref();
            alias.is_none_or(|alias| alias.has(&one.definition))
        };
        endpoints.retain(|(one, _)| is_of_alias(one));
        Entries::local(endpoints.into_iter(), self.subset())
    }

    fn build(&self, port: u16, is_passthrough: bool) -> EndpointSet {
        self.ranking(port).build_set(self.local(port, is_passthrough))
    }
}

/// Service with its members, at one of its ports or at the requested one.
#[derive(Debug)]
pub(super) struct Behind {
    pub(super) service: Arc<mesh::Service>,
    pub(super) port: Option<u16>,
    /// Members by uid.
    pub(super) members: Arc<[Member]>,
}

impl Behind {
    /// Returns the endpoint of a member and whether it is ready. With `is_passthrough`, it is
    /// always dialled at its target port. Routing decides later between it and a waypoint.
    pub(super) fn endpoint<'a>(
        &self,
        member: &'a Member,
        requested: u16,
        rules: DialRules,
        is_passthrough: bool,
    ) -> Option<(&'a Arc<Endpoint>, bool)> {
        let (port, workload) = (self.port.unwrap_or(requested), member.workload());
        let (target, is_ready) = served(&self.service, workload, port).ok()?;
        let is_tunnelled = !rules.hbone_only || speaks_hbone(workload, port, target);
        let tunnelled = || is_tunnelled.then(|| dialled_port(workload, target));
        let dialled = if is_passthrough { Some(target) } else { tunnelled() };
        let dialled = dialled.filter(|port| *port != 0)?;
        Some((member.endpoint(dialled, rules.has_passthrough)?, is_ready))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::Snapshot;
    use crate::snapshot::builder::{Change, build};
    use crate::snapshot::mesh::{Mesh, Template, Workload};
    use crate::snapshot::tests::samples;
    use crate::snapshot::traffic::{Traffic, TrafficRule};

    fn echo(snapshot: &Snapshot) -> &LazySet {
        &snapshot.services.get("echo.app").expect("a service").ports[&80]
    }

    /// Returns a snapshot with two pods of one service. The first one has this weight.
    fn with_weight(before: &Snapshot, weight: u32) -> Snapshot {
        let pod = |uid: &str, last, capacity| {
            let addresses = [[10, 0, 0, last].into()].into();
            let pod = samples::workload(uid, "echo", Template::default());
            Workload { addresses, capacity, ..pod }
        };
        let mesh = Mesh::new([samples::service("echo")], [pod("a", 1, weight), pod("b", 2, 1)]);
        build(before, Change { mesh: Some((mesh, "east".into())), ..Change::default() })
    }

    #[test]
    fn a_set_is_built_when_it_is_read_and_those_that_replace_it_at_once() {
        let first = with_weight(&Snapshot::default(), 1);
        let second = with_weight(&first, 2);
        assert!(!echo(&first).is_built() && !echo(&second).is_built());
        let weights = |set: &EndpointSet| -> Vec<_> {
            set.endpoints.iter().map(|endpoint| endpoint.weight).collect()
        };
        let states = |set: &EndpointSet| -> Vec<_> {
            set.endpoints.iter().map(|endpoint| Arc::as_ptr(&endpoint.state)).collect()
        };
        assert_eq!(weights(echo(&second)), [2, 1]);
        let third = with_weight(&second, 3);
        assert!(echo(&third).is_built() && !echo(&first).is_built());
        assert_eq!(weights(echo(&third)), [3, 1]);
        assert_eq!(states(echo(&third)), states(echo(&second)));
        // The pod that has not changed has one state in all snapshots, in whatever order.
        assert_eq!(states(echo(&first))[1], states(echo(&third))[1]);
    }

    #[test]
    fn what_a_service_keeps_does_not_grow_with_the_rules_of_others() {
        let rules = |of: &str| {
            let rule = TrafficRule::default();
            let traffic = Traffic::new([(of.into(), rule)], TrafficRule::default());
            Change { traffic: Some(traffic), ..Change::default() }
        };
        let first = build(&with_weight(&Snapshot::default(), 1), rules("other.app"));
        let old = Arc::downgrade(&first.balancing);
        let second = build(&first, rules("another.app"));
        drop(first);
        assert!(second.services.contains_key("echo.app"));
        assert!(old.upgrade().is_none(), "a service keeps all rules");
    }
}
