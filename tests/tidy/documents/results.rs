//! Age of the results that README.md and docs/performance.md show.

use std::fs;
use std::io::Write;
use std::process::Command;

use super::markdown::top;

/// Rooms that the results measure. Their tests are beside them, and count too.
const MEASURED: [&str; 4] = ["src/datapath", "src/limits", "src/outer", "src/tls"];
/// Limit of commits since the results, after which they describe another gateway.
const COMMITS_MAX: u32 = 50;

fn git(arguments: &[&str]) -> Option<String> {
    let mut git = Command::new("git");
    git.args(["-c", "safe.directory=*"]).args(arguments).current_dir(top());
    let output = git.output().expect("git");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    output.status.success().then(|| text.trim().to_owned())
}

/// Returns the commit under the table of a page: `9 rounds at 0123abc;`.
fn commit_of(page: &str) -> Option<&str> {
    let (_, table) = page.split_once("<!-- bench -->")?;
    let (_, rest) = table.split_once(" rounds at ")?;
    Some(rest.split_once([';', '.', ' '])?.0)
}

#[test]
fn the_results_are_of_the_data_path_that_is_there() {
    let page = fs::read_to_string(top().join("docs/performance.md")).unwrap();
    let commit = commit_of(&page).expect("a table with its commit");
    let readme = fs::read_to_string(top().join("README.md")).unwrap();
    assert_eq!(commit_of(&readme), Some(commit), "README.md and docs/performance.md differ");
    if git(&["rev-parse", "--is-shallow-repository"]).as_deref() != Some("false") {
        // Without the word at its begin, as nobody can mend that in a shallow clone.
        let skipped = format!("\nage of the results SKIPPED: {commit} is only in a whole clone\n");
        return std::io::stdout().write_all(skipped.as_bytes()).unwrap();
    }
    let range = format!("{commit}..HEAD");
    let since = git(&[&["rev-list", "--count", &range, "--"], &MEASURED[..]].concat());
    let since = since.unwrap_or_else(|| panic!("{commit} is no commit of this history"));
    let since: u32 = since.parse().unwrap();
    assert!(
        since <= COMMITS_MAX,
        "{since} commits since {commit} changed what the results measure; type: make bench ROUNDS=9"
    );
}
