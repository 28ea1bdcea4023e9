//! Frame meter: limits the work that a connection causes relative to the data that it carries.
//!
//! A peer that floods with resets, CONTINUATION, PING, SETTINGS, PRIORITY, WINDOW_UPDATE, empty
//! DATA, unknown frames, HPACK work or KeyUpdates could occupy its whole worker. Therefore every
//! frame has a price; tunnel bytes, answers and time earn credit. A connection without credit is
//! ended with ENHANCE_YOUR_CALM (RFC 9113 section 7). A gateway carries tunnels of many first
//! peers, which have a credit each. Without it, only the streams of that first peer are reset.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::time::Duration;

use tokio::time::Instant;

use super::frame::{FrameHeader, HEADER_BYTES, kind};

/// Initial and maximum credit of a connection. A client that opens 256 tunnels at once with 1
/// KiB of headers each needs about 9,000.
const CREDIT_MAX: u64 = 20_000;
/// Credit per second. A quiet peer needs 0.1 PING a second; a pool whose clients abandon their
/// tunnels before the first byte arrives may do so some 200 times a second.
const CREDIT_PER_SECOND: u64 = 2_000;
/// Multiple of both for a connection from a gateway, which all its first peers share. Each of them
/// has the credit of a connection. A gateway can invent first peers, and gains no more than this.
/// 4,000 refused CONNECTs a second of one first peer leave half of it to the others.
const GATEWAY_FACTOR: u64 = 8;
/// Limit of first peers of a connection whose credit is remembered: one for each open stream.
pub(super) const FIRST_PEERS_MAX: usize = 256;
/// Tunnel bytes, in either direction, per credit: a DATA frame that fills a TLS record pays for
/// about two hundred window updates.
const BYTES_PER_CREDIT: u64 = 64;
/// Credit for a sent frame with an answer or data: the peer acknowledges what it receives.
const CREDIT_PER_ANSWER: u64 = 4;
/// Credit for a rejection. A client that tries an unavailable service 500 times a second must
/// not lose its tunnels to other services.
const CREDIT_PER_REFUSAL: u64 = 2;

/// Prices in credits, by the work that a frame causes. A credit is about 0.4 µs.
const PRICE_CONTROL: u64 = 2;
const PRICE_REQUEST: u64 = 4;
/// Price of a reset, by the peer or for a frame of it on a closed stream.
pub(super) const PRICE_RESET: u64 = 4;
const PRICE_CONTINUATION: u64 = 10;
/// A KeyUpdate derives keys for one or both directions. A peer needs one for 2²⁴ records.
const PRICE_KEY_UPDATE: u64 = 40;
/// Price of a record that holds little besides its own header and trailer.
const PRICE_SMALL_RECORD: u64 = 1;
const SMALL_RECORD_BYTES: usize = 32;
/// Header block bytes included in the price of a request: Istio's headers, mostly indexed.
const HEADER_BYTES_FREE: u64 = 128;
/// Further header block bytes per credit: HPACK may expand each byte to a field.
const HEADER_BYTES_PER_CREDIT: u64 = 32;
/// Bytes per credit that the price of DATA on an open stream is reduced by: 32 bytes pay for their
/// write to the endpoint.
const DATA_BYTES_PER_CREDIT: u64 = 16;
/// Bytes per credit of DATA on a closed stream, which are decrypted and dropped. A peer may have
/// 64 MiB under way when its tunnels are reset: 16,384 credits in frames of 16 KiB.
const DROPPED_BYTES_PER_CREDIT: u64 = 8 * 1024;
const STREAMS_PER_CREDIT: usize = 8;
/// Limit of the work in a turn of a connection, in credits, after which other tasks of the worker
/// run. It is exceeded by one frame at most.
const TURN_WORK_MAX: u64 = 512;
/// Limit while other sources have tasks on the worker.
const SHARED_TURN_WORK_MAX: u64 = 128;
/// Work of a write to an endpoint, in the same unit: 6 to 9 µs of the kernel on the loopback
/// interface. The bytes of the frame pay for it. It counts while other sources have tasks: a longer
/// turn costs less for each frame.
const WRITE_WORK: u64 = 16;

