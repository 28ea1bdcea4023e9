//! What was rejected and why: in the NACK for the server, and kept for people.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write;

/// Bytes of a name. Istio's longest, of a split-horizon workload, is made of six Kubernetes names
/// of at most 253 bytes and an address: 1.6 KiB.
pub(super) const NAME_BYTES_MAX: usize = 2 * 1024;
/// Bytes of one reason; the rest is cut off.
const REASON_BYTES_MAX: usize = 512;
/// Bytes of the message of a NACK.
pub(super) const NACK_BYTES_MAX: usize = 4 * 1024;
/// Room for `; and 18446744073709551615 more`.
const MORE_BYTES: usize = 31;
/// Rejections of one type that are kept for people: 3 KiB each at most.
pub(super) const LISTED_MAX: usize = 1_000;

/// What is known to be rejected of one type, until a good version or a removal comes.
#[derive(Clone, Debug, Default)]
pub(super) struct Rejected {
    /// By name. All that have no name that could ever be held share the empty one.
    entries: BTreeMap<Box<str>, Rejection>,
    /// How many names one response had beyond those, and the most that one had on this stream.
    left_out: usize,
    left_out_most: usize,
}

/// Why a resource was rejected, and in which version.
#[derive(Clone, Debug)]
struct Rejection {
    reason: Box<str>,
    version: Box<str>,
}

impl Rejected {
    /// Notes a rejection, or if too many are there already only that there is one more.
    pub(super) fn put(&mut self, name: &str, version: &str, reason: &str) {
        let name = if has_use(name).is_ok() { name } else { "" };
        if self.entries.len() >= LISTED_MAX && !self.entries.contains_key(name) {
            self.left_out += usize::from(!name.is_empty());
            self.left_out_most = self.left_out_most.max(self.left_out);
            return;
        }
        let rejection = Rejection {
            reason: clip(reason, REASON_BYTES_MAX).into(),
            version: clip(version, REASON_BYTES_MAX).into(),
        };
        self.entries.insert(name.into(), rejection);
    }

    /// There is a good version of it, or none any more.
    pub(super) fn clear(&mut self, name: &str) {
        self.entries.remove(name);
    }

    /// A new response of the type: what had no name is out of date.
    pub(super) fn clear_nameless(&mut self) {
        self.entries.remove("");
        self.left_out = 0;
    }

    /// A new stream, on which the server sends again all that is not held.
    pub(super) fn clear_all(&mut self) {
        *self = Self::default();
    }

    /// Forgets what a response does not name that names everything.
    pub(super) fn keep(&mut self, named: &HashSet<&str>) {
        self.entries.retain(|name, _| named.contains(&**name));
    }

    /// How many more there are at least, of which only the number is known.
    pub(super) fn unlisted(&self) -> usize {
        self.left_out_most
    }

    /// Name, reason and version of each, by name.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &str, &str)> + Clone {
        let entries = self.entries.iter();
        entries.map(|(name, entry)| (&**name, &*entry.reason, &*entry.version))
    }
}

/// The message of a NACK in the making: `name: reason; …`, and how many did not fit.
#[derive(Debug, Default)]
pub(super) struct Nack {
    text: String,
    left_out: usize,
}

impl Nack {
    /// Adds a rejected resource.
    pub(super) fn add(&mut self, name: &str, reason: &str) {
        let name = match name {
            "" => "(no name)",
            name => clip(name, NAME_BYTES_MAX),
        };
        let reason = clip(reason, REASON_BYTES_MAX);
        let separator = if self.text.is_empty() { "" } else { "; " };
        let bytes = self.text.len() + separator.len() + name.len() + ": ".len() + reason.len();
        if self.left_out > 0 || bytes > NACK_BYTES_MAX - MORE_BYTES {
            self.left_out += 1;
            return;
        }
        // Writing to a string cannot fail.
        let _ = write!(self.text, "{separator}{name}: {reason}");
    }

    /// The message, or none if nothing was rejected.
    pub(super) fn message(mut self) -> Option<String> {
        if self.left_out > 0 {
            let _ = write!(self.text, "; and {} more", self.left_out);
        }
        (!self.text.is_empty()).then_some(self.text)
    }
}

/// Whether a resource can be held under this name.
///
/// # Errors
/// Why not.
pub(super) fn has_use(name: &str) -> Result<(), String> {
    match name {
        "" => Err("it has no name".to_owned()),
        super::messages::ALL => Err("this name stands for all resources".to_owned()),
        name if name.len() > NAME_BYTES_MAX => {
            let bytes = name.len();
            Err(format!(
                "its name has {bytes} bytes, and at most {NAME_BYTES_MAX} are taken"
            ))
        }
        _ => Ok(()),
    }
}

/// The longest beginning of a text that has at most so many bytes.
pub(super) fn clip(text: &str, bytes: usize) -> &str {
    let mut end = text.len().min(bytes);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or(text)
}
