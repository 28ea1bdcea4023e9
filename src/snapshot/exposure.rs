//! Exposure rules: the peers that may reach a service, and the names that they may use.

use std::collections::{HashMap, HashSet};
use std::fmt;

use crate::wire::sni::RouteBy;
use crate::wire::{Authority, Host, SpkiHash};

use super::TrustSet;

/// The exposure rules, looked up by service and by alias. It knows nothing of the mesh, so that
/// a service that comes and goes keeps its rules.
#[derive(Debug, Default, PartialEq)]
pub struct ExposureTable {
    /// Exposure of services without an entry to every peer of the trust set, but for those that
    /// only clients of their namespace see.
    expose_all: bool,
    /// Rules by service hostname.
    services: HashMap<Box<str>, Vec<Exposure>>,
    /// Rules by the host of an alias, each with what the alias stands for.
    aliases: HashMap<Box<str>, Vec<(Alias, Exposure)>>,
    /// Presence of an entry that says the namespace of its service.
    has_namespaces: bool,
    /// Hosts that routes of TLS listeners open to anyone.
    routed: HashSet<Box<str>>,
}

/// Service and port that a name stands for.
#[derive(Clone, Debug, PartialEq)]
struct Alias {
    /// The port that has to be asked for; none is any.
    asked: Option<u16>,
    /// The service's hostname.
    host: Box<str>,
    /// The service's port; none is the one that was asked for.
    port: Option<u16>,
}

/// Exports of a control plane to every peer of the trust set: services and their ports.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExportSet(HashMap<Box<str>, Vec<u16>>);

impl ExportSet {
    /// Returns whether a port of a service is exported.
    pub fn contains(&self, host: &str, port: u16) -> bool {
        self.0.get(host).is_some_and(|ports| ports.contains(&port))
    }

    /// Returns whether any port of a service is exported.
    pub fn has(&self, host: &str) -> bool {
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

/// One entry of the exposure list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exposure {
    /// Its place in the configuration's list, for people.
    pub index: usize,
    /// The port that the entry is about; none is all of the service's.
    pub port: Option<u16>,
    /// The namespace of the service; none is that of the service that answers to the hostname.
    pub namespace: Option<Box<str>>,
    /// Audiences that may reach it; alternatives. Empty is nobody.
    pub to: Vec<Audience>,
    /// Exposure of the service's workloads at their own addresses too.
    pub workloads: bool,
    /// Routing of tunnels to it, by authority or server name; none is as their listener does.
    pub route_by: Option<RouteBy>,
}

/// A description of peers: all its keys must hold, the values of one key are alternatives.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Audience {
    /// Anyone, known or not.
    pub anyone: bool,
    /// The peer's cluster, by its issuer or its trust domain.
    pub cluster: Option<Box<str>>,
    /// The peer's namespace; empty is any.
    pub namespaces: Vec<Box<str>>,
    /// The peer's namespace and service account; empty is any.
    pub service_accounts: Vec<(Box<str>, Box<str>)>,
}

/// Peer's verified identity, which the exposure rules are evaluated for.
#[derive(Clone, Copy, Debug)]
pub struct Caller<'a> {
    /// The trust domain of the peer's certificate.
    pub trust_domain: &'a str,
    /// The issuer of the peer's certificate.
    pub issuer: Option<&'a SpkiHash>,
    /// The namespace of the peer's identity.
    pub namespace: &'a str,
    /// The service account of the peer's identity.
    pub service_account: &'a str,
}

impl Caller<'_> {
    /// Somebody whose identity nobody has verified, as on a TLS listener.
    pub const UNKNOWN: Self = Caller {
        trust_domain: "",
        issuer: None,
        namespace: "",
        service_account: "",
    };

    /// Returns whether there is no identity. One that was verified has a trust domain.
    fn is_unknown(self) -> bool {
        self.trust_domain.is_empty()
    }
}

/// Result of the exposure rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The caller may.
    Allowed,
    /// The service is exposed, but not to this caller.
    NotForPeer,
    /// The service is exposed to nobody.
    NotExposed,
}

impl ExposureTable {
    /// An empty table; `expose_all` says what holds for services without an entry.
    pub fn new(expose_all: bool) -> Self {
        Self {
            expose_all,
            ..Self::default()
        }
    }

