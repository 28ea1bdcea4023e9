//! Shared support of the tests: the command, its input files, and requests to its ports.

use std::fmt::Debug;
use std::future::Future;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

/// Limit of every wait of a test, so that a hang is a named failure.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Runs a test's future under [`DEADLINE`].
pub fn run<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
        .block_on(async {
            tokio::time::timeout(DEADLINE, test)
                .await
                .expect("within the deadline")
        })
}

/// Polls until the answer is as wanted. Fails with the last answer at the deadline.
pub async fn until<T: Debug>(
    what: &str,
    mut ask: impl AsyncFnMut() -> T,
    wanted: impl Fn(&T) -> bool,
) -> T {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    loop {
        let answer = ask().await;
        if wanted(&answer) {
            return answer;
        }
        assert!(
            tokio::time::Instant::now() < deadline,
            "{what}: last seen {answer:?}"
        );
        // deadline: the state of another process can only be polled.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Returns the command, without the variables of this process's environment that it reads.
pub fn strait() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_strait"));
    command
        .env_remove("STRAIT_CONFIG")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

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
    let id = child.id().expect("a running process");
    let pid = rustix::process::Pid::from_raw(id.try_into().expect("a pid")).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("a signal");
}

/// Sends a GET request to `http://ADDRESS/PATH`. Returns status and body; status 0 if nothing
/// listens.
pub async fn get(url: &str) -> (u16, String) {
    let rest = url.strip_prefix("http://").expect("an http URL");
    let (address, path) = rest.split_once('/').expect("a path");
    let ask = async {
        let mut stream = TcpStream::connect(address).await?;
        let request = format!("GET /{path} HTTP/1.0\r\nhost: localhost\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    let answer = ask.await.unwrap_or_default();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    let status = head.split(' ').nth(1).and_then(|text| text.parse().ok());
    (status.unwrap_or(0), body.to_owned())
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
