//! `strait drain` and `strait release`: orders to the running gateway, through its admin
//! port.

use std::net::SocketAddr;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use http::{Method, StatusCode};

use super::ask::{Admin, run_admin_command};
use crate::wire::RegionPattern;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Evacuates a region: new tunnels go to endpoints elsewhere, and open tunnels stay.
    ///
    /// The evacuation affects only this gateway, until --undo or a restart, or until --undo alone
    /// with --persist, and `strait status` shows it; set weight 0 in `traffic[].regions` to make it
    /// permanent. A region in which the mesh has no workload is an error that lists the known ones.
    /// If services would be left without endpoints, the command lists them and changes nothing,
    /// unless --force is given.
    ///
    /// Exits 1 if the gateway refuses, or would refuse (--dry-run), 2 if it does not answer.
    #[command(after_help = "Examples:\n  strait drain region us-east-2 --dry-run\n  \
                            strait drain region us-east-2 --persist\n  \
                            strait drain region us-east-2/us-east-2a --force\n  \
                            strait drain region us-east-2 --undo")]
    Region {
        /// A region, REGION/ZONE or REGION/ZONE/SUBZONE, as named in the mesh.
        #[arg(value_parser = region)]
        region: RegionPattern,
        #[command(flatten)]
        options: Options,
    },
    /// Evacuates all workloads and gateways of a cluster, as `drain region` does for a region.
    #[command(after_help = "Examples:\n  strait drain cluster west --dry-run\n  \
                            strait drain cluster west --undo")]
    Cluster {
        /// A cluster, as named in the mesh.
        cluster: String,
        #[command(flatten)]
        options: Options,
    },
    /// Evacuates one workload or gateway, as `drain region` does for a region.
    #[command(after_help = "Examples:\n  strait drain endpoint 10.0.0.7\n  \
                            strait drain endpoint east//Pod/app/echo-1 --undo")]
    Endpoint {
        /// An IP address, or the uid of a workload.
        endpoint: String,
        #[command(flatten)]
        options: Options,
    },
    /// Evacuates one gateway of another network: new tunnels go through others, open ones stay.
    #[command(after_help = "Examples:\n  strait drain gateway 192.0.2.1:15008 --dry-run\n  \
                            strait drain gateway '[2001:db8::1]:15008' --undo")]
    Gateway {
        /// Address and HBONE port, as `strait status peers` lists them.
        gateway: SocketAddr,
        #[command(flatten)]
        options: Options,
    },
    /// Drains a service: new tunnels to it are rejected (503, `no_endpoint`), and open ones stay.
    #[command(after_help = "Examples:\n  strait drain service echo.app.svc.cluster.local\n  \
                            strait drain service app/echo.app.svc.cluster.local --undo")]
    Service {
        /// A hostname, or NAMESPACE/HOST.
        service: String,
        #[command(flatten)]
        options: Options,
    },
    /// Drains a listener: it accepts no connection, and its peers get GOAWAY.
    ///
    /// Open tunnels have until `drain.deadline`, as after the removal of the listener from the
    /// configuration. The gateway stays ready. --undo opens the listener again.
    #[command(after_help = "Examples:\n  strait drain listener cross-network --persist\n  \
                            strait drain listener cross-network --undo")]
    Listener {
        /// A name in `listeners[].name`.
        listener: String,
        #[command(flatten)]
        options: Options,
    },
}

#[derive(Debug, Args)]
pub(super) struct Options {
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

fn region(text: &str) -> Result<RegionPattern, String> {
    let region = RegionPattern::parse(text).filter(|region| region.part_count() > 0);
    region.ok_or_else(|| "write a region, REGION/ZONE or REGION/ZONE/SUBZONE".to_owned())
}

#[derive(Debug, Args)]
pub(super) struct Release {
    #[command(flatten)]
    admin: Admin,
}

/// Requests that held removals are made, and prints the result.
pub(super) fn release(args: &Release) -> ExitCode {
    run_admin_command(async {
        let answer = args.admin.request(Method::POST, "/discovery/release", &()).await?;
        match answer.status {
            StatusCode::CONFLICT => answer.print_refusal().await,
            _ => answer.print_success().await,
        }
    })
}

/// Sends the command to the gateway and prints the result.
pub(super) fn run(command: &Command) -> ExitCode {
    let (kind, name, options) = match command {
        Command::Region { region, options } => ("region", region.to_string(), options),
        Command::Cluster { cluster, options } => ("cluster", cluster.clone(), options),
        Command::Endpoint { endpoint, options } => ("endpoint", endpoint.clone(), options),
        Command::Gateway { gateway, options } => ("gateway", gateway.to_string(), options),
        Command::Service { service, options } => ("service", service.clone(), options),
        Command::Listener { listener, options } => ("listener", listener.clone(), options),
    };
    let query = [
        (kind, Some(name)),
        ("undo", options.undo.then(String::new)),
        ("force", options.force.then(String::new)),
        ("persist", options.persist.then(String::new)),
    ];
    // A gateway without support for dry runs rejects GET, and changes nothing.
    let method = if options.dry_run { Method::GET } else { Method::POST };
    run_admin_command(async {
        let answer = options.admin.request(method, &format!("/drain/{kind}"), &query).await?;
        // The body of a refusal has its reason; a refusal without a body is not from strait.
        match answer.status {
            StatusCode::NOT_FOUND | StatusCode::CONFLICT => answer.print_refusal().await,
            _ => answer.print_success().await,
        }
    })
}
