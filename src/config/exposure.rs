//! The `exposure` section: which services, to whom, under which names.

use std::collections::{BTreeSet, HashMap};

use serde::Serializer;

use crate::wire::sni::RouteBy;

use super::auto;
use super::names::is_segment;
use super::{Audience, DefaultExposure, ExposedService, Exposure, HostPort};
use crate::yaml::Value;

/// What is wrong with an empty list of alternatives.
const EMPTY: &str = "is empty, which admits nobody";

/// One entry as read, with the values that findings about it point to.
struct Entry<'a> {
    exposed: ExposedService,
    names: Vec<(HostPort, Value<'a>)>,
    /// Where it says by what tunnels are routed, or where it could.
    route_by: Value<'a>,
    /// The entry.
    value: Value<'a>,
}

pub(super) fn word<S: Serializer>(
    route_by: &Option<RouteBy>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match route_by {
        Some(route_by) => serializer.collect_str(route_by),
        None => serializer.serialize_none(),
    }
}

/// Reads the section. `clusters` are those that `trust` names; none when the trust
/// section could not be read, which must not bring findings here as well.
pub(super) fn read(value: Value<'_>, clusters: Option<&BTreeSet<String>>) -> Option<Exposure> {
    let mut fields = value.fields("exposure")?;
    let default = fields
        .get("default")
        .map_or(Some(DefaultExposure::None), default_exposure);
    let entries: Vec<_> = match fields.get("services") {
        Some(list) => list
            .items()
            .filter_map(|item| entry(item, clusters))
            .collect(),
        None => Vec::new(),
    };
    let files: Vec<_> = match fields.get("files") {
        Some(list) => list.items().map(Value::existing_path).collect(),
        None => Vec::new(),
    };
    let auto = fields.get("auto");
    let rules: Vec<_> = auto
        .into_iter()
        .flat_map(|list| list.items().map(auto::rule))
        .collect();
    fields.finish();
    if let Some(auto) = auto.filter(|_| files.is_empty()) {
        let what = "selects Services of `exposure.files`, and there are none";
        auto.error(what, "`files: [DIRECTORY]` beside it");
    }
    aliases_are_unambiguous(&entries);
    routing_is_unambiguous(&entries);
    names_are_shared(&entries);
    namespaces_are_unambiguous(&entries);
    let services = entries.into_iter().map(|entry| entry.exposed).collect();
    Some(Exposure {
        default: default?,
        services,
        files: files.into_iter().collect::<Option<_>>()?,
        auto: rules.into_iter().collect::<Option<_>>()?,
    })
}

fn default_exposure(value: Value<'_>) -> Option<DefaultExposure> {
    let words = [
        ("none", DefaultExposure::None),
        ("all", DefaultExposure::All),
    ];
    let default = value.choice(&words)?;
    if default == DefaultExposure::All {
        let what = "is `all`: every service of the mesh can be reached by every trusted peer";
        value.warning(what, "`none` and an entry for each service that is shared");
    }
    Some(default)
}

fn entry<'a>(value: Value<'a>, clusters: Option<&BTreeSet<String>>) -> Option<Entry<'a>> {
    let mut fields = value.fields("exposure.services[]")?;
    let service = fields
        .need("service", "\"echo.app.svc.cluster.local:80\"")
        .and_then(service);
    let own = match fields.get("namespace") {
        Some(value) => namespace(value).map(Some),
        None => Some(None),
    };
    let to: Option<Vec<_>> = match fields.get("to") {
        // Collected before it is turned around, so that every audience reports its findings.
        Some(list) => {
            let read: Vec<_> = list.items().map(|item| audience(item, clusters)).collect();
            read.into_iter().collect()
        }
        None => Some(Vec::new()),
    };
    let names: Vec<_> = match fields.get("names") {
        Some(list) => list
            .items()
            .map(|item| Some((alias(item)?, item)))
            .collect(),
        None => Vec::new(),
    };
    let workloads = fields.get("workloads").map_or(Some(false), Value::flag);
    let routed = fields.get("route_by");
    let route_by = match routed {
        Some(route_by) => route_by.choice(&RouteBy::WORDS).map(Some),
        None => Some(None),
    };
    fields.finish();
    let (service, to, workloads) = (service?, to?, workloads?);
    let names = names.into_iter().collect::<Option<Vec<_>>>()?;
    if to.is_empty() {
        let what = format!("exposes `{service}` to nobody");
        value.warning(what, "`to: [{cluster: CLUSTER}]` or `to: [{anyone: true}]`");
    }
    let with_port = |(name, value): (HostPort, Value<'a>)| {
        (
            HostPort {
                port: name.port.or(service.port),
                ..name
            },
            value,
        )
    };
    let names: Vec<_> = names.into_iter().map(with_port).collect();
    let aliases = names.iter().map(|(name, _)| name.clone()).collect();
    let exposed = ExposedService {
        service,
        namespace: own?,
        to,
        names: aliases,
        workloads,
        route_by: route_by?,
        line: value.line(),
    };
    let route_by = routed.unwrap_or(value);
    Some(Entry {
        exposed,
        names,
        route_by,
        value,
    })
}

