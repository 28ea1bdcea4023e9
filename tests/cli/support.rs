//! Shared support of the tests: the command, its input files, and requests to its ports.

use std::path::Path;

use rustix::process::Signal;
use tempfile::TempDir;
use tokio::process::{Child, Command};

#[path = "../it/support/process.rs"]
mod process;

pub use process::{run, strait, until};

/// Outcome of a command.
#[derive(Debug)]
pub struct CommandOutput {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// Runs the command in `folder` to its end.
pub async fn run_command(folder: &Path, args: &[&str]) -> CommandOutput {
    done_with(folder, args, |_| {}).await
}

/// Runs the command in `folder` to its end. `configure` adds settings, such as an environment.
pub async fn done_with(
    folder: &Path,
    args: &[&str],
    configure: impl FnOnce(&mut Command),
) -> CommandOutput {
    let mut command = strait();
    command.args(args).current_dir(folder);
    configure(&mut command);
    let output = command.output().await;
    let output = output.expect("the command's output");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    CommandOutput {
        code: output.status.code(),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

pub fn interrupt(child: &Child) {
    process::send_signal(child, Signal::INT);
}

/// Sends a GET request to `http://ADDRESS/PATH`. Returns status and body; status 0 if nothing
/// listens.
pub async fn get(url: &str) -> (u16, String) {
    let rest = url.strip_prefix("http://").expect("an http URL");
    let (address, path) = rest.split_once('/').expect("a path");
    process::http(address, "GET", &format!("/{path}")).await
}

/// Creates a folder with the output of `strait certs` in `certs/`.
pub async fn folder_with_certificates() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let made = run_command(folder.path(), &["certs", "certs"]).await;
    assert_eq!(made.code, Some(0), "{made:?}");
    folder
}

/// Writes a file into a folder.
pub fn write(folder: &Path, name: &str, text: &str) {
    std::fs::write(folder.join(name), text).expect("a file");
}
