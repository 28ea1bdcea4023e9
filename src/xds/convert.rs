//! Helpers that convert the fields of resources, shared by all sources.
//!
//! An error begins with the path of the field below its message, such as `.address: 3 bytes`, or
//! is the reason alone if the value itself is wrong. [`At`] adds the path of the value.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::Display;
use std::net::IpAddr;
use std::sync::Arc;

use crate::snapshot::gateway_record;
use crate::snapshot::mesh::{Place, Template, Workload};

/// Path of a value in an error.
pub(super) trait At<T> {
    /// Adds the path to the error.
    fn at(self, path: impl Display) -> Result<T, String>;
}

impl<T> At<T> for Result<T, String> {
    fn at(self, path: impl Display) -> Self {
        self.map_err(|why| {
            if why.starts_with(['.', '[', ':']) {
                format!("{path}{why}")
            } else {
                format!("{path}: {why}")
            }
        })
    }
}

/// Returns the records of the gateways that workloads of other networks name by hostname. The
/// cluster of a gateway is that of all workloads that name it.
pub(super) fn named_gateways<'a>(workloads: impl Iterator<Item = &'a Workload>) -> Vec<Workload> {
    let mut records: BTreeMap<Arc<str>, Workload> = BTreeMap::new();
    for record in workloads.filter_map(named_gateway) {
        match records.entry(Arc::clone(&record.uid)) {
            Entry::Vacant(new) => drop(new.insert(record)),
            Entry::Occupied(mut known) if known.get().cluster != record.cluster => {
                let mut template = Template::clone(&record.template);
                template.cluster = Arc::default();
                known.get_mut().template = template.into();
            }
            Entry::Occupied(_) => {}
        }
    }
    records.into_values().collect()
}

fn named_gateway(workload: &Workload) -> Option<Workload> {
    let gateway = workload.network_gateway.as_deref()?;
    let Place::Name(name) = &gateway.place else {
        return None;
    };
    let (_, host) = name.split_once('/')?;
    let network = Some(&workload.network).filter(|network| !network.is_empty())?;
    Some(gateway_record(network, &workload.cluster, host, gateway.port))
}

/// Converts all entries of a list.
pub(super) fn each<T, U>(
    path: &str,
    list: impl IntoIterator<Item = T>,
    mut convert: impl FnMut(T) -> Result<U, String>,
) -> Result<Vec<U>, String> {
    let list = list.into_iter().enumerate();
    list.map(|(index, one)| convert(one).at(format_args!("{path}[{index}]"))).collect()
}

/// Returns a hostname in lower case without the trailing dot. The authorities of peers have the
/// same form when they are looked up.
pub(super) fn normal_hostname(text: &str) -> Option<Cow<'_, str>> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.*:".contains(&byte);
    let name = text.strip_suffix('.').unwrap_or(text);
    let good = !name.is_empty() && name.len() <= 253 && name.bytes().all(allowed);
    good.then(|| {
        if name.bytes().any(|byte| byte.is_ascii_uppercase()) {
            Cow::Owned(name.to_ascii_lowercase())
        } else {
            Cow::Borrowed(name)
        }
    })
}

/// Checks the length of a field: each entry takes more memory than bytes on the wire.
pub(super) fn check_length(field: &str, count: usize, most: usize) -> Result<(), String> {
    if count > most {
        Err(format!("{field}: {count} entries, want at most {most}"))
    } else {
        Ok(())
    }
}

/// Parses an address of 4 or 16 bytes. IPv4-mapped IPv6 becomes IPv4, as lookups expect.
pub(super) fn ip(bytes: &[u8]) -> Result<IpAddr, String> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    let v6 = || <[u8; 16]>::try_from(bytes).map(|bytes| IpAddr::from(bytes).to_canonical());
    v4.or_else(|_| v6()).map_err(|_| format!("{} bytes, want 4 or 16", bytes.len()))
}

/// Parses a unicast address. An IPv4-mapped IPv6 address becomes IPv4, as lookups use the
/// canonical form.
pub(super) fn unicast(text: &str) -> Option<IpAddr> {
    let ip = text.parse::<IpAddr>().ok()?.to_canonical();
    (!ip.is_unspecified() && !ip.is_multicast()).then_some(ip)
}

/// Returns the port, or 0 if the number is out of range.
pub(super) fn number(value: u32) -> u16 {
    u16::try_from(value).unwrap_or(0)
}

/// Returns the namespace. A slash would make names such as `namespace/hostname` ambiguous.
pub(super) fn namespace(text: String) -> Result<String, String> {
    if text.contains('/') { Err(format!("{} has a slash", shown(&text))) } else { Ok(text) }
}

/// Returns untrusted text in a form that is safe in messages.
pub(super) fn shown(text: &str) -> String {
    const CHARS_MAX: usize = 80;
    let short: String = text.chars().take(CHARS_MAX).collect();
    let dots = if short.len() < text.len() { "…" } else { "" };
    format!("`{}{dots}`", short.escape_debug())
}
