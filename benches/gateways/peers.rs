//! HAProxy and nginx, each a process with a folder of its own.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::envoy::say;
use crate::rows::Kind;
use crate::support::until;

/// A running peer. It is killed when it is dropped.
pub struct Peer {
    pub folder: TempDir,
    process: Child,
}

/// The program of a peer, or a line that says that it is missing and what to type.
pub fn program(kind: Kind) -> Option<PathBuf> {
    let needed: &[&str] = match kind {
        Kind::Strait | Kind::Before | Kind::Envoy => return None,
        Kind::Haproxy | Kind::HaproxySplice => &["/usr/sbin/haproxy"],
        Kind::Nginx => &[
            "/usr/sbin/nginx",
            "/usr/lib/nginx/modules/ngx_stream_module.so",
        ],
    };
    if let Some(missing) = needed.iter().find(|path| !Path::new(path).exists()) {
        let name = kind.name();
        say(&format!(
            "SKIPPED {name}: there is no {missing}; type `make peers`"
        ));
        assert!(
            std::env::var_os("STRAIT_CI").is_none_or(|ci| ci != "1"),
            "nothing may be skipped under STRAIT_CI=1"
        );
        return None;
    }
    needed.first().map(PathBuf::from)
}

/// What it calls its own version.
pub async fn version(program: &Path) -> String {
    let output = Command::new(program).arg("-v").output().await;
    let output = output.expect("a version");
    // nginx says it on stderr.
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8(text).expect("text");
    let first = text.lines().next().unwrap_or_default();
    let number = first
        .split([' ', '/'])
        .find(|word| word.starts_with(|first: char| first.is_ascii_digit()) && word.contains('.'));
    number.expect("a version").to_owned()
}

impl Peer {
    /// Starts a program with a configuration, of which the folder alone is left open, and waits
    /// until it listens at `address`.
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
        // prlimit is of util-linux, which every Linux distribution has.
        let mut command = Command::new("prlimit");
        command.arg(format!("--nofile={descriptors}:{descriptors}"));
        command.arg(program);
        match program.ends_with("haproxy") {
            true => command.args(["-db", "-f"]).arg(&file),
            false => command.arg("-c").arg(&file),
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
