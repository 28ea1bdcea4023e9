//! Mesh file: discovery without a control plane, in the format of ztunnel's local
//! configuration.
//!
//! Every key of that format is read or explicitly ignored, and any other is an error. A
//! partially understood mesh would be routed partially. All findings are reported together.

mod gateways;
mod policies;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use super::convert::{named_gateways, normal_hostname, unicast};
use crate::snapshot::Policies;
use crate::snapshot::mesh::{
    Addresses, Derived, Locality, Mesh, PodLabels, Ports, Protocol, Service, Services, Sorted,
    Template, Workload,
};
use crate::wire::label::{POD_LABELS_MAX, is_label};
use crate::yaml::{Document, Fields, Findings, Report, Value};

/// Service with its position in the file.
type Located<'a> = (Service, Value<'a>);

/// Reads and validates a mesh file. Returns the mesh and its authorization policies, with the
/// warnings.
pub fn load(path: &Path) -> Result<((Mesh, Policies), Findings), Findings> {
    mesh(&Document::load(path)?)
}

/// Parses and validates a text as the contents of the file `path`.
pub fn parse(path: &Path, text: &str) -> Result<(Mesh, Policies), Findings> {
    mesh(&Document::parse(path, text)?).map(|(mesh, _)| mesh)
}

fn mesh(document: &Document) -> Result<((Mesh, Policies), Findings), Findings> {
    let report = Report::new(document.file());
    // An empty file is more often one that is being written than a mesh without services.
    let mesh = Fields::of_document(document, &report, "workloads: []").map(read);
    let findings = report.into_findings();
    match mesh {
        Some(mesh) if !findings.has_errors() => Ok((mesh, findings)),
        _ => Err(findings),
    }
}

/// Reads every part before any is discarded, so that all findings are reported.
fn read(mut top: Fields<'_>) -> (Mesh, Policies) {
    let workloads = items(&mut top, "workloads");
    let services = items(&mut top, "services");
    let policies = items(&mut top, "policies");
    drop(top);
    check_unique_uids(&workloads);
    let declared = services.iter().copied().filter_map(peek_service_key).collect();
    let placed = |item| Some((service(item)?, item));
    let services = resolve_canonical_services(services.into_iter().filter_map(placed).collect());
    check_unique_vips(&services);
    gateways::warn_of_missing_waypoints(&services, &declared);
    let (workloads, claims): (Vec<_>, Vec<_>) = workloads.into_iter().map(workload).unzip();
    check_service_references(claims.iter().flatten(), &services, &declared);
    let policies = policies.into_iter().filter_map(policies::policy);
    let policies = policies.map(Arc::new).collect();
    let services = services.into_iter().map(|(service, _)| service);
    let workloads: Vec<_> = workloads.into_iter().flatten().collect();
    let gateways = named_gateways(workloads.iter());
    let mesh = Mesh::new(services, gateways.into_iter().chain(workloads));
    (mesh, policies)
}

fn items<'a>(top: &mut Fields<'a>, key: &'static str) -> Vec<Value<'a>> {
    top.get(key).into_iter().flat_map(Value::items).collect()
}

/// Reference of a workload to a service: `namespace/hostname`, optionally one of its ports, and
/// its position.
type ServiceReference<'a> = (String, Option<u16>, Value<'a>);

/// Reads a workload and its claims. The claims are returned even if the workload is invalid.
fn workload(value: Value<'_>) -> (Option<Workload>, Vec<ServiceReference<'_>>) {
    let Some(mut fields) = value.fields("workloads[]") else {
        return (None, Vec::new());
    };
    let mut claims = Vec::new();
    let services =
        fields.required("services", "{}", |value| read_service_references(value, &mut claims));
    let workload = workload_fields(&mut fields, services);
    (fields.complete(workload), claims)
}

