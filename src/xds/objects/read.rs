//! From the documents of a file to objects, by their version and kind.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::meta::{self, Meta, label_name};
use super::{Export, Import, Objects, ports, service, slice};
use crate::config::fields::{Fields, Value};
use crate::config::yaml::Document;
use crate::config::{Findings, Report};
use crate::xds::file::ip;

/// Kinds that are passed over, by the line of the first of each.
type PassedOver = BTreeMap<String, u64>;

/// So many of them are told.
const KINDS_MAX: usize = 64;

/// Adds the objects of a file. Returns what is wrong with it.
pub(super) fn file(path: &Path, objects: &mut Objects) -> Findings {
    all(path, Document::load_all(path), objects)
}

/// As [`file()`], of a text that would stand there.
pub(super) fn text(path: &Path, text: &str, objects: &mut Objects) -> Findings {
    all(path, Document::parse_all(path, text), objects)
}

fn all(path: &Path, read: Result<Vec<Document>, Findings>, objects: &mut Objects) -> Findings {
    let documents = match read {
        Ok(documents) => documents,
        Err(findings) => return findings,
    };
    let report = Report::new(path);
    let mut passed_over = PassedOver::new();
    for document in &documents {
        let value = Value::of_document(document, &report);
        object(value, objects, &mut passed_over);
    }
    for (kind, line) in passed_over {
        report.warning(line, format!("objects of {kind} are passed over"), "");
    }
    report.into_findings()
}

/// Reads an object, or each of a list.
fn object(value: Value<'_>, objects: &mut Objects, passed_over: &mut PassedOver) {
    let Some(mut top) = value.foreign("object") else {
        return;
    };
    let version = top.need("apiVersion", "v1").and_then(Value::text);
    let kind = top.need("kind", "Service").and_then(Value::text);
    let (Some(version), Some(kind)) = (version, kind) else {
        return;
    };
    match (version, kind) {
        ("v1", "List") => {
            for item in top.get("items").into_iter().flat_map(Value::items) {
                object(item, objects, passed_over);
            }
        }
        ("v1", "Namespace" | "Service")
        | ("discovery.k8s.io/v1", "EndpointSlice")
        | (
            "multicluster.x-k8s.io/v1alpha1" | "multicluster.x-k8s.io/v1beta1",
            "ServiceExport" | "ServiceImport",
        ) => known(kind, &mut top, value, objects),
        _ if passed_over.len() < KINDS_MAX => {
            let kind = format!("{kind} of {version}");
            passed_over.entry(kind).or_insert_with(|| value.line());
        }
        _ => {}
    }
    top.finish();
}

/// Reads an object of one of our kinds.
fn known<'a>(kind: &str, top: &mut Fields<'a>, value: Value<'a>, objects: &mut Objects) {
    let place = value.place();
    if kind == "EndpointSlice" {
        // Its own name says nothing.
        let meta = meta::read(top, place, Value::text);
        let slice = meta.and_then(|meta| slice::read(top, value, &meta));
        objects.slices.extend(slice);
        return;
    }
    let Some(meta) = meta::read(top, place, label_name) else {
        return;
    };
    match kind {
        "Namespace" => objects.namespaces.push(Meta {
            namespace: Arc::clone(&meta.name),
            ..meta
        }),
        "Service" => objects.services.extend(service::read(top, value, meta)),
        "ServiceExport" => objects.exports.extend(export(meta, value)),
        _ => objects.imports.extend(import(top, meta)),
    }
}

fn export(meta: Meta, value: Value<'_>) -> Option<Export> {
    let created = match &meta.created {
        Some(text) => {
            let Ok(time) = humantime::parse_rfc3339(text) else {
                let what = format!("has `{text}` for its creationTimestamp");
                value.error(what, "a time such as `2026-01-31T12:00:00Z`");
                return None;
            };
            Some(time)
        }
        None => None,
    };
    Some(Export { meta, created })
}

/// Reads the ports and addresses of an import. Older versions have them in `spec`.
fn import(top: &mut Fields<'_>, meta: Meta) -> Option<Import> {
    match top.get("spec") {
        Some(spec) => {
            let mut spec = spec.foreign("spec")?;
            let import = import_fields(&mut spec, meta);
            spec.finish();
            import
        }
        None => import_fields(top, meta),
    }
}

fn import_fields(fields: &mut Fields<'_>, meta: Meta) -> Option<Import> {
    let ports = fields.get("ports");
    let ports = ports.map_or(Some(Vec::new()), |list| ports::read(list, "ports[]"));
    let ips: Vec<_> = match fields.get("ips") {
        Some(list) => list
            .items()
            .map(|item| item.parsed("an IP address", ip))
            .collect(),
        None => Vec::new(),
    };
    Some(Import {
        meta,
        ports: ports?,
        ips: ips.into_iter().collect::<Option<_>>()?,
    })
}
