//! How services are called: the one form of a name for all sources.

/// Lower case, without the last dot, as the authorities of peers are before they are looked up.
pub(super) fn normal_hostname(text: &str) -> Option<String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.*:".contains(&byte);
    let name = text.strip_suffix('.').unwrap_or(text);
    let good = !name.is_empty() && name.len() <= 253 && name.bytes().all(allowed);
    good.then(|| name.to_ascii_lowercase())
}

/// `namespace/hostname`, by which workloads name their services.
pub(super) fn service_key(text: &str) -> Option<String> {
    let (namespace, hostname) = text.split_once('/')?;
    let hostname = normal_hostname(hostname)?;
    (!namespace.is_empty()).then(|| format!("{namespace}/{hostname}"))
}