fn workload_fields(fields: &mut Fields<'_>, services: Sorted<Arc<str>, Ports>) -> Workload {
    let uid: Arc<str> = fields.required("uid", "\"east//Pod/app/echo-1\"", shared);
    let protocols = [("TCP", Protocol::Tcp), ("HBONE", Protocol::Hbone)];
    let modes = [("Standard", false), ("HostNetwork", true)];
    let states = [("Healthy", true), ("Unhealthy", false)];
    let (policies, has_waypoint) = read_policies_and_ignored_keys(fields);
    let mut text = |key, default| text_or(fields, key, default);
    let template = Template {
        service_account: text("serviceAccount", "default"),
        trust_domain: text("trustDomain", "cluster.local"),
        cluster: text("clusterId", "Kubernetes"),
        network: text("network", ""),
        workload_name: text("workloadName", ""),
        workload_type: text("workloadType", ""),
        canonical_name: text("canonicalName", ""),
        canonical_revision: text("canonicalRevision", ""),
        namespace: fields.required("namespace", "default", segment).into(),
        hostname: fields.optional("hostname", Arc::default(), hostname_or_none),
        protocol: fields.optional("protocol", Protocol::Tcp, |v| v.choice(&protocols)),
        host_network: fields.optional("networkMode", false, |v| v.choice(&modes)),
        locality: fields.optional("locality", Locality::default(), locality).into(),
        has_waypoint,
        policies,
        pod_labels: fields.optional("labels", PodLabels::default(), pod_labels),
        labels: Derived::default(),
    };
    let gateway = fields.optional("networkGateway", None, |v| {
        gateways::address(v, "workloads[].networkGateway").map(Some)
    });
    Workload {
        own_name: Workload::own_name(&uid, fields.optional("name", "", Value::text)),
        uid,
        node: text_or(fields, "node", ""),
        addresses: fields.required("workloadIps", "[\"10.0.0.1\"]", addresses),
        healthy: fields.optional("status", true, |v| v.choice(&states)),
        capacity: fields.optional("capacity", 1, |v| v.number(0, u32::MAX)),
        priority: 0,
        degraded: false,
        network_gateway: gateway.map(Arc::new),
        services: Services(Arc::new(services)),
        template: template.into(),
    }
}

/// Reads the policies that select a workload, and whether it has a waypoint. Also validates the
/// keys that a gateway does not use.
fn read_policies_and_ignored_keys(fields: &mut Fields<'_>) -> (Box<[Arc<str>]>, bool) {
    let waypoint = fields.get("waypoint").map(|v| gateways::address(v, "workloads[].waypoint"));
    fields.get("nativeTunnel").map(Value::flag);
    let policies = fields.optional("authorizationPolicies", Vec::new(), |list| list.all(shared));
    if let Some(mut tunnel) =
        fields.get("applicationTunnel").and_then(|v| v.fields("workloads[].applicationTunnel"))
    {
        tunnel.get("protocol").map(|v| v.choice(&[("NONE", ()), ("PROXY", ())]));
        tunnel.get("port").map(Value::port);
    }
    (policies.into(), waypoint.is_some())
}

/// Reads `{KEY: VALUE}`.
fn pod_labels(value: Value<'_>) -> Option<PodLabels> {
    let twice = |key: &Arc<str>| (format!("has the label `{key}` twice"), "each label once");
    let labels = data_map(value, "is not a map", "`{team: shop}`", twice, |key, value| {
        let text = value.text_or_empty()?;
        if !is_label(key, text) {
            let what = format!("is the label `{key}: {text}`");
            value.error(what, "a key and a value of at most 63 characters, as in Kubernetes");
            return None;
        }
        Some((Arc::from(key), Arc::from(text)))
    })?;
    if labels.len() > POD_LABELS_MAX {
        let what = format!("has {} labels", labels.len());
        value.error(what, format!("at most {POD_LABELS_MAX}"));
        return None;
    }
    Some(labels.into_iter().collect())
}

/// Reads `{"namespace/hostname": {servicePort: targetPort}}`.
fn read_service_references<'a>(
    value: Value<'a>,
    claims: &mut Vec<ServiceReference<'a>>,
) -> Option<Sorted<Arc<str>, Ports>> {
    let example = "`{\"app/echo.app.svc.cluster.local\": {80: 8080}}`";
    let twice = |key: &String| {
        let what = format!("names the service `{key}` twice");
        (what, "all its ports in one entry")
    };
    let services = data_map(value, "is not a map", example, twice, |text, value| {
        let Some(key) = normalize_service_key(text) else {
            let what = format!("names a service `{text}`");
            value.error(what, "`NAMESPACE/HOSTNAME`");
            return None;
        };
        let ports = ports(value, 1)?;
        claims.push((key.clone(), None, value));
        let ports = ports.into_iter().map(|(port, (target, at))| {
            claims.push((key.clone(), Some(port), at));
            (port, target)
        });
        let ports: Ports = ports.collect();
        Some((key, ports))
    })?;
    let services = services.into_iter();
    Some(services.map(|(key, ports)| (key.into(), ports)).collect())
}

