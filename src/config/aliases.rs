//! The `names` section: families of suffixes, and other names of services.

use std::collections::BTreeSet;

use super::define::{Hostname, NonEmpty, OneOrMore, Service, section};
use super::line::Line;
use super::names::HostPort;
use crate::yaml::Value;

const ALIAS: &str = "names.aliases[]";

/// Default of `names.suffixes`: that of Kubernetes, that of its multi-cluster services, and those
/// of Istio's multi-cluster meshes.
pub const SUFFIXES: [&str; 4] =
    ["svc.cluster.local", "svc.clusterset.local", "mesh.internal", "global"];

section! {
    /// Names of services besides their hostnames.
    pub struct Names at "names" or default, check(check) {
        /// Suffixes of families: `NAME.NAMESPACE.SUFFIX` is one service under all of these. A
        /// service with the exact name wins, then the order of this list. If a service of NAMESPACE
        /// has the name under any suffix, services of other namespaces have it under none. Exposure
        /// of one name of a family holds for its service, unless its hostname has an exposure of
        /// its own.
        suffixes: Vec<String> as Vec<Hostname> = default(SUFFIXES.map(str::to_owned).into());
        /// Further names of services.
        aliases: Vec<Alias> = default(Vec::new());
    }
}

impl Names {
    /// Returns `NAME.NAMESPACE` of a name of a family, and any other name as it is.
    pub fn family<'n>(&self, host: &'n str) -> &'n str {
        let stem = |suffix: &String| host.strip_suffix(suffix.as_str())?.strip_suffix('.');
        self.suffixes.iter().find_map(stem).unwrap_or(host)
    }
}

section! {
    /// A name that leads to services.
    pub struct Alias at "names.aliases[]", check(check_alias), compare(compare) {
        /// The name, which no service has. Without port it has that of `to`, or any.
        name: HostPort as Service = required("\"payments.global\"");
        /// Service behind the name, or several, whose endpoints then serve it together; a peer
        /// needs each of them to be exposed to it. A host alone has the requested port.
        to: Vec<HostPort> as OneOrMore<Service> = required(
            "\"payments.uswest2.svc.cluster.local\"");
        /// Clusters that see the name; each may have a target of its own. For others the service is
        /// unknown. Clients of TLS listeners see only names without `consumers`. `strait check`
        /// warns of a consumer that may not reach a service of `to`.
        consumers: Option<Vec<String>> as Option<NonEmpty<String>> = default(None, "all");
        /// Region to which the endpoints are restricted.
        region: Option<String> = default(None, "every region");
        /// Subset of the endpoints, by `exposure.services[].subsets` of the only service in `to`.
        subset: Option<String> = default(None, "all endpoints");
        /// The line.
        line: Line = aside(Line::of);
    }
}

impl Alias {
    /// Returns an alias for all consumers, of all endpoints.
    pub fn new(name: HostPort, to: Vec<HostPort>) -> Self {
        let line = Line::default();
        Self { name, to, consumers: None, region: None, subset: None, line }
    }
}

fn check(names: Names, value: Value<'_>) -> Option<Names> {
    let mut seen = BTreeSet::new();
    let items = value.at("names", "suffixes").entries();
    for (suffix, item) in names.suffixes.iter().zip(items) {
        if !seen.insert(suffix) {
            item.error(format!("has `{suffix}` twice"), "each suffix once");
        }
    }
    Some(names)
}

/// Gives a name without a port that of its services.
fn check_alias(mut alias: Alias, value: Value<'_>) -> Option<Alias> {
    let mut hosts = BTreeSet::new();
    if let Some(twice) = alias.to.iter().find(|target| !hosts.insert(&target.host)) {
        let what = format!("has {} twice", twice.host);
        value.at(ALIAS, "to").error(what, "each service once");
        return None;
    }
    if alias.subset.is_some() && alias.to.len() > 1 {
        let what = "is of several services";
        value.at(ALIAS, "subset").error(what, "one service into `to`, or remove `subset`");
        return None;
    }
    let ports: BTreeSet<_> = alias.to.iter().map(|target| target.port).collect();
    if alias.name.port.is_none() {
        if ports.len() > 1 {
            let what = "has no port, and the services behind it have several";
            let how = format!("`\"{}:PORT\"`", alias.name);
            value.at(ALIAS, "name").error(what, how);
            return None;
        }
        alias.name.port = ports.first().copied().flatten();
    }
    Some(alias)
}

fn compare(_: Value<'_>, read: &[(Alias, Value<'_>)]) {
    for (at, (alias, value)) in read.iter().enumerate() {
        let earlier = read.iter().take(at).map(|(alias, _)| alias);
        report_repeated_name(alias, *value, earlier);
        report_alias_of_alias(alias, *value, read.iter().map(|(alias, _)| alias));
    }
}

/// Reports a name that two aliases have for one consumer. An alias for all is seen by consumers
/// without one of their own.
fn report_repeated_name<'a>(
    alias: &Alias,
    value: Value<'_>,
    mut earlier: impl Iterator<Item = &'a Alias>,
) {
    let common = |other: &Alias| match (&alias.consumers, &other.consumers) {
        (Some(mine), Some(theirs)) => mine.iter().find(|one| theirs.contains(one)).cloned(),
        (None, None) => Some("every consumer".to_owned()),
        _ => None,
    };
    let twice = earlier.find_map(|other| {
        let overlaps = other.name.overlaps(&alias.name);
        Some((common(other).filter(|_| overlaps)?, other.line.number()))
    });
    if let Some((consumer, line)) = twice {
        let name = &alias.name;
        let what = format!("has the name `{name}` for {consumer}, as line {line} has");
        value.error(what, "each name once for a consumer");
    }
}

fn report_alias_of_alias<'a>(
    alias: &Alias,
    value: Value<'_>,
    mut others: impl Iterator<Item = &'a Alias>,
) {
    let is_target = |name: &HostPort| alias.to.iter().any(|target| target.host == name.host);
    if let Some(other) = others.find(|other| is_target(&other.name)) {
        let (name, line) = (&other.name.host, other.line.number());
        let what = format!("leads to `{name}`, which is the alias of line {line}");
        value.error(what, "the hostnames of services into `to`");
    }
}
