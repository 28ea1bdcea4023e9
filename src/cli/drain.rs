//! `strait drain region`: an order of an operator to the running gateway.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use http::{Method, StatusCode};

use super::ask::{Admin, answered, encoded};
use crate::wire::RegionPattern;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Evacuates a region: new tunnels go to endpoints elsewhere, open ones go on.
    ///
    /// The evacuation holds until --undo or a restart, `strait status` shows it, and it is for
    /// this gateway alone; for good write weight 0 in `traffic[].regions`. A region in which the
    /// mesh has no workload is an error that lists the known ones. Where services would be left
    /// without endpoints, they are named and nothing is changed, unless --force is given.
    ///
    /// Exits 1 if the gateway refuses, or would refuse (--dry-run), 2 if nobody answers.
    #[command(
        after_help = "Examples:\n  strait drain region us-east-2 --dry-run\n  \
                            strait drain region us-east-2\n  \
                            strait drain region us-east-2/us-east-2a --force\n  \
                            strait drain region us-east-2 --undo"
    )]
    Region(Region),
}

#[derive(Debug, Args)]
pub(super) struct Region {
    /// A region, REGION/ZONE or REGION/ZONE/SUBZONE, as the mesh names them.
    #[arg(value_parser = region)]
    region: RegionPattern,
    /// Puts it back.
    #[arg(long, conflicts_with = "force")]
    undo: bool,
    /// Evacuates it also where services are left without endpoints: their tunnels are refused.
    #[arg(long)]
    force: bool,
    /// Says what the order would do, and changes nothing.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    admin: Admin,
}

fn region(text: &str) -> Result<RegionPattern, String> {
    let region = RegionPattern::parse(text).filter(|region| region.depth() > 0);
    region.ok_or_else(|| "write a region, REGION/ZONE or REGION/ZONE/SUBZONE".to_owned())
}

/// Gives the order, and prints what came of it.
pub(super) fn run(command: &Command) -> ExitCode {
    let Command::Region(of) = command;
    let more = match (of.undo, of.force) {
        (true, _) => "&undo",
        (false, true) => "&force",
        (false, false) => "",
    };
    let region = encoded(&of.region.to_string());
    let path = format!("/drain/region?region={region}{more}");
    // A gateway that does not know of dry runs refuses the method, and changes nothing.
    let method = match of.dry_run {
        true => Method::GET,
        false => Method::POST,
    };
    answered(async {
        let answer = of.admin.ask(method, &path).await?;
        // Ours says why it refuses; what says nothing is another port's.
        match answer.status {
            StatusCode::NOT_FOUND | StatusCode::CONFLICT => answer.refused().await,
            _ => answer.printed().await.map(|()| ExitCode::SUCCESS),
        }
    })
}
