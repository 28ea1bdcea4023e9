//! Conversion of YAML documents to objects, by version and kind.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value as Json;

use super::entries;
use super::meta::{self, Meta, label_name};
use super::service::{DeclaredScope, Service};
use super::{Export, Import, InvalidObjects, Node, Objects, RunningPod, ports, service, slice};
use crate::xds::convert::unicast;
use crate::yaml::{Document, Fields, Findings, Position, Report, Severity, Value};

/// Ignored kinds, with the position of the first object of each.
type IgnoredKinds = BTreeMap<String, Position>;

/// Limit of the ignored kinds that are reported.
const KINDS_MAX: usize = 64;

/// Kind, with its API versions.
pub(in crate::xds) type Kind = (&'static str, &'static [&'static str]);

pub(in crate::xds) const KINDS: [Kind; 11] = [
    ("Namespace", &["v1"]),
    ("Node", &["v1"]),
    ("Pod", &["v1"]),
    ("Service", &["v1"]),
    ("EndpointSlice", &["discovery.k8s.io/v1"]),
    ("ServiceExport", &MULTICLUSTER),
    ("ServiceImport", &MULTICLUSTER),
    ("ServiceExpositionPolicy", &["multicluster.istio.io/v1alpha1"]),
    ("RemoteServiceBinding", &["multicluster.istio.io/v1alpha1"]),
    ("GlobalTrafficPolicy", &["admiral.io/v1alpha1", "admiral.io/v1"]),
    ("Dependency", &["admiral.io/v1alpha1"]),
];

const MULTICLUSTER: [&str; 2] = ["multicluster.x-k8s.io/v1alpha1", "multicluster.x-k8s.io/v1beta1"];

/// Similarity above which a kind is a misspelt one: less than two of ten letters differ.
/// `ServiceEntry` resembles `ServiceExport` by 0.62.
const SIMILAR_KIND: f64 = 0.8;

/// Number of letters by which the length of a misspelt kind differs: a fifth of the longest one.
/// Others need no comparison, however long they are.
const KIND_EDITS_MAX: usize = 5;

/// Number of letters that differ in a misspelt API group.
const GROUP_EDITS_MAX: usize = 2;

/// Limit of the addresses of a ServiceImport: that of a service of a control plane.
const IPS_MAX: usize = 1024;

/// Adds the objects of a file. Returns its findings.
pub(super) fn file(path: &Path, objects: &mut Objects) -> Findings {
    all(path, Document::load_all(path, 0), objects)
}

/// Like [`file()`], for a text as the contents of that file.
pub(super) fn text(path: &Path, text: &str, objects: &mut Objects) -> Findings {
    all(path, Document::parse_all(path, text), objects)
}

/// Adds an object of an API server, under its name for findings. Returns its findings.
pub(super) fn json(name: &Path, json: Json, objects: &mut Objects) -> Findings {
    all(name, Ok(vec![Document::of_json(name, json)]), objects)
}

fn all(path: &Path, read: Result<Vec<Document>, Findings>, objects: &mut Objects) -> Findings {
    let documents = match read {
        Ok(documents) => documents,
        Err(findings) => return findings,
    };
    let report = Report::new(path);
    let mut passed_over = IgnoredKinds::new();
    for document in &documents {
        let value = Value::of_document(document, &report);
        object(value, &report, objects, &mut passed_over);
    }
    for (kind, position) in passed_over {
        report.warning(position, format!("objects of {kind} are ignored"), "");
    }
    report.into_findings()
}

/// Reads an object, or each object of a list. An error in an object of a supported kind affects
/// that object only. A document without a kind makes its file unusable, because it could be
/// anything.
fn object(
    value: Value<'_>,
    report: &Report,
    objects: &mut Objects,
    passed_over: &mut IgnoredKinds,
) {
    let Some(mut top) = value.foreign("object") else {
        return;
    };
    let version = top.need("apiVersion", "v1").and_then(Value::text);
    let kind = top.need("kind", "Service").and_then(Value::text);
    let (Some(version), Some(kind)) = (version, kind) else {
        return;
    };
    if is_list(version, kind) {
        for item in top.need("items", "[]").into_iter().flat_map(Value::items) {
            object(item, report, objects, passed_over);
        }
        return top.report_misspelt();
    }
    let Some((meant, is_near)) = meant_kind(version, kind) else {
        if passed_over.len() < KINDS_MAX {
            let kind = format!("{kind} of {version}");
            passed_over.entry(kind).or_insert_with(|| value.position());
        }
        return;
    };
    report.grade_errors(Severity::PassedOver);
    let errors = report.errors();
    let (name, versions) = meant;
    if name != kind || !versions.contains(&version) {
        let versions = versions.join(" or ");
        let what = format!(
            "objects of {kind} of {version} are not supported (did you mean {name} of {versions}?)"
        );
        let how = "a supported kind and its version, or the file without it";
        report.error(value.position(), what, how);
    }
    // A kind of another group may belong to another namespace than the meant one.
    let read = is_near.then(|| {
        let read = read_supported(name, kind, &mut top, (value, report));
        top.report_misspelt();
        read
    });
    drop(top);
    let is_good = report.errors() == errors;
    report.grade_errors(Severity::Error);
    report.set_namespace(Arc::default());
    if let Some(read) = read.flatten() {
        objects.append(if is_good { read } else { read.invalid() });
    }
}

/// Returns whether an object is a list of objects: of any kind, or of a supported one.
fn is_list(version: &str, kind: &str) -> bool {
    let is_of_supported = |name: &str| {
        let mut kinds = KINDS.iter();
        kinds.any(|one| one.0 == name && is_near(version, one))
    };
    (version, kind) == ("v1", "List") || kind.strip_suffix("List").is_some_and(is_of_supported)
}

/// Returns the kind that an object is or is meant as, and whether its API group is almost that of
/// the kind. Other groups may have kinds of the same names, but not of almost the same names.
fn meant_kind(version: &str, kind: &str) -> Option<(Kind, bool)> {
    if let Some(same) = KINDS.iter().find(|(name, _)| *name == kind) {
        return is_near(version, same).then_some((*same, true));
    }
    let similarity = |name| strsim::normalized_damerau_levenshtein(kind, name);
    let near = KINDS.iter().filter(|(name, _)| name.len().abs_diff(kind.len()) <= KIND_EDITS_MAX);
    let best = near.map(|one| (similarity(one.0), *one));
    let best = best.max_by(|(one, _), (other, _)| one.total_cmp(other));
    best.filter(|(similarity, _)| *similarity > SIMILAR_KIND)
        .map(|(_, one)| (one, is_near(version, &one)))
}

/// Returns whether an API version has almost the group of a kind, or none, as `v1`.
fn is_near(version: &str, (_, versions): &Kind) -> bool {
    let Some((group, _)) = version.split_once('/') else {
        return true;
    };
    let mut known = versions.iter().filter_map(|version| version.split_once('/'));
    known.any(|(known, _)| {
        known.len().abs_diff(group.len()) <= GROUP_EDITS_MAX
            && strsim::damerau_levenshtein(group, known) <= GROUP_EDITS_MAX
    })
}

/// Reads an object of a supported kind, as far as possible. Returns none without a valid name,
/// because the object then cannot affect anything. `written` is the kind as it is written.
fn read_supported<'a>(
    kind: &str,
    written: &str,
    top: &mut Fields<'a>,
    (value, report): (Value<'a>, &Report),
) -> Option<Objects> {
    let place = value.place();
    let meta = meta::read(top, place, |name| match kind {
        "Namespace" | "Service" | "ServiceExport" | "ServiceImport" => name.and_then(label_name),
        // The name of a slice, a Node or a Pod itself has no meaning.
        "EndpointSlice" | "Node" | "Pod" => name.and_then(Value::text),
        // Nor has that of a policy. One without a name is invalid, and closes its services.
        _ => Some(name.and_then(Value::text).unwrap_or_default()),
    })?;
    let namespace = match kind {
        "Namespace" | "Node" => &meta.name,
        _ => &meta.namespace,
    };
    report.set_namespace(Arc::clone(namespace));
    let mut read = Objects::default();
    match kind {
        "Namespace" => {
            if meta.has_namespace {
                let how = "the object without it";
                value.error("is a Namespace with `metadata.namespace`", how);
                // A misspelt kind may be one of a namespace, whose objects affect no other.
                if written != kind {
                    return None;
                }
            }
            read.namespaces.push(Meta { namespace: Arc::clone(&meta.name), ..meta });
        }
        "Node" => {
            read.nodes.push(Node { cluster: meta.cluster, addresses: node_addresses(top) });
        }
        "Pod" => read.pods.extend(running_pod(top, meta)),
        "Service" => read.services.extend(service::read(top, value, meta)),
        "ServiceExport" => {
            read.exports.push(Export { created: meta.creation_time(value), meta });
        }
        "ServiceImport" => read.imports.push(import(top, meta)),
        "EndpointSlice" => read.slices.extend(slice::read(top, value, &meta)),
        _ => read.entries.push(entries::read(kind, top, &meta, value).into()),
    }
    Some(read)
}

impl Objects {
    /// Returns what an invalid object restricts, so that nobody can reach more than with the valid
    /// object.
    fn invalid(self) -> Self {
        let named = self.namespaces.into_iter().map(|meta| (meta.cluster, meta.name));
        let namespaces = named.chain(self.entries.iter().filter_map(|one| one.hidden_namespace()));
        // The Service may have been declared local, and its addresses still belong to it.
        let closed =
            |service| Service { declared: DeclaredScope::Local, ports: Vec::new(), ..service };
        Self {
            passed_over: InvalidObjects {
                namespaces: namespaces.collect(),
                imports: self.imports,
                slices: self.slices,
            },
            services: self.services.into_iter().map(closed).collect(),
            entries: self
                .entries
                .into_iter()
                .map(|one| Arc::unwrap_or_clone(one).closed().into())
                .collect(),
            ..Self::default()
        }
    }
}

fn node_addresses(top: &mut Fields<'_>) -> Vec<IpAddr> {
    let Some(mut status) = top.get("status").and_then(|status| status.foreign("status")) else {
        return Vec::new();
    };
    let items = status.get("addresses").into_iter().flat_map(Value::items);
    let addresses = items.filter_map(|item| {
        let mut fields = item.foreign("status.addresses[]")?;
        let kind = fields.need("type", "InternalIP").and_then(Value::text)?;
        let address = fields.need("address", "10.0.0.1");
        let address = address.filter(|_| matches!(kind, "InternalIP" | "ExternalIP"))?;
        address.parsed("an IP address", unicast)
    });
    addresses.collect()
}

/// Reads the addresses of a Pod; none for one that has ended, as another pod may have them.
fn running_pod(top: &mut Fields<'_>, meta: Meta) -> Option<RunningPod> {
    let spec = top.get("spec").and_then(|spec| spec.foreign("spec"));
    let host_network = spec.and_then(|mut spec| spec.get("hostNetwork").and_then(Value::flag));
    let mut status = top.get("status").and_then(|status| status.foreign("status"))?;
    let phase = status.get("phase").and_then(Value::text);
    let items = status.get("podIPs").into_iter().flat_map(Value::items);
    let addresses = items.filter_map(|item| {
        let mut fields = item.foreign("status.podIPs[]")?;
        fields.need("ip", "10.0.0.1")?.parsed("an IP address", unicast)
    });
    let addresses = addresses.collect();
    let has_ended = matches!(phase, Some("Succeeded" | "Failed"));
    let host_network = host_network.unwrap_or(false);
    (!has_ended).then_some(RunningPod { meta, addresses, host_network })
}

/// Reads the ports and addresses of an import. Older versions have them in `spec`.
fn import(top: &mut Fields<'_>, meta: Meta) -> Import {
    match top.get("spec").map(|spec| spec.foreign("spec")) {
        Some(Some(mut spec)) => import_fields(&mut spec, meta),
        Some(None) | None => import_fields(top, meta),
    }
}

fn import_fields(fields: &mut Fields<'_>, meta: Meta) -> Import {
    let ports = fields.get("ports");
    let ports = ports.and_then(|list| ports::read(list, "ports[]"));
    let ips = fields.get("ips");
    // All of them remain claimed.
    ips.and_then(|list| list.at_most(IPS_MAX, "fewer addresses"));
    let ips = ips.into_iter().flat_map(Value::items);
    Import {
        meta,
        ports: ports.unwrap_or_default(),
        ips: ips.filter_map(|item| item.parsed("an IP address", unicast)).collect(),
    }
}
