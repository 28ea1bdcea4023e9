//! Alternative names of services: name families, which share a stem and differ in their suffix, and
//! aliases.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;

use derive_more::Deref;

use super::mesh::Workload;
use super::subset::{self, Subset};
use crate::config::{self, Config, ExposedService, HostPort};
use crate::wire::{Authority, Host};

/// Families and aliases of the configuration. The table is independent of the mesh, like the
/// exposure rules.
#[derive(Debug, Default, PartialEq)]
pub struct NameTable {
    /// Suffixes of families, in order of precedence.
    suffixes: Vec<Box<str>>,
    aliases: HashMap<Box<str>, Vec<Arc<Alias>>>,
    /// Aliases with a derived service, by [`Self::family_key`] of each target.
    derived: HashMap<Box<str>, Vec<Arc<Alias>>>,
}

/// Configured name that leads to one or more services.
#[derive(Debug, Deref, PartialEq)]
pub struct Alias {
    #[deref]
    pub entry: config::Alias,
    /// Subset that restricts the endpoints; `None` means any.
    pub subset: Option<Subset>,
    /// Name of the derived service, which is never a valid authority.
    pub label: Arc<str>,
}

impl Alias {
    /// Returns the alias of an entry, whose subset is `subset`.
    pub fn new(entry: config::Alias, subset: Option<Subset>) -> Self {
        // The label always has an `@`, which no authority contains, so no hostname equals it.
        let mut label = entry.name.to_string();
        if let Some(consumers) = &entry.consumers {
            let _ = write!(label, "({})", consumers.join(","));
        }
        let _ = write!(label, "@{}", entry.region.as_deref().unwrap_or("*"));
        if let Some(subset) = &subset {
            let _ = write!(label, "#{subset}");
        }
        Self { entry, subset, label: label.into() }
    }

    /// Returns the alias of an entry, whose subset is one of `services`.
    pub fn of(entry: &config::Alias, services: &[ExposedService]) -> Self {
        let subset = entry.to.first().zip(entry.subset.as_ref()).and_then(|(target, name)| {
            let of = subset::find(services, &target.host, name)?;
            Some(Subset::of(&target.host, of, services))
        });
        Self::new(entry.clone(), subset)
    }

    /// Returns the target if the alias is only another name for one service: it has a single
    /// target, and neither region nor subset.
    pub fn single_target(&self) -> Option<&HostPort> {
        match &*self.to {
            [only] if self.region.is_none() && self.subset.is_none() => Some(only),
            _ => None,
        }
    }

    /// Returns whether a workload is in the region and the subset.
    pub(super) fn has(&self, workload: &Workload) -> bool {
        let region = self.region.as_deref();
        region.is_none_or(|region| *workload.locality.region == *region)
            && self.subset.as_ref().is_none_or(|subset| subset.part_of(workload).is_some())
    }

    /// Returns whether the alias still leads to every target of `earlier`. Additional targets are
    /// allowed.
    pub(super) fn keeps_targets_of(&self, earlier: &Self) -> bool {
        let is_there = |target: &HostPort| self.to.contains(target);
        self.label == earlier.label && earlier.to.iter().all(is_there)
    }

    fn has_consumer(&self, cluster: Option<&str>) -> bool {
        self.consumers.as_ref().is_some_and(|consumers| {
            cluster.is_some_and(|cluster| consumers.iter().any(|one| **one == *cluster))
        })
    }
}

impl NameTable {
    /// Returns the table of these suffixes, in order of precedence, and of these aliases by host.
    /// `HOST@SUBSET` is the host of a subset of a service.
    pub fn new<'a>(
        suffixes: impl IntoIterator<Item = &'a str>,
        aliases: impl IntoIterator<Item = (&'a str, Alias)>,
    ) -> Self {
        let mut table =
            Self { suffixes: suffixes.into_iter().map(Into::into).collect(), ..Self::default() };
        for (host, alias) in aliases {
            table.add(host, alias);
        }
        table
    }