    /// Adds an entry for `host`, reachable under its own name and under `names`: hosts with the
    /// port to ask for, none being any. The port that is reached is the entry's, or the asked one.
    pub fn expose<'a>(
        &mut self,
        host: &str,
        exposure: &Exposure,
        names: impl IntoIterator<Item = (&'a str, Option<u16>)>,
    ) {
        self.has_namespaces |= exposure.namespace.is_some();
        for (name, asked) in names {
            let alias = Alias {
                asked,
                host: host.into(),
                port: exposure.port,
            };
            self.aliases
                .entry(name.into())
                .or_default()
                .push((alias, exposure.clone()));
        }
        self.services
            .entry(host.into())
            .or_default()
            .push(exposure.clone());
    }

    /// Notes hosts that routes of TLS listeners open to anyone.
    pub fn route<'a>(&mut self, hosts: impl IntoIterator<Item = &'a str>) {
        self.routed.extend(hosts.into_iter().map(Into::into));
    }

    /// The hosts that routes of TLS listeners open to anyone.
    pub fn routed(&self) -> impl Iterator<Item = &str> {
        self.routed.iter().map(|host| &**host)
    }

    /// Returns whether a service has an entry, which then decides alone to whom it is exposed.
    pub fn has_entry(&self, host: &str) -> bool {
        self.services.contains_key(host)
    }

    /// Returns whether any service has an entry.
    pub fn has_entries(&self) -> bool {
        !self.services.is_empty()
    }

    /// The hostnames of services with an entry.
    pub fn hosts(&self) -> impl Iterator<Item = &str> {
        self.services.keys().map(|host| &**host)
    }

    /// The entries of a service; none where the rule for all services holds.
    pub fn entries(&self, host: &str) -> &[Exposure] {
        self.services.get(host).map_or(&[], Vec::as_slice)
    }

    /// Returns whether any entry says the namespace of its service.
    pub fn has_namespaces(&self) -> bool {
        self.has_namespaces
    }

    /// The only namespace whose service answers to a hostname, where an entry says so.
    pub fn namespace(&self, host: &str) -> Option<&str> {
        let mut entries = self.entries(host).iter();
        entries.find_map(|entry| entry.namespace.as_deref())
    }

    /// Returns the routing of tunnels to a port of a service, where an entry sets it.
    pub fn route_by(&self, host: &str, port: u16) -> Option<RouteBy> {
        let entries = self.entries(host).iter();
        let mut of_port = entries.filter(|entry| entry.port.is_none_or(|only| only == port));
        of_port.find_map(|entry| entry.route_by)
    }

    /// Returns whether services without an entry are exposed to every peer of the trust set, but
    /// for those that only clients of their namespace see.
    pub fn exposes_all(&self) -> bool {
        self.expose_all
    }

    /// The service and port that an alias stands for.
    pub fn alias(&self, asked: &Authority) -> Option<(&str, u16)> {
        let (alias, _) = self.entries_of_alias(asked)?.next()?;
        Some((&alias.host, alias.port.unwrap_or(asked.port)))
    }

    /// The services that have this name as an alias, at whatever port.
    pub fn hosts_called<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a str> {
        let aliases = self.aliases.get(name).into_iter().flatten();
        aliases.map(|(alias, _)| &*alias.host)
    }

    /// The entries that give a service the name that is asked for.
    pub fn entries_called(&self, asked: &Authority) -> impl Iterator<Item = &Exposure> {
        let entries = self.entries_of_alias(asked).into_iter().flatten();
        entries.map(|(_, exposure)| exposure)
    }

    fn entries_of_alias(
        &self,
        asked: &Authority,
    ) -> Option<impl Iterator<Item = &(Alias, Exposure)>> {
        let Host::Name(name) = &asked.host else {
            return None;
        };
        let entries = self.aliases.get(&**name)?;
        Some(
            entries
                .iter()
                .filter(|(alias, _)| alias.asked.is_none_or(|port| port == asked.port)),
        )
    }

    /// Judges whether `caller` may reach the service that it asks for by an alias. Only the entries
    /// count that give the service this alias, as another consumer's name opens nothing.
    pub fn judge_alias(&self, caller: Caller<'_>, trust: &TrustSet, asked: &Authority) -> Verdict {
        let entries = self.entries_of_alias(asked).into_iter().flatten();
        verdict(entries.map(|(_, exposure)| exposure), caller, trust)
    }

    /// Judges whether `caller` may reach a workload of service `host`, which serves port `port` of
    /// it, at its address.
    pub fn judge_workload(
        &self,
        caller: Caller<'_>,
        trust: &TrustSet,
        host: &str,
        port: u16,
    ) -> Verdict {
        let entries = self.entries(host).iter();
        let entries = entries.filter(|entry| entry.workloads && entry.is_about(port));
        verdict(entries, caller, trust)
    }

    /// Returns whether the entries of service `host` let `caller` reach port `port` of it by
    /// anything that is no alias.
    pub fn judge(&self, caller: Caller<'_>, trust: &TrustSet, host: &str, port: u16) -> Verdict {
        let entries = self.entries(host).iter();
        let entries = entries.filter(|entry| entry.is_about(port));
        verdict(entries, caller, trust)
    }
}

