//! `strait drain region`: what an operator orders the running gateway.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use http::{Method, StatusCode};

use super::ask::{Admin, answered, encoded};
use crate::wire::RegionPattern;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Evacuates a region: new tunnels go to endpoints elsewhere, open ones go on.
    ///
    /// Where no endpoint is left tunnels are refused, and the log says why. It holds until --undo
    /// or a restart, is shown by `strait status`, and is said to this gateway alone; for good
    /// write weight 0 in `traffic[].regions`.
    ///
    /// Exits 1 if the gateway does not do it, 2 if nobody answers.
    #[command(after_help = "Examples:\n  strait drain region us-east-2\n  \
                            strait drain region us-east-2/us-east-2a\n  \
                            strait drain region us-east-2 --undo")]
    Region(Region),
}

#[derive(Debug, Args)]
pub(super) struct Region {
    /// A region, REGION/ZONE or REGION/ZONE/SUBZONE, as the mesh names them.
    #[arg(value_parser = region)]
    region: RegionPattern,
    /// Puts it back.
    #[arg(long)]
    undo: bool,
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
    let undo = if of.undo { "&undo" } else { "" };
    let path = format!(
        "/drain/region?region={}{undo}",
        encoded(&of.region.to_string())
    );
    answered(async {
        let answer = of.admin.ask(Method::POST, &path).await?;
        // Ours says why it refuses; what says nothing is another port's.
        match answer.status {
            StatusCode::NOT_FOUND | StatusCode::CONFLICT => answer.refused().await,
            _ => answer.printed().await.map(|()| ExitCode::SUCCESS),
        }
    })
}
