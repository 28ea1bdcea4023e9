//! `strait load` as a process: the load, and its endpoints.

use std::net::SocketAddr;
use std::process::Stdio;

use serde_json::Value;
use strait::tools::dev::Leaf;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::support::{CLIENT, ENDPOINT, Identities, identities};

/// A folder with `tls.crt`, `tls.key` and `root.crt`.
fn folder(leaf: &Leaf, root: &str) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in
        [("tls.crt", leaf.chain_pem.as_str()), ("tls.key", &leaf.key_pem), ("root.crt", root)]
    {
        std::fs::write(folder.path().join(name), text).expect("a file");
    }
    folder
}

const FILES: &[&str] = &["--chain=tls.crt", "--key=tls.key", "--roots=root.crt"];

fn strait(folder: &TempDir, namespace: Option<u32>) -> Command {
    let mut command = crate::support::process::strait_in(namespace);
    command.current_dir(folder.path()).arg("load");
    command
}

/// Outcome of a load.
#[derive(Debug)]
pub struct LoadResult {
    pub code: Option<i32>,
    /// Null without a report.
    pub report: Value,
    pub stderr: String,
}

impl LoadResult {
    pub fn number(&self, name: &str) -> u64 {
        let number = self.report[name].as_u64();
        number.unwrap_or_else(|| panic!("no {name} in {self:?}"))
    }

    /// Fails unless everything succeeded.
    pub fn expect_success(self) -> Self {
        assert_eq!((self.code, self.stderr.as_str()), (Some(0), ""), "{self:?}");
        assert_eq!(self.number("failures"), 0, "{self:?}");
        self
    }
}

/// Load, as a client of cluster west.
pub struct Load {
    folder: TempDir,
    to: SocketAddr,
    bare: bool,
    /// Process whose network namespace the load runs in, if not our own.
    pub namespace: Option<u32>,
}

impl Load {
    pub fn new(to: SocketAddr) -> Self {
        Self::of(to, identities())
    }

    /// Uses another mesh's certificates.
    pub fn of(to: SocketAddr, identities: &Identities) -> Self {
        let folder = folder(&identities.leaf(CLIENT), &identities.root);
        Self { folder, to, bare: false, namespace: None }
    }

    /// Uses bare connections through a TLS listener.
    pub fn bare(to: SocketAddr) -> Self {
        Self { bare: true, ..Self::new(to) }
    }

    /// Runs `strait load` to its end, with these arguments, separated by blanks.
    pub async fn run(&self, authority: &str, args: &str) -> LoadResult {
        ended(self.start(authority, args)).await
    }

    /// Starts such a run.
    pub fn start(&self, authority: &str, args: &str) -> Child {
        let to = self.to.to_string();
        let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
        let mut command = strait(&self.folder, self.namespace);
        command.args(args.split_whitespace());
        command.args(["--json", "--to", &to]);
        if self.bare {
            command.args(["--sni", host])
        } else {
            command.args(["--authority", authority]).args(FILES)
        };
        command.spawn().expect("the load's process")
    }
}

/// Waits for a load's end.
pub async fn ended(load: Child) -> LoadResult {
    let output = load.wait_with_output().await.expect("its output");
    LoadResult {
        code: output.status.code(),
        report: serde_json::from_slice(&output.stdout).unwrap_or_default(),
        stderr: String::from_utf8(output.stderr).expect("text"),
    }
}

/// Running endpoint, killed on drop.
pub struct Serve {
    process: Child,
    _folder: TempDir,
}

impl Serve {
    /// Starts `strait load serve` with plain TCP, and waits until it listens.
    pub async fn plain(at: SocketAddr, mode: &str) -> Self {
        Self::start(at, &["--mode", mode]).await
    }

    /// Starts it behind TLS passthrough.
    pub async fn after_hello(at: SocketAddr, mode: &str) -> Self {
        Self::start(at, &["--mode", mode, "--after-hello"]).await
    }

    /// Starts it with HBONE, as the endpoint of cluster east.
    pub async fn hbone(at: SocketAddr, mode: &str) -> Self {
        let mut args = vec!["--mode", mode, "--hbone"];
        args.extend(FILES);
        Self::start(at, &args).await
    }

    async fn start(at: SocketAddr, args: &[&str]) -> Self {
        let folder = folder(&identities().leaf(ENDPOINT), &identities().root);
        let mut process = strait(&folder, None)
            .args(["serve", "--bind", &at.to_string()])
            .args(args)
            .stderr(Stdio::inherit())
            .spawn()
            .expect("the endpoint's process");
        let stdout = process.stdout.take().expect("its output");
        let line = BufReader::new(stdout).lines().next_line().await;
        let line = line.expect("its output").expect("a line");
        assert!(line.starts_with(&format!("listening on {at}: ")), "{line}");
        Self { process, _folder: folder }
    }

    /// Kills it, and waits until its address is free again.
    pub async fn kill(mut self) {
        self.process.kill().await.expect("a running endpoint");
    }
}
