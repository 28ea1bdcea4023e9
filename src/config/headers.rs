//! Metadata that a control plane is sent besides ours.

use http::HeaderName;

use crate::yaml::Value;

/// Metadata of a call: what gRPC and we say ourselves cannot be said here.
pub(super) fn read(value: Value<'_>) -> Option<Vec<(String, String)>> {
    // Values are secrets, also where they stand in the wrong place.
    let read = value.secret().pairs().map(|(entry, value)| {
        let name = entry.key.to_ascii_lowercase();
        let is_ours = matches!(
            &*name,
            "authorization" | "clusterid" | "content-type" | "te"
        );
        let is_name = HeaderName::from_bytes(name.as_bytes()).is_ok();
        if !is_name || is_ours || name.starts_with("grpc-") || name.ends_with("-bin") {
            let what = format!("has `{}`, which cannot be sent", entry.key.escape_debug());
            value.error(what, "the name of a header of your own, such as `x-tenant`");
            return None;
        }
        let wanted = "the value of a header, in printable ASCII";
        let value = value.parsed(wanted, |text| {
            let is_plain = text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
            is_plain.then(|| text.to_owned())
        })?;
        Some((name, value))
    });
    read.collect::<Vec<_>>().into_iter().collect()
}
