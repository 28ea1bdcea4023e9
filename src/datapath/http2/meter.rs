//! Frame meter: limits the work that a connection causes relative to the data that it carries.
//!
//! A peer that floods with resets, CONTINUATION, PING, SETTINGS, PRIORITY, WINDOW_UPDATE, empty
//! DATA, unknown frames, HPACK work or KeyUpdates could occupy its whole worker. Therefore every
//! frame has a price; tunnel bytes, answers and time earn credit. A connection without credit is
//! ended with ENHANCE_YOUR_CALM (RFC 9113 section 7).

use std::time::Duration;

use tokio::time::Instant;

use super::frame::{FrameHeader, HEADER_BYTES, flag, kind};

/// Initial and maximum credit of a connection. A client that opens 256 tunnels at once with 1
/// KiB of headers each needs about 9,000.
const CREDIT_MAX: u64 = 20_000;
/// Credit per second. A quiet peer needs 0.1 PING a second; a pool whose clients abandon their
/// tunnels before the first byte arrives may do so some 200 times a second.
const CREDIT_PER_SECOND: u64 = 2_000;
/// Tunnel bytes, in either direction, per credit: a DATA frame that fills a TLS record pays for
/// about two hundred window updates.
const BYTES_PER_CREDIT: u64 = 64;
/// Credit for a sent frame with an answer or data: the peer acknowledges what it receives.
const CREDIT_PER_ANSWER: u64 = 4;
/// Credit for a rejection. A client that tries an unavailable service 500 times a second must
/// not lose its tunnels to other services.
const CREDIT_PER_REFUSAL: u64 = 2;

/// Prices in credits, by the work that a frame causes.
const PRICE_CONTROL: u64 = 2;
const PRICE_REQUEST: u64 = 4;
const PRICE_RESET: u64 = 4;
const PRICE_CONTINUATION: u64 = 10;
/// A KeyUpdate derives keys for one or both directions. A peer needs one for 2²⁴ records.
const PRICE_KEY_UPDATE: u64 = 40;
/// Header block bytes included in the price of a request: Istio's headers, mostly indexed.
const HEADER_BYTES_FREE: u64 = 128;
/// Further header block bytes per credit: HPACK may expand each byte to a field.
const HEADER_BYTES_PER_CREDIT: u64 = 32;
/// Size below which a DATA frame without END_STREAM is charged as a control frame.
const CHARGED_DATA_BYTES: u64 = 32;

/// Credit of one connection.
#[derive(Debug)]
pub struct FrameMeter {
    credit: u64,
    /// Bytes that have not earned a whole credit yet.
    bytes: u64,
    credited_at: Instant,
}

impl Default for FrameMeter {
    /// Returns the meter of a new connection.
    fn default() -> Self {
        Self {
            credit: CREDIT_MAX,
            bytes: 0,
            credited_at: Instant::now(),
        }
    }
}

impl FrameMeter {
    /// Charges for a received frame.
    pub fn received(&mut self, frame: FrameHeader) -> Result<(), CreditExhausted> {
        if frame.kind == kind::DATA {
            self.earn_bytes(frame.length as u64);
        }
        self.charge(price(frame))
    }

    /// Charges for a received TLS record with `length` bytes of application data, or none. A record
    /// that holds less than a frame header pays as much as a small frame.
    pub fn received_record(&mut self, length: usize) -> Result<(), CreditExhausted> {
        if length < HEADER_BYTES {
            self.charge(PRICE_CONTROL)
        } else {
            Ok(())
        }
    }

    /// Charges for a received KeyUpdate (RFC 8446 section 4.6.3).
    pub fn received_key_update(&mut self) -> Result<(), CreditExhausted> {
        self.charge(PRICE_KEY_UPDATE)
    }

    fn charge(&mut self, price: u64) -> Result<(), CreditExhausted> {
        if price > self.credit {
            self.earn_time();
        }
        let left = self.credit.checked_sub(price).ok_or(CreditExhausted)?;
        self.credit = left;
        Ok(())
    }

    /// Earns credit for a sent frame.
    pub fn sent(&mut self, kind: u8, flags: u8, length: usize) {
        match kind {
            kind::HEADERS if flags & flag::END_STREAM != 0 => self.earn(CREDIT_PER_REFUSAL),
            kind::DATA | kind::HEADERS => {
                self.earn(CREDIT_PER_ANSWER);
                self.earn_bytes(length as u64);
            }
            _ => {}
        }
    }

    fn earn(&mut self, credit: u64) {
        self.credit = (self.credit + credit).min(CREDIT_MAX);
    }

    fn earn_bytes(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.earn(self.bytes / BYTES_PER_CREDIT);
        self.bytes %= BYTES_PER_CREDIT;
    }

    fn earn_time(&mut self) {
        let step = Duration::from_secs(1) / 10;
        let steps = self.credited_at.elapsed().as_millis() / step.as_millis();
        let steps = u32::try_from(steps).unwrap_or(u32::MAX);
        if steps > 0 {
            self.credited_at += step.saturating_mul(steps);
            self.earn(u64::from(steps) * CREDIT_PER_SECOND / 10);
        }
    }
}

/// Error of a connection whose credit is used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreditExhausted;

