//! `links`: which cluster may use the gateways of which other.

use std::collections::{BTreeSet, HashSet};

use serde::Serialize;

use crate::yaml::Value;

/// A direction in which tunnels may go.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Link {
    /// The cluster whose peers open tunnels.
    pub from: String,
    /// The cluster whose gateways they may use.
    pub to: String,
}

/// Reads the list. `clusters` are those that `trust` names, if these could be read, and
/// `own` is the one that this gateway stands in.
pub(super) fn read(
    value: Value<'_>,
    clusters: Option<&BTreeSet<String>>,
    own: Option<&str>,
) -> Option<Vec<Link>> {
    let read: Vec<_> = value
        .items()
        .map(|item| Some((link(item)?, item)))
        .collect();
    let mut seen = HashSet::new();
    for (link, item) in read.iter().flatten() {
        let Link { from, to } = link;
        if !seen.insert(link) {
            item.error(format!("says `{from}` to `{to}` twice"), "each link once");
        } else if from == to {
            let what = format!("links `{from}` to itself, which it always is");
            item.warning(what, "the list without it");
        } else if own == Some(to) && clusters.is_some_and(|clusters| !clusters.contains(from)) {
            let what = format!("is from `{from}`, and `trust` names no such cluster");
            item.warning(what, "a cluster that it names");
        }
    }
    let mut links = read.iter().flatten().map(|(link, _)| link);
    if let Some(own) = own.filter(|own| !read.is_empty() && links.all(|link| link.to != *own)) {
        let what = format!("has no link to `{own}`, so only peers of `{own}` may use this gateway");
        value.warning(what, format!("`{{from: CLUSTER, to: {own}}}` into it"));
    }
    read.into_iter().map(|read| Some(read?.0)).collect()
}

fn link(value: Value<'_>) -> Option<Link> {
    let mut fields = value.fields("links[]")?;
    let from = fields.need("from", "west").and_then(Value::text);
    let to = fields.need("to", "east").and_then(Value::text);
    fields.finish();
    Some(Link {
        from: from?.to_owned(),
        to: to?.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use crate::config::tests::with;

    #[test]
    fn a_link_is_a_direction_between_two_clusters_and_said_once() {
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
                "11: error: `links[]` says `a` to `b` twice; write each link once",
            ),
            (
                "[{from: a, to: a}]",
                "11: warning: `links[]` links `a` to itself",
            ),
            (
                "[{from: wets, to: east}]",
                "11: warning: `links[]` is from `wets`, and `trust` names no such cluster",
            ),
        ] {
            let findings = with(&format!("links: {links}"));
            let good = findings.starts_with(want) && findings.is_empty() == want.is_empty();
            assert!(good, "{links}: {findings}");
        }
    }
}
