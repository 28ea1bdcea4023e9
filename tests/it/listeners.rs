//! Listeners that change while the gateway runs, and their state for an operator.

use std::io::ErrorKind;

use h2::Reason;
use serde_json::Value;
use strait::tools::hbone::Client;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Duration, Instant};

use crate::passthrough::client_hello;
use crate::support::raw::{GOAWAY, RST_STREAM, RawPeer};
use crate::support::{
    CLIENT, ECHO, Endpoint, GATEWAY, Gateway, Net, Settings, broken, echoes, identities, replace,
    run, until,
};

const EXTRA: u16 = 15010;
const ROUTES: u16 = 15012;
/// `drain.deadline` of the usual settings.
const DEADLINE: Duration = Duration::from_secs(2);
/// Alert unrecognized_name, fatal.
const UNRECOGNIZED: [u8; 7] = [21, 3, 3, 0, 2, 2, 112];

/// A listener as an entry of the list.
fn listener(net: Net, name: &str, port: u16, rest: &str) -> String {
    let bind = net.address(1, port);
    format!("  - {{name: {name}, bind: \"{bind}\", {rest}}}\n")
}

/// TLS by routes of these names to [`ECHO`].
fn routes(names: &str) -> String {
    format!("protocol: tls, routes: [{{sni: [{names}], to: \"{ECHO}\"}}]")
}

/// A gateway with this listener besides the usual one, and the endpoint of [`ECHO`].
async fn gateway(net: Net, listeners: String) -> (Gateway, Endpoint) {
    let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    settings.listeners = listeners;
    let gateway = Gateway::start(&settings).await;
    (gateway, Endpoint::echo(net.listen(11, 9000).await))
}

/// Replaces a part of `strait.yaml`, and waits until the gateway has read it.
async fn edit(gateway: &Gateway, from: &str, to: &str, result: &str) {
    let name = format!("strait_reload_total{{what=\"config\",result=\"{result}\"}}");
    let before = gateway.metric(&name).await;
    let path = gateway.file("strait.yaml");
    let text = std::fs::read_to_string(&path).expect("a file");
    assert!(text.contains(from), "{from} is not in {text}");
    replace(&path, &text.replace(from, to));
    let count = async || gateway.metric(&name).await;
    until(&name, count, |&now| now > before).await;
}

async fn connect_at(net: Net, port: u16) -> Client {
    let tls = identities().client(CLIENT, GATEWAY);
    let client = Client::connect(net.address(1, port), &tls).await;
    client.expect("a connection")
}

/// Returns a passthrough connection after its ClientHello was echoed.
async fn passed_on(net: Net, port: u16, name: &str) -> TcpStream {
    let stream = TcpStream::connect(net.address(1, port)).await;
    let mut stream = stream.expect("a connection");
    let hello = client_hello(name, &[]);
    stream.write_all(&hello).await.expect("a hello");
    let mut echoed = vec![0; hello.len()];
    stream.read_exact(&mut echoed).await.expect("an echo");
    assert_eq!(echoed, hello);
    stream
}

async fn goes_on(stream: &mut TcpStream) {
    stream.write_all(b"?").await.expect("an open tunnel");
    assert_eq!(stream.read_u8().await.expect("an open tunnel"), b'?');
}

