//! How much may be held, so that no server can fill the memory.

/// Resources and wanted names, of all types together. A mesh of 100,000 workloads has a tenth.
pub(in crate::xds) const ENTRIES_MAX: usize = 1_000_000;
/// Bytes of their names, versions and bodies. A workload of 60-byte names has some 500.
const BYTES_MAX: usize = 512 * 1024 * 1024;
/// Bytes that a name takes beside its own, in the map that holds it.
const OVERHEAD_BYTES: usize = 64;

/// Names and versions of one type in the first request of a stream. gRPC servers take messages of
/// 4 MiB by default, and istiod has that default; 40,000 workloads of 60 bytes are below.
const CLAIMS_BYTES_MAX: usize = 3 * 1024 * 1024;

/// Names that are wanted of one type, which are in that request too: 16,000 of 45 bytes.
const WANTED_BYTES_MAX: usize = 896 * 1024;

/// How much may be held, how much of it may be claimed, and how much wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) entries: usize,
    pub(super) bytes: usize,
    pub(super) claims: usize,
    pub(super) wanted: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            entries: ENTRIES_MAX,
            bytes: BYTES_MAX,
            claims: CLAIMS_BYTES_MAX,
            wanted: WANTED_BYTES_MAX,
        }
    }
}

/// How much is held, and how much may be.
#[derive(Clone, Debug)]
pub(super) struct Usage {
    pub(super) limits: Limits,
    entries: usize,
    bytes: usize,
}

impl Usage {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            entries: 0,
            bytes: 0,
        }
    }

    /// Notes an entry of so many bytes in place of another one, if there was one.
    ///
    /// # Errors
    /// It is too much. What gets smaller never is.
    pub(super) fn put(&mut self, old: Option<usize>, new: usize) -> Result<(), String> {
        let entries = self.entries + usize::from(old.is_none());
        let bytes = (self.bytes + new).saturating_sub(old.unwrap_or(0));
        let Limits {
            entries: most,
            bytes: most_bytes,
            ..
        } = self.limits;
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

    /// Notes that an entry is gone.
    pub(super) fn drop(&mut self, bytes: usize) {
        self.entries = self.entries.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    #[cfg(test)]
    pub(super) fn held(&self) -> (usize, usize) {
        (self.entries, self.bytes)
    }
}

/// Returns the bytes that a name with its version counts.
pub(super) fn cost(name: &str, version: &str) -> usize {
    name.len() + OVERHEAD_BYTES + version.len()
}
