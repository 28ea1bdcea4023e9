//! Frame meter: limits the work that a connection causes relative to the data that it carries.
//!
//! h2 bounds resets and CONTINUATION, but not PING, SETTINGS, PRIORITY, WINDOW_UPDATE, empty
//! DATA, unknown frames or HPACK work: one peer that floods with them occupies its whole worker.
//! Therefore every frame has a price; tunnel bytes, answers and time earn credit. A connection
//! without credit is ended with ENHANCE_YOUR_CALM (RFC 9113 section 7).

use std::time::Duration;

use tokio::time::Instant;

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
/// Header block bytes included in the price of a request: Istio's headers, mostly indexed.
const HEADER_BYTES_FREE: u64 = 128;
/// Further header block bytes per credit: HPACK may expand each byte to a field.
const HEADER_BYTES_PER_CREDIT: u64 = 32;
/// Size below which a DATA frame without END_STREAM is charged as a control frame.
const SMALL_DATA_BYTES: u64 = 32;

/// Frame types (RFC 9113 section 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const CONTINUATION: u8 = 9;
/// END_STREAM flag of DATA and HEADERS.
const END_STREAM: u8 = 1;
/// Length of the client's connection preface, which precedes its first frame (RFC 9113 section
/// 3.4).
const PREFACE_BYTES: usize = 24;
const FRAME_HEADER_BYTES: usize = 9;

/// Credit of one connection.
#[derive(Debug)]
pub struct FrameMeter {
    inbound: FrameScanner,
    outbound: FrameScanner,
    credit: u64,
    /// Bytes that have not earned a whole credit yet.
    bytes: u64,
    credited_at: Instant,
}

impl FrameMeter {
    /// Returns the meter of a connection before its preface.
    pub fn new() -> Self {
        Self {
            inbound: FrameScanner {
                skip: PREFACE_BYTES,
                ..FrameScanner::default()
            },
            outbound: FrameScanner::default(),
            credit: CREDIT_MAX,
            bytes: 0,
            credited_at: Instant::now(),
        }
    }

    /// Charges for received bytes. Returns the number of frames that begin in `bytes`.
    ///
    /// # Errors
    /// The credit is used up.
    pub fn received(&mut self, bytes: &[u8]) -> Result<u32, CreditExhausted> {
        let (mut price, mut carried, mut frames) = (0, 0, 0);
        self.inbound.scan(bytes, |frame| {
            frames += 1;
            price += frame.price();
            if frame.kind == DATA {
                carried += frame.length;
            }
        });
        self.earn_bytes(carried);
        if price > self.credit {
            self.earn_time();
        }
        match self.credit.checked_sub(price) {
            Some(credit) => {
                self.credit = credit;
                Ok(frames)
            }
            None => Err(CreditExhausted),
        }
    }

