//! `strait check`: everything that `strait run` would trip over, before it does.

use std::process::ExitCode;

use crate::app::{self, Inputs};
use crate::config::Source;

/// Reads the configuration and every file that it names; prints what is wrong with any of them.
pub(super) fn run(source: &Source) -> ExitCode {
    let report = app::check(source);
    let label = source.label();
    for line in &report.warnings {
        eprintln!("{line}");
    }
    for line in &report.errors {
        eprintln!("{line}");
    }
    match (&report.inputs, report.errors.len()) {
        (Some(Inputs { config, mesh, .. }), 0) => {
            println!(
                "{label}: ok: {} listeners, {} trust domains, {} exposed services, {} services \
                 and {} workloads in the mesh",
                config.listeners.len(),
                config.trust.domains.len(),
                config.exposure.services.len(),
                mesh.services.len(),
                mesh.workloads.len(),
            );
            ExitCode::SUCCESS
        }
        (_, 1) => {
            eprintln!("{label}: 1 mistake");
            ExitCode::FAILURE
        }
        (_, count) => {
            eprintln!("{label}: {count} mistakes");
            ExitCode::FAILURE
        }
    }
}
