//! Normal form of service names, shared by all sources.

use std::borrow::Cow;

/// Returns a hostname in lower case without the trailing dot. The authorities of peers have the
/// same form when they are looked up.
pub(super) fn normal_hostname(text: &str) -> Option<Cow<'_, str>> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.*:".contains(&byte);
    let name = text.strip_suffix('.').unwrap_or(text);
    let good = !name.is_empty() && name.len() <= 253 && name.bytes().all(allowed);
    good.then(
        || match name.bytes().any(|byte| byte.is_ascii_uppercase()) {
            true => Cow::Owned(name.to_ascii_lowercase()),
            false => Cow::Borrowed(name),
        },
    )
}

/// Normalizes `namespace/hostname`, the form in which workloads refer to services.
pub(super) fn normalize_service_key(text: &str) -> Option<String> {
    let (namespace, hostname) = text.split_once('/')?;
    let hostname = normal_hostname(hostname)?;
    (!namespace.is_empty()).then(|| format!("{namespace}/{hostname}"))
}
