//! `strait check`: everything that `strait run` would trip over, before it does.

use std::path::Path;
use std::process::ExitCode;

use crate::app::{self, Inputs};

/// Reads the configuration and every file that it names; prints what is wrong with any of them.
pub(super) fn run(path: &Path) -> ExitCode {
    let report = app::check(path);
    for line in &report.warnings {
        eprintln!("{line}");
    }
    for line in &report.errors {
        eprintln!("{line}");
    }
    match (&report.inputs, report.errors.len()) {
        (Some(Inputs { config, mesh, .. }), 0) => {
            println!(
                "{}: ok: {} listeners, {} trust domains, {} exposed services, {} services and {} \
                 workloads in the mesh",
                path.display(),
                config.listeners.len(),
                config.trust.domains.len(),
                config.exposure.services.len(),
                mesh.services.len(),
                mesh.workloads.len(),
            );
            ExitCode::SUCCESS
        }
        (_, 1) => {
            eprintln!("{}: 1 mistake", path.display());
            ExitCode::FAILURE
        }
        (_, count) => {
            eprintln!("{}: {count} mistakes", path.display());
            ExitCode::FAILURE
        }
    }
}
