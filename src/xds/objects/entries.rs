//! Entries of the configuration that objects of other projects describe: ServiceExpositionPolicy
//! and RemoteServiceBinding of the multi-cluster agents of istio-ecosystem, and Admiral's
//! GlobalTrafficPolicy.
//!
//! A field that could restrict access is an error if it cannot be expressed. Any other one is a
//! warning.

use std::sync::Arc;

use super::meta::{Meta, is_label_name, label_name};
use super::view::{LOCAL_SUFFIX, host};
use crate::config::{
    Audience, Config, Distribution, ExposedService, HostPort, Line, RegionWeight, ServiceLimits,
    Traffic,
};
use crate::wire::{RegionPattern, Transit};
use crate::yaml::{Fields, Value};

const EXPOSED: &str = "spec.exposed[]";
const REMOTE: &str = "spec.remote[]";
const REMOTE_SERVICE: &str = "spec.remote[].services[]";
const POLICY: &str = "spec.policy[]";
const TARGET: &str = "spec.policy[].target[]";

/// Entries of one or more objects, in file order. Each has the cluster of its object.
#[derive(Clone, Debug, Default)]
pub(super) struct Entries {
    pub(super) services: Vec<(Owner, ExposedService)>,
    pub(super) bound: Vec<(Owner, BoundService)>,
    pub(super) traffic: Vec<(Owner, Traffic)>,
}

/// Cluster of an object; ours if absent.
pub(super) type Owner = Option<Arc<str>>;

/// Returns whether an object belongs to the cluster of the gateway.
pub(super) fn is_own(owner: &Owner, config: &Config) -> bool {
    let own = config.gateway.cluster.as_str();
    owner.as_deref().is_none_or(|cluster| cluster == own)
}

/// Service of another cluster for local clients.
#[derive(Clone, Debug)]
pub(super) struct BoundService {
    /// Cluster that exposes the service.
    pub(super) cluster: String,
    /// Service as that cluster exposes it.
    pub(super) service: HostPort,
    /// Name for local clients.
    pub(super) name: String,
    /// Namespace of the object.
    pub(super) namespace: Arc<str>,
    pub(super) line: Line,
}

impl Entries {
    /// Adds the entries of an object.
    pub(super) fn add(&mut self, other: Self) {
        self.services.extend(other.services);
        self.bound.extend(other.bound);
        self.traffic.extend(other.traffic);
    }

    /// Adds the entries of an invalid object: its services are exposed to nobody, whatever else
    /// exports them.
    pub(super) fn add_invalid(&mut self, other: Self) {
        let closed = other.services.into_iter().map(|(owner, service)| {
            let to = Vec::new();
            (owner, ExposedService { to, ..service })
        });
        self.services.extend(closed);
    }
}

/// Reads the `spec` of an object of one of the kinds.
pub(super) fn read(kind: &str, top: &mut Fields<'_>, meta: &Meta) -> Entries {
    let mut entries = Entries::default();
    let Some(spec) = top.need("spec", "{}") else {
        return entries;
    };
    let owner = || meta.cluster.clone();
    match kind {
        "ServiceExpositionPolicy" => {
            for item in list(
                spec,
                "exposed",
                "[{name: echo, port: 80, clusters: [west]}]",
            ) {
                let services = exposed(item, &meta.namespace).into_iter();
                entries.services.extend(services.map(|one| (owner(), one)));
            }
        }
        "RemoteServiceBinding" => {
            for item in list(
                spec,
                "remote",
                "[{cluster: west, services: [{name: echo}]}]",
            ) {
                let bound = remote(item, &meta.namespace).into_iter();
                entries.bound.extend(bound.map(|one| (owner(), one)));
            }
        }
        _ => {
            let policies = spec.foreign("spec").and_then(|mut fields| {
                let policies = fields.need("policy", "[{dns: echo.global, lbType: 0}]");
                fields.get("selector");
                fields.warn_of_others();
                fields.finish();
                policies
            });
            for item in policies.into_iter().flat_map(Value::items) {
                let traffic = policy(item, &meta.namespace).map(|one| (owner(), one));
                entries.traffic.extend(traffic);
            }
        }
    }
    entries
}

/// Returns the items of the only key of a `spec`.
fn list<'a>(
    spec: Value<'a>,
    key: &'static str,
    example: &str,
) -> impl Iterator<Item = Value<'a>> + use<'a> {
    let items = spec.fields("spec").and_then(|mut fields| {
        let items = fields.need(key, example);
        fields.finish();
        items
    });
    items.into_iter().flat_map(Value::items)
}

