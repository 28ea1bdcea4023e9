//! Support that all end-to-end tests share: deadlines, polling, processes, and HTTP requests.

use std::fmt::Debug;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio::process::{Child, Command};
use tokio::time::{Instant, timeout};

/// Limit of each test, so that a hang is a named failure. A test that moves gigabytes takes a
/// minute beside a compiler on two cores.
pub const DEADLINE: Duration = Duration::from_secs(300);

/// Limit of a wait for a state of another process.
pub const WAIT_MAX: Duration = Duration::from_secs(30);

/// Limit of a wait without a deadline of its own, such as a read: the time in which nothing that
/// the test's own future awaits happens.
pub const QUIET_MAX: Duration = Duration::from_secs(60);
/// Number of timers in [`QUIET_MAX`]. A machine that stands still delays one of them only.
const QUIET_PARTS: u32 = 4;

/// Runs a test's future under [`DEADLINE`] and [`QUIET_MAX`].
pub fn run<T>(test: impl Future<Output = T>) -> T {
    run_within(DEADLINE, test)
}

/// As [`run`], under another deadline.
pub fn run_within<T>(deadline: Duration, test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
        .block_on(async { timeout(deadline, watched(test)).await })
        .expect("within the deadline")
}

/// Runs a future that is woken at least once in each [`QUIET_MAX`], and fails otherwise.
pub async fn watched<T>(test: impl Future<Output = T>) -> T {
    let mut test = pin!(test);
    let mut timer = tokio::time::interval(QUIET_MAX / QUIET_PARTS);
    // The first one ends at once.
    timer.tick().await;
    let mut quiet = 0;
    poll_fn(|context| {
        let mut is_timer = false;
        while timer.poll_tick(context).is_ready() {
            is_timer = true;
        }
        quiet = if is_timer { quiet + 1 } else { 0 };
        assert!(quiet < QUIET_PARTS, "the test waits for something that does not happen");
        test.as_mut().poll(context)
    })
    .await
}

/// Polls until the answer is as wanted. Fails with the last answer after [`WAIT_MAX`].
pub async fn until<T: Debug>(
    what: &str,
    mut ask: impl AsyncFnMut() -> T,
    wanted: impl Fn(&T) -> bool,
) -> T {
    let deadline = Instant::now() + WAIT_MAX;
    loop {
        let answer = ask().await;
        if wanted(&answer) {
            return answer;
        }
        assert!(Instant::now() < deadline, "{what}: last seen {answer:?}");
        // deadline: the state of another process can only be polled.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Returns the command, without the variables of this process's environment that it reads.
pub fn strait() -> Command {
    strait_in(None)
}

/// Returns the command, in the network namespace of a process.
pub fn strait_in(namespace: Option<u32>) -> Command {
    let program = env!("CARGO_BIN_EXE_strait");
    let mut command = match namespace {
        None => Command::new(program),
        // nsenter is in util-linux, which every Linux distribution has.
        Some(process) => {
            let mut nsenter = Command::new("nsenter");
            nsenter.args([&format!("--net=/proc/{process}/ns/net"), program]);
            nsenter
        }
    };
    command
        .env_remove("STRAIT_CONFIG")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// Sends a signal to a running process.
pub fn send_signal(process: &Child, signal: Signal) {
    let id = process.id().expect("a running process");
    let pid = Pid::from_raw(id.try_into().expect("a pid")).expect("a pid");
    kill_process(pid, signal).expect("a signal");
}

/// Sends one HTTP request. Returns the status, 0 if nothing listens, and the body.
pub async fn http(address: impl ToSocketAddrs, method: &str, path: &str) -> (u16, String) {
    let ask = async {
        let mut stream = TcpStream::connect(address).await?;
        let request = format!("{method} {path} HTTP/1.0\r\nhost: localhost\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    let answer = timeout(WAIT_MAX, ask).await.expect("an answer in time");
    let answer = answer.unwrap_or_default();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    let status = head.split(' ').nth(1).and_then(|text| text.parse().ok());
    (status.unwrap_or(0), body.to_owned())
}
