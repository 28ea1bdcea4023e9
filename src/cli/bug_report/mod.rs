//! `strait bug-report`: one archive with the state of a gateway and its host, without secrets.

mod redact;

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use http::Method;
use tokio::time::timeout;

use self::redact::{Redactor, is_secret_name};
use super::ask::{Admin, run_admin_command};
use super::doctor;
use super::source::ConfigArgs;
use super::text::{VERSION, print};
use crate::app::control_planes;
use crate::config::{Examined, Identity, Source};
use crate::yaml::Findings;

const EXAMPLES: &str = "\
Examples:
  strait bug-report -c strait.yaml
  strait bug-report -c strait.yaml --to report.tar --log /var/log/strait.log
  sudo -u strait strait bug-report -c /etc/strait/strait.yaml --to /tmp/report.tar
  kubectl exec -n istio-system deploy/eastwest -- /strait bug-report --to - > report.tar";

/// Pages of the running gateway, each with its file.
const PAGES: [(&str, &str); 4] = [
    ("status.json", "/status"),
    ("peers.json", "/peers"),
    ("refusals.json", "/refusals"),
    ("metrics.txt", "/stats/prometheus"),
];

/// Files of the kernel about this process and its host.
const HOST: [&str; 8] = [
    "/proc/version",
    "/proc/self/limits",
    "/proc/meminfo",
    "/proc/loadavg",
    "/proc/self/cgroup",
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory.current",
    "/sys/fs/cgroup/cpu.max",
];

/// Deadline for each page.
const DEADLINE: Duration = Duration::from_secs(20);
/// Limit of the end of the log, and of other files that are read.
const LOG_BYTES_MAX: u64 = 1 << 20;

/// Writes an archive for a bug report: status, peers, refusals and metrics of the running gateway,
/// the configuration, the findings of `strait doctor`, the version, the kernel and its limits, and
/// the end of a log file.
///
/// Private keys, tokens, passwords and the values of headers are removed. Names, addresses and
/// identities stay: read the archive before you publish it. Pages that no gateway answers at the
/// admin port have the cause in their place. If the configuration cannot be used, the default port
/// is asked.
///
/// Exits 0 if the archive was written, 1 if not, 2 if the command line is wrong.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// Archive (tar), a new file; `-` is stdout.
    #[arg(long, value_name = "FILE", default_value = "strait-bug-report.tar")]
    to: PathBuf,
    /// Log file whose last MiB is added.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
}

/// Writes the archive.
pub(super) fn run(args: &Args) -> ExitCode {
    run_admin_command(async {
        let written = match write(args).await {
            Ok(()) => return Ok(ExitCode::SUCCESS),
            Err(error) => error,
        };
        eprintln!("{}: {written:#}; give another file by --to", args.to.display());
        Ok(ExitCode::FAILURE)
    })
}

async fn write(args: &Args) -> anyhow::Result<()> {
    let mut to: Box<dyn Write> = if args.to == Path::new("-") {
        Box::new(std::io::stdout())
    } else {
        // Another user must not read it, nor choose where it is written.
        Box::new(OpenOptions::new().write(true).create_new(true).mode(0o600).open(&args.to)?)
    };
    let source = args.config.source_of_pod();
    let (config, examined) = source.print();
    let redactor = Redactor::new(secrets(&examined))?;
    let mut archive = tar::Builder::new(&mut to);
    for (name, text) in contents(args, &source, config, &examined).await {
        let text = redactor.redact(&text);
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len().try_into()?);
        header.set_mode(0o600);
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        header.set_mtime(since.unwrap_or_default().as_secs());
        archive.append_data(&mut header, format!("strait-bug-report/{name}"), text.as_bytes())?;
    }
    archive.finish()?;
    drop(archive);
    to.flush()?;
    if args.to != Path::new("-") {
        print(format!("{} is written; read it before you publish it\n", args.to.display()))?;
    }
    Ok(())
}

/// Returns the files of the archive. A part that cannot be read has the cause in its place.
async fn contents(
    args: &Args,
    source: &Source,
    config: Result<String, Findings>,
    examined: &Examined,
) -> Vec<(&'static str, String)> {
    let version = format!("strait {}\n", *VERSION);
    let host = HOST.map(|file| format!("# {file}\n{}\n", or_cause(tail(Path::new(file)))));
    let config = config.unwrap_or_else(|_| "# cannot be read, see doctor.json\n".to_owned());
    let report = doctor::examine(source, examined.clone(), false).await;
    let report = serde_json::to_string_pretty(&report).context("no findings");
    let mut files = vec![
        ("version.txt", version),
        ("host.txt", host.concat()),
        ("config.yaml", config),
        ("doctor.json", or_cause(report)),
    ];
    if let Some(log) = &args.log {
        files.push(("log.txt", or_cause(tail(log))));
    }
    // A gateway runs on with its last good state while its file has mistakes.
    let admin = Admin::at(doctor::admin_of(examined));
    for (name, path) in PAGES {
        let asking = async {
            let answer = admin.request(Method::GET, path, &()).await?;
            anyhow::Ok(String::from_utf8_lossy(&answer.read().await?).into_owned())
        };
        let text = timeout(DEADLINE, asking).await.context("no answer in time");
        files.push((name, or_cause(text.and_then(|text| text))));
    }
    files
}

fn or_cause(text: anyhow::Result<String>) -> String {
    text.unwrap_or_else(|error| format!("# not available: {error:#}\n"))
}

/// Reads the end of a file.
fn tail(path: &Path) -> anyhow::Result<String> {
    let mut file = File::open(path)?;
    // Files of the kernel have no length and cannot be positioned.
    let length = fs::metadata(path)?.len();
    if length > LOG_BYTES_MAX {
        file.seek(SeekFrom::End(-i64::try_from(LOG_BYTES_MAX)?))?;
    }
    let mut bytes = Vec::new();
    file.take(LOG_BYTES_MAX).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    // Of a line that is cut, the name of a secret may be missing.
    let whole = text.split_once('\n').filter(|_| length > LOG_BYTES_MAX);
    Ok(whole.map_or(&*text, |(_, whole)| whole).to_owned())
}

/// Returns the secrets that the gateway uses: its private key, tokens, the values of headers, and
/// variables of the environment with such names.
fn secrets(examined: &Examined) -> Vec<String> {
    let environment = std::env::vars_os().filter_map(|(name, value)| {
        is_secret_name(&name.to_string_lossy()).then(|| value.to_string_lossy().into_owned())
    });
    let mut secrets: Vec<_> = environment.collect();
    let mut files = Vec::new();
    if let Some(Identity::Files(identity)) = &examined.identity {
        files.push(&identity.key);
    }
    for plane in control_planes(examined) {
        files.extend(&plane.token);
        secrets.extend(plane.headers.iter().map(|(_, value)| value.clone()));
    }
    secrets.extend(files.into_iter().filter_map(|file| tail(file).ok()));
    secrets
}
