//! Cases of texts: `findings/KIND/NAME.yaml` has situations, and `NAME.txt` the result of each.
//! `STRAIT_UPDATE=1 cargo test --locked --test corpus` writes the latter.
//!
//! A case begins with `# case: SITUATION`, and lacks the sections that it takes from `base.yaml` of
//! its kind, except for those after `# without:`. With `rows` it is a template: each row has the
//! values of its `${NAME}`.
//!
//! | kind | input | result |
//! |---|---|---|
//! | `config` | `strait.yaml`; valid by the schema if accepted | findings, `# shown:` sections |
//! | `pod` | [`PodCase`] | findings, configuration in force |
//! | `mesh` | mesh file | findings, `# shown:` kinds |
//! | `objects` | Kubernetes objects, read by the gateway of `base.yaml` | findings |
//! | `merge`, `join` | `objects`, `before`, `mesh`: see `objects.rs` | entries or mesh, findings |
//! | `explain` | `question` and others: see `explain.rs` | answer |

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use strait::config::pod::{Environment, Flags};
use strait::config::{Config, Source};
use strait::snapshot::mesh::Mesh;
use strait::xds;

pub const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const CASE: &str = "# case: ";

/// Directory of the cases of a kind.
fn folder(kind: &str) -> PathBuf {
    Path::new(ROOT).join("tests/corpus/findings").join(kind)
}

/// Compares the findings about all cases of a kind with the expected ones.
pub fn compare(kind: &str, base: &str, check: impl Fn(&Path, &str) -> String) {
    let files = fs::read_dir(folder(kind)).expect("cases").map(|file| file.expect("a file").path());
    let (expected, others): (Vec<_>, Vec<_>) =
        files.partition(|file| file.extension().is_some_and(|extension| extension == "txt"));
    let of = |expected: &PathBuf| expected.with_extension("yaml");
    let orphans: Vec<_> = expected.iter().filter(|file| !others.contains(&of(file))).collect();
    assert!(orphans.is_empty(), "findings without cases: {orphans:?}");
    let files = others.into_iter();
    let files = files.filter(|file| file.extension().is_some_and(|extension| extension == "yaml"));
    let files: Vec<_> = files.filter(|file| !file.ends_with("base.yaml")).collect();
    assert!(!files.is_empty(), "no cases of {kind}");
    let mut wrong = Vec::new();
    for file in files {
        let found = reported(&file, base, &check);
        let expected = file.with_extension("txt");
        if std::env::var_os("STRAIT_UPDATE").is_some() {
            fs::write(&expected, found).expect("the findings");
        } else if fs::read_to_string(&expected).unwrap_or_default() != found {
            wrong.push(format!("{}:\n{found}", expected.display()));
        }
    }
    assert!(wrong.is_empty(), "other findings than in\n{}", wrong.join("\n"));
}

/// Returns the findings about each case of a file.
fn reported(file: &Path, base: &str, check: &impl Fn(&Path, &str) -> String) -> String {
    let text = fs::read_to_string(file).expect("a file");
    let name = file.file_name().expect("a name").to_string_lossy();
    // Relative paths in a case start at the root, so that `Cargo.toml` exists.
    let path = Path::new(ROOT).join(&*name);
    let (mut found, mut line) = (String::new(), 0);
    for case in
        text.split_inclusive('\n').collect::<Vec<_>>().chunk_by(|_, next| !next.starts_with(CASE))
    {
        let situation = case.first().and_then(|first| first.strip_prefix(CASE));
        if let Some(situation) = situation {
            let case_text = case.concat();
            // Findings have the lines of the file of cases.
            let whole = format!("{}{case_text}{}", "\n".repeat(line), beside(base, &case_text));
            let findings = check(&path, &whole);
            let findings = findings.replace(&format!("{ROOT}/"), "");
            let _ = writeln!(found, "{}", situation.trim_end());
            let findings = if findings.is_empty() { "ok" } else { &findings };
            for finding in findings.lines().filter(|one| !one.is_empty()) {
                let _ = writeln!(found, "  {finding}");
            }
        }
        line += case.len();
    }
    found
}

/// Returns the sections of the base that a case lacks.
fn beside(base: &str, case: &str) -> String {
    let key = |line: &str| line.split_once(':').map(|(key, _)| key.to_owned());
    let mut own: Vec<_> = case.lines().filter_map(key).collect();
    own.extend(directive(case, "# without:").into_iter().map(str::to_owned));
    let lines: Vec<_> = base.split_inclusive('\n').collect();
    let sections = lines.chunk_by(|_, next| next.starts_with([' ', '-']));
    let lacks = |section: &&[&str]| key(section[0]).is_some_and(|key| !own.contains(&key));
    sections.filter(lacks).flatten().copied().collect()
}

/// Returns the text that the cases of a kind share.
pub fn base(kind: &str) -> String {
    fs::read_to_string(folder(kind).join("base.yaml")).expect("the base")
}

/// Returns the values in a line of comment such as `# shown: log drain`.
fn directive<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let mut lines = text.lines();
    let words = lines.find_map(|line| line.strip_prefix(name));
    words.into_iter().flat_map(str::split_whitespace).collect()
}

