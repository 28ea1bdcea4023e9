//! Arguments of `strait conformance`, and its run.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::runtime::Builder;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::config::IdentityFiles;
use crate::output::Output;
use crate::tls::IdentityMaterial;
use crate::tools::hbone::resolve;

use super::case::{CASE_DEADLINE, Case, Group, Verdict};
use super::peer::{Names, Target};
use super::report::Report;
use super::table::table;

const EXAMPLES: &str = "Examples, with `strait load serve --mode scripted` behind the gateway:
  strait conformance --to 10.0.0.1:15008 --authority echo.global:80 \\
    --chain client.crt --key client.key --roots root.crt
  … --group tls --group http2            without floods and faults
  … --only 'CONTINUATION, full' --seconds 60    one flood, for a minute";

/// Checks any HBONE gateway against RFC 9113 and docs/wire-contract.md, with floods and faults.
///
/// It connects as a client that the gateway accepts. The endpoint behind the authority is `strait
/// load serve --mode scripted`, or any echo, with which some cases are skipped.
///
/// Exits 0 if cases conform and none fails, 1 otherwise, 2 if the arguments are wrong or no tunnel
/// can be opened. A run takes about two minutes. Do not aim it at a gateway in production: it
/// floods.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Address of the gateway.
    #[arg(long, value_name = "HOST:PORT")]
    to: String,
    /// Authority of an endpoint that returns all bytes.
    #[arg(long, value_name = "HOST:PORT")]
    authority: String,
    /// Authority that the gateway does not know.
    #[arg(long, value_name = "HOST:PORT", default_value = "nothing.conformance.test:80")]
    unknown: String,
    /// Certificate chain of the client.
    #[arg(long, value_name = "FILE")]
    chain: PathBuf,
    /// Key of the certificate.
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
    /// Roots for the gateway's certificate; any SPIFFE identity under them is accepted.
    #[arg(long, value_name = "FILE")]
    roots: PathBuf,
    /// Run these groups only.
    #[arg(long, value_enum)]
    group: Vec<Group>,
    /// Run only cases whose section and name contain this.
    #[arg(long, value_name = "PART")]
    only: Option<String>,
    /// Seconds after which a flood that the gateway does not end fails.
    #[arg(long, value_name = "SECONDS", default_value = "3",
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    #[command(flatten)]
    output: Output,
}

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let ready = async {
            let mut target = args.target().await?;
            target.probe().await.with_context(|| format!("no tunnel through {}", args.to))?;
            let cases = args.select(&target)?;
            anyhow::Ok((target, cases))
        };
        // deadline: of a case, of which this is the first.
        let ready = timeout(CASE_DEADLINE, ready).await.context("no tunnel in time");
        match ready.and_then(|ready| ready) {
            Ok((target, cases)) => args.check(&target, cases).await,
            Err(error) => {
                eprintln!("{error:#}");
                Ok(ExitCode::from(2))
            }
        }
    })
}

impl Args {
    async fn target(&self) -> anyhow::Result<Target> {
        let address = resolve(&self.to).await?;
        let material = IdentityMaterial::load(&IdentityFiles {
            chain: self.chain.clone(),
            key: self.key.clone(),
            roots: self.roots.clone(),
        })?;
        let names =
            Names { echo: self.authority.as_str().into(), unknown: self.unknown.as_str().into() };
        Ok(Target::new(address, material, names)?)
    }

    /// Returns the cases to run, of which there is one at least.
    fn select(&self, target: &Target) -> anyhow::Result<Vec<Case>> {
        let cases = table(target, Duration::from_secs(self.seconds));
        let cases: Vec<_> = cases.into_iter().filter(|case| self.wants(case)).collect();
        ensure!(!cases.is_empty(), "no case has this group and name; omit --only to run all");
        Ok(cases)
    }

    async fn check(&self, target: &Target, cases: Vec<Case>) -> anyhow::Result<ExitCode> {
        let (all, mut report) = (cases.len(), Report::new(&self.to));
        let (waiting, cases) = cases.into_iter().partition(|case| case.group == Group::Faults);
        // Faults wait for deadlines of the gateway, so they run beside the cases before the floods.
        let mut faults = Faults::start(target, waiting);
        for (number, case) in Vec::from_iter::<Vec<Case>>(cases).iter().enumerate() {
            progress(number, all, &case.name);
            if case.group == Group::Floods {
                faults.finish(&mut report).await;
            }
            let verdict = case.run(target, false).await;
            report.add(case, verdict);
        }
        faults.finish(&mut report).await;
        progress(all, all, "");
        report.print(self.output.is_json())?;
        Ok(report.exit_code())
    }

    fn wants(&self, case: &Case) -> bool {
        let name = format!("{} {}", case.section, case.name);
        (self.group.is_empty() || self.group.contains(&case.group))
            && self.only.as_ref().is_none_or(|part| name.contains(part))
    }
}

/// Faults that run at once.
struct Faults(Vec<(Arc<Case>, JoinHandle<Verdict>)>);

impl Faults {
    fn start(target: &Target, cases: Vec<Case>) -> Self {
        let start = |case: Case| {
            let (target, case) = (target.clone(), Arc::new(case));
            let running = Arc::clone(&case);
            (case, tokio::spawn(async move { running.run(&target, false).await }))
        };
        Self(cases.into_iter().map(start).collect())
    }

    async fn finish(&mut self, report: &mut Report) {
        for (case, running) in self.0.drain(..) {
            let verdict = running.await;
            report.add(&case, verdict.unwrap_or_else(|error| Verdict::Failed(error.to_string())));
        }
    }
}

/// Shows on a terminal which case runs.
fn progress(number: usize, all: usize, name: &str) {
    if io::stderr().is_terminal() {
        eprint!("\r\x1b[K");
        if number < all {
            eprint!("{number}/{all} {name}");
        }
        // The report follows in any case.
        let _ = io::stderr().flush();
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::tools::dev::Authority;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn select(more: &[&str]) -> anyhow::Result<Vec<Case>> {
        let needed = "x --to a:1 --authority b:2 --chain c --key d --roots e".split(' ');
        let cli = Cli::try_parse_from(needed.chain(more.iter().copied()))?;
        let authority = Authority::new()?;
        let leaf = authority.intermediate("east")?.leaf("spiffe://east.local/ns/a/sa/b")?;
        let pem = authority.root_pem();
        let material = IdentityMaterial::from_pem(&leaf.chain_pem, &leaf.key_pem, &pem)?;
        let names = Names { echo: "b:2".into(), unknown: "n:1".into() };
        cli.args.select(&Target::new(([127, 0, 0, 1], 1).into(), material, names)?)
    }

    #[test]
    fn cases_are_selected_by_group_and_part_and_none_is_an_error() {
        let all = select(&[]).unwrap();
        let tls = select(&["--group", "tls", "--group", "floods"]).unwrap();
        assert!(tls.iter().all(|case| matches!(case.group, Group::Tls | Group::Floods)));
        assert!(tls.len() > 20 && tls.len() < all.len());
        let one = select(&["--only", "10.5 rapid reset, bad"]).unwrap();
        assert_eq!(one.len(), 1, "{one:?}");
        let none = select(&["--only", "nothing like it"]).unwrap_err().to_string();
        assert!(none.contains("omit --only"), "{none}");
    }
}