    /// Earns credit for sent bytes.
    pub fn sent(&mut self, bytes: &[u8]) {
        let (mut earned, mut carried) = (0, 0);
        self.outbound.scan(bytes, |frame| match frame.kind {
            HEADERS if frame.flags & END_STREAM != 0 => earned += CREDIT_PER_REFUSAL,
            DATA | HEADERS => {
                earned += CREDIT_PER_ANSWER;
                carried += frame.length;
            }
            _ => {}
        });
        self.earn(earned);
        self.earn_bytes(carried);
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

impl Default for FrameMeter {
    fn default() -> Self {
        Self::new()
    }
}

/// Error of a connection whose credit is used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreditExhausted;

/// Fields of a frame header.
#[derive(Clone, Copy, Debug)]
struct Frame {
    length: u64,
    kind: u8,
    flags: u8,
}

impl Frame {
    fn price(self) -> u64 {
        match self.kind {
            DATA if self.length >= SMALL_DATA_BYTES || self.flags & END_STREAM != 0 => 0,
            HEADERS => {
                let excess = self.length.saturating_sub(HEADER_BYTES_FREE);
                PRICE_REQUEST + excess / HEADER_BYTES_PER_CREDIT
            }
            CONTINUATION => PRICE_CONTINUATION + self.length / HEADER_BYTES_PER_CREDIT,
            RST_STREAM => PRICE_RESET,
            // Unknown frames are skipped, so nothing else bounds their length.
            _ => PRICE_CONTROL + self.length / BYTES_PER_CREDIT,
        }
    }
}

/// Incremental scanner for frame headers in arbitrarily segmented bytes.
#[derive(Debug, Default)]
struct FrameScanner {
    /// Bytes to skip before the next header.
    skip: usize,
    header: [u8; FRAME_HEADER_BYTES],
    /// Number of header bytes read.
    filled: usize,
}

impl FrameScanner {
    fn scan(&mut self, mut bytes: &[u8], mut seen: impl FnMut(Frame)) {
        loop {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            if bytes.is_empty() {
                return;
            }
            let taken = (FRAME_HEADER_BYTES - self.filled).min(bytes.len());
            self.header[self.filled..self.filled + taken].copy_from_slice(&bytes[..taken]);
            self.filled += taken;
            bytes = &bytes[taken..];
            if self.filled < FRAME_HEADER_BYTES {
                return;
            }
            let [high, middle, low, kind, flags, ..] = self.header;
            let length = u32::from_be_bytes([0, high, middle, low]);
            self.filled = 0;
            self.skip = length as usize;
            seen(Frame {
                length: u64::from(length),
                kind,
                flags,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PING: u8 = 6;
    const UNKNOWN: u8 = 0xbe;

    fn frame(kind: u8, flags: u8, length: usize) -> Vec<u8> {
        let [_, high, middle, low] = u32::try_from(length).expect("short").to_be_bytes();
        let mut bytes = vec![high, middle, low, kind, flags, 0, 0, 0, 1];
        bytes.resize(FRAME_HEADER_BYTES + length, 0);
        bytes
    }

    /// Returns a meter after the preface.
    fn meter() -> FrameMeter {
        let mut meter = FrameMeter::new();
        assert_eq!(meter.received(&[0; PREFACE_BYTES]), Ok(0));
        meter
    }

    /// Returns how many of these frames a fresh connection may send at once.
    fn allowed(frame: &[u8]) -> usize {
        let mut meter = meter();
        (0..1_000_000)
            .take_while(|_| meter.received(frame).is_ok())
            .count()
    }

    #[tokio::test(start_paused = true)]
    async fn frames_that_carry_nothing_use_the_credit_up() {
        assert_eq!(allowed(&frame(PING, 0, 8)), 10_000);
        assert_eq!(allowed(&frame(DATA, 0, 0)), 10_000);
        assert_eq!(allowed(&frame(RST_STREAM, 0, 4)), 5_000);
        assert_eq!(allowed(&frame(UNKNOWN, 0, 16_384)), 77);
        // A header block of one-byte references.
        assert_eq!(allowed(&frame(HEADERS, 4, 4_000)), 160);
        assert_eq!(allowed(&frame(CONTINUATION, 0, 0)), 2_000);
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_of_tunnels_never_do() {
        assert_eq!(allowed(&frame(DATA, 0, 16_384)), 1_000_000);
        assert_eq!(allowed(&frame(DATA, 0, 128)), 1_000_000);
        assert_eq!(allowed(&frame(DATA, END_STREAM, 0)), 1_000_000);
    }

    #[tokio::test(start_paused = true)]
    async fn answers_pay_for_small_requests_and_for_tunnels_that_end_by_reset() {
        let mut meter = meter();
        for _ in 0..1_000_000 {
            meter
                .received(&frame(DATA, 0, 1))
                .expect("one byte of a request");
            meter.sent(&frame(DATA, 0, 1));
        }
        for _ in 0..100_000 {
            meter.received(&frame(HEADERS, 4, 100)).expect("a CONNECT");
            meter.sent(&frame(HEADERS, 4, 10));
            meter
                .received(&frame(DATA, 0, 500))
                .expect("an inner hello");
            meter.sent(&frame(DATA, 0, 500));
            meter.received(&frame(RST_STREAM, 0, 4)).expect("its end");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pool_whose_small_tunnels_all_end_by_reset_is_no_flood() {
        let mut meter = meter();
        for _ in 0..100_000 {
            meter.received(&frame(HEADERS, 4, 100)).expect("a CONNECT");
            meter.sent(&frame(HEADERS, 4, 10));
            meter.received(&frame(DATA, 0, 100)).expect("a request");
            meter.sent(&frame(DATA, 0, 100));
            meter.received(&frame(RST_STREAM, 0, 4)).expect("its end");
            tokio::time::advance(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_tries_a_dead_service_again_and_again_is_no_flood() {
        let mut meter = meter();
        for _ in 0..100_000 {
            meter.received(&frame(HEADERS, 4, 120)).expect("a CONNECT");
            meter.sent(&frame(HEADERS, END_STREAM | 4, 10));
            tokio::time::advance(Duration::from_millis(2)).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_we_must_answer_by_ourselves_earns_nothing() {
        let mut meter = meter();
        let sent = (0..1_000_000).take_while(|_| {
            meter.sent(&frame(PING, 1, 8));
            meter.received(&frame(PING, 0, 8)).is_ok()
        });
        assert_eq!(sent.count(), 10_000);
    }

    #[tokio::test(start_paused = true)]
    async fn credit_comes_back_with_time() {
        let mut meter = meter();
        while meter.received(&frame(PING, 0, 8)).is_ok() {}
        tokio::time::advance(Duration::from_secs(1)).await;
        let more = (0..1_000_000).take_while(|_| meter.received(&frame(PING, 0, 8)).is_ok());
        assert_eq!(more.count(), 1_000);
        tokio::time::advance(Duration::from_secs(3600)).await;
        let full = (0..1_000_000).take_while(|_| meter.received(&frame(PING, 0, 8)).is_ok());
        assert_eq!(full.count(), 10_000, "no more than a fresh connection has");
    }

    proptest! {
        #[test]
        fn however_a_stream_is_cut_the_same_frames_are_found(
            frames in prop::collection::vec((any::<u8>(), any::<u8>(), 0_usize..50), 1..20),
            cuts in prop::collection::vec(1_usize..30, 1..50),
        ) {
            let stream: Vec<u8> = frames.iter().flat_map(|&(k, f, l)| frame(k, f, l)).collect();
            let (mut walker, mut found) = (FrameScanner::default(), Vec::new());
            let mut rest = &stream[..];
            for cut in cuts.iter().cycle() {
                let (part, later) = rest.split_at((*cut).min(rest.len()));
                walker.scan(part, |seen| found.push((seen.kind, seen.flags, seen.length)));
                rest = later;
                if rest.is_empty() { break }
            }
            let wanted: Vec<_> = frames.iter().map(|&(k, f, l)| (k, f, l as u64)).collect();
            prop_assert_eq!(found, wanted);
        }
    }
}
