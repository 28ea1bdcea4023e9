//! What several values of `strait.yaml` must hold together.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use super::{Bind, Binds, Listener};
use crate::yaml::{Report, Value};

/// An address that is served besides the listeners.
#[derive(Debug)]
pub(super) struct Opened<'a> {
    /// The key of the section.
    pub label: &'static str,
    /// The address, given or default.
    pub address: SocketAddr,
    /// Where it is given; none for a default.
    pub given: Option<Value<'a>>,
}

impl Opened<'_> {
    pub(super) fn to_bind(&self) -> Bind {
        Bind { bind: self.address }
    }
}

/// Returns the addresses of a section that may have several.
pub(super) fn to_binds(opened: &[Opened<'_>]) -> Binds {
    Binds {
        bind: opened.iter().map(|opened| opened.address).collect(),
    }
}

/// Reports every entry whose name an earlier one has.
pub(super) fn repeated<'a>(named: impl Iterator<Item = (&'a str, Value<'a>)>) {
    let mut first = HashMap::new();
    for (name, value) in named {
        match first.get(name) {
            Some(line) => {
                let what = format!("has `{name}` twice, first on line {line}");
                value.error(what, "each name once");
            }
            None => {
                first.insert(name, value.line());
            }
        }
    }
}

/// Reports addresses that cannot be bound together, at the later line of the two.
pub(super) fn overlaps<'a>(
    report: &Report,
    listeners: &[(Listener, u64)],
    opened: impl Iterator<Item = &'a Opened<'a>>,
) {
    let listeners = listeners.iter().map(|(listener, line)| {
        (
            format!("listener `{}`", listener.name),
            listener.bind,
            Some(*line),
        )
    });
    let opened = opened.map(|opened| {
        let line = opened.given.map(Value::line);
        (format!("`{}.bind`", opened.label), opened.address, line)
    });
    let all: Vec<_> = listeners.chain(opened).collect();
    for (index, (label, address, line)) in all.iter().enumerate() {
        for (earlier_label, earlier, earlier_line) in &all[..index] {
            if !addresses_overlap(*address, *earlier) {
                continue;
            }
            // Two defaults never overlap, so one of the lines is known.
            let line = (*line).max(*earlier_line).unwrap_or(1);
            let what = format!("{label} ({address}) overlaps {earlier_label} ({earlier})");
            report.error(line, what, "another port or a specific address");
        }
    }
}

/// Whether the kernel would refuse the second of two binds. `[::]` also takes IPv4; port 0 is a
/// port that is free.
fn addresses_overlap(one: SocketAddr, other: SocketAddr) -> bool {
    let (a, b) = (one.ip().to_canonical(), other.ip().to_canonical());
    let covers =
        |wide: IpAddr, ip: IpAddr| wide.is_unspecified() && (wide.is_ipv6() || ip.is_ipv4());
    let same_port = one.port() == other.port() && one.port() != 0;
    same_port && (a == b || covers(a, b) || covers(b, a))
}

/// The admin pages stop the process and show its state, without a password.
pub(super) fn admin_is_local(admin: &Opened<'_>) {
    if let Some(given) = admin.given
        && !admin.address.ip().to_canonical().is_loopback()
    {
        let what = format!(
            "is `{}`, where other hosts could stop this gateway",
            admin.address
        );
        given.error(what, format!("`\"127.0.0.1:{}\"`", admin.address.port()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn wildcards_overlap_what_they_cover_and_port_zero_nothing() {
        let overlap = |a: &str, b: &str| addresses_overlap(a.parse().unwrap(), b.parse().unwrap());
        assert!(overlap("127.0.0.1:1", "127.0.0.1:1"));
        assert!(overlap("0.0.0.0:1", "127.0.0.1:1") && overlap("127.0.0.1:1", "0.0.0.0:1"));
        assert!(overlap("[::]:1", "127.0.0.1:1") && overlap("[::]:1", "0.0.0.0:1"));
        assert!(overlap("[::]:1", "[::1]:1") && overlap("[::ffff:127.0.0.1]:1", "127.0.0.1:1"));
        assert!(!overlap("0.0.0.0:1", "[::1]:1"));
        assert!(!overlap("127.0.0.1:1", "127.0.0.2:1"));
        assert!(!overlap("127.0.0.1:1", "127.0.0.1:2"));
        assert!(!overlap("127.0.0.1:0", "127.0.0.1:0"));
    }

    #[test]
    fn istiod_8_metrics_may_have_several_addresses_and_each_is_checked() {
        let metrics = |bind: &str| {
            let text = format!("{}metrics: {{bind: {bind}}}\n", super::super::tests::GOOD);
            let (config, findings) = Config::parse("strait.yaml".as_ref(), &text);
            let addresses = config.map(|config| config.metrics.bind);
            (addresses.unwrap_or_default().len(), findings.to_string())
        };
        for (bind, count, said) in [
            ("\"[::]:1\"", 1, ""),
            ("[\"[::]:1\", \"127.0.0.1:2\"]", 2, ""),
            ("[]", 0, "`metrics.bind` is empty; write `\"[::]:15020\"`"),
            ("[\"[::]:1\", many]", 0, "`metrics.bind[]` is `many`"),
            (
                "[\"[::]:1\", \"127.0.0.1:1\"]",
                0,
                "overlaps `metrics.bind` ([::]:1)",
            ),
        ] {
            let (addresses, findings) = metrics(bind);
            assert_eq!(addresses, count, "{bind}: {findings}");
            assert!(
                findings.contains(said) && findings.is_empty() == said.is_empty(),
                "{findings}"
            );
        }
    }
}
