//! Certificate revocation lists, as `trust.crl` names them.

use std::path::PathBuf;

use serde::Serialize;

use super::serialize::lossy_paths;
use crate::yaml::Value;

/// Certificate revocation lists (RFC 5280) for the leaves and intermediates of peers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Crl {
    /// The files: PEM with any number of lists, or one list in DER. Required, at least one.
    #[serde(serialize_with = "lossy_paths")]
    pub files: Vec<PathBuf>,
    /// A certificate whose issuer's list is past its nextUpdate. Default: reject.
    pub on_stale: CrlPolicy,
    /// A certificate whose issuer has no list, and a file that is absent or empty. Default: reject.
    pub on_missing: CrlPolicy,
}

/// The treatment of a certificate whose revocation status is not certain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CrlPolicy {
    /// The certificate is refused.
    Reject,
    /// The certificate counts as not revoked.
    Accept,
}

/// Reads `trust.crl`.
pub(super) fn read(value: Value<'_>) -> Option<Crl> {
    let mut fields = value.fields("trust.crl")?;
    let words = [("reject", CrlPolicy::Reject), ("accept", CrlPolicy::Accept)];
    let mut policy = |key| {
        let said = fields.get(key);
        said.map_or(Some(CrlPolicy::Reject), |said| said.choice(&words))
    };
    let (on_stale, on_missing) = (policy("on_stale"), policy("on_missing"));
    let list = fields.need("files", "[crl.pem]");
    fields.finish();
    let list = list?;
    if list.is_vacant() {
        list.error("is empty", "the path of each file, or remove `trust.crl`");
        return None;
    }
    let path = |file: Value<'_>| match on_missing {
        Some(CrlPolicy::Accept) => file.watched_path(),
        _ => file.credential_path(),
    };
    let files: Vec<_> = list.items().map(path).collect();
    Some(Crl {
        files: files.into_iter().collect::<Option<_>>()?,
        on_stale: on_stale?,
        on_missing: on_missing?,
    })
}
