//! Text formatting for terminals.

use std::fmt::Write as _;

/// Returns the lines of a table with a header. Each column is as wide as its widest cell. Lines
/// may end with spaces, which the caller trims.
pub fn lines<const N: usize>(
    indent: &str,
    header: [&str; N],
    rows: Vec<[String; N]>,
) -> impl Iterator<Item = String> {
    let rows = rows
        .into_iter()
        .map(|row| row.map(|cell| escape_control(&cell)));
    let header = header.map(ToOwned::to_owned);
    let rows: Vec<_> = std::iter::once(header).chain(rows).collect();
    let widths: [usize; N] = std::array::from_fn(|column| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.max().unwrap_or(0)
    });
    let indent = indent.to_owned();
    rows.into_iter().map(move |row| {
        let mut line = indent.clone();
        for (cell, width) in row.iter().zip(widths) {
            // Writing to a string cannot fail.
            let _ = write!(line, "{cell:width$}  ");
        }
        line
    })
}

/// Escapes control characters, which a terminal would interpret, including line ends.
pub fn escape_control(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        match char.is_control() {
            true => out.extend(char.escape_default()),
            false => out.push(char),
        }
    }
    out
}
