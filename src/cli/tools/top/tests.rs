//! Tests of the screen, from the pages that the admin port's tests record.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use parking_lot::Mutex;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{Event, KeyCode};
use ratatui::style::Color;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_stream::wrappers::ReceiverStream;

use super::*;

const EXPLAIN: &str = "strait explain --from spiffe://north.local/ns/a/sa/b --to gone.test:80";

/// Event with a refusal, a drain, holders of tunnels and a service whose name is hostile.
fn event() -> Value {
    let mut status: Value =
        serde_json::from_str(include_str!("../../../admin/status/pages/status.json"))
            .expect("JSON");
    let peers: Value =
        serde_json::from_str(include_str!("../../../admin/status/pages/peers.json")).expect("JSON");
    status["services"] =
        json!({ "total": 2, "list": [service("app/a", 0), service("app/b\u{1b}[2J", 3)] });
    status["drained"] = json!([
        { "kind": "service", "name": "a.app", "since": status["at"], "persisted": true },
        { "kind": "region", "name": "$(reboot)", "since": status["at"], "persisted": false },
    ]);
    let holders =
        json!([{ "source": "cluster west", "held": 3 }, { "source": "cluster n", "held": 1 }]);
    status["shares"] =
        json!([{ "resource": "tunnels", "of": null, "used": 4, "max": null, "holders": holders }]);
    let refusal = |last: &str| {
        json!({
            "reason": "unknown_host", "count": 2, "last": last, "identity": null, "cluster": null,
            "firstPeer": null, "address": "198.51.100.7", "listener": null,
            "authority": "gone.test:80", "sni": null, "error": null, "explain": EXPLAIN,
        })
    };
    let now = status["at"].as_str().expect("a time").to_owned();
    let refusals = json!([refusal(&now), refusal("2000-01-01T00:00:00Z")]);
    json!({ "status": status, "peers": peers, "refusals": { "refusals": refusals } })
}

fn service(name: &str, tunnels: u32) -> Value {
    let endpoint = |uid: &str, port: u16, tunnels: u32, unused: Option<&str>| {
        json!({
            "port": port, "uid": uid, "address": "192.0.2.9:80", "weight": 1, "tunnels": tunnels,
            "unused": unused,
        })
    };
    let endpoints = [
        endpoint("pod-1", 80, tunnels, None),
        endpoint("pod-2", 80, 1, Some("ejected")),
        endpoint("pod-3", 81, 1, None),
    ];
    json!({
        "service": name, "ports": [80, 81], "used": 1, "total": 2, "tunnels": tunnels,
        "exposedTo": ["cluster north: exposure.services[0]"], "endpoints": endpoints, "more": 0,
    })
}

fn shown(event: &Value) -> Shown {
    let event: DashboardEvent<IgnoredAny> =
        serde_json::from_value(event.clone()).expect("an event");
    let service = serde_json::from_value(service("app/b\u{1b}[2J", 3)).expect("a service");
    Shown { event, service: Some(service) }
}

fn press(view: &mut View, key: KeyCode) -> bool {
    view.press(&Event::Key(key.into()))
}

/// Draws the view on a screen, and returns its lines without the spaces at their ends.
fn screen(view: &View, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
    terminal.draw(|frame| view.draw(frame)).expect("a frame");
    let buffer = terminal.backend().buffer();
    let lines = buffer.content.chunks(usize::from(width));
    let text = |line: &[ratatui::buffer::Cell]| line.iter().map(|cell| cell.symbol()).collect();
    lines
        .map(|line| {
            let line: String = text(line);
            line.trim_end().to_owned()
        })
        .collect()
}

fn assert_shows(lines: &[String], expected: &[&str]) {
    for part in expected {
        assert!(lines.iter().any(|line| line.contains(part)), "{part:?} in {lines:#?}");
    }
}

#[test]
fn each_tab_shows_what_the_dashboard_shows() {
    let mut view = View::new(shown(&event()));
    let tabs = [
        &["192.0.2.1:15008", "20ms 500us", "80%", "refused", "14 tunnels, 1 of 2"][..],
        &["app/b\\u{1b}[2J", "1 of 2", "pod-2", "ejected", "75%", "100%"],
        &["cluster west", "75%", "cluster n", "25%"],
        &["unknown_host", "gone.test:80", "just now", EXPLAIN],
        &["spiffe://west.local/ns/g/sa/g", "gateway 192.0.2.1:15008"],
        &["keeps it", "strait drain service a.app --undo", "ends it"],
    ];
    for expected in tabs {
        let lines = screen(&view, 150, 30);
        assert_shows(&lines, expected);
        assert_shows(
            &lines,
            &[" Networks   Services   Tunnels   Refusals   Certificates   Drains", "q ends"],
        );
        press(&mut view, KeyCode::Tab);
    }
    assert_shows(&screen(&view, 150, 30), tabs[0]);
    let refusals = screen(
        &{
            (0..3).for_each(|_| {
                press(&mut view, KeyCode::Right);
            });
            view
        },
        150,
        30,
    );
    let rows = refusals.iter().filter(|line| line.contains("unknown_host"));
    assert_eq!(rows.count(), 1, "the other one is old: {refusals:#?}");
}

