//! `strait check`: everything that `strait run` would trip over, before it does.

use std::collections::HashSet;
use std::process::ExitCode;

use crate::app::{self, Inputs, Report};
use crate::config::{Discovery, Source};

/// Reads the configuration and every file that it names; prints what is wrong with any of them.
pub(super) fn run(source: &Source) -> ExitCode {
    printed(source, &app::check(source))
}

/// Prints what was found, and exits by it.
pub(super) fn printed(source: &Source, report: &Report) -> ExitCode {
    let label = source.label();
    for line in &report.warnings {
        eprintln!("{line}");
    }
    for line in report.passed_over.iter().chain(&report.errors) {
        eprintln!("{line}");
    }
    match (
        &report.inputs,
        report.passed_over.len() + report.errors.len(),
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
                    format!("the mesh comes from {}, which was not asked", plane.address)
                }
            };
            println!(
                "{label}: ok: {}, {}, {}{}, {source}",
                count(config.listeners.len(), "listener"),
                count(config.trust.domains.len(), "trust domain"),
                count(config.exposure.services.len(), "exposed service"),
                by_objects(inputs),
            );
            ExitCode::SUCCESS
        }
        (_, mistakes) => {
            eprintln!("{label}: {}", count(mistakes, "mistake"));
            ExitCode::FAILURE
        }
    }
}

/// How many services objects export, where there are files of them. Each has several hostnames.
fn by_objects(Inputs { config, scope, .. }: &Inputs) -> String {
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
        of => format!("{of} {what}s"),
    }
}
