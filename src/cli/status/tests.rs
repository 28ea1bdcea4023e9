//! Tests of the pages as text, from recorded JSON.

use serde_json::{Value, json};

use super::*;
use crate::admin::{ListenerRow, ListenerState};
use crate::config::{Audience, HostPort, Line, Listener, ObjectBindings};

/// Page of a gateway that waits for its control plane.
fn page() -> Value {
    serde_json::from_str(include_str!("pages/waiting.json")).expect("JSON")
}

fn status_text(page: &Value) -> String {
    text::page(&serde_json::from_value(page.clone()).expect("a page"), false, false)
}

#[test]
fn the_page_is_aligned_and_says_when_and_why() {
    let text = status_text(&page());
    let rejected = "  rejected of addresses: east//Pod/app/bad: workload.addresses[0]: 5 \
                    bytes\\u{1b}[2J (version 7, 2m ago)\n";
    let want = format!(
        r#"strait 0.1.0  not ready, pending: discovery (clusters)
cluster east, network net, locality us/a (pod); snapshot 7: 60 services, 2 workloads, 0 policies

Problems
  11 of addresses are rejected

Operator  `strait drain KIND NAME --undo` puts it back
  region us-east-2 is evacuated since 2026-01-01T01:00:00Z (1m ago), until a restart

Listeners
  NAME   ADDRESS        PROTOCOL  ROUTED         SOURCES                   STATE
  mesh   0.0.0.0:15008  hbone     by authority   every address             open
  istio  0.0.0.0:15443  tls       istio          every address             waits for a certificate
  sni    0.0.0.0:15012  tls       by its routes  10.0.0.0/8, 192.0.2.1/32  open
  mesh   0.0.0.0:15008  hbone     by authority   every address             failed, see Problems
  mesh   0.0.0.0:15008  hbone     by authority   every address             draining
  THROUGH  ASKED FOR BY            REACHED                     BY
  mesh     any authority           services by their exposure  the trust set
  istio    outbound_.PORT_._.HOST  services exposed to anyone  anyone
  sni      *.a, *                  echo.app:80                 anyone from 10.0.0.0/8, 192.0.2.1/32

Discovery  istio istiod:15012
  not connected since 2026-01-01T01:00:00Z (1m ago)
  unavailable: "gone"
  tried 3 times, next in 2s
  state on disk of 2026-01-01T00:59:55Z (1m 5s ago)
  TYPE       STATE    HELD  REJECTED     NACKS  VERSION                 LAST ACCEPTED
  addresses  synced   12    at least 11  2      2026-01-01T00:00:00Z/7  1h 1m ago
  clusters   pending  0     0            0      (0 responses)           never
{rejected}  and 1 more, see `strait dump`
{unused}  and 2 more, see `strait dump`

Certificates
  IDENTITY                       STATE      SERIAL  EXPIRES
  spiffe://east.local/ns/a/sa/b  Available  17      in 1day (2026-01-02T01:01:00Z)

Changes read
  SOURCE  READ       RESULT
  config  1h 1m ago  rejected, see Problems; the previous state is in use

Hostnames
  NAME        ANSWERED  LAST ERROR  ADDRESSES
  db.example  1m ago    timed out   10.0.0.1,10.0.0.2
  a.example   never     -           10.0.0.1,10.0.0.2 and more

Services
  SERVICE       PORTS  ENDPOINTS USED  TUNNELS  EXPOSED TO
  app/echo.app  80,81  1 of 2          1        cluster west on port 80; cluster north
  1 of 60 services; see one by `strait status SERVICE`, all by --all
"#,
        rejected = rejected.repeat(10),
        unused = "  not used of clusters: x\\u{1b}: no service by its name\n".repeat(10),
    );
    assert_eq!(text, want);
}

#[test]
fn a_binding_is_used_by_the_identities_of_its_clients() {
    let cluster = |name: &str| Audience { cluster: Some(name.to_owned()), ..Audience::default() };
    let narrow = Audience {
        namespaces: vec!["shop".to_owned(), "web".to_owned()],
        service_accounts: vec![("shop".to_owned(), "cart".to_owned())],
        ..Audience::default()
    };
    let anyone = Audience { anyone: true, ..Audience::default() };
    for (to, want) in [
        (vec![], "anyone from 10.0.0.0/8"),
        (vec![anyone], "the trust set from 10.0.0.0/8"),
        (vec![cluster("west"), cluster("north")], "cluster west; cluster north from 10.0.0.0/8"),
        (vec![narrow], "any cluster, namespace shop or web, account shop/cart from 10.0.0.0/8"),
    ] {
        let template = ObjectBindings {
            addresses: "127.64.0.0/10".parse().unwrap(),
            clients: vec!["10.0.0.0/8".parse().unwrap()],
            to,
        };
        let service = HostPort::parse("pay.app:80").unwrap();
        let local = ("pay.global".to_owned(), ([127, 64, 0, 1], 80).into());
        let binding =
            template.binding((vec!["west".to_owned()], service), local, vec![Line::default()]);
        let mut page = page();
        page["listeners"] = json!([ListenerRow {
            listener: Listener::from(&binding),
            address: binding.listen,
            state: ListenerState::Open,
            error: None,
        }]);
        let text = status_text(&page);
        let row = format!("any connection, as pay.global  pay.app:80 of west  {want}\n");
        assert!(text.contains(&row), "{text}");
    }
}

