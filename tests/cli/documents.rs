//! The commands in the documentation: each one is run, or marked by what it needs.
//!
//! The word after `sh` in the fence of a block selects how; CONTRIBUTING.md lists them.

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::support::{get, run, run_command, strait, until, write};

/// Pages with commands.
const PAGES: [&str; 11] = [
    README,
    "CONTRIBUTING.md",
    EXAMPLES,
    "deploy/kubernetes/README.md",
    "docs/conformance.md",
    "docs/istio.md",
    "docs/load-testing.md",
    "docs/migration.md",
    "docs/operations.md",
    "docs/quickstart.md",
    "docs/routing.md",
];
/// Page whose first block is the `strait.yaml` of its commands.
const README: &str = "README.md";
/// Page whose commands start gateways of two clusters.
const EXAMPLES: &str = "deploy/examples/README.md";
/// The command of a `gateway` block, for pages that have none.
const GATEWAY: &str = "exec strait run -c deploy/local/strait.yaml";
/// The configuration of that command.
const LOCAL: &str = "deploy/local/strait.yaml";
/// Starts of commands; a block without a language must not hold them.
const COMMANDS: [&str; 6] = ["strait ", "make ", "cargo ", "kubectl ", "curl ", "docker "];

/// A fenced block of a page.
#[derive(Debug)]
struct Block {
    page: &'static str,
    line: usize,
    /// The words after the fence.
    kind: String,
    text: String,
}

fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn blocks(page: &'static str) -> Vec<Block> {
    let text = std::fs::read_to_string(top().join(page)).expect("a page");
    let mut blocks: Vec<Block> = Vec::new();
    let mut open: Option<Block> = None;
    for (line, number) in text.lines().zip(1..) {
        match (line.trim_start().strip_prefix("```"), &mut open) {
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (Some(kind), None) => {
                open =
                    Some(Block { page, line: number, kind: kind.to_owned(), text: String::new() });
            }
            (None, Some(block)) => block.text += &format!("{line}\n"),
            (None, None) => {}
        }
    }
    blocks
}

/// A folder with the example of `deploy/local`, at addresses that no other test uses.
struct Place {
    folder: TempDir,
    /// Parts of texts, and their replacements.
    changes: Vec<(&'static str, String)>,
    address: String,
}

impl Place {
    async fn new(page: usize, has_certs: bool) -> Self {
        let [_, _, high, low] = std::process::id().to_be_bytes();
        let net = format!("127.{}.{low}", 150 + high % 50);
        let address = format!("{net}.{}", 10 + page);
        // The last digit is that of the example: 127.0.1.1 becomes 127.170.3.101.
        let endpoints = format!("{net}.{}", 10 + page);
        let admin = format!("--admin {address}:15000");
        let changes = vec![
            ("\"127.0.0.1:", format!("\"{address}:")),
            ("localhost:", format!("{address}:")),
            ("--to 127.0.0.1:", format!("--to {address}:")),
            ("127.0.1.", endpoints),
            ("strait status", format!("strait status {admin}")),
            ("strait dump", format!("strait dump {admin}")),
            ("explain --admin", format!("explain {admin}")),
            ("strait load rr", "strait load rr --seconds 1".to_owned()),
            // The endpoints in the background have to listen before the load starts.
            (" &\n", " & pids=\"$pids $!\"; sleep 1\n".to_owned()),
            ("curl -s ", "curl -sf ".to_owned()),
            ("-c strait.yaml --take-over /run/strait/", format!("-c {LOCAL} --take-over ")),
        ];
        let folder = tempfile::tempdir().expect("a folder");
        let changes = if PAGES[page] == EXAMPLES {
            // Gateways of two clusters, each in a network of its own.
            let network = |first: u8| format!("127.{}.{low}.", first + high % 50);
            let networks = [("127.1.0.", network(200)), ("127.2.0.", network(100))];
            let kept = changes.into_iter().filter(|(from, _)| *from == " &\n");
            networks.into_iter().chain(kept).collect()
        } else {
            changes
        };
        let place = Self { folder, changes, address };
        if has_certs {
            let made = run_command(place.folder.path(), &["certs", "certs"]).await;
            assert_eq!(made.code, Some(0), "{made:?}");
        }
        copy_examples(place.folder.path(), |text| place.changed(text));
        if PAGES[page] == README {
            let sample = blocks(README).into_iter().find(|block| block.kind == "yaml");
            let sample = sample.expect("a configuration").text;
            write(place.folder.path(), "strait.yaml", &sample);
        }
        place
    }

