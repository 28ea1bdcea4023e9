//! Arguments of commands that become values of a configuration, read by the forms of its keys.
//! Errors are the findings of the reader.

use std::path::Path;

use serde_json::json;

use super::define::{Account, Segment, ServicePort, Type};
use super::identity::DomainName;
use super::names::HostPort;
use crate::yaml::{Document, Findings, Value};

/// Reads the hostname and port of a service.
pub fn service(text: &str) -> Result<HostPort, String> {
    read::<ServicePort>("service", text)
}

/// Reads a namespace.
pub fn namespace(text: &str) -> Result<String, String> {
    read::<Segment>("namespace", text)
}

/// Reads `NAMESPACE/NAME` of a service account.
pub fn account(text: &str) -> Result<(String, String), String> {
    read::<Account>("account", text)
}

/// Reads a trust domain.
pub fn domain(text: &str) -> Result<String, String> {
    read::<DomainName>("domain", text)
}

/// Reads the name of a cluster.
pub fn cluster(text: &str) -> Result<String, String> {
    line("cluster", text)
}

/// Reads the name of a network.
pub fn network(text: &str) -> Result<String, String> {
    line("network", text)
}

/// Reads text that a comment can hold: it has no line break of any version of YAML.
fn line(name: &'static str, text: &str) -> Result<String, String> {
    let is_break = |c: char| c.is_control() || c.is_whitespace() && c != ' ';
    if text.contains(is_break) {
        return Err(format!("`{name}` is {text:?}; write text on one line"));
    }
    read::<String>(name, text)
}

fn read<T: Type>(name: &'static str, text: &str) -> Result<T::Out, String> {
    let first = |findings: Findings| {
        let finding = findings.0.first();
        finding.map_or_else(String::new, |one| format!("{}; write {}", one.what, one.how))
    };
    let document = Document::parse(Path::new(""), &json!({name: text}).to_string());
    let document = document.map_err(first)?;
    let report = document.report();
    let read = T::read(Value::of_document(&document, &report).at("", name));
    read.ok_or_else(|| first(report.into_findings()))
}
