//! Entries of the configuration that objects of other projects describe: ServiceExpositionPolicy
//! and RemoteServiceBinding of the multi-cluster agents of istio-ecosystem, and Admiral's
//! GlobalTrafficPolicy and Dependency.
//!
//! A field that could restrict access is an error if it cannot be expressed. Any other one is a
//! warning.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;
use std::time::SystemTime;

use super::dependency::{Dependency, IDENTITY};
use super::meta::{Meta, bounded, is_label_name, label_name};
use super::names::{LOCAL_SUFFIX, host};
use crate::config::{
    Audience, Config, Distribution, ExposedService, HostPort, Line, RegionWeight, TrafficRule,
};
use crate::wire::RegionPattern;
use crate::yaml::{Fields, Value};

const EXPOSED: &str = "spec.exposed[]";
const REMOTE: &str = "spec.remote[]";
const REMOTE_SERVICE: &str = "spec.remote[].services[]";
const POLICY: &str = "spec.policy[]";
const TARGET: &str = "spec.policy[].target[]";

/// Admiral's keys of an environment, the best first, and the environment of objects without one.
const ENVIRONMENTS: [&str; 2] = ["admiral.io/env", "env"];
const DEFAULT_ENVIRONMENT: &str = "default";

/// Limit of the items of one object, of which most are a service of its namespace.
const ITEMS_MAX: usize = 1000;

/// Remedy of an object with more items.
const FEWER: &str = "the others into another object";

/// Limit of the ports, of the clusters and of the regions of one entry: that of Kubernetes for the
/// ports of an EndpointSlice.
const LIST_MAX: usize = 100;

/// Limit of the name of a cluster in bytes: that of a DNS name.
const CLUSTER_BYTES_MAX: usize = 253;

#[derive(Clone, Debug)]
pub(super) struct Entries {
    /// Cluster of the object; ours if absent.
    cluster: Option<Arc<str>>,
    age: Age,
    pub(super) services: Vec<Exposed>,
    pub(super) bound: Vec<BoundService>,
    pub(super) traffic: Vec<TrafficRule>,
    pub(super) dependency: Option<Dependency>,
    /// True if the list of services could not be read, so that it may have named any.
    hides_services: bool,
}

/// Age of an object, in the order of Gateway API's rule for conflicts: by creation time, which
/// Kubernetes sets, then by namespace and name. An object without the time is the newest.
type Age = (bool, Option<SystemTime>, Arc<str>, Arc<str>);

/// Returns the entries of the objects of the gateway's cluster, the oldest object first. Names and
/// addresses belong to the first one that claims them, whatever file it is in.
pub(super) fn by_age<'a>(entries: &'a [Arc<Entries>], config: &Config) -> Vec<&'a Entries> {
    let own = config.gateway.cluster.as_str();
    let is_own = |of: &&Entries| of.cluster.as_deref().is_none_or(|cluster| cluster == own);
    let mut entries: Vec<_> = entries.iter().map(|one| &**one).filter(is_own).collect();
    entries.sort_by(|one, other| one.age.cmp(&other.age));
    entries
}

/// Service that other clusters may reach.
#[derive(Clone, Debug)]
pub(super) struct Exposed {
    pub(super) host: String,
    /// Ports; none for all.
    pub(super) ports: Vec<Option<u16>>,
    pub(super) alias: Option<String>,
    /// Clusters that may reach it.
    pub(super) clusters: Vec<String>,
    pub(super) namespace: Arc<str>,
    pub(super) line: Line,
}

/// Service of another cluster for local clients.
#[derive(Clone, Debug)]
pub(super) struct BoundService {
    pub(super) cluster: String,
    /// Service as that cluster exposes it.
    pub(super) service: HostPort,
    pub(super) name: String,
    pub(super) namespace: Arc<str>,
    pub(super) line: Line,
}

impl Entries {
    /// Returns the number of items in its lists.
    pub(super) fn items(&self) -> usize {
        let destinations = self.dependency.as_ref().and_then(|one| one.destinations.as_ref());
        let lists = self.services.len() + self.bound.len() + self.traffic.len();
        lists + destinations.map_or(0, Vec::len)
    }

    /// Returns the cluster and the namespace of which an invalid object may have restricted any
    /// service.
    pub(super) fn hidden_namespace(&self) -> Option<(Option<Arc<str>>, Arc<str>)> {
        let (_, _, namespace, _) = &self.age;
        self.hides_services.then(|| (self.cluster.clone(), Arc::clone(namespace)))
    }