    pub fn of(config: &Config) -> Self {
        let services = &config.exposure.services;
        let mut table = Self::new(config.names.suffixes.iter().map(String::as_str), []);
        for alias in &config.names.aliases {
            table.add(&alias.name.host, Alias::of(alias, services));
        }
        for exposed in services {
            let name = HostPort { port: None, ..exposed.service.clone() };
            for of in &exposed.subsets {
                let subset = Subset::of(&name.host, of, services);
                let entry = config::Alias::new(name.clone(), vec![name.clone()]);
                table.add(&format!("{}@{}", name.host, of.name), Alias::new(entry, Some(subset)));
            }
        }
        table
    }

    fn add(&mut self, host: &str, alias: Alias) {
        let alias = Arc::new(alias);
        if alias.single_target().is_none() {
            for target in &alias.to {
                let key = self.family_key(&target.host).into();
                self.derived.entry(key).or_default().push(Arc::clone(&alias));
            }
        }
        let key = self.alias_key(host).into_owned();
        self.aliases.entry(key.into()).or_default().push(alias);
    }

    /// Returns the alias that matches `requested` for peers of `cluster`. An alias with consumers
    /// takes precedence over one for every peer. Without a cluster, only the latter matches.
    pub fn alias(&self, requested: &Authority, cluster: Option<&str>) -> Option<&Arc<Alias>> {
        let Host::Name(name) = &requested.host else {
            return None;
        };
        let aliases = self.aliases.get(&*self.alias_key(name))?;
        let fits = |alias: &&Arc<Alias>| alias.name.port.is_none_or(|port| port == requested.port);
        let mut fitting = aliases.iter().filter(fits);
        let own = fitting.clone().find(|alias| alias.has_consumer(cluster));
        own.or_else(|| fitting.find(|alias| alias.consumers.is_none()))
    }

    /// Returns the key of an alias. A subset has one for all names of its service's family.
    fn alias_key<'a>(&self, host: &'a str) -> Cow<'a, str> {
        match host.split_once('@') {
            Some((host, subset)) => format!("{}@{subset}", self.family_key(host)).into(),
            None => host.into(),
        }
    }

    pub fn aliases_of(&self, name: &str) -> &[Arc<Alias>] {
        self.aliases.get(name).map_or(&[], Vec::as_slice)
    }

    pub(super) fn derived_aliases(&self) -> impl Iterator<Item = &Arc<Alias>> {
        self.aliases.values().flatten().filter(|alias| alias.single_target().is_none())
    }

    /// Returns the aliases whose derived service depends on a hostname.
    pub(super) fn derived_aliases_for(&self, host: &str) -> &[Arc<Alias>] {
        self.derived.get(self.family_key(host)).map_or(&[], Vec::as_slice)
    }

    /// Returns the part that all names of a family share, `NAME.NAMESPACE`. Returns `None` for a
    /// name outside all families.
    pub fn stem<'a>(&self, host: &'a str) -> Option<&'a str> {
        let (end, _) = host.match_indices('.').nth(1)?;
        let (stem, rest) = host.split_at_checked(end)?;
        let rest = rest.strip_prefix('.')?;
        self.suffixes.iter().any(|suffix| **suffix == *rest).then_some(stem)
    }

    /// Returns the namespace to which a hostname `NAME.NAMESPACE.svc.DOMAIN`, or a name of a
    /// family, belongs.
    pub fn owner<'a>(&self, host: &'a str) -> Option<&'a str> {
        let mut labels = host.split('.');
        let (name, namespace) = (labels.next()?, labels.next()?);
        let is_service = labels.next() == Some("svc") && labels.next().is_some();
        let is_name = |label: &str| !["", "*"].contains(&label);
        let is_owned = is_name(name) && is_name(namespace);
        (is_owned && (is_service || self.stem(host).is_some())).then_some(namespace)
    }

    /// Returns all names of the family with this stem, in the order of the suffixes.
    pub fn family(&self, stem: &str) -> impl Iterator<Item = String> {
        self.suffixes.iter().map(move |suffix| format!("{stem}.{suffix}"))
    }

    /// Returns whether two names are equal or of one family.
    pub fn is_same_family(&self, one: &str, other: &str) -> bool {
        let stem = self.stem(one);
        one == other || (stem.is_some() && stem == self.stem(other))
    }

    /// Returns the stem of a name, or the name itself if it is outside all families. A stem has one
    /// dot and is itself outside all families, so it may equal the hostname of a service. Both then
    /// share a key.
    fn family_key<'a>(&self, host: &'a str) -> &'a str {
        self.stem(host).unwrap_or(host)
    }
}
