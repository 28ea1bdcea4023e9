//! `strait proxy`: the command line that Istio gives the containers of its gateways.
//!
//! Newer versions of Istio add arguments, and the gateway must start in spite of them. Unknown
//! arguments are therefore logged and ignored. clap does not support that, so this module parses
//! them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{CommandFactory, ValueEnum};

use super::check;
use super::text::print;
use crate::app;
use crate::config::Source;
use crate::config::pod::{Environment, Flags, OVERLAY, truth};

/// Flags of Istio that take no value.
const SWITCHES: [&str; 2] = ["--log_as_json", "--profiling"];

/// Options of strait. No option of Istio is spelled similarly.
const OWN_OPTIONS: [&str; 3] = ["--print-config", "--config", "--help"];
/// Limit of the edit distance at which an unknown argument is reported as a misspelled option.
const EDIT_DISTANCE_MAX: usize = 2;

const HELP: &str = "\
Options, anywhere after the role:
  -c, --config PATH   a strait.yaml, or a directory of YAML files, merged over the pod's defaults:
                      maps are merged, and other values are replaced
                      [default: /etc/strait/strait.yaml, if it exists] [env: STRAIT_CONFIG]
  --print-config      print the effective configuration as YAML, each value with its origin, then
                      every mistake; exits 1 if there is one
  --log_output_level, --proxyLogLevel, --log_as_json
                      level and format of the log, in Istio's syntax
All other arguments of Istio are accepted, and listed in the log's first line.

Examples:
  strait proxy waypoint --domain istio-system.svc.cluster.local --log_output_level default:info
  strait proxy waypoint --print-config
  kubectl exec -n istio-system deploy/eastwest -- /strait proxy waypoint --print-config";

/// Runs as an Istio gateway: all settings come from the environment and the files that Istio gives
/// its proxies. No configuration is needed.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(super) struct Args {
    /// Role in which Istio starts the container: waypoint, router or ztunnel; it has no effect.
    #[arg(allow_hyphen_values = true, value_parser = role)]
    role: Role,
    /// Istio's arguments, and the options below.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Role {
    Waypoint,
    Router,
    Ztunnel,
}

/// Parses the role. If an option precedes it, the error shows the correct order.
fn role(text: &str) -> Result<Role, String> {
    if text.starts_with('-') {
        return Err(format!("the role comes first: strait proxy waypoint {text}"));
    }
    Role::from_str(text, false)
        .map_err(|_| "unknown role; write waypoint, router or ztunnel (all are equivalent)".into())
}

/// Returns true if the edit distance of the words is at most [`EDIT_DISTANCE_MAX`]. A much longer
/// word exceeds it, and is not compared.
fn is_misspelling_of(word: &str, wanted: &str) -> bool {
    word.len() <= 3 * wanted.len() && strsim::levenshtein(word, wanted) <= EDIT_DISTANCE_MAX
}

/// Parsed arguments.
#[derive(Debug, Default)]
struct Arguments {
    config: Option<PathBuf>,
    flags: Flags,
    print_config: bool,
    help: bool,
    ignored: Vec<String>,
}

/// Runs the gateway, or prints its configuration with `--print-config`.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Arguments { config, flags, print_config: prints, help: helps, ignored } =
        Arguments::parse(&args.arguments)?;
    if helps {
        let mut command = super::Cli::command();
        let proxy = command
            .find_subcommand_mut("proxy")
            .context("cannot print help: the subcommand `proxy` is not defined")?;
        // As clap does with the help of other commands, if the reader has closed the pipe.
        let _ = proxy.print_long_help();
        return Ok(ExitCode::SUCCESS);
    }
    let config = config.or_else(|| std::env::var_os("STRAIT_CONFIG").map(PathBuf::from));
    let environment = Environment::of_process();
    let source = Source::pod(environment, &flags, config.as_deref(), Path::new(OVERLAY));
    if prints {
        return print_config(&source);
    }
    let notice = (!ignored.is_empty()).then(|| format!("ignored arguments: {}", ignored.join(" ")));
    app::run(&source, notice, None)?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the configuration, and its findings to stderr. Elsewhere than in a pod its certificates
/// and tokens are missing, as for `strait check`.
fn print_config(source: &Source) -> anyhow::Result<ExitCode> {
    let (text, examined) = source.print();
    print(text.unwrap_or_else(|_| "# no configuration: the file cannot be read\n".to_owned()))?;
    let line = check::describe(source, &app::check(source, examined), false);
    line.iter().for_each(|line| eprintln!("{line}"));
    Ok(ExitCode::from(u8::from(line.is_none())))
}