    /// Returns the entries of an invalid object: its services are exposed to nobody, whatever else
    /// exports them, and the services that it depends on are not used.
    pub(super) fn closed(self) -> Self {
        let services = self.services.into_iter().map(Exposed::closed).collect();
        let dependency = self.dependency.map(Dependency::closed);
        Self { services, dependency, bound: Vec::new(), traffic: Vec::new(), ..self }
    }
}

impl Exposed {
    /// Returns the service for no cluster.
    pub(super) fn closed(self) -> Self {
        Self { clusters: Vec::new(), ..self }
    }

    /// Returns its entry for a port.
    pub(super) fn entry(&self, port: Option<u16>) -> ExposedService {
        let audience =
            |cluster: &String| Audience { cluster: Some(cluster.clone()), ..Audience::default() };
        let named = |host: &String| HostPort { host: host.clone(), port };
        ExposedService {
            namespace: Some(self.namespace.to_string()),
            to: self.clusters.iter().map(audience).collect(),
            names: self.alias.iter().map(named).collect(),
            is_of_object: true,
            line: self.line.clone(),
            ..ExposedService::new(named(&self.host))
        }
    }
}

/// Reads the `spec` of an object of one of the kinds.
pub(super) fn read(kind: &str, top: &mut Fields<'_>, meta: &Meta, object: Value<'_>) -> Entries {
    let created = meta.creation_time(object);
    let (namespace, name) = (Arc::clone(&meta.namespace), Arc::clone(&meta.name));
    let mut entries = Entries {
        cluster: meta.cluster.clone(),
        age: (created.is_none(), created, namespace, name),
        services: Vec::new(),
        bound: Vec::new(),
        traffic: Vec::new(),
        dependency: (kind == "Dependency").then(|| Dependency::unknown(meta)),
        hides_services: kind == "ServiceExpositionPolicy",
    };
    let Some(spec) = top.need("spec", "{}") else {
        return entries;
    };
    match kind {
        "ServiceExpositionPolicy" => {
            let example = "[{name: echo, port: 80, clusters: [west]}]";
            let items = spec.fields("spec").and_then(|mut fields| fields.need("exposed", example));
            let is_short = |items: Value<'_>| items.at_most(ITEMS_MAX, FEWER).is_some();
            let is_read = items.is_some_and(|items| items.is_list() && is_short(items));
            entries.hides_services = !is_read;
            let items = items.into_iter().flat_map(Value::items);
            let services = items.filter_map(|item| exposed(item, &meta.namespace));
            // A list that is too long closes all services, and keeps its aliases from others.
            entries.services.extend(services.filter(|one| is_read || one.alias.is_some()));
        }
        "RemoteServiceBinding" => {
            let example = "[{cluster: west, services: [{name: echo}]}]";
            let list = spec.fields("spec").and_then(|mut fields| fields.need("remote", example));
            let items = list.into_iter().flat_map(Value::items);
            let bound = items.flat_map(|item| remote(item, &meta.namespace));
            entries.bound.extend(bound.take(ITEMS_MAX + 1));
            if let Some(list) = list.filter(|_| entries.bound.len() > ITEMS_MAX) {
                list.error(format!("has more than {ITEMS_MAX} services"), FEWER);
            }
        }
        "Dependency" => entries.dependency.iter_mut().for_each(|one| one.read(spec)),
        _ => {
            let Some(mut fields) = spec.foreign("spec") else {
                return entries;
            };
            let policies = fields.need("policy", "[{dns: echo.global, lbType: 0}]");
            let selector = fields.get("selector");
            fields.warn_of_others();
            let identity = Identity::find(meta, selector);
            let policies = policies.and_then(|list| list.at_most(ITEMS_MAX, FEWER));
            let items = policies.into_iter().flat_map(Value::items);
            let traffic = items.filter_map(|item| policy(item, identity.as_ref(), &meta.namespace));
            entries.traffic.extend(traffic);
        }
    }
    entries
}

/// Reads a service that clusters may reach. There is one for every readable name, so that an
/// invalid object closes its services.
fn exposed(item: Value<'_>, namespace: &Arc<str>) -> Option<Exposed> {
    let mut fields = item.fields(EXPOSED)?;
    let name = fields.need("name", "echo").and_then(label_name);
    let alias = fields.get("alias").and_then(|value| named(value, namespace));
    let ports = fields.get("port").map(ports).unwrap_or_default();
    let clusters = fields.need("clusters", "[west]").map(clusters);
    if let Some(subset) = fields.get("subset") {
        let how = "the entry without it, with the name of a Service that has these pods alone";
        subset.error("exposes a part of a service, which cannot be expressed", how);
    }
    let ports = match &*ports {
        [] => vec![None],
        ports => ports.iter().copied().map(Some).collect(),
    };
    Some(Exposed {
        host: host((namespace, name?), LOCAL_SUFFIX),
        ports,
        alias,
        clusters: clusters.unwrap_or_default(),
        namespace: Arc::clone(namespace),
        line: Line(item.place()),
    })
}

