//! RFC 9113 by its sections: raw frames over TLS, and the expected result of each.

mod connection;
mod messages;
mod states;
mod streams;
mod windows;

use super::case::Case;
use super::peer::Names;

/// Returns all cases of HTTP/2, for a gateway that accepts frames of up to `frame_max` bytes.
pub(super) fn cases(to: &Names, frame_max: u32) -> Vec<Case> {
    let parts = [
        connection::cases(to, frame_max),
        messages::cases(to),
        states::cases(to),
        streams::cases(to),
        windows::cases(),
    ];
    parts.into_iter().flatten().collect()
}
