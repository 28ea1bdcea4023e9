//! Progress of the connection inside a tunnel, which tells a normal end from a failure when the
//! peer resets the tunnel.
//!
//! Clients of double HBONE end every tunnel by a reset once its inner connection has closed:
//! ztunnel by CANCEL, and Envoy by INTERNAL_ERROR after the inner close_notify
//! (docs/wire-contract.md 1.6).

use crate::reason::Reason;

/// Exchanges of the inner connection, and the sides that have closed it.
#[derive(Clone, Copy, Debug, Default)]
pub struct InnerProgress(u8);

/// Number of steps in two exchanges, each of them bytes of the peer and then bytes of the
/// endpoint: the TLS 1.3 handshake, and one exchange after it.
const ESTABLISHED_STEPS: u8 = 4;
/// Bits of the step count.
const STEP_MASK: u8 = 0x0f;
/// Bit for an alert as the last bytes of the peer. The next bit is that of the endpoint.
const PEER_CLOSED: u8 = 0x40;
/// Header of an encrypted TLS 1.3 record with an alert: 2 bytes of alert, its type, and a tag of
/// 16 (RFC 8446 section 5.2). An alert after the handshake ends its direction. Other content of 2
/// bytes has the same size, and more may follow it.
const ALERT_HEAD: [u8; 5] = [23, 3, 3, 0, 2 + 1 + 16];
const ALERT_BYTES: usize = ALERT_HEAD.len() + 19;

impl InnerProgress {
    pub fn record_peer_bytes(&mut self, bytes: &[u8]) {
        self.record(0, bytes);
    }

    pub fn record_endpoint_bytes(&mut self, bytes: &[u8]) {
        self.record(1, bytes);
    }

    fn record(&mut self, turn: u8, bytes: &[u8]) {
        let steps = self.0 & STEP_MASK;
        if steps < ESTABLISHED_STEPS {
            self.0 += u8::from(steps % 2 == turn);
            return;
        }
        let closed = PEER_CLOSED << turn;
        if ends_in_alert(bytes) {
            self.0 |= closed;
        } else {
            self.0 &= !closed;
        }
    }

    /// Returns the reason of an end: [`Reason::Completed`] if the reset by the peer is the normal
    /// end of an inner connection. The endpoint did not get the last `unsent` bytes of the peer.
    /// `is_lost` is true if the peer did not get all bytes of the endpoint.
    ///
    /// CANCEL and NO_ERROR are normal after two exchanges if nothing but the peer's alert is lost.
    /// A reset in the same flight overtakes that alert. Any other code is normal only after an
    /// alert.
    pub fn classify_end(self, reason: Reason, unsent: usize, is_lost: bool) -> Reason {
        let is_established = self.0 & STEP_MASK == ESTABLISHED_STEPS;
        let alert = match self.0 & PEER_CLOSED {
            0 => 0,
            _ => ALERT_BYTES,
        };
        match reason {
            Reason::DownstreamCancelled if is_established && unsent <= alert && !is_lost => {
                Reason::Completed
            }
            Reason::DownstreamReset if self.0 & (PEER_CLOSED | PEER_CLOSED << 1) != 0 => {
                Reason::Completed
            }
            reason => reason,
        }
    }
}

fn ends_in_alert(bytes: &[u8]) -> bool {
    let start = bytes.len().checked_sub(ALERT_BYTES);
    let last = start.and_then(|start| bytes.get(start..));
    last.is_some_and(|last| last.starts_with(&ALERT_HEAD))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alert() -> Vec<u8> {
        [&ALERT_HEAD[..], &[7; 19]].concat()
    }

    /// Returns the reasons of a reset by CANCEL and of one by INTERNAL_ERROR, without and with
    /// lost bytes.
    fn judged(progress: InnerProgress) -> [Reason; 4] {
        let of = |reason| [false, true].map(|is_lost| progress.classify_end(reason, 0, is_lost));
        let [first, second] = of(Reason::DownstreamCancelled);
        let [third, fourth] = of(Reason::DownstreamReset);
        [first, second, third, fourth]
    }

    #[test]
    fn a_reset_is_a_normal_end_once_the_inner_connection_has_served_and_closed() {
        let (cancelled, reset) = (Reason::DownstreamCancelled, Reason::DownstreamReset);
        let done = Reason::Completed;
        let broken = [cancelled, cancelled, reset, reset];
        let mut progress = InnerProgress::default();
        progress.record_endpoint_bytes(b"a greeting");
        assert_eq!(judged(progress), broken);
        progress.record_peer_bytes(b"hello");
        progress.record_peer_bytes(b"more of it");
        progress.record_endpoint_bytes(b"hello");
        // A failed inner handshake ends in an alert too.
        progress.record_peer_bytes(&alert());
        assert_eq!(judged(progress), broken);
        progress.record_endpoint_bytes(b"an answer");
        progress.record_endpoint_bytes(b"more of it");
        assert_eq!(judged(progress), [done, cancelled, reset, reset]);
        let mut closed = progress;
        closed.record_peer_bytes(&[b"before", &alert()[..]].concat());
        let ends = [done, cancelled, done, done];
        assert_eq!(judged(closed), ends);
        closed.record_endpoint_bytes(b"after");
        assert_eq!(judged(closed), ends);
        progress.record_endpoint_bytes(&alert());
        assert_eq!(judged(progress), ends);
        assert_eq!(progress.classify_end(Reason::Revoked, 0, false), Reason::Revoked);
    }

    #[test]
    fn an_alert_is_one_while_it_is_the_last_thing_of_its_direction() {
        let (cancelled, reset) = (Reason::DownstreamCancelled, Reason::DownstreamReset);
        let open = [Reason::Completed, cancelled, reset, reset];
        let mut established = InnerProgress::default();
        for _ in 0..2 {
            established.record_peer_bytes(b"hello");
            established.record_endpoint_bytes(b"hello");
        }
        let mut progress = established;
        progress.record_peer_bytes(&alert());
        progress.record_peer_bytes(b"more");
        assert_eq!(judged(progress), open);
        let mut progress = established;
        progress.record_endpoint_bytes(&alert());
        progress.record_peer_bytes(b"more");
        assert_eq!(judged(progress)[2], Reason::Completed);
        progress.record_endpoint_bytes(b"more");
        assert_eq!(judged(progress), open);
    }

    #[test]
    fn a_cancelled_tunnel_has_lost_nothing_but_the_alert_of_the_peer() {
        let cancelled = Reason::DownstreamCancelled;
        let mut progress = InnerProgress::default();
        for _ in 0..2 {
            progress.record_peer_bytes(b"hello");
            progress.record_endpoint_bytes(b"hello");
        }
        assert_eq!(progress.classify_end(cancelled, 1, false), cancelled);
        let mut answered = progress;
        answered.record_endpoint_bytes(&alert());
        assert_eq!(answered.classify_end(cancelled, 1, false), cancelled);
        progress.record_peer_bytes(&alert());
        let judge = |unsent, is_lost| progress.classify_end(cancelled, unsent, is_lost);
        assert_eq!(judge(ALERT_BYTES, false), Reason::Completed);
        assert_eq!(judge(ALERT_BYTES + 1, false), cancelled);
        assert_eq!(judge(0, true), cancelled);
    }

    #[test]
    fn only_a_record_with_nothing_but_an_alert_is_one() {
        assert!(ends_in_alert(&alert()));
        assert!(!ends_in_alert(&[&alert()[..], b"x"].concat()));
        assert!(!ends_in_alert(&alert()[1..]));
        assert!(!ends_in_alert(&[23; 24]));
        assert!(!ends_in_alert(b""));
    }
}