/// Reads a port, or a list of ports as earlier versions have.
fn ports(value: Value<'_>) -> Vec<u16> {
    if value.is_list() {
        if value.is_vacant() {
            value.error("is empty", "at least one port");
        }
        unique(value, value.all(Value::port))
    } else {
        value.port().into_iter().collect()
    }
}

/// Reads the clusters that may reach a service. None at all would mean every cluster in the
/// original, which is never exposed by an omission here.
fn clusters(value: Value<'_>) -> Vec<String> {
    if value.is_vacant() {
        value.error("is empty", "the clusters that may reach the service");
    }
    unique(value, value.all(|item| cluster_name(item).map(str::to_owned)))
}

/// Reads the name of a cluster.
fn cluster_name(value: Value<'_>) -> Option<&str> {
    bounded(value, CLUSTER_BYTES_MAX, "the name of a cluster")
}

/// Returns the items of a list. Repeated ones and more than [`LIST_MAX`] are an error: each port of
/// a service has an entry with each cluster.
fn unique<T: Clone + Eq + Hash>(value: Value<'_>, items: Option<Vec<T>>) -> Vec<T> {
    let mut items = items.unwrap_or_default();
    let written = items.len();
    let mut seen = HashSet::new();
    items.retain(|item| seen.insert(item.clone()));
    if items.len() < written {
        value.error("has an item twice", "each one once");
    }
    if items.len() > LIST_MAX {
        let what = format!("has more than {LIST_MAX} items");
        value.error(what, "the others into another entry");
        items.truncate(LIST_MAX);
    }
    items
}

/// Reads a hostname. One label is a service of the namespace.
fn named(value: Value<'_>, namespace: &str) -> Option<String> {
    let wanted = "the name of a service of the namespace, or a hostname";
    value.parsed(wanted, |text| hostname(text, namespace))
}

fn hostname(text: &str, namespace: &str) -> Option<String> {
    if is_label_name(text) {
        return Some(host((namespace, text), LOCAL_SUFFIX));
    }
    let parsed = HostPort::parse(text).ok()?;
    let is_name = parsed.port.is_none() && !parsed.is_address() && text.contains('.');
    is_name.then_some(parsed.host)
}

fn remote(item: Value<'_>, namespace: &Arc<str>) -> Vec<BoundService> {
    let Some(mut fields) = item.fields(REMOTE) else {
        return Vec::new();
    };
    let cluster = fields.need("cluster", "west").and_then(cluster_name);
    let services = fields.need("services", "[{name: echo, port: 80}]");
    let services = services.and_then(|list| list.at_most(ITEMS_MAX, FEWER));
    let items = services.into_iter().flat_map(Value::items);
    let services = items.filter_map(|item| remote_service(item, cluster, namespace));
    services.collect()
}

fn remote_service(
    item: Value<'_>,
    cluster: Option<&str>,
    namespace: &Arc<str>,
) -> Option<BoundService> {
    let mut fields = item.fields(REMOTE_SERVICE)?;
    if let Some(value) = fields.get("namespace")
        && label_name(value).is_some_and(|other| *other != **namespace)
    {
        // A tenant may give names in its own namespace only.
        value.error("is not the namespace of the object", "an object in that namespace");
    }
    let host = fields.need("name", "echo");
    let host = host.and_then(|value| named(value, namespace));
    let name = match fields.get("alias") {
        Some(value) => named(value, namespace),
        None => host.clone(),
    };
    let port = fields.need("port", "80").and_then(Value::port);
    Some(BoundService {
        cluster: cluster?.to_owned(),
        service: HostPort { host: host?, port: Some(port?) },
        name: name?,
        namespace: Arc::clone(namespace),
        line: Line(item.place()),
    })
}

/// Identity of a GlobalTrafficPolicy, as Admiral finds it.
struct Identity {
    environment: String,
    /// `ENVIRONMENT.IDENTITY.global`, which Admiral gives to the workloads of the identity.
    name: String,
}