/// Credit that prices use up, and that time, bytes and answers earn.
#[derive(Debug)]
struct Credit {
    left: u64,
    /// Multiple of [`CREDIT_MAX`] and [`CREDIT_PER_SECOND`].
    factor: u64,
    /// Bytes that have not earned a whole credit yet.
    bytes: u64,
    credited_at: Instant,
}

impl Default for Credit {
    fn default() -> Self {
        Self { left: CREDIT_MAX, factor: 1, bytes: 0, credited_at: Instant::now() }
    }
}

impl Credit {
    fn set_factor(&mut self, factor: u64) {
        if factor != self.factor {
            self.left = self.left * factor / self.factor;
            self.factor = factor;
        }
    }

    /// Spends credit. Returns false if there is too little.
    fn spend(&mut self, price: u64) -> bool {
        if price > self.left {
            self.earn_time();
        }
        let left = self.left.checked_sub(price);
        self.left = left.unwrap_or(self.left);
        left.is_some()
    }

    fn earn(&mut self, credit: u64, bytes: u64) {
        self.bytes += bytes;
        let earned = credit + self.bytes / BYTES_PER_CREDIT;
        self.left = (self.left + earned).min(CREDIT_MAX * self.factor);
        self.bytes %= BYTES_PER_CREDIT;
    }

    fn earn_time(&mut self) {
        let step = Duration::from_secs(1) / 10;
        let steps = self.credited_at.elapsed().as_millis() / step.as_millis();
        let steps = u32::try_from(steps).unwrap_or(u32::MAX);
        if steps > 0 {
            self.credited_at += step.saturating_mul(steps);
            self.earn(u64::from(steps) * CREDIT_PER_SECOND * self.factor / 10, 0);
        }
    }
}

/// First peer of a tunnel, as a keyed hash: its account on one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FirstPeerId(u64);

/// Credit of one connection, and of the first peers behind it.
#[derive(Debug, Default)]
pub struct FrameMeter {
    credit: Credit,
    /// Credit of each first peer, which is charged besides that of the connection.
    first_peers: HashMap<FirstPeerId, Credit>,
    turn: u64,
    /// Work of a write in this turn.
    write_work: u64,
}

impl FrameMeter {
    /// Starts a turn of the connection. It is shorter if other sources use the worker.
    pub fn begin_turn(&mut self, is_shared: bool) {
        let shared = (TURN_WORK_MAX - SHARED_TURN_WORK_MAX, WRITE_WORK);
        (self.turn, self.write_work) = if is_shared { shared } else { (0, 0) };
    }

    /// Returns true if the turn has had its work.
    pub fn is_turn_over(&self) -> bool {
        self.turn >= TURN_WORK_MAX
    }

    /// Gives the connection the credit of a gateway, or of another peer.
    pub fn set_for_gateway(&mut self, is_gateway: bool) {
        let factor = if is_gateway { GATEWAY_FACTOR } else { 1 };
        self.credit.set_factor(factor);
    }

    pub fn first_peer(&self, source: &[u8]) -> FirstPeerId {
        FirstPeerId(self.first_peers.hasher().hash_one(source))
    }

    pub fn has_first_peers(&self) -> bool {
        !self.first_peers.is_empty()
    }

    /// Charges a price to the connection, and to the first peer of a stream.
    ///
    /// # Errors
    /// One of them has too little credit. The connection is charged in either case.
    pub fn charge(
        &mut self,
        price: u64,
        first_peer: Option<FirstPeerId>,
    ) -> Result<(), CreditExhausted> {
        self.turn += price;
        if !self.credit.spend(price) {
            return Err(CreditExhausted::Connection);
        }
        self.charge_first_peer(price, first_peer)
    }

    pub fn charge_first_peer(
        &mut self,
        price: u64,
        first_peer: Option<FirstPeerId>,
    ) -> Result<(), CreditExhausted> {
        match first_peer {
            Some(id) if !self.account(id).spend(price) => Err(CreditExhausted::FirstPeer(id)),
            _ => Ok(()),
        }
    }

