//! Metrics of the process, under the names of Prometheus' client libraries. They are read at each
//! scrape. One that cannot be read is left out.

use std::fmt;
use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use super::sets::encode_as;

/// Process, with the time of its start.
#[derive(Debug)]
pub(super) struct Process(pub(super) SystemTime);

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        let cpu = Duration::try_from(cpu).unwrap_or_default().as_secs_f64();
        let help = "CPU time of the process";
        encode_as(&mut encoder, "process_cpu_seconds", help, &ConstCounter::new(cpu))?;
        let mut gauge = |name, help, value: Option<f64>| match value {
            Some(value) => encode_as(&mut encoder, name, help, &ConstGauge::new(value)),
            None => Ok(()),
        };
        let start = self.0.duration_since(UNIX_EPOCH).ok().map(|start| start.as_secs_f64());
        gauge("process_start_time_seconds", "Start of the process (Unix time)", start)?;
        let help = "Resident memory of the process";
        gauge("process_resident_memory_bytes", help, resident_bytes())?;
        gauge(
            "process_open_fds",
            "Open descriptors",
            open_descriptors().map(|count| count as f64),
        )?;
        let limit = getrlimit(Resource::Nofile).current.map(|limit| limit as f64);
        gauge("process_max_fds", "Limit of open descriptors", limit)
    }
}

fn resident_bytes() -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<f64>().ok()? * 1024.0)
}

/// Returns the number of open descriptors. Since Linux 6.2 it is the size of the folder, whose
/// entries take longer to count.
fn open_descriptors() -> Option<u64> {
    const FOLDER: &str = "/proc/self/fd";
    match fs::metadata(FOLDER).ok()?.len() {
        0 => u64::try_from(fs::read_dir(FOLDER).ok()?.count()).ok(),
        count => Some(count),
    }
}
