//! `-c` with a directory: its files are one configuration, and findings name the file of each line.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use tempfile::TempDir;

use crate::check::{GOOD, GOOD_MESH};
use crate::support::{CommandOutput, folder_with_certificates, run, run_command, write};

/// Sections of [`GOOD`] from this one on are in the second file.
const SECOND: &str = "exposure:\n";

/// Returns a folder with the files of [`GOOD`] in `conf.d`, beside which certificates and mesh are.
async fn folder() -> TempDir {
    let folder = folder_with_certificates().await;
    let parts = folder.path().join("conf.d");
    std::fs::create_dir(&parts).expect("a folder");
    let (first, second) = GOOD.split_once(SECOND).expect("the second part");
    write(&parts, "10-base.yaml", &beside(first));
    write(&parts, "20-exposure.yml", &format!("{SECOND}{second}"));
    write(folder.path(), "mesh.yaml", GOOD_MESH);
    folder
}

/// Returns a text with paths from a folder to the files beside it.
fn beside(text: &str) -> String {
    text.replace("certs/", "../certs/").replace("mesh.yaml", "../mesh.yaml")
}

async fn check(folder: &Path) -> CommandOutput {
    run_command(folder, &["check", "-c", "conf.d"]).await
}

/// Fails unless the findings are these lines, before the number of mistakes.
async fn finds(folder: &Path, wanted: &[&str]) {
    let checked = check(folder).await;
    assert_eq!(checked.code, Some(1), "{checked:?}");
    let found: Vec<_> = checked.stderr.lines().collect();
    let (last, found) = found.split_last().expect("findings");
    assert!(last.starts_with("conf.d: ") && last.contains(" mistake"), "{last}");
    assert_eq!(found, wanted);
}

#[test]
fn the_files_of_a_directory_are_one_configuration_for_every_command() {
    run(async {
        let folder = folder().await;
        let folder = folder.path();
        let wanted = "conf.d: ok: 1 listener, 2 trust domains, 1 exposed service, 1 service and 1 \
                      workload in the mesh\n";
        // Backups of editors, hidden files, folders and other files are no parts.
        for name in ["10-base.yaml~", ".20-exposure.yml.swp", "#a.yaml#", ".a.yaml", "README"] {
            write(&folder.join("conf.d"), name, "no: configuration\n");
        }
        std::fs::create_dir(folder.join("conf.d/old.yaml")).expect("a folder");
        let checked = check(folder).await;
        assert_eq!((&*checked.stdout, &*checked.stderr), (wanted, ""));

        let asked = ["--from", "spiffe://west.local/ns/shop/sa/a"];
        let to = ["--to", "echo.app.svc.cluster.local:80"];
        let explain = [&["explain", "-c", "conf.d"][..], &asked, &to].concat();
        let explained = run_command(folder, &explain).await;
        assert_eq!(explained.code, Some(0), "{explained:?}");
        let place = "exposure.services[0] (conf.d/20-exposure.yml:3)";
        assert!(explained.stdout.contains(place), "{}", explained.stdout);

        let doctor = run_command(folder, &["doctor", "-c", "conf.d"]).await;
        assert!(doctor.stdout.contains("configuration: conf.d is correct"), "{doctor:?}");

        let report = run_command(folder, &["bug-report", "-c", "conf.d", "--to", "-"]).await;
        assert_eq!(report.code, Some(0), "{report:?}");
        for (line, place) in [
            ("  cluster: east ", "# conf.d/10-base.yaml:1"),
            ("  lag: \"5s\" ", "# conf.d/20-exposure.yml:5"),
        ] {
            let found = report.stdout.lines().find(|found| found.starts_with(line));
            assert!(found.is_some_and(|found| found.ends_with(place)), "{line}: {found:?}");
        }

        let pod = ["proxy", "waypoint", "--print-config", "-c", "conf.d"];
        let pod = run_command(folder, &pod).await;
        assert!(pod.stdout.contains("conf.d/20-exposure.yml:5"), "{pod:?}");
    });
}

