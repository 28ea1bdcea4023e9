//! `strait check`: validation of the configuration and of every file that it names.

use std::collections::HashSet;
use std::process::ExitCode;

use serde_json::{Value, json};

use super::text::print;
use crate::app::{self, Inputs, Report};
use crate::config::{Discovery, Source};
use crate::labels::count;

/// Form of the report.
#[derive(Debug, clap::Args)]
pub(super) struct Form {
    /// Counts warnings as errors, except for the one about files that only the gateway's machine
    /// has.
    #[arg(long)]
    strict: bool,
    /// Format of the report: `text` on stderr, or `json` on stdout.
    #[arg(long, default_value = "text", value_parser = ["text", "json"])]
    format: String,
}

/// Validates the configuration and its files, and prints every mistake.
pub(super) fn run(source: &Source, form: &Form) -> anyhow::Result<ExitCode> {
    let report = app::check(source, source.examine_without_keys());
    let is_ok = report.inputs.is_some() && mistakes(&report, form.strict) == 0;
    if form.format == "text" {
        if let Some(line) = describe(source, &report, form.strict) {
            print(line + "\n")?;
        }
    } else {
        print(format!("{:#}\n", to_json(source, &report, is_ok)))?;
    }
    Ok(ExitCode::from(u8::from(!is_ok)))
}

/// Returns the number of mistakes.
fn mistakes(report: &Report, is_strict: bool) -> usize {
    let absent = usize::from(report.absent.is_some());
    let warnings = report.warnings.len().saturating_sub(absent);
    let mistakes = report.skipped_objects.len() + report.errors.len();
    mistakes + if is_strict { warnings } else { 0 }
}

/// Prints the findings to stderr, and returns the line for a configuration without mistakes.
pub(super) fn describe(source: &Source, report: &Report, is_strict: bool) -> Option<String> {
    let label = source.label();
    for line in &report.warnings {
        eprintln!("{line}");
    }
    for line in report.skipped_objects.iter().chain(&report.errors) {
        eprintln!("{line}");
    }
    match (&report.inputs, mistakes(report, is_strict)) {
        (Some(inputs), 0) => {
            let Inputs { config, mesh, .. } = inputs;
            let source = match &config.discovery {
                Discovery::File { .. } => format!(
                    "{} and {} in the mesh",
                    count(mesh.services.len(), "service"),
                    count(mesh.workloads.len(), "workload")
                ),
                Discovery::Kubernetes(_) => {
                    "the mesh comes from a Kubernetes API server, which was not contacted"
                        .to_owned()
                }
                Discovery::Istio { plane, .. } | Discovery::Envoy { plane, .. } => {
                    format!("the mesh comes from {}, which was not contacted", plane.address)
                }
            };
            Some(format!(
                "{label}: ok: {}, {}, {}{}, {source}",
                count(config.listeners.len(), "listener"),
                count(config.trust.domains.len(), "trust domain"),
                count(config.exposure.services.len(), "exposed service"),
                describe_exported(inputs),
            ))
        }
        (_, mistakes) => {
            let strict = if is_strict { " with --strict" } else { "" };
            eprintln!("{label}: {}{strict}", count(mistakes, "mistake"));
            None
        }
    }
}

/// Returns the report as JSON.
fn to_json(source: &Source, report: &Report, is_ok: bool) -> Value {
    let errors = report.errors.iter().map(|line| (line, "error"));
    let skipped = report.skipped_objects.iter();
    let warnings = report.warnings.iter().map(|line| (line, "warning"));
    let findings = errors.chain(skipped.map(|line| (line, "error"))).chain(warnings);
    let counts = report.inputs.as_ref().map(|Inputs { config, mesh, .. }| {
        json!({
            "listeners": config.listeners.len(),
            "trustDomains": config.trust.domains.len(),
            "exposedServices": config.exposure.services.len(),
            "services": mesh.services.len(),
            "workloads": mesh.workloads.len(),
        })
    });
    json!({
        "configuration": source.label(),
        "ok": is_ok,
        "findings": findings.map(|(line, severity)| finding(line, severity)).collect::<Vec<_>>(),
        "counts": counts,
    })
}

/// Returns a line `FILE:LINE: SEVERITY: MESSAGE` by its parts. A line without place is a message.
fn finding(line: &str, severity: &str) -> Value {
    let (place, message) = line.split_once(&format!(": {severity}: ")).unwrap_or(("", line));
    let numbered = place.rsplit_once(':');
    let numbered = numbered.and_then(|(file, number)| Some((file, number.parse::<u64>().ok()?)));
    let (file, number) = match numbered {
        Some((file, number)) => (file, Some(number)),
        None => (place, None),
    };
    let file = Some(file).filter(|file| !file.is_empty());
    json!({"severity": severity, "file": file, "line": number, "message": message})
}

/// Describes the number of services that objects export; empty without object files. Each service
/// has several hostnames, which share their first two labels.
fn describe_exported(Inputs { config, scope, .. }: &Inputs) -> String {
    if config.exposure.files.is_empty() {
        return String::new();
    }
    let exported = scope.exported.iter();
    let names: HashSet<Vec<_>> =
        exported.map(|host| host.splitn(3, '.').take(2).collect()).collect();
    format!(", {} by objects", count(names.len(), "exported service"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_report_has_its_place_severity_and_message() {
        for (line, file, number, message) in [
            ("a b.yaml:12: error: x: y; write `z`", "a b.yaml", Some(12), "x: y; write `z`"),
            ("STRAIT_X: error: x", "STRAIT_X", None, "x"),
            ("cannot read it: no", "", None, "cannot read it: no"),
        ] {
            let file = Some(file).filter(|file| !file.is_empty());
            let want = json!({
                "severity": "error", "file": file, "line": number, "message": message,
            });
            assert_eq!(finding(line, "error"), want, "{line}");
        }
    }
}
