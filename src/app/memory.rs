//! Limit and use of memory of this process, from cgroups and `/proc`.
//!
//! Both are measured every 100 ms at run time: a limit can change, and the cost of a tunnel is
//! not known otherwise. Admission uses three quarters of the limit. The rest is for handshakes,
//! growing buffers and allocations of the kernel in between.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tracing::warn;

use crate::datapath::DataPath;

/// Assumed limit in bytes if none can be read: the least that a gateway is given.
const DEFAULT_LIMIT: u64 = 128 << 20;
const PERIOD: Duration = Duration::from_millis(100);

/// Memory limit and use, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Memory of the machine, or limit of the memory cgroup of this process with the least left.
    pub limit: u64,
    /// Use of the cgroup without its page cache. Resident memory of the process if no cgroup has
    /// a limit or reports its use.
    pub used: u64,
}

/// Limits that follow from a measurement, in bytes: for buffers, and for further descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MemoryLimits {
    buffers: usize,
    descriptors: usize,
}

impl Memory {
    /// Measures limit and use. `root` is `/`, except in tests.
    pub fn measure(root: &Path) -> Self {
        let machine = read_kib(&root.join("proc/meminfo"), "MemTotal:");
        let cgroups = read(&root.join("proc/self/cgroup")).unwrap_or_default();
        let groups = cgroups.lines().filter_map(|line| Cgroup::parse(root, line));
        let resident = || read_kib(&root.join("proc/self/status"), "VmRSS:").unwrap_or(0);
        let limited = groups.flat_map(|group| group.measure(machine, resident));
        // Of several limits the one with the least left counts: other processes share the limits
        // of parent groups.
        let nearest = limited.min_by_key(|own| own.limit.saturating_sub(own.used));
        nearest
            .unwrap_or_else(|| Self { limit: machine.unwrap_or(DEFAULT_LIMIT), used: resident() })
    }

    /// Returns the default limit of buffered bytes: a quarter of the memory limit. The rest is
    /// for the tunnels themselves, socket buffers, the mesh, and memory that the allocator
    /// retains.
    pub fn buffers(self) -> usize {
        bytes(self.limit / 4)
    }

    /// Computes the limits. `held` is the number of buffered bytes, `configured` the configured
    /// maximum.
    ///
    /// Buffers may grow up to seven eighths of the memory limit, and always to a sixteenth,
    /// because freed memory may stay resident for ten seconds.
    fn shares(self, held: usize, configured: Option<usize>) -> MemoryLimits {
        let other = self.used.saturating_sub(held as u64);
        let growth = (self.limit / 8 * 7).saturating_sub(other);
        let most = configured.unwrap_or_else(|| self.buffers());
        MemoryLimits {
            buffers: bytes(growth.max(self.limit / 16)).min(most),
            descriptors: bytes((self.limit / 4 * 3).saturating_sub(self.used)),
        }
    }
}

/// Measures periodically, and adapts the descriptor pool and the buffer budget. Never returns.
pub(super) async fn watch(data_path: Arc<DataPath>, configured: Option<usize>) {
    let mut was_full = false;
    loop {
        let memory = Memory::measure(Path::new("/"));
        adapt(&data_path, memory, configured);
        let is_full = memory.used >= memory.limit / 4 * 3;
        if is_full && !was_full {
            let Memory { limit, used } = memory;
            warn!(
                used,
                limit,
                "memory is three quarters full: new connections and tunnels are refused; raise \
                 the limit"
            );
        }
        was_full = is_full;
        sleep(PERIOD).await;
    }
}

/// Adapts the descriptor pool and the buffer budget to a measurement.
pub(super) fn adapt(data_path: &DataPath, memory: Memory, configured: Option<usize>) {
    let shares = memory.shares(data_path.budget.held(), configured);
    data_path.admission.pool.set_memory(shares.descriptors);
    data_path.budget.set_limit(shares.buffers);
    data_path.metrics.set_buffer_limit(shares.buffers);
    data_path.metrics.set_memory(memory.limit, memory.used);
}

