//! Files in git: no large file, no private key, no secret in a recording, and no action of a
//! workflow that can change.

use std::fs;
use std::path::Path;
use std::process::Command;

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{
    GeneralPurpose, GeneralPurposeConfig, STANDARD_NO_PAD, URL_SAFE,
};

const FILE_BYTES_MAX: usize = 1024 * 1024;

/// Split into two halves, like every other literal of it in code that searches for keys.
const KEY_HEADER: &str = concat!("PRIVATE KEY", "-----");

/// Lower bound of a key: an Ed25519 key in PKCS#8 is 48 bytes, which are 64 characters.
const KEY_CHARS_MIN: usize = 40;

/// Recordings of a real control plane.
const RECORDINGS: &str = "tests/corpus/istiod/";

/// Texts of credentials and of the machine that recorded, in lower case.
const SECRETS: &[&str] =
    &["bearer", "authorization:", "token", "/home/", "/root/", "/tmp/", "/work"];

/// Lower bound of a run of hex or base64 that is decoded: `/root/` has 8 characters in base64.
const CODED_CHARS_MIN: usize = 8;

/// Start of a JWT: `{"` in base64url.
const JWT: &str = "eyJ";
/// Lower bound of the header of a JWT: `{"alg":"none"}` has 19 characters.
const JWT_CHARS_MIN: usize = 16;

/// Returns path and content of every file that git tracks and that exists in the checkout.
fn tracked() -> Vec<(String, Vec<u8>)> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    // In a build container, another user often owns the checkout; this only lists names.
    let listing = Command::new("git")
        .args(["-c", "safe.directory=*", "ls-files", "-z"])
        .current_dir(top)
        .output()
        .expect("git lists what is tracked, so it has to be installed");
    assert!(
        listing.status.success(),
        "this test needs a git checkout: {}",
        String::from_utf8_lossy(&listing.stderr)
    );
    let names = String::from_utf8(listing.stdout).unwrap();
    let names = names.split('\0').filter(|name| !name.is_empty());
    names.filter_map(|name| Some((name.to_owned(), fs::read(top.join(name)).ok()?))).collect()
}

fn check_size(path: &str, content: &[u8]) -> Option<String> {
    let bytes = content.len();
    (bytes > FILE_BYTES_MAX).then(|| format!("{path}: {bytes} bytes are too much to keep in git"))
}

/// Checks for a key, which has a header and a body. Code that searches for keys has a header alone.
fn check_key(path: &str, content: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(content);
    let has_key = text.match_indices(KEY_HEADER).any(|(start, _)| {
        let body = text[start + KEY_HEADER.len()..].replace("\\n", "\n");
        let gap = |c: char| c.is_whitespace() || matches!(c, '"' | '\\' | '\'');
        let body: String = body.chars().take(4 * KEY_CHARS_MIN).filter(|&c| !gap(c)).collect();
        let base64 = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '=');
        body.chars().take_while(base64).count() >= KEY_CHARS_MIN
    });
    has_key.then(|| format!("{path}: holds a private key; make it when the test runs (tools::dev)"))
}

/// Returns the bytes that runs of hex and base64 in a text encode. Other letters can precede the
/// start of an encoding.
fn decoded(text: &str) -> Vec<Vec<u8>> {
    let runs = |is_part: fn(char) -> bool| {
        let runs = text.split(move |c| !is_part(c));
        runs.filter(|run| run.len() >= CODED_CHARS_MIN)
    };
    let hex = runs(|c| c.is_ascii_hexdigit()).flat_map(|run| {
        (0..2).map(|at| {
            let pairs = run.as_bytes()[at..].chunks_exact(2);
            let digit = |digit: u8| char::from(digit).to_digit(16).unwrap_or_default();
            let byte = |pair: &[u8]| u8::try_from(16 * digit(pair[0]) + digit(pair[1]));
            pairs.map(|pair| byte(pair).unwrap_or_default()).collect()
        })
    });
    let config = GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true);
    let engine = GeneralPurpose::new(
        &STANDARD,
        config.with_decode_padding_mode(DecodePaddingMode::Indifferent),
    );
    let base64 = runs(|c| c.is_ascii_alphanumeric() || "+/-_".contains(c)).flat_map(|run| {
        let run = run.replace('-', "+").replace('_', "/");
        let parts = (0..4).map(|at| &run[at..run.len() - usize::from((run.len() - at) % 4 == 1)]);
        parts.filter_map(|part| engine.decode(part).ok()).collect::<Vec<_>>()
    });
    hex.chain(base64).collect()
}

