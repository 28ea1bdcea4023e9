//! Output of the demo: text with a progress line, or one JSON object.

use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::time::Instant;

use serde_json::{Value, json};

use super::world::DemoEnvironment;

pub(super) struct Report {
    json: bool,
    steps: Vec<Value>,
    current: Option<(&'static str, Instant)>,
    started: Instant,
}

impl Report {
    pub(super) fn new(json: bool) -> Self {
        Self { json, steps: Vec::new(), current: None, started: Instant::now() }
    }

    pub(super) fn begin(&mut self, name: &'static str, what: &str) {
        self.current = Some((name, Instant::now()));
        if !self.json {
            print(format_args!("{}. {what}", self.steps.len() + 1));
        }
    }

    /// Overwrites the progress line, if stderr is a terminal.
    pub(super) fn progress(&self, done: usize, all: usize) {
        if std::io::stderr().is_terminal() {
            eprint!("\r   {done}/{all} requests ");
            if done == all {
                eprint!("\r                              \r");
            }
            let _ = std::io::stderr().flush();
        }
    }

    /// Records the figures of a step and prints them. The caller judges them afterwards.
    pub(super) fn done(&mut self, figures: Value, text: &str) {
        if let Some((name, begun)) = self.current {
            let millis = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
            self.steps.push(json!({"name": name, "millis": millis, "figures": figures}));
        }
        if !self.json {
            print(format_args!("   {text}"));
        }
    }

    pub(super) fn name_step(&self, error: anyhow::Error) -> anyhow::Error {
        match self.current {
            Some((name, _)) => error.context(format!("step {name} failed")),
            None => error,
        }
    }

    /// Ends the output; `error` is the failure of the demo, if any.
    pub(super) fn end(&self, error: Option<&anyhow::Error>) {
        if self.json {
            let failed = error.and(self.current).map(|(name, _)| name);
            let error = error.map(|error| format!("{error:#}"));
            let all = json!({"ok": error.is_none(), "error": error, "failed_step": failed,
                             "steps": self.steps});
            print(all);
        } else if error.is_none() {
            let seconds = self.started.elapsed().as_secs_f64();
            print(format_args!("all steps passed in {seconds:.1} s"));
        }
        let _ = std::io::stdout().flush();
    }

    /// Prints commands to try with the processes that were left running.
    pub(super) fn print_hints(&self, world: &DemoEnvironment) {
        if self.json {
            return;
        }
        print(format_args!(
            "\nleft running; Ctrl-C ends it. Try:\n  \
             curl -s {metrics} | grep strait_\n  \
             curl -s {dump} | python3 -m json.tool | less\n  \
             curl -s -X POST '{admin}/logging?level=debug'\n  \
             tail -f {log}\n  \
             $EDITOR {folder}/mesh.yaml    (applied within a second)\n  \
             curl -s -X POST {admin}/quitquitquit    (drains the gateway)",
            metrics = world.metrics_url(),
            dump = world.dump_url(),
            admin = world.admin_url(),
            log = world.log_file().display(),
            folder = world.folder().display(),
        ));
    }
}

/// Prints a line. A reader that closes the pipe does not end the demo.
fn print(line: impl Display) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
