//! The command line: one file per command.
//!
//! Exit codes: 0 all is well, 1 it is not (the message says what), 2 the arguments are wrong or,
//! where a running gateway is asked, nobody answers.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command speaks to the person who typed it"
)]

mod ask;
pub mod certs;
mod check;
pub mod demo;
mod drain;
mod explain;
pub mod load;
mod proxy;
mod schema;
mod stop;
mod trust;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::app;
use crate::config::Source;

const EXAMPLES: &str = "\
Examples:
  strait demo                   see it work, in a temporary folder
  strait certs certs            make certificates for a trial
  strait check -c strait.yaml   find mistakes before they matter
  strait run -c strait.yaml     serve
  strait status                 where the running gateway stands, and why an endpoint is not used
  strait explain --help         what would become of a tunnel, and why
  strait load --help            measure it, or any other HBONE gateway";

/// An east-west gateway data plane for multicluster service meshes.
#[derive(Debug, Parser)]
#[command(
    name = "strait",
    version,
    after_help = EXAMPLES
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serves as the gateway until SIGTERM.
    ///
    /// SIGTERM drains: readiness fails, new connections are taken for `drain.lag`, clients are
    /// told to go elsewhere, and open tunnels have until `drain.deadline`. A second SIGTERM ends
    /// it now. Changes of the files are applied while it runs.
    #[command(after_help = "Examples:\n  strait run -c strait.yaml\n  \
                            STRAIT_CONFIG=/etc/strait/strait.yaml strait run")]
    Run(ConfigArgs),
    /// Serves as a gateway of Istio's, started by the arguments of its proxies.
    Proxy(proxy::Args),
    /// Checks strait.yaml and the files that it names, and lists every mistake with its line.
    ///
    /// Certificates, keys and tokens need not exist where the gateway does not run, as on a laptop
    /// or in CI: one warning names the missing files, and all else is checked. A machine that has
    /// the gateway's certificate, its key or a token is one where it runs: there each file that is
    /// missing is an error, such as a key beside its certificate.
    ///
    /// Exits 0 if all is well (warnings are shown), 1 with errors, 2 if the command line is wrong.
    #[command(after_help = "Examples:\n  strait check -c strait.yaml\n  \
                            strait check -c deploy/local/strait.yaml")]
    Check(ConfigArgs),
    /// Shows the gateway at work: two clusters, double HBONE, a killed endpoint, two refusals.
    Demo(demo::Args),
    /// Shows where the running gateway stands: its sources, what is rejected and why,
    /// certificates, and services; of one service each endpoint, and why one is not used.
    ///
    /// Exits 0 if the gateway is ready, 1 if not or if there is no such service, 2 if nobody
    /// answers.
    #[command(after_help = "Examples:\n  strait status\n  strait status --all\n  \
                            strait status echo.app.svc.cluster.local:80\n  \
                            strait status app/echo --json | jq .services.list\n  \
                            kubectl exec -n istio-system deploy/eastwest -- /strait status")]
    Status(ask::StatusArgs),
    /// Prints all that the running gateway knows, as a file that `istioctl ztunnel-config` reads.
    ///
    /// Exits 2 if nobody answers.
    #[command(after_help = "Examples:\n  \
                            strait dump > dump.json; \
                            istioctl ztunnel-config workload --file dump.json\n  \
                            strait dump | jq .strait")]
    Dump(ask::DumpArgs),
    /// Takes a part of the mesh out of the running gateway, until it is put back or a restart.
    #[command(subcommand)]
    Drain(drain::Command),
    Explain(explain::Args),
    /// Shows what is known of those who sign the certificates of peers.
    #[command(subcommand)]
    Trust(trust::Command),
    /// Prints the keys of strait.yaml as a JSON Schema, which editors use.
    Schema(schema::Args),
    /// Writes development certificates: a root, an intermediate per cluster, SPIFFE leaves.
    Certs(certs::Args),
    Load(Box<load::Args>),
}

#[derive(Debug, Args)]
struct ConfigArgs {
    /// The configuration file.
    #[arg(
        short,
        long,
        value_name = "FILE",
        default_value = "strait.yaml",
        env = "STRAIT_CONFIG"
    )]
    config: PathBuf,
    /// The file without its option, as people write it: an error that says how.
    #[arg(hide = true, value_parser = without_option)]
    misplaced: Option<String>,
}

fn without_option(file: &str) -> Result<String, String> {
    Err(format!("the file is named by an option: write `-c {file}`"))
}

impl ConfigArgs {
    fn source(&self) -> Source {
        Source::file(&self.config)
    }
}

/// Runs the command that was asked for.
pub fn run(cli: Cli) -> ExitCode {
    let done = match cli.command {
        Command::Run(args) => app::run(&args.source(), None),
        Command::Check(args) => return check::run(&args.source()),
        Command::Proxy(args) => return exit(proxy::run(&args)),
        Command::Demo(args) => demo::run(&args),
        Command::Certs(args) => certs::run(&args),
        Command::Schema(args) => schema::run(&args),
        Command::Status(args) => return ask::status(&args),
        Command::Dump(args) => return ask::dump(&args),
        Command::Drain(command) => return drain::run(&command),
        Command::Explain(args) => return explain::run(&args),
        Command::Trust(command) => return trust::run(&command),
        Command::Load(args) => return exit(load::run(&args)),
    };
    exit(done.map(|()| ExitCode::SUCCESS))
}

fn exit(done: anyhow::Result<ExitCode>) -> ExitCode {
    done.unwrap_or_else(|error| {
        eprintln!("{error:#}");
        ExitCode::FAILURE
    })
}
