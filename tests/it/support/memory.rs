//! Memory, processor time and threads of a process.

use std::time::Duration;

/// Unit of times in `/proc`.
const TICK: Duration = Duration::from_millis(10);

/// Returns the private dirty memory of a process, in bytes; 0 if the process has ended.
pub fn private_dirty(process: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup"));
    let text = text.unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Private_Dirty:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Returns the processor time of all threads of a process so far.
pub fn processor_time(process: u32) -> Duration {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).expect("its times");
    // The name before the state may have blanks. `utime` and `stime` are words 14 and 15.
    let (_, rest) = text.rsplit_once(") ").expect("a state");
    let ticks = rest.split(' ').skip(11).take(2).map(|word| word.parse::<u32>().expect("ticks"));
    TICK * ticks.sum::<u32>()
}

/// Returns the names of the threads of a process.
pub fn thread_names(process: u32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter();
    let tasks = tasks.flatten().flatten();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .collect()
}