#[test]
fn the_selected_row_is_shown_whole_on_a_narrow_screen_and_selects_the_endpoints() {
    let mut view = View::new(shown(&event()));
    press(&mut view, KeyCode::BackTab);
    press(&mut view, KeyCode::Left);
    press(&mut view, KeyCode::Left);
    let lines = screen(&view, 50, 14);
    assert!(!lines[..11].concat().contains(EXPLAIN), "{lines:#?}");
    assert!(lines[11..].join(" ").contains(EXPLAIN), "{lines:#?}");
    press(&mut view, KeyCode::Left);
    press(&mut view, KeyCode::Left);
    assert_eq!(view.service().as_deref(), Some("app/b\u{1b}[2J"), "the one with endpoints");
    press(&mut view, KeyCode::Up);
    press(&mut view, KeyCode::Up);
    assert_eq!(view.service().as_deref(), Some("app/a"));
    for _ in 0..3 {
        press(&mut view, KeyCode::Down);
    }
    assert_eq!(view.service().as_deref(), Some("app/b\u{1b}[2J"), "the last one");
}

#[test]
fn a_screen_of_any_size_is_drawn() {
    let mut view = View::new(shown(&event()));
    for _ in 0..6 {
        for (width, height) in [(1, 1), (7, 3), (20, 5), (80, 24), (300, 100)] {
            assert_eq!(screen(&view, width, height).len(), usize::from(height));
        }
        press(&mut view, KeyCode::Tab);
    }
}

#[test]
fn a_lost_gateway_is_reported_above_the_last_state() {
    let mut view = View::new(shown(&event()));
    view.update(Err(anyhow::anyhow!("refused\u{1b}")));
    let lines = screen(&view, 150, 30);
    assert!(lines[0].ends_with("no data for 0s: refused\\u{1b}"), "{lines:#?}");
    assert_shows(&lines, &["192.0.2.1:15008"]);
    view.update(Ok(shown(&event())));
    assert!(!screen(&view, 150, 30)[0].contains("no data"));
}

#[test]
fn a_state_has_its_colour() {
    let view = View::new(shown(&event()));
    let mut terminal = Terminal::new(TestBackend::new(150, 30)).expect("a terminal");
    terminal.draw(|frame| view.draw(frame)).expect("a frame");
    let buffer = terminal.backend().buffer();
    let colors = |text: &str| {
        let lines = buffer.content.chunks(150);
        let cells = lines.filter_map(|line| {
            let symbols: String = line.iter().map(|cell| cell.symbol()).collect();
            Some(line[symbols.find(text)?].fg)
        });
        cells.collect::<Vec<_>>()
    };
    assert_eq!(colors("failed")[0], Color::Red);
    assert!(colors("ready  ").contains(&Color::Green));
}

#[test]
fn the_keys_that_end_it_end_it() {
    let mut view = View::new(shown(&event()));
    assert!(!press(&mut view, KeyCode::Char('x')));
    assert!(!view.press(&Event::Resize(10, 10)));
    assert!(press(&mut view, KeyCode::Char('q')));
    assert!(press(&mut view, KeyCode::Esc));
}

#[test]
fn the_text_has_all_tabs_and_no_escape() {
    let mut without = event();
    without["refusals"]["refusals"] = json!([]);
    let text = View::new(shown(&without)).text(false);
    assert!(!text.contains('\u{1b}'), "{text}");
    for part in [
        "\nGateways of other networks\n  GATEWAY          NETWORK   CLUSTER  STATE",
        "\nEndpoints of app/b\\u{1b}[2J\n",
        "\nRefusals of the last 15 minutes, the most frequent first\n  nothing was refused\n",
        "strait drain service a.app --undo\n",
    ] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    assert!(View::new(shown(&without)).text(true).contains("\u{1b}[1mDrained by an operator"));
}

#[tokio::test]
async fn endpoints_are_asked_for_once_for_each_state_while_their_tab_is_shown() {
    let (sender, receiver) = mpsc::channel(1);
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&asked);
    let mut page = event()["status"].take();
    page["services"] = json!({ "total": 1, "list": [service("app/a", 0)] });
    let page = page.to_string();
    let stream = Arc::new(Mutex::new(Some(Body::from_stream(ReceiverStream::new(receiver)))));
    let router = Router::new()
        .route("/dashboard/events", get(async move || stream.lock().take().expect("a stream")))
        .route(
            "/status",
            get(async move || {
                counted.fetch_add(1, Ordering::Relaxed);
                page
            }),
        );
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move { axum::serve(listener, router).await });
    let mut events = Events::open(&Admin::at(address)).await.expect("events");
    let (select, selected) = watch::channel(None);
    for (second, name, count) in [
        (0, None, 0),
        (0, Some("app/a"), 1),
        (0, Some("app/a"), 1),
        (1, Some("app/a"), 2),
        (1, Some("app/b"), 3),
        (2, None, 3),
    ] {
        select.send_replace(name.map(str::to_owned));
        let mut event = event();
        event["status"]["at"] = format!("2026-11-27T19:00:0{second}Z").into();
        let text = Ok::<_, io::Error>(format!("data: {event}\n\n"));
        sender.send(text).await.expect("a reader");
        let shown = events.next(&selected).await.expect("an event");
        assert_eq!(asked.load(Ordering::Relaxed), count, "{second} {name:?}");
        assert_eq!(shown.service.is_some(), name.is_some());
    }
}

#[test]
fn endpoints_are_on_the_screen_under_the_tab_of_services_alone() {
    let mut view = View::new(shown(&event()));
    assert_eq!(view.service_on_screen(), None);
    press(&mut view, KeyCode::Tab);
    assert!(view.service_on_screen().is_some());
    press(&mut view, KeyCode::Tab);
    assert_eq!(view.service_on_screen(), None);
}