#[test]
fn what_two_files_set_is_a_mistake_at_both_places_and_hides_no_other() {
    run(async {
        let folder = folder().await;
        let folder = folder.path();
        let more = "drain: {deadline: 1m, lag: 6s}\ngateway: {netwrok: east}\n\
                    listeners: [{name: other, bind: \"127.0.0.1:15009\"}]\n";
        write(&folder.join("conf.d"), "30-more.yaml", more);
        let twice = |line: u64, key: &str, first: &str| {
            format!(
                "conf.d/30-more.yaml:{line}: error: `{key}` is given twice, first at \
                 conf.d/{first}; write it once: only maps are merged"
            )
        };
        let unknown = "conf.d/30-more.yaml:2: error: unknown key `netwrok` in `gateway` (did you \
                       mean `network`?); write one of `cluster`, `network`, `locality`";
        let drain = twice(1, "drain.lag", "20-exposure.yml:5");
        let listeners = twice(3, "listeners", "10-base.yaml:11");
        finds(folder, &[&drain, unknown, &listeners]).await;

        let list = "- gateway\n";
        write(&folder.join("conf.d"), "30-more.yaml", list);
        write(&folder.join("conf.d"), "40-empty.yaml", "# drain: {lag: 1s}\n");
        let wrong = [
            "30-more.yaml:1: error: the file is not a map of keys and values",
            "40-empty.yaml:2: error: the file is empty",
        ];
        let wrong = wrong.map(|what| format!("conf.d/{what}; write keys into it, or remove it"));
        finds(folder, &[&wrong[0], &wrong[1]]).await;

        // Those of a file that cannot be parsed come first.
        write(&folder.join("conf.d"), "40-empty.yaml", "a: b\n  c: d\n");
        let syntax = "conf.d/40-empty.yaml:2: error: not valid YAML: mapping values are not \
                      allowed in this context";
        finds(folder, &[syntax, &wrong[0]]).await;
    });
}

#[test]
fn a_mounted_config_map_is_a_directory_of_links() {
    run(async {
        let folder = folder().await;
        let folder = folder.path();
        let mount = folder.join("conf.d");
        std::fs::create_dir(mount.join("..0")).expect("a folder");
        symlink("..0", mount.join("..data")).expect("a link");
        for file in ["10-base.yaml", "20-exposure.yml"] {
            std::fs::rename(mount.join(file), mount.join("..0").join(file)).expect("a rename");
            symlink(format!("..data/{file}"), mount.join(file)).expect("a link");
        }
        let checked = check(folder).await;
        assert_eq!((checked.code, &*checked.stderr), (Some(0), ""), "{checked:?}");
        std::fs::remove_file(mount.join("..data")).expect("no link");
        let checked = check(folder).await;
        let wanted = "conf.d/10-base.yaml:1: error: the file cannot be read: No such file";
        assert!(checked.stderr.starts_with(wanted), "{checked:?}");
    });
}

#[test]
fn a_directory_without_files_or_that_cannot_be_read_is_a_mistake_with_its_remedy() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        for command in ["check", "run"] {
            let missing = run_command(folder, &[command, "-c", "conf.d"]).await;
            let wanted = "conf.d:1: error: the file cannot be read: No such file";
            assert!(missing.stderr.starts_with(wanted), "{missing:?}");
            assert_eq!(missing.code, Some(1), "{missing:?}");
        }
        let parts = folder.join("conf.d");
        std::fs::create_dir(&parts).expect("a folder");
        write(&parts, "README", "");
        let none = "conf.d: error: the directory has no YAML file; write `*.yaml` files into it";
        finds(folder, &[none]).await;

        write(&parts, "10-drain.yaml", "drain: {lag: 1s}\n");
        let checked = check(folder).await;
        let lacks = "conf.d: error: the directory has no `gateway`; write `gateway: {cluster: \
                     east}`\n";
        assert!(checked.stderr.starts_with(lacks), "{checked:?}");

        std::fs::set_permissions(&parts, PermissionsExt::from_mode(0o000)).expect("a mode");
        let refused = check(folder).await;
        std::fs::set_permissions(&parts, PermissionsExt::from_mode(0o700)).expect("a mode");
        // Root may read it nevertheless.
        if !refused.stderr.starts_with(lacks) {
            let wanted = "conf.d: error: the directory cannot be read: Permission denied";
            assert!(refused.stderr.starts_with(wanted), "{refused:?}");
        }
    });
}
