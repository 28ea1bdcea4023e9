//! Value that expires, in one atomic word.

use std::sync::atomic::{AtomicU64, Ordering};

/// Value, in the lower half, with the second after the one in which it was recorded. It expires
/// after [`EXPIRY_SECONDS`]; 0 means none.
#[derive(Debug, Default)]
pub(super) struct Expiring(AtomicU64);

/// Time for which a value counts after it was recorded, in seconds.
const EXPIRY_SECONDS: u64 = 60;

impl Expiring {
    /// Returns the value and its age in seconds, unless it has expired.
    pub(super) fn get(&self, second: u64) -> Option<(u32, u64)> {
        let packed = self.0.load(Ordering::Relaxed);
        let recorded = (packed >> 32).checked_sub(1)?;
        let age = second.saturating_sub(recorded);
        let value = u32::try_from(packed & u64::from(u32::MAX)).ok()?;
        (age < EXPIRY_SECONDS).then_some((value, age))
    }

    /// Records a value. The seconds since the start of a process fit 32 bits.
    pub(super) fn set(&self, value: u32, second: u64) {
        let packed = (second + 1) << 32 | u64::from(value);
        // Many tunnels record the same value in a second.
        if self.0.load(Ordering::Relaxed) != packed {
            self.0.store(packed, Ordering::Relaxed);
        }
    }
}
