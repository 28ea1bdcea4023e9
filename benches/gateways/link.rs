//! Long link with loss in front of the gateways, for loads in a network namespace of their own.

use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::common::process::Process;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/gateways/link.py");
/// Delay of each direction in milliseconds: half of a round trip of 80 ms.
const DELAY_MS: &str = "40";
const LOSS_PERCENT: &str = "1";
/// Rate of each direction, which the script keeps up with on a part of the load's processor.
const MBYTES_PER_SECOND: &str = "10";

/// Running link, which ends on drop.
pub struct Link {
    /// Process whose network namespace is the far side.
    pub namespace: u32,
    pub process: Process,
    _script: Child,
}

impl Link {
    /// Starts the link.
    ///
    /// # Errors
    /// The machine lacks a privilege, `/dev/net/tun` or a program.
    pub async fn start() -> Result<Self, String> {
        let mut script = Command::new("python3")
            .args([SCRIPT, DELAY_MS, LOSS_PERCENT, MBYTES_PER_SECOND])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| format!("python3: {error}"))?;
        let (stdout, stderr) = (script.stdout.take(), script.stderr.take());
        let mut lines = BufReader::new(stdout.expect("a pipe")).lines();
        let first = lines.next_line().await.ok().flatten();
        if let Some(namespace) = first.and_then(|line| line.parse().ok()) {
            return Ok(Self { namespace, process: Process::child(SCRIPT), _script: script });
        }
        let mut error = String::new();
        let read = stderr.expect("a pipe").read_to_string(&mut error).await;
        read.map_err(|error| error.to_string())?;
        let last = error.lines().next_back().unwrap_or_default();
        Err(format!("the link cannot be made: {last}"))
    }
}