    /// Charges for a received DATA frame, whose bytes earn credit if its stream is open.
    pub fn received_data(
        &mut self,
        length: usize,
        is_open: bool,
        first_peer: Option<FirstPeerId>,
    ) -> Result<(), CreditExhausted> {
        let bytes = length as u64;
        if !is_open {
            return self.charge(PRICE_CONTROL + bytes / DROPPED_BYTES_PER_CREDIT, first_peer);
        }
        self.earn(0, bytes, first_peer);
        let paid = PRICE_CONTROL.min(bytes / DATA_BYTES_PER_CREDIT);
        self.turn += self.write_work + paid;
        self.charge(PRICE_CONTROL - paid, first_peer)
    }

    /// Charges for a received TLS record with `length` bytes of application data, or none. A record
    /// that holds less than a frame header pays as much as a small frame.
    pub fn received_record(&mut self, length: usize) -> Result<(), CreditExhausted> {
        match length {
            ..HEADER_BYTES => self.charge(PRICE_CONTROL, None),
            HEADER_BYTES..SMALL_RECORD_BYTES => self.charge(PRICE_SMALL_RECORD, None),
            _ => {
                self.turn += PRICE_SMALL_RECORD;
                Ok(())
            }
        }
    }

    /// Charges for a received KeyUpdate (RFC 8446 section 4.6.3).
    pub fn received_key_update(&mut self) -> Result<(), CreditExhausted> {
        self.charge(PRICE_KEY_UPDATE, None)
    }

    pub fn changed_windows(&mut self, streams: usize) -> Result<(), CreditExhausted> {
        self.charge((streams / STREAMS_PER_CREDIT) as u64, None)
    }

    /// Charges for streams that may send again after such a change: as much as WINDOW_UPDATE for
    /// each of them.
    pub fn unblocked(&mut self, streams: usize) -> Result<(), CreditExhausted> {
        self.charge(PRICE_CONTROL * streams as u64, None)
    }

    /// Earns credit for an answer of `length` bytes that opens a tunnel.
    pub fn sent_answer(&mut self, length: usize, first_peer: Option<FirstPeerId>) {
        self.earn(CREDIT_PER_ANSWER, length as u64, first_peer);
    }

    /// Earns credit for a rejection.
    pub fn sent_refusal(&mut self, first_peer: Option<FirstPeerId>) {
        self.earn(CREDIT_PER_REFUSAL, 0, first_peer);
    }

    /// Earns credit for sent DATA. `frames` counts those that the peer's window did not cut: a peer
    /// that opens its window byte by byte is not paid for each of them.
    pub fn sent_data(&mut self, frames: usize, bytes: usize, first_peer: Option<FirstPeerId>) {
        let answers = CREDIT_PER_ANSWER * frames as u64;
        self.earn(answers, bytes as u64, first_peer);
    }

    fn earn(&mut self, credit: u64, bytes: u64, first_peer: Option<FirstPeerId>) {
        self.credit.earn(credit, bytes);
        if let Some(id) = first_peer {
            self.account(id).earn(credit, bytes);
        }
    }

