//! Machine: its processors, their assignment, and their load.

use std::fs;
use std::time::Duration;

use super::process::Process;

/// Processor of the gateways on a machine with two; everything else runs on the other.
pub const CPU_OF_GATEWAYS: &str = "1";
const CPU_OF_LOAD: &str = "0";
/// Unit of times in `/proc`.
pub const TICK: Duration = Duration::from_millis(10);

/// Binds this process, and the load that it generates or starts, to one processor if the gateway
/// can have another one. Returns a description for the report.
pub fn pin_load() -> &'static str {
    if processors() > 1 {
        Process::own().pin(CPU_OF_LOAD);
        "the gateway on CPU 1, all load on CPU 0"
    } else {
        "gateway and load on the same CPU"
    }
}

/// Returns the number of processors of the machine, not only those that this process may use.
pub fn processors() -> u32 {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    text.lines().filter(|line| line.starts_with("processor")).map(|_| 1).sum()
}

/// Returns the busy time of all processors, including time stolen by the hypervisor.
pub fn busy() -> Duration {
    let text = fs::read_to_string("/proc/stat").expect("the processors' times");
    let words = text.lines().next().unwrap_or_default().split_whitespace();
    let ticks: Vec<u64> = words.skip(1).filter_map(|word| word.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal
    let busy: u64 = [0, 1, 2, 5, 6, 7].iter().filter_map(|&at| ticks.get(at)).sum();
    TICK * u32::try_from(busy).expect("less than a year")
}
