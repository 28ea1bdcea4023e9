//! Arguments that name the configuration.

use std::path::PathBuf;

use clap::Args;

use crate::config::Source;

#[derive(Debug, Args)]
pub(super) struct ConfigArgs {
    /// Path of the configuration file.
    #[arg(short, long, value_name = "FILE", default_value = "strait.yaml", env = "STRAIT_CONFIG")]
    config: PathBuf,
    /// Positional file, a common mistake. Its parser returns an error that names `-c`.
    #[arg(hide = true, value_parser = reject_positional_file)]
    positional_file: Option<String>,
}

fn reject_positional_file(file: &str) -> Result<String, String> {
    Err(format!("the configuration file is given by an option; write `-c {file}`"))
}

impl ConfigArgs {
    pub(super) fn source(&self) -> Source {
        Source::file(&self.config)
    }
}
