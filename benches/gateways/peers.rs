//! HAProxy and nginx, each a process with its own folder.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::envoy::print_uncaptured;
use crate::rows::Kind;
use crate::support::until;

/// Running peer, killed on drop.
pub struct Peer {
    pub folder: TempDir,
    process: Child,
}

/// Returns the program of a peer, or prints a line with the command that installs it.
pub fn program(kind: Kind) -> Option<PathBuf> {
    let needed: &[&str] = match kind {
        Kind::Strait
        | Kind::TwoWorkers
        | Kind::FourWorkers
        | Kind::Before
        | Kind::Envoy
        | Kind::TwoStraits
        | Kind::TwoEnvoys
        | Kind::CopyLoop
        | Kind::Direct => return None,
        Kind::Haproxy | Kind::HaproxySplice => &["/usr/sbin/haproxy"],
        Kind::Nginx => &["/usr/sbin/nginx", "/usr/lib/nginx/modules/ngx_stream_module.so"],
    };
    if let Some(missing) = needed.iter().find(|path| !Path::new(path).exists()) {
        let name = kind.name();
        skip(&format!("{name}: there is no {missing}; type `make peers`"));
        return None;
    }
    needed.first().map(PathBuf::from)
}

/// Prints what is skipped, and why.
pub fn skip(what: &str) {
    print_uncaptured(&format!("SKIPPED {what}"));
    assert!(
        std::env::var_os("STRAIT_CI").is_none_or(|ci| ci != "1"),
        "nothing may be skipped under STRAIT_CI=1"
    );
}

/// Returns the version that the program prints.
pub async fn version(program: &Path) -> String {
    let output = Command::new(program).arg("-v").output().await;
    let output = output.expect("a version");
    // nginx prints it on stderr.
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8(text).expect("text");
    let first = text.lines().next().unwrap_or_default();
    let number = first
        .split([' ', '/'])
        .find(|word| word.starts_with(|first: char| first.is_ascii_digit()) && word.contains('.'));
    number.expect("a version").to_owned()
}

impl Peer {
    /// Starts a program with a configuration, in which only the folder is left to fill in, and
    /// waits until it listens at `address`.
    pub async fn start(
        program: &Path,
        configuration: &str,
        address: SocketAddr,
        descriptors: u32,
    ) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().to_str().expect("a plain path");
        let file = folder.path().join("configuration");
        std::fs::write(&file, configuration.replace("@FOLDER@", path)).expect("a file");
        let log = std::fs::File::create(folder.path().join("log")).expect("a log file");
        // prlimit is in util-linux, which every Linux distribution has.
        let mut command = Command::new("prlimit");
        command.arg(format!("--nofile={descriptors}:{descriptors}"));
        command.arg(program);
        if program.ends_with("haproxy") {
            command.args(["-db", "-f"]).arg(&file)
        } else {
            command.arg("-c").arg(&file)
        };
        let process = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .expect("a peer's process");
        let mut peer = Self { folder, process };
        peer.listens(address).await;
        peer
    }

    async fn listens(&mut self, address: SocketAddr) {
        let log = self.folder.path().join("log");
        let mut exited = || self.process.try_wait().expect("a state");
        let listens = async || {
            if let Some(status) = exited() {
                let log = std::fs::read_to_string(&log).expect("a log");
                panic!("a peer is gone with {status}:\n{log}");
            }
            TcpStream::connect(address).await.is_ok()
        };
        until("a peer's listener", listens, |&listens| listens).await;
    }
}
