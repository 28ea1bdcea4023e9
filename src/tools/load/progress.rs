//! Progress line on stderr: rewritten each second on a terminal, appended every ten seconds
//! elsewhere.

use std::io::{IsTerminal, Write};
use std::rc::Rc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval_at};

use super::run::RunState;
use super::units;

const TERMINAL_INTERVAL: Duration = Duration::from_secs(1);
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Escape sequence that returns to the start of the line and clears it.
const CLEAR: &str = "\r\x1b[K";

/// Shows the progress until the time of the run is over.
pub(super) async fn show(run: Rc<RunState>) {
    let watched = std::io::stderr().is_terminal();
    let every = if watched { TERMINAL_INTERVAL } else { LOG_INTERVAL };
    let begun = Instant::now();
    let mut ticks = interval_at(begun + every, every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last = Counts::now(&run);
    loop {
        ticks.tick().await;
        if begun.elapsed() >= run.plan.seconds {
            return;
        }
        let now = Counts::now(&run);
        let line = line(&run, begun.elapsed(), &last, &now);
        if watched {
            eprint!("{CLEAR}{line}");
            // A terminal that is gone does not affect the run.
            let _ = std::io::stderr().flush();
        } else {
            eprintln!("{line}");
        }
        last = now;
    }
}

pub(super) fn clear() {
    if std::io::stderr().is_terminal() {
        eprint!("{CLEAR}");
    }
}

struct Counts {
    at: Instant,
    operations: u64,
    bytes: u64,
}

impl Counts {
    fn now(run: &RunState) -> Self {
        let tally = &run.tally;
        Self {
            at: Instant::now(),
            operations: tally.operations.get(),
            bytes: tally.sent.get() + tally.received.get(),
        }
    }
}

fn line(run: &RunState, since: Duration, last: &Counts, now: &Counts) -> String {
    let seconds = (now.at - last.at).as_secs_f64();
    let rate = |now: u64, last: u64| (now - last) as f64 / seconds;
    let mut line = format!(
        "{}: {:.0} of {:.0} s",
        run.plan.work,
        since.as_secs_f64(),
        run.plan.seconds.as_secs_f64(),
    );
    if run.plan.size.is_some() {
        let rate = units::three_digits(rate(now.operations, last.operations));
        line += &format!(", {rate} operations/s");
    }
    let bytes = units::bytes(rate(now.bytes, last.bytes));
    let failures = run.tally.failures.get();
    line + &format!(", {bytes}/s, {failures} failures")
}
