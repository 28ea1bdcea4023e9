//! System calls of a thread, counted by `perf stat` from tracepoints of the kernel.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// Tracepoints of all system calls.
const EVENTS: &str = "syscalls:sys_enter_*";
const PREFIX: &str = "syscalls:sys_enter_";

/// Running count.
pub struct Counter {
    perf: Child,
}

/// Counts by the name of the system call, largest first.
pub type Counts = Vec<(String, u64)>;

/// Returns the id of the thread of this process with this name.
pub fn thread(name: &str) -> Option<u32> {
    let threads = fs::read_dir("/proc/self/task").ok()?;
    let mut ids = threads.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let named = |id: &u32| {
        let comm = fs::read_to_string(format!("/proc/self/task/{id}/comm"));
        comm.is_ok_and(|comm| comm.trim_end() == name)
    };
    ids.find(named)
}

impl Counter {
    /// Starts to count. Fails without perf, or without the right to use the kernel's tracepoints.
    pub fn start(thread: u32) -> Option<Self> {
        let mut perf = Command::new("perf")
            .args(["stat", "-x", ",", "-e", EVENTS, "-t", &thread.to_string()])
            // perf counts while this command runs, which it starts after the counters.
            .args(["--", "sh", "-c", "echo; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .ok()?;
        let mut line = String::new();
        let stdout = BufReader::new(perf.stdout.as_mut()?).read_line(&mut line);
        if stdout.is_ok_and(|read| read > 0) {
            return Some(Self { perf });
        }
        let _ = perf.wait();
        None
    }

    /// Stops, and returns the counts.
    pub fn stop(self) -> Counts {
        // The wait closes standard input, which ends the command.
        let output = self.perf.wait_with_output().expect("perf's output");
        parse(&String::from_utf8_lossy(&output.stderr))
    }
}

/// Reads lines such as `17,,syscalls:sys_enter_recvfrom,1000,100.00,,`. Calls that did not happen
/// have a text in place of the number.
fn parse(text: &str) -> Counts {
    let count = |line: &str| {
        let mut words = line.split(',');
        let count = words.next()?.parse().ok().filter(|count| *count > 0)?;
        Some((words.nth(1)?.strip_prefix(PREFIX)?.to_owned(), count))
    };
    let mut counts: Counts = text.lines().filter_map(count).collect();
    counts.sort_unstable_by_key(|&(_, count)| std::cmp::Reverse(count));
    counts
}
