//! Tests of the page and its events.

use axum::http::Request;
use serde_json::Value;
use tokio::time::timeout;
use tokio_stream::StreamExt as _;
use tower::ServiceExt as _;

use super::*;
use crate::admin::admin_router;
use crate::admin::tests::{Fixture, ask, fixture};
use crate::snapshot::builder::Change;
use crate::snapshot::mesh::{Mesh, Service};

/// Name that would be a script, and would end an event, if it were not escaped.
const PLANTED: &str = "<script>alert(1)</script>\n\ndata: {}";

const DEADLINE: Duration = Duration::from_secs(10);

async fn request(router: &Router, path: &str, more: &[(&str, &str)]) -> Response {
    let mut request = Request::builder().uri(path).header("host", "127.0.0.1:15000");
    for (name, value) in more {
        request = request.header(*name, *value);
    }
    let request = request.body(Body::empty()).expect("a request");
    router.clone().oneshot(request).await.expect("infallible")
}

/// Subscriber, with what it has received and not yet read.
struct Subscriber {
    body: axum::body::BodyDataStream,
    received: String,
}

impl Subscriber {
    async fn new(router: &Router) -> Self {
        let answer = request(router, "/dashboard/events", &[]).await;
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(answer.headers()["content-type"], "text/event-stream");
        Self { body: answer.into_body().into_data_stream(), received: String::new() }
    }

    /// Returns the next block of lines; none at the end.
    async fn block(&mut self) -> Option<String> {
        loop {
            if let Some((block, rest)) = self.received.split_once("\n\n") {
                let block = block.to_owned();
                self.received = rest.to_owned();
                return Some(block);
            }
            let piece = self.body.next().await?.expect("a piece");
            self.received += std::str::from_utf8(&piece).expect("text");
        }
    }

    async fn event(&mut self) -> Value {
        loop {
            let block = self.block().await.expect("an event");
            if let Some(data) = block.strip_prefix("data: ") {
                return serde_json::from_str(data).expect("JSON");
            }
        }
    }
}

#[tokio::test]
async fn the_page_has_files_of_this_port_alone_and_no_markup_from_data() {
    let Fixture { state, _log, .. } = fixture();
    let router = admin_router(state);
    let answer = request(&router, "/dashboard", &[]).await;
    let headers = answer.headers();
    assert_eq!(headers["content-type"], "text/html; charset=utf-8");
    assert_eq!(headers["x-content-type-options"], "nosniff");
    let policy = headers["content-security-policy"].to_str().expect("text");
    for part in ["default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"] {
        assert!(policy.contains(part), "{policy}");
    }
    assert!(!policy.contains("unsafe") && !policy.contains('*'), "{policy}");
    for attribute in ["href=\"", "src=\""] {
        for link in HTML.split(attribute).skip(1) {
            let link = link.split('"').next().unwrap_or_default();
            if let Some(id) = link.strip_prefix('#') {
                assert!(HTML.contains(&format!("id=\"{id}\"")), "{link}");
            } else if link != "data:," {
                let (status, _) = ask(router.clone(), "GET", &format!("/{link}")).await;
                assert_eq!(status, StatusCode::OK, "{link}");
            }
        }
    }
    assert!(!HTML.contains("<style") && !HTML.contains(" style=") && !HTML.contains(" on"));
    assert_eq!(HTML.matches("<script").count(), 1);
    for sink in ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval", "Function("]
    {
        assert!(!SCRIPT.contains(sink), "{sink}");
    }
    let elements = SCRIPT.split("element(\"").skip(1);
    for id in elements.filter_map(|rest| rest.split('"').next()) {
        assert!(HTML.contains(&format!("id=\"{id}\"")), "{id}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_event_a_second_has_the_json_of_the_pages() {
    let Fixture { state, publisher, _log } = fixture();
    let service = Service {
        name: PLANTED.into(),
        namespace: "app".into(),
        hostname: PLANTED.into(),
        ..Service::default()
    };
    let mesh = Mesh::new([service], []);
    publisher.update(Change { mesh: Some((mesh, "east".into())), ..Change::default() });
    let router = admin_router(state);
    let mut subscriber = Subscriber::new(&router).await;
    assert_eq!(subscriber.block().await.as_deref(), Some("retry: 1000"));
    let mut event = subscriber.event().await;
    let first = Instant::now();
    let listed = &event["status"]["services"]["list"][0]["service"];
    assert_eq!(listed, &Value::from(format!("app/{PLANTED}")));
    for path in ["status", "peers", "refusals"] {
        let (_, page) = ask(router.clone(), "GET", &format!("/{path}")).await;
        let mut page: Value = serde_json::from_str(&page).expect("JSON");
        // The time of the page.
        for page in [&mut page, &mut event[path]] {
            page.as_object_mut().expect("an object").remove("at");
        }
        assert_eq!(event[path], page);
    }
    subscriber.event().await;
    assert!(first.elapsed() >= PERIOD);
}

#[tokio::test]
async fn a_subscriber_beyond_the_limit_is_refused_until_another_leaves() {
    let Fixture { state, _log, .. } = fixture();
    let router = admin_router(state);
    let mut subscribers = Vec::new();
    for _ in 0..SUBSCRIBERS_MAX {
        subscribers.push(Subscriber::new(&router).await);
    }
    let refused = request(&router, "/dashboard/events", &[]).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    drop(subscribers.pop());
    // Its task gives the place back.
    let admitted = async {
        while request(&router, "/dashboard/events", &[]).await.status() != StatusCode::OK {
            tokio::task::yield_now().await;
        }
    };
    timeout(DEADLINE, admitted).await.expect("a place");
}

#[tokio::test(start_paused = true)]
async fn events_end_when_the_process_leaves_the_port() {
    let Fixture { state, _log, .. } = fixture();
    let mut subscriber = Subscriber::new(&admin_router(state.clone())).await;
    subscriber.event().await;
    state.lifecycle.hand_over();
    let ended = async { while subscriber.block().await.is_some() {} };
    timeout(DEADLINE, ended).await.expect("an end");
}

#[tokio::test]
async fn a_foreign_page_gets_no_events() {
    let Fixture { state, _log, .. } = fixture();
    let router = admin_router(state);
    for header in [
        ("origin", "http://evil.example"),
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-dest", "document"),
    ] {
        let answer = request(&router, "/dashboard/events", &[header]).await;
        assert_eq!(answer.status(), StatusCode::FORBIDDEN, "{header:?}");
    }
}
