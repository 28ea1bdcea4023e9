//! Answers to scrapes: pages of metrics, each encoded once for all scrapers within its lifetime.
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

/// Maximum number of pages of one format: the last one, and old ones that are still being sent.
const PAGES_MAX: usize = 3;

/// Metrics in both formats, for one port.
#[derive(Debug)]
pub(super) struct Scrapes {
    metrics: Arc<Metrics>,
    /// Time for which a page is sent again.
    lifetime: Duration,
    plain: Format,
    openmetrics: Format,
}

/// Format of the metrics.
#[derive(Debug)]
struct Format {
    content_type: &'static str,
    encode: fn(&Metrics) -> String,
    /// The last page, after older ones that are still being sent.
    pages: Arc<Mutex<Vec<Page>>>,
}

/// Encoded metrics.
#[derive(Clone, Debug)]
struct Page {
    bytes: Bytes,
    at: Instant,
}

impl Scrapes {
    /// Creates the answers; pages are sent again for the time `fresh`.
    pub(super) fn new(metrics: Arc<Metrics>, fresh: Duration) -> Arc<Self> {
        let format = |content_type, encode| Format { content_type, encode, pages: Arc::default() };
        Arc::new(Self {
            metrics,
            lifetime: fresh,
            plain: format("text/plain; version=0.0.4; charset=utf-8", Metrics::encode_plain),
            openmetrics: format(
                "application/openmetrics-text; version=1.0.0; charset=utf-8",
                Metrics::encode,
            ),
        })
    }

    /// Answers with the metrics in the requested format: plain text unless `accept` contains
    /// OpenMetrics.
    pub(super) async fn answer(&self, headers: &HeaderMap) -> Response {
        let names_openmetrics = headers.get_all(header::ACCEPT).iter().any(|value| {
            value.to_str().is_ok_and(|value| value.contains("application/openmetrics-text"))
        });
        let format = if names_openmetrics { &self.openmetrics } else { &self.plain };
        match format.page(&self.metrics, self.lifetime).await {
            Some(bytes) => ([(header::CONTENT_TYPE, format.content_type)], bytes).into_response(),
            None => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }
}

impl Format {
    /// Returns the last page if it is fresh or too many are being sent, otherwise a new one; none
    /// if the encoding failed.
    async fn page(&self, metrics: &Arc<Metrics>, fresh: Duration) -> Option<Bytes> {
        // A scrape that waits here for an encoding receives its page, unless pages expire
        // immediately.
        let mut pages = Arc::clone(&self.pages).lock_owned().await;
        let is_fresh = |page: &Page| page.at.elapsed() < fresh;
        pages.retain(|page| is_fresh(page) || !page.bytes.is_unique());
        if let Some(last) = pages.last()
            && (is_fresh(last) || pages.len() >= PAGES_MAX)
        {
            return Some(last.bytes.clone());
        }
        let (encode, metrics) = (self.encode, Arc::clone(metrics));
        // The task keeps the lock if the client disconnects, so that the next scrape does not
        // start a second encoding.
        let made = tokio::task::spawn_blocking(move || {
            let bytes = Bytes::from(encode(&metrics));
            let at = Instant::now();
            pages.push(Page { bytes: bytes.clone(), at });
            bytes
        });
        made.await.ok()
    }
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;

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
        let scrapes = Scrapes::new(Arc::clone(&metrics), Duration::from_secs(1));
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
        let scrapes = Scrapes::new(Arc::clone(&metrics), Duration::from_secs(1));
        let mut held = Vec::new();
        for _ in 0..10 {
            held.push(scraped(&scrapes).await);
            drop(metrics.connection_opened());
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let mut pages: Vec<_> = held.iter().map(|page| page.as_ptr()).collect();
        pages.dedup();
        assert_eq!(pages.len(), PAGES_MAX);
        assert!(counts(&scraped(&scrapes).await, PAGES_MAX - 1), "the last");
        // One old page is no longer held.
        held.remove(0);
        assert!(counts(&scraped(&scrapes).await, 10));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_goes_away_leaves_its_encoding_to_the_next() {
        let metrics = Arc::new(Metrics::new());
        let scrapes = Scrapes::new(Arc::clone(&metrics), Duration::from_secs(1));
        let headers = HeaderMap::new();
        let gone = tokio::time::timeout(Duration::ZERO, scrapes.answer(&headers));
        drop(gone.await);
        assert!(counts(&scraped(&scrapes).await, 0));
        assert_eq!(scrapes.plain.pages.lock().await.len(), 1);
    }
}
