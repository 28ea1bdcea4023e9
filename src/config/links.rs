//! The `links` section: clusters that may use the gateways of other clusters.

use std::collections::HashSet;
use std::time::Duration;

use serde_json::json;

use super::define::{Size, TunnelTime, form, section};
use crate::wire::sni::SniPattern;
use crate::yaml::Value;

section! {
    /// A direction of tunnels between clusters.
    pub struct Link at "links[]", derive(Eq, Hash), compare(compare) {
        /// Cluster whose peers open tunnels.
        from: String = required("west");
        /// Cluster whose gateways they may use.
        to: String = required("east");
        /// Services that all these peers may reach, besides those that `exposure` opens to them:
        /// a hostname, `*.NAME` for all below it at any depth, or `*`. One name of a family stands
        /// for all. Services that only their namespace sees (`exportTo: ["."]`) are not among them.
        exposes: Vec<SniPattern> = default(Vec::new());
        /// Budget of the bytes that their tunnels carry through this gateway to gateways of `to`.
        /// An excess raises an alert and may reduce weights, but ends no tunnel. A link to the
        /// cluster of this gateway takes none: write it in the configuration of `from`.
        budget: Option<LinkBudget> = default(None, "no budget");
    }
}

section! {
    /// Budget of bytes, both directions together.
    pub struct LinkBudget at "links[].budget", derive(Copy, Eq, Hash) {
        /// Bytes in each period. The metrics `strait_link_used_bytes` and
        /// `strait_link_budget_bytes` show an excess, and the log has one line for it.
        bytes: usize as Size = required("100GiB");
        /// Period. The first one begins with the start of the process.
        period: Duration as TunnelTime = default(DAY);
        /// Percentage of their weight that gateways of `to` have for new tunnels of these peers,
        /// from an excess until the end of the period. Other endpoints of the tier take the rest.
        /// Without others the tunnels still go to `to`.
        excess_weight: Option<u8> as Option<ExcessWeight> = default(None, "the whole weight");
    }
}

form! {
    /// A part of a weight.
    ExcessWeight => u8, "a whole percentage from 1% to 99%, such as `10%`", "string",
        |value, wanted| value.parsed(wanted, |text| {
            let digits = text.strip_suffix('%')?;
            let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit());
            let percent = digits.parse().ok().filter(|_| is_plain)?;
            (1..=99).contains(&percent).then_some(percent)
        }),
        |percent| json!(format!("{percent}%"));
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn compare(_: Value<'_>, read: &[(Link, Value<'_>)]) {
    let mut seen = HashSet::new();
    for (link, item) in read {
        let Link { from, to, .. } = link;
        if !seen.insert((from, to)) {
            item.error(format!("has `{from}` to `{to}` twice"), "each link once");
        } else if from == to {
            let what = format!("links `{from}` to itself, which is implied");
            item.warning(what, "the list without it");
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::tests::{GOOD, check, with};

    #[test]
    fn a_link_is_a_direction_between_two_clusters_and_given_once() {
        for (links, want) in [
            ("[]", ""),
            ("[{from: west, to: east}, {from: east, to: west}]", ""),
            // Links between others are for their gateways; a list without one to this gateway's
            // cluster shuts out all but its own.
            ("[{from: a, to: b}, {from: west, to: east}]", ""),
            (
                "[{from: west, to: eats}]",
                "11: warning: `links` has no link to `east`, so only peers of `east` may use this \
                 gateway; write `{from: CLUSTER, to: east}` into it",
            ),
            ("{}", "11: error: `links` is a map; write a list"),
            ("[{from: a}]", "11: error: `links[]` has no `to`; write `to: east`"),
            ("[{from: a, to: [b]}]", "11: error: `links[].to` is a list; write text"),
            ("[{from: a, to: b, both: true}]", "11: error: unknown key `both` in `links[]`"),
            (
                "[{from: a, to: b}, {from: a, to: b}]",
                "11: error: `links[]` has `a` to `b` twice; write each link once",
            ),
            (
                "[{from: a, to: b}, {from: a, to: b, exposes: [\"*\"]}]",
                "11: error: `links[]` has `a` to `b` twice; write each link once",
            ),
            (
                "[{from: a, to: b, exposes: [\"a*\"]}]",
                "11: error: `links[].exposes[]` is `a*`, which ",
            ),
            ("[{from: west, to: east, exposes: [\"*\", \"*.shop.global\", a.b]}]", ""),
            ("[{from: a, to: a}]", "11: warning: `links[]` links `a` to itself"),
            (
                "[{from: wets, to: east}]",
                "11: warning: `links[]` is from `wets`, which is not a cluster of `trust`",
            ),
        ] {
            assert_finding(links, want);
        }
    }

    #[test]
    fn a_budget_has_bytes_and_a_period_and_is_for_tunnels_to_others() {
        for (links, want) in [
            ("[{from: west, to: east}, {from: east, to: west, budget: {bytes: 1GiB}}]", ""),
            ("[{from: west, to: east}, {from: a, to: b, budget: {bytes: 9TB, period: 30d}}]", ""),
            (
                "[{from: a, to: b, budget: {period: 1d}}]",
                "11: error: `links[].budget` has no `bytes`; write `bytes: 100GiB`",
            ),
            (
                "[{from: a, to: b, budget: {bytes: 1KiB}}]",
                "11: error: `links[].budget.bytes` is `1KiB`; write a size of at least 1MiB",
            ),
            (
                "[{from: west, to: east}, {from: a, to: b, budget: {bytes: 1GiB, excess_weight: \
                 10%}}]",
                "",
            ),
            (
                "[{from: a, to: b, budget: {bytes: 1GiB, excess_weight: 0%}}]",
                "11: error: `links[].budget.excess_weight` is `0%`; write a whole percentage from \
                 1% to 99%",
            ),
            (
                "[{from: a, to: b, budget: {bytes: 1GiB, period: 0s}}]",
                "11: error: `links[].budget.period` is `0s`; write a duration from 1s to 365d",
            ),
            (
                "[{from: west, to: east, budget: {bytes: 1GiB}}]",
                "11: error: `links[]` has a `budget` of tunnels to `east`, which is this",
            ),
        ] {
            assert_finding(links, want);
        }
    }

    #[test]
    fn a_budget_of_peers_that_count_under_another_name_is_a_warning() {
        let findings = |trust: &str, from: &str| {
            let text = GOOD.replacen("  domains:", &format!("{trust}\n  domains:"), 1);
            let links = "{from: west, to: east}, {from: FROM, to: b, budget: {bytes: 1GiB}}";
            check(&format!("{text}links: [{}]", links.replace("FROM", from))).1
        };
        let skip = "  skip_validation: true";
        let want = "12: warning: `links[]` has a `budget` that counts no tunnel of `a`: no entry \
                    of `trust.domains` is for it, so its peers count as the cluster `unlisted`; \
                    write `{name: a}` into `trust.domains`";
        assert!(findings(skip, "a").ends_with(want), "{}", findings(skip, "a"));
        for (trust, from) in [(skip, "west"), (skip, "east"), ("  waypoints: []", "a")] {
            assert!(!findings(trust, from).contains("unlisted"), "{trust} {from}");
        }
    }

    /// Asserts that the links have one finding that begins so, or none.
    fn assert_finding(links: &str, want: &str) {
        let findings = with(&format!("links: {links}"));
        let good = findings.starts_with(want) && findings.is_empty() == want.is_empty();
        assert!(good, "{links}: {findings}");
    }
}
