//! `strait completions` and `strait man`: the files that packages install beside the program.

use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

use crate::cli::text::print;

/// Arguments of `strait completions`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
                        strait completions bash > /etc/bash_completion.d/strait\n  \
                        strait completions fish > ~/.config/fish/completions/strait.fish")]
pub(in crate::cli) struct CompletionsArgs {
    /// Shell that reads them.
    shell: Shell,
}

/// Arguments of `strait man`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  strait man | man -l -\n  strait man /usr/local/share/man/man1"
)]
pub(in crate::cli) struct ManArgs {
    /// Folder of the pages, such as strait-run.1; created if it is missing.
    folder: Option<PathBuf>,
}

/// Prints the completions of a shell.
pub(super) fn completions(mut command: Command, args: &CompletionsArgs) -> anyhow::Result<()> {
    // The generator panics on a failed write, such as one to a closed pipe.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "strait", &mut script);
    print(script)
}

/// Prints the manual page of the program, or writes the pages of all commands.
pub(super) fn man(command: Command, args: &ManArgs) -> anyhow::Result<()> {
    if let Some(folder) = &args.folder {
        return fs::create_dir_all(folder)
            .and_then(|()| clap_mangen::generate_to(command, folder))
            .with_context(|| format!("cannot write the pages to {}", folder.display()));
    }
    let mut page = Vec::new();
    Man::new(command.disable_help_subcommand(true)).render(&mut page)?;
    print(page)
}
