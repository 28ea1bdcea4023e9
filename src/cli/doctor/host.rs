//! Checks of the limits of this host, and of the MTU of its default route.

use std::fs;
use std::path::Path;
use std::thread::available_parallelism;

use bytesize::ByteSize;
use rustix::process::{Resource, getrlimit};

use super::finding::Finding;
use crate::app::Memory;
use crate::config::Config;

const LIMITS: &str = "limits";
const MTU: &str = "mtu";

/// Least limit of open files that is no warning: 2,000 tunnels of two sockets each.
const FILES_MIN: u64 = 4096;
/// Least MTU of IPv6 (RFC 8200 section 5), and what tunnels in tunnels leave of Ethernet's.
pub(super) const MTU_MIN: u64 = 1280;

/// Compares open files, memory and processors with the configuration.
pub(super) fn limits(config: &Config, root: &Path) -> Vec<Finding> {
    vec![files(), memory(config, root), processors(config)]
}

fn files() -> Finding {
    let Some(files) = getrlimit(Resource::Nofile).maximum else {
        return Finding::ok(LIMITS, "open files have no limit");
    };
    let found = format!("{files} open files are enough for about {} tunnels", files / 2);
    if files < FILES_MIN {
        let remedy = "raise the hard limit, such as by `LimitNOFILE=` or `ulimit -Hn`";
        return Finding::warning(LIMITS, found, remedy);
    }
    Finding::ok(LIMITS, found)
}

fn memory(config: &Config, root: &Path) -> Finding {
    let memory = Memory::measure(root);
    let buffers = config.limits.buffers.unwrap_or_else(|| memory.buffers());
    let buffers = u64::try_from(buffers).unwrap_or(u64::MAX);
    let [limit, used, of_buffers] = [memory.limit, memory.used, buffers].map(ByteSize);
    let found = format!("{limit} of memory, {used} used, {of_buffers} for buffers");
    if buffers > memory.limit / 2 {
        let remedy = "lower `limits.buffers` to a quarter of the memory, or raise its limit";
        return Finding::failure(LIMITS, found, remedy);
    }
    if memory.used >= memory.limit / 4 * 3 {
        return Finding::warning(LIMITS, found, "raise the memory limit");
    }
    Finding::ok(LIMITS, found)
}

fn processors(config: &Config) -> Finding {
    let Ok(processors) = available_parallelism() else {
        return Finding::ok(LIMITS, "the number of processors is unknown");
    };
    let processors = processors.get();
    let workers = if config.workers == 0 { processors } else { config.workers };
    let found = format!("{workers} workers on {processors} processors of this process");
    if workers > processors {
        let remedy = "lower `workers`, or raise the limit of processors";
        return Finding::warning(LIMITS, found, remedy);
    }
    Finding::ok(LIMITS, found)
}

/// Checks the MTU of the interface with the default route.
pub(super) fn mtu(root: &Path) -> Option<Finding> {
    let interface = default_interface(root)?;
    let file = root.join("sys/class/net").join(&interface).join("mtu");
    let mtu: u64 = fs::read_to_string(file).ok()?.trim().parse().ok()?;
    let found = format!("{mtu} on {interface}, the interface of the default route");
    Some(if mtu < MTU_MIN {
        let remedy = format!("raise it to {MTU_MIN} or more, or large packets may be lost");
        Finding::warning(MTU, found, remedy)
    } else {
        Finding::ok(MTU, found)
    })
}

/// Returns the interface of the default route of IPv4, else of IPv6.
fn default_interface(root: &Path) -> Option<String> {
    let read = |file| fs::read_to_string(root.join(file)).unwrap_or_default();
    let (v4, v6) = (read("proc/net/route"), read("proc/net/ipv6_route"));
    let of_v4 = v4.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let (interface, to) = (words.next()?, words.next()?);
        (to == "00000000" && words.nth(5)? == "00000000").then_some(interface)
    });
    let of_v6 = || {
        v6.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            let (to, length) = (words.next()?, words.next()?);
            let is_default = to.bytes().all(|digit| digit == b'0') && length == "00";
            words.next_back().filter(|interface| is_default && *interface != "lo")
        })
    };
    of_v4.or_else(of_v6).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::super::finding::Outcome;
    use super::*;

    #[test]
    fn a_small_mtu_of_the_default_route_is_a_warning() {
        let root = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        };
        assert!(mtu(root.path()).is_none());
        let route = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n\
                     wg0 0000000A 00000000 0001 0 0 0 000000FF 0 0 0\n\
                     eth0 00000000 0100000A 0003 0 0 0 00000000 0 0 0\n";
        write("proc/net/route", route);
        write("sys/class/net/wg0/mtu", "600\n");
        for (text, want) in [("1500\n", Outcome::Ok), ("1200\n", Outcome::Warning)] {
            write("sys/class/net/eth0/mtu", text);
            let found = mtu(root.path()).expect("a finding");
            assert_eq!(found.outcome, want);
            assert!(found.found.contains("on eth0"), "{found:?}");
        }
    }
}