    fn changed(&self, text: &str) -> String {
        let apply = |text: String, (from, to): &(&str, String)| text.replace(from, to);
        self.changes.iter().fold(text.to_owned(), apply)
    }

    fn shell(&self, script: &str) -> Command {
        let mut command = shell(self.folder.path(), &self.changed(script));
        command.stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    async fn start(&self, script: &str) -> Child {
        let log = std::fs::File::create(self.folder.path().join("log")).expect("a log");
        let mut command = self.shell(script);
        let gateway = command.stdout(Stdio::null()).stderr(log).spawn();
        let ready = format!("http://{}:15021/healthz/ready", self.address);
        let ask = async || get(&ready).await.0;
        until("readiness", ask, |status| *status == 200).await;
        gateway.expect("the gateway")
    }
}

/// Copies `deploy/local` and `deploy/examples`, with `change` applied to their files.
fn copy_examples(folder: &Path, change: impl Fn(&str) -> String) {
    let examples = ["acceptor", "ambient-and-sidecars", "donor", "regions", "split-horizon"];
    let examples = examples.map(|name| Path::new("deploy/examples").join(name));
    for example in examples.into_iter().chain(["deploy/local".into()]) {
        let to = folder.join(&example);
        std::fs::create_dir_all(&to).expect("a folder");
        for file in std::fs::read_dir(top().join(&example)).expect("an example") {
            let file = file.expect("a file");
            let text = std::fs::read_to_string(file.path()).expect("an example");
            let name = file.file_name();
            write(&to, name.to_str().expect("a name"), &change(&text));
        }
    }
}

/// A script in `folder`, with the command of this build first in the path.
fn shell(folder: &Path, script: &str) -> Command {
    let own = PathBuf::from(env!("CARGO_BIN_EXE_strait"));
    let own = own.parent().expect("a folder").display().to_string();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("sh");
    command
        .args(["-euc", script])
        .current_dir(folder)
        .env_remove("STRAIT_CONFIG")
        .env("PATH", format!("{own}:{path}"));
    command
}

fn assert_ran(block: &Block, output: &Output) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    let stdout = String::from_utf8_lossy(&output.stdout);
    let place = format!("{}:{}", block.page, block.line);
    assert!(output.status.success(), "{place}: {stderr}\n{stdout}");
}

/// Runs a script whose children in the background end with it.
async fn ran(place: &Place, block: &Block) {
    let script = format!("pids=; trap 'kill $pids 2>/dev/null || true' EXIT\n{}", block.text);
    let output = place.shell(&script).output().await.expect("a shell");
    assert_ran(block, &output);
}

/// Runs the commands of a `console` block and compares their output.
async fn compared(block: &Block) {
    let folder = tempfile::tempdir().expect("a folder");
    let made = run_command(folder.path(), &["certs", "certs"]).await;
    assert_eq!(made.code, Some(0), "{made:?}");
    copy_examples(folder.path(), str::to_owned);
    let (command, shown) = block.text.split_once('\n').expect("an output");
    let command = command.strip_prefix("$ ").expect("a command");
    let output = shell(folder.path(), command).output().await.expect("a shell");
    assert_ran(block, &output);
    assert_eq!(String::from_utf8_lossy(&output.stdout), shown, "{}", block.page);
}

/// Checks the make targets and test names of a block that compiles or takes minutes.
async fn built(block: &Block) {
    for line in block.text.lines() {
        let words: Vec<_> = line.split_whitespace().collect();
        if let Some(test) = words.iter().skip_while(|word| **word != "--test").nth(1) {
            assert!(top().join("tests").join(test).exists(), "{line}");
        }
        if let ["make", target, ..] = words[..] {
            let mut make = Command::new("make");
            let output = make.args(["-n", target]).current_dir(top()).output().await;
            assert_ran(block, &output.expect("make"));
        }
    }
}

#[test]
fn each_command_of_the_documentation_runs() {
    run(async {
        for (number, page) in PAGES.into_iter().enumerate() {
            let (mut place, mut gateway) = (None, None);
            let blocks = blocks(page);
            let makes_certs = blocks.iter().any(|block| block.text.contains("strait certs "));
            for block in blocks {
                match &*block.kind {
                    "sh build" => built(&block).await,
                    "console" => compared(&block).await,
                    "sh" | "sh gateway" | "sh running" => {
                        if place.is_none() {
                            place = Some(Place::new(number, !makes_certs).await);
                        }
                        let place = place.as_ref().expect("a place");
                        if block.kind == "sh gateway" {
                            // It has the addresses of the one before.
                            if let Some(mut before) = gateway.take() {
                                Child::kill(&mut before).await.expect("a process");
                            }
                            gateway = Some(place.start(&format!("exec {}", block.text)).await);
                        } else if block.kind == "sh running" && gateway.is_none() {
                            gateway = Some(place.start(GATEWAY).await);
                        }
                        if block.kind != "sh gateway" {
                            ran(place, &block).await;
                        }
                    }
                    _ => {}
                }
            }
        }
    });
}

#[test]
fn each_block_with_commands_has_a_known_kind() {
    let kinds = ["sh", "sh build", "sh cluster", "sh gateway", "sh running", "console"];
    let mut with_commands = 0;
    for page in PAGES {
        for block in blocks(page) {
            let is_command = |line: &str| COMMANDS.iter().any(|start| line.starts_with(start));
            let has_commands = block.text.lines().any(is_command);
            with_commands += usize::from(has_commands);
            let is_known = kinds.contains(&&*block.kind);
            assert!(is_known || !has_commands, "{}:{}", page, block.line);
            assert!(is_known || !block.kind.starts_with("sh"), "{}:{}", page, block.line);
        }
    }
    assert!(with_commands > 15, "the blocks are found");
    let others = documents_with_commands();
    assert_eq!(others, [""; 0], "add them to PAGES");
}

/// Pages of `docs` with commands in a block that are not in [`PAGES`].
fn documents_with_commands() -> Vec<String> {
    let files = std::fs::read_dir(top().join("docs")).expect("a folder");
    let paths = files.map(|file| file.expect("a file").path());
    let others = paths.filter(|path| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.contains("```sh") || text.contains("```console")
    });
    let names = others.map(|path| path.strip_prefix(top()).expect("below").display().to_string());
    names.filter(|name| !PAGES.contains(&&**name)).collect()
}

