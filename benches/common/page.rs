//! Tables of README.md and docs/performance.md, which a run replaces.

fn marks(of: &str) -> (String, String) {
    (format!("<!-- {of} -->"), format!("<!-- /{of} -->"))
}

/// Returns the text between the two marks of a bench, `<!-- of -->` and `<!-- /of -->`.
pub fn section<'a>(page: &'a str, of: &str) -> Result<&'a str, String> {
    let (begin, end) = marks(of);
    let missing = || format!("a page has no {begin} … {end}");
    let (_, rest) = page.split_once(&begin).ok_or_else(missing)?;
    let (section, _) = rest.split_once(&end).ok_or_else(missing)?;
    Ok(section.trim())
}

/// Returns the page with another text there.
pub fn replaced(page: &str, of: &str, text: &str) -> Result<String, String> {
    section(page, of)?;
    let (begin, end) = marks(of);
    let (before, rest) = page.split_once(&begin).unwrap_or_default();
    let (_, after) = rest.split_once(&end).unwrap_or_default();
    Ok(format!("{before}{begin}\n{}\n{end}{after}", text.trim_end()))
}
