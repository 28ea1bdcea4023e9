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

use crate::yaml::{Finding, Findings, Place, Severity};

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
    passed_over: PassedOver,
}

/// Objects with mistakes, as far as they can be read. They make no route; they only keep others
/// from what they would keep them from without the mistake. Services are not among these: one with
/// a mistake stays in its cluster.
#[derive(Clone, Debug, Default)]
struct PassedOver {
    /// Their services stay in their cluster: the namespace may name a waypoint for them.
    namespaces: Vec<Meta>,
    /// Their addresses are claimed.
    imports: Vec<Import>,
    /// The addresses of their endpoints are claimed.
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

/// Reads and checks all objects of files and of the files of directories. An object with a mistake
/// is passed over, with a finding.
///
/// # Errors
/// The findings of all files, if one of them cannot be used.
pub fn load(paths: &[PathBuf]) -> Result<(Objects, Findings), Findings> {
    let mut objects = Objects::default();
    let findings = files::each(paths, |file| read::file(file, &mut objects));
    let findings = Findings(cut(findings.0));
    match findings.has_errors() {
        true => Err(findings),
        false => Ok((objects, findings)),
    }
}

/// Reads and checks a text that would stand in the file `path`.
///
/// # Errors
/// All findings, if the text cannot be used. One with a mistake in an object can be.
pub fn parse(path: &Path, text: &str) -> Result<Objects, Findings> {
    let mut objects = Objects::default();
    let findings = read::text(path, text, &mut objects);
    match findings.has_errors() {
        true => Err(findings),
        false => Ok(objects),
    }
}

/// Cuts the warnings, and the findings of objects that are passed over, to [`WARNINGS_MAX`] of
/// each, and counts the others: one tenant's objects can have any number of them.
fn cut(findings: impl IntoIterator<Item = Finding>) -> Vec<Finding> {
    let (mut kept, mut cut) = (Vec::new(), Vec::<(Finding, usize)>::new());
    let (mut warnings, mut passed_over) = (0, 0);
    for finding in findings {
        let count = match finding.severity {
            Severity::Error | Severity::Absent => None,
            Severity::Warning => Some(&mut warnings),
            Severity::PassedOver => Some(&mut passed_over),
        };
        let Some(count) = count else {
            kept.push(finding);
            continue;
        };
        *count += 1;
        if *count <= WARNINGS_MAX {
            kept.push(finding);
            continue;
        }
        match cut
            .iter_mut()
            .find(|(first, _)| first.severity == finding.severity)
        {
            Some((_, more)) => *more += 1,
            None => cut.push((finding, 1)),
        }
    }
    kept.extend(cut.into_iter().map(|(first, more)| Finding {
        what: format!("{more} more findings are left out, of which this is the first"),
        how: String::new(),
        ..first
    }));
    kept
}

/// Where an object stands, for findings.
fn shown(place: &Place) -> String {
    place.to_string()
}
