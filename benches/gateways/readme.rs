//! Table of the README, which a run replaces.

const BEGIN: &str = "<!-- bench -->";
const END: &str = "<!-- /bench -->";

/// Returns the text between the two marks.
pub fn section(readme: &str) -> Result<&str, String> {
    let missing = || format!("the README has no {BEGIN} … {END}");
    let (_, rest) = readme.split_once(BEGIN).ok_or_else(missing)?;
    let (section, _) = rest.split_once(END).ok_or_else(missing)?;
    Ok(section.trim())
}

/// Returns the README with another text there.
pub fn replaced(readme: &str, text: &str) -> Result<String, String> {
    section(readme)?;
    let (before, rest) = readme.split_once(BEGIN).unwrap_or_default();
    let (_, after) = rest.split_once(END).unwrap_or_default();
    Ok(format!("{before}{BEGIN}\n{}\n{END}{after}", text.trim_end()))
}