impl Exposure {
    /// Returns whether the entry is about a port of its service.
    pub fn is_about(&self, port: u16) -> bool {
        self.port.is_none_or(|only| only == port)
    }
}

fn verdict<'a>(
    entries: impl Iterator<Item = &'a Exposure>,
    caller: Caller<'_>,
    trust: &TrustSet,
) -> Verdict {
    let mut verdict = Verdict::NotExposed;
    for audience in entries.flat_map(|entry| &entry.to) {
        if audience.admits(caller, trust) {
            return Verdict::Allowed;
        }
        verdict = Verdict::NotForPeer;
    }
    verdict
}

impl Audience {
    /// Returns whether the caller is one of these. A caller of a domain outside the trust set never
    /// is, and one without identity only where anyone is.
    pub fn admits(&self, caller: Caller<'_>, trust: &TrustSet) -> bool {
        if caller.is_unknown() {
            return self.anyone;
        }
        let Some(cluster) = trust.cluster(caller) else {
            return false;
        };
        let namespace = || {
            self.namespaces.is_empty()
                || self
                    .namespaces
                    .iter()
                    .any(|name| **name == *caller.namespace)
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
            return f.write_str("anyone of the trust set");
        }
        match &self.cluster {
            Some(cluster) => write!(f, "cluster {cluster}")?,
            None => f.write_str("any cluster")?,
        }
        if !self.namespaces.is_empty() {
            write!(f, ", namespace {}", self.namespaces.join(" or "))?;
        }
        let accounts = self.service_accounts.iter();
        let accounts: Vec<_> = accounts
            .map(|(space, name)| format!("{space}/{name}"))
            .collect();
        match accounts.is_empty() {
            true => Ok(()),
            false => write!(f, ", account {}", accounts.join(" or ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Authority {
        Authority::parse(text).expect("a valid authority")
    }

    fn caller<'a>(trust_domain: &'a str, namespace: &'a str, account: &'a str) -> Caller<'a> {
        Caller {
            trust_domain,
            issuer: None,
            namespace,
            service_account: account,
        }
    }

    fn audience(cluster: &str, namespaces: &[&str], accounts: &[(&str, &str)]) -> Audience {
        Audience {
            anyone: false,
            cluster: (!cluster.is_empty()).then(|| cluster.into()),
            namespaces: namespaces.iter().map(|&name| name.into()).collect(),
            service_accounts: accounts
                .iter()
                .map(|&(ns, sa)| (ns.into(), sa.into()))
                .collect(),
        }
    }

    fn exposure(port: Option<u16>, to: Vec<Audience>) -> Exposure {
        Exposure {
            port,
            to,
            ..Exposure::default()
        }
    }

    fn trust() -> TrustSet {
        TrustSet::new([("west.local", "west"), ("north.local", "north")])
    }

    #[test]
    fn all_keys_of_an_entry_hold_and_values_and_entries_are_alternatives() {
        let mut table = ExposureTable::new(false);
        let to = vec![
            audience(
                "west",
                &["shop", "cart"],
                &[("shop", "checkout"), ("cart", "cart")],
            ),
            audience("north", &[], &[]),
        ];
        let exposure = exposure(Some(80), to);
        table.expose("echo.app", &exposure, []);
        let judge = |caller, port| table.judge(caller, &trust(), "echo.app", port);
        assert_eq!(
            judge(caller("west.local", "shop", "checkout"), 80),
            Verdict::Allowed
        );
        assert_eq!(
            judge(caller("west.local", "cart", "cart"), 80),
            Verdict::Allowed
        );
        assert_eq!(
            judge(caller("north.local", "any", "one"), 80),
            Verdict::Allowed
        );
        assert_eq!(
            judge(caller("west.local", "cart", "checkout"), 80),
            Verdict::NotForPeer
        );
        assert_eq!(
            judge(caller("west.local", "other", "checkout"), 80),
            Verdict::NotForPeer
        );
        assert_eq!(
            judge(caller("evil.local", "shop", "checkout"), 80),
            Verdict::NotForPeer
        );
        assert_eq!(
            judge(caller("north.local", "any", "one"), 81),
            Verdict::NotExposed
        );
    }

    #[test]
    fn an_alias_opens_the_service_only_to_those_whom_its_entry_names() {
        let mut table = ExposureTable::new(false);
        let west = exposure(Some(80), vec![audience("west", &[], &[])]);
        let north = exposure(Some(80), vec![audience("north", &[], &[])]);
        table.expose("echo.app", &west, [("west.global", Some(80))]);
        table.expose("echo.app", &north, [("north.global", Some(8080))]);
        let judge = |domain, asked: &str| {
            table.judge_alias(caller(domain, "a", "b"), &trust(), &name(asked))
        };
        assert_eq!(judge("west.local", "west.global:80"), Verdict::Allowed);
        assert_eq!(
            judge("west.local", "north.global:8080"),
            Verdict::NotForPeer
        );
        assert_eq!(judge("north.local", "north.global:8080"), Verdict::Allowed);
        let own = table.judge(caller("west.local", "a", "b"), &trust(), "echo.app", 80);
        assert_eq!(own, Verdict::Allowed);
        assert_eq!(judge("west.local", "other.global:80"), Verdict::NotExposed);
        assert_eq!(
            table.alias(&name("north.global:8080")),
            Some(("echo.app", 80))
        );
    }

    #[test]
    fn a_name_without_port_stands_for_every_port_of_the_service() {
        let mut table = ExposureTable::new(false);
        let all = exposure(None, vec![audience("west", &[], &[])]);
        table.expose("echo.app", &all, [("echo.global", None)]);
        for port in [80, 443] {
            let asked = name(&format!("echo.global:{port}"));
            assert_eq!(table.alias(&asked), Some(("echo.app", port)));
            let west = caller("west.local", "a", "b");
            let verdict = table.judge_alias(west, &trust(), &asked);
            assert_eq!(verdict, Verdict::Allowed);
        }
    }

    #[test]
    fn anyone_is_the_trust_set_and_who_has_no_identity() {
        let mut table = ExposureTable::new(false);
        let open = |anyone| Audience {
            anyone,
            ..Audience::default()
        };
        let exposure = |anyone| exposure(None, vec![open(anyone)]);
        table.expose("open.app", &exposure(true), [("open.global", None)]);
        table.expose("closed.app", &exposure(false), []);
        let judge = |caller, host: &str| table.judge(caller, &trust(), host, 1);
        let of = |domain| caller(domain, "a", "b");
        let open = |caller| judge(caller, "open.app");
        assert_eq!(open(of("west.local")), Verdict::Allowed);
        assert_eq!(open(of("evil.local")), Verdict::NotForPeer);
        assert_eq!(open(Caller::UNKNOWN), Verdict::Allowed);
        let alias = table.judge_alias(Caller::UNKNOWN, &trust(), &name("open.global:1"));
        assert_eq!(alias, Verdict::Allowed);
        let closed = |caller| judge(caller, "closed.app");
        assert_eq!(closed(of("west.local")), Verdict::Allowed);
        assert_eq!(closed(Caller::UNKNOWN), Verdict::NotForPeer);
    }
}
