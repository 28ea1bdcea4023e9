//! Exposure rules: the peers that may reach a service, the names that they may use, and the
//! visibility of services by exports and links.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use derive_more::Deref;
use foldhash::HashMap;

use crate::config::{Config, DefaultExposure, ExposedService, HostPort, Listener};
use crate::reason::Reason;
use crate::wire::sni::{RouteBy, SniPattern};
use crate::wire::{Authority, Host, Transit};

use super::{Caller, TrustSet, TunnelCount};

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
    pub exposes_by_default: bool,
    services: HashMap<Box<str>, Vec<Exposure>>,
    /// Entries by host of an alias, each with the port that the authority must have; `None` matches
    /// any port.
    aliases: HashMap<Box<str>, Vec<(Option<u16>, Exposure)>>,
    len: usize,
    /// True if an entry sets the namespace of its service.
    pub(super) has_namespaces: bool,
    /// Rules for entries and exports that state no transit, in order of precedence.
    transit_rules: Vec<TransitRule>,
    /// True if an entry or a rule grants transit to other networks.
    pub(super) has_transit: bool,
    /// True if an entry has limits.
    pub has_limits: bool,
    /// Hosts that routes of TLS listeners expose to anyone.
    routed: HashSet<Box<str>>,
}

/// Services and ports that a control plane exports to every peer of the trust set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExportSet(HashMap<Box<str>, Vec<u16>>);

impl ExportSet {
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
    /// Namespaces whose services no other cluster reaches, by any name with the namespace.
    pub closed: HashSet<Box<str>>,
    /// Rules by which services are not used from other clusters, by hostname.
    pub unneeded: HashMap<Box<str>, Arc<str>>,
    /// Clusters whose peers may use this gateway; `None` means every cluster.
    pub linked: Option<HashSet<Box<str>>>,
    /// Services that links expose to all peers of a cluster, by cluster.
    pub by_link: HashMap<Box<str>, Vec<SniPattern>>,
}

impl ServiceVisibility {
    /// Returns the visibility by the links of a configuration. Without `links`, all clusters are
    /// linked.
    pub fn of_links(config: &Config) -> Self {
        let own = config.gateway.cluster.as_str();
        let here = || config.links.iter().flatten().filter(|link| link.to == own);
        let linked = here().map(|link| link.from.as_str()).chain([own]).map(Into::into);
        let exposing = here().filter(|link| !link.exposes.is_empty());
        let exposed = exposing.map(|link| (link.from.as_str().into(), link.exposes.clone()));
        Self {
            linked: config.links.is_some().then(|| linked.collect()),
            by_link: exposed.collect(),
            ..Self::default()
        }
    }
}

#[derive(Clone, Debug, Deref, PartialEq)]
pub struct Exposure {
    /// Index in the configuration's list, for display.
    pub index: usize,
    #[deref(forward)]
    pub entry: Arc<ExposedService>,
    /// Number of the tunnels that the entry admits, counted if it is limited.
    pub open: Arc<TunnelCount>,
}

/// Rule that exposes a service port to a caller.
#[derive(Clone, Copy, Debug)]
pub enum ExposedBy<'a> {
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

    pub fn of(config: &Config) -> Self {
        let table = Self::new(config.exposure.default == DefaultExposure::All);
        let mut table = table.with_transit(config.exposure.transit.iter().cloned());
        config.exposure.services.iter().cloned().for_each(|entry| table.add(entry));
        let routes = config.listeners.iter().flat_map(Listener::routes);
        table.add_passthrough_hosts(routes.map(|route| route.to.host.as_str()));
        table
    }

    /// Adds an entry. Its service is reachable under its own name and under those of the entry. A
    /// name without a port has the port of the service.
    pub fn add(&mut self, entry: ExposedService) {
        self.has_namespaces |= entry.namespace.is_some();
        self.has_transit |= entry.transit > Some(Transit::Off);
        self.has_limits |= entry.limits.is_some();
        let entry = Exposure { index: self.len, entry: Arc::new(entry), open: Arc::default() };
        self.len += 1;
        for name in &entry.names {
            let named = (name.port.or(entry.service.port), entry.clone());
            self.aliases.entry(name.host.as_str().into()).or_default().push(named);
        }
        self.services.entry(entry.service.host.as_str().into()).or_default().push(entry);
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

    /// Takes over the counts of open tunnels from the table that this one replaces. An entry for
    /// the same port and audiences of a service keeps its count.
    pub(super) fn keep_counts(&mut self, old: &Self) {
        for (host, entries) in &mut self.services {
            let mut earlier = HashMap::<_, Vec<_>>::default();
            for old in old.entries(host).iter().rev() {
                let same = earlier.entry((old.service.port, &*old.to)).or_default();
                same.push(&old.open);
            }
            for entry in entries {
                let rule = &entry.entry;
                let same = earlier.get_mut(&(rule.service.port, &*rule.to));
                if let Some(open) = same.and_then(Vec::pop) {
                    entry.open = Arc::clone(open);
                }
            }
        }
        let all = self.services.values().flatten();
        let open: HashMap<_, _> = all.map(|entry| (entry.index, &entry.open)).collect();
        for (_, entry) in self.aliases.values_mut().flatten() {
            if let Some(open) = open.get(&entry.index) {
                entry.open = Arc::clone(open);
            }
        }
    }

    /// Returns the service and port to which an alias leads.
    pub fn alias(&self, requested: &Authority) -> Option<(&str, u16)> {
        let HostPort { host, port } = &self.entries_with_alias(requested).next()?.service;
        Some((host, port.unwrap_or(requested.port)))
    }

    /// Returns the services that have this name as an alias, for any port.
    pub fn hosts_with_alias<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a str> {
        let aliases = self.aliases.get(name).into_iter().flatten();
        aliases.map(|(_, entry)| &*entry.service.host)
    }

    /// Returns the namespace of the objects that give an alias; none if the configuration does.
    pub fn namespace_of_alias(&self, name: &str) -> Option<&str> {
        let (_, entry) = self.aliases.get(name)?.first()?;
        let namespace = entry.namespace.as_deref();
        namespace.filter(|_| entry.is_of_object)
    }

    /// Returns the entries that give a service the requested name.
    pub fn entries_with_alias(&self, requested: &Authority) -> impl Iterator<Item = &Exposure> {
        let entries = match &requested.host {
            Host::Name(name) => self.aliases.get(&**name),
            Host::Ip(_) => None,
        };
        let port = requested.port;
        let entries = entries.into_iter().flatten();
        let meant = entries.filter(move |(of, _)| of.is_none_or(|only| only == port));
        meant.map(|(_, entry)| entry)
    }
}

impl Exposure {
    pub fn applies_to(&self, port: u16) -> bool {
        self.service.port.is_none_or(|only| only == port)
    }

    pub fn admits(&self, caller: Caller<'_>, trust: &TrustSet) -> bool {
        self.to.iter().any(|of| of.admits(caller, trust))
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
        if !entry.to.is_empty() {
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
        self.anyone
            || (self.cluster.as_ref().is_none_or(|only| **only == *cluster)
                && self.has_account(caller.namespace, caller.service_account))
    }

    /// Returns whether the audience has a service account of its cluster.
    pub fn has_account(&self, namespace: &str, account: &str) -> bool {
        let mut accounts = self.service_accounts.iter();
        (self.namespaces.is_empty() || self.namespaces.iter().any(|of| *of == *namespace))
            && (self.service_accounts.is_empty()
                || accounts.any(|(of, name)| *of == *namespace && *name == *account))
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