/// Reads a map whose keys are data. Every invalid entry has reported its finding.
fn data_map<'a, K: Ord + Clone, T>(
    value: Value<'a>,
    wrong: &str,
    example: &str,
    twice: impl Fn(&K) -> (String, &'static str),
    mut read: impl FnMut(&str, Value<'a>) -> Option<(K, T)>,
) -> Option<BTreeMap<K, T>> {
    if !value.is_map() {
        value.error(wrong, example);
        return None;
    }
    let (mut all, mut good) = (BTreeMap::new(), true);
    for (entry, value) in value.pairs() {
        let Some((key, read)) = read(&entry.key, value) else {
            good = false;
            continue;
        };
        if all.insert(key.clone(), read).is_some() {
            let (what, how) = twice(&key);
            value.error(what, how);
            good = false;
        }
    }
    good.then_some(all)
}

/// Normalizes `namespace/hostname`, the form in which workloads refer to services.
fn normalize_service_key(text: &str) -> Option<String> {
    let (namespace, hostname) = text.split_once('/')?;
    let hostname = normal_hostname(hostname)?;
    (!namespace.is_empty()).then(|| format!("{namespace}/{hostname}"))
}

/// Reads service ports, each with its target port and the position of the target. A target
/// below `target_min` is an error. Target 0 means a port that each workload names, so only a
/// service may have it.
fn ports(value: Value<'_>, target_min: u16) -> Option<BTreeMap<u16, (u16, Value<'_>)>> {
    let (wrong, example) = ("is not a map of ports", "`{80: 8080}`, service port to target port");
    let twice = |port: &u16| (format!("has the service port {port} twice"), "each port once");
    data_map(value, wrong, example, twice, |text, value| {
        let port = text.parse().ok().filter(|port: &u16| *port > 0);
        let target = value.number(target_min, u16::MAX);
        if port.is_none() {
            let what = format!("has a service port `{text}`");
            value.error(what, "a whole number from 1 to 65535");
        }
        Some((port?, (target?, value)))
    })
}

fn service(value: Value<'_>) -> Option<Service> {
    let mut fields = value.fields("services[]")?;
    let (name, namespace) =
        (fields.required("name", "echo", segment), fields.required("namespace", "app", segment));
    let visibilities = [("Public", false), ("Namespace", true)];
    let text = |v: Value<'_>| v.text().map(str::to_owned);
    let ports = |v| {
        let ports = ports(v, 0)?.into_iter();
        Some(ports.map(|(port, (target, _))| (port, target)).collect())
    };
    let own = Service {
        name: name.into(),
        namespace: namespace.into(),
        hostname: fields.required("hostname", "echo.app.svc.cluster.local", hostname).into(),
        vips: fields.required("vips", "[\"east/10.1.0.1\"]", |v| v.all(network_address)),
        ports: fields.required("ports", "{80: 8080}", ports),
        subject_alt_names: fields.optional("subjectAltNames", Vec::new(), |list| list.all(text)),
        waypoints: gateways::waypoints(&mut fields),
        private: fields.optional("visibility", false, |v| v.choice(&visibilities)),
        canonical: fields.optional("canonical", false, Value::flag),
        ..Service::default()
    };
    let service = fields.optional("loadBalancer", own.clone(), |v| gateways::balancer(v, own));
    fields.get("cidrVips").map(|list| list.all(|v| v.text().map(drop)));
    fields.get("endpoints");
    fields.get("ipFamilies").map(|v| v.choice(&[("IPv4", ()), ("IPv6", ()), ("Dual", ())]));
    fields.complete(service)
}

fn locality(value: Value<'_>) -> Option<Locality> {
    let mut fields = value.fields("workloads[].locality")?;
    let locality = Locality {
        region: text_or(&mut fields, "region", ""),
        zone: text_or(&mut fields, "zone", ""),
        subzone: text_or(&mut fields, "subzone", ""),
    };
    fields.complete(locality)
}

/// Reads a text. As in WDS, an empty value means absent.
fn text_or(fields: &mut Fields<'_>, key: &'static str, default: &str) -> Arc<str> {
    let text = fields.optional(key, "", Value::text_or_empty);
    if text.is_empty() { default } else { text }.into()
}

fn shared(value: Value<'_>) -> Option<Arc<str>> {
    value.text().map(Arc::from)
}

fn addresses(list: Value<'_>) -> Option<Addresses> {
    let wanted = "an IP address that can be dialled, such as `10.0.0.1`";
    list.all(|value| value.parsed(wanted, unicast)).map(Addresses::from_iter)
}

fn network_address(value: Value<'_>) -> Option<(String, IpAddr)> {
    value.parsed("`NETWORK/IP`, or `/IP` for the network without name", |text| {
        let (network, address) = text.rsplit_once('/')?;
        Some((network.to_owned(), unicast(address)?))
    })
}

/// Reads a name that is part of a key such as `namespace/hostname`.
fn segment(value: Value<'_>) -> Option<String> {
    let good = |text: &str| !text.contains(|c: char| c == '/' || c.is_whitespace());
    value.parsed("a name without `/` and spaces", |text| good(text).then(|| text.to_owned()))
}

fn hostname(value: Value<'_>) -> Option<String> {
    value.parsed("a host name, such as `echo.app.svc.cluster.local`", |text| {
        normal_hostname(text).map(Cow::into_owned)
    })
}

/// Reads the hostname of a workload; empty if it has none.
fn hostname_or_none(value: Value<'_>) -> Option<Arc<str>> {
    match value.text_or_empty()? {
        "" => Some(Arc::default()),
        _ => hostname(value).map(Arc::from),
    }
}

/// Returns the key of a service, even if the rest of it is invalid.
fn peek_service_key(service: Value<'_>) -> Option<String> {
    let namespace = service.peek("namespace")?;
    let hostname = normal_hostname(service.peek("hostname")?)?;
    Some(format!("{namespace}/{hostname}"))
}

fn check_unique_uids(workloads: &[Value<'_>]) {
    let mut lines = HashMap::new();
    for workload in workloads {
        let Some(uid) = workload.peek("uid") else {
            continue;
        };
        if let Some(line) = lines.insert(uid, workload.line()) {
            let what = format!("has the uid `{uid}`, which line {line} has too");
            workload.error(what, "another uid");
        }
    }
}

/// Resolves services with the same hostname: the canonical one wins. Others of its namespace
/// are dropped. Those of other namespaces stay, because workloads refer to services by
/// namespace and hostname, and lookups by hostname take the canonical one.
fn resolve_canonical_services(services: Vec<Located<'_>>) -> Vec<Located<'_>> {
    let mut by_hostname: HashMap<&str, Vec<usize>> = HashMap::new();
    for (index, (service, _)) in services.iter().enumerate() {
        by_hostname.entry(&service.hostname).or_default().push(index);
    }
    let mut dropped = HashSet::new();
    for same in by_hostname.values().filter(|same| same.len() > 1) {
        let canonical: Vec<_> =
            same.iter().copied().filter(|index| services[*index].0.canonical).collect();
        let [winner] = canonical[..] else {
            for pair in same.windows(2) {
                let ((service, value), (_, first)) = (&services[pair[1]], &services[pair[0]]);
                let what = format!(
                    "has the hostname `{}`, which line {} has too",
                    service.hostname,
                    first.line()
                );
                value.error(what, "`canonical: true` at exactly one of them, or another hostname");
            }
            continue;
        };
        let namespace = &services[winner].0.namespace;
        let loses = |index: &usize| *index != winner && services[*index].0.namespace == *namespace;
        dropped.extend(same.iter().copied().filter(loses));
    }
    let kept = services.into_iter().enumerate().filter(|(index, _)| !dropped.contains(index));
    kept.map(|(_, placed)| placed).collect()
}

/// Reports virtual addresses of several services. Services with the same hostname may share
/// theirs. An address without a network is in every network.
fn check_unique_vips(services: &[Located<'_>]) {
    let mut by_address: HashMap<IpAddr, Vec<(&str, &Located<'_>)>> = HashMap::new();
    for placed @ (service, value) in services {
        for (network, ip) in &service.vips {
            let others = by_address.entry(*ip).or_default();
            let other = others.iter().find(|(of, (other, _))| {
                (of == network || of.is_empty() || network.is_empty())
                    && other.hostname != service.hostname
            });
            if let Some((_, (other, at))) = other {
                let what = format!(
                    "has the VIP `{network}/{ip}`, which `{}` on line {} has too",
                    other.hostname,
                    at.line()
                );
                value.error(what, "another address at one of them");
            }
            others.push((network, placed));
        }
    }
}

/// Reports references to services that are not defined, because such a workload would silently
/// get no traffic. `declared` has all services in the file, including invalid ones.
fn check_service_references<'a>(
    claims: impl Iterator<Item = &'a ServiceReference<'a>>,
    services: &[Located<'_>],
    declared: &HashSet<String>,
) {
    let known: HashMap<_, _> =
        services.iter().map(|(service, _)| (service.key(), service)).collect();
    for (name, port, value) in claims {
        match (known.get(name), port) {
            (None, None) if !declared.contains(name) => {
                let what = format!("names `{name}`, which is not in `services`");
                value.error(what, "the `NAMESPACE/HOSTNAME` of one that is");
            }
            (Some(service), Some(port)) if !service.ports.contains_key(port) => {
                let has: Vec<_> = service.ports.keys().map(u16::to_string).collect();
                let what = format!("has the port {port}, which `{name}` does not have");
                value.error(what, format!("one of {}", has.join(", ")));
            }
            _ => {}
        }
    }
}
