//! A process as the kernel sees it: its memory, its processor time, and where it runs.

use std::fs;
use std::process::Command;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::support::memory;

/// How often memory is looked at.
const SAMPLE: Duration = Duration::from_millis(20);

/// A process that we have started.
#[derive(Clone, Copy, Debug)]
pub struct Process(u32);

impl Process {
    /// This process.
    pub fn own() -> Self {
        Self(std::process::id())
    }

    /// The child that has this text in its command line, which names a folder of its own.
    pub fn child(text: &str) -> Self {
        let own = format!("PPid:\t{}\n", std::process::id());
        let children = fs::read_dir("/proc").expect("a list of processes");
        let mut ids = children.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let is_it = |id: &u32| {
            let read = |name| fs::read_to_string(format!("/proc/{id}/{name}")).unwrap_or_default();
            read("cmdline").contains(text) && read("status").contains(&own)
        };
        Self(ids.find(is_it).expect("a process with this text"))
    }

    /// Binds all its threads, and those that it will have, to one processor.
    pub fn pin(self, cpu: &str) {
        let id = self.0.to_string();
        // taskset is of util-linux, which every Linux distribution has.
        let bound = Command::new("taskset")
            .args(["--all-tasks", "--cpu-list", "--pid", cpu, &id])
            .output()
            .expect("taskset");
        assert!(bound.status.success(), "taskset: {bound:?}");
    }

    /// Memory that it alone has and has written to, in bytes.
    pub fn private_dirty(self) -> u64 {
        memory::private_dirty(self.0)
    }

    /// How many descriptors it has open.
    pub fn descriptors(self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.0)).map_or(0, Iterator::count)
    }

    /// Processor time of all its threads, to the nanosecond.
    pub fn cpu(self) -> Duration {
        let threads = fs::read_dir(format!("/proc/{}/task", self.0)).into_iter();
        let nanoseconds = threads.flatten().filter_map(|thread| {
            let text = fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
            text.split(' ').next()?.parse::<u64>().ok()
        });
        Duration::from_nanos(nanoseconds.sum())
    }

    /// Whether a thread of it is left. While one is, its ports are taken, even if its memory is
    /// free; where none is, there may be the entry that waits for its parent.
    pub fn lives(self) -> bool {
        let folder = format!("/proc/{}", self.0);
        let threads = fs::read_dir(format!("{folder}/task")).map_or(0, Iterator::count);
        let status = fs::read_to_string(format!("{folder}/status")).unwrap_or_default();
        threads > 1 || (threads == 1 && !status.contains("State:\tZ"))
    }
}

/// Looks at a process's memory until it is asked for the peak.
pub struct Peak {
    stop: Sender<()>,
    looking: JoinHandle<u64>,
}

impl Peak {
    pub fn of(process: Process) -> Self {
        let (stop, stopped) = channel();
        let looking = std::thread::spawn(move || look(process, &stopped));
        Self { stop, looking }
    }

    /// The most that there was.
    pub fn bytes(self) -> u64 {
        drop(self.stop);
        self.looking.join().expect("a thread that looks")
    }
}

fn look(process: Process, stopped: &Receiver<()>) -> u64 {
    let mut peak = 0;
    loop {
        peak = process.private_dirty().max(peak);
        if stopped.recv_timeout(SAMPLE) != Err(RecvTimeoutError::Timeout) {
            return process.private_dirty().max(peak);
        }
    }
}
