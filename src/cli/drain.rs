//! `strait drain` and `strait release`: orders to the running gateway, through its admin
//! port.

use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use clap::builder::PossibleValuesParser;
use http::{Method, StatusCode};

use super::ask::{Admin, run_admin_command};
use crate::wire::DrainTarget;

/// Drains a part of the mesh or a listener of the running gateway: new tunnels go to endpoints
/// elsewhere, and open tunnels stay.
///
/// The drain affects only this gateway, until --undo or a restart, or until --undo alone with
/// --persist, and `strait status` shows it. For a region, set weight 0 in `traffic[].regions` to
/// make it permanent. A part that the mesh does not have is an error that lists the known ones. If
/// services would be left without endpoints, the command lists them and changes nothing, unless
/// --force is given.
///
/// New tunnels to a service are rejected (503, `no_endpoint`). A listener accepts no connection,
/// and its peers get GOAWAY; open tunnels have until `drain.deadline`, as after the removal of the
/// listener from the configuration, and the gateway stays ready.
///
/// Exits 1 if the gateway refuses, or would refuse (--dry-run), 2 if it does not answer.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  strait drain region us-east-2 --dry-run\n  \
                        strait drain region us-east-2/us-east-2a --persist\n  \
                        strait drain cluster west --force\n  \
                        strait drain endpoint east//Pod/app/echo-1 --undo\n  \
                        strait drain gateway '[2001:db8::1]:15008'\n  \
                        strait drain service app/echo.app.svc.cluster.local\n  \
                        strait drain listener cross-network --persist")]
pub(super) struct Drain {
    /// Kind of what is drained.
    #[arg(value_parser = PossibleValuesParser::new(DrainTarget::KINDS))]
    kind: String,
    /// A region as REGION, REGION/ZONE or REGION/ZONE/SUBZONE; a cluster; the IP address of an
    /// endpoint or the uid of a workload; address and HBONE port of a gateway, as `strait status
    /// peers` lists them; a hostname or NAMESPACE/HOST of a service; the name of a listener.
    name: String,
    /// Ends the drain.
    #[arg(long, conflicts_with_all = ["force", "persist"])]
    undo: bool,
    /// Keeps the drain over restarts, in the file `drain.file`.
    #[arg(long)]
    persist: bool,
    /// Evacuates even if services are left without endpoints: their tunnels are rejected.
    #[arg(long)]
    force: bool,
    /// Prints the effect of the command, and changes nothing.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    admin: Admin,
}

/// Requests that held removals are made, and prints the result.
pub(super) fn release(admin: &Admin) -> ExitCode {
    run_admin_command(async {
        let answer = admin.request(Method::POST, "/discovery/release", &()).await?;
        match answer.status {
            StatusCode::CONFLICT => answer.print_refusal().await,
            _ => answer.print_success().await,
        }
    })
}

/// Sends the command to the gateway and prints the result.
pub(super) fn run(args: &Drain) -> ExitCode {
    let Drain { kind, name, undo, persist, force, dry_run, admin } = args;
    let set = |is_set: &bool| is_set.then_some("");
    let query = [
        (&**kind, Some(&**name)),
        ("undo", set(undo)),
        ("force", set(force)),
        ("persist", set(persist)),
    ];
    // A gateway without support for dry runs rejects GET, and changes nothing.
    let method = if *dry_run { Method::GET } else { Method::POST };
    run_admin_command(async {
        if DrainTarget::parse(kind, name).is_none() {
            bail!("{name:?} names no {kind}; see `strait drain --help`");
        }
        let answer = admin.request(method, &format!("/drain/{kind}"), &query).await?;
        // The body of a refusal has its reason; a refusal without a body is not from strait.
        match answer.status {
            StatusCode::NOT_FOUND | StatusCode::CONFLICT => answer.print_refusal().await,
            _ => answer.print_success().await,
        }
    })
}