/// Returns the price of a received frame.
fn price(frame: FrameHeader) -> u64 {
    let length = frame.length as u64;
    match frame.kind {
        kind::DATA if length >= CHARGED_DATA_BYTES || frame.has(flag::END_STREAM) => 0,
        kind::HEADERS => {
            let excess = length.saturating_sub(HEADER_BYTES_FREE);
            PRICE_REQUEST + excess / HEADER_BYTES_PER_CREDIT
        }
        kind::CONTINUATION => PRICE_CONTINUATION + length / HEADER_BYTES_PER_CREDIT,
        kind::RST_STREAM => PRICE_RESET,
        // Unknown frames are skipped, so nothing else bounds their length.
        _ => PRICE_CONTROL + length / BYTES_PER_CREDIT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: u8 = kind::DATA;
    const HEADERS: u8 = kind::HEADERS;
    const UNKNOWN: u8 = 0xbe;

    fn frame(kind: u8, flags: u8, length: usize) -> FrameHeader {
        FrameHeader {
            length,
            kind,
            flags,
            stream: 1,
        }
    }

    fn meter() -> FrameMeter {
        FrameMeter::default()
    }

    /// Returns how many of these frames a fresh connection may send at once.
    fn allowed(frame: FrameHeader) -> usize {
        let mut meter = meter();
        (0..1_000_000)
            .take_while(|_| meter.received(frame).is_ok())
            .count()
    }

    #[tokio::test(start_paused = true)]
    async fn frames_that_carry_nothing_use_the_credit_up() {
        assert_eq!(allowed(frame(kind::PING, 0, 8)), 10_000);
        assert_eq!(allowed(frame(DATA, 0, 0)), 10_000);
        assert_eq!(allowed(frame(kind::RST_STREAM, 0, 4)), 5_000);
        assert_eq!(allowed(frame(UNKNOWN, 0, 16_384)), 77);
        // A header block of one-byte references.
        assert_eq!(allowed(frame(HEADERS, 4, 4_000)), 160);
        assert_eq!(allowed(frame(kind::CONTINUATION, 0, 0)), 2_000);
    }

    #[tokio::test(start_paused = true)]
    async fn records_that_carry_nothing_use_the_credit_up() {
        let allowed = |record: fn(&mut FrameMeter) -> Result<(), CreditExhausted>| {
            let mut meter = meter();
            let records = (0..1_000_000).take_while(|_| record(&mut meter).is_ok());
            records.count()
        };
        assert_eq!(allowed(|meter| meter.received_record(0)), 10_000);
        assert_eq!(allowed(|meter| meter.received_record(8)), 10_000);
        assert_eq!(allowed(|meter| meter.received_record(9)), 1_000_000);
        assert_eq!(allowed(FrameMeter::received_key_update), 500);
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_of_tunnels_never_do() {
        assert_eq!(allowed(frame(DATA, 0, 16_384)), 1_000_000);
        assert_eq!(allowed(frame(DATA, 0, 128)), 1_000_000);
        assert_eq!(allowed(frame(DATA, flag::END_STREAM, 0)), 1_000_000);
    }

    #[tokio::test(start_paused = true)]
    async fn answers_pay_for_small_requests_and_for_tunnels_that_end_by_reset() {
        let mut meter = meter();
        for _ in 0..1_000_000 {
            meter
                .received(frame(DATA, 0, 1))
                .expect("one byte of a request");
            meter.sent(DATA, 0, 1);
        }
        for _ in 0..100_000 {
            meter.received(frame(HEADERS, 4, 100)).expect("a CONNECT");
            meter.sent(HEADERS, 4, 10);
            meter.received(frame(DATA, 0, 500)).expect("an inner hello");
            meter.sent(DATA, 0, 500);
            meter
                .received(frame(kind::RST_STREAM, 0, 4))
                .expect("its end");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pool_whose_small_tunnels_all_end_by_reset_is_no_flood() {
        let mut meter = meter();
        for _ in 0..100_000 {
            meter.received(frame(HEADERS, 4, 100)).expect("a CONNECT");
            meter.sent(HEADERS, 4, 10);
            meter.received(frame(DATA, 0, 100)).expect("a request");
            meter.sent(DATA, 0, 100);
            meter
                .received(frame(kind::RST_STREAM, 0, 4))
                .expect("its end");
            tokio::time::advance(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_tries_a_dead_service_again_and_again_is_no_flood() {
        let mut meter = meter();
        for _ in 0..100_000 {
            meter.received(frame(HEADERS, 4, 120)).expect("a CONNECT");
            meter.sent(HEADERS, flag::END_STREAM | 4, 10);
            tokio::time::advance(Duration::from_millis(2)).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_we_must_answer_by_ourselves_earns_nothing() {
        let mut meter = meter();
        let sent = (0..1_000_000).take_while(|_| {
            meter.sent(kind::PING, 1, 8);
            meter.received(frame(kind::PING, 0, 8)).is_ok()
        });
        assert_eq!(sent.count(), 10_000);
    }

    #[tokio::test(start_paused = true)]
    async fn credit_comes_back_with_time() {
        let mut meter = meter();
        while meter.received(frame(kind::PING, 0, 8)).is_ok() {}
        tokio::time::advance(Duration::from_secs(1)).await;
        let more = (0..1_000_000).take_while(|_| meter.received(frame(kind::PING, 0, 8)).is_ok());
        assert_eq!(more.count(), 1_000);
        tokio::time::advance(Duration::from_secs(3600)).await;
        let full = (0..1_000_000).take_while(|_| meter.received(frame(kind::PING, 0, 8)).is_ok());
        assert_eq!(full.count(), 10_000, "no more than a fresh connection has");
    }
}
