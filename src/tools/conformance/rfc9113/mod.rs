//! RFC 9113 by its sections: raw frames over TLS, and the expected result of each.

mod connection;
mod messages;
mod states;
mod streams;
mod windows;

use super::case::Case;
use super::peer::{Limits, Names};

/// Returns all cases of HTTP/2, for a gateway with these limits.
pub(super) fn cases(to: &Names, limits: Limits) -> Vec<Case> {
    let parts = [
        connection::cases(to, limits),
        messages::cases(to),
        states::cases(to),
        streams::cases(to),
        windows::cases(),
    ];
    parts.into_iter().flatten().collect()
}