/// Memory cgroup of version 1 or 2.
struct Cgroup {
    mount: PathBuf,
    own: PathBuf,
    limits: &'static [&'static str],
    used: &'static str,
    cache: [&'static str; 2],
}

impl Cgroup {
    /// Parses a line of `/proc/self/cgroup`, `ID:CONTROLLERS:PATH`. Returns none for other
    /// controllers.
    fn parse(root: &Path, line: &str) -> Option<Self> {
        let mut parts = line.splitn(3, ':');
        let (controllers, path) = (parts.nth(1)?, parts.next()?);
        let mount = match controllers {
            "" => "sys/fs/cgroup",
            _ if controllers.split(',').any(|name| name == "memory") => "sys/fs/cgroup/memory",
            _ => return None,
        };
        let mount = root.join(mount);
        let own = mount.join(path.trim_start_matches('/'));
        Some(match controllers {
            "" => Self {
                mount,
                own,
                // Above `memory.high` the kernel throttles the process almost to a stop.
                limits: &["memory.max", "memory.high"],
                used: "memory.current",
                cache: ["active_file", "inactive_file"],
            },
            _ => Self {
                mount,
                own,
                limits: &["memory.limit_in_bytes"],
                used: "memory.usage_in_bytes",
                cache: ["total_active_file", "total_inactive_file"],
            },
        })
    }

    /// Returns the limits of this group and of its ancestors below the memory of the machine, each
    /// with the use of that group. If a group does not report its use, that of its nearest
    /// descendant counts. The use of groups without a limit is not read, which costs more.
    fn measure(&self, machine: Option<u64>, resident: impl Fn() -> u64) -> Vec<Memory> {
        // In a container, only the mount itself may be visible.
        let groups = self.own.ancestors().take_while(|group| group.starts_with(&self.mount));
        let groups: Vec<&Path> = groups.collect();
        let limited = groups.iter().enumerate().filter_map(|(place, group)| {
            let limits = self.limits.iter().map(|file| group.join(file));
            let limits = limits.filter_map(|file| read(&file)?.trim().parse().ok());
            let limit = limits.min().filter(|&limit| machine.is_none_or(|all| limit < all))?;
            let used = groups.iter().take(place + 1).rev().find_map(|group| self.used(group));
            Some(Memory { limit, used: used.unwrap_or_else(&resident) })
        });
        limited.collect()
    }

    /// Returns the use of a group without the page cache, which the kernel reclaims before it
    /// kills the process.
    fn used(&self, group: &Path) -> Option<u64> {
        let used = read(&group.join(self.used))?.trim().parse::<u64>().ok()?;
        let stat = read(&group.join("memory.stat")).unwrap_or_default();
        let cache = stat.lines().filter_map(|line| {
            let (name, value) = line.split_once(' ')?;
            self.cache.contains(&name).then(|| value.parse::<u64>().ok())?
        });
        Some(used.saturating_sub(cache.sum()))
    }
}

/// Returns the value of a line `KEY VALUE kB`, in bytes.
fn read_kib(path: &Path, key: &str) -> Option<u64> {
    let text = read(path)?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib.saturating_mul(1024))
}

