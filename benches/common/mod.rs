//! Shared support of the benches: processes, the machine, tables, and the output of results.

pub mod machine;
pub mod page;
pub mod process;
pub mod table;

use std::io::Write as _;
use std::process::Command;

/// Returns the commit of this checkout, marked if files differ from it.
pub fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git")
            .args(["-c", "safe.directory=*"])
            .args(arguments)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .expect("git");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    let commit = git(&["rev-parse", "--short", "HEAD"]);
    // Results of an earlier run are no difference, and neither are their tables.
    let results = [":!benches/results", ":!README.md", ":!docs/performance.md"];
    let status = [&["status", "--porcelain", "--", "."], &results[..]].concat();
    let changed = git(&status);
    if changed.is_empty() { commit } else { format!("{commit}-dirty") }
}

/// Prints a result on stdout.
pub fn print_uncaptured(text: &str) {
    let mut terminal = std::io::stdout().lock();
    let _ = terminal.write_all(text.as_bytes());
    let _ = terminal.flush();
}
