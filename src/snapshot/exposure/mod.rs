//! Exposure rules: the peers that may reach a service, the names that they may use, and the
//! visibility of services by exports and links.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use crate::reason::Reason;
use crate::wire::sni::{RouteBy, SniPattern};
use crate::wire::{Authority, Host, Transit};

use super::{Caller, ServiceLimits, TrustSet, TunnelCount};

#[cfg(test)]
mod tests;
mod transit;

pub use crate::config::Audience;
pub use transit::TransitRule;

/// Exposure rules by service and by alias. The table is independent of the mesh, so a service that
/// is removed and added again keeps its rules.
#[derive(Debug, Default, PartialEq)]
pub struct ExposureTable {
    /// True if services without an entry are exposed to every peer of the trust set, except those
    /// that are visible only in their namespace.
    exposes_by_default: bool,
    /// Entries by service hostname.
    services: HashMap<Box<str>, Vec<Exposure>>,
    /// Entries by host of an alias, each with the target of the alias.
    aliases: HashMap<Box<str>, Vec<(AliasTarget, Exposure)>>,
    /// True if an entry sets the namespace of its service.
    pub(super) has_namespaces: bool,
    /// Rules for entries and exports that state no transit, in order of precedence.
    transit_rules: Vec<TransitRule>,
    /// True if an entry or a rule grants transit to other networks.
    has_transit: bool,
    /// True if an entry has limits.
    has_limits: bool,
    /// Hosts that routes of TLS listeners expose to anyone.
    routed: HashSet<Box<str>>,
}

/// Service and port to which an alias leads.
#[derive(Clone, Debug, PartialEq)]
struct AliasTarget {
    /// Port that the authority must have; `None` matches any port.
    requested_port: Option<u16>,
    /// Hostname of the service.
    host: Box<str>,
    /// Port of the service; `None` means the requested port.
    port: Option<u16>,
}

/// Services and ports that a control plane exports to every peer of the trust set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExportSet(HashMap<Box<str>, Vec<u16>>);

impl ExportSet {
    /// Returns whether a port of a service is exported.
    pub fn contains(&self, host: &str, port: u16) -> bool {
        self.0.get(host).is_some_and(|ports| ports.contains(&port))
    }

    /// Returns whether any port of a service is exported.
    pub fn contains_host(&self, host: &str) -> bool {
        self.0.contains_key(host)
    }
}

impl<'a> FromIterator<(&'a str, u16)> for ExportSet {
    fn from_iter<T: IntoIterator<Item = (&'a str, u16)>>(exports: T) -> Self {
        let mut set = Self::default();
        for (host, port) in exports {
            set.0.entry(host.into()).or_default().push(port);
        }
        set
    }
}

/// Services exported or kept local by their own cluster, and the clusters that are linked to it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceVisibility {
    /// Hostnames of services exported on all ports to every peer of a linked cluster.
    pub exported: HashSet<Box<str>>,
    /// Hostnames of services that no other cluster reaches, regardless of all other rules.
    pub local: HashSet<Box<str>>,
    /// Clusters whose peers may use this gateway; `None` means every cluster.
    pub linked: Option<HashSet<Box<str>>>,
    /// Services that links expose to all peers of a cluster, by cluster.
    pub by_link: HashMap<Box<str>, Vec<SniPattern>>,
}

/// Entry of the exposure list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exposure {
    /// Index in the configuration's list, for display.
    pub index: usize,
    /// Port of the service to which the entry applies; `None` means all ports.
    pub port: Option<u16>,
    /// Namespace of the service; `None` means that of the service that answers to the hostname.
    pub namespace: Option<Box<str>>,
    /// Alternative audiences that may reach the service. If empty, no peer may.
    pub audiences: Vec<Audience>,
    /// True if workloads of the service are also exposed at their own addresses.
    pub exposes_workloads: bool,
    /// Routing key of tunnels to the service; `None` means that of the listener.
    pub route_by: Option<RouteBy>,
    /// Use of other networks by tunnels of these audiences; `None` means that of
    /// `exposure.transit`.
    pub transit: Option<Transit>,
    /// Limits of the tunnels that the entry admits.
    pub limits: ServiceLimits,
    /// True for the entry of a Kubernetes object, whose aliases yield to hostnames of the mesh.
    pub is_of_object: bool,
    /// Number of these tunnels, counted if it is limited.
    pub open: Arc<TunnelCount>,
}

