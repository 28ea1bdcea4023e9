//! Lookup of the service to which an authority leads, and evaluation of its exposure.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use crate::config::HostPort;
use crate::reason::Reason;
use crate::wire::sni::RouteBy;
use crate::wire::{Authority, Host};

use super::exposure::admitting;
use super::mesh::{self, Workload};
use super::names::Alias;
use super::{Caller, EndpointSet, ExposedBy, Exposure, LazySet, Service, Snapshot};

mod exclusion;
mod exposed_workloads;
mod limits;
mod links;
#[cfg(test)]
mod tests;
mod transit;
mod waypoints;

pub use exclusion::{exclusion_reason, location_exclusion};

/// Service port that matches an authority.
#[derive(Clone, Debug)]
pub struct LookupResult<'a> {
    pub service: &'a Arc<Service>,
    /// Port of the service; the service has it.
    pub port: u16,
    /// Part of the configuration or mesh that the authority matched.
    pub matched_by: MatchedBy,
}

/// Port of a service, which its hostname identifies.
#[derive(Clone, Copy, Debug)]
pub struct ServicePort<'a> {
    pub host: &'a str,
    pub port: u16,
}

/// Requested authority, with the service port to which it leads and its match.
#[derive(Clone, Copy, Debug)]
pub struct Requested<'a> {
    pub authority: &'a Authority,
    pub to: ServicePort<'a>,
    pub matched_by: &'a MatchedBy,
}

impl LookupResult<'_> {
    pub fn requested<'a>(&'a self, authority: &'a Authority) -> Requested<'a> {
        let to = ServicePort { host: &self.service.hostname, port: self.port };
        Requested { authority, to, matched_by: &self.matched_by }
    }
}

/// Part of the configuration or mesh that an authority matched. It determines the exposure rules
/// that apply.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum MatchedBy {
    /// Hostname, name of its family, or VIP of the service.
    #[default]
    Service,
    /// Name that `exposure` gives to the service.
    Exposed,
    Alias(Arc<Alias>),
    Workload(Arc<Workload>),
}

impl Snapshot {
    /// Looks up the service of an authority. A name is matched against the names that `exposure`
    /// gives, then the aliases visible to the caller's cluster, hostnames, and names of families.
    /// An address is matched against the VIPs of this network, then its exposed workloads.
    ///
    /// Names of the configuration come first, so that a tenant cannot take them over by choosing
    /// such a hostname. Names that objects give come after hostnames, so that a tenant cannot take
    /// over those either. Nothing is resolved by DNS.
    pub fn find(&self, caller: Caller<'_>, requested: &Authority) -> Option<LookupResult<'_>> {
        let (service, port, matched_by) = match &requested.host {
            Host::Name(name) => self.find_name(caller, name, requested)?,
            Host::Ip(ip) => match self.service_by_vip(*ip) {
                Some(service) => (service, requested.port, MatchedBy::Service),
                None => return self.find_workload(caller, *ip, requested),
            },
        };
        let has_port = service.ports.contains_key(&port);
        has_port.then_some(LookupResult { service, port, matched_by })
    }

    /// Looks up the service of a name.
    fn find_name(
        &self,
        caller: Caller<'_>,
        name: &str,
        requested: &Authority,
    ) -> Option<(&Arc<Service>, u16, MatchedBy)> {
        if let Some((host, port)) = self.exposed_alias(requested) {
            return Some((self.service_by_name(host)?, port, MatchedBy::Exposed));
        }
        if let Some(alias) = self.names.alias(requested, self.cluster(caller)) {
            let (service, port) = match alias.single_target() {
                Some(HostPort { host, port }) => {
                    (self.service_by_name(host)?, port.unwrap_or(requested.port))
                }
                None => (self.derived_services.get(&alias.label)?, requested.port),
            };
            return Some((service, port, MatchedBy::Alias(Arc::clone(alias))));
        }
        Some((self.service_by_unassigned_name(name)?, requested.port, MatchedBy::Service))
    }

    /// Looks up the workload at an address. If it serves this port for several services, returns
    /// the first that the caller may reach by address, or else the first.
    fn find_workload(
        &self,
        caller: Caller<'_>,
        ip: IpAddr,
        requested: &Authority,
    ) -> Option<LookupResult<'_>> {
        let mut found = self.ports_at_address(ip, requested.port);
        let first = found.next()?;
        let is_allowed =
            |found: &LookupResult<'_>| self.exposed_by(caller, found.requested(requested)).is_ok();
        if is_allowed(&first) {
            return Some(first);
        }
        Some(found.find(is_allowed).unwrap_or(first))
    }