async fn is_reset(stream: &mut TcpStream) {
    let error = stream.read_u8().await.expect_err("a reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

async fn refused(net: Net, port: u16) {
    let connect = async || TcpStream::connect(net.address(1, port)).await.is_err();
    until("refused connections", connect, |&refused| refused).await;
}

async fn page(gateway: &Gateway) -> Value {
    let (_, text) = gateway.http(15000, "GET", "/status?format=json").await;
    serde_json::from_str(&text).expect("JSON")
}

/// Each listener's name and state.
async fn states(gateway: &Gateway) -> Vec<(String, String)> {
    let page = page(gateway).await;
    let rows = page["listeners"].as_array().expect("a list").iter();
    let text = |row: &Value, key: &str| row[key].as_str().expect("text").to_owned();
    rows.map(|row| (text(row, "name"), text(row, "state"))).collect()
}

fn state(name: &str, state: &str) -> (String, String) {
    (name.to_owned(), state.to_owned())
}

#[test]
fn routes_and_sources_of_a_tls_listener_hold_for_new_and_open_tunnels() {
    run(async {
        let net = Net::new();
        let tls = listener(net, "tls", ROUTES, &routes("a.example, b.example"));
        let (gateway, _endpoint) = gateway(net, tls).await;
        let mut lost = passed_on(net, ROUTES, "a.example").await;
        let mut kept = passed_on(net, ROUTES, "b.example").await;

        let (old, new) = ("[a.example, b.example]", "[b.example, c.example]");
        edit(&gateway, old, new, "ok").await;
        is_reset(&mut lost).await;
        goes_on(&mut kept).await;
        passed_on(net, ROUTES, "c.example").await;
        let unknown = TcpStream::connect(net.address(1, ROUTES)).await;
        let mut unknown = unknown.expect("a connection");
        unknown.write_all(&client_hello("a.example", &[])).await.expect("a hello");
        let mut alert = Vec::new();
        unknown.read_to_end(&mut alert).await.expect("a clean end");
        assert_eq!(alert, UNRECOGNIZED);

        let (old, new) = ("protocol: tls,", "protocol: tls, sources: [192.0.2.0/24],");
        edit(&gateway, old, new, "ok").await;
        is_reset(&mut kept).await;
        // The reset may come before the client has seen the connection.
        if let Ok(mut excluded) = TcpStream::connect(net.address(1, ROUTES)).await {
            is_reset(&mut excluded).await;
        }
        let revoked = async || gateway.tunnels("revoked").await;
        until("revoked", revoked, |&now| now == 2.0).await;
        gateway.logged("the listener's `sources` no longer contain").await;
    });
}

#[test]
fn a_route_to_another_service_takes_the_right_of_its_open_tunnels() {
    run(async {
        let net = Net::new();
        let tls = listener(net, "tls", ROUTES, &routes("\"*\""));
        let (gateway, _endpoint) = gateway(net, tls).await;
        let mut stream = passed_on(net, ROUTES, "a.example").await;
        let (old, new) = (
            format!("[\"*\"], to: \"{ECHO}\""),
            "[\"*\"], to: \"secret.app.svc.cluster.local:80\"",
        );
        edit(&gateway, &old, new, "ok").await;
        is_reset(&mut stream).await;
        passed_on(net, ROUTES, "a.example").await;
        gateway.logged("dst.service=\"secret.app.svc.cluster.local\"").await;
    });
}

#[test]
fn route_by_and_sources_of_an_hbone_listener_hold_on_open_connections() {
    run(async {
        let net = Net::new();
        let (gateway, _endpoint) = gateway(net, String::new()).await;
        let client = gateway.client(identities()).await;
        let mut old = client.tunnel(ECHO).await.expect("a tunnel");
        echoes(&mut old).await;

        edit(&gateway, "protocol: hbone", "protocol: hbone, route_by: sni", "ok").await;
        echoes(&mut old).await;
        let mut new = client.tunnel(ECHO).await.expect("200 before the hello");
        new.write_all(b"no hello").await.expect("an open tunnel");
        assert_eq!(broken(&mut new).await, Some(Reason::CONNECT_ERROR));

        let narrow = "sources: [192.0.2.0/24]";
        edit(&gateway, "route_by: sni", narrow, "ok").await;
        assert_eq!(broken(&mut old).await, Some(Reason::INTERNAL_ERROR));
        assert!(client.tunnel(ECHO).await.is_err(), "a tunnel from outside");
    });
}

#[test]
fn a_new_listener_opens_and_a_removed_one_drains_until_the_deadline() {
    run(async {
        let net = Net::new();
        let extra = listener(net, "extra", EXTRA, "protocol: hbone");
        let (gateway, _endpoint) = gateway(net, extra.clone()).await;
        let (usual, removed) = (gateway.client(identities()).await, connect_at(net, EXTRA).await);
        let mut kept = usual.tunnel(ECHO).await.expect("a tunnel");
        let mut ends = removed.tunnel(ECHO).await.expect("a tunnel");
        let mut stays = removed.tunnel(ECHO).await.expect("a tunnel");

        let later = listener(net, "later", ROUTES, &routes("a.example"));
        let start = Instant::now();
        edit(&gateway, &extra, &later, "ok").await;
        refused(net, EXTRA).await;
        passed_on(net, ROUTES, "a.example").await;
        let goaway = async || removed.tunnel(ECHO).await.is_err();
        until("GOAWAY", goaway, |&refused| refused).await;
        let want =
            [state("cross-network", "open"), state("later", "open"), state("extra", "draining")];
        assert_eq!(states(&gateway).await, want);
        echoes(&mut stays).await;
        ends.shutdown().await.expect("our end");
        let mut rest = Vec::new();
        ends.read_to_end(&mut rest).await.expect("a clean end");

        assert_eq!(broken(&mut stays).await, Some(Reason::INTERNAL_ERROR));
        assert!(start.elapsed() >= DEADLINE, "after {:?}", start.elapsed());
        gateway.logged("drain_deadline").await;
        let states = async || states(&gateway).await;
        until("no more listener", states, |now| *now == want[..2]).await;
        echoes(&mut kept).await;
        usual.tunnel(ECHO).await.expect("a new tunnel");
    });
}

#[test]
fn a_peer_that_ignores_goaway_is_gone_soon_after_the_deadline() {
    run(async {
        let net = Net::new();
        let (gateway, _endpoint) = gateway(net, String::new()).await;
        // It answers no PING, so that the second GOAWAY is never sent.
        let mut peer = RawPeer::connect(&gateway).await;
        peer.tunnel(1, ECHO).await;
        let (old, new) = (net.address(1, 15008), net.address(1, EXTRA));
        let start = Instant::now();
        edit(&gateway, &old.to_string(), &new.to_string(), "ok").await;
        let mut kinds = Vec::new();
        while let Some(frame) = peer.next().await {
            kinds.push(frame.kind);
        }
        assert!(kinds.contains(&GOAWAY) && kinds.contains(&RST_STREAM));
        let time = start.elapsed();
        // A peer that answers no PING is dropped after 30 s in any case.
        assert!((DEADLINE..5 * DEADLINE).contains(&time), "{time:?}");
    });
}

#[test]
fn a_listener_that_is_moved_or_turned_serves_as_it_now_is() {
    run(async {
        let net = Net::new();
        let extra = listener(net, "extra", EXTRA, "protocol: hbone");
        let (gateway, _endpoint) = gateway(net, extra.clone()).await;
        let client = connect_at(net, EXTRA).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");

        // The same address with another protocol.
        let turned = listener(net, "extra", EXTRA, &routes("a.example"));
        edit(&gateway, &extra, &turned, "ok").await;
        let mut stream = passed_on(net, EXTRA, "a.example").await;
        echoes(&mut tunnel).await;
        assert_eq!(broken(&mut tunnel).await, Some(Reason::INTERNAL_ERROR));

        // A wildcard that covers the address, whose own socket has to be closed first.
        let address = net.address(1, EXTRA);
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = free.local_addr().expect("an address").port();
        drop(free);
        let narrow = std::net::SocketAddr::new(address.ip(), port);
        edit(&gateway, &address.to_string(), &narrow.to_string(), "ok").await;
        refused(net, EXTRA).await;
        passed_on(net, port, "a.example").await;
        is_reset(&mut stream).await;
        edit(&gateway, &narrow.to_string(), &format!("0.0.0.0:{port}"), "ok").await;
        passed_on(net, port, "a.example").await;
    });
}

#[test]
fn an_address_in_use_is_a_failed_reload_that_is_tried_again() {
    run(async {
        let net = Net::new();
        let (gateway, _endpoint) = gateway(net, String::new()).await;
        let client = gateway.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        let taken = net.listen(1, EXTRA).await;

        let more = [
            listener(net, "taken", EXTRA, &routes("a.example")),
            listener(net, "free", ROUTES, &routes("a.example")),
            "discovery:".to_owned(),
        ];
        let more = more.concat();
        edit(&gateway, "discovery:", &more, "error").await;
        passed_on(net, ROUTES, "a.example").await;
        echoes(&mut tunnel).await;
        let want = |taken| {
            let (usual, free) = (state("cross-network", "open"), state("free", "open"));
            vec![usual, state("taken", taken), free]
        };
        assert_eq!(states(&gateway).await, want("failed"));
        let (code, text, _) = gateway.run_command(&["status"]).await;
        assert_eq!(code, 0, "{text}");
        let problem =
            format!("listener `taken` is not open: cannot listen on {}", net.address(1, EXTRA));
        assert!(text.contains(&problem), "{text}");
        assert!(text.contains("in use except for a part"), "{text}");

        drop(taken);
        let mesh = std::fs::read_to_string(gateway.file("mesh.yaml")).expect("a file");
        replace(&gateway.file("mesh.yaml"), &format!("# again\n{mesh}"));
        let states = async || states(&gateway).await;
        until("an open listener", states, |now| *now == want("open")).await;
        passed_on(net, EXTRA, "a.example").await;
        assert_eq!(page(&gateway).await["problems"], serde_json::json!([]));
        echoes(&mut tunnel).await;
    });
}

#[test]
fn a_listener_whose_new_port_is_in_use_stays_at_the_old_one_until_that_is_free() {
    run(async {
        let net = Net::new();
        let tls = listener(net, "tls", ROUTES, &routes("a.example"));
        let (gateway, _endpoint) = gateway(net, tls).await;
        let taken = net.listen(1, EXTRA).await;
        let (old, new) = (net.address(1, ROUTES).to_string(), net.address(1, EXTRA).to_string());
        edit(&gateway, &old, &new, "error").await;
        passed_on(net, ROUTES, "a.example").await;
        let want = [state("cross-network", "open"), state("tls", "open")];
        assert_eq!(states(&gateway).await, want);
        let (_, text, _) = gateway.run_command(&["status"]).await;
        let problem = format!("listener `tls` is still at {old}: cannot listen on {new}");
        assert!(text.contains(&problem), "{text}");

        let mut open = passed_on(net, ROUTES, "a.example").await;
        edit(&gateway, "[a.example]", "[b.example]", "error").await;
        is_reset(&mut open).await;
        passed_on(net, ROUTES, "b.example").await;

        drop(taken);
        let mesh = std::fs::read_to_string(gateway.file("mesh.yaml")).expect("a file");
        replace(&gateway.file("mesh.yaml"), &format!("# again\n{mesh}"));
        let connect = async || TcpStream::connect(net.address(1, EXTRA)).await;
        let _ = until("the new port", connect, Result::is_ok).await;
        passed_on(net, EXTRA, "b.example").await;
        refused(net, ROUTES).await;
        assert_eq!(page(&gateway).await["problems"], serde_json::json!([]));
    });
}

#[test]
fn a_gateway_whose_listeners_are_all_closed_is_not_ready() {
    run(async {
        let net = Net::new();
        let (gateway, _endpoint) = gateway(net, String::new()).await;
        let old = net.address(1, 15008);
        let taken = net.listen(2, 15008).await;
        let new = format!("0.0.0.0:{}", old.port());
        edit(&gateway, &old.to_string(), &new, "error").await;
        let ready = async || gateway.readiness().await;
        let (code, text) = ready().await;
        assert!(code == 500 && text.contains("listeners"), "{code} {text}");
        drop(taken);
        edit(&gateway, &new, &old.to_string(), "ok").await;
        until("readiness", ready, |(code, _)| *code == 200).await;
    });
}

#[test]
fn a_listener_that_was_added_is_never_dialled() {
    run(async {
        let net = Net::new();
        // The endpoint has an address that the new listener will use.
        let settings = Settings::new(net, identities()).endpoints(&[(1, 1, "TCP")]);
        let gateway = Gateway::start(&settings).await;
        let client = gateway.client(identities()).await;
        assert!(client.tunnel(ECHO).await.is_err());
        assert_eq!(gateway.tunnels("dial_refused").await, 1.0);
        let own = listener(net, "own", 9000, &routes("a.example"));
        edit(&gateway, "discovery:", &(own + "discovery:"), "ok").await;
        assert!(client.tunnel(ECHO).await.is_err());
        let denied = async || gateway.tunnels("dial_denied").await;
        until("dial_denied", denied, |&now| now == 1.0).await;
    });
}

#[test]
fn status_shows_listeners_and_what_a_route_of_any_name_opens() {
    run(async {
        let net = Net::new();
        let to = "to: \"secret.app.svc.cluster.local:80\"";
        let any = format!("protocol: tls, routes: [{{sni: [\"*\"], {to}}}]");
        let narrow =
            format!("protocol: tls, sources: [10.0.0.0/8], routes: [{{sni: [x.example], {to}}}]");
        let istio = "protocol: tls, routing: istio";
        let listeners = [
            listener(net, "any", ROUTES, &any),
            listener(net, "narrow", EXTRA, &narrow),
            listener(net, "istio", 15443, istio),
        ];
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        settings.listeners = listeners.concat();
        settings.exposure = format!("    - {{service: \"{ECHO}\", to: [{{anyone: true}}]}}\n");
        let gateway = Gateway::start(&settings).await;

        let (code, text, _) = gateway.run_command(&["status"]).await;
        assert_eq!(code, 0, "{text}");
        for (name, rest) in [
            ("cross-network", "hbone     by authority   every address  open"),
            ("any", "tls       by its routes  every address  open"),
            ("narrow", "tls       by its routes  10.0.0.0/8     open"),
            ("istio", "tls       istio          every address  open"),
        ] {
            let mut lines = text.lines();
            let line = lines.find(|line| line.trim_start().starts_with(name));
            let line = line.unwrap_or_else(|| panic!("{name}: {text}"));
            assert!(line.ends_with(rest), "{line}");
        }
        let mut lines = text.lines();
        let secret = lines.find(|line| line.contains("app/secret"));
        let secret = secret.expect("a line");
        assert!(!secret.contains("nobody"), "{secret}");
        for reported in [
            "anyone on port 80 through listener any (sni *)",
            "anyone from 10.0.0.0/8 on port 80 through listener narrow (sni x.example)",
        ] {
            assert!(secret.contains(reported), "{secret}");
        }
        let (_, echo, _) = gateway.run_command(&["status", "echo"]).await;
        let reported = "exposed to anyone on port 80 through listener istio (server name in \
                        Istio's format)";
        assert!(echo.contains(reported), "{echo}");

        let page = page(&gateway).await;
        let row = &page["listeners"][2];
        assert_eq!(row["address"], net.address(1, EXTRA).to_string());
        assert_eq!(row["protocol"], "tls");
        assert_eq!(row["sources"], serde_json::json!(["10.0.0.0/8"]));
        assert_eq!(row["routes"][0]["sni"][0], "x.example");
        assert_eq!(row["state"], "open");
    });
}

/// Returns the hash of the configuration in use.
async fn config_hash(gateway: &Gateway) -> String {
    let text = gateway.scrape().await;
    let mut hashes = text.lines().filter(|line| line.starts_with("strait_config_info{"));
    let hash = hashes.next().expect("a hash").to_owned();
    assert_eq!(hashes.next(), None, "{text}");
    hash
}

#[test]
fn the_hash_of_the_configuration_and_the_listeners_that_are_up_are_in_the_metrics() {
    run(async {
        let net = Net::new();
        let extra = listener(net, "extra", EXTRA, "protocol: hbone");
        let (gateway, _endpoint) = gateway(net, extra.clone()).await;
        let is_reloaded = async || {
            let time = gateway.metric("strait_config_last_reload_success_timestamp_seconds").await;
            assert!(time > 1e9, "{time}");
            gateway.metric("strait_config_last_reload_successful").await
        };
        let up = async || gateway.metric("strait_listener_up{listener=\"extra\"}").await;
        assert_eq!((is_reloaded().await, up().await), (1.0, 1.0));
        let first = config_hash(&gateway).await;
        edit(&gateway, &extra, "", "ok").await;
        assert_ne!(config_hash(&gateway).await, first);
        until("it is closed", up, |&up| up == 0.0).await;
        edit(&gateway, "gateway: {", "gateway: {mistake: x, ", "error").await;
        assert_ne!(config_hash(&gateway).await, first);
        assert_eq!(is_reloaded().await, 0.0);
        edit(&gateway, "gateway: {mistake: x, ", "gateway: {", "ok").await;
        assert_eq!(is_reloaded().await, 1.0);
        edit(&gateway, "listeners:\n", &format!("listeners:\n{extra}"), "ok").await;
        assert_ne!(config_hash(&gateway).await, first, "another order");
        edit(&gateway, &format!("listeners:\n{extra}"), "listeners:\n", "ok").await;
        let own = format!(
            "  - {{name: cross-network, bind: \"{}:15008\", protocol: hbone}}\n",
            net.ip(1)
        );
        edit(&gateway, &own, &format!("{own}{extra}"), "ok").await;
        assert_eq!(config_hash(&gateway).await, first);
        until("it is open", up, |&up| up == 1.0).await;
    });
}
