//! Arguments of `strait load`, one subcommand per kind of load.

use std::num::NonZeroUsize;
use std::process::ExitCode;

use anyhow::Context;
use clap::Subcommand;
use tokio::runtime::{Builder, LocalOptions, LocalRuntime};

use super::args::{self, BulkArgs, HandshakeArgs, Idle, Request, RequestArgs, StreamArgs, Work};
use super::{drive, serve};

/// Generates load for an HBONE gateway and measures it, or serves the endpoints for that.
///
/// With --sni it uses bare connections through a TLS listener, one for each stream.
///
/// Exits 0 if every operation succeeded, 1 if any failed (the report lists the failures), 2 if the
/// arguments are wrong. Ctrl-C ends it early, with the report so far and the same exit codes. An
/// operation has 10 s. A stream gives up after ten failures in a row.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    what: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Sends to a sink and reports the delivered bytes per second; needs `serve --mode sink`.
    ///
    /// Without --size each stream sends until the time is over, ends its direction, and waits until
    /// the sink has ended too. With --size an operation is one tunnel with that many bytes.
    #[command(after_help = args::example("up", "--streams 16"))]
    Up(BulkArgs),
    /// Receives from a source and reports bytes per second; needs `serve --mode source`.
    ///
    /// Without --size each stream receives until the time is over. With --size an operation is one
    /// tunnel with that many bytes.
    #[command(after_help = args::example("down", "--size 1MiB --streams 4"))]
    Down(BulkArgs),
    /// Sends requests and reads them back, on tunnels that stay open; needs `serve --mode echo`.
    #[command(after_help = args::example("rr", "--streams 64 --rate 5000"))]
    Rr(RequestArgs),
    /// Opens a tunnel for each request, and ends it by END_STREAM; needs `serve --mode echo`.
    #[command(after_help = args::example("churn", "--streams 16"))]
    Churn(RequestArgs),
    /// Opens a connection for each request; needs `serve --mode echo`.
    ///
    /// A connection is TCP, mTLS without resumption, HTTP/2, and one tunnel. --connections limits
    /// the number that is opened concurrently.
    #[command(after_help = args::example("handshake", "--connections 4"))]
    Handshake(HandshakeArgs),
    /// Opens tunnels and holds them; one that ends is a failure.
    #[command(after_help = args::example("idle", "--connections 100 --streams 100"))]
    Idle(Idle),
    /// Opens tunnels to a source and never reads; needs `serve --mode source`.
    ///
    /// The default of --window is 64 KiB here.
    #[command(after_help = args::example("stall", "--streams 100"))]
    Stall(StreamArgs),
    /// As rr, beside a bulk and a stalled stream of the same connection; needs `serve --mode echo`.
    ///
    /// The bulk stream sends and receives as fast as possible. The stalled stream sends twice its
    /// window and never reads, so that the gateway holds the half that it cannot deliver.
    #[command(after_help = args::example("mixed", "--streams 8 --rate 200"))]
    Mixed(RequestArgs),
    /// Serves an endpoint for the other commands, until Ctrl-C.
    Serve(serve::Args),
}

const EXAMPLES: &str = "Example, with deploy/local and the certificates of `strait certs certs`:
  strait run -c deploy/local/strait.yaml
  for ip in 127.0.1.1 127.0.1.2; do strait load serve --hbone --bind $ip:15008 \\
    --chain certs/endpoint.crt --key certs/endpoint.key --roots certs/root.crt & done
  strait load rr --to 127.0.0.1:15008 --authority echo.global:80 --double --streams 16 \\
    --chain certs/client.crt --key certs/client.key --roots certs/root.crt

`strait load COMMAND --help` has an example of each.";

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let runtime = runtime()?;
    let plan = match &args.what {
        Command::Up(of) => of.common.plan(Work::Up, of.size, of.rate),
        Command::Down(of) => of.common.plan(Work::Down, of.size, of.rate),
        Command::Rr(of) => of.plan(Work::Rr),
        Command::Churn(of) => of.plan(Work::Churn),
        Command::Handshake(of) => {
            let (common, streams) = (of.common.clone(), NonZeroUsize::MIN);
            let Request { size, rate } = of.request;
            StreamArgs { common, streams }.plan(Work::Handshake, Some(size), rate)
        }
        Command::Idle(of) => of.common.plan(Work::Idle, of.burst, None),
        Command::Stall(of) => of.plan(Work::Stall, None, None),
        Command::Mixed(of) => of.plan(Work::Mixed),
        Command::Serve(args) => {
            runtime.block_on(serve::serve(args))?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    let is_json = plan.output.is_json();
    let report = runtime.block_on(drive::run_plan(plan))?;
    report.print(is_json)?;
    if let Some(complaint) = report.failure_summary() {
        eprintln!("{complaint}");
    }
    Ok(report.exit_code())
}

fn runtime() -> anyhow::Result<LocalRuntime> {
    Builder::new_current_thread()
        .enable_all()
        .build_local(LocalOptions::default())
        .context("cannot start a runtime")
}
