//! A cgroup for a gateway, which limits its memory or its CPU time.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Cgroup with a limit. Removed on drop, once no process is in it.
pub struct Cgroup {
    pub path: PathBuf,
    limit: &'static str,
}

/// Mount points of cgroups of both versions, each with the file of the limit.
type Mounts = [(&'static str, &'static str); 2];
const MEMORY: Mounts =
    [("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")];
const CPU: Mounts = [("/sys/fs/cgroup", "cpu.max"), ("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us")];

impl Cgroup {
    /// Creates a group with a limit of memory in bytes; none if this user cannot create one on this
    /// machine.
    pub fn new(test: &str, limit: f64) -> Option<Self> {
        Self::of(test, &MEMORY, limit)
    }

    /// As [`Cgroup::new`], with a limit of CPU time in microseconds of each tenth of a second.
    pub fn cpu(test: &str, limit: f64) -> Option<Self> {
        Self::of(test, &CPU, limit)
    }

    fn of(test: &str, mounts: &Mounts, limit: f64) -> Option<Self> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("strait-test-{}-{next}", std::process::id());
        let made = mounts.iter().find_map(|&(mount, file)| {
            let group = Self { path: Path::new(mount).join(&name), limit: file };
            std::fs::create_dir(&group.path).ok()?;
            // Only a kernel with the controller of this version creates the file.
            let is_made = group.path.join(file).exists();
            (is_made && group.set(limit)).then_some(group)
        });
        if made.is_none() {
            super::skip(test, "no such cgroup can be made here; run it as root");
        }
        made
    }

    /// Changes the limit. Returns true if the kernel accepted it.
    pub fn set(&self, limit: f64) -> bool {
        std::fs::write(self.path.join(self.limit), format!("{limit:.0}")).is_ok()
    }

    /// Returns the number of OOM kills in it.
    pub fn kills(&self) -> u64 {
        let files = ["memory.events", "memory.oom_control"];
        let texts = files.map(|file| std::fs::read_to_string(self.path.join(file)));
        let mut lines = texts.iter().flatten().flat_map(|text| text.lines());
        let kills = lines.find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok());
        kills.expect("the kernel's count")
    }
}

/// Returns the command that enters a group. A shell drops variables whose names it cannot
/// represent, such as Istio's XDS_HEADER_x-tenant.
pub fn enter(group: &Path) -> Vec<String> {
    let script = r#"echo $$ > "$0/cgroup.procs" && exec "$@""#;
    let group = group.to_str().expect("UTF-8");
    ["sh", "-c", script, group].map(str::to_owned).to_vec()
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The kernel needs a moment to remove a killed process.
        super::run(async {
            for _ in 0..100 {
                if std::fs::remove_dir(&self.path).is_ok() {
                    return;
                }
                // deadline: a group can only be removed again and again.
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        });
    }
}
