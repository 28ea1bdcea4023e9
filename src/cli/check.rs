//! `strait check`: validation of the configuration and of every file that it names.

use std::collections::HashSet;
use std::process::ExitCode;

use crate::app::{self, Inputs, Report};
use crate::config::{Discovery, Source};

/// Validates the configuration and its files, and prints every mistake.
pub(super) fn run(source: &Source) -> ExitCode {
    print_report(source, &app::check(source))
}

/// Prints the report and returns the exit code for it.
pub(super) fn print_report(source: &Source, report: &Report) -> ExitCode {
    let label = source.label();
    for line in &report.warnings {
        eprintln!("{line}");
    }
    for line in report.skipped_objects.iter().chain(&report.errors) {
        eprintln!("{line}");
    }
    match (
        &report.inputs,
        report.skipped_objects.len() + report.errors.len(),
    ) {
        (Some(inputs), 0) => {
            let Inputs { config, mesh, .. } = inputs;
            let source = match &config.discovery {
                Discovery::File { .. } => format!(
                    "{} and {} in the mesh",
                    count(mesh.services.len(), "service"),
                    count(mesh.workloads.len(), "workload")
                ),
                Discovery::Istio { plane, .. } | Discovery::Envoy { plane, .. } => {
                    format!(
                        "the mesh comes from {}, which was not contacted",
                        plane.address
                    )
                }
            };
            println!(
                "{label}: ok: {}, {}, {}{}, {source}",
                count(config.listeners.len(), "listener"),
                count(config.trust.domains.len(), "trust domain"),
                count(config.exposure.services.len(), "exposed service"),
                describe_exported(inputs),
            );
            ExitCode::SUCCESS
        }
        (_, mistakes) => {
            eprintln!("{label}: {}", count(mistakes, "mistake"));
            ExitCode::FAILURE
        }
    }
}

/// Describes the number of services that objects export; empty without object files. Each service
/// has several hostnames, which share their first two labels.
fn describe_exported(Inputs { config, scope, .. }: &Inputs) -> String {
    if config.exposure.files.is_empty() {
        return String::new();
    }
    let exported = scope.exported.iter();
    let names: HashSet<Vec<_>> = exported
        .map(|host| host.splitn(3, '.').take(2).collect())
        .collect();
    format!(", {} by objects", count(names.len(), "exported service"))
}

fn count(of: usize, what: &str) -> String {
    match of {
        1 => format!("1 {what}"),
        number => format!("{number} {what}s"),
    }
}