    /// Returns the service of a name that the configuration does not give to the peer. If the
    /// configuration gives the name to other peers or for another port, only a service in the
    /// namespace that owns it may answer.
    pub fn service_by_unassigned_name(&self, name: &str) -> Option<&Arc<Service>> {
        let service = self.service_by_name(name)?;
        self.may_use_name(name, &service.definition).then_some(service)
    }

    /// Returns whether a service may have a name that the configuration does not give to the peer.
    fn may_use_name(&self, name: &str, service: &mesh::Service) -> bool {
        let owner = self.names.owner(&service.hostname);
        owner == Some(&service.namespace) || !self.is_configured_name(name)
    }

    /// Returns whether the configuration gives this name to a service, by an alias or in
    /// `exposure`.
    pub(super) fn is_configured_name(&self, name: &str) -> bool {
        !self.names.aliases_of(name).is_empty()
            || (self.exposure.hosts_with_alias(name).next().is_some()
                && self.overridden_alias(name).is_none())
    }

    /// Returns the service and port to which a name of `exposure` leads.
    pub fn exposed_alias(&self, requested: &Authority) -> Option<(&str, u16)> {
        let Host::Name(name) = &requested.host else {
            return None;
        };
        let alias = self.exposure.alias(requested)?;
        self.overridden_alias(name).is_none().then_some(alias)
    }

    /// Returns the namespace of the objects that give an alias, if a service of another namespace
    /// claims it as its hostname. A claim counts even if no service answers, as two claims may
    /// exclude each other. The namespace that owns a name keeps it.
    pub(super) fn overridden_alias(&self, name: &str) -> Option<&str> {
        let of = self.exposure.namespace_of_alias(name)?;
        let mut claims = self.index.claims(name).iter();
        let is_claimed = claims.any(|claim| *claim.service.namespace != *of);
        (is_claimed && self.names.owner(name) != Some(of)).then_some(of)
    }

    pub fn service_by_name(&self, host: &str) -> Option<&Arc<Service>> {
        let own = self.services.get(host);
        own.or_else(|| {
            let mut family = self.names.family(self.names.stem(host)?);
            family.find_map(|name| self.services.get(&*name))
        })
    }

    /// Returns the service of a hostname, or the derived service of a label.
    pub fn service_or_derived(&self, host: &str) -> Option<&Arc<Service>> {
        self.services.get(host).or_else(|| self.derived_services.get(host))
    }

    /// Returns the endpoints of a lookup result, those for TLS listeners if `is_passthrough`.
    pub fn endpoints(&self, found: &LookupResult<'_>, is_passthrough: bool) -> Arc<EndpointSet> {
        let LookupResult { service, port, .. } = found;
        if let MatchedBy::Workload(workload) = &found.matched_by {
            let endpoint = self.workload_endpoint(service, &workload.uid, *port, is_passthrough);
            return Arc::new(EndpointSet::new(endpoint));
        }
        service.sets(is_passthrough).get(port).map(LazySet::get).cloned().unwrap_or_default()
    }

    fn cluster<'a>(&'a self, caller: Caller<'a>) -> Option<&'a str> {
        self.trust.cluster(caller)
    }
}

