//! `strait explain`: the outcome of a hypothetical tunnel, with its reasons.

mod text;

use std::io::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;

use super::ask::{self, Admin};
use crate::app;
use crate::config::Source;
use crate::explain::{Answer, Question};

const EXAMPLES: &str = "\
Examples:
  strait explain --from spiffe://west.local/ns/shop/sa/checkout --to echo.global:80
  strait explain --from spiffe://west.local/ns/shop/sa/checkout --to echo.global:80 \\
    -c strait.yaml
  strait explain --listener sidecars --alpn istio \\
    --sni outbound_.80_._.echo.app.svc.cluster.local
  strait explain --from spiffe://west.local/ns/shop/sa/checkout --to echo.global:80 --json |
    jq .outcome
  kubectl exec -n istio-system deploy/eastwest -- /strait explain --from … --to …";

/// Explains the outcome of a hypothetical tunnel: its service, the rule that allows or rejects it
/// and the change that would alter that, the tiers of endpoints, the probability of each endpoint,
/// and the reasons why others are not used.
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
    /// Identity in the peer's certificate. Not for TLS listeners, where the gateway sees none.
    #[arg(long, value_name = "spiffe://TD/ns/NS/sa/SA")]
    from: Option<String>,
    /// Cluster of the peer, one of `trust.clusters`, if the issuer of its certificate determines
    /// it; without it an issuer that no cluster has.
    #[arg(long, value_name = "NAME")]
    cluster: Option<String>,
    /// Authority of the peer's CONNECT.
    #[arg(long, value_name = "HOST:PORT")]
    to: Option<String>,
    /// Server name of the peer's TLS: on a TLS listener, or inside the tunnel if the gateway reads
    /// it. Empty is a ClientHello without one.
    #[arg(long, value_name = "NAME")]
    sni: Option<String>,
    /// ALPN protocols that the peer's TLS offers.
    #[arg(long, value_name = "PROTOCOL", value_delimiter = ',')]
    alpn: Vec<String>,
    /// Name of the listener in the configuration; without it the first HBONE listener, or the only
    /// TLS listener.
    #[arg(long, value_name = "NAME")]
    listener: Option<String>,
    /// Value of the peer's x-istio-source header.
    #[arg(long, value_name = "WHAT", value_parser = ["waypoint", "gateway"])]
    origin: Option<String>,
    /// Address of the peer, for `sources` of a listener and for policies that match it.
    #[arg(long, value_name = "IP")]
    address: Option<IpAddr>,
    /// All endpoints; without it the 50 most probable.
    #[arg(long)]
    all: bool,
    /// JSON instead of text.
    #[arg(long)]
    json: bool,
    /// Configuration to use instead of a running gateway.
    #[arg(short, long, value_name = "FILE", conflicts_with = "admin")]
    config: Option<PathBuf>,
    #[command(flatten)]
    admin: Admin,
}

impl Args {
    fn question(&self) -> Question {
        Question {
            from: self.from.clone(),
            cluster: self.cluster.clone(),
            to: self.to.clone(),
            sni: self.sni.clone(),
            alpn: self.alpn.clone(),
            listener: self.listener.clone(),
            origin: self.origin.clone(),
            address: self.address,
            all: self.all,
        }
    }
}

/// Requests the explanation, prints it, and returns the exit code for it.
pub(super) fn run(args: &Args) -> ExitCode {
    let question = args.question();
    if let Some(file) = &args.config {
        return explain_from_files(&Source::file(file), &question, args.json);
    }
    let parameters = question.parameters().into_iter();
    let parameters =
        parameters.map(|(key, value)| format!("{key}={}", ask::percent_encode(&value)));
    let path = format!("/explain?{}", parameters.collect::<Vec<_>>().join("&"));
    ask::fetch_whole(&args.admin, &path, |answer| match answer {
        Ok(bytes) => {
            let answer = serde_json::from_slice(&bytes);
            let answer = answer.context(
                "cannot decode the gateway's answer; use the gateway's version of strait",
            )?;
            Ok(print_answer(&answer, args.json))
        }
        Err(why) => Ok(print_error(&why)),
    })
}

fn explain_from_files(source: &Source, question: &Question, json: bool) -> ExitCode {
    let report = app::check_without_keys(source);
    if let Some(warning) = &report.absent {
        eprintln!("{warning}");
    }
    for line in &report.skipped_objects {
        eprintln!("{line}");
    }
    match report.inputs {
        Some(inputs) if report.errors.is_empty() => match app::offline(&inputs, question) {
            Ok(answer) => print_answer(&answer, json),
            Err(why) => print_error(&why),
        },
        _ => print_error(&report.errors.join("\n")),
    }
}

fn print_error(why: &str) -> ExitCode {
    eprintln!("{}", why.trim_end());
    ExitCode::from(2)
}

fn print_answer(answer: &Answer, json: bool) -> ExitCode {
    let text = match json {
        true => serde_json::to_string_pretty(answer).unwrap_or_default() + "\n",
        false => text::page(answer),
    };
    // A reader that closes the pipe is not an error.
    let _ = std::io::stdout().write_all(text.as_bytes());
    match answer.outcome.opened {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
