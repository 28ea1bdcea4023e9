//! Arguments of `strait`, and their dispatch to the commands.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use super::source::ConfigArgs;
use super::text::VERSION;
use super::{ask, bug_report, check, doctor, drain, explain, link, proxy, schema, status, trust};
use crate::app;

const EXAMPLES: &str = "\
Examples:
  strait check -c strait.yaml   validate the configuration
  strait doctor -c strait.yaml  check the gateway's surroundings too
  strait run -c strait.yaml     serve
  strait status                 state of the gateway, and why an endpoint is not used
  strait explain --help         outcome of a hypothetical tunnel, with reasons
  strait link --help            configuration of both sides of a link";

const EXAMPLES_OF_TOOLS: &str = "
  strait demo                   a demonstration in a temporary folder
  strait certs certs            make certificates for a trial
  strait load --help            measure it, or any other HBONE gateway
  strait conformance --help     check it, or any other HBONE gateway
  strait top                    the dashboard in a terminal";

/// An east-west gateway data plane for multicluster service meshes.
#[derive(Debug, Parser)]
#[command(
    name = "strait",
    version = VERSION.as_str(),
    after_help = [EXAMPLES, if cfg!(feature = "tools") { EXAMPLES_OF_TOOLS } else { "" }].concat()
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs the gateway until SIGTERM.
    ///
    /// SIGTERM drains: readiness fails, new connections are accepted for `drain.lag`, clients
    /// receive GOAWAY, and open tunnels have until `drain.deadline`. A second SIGTERM ends the
    /// process at once. Changes of the files are applied while it runs. SIGHUP reads all files
    /// again.
    #[command(after_help = "Examples:\n  strait run -c strait.yaml\n  \
                            STRAIT_CONFIG=/etc/strait/strait.yaml strait run\n  \
                            strait run -c strait.yaml --take-over /run/strait/take-over")]
    Run(RunArgs),
    /// Runs as an Istio gateway, with the command line that Istio gives its proxies.
    Proxy(proxy::Args),
    /// Checks the configuration and the files that it names, and lists every mistake with its line.
    ///
    /// Certificates, keys and tokens need not exist where the gateway does not run, as on a laptop
    /// or in CI: one warning names the missing files, and everything else is checked. If the
    /// gateway's certificate, its key or a token exists, every other missing file is an error.
    ///
    /// Exits 0 on success (warnings are shown), 1 with errors, 2 if the command line is wrong.
    #[command(after_help = "Examples:\n  strait check -c strait.yaml\n  \
                            strait check -c deploy/local/strait.yaml\n  \
                            strait check -c strait.yaml --strict\n  \
                            strait check -c conf.d -o json | jq .findings")]
    Check(CheckArgs),
    Doctor(doctor::Args),
    BugReport(bug_report::Args),
    /// Shows the state of the running gateway: sources, rejected resources with reasons,
    /// certificates, and services; for one service each endpoint, and the reason if it is not used.
    ///
    /// Exits 0 if the gateway is ready, 1 if it is not or has no such service, 2 if it does not
    /// answer.
    #[command(after_help = "Examples:\n  strait status\n  strait status --all\n  \
                            strait status echo.app.svc.cluster.local:80\n  \
                            strait status app/echo -o json | jq .services.list\n  \
                            strait status peers\n  \
                            strait status refusals\n  \
                            kubectl exec -n istio-system deploy/eastwest -- /strait status")]
    Status(status::Args),
    /// Prints the whole state of the running gateway, as a file that `istioctl ztunnel-config`
    /// reads.
    ///
    /// Exits 2 if the gateway does not answer.
    #[command(after_help = "Examples:\n  \
                            strait dump > dump.json; \
                            istioctl ztunnel-config workload --file dump.json\n  \
                            strait dump | jq .strait")]
    Dump(ask::Admin),
    Drain(drain::Drain),
    /// Applies the removals by the control plane or the API server that the running gateway holds
    /// (`discovery.hold`), without waiting for their time.
    ///
    /// Exits 1 if no removals are held, 2 if the gateway does not answer.
    #[command(after_help = "Examples:\n  strait status\n  strait release")]
    Release(ask::Admin),
    Explain(Box<explain::Args>),
    Link(Box<link::LinkArgs>),
    Expose(Box<link::ExposeArgs>),
    /// Shows the issuers of the peers' certificates.
    #[command(subcommand)]
    Trust(trust::Command),
    /// Prints the keys of strait.yaml as a JSON Schema, which editors use.
    Schema(schema::Args),
    #[cfg(feature = "tools")]
    #[command(flatten)]
    Tool(super::tools::Tool),
}

#[derive(Debug, Args)]
struct RunArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Replaces the process that runs with the same option, without refusing a connection.
    ///
    /// The new process receives the listening sockets of the old one, which drains once the new
    /// one is ready, and keeps its tunnels until `drain.deadline`. If the new process fails before
    /// that, the old one goes on. Without an old process, it starts as usual. SOCKET is the path of
    /// a Unix socket in a folder that only this user or root may write to.
    #[arg(long, value_name = "SOCKET", env = "STRAIT_TAKE_OVER")]
    take_over: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct CheckArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    form: check::Form,
}

pub fn run(cli: Cli) -> ExitCode {
    let done = match cli.command {
        Command::Run(args) => app::run(&args.config.source(), None, args.take_over.as_deref()),
        Command::Check(args) => return exit(check::run(&args.config.source(), &args.form)),
        Command::Doctor(args) => return doctor::run(&args),
        Command::BugReport(args) => return bug_report::run(&args),
        Command::Proxy(args) => return exit(proxy::run(&args)),
        Command::Schema(args) => schema::run(&args),
        Command::Link(args) => link::link(&args),
        Command::Expose(args) => link::expose(&args),
        Command::Status(args) => return status::run(&args),
        Command::Dump(admin) => return ask::dump(&admin),
        Command::Drain(args) => return drain::run(&args),
        Command::Release(admin) => return drain::release(&admin),
        Command::Explain(args) => return explain::run(&args),
        Command::Trust(command) => return trust::run(&command),
        #[cfg(feature = "tools")]
        Command::Tool(tool) => return exit(tool.run(<Cli as clap::CommandFactory>::command())),
    };
    exit(done.map(|()| ExitCode::SUCCESS))
}

fn exit(done: anyhow::Result<ExitCode>) -> ExitCode {
    done.unwrap_or_else(|error| {
        eprintln!("{error:#}");
        ExitCode::FAILURE
    })
}
