//! `strait explain`: the outcome of a hypothetical tunnel, with its reasons.

mod text;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use http::Method;

use super::ask::{Admin, run_admin_command};
use super::text::print;
use crate::app;
use crate::config::Source;
use crate::explain::{Answer, Question};
use crate::labels::join;
use crate::output::Output;
use crate::yaml::Severity;

const EXAMPLES: &str = "\
Examples:
  strait explain --from spiffe://west.local/ns/shop/sa/checkout --to echo.global:80
  strait explain --from spiffe://west.local/ns/shop/sa/checkout --to echo.global:80 \\
    -c strait.yaml
  strait explain --listener sidecars --alpn istio \\
    --sni outbound_.80_._.echo.app.svc.cluster.local
  strait explain --binding echo.app.svc.cluster.local:80 --address 127.0.0.1
  strait explain --from spiffe://west.local/ns/edge/sa/gateway --to echo.global:80 \\
    --source spiffe://north.local/ns/shop/sa/checkout --via other,own
  strait explain --from spiffe://west.local/ns/shop/sa/checkout --to echo.global:80 -o json |
    jq .outcome
  kubectl exec -n istio-system deploy/eastwest -- /strait explain --from … --to …";

/// Explains the outcome of a hypothetical tunnel: its service, the rule that allows or rejects it
/// and the change that would alter that, the tiers of endpoints, the probability of each endpoint,
/// and the reasons why others are not used. With --binding it explains the connection of a local
/// client: the gateways, and the certificates that they and the workloads behind them must have.
///
/// The running gateway answers, with its current loads and ejections, as for `strait status`; with
/// -c the answer comes from the files, as for a gateway that has just started with them.
/// Certificates and keys need not exist with -c: one warning names those that do not. The command
/// dials nothing, and nothing is counted or logged.
///
/// Exits 0 if the tunnel would be opened, 1 if it would be rejected, 2 if the arguments are wrong
/// or the gateway does not answer.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    question: Question,
    #[command(flatten)]
    output: Output,
    /// Configuration to use instead of a running gateway: a file or a directory.
    #[arg(short, long, value_name = "PATH", conflicts_with = "admin")]
    config: Option<PathBuf>,
    #[command(flatten)]
    admin: Admin,
}

/// Requests the explanation, prints it, and returns the exit code for it.
pub(super) fn run(args: &Args) -> ExitCode {
    run_admin_command(async {
        if let Some(file) = &args.config {
            return explain_from_files(file, args);
        }
        let answer = args.admin.request(Method::GET, "/explain", &args.question).await?;
        print_answer(&answer.decode().await?, args.output.is_json())
    })
}

fn explain_from_files(file: &Path, args: &Args) -> anyhow::Result<ExitCode> {
    let report = app::check_without_keys(&Source::file(file));
    if let Some(warning) = &report.absent {
        eprintln!("{warning}");
    }
    for finding in report.findings.with(Severity::PassedOver) {
        eprintln!("{finding}");
    }
    match report.inputs {
        Some(inputs) if !report.findings.has_errors() => {
            match app::offline(&inputs, &args.question) {
                Ok(answer) => print_answer(&answer, args.output.is_json()),
                Err(why) => bail!("{}", why.trim_end()),
            }
        }
        _ => bail!("{}", join(report.findings.with(Severity::Error), "\n")),
    }
}

fn print_answer(answer: &Answer, json: bool) -> anyhow::Result<ExitCode> {
    let text = if json {
        serde_json::to_string_pretty(answer).unwrap_or_default() + "\n"
    } else {
        text::page(answer)
    };
    print(text)?;
    Ok(ExitCode::from(u8::from(!answer.outcome.opened)))
}
