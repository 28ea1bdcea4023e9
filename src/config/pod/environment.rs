//! The variables of a pod, those that its `PROXY_CONFIG` adds, and the files beside them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::yaml::{Document, Findings, Kind, Node};

/// Istio's `ProxyConfig` of this pod, in YAML or JSON.
const PROXY_CONFIG: &str = "PROXY_CONFIG";

/// The API server takes no more than so many bytes of annotations, and labels are shorter.
const LABELS_BYTES_MAX: u64 = 256 * 1024;

/// A value, and what says so.
#[derive(Clone, Debug)]
pub(super) struct Said {
    /// The value.
    pub value: String,
    /// A variable, a file, or a word for what nothing says.
    pub by: String,
}

impl Said {
    /// The items of a list with commas between them.
    pub(super) fn items(&self) -> impl Iterator<Item = Self> {
        let items = self.value.split(',').map(str::trim);
        items.filter(|item| !item.is_empty()).map(|item| Self {
            value: item.to_owned(),
            by: self.by.clone(),
        })
    }
}

/// The environment of a pod. A variable that is empty says nothing.
#[derive(Clone, Debug)]
pub struct Environment {
    variables: BTreeMap<String, String>,
    folder: PathBuf,
    proxy_config: Option<Document>,
    findings: Findings,
}

impl Environment {
    /// That of this process, with its working directory.
    pub fn of_process() -> Self {
        let variables = std::env::vars_os().map(|(name, value)| {
            let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
            (text(name), text(value))
        });
        Self::new(variables, Path::new("."))
    }

    /// These variables, and the files of a folder in place of the working directory.
    pub fn new(variables: impl IntoIterator<Item = (String, String)>, folder: &Path) -> Self {
        let variables = variables.into_iter();
        let variables: BTreeMap<_, _> = variables.filter(|(_, value)| !value.is_empty()).collect();
        let text = variables.get(PROXY_CONFIG);
        let parsed = text.map(|text| Document::parse(Path::new(PROXY_CONFIG), text));
        let (proxy_config, findings) = match parsed {
            Some(Ok(document)) => (Some(document), Findings::default()),
            Some(Err(findings)) => (None, findings),
            None => (None, Findings::default()),
        };
        Self {
            variables,
            folder: folder.to_owned(),
            proxy_config,
            findings,
        }
    }

    /// What is wrong with `PROXY_CONFIG`.
    pub(super) fn findings(&self) -> &Findings {
        &self.findings
    }

    /// The value of the first of some variables that is set, in the environment or by the
    /// `proxyMetadata` of `PROXY_CONFIG`.
    pub(super) fn first(&self, names: &[&str]) -> Option<Said> {
        names.iter().find_map(|name| {
            let value = self.variables.get(*name).map(|value| Said {
                value: value.clone(),
                by: (*name).to_owned(),
            });
            value.or_else(|| {
                let metadata = self.proxy_config.as_ref()?.root.get("proxyMetadata")?;
                self.scalar(metadata, name, "proxyMetadata.")
            })
        })
    }

    /// Whether a variable is set, in either place.
    pub fn says(&self, name: &str) -> bool {
        self.first(&[name]).is_some()
    }

    /// A value of `PROXY_CONFIG` itself.
    pub(super) fn proxy_config(&self, key: &str) -> Option<Said> {
        self.scalar(&self.proxy_config.as_ref()?.root, key, "")
    }

    fn scalar(&self, map: &Node, key: &str, prefix: &str) -> Option<Said> {
        let node = map.get(key)?;
        let value = match &node.kind {
            Kind::Text(text) => text.to_string(),
            Kind::Bool(_) | Kind::Int(_) | Kind::Float => {
                self.proxy_config.as_ref()?.text_of(node)?.to_owned()
            }
            _ => return None,
        };
        (!value.is_empty()).then(|| Said {
            value,
            by: format!("{PROXY_CONFIG}.{prefix}{key}"),
        })
    }

    /// The variables whose names begin so, by what follows, those of `proxyMetadata` included.
    pub(super) fn prefixed(&self, prefix: &str) -> Vec<(&str, Said)> {
        let metadata = self
            .proxy_config
            .as_ref()
            .and_then(|config| config.root.get("proxyMetadata"));
        let more = match metadata.map(|metadata| &metadata.kind) {
            Some(Kind::Map(entries)) => &entries[..],
            _ => &[],
        };
        let names = self.variables.keys().map(String::as_str);
        let names = names.chain(more.iter().map(|entry| &*entry.key));
        let names: BTreeSet<_> = names.filter(|name| name.starts_with(prefix)).collect();
        let said = names.into_iter().filter_map(|name| {
            let mut said = self.first(&[name])?;
            said.by = said.by.escape_debug().to_string();
            Some((name.strip_prefix(prefix)?, said))
        });
        said.collect()
    }

    /// A label of the pod, as the downward API writes it.
    pub(super) fn label(&self, file: &str, key: &str) -> Option<Said> {
        let by = self.path(file);
        let mut text = String::new();
        let opened = File::open(&by).ok()?;
        opened
            .take(LABELS_BYTES_MAX)
            .read_to_string(&mut text)
            .ok()?;
        let mut lines = text.lines();
        let value = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix('='))?;
        // The value of a label has no character that would be escaped.
        let value = value.trim().trim_matches('"').to_owned();
        (!value.is_empty()).then_some(Said { value, by })
    }

    /// Whether there is something at a path relative to the working directory.
    pub(super) fn has(&self, relative: &str) -> bool {
        self.folder.join(relative).exists()
    }

    /// As [`Self::path`], from the root.
    pub(super) fn absolute(&self, relative: &str) -> String {
        let path = self.folder.join(relative);
        let path = std::path::absolute(&path).unwrap_or(path);
        path.to_string_lossy().into_owned()
    }

    /// A path relative to the working directory, as text.
    pub(super) fn path(&self, relative: &str) -> String {
        self.folder.join(relative).to_string_lossy().into_owned()
    }
}