fn bytes(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Reads a file of `/proc` or of a cgroup. It reports no size, so that without room for it the
/// standard library reads 32 bytes at first.
fn read(path: &Path) -> Option<String> {
    let mut text = String::with_capacity(8 * 1024);
    File::open(path).ok()?.read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: u64 = 8 << 30;

    fn of(files: &[(&str, &str)]) -> u64 {
        measured(files).limit
    }

    fn measured(files: &[(&str, &str)]) -> Memory {
        let root = tempfile::tempdir().expect("a folder");
        let machine = ("proc/meminfo", "MemTotal:        8388608 kB\nMemFree: 1 kB\n");
        let status = ("proc/self/status", "VmPeak: 9 kB\nVmRSS:\t    1024 kB\n");
        for (name, text) in files.iter().chain([&machine, &status]) {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            std::fs::write(path, text).expect("a file");
        }
        Memory::measure(root.path())
    }

    #[test]
    fn the_least_limit_on_the_way_up_counts_in_both_versions_of_cgroups() {
        assert_eq!(of(&[]), MACHINE);
        let v2 = [
            ("proc/self/cgroup", "0::/pods/strait\n"),
            ("sys/fs/cgroup/pods/strait/memory.max", "max\n"),
            ("sys/fs/cgroup/pods/memory.max", "268435456\n"),
        ];
        assert_eq!(of(&v2), 256 << 20);
        let v1 = [
            ("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/a\n"),
            ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "134217728\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/cpu/a/memory.limit_in_bytes", "1\n"),
        ];
        assert_eq!(of(&v1), 128 << 20);
    }

    #[test]
    fn a_container_sees_its_own_group_as_the_root() {
        let container = [
            ("proc/self/cgroup", "0::/kubepods/burstable/pod1/c2\n"),
            ("sys/fs/cgroup/memory.max", "67108864\n"),
        ];
        assert_eq!(of(&container), 64 << 20);
        let unlimited = [("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/memory.max", "max\n")];
        assert_eq!(of(&unlimited), MACHINE);
    }

    #[test]
    fn memory_high_is_a_limit_too() {
        let files = [
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "268435456\n"),
            ("sys/fs/cgroup/memory.high", "134217728\n"),
        ];
        assert_eq!(of(&files), 128 << 20);
    }

    #[test]
    fn usage_is_that_of_the_group_without_its_page_cache() {
        let stat = "anon 1\nfile 50\ninactive_file 20\nactive_file 30\n";
        let v2 = [
            ("proc/self/cgroup", "0::/a\n"),
            ("sys/fs/cgroup/a/memory.max", "134217728\n"),
            ("sys/fs/cgroup/a/memory.current", "1000\n"),
            ("sys/fs/cgroup/a/memory.stat", stat),
        ];
        let want = |used| Memory { limit: 128 << 20, used };
        assert_eq!(measured(&v2), want(950));
        let stat = "inactive_file 1\ntotal_inactive_file 20\ntotal_active_file 30\n";
        let v1 = [
            ("proc/self/cgroup", "4:memory:/seen/by/the/host\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "134217728\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n"),
            ("sys/fs/cgroup/memory/memory.stat", stat),
        ];
        assert_eq!(measured(&v1), want(950));
        let without = measured(&[]);
        assert_eq!((without.limit, without.used), (MACHINE, 1 << 20));
    }

    #[test]
    fn what_is_admitted_and_buffered_follows_from_what_is_used() {
        const MIB: u64 = 1 << 20;
        let memory = |used| Memory { limit: 128 * MIB, used: used * MIB };
        let shares = |used, held: u64, configured: Option<u64>| {
            let shares = memory(used).shares(bytes(held * MIB), configured.map(bytes));
            (shares.buffers as u64 / MIB, shares.descriptors as u64 / MIB)
        };
        assert_eq!(shares(16, 0, None), (32, 80));
        assert_eq!(shares(84, 0, None), (28, 12));
        assert_eq!(shares(90, 40, None), (32, 6), "what is held is used already");
        assert_eq!(shares(125, 0, None), (8, 0));
        assert_eq!(shares(16, 0, Some(4 * MIB)), (4, 80));
    }

    #[test]
    fn a_limit_above_counts_with_what_all_below_it_use() {
        let files = [
            ("proc/self/cgroup", "0::/pod/strait\n"),
            ("sys/fs/cgroup/pod/strait/memory.max", "134217728\n"),
            ("sys/fs/cgroup/pod/strait/memory.current", "1048576\n"),
            ("sys/fs/cgroup/pod/memory.max", "268435456\n"),
            ("sys/fs/cgroup/pod/memory.current", "260046848\n"),
        ];
        let want = Memory { limit: 256 << 20, used: 248 << 20 };
        assert_eq!(measured(&files), want);
    }

    #[test]
    fn this_machine_has_a_limit() {
        let memory = Memory::measure(Path::new("/"));
        assert!(memory.limit > 1 << 20 && memory.used > 1 << 16, "{memory:?}");
    }
}