/// The table of the second worked example: endpoints of a tier, and those that are ready.
const TIERS: [(&str, &str, usize, usize); 3] = [
    ("us-east-2", "us-east-2a", 4, 2),
    ("us-east-2", "us-east-2b", 4, 4),
    ("us-west-1", "us-west-1a", 2, 2),
];

/// A mesh with the endpoints of [`TIERS`], of which `ready` are healthy in the first one.
fn tiers(ready: usize) -> String {
    let host = "app/echo.app.svc.cluster.local";
    let service = "{name: echo, namespace: app, hostname: echo.app.svc.cluster.local, \
                   vips: [], ports: {80: 8080}}";
    let mut text = format!("services:\n  - {service}\nworkloads:\n");
    for (tier, (region, zone, count, healthy)) in TIERS.into_iter().enumerate() {
        let healthy = if tier == 0 { ready } else { healthy };
        for place in 0..count {
            let status = if place < healthy { "Healthy" } else { "Unhealthy" };
            text += &format!(
                "  - {{uid: {zone}-{place}, namespace: app, network: east, protocol: HBONE, \
                 status: {status}, workloadIps: [10.0.{tier}.{place}], \
                 locality: {{region: {region}, zone: {zone}}}, \
                 services: {{\"{host}\": {{80: 8080}}}}}}\n"
            );
        }
    }
    text
}

#[test]
fn the_shares_of_the_second_worked_example_are_those_of_the_code() {
    run(async {
        let page = std::fs::read_to_string(top().join("docs/routing.md")).expect("a page");
        for (ready, shares) in
            [(2, [0.71, 0.29, 0.0]), (1, [0.35, 0.65, 0.0]), (4, [1.0, 0.0, 0.0])]
        {
            let folder = tempfile::tempdir().expect("a folder");
            copy_examples(folder.path(), |text| {
                format!("{text}\ntraffic: [{{service: \"*\", distribution: close}}]\n")
            });
            let local = folder.path().join("deploy/local");
            write(&local, "mesh.yaml", &tiers(ready));
            let explained = strait()
                .args(["explain", "-c", "deploy/local/strait.yaml", "-o", "json", "--from"])
                .args(["spiffe://west.local/ns/shop/sa/checkout", "--to", "echo.global:80"])
                .current_dir(folder.path())
                .output();
            let output = explained.await.expect("an answer");
            let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
            let groups = answer["groups"].as_array().expect("groups");
            let got: Vec<_> = groups.iter().filter_map(|group| group["share"].as_f64()).collect();
            let is_near = |(got, want): (&f64, f64)| (got - want).abs() < 1e-6;
            let near = got.iter().zip(shares).all(is_near) && got.len() == shares.len();
            assert!(near, "{got:?}, not {shares:?}: {answer}");
            for share in shares.iter().filter(|share| **share > 0.0) {
                let text = format!("{:.0} %", share * 100.0);
                assert!(page.contains(&text), "{text} is on the page");
            }
        }
    });
}
