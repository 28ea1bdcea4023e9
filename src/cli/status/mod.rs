//! `strait status`: the state of the running gateway.

mod peers;
mod refusals;
#[cfg(test)]
mod tests;
mod text;

use std::process::ExitCode;

use clap::Subcommand;
use http::{Method, StatusCode};
use serde::de::DeserializeOwned;

use super::ask::{Admin, run_admin_command};
use super::text::{is_color_terminal, print};
use crate::output::Output;

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
pub(super) struct Args {
    #[command(subcommand)]
    part: Option<Part>,
    /// Service to show with its endpoints: a name or a hostname, alone or after NAMESPACE/, or
    /// another of its names; with or without a port.
    service: Option<String>,
    /// All services, or all endpoints of the service; without it the first 50.
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    admin: Admin,
}

/// Part of the state with a page of its own.
#[derive(Debug, Subcommand)]
enum Part {
    /// Shows gateways of other networks and links between clusters: state, round trip time,
    /// tunnels, ejections, certificate, last error.
    ///
    /// Exits 2 if the gateway does not answer.
    #[command(after_help = "Examples:\n  strait status peers\n  \
                            strait status peers -o json | jq .gateways")]
    Peers(PartArgs),
    /// Shows the last refusals of tunnels and connections by reason, peer and requested name, the
    /// most frequent first, with the commands that explain them.
    ///
    /// At most 256 kinds are kept, of each peer the last 8.
    ///
    /// Exits 2 if the gateway does not answer.
    #[command(after_help = "Examples:\n  strait status refusals\n  \
                            strait status refusals -o json | jq .refusals[0].explain")]
    Refusals(PartArgs),
}

#[derive(Debug, clap::Args)]
struct PartArgs {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    admin: Admin,
}

/// Prints the status page. The exit code is the result of the readiness probe.
pub(super) fn run(args: &Args) -> ExitCode {
    match &args.part {
        Some(Part::Peers(args)) => return part(args, "/peers", peers::page),
        Some(Part::Refusals(args)) => return part(args, "/refusals", refusals::page),
        None => {}
    }
    let query = [("service", args.service.as_deref()), ("all", args.all.then_some(""))];
    run_admin_command(async {
        let page = args.admin.request(Method::GET, "/status", &query).await?;
        // The body of a 404 names the missing service; a 404 without a body is not from strait.
        if page.status == StatusCode::NOT_FOUND && args.service.is_some() {
            return page.print_refusal().await;
        }
        if args.output.is_json() {
            page.print_success().await?;
        } else {
            let page = page.decode().await?;
            print(text::page(&page, args.service.is_some(), is_color_terminal()))?;
        }
        let ready = args.admin.request(Method::GET, "/ready", &()).await?;
        Ok(match ready.status {
            StatusCode::OK => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        })
    })
}

/// Prints the page at `path` as JSON, or as the text that `format` makes of it.
fn part<P: DeserializeOwned>(
    args: &PartArgs,
    path: &str,
    format: fn(&P, bool) -> String,
) -> ExitCode {
    run_admin_command(async {
        let page = args.admin.request(Method::GET, path, &()).await?;
        if args.output.is_json() {
            return page.print_success().await;
        }
        print(format(&page.decode().await?, is_color_terminal()))?;
        Ok(ExitCode::SUCCESS)
    })
}
