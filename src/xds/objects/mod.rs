//! Kubernetes' objects in files: which Services of this cluster are exported and which are kept
//! local, what other clusters export to it, and the endpoints of both.
//!
//! [`load`] reads Namespace, Service, EndpointSlice, ServiceExport and ServiceImport; fields of
//! theirs that are not ours to read are passed over, and other kinds with a warning for each.
//! [`join()`] makes of the objects what the snapshot wants, by what the configuration says.

mod files;
mod join;
mod members;
mod meta;
mod owners;
mod ports;
mod read;
mod service;
mod slice;
#[cfg(test)]
mod tests;
mod view;
mod vips;
mod waypoints;

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::config::{Findings, Place};

pub use files::contents;
pub use join::{Joined, join};

use meta::Meta;
use ports::Port;
use service::Service;
use slice::Slice;

/// Warnings of one kind that are kept. Nobody reads more than a screen of them.
const WARNINGS_MAX: usize = 200;

/// The objects of all files, in their order. Nothing of them has been compared yet: one object may
/// be there several times, as several control planes tell it.
#[derive(Clone, Debug, Default)]
pub struct Objects {
    namespaces: Vec<Meta>,
    services: Vec<Service>,
    exports: Vec<Export>,
    imports: Vec<Import>,
    slices: Vec<Slice>,
}

/// A Service is exported by its cluster.
#[derive(Clone, Debug)]
struct Export {
    meta: Meta,
    /// When it was made: of two that disagree the older one holds.
    created: Option<SystemTime>,
}

/// What a cluster is told of a service that some clusters export.
#[derive(Clone, Debug)]
struct Import {
    meta: Meta,
    ports: Vec<Port>,
    ips: Vec<std::net::IpAddr>,
}

/// Reads and checks all objects of files and of the files of directories.
///
/// # Errors
/// The findings of all files, if one of them cannot be used.
pub fn load(paths: &[PathBuf]) -> Result<(Objects, Findings), Findings> {
    let mut objects = Objects::default();
    let findings = files::each(paths, |file| read::file(file, &mut objects));
    match findings.has_errors() {
        true => Err(findings),
        false => Ok((objects, findings)),
    }
}

/// Reads and checks a text that would stand in the file `path`.
///
/// # Errors
/// All findings, if the text cannot be used.
pub fn parse(path: &Path, text: &str) -> Result<Objects, Findings> {
    let mut objects = Objects::default();
    let findings = read::text(path, text, &mut objects);
    match findings.has_errors() {
        true => Err(findings),
        false => Ok(objects),
    }
}

/// Where an object stands, for findings.
fn shown(place: &Place) -> String {
    place.to_string()
}
