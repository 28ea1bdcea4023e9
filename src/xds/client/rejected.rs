//! Rejected resources and their reasons, for NACK messages and for the status.

use std::collections::BTreeMap;
use std::fmt::Write;

use foldhash::HashSet;

/// Bytes of a name. Istio's longest, of a split-horizon workload, is made of six Kubernetes
/// names of at most 253 bytes and an address: 1.6 KiB.
pub(super) const NAME_BYTES_MAX: usize = 2 * 1024;
/// Bytes of one reason; longer ones are truncated.
const REASON_BYTES_MAX: usize = 512;
pub(super) const NACK_BYTES_MAX: usize = 4 * 1024;
/// Bytes reserved for `; and 18446744073709551615 more`.
const MORE_BYTES: usize = 31;
/// Limit of rejections of one type that the status lists, of at most 3 KiB each.
pub(super) const LISTED_MAX: usize = 1_000;

/// Rejected resources of one type. An entry lasts until a valid version or a removal.
#[derive(Clone, Debug, Default)]
pub(super) struct Rejected {
    /// Rejections by name. All resources without a usable name share the empty one.
    entries: BTreeMap<Box<str>, Rejection>,
    /// Number of names beyond the limit in the latest response, and the largest such number on
    /// this stream.
    unlisted_now: usize,
    unlisted_peak: usize,
}

#[derive(Clone, Debug)]
struct Rejection {
    reason: Box<str>,
    version: Box<str>,
}

impl Rejected {
    /// Records a rejection. Beyond [`LISTED_MAX`] it is only counted.
    pub(super) fn put(&mut self, name: &str, version: &str, reason: &str) {
        let name = if check_name(name).is_ok() { name } else { "" };
        if self.entries.len() >= LISTED_MAX && !self.entries.contains_key(name) {
            self.unlisted_now += usize::from(!name.is_empty());
            self.unlisted_peak = self.unlisted_peak.max(self.unlisted_now);
            return;
        }
        let rejection = Rejection {
            reason: truncate(reason, REASON_BYTES_MAX).into(),
            version: truncate(version, REASON_BYTES_MAX).into(),
        };
        self.entries.insert(name.into(), rejection);
    }

    /// Removes a rejection after a valid version or a removal.
    pub(super) fn clear(&mut self, name: &str) {
        self.entries.remove(name);
    }

    /// Removes the rejection without a usable name when a new response of the type begins.
    pub(super) fn remove_unnamed(&mut self) {
        self.entries.remove("");
        self.unlisted_now = 0;
    }

    /// Removes all rejections at the first response of a stream, on which the server sends
    /// again everything that is not held.
    pub(super) fn clear_all(&mut self) {
        *self = Self::default();
    }

    /// Removes rejections that a complete response does not name.
    pub(super) fn retain_named(&mut self, named: &HashSet<&str>) {
        self.entries.retain(|name, _| named.contains(&**name));
    }

    /// Returns the number of rejections that are only counted; a lower bound.
    pub(super) fn unlisted(&self) -> usize {
        self.unlisted_peak
    }

    /// Returns name, reason and version of each rejection, ordered by name.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &str, &str)> + Clone {
        self.entries.iter().map(|(name, entry)| (&**name, &*entry.reason, &*entry.version))
    }
}

/// Builder of the message of a NACK: `name: reason; …`, and the number of entries that did not
/// fit.
#[derive(Debug, Default)]
pub(super) struct NackBuilder {
    text: String,
    left_out: usize,
}

impl NackBuilder {
    pub(super) fn add(&mut self, name: &str, reason: &str) {
        let name = match name {
            "" => "(no name)",
            name => truncate(name, NAME_BYTES_MAX),
        };
        let reason = truncate(reason, REASON_BYTES_MAX);
        let separator = if self.text.is_empty() { "" } else { "; " };
        let bytes = self.text.len() + separator.len() + name.len() + ": ".len() + reason.len();
        if self.left_out > 0 || bytes > NACK_BYTES_MAX - MORE_BYTES {
            self.left_out += 1;
            return;
        }
        // Writing to a string cannot fail.
        let _ = write!(self.text, "{separator}{name}: {reason}");
    }

    /// Returns the message; none if nothing was rejected.
    pub(super) fn message(mut self) -> Option<String> {
        if self.left_out > 0 {
            let _ = write!(self.text, "; and {} more", self.left_out);
        }
        (!self.text.is_empty()).then_some(self.text)
    }
}

/// Checks that a resource can be held under this name.
pub(super) fn check_name(name: &str) -> Result<(), String> {
    match name {
        "" => Err("it has no name".to_owned()),
        super::messages::WILDCARD => Err("the name `*` is reserved".to_owned()),
        name if name.len() > NAME_BYTES_MAX => {
            let bytes = name.len();
            Err(format!("name: {bytes} bytes, want at most {NAME_BYTES_MAX}"))
        }
        _ => Ok(()),
    }
}

/// Returns the longest prefix of a text within a number of bytes.
pub(super) fn truncate(text: &str, bytes: usize) -> &str {
    let mut end = text.len().min(bytes);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or(text)
}