impl Identity {
    fn find(meta: &Meta, selector: Option<Value<'_>>) -> Option<Self> {
        let pairs = selector.into_iter().flat_map(Value::pairs);
        let pairs = pairs.filter_map(|(entry, value)| Some((&*entry.key, value.text_or_empty()?)));
        let selector: HashMap<&str, &str> = pairs.collect();
        let label = |key| meta.label(key).or_else(|| selector.get(key).copied());
        let is_set = |text: &&str| !text.is_empty();
        let [own, short] = ENVIRONMENTS;
        let annotation = meta.annotations.get(own).map(|text| &**text).filter(is_set);
        let environment = annotation.or_else(|| label(own).filter(is_set));
        let environment = environment.or_else(|| label(short).filter(is_set));
        let environment = environment.unwrap_or(DEFAULT_ENVIRONMENT).to_ascii_lowercase();
        let identity = label(IDENTITY).filter(is_set)?.to_ascii_lowercase();
        Some(Self { name: format!("{environment}.{identity}.global"), environment })
    }

    /// Returns the name with a prefix: its own for the environment and `default`.
    fn prefixed(&self, prefix: &str) -> Option<String> {
        let prefix = prefix.to_ascii_lowercase();
        if [DEFAULT_ENVIRONMENT, &*self.environment].contains(&&*prefix) {
            hostname(&self.name, "")
        } else {
            hostname(&format!("{prefix}.{}", self.name), "")
        }
    }
}

/// Reads the distribution of one name: `dns` or, as Admiral's current versions have, `dnsPrefix` of
/// the identity.
fn policy(
    item: Value<'_>,
    identity: Option<&Identity>,
    namespace: &Arc<str>,
) -> Option<TrafficRule> {
    let mut fields = item.foreign(POLICY)?;
    let prefix = fields.get("dnsPrefix");
    let dns = match (fields.get("dns"), identity.zip(prefix)) {
        (None, Some((identity, value))) => {
            value.parsed("a part of a hostname", |prefix| identity.prefixed(prefix))
        }
        _ => fields.need("dns", "echo.global").and_then(|value| {
            let parse = |text: &str| text.contains('.').then(|| hostname(text, ""))?;
            value.parsed("a hostname without port", parse)
        }),
    };
    let is_by_weight = fields.get("lbType").map_or(Some(false), |value| {
        let wanted = "`0` or `TOPOLOGY`, `1` or `FAILOVER`";
        value.parsed(wanted, |text| match &*text.to_ascii_lowercase() {
            "0" | "topology" => Some(false),
            "1" | "failover" => Some(true),
            _ => None,
        })
    });
    let targets = fields.get("target");
    let regions = targets.map(regions).unwrap_or_default();
    fields.warn_of_others();
    let is_by_weight = is_by_weight?;
    match targets.filter(|list| !list.is_vacant()) {
        Some(list) if !is_by_weight => {
            list.warning("is ignored with `lbType: TOPOLOGY`", "`lbType: FAILOVER`");
        }
        None if is_by_weight => {
            item.warning("has no `target` for `lbType: FAILOVER`", "the weights of its regions");
            return None;
        }
        _ => {}
    }
    Some(TrafficRule {
        service: Some(dns?),
        distribution: (!is_by_weight).then_some(Distribution::Close),
        regions: if is_by_weight { regions } else { Vec::new() },
        namespace: Some(Arc::clone(namespace)),
        line: Line(item.place()),
        ..TrafficRule::default()
    })
}

fn regions(list: Value<'_>) -> Vec<RegionWeight> {
    let (mut read, mut seen) = (Vec::new(), HashSet::new());
    for (count, item) in list.items().enumerate() {
        if count == LIST_MAX {
            let what = format!("has more than {LIST_MAX} items");
            list.error(what, "fewer regions, such as `REGION/*`");
            break;
        }
        let Some(mut fields) = item.foreign(TARGET) else {
            continue;
        };
        let wanted = "`REGION`, `REGION/*`, `REGION/ZONE`, `REGION/ZONE/SUBZONE` or `*`";
        let region = fields.need("region", "us-west-2/*");
        let region = region.and_then(|value| value.parsed(wanted, RegionPattern::parse));
        let weight = fields.get("weight").map_or(Some(0), |value| value.number(0, u32::MAX));
        fields.warn_of_others();
        if let (Some(region), Some(weight)) = (region, weight) {
            if !seen.insert(region.clone()) {
                item.error(format!("has `{region}` twice"), "each region once");
            }
            read.push(RegionWeight { region, weight });
        }
    }
    if !read.is_empty() && read.iter().all(|one| one.weight == 0) {
        list.error("has weights that sum to 0", "a weight above 0 for a region");
    }
    read
}
