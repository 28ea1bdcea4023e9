//! Process in the kernel's accounting: its memory, processor time, and affinity.

use std::fs;
use std::process::Command;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::support::memory;

/// Sampling interval of memory.
const SAMPLE: Duration = Duration::from_millis(20);

/// Process that this bench has started.
#[derive(Clone, Copy, Debug)]
pub struct Process(u32);

impl Process {
    /// Returns this process.
    pub fn own() -> Self {
        Self(std::process::id())
    }

    /// Returns the child whose command line has this text, which is the path of a unique folder.
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

    /// Binds all its present and future threads to one processor.
    pub fn pin(self, cpu: &str) {
        let id = self.0.to_string();
        // taskset is in util-linux, which every Linux distribution has.
        let bound = Command::new("taskset")
            .args(["--all-tasks", "--cpu-list", "--pid", cpu, &id])
            .output()
            .expect("taskset");
        assert!(bound.status.success(), "taskset: {bound:?}");
    }

    /// Returns its private dirty memory, in bytes.
    pub fn private_dirty(self) -> u64 {
        memory::private_dirty(self.0)
    }

    /// Returns the number of its open descriptors.
    pub fn descriptors(self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.0)).map_or(0, Iterator::count)
    }

    /// Returns the processor time of all its threads, in nanoseconds.
    pub fn cpu(self) -> Duration {
        let threads = fs::read_dir(format!("/proc/{}/task", self.0)).into_iter();
        let nanoseconds = threads.flatten().filter_map(|thread| {
            let text = fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
            text.split(' ').next()?.parse::<u64>().ok()
        });
        Duration::from_nanos(nanoseconds.sum())
    }

    /// Returns true if one of its threads is left. Until then its ports are in use, even if its
    /// memory is free. Afterwards an entry may remain that waits for its parent.
    pub fn lives(self) -> bool {
        let folder = format!("/proc/{}", self.0);
        let threads = fs::read_dir(format!("{folder}/task")).map_or(0, Iterator::count);
        let status = fs::read_to_string(format!("{folder}/status")).unwrap_or_default();
        threads > 1 || (threads == 1 && !status.contains("State:\tZ"))
    }
}

/// Sampler of a process's memory, until the peak is requested.
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

    /// Returns the peak.
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
