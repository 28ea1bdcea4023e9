//! Servers with deliberate faults, to verify that the model detects them.
//!
//! Each fault is a mistake that a real server could make. It changes what the gateway receives, or
//! what it has sent.

use super::super::wire::{
    ACK, DATA, END_STREAM, Frame, GOAWAY, HEADERS, PING, RST_STREAM, Received, SETTINGS,
    WINDOW_UPDATE,
};

/// Largest initial window of the schedules.
pub(super) const INITIAL_WINDOWS_MAX: u32 = 200_000;

/// Fault of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Nothing,
    /// The window of a stream is never given back.
    DropsWindowUpdates,
    /// The payloads of two DATA frames are exchanged.
    SwapsData,
    /// A byte is lost between two writes.
    LosesByte,
    /// A byte on the way to an endpoint is lost.
    LosesByteOfPeer,
    /// The end of an endpoint is not passed on.
    ForgetsEnd,
    /// The end of a peer is not passed on.
    IgnoresEnd,
    /// DATA is sent beyond the window.
    ExceedsWindow,
    /// A smaller initial window does not apply to open streams.
    IgnoresSmallerWindow,
    /// DATA follows the gateway's own reset.
    SendsAfterReset,
    /// The reset of a peer has no effect.
    IgnoresReset,
    /// Resets have another code.
    WrongResetCode,
    /// A stream that is rejected is not reset.
    ForgetsReset,
    /// GOAWAY has another code.
    WrongGoawayCode,
    /// GOAWAY names a stream that was not processed.
    WrongLastStream,
    /// A request is answered before its dial.
    AnswersEarly,
    /// A PING is acknowledged with other bytes.
    WrongPong,
    ForgetsSettingsAck,
    /// The connection ends without close_notify.
    ForgetsAlert,
}

impl Fault {
    pub(super) const WRONG: [Self; 18] = [
        Self::DropsWindowUpdates,
        Self::SwapsData,
        Self::LosesByte,
        Self::LosesByteOfPeer,
        Self::ForgetsEnd,
        Self::IgnoresEnd,
        Self::ExceedsWindow,
        Self::IgnoresSmallerWindow,
        Self::SendsAfterReset,
        Self::IgnoresReset,
        Self::WrongResetCode,
        Self::ForgetsReset,
        Self::WrongGoawayCode,
        Self::WrongLastStream,
        Self::AnswersEarly,
        Self::WrongPong,
        Self::ForgetsSettingsAck,
        Self::ForgetsAlert,
    ];

    /// Changes a frame that the gateway receives. None: it does not receive the frame.
    pub(super) fn change_input(self, frame: &Frame) -> Option<Frame> {
        let mut frame = frame.clone();
        match (self, frame.kind) {
            (Self::IgnoresReset, RST_STREAM) => return None,
            (Self::IgnoresEnd, DATA) => frame.flags &= !END_STREAM,
            (Self::ExceedsWindow, WINDOW_UPDATE) if frame.payload.len() == 4 => {
                let increment = frame.number(0).saturating_mul(2).min(u32::MAX >> 1);
                frame.payload = increment.to_be_bytes().to_vec();
            }
            (Self::IgnoresSmallerWindow, SETTINGS) => {
                if let [0, 4, ..] = *frame.payload {
                    let value = frame.number(2).max(INITIAL_WINDOWS_MAX);
                    frame.payload[2..].copy_from_slice(&value.to_be_bytes());
                }
            }
            _ => {}
        }
        Some(frame)
    }

    /// Changes messages that the gateway has sent.
    pub(super) fn change_output(self, received: &mut Vec<Received>) {
        match self {
            Self::SwapsData => swap_data(received),
            Self::SendsAfterReset => {
                let reset = received.iter().find_map(|message| match message {
                    Received::Frame(frame) if frame.kind == RST_STREAM => Some(frame.stream),
                    _ => None,
                });
                let data = |id| Received::Frame(Frame::new(DATA, 0, id, b""));
                received.extend(reset.map(data));
            }
            Self::ForgetsAlert => {
                received.retain(|message| !matches!(message, Received::Alert(_)));
            }
            _ => received.retain_mut(|message| match message {
                Received::Frame(frame) => self.keeps(frame),
                _ => true,
            }),
        }
    }

    /// Changes a frame. Returns false if it is not sent.
    fn keeps(self, frame: &mut Frame) -> bool {
        match (self, frame.kind) {
            (Self::DropsWindowUpdates, WINDOW_UPDATE) => return frame.stream == 0,
            (Self::LosesByte, DATA) => drop(frame.payload.pop()),
            (Self::ForgetsEnd, DATA) => frame.flags &= !END_STREAM,
            (Self::WrongResetCode, RST_STREAM) => frame.payload[3] ^= 2,
            (Self::ForgetsReset, RST_STREAM) => return frame.number(0) != 0,
            (Self::WrongGoawayCode, GOAWAY) if frame.number(4) != 0 => frame.payload[7] ^= 2,
            (Self::WrongLastStream, GOAWAY) => frame.payload[3] = frame.payload[3].wrapping_add(2),
            (Self::WrongPong, PING) if frame.has(ACK) => frame.payload[0] ^= 1,
            (Self::ForgetsSettingsAck, SETTINGS) => return !frame.has(ACK),
            _ => {}
        }
        true
    }

    /// Returns an answer to a request that no task has answered.
    pub(super) fn early_answer(self, id: u32) -> Option<Received> {
        let answer = Frame::new(HEADERS, 4, id, &[0x88]);
        (self == Self::AnswersEarly).then_some(Received::Frame(answer))
    }
}

/// Exchanges the payloads of the first two DATA frames.
fn swap_data(received: &mut [Received]) {
    let data = received.iter_mut().filter_map(|message| match message {
        Received::Frame(frame) if frame.kind == DATA => Some(&mut frame.payload),
        _ => None,
    });
    let mut data = data.take(2);
    if let (Some(first), Some(second)) = (data.next(), data.next()) {
        std::mem::swap(first, second);
    }
}
