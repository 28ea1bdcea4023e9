//! Forms in which the values of the configuration are dumped.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serializer;

/// Writes a path, which need not be UTF-8: a dump must not fail over one.
pub(super) fn lossy_path<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

pub(super) fn lossy_paths<S: Serializer>(
    paths: &[PathBuf],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(paths.iter().map(|path| path.to_string_lossy()))
}

pub(super) fn lossy_path_option<S: Serializer>(
    path: &Option<PathBuf>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match path {
        Some(path) => serializer.collect_str(&path.display()),
        None => serializer.serialize_none(),
    }
}

pub(super) fn human_duration<S: Serializer>(
    value: &Duration,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_duration(*value))
}

/// Writes the names of headers. Their values may be secrets.
pub(super) fn names_only<S: Serializer>(
    headers: &[(String, String)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(headers.iter().map(|(name, _)| name))
}

pub(super) fn account_names<S: Serializer>(
    accounts: &[(String, String)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(
        accounts
            .iter()
            .map(|(namespace, name)| format!("{namespace}/{name}")),
    )
}
