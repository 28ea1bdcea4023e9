//! Whole table.

use std::time::Duration;

use super::case::Case;
use super::peer::Target;
use super::{faults, floods, rfc9113, tls, tunnels};

/// Returns all cases, those of a group after each other. A flood that the gateway does not end has
/// this duration.
pub fn table(to: &Target, flood: Duration) -> Vec<Case> {
    let parts = [
        tls::cases(),
        rfc9113::cases(&to.names, to.limits),
        tunnels::cases(),
        faults::cases(),
        floods::cases(flood),
    ];
    parts.into_iter().flatten().collect()
}
