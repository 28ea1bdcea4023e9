//! `/dashboard`: the state of the gateway as a page for a browser, which changes nothing.
//!
//! `/dashboard/events` sends the JSON of `/status`, `/peers` and `/refusals` as Server-Sent Events.
//! The page requests the endpoints of a service from `/status` itself. Names in the JSON are those
//! of tenants and peers, so the page writes them as text, and its policy permits no other script
//! than its own. The deadlines of the port apply to a subscriber that does not read.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, sleep_until};
use tokio_stream::wrappers::ReceiverStream;

use super::pages::DashboardEvent;
use super::scrape::SharedPage;
use super::status::{self, SERVICES_MAX};
use super::{AdminState, Source};
use crate::lifecycle::Lifecycle;

const HTML: &str = include_str!("page.html");
const CSS: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Files of this port alone, nothing inline, and no other page around it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
                      connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

/// Maximum number of subscribers, of the 64 connections of the port.
const SUBSCRIBERS_MAX: usize = 8;
/// Time between two events of a subscriber.
const PERIOD: Duration = Duration::from_secs(1);
/// Age at which the state is read anew, in multiples of the time that reading it took. A page of a
/// large mesh takes long, and open browsers must not keep a core busy.
const REST: u32 = 9;

/// Source of the events, for all subscribers.
#[derive(Clone)]
struct Events {
    page: Arc<SharedPage>,
    places: Arc<Semaphore>,
    lifecycle: Lifecycle,
}

/// Creates the router of the page, its files and its events.
pub(super) fn router(state: &AdminState) -> Router<AdminState> {
    let (of, lifecycle) = (state.clone(), state.lifecycle.clone());
    let encode: Source<String> = Arc::new(move || encode(&of));
    let events = Events {
        page: Arc::new(SharedPage::new(PERIOD, REST, encode)),
        places: Arc::new(Semaphore::new(SUBSCRIBERS_MAX)),
        lifecycle,
    };
    let file = |kind, text: &'static str| get(async move || answer(kind, text));
    Router::new()
        .route("/dashboard", file("text/html; charset=utf-8", HTML))
        .route("/dashboard/page.css", file("text/css; charset=utf-8", CSS))
        .route("/dashboard/page.js", file("text/javascript; charset=utf-8", SCRIPT))
        .route("/dashboard/events", get(async move |headers: HeaderMap| events.subscribe(&headers)))
}

/// Returns an answer that a browser uses for what it is, and keeps nowhere.
fn answer(kind: &'static str, body: impl IntoResponse) -> Response {
    let headers: [(HeaderName, &str); 6] = [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    (headers, body).into_response()
}

/// Returns the next event. JSON has no line breaks, which would end it.
fn encode(state: &AdminState) -> String {
    let event = DashboardEvent {
        status: status::page(state, None, SERVICES_MAX),
        peers: status::peers::page(state),
        refusals: status::refusals::page(state),
    };
    match serde_json::to_string(&event) {
        Ok(json) => format!("data: {json}\n\n"),
        Err(error) => format!(": {error}\n\n"),
    }
}

impl Events {
    /// Answers with events until the client is gone or the process leaves the port; 503 if all
    /// places are taken, and 403 for a window of its own, as a foreign page could open eight.
    fn subscribe(&self, headers: &HeaderMap) -> Response {
        if headers.get("sec-fetch-dest").is_some_and(|dest| dest == "document") {
            return (StatusCode::FORBIDDEN, "events are for /dashboard\n").into_response();
        }
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
            let text = format!("{SUBSCRIBERS_MAX} dashboards are open; close one\n");
            return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
        };
        let (sender, receiver) = mpsc::channel(1);
        let events = self.clone();
        tokio::spawn(async move {
            let _place = place;
            tokio::select! {
                () = events.send(&sender) => {}
                () = sender.closed() => {}
                () = events.lifecycle.ports_end() => {}
            }
        });
        answer("text/event-stream", Body::from_stream(ReceiverStream::new(receiver)))
    }

    /// Sends events until the client is gone.
    async fn send(&self, sender: &mpsc::Sender<io::Result<Bytes>>) {
        // A browser that has lost the connection tries again after a second.
        let mut next = Bytes::from_static(b"retry: 1000\n\n");
        let mut due = Instant::now();
        while sender.send(Ok(next)).await.is_ok() {
            sleep_until(due).await;
            let Some(page) = self.page.load().await else { return };
            // From here on, so that the page is no longer fresh when it is due.
            due = Instant::now() + PERIOD;
            // A subscriber that does not read holds a copy, so that the page can be replaced.
            next = Bytes::copy_from_slice(&page);
        }
    }
}

#[cfg(test)]
mod tests;