#[test]
fn one_service_has_its_endpoints_and_why_they_are_not_used() {
    let mut page = page();
    page["ready"] = true.into();
    let text = text::page(&serde_json::from_value(page).expect("a page"), true, true);
    let want = "\u{1b}[1mstrait\u{1b}[0m 0.1.0  \u{1b}[32mready\u{1b}[0m
cluster east, network net, locality us/a (pod); snapshot 7: 60 services, 2 workloads, 0 policies

\u{1b}[1mService\u{1b}[0m  app/echo.app
  exposed to cluster west on port 80
  exposed to cluster north
  1 of 2 workloads used
  PORT  WORKLOAD  ADDRESS         WEIGHT  TUNNELS  STATE
  80    a         10.0.0.1:15008  1       1        used
  80    long-uid  -               1       0        not used: unhealthy
  and 4 more; see all by --all
";
    assert_eq!(text, want);
}

#[test]
fn issuers_and_holders_are_tables_up_to_a_limit() {
    let mut page = page();
    assert!(!status_text(&page).contains("Issuers"));
    let issuer = json!({
        "spki": "x", "subject": "CN=x", "cluster": null, "accepted": 1, "refused": 0,
    });
    page["issuers"] = json!(vec![issuer; 30]);
    let holder = json!({ "source": "cluster west", "held": 4 });
    page["shares"] = json!([
        { "resource": "tunnels", "of": null, "used": 4, "max": null, "holders": [holder] },
    ]);
    let text = status_text(&page);
    let header = "  SPKI SHA-256  SUBJECT  CLUSTER  ACCEPTED  REFUSED\n";
    assert!(text.contains(header), "{text}");
    assert_eq!(text.matches("  x             CN=x     -        1         0\n").count(), 20);
    let more = "\n  and 10 more, see `strait status -o json`\n";
    assert!(text.contains(more), "{text}");
    let shares = "Shares
  RESOURCE  OF  USED  HOLDER        HELD
  tunnels   -   4     cluster west  4
";
    assert!(text.contains(shares), "{text}");
}

#[test]
fn a_full_page_has_the_recorded_text() {
    let json = include_str!("../../admin/status/pages/status.json");
    let page = serde_json::from_str(json).expect("a page");
    assert_eq!(text::page(&page, false, false), include_str!("pages/status.txt"));
    let json = include_str!("../../admin/status/pages/service.json");
    let page = serde_json::from_str(json).expect("a page");
    assert_eq!(text::page(&page, true, false), include_str!("pages/service.txt"));
    let json = include_str!("../../admin/status/pages/peers.json");
    let page = serde_json::from_str(json).expect("a page");
    assert_eq!(peers::page(&page, false), include_str!("pages/peers.txt"));
}

#[test]
fn refusals_are_a_table_with_the_commands_that_explain_them() {
    let row = |count: u64, authority: &str, explain: Option<&str>| {
        json!({
            "reason": "not_exposed", "count": count, "last": "2026-01-01T01:00:00Z",
            "identity": "spiffe://west.local/ns/a/sa/b", "address": "192.0.2.1",
            "authority": authority, "explain": explain,
        })
    };
    let command = "strait explain --to a.test:80";
    let page =
        json!({"refusals": [row(12, "a.test:80", Some(command)), row(1, "\u{1b}[2J", None)]});
    let page = serde_json::from_value(page).expect("a page");
    let want = r"
Refusals  the most frequent first
  COUNT  LAST                  REASON       PEER                           REQUESTED  ERROR
  12     2026-01-01T01:00:00Z  not_exposed  spiffe://west.local/ns/a/sa/b  a.test:80  -
  1      2026-01-01T01:00:00Z  not_exposed  spiffe://west.local/ns/a/sa/b  \u{1b}[2J  -

Commands that explain them
  strait explain --to a.test:80
";
    assert_eq!(refusals::page(&page, false), want);
}