/// Reads a service that clusters may reach: an entry for each of its ports. There is one for every
/// readable name, so that an invalid object closes its services.
fn exposed(item: Value<'_>, namespace: &Arc<str>) -> Vec<ExposedService> {
    let Some(mut fields) = item.fields(EXPOSED) else {
        return Vec::new();
    };
    let name = fields.need("name", "echo").and_then(label_name);
    let alias = fields
        .get("alias")
        .and_then(|value| named(value, namespace));
    let ports = fields.get("port").map(ports).unwrap_or_default();
    let clusters = fields.need("clusters", "[west]").map(clusters);
    if let Some(subset) = fields.get("subset") {
        let how = "the entry without it, with the name of a Service that has these pods alone";
        subset.error(
            "exposes a part of a service, which cannot be expressed",
            how,
        );
    }
    fields.finish();
    let Some(name) = name else {
        return Vec::new();
    };
    let host = host((namespace, name), LOCAL_SUFFIX);
    let all = [None];
    let ports: Vec<_> = match &*ports {
        [] => all.into(),
        ports => ports.iter().copied().map(Some).collect(),
    };
    let clusters = clusters.unwrap_or_default();
    let audience = |cluster: &String| Audience {
        cluster: Some(cluster.clone()),
        ..Audience::default()
    };
    let entry = |port| ExposedService {
        service: HostPort {
            host: host.clone(),
            port,
        },
        namespace: Some(namespace.to_string()),
        to: clusters.iter().map(audience).collect(),
        names: alias
            .iter()
            .map(|host| HostPort {
                host: host.clone(),
                port,
            })
            .collect(),
        workloads: false,
        route_by: None,
        transit: Transit::Off,
        limits: ServiceLimits::default(),
        subsets: Vec::new(),
        is_of_object: true,
        line: Line(item.place()),
    };
    ports.into_iter().map(entry).collect()
}

/// Reads a port, or a list of ports as earlier versions have.
fn ports(value: Value<'_>) -> Vec<u16> {
    if value.is_list() {
        if value.is_vacant() {
            value.error("is empty", "at least one port");
        }
        value.all(Value::port).unwrap_or_default()
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
    let read = value.all(|item| item.text().map(str::to_owned));
    read.unwrap_or_default()
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

/// Reads the services of a cluster.
fn remote(item: Value<'_>, namespace: &Arc<str>) -> Vec<BoundService> {
    let Some(mut fields) = item.fields(REMOTE) else {
        return Vec::new();
    };
    let cluster = fields.need("cluster", "west").and_then(Value::text);
    let services = fields.need("services", "[{name: echo, port: 80}]");
    fields.finish();
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
        value.error(
            "is not the namespace of the object",
            "an object in that namespace",
        );
    }
    let host = fields.need("name", "echo");
    let host = host.and_then(|value| named(value, namespace));
    let name = match fields.get("alias") {
        Some(value) => named(value, namespace),
        None => host.clone(),
    };
    let port = fields.need("port", "80").and_then(Value::port);
    fields.finish();
    Some(BoundService {
        cluster: cluster?.to_owned(),
        service: HostPort {
            host: host?,
            port: Some(port?),
        },
        name: name?,
        namespace: Arc::clone(namespace),
        line: Line(item.place()),
    })
}

/// Reads the distribution of one name.
fn policy(item: Value<'_>, namespace: &Arc<str>) -> Option<Traffic> {
    let mut fields = item.foreign(POLICY)?;
    let dns = fields.need("dns", "echo.global");
    let dns = dns.and_then(|value| {
        let parse = |text: &str| text.contains('.').then(|| hostname(text, ""))?;
        value.parsed("a hostname without port", parse)
    });
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
    // `dns` has it already.
    fields.get("dnsPrefix");
    fields.warn_of_others();
    fields.finish();
    let is_by_weight = is_by_weight?;
    match targets.filter(|list| !list.is_vacant()) {
        Some(list) if !is_by_weight => {
            list.warning("is ignored with `lbType: TOPOLOGY`", "`lbType: FAILOVER`");
        }
        None if is_by_weight => {
            item.warning(
                "has no `target` for `lbType: FAILOVER`",
                "the weights of its regions",
            );
            return None;
        }
        _ => {}
    }
    Some(Traffic {
        service: Some(dns?),
        distribution: (!is_by_weight).then_some(Distribution::Close),
        spill_below: None,
        regions: if is_by_weight { regions } else { Vec::new() },
        latency: None,
        namespace: Some(Arc::clone(namespace)),
        line: Line(item.place()),
    })
}

/// Reads the weights of regions.
fn regions(list: Value<'_>) -> Vec<RegionWeight> {
    let mut read: Vec<RegionWeight> = Vec::new();
    for item in list.items() {
        let Some(mut fields) = item.foreign(TARGET) else {
            continue;
        };
        let wanted = "`REGION`, `REGION/*`, `REGION/ZONE`, `REGION/ZONE/SUBZONE` or `*`";
        let region = fields.need("region", "us-west-2/*");
        let region = region.and_then(|value| value.parsed(wanted, RegionPattern::parse));
        let weight = fields
            .get("weight")
            .map_or(Some(0), |value| value.number(0, u32::MAX));
        fields.warn_of_others();
        fields.finish();
        if let (Some(region), Some(weight)) = (region, weight) {
            if read.iter().any(|one| one.region == region) {
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
