//! File of the orders of `strait drain --persist`, and what follows the drains in force.
//!
//! The first line has the version. Each other line is an order: its time, kind and name.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use tracing::warn;

use crate::admin::DrainStorage;
use crate::replace_file::replace_file;
use crate::snapshot::builder::Change;
use crate::snapshot::traffic::{Drained, Drains, Override};
use crate::wire::DrainTarget;

use super::state::App;

/// First line of the file.
const VERSION: &str = "strait drains 1";
/// Limit of the file in bytes: 64 orders with names of 2 KiB need 132 KiB.
const BYTES_MAX: u64 = 256 << 10;

/// Applies the orders of the file. A file that cannot be used is a problem on the status page.
pub(super) fn restore(app: &App) {
    if let Some(path) = &app.config.load().drain.file {
        match read(path) {
            Ok(drains) => {
                for (target, drained) in drains {
                    let overrides = Some(Override::Drain(target, drained));
                    app.publisher.update(Change { overrides, ..Change::default() });
                }
            }
            Err(why) => {
                warn!(file = %path.display(), error = why, "cannot restore drains");
                let path = path.display();
                app.status.set_drain_problem(Some(format!(
                    "nothing is drained by {path} (`drain.file`): {why}; repeat `strait drain \
                     --persist`, which replaces it, or remove it and restart"
                )));
            }
        }
    }
    count(app);
}

/// Makes listeners and metrics follow the drains of the snapshot.
pub(super) fn follow(app: &App) {
    count(app);
    app.listeners.follow_drains();
}

fn count(app: &App) {
    let drains = &app.data_path.reader.snapshot().balancing.evacuated;
    app.data_path.metrics.set_drained(drains.iter().map(|(target, one)| (target, one.since)));
}

/// Returns the function that stores the drains to keep over restarts.
pub(super) fn storage(app: &App) -> DrainStorage {
    let app = app.clone();
    std::sync::Arc::new(move |drains| {
        let config = app.config.load();
        let Some(path) = &config.drain.file else {
            return Err("`drain.file` is not set; set it and restart".to_owned());
        };
        let written = replace_file(path, &path.with_extension("new"), |mut file| {
            file.write_all(format(drains).as_bytes())?;
            Ok(file)
        });
        written
            .map_err(|error| format!("cannot write {} (`drain.file`): {error}", path.display()))?;
        app.status.set_drain_problem(None);
        Ok(())
    })
}

fn format(drains: &Drains) -> String {
    let mut text = format!("{VERSION}\n");
    for (target, drained) in drains.iter().filter(|(_, drained)| drained.is_persisted) {
        let since = humantime::format_rfc3339_seconds(drained.since);
        let _ = writeln!(text, "{since} {target}");
    }
    text
}

fn parse(text: &str) -> Result<Drains, String> {
    let mut lines = text.lines();
    if lines.next() != Some(VERSION) {
        return Err(format!("its first line is not `{VERSION}`"));
    }
    let order = |line: &str| {
        let (since, target) = line.split_once(' ')?;
        let (kind, name) = target.split_once(' ')?;
        let since = humantime::parse_rfc3339(since).ok()?;
        Some((DrainTarget::parse(kind, name)?, Drained { since, is_persisted: true }))
    };
    let orders = lines.enumerate().map(|(index, line)| {
        order(line).ok_or_else(|| format!("line {} is not TIME KIND NAME", index + 2))
    });
    orders.collect()
}

/// Reads the file; there are no orders without one.
fn read(path: &Path) -> Result<Drains, String> {
    let file = match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Drains::new()),
        file => file.map_err(|error| error.to_string())?,
    };
    let mut text = String::new();
    let read = file.take(BYTES_MAX + 1).read_to_string(&mut text);
    read.map_err(|error| error.to_string())?;
    if text.len() as u64 > BYTES_MAX {
        return Err(format!("it has more than {BYTES_MAX} bytes"));
    }
    parse(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_orders_to_keep_are_written_and_each_is_read_back() {
        let since = humantime::parse_rfc3339("2026-01-01T00:00:00Z").unwrap();
        let order = |kind, name, is_persisted| {
            (DrainTarget::parse(kind, name).unwrap(), Drained { since, is_persisted })
        };
        let kept = [
            order("region", "us-east-2/us-east-2a", true),
            order("gateway", "192.0.2.1:15008", true),
            order("listener", "cross network", true),
        ];
        let mut all = Drains::from(kept.clone());
        all.extend([order("cluster", "west", false)]);
        assert_eq!(parse(&format(&all)), Ok(Drains::from(kept)));
    }

    #[test]
    fn a_file_that_cannot_be_used_is_an_error_and_no_file_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drains");
        assert_eq!(read(&path), Ok(Drains::new()));
        for (text, want) in [
            ("", "its first line is not `strait drains 1`"),
            ("strait drains 2\n", "its first line is not `strait drains 1`"),
            ("strait drains 1\nnow region a\n", "line 2 is not TIME KIND NAME"),
            ("strait drains 1\n2026-01-01T00:00:00Z zone a\n", "line 2 is not TIME KIND NAME"),
            (&"x".repeat((256 << 10) + 1), "it has more than 262144 bytes"),
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(read(&path), Err(want.to_owned()));
        }
    }
}
