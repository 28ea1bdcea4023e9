//! `strait completions` and `strait man`: the files that packages install beside the program.

use std::fs;
use std::path::Path;

use anyhow::Context;
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

use crate::cli::text::print;

/// Prints the completions of a shell.
pub(super) fn completions(mut command: Command, shell: Shell) -> anyhow::Result<()> {
    // The generator panics on a failed write, such as one to a closed pipe.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "strait", &mut script);
    print(script)
}

/// Prints the manual page of the program, or writes the pages of all commands.
pub(super) fn man(command: Command, folder: Option<&Path>) -> anyhow::Result<()> {
    if let Some(folder) = folder {
        return fs::create_dir_all(folder)
            .and_then(|()| clap_mangen::generate_to(command, folder))
            .with_context(|| format!("cannot write the pages to {}", folder.display()));
    }
    let mut page = Vec::new();
    Man::new(command.disable_help_subcommand(true)).render(&mut page)?;
    print(page)
}
