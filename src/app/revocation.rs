//! Warnings about revocation lists that cause peers to be refused.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::config::Examined;

use super::inputs::{Certificates, place_of};

/// Returns warnings about stale lists and about trusted roots without a list, if the
/// configuration refuses peers for them. They are not part of the inputs of a start, because a
/// running gateway logs them itself. Roots are not checked while a list does not exist on this
/// machine.
pub(super) fn warnings(
    path: &Path,
    examined: &Examined,
    certificates: Option<&Certificates>,
) -> Vec<String> {
    let config = examined.trust.as_ref().and_then(|trust| trust.crl.as_ref());
    let (Some(config), Some((material, trust))) = (config, certificates) else {
        return Vec::new();
    };
    let crls = trust.crls.iter();
    let stale = crls.flat_map(|crls| crls.refused_as_stale(SystemTime::now()));
    let mut warnings: Vec<_> = stale
        .map(|list| {
            let place = place_of(&list.file, path, &examined.named);
            format!(
                "{place}: warning: {list} is stale: peers of this issuer are refused; \
                 put a newer list there, or write `on_stale: accept`"
            )
        })
        .collect();
    if config.files.iter().any(|file| examined.is_absent(file)) {
        return warnings;
    }
    let first = config.files.first().map_or(path, PathBuf::as_path);
    let place = place_of(first, path, &examined.named);
    let roots = trust.roots_without_crl(material.as_ref()).into_iter();
    warnings.extend(roots.map(|root| {
        format!(
            "{place}: warning: `trust.crl` has no list of the root {root}: peers below {root} are \
             refused; add its list, or write `on_missing: accept`"
        )
    }));
    warnings
}
