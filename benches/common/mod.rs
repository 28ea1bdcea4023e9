//! What the benches share: processes, the machine, tables, and where results go.

pub mod machine;
pub mod process;
pub mod table;

use std::io::Write as _;
use std::process::Command;

/// The commit of this checkout, marked where files differ from it.
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
    // Results of an earlier run make nothing differ, and a table of them is in the README.
    let results = [":!benches/results", ":!README.md"];
    let status = [&["status", "--porcelain", "--", "."], &results[..]].concat();
    let changed = git(&status);
    if changed.is_empty() {
        commit
    } else {
        format!("{commit}-dirty")
    }
}

/// Prints, on stdout: a result.
pub fn say(text: &str) {
    let mut terminal = std::io::stdout().lock();
    let _ = terminal.write_all(text.as_bytes());
    let _ = terminal.flush();
}
