//! How much memory this process may use, as the kernel sees it.

use std::fs;
use std::path::{Path, PathBuf};

/// What a process may use where no limit can be read. It is the least that a gateway is given.
const UNKNOWN: u64 = 128 << 20;

/// Half of what this process may use: what its tunnels may hold. The other half is for what they
/// are made of, the kernel's socket buffers, and the mesh.
pub(super) fn half() -> usize {
    usize::try_from(limit(Path::new("/")) / 2).unwrap_or(usize::MAX)
}

/// The least of the machine's memory and the limits of the process's memory cgroups, in bytes.
/// `root` is `/` but for tests.
fn limit(root: &Path) -> u64 {
    let machine = read(&root.join("proc/meminfo")).and_then(|text| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("MemTotal:"))?;
        let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
        Some(kib * 1024)
    });
    let cgroups = read(&root.join("proc/self/cgroup")).unwrap_or_default();
    let limits = cgroups.lines().filter_map(|line| of_cgroup(root, line));
    limits.chain(machine).min().unwrap_or(UNKNOWN)
}

/// The least limit of one line of `/proc/self/cgroup`, `ID:CONTROLLERS:PATH`, and of all groups
/// above it. A container may see only the end of its path, at the root: that is looked at as well.
fn of_cgroup(root: &Path, line: &str) -> Option<u64> {
    let mut parts = line.splitn(3, ':');
    let (controllers, path) = (parts.nth(1)?, parts.next()?);
    let (mount, file) = match controllers {
        "" => ("sys/fs/cgroup", "memory.max"),
        _ if controllers.split(',').any(|name| name == "memory") => {
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
        }
        _ => return None,
    };
    let mount = root.join(mount);
    let own: PathBuf = mount.join(path.trim_start_matches('/'));
    let groups = own
        .ancestors()
        .take_while(|group| group.starts_with(&mount));
    groups
        .filter_map(|group| read(&group.join(file))?.trim().parse().ok())
        .min()
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: u64 = 8 << 30;

    fn of(files: &[(&str, &str)]) -> u64 {
        let root = tempfile::tempdir().expect("a folder");
        let machine = (
            "proc/meminfo",
            "MemTotal:        8388608 kB\nMemFree: 1 kB\n",
        );
        for (name, text) in files.iter().chain([&machine]) {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        }
        limit(root.path())
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
            (
                "proc/self/cgroup",
                "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/a\n",
            ),
            (
                "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes",
                "134217728\n",
            ),
            (
                "sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
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
        let unlimited = [
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "max\n"),
        ];
        assert_eq!(of(&unlimited), MACHINE);
    }

    #[test]
    fn this_machine_has_a_limit() {
        assert!(limit(Path::new("/")) > 1 << 20);
    }
}
