//! `strait check`: validation of the configuration and of every file that it names.

use std::collections::HashSet;
use std::process::ExitCode;

use serde_json::{Value, json};

use super::text::print;
use crate::app::{self, Inputs, Report};
use crate::config::{Discovery, EnvoySource, Source};
use crate::labels::count;
use crate::output::Output;
use crate::yaml::{Finding, Place, Severity};

/// Form of the report, which is text on stderr or JSON on stdout.
#[derive(Debug, clap::Args)]
pub(super) struct Form {
    /// Counts warnings as errors, except for the one about files that only the gateway's machine
    /// has.
    #[arg(long)]
    strict: bool,
    #[command(flatten)]
    output: Output,
}

/// Validates the configuration and its files, and prints every mistake.
pub(super) fn run(source: &Source, form: &Form) -> anyhow::Result<ExitCode> {
    let report = app::check(source, source.examine_without_keys());
    let is_ok = report.inputs.is_some() && mistakes(&report, form.strict) == 0;
    if form.output.is_json() {
        print(format!("{:#}\n", to_json(source, &report, is_ok)))?;
    } else if let Some(line) = describe(source, &report, form.strict) {
        print(line + "\n")?;
    }
    Ok(ExitCode::from(u8::from(!is_ok)))
}

/// Returns the number of mistakes.
fn mistakes(report: &Report, is_strict: bool) -> usize {
    let counts = |finding: &&Finding| {
        let is_warning = finding.severity == Severity::Warning;
        !is_warning || is_strict && report.absent.as_ref() != Some(*finding)
    };
    report.findings.0.iter().filter(counts).count()
}

/// Prints the findings to stderr, and returns the line for a configuration without mistakes.
pub(super) fn describe(source: &Source, report: &Report, is_strict: bool) -> Option<String> {
    let label = source.label();
    let severities = [Severity::Warning, Severity::PassedOver, Severity::Error];
    for finding in severities.into_iter().flat_map(|severity| report.findings.with(severity)) {
        eprintln!("{finding}");
    }
    match (&report.inputs, mistakes(report, is_strict)) {
        (Some(inputs), 0) => {
            let Inputs { config, mesh, .. } = inputs;
            let source = match &config.discovery {
                Discovery::File(_) => format!(
                    "{} and {} in the mesh",
                    count(mesh.services.len(), "service"),
                    count(mesh.workloads.len(), "workload")
                ),
                Discovery::Kubernetes(_) => {
                    "the mesh comes from a Kubernetes API server, which was not contacted"
                        .to_owned()
                }
                Discovery::Istio(xds) | Discovery::Envoy(EnvoySource { xds, .. }) => {
                    format!("the mesh comes from {}, which was not contacted", xds.plane.address)
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
    let findings = report.findings.0.iter().map(|finding| {
        let Place { file, line } = &finding.place;
        json!({
            "severity": finding.severity.to_string(),
            "file": file.display().to_string(),
            "line": Some(line).filter(|line| **line > 0),
            "message": finding.message(),
        })
    });
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
        "findings": findings.collect::<Vec<_>>(),
        "counts": counts,
    })
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