/// Rule that exposes a service port to a caller.
#[derive(Clone, Copy, Debug)]
pub enum ExposedBy<'a> {
    /// This entry of `exposure.services`.
    Entry(&'a Exposure),
    /// `exposes` of the link from the caller's cluster.
    Link,
    /// `exposure.default`, or an export by the control plane or by objects of the service.
    DefaultOrExport,
}

impl ExposureTable {
    /// Returns an empty table; `expose_all` is the rule for services without an entry.
    pub fn new(expose_all: bool) -> Self {
        Self { exposes_by_default: expose_all, ..Self::default() }
    }

    /// Adds an entry for `host`, reachable under its own name and under `names`. Each name has the
    /// port that the authority must have, or `None` for any. It leads to the entry's port, or else
    /// to the requested one.
    pub fn add_entry<'a>(
        &mut self,
        host: &str,
        exposure: &Exposure,
        names: impl IntoIterator<Item = (&'a str, Option<u16>)>,
    ) {
        self.has_namespaces |= exposure.namespace.is_some();
        self.has_transit |= exposure.transit > Some(Transit::Off);
        self.has_limits |= exposure.limits.is_some();
        for (name, requested) in names {
            let alias =
                AliasTarget { requested_port: requested, host: host.into(), port: exposure.port };
            self.aliases.entry(name.into()).or_default().push((alias, exposure.clone()));
        }
        self.services.entry(host.into()).or_default().push(exposure.clone());
    }

    /// Adds hosts that routes of TLS listeners expose to anyone.
    pub fn add_passthrough_hosts<'a>(&mut self, hosts: impl IntoIterator<Item = &'a str>) {
        self.routed.extend(hosts.into_iter().map(Into::into));
    }

    /// Returns the hosts that routes of TLS listeners expose to anyone.
    pub fn passthrough_hosts(&self) -> impl Iterator<Item = &str> {
        self.routed.iter().map(|host| &**host)
    }

    /// Returns whether a service has an entry. If so, its entries alone decide about its exposure.
    pub fn has_entry(&self, host: &str) -> bool {
        self.services.contains_key(host)
    }

    /// Returns whether any service has an entry.
    pub fn has_entries(&self) -> bool {
        !self.services.is_empty()
    }

    /// Returns the hostnames of services with an entry.
    pub fn hosts(&self) -> impl Iterator<Item = &str> {
        self.services.keys().map(|host| &**host)
    }

    /// Returns the entries of a service; without any, the rule for all services applies.
    pub fn entries(&self, host: &str) -> &[Exposure] {
        self.services.get(host).map_or(&[], Vec::as_slice)
    }

    /// Returns the only namespace whose service may answer to a hostname, if an entry sets it.
    pub fn namespace(&self, host: &str) -> Option<&str> {
        let mut entries = self.entries(host).iter();
        entries.find_map(|entry| entry.namespace.as_deref())
    }

    /// Returns the routing key of tunnels to a port of a service, if an entry sets it.
    pub fn route_by(&self, host: &str, port: u16) -> Option<RouteBy> {
        let mut entries = self.entries(host).iter().filter(|entry| entry.applies_to(port));
        entries.find_map(|entry| entry.route_by)
    }

    /// Returns whether any entry or rule grants transit to other networks.
    pub fn has_transit(&self) -> bool {
        self.has_transit
    }

    /// Returns whether any entry has limits.
    pub fn has_limits(&self) -> bool {
        self.has_limits
    }

    /// Takes over the counts of open tunnels from the table that this one replaces. An entry for
    /// the same port and audiences of a service keeps its count.
    pub(super) fn keep_counts(&mut self, old: &Self) {
        for (host, entries) in &mut self.services {
            let mut earlier = HashMap::<_, Vec<_>>::new();
            for old in old.entries(host).iter().rev() {
                let same = earlier.entry((old.port, &*old.audiences)).or_default();
                same.push(&old.open);
            }
            for entry in entries {
                let same = earlier.get_mut(&(entry.port, &*entry.audiences));
                if let Some(open) = same.and_then(Vec::pop) {
                    entry.open = Arc::clone(open);
                }
            }
        }
        let mut open = HashMap::new();
        for (host, entries) in &self.services {
            for entry in entries {
                open.entry((&**host, entry.index)).or_insert(&entry.open);
            }
        }
        for (target, entry) in self.aliases.values_mut().flatten() {
            if let Some(open) = open.get(&(&*target.host, entry.index)) {
                entry.open = Arc::clone(open);
            }
        }
    }

    /// Returns whether services without an entry are exposed to every peer of the trust set, except
    /// those that are visible only in their namespace.
    pub fn exposes_all(&self) -> bool {
        self.exposes_by_default
    }

    /// Returns the service and port to which an alias leads.
    pub fn alias(&self, requested: &Authority) -> Option<(&str, u16)> {
        let (alias, _) = self.entries_of_alias(requested).next()?;
        Some((&alias.host, alias.port.unwrap_or(requested.port)))
    }

    /// Returns the services that have this name as an alias, for any port.
    pub fn hosts_with_alias<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a str> {
        let aliases = self.aliases.get(name).into_iter().flatten();
        aliases.map(|(alias, _)| &*alias.host)
    }

    /// Returns the namespace of the objects that give an alias; none if the configuration does.
    pub(super) fn namespace_of_alias(&self, name: &str) -> Option<&str> {
        let (_, entry) = self.aliases.get(name)?.first()?;
        let namespace = entry.namespace.as_deref();
        namespace.filter(|_| entry.is_of_object)
    }

    /// Returns the entries that give a service the requested name.
    pub fn entries_with_alias(&self, requested: &Authority) -> impl Iterator<Item = &Exposure> {
        self.entries_of_alias(requested).map(|(_, exposure)| exposure)
    }

    fn entries_of_alias(
        &self,
        requested: &Authority,
    ) -> impl Iterator<Item = &(AliasTarget, Exposure)> {
        let entries = match &requested.host {
            Host::Name(name) => self.aliases.get(&**name),
            Host::Ip(_) => None,
        };
        let port = requested.port;
        let entries = entries.into_iter().flatten();
        entries.filter(move |(alias, _)| alias.requested_port.is_none_or(|only| only == port))
    }
}

