//! Arguments that name the configuration.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::config::Source;
use crate::config::pod::{Environment, Flags, OVERLAY};

/// Default path of the configuration.
const DEFAULT: &str = "strait.yaml";

#[derive(Debug, Args)]
pub(super) struct ConfigArgs {
    /// Configuration: a file, or a directory whose YAML files are merged.
    #[arg(short, long, value_name = "PATH", default_value = DEFAULT, env = "STRAIT_CONFIG")]
    config: PathBuf,
    /// Positional path, a common mistake. Its parser returns an error that names `-c`.
    #[arg(hide = true, value_parser = reject_positional_file)]
    positional_file: Option<String>,
}

fn reject_positional_file(file: &str) -> Result<String, String> {
    Err(format!("the configuration is given by an option; write `-c {file}`"))
}

impl ConfigArgs {
    pub(super) fn source(&self) -> Source {
        Source::file(&self.config)
    }

    /// Returns the source of the gateway of this host: in the pod of a gateway of Istio that of
    /// `strait proxy`, otherwise the file.
    pub(super) fn source_of_pod(&self) -> Source {
        let environment = Environment::of_process();
        if !environment.is_of_gateway() {
            return self.source();
        }
        let named = Some(&*self.config).filter(|file| *file != Path::new(DEFAULT) || file.exists());
        Source::pod(environment, &Flags::default(), named, Path::new(OVERLAY))
    }
}
