//! File of the orders of `strait drain --persist`.
//!
//! The first line has the version. Each other line is an order: its time, kind and name.

#[cfg(test)]
mod tests;

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;
use std::time::Duration;

use parking_lot::Mutex;
use tracing::warn;

use crate::admin::{DRAIN_FILE_UNSET, DrainStorage};
use crate::replace_file::{replace_file, suffixed};
use crate::snapshot::builder::Change;
use crate::snapshot::traffic::{Drained, Drains, Override};
use crate::wire::DrainTarget;

use super::state::App;

/// Suffix of the copy of a file that cannot be used as a whole.
const UNREADABLE: &str = ".unreadable";
/// First line of the file.
const VERSION: &str = "strait drains 1";
/// Limit of the file in bytes: 64 orders with names of 2 KiB need 132 KiB.
const BYTES_MAX: u64 = 256 << 10;

/// Limit of the wait for another order that is being stored. A volume may stall for any time.
const STORE_WAIT: Duration = Duration::from_secs(10);

/// Applies the orders of the file. What cannot be used is a problem on the status page.
pub(super) fn restore(app: &App) {
    let reader = app.data_path.reader.clone();
    app.data_path.metrics.drains.set(move || {
        let drains = &reader.snapshot().balancing.evacuated;
        drains.iter().map(|(target, drained)| (target.clone(), drained.since)).collect()
    });
    let config = app.config.load();
    let Some(path) = &config.drain.file else {
        return;
    };
    let (drains, problem) = read(path);
    for (target, drained) in drains {
        let overrides = Some(Override::Drain(target, drained));
        app.publisher.update(Change { overrides, ..Change::default() });
    }
    if let Some(why) = problem {
        let path = path.display();
        warn!(file = %path, error = why, "cannot restore drains");
        *app.status.drain_problem.lock() = Some(format!(
            "orders of {path} (`drain.file`) are not in force: {why}; repeat `strait drain \
             --persist`, which replaces the file and keeps this one as {path}{UNREADABLE}"
        ));
    }
}

/// Returns the function that stores the drains to keep over restarts.
pub(super) fn storage(app: &App) -> DrainStorage {
    let (app, storing) = (app.clone(), Mutex::new(()));
    std::sync::Arc::new(move || {
        let config = app.config.load();
        let Some(path) = &config.drain.file else {
            return Err(DRAIN_FILE_UNSET.to_owned());
        };
        let storing = storing.try_lock_for(STORE_WAIT);
        let stored = match storing {
            // The last of several orders stores all of them.
            Some(_) => store(path, &app.data_path.reader.snapshot().balancing.evacuated),
            None => Err(ErrorKind::TimedOut.into()),
        };
        let stored = stored
            .map_err(|error| format!("cannot write {} (`drain.file`): {error}", path.display()));
        let problem = |why| format!("{why}; repeat the last order of `strait drain`");
        *app.status.drain_problem.lock() = stored.clone().err().map(problem);
        stored
    })
}

/// Replaces the file. One that cannot be used as a whole is kept beside it.
fn store(path: &Path, drains: &Drains) -> io::Result<()> {
    if read(path).1.is_some() {
        fs::copy(path, suffixed(path, UNREADABLE))?;
    }
    let fill = |mut file: File| file.write_all(format(drains).as_bytes()).map(|()| file);
    replace_file(path, fill).map(drop)
}

fn format(drains: &Drains) -> String {
    let mut text = format!("{VERSION}\n");
    for (target, drained) in drains.iter().filter(|(_, drained)| drained.is_persisted) {
        let since = humantime::format_rfc3339_seconds(drained.since);
        let _ = writeln!(text, "{since} {target}");
    }
    text
}

/// Reads the orders of the file, and why some or all are missing. There are none without a file.
fn read(path: &Path) -> (Drains, Option<String>) {
    let text = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return (Drains::new(), None),
        file => file.and_then(|file| {
            let mut text = String::new();
            file.take(BYTES_MAX + 1).read_to_string(&mut text).map(|_| text)
        }),
    };
    match text {
        Err(error) => (Drains::new(), Some(error.to_string())),
        Ok(text) if text.len() as u64 > BYTES_MAX => {
            (Drains::new(), Some(format!("it has more than {BYTES_MAX} bytes")))
        }
        Ok(text) => parse(&text),
    }
}

fn parse(text: &str) -> (Drains, Option<String>) {
    let mut lines = text.lines();
    if lines.next() != Some(VERSION) {
        return (Drains::new(), Some(format!("its first line is not `{VERSION}`")));
    }
    let order = |line: &str| {
        let (since, target) = line.split_once(' ')?;
        let (kind, name) = target.split_once(' ')?;
        let since = humantime::parse_rfc3339(since).ok()?;
        Some((DrainTarget::parse(kind, name)?, Drained { since, is_persisted: true }))
    };
    let (mut drains, mut wrong) = (Drains::new(), Vec::new());
    for (index, line) in lines.enumerate() {
        match order(line) {
            Some((target, drained)) => _ = drains.insert(target, drained),
            None => wrong.push((index + 2).to_string()),
        }
    }
    let problem = format!("not TIME KIND NAME: line {}", wrong.join(", "));
    (drains, (!wrong.is_empty()).then_some(problem))
}