pub(super) fn host_port(value: Value<'_>) -> Option<HostPort> {
    let text = value.text()?;
    match HostPort::parse(text) {
        Ok(name) => Some(name),
        Err(error) => {
            let how = "`host:port` or `host`, such as `echo.app.svc.cluster.local:80`";
            value.error(format!("is `{text}`, which {error}"), how);
            None
        }
    }
}

fn service(value: Value<'_>) -> Option<HostPort> {
    let name = host_port(value)?;
    if name.is_address() {
        let what = format!("is `{name}`, an address, and services are known by their hostnames");
        let how =
            "the `hostname` that the mesh has for it, such as `echo.app.svc.cluster.local:80`";
        value.error(what, how);
        return None;
    }
    Some(name)
}

fn alias(value: Value<'_>) -> Option<HostPort> {
    let name = host_port(value)?;
    if name.is_address() {
        let what = format!("is `{name}`, an address, which is never looked up as a name");
        value.error(
            what,
            "a name, or add the address to the service's `vips` in the mesh",
        );
        return None;
    }
    Some(name)
}

fn audience(value: Value<'_>, clusters: Option<&BTreeSet<String>>) -> Option<Audience> {
    if value.is_map() && value.is_vacant() {
        let what = "has an empty entry, which does not say whether it means nobody or everybody";
        value.error(
            what,
            "`{anyone: true}` to admit every peer, or remove it to admit nobody",
        );
        return None;
    }
    let mut fields = value.fields("exposure.services[].to[]")?;
    let anyone = fields.get("anyone").map_or(Some(false), Value::flag);
    let cluster = fields
        .get("cluster")
        .map(|cluster| known_cluster(cluster, clusters));
    let namespaces = fields.get("namespaces");
    let accounts = fields.get("service_accounts");
    fields.finish();
    let named = cluster.is_some() || namespaces.is_some() || accounts.is_some();
    let namespaces = namespaces.map_or(Some(Vec::new()), |list| all(list, EMPTY, namespace));
    let accounts = accounts.map_or(Some(Vec::new()), |list| all(list, EMPTY, account));
    let (anyone, namespaces) = (anyone?, namespaces?);
    match (anyone, named) {
        (true, true) => {
            let what = "has `anyone: true` next to other keys, which would then mean nothing";
            value.error(what, "either `{anyone: true}` or the other keys");
        }
        (false, false) => {
            value.error(
                "admits nobody",
                "`{anyone: true}` to admit every peer, or remove it",
            );
        }
        _ => {}
    }
    for (namespace, name, item) in accounts.iter().flatten() {
        if !namespaces.is_empty() && !namespaces.contains(namespace) {
            let what = format!(
                "has `{namespace}/{name}`, whose namespace is not in `namespaces`: all keys of an \
                 entry must hold, so no peer has it"
            );
            item.error(
                what,
                format!("`{namespace}` into `namespaces`, or remove `namespaces`"),
            );
        }
    }
    let cluster = match cluster {
        Some(cluster) => Some(cluster?),
        None => None,
    };
    let service_accounts = accounts?
        .into_iter()
        .map(|(ns, name, _)| (ns, name))
        .collect();
    Some(Audience {
        anyone,
        cluster,
        namespaces,
        service_accounts,
    })
}

/// The entries of a list that must not be empty; `empty` says what that would mean.
pub(super) fn all<'a, T>(
    list: Value<'a>,
    empty: &str,
    read: impl Fn(Value<'a>) -> Option<T>,
) -> Option<Vec<T>> {
    if list.is_vacant() {
        list.error(empty, "at least one entry, or remove the key");
        return None;
    }
    let read: Vec<_> = list.items().map(read).collect();
    read.into_iter()
        .collect::<Option<Vec<_>>>()
        .filter(|read| !read.is_empty())
}

