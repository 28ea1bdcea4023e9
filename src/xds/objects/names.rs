//! Keys and names of services.

use std::sync::Arc;

/// Namespace and name of a service. Services with the same key in several clusters are one
/// service.
pub(super) type Key<'a> = (&'a str, &'a str);

/// Key that outlives the objects.
pub(super) type OwnedKey = (Arc<str>, Arc<str>);

/// Suffix of a service in its own cluster.
pub(super) const LOCAL_SUFFIX: &str = "svc.cluster.local";

pub(super) fn host((namespace, name): Key<'_>, suffix: &str) -> String {
    format!("{name}.{namespace}.{suffix}")
}

/// Returns `namespace/hostname` of a service.
pub(super) fn name(key: Key<'_>, suffix: &str) -> Arc<str> {
    format!("{}/{}", key.0, host(key, suffix)).into()
}
