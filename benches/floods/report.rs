//! Table as Markdown that is also readable on a terminal.

use std::fmt::Write as _;
use std::time::Duration;

use crate::attacker::End;
use crate::attacks::{AttackKind, STREAMS};
use crate::common::table::{head, line};
use crate::readers::{READERS, Readers, WINDOW};
use crate::row::Row;
use crate::victim::Latency;

/// Columns of a flood's row, in the order of [`row`].
const COLUMNS: [&str; 13] = [
    "flood",
    "connections",
    "frames/s",
    "MB/s",
    "sent",
    "memory grown",
    "CPU",
    "how it ended",
    "p50 at rest → under attack",
    "p99 at rest → under attack",
    "lost",
    "others' CPU",
    "verdict",
];
const COLUMNS_OF_READERS: [&str; 7] = [
    "gateway",
    "a reader and its tunnel, endpoint idle",
    "endpoint always sends",
    "beyond the tunnel",
    "p50 at rest → beside them",
    "p99 at rest → beside them",
    "verdict",
];

/// Returns the heading of a run.
pub fn heading(command: &str, commit: &str, where_pinned: &str) -> String {
    format!(
        "# Floods, at {commit}

Made by `{command}`: {where_pinned}, one worker each, a fresh process for each row.
Attackers have a good certificate, read all that comes, and do not come back once they are ended.
Sent is what the attackers' kernel took, before TLS, and the rate is that over the time until they
were ended. Floods of records (empty, one-byte, KeyUpdate, alerts) count records and bytes with TLS.
Memory is the peak of private dirty pages over what there was before the flood. CPU is the gateway's
over the whole time of a row, the victim's 200 requests a second included; others' CPU is the share
of the machine that neither the gateway nor this load had, which makes latencies noise where it is
high. A request of the victim's is a tunnel: CONNECT, 64 bytes there and back. A flood that is over
in milliseconds leaves the victim at rest for most of the row's time.

The bar: every flood is ended, memory is at most ten times the bytes sent plus 1 MiB a connection,
the victim loses no request and its median at most doubles. Streams that are opened and left may
stay: they are bounded by number.
"
    )
}

/// Returns the head of a gateway's table of floods.
pub fn table(gateway: &str) -> String {
    format!("\n## {gateway}\n\n{}", head(&COLUMNS))
}

/// Returns the row of a flood that was not measured.
pub fn not_measured(name: &str, connections: u32) -> String {
    let mut cells = vec![String::new(); COLUMNS.len()];
    name.clone_into(&mut cells[0]);
    cells[1] = connections.to_string();
    "not measured; FULL=1 does".clone_into(&mut cells[COLUMNS.len() - 1]);
    line(&cells)
}

pub fn row(row: &Row) -> String {
    let seconds = row.lasted().as_secs_f64().max(0.001);
    let mut memory = mib(row.grown);
    if matches!(row.attack.what, AttackKind::Leave) {
        let streams = u64::from(STREAMS * row.connections);
        let _ = write!(memory, " ({:.1} KiB a stream)", kib(row.grown / streams));
    }
    line(&[
        row.attack.name.to_owned(),
        row.connections.to_string(),
        format!("{:.0}", figure(row.frames()) / seconds),
        format!("{:.1}", figure(row.bytes()) / seconds / 1e6),
        mib(row.bytes()),
        memory,
        format!("{:.2} of {:.0} s", row.cpu.as_secs_f64(), row.time.as_secs_f64()),
        ends(row),
        times(row.rest.p50, row.under.p50),
        times(row.rest.p99, row.under.p99),
        lost(row.rest, row.under),
        format!("{:.0} %", 100.0 * row.others),
        verdict(&row.misses()),
    ])
}

/// Returns the head of the table of readers.
pub fn readers_table() -> String {
    let kib = WINDOW / 1024;
    format!(
        "\n## Readers that never read\n\n{READERS} connections with a tunnel each, stream windows \
         of {kib} KiB. The bar: under 300 KiB\nbeyond the tunnel, and the victim as above.\n\n{}",
        head(&COLUMNS_OF_READERS)
    )
}

pub fn readers(gateway: &str, readers: &Readers) -> String {
    let each = |bytes| format!("{:.0} KiB", kib(bytes));
    line(&[
        gateway.to_owned(),
        each(readers.idle),
        each(readers.endless),
        each(readers.beyond()),
        times(readers.rest.p50, readers.under.p50),
        times(readers.rest.p99, readers.under.p99),
        verdict(&readers.misses()),
    ])
}

fn verdict(misses: &[String]) -> String {
    if misses.is_empty() { "ok".to_owned() } else { format!("MISS: {}", misses.join(", ")) }
}

fn lost(rest: Latency, under: Latency) -> String {
    let (lost, all) = (rest.lost + under.lost, rest.requests + under.requests);
    format!("{lost} of {all}")
}

/// Describes the ends of the connections: their kinds and numbers, and the last end of each kind.
fn ends(row: &Row) -> String {
    let mut ends: Vec<(End, usize, Duration)> = Vec::new();
    for outcome in &row.outcomes {
        match ends.iter_mut().find(|(end, ..)| *end == outcome.end) {
            Some((_, count, last)) => {
                *count += 1;
                *last = outcome.lasted.max(*last);
            }
            None => ends.push((outcome.end, 1, outcome.lasted)),
        }
    }
    let received = ends.iter().map(|&(end, count, last)| {
        let times = if count > 1 { format!("{count} × ") } else { String::new() };
        let last = last.as_secs_f64();
        match end {
            End::StillOpen => format!("{times}still open"),
            End::Closed => format!("{times}closed, {last:.3} s"),
            End::GoAway(code) => format!("{times}{:?}, {last:.3} s", h2::Reason::from(code)),
        }
    });
    received.collect::<Vec<_>>().join("; ")
}

fn times(rest: Option<Duration>, under: Option<Duration>) -> String {
    let milliseconds = |time: Option<Duration>| {
        time.map_or_else(
            || "never".to_owned(),
            |time| format!("{:.2}", 1000.0 * time.as_secs_f64()),
        )
    };
    format!("{} → {} ms", milliseconds(rest), milliseconds(under))
}

/// Converts a count for a division: no count comes near 2^53.
#[expect(clippy::cast_precision_loss, reason = "a table shows three digits")]
fn figure(count: u64) -> f64 {
    count as f64
}

fn kib(bytes: u64) -> f64 {
    figure(bytes) / 1024.0
}

fn mib(bytes: u64) -> String {
    let mib = kib(bytes) / 1024.0;
    if mib < 0.1 { format!("{:.1} KiB", kib(bytes)) } else { format!("{mib:.1} MiB") }
}
