//! Limits of held state, so that no server can exhaust the memory.

/// Limit of resources and wanted names, of all types together. A mesh of 100,000 workloads has
/// a tenth.
pub(in crate::xds) const ENTRIES_MAX: usize = 1_000_000;
/// Limit of the bytes of their names, versions and bodies. A workload with 60-byte names has
/// some 500.
const BYTES_MAX: usize = 512 * 1024 * 1024;
/// Bytes of overhead per name in the map that holds it.
const OVERHEAD_BYTES: usize = 64;

/// Limit of names and versions of one type in the first request of a stream, in bytes. gRPC
/// servers, istiod included, accept messages of 4 MiB by default. 40,000 workloads of 60 bytes
/// are below.
const CLAIMS_BYTES_MAX: usize = 3 * 1024 * 1024;

/// Limit of the wanted names of one type in that request, in bytes: 16,000 names of 45 bytes.
const WANTED_BYTES_MAX: usize = 896 * 1024;

/// Limits of held, claimed and wanted state.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) entries: usize,
    pub(super) bytes: usize,
    pub(super) initial_versions_bytes: usize,
    pub(super) wanted: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            entries: ENTRIES_MAX,
            bytes: BYTES_MAX,
            initial_versions_bytes: CLAIMS_BYTES_MAX,
            wanted: WANTED_BYTES_MAX,
        }
    }
}

/// Current usage and its limits.
#[derive(Clone, Debug)]
pub(super) struct Usage {
    pub(super) limits: Limits,
    entries: usize,
    bytes: usize,
}

impl Usage {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, entries: 0, bytes: 0 }
    }

    /// Records an entry of `new` bytes, replacing one of `old` bytes if there was one.
    ///
    /// # Errors
    /// The limit that the entry would exceed. An entry that shrinks is always accepted.
    pub(super) fn put(&mut self, old: Option<usize>, new: usize) -> Result<(), String> {
        let entries = self.entries + usize::from(old.is_none());
        let bytes = (self.bytes + new).saturating_sub(old.unwrap_or(0));
        let Limits { entries: most, bytes: most_bytes, .. } = self.limits;
        if entries > self.entries && entries > most {
            return Err(format!("{most} resources are held, which is the limit"));
        }
        if bytes > self.bytes && bytes > most_bytes {
            return Err(format!(
                "names and bodies would take {bytes} bytes, over the limit of {most_bytes}"
            ));
        }
        (self.entries, self.bytes) = (entries, bytes);
        Ok(())
    }

    /// Returns the number of entries.
    pub(super) fn entries(&self) -> usize {
        self.entries
    }

    pub(super) fn drop(&mut self, bytes: usize) {
        self.entries = self.entries.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    #[cfg(test)]
    pub(super) fn held(&self) -> (usize, usize) {
        (self.entries, self.bytes)
    }
}

/// Returns the size of a name with its version that counts against the limits, in bytes.
pub(super) fn accounted_bytes(name: &str, version: &str) -> usize {
    name.len() + OVERHEAD_BYTES + version.len()
}
