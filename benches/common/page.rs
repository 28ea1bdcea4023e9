//! Tables of README.md and docs/performance.md, which a run replaces.

const BEGIN: &str = "<!-- bench -->";
const END: &str = "<!-- /bench -->";

/// Rows of the README, by the names of `ROWS`. docs/performance.md has all with a limit.
pub const ROWS: [&str; 6] = [
    "idle tunnel",
    "bulk up, 16 streams",
    "bulk down, 16 streams",
    "request of 128 B, 64 streams",
    "full mTLS handshake and a tunnel",
    "SNI, connection, 16 at a time",
];

/// Returns the text between the two marks of a page.
pub fn section(page: &str) -> Result<&str, String> {
    let missing = || format!("a page has no {BEGIN} … {END}");
    let (_, rest) = page.split_once(BEGIN).ok_or_else(missing)?;
    let (section, _) = rest.split_once(END).ok_or_else(missing)?;
    Ok(section.trim())
}

/// Returns the page with another text there.
pub fn replaced(page: &str, text: &str) -> Result<String, String> {
    section(page)?;
    let (before, rest) = page.split_once(BEGIN).unwrap_or_default();
    let (_, after) = rest.split_once(END).unwrap_or_default();
    Ok(format!("{before}{BEGIN}\n{}\n{END}{after}", text.trim_end()))
}
