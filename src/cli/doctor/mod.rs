//! `strait doctor`: independent checks of a gateway and its surroundings, each with its remedy.
//!
//! `certificates`, `network` and `host` hold the checks, and `running` those of a gateway that
//! runs. No check needs the result of another one, except the certificate with which gateways are
//! dialled.

mod certificates;
mod finding;
mod host;
mod network;
mod running;

use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;

use self::finding::{Finding, Outcome, Report};
use super::ask::run_admin_command;
use super::source::ConfigArgs;
use super::text::print;
use crate::app;
use crate::config::{ADMIN, Examined, Source};
use crate::output::Output;
use crate::yaml::Severity;

const EXAMPLES: &str = "\
Examples:
  strait doctor -c strait.yaml
  strait doctor -c strait.yaml -o json | jq '.checks[] | select(.result != \"ok\")'
  kubectl exec -n istio-system deploy/eastwest -- /strait doctor";

/// Checks the gateway and its surroundings, and prints a line for each check: what was found, and
/// the remedy.
///
/// It reads the configuration and its files as `strait check`, in the pod of a gateway as `strait
/// proxy`; judges the own certificate, the roots and the clock; dials the gateways of other
/// networks, as tunnels do, and the control plane; looks up the configured names; and compares the
/// limits of this host with the configuration. Without certificates in files, it requests one. A
/// gateway need not run. If one answers on the admin port of the configuration, its state is
/// checked too.
///
/// Exits 0 without failures (warnings are shown), 1 with failures, 2 if the command line is wrong.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    output: Output,
}

/// Runs all checks and prints their findings.
pub(super) fn run(args: &Args) -> ExitCode {
    let source = args.config.source_of_pod();
    run_admin_command(async {
        let report = examine(&source, source.examine_without_keys(), true).await;
        print(if args.output.is_json() {
            serde_json::to_string_pretty(&report)? + "\n"
        } else {
            report.text()
        })?;
        Ok(ExitCode::from(u8::from(!report.ok)))
    })
}

/// Runs all checks. Without certificates in files, one is requested if `may_request`.
pub(super) async fn examine(source: &Source, examined: Examined, may_request: bool) -> Report {
    let root = Path::new("/");
    let report = app::check(source, examined.clone());
    let (own, mut checks) = certificates::own(source, &examined, may_request).await;
    checks.extend(certificates::roots(&examined));
    let mut network = network::planes(&examined).await;
    match &report.inputs {
        Some(inputs) => network.extend(network::gateways(inputs, own.as_deref()).await),
        None => network.push(Finding::warning(
            "gateways",
            "were not dialled: the configuration cannot be used",
            "correct it first",
        )),
    }
    checks.push(certificates::clock(checks.iter().chain(&network)));
    checks.extend(network);
    if let Some(config) = &examined.config {
        checks.extend(host::limits(config, root));
    }
    checks.extend(running::gateway(admin_of(&examined)).await);
    checks.extend(host::mtu(root));
    checks.splice(0..0, configuration(source, &report));
    let ok = checks.iter().all(|one| one.outcome != Outcome::Failure);
    Report { ok, checks }
}

/// Returns the admin port of a configuration, the default one if that cannot be used.
pub(super) fn admin_of(examined: &Examined) -> SocketAddr {
    examined.config.as_ref().map_or(ADMIN, |config| config.admin.bind)
}

/// Returns the findings of `strait check`.
fn configuration(source: &Source, report: &app::Report) -> Vec<Finding> {
    let findings = report.findings.0.iter().map(|finding| {
        let outcome = match finding.severity {
            Severity::Warning => Outcome::Warning,
            _ => Outcome::Failure,
        };
        let message = format!("{}: {}", finding.place, finding.message());
        Finding::of_message("configuration", outcome, &message)
    });
    let mut findings: Vec<_> = findings.collect();
    if findings.is_empty() {
        findings.push(Finding::ok("configuration", format!("{} is correct", source.label())));
    }
    findings
}
