//! Page of refusals as text.

use crate::admin::pages::{RefusalRow, RefusalsPage};
use crate::cli::text::{Text, or_dash};

/// Formats the page.
pub(super) fn page(page: &RefusalsPage, color: bool) -> String {
    let mut text = Text::new(color);
    text.heading("Refusals", "the most frequent first");
    let peer = |row: &RefusalRow| match (&row.first_peer, &row.identity) {
        (Some(first), Some(gateway)) => format!("{first} by {gateway}"),
        (_, Some(identity)) => identity.to_string(),
        (_, None) => row.address.to_string(),
    };
    let requested = |row: &RefusalRow| match (&row.authority, &row.sni) {
        (Some(authority), Some(sni)) => format!("{authority} ({sni})"),
        (authority, sni) => or_dash(authority.as_ref().or(sni.as_ref())),
    };
    text.table(
        &page.refusals,
        &[
            ("COUNT", &|row| row.count.to_string()),
            ("LAST", &|row| humantime::format_rfc3339_seconds(row.last).to_string()),
            ("REASON", &|row| row.reason.clone()),
            ("PEER", &peer),
            ("REQUESTED", &requested),
            ("ERROR", &|row| or_dash(row.error.as_ref())),
        ],
    );
    let commands = page.refusals.iter().filter_map(|row| row.explain.as_deref());
    if commands.clone().next().is_some() {
        text.heading("Commands that explain them", "");
        commands.for_each(|command| text.line(&format!("  {command}")));
    }
    text.finish()
}
