//! Answers to scrapes, and pages that are encoded once for all clients within a lifetime.
//!
//! Clients share the bytes of a page, so a client that does not read uses only the memory of its
//! socket. Pages are encoded on a blocking thread, one at a time for each format. While slow
//! clients hold several old pages, the last page is sent again instead of a new one. A limit of
//! scrapers would let the same number of silent clients lock out Prometheus.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::telemetry::Metrics;

/// Maximum number of copies of a page: the last one, and old ones that are still being sent.
const COPIES_MAX: usize = 3;

/// Metrics in both formats, for one port.
pub(super) struct Scrapes {
    plain: SharedPage,
    openmetrics: SharedPage,
}

type Encode = Arc<dyn Fn() -> String + Send + Sync>;

/// Page that is encoded at most once within its lifetime.
pub(super) struct SharedPage {
    /// Minimum time for which the page is sent again.
    lifetime: Duration,
    /// The same in multiples of the time that the encoding took.
    rest: u32,
    encode: Encode,
    /// The last copy, after older ones that are still being sent.
    copies: Arc<Mutex<Vec<Encoded>>>,
}

/// Page as it was at a time.
struct Encoded {
    bytes: Bytes,
    fresh_until: Instant,
}

impl Scrapes {
    /// Creates the answers; pages are sent again for the time `lifetime`.
    pub(super) fn new(metrics: &Arc<Metrics>, lifetime: Duration) -> Arc<Self> {
        let page = |encode: fn(&Metrics) -> String| {
            let metrics = Arc::clone(metrics);
            SharedPage::new(lifetime, 0, Arc::new(move || encode(&metrics)))
        };
        Arc::new(Self { plain: page(Metrics::encode_plain), openmetrics: page(Metrics::encode) })
    }

    /// Answers with the metrics in the requested format: plain text unless `accept` contains
    /// OpenMetrics.
    pub(super) async fn answer(&self, headers: &HeaderMap) -> Response {
        let names_openmetrics = headers.get_all(header::ACCEPT).iter().any(|value| {
            value.to_str().is_ok_and(|value| value.contains("application/openmetrics-text"))
        });
        let (page, content_type) = if names_openmetrics {
            let version = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            (&self.openmetrics, version)
        } else {
            (&self.plain, "text/plain; version=0.0.4; charset=utf-8")
        };
        match page.load().await {
            Some(bytes) => ([(header::CONTENT_TYPE, content_type)], bytes).into_response(),
            None => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }
}

impl SharedPage {
    pub(super) fn new(lifetime: Duration, rest: u32, encode: Encode) -> Self {
        Self { lifetime, rest, encode, copies: Arc::default() }
    }

    /// Returns the last copy if it is fresh or too many are being sent, otherwise a new one; none
    /// if the encoding failed.
    pub(super) async fn load(&self) -> Option<Bytes> {
        // A client that waits here for an encoding receives its page, unless pages expire
        // immediately.
        let mut copies = Arc::clone(&self.copies).lock_owned().await;
        let is_fresh = |copy: &Encoded| Instant::now() < copy.fresh_until;
        copies.retain(|copy| is_fresh(copy) || !copy.bytes.is_unique());
        if let Some(last) = copies.last()
            && (is_fresh(last) || copies.len() >= COPIES_MAX)
        {
            return Some(last.bytes.clone());
        }
        let (encode, lifetime, rest) = (Arc::clone(&self.encode), self.lifetime, self.rest);
        // The task keeps the lock if the client disconnects, so that the next one does not start a
        // second encoding.
        let made = tokio::task::spawn_blocking(move || {
            let start = Instant::now();
            let bytes = Bytes::from(encode());
            let end = Instant::now();
            let fresh_until = end + lifetime.max((end - start) * rest);
            copies.push(Encoded { bytes: bytes.clone(), fresh_until });
            bytes
        });
        made.await.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::body::to_bytes;
    use tokio::runtime::Handle;

    use super::*;

    /// Returns true if the page counts this number of accepted connections.
    fn counts(page: &[u8], connections: usize) -> bool {
        let line = format!("strait_connections_total {connections}\n");
        String::from_utf8_lossy(page).contains(&line)
    }

    async fn scraped(scrapes: &Scrapes) -> Bytes {
        let answer = scrapes.answer(&HeaderMap::new()).await;
        assert_eq!(answer.status(), StatusCode::OK);
        let body = to_bytes(answer.into_body(), usize::MAX).await;
        body.expect("a page")
    }

    #[tokio::test(start_paused = true)]
    async fn a_page_is_encoded_once_a_second_for_all_scrapers() {
        let metrics = Arc::new(Metrics::new());
        let scrapes = Scrapes::new(&metrics, Duration::from_secs(1));
        let first = scraped(&scrapes).await;
        drop(metrics.connection_opened());
        let second = scraped(&scrapes).await;
        assert_eq!(first.as_ptr(), second.as_ptr(), "the same bytes");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(counts(&scraped(&scrapes).await, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn clients_that_do_not_read_hold_few_pages_and_keep_nobody_out() {
        let metrics = Arc::new(Metrics::new());
        let scrapes = Scrapes::new(&metrics, Duration::from_secs(1));
        let mut held = Vec::new();
        for _ in 0..10 {
            held.push(scraped(&scrapes).await);
            drop(metrics.connection_opened());
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let mut pages: Vec<_> = held.iter().map(|page| page.as_ptr()).collect();
        pages.dedup();
        assert_eq!(pages.len(), COPIES_MAX);
        assert!(counts(&scraped(&scrapes).await, COPIES_MAX - 1), "the last");
        // One old page is no longer held.
        held.remove(0);
        assert!(counts(&scraped(&scrapes).await, 10));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_goes_away_leaves_its_encoding_to_the_next() {
        let metrics = Arc::new(Metrics::new());
        let scrapes = Scrapes::new(&metrics, Duration::from_secs(1));
        let headers = HeaderMap::new();
        let gone = tokio::time::timeout(Duration::ZERO, scrapes.answer(&headers));
        drop(gone.await);
        assert!(counts(&scraped(&scrapes).await, 0));
        assert_eq!(scrapes.plain.copies.lock().await.len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_page_that_takes_long_is_sent_again_for_longer() {
        let (count, runtime) = (Arc::new(AtomicUsize::new(0)), Handle::current());
        let counted = Arc::clone(&count);
        let encode: Encode = Arc::new(move || {
            runtime.block_on(tokio::time::advance(Duration::from_secs(2)));
            counted.fetch_add(1, Ordering::Relaxed);
            String::new()
        });
        let page = SharedPage::new(Duration::from_secs(1), 9, encode);
        for (pause, expected) in [(0, 1), (17, 1), (2, 2)] {
            tokio::time::advance(Duration::from_secs(pause)).await;
            page.load().await.expect("a page");
            assert_eq!(count.load(Ordering::Relaxed), expected, "after {pause} s more");
        }
    }
}
