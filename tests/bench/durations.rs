//! Tests of `tests/durations.py`, with a shell script in place of cargo.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

/// Runs the tool over the output of two test binaries. Returns all that it prints.
fn print_durations(tests: &str) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let cargo = folder.path().join("cargo");
    // As cargo, and as the test binary that `Running` names.
    let script = format!(
        "#!/bin/sh
case \"$*\" in
  *--no-run*) exit ;;
  --list*) echo 'a: test'; exit ;;
esac
echo \"     Running tests/it/main.rs ($0)\"
cat <<'end'
{tests}
test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out
end
"
    );
    fs::write(&cargo, script).expect("a file");
    fs::set_permissions(&cargo, Permissions::from_mode(0o755)).expect("a program");
    let path = std::env::var("PATH").expect("a path");
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/durations.py");
    let done = Command::new("python3")
        .arg(tool)
        .env("PATH", format!("{}:{path}", folder.path().display()))
        .output()
        .expect("python3");
    assert!(done.status.success(), "{done:?}");
    String::from_utf8(done.stdout).expect("text")
}

#[test]
fn skipped_and_ignored_tests_are_counted_at_the_end() {
    let printed = print_durations(
        "test a ... ok
test b ... 
SKIPPED it::b: there is no Envoy
ok
test c ... ignored, it needs a cluster",
    );
    let end = "
2 SKIPPED
  it::b: there is no Envoy
  tests/it/main.rs c: ignored
";
    assert!(printed.ends_with(end), "{printed}");
}

#[test]
fn without_skipped_tests_the_durations_are_the_end() {
    let printed = print_durations("test a ... ok");
    assert!(!printed.contains("SKIPPED"), "{printed}");
    assert!(printed.trim_end().ends_with("tests/it/main.rs a"), "{printed}");
}