pub(super) fn known_cluster(
    value: Value<'_>,
    clusters: Option<&BTreeSet<String>>,
) -> Option<String> {
    let cluster = value.text()?;
    if let Some(clusters) = clusters
        && !clusters.contains(cluster)
    {
        let known: Vec<_> = clusters.iter().map(|name| format!("`{name}`")).collect();
        let what = format!("is `{cluster}`, and `trust` names no such cluster");
        value.error(what, format!("one of {}", known.join(", ")));
        return None;
    }
    Some(cluster.to_owned())
}

fn namespace(value: Value<'_>) -> Option<String> {
    let wanted = "the name of one namespace; leave the key out for every namespace";
    value.parsed(wanted, |text| is_segment(text).then(|| text.to_owned()))
}

fn account<'a>(value: Value<'a>) -> Option<(String, String, Value<'a>)> {
    let wanted = "`NAMESPACE/NAME`, such as `shop/checkout`";
    let (namespace, name) = value.parsed(wanted, |text| {
        let (namespace, name) = text.split_once('/')?;
        let good = is_segment(namespace) && is_segment(name);
        good.then(|| (namespace.to_owned(), name.to_owned()))
    })?;
    Some((namespace, name, value))
}

/// A name must lead to one service: it is neither a service's own nor given to two.
fn aliases_are_unambiguous(entries: &[Entry<'_>]) {
    let mut services: HashMap<&str, Vec<&ExposedService>> = HashMap::new();
    for Entry { exposed, .. } in entries {
        services
            .entry(&exposed.service.host)
            .or_default()
            .push(exposed);
    }
    let mut given: HashMap<&str, Vec<(&HostPort, &HostPort, u64)>> = HashMap::new();
    for Entry { exposed, names, .. } in entries {
        for (name, value) in names {
            if name.host == exposed.service.host {
                let what = format!(
                    "is `{name}`, which has the service's own host: its own name wins, so this \
                     one is never used"
                );
                value.error(what, "another name, or remove it");
                continue;
            }
            let taken = services.get(name.host.as_str()).into_iter().flatten();
            let other = taken
                .clone()
                .find(|o| o.service != exposed.service && o.service.overlaps(name));
            if let Some(other) = other {
                let what = format!(
                    "is `{name}`, which is itself the service exposed on line {}",
                    other.line
                );
                value.error(what, "a name that no service has");
            }
            let earlier = given.entry(&name.host).or_default();
            let twice = earlier
                .iter()
                .find(|(n, service, _)| **service != exposed.service && n.overlaps(name));
            if let Some((_, service, line)) = twice {
                let what = format!("is `{name}`, which line {line} gives to `{service}`");
                value.error(what, "another name for one of them");
            }
            earlier.push((name, &exposed.service, value.line()));
        }
    }
}

/// Tunnels to one port of a service are routed in one way, whoever asks.
fn routing_is_unambiguous(entries: &[Entry<'_>]) {
    let mut seen: HashMap<&str, Vec<&ExposedService>> = HashMap::new();
    for Entry {
        exposed, route_by, ..
    } in entries
    {
        let earlier = seen.entry(&exposed.service.host).or_default();
        let other = earlier.iter().find(|other| {
            other.route_by != exposed.route_by && other.service.overlaps(&exposed.service)
        });
        if let Some(other) = other {
            let what = format!(
                "routes tunnels to `{}` in another way than line {} does",
                exposed.service, other.line
            );
            route_by.error(what, "the same `route_by`, or none, in both entries");
        }
        earlier.push(exposed);
    }
}

/// Warns of two entries of a service with different `names`: each name opens the service to the
/// peers of its own entry alone, who are others than those of the other entry.
fn names_are_shared(entries: &[Entry<'_>]) {
    let mut seen: HashMap<&str, Vec<&ExposedService>> = HashMap::new();
    let lacks = |one: &ExposedService, other: &ExposedService| {
        let has = |name: &HostPort| other.names.iter().any(|own| own.overlaps(name));
        !one.names.iter().all(has)
    };
    for Entry { exposed, value, .. } in entries {
        let earlier = seen.entry(&exposed.service.host).or_default();
        let other = earlier.iter().find(|other| {
            other.to != exposed.to
                && other.service.overlaps(&exposed.service)
                && (lacks(other, exposed) || lacks(exposed, other))
        });
        if let Some(other) = other {
            let what = format!(
                "gives `{}` other `names` than line {} does, and a name opens it to those alone \
                 whom its own entry admits",
                exposed.service, other.line
            );
            let how = "the same `names` into both entries, or each name with its `consumers` into \
                       `names.aliases`";
            value.warning(what, how);
        }
        earlier.push(exposed);
    }
}

/// A hostname is of one namespace: no other one can have it.
fn namespaces_are_unambiguous(entries: &[Entry<'_>]) {
    let mut seen: HashMap<&str, &ExposedService> = HashMap::new();
    for Entry { exposed, value, .. } in entries {
        let Some(namespace) = &exposed.namespace else {
            continue;
        };
        let first = seen.entry(&exposed.service.host).or_insert(exposed);
        if first.namespace.as_ref() != Some(namespace) {
            let what = format!(
                "has `namespace: {namespace}` for `{}`, of which line {} says another one",
                exposed.service.host, first.line
            );
            value.error(what, "the same `namespace` in both entries");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::with;

    #[test]
    fn a_hostname_has_one_namespace() {
        let both = |one: &str, other: &str| {
            let entry = |keys| format!("\n  - {{to: [{{anyone: true}}], service: {keys}}}");
            let entries = [one, other].map(entry).concat();
            with(&format!("exposure:\n  services:{entries}"))
        };
        for (one, other) in [
            ("a, namespace: x", "a"),
            ("\"a:80\", namespace: x", "\"a:81\", namespace: x"),
            ("a, namespace: x", "b, namespace: y"),
        ] {
            assert_eq!(both(one, other), "", "{one} {other}");
        }
        assert_eq!(
            both("\"a:80\", namespace: x", "\"a:81\", namespace: y"),
            "14: error: `exposure.services[]` has `namespace: y` for `a`, of which line 13 says \
             another one; write the same `namespace` in both entries"
        );
    }

    #[test]
    fn tunnels_to_one_port_of_a_service_are_routed_in_one_way() {
        let both = |one: &str, other: &str| {
            let entry = |keys| format!("\n  - {{to: [{{anyone: true}}], {keys}}}");
            let entries = [one, other].map(entry).concat();
            with(&format!("exposure:\n  services:{entries}"))
        };
        let good = [
            (
                "service: \"a:80\", route_by: sni",
                "service: \"a:81\", route_by: strict",
            ),
            (
                "service: a, route_by: sni",
                "service: \"a:80\", route_by: sni",
            ),
            ("service: a, route_by: authority", "service: b"),
        ];
        for (one, other) in good {
            assert_eq!(both(one, other), "", "{one} {other}");
        }
        assert_eq!(
            both("service: \"a:80\"", "service: a, route_by: strict"),
            "14: error: `exposure.services[].route_by` routes tunnels to `a` in another way than \
             line 13 does; write the same `route_by`, or none, in both entries"
        );
        assert!(
            both("service: a, route_by: sni", "service: a").starts_with(
                "14: error: `exposure.services[]` routes tunnels to `a` in another way"
            )
        );
        assert_eq!(
            both("service: a", "service: b, route_by: name"),
            "14: error: `exposure.services[].route_by` cannot be `name`; write one of \
             `authority`, `sni`, `strict`"
        );
    }

    #[test]
    fn entries_that_overlap_and_admit_others_have_the_same_names() {
        let both = |one: &str, other: &str| {
            let entry = |keys| format!("\n  - {{service: {keys}}}");
            let entries = [one, other].map(entry).concat();
            with(&format!("exposure:\n  services:{entries}"))
        };
        let (west, east) = ("to: [{cluster: west}]", "to: [{cluster: east}]");
        let warned = [
            (format!("a, {west}, names: [b]"), format!("a, {east}")),
            (format!("a, {west}"), format!("'a:80', {east}, names: [b]")),
            (
                format!("a, {west}, names: [b]"),
                format!("a, {east}, names: [b, c]"),
            ),
        ];
        for (one, other) in warned {
            let found = both(&one, &other);
            assert!(found.starts_with("14: warning: "), "{one} {other}: {found}");
            assert!(
                found.contains(" other `names` than line 13 does"),
                "{found}"
            );
        }
        let good = [
            (
                format!("a, {west}, names: [b]"),
                format!("a, {east}, names: [b]"),
            ),
            (format!("a, {west}, names: [b]"), format!("a, {west}")),
            (
                format!("'a:80', {west}, names: [b]"),
                format!("'a:81', {east}"),
            ),
            (format!("a, {west}, names: [b]"), format!("c, {east}")),
        ];
        for (one, other) in good {
            assert_eq!(both(&one, &other), "", "{one} {other}");
        }
    }
}
