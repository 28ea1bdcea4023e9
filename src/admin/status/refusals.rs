//! GET `/refusals`: the last refusals by kind, each with the command that explains it.

use axum::Json;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};

use super::Form;
use crate::admin::AdminState;
use crate::admin::pages::{RefusalRow, RefusalsPage};
use crate::config::{Config, ListenerProtocol, TlsRouting};
use crate::reason::Reason;
use crate::telemetry::Refusals;

/// Prefix of the listener of a binding in records.
const BINDING: &str = "binding ";

pub(in crate::admin) async fn refusals(
    State(state): State<AdminState>,
    Query(form): Query<Form>,
) -> Response {
    if let Some(refusal) = form.refusal("strait status refusals") {
        return refusal;
    }
    Json(page(&state)).into_response()
}

/// Returns the page.
pub(in crate::admin) fn page(state: &AdminState) -> RefusalsPage {
    let config = state.config.load();
    let list = state.metrics.refusals.list().into_iter();
    RefusalsPage { refusals: list.map(|entry| row(&config, entry)).collect() }
}

fn row(config: &Config, entry: Refusals) -> RefusalRow {
    let explain = explain_command(config, &entry);
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let refused = entry.refused;
    RefusalRow {
        reason: refused.reason.to_owned(),
        count: entry.count,
        last: entry.last,
        identity: entry.identity,
        cluster: some(&entry.cluster),
        first_peer: some(&refused.first_peer),
        address: entry.address,
        listener: some(&refused.listener),
        authority: some(&refused.authority),
        sni: some(&refused.sni),
        error: entry.error.map(Into::into),
        explain,
    }
}

/// Returns the command that explains the refusal; none for a connection without a CONNECT, and for
/// a name that a shell could read as anything but a word.
fn explain_command(config: &Config, entry: &Refusals) -> Option<String> {
    let refused = &entry.refused;
    let address = entry.address.to_string();
    let binding = refused.listener.strip_prefix(BINDING);
    let mut listeners = config.listeners.iter();
    let listener = listeners.find(|it| *it.name == *refused.listener);
    let is_istio = listener.is_some_and(|listener| {
        matches!(listener.protocol, ListenerProtocol::Tls(TlsRouting::Istio { .. }))
    });
    let offers_istio = is_istio && refused.reason != Reason::NoIstioAlpn.label();
    let issued = config.trust.clusters.iter().any(|cluster| *cluster.name == *entry.cluster);
    let arguments = [
        ("binding", binding),
        ("from", entry.identity.as_deref()),
        ("cluster", issued.then_some(&*entry.cluster)),
        ("source", Some(&*refused.first_peer)),
        ("to", binding.is_none().then_some(&*refused.authority)),
        ("listener", listener.map(|listener| &*listener.name)),
        ("alpn", offers_istio.then_some("istio")),
        ("sni", Some(&*refused.sni)),
        ("address", Some(&*address)),
    ];
    let given = arguments.iter().filter_map(|&(key, value)| Some((key, value?)));
    let given = given.filter(|(_, value)| !value.is_empty());
    let is_request = |&(key, _): &(&str, &str)| ["binding", "to", "sni"].contains(&key);
    // The command explains CONNECTs, and a request by another method was none.
    let is_other = refused.reason == Reason::NotConnect.label();
    if is_other || !given.clone().any(|argument| is_request(&argument)) {
        return None;
    }
    given.into_iter().try_fold("strait explain".to_owned(), |command, (key, value)| {
        Some(format!("{command} --{key} {}", word(value)?))
    })
}

/// Returns the value as one word of a shell, in single quotes if it needs them; none if it has
/// single quotes or characters that are not printable ASCII.
fn word(value: &str) -> Option<String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._:/-".contains(c);
    if value.chars().all(is_plain) && !value.starts_with('-') {
        return Some(value.to_owned());
    }
    let is_quotable = value.chars().all(|c| (c.is_ascii_graphic() || c == ' ') && c != '\'');
    (is_quotable && !value.starts_with('-')).then(|| format!("'{value}'"))
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;

    use serde_json::Value;

    use super::word;
    use crate::admin::admin_router;
    use crate::admin::tests::{Fixture, ask, fixture};
    use crate::reason::{HandshakeRefusal, Reason};
    use crate::telemetry::{Record, report_refused_handshake};
    use crate::tools::samples::source;

    async fn page(fixture: &Fixture) -> Value {
        let router = admin_router(fixture.state.clone());
        serde_json::from_str(&ask(router, "GET", "/refusals").await.1).expect("JSON")
    }

    #[tokio::test]
    async fn a_refusal_has_the_command_that_explains_it_and_what_ended_well_is_none() {
        let fixture = fixture();
        let metrics = &fixture.state.metrics;
        let peer = Arc::new(source());
        for (authority, reason) in [
            ("echo.global:80", Reason::NotForPeer),
            ("$(reboot);'x", Reason::BadAuthority),
            ("echo.global:80", Reason::NotConnect),
            ("left.test:80", Reason::DownstreamCancelled),
        ] {
            Record::new(metrics, &peer, authority).finish(reason);
        }
        let client = SocketAddr::from(([198, 51, 100, 7], 4000));
        report_refused_handshake(metrics, client, HandshakeRefusal::Other, "no\u{1b}TLS");
        let page = page(&fixture).await;
        let rows = page["refusals"].as_array().expect("rows");
        assert_eq!(rows.len(), 4, "{page:#}");
        let row = |reason: Reason| rows.iter().find(|row| row["reason"] == reason.label());
        let known = row(Reason::NotForPeer).expect("a row");
        let command = format!(
            "strait explain --from {} --to echo.global:80 --listener cross-network --address {}",
            peer.principal,
            peer.address.ip()
        );
        assert_eq!(known["explain"], command);
        assert_eq!(known["count"], 1);
        for reason in [Reason::BadAuthority, Reason::NotConnect] {
            assert_eq!(row(reason).expect("a row")["explain"], Value::Null, "{reason}");
        }
        let handshake = rows.iter().find(|row| row["identity"].is_null()).expect("a row");
        assert_eq!(handshake["address"], "198.51.100.7");
        assert_eq!(handshake["explain"], Value::Null, "a handshake requests nothing");
    }

    #[test]
    fn a_shell_reads_a_value_as_one_word() {
        for (value, expected) in [
            ("echo.global:80", Some("echo.global:80")),
            ("[::1]:80", Some("'[::1]:80'")),
            ("$(reboot) `x` \"y\" \\", Some("'$(reboot) `x` \"y\" \\'")),
            ("it's", None),
            ("a\nb", None),
            ("--admin", None),
            ("ä", None),
        ] {
            assert_eq!(word(value).as_deref(), expected, "{value}");
        }
    }
}