    /// Returns the credit of a first peer. Beyond the limit it replaces the one with most credit,
    /// which loses least.
    fn account(&mut self, id: FirstPeerId) -> &mut Credit {
        let accounts = &mut self.first_peers;
        if accounts.len() >= FIRST_PEERS_MAX && !accounts.contains_key(&id) {
            let credits = accounts.iter_mut().map(|(id, credit)| {
                credit.earn_time();
                (credit.left, *id)
            });
            if let Some((_, most)) = credits.max_by_key(|(left, _)| *left) {
                accounts.remove(&most);
            }
        }
        accounts.entry(id).or_default()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreditExhausted {
    /// The credit of the connection is used up.
    Connection,
    /// The credit of this first peer is used up.
    FirstPeer(FirstPeerId),
}

/// Returns the price of a received frame other than DATA.
pub(super) fn price(frame: FrameHeader) -> u64 {
    let length = frame.length as u64;
    match frame.kind {
        kind::HEADERS => request_price(frame.length),
        kind::CONTINUATION => PRICE_CONTINUATION + length / HEADER_BYTES_PER_CREDIT,
        kind::RST_STREAM => PRICE_RESET,
        // Unknown frames are skipped, so nothing else bounds their length.
        _ => PRICE_CONTROL + length / BYTES_PER_CREDIT,
    }
}

/// Returns the price of a request whose header block has `length` bytes.
pub(super) fn request_price(length: usize) -> u64 {
    let excess = (length as u64).saturating_sub(HEADER_BYTES_FREE);
    PRICE_REQUEST + excess / HEADER_BYTES_PER_CREDIT
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADERS: u8 = kind::HEADERS;
    const UNKNOWN: u8 = 0xbe;

    fn frame(kind: u8, flags: u8, length: usize) -> FrameHeader {
        FrameHeader { length, kind, flags, stream: 1 }
    }

    fn meter() -> FrameMeter {
        FrameMeter::default()
    }

    /// Returns how often a fresh connection may do this at once.
    fn allowed(mut charge: impl FnMut(&mut FrameMeter) -> Result<(), CreditExhausted>) -> usize {
        let mut meter = meter();
        let tries = (0..1_000_000).take_while(|_| charge(&mut meter).is_ok());
        tries.count()
    }

    fn allowed_frames(kind: u8, flags: u8, length: usize) -> usize {
        allowed(|meter| meter.charge(price(frame(kind, flags, length)), None))
    }

    fn allowed_data(length: usize, is_open: bool) -> usize {
        allowed(|meter| meter.received_data(length, is_open, None))
    }

    #[tokio::test(start_paused = true)]
    async fn frames_that_carry_nothing_use_the_credit_up() {
        assert_eq!(allowed_frames(kind::PING, 0, 8), 10_000);
        assert_eq!(allowed_frames(kind::RST_STREAM, 0, 4), 5_000);
        assert_eq!(allowed_frames(UNKNOWN, 0, 16_384), 77);
        // A header block of one-byte references.
        assert_eq!(allowed_frames(HEADERS, 4, 4_000), 160);
        assert_eq!(allowed_frames(kind::CONTINUATION, 0, 0), 2_000);
        assert_eq!(allowed_data(0, true), 10_000);
    }

    #[tokio::test(start_paused = true)]
    async fn records_that_carry_nothing_use_the_credit_up() {
        assert_eq!(allowed(|meter| meter.received_record(0)), 10_000);
        assert_eq!(allowed(|meter| meter.received_record(8)), 10_000);
        assert_eq!(allowed(|meter| meter.received_record(9)), 20_000);
        assert_eq!(allowed(|meter| meter.received_record(32)), 1_000_000);
        assert_eq!(allowed(FrameMeter::received_key_update), 500);
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_of_tunnels_never_do() {
        for length in [32, 128, 16_384] {
            assert_eq!(allowed_data(length, true), 1_000_000, "{length} bytes");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn data_on_closed_streams_earns_nothing_and_has_a_price() {
        assert_eq!(allowed_data(0, false), 10_000);
        assert_eq!(allowed_data(32, false), 10_000);
        assert_eq!(allowed_data(16_384, false), 5_000);
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_under_way_when_all_tunnels_are_reset_are_no_flood() {
        let mut meter = meter();
        for _ in 0..(64 << 20) / 16_384 {
            let charged = meter.received_data(16_384, false, None);
            charged.expect("a full window of 256 streams");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn answers_pay_for_small_requests_and_for_tunnels_that_end_by_reset() {
        let mut meter = meter();
        for _ in 0..1_000_000 {
            let charged = meter.received_record(10);
            charged.expect("a record of one small frame");
            let charged = meter.received_data(1, true, None);
            charged.expect("one byte of a request");
            meter.sent_data(1, 1, None);
        }
        for _ in 0..100_000 {
            let charged = meter.charge(request_price(100), None);
            charged.expect("a CONNECT");
            meter.sent_answer(10, None);
            let charged = meter.received_data(500, true, None);
            charged.expect("an inner hello");
            meter.sent_data(1, 500, None);
            meter.charge(PRICE_RESET, None).expect("its end");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_opens_its_window_byte_by_byte_uses_its_credit_up() {
        let updates = allowed(|meter| {
            meter.sent_data(0, 1, None);
            meter.charge(price(frame(kind::WINDOW_UPDATE, 0, 4)), None)
        });
        assert!(updates < 10_100, "{updates}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_pool_whose_small_tunnels_all_end_by_reset_is_no_flood() {
        let mut meter = meter();
        for _ in 0..100_000 {
            let charged = meter.charge(request_price(100), None);
            charged.expect("a CONNECT");
            meter.sent_answer(10, None);
            let charged = meter.received_data(100, true, None);
            charged.expect("a request");
            meter.sent_data(1, 100, None);
            meter.charge(PRICE_RESET, None).expect("its end");
            tokio::time::advance(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_tries_a_dead_service_again_and_again_is_no_flood() {
        let mut meter = meter();
        for _ in 0..100_000 {
            let charged = meter.charge(request_price(120), None);
            charged.expect("a CONNECT");
            meter.sent_refusal(None);
            tokio::time::advance(Duration::from_millis(2)).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn credit_comes_back_with_time() {
        let mut meter = meter();
        let ping = price(frame(kind::PING, 0, 8));
        let mut pings = || {
            let sent = (0..1_000_000).take_while(|_| meter.charge(ping, None).is_ok());
            sent.count()
        };
        assert_eq!(pings(), 10_000);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(pings(), 1_000);
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!(pings(), 10_000, "no more than a fresh connection has");
    }

    /// Charges for a CONNECT of a first peer that it abandons before the answer.
    fn abandon(meter: &mut FrameMeter, id: FirstPeerId) -> Result<(), CreditExhausted> {
        meter.charge(request_price(150), None)?;
        let exhausted = meter.charge_first_peer(request_price(150), Some(id));
        if exhausted.is_err() {
            meter.sent_refusal(None);
            return exhausted;
        }
        meter.charge(PRICE_RESET, Some(id))
    }

    #[tokio::test(start_paused = true)]
    async fn a_first_peer_without_credit_takes_none_of_the_others() {
        let mut meter = meter();
        meter.set_for_gateway(true);
        let [flooding, quiet] = [&b"a"[..], b"b"].map(|source| meter.first_peer(source));
        let mut refused = 0;
        // 3,000 CONNECTs a second for 100 s.
        for _ in 0..100_000 {
            for _ in 0..3 {
                match abandon(&mut meter, flooding) {
                    Ok(()) => {}
                    Err(CreditExhausted::FirstPeer(id)) if id == flooding => refused += 1,
                    error => panic!("{error:?}"),
                }
            }
            let charged = meter.received_data(1, true, Some(quiet));
            charged.expect("a small frame of another");
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert!(refused > 200_000, "{refused}");
    }

    #[tokio::test(start_paused = true)]
    async fn invented_first_peers_have_a_multiple_of_the_credit_of_a_connection() {
        let mut meter = meter();
        meter.set_for_gateway(true);
        let mut count = 0;
        let end = loop {
            let id = meter.first_peer(format!("invented {}", count % 100_000).as_bytes());
            if let Err(end) = meter.charge(PRICE_RESET, Some(id)) {
                break end;
            }
            count += 1;
        };
        assert_eq!(end, CreditExhausted::Connection);
        assert_eq!(count * PRICE_RESET, GATEWAY_FACTOR * CREDIT_MAX);
        assert_eq!(meter.first_peers.len(), FIRST_PEERS_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn inventing_first_peers_restores_no_credit() {
        let mut meter = meter();
        meter.set_for_gateway(true);
        let id = meter.first_peer(b"flooding");
        while meter.charge_first_peer(PRICE_RESET, Some(id)).is_ok() {}
        for index in 0..1_000_u32 {
            let invented = meter.first_peer(&index.to_be_bytes());
            let charged = meter.charge(PRICE_RESET, Some(invented));
            charged.expect("credit of a new first peer");
        }
        let charged = meter.charge(PRICE_RESET, Some(id));
        assert_eq!(charged, Err(CreditExhausted::FirstPeer(id)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_work_of_a_turn_is_bounded_also_if_bytes_pay_for_it() {
        for (length, is_shared) in [(0, false), (1, true), (32, false), (1_000, true)] {
            let mut meter = meter();
            meter.begin_turn(is_shared);
            let frames = (0..).take_while(|_| {
                let charged = meter.received_data(length, true, None);
                charged.is_ok() && !meter.is_turn_over()
            });
            let want = if is_shared { 7 } else { 255 };
            assert_eq!(frames.count(), want, "{length} bytes");
            meter.begin_turn(false);
            assert!(!meter.is_turn_over());
        }
    }
}
