//! Static and dynamic table of HPACK (RFC 7541 sections 2.3, 4 and appendix A).

use std::collections::VecDeque;
use std::sync::Arc;

use super::error::HpackError;

/// Limit of the dynamic table in bytes: SETTINGS_HEADER_TABLE_SIZE, of which we advertise the
/// default (RFC 9113 section 6.5.2).
pub(super) const TABLE_BYTES_MAX: usize = 4096;
/// Size of an entry in excess of its octets (RFC 7541 section 4.1).
const ENTRY_OVERHEAD_BYTES: usize = 32;

/// Name of an entry. Entries share it, so that an insertion by index copies no name.
#[derive(Clone, Debug)]
pub(super) enum Name {
    Static(&'static [u8]),
    Shared(Arc<[u8]>),
}

impl Name {
    fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Static(name) => name,
            Self::Shared(name) => name,
        }
    }
}

#[derive(Debug)]
struct Entry {
    name: Name,
    value: Box<[u8]>,
}

impl Entry {
    fn size(&self) -> usize {
        self.name.as_bytes().len() + self.value.len() + ENTRY_OVERHEAD_BYTES
    }
}

/// Dynamic table. The newest entry has the lowest index.
#[derive(Debug)]
pub(super) struct DynamicTable {
    entries: VecDeque<Entry>,
    size: usize,
    size_max: usize,
}

impl Default for DynamicTable {
    fn default() -> Self {
        Self { entries: VecDeque::new(), size: 0, size_max: TABLE_BYTES_MAX }
    }
}

impl DynamicTable {
    #[cfg(test)]
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Returns the name and value of an index in either table.
    pub(super) fn get(&self, index: usize) -> Result<(&[u8], &[u8]), HpackError> {
        let index = index.checked_sub(1).ok_or(HpackError::Index)?;
        if let Some((name, value)) = STATIC.get(index) {
            return Ok((name.as_bytes(), value.as_bytes()));
        }
        let entry = self.entries.get(index - STATIC.len()).ok_or(HpackError::Index)?;
        Ok((entry.name.as_bytes(), &entry.value))
    }

    /// Returns the name of an index in either table.
    pub(super) fn name(&self, index: usize) -> Result<Name, HpackError> {
        let index = index.checked_sub(1).ok_or(HpackError::Index)?;
        if let Some((name, _)) = STATIC.get(index) {
            return Ok(Name::Static(name.as_bytes()));
        }
        let entry = self.entries.get(index - STATIC.len());
        Ok(entry.ok_or(HpackError::Index)?.name.clone())
    }

    /// Inserts an entry and evicts old ones. An entry above the limit empties the table and is not
    /// inserted (RFC 7541 section 4.4).
    pub(super) fn insert(&mut self, name: Name, value: &[u8]) {
        let value = value.into();
        let entry = Entry { name, value };
        let size = entry.size();
        self.evict(self.size_max.saturating_sub(size));
        if size <= self.size_max {
            self.size += size;
            self.entries.push_front(entry);
        }
    }

    /// Changes the limit, and evicts entries above it (RFC 7541 section 4.3).
    pub(super) fn resize(&mut self, size_max: usize) {
        self.size_max = size_max;
        self.evict(size_max);
    }

    /// Evicts the oldest entries until the table has at most `size` bytes.
    fn evict(&mut self, size: usize) {
        while self.size > size
            && let Some(entry) = self.entries.pop_back()
        {
            self.size -= entry.size();
        }
    }
}

/// Static table (RFC 7541 appendix A), from index 1.
const STATIC: [(&str, &str); 61] = [
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    (":status", "200"),
    (":status", "204"),
    (":status", "206"),
    (":status", "304"),
    (":status", "400"),
    (":status", "404"),
    (":status", "500"),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    ("accept-language", ""),
    ("accept-ranges", ""),
    ("accept", ""),
    ("access-control-allow-origin", ""),
    ("age", ""),
    ("allow", ""),
    ("authorization", ""),
    ("cache-control", ""),
    ("content-disposition", ""),
    ("content-encoding", ""),
    ("content-language", ""),
    ("content-length", ""),
    ("content-location", ""),
    ("content-range", ""),
    ("content-type", ""),
    ("cookie", ""),
    ("date", ""),
    ("etag", ""),
    ("expect", ""),
    ("expires", ""),
    ("from", ""),
    ("host", ""),
    ("if-match", ""),
    ("if-modified-since", ""),
    ("if-none-match", ""),
    ("if-range", ""),
    ("if-unmodified-since", ""),
    ("last-modified", ""),
    ("link", ""),
    ("location", ""),
    ("max-forwards", ""),
    ("proxy-authenticate", ""),
    ("proxy-authorization", ""),
    ("range", ""),
    ("referer", ""),
    ("refresh", ""),
    ("retry-after", ""),
    ("server", ""),
    ("set-cookie", ""),
    ("strict-transport-security", ""),
    ("transfer-encoding", ""),
    ("user-agent", ""),
    ("vary", ""),
    ("via", ""),
    ("www-authenticate", ""),
];
