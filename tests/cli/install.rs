//! `strait --version`, and what packages install: completions of shells and manual pages.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;

use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::support::{done_with, run, run_command};

async fn printed(args: &[&str]) -> String {
    let done = run_command(Path::new("."), args).await;
    assert_eq!((done.code, &*done.stderr), (Some(0), ""), "{args:?}");
    done.stdout
}

/// Returns the names of the commands in the help.
async fn commands() -> BTreeSet<String> {
    let help = printed(&["--help"]).await;
    let (_, list) = help.split_once("\nCommands:\n").expect("a list of commands");
    let (list, _) = list.split_once("\n\nOptions:").expect("options after the commands");
    let names = list.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    let names: BTreeSet<_> = names.filter(|name| !name.is_empty()).map(str::to_owned).collect();
    assert!(names.contains("run") && names.contains("man"), "{names:?}");
    names
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

#[test]
fn completions_have_each_command() {
    run(async {
        let commands = commands().await;
        for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
            let script = printed(&["completions", shell]).await;
            for command in &commands {
                assert!(script.contains(command), "{command} is missing in those of {shell}");
            }
        }
    });
}

#[test]
fn bash_reads_its_completions() {
    run(async {
        let script = printed(&["completions", "bash"]).await;
        let ask = "\nCOMP_WORDS=(strait conf) COMP_CWORD=1\n_strait strait conf strait\n\
                   echo \"${COMPREPLY[@]}\"\n";
        let mut bash = Command::new("bash");
        bash.args(["--norc", "-eu"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = bash.spawn().expect("bash");
        let mut input = child.stdin.take().expect("its input");
        input.write_all((script + ask).as_bytes()).await.expect("a reader");
        drop(input);
        let done = child.wait_with_output().await.expect("its end");
        assert!(done.status.success(), "{done:?}");
        assert_eq!(String::from_utf8_lossy(&done.stdout), "conformance\n");
    });
}

#[test]
fn an_unknown_shell_is_an_error_that_lists_the_known() {
    run(async {
        let done = run_command(Path::new("."), &["completions", "tcsh"]).await;
        assert_eq!(done.code, Some(2), "{done:?}");
        assert!(done.stderr.contains("[possible values: bash, "), "{}", done.stderr);
    });
}

#[test]
fn each_command_has_a_page() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        let pages = folder.path().join("share/man1");
        let path = pages.to_str().expect("UTF-8");
        assert_eq!(printed(&["man", path]).await, "");
        let page = |name: &str| {
            std::fs::read_to_string(pages.join(name)).unwrap_or_else(|error| {
                panic!("{name}: {error}");
            })
        };
        assert_eq!(page("strait.1"), printed(&["man"]).await);
        for command in commands().await.iter().filter(|command| *command != "help") {
            let text = page(&format!("strait-{command}.1"));
            assert!(text.contains(&format!(".TH strait-{command} 1")), "{command}: {text}");
        }
        assert!(page("strait-load-rr.1").contains("\\-\\-authority"), "options are documented");
    });
}

#[test]
fn a_folder_that_cannot_be_made_is_an_error_that_names_it() {
    run(async {
        let done = run_command(Path::new("."), &["man", "/proc/strait"]).await;
        assert_eq!((done.code, &*done.stdout), (Some(1), ""), "{done:?}");
        assert!(done.stderr.starts_with("cannot write the pages to /proc/strait: "), "{done:?}");
    });
}

#[test]
fn a_reader_that_closes_the_pipe_ends_a_command_silently() {
    run(async {
        let link = "link west,domain=a.b east,domain=c.d,gateway=203.0.113.10:15008";
        let link: Vec<_> = link.split(' ').collect();
        for args in [
            &["schema"][..],
            &["schema", "--markdown"],
            &["completions", "bash"],
            &["man"],
            &["proxy", "waypoint", "--help"],
            &link,
        ] {
            let (reader, writer) = std::io::pipe().expect("a pipe");
            drop(reader);
            let done = done_with(Path::new("."), args, |command| {
                command.stdout(writer);
            });
            let done = done.await;
            assert_eq!((done.code, &*done.stderr), (Some(0), ""), "{args:?}");
        }
    });
}
