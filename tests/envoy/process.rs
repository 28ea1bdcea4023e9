//! Envoy process with its own folder.

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use strait::tools::dev::Leaf;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::support::{Net, identities, skip, until};

/// Time in which bytes arrive at a stopped Envoy, unless its peer waits for it.
const UNREAD_WAIT: Duration = Duration::from_secs(1);

/// Prints a line that shows although the test passes: cargo captures only the output of macros.
pub fn print_uncaptured(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Returns Envoy's program. Without one, prints that the test is skipped; under `STRAIT_CI=1` that
/// is a failure.
pub fn program(test: &str) -> Option<PathBuf> {
    let installed = || concat!(env!("CARGO_MANIFEST_DIR"), "/.envoy/bin/envoy").into();
    let path = std::env::var_os("STRAIT_ENVOY").unwrap_or_else(installed);
    let path = PathBuf::from(path);
    if path.exists() {
        return Some(path);
    }
    let why = format!("there is no Envoy at {}; type `make envoy`", path.display());
    skip(test, &why);
    None
}

/// Returns the version, such as `1.40.0`.
pub async fn version(program: &PathBuf) -> String {
    let output = Command::new(program).arg("--version").output().await;
    let output = String::from_utf8(output.expect("a version").stdout).expect("text");
    // `…/envoy  version: COMMIT/1.40.0/Clean/RELEASE/BoringSSL`
    let (_, version) = output.split_once("version: ").expect("a version");
    version.split('/').nth(1).expect("a version").to_owned()
}

/// Running Envoy, killed on drop.
pub struct Envoy {
    pub folder: TempDir,
    admin: SocketAddr,
    process: Child,
}

impl Envoy {
    /// Starts Envoy at `host`, as `leaf`, with a configuration in which names between two `@` are
    /// filled in, and waits until it is ready.
    pub async fn start(
        program: &PathBuf,
        net: Net,
        host: u8,
        leaf: &Leaf,
        (template, names): (&str, &[(&str, String)]),
    ) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut yaml = template
            .replace("@HOST@", &net.ip(host).to_string())
            .replace("@FOLDER@", folder.path().to_str().expect("a plain path"));
        for (name, value) in names {
            yaml = yaml.replace(&format!("@{name}@"), value);
        }
        for (name, text) in [
            ("envoy.crt", &leaf.chain_pem),
            ("envoy.key", &leaf.key_pem),
            ("root.crt", &identities().root),
            ("envoy.yaml", &yaml),
        ] {
            std::fs::write(folder.path().join(name), text).expect("a file");
        }
        let log = std::fs::File::create(folder.path().join("log")).expect("a log file");
        let process = Command::new(program)
            .arg("--config-path")
            .arg(folder.path().join("envoy.yaml"))
            .args(["--concurrency", "1", "--disable-hot-restart"])
            .args(["--log-level", "warning"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .expect("Envoy's process");
        let mut envoy = Self { folder, admin: net.address(host, 19000), process };
        envoy.ready().await;
        envoy
    }

    async fn ready(&mut self) {
        let admin = self.admin;
        let log = self.folder.path().join("log");
        let mut exited = || self.process.try_wait().expect("a state");
        let ready = async || {
            if let Some(status) = exited() {
                let log = std::fs::read_to_string(&log).expect("a log");
                panic!("Envoy is gone with {status}:\n{log}");
            }
            ask(admin, "/ready").await.unwrap_or_default()
        };
        until("Envoy's readiness", ready, |answer| answer.contains("LIVE\n")).await;
    }

    /// Returns a counter or gauge of Envoy.
    pub async fn stat(&self, name: &str) -> u64 {
        let path = format!("/stats?filter=^{name}$");
        let answer = ask(self.admin, &path).await.expect("statistics");
        let value = answer.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        let value = value.unwrap_or_else(|| panic!("no statistic {name} in\n{answer}"));
        value.parse().expect("a number")
    }

    /// Kills the process while bytes of a connection to `address` are unread. Only then does its
    /// kernel end the connection by RST alone; otherwise it would send FIN first.
    pub async fn kill_in_the_middle(&mut self, address: SocketAddr) {
        let id = self.process.id().expect("a running Envoy");
        let pid = Pid::from_raw(id.try_into().expect("a pid")).expect("a pid");
        let has_unread = async || {
            kill_process(pid, Signal::STOP).expect("a signal");
            let some = until("unread bytes", async || unread(address), |&bytes| bytes > 0);
            let is_there = timeout(UNREAD_WAIT, some).await.is_ok();
            if !is_there {
                // It was stopped after the window of its peer, and has to give it back.
                kill_process(pid, Signal::CONT).expect("a signal");
            }
            is_there
        };
        until("unread bytes at a stopped Envoy", has_unread, |&is_there| is_there).await;
        self.process.kill().await.expect("a stopped Envoy");
    }
}

/// Returns the number of bytes that wait in the kernel for the listener at `address`, over all
/// connections.
fn unread(address: SocketAddr) -> u64 {
    let SocketAddr::V4(v4) = address else {
        panic!("{address} is not IPv4");
    };
    // Format of proc(5): `sl local_address rem_address st tx_queue:rx_queue …`, all in hex, and
    // addresses in the byte order of this host.
    let ip = u32::from_ne_bytes(v4.ip().octets());
    let local = format!("{ip:08X}:{:04X}", v4.port());
    let table = std::fs::read_to_string("/proc/net/tcp").expect("the table of connections");
    let established = table.lines().filter_map(|line| {
        let words: Vec<_> = line.split_whitespace().take(5).collect();
        let (_, queued) = words.get(4)?.split_once(':')?;
        (words[1] == local && words[3] == "01").then_some(queued)
    });
    established.map(|bytes| u64::from_str_radix(bytes, 16).expect("a number")).sum()
}

/// Sends a request to an admin port. Returns the whole answer, with its chunk headers.
async fn ask(admin: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(admin).await?;
    let request = format!("GET {path} HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}