/// Exposure of the services that a lookup found.
impl Snapshot {
    /// Evaluates the exposure rules, or the control plane's exports if the rules have no entry. All
    /// services behind an alias must be exposed. Those that do not exist or lack the port are left
    /// out, because they contribute no endpoint.
    ///
    /// # Errors
    /// [`Reason::NotForPeer`], or [`Reason::NotExposed`] to any peer.
    pub fn evaluate_exposure(&self, caller: Caller<'_>, of: Requested<'_>) -> Result<(), Reason> {
        let mut ports = self.exposed_ports(of).peekable();
        // An open tunnel can outlive all targets. The rules of their names alone then decide about
        // it.
        let names = match of.matched_by {
            MatchedBy::Alias(alias) if ports.peek().is_none() => &*alias.to,
            _ => &[],
        };
        let names = names.iter().map(|HostPort { host, port }| {
            let to = ServicePort { host, port: port.unwrap_or(of.authority.port) };
            Requested { to, matched_by: &MatchedBy::Service, ..of }
        });
        ports.chain(names).try_for_each(|of| self.exposed_by(caller, of).map(|_| ()))
    }

    /// Returns the rule that exposes one service port, which is not behind an alias, to a caller.
    pub fn exposed_by(
        &self,
        caller: Caller<'_>,
        of: Requested<'_>,
    ) -> Result<ExposedBy<'_>, Reason> {
        let ServicePort { host, port } = of.to;
        if self.is_cluster_local(host) {
            return Err(Reason::NotExposed);
        }
        let entries = self.exposure_entries(host);
        let applying = self.entries_of(entries, of);
        let refused = match admitting(applying, caller, &self.trust) {
            Ok(entry) => return Ok(ExposedBy::Entry(entry)),
            Err(refused) => refused,
        };
        if *of.matched_by == MatchedBy::Service {
            if self.is_exposed_by_link(caller, host) {
                return Ok(ExposedBy::Link);
            }
            if entries.is_empty() && self.is_exposed_without_entry(caller, host, port) {
                return Ok(ExposedBy::DefaultOrExport);
            }
        }
        Err(refused)
    }

    /// Returns the entries that apply to a port of a service, by the match of the requested
    /// authority. `of_host` are those of the service. Only entries with an alias count for that
    /// alias: a name for another consumer grants nothing.
    fn entries_of<'a>(
        &'a self,
        of_host: &'a [Exposure],
        Requested { authority, to, matched_by }: Requested<'_>,
    ) -> impl Iterator<Item = &'a Exposure> {
        let by_name = *matched_by == MatchedBy::Exposed;
        let by_address = matches!(matched_by, MatchedBy::Workload(_));
        let named = by_name.then(|| self.exposure.entries_with_alias(authority));
        let of_host = if by_name { &[] } else { of_host };
        let of_port = of_host
            .iter()
            .filter(move |entry| entry.applies_to(to.port) && (entry.workloads || !by_address));
        named.into_iter().flatten().chain(of_port)
    }

    /// Returns whether a service is exposed to any peer, apart from links: by an entry that meets
    /// the condition, or without entries by default or by an export of one of the ports.
    pub fn is_exposed_to_any(
        &self,
        host: &str,
        mut ports: impl Iterator<Item = u16>,
        admits: impl Fn(&Exposure) -> bool,
    ) -> bool {
        if self.is_cluster_local(host) {
            return false;
        }
        match self.exposure_entries(host) {
            [] => {
                self.is_exposed_by_default(host) || ports.any(|port| self.is_exported(host, port))
            }
            entries => entries.iter().any(admits),
        }
    }

    /// Returns whether a service without an entry is exposed to a caller of the trust set, by
    /// default or by an export.
    fn is_exposed_without_entry(&self, caller: Caller<'_>, host: &str, port: u16) -> bool {
        let is_exposed = || self.is_exposed_by_default(host) || self.is_exported(host, port);
        self.cluster(caller).is_some() && is_exposed()
    }

    /// Returns whether `exposure.default` exposes a service without an entry. A service that is
    /// visible only in its namespace (`exportTo: ["."]`) needs an entry.
    pub fn is_exposed_by_default(&self, host: &str) -> bool {
        let is_private = |service: &Arc<Service>| service.private;
        self.exposure.exposes_by_default && !self.services.get(host).is_some_and(is_private)
    }

    /// Evaluates an open tunnel by the target of an alias that serves its endpoint, if that target
    /// no longer exists. [`Self::evaluate_exposure`] evaluates only targets that exist.
    pub fn evaluate_removed_target(
        &self,
        caller: Caller<'_>,
        of: Requested<'_>,
        endpoint: &Workload,
    ) -> Result<(), Reason> {
        let MatchedBy::Alias(alias) = of.matched_by else {
            return Ok(());
        };
        let served = |target: &str| {
            let served = endpoint.services.keys();
            let served = served.filter_map(|name| name.split_once('/'));
            let served = served.filter(|(_, host)| self.names.is_same_family(host, target));
            served.collect::<Vec<_>>()
        };
        let is_its = |target: &str| !served(target).is_empty();
        let is_meant = |(namespace, host): &(&str, &str)| self.may_answer(host, namespace);
        let mut targets = alias.to.iter().map(|target| served(&target.host));
        if targets.any(|served| !served.is_empty() && !served.iter().any(is_meant)) {
            return Err(Reason::NotExposed);
        }
        let mut refusals = alias.to.iter().filter_map(|target| {
            let (service, port) =
                (self.service_by_name(&target.host), target.port.unwrap_or(of.authority.port));
            let is_there = service.is_some_and(|service| service.ports.contains_key(&port));
            let host = service.map_or(&*target.host, |service| &service.hostname);
            let is_gone = !is_there && is_its(&target.host);
            let (to, matched_by) = (ServicePort { host, port }, &MatchedBy::Service);
            is_gone.then(|| self.exposed_by(caller, Requested { to, matched_by, ..of }).err())?
        });
        refusals.next().map_or(Ok(()), Err)
    }

    /// Returns the service ports that have to be exposed, with the match that their rules have: for
    /// an alias, all existing ones behind it.
    pub fn exposed_ports<'a>(&'a self, of: Requested<'a>) -> impl Iterator<Item = Requested<'a>> {
        let (alias, own) = match of.matched_by {
            MatchedBy::Alias(alias) => (Some(alias), None),
            _ => (None, Some(of)),
        };
        let port = of.authority.port;
        let behind = alias.into_iter().flat_map(move |alias| self.behind(alias, port));
        let behind = behind.map(move |(host, port)| {
            let (to, matched_by) = (ServicePort { host, port }, &MatchedBy::Service);
            Requested { to, matched_by, ..of }
        });
        own.into_iter().chain(behind)
    }

    /// Returns the existing services behind an alias, each with the port that is reached.
    pub fn behind<'a>(
        &'a self,
        alias: &'a Alias,
        requested: u16,
    ) -> impl Iterator<Item = (&'a str, u16)> {
        alias.to.iter().filter_map(move |HostPort { host, port }| {
            let (service, port) = (self.service_by_name(host)?, port.unwrap_or(requested));
            let has_port = service.ports.contains_key(&port);
            has_port.then_some((&*service.hostname, port))
        })
    }

    /// Returns the routing key of tunnels, if an entry of the service or of the requested name sets
    /// it. Of several entries or of several services behind an alias, the strictest applies.
    pub fn route_by(&self, requested: Requested<'_>) -> Option<RouteBy> {
        let Requested { authority, to, matched_by } = requested;
        let of = |(host, port)| self.exposure.route_by(&self.exposure_host(host), port);
        match matched_by {
            MatchedBy::Alias(alias) => self.behind(alias, authority.port).filter_map(of).max(),
            MatchedBy::Exposed => {
                let called = self.exposure.entries_with_alias(authority);
                called.map(|entry| entry.route_by).max().flatten().max(of((to.host, to.port)))
            }
            _ => of((to.host, to.port)),
        }
    }

    /// Returns whether `requested` may still lead to a service as when a tunnel was opened. Only
    /// the configuration changes the result, and hostnames that override an alias of objects.
    pub fn still_leads_to(
        &self,
        caller: Caller<'_>,
        requested: &Authority,
        service: &mesh::Service,
        port: u16,
        matched_by: &MatchedBy,
    ) -> bool {
        let host = &*service.hostname;
        let Host::Name(name) = &requested.host else {
            return true;
        };
        let exposed = || self.exposed_alias(requested);
        match matched_by {
            MatchedBy::Service => {
                match (exposed(), self.names.alias(requested, self.cluster(caller))) {
                    (Some((now, at)), _) => at == port && self.names.is_same_family(now, host),
                    (None, Some(alias)) => {
                        let mut targets = alias.to.iter();
                        targets.any(|target| self.names.is_same_family(&target.host, host))
                    }
                    (None, None) => {
                        self.names.is_same_family(name, host) && self.may_use_name(name, service)
                    }
                }
            }
            MatchedBy::Exposed => exposed()
                .is_some_and(|(now, at)| at == port && self.names.is_same_family(now, host)),
            MatchedBy::Alias(alias) => {
                let now = self.names.alias(requested, self.cluster(caller));
                exposed().is_none() && now.is_some_and(|now| now.keeps_targets_of(alias))
            }
            MatchedBy::Workload(_) => false,
        }
    }

    /// Returns whether an object of its own cluster keeps a service local, which overrides all
    /// other rules.
    pub fn is_cluster_local(&self, host: &str) -> bool {
        self.scope.local.contains(host) || self.closed_namespace(host).is_some()
    }

    /// Returns the namespace of a service, if it is closed because some of its objects are not
    /// known.
    pub fn closed_namespace<'a>(&self, host: &'a str) -> Option<&'a str> {
        let closed = Some(&self.scope.closed).filter(|closed| !closed.is_empty())?;
        self.names.owner(host).filter(|namespace| closed.contains(*namespace))
    }

    /// Returns the entries that apply to a service. If there are any, they alone decide about its
    /// exposure.
    pub fn exposure_entries(&self, host: &str) -> &[Exposure] {
        self.exposure.entries(&self.exposure_host(host))
    }

    /// Returns the hostname whose entries apply to a service: its own, or else a name of its family
    /// that no other service has. An exported hostname can be two services, one of its cluster and
    /// one of all clusters; entries of either apply to both.
    fn exposure_host<'a>(&self, host: &'a str) -> Cow<'a, str> {
        if self.exposure.has_entry(host) || !self.exposure.has_entries() {
            return Cow::Borrowed(host);
        }
        let has_entry = |name: &String| self.exposure.has_entry(name);
        let with_entry = || self.family_of(host).filter(has_entry);
        let own = with_entry().find(|name| self.is_other_name(name, host));
        let is_exported = || self.scope.exported.contains(host);
        let found = own.or_else(|| with_entry().next().filter(|_| is_exported()));
        found.map_or(Cow::Borrowed(host), Cow::Owned)
    }

    /// Returns whether a service is exported, by a separate object or by the control plane for this
    /// port. The export may use its hostname or another name of its family.
    pub fn is_exported(&self, host: &str, port: u16) -> bool {
        let is_its =
            |name: &str| self.exports.contains(name, port) && self.is_other_name(name, host);
        self.scope.exported.contains(host)
            || self.exports.contains(host, port)
            || self.family_of(host).any(|name| is_its(&name))
    }

    /// Returns all names of the family to which a name belongs, if any.
    pub(super) fn family_of(&self, host: &str) -> impl Iterator<Item = String> {
        let stem = self.names.stem(host).into_iter();
        stem.flat_map(|stem| self.names.family(stem))
    }

    /// Returns whether `name` is an alternative name, by its family, of the service `host`.
    fn is_other_name(&self, name: &str, host: &str) -> bool {
        let is_other = *name != *host && !self.services.contains_key(name);
        let called = || self.service_by_name(name);
        is_other && called().is_none_or(|service| *service.hostname == *host)
    }

    /// Returns whether adding or removing the service of this hostname may move rules of its family
    /// from one service to another.
    pub(super) fn moves_family_rules(&self, host: &str) -> bool {
        let names: Vec<_> = self.family_of(host).collect();
        let has_rules =
            |name: &String| self.exposure.has_entry(name) || self.exports.contains_host(name);
        let is_other = |name: &&String| ***name != *host;
        let mut others = names.iter().filter(is_other);
        names.iter().any(has_rules) && others.any(|name| self.services.contains_key(&**name))
    }
}
