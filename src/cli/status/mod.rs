//! `strait status`: the state of the running gateway.

mod peers;
#[cfg(test)]
mod tests;
mod text;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Subcommand;
use http::{Method, StatusCode};

use super::ask::{Admin, print, run_admin_command};

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
    /// JSON instead of text.
    #[arg(long)]
    json: bool,
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
                            strait status peers --json | jq .gateways")]
    Peers(PeersArgs),
}

#[derive(Debug, clap::Args)]
struct PeersArgs {
    /// JSON instead of text.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    admin: Admin,
}

/// Prints the status page. The exit code is the result of the readiness probe.
pub(super) fn run(args: &Args) -> ExitCode {
    if let Some(Part::Peers(args)) = &args.part {
        return peers(args);
    }
    let query = [("service", args.service.as_deref()), ("all", args.all.then_some(""))];
    run_admin_command(async {
        let page = args.admin.request(Method::GET, "/status", &query).await?;
        // The body of a 404 names the missing service; a 404 without a body is not from strait.
        if page.status == StatusCode::NOT_FOUND && args.service.is_some() {
            return page.print_refusal().await;
        }
        if args.json {
            page.print_success().await?;
        } else {
            let page = page.decode().await?;
            print(&text::page(&page, args.service.is_some(), is_color_terminal()));
        }
        let ready = args.admin.request(Method::GET, "/ready", &()).await?;
        Ok(match ready.status {
            StatusCode::OK => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        })
    })
}

/// Prints the page of gateways and links.
fn peers(args: &PeersArgs) -> ExitCode {
    run_admin_command(async {
        let page = args.admin.request(Method::GET, "/peers", &()).await?;
        if args.json {
            return page.print_success().await;
        }
        print(&peers::page(&page.decode().await?, is_color_terminal()));
        Ok(ExitCode::SUCCESS)
    })
}

fn is_color_terminal() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none()
}
