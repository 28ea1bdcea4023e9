//! `strait bug-report`: the archive has its parts, and no planted secret.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;

use crate::doctor::{World, admin};
use crate::support::{done_with, run, write};

const PEM: &str = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIPlantedInTheLog0123456789\n\
                   -----END EC PRIVATE KEY-----\n";

/// Secrets that must not be in the archive.
const PLANTED: [&str; 9] = [
    "planted-header-value",
    "planted-token-of-a-file",
    "planted-environment-token",
    "planted-environment-password",
    "planted-bearer-of-the-log",
    "planted-password-of-the-log",
    "MHcCAQEEIPlantedInTheLog0123456789",
    "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJwbGFudGVkIn0.c2lnbmF0dXJl",
    "planted-comment",
];

/// Reads the files of an archive.
fn unpack(bytes: &[u8]) -> BTreeMap<String, String> {
    let mut archive = tar::Archive::new(bytes);
    let entries = archive.entries().expect("entries").map(|entry| {
        let mut entry = entry.expect("an entry");
        let name = entry.path().expect("a name").display().to_string();
        let mut text = String::new();
        entry.read_to_string(&mut text).expect("text");
        (name, text)
    });
    entries.collect()
}

#[test]
fn an_archive_has_all_parts_and_no_planted_secret() {
    run(async {
        let world = World::new();
        let folder = world.folder.path();
        write(folder, "token", "planted-token-of-a-file\n");
        let page = format!("{{\"a\": \"{}\", \"b\": \"{}\"}}", PLANTED[2], PLANTED[1]);
        let address = admin(page).await;
        let plane = "{kind: istio, address: \"127.0.0.1:1\", roots: root.crt, token: token, \
                     headers: {x-tenant: planted-header-value}} # password: planted-comment";
        world.config(&[
            ("bind: \"127.0.0.1:1\"", &format!("bind: \"{address}\"")),
            ("{kind: file, path: mesh.yaml}", plane),
        ]);
        let log = format!(
            "one line stays\n{PEM}authorization: Bearer {}\npassword={}\njwt {} {} {}\n",
            PLANTED[4], PLANTED[5], PLANTED[7], PLANTED[2], PLANTED[3]
        );
        write(folder, "log", &log);
        let args = ["bug-report", "-c", "strait.yaml", "--to", "a.tar", "--log", "log"];
        let done = done_with(folder, &args, |command| {
            command.env("STRAIT_TEST_TOKEN", PLANTED[2]).env("DB_PASSWORD", PLANTED[3]);
        })
        .await;
        assert_eq!(done.code, Some(0), "{done:?}");
        let file = folder.join("a.tar");
        let bytes = std::fs::read(&file).expect("the archive");
        let mode = std::fs::metadata(&file).expect("the archive").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let raw = String::from_utf8_lossy(&bytes);
        let key = std::fs::read_to_string(folder.join("own.key")).expect("a key");
        let lines = key.lines().filter(|line| !line.starts_with('-'));
        for secret in PLANTED.into_iter().chain(lines) {
            assert!(!raw.contains(secret), "{secret}: {raw}");
        }
        let files = unpack(&bytes);
        for (name, part) in [
            ("version.txt", "strait "),
            ("host.txt", "Max open files"),
            ("config.yaml", "cluster: east"),
            ("doctor.json", "\"check\": \"certificate\""),
            ("log.txt", "one line stays"),
            ("status.json", "\"a\": \"[removed]\""),
            ("peers.json", "[removed]"),
            ("refusals.json", "[removed]"),
            ("metrics.txt", "[removed]"),
        ] {
            let text = files.get(&format!("strait-bug-report/{name}"));
            let text = text.unwrap_or_else(|| panic!("{name}: {:?}", files.keys()));
            assert!(text.contains(part), "{name}: {text}");
        }
        let again = done_with(folder, &args, |_| {}).await;
        assert_eq!(again.code, Some(1), "an archive is never replaced: {again:?}");
        assert!(again.stderr.contains("give another file by --to"), "{again:?}");
    });
}

#[test]
fn a_key_in_the_place_of_a_file_and_a_cut_log_give_no_secret_away() {
    run(async {
        let world = World::new();
        let folder = world.folder.path();
        let line = PEM.replace('\n', "\\n");
        world.config(&[
            ("key: own.key", &format!("key: \"{line}\"")),
            ("workers: 1", "workers: 1\nadmin_password: planted-password"),
        ]);
        let cut = PEM.split_once('\n').expect("lines").1;
        write(folder, "log", &format!("{cut}the rest\n"));
        let args = ["bug-report", "-c", "strait.yaml", "--to", "-", "--log", "log"];
        let done = done_with(folder, &args, |_| {}).await;
        assert_eq!(done.code, Some(0), "{done:?}");
        let files = unpack(done.stdout.as_bytes());
        for secret in ["PlantedInTheLog", "planted-password"] {
            assert!(!done.stdout.contains(secret), "{secret}: {}", done.stdout);
        }
        let log = files.get("strait-bug-report/log.txt").expect("a log");
        assert_eq!(log, "[removed]\nthe rest\n");
        // A gateway may run on while its file has mistakes.
        assert!(files.contains_key("strait-bug-report/status.json"), "{:?}", files.keys());
    });
}
