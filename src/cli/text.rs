//! Text for a terminal: lines, headings and aligned tables.
//!
//! Names and reasons come from control planes and files. Control characters are escaped, because
//! they could control the terminal.

use std::io::{self, IsTerminal, Write};
use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

use anyhow::Context;

use crate::labels::{escape_control, join, printed};

/// Version and, in a release, the commit that was built. A build without git has no commit.
pub(super) static VERSION: LazyLock<String> = LazyLock::new(|| {
    let version = env!("CARGO_PKG_VERSION");
    match option_env!("STRAIT_COMMIT") {
        None | Some("") => version.to_owned(),
        Some(commit) => format!("{version} ({commit})"),
    }
});

/// Column of a table: its header, and the function that formats the cell of a row.
pub(super) type Column<'a, T> = (&'a str, &'a dyn Fn(&T) -> String);

/// Colour of a ready gateway.
pub(super) const GREEN: &str = "32";
/// Colour of problems.
pub(super) const RED: &str = "31";
/// Weight of headings.
pub(super) const BOLD: &str = "1";

/// Prints the result of a command. A reader that closes the pipe is not an error.
pub(super) fn print(text: impl AsRef<[u8]>) -> anyhow::Result<()> {
    printed(io::stdout().write_all(text.as_ref())).context("cannot print")
}

/// Returns true if colours can be printed, and the user has not refused them.
pub(super) fn is_color_terminal() -> bool {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none()
}

/// Text that is being written.
#[derive(Debug, Default)]
pub(super) struct Text {
    out: String,
    color: bool,
}

impl Text {
    /// Creates an empty text, which is coloured on request.
    pub(super) fn new(color: bool) -> Self {
        let out = String::new();
        Self { out, color }
    }

    /// Returns the text that was written.
    pub(super) fn finish(self) -> String {
        self.out
    }

    /// Writes a line without the spaces at its end.
    pub(super) fn line(&mut self, line: &str) {
        self.raw_line(&escape_control(line));
    }

    /// Writes a line that may contain [`paint`](Self::paint)ed parts.
    pub(super) fn raw_line(&mut self, line: &str) {
        self.out += line.trim_end();
        self.out.push('\n');
    }

    /// Writes an empty line and a heading, with further text after it.
    pub(super) fn heading(&mut self, heading: &str, rest: &str) {
        let heading = self.paint(BOLD, heading);
        self.line("");
        self.raw_line(&format!("{heading}  {}", escape_control(rest)));
    }

    /// Returns the words in a colour, if the text is coloured.
    pub(super) fn paint(&self, color: &str, words: &str) -> String {
        if self.color { format!("\x1b[{color}m{words}\x1b[0m") } else { words.to_owned() }
    }

    /// Writes the number of rows that are not listed, if there are any.
    pub(super) fn more(&mut self, count: usize, see: &str) {
        if count > 0 {
            self.line(&format!("  and {count} more{see}"));
        }
    }

    /// Writes the rows as a table; `none` without rows.
    pub(super) fn table<T>(&mut self, rows: &[T], columns: &[Column<'_, T>]) {
        self.table_up_to(usize::MAX, rows, columns);
    }

    /// Writes at most `max` rows as a table, and the number of the others.
    pub(super) fn table_up_to<T>(&mut self, max: usize, rows: &[T], columns: &[Column<'_, T>]) {
        if rows.is_empty() {
            return self.line("  none");
        }
        let shown = rows.get(..max).unwrap_or(rows);
        let columns = columns.iter().map(|(header, cell)| {
            let cells = shown.iter().map(|row| escape_control(&cell(row)));
            let cells: Vec<_> = std::iter::once((*header).to_owned()).chain(cells).collect();
            let width = cells.iter().map(|cell| cell.chars().count()).max().unwrap_or(0);
            (cells, width)
        });
        let columns: Vec<_> = columns.collect();
        for index in 0..=shown.len() {
            let cells = columns.iter().filter_map(|(cells, width)| {
                let cell = cells.get(index)?;
                Some(format!("  {cell:width$}"))
            });
            self.line(&cells.collect::<String>());
        }
        self.more(rows.len() - shown.len(), ", see `strait status -o json`");
    }
}

/// Returns the text, or `-` if there is none.
pub(super) fn or_dash<T: ToString>(text: Option<T>) -> String {
    text.map_or_else(|| "-".to_owned(), |text| text.to_string())
}

/// Formats a time in the past.
pub(super) fn ago(now: SystemTime, at: SystemTime) -> String {
    match now.duration_since(at).unwrap_or_default().as_secs() {
        0 => "just now".to_owned(),
        seconds => format!("{} ago", span(seconds)),
    }
}

/// Formats a time in the future, or the past.
pub(super) fn until(now: SystemTime, end: SystemTime) -> String {
    match end.duration_since(now) {
        Ok(left) => format!("in {}", span(left.as_secs())),
        Err(_) => ago(now, end),
    }
}

/// Formats the two largest units of a duration.
fn span(seconds: u64) -> String {
    let exact = humantime::format_duration(Duration::from_secs(seconds)).to_string();
    join(exact.split(' ').take(2), " ")
}
