//! Kubernetes objects from files and from an API server: exported and local Services of this
//! cluster, imports from other clusters, and the endpoints of both.
//!
//! [`load`] reads Namespace, Node, Pod, Service, EndpointSlice, ServiceExport and ServiceImport,
//! and the kinds of `entries`. It ignores fields without use here, and other kinds with a warning
//! for each.
//! [`merge()`] adds exposed services and bindings to the configuration. [`join()`] builds the mesh
//! from the objects and the configuration. [`distribute()`] adds distributions that fit the mesh.

mod addresses;
mod claims;
mod dependency;
mod distribute;
mod entries;
mod files;
mod findings;
mod join;
mod limited;
mod members;
mod merge;
mod meta;
mod names;
mod needs;
mod ports;
mod read;
mod service;
mod shares;
mod slice;
#[cfg(test)]
mod tests;
mod view;
mod waypoints;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use serde_json::Value as Json;

use crate::config::Line;
use crate::yaml::{Finding, Findings, Severity};

pub use addresses::AddressHolders;
pub use distribute::distribute;
pub use join::{JoinResult, join};
pub(super) use limited::WARNINGS_MAX;
pub(crate) use limited::limit_findings;
pub use merge::merge;

use entries::Entries;
pub(super) use read::KINDS;

use meta::Meta;
use ports::Port;
use service::{DeclaredScope, Service};
use slice::Slice;

/// Bytes that an item of an entry takes, with what it adds to the configuration.
const ITEM_BYTES: usize = 1024;

/// Bytes that an endpoint of a slice takes.
const ENDPOINT_BYTES: usize = 256;

/// Objects of all files in file order. They are not deduplicated: several control planes may
/// supply the same object.
#[derive(Clone, Debug, Default)]
pub struct Objects {
    namespaces: Vec<Meta>,
    nodes: Vec<Node>,
    pods: Vec<RunningPod>,
    services: Vec<Service>,
    exports: Vec<Export>,
    imports: Vec<Import>,
    slices: Vec<Slice>,
    entries: Vec<Arc<Entries>>,
    passed_over: InvalidObjects,
    /// Namespaces with objects that are not known. Their services stay in all clusters.
    closed: BTreeSet<Arc<str>>,
}

/// Invalid objects, as far as they can be read. They create no route. They only restrict other
/// objects as the valid object would. Services are not among these: an invalid Service stays in
/// its cluster.
#[derive(Clone, Debug, Default)]
struct InvalidObjects {
    /// Namespaces whose services stay in their cluster, because the namespace may name a
    /// waypoint for them.
    namespaces: Vec<ClusterNamespace>,
    /// Imports whose addresses remain claimed.
    imports: Vec<Import>,
    /// Slices whose endpoint addresses remain claimed.
    slices: Vec<Slice>,
}

/// Cluster, which is ours if absent, and name of a namespace.
type ClusterNamespace = (Option<Arc<str>>, Arc<str>);

/// Node: a machine of a cluster.
#[derive(Clone, Debug)]
struct Node {
    /// Cluster; ours if absent.
    cluster: Option<Arc<str>>,
    /// Addresses, which all pods in the host's network share.
    addresses: Vec<IpAddr>,
}

/// Pod that has addresses, by the status that its kubelet writes.
#[derive(Clone, Debug)]
struct RunningPod {
    meta: Meta,
    addresses: Vec<IpAddr>,
    /// True if its addresses are those of its node.
    host_network: bool,
}

/// ServiceExport: the export of a Service by its cluster.
#[derive(Clone, Debug)]
struct Export {
    meta: Meta,
    /// Creation time. Of two exports that disagree, the older one wins.
    created: Option<SystemTime>,
}

/// ServiceImport: a service that other clusters export.
#[derive(Clone, Debug)]
struct Import {
    meta: Meta,
    ports: Vec<Port>,
    ips: Vec<IpAddr>,
}

/// Reads and validates all objects of files and of the files in directories. An invalid object
/// is skipped with a finding.
///
/// # Errors
/// The findings of all files, if one of them is unusable.
pub fn load(paths: &[PathBuf]) -> Result<(Objects, Findings), Findings> {
    let mut objects = Objects::default();
    let findings = files::read_each(paths, |file| read::file(file, &mut objects));
    let findings = Findings(limit_findings(findings.0));
    if findings.has_errors() { Err(findings) } else { Ok((objects, findings)) }
}

