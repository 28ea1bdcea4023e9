//! `strait explain`: what would become of a tunnel, and why.

mod text;

use std::io::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;

use super::ask::{self, Admin};
use crate::app;
use crate::config::Source;
use crate::datapath::explain::{Answer, Question};

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

/// Explains what would become of a tunnel: which service is meant and why, the rule that allows or
/// refuses it and what to write to change that, the tiers of endpoints, the odds of each, and why
/// the others are out.
///
/// The running gateway answers, by its loads and ejections of now, as for `strait status`; with -c
/// the files do, as a gateway that starts with them would be, at rest. Certificates and keys need
/// not exist then: one warning names those that do not. Nobody is dialled, and nothing is counted
/// or logged.
///
/// Exits 0 if the tunnel would be opened, 1 if it would be refused, 2 if the question is wrong or
/// nobody answers.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Who asks: the identity of the peer's certificate. Not for TLS listeners, where the gateway
    /// sees none.
    #[arg(long, value_name = "spiffe://TD/ns/NS/sa/SA")]
    from: Option<String>,
    /// The peer's cluster, one of `trust.clusters`, where the issuer of its certificate says it;
    /// without it an issuer that no cluster has.
    #[arg(long, value_name = "NAME")]
    cluster: Option<String>,
    /// What the peer asks for: the authority of its CONNECT.
    #[arg(long, value_name = "HOST:PORT")]
    to: Option<String>,
    /// The server name of its TLS: on a TLS listener, or inside the tunnel where that is looked
    /// at. Empty is a hello without one.
    #[arg(long, value_name = "NAME")]
    sni: Option<String>,
    /// What its TLS offers by ALPN.
    #[arg(long, value_name = "PROTOCOL", value_delimiter = ',')]
    alpn: Vec<String>,
    /// The listener by its name in the configuration; without it the first one of HBONE, or the
    /// only one of TLS.
    #[arg(long, value_name = "NAME")]
    listener: Option<String>,
    /// What the peer says by x-istio-source.
    #[arg(long, value_name = "WHAT", value_parser = ["waypoint", "gateway"])]
    origin: Option<String>,
    /// The peer's address, for `sources` of a listener and for policies that ask for it.
    #[arg(long, value_name = "IP")]
    address: Option<IpAddr>,
    /// All endpoints; without it the 50 likeliest.
    #[arg(long)]
    all: bool,
    /// JSON instead of text.
    #[arg(long)]
    json: bool,
    /// The configuration to look at instead of a running gateway.
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

/// Asks, prints the answer, and exits by it.
pub(super) fn run(args: &Args) -> ExitCode {
    let question = args.question();
    if let Some(file) = &args.config {
        return offline(&Source::file(file), &question, args.json);
    }
    let parameters = question.parameters().into_iter();
    let parameters = parameters.map(|(key, value)| format!("{key}={}", ask::encoded(&value)));
    let path = format!("/explain?{}", parameters.collect::<Vec<_>>().join("&"));
    ask::whole(&args.admin, &path, |answer| match answer {
        Ok(bytes) => {
            let answer = serde_json::from_slice(&bytes);
            let answer = answer.context("the gateway's answer cannot be read; is it as new?")?;
            Ok(printed(&answer, args.json))
        }
        Err(why) => Ok(refused(&why)),
    })
}

fn offline(source: &Source, question: &Question, json: bool) -> ExitCode {
    let report = app::check_without_keys(source);
    if let Some(warning) = &report.absent {
        eprintln!("{warning}");
    }
    for line in &report.passed_over {
        eprintln!("{line}");
    }
    match report.inputs {
        Some(inputs) if report.errors.is_empty() => match app::offline(&inputs, question) {
            Ok(answer) => printed(&answer, json),
            Err(why) => refused(&why),
        },
        _ => refused(&report.errors.join("\n")),
    }
}

fn refused(why: &str) -> ExitCode {
    eprintln!("{}", why.trim_end());
    ExitCode::from(2)
}

fn printed(answer: &Answer, json: bool) -> ExitCode {
    let text = match json {
        true => serde_json::to_string_pretty(answer).unwrap_or_default() + "\n",
        false => text::page(answer),
    };
    // A reader that has seen enough is no error.
    let _ = std::io::stdout().write_all(text.as_bytes());
    match answer.outcome.opened {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