impl Arguments {
    fn parse(arguments: &[OsString]) -> anyhow::Result<Self> {
        let mut read = Self::default();
        let mut levels = (None, None);
        let mut left = arguments.iter().peekable();
        while let Some(argument) = left.next() {
            let text = argument.to_string_lossy();
            let (name, mut value) = match text.split_once('=') {
                Some((name, value)) if name.starts_with('-') => (name, Some(value.into())),
                _ => (&*text, None),
            };
            let takes = match name {
                "-h" | "--help" | "--print-config" => false,
                name => name.starts_with('-') && !SWITCHES.contains(&name),
            };
            if takes && value.is_none() {
                value = left.next_if(|next| !next.to_string_lossy().starts_with('-')).cloned();
            }
            let word = || value.as_ref().map(|value| value.to_string_lossy().into_owned());
            match name {
                "-h" | "--help" => read.help = true,
                "--print-config" => read.print_config = true,
                "-c" | "--config" => match value {
                    Some(file) => read.config = Some(file.into()),
                    None => bail!("missing value of {name}; write `{name} FILE`"),
                },
                "--log_as_json" => {
                    read.flags.json = word().is_none_or(|word| truth(&word) != Some(false));
                }
                "--log_output_level" => levels.0 = word().and_then(|word| agent_level(&word)),
                "--proxyLogLevel" => levels.1 = word().and_then(|word| proxy_level(&word)),
                name => match OWN_OPTIONS.iter().find(|own| is_misspelling_of(name, own)) {
                    Some(own) => bail!("unknown option {name}; did you mean {own}?"),
                    None => read.ignored.push(name.to_owned()),
                },
            }
        }
        let (agent, proxy) = levels;
        read.flags.level = proxy
            .map(|level| (level, "--proxyLogLevel"))
            .or_else(|| agent.map(|level| (level, "--log_output_level")));
        Ok(read)
    }
}

/// Returns the level of `--log_output_level` for all scopes, as in `default:info,ads:debug`.
fn agent_level(text: &str) -> Option<String> {
    let levels = text.split(',').map(str::trim);
    let level = levels
        .filter_map(|level| match level.split_once(':') {
            Some(("default" | "all", level)) => Some(level),
            Some(_) => None,
            None => Some(level),
        })
        .next_back()?;
    let level = match level {
        "none" => "off",
        "fatal" => "error",
        level => level,
    };
    Some(level.to_owned())
}

/// Returns the level of `--proxyLogLevel` if it is `debug` or `trace`. The flag sets Envoy's level,
/// by default `warning`, which does not silence Envoy's access log. It would silence ours, so other
/// levels are ignored.
fn proxy_level(text: &str) -> Option<String> {
    matches!(text, "debug" | "trace").then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Arguments {
        let words: Vec<_> = line.split_whitespace().map(OsString::from).collect();
        Arguments::parse(&words).unwrap()
    }

    #[test]
    fn istios_arguments_are_read_or_named() {
        let read = parse(
            "--domain istio-system.svc.cluster.local --serviceCluster eastwest.istio-system \
             --proxyLogLevel warning --proxyComponentLogLevel misc:error \
             --log_output_level default:warn,ads:debug --log_as_json --stsPort=15463 \
             --outlierLogPath /dev/stdout --of-tomorrow",
        );
        assert_eq!(
            read.ignored,
            [
                "--domain",
                "--serviceCluster",
                "--proxyComponentLogLevel",
                "--stsPort",
                "--outlierLogPath",
                "--of-tomorrow"
            ]
        );
        assert_eq!(read.flags.level, Some(("warn".into(), "--log_output_level")));
        assert!(read.flags.json && !read.print_config && read.config.is_none());
    }

    #[test]
    fn our_own_options_stand_anywhere() {
        for line in ["-c a --print-config --x 1", "--x 1 --print-config --config=a"] {
            let read = parse(line);
            assert_eq!(read.config.as_deref(), Some(Path::new("a")), "{line}");
            assert!(read.print_config, "{line}");
            assert_eq!(read.ignored, ["--x"], "{line}");
        }
        let error = Arguments::parse(&["--config".into(), "--domain".into()]).unwrap_err();
        assert_eq!(error.to_string(), "missing value of --config; write `--config FILE`");
    }

    #[test]
    fn levels_mean_what_they_mean_to_istio() {
        let cases = [
            ("--log_output_level=info", Some("info")),
            ("--log_output_level all:debug", Some("debug")),
            ("--log_output_level default:none", Some("off")),
            ("--log_output_level ads:debug", None),
            ("--proxyLogLevel warning", None),
            ("--proxyLogLevel trace --log_output_level default:info", Some("trace")),
            ("--log_output_level", None),
        ];
        for (line, want) in cases {
            let level = parse(line).flags.level;
            assert_eq!(level.map(|(level, _)| level).as_deref(), want, "{line}");
        }
    }
}