impl Exposure {
    /// Returns whether the entry applies to a port of its service.
    pub fn applies_to(&self, port: u16) -> bool {
        self.port.is_none_or(|only| only == port)
    }

    /// Returns whether the entry admits a caller.
    pub fn admits(&self, caller: Caller<'_>, trust: &TrustSet) -> bool {
        self.audiences.iter().any(|of| of.admits(caller, trust))
    }
}

/// Returns the first entry that admits the caller.
///
/// # Errors
/// [`Reason::NotForPeer`], or [`Reason::NotExposed`] if the entries admit no peer.
pub(super) fn admitting<'a>(
    entries: impl Iterator<Item = &'a Exposure>,
    caller: Caller<'_>,
    trust: &TrustSet,
) -> Result<&'a Exposure, Reason> {
    let mut reason = Reason::NotExposed;
    for entry in entries {
        if entry.admits(caller, trust) {
            return Ok(entry);
        }
        if !entry.audiences.is_empty() {
            reason = Reason::NotForPeer;
        }
    }
    Err(reason)
}

impl Audience {
    /// Returns whether the caller belongs to this audience. A caller of a domain outside the trust
    /// set never does. A caller without identity does only if `anyone` is set.
    pub fn admits(&self, caller: Caller<'_>, trust: &TrustSet) -> bool {
        if caller.is_unknown() {
            return self.anyone;
        }
        let Some(cluster) = trust.cluster(caller) else {
            return false;
        };
        let namespace = || {
            self.namespaces.is_empty()
                || self.namespaces.iter().any(|name| **name == *caller.namespace)
        };
        let account = || {
            self.service_accounts.is_empty()
                || self.service_accounts.iter().any(|(namespace, name)| {
                    **namespace == *caller.namespace && **name == *caller.service_account
                })
        };
        self.anyone
            || (self.cluster.as_ref().is_none_or(|only| **only == *cluster)
                && namespace()
                && account())
    }
}

impl fmt::Display for Audience {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.anyone {
            return f.write_str("every peer of the trust set");
        }
        match &self.cluster {
            Some(cluster) => write!(f, "cluster {cluster}")?,
            None => f.write_str("any cluster")?,
        }
        if !self.namespaces.is_empty() {
            write!(f, ", namespace {}", self.namespaces.join(" or "))?;
        }
        let accounts = self.service_accounts.iter();
        let accounts: Vec<_> = accounts.map(|(space, name)| format!("{space}/{name}")).collect();
        if accounts.is_empty() { Ok(()) } else { write!(f, ", account {}", accounts.join(" or ")) }
    }
}
