//! States of a stream, and the results of frames in them.

use std::borrow::Cow;

use derive_more::Display;

/// Error codes (RFC 9113 section 7).
pub(super) const PROTOCOL_ERROR: u32 = 1;
pub(super) const INTERNAL_ERROR: u32 = 2;
pub(super) const FLOW_CONTROL_ERROR: u32 = 3;
pub(super) const STREAM_CLOSED: u32 = 5;
pub(super) const FRAME_SIZE_ERROR: u32 = 6;
pub(super) const COMPRESSION_ERROR: u32 = 9;

/// State of stream 1 before the frames of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// No SETTINGS and no preface were sent.
    Unconnected,
    Idle,
    Open,
    /// The peer has sent END_STREAM.
    HalfClosedRemote,
    /// The gateway has sent END_STREAM.
    HalfClosedLocal,
    /// Both have sent END_STREAM.
    Ended,
    /// The peer has sent RST_STREAM.
    Reset,
    /// The gateway has sent RST_STREAM.
    ResetByGateway,
    /// The gateway has answered with an error and END_STREAM.
    Rejected,
}

/// Result of the frames of a case.
#[derive(Clone, Debug, Display, PartialEq, Eq)]
pub(super) enum Outcome {
    #[display("GOAWAY {}", h2::Reason::from(*_0))]
    Connection(u32),
    /// The connection ends without GOAWAY.
    #[display("close")]
    Closed,
    #[display("RST_STREAM {}", h2::Reason::from(*_0))]
    Stream(u32),
    #[display("status {_0}")]
    Status(u16),
    /// The bytes that the endpoint returns in stream 1.
    #[display("{} bytes of the endpoint", _0.len())]
    Data(Cow<'static, [u8]>),
    /// Nothing but the answer to PING.
    #[display("no effect")]
    Ignored,
}

pub(super) const fn data(bytes: &'static [u8]) -> Outcome {
    Outcome::Data(Cow::Borrowed(bytes))
}

impl Outcome {
    /// Reports whether a gateway conforms by this outcome where `self` is Strait's own.
    ///
    /// A server may answer a malformed request before it resets it (RFC 9113 section 8.1.1), may
    /// treat an error of a stream as one of the connection and use a generic code in place of a
    /// specific one (section 5.4), and may close without GOAWAY (section 5.4.1). Any error rejects
    /// a tunnel.
    pub(super) fn permits(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Stream(PROTOCOL_ERROR), Self::Status(400..=499)) => true,
            (Self::Stream(1..), Self::Stream(code) | Self::Connection(code))
            | (Self::Connection(_), Self::Connection(code))
                if matches!(*code, PROTOCOL_ERROR | INTERNAL_ERROR) =>
            {
                true
            }
            (Self::Stream(code), Self::Connection(other)) => code == other,
            (Self::Status(400), Self::Connection(PROTOCOL_ERROR) | Self::Closed) => true,
            (Self::Connection(_) | Self::Stream(1..), Self::Closed) => true,
            (Self::Status(400..), Self::Status(400..) | Self::Stream(_)) => true,
            (one, other) => one == other,
        }
    }
}

impl State {
    /// Reports whether the endpoint has to end first, or stay open after its client.
    pub(super) fn needs_script(self) -> bool {
        matches!(self, Self::HalfClosedRemote | Self::HalfClosedLocal | Self::Ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generic_codes_and_the_end_of_the_connection_conform_and_no_effect_does_not() {
        let size = Outcome::Connection(FRAME_SIZE_ERROR);
        let closed = Outcome::Stream(STREAM_CLOSED);
        for (one, other, conforms) in [
            (&size, Outcome::Connection(PROTOCOL_ERROR), true),
            (&size, Outcome::Connection(STREAM_CLOSED), false),
            (&size, Outcome::Closed, true),
            (&size, Outcome::Stream(FRAME_SIZE_ERROR), false),
            (&closed, Outcome::Connection(INTERNAL_ERROR), true),
            (&closed, Outcome::Stream(FRAME_SIZE_ERROR), false),
            (&closed, Outcome::Ignored, false),
            (&Outcome::Ignored, Outcome::Connection(PROTOCOL_ERROR), false),
        ] {
            assert_eq!(one.permits(&other), conforms, "{one}, {other}");
        }
    }
}
