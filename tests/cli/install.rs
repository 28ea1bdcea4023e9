//! `strait --version`.

use std::path::Path;

use crate::support::{run, run_command};

async fn printed(args: &[&str]) -> String {
    let done = run_command(Path::new("."), args).await;
    assert_eq!((done.code, &*done.stderr), (Some(0), ""), "{args:?}");
    done.stdout
}

#[test]
fn the_version_has_the_commit_of_a_release_alone() {
    run(async {
        let version = env!("CARGO_PKG_VERSION");
        let expected = match option_env!("STRAIT_COMMIT") {
            None | Some("") => format!("strait {version}\n"),
            Some(commit) => format!("strait {version} ({commit})\n"),
        };
        assert_eq!(printed(&["--version"]).await, expected);
    });
}
