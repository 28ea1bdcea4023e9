//! The machine: its processors, who has which, and what they do.

use std::fs;
use std::time::Duration;

use super::process::Process;

/// Where two processors exist, the gateways have this one, and everything else the other.
pub const CPU_OF_GATEWAYS: &str = "1";
const CPU_OF_LOAD: &str = "0";
/// What `/proc` counts in.
pub const TICK: Duration = Duration::from_millis(10);

/// Binds this process, and with it the load that it makes or starts, where there is another
/// processor for the gateway. Returns how that is told.
pub fn pin_load() -> &'static str {
    if processors() > 1 {
        Process::own().pin(CPU_OF_LOAD);
        "the gateway on CPU 1, all load on CPU 0"
    } else {
        "gateway and load on the same CPU"
    }
}

/// Of the machine, and not those that this process may use.
pub fn processors() -> u32 {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    text.lines()
        .filter(|line| line.starts_with("processor"))
        .map(|_| 1)
        .sum()
}

/// Time that all processors together have been busy, the hypervisor's theft included.
pub fn busy() -> Duration {
    let text = fs::read_to_string("/proc/stat").expect("the processors' times");
    let words = text.lines().next().unwrap_or_default().split_whitespace();
    let ticks: Vec<u64> = words.skip(1).filter_map(|word| word.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal
    let busy: u64 = [0, 1, 2, 5, 6, 7]
        .iter()
        .filter_map(|&at| ticks.get(at))
        .sum();
    TICK * u32::try_from(busy).expect("less than a year")
}
