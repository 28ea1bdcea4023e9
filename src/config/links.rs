//! The `links` section: clusters that may use the gateways of other clusters.

use std::collections::HashSet;
use std::time::Duration;

use serde_json::json;

use super::define::{Size, TunnelTime, form, matching, percent, section};
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
    ExcessWeight => u8, "a whole percentage from 1% to 99%, such as `10%`",
        matching("^0*[1-9][0-9]?%$"),
        |value, wanted| percent(value, wanted, 1..=99),
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
