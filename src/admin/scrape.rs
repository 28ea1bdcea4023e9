//! Answers to scrapes: pages of metrics, each encoded once for all who ask within a while.
//!
//! Clients share the bytes of a page, so one that does not read holds no memory of its own but its
//! socket's. A page is encoded where that may take its time, one at a time for each format. While
//! slow clients hold several old pages, no new one is made and the last is sent again: a limit of
//! scrapers instead would let as many mute clients keep Prometheus out.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use tokio::sync::{Mutex, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::telemetry::Metrics;

/// Pages of one format that exist at once: the last one, and old ones that are still being sent.
const PAGES_MAX: usize = 3;

/// The metrics in both formats, for one port.
#[derive(Debug)]
pub(super) struct Scrapes {
    metrics: Arc<Metrics>,
    /// For how long a page is sent again.
    fresh: Duration,
    plain: Format,
    openmetrics: Format,
}

/// A format of the metrics.
#[derive(Debug)]
struct Format {
    content_type: &'static str,
    encode: fn(&Metrics) -> String,
    last: Arc<Mutex<Option<Page>>>,
    places: Arc<Semaphore>,
}

/// Metrics as they were encoded.
#[derive(Clone, Debug)]
struct Page {
    bytes: Bytes,
    at: Instant,
}

/// The text of a page, which has its place until the last client has it.
struct Placed {
    text: String,
    _place: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Placed {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

impl Scrapes {
    /// Pages that are sent again for as long as they are `fresh`.
    pub(super) fn new(metrics: Arc<Metrics>, fresh: Duration) -> Arc<Self> {
        let format = |content_type, encode| Format {
            content_type,
            encode,
            last: Arc::default(),
            places: Arc::new(Semaphore::new(PAGES_MAX)),
        };
        Arc::new(Self {
            metrics,
            fresh,
            plain: format(
                "text/plain; version=0.0.4; charset=utf-8",
                Metrics::encode_plain,
            ),
            openmetrics: format(
                "application/openmetrics-text; version=1.0.0; charset=utf-8",
                Metrics::encode,
            ),
        })
    }

    /// The metrics in the format that the scraper asks for; plain text unless it names OpenMetrics.
    pub(super) async fn answer(&self, headers: &HeaderMap) -> Response {
        let names_openmetrics = headers.get_all(header::ACCEPT).iter().any(|value| {
            value
                .to_str()
                .is_ok_and(|value| value.contains("application/openmetrics-text"))
        });
        let format = match names_openmetrics {
            true => &self.openmetrics,
            false => &self.plain,
        };
        match format.page(&self.metrics, self.fresh).await {
            Some(bytes) => ([(header::CONTENT_TYPE, format.content_type)], bytes).into_response(),
            None => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }
}

impl Format {
    /// The last page if it is fresh enough or there is no place for another, else a new one; none
    /// if the encoding failed.
    async fn page(&self, metrics: &Arc<Metrics>, fresh: Duration) -> Option<Bytes> {
        // A scrape that waits here for an encoding gets its page, if pages stay fresh.
        let last = Arc::clone(&self.last).lock_owned().await;
        let is_fresh = |page: &&Page| page.at.elapsed() < fresh;
        if let Some(page) = last.as_ref().filter(is_fresh) {
            return Some(page.bytes.clone());
        }
        match Arc::clone(&self.places).try_acquire_owned() {
            Ok(place) => self.encoded(Arc::clone(metrics), last, place).await,
            Err(_) => last.as_ref().map(|page| page.bytes.clone()),
        }
    }

    /// Encodes a new page. It keeps the lock if the client goes away: the next one must not start
    /// a second encoding.
    async fn encoded(
        &self,
        metrics: Arc<Metrics>,
        mut last: OwnedMutexGuard<Option<Page>>,
        place: OwnedSemaphorePermit,
    ) -> Option<Bytes> {
        let encode = self.encode;
        let made = tokio::task::spawn_blocking(move || {
            let text = encode(&metrics);
            let bytes = Bytes::from_owner(Placed {
                text,
                _place: place,
            });
            let at = Instant::now();
            *last = Some(Page {
                bytes: bytes.clone(),
                at,
            });
            bytes
        });
        made.await.ok()
    }
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;

    use super::*;

    /// Returns whether the page counts so many accepted connections.
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
    async fn review_12_a_page_is_encoded_once_a_second_for_all_scrapers() {
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
    async fn review_12_clients_that_do_not_read_hold_few_pages_and_keep_nobody_out() {
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
        assert_eq!(scrapes.plain.places.available_permits(), PAGES_MAX - 1);
    }
}
