//! File with the address and the credentials of an API server, as `kubectl` has it.
//!
//! The tree of [`crate::yaml`] is read as JSON. The reader of `kube` has a YAML parser of its own,
//! with an instance of it for each type of the file: 0.5 MB of code.

use std::path::Path;

use anyhow::anyhow;
use kube::config::Kubeconfig;
use serde_json::Value as Json;

use crate::yaml::{Document, Kind, Node};

/// Limit of the aliases of a file.
const ALIASES_MAX: usize = 1000;

/// Reads a file. Its documents are merged, and its paths are relative to its folder.
pub(super) fn read(file: &Path) -> anyhow::Result<Kubeconfig> {
    let mut merged = Kubeconfig::default();
    for document in Document::load_all(file, ALIASES_MAX)? {
        let read = serde_json::from_value(json(&document, &document.root));
        // The error of the value would quote it, and it may be a credential.
        let read: Kubeconfig =
            read.map_err(|_| anyhow!("{} has not the form of a kubeconfig", file.display()))?;
        merged = merged.merge(read)?;
    }
    let folder = file.parent().unwrap_or_else(|| Path::new(""));
    let clusters = merged.clusters.iter_mut().filter_map(|one| one.cluster.as_mut());
    let roots = clusters.map(|cluster| &mut cluster.certificate_authority);
    let users = merged.auth_infos.iter_mut().filter_map(|one| one.auth_info.as_mut());
    let own = users.flat_map(|user| {
        [&mut user.client_certificate, &mut user.client_key, &mut user.token_file]
    });
    for path in roots.chain(own).flatten() {
        *path = folder.join(&*path).to_string_lossy().into_owned();
    }
    Ok(merged)
}

/// Returns a value as JSON. Numbers are text: no field of the file is one, but a name may be.
pub(super) fn json(document: &Document, node: &Node) -> Json {
    match &node.kind {
        Kind::Null => Json::Null,
        Kind::Bool(value) => Json::Bool(*value),
        Kind::Int(_) | Kind::Float => document.text_of(node).into(),
        Kind::Text(text) => Json::String(text.to_string()),
        Kind::List(items) => items.iter().map(|item| json(document, item)).collect(),
        Kind::Map(entries) => entries
            .iter()
            .map(|entry| (entry.key.to_string(), json(document, &entry.value)))
            .collect(),
    }
}
