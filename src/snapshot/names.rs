//! Other names of services: the families of suffixes, and aliases.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;

use crate::wire::{Authority, Host};

/// What the configuration says of names. Like the exposure rules it knows nothing of the mesh.
#[derive(Debug, Default, PartialEq)]
pub struct NameTable {
    /// The suffixes of the families, the first one first.
    suffixes: Vec<Box<str>>,
    /// The aliases by their hosts.
    aliases: HashMap<Box<str>, Vec<Arc<Alias>>>,
    /// Those with a service of their own, by the stem or the host of each service behind them.
    derived: HashMap<Box<str>, Vec<Arc<Alias>>>,
}

/// A name that leads to services.
#[derive(Debug, PartialEq)]
pub struct Alias {
    /// The port that has to be asked for; none is any.
    asked: Option<u16>,
    /// The services' hostnames and ports; without port it is the one that was asked for.
    to: Vec<Target>,
    /// The clusters that see the name; none is every peer.
    consumers: Option<Vec<Box<str>>>,
    /// The region of the endpoints; none is any.
    region: Option<Box<str>>,
    /// The name without port.
    host: Box<str>,
    /// What its derived service is called.
    label: Arc<str>,
}

/// A hostname and a port.
pub type Target = (Box<str>, Option<u16>);

impl Alias {
    /// The alias `host` of these services, at the port `asked` or at any.
    pub fn new(
        (host, asked): (&str, Option<u16>),
        to: Vec<Target>,
        consumers: Option<Vec<Box<str>>>,
        region: Option<Box<str>>,
    ) -> Self {
        // No authority has one of these characters besides the colon.
        let mut label = host.to_owned();
        if let Some(port) = asked {
            let _ = write!(label, ":{port}");
        }
        if let Some(consumers) = &consumers {
            let _ = write!(label, "({})", consumers.join(","));
        }
        let _ = write!(label, "@{}", region.as_deref().unwrap_or("*"));
        Self {
            asked,
            to,
            consumers,
            region,
            host: host.into(),
            label: label.into(),
        }
    }

    /// The one service that the name is nothing but another name of.
    pub fn plain(&self) -> Option<&Target> {
        match &*self.to {
            [only] if self.region.is_none() => Some(only),
            _ => None,
        }
    }

    /// The name without port.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port that has to be asked for; none is any.
    pub fn asked(&self) -> Option<u16> {
        self.asked
    }

    /// The services behind it.
    pub fn targets(&self) -> &[Target] {
        &self.to
    }

    /// The clusters that see the name; none is every peer.
    pub fn consumers(&self) -> Option<&[Box<str>]> {
        self.consumers.as_deref()
    }

    /// The region of the endpoints; none is any.
    pub fn region(&self) -> Option<&str> {
        self.region.as_deref()
    }

    /// What its derived service is called, which no authority can be.
    pub fn label(&self) -> &Arc<str> {
        &self.label
    }

    /// Whether it still leads where an earlier one did, be it to more services than then.
    pub(super) fn stands_for(&self, earlier: &Self) -> bool {
        let is_there = |target: &Target| self.to.contains(target);
        self.label == earlier.label && earlier.to.iter().all(is_there)
    }

    fn is_for(&self, cluster: Option<&str>) -> bool {
        self.consumers.as_ref().is_some_and(|consumers| {
            cluster.is_some_and(|cluster| consumers.iter().any(|one| **one == *cluster))
        })
    }
}

impl NameTable {
    /// The table of these suffixes, the first one first, and aliases by their hosts.
    pub fn new<'a>(
        suffixes: impl IntoIterator<Item = &'a str>,
        aliases: impl IntoIterator<Item = (&'a str, Alias)>,
    ) -> Self {
        let mut table = Self {
            suffixes: suffixes.into_iter().map(Into::into).collect(),
            ..Self::default()
        };
        for (host, alias) in aliases {
            let alias = Arc::new(alias);
            if alias.plain().is_none() {
                for (target, _) in &alias.to {
                    let key = table.key(target).into();
                    let derived = table.derived.entry(key).or_default();
                    derived.push(Arc::clone(&alias));
                }
            }
            table.aliases.entry(host.into()).or_default().push(alias);
        }
        table
    }

    /// The alias that is asked for, as peers of `cluster` see it; without one, as everybody does.
    /// What is for some consumers hides from them what is for all.
    pub fn alias(&self, asked: &Authority, cluster: Option<&str>) -> Option<&Arc<Alias>> {
        let Host::Name(name) = &asked.host else {
            return None;
        };
        let aliases = self.aliases.get(&**name)?;
        let fits = |alias: &&Arc<Alias>| alias.asked.is_none_or(|port| port == asked.port);
        let mut fitting = aliases.iter().filter(fits);
        let own = fitting.clone().find(|alias| alias.is_for(cluster));
        own.or_else(|| fitting.find(|alias| alias.consumers.is_none()))
    }

    /// All aliases of this host.
    pub fn called(&self, name: &str) -> &[Arc<Alias>] {
        self.aliases.get(name).map_or(&[], Vec::as_slice)
    }

    /// All aliases that have a service of their own.
    pub(super) fn all_derived(&self) -> impl Iterator<Item = &Arc<Alias>> {
        let aliases = self.aliases.values().flatten();
        aliases.filter(|alias| alias.plain().is_none())
    }

    /// The aliases whose own service has to do with a hostname.
    pub(super) fn derived(&self, host: &str) -> &[Arc<Alias>] {
        let found = self.derived.get(self.key(host));
        found.map_or(&[], Vec::as_slice)
    }

    /// What all names of a family have in common, `NAME.NAMESPACE`; none of a name of no family.
    pub fn stem<'a>(&self, host: &'a str) -> Option<&'a str> {
        let (end, _) = host.match_indices('.').nth(1)?;
        let (stem, rest) = host.split_at_checked(end)?;
        let rest = rest.strip_prefix('.')?;
        let mut suffixes = self.suffixes.iter();
        suffixes.any(|suffix| **suffix == *rest).then_some(stem)
    }

    /// The namespace that a hostname `NAME.NAMESPACE.svc.DOMAIN`, or a name of a family, belongs
    /// to.
    pub fn owner<'a>(&self, host: &'a str) -> Option<&'a str> {
        let mut labels = host.split('.');
        let (name, namespace) = (labels.next()?, labels.next()?);
        let is_service = labels.next() == Some("svc") && labels.next().is_some();
        let is_name = |label: &str| !["", "*"].contains(&label);
        let is_owned = is_name(name) && is_name(namespace);
        (is_owned && (is_service || self.stem(host).is_some())).then_some(namespace)
    }

    /// All names of the family that has this stem, the first one first.
    pub fn family(&self, stem: &str) -> impl Iterator<Item = String> {
        let suffixes = self.suffixes.iter();
        suffixes.map(move |suffix| format!("{stem}.{suffix}"))
    }

    /// Whether two names are one or of one family.
    pub fn is_same(&self, one: &str, other: &str) -> bool {
        let stem = self.stem(one);
        one == other || (stem.is_some() && stem == self.stem(other))
    }

    /// What a name and all names of its family have in common. A stem has one dot and is no name
    /// of a family itself, so that it may be the name of a service too: then both share a key.
    fn key<'a>(&self, host: &'a str) -> &'a str {
        self.stem(host).unwrap_or(host)
    }
}
