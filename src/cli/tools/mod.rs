//! Commands of developers and packagers, and a view for terminals: the feature `tools`, which
//! images leave out.

mod install;
mod top;

use std::process::ExitCode;

use clap::Subcommand;

use crate::app;
use crate::tools::{certs, conformance, demo, load};

#[derive(Debug, Subcommand)]
pub(super) enum Tool {
    /// Demonstrates the gateway: two clusters, double HBONE, a killed endpoint, two rejections.
    Demo(demo::Args),
    /// Writes development certificates: a root, an intermediate per cluster, SPIFFE leaves.
    Certs(certs::Args),
    Load(Box<load::Args>),
    Conformance(Box<conformance::Args>),
    Top(top::Args),
    /// Prints the completions of a shell.
    Completions(install::CompletionsArgs),
    /// Prints the manual page of strait, or writes the pages of all commands to a folder.
    Man(install::ManArgs),
}

impl Tool {
    /// Runs the command. `program` has all commands, those of this feature and the others.
    pub(super) fn run(&self, program: clap::Command) -> anyhow::Result<ExitCode> {
        match self {
            Self::Demo(args) => demo::run(args)?,
            Self::Certs(args) => certs::run(args)?,
            Self::Load(args) => {
                app::raise_descriptor_limit();
                return load::run(args);
            }
            Self::Conformance(args) => return conformance::run(args),
            Self::Top(args) => return Ok(top::run(args)),
            Self::Completions(args) => install::completions(program, args)?,
            Self::Man(args) => install::man(program, args)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}
