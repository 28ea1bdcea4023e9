//! Variables of a pod, those of its `PROXY_CONFIG`, and its files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::yaml::{Document, Findings, Kind, Node};

/// Istio's `ProxyConfig` of this pod, in YAML or JSON.
const PROXY_CONFIG: &str = "PROXY_CONFIG";

/// Limit of the labels file in bytes: that of Kubernetes for annotations. Labels are shorter.
const LABELS_BYTES_MAX: u64 = 256 * 1024;

/// Characters of a value that findings quote.
const SHOWN_MAX: usize = 80;

/// A value and its origin.
#[derive(Clone, Debug)]
pub(super) struct Setting {
    /// The value.
    pub value: String,
    /// The origin: a variable, a file, or a word for a default.
    pub by: String,
}

impl Setting {
    /// Returns the value as findings quote it.
    pub(super) fn shown(&self) -> String {
        self.value.chars().take(SHOWN_MAX).collect()
    }

    /// Returns the items of a list with commas between them.
    pub(super) fn items(&self) -> impl Iterator<Item = Self> {
        let items = self.value.split(',').map(str::trim);
        items
            .filter(|item| !item.is_empty())
            .map(|item| Self { value: item.to_owned(), by: self.by.clone() })
    }
}

/// The environment of a pod. Empty variables count as unset.
#[derive(Clone, Debug)]
pub struct Environment {
    variables: BTreeMap<String, String>,
    folder: PathBuf,
    proxy_config: Option<Document>,
    findings: Findings,
}

impl Environment {
    /// Returns the environment of this process, with its working directory.
    pub fn of_process() -> Self {
        let variables = std::env::vars_os().map(|(name, value)| {
            let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
            (text(name), text(value))
        });
        Self::new(variables, Path::new("."))
    }

    /// Makes an environment of variables, and of a folder in place of the working directory.
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
        Self { variables, folder: folder.to_owned(), proxy_config, findings }
    }

    /// Returns the mistakes in `PROXY_CONFIG`.
    pub(super) fn findings(&self) -> &Findings {
        &self.findings
    }

    /// Returns the value of the first variable that is set, in the environment or in the
    /// `proxyMetadata` of `PROXY_CONFIG`.
    pub(super) fn first(&self, names: &[&str]) -> Option<Setting> {
        names.iter().find_map(|name| {
            let value = self
                .variables
                .get(*name)
                .map(|value| Setting { value: value.clone(), by: (*name).to_owned() });
            value.or_else(|| {
                let metadata = self.proxy_config.as_ref()?.root.get("proxyMetadata")?;
                self.scalar(metadata, name, "proxyMetadata.")
            })
        })
    }

    /// Returns whether a variable is set, in either place.
    pub fn says(&self, name: &str) -> bool {
        self.first(&[name]).is_some()
    }

    /// Returns whether this is the pod of a gateway of Istio, by variables that all of them have.
    pub fn is_of_gateway(&self) -> bool {
        self.says("POD_NAME") && self.says("ISTIO_META_CLUSTER_ID")
    }

    pub(super) fn proxy_config(&self, key: &str) -> Option<Setting> {
        self.scalar(&self.proxy_config.as_ref()?.root, key, "")
    }

    fn scalar(&self, map: &Node, key: &str, prefix: &str) -> Option<Setting> {
        let node = map.get(key)?;
        let value = match &node.kind {
            Kind::Text(text) => text.to_string(),
            Kind::Bool(_) | Kind::Int(_) | Kind::Float => {
                self.proxy_config.as_ref()?.text_of(node)?.to_owned()
            }
            _ => return None,
        };
        (!value.is_empty()).then(|| Setting { value, by: format!("{PROXY_CONFIG}.{prefix}{key}") })
    }

    /// Returns the variables with a prefix, by the rest of their names, those of `proxyMetadata`
    /// included.
    pub(super) fn prefixed(&self, prefix: &str) -> Vec<(&str, Setting)> {
        let metadata =
            self.proxy_config.as_ref().and_then(|config| config.root.get("proxyMetadata"));
        let more = match metadata.map(|metadata| &metadata.kind) {
            Some(Kind::Map(entries)) => &entries[..],
            _ => &[],
        };
        let names = self.variables.keys().map(String::as_str);
        let names = names.chain(more.iter().map(|entry| &*entry.key));
        let names: BTreeSet<_> = names.filter(|name| name.starts_with(prefix)).collect();
        let setting = names.into_iter().filter_map(|name| {
            let mut setting = self.first(&[name])?;
            setting.by = setting.by.escape_debug().to_string();
            Some((name.strip_prefix(prefix)?, setting))
        });
        setting.collect()
    }

    /// Returns a label of the pod, from a file of the downward API.
    pub(super) fn label(&self, file: &str, key: &str) -> Option<Setting> {
        let by = self.path(file);
        let mut text = String::new();
        File::open(&by).ok()?.take(LABELS_BYTES_MAX).read_to_string(&mut text).ok()?;
        let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='))?;
        // Values of labels have no characters that need escapes.
        let value = value.trim().trim_matches('"').to_owned();
        (!value.is_empty()).then_some(Setting { value, by })
    }

    /// Returns whether a path relative to the working directory exists.
    pub(super) fn has(&self, relative: &str) -> bool {
        self.folder.join(relative).exists()
    }

    /// As [`Self::path`], but absolute.
    pub(super) fn absolute(&self, relative: &str) -> String {
        let path = self.folder.join(relative);
        std::path::absolute(&path).unwrap_or(path).to_string_lossy().into_owned()
    }

    /// Returns a path relative to the working directory, as text.
    pub(super) fn path(&self, relative: &str) -> String {
        self.folder.join(relative).to_string_lossy().into_owned()
    }
}
