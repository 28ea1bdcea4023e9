//! Page of gateways and links as text.

use crate::admin::pages::{LinkRow, LinkTraffic, LoadRow, PeersPage};
use crate::cli::text::{Text, or_dash};
use crate::status::LinkUsage;

use super::text::gateways;

/// Formats the page.
pub(super) fn page(page: &PeersPage, color: bool) -> String {
    let mut text = Text::new(color);
    links(&mut text, &page.links);
    budgets(&mut text, &page.budgets);
    if !page.peers.is_empty() {
        text.heading("Tunnels of peer gateways", "");
        text.table(
            &page.peers,
            &[
                ("IDENTITY", &|row| row.identity.to_string()),
                ("IN", &|row| row.inbound.to_string()),
                ("OUT", &|row| row.outbound.to_string()),
            ],
        );
    }
    gateways(&mut text, &page.gateways, usize::MAX);
    loads(&mut text, &page.loads);
    if page.gateways.is_empty() {
        text.line("");
        text.line("no gateways of other networks are known");
    }
    text.finish()
}

fn links(text: &mut Text, links: &[LinkRow]) {
    text.heading("Links", "");
    let outbound = |row: &LinkRow| match row.traffic {
        LinkTraffic::Outbound { gateways, ready, tunnels } => [gateways, ready, tunnels].map(Some),
        LinkTraffic::Inbound { .. } => [None; 3],
    };
    let inbound = |row: &LinkRow| match row.traffic {
        LinkTraffic::Inbound { accepted, refused } => [accepted, refused],
        LinkTraffic::Outbound { .. } => [None; 2],
    };
    text.table(
        links,
        &[
            ("FROM", &|row| row.from.clone()),
            ("TO", &|row| row.to.clone()),
            ("STATE", &|row| if row.linked { "linked" } else { "not linked" }.to_owned()),
            ("GATEWAYS", &|row| or_dash(outbound(row)[0])),
            ("READY", &|row| or_dash(outbound(row)[1])),
            ("TUNNELS", &|row| or_dash(outbound(row)[2])),
            ("ACCEPTED", &|row| or_dash(inbound(row)[0])),
            ("REFUSED", &|row| or_dash(inbound(row)[1])),
        ],
    );
}

fn budgets(text: &mut Text, budgets: &[LinkUsage]) {
    if budgets.is_empty() {
        return;
    }
    text.heading("Budgets of links, in bytes of the current period", "");
    text.table(
        budgets,
        &[
            ("FROM", &|row| row.from.to_string()),
            ("TO", &|row| row.to.to_string()),
            ("USED", &|row| row.used.to_string()),
            ("BUDGET", &|row| row.budget.to_string()),
            ("WEIGHT", &|row| row.weight.clone()),
        ],
    );
}

fn loads(text: &mut Text, loads: &[LoadRow]) {
    if loads.is_empty() {
        return;
    }
    text.heading("Services behind gateways, used in the last minute", "");
    text.table(
        loads,
        &[
            ("GATEWAY", &|row| row.gateway.to_string()),
            ("SERVICE", &|row| row.service.clone()),
            ("COUNTED", &|row| row.counted.to_string()),
            ("FREE", &|row| or_dash(row.free.map(|free| format!("{free:?}")))),
            ("TIME TO 200", &|row| row.dial.clone()),
            ("WEIGHT X", &|row| format!("{:?}", row.factor)),
        ],
    );
}
