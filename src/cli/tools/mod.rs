//! Commands of developers and packagers, and a view for terminals: the feature `tools`, which
//! images leave out.

mod install;
mod top;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;
use clap_complete::Shell;

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
    #[command(after_help = "Examples:\n  \
                            strait completions bash > /etc/bash_completion.d/strait\n  \
                            strait completions fish > ~/.config/fish/completions/strait.fish")]
    Completions {
        /// Shell that reads them.
        shell: Shell,
    },
    /// Prints the manual page of strait, or writes the pages of all commands to a folder.
    #[command(
        after_help = "Examples:\n  strait man | man -l -\n  strait man /usr/local/share/man/man1"
    )]
    Man {
        /// Folder of the pages, such as strait-run.1; created if it is missing.
        folder: Option<PathBuf>,
    },
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
            Self::Completions { shell } => install::completions(program, *shell)?,
            Self::Man { folder } => install::man(program, folder.as_deref())?,
        }
        Ok(ExitCode::SUCCESS)
    }
}