/// Checks a recording for credentials, as they are or written as hex or base64.
fn check_recording(path: &str, content: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(content);
    let mut views = vec![content.to_vec()];
    views.extend(decoded(&text));
    views.iter().find_map(|view| check_view(path, view))
}

fn check_view(path: &str, content: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(content);
    let lower = text.to_lowercase();
    let secret = SECRETS.iter().find(|secret| lower.contains(**secret));
    let is_jwt = |at: usize| {
        let base64url = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        let header = text[at..].chars().take_while(base64url).count();
        header >= JWT_CHARS_MIN && text[at + header..].starts_with('.')
    };
    let jwt = text.match_indices(JWT).any(|(at, _)| is_jwt(at));
    let key = text.contains("PRIVATE KEY").then_some("a private key");
    let found = secret.copied().or_else(|| jwt.then_some("a JWT")).or(key);
    found.map(|found| format!("{path}: holds `{found}`; tests/istiod/record.py should remove it"))
}

#[test]
fn no_recording_of_a_control_plane_has_a_secret() {
    let mut tracked = tracked();
    tracked.retain(|(path, _)| path.starts_with(RECORDINGS));
    assert!(!tracked.is_empty(), "no recordings");
    let findings: Vec<String> =
        tracked.iter().filter_map(|(path, content)| check_recording(path, content)).collect();
    assert!(findings.is_empty(), "\n{}\n", findings.join("\n"));
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_secret_in_a_recording_is_caught() {
    let jwt = "eyJhbGciOiJSUzI1NiIsImtpZCI6IiJ9.eyJpc3MiOiJrdWJlIn0.c2ln";
    for text in [
        format!("1: {{1: \"{jwt}\"}}"),
        "authorization: Basic eA==".to_owned(),
        "Bearer x".to_owned(),
        format!("-----BEGIN EC {KEY_HEADER}"),
        "8: \"/home/somebody/strait\"".to_owned(),
        format!("2: x0a580165{}", hex(b"Bearer x")),
        format!("2: xa{}", hex(jwt.as_bytes()).to_uppercase()),
        format!("key: {}", STANDARD_NO_PAD.encode(format!("-----BEGIN {KEY_HEADER}"))),
        format!("key: {}", STANDARD_NO_PAD.encode(format!("x-----BEGIN {KEY_HEADER}"))),
        format!("key: /a{}", STANDARD_NO_PAD.encode("xxauthorization: Basic eA==")),
        format!("key: {}", URL_SAFE.encode(format!("\u{fb}\u{ff}token {jwt}"))),
    ] {
        assert!(check_recording("a", text.as_bytes()).is_some(), "{text}");
    }
    for text in [
        "2: \"type.googleapis.com/istio.security.Authorization\"",
        "1: \"-----BEGIN CERTIFICATE-----\\nMIIBqTCCAU+gAweyJw\"",
    ] {
        assert!(check_recording("a", text.as_bytes()).is_none(), "{text}");
    }
}

#[test]
fn no_file_in_git_is_larger_than_a_mebibyte() {
    let tracked = tracked();
    let findings: Vec<String> =
        tracked.iter().filter_map(|(path, content)| check_size(path, content)).collect();
    assert!(findings.is_empty(), "\n{}\n", findings.join("\n"));
}

#[test]
fn no_private_key_is_in_git() {
    let tracked = tracked();
    let findings: Vec<String> =
        tracked.iter().filter_map(|(path, content)| check_key(path, content)).collect();
    assert!(findings.is_empty(), "\n{}\n", findings.join("\n"));
}

#[test]
fn a_file_over_a_mebibyte_is_caught() {
    assert!(check_size("a.bin", &vec![0; FILE_BYTES_MAX + 1]).is_some());
    assert!(check_size("a.bin", &vec![0; FILE_BYTES_MAX]).is_none());
}

#[test]
fn a_private_key_is_caught_however_it_is_wrapped() {
    let body = "MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgevZzL1gdAFr88hb2";
    for text in [
        format!("-----BEGIN {KEY_HEADER}\n{body}\n"),
        format!("-----BEGIN EC {KEY_HEADER}\r\n{body}\r\n"),
        format!("key: |\n    -----BEGIN {KEY_HEADER}\n    {body}\n"),
        format!("const KEY: &str = \"-----BEGIN {KEY_HEADER}\\n{body}\\n\";"),
        format!("const KEY: &str = \"-----BEGIN {KEY_HEADER}\\\n  {body}\";"),
    ] {
        assert!(check_key("a", text.as_bytes()).is_some(), "{text}");
    }
    for text in [
        format!(
            "assert!(pem.contains(\"{KEY_HEADER}\"), \"it has no key at all, so it is wrong\");"
        ),
        format!("-----BEGIN {KEY_HEADER}\n"),
        format!("-----BEGIN CERTIFICATE-----\n{body}\n"),
    ] {
        assert!(check_key("a", text.as_bytes()).is_none(), "{text}");
    }
}

/// Returns the findings about a workflow: actions by another name than a commit, and containers of
/// another Rust than the image's.
fn check_workflow(path: &str, text: &str, rust: &str) -> Vec<String> {
    let values = |key: &'static str| {
        let lines = text.lines().map(|line| line.trim().trim_start_matches("- "));
        lines.filter_map(move |line| line.strip_prefix(key)).map(str::trim)
    };
    let is_pinned = |action: &str| {
        let reference = action.split([' ', '@']).nth(1).unwrap_or_default();
        reference.len() == 40 && reference.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let movable = values("uses:").filter(|action| !is_pinned(action));
    let movable = movable.map(|action| format!("{path}: {action} is not pinned by its commit"));
    let image = format!("rust:{rust}-bookworm");
    let images = values("container:").chain(values("image:"));
    let others = images.filter(|name| !name.is_empty() && **name != image);
    let others = others.map(|name| format!("{path}: {name} is not {image}, as in the Dockerfile"));
    movable.chain(others).collect()
}

#[test]
fn workflows_run_pinned_actions_and_the_rust_of_the_image() {
    let tracked = tracked();
    let text = |(path, content): &(String, Vec<u8>)| {
        (path.clone(), String::from_utf8_lossy(content).into_owned())
    };
    let dockerfile = tracked.iter().map(text).find(|(path, _)| path == "Dockerfile").unwrap().1;
    let rust = dockerfile.lines().find_map(|line| line.strip_prefix("ARG RUST_VERSION=")).unwrap();
    let mut workflows = tracked.iter().map(text).collect::<Vec<_>>();
    workflows.retain(|(path, _)| path.starts_with(".github/workflows/"));
    assert!(workflows.len() >= 2, "{} workflows", workflows.len());
    let findings: Vec<String> =
        workflows.iter().flat_map(|(path, text)| check_workflow(path, text, rust)).collect();
    assert!(findings.is_empty(), "\n{}\n", findings.join("\n"));
}

#[test]
fn a_movable_action_and_another_rust_are_caught() {
    let commit = "de0fac2e4500dabe0009e67214ff5f5447ce83dd";
    let good = format!(
        "container:\n  image: rust:1.95-bookworm\nsteps:\n  - uses: a/b@{commit} # v6\n  \
         - if: failure()\n    uses: a/b@{commit}\n"
    );
    assert!(check_workflow("ci.yml", &good, "1.95").is_empty());
    for bad in ["- uses: a/b@v6", "uses: a/b", "container: rust:1.94-bookworm", "image: rust"] {
        assert_eq!(check_workflow("ci.yml", &format!("{good}{bad}\n"), "1.95").len(), 1, "{bad}");
    }
}