/// Returns the result of `show` for a case, or below a heading for each of its rows.
pub fn each_row(text: &str, show: impl Fn(&str) -> String) -> String {
    let (rows, template) = partition(text, |key| key == "rows");
    let rows: Option<BTreeMap<String, Vec<BTreeMap<String, String>>>> =
        serde_saphyr::from_str(&rows).expect("rows");
    let Some(rows) = rows.and_then(|mut rows| rows.remove("rows")) else {
        return show(text);
    };
    let mut all = String::new();
    for row in rows {
        let put = |text: String, (name, value): (&String, &String)| {
            text.replace(&format!("${{{name}}}"), value)
        };
        let heading: Vec<_> = row.iter().map(|(name, value)| format!("{name} `{value}`")).collect();
        let _ = writeln!(all, "{}", heading.join(", "));
        for line in show(&row.iter().fold(template.clone(), put)).lines() {
            let _ = writeln!(all, "  {line}");
        }
    }
    all
}

/// Divides a text into the sections of the keys that are meant, and the others.
pub fn partition(text: &str, is_meant: impl Fn(&str) -> bool) -> (String, String) {
    let lines: Vec<_> = text.split_inclusive('\n').collect();
    let sections = lines.chunk_by(|_, next| next.starts_with([' ', '-', '\n']));
    let is_meant =
        |section: &&[&str]| section[0].split_once(':').is_some_and(|(key, _)| is_meant(key));
    let (meant, others): (Vec<_>, Vec<_>) = sections.partition(is_meant);
    (meant.concat().concat(), others.concat().concat())
}

#[test]
fn findings_about_configurations() {
    let (mut schemas, mut compiler) = (boon::Schemas::new(), boon::Compiler::new());
    let schema = strait::config::reference::schema();
    compiler.add_resource("strait.json", schema).expect("a schema");
    let index = compiler.compile("strait.json", &mut schemas).expect("a valid schema");
    compare("config", &base("config"), |path, text| {
        let (config, findings) = Config::parse(path, text);
        let mut found = findings.to_string();
        let Some(config) = config else {
            return found;
        };
        let options = serde_saphyr::options! { strict_booleans: true };
        let file = serde_saphyr::from_str_with_options(text, options).expect("YAML");
        let valid = schemas.validate(&file, index).map_err(|error| error.to_string());
        assert_eq!(valid, Ok(()), "{text}");
        let shown = serde_json::to_value(&config).expect("JSON");
        for section in directive(text, "# shown:") {
            let _ = write!(found, "\n{section}: {}", shown[section]);
        }
        found
    });
}

/// A pod: its variables, its labels, files that exist, and `strait.yaml`.
#[derive(Default, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
struct PodCase {
    variables: BTreeMap<String, String>,
    labels: BTreeMap<String, String>,
    files: Vec<String>,
    strait: String,
}

impl PodCase {
    /// Returns the findings, and the configuration in force without the defaults of keys.
    fn reported(self) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |file: &str, text: &str| {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        };
        let mounted = ["var/run/secrets/istio/root-cert.pem", "var/run/secrets/tokens/istio-token"];
        mounted
            .into_iter()
            .chain(self.files.iter().map(String::as_str))
            .for_each(|file| write(file, ""));
        let labels = self.labels.iter().map(|(key, value)| format!("{key}=\"{value}\"\n"));
        write("etc/istio/pod/labels", &labels.collect::<String>());
        if !self.strait.is_empty() {
            write("strait.yaml", &self.strait);
        }
        let environment = Environment::new(self.variables, folder.path());
        let usual = folder.path().join("strait.yaml");
        let source = Source::pod(environment, &Flags::default(), None, &usual);
        let examined = source.examine();
        let mut found = examined.findings.to_string();
        if examined.config.is_some() {
            let printed = source.print().0.expect("a configuration");
            let printed = printed.lines().filter(|line| !line.ends_with("# the default"));
            found.extend(printed.map(|line| format!("\n{line}")));
        }
        found.replace(&format!("{}/", folder.path().display()), "")
    }
}

#[test]
fn findings_about_pods() {
    compare("pod", "", |_, text| {
        let case: Option<PodCase> = serde_saphyr::from_str(text).expect("a case");
        case.unwrap_or_default().reported()
    });
}

#[test]
fn findings_about_mesh_files() {
    compare("mesh", "", |path, text| {
        let (mesh, policies) = match xds::file::parse(path, text) {
            Ok(parsed) => parsed,
            Err(findings) => return findings.to_string(),
        };
        let mut shown = String::new();
        for kind in directive(text, "# shown:") {
            let lines: Vec<_> = match kind {
                "workloads" => {
                    mesh.workloads.sorted().iter().map(|one| format!("{one:?}")).collect()
                }
                "services" => mesh.services.sorted().iter().map(|one| format!("{one:?}")).collect(),
                _ => policies.iter().map(|one| format!("{one:?}")).collect(),
            };
            lines.iter().for_each(|line| _ = writeln!(shown, "{line}"));
        }
        shown
    });
}

#[test]
fn findings_about_objects() {
    let gateway = Config::parse(&Path::new(ROOT).join("strait.yaml"), &base("objects"));
    let (Some(gateway), _) = gateway else {
        panic!("{}", gateway.1);
    };
    let folder = tempfile::tempdir().expect("a folder");
    compare("objects", "", |path, text| {
        let file = folder.path().join(path.file_name().expect("a name"));
        fs::write(&file, text).expect("a file");
        let (objects, mut findings) = match xds::objects::load(&[file]) {
            Ok(loaded) => loaded,
            Err(findings) => (xds::objects::Objects::default(), findings),
        };
        let (mut config, merged) = xds::objects::merge(&gateway, &objects, &Mesh::default());
        let distributed = xds::objects::distribute(&mut config, &objects, None);
        findings.0.extend(merged.0.into_iter().chain(distributed.0));
        for finding in &mut findings.0 {
            finding.place.file = path.to_owned();
        }
        findings.to_string().replace(&format!("{}/", folder.path().display()), "")
    });
}
