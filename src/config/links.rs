//! The `links` section: clusters that may use the gateways of other clusters.

use std::collections::HashSet;

use super::define::section;
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
    }
}

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
    use crate::config::tests::with;

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
            (
                "[{from: a}]",
                "11: error: `links[]` has no `to`; write `to: east`",
            ),
            (
                "[{from: a, to: [b]}]",
                "11: error: `links[].to` is a list; write text",
            ),
            (
                "[{from: a, to: b, both: true}]",
                "11: error: unknown key `both` in `links[]`",
            ),
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
            (
                "[{from: west, to: east, exposes: [\"*\", \"*.shop.global\", a.b]}]",
                "",
            ),
            (
                "[{from: a, to: a}]",
                "11: warning: `links[]` links `a` to itself",
            ),
            (
                "[{from: wets, to: east}]",
                "11: warning: `links[]` is from `wets`, which is not a cluster of `trust`",
            ),
        ] {
            let findings = with(&format!("links: {links}"));
            let good = findings.starts_with(want) && findings.is_empty() == want.is_empty();
            assert!(good, "{links}: {findings}");
        }
    }
}