/// Parses and validates a text as the contents of the file `path`.
///
/// # Errors
/// All findings, if the text is unusable. A text with an invalid object is usable.
pub fn parse(path: &Path, text: &str) -> Result<Objects, Findings> {
    let mut objects = Objects::default();
    let findings = read::text(path, text, &mut objects);
    if findings.has_errors() { Err(findings) } else { Ok(objects) }
}

/// Reads and validates an object of an API server, under its name for findings.
pub(super) fn of_json(name: &Path, json: Json) -> (Objects, Findings) {
    let mut objects = Objects::default();
    let findings = read::json(name, json, &mut objects);
    (objects, findings)
}

impl Objects {
    /// Returns the objects that close namespaces.
    pub(super) fn closing(closed: BTreeSet<Arc<str>>) -> Self {
        Self { closed, ..Self::default() }
    }

    /// Returns the value of a label of the first namespace.
    pub(super) fn label_of_namespace(&self, label: &str) -> Option<&str> {
        self.namespaces.first()?.label(label)
    }

    pub(super) fn has_invalid_namespace(&self) -> bool {
        !self.passed_over.namespaces.is_empty()
    }

    /// Returns how far an object exports its service: a larger number may open it to more peers.
    pub(super) fn openness(&self) -> usize {
        let of = |one: &Service| match one.declared {
            DeclaredScope::Local => 0,
            DeclaredScope::Nothing => 1,
            DeclaredScope::Global | DeclaredScope::GlobalOnly => 2,
        };
        self.services.first().map_or(self.exports.len(), of)
    }

    /// Returns the addresses that pods have for themselves.
    pub(super) fn pod_addresses(&self) -> impl Iterator<Item = IpAddr> {
        let pods = self.pods.iter().filter(|pod| !pod.host_network);
        pods.flat_map(|pod| pod.addresses.iter().copied())
    }

    /// Returns the number of bytes that the items of these objects take: many times those of a
    /// terse text.
    pub(super) fn bytes(&self) -> usize {
        let items: usize = self.entries.iter().map(|one| one.items()).sum();
        let slices = self.slices.iter().chain(&self.passed_over.slices);
        let endpoints: usize = slices.map(|one| one.endpoints.len()).sum();
        items * ITEM_BYTES + endpoints * ENDPOINT_BYTES
    }

    /// Returns the names in the mesh of the services that these objects define, export or serve.
    pub(super) fn service_names(&self) -> impl Iterator<Item = Arc<str>> {
        let services = self.services.iter().map(|one| &one.meta);
        let exports = self.exports.iter().map(|one| &one.meta);
        let imports = self.imports.iter().map(|one| &one.meta);
        let named = services.chain(exports).chain(imports);
        let named = named.map(|meta| (&*meta.namespace, &*meta.name));
        let served = self.slices.iter().map(|slice| (&*slice.namespace, &*slice.service));
        named.chain(served).flat_map(join::names)
    }

    /// Returns these objects and `others`, which come last.
    pub fn with<'a>(&self, others: impl Iterator<Item = &'a Self>) -> Self {
        let mut all = self.clone();
        others.cloned().for_each(|one| all.append(one));
        all
    }

    fn append(&mut self, other: Self) {
        self.namespaces.extend(other.namespaces);
        self.nodes.extend(other.nodes);
        self.pods.extend(other.pods);
        self.services.extend(other.services);
        self.exports.extend(other.exports);
        self.imports.extend(other.imports);
        self.slices.extend(other.slices);
        self.entries.extend(other.entries);
        self.passed_over.namespaces.extend(other.passed_over.namespaces);
        self.passed_over.imports.extend(other.passed_over.imports);
        self.passed_over.slices.extend(other.passed_over.slices);
        self.closed.extend(other.closed);
    }
}

/// Returns the finding that an entry of an object, or a part of one, is not used.
fn refusal(namespace: &str, line: &Line, what: String, how: &str) -> Finding {
    Finding { severity: Severity::PassedOver, ..Finding::warning(&line.0, what, how).of(namespace) }
}
