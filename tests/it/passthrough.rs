//! TLS listeners: routed by ClientHello, passed through unread, and ended like TCP.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::support::oracle::{self, Oracle, Plan};
use crate::support::{
    ENDPOINT, Endpoint, Gateway, Net, Settings, identities, replace, reset, run, until,
};

const ISTIO: u16 = 15443;
const ROUTES: u16 = 15012;
const NARROW: u16 = 15017;
const ECHO_SNI: &str = "outbound_.80_._.echo.app.svc.cluster.local";
/// Alert unrecognized_name, fatal.
pub const UNRECOGNIZED: [u8; 7] = [21, 3, 3, 0, 2, 2, 112];
/// Alert handshake_failure, fatal.
const FAILURE: [u8; 7] = [21, 3, 3, 0, 2, 2, 40];
const MIB: u64 = 1 << 20;

fn settings(net: Net, endpoints: &[(u8, u32, &str)]) -> Settings<'static> {
    let mut settings = Settings::new(net, identities()).endpoints(endpoints);
    let ip = net.ip(1);
    settings.listeners = format!(
        "  - {{name: auto-passthrough, bind: \"{ip}:{ISTIO}\", protocol: tls, routing: istio}}
  - name: routes
    bind: \"{ip}:{ROUTES}\"
    protocol: tls
    routes:
      - {{sni: [\"*.secret.example\"], to: \"secret.app.svc.cluster.local:80\"}}
      - {{sni: [\"gone.example\"], to: \"gone.app.svc.cluster.local:80\"}}
      - {{sni: [\"*\"], to: \"echo.app.svc.cluster.local:80\"}}
  - {{name: narrow, bind: \"{ip}:{NARROW}\", protocol: tls, routing: istio,
     sources: [192.0.2.0/24]}}
"
    );
    settings.exposure = exposure("{anyone: true}");
    settings
}

fn exposure(to: &str) -> String {
    format!("    - {{service: \"echo.app.svc.cluster.local:80\", to: [{to}]}}\n")
}

/// Returns a ClientHello of rustls. An IP address as `name` leaves the server name out.
pub fn client_hello(name: &str, alpn: &[&str]) -> Vec<u8> {
    let mut config = ClientConfig::builder()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|one| one.as_bytes().to_vec()).collect();
    let name = name.to_owned().try_into().expect("a name");
    let mut client = ClientConnection::new(Arc::new(config), name).expect("a client");
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).expect("a hello");
    bytes
}

/// Opens a connection and sends this ClientHello.
async fn sent(net: Net, port: u16, hello: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(net.address(1, port)).await.expect("a connection");
    stream.write_all(hello).await.expect("a hello");
    stream
}

/// Returns the whole answer, to a clean end.
pub async fn answer(mut stream: TcpStream) -> Vec<u8> {
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.expect("a clean end");
    answer
}

async fn ended(gateway: &Gateway, reason: &str, count: f64) {
    until(reason, async || gateway.tunnels(reason).await, |&now| now == count).await;
}

/// Starts an endpoint whose connections belong to the oracle, after one of these ClientHellos of
/// the same length.
async fn oracle_after(net: Net, host: u8, oracle: &Oracle, hellos: &[Vec<u8>]) -> Endpoint {
    let (oracle, hellos) = (oracle.clone(), hellos.to_vec());
    Endpoint::new(net.listen(host, 9000).await, move |mut stream| {
        let (oracle, hellos) = (oracle.clone(), hellos.clone());
        async move {
            let mut replayed = vec![0; hellos[0].len()];
            stream.read_exact(&mut replayed).await.expect("a hello");
            let is_known = hellos.contains(&replayed);
            assert!(is_known, "the hello is replayed as it was");
            oracle.answer(stream).await;
        }
    })
}

#[test]
fn the_client_meets_its_endpoints_own_certificate_at_the_target_port() {
    run(async {
        let net = Net::new();
        // An HBONE endpoint too is dialled at its target port here.
        let gateway = Gateway::start(&settings(net, &[(11, 1, "HBONE")])).await;
        let mut server = (*identities().server(ENDPOINT)).clone();
        server.alpn_protocols = vec![b"istio".to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(server));
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, move |stream| {
            let acceptor = acceptor.clone();
            async move {
                let mut tls = acceptor.accept(stream).await.expect("a handshake");
                let mut requested = String::new();
                tls.read_to_string(&mut requested).await.expect("a question");
                tls.write_all(requested.to_uppercase().as_bytes()).await.expect("an answer");
                tls.shutdown().await.expect("an end");
            }
        });
        let client = identities().client(crate::support::CLIENT, ENDPOINT);
        let mut client = (*client).clone();
        client.enable_sni = true;
        client.alpn_protocols = vec![b"istio".to_vec()];
        let stream = TcpStream::connect(net.address(1, ISTIO)).await.expect("a connection");
        let name = ECHO_SNI.try_into().expect("a name");
        let connecting = TlsConnector::from(Arc::new(client)).connect(name, stream);
        let mut tls = connecting.await.expect("a handshake with the endpoint");
        assert_eq!(tls.get_ref().1.alpn_protocol(), Some(&b"istio"[..]));
        tls.write_all(b"who is there").await.expect("a question");
        tls.shutdown().await.expect("our end");
        let mut answer = String::new();
        tls.read_to_string(&mut answer).await.expect("an answer");
        assert_eq!(answer, "WHO IS THERE");
        drop(tls);
        ended(&gateway, "completed", 1.0).await;
        gateway.logged("connection complete").await;
        let log = gateway.log();
        let line = log.lines().find(|line| line.contains("connection complete")).expect("a line");
        assert!(line.contains(&format!("dst.sni=\"{ECHO_SNI}\"")), "{line}");
        assert!(!line.contains("src.identity") && !line.contains("dst.hbone_addr"), "{line}");
        let metrics = gateway.scrape().await;
        assert!(metrics.contains("connection_security_policy=\"unknown\""), "{metrics}");
    });
}

#[test]
fn what_an_unverified_client_may_not_reach_is_refused_alike() {
    run(async {
        let net = Net::new();
        let mut settings = settings(net, &[(11, 1, "TCP")]);
        settings.exposure = exposure("{cluster: west}");
        let gateway = Gateway::start(&settings).await;
        let endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let istio = &["istio"][..];
        let secret = "outbound_.80_._.secret.app.svc.cluster.local";
        let cases = [
            (ISTIO, "outbound_.80_._.no.app", istio, "unknown_service"),
            (ISTIO, "outbound_.81_._.echo.app.svc.cluster.local", istio, "unknown_service"),
            (ISTIO, secret, istio, "not_exposed"),
            (ISTIO, ECHO_SNI, istio, "not_for_peer"),
            (ISTIO, "echo.app.svc.cluster.local", istio, "unknown_sni"),
            (ISTIO, "10.0.0.1", istio, "unknown_sni"),
            (ISTIO, ECHO_SNI, &["h2", "http/1.1"], "no_istio_alpn"),
            (ISTIO, ECHO_SNI, &[], "no_istio_alpn"),
            (ROUTES, "gone.example", &[], "unknown_service"),
        ];
        for (port, name, alpn, reason) in cases {
            let before = gateway.tunnels(reason).await;
            let stream = sent(net, port, &client_hello(name, alpn)).await;
            assert_eq!(answer(stream).await, UNRECOGNIZED, "{name} {alpn:?}");
            ended(&gateway, reason, before + 1.0).await;
        }
        assert_eq!(endpoint.accepted(), 0);
        // A change of the exposure opens the service at run time.
        let path = gateway.file("strait.yaml");
        let text = std::fs::read_to_string(&path).expect("a file");
        replace(&path, &text.replace("{cluster: west}", "{anyone: true}"));
        gateway.logged("reloaded").await;
        let opened = client_hello(ECHO_SNI, istio);
        let mut stream = sent(net, ISTIO, &opened).await;
        let mut echoed = vec![0; opened.len()];
        stream.read_exact(&mut echoed).await.expect("an echo");
        assert_eq!(echoed, opened);
        // The reverse change revokes the permission of open connections.
        replace(&path, &text);
        let error = stream.read(&mut echoed).await.expect_err("a reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        ended(&gateway, "revoked", 1.0).await;
    });
}

#[test]
fn routes_of_a_listener_open_their_targets_to_whoever_reaches_it() {
    run(async {
        let net = Net::new();
        let mut settings = settings(net, &[(11, 1, "TCP")]);
        settings.exposure = exposure("{cluster: west}");
        let gateway = Gateway::start(&settings).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let cases = [
            ("a.secret.example", "secret.app"),
            ("a.b.Secret.Example", "secret.app"),
            ("secret.example", "echo.app"),
            ("10.0.0.1", "echo.app"),
        ];
        for (count, (name, service)) in (1..).zip(cases) {
            let hello = client_hello(name, &[]);
            let mut stream = sent(net, ROUTES, &hello).await;
            stream.shutdown().await.expect("our end");
            assert_eq!(answer(stream).await, hello, "{name}");
            ended(&gateway, "completed", f64::from(count)).await;
            gateway.logged(&format!("dst.service=\"{service}.svc.cluster.local\"")).await;
        }
    });
}

#[test]
fn a_listener_with_sources_resets_whoever_comes_from_elsewhere() {
    run(async {
        let net = Net::new();
        let gateway = Gateway::start(&settings(net, &[(11, 1, "TCP")])).await;
        // The reset may come before the client has seen the connection.
        let read = async {
            let mut stream = TcpStream::connect(net.address(1, NARROW)).await?;
            stream.read(&mut [0]).await
        };
        let error = read.await.expect_err("a reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        let shed =
            "strait_connections_shed_total{limit=\"not_in_sources\",source_cluster=\"unknown\"}";
        assert_eq!(gateway.metric(shed).await, 1.0);
    });
}

#[test]
fn a_hello_that_comes_byte_by_byte_has_five_seconds_and_what_is_none_an_alert() {
    run(async {
        let net = Net::new();
        let gateway = Gateway::start(&settings(net, &[(11, 1, "TCP")])).await;
        let hello = client_hello(ECHO_SNI, &["istio"]);
        let start = Instant::now();
        let mut slow = sent(net, ISTIO, &hello[..100]).await;
        let mut at = 100;
        let left = loop {
            tokio::select! {
                left = slow.read_u8() => break left,
                // deadline: the pace of a peer that is intentionally slow.
                () = sleep(Duration::from_millis(100)) => {
                    let _ = slow.write_all(&hello[at..=at]).await;
                    at += 1;
                }
            }
        };
        assert!(left.is_err(), "it was sent nothing");
        let time = start.elapsed();
        assert!((5..8).contains(&time.as_secs()), "{time:?}");
        assert_eq!(gateway.refused_handshakes("timeout").await, 1.0);
        let plain = sent(net, ISTIO, b"GET / HTTP/1.1\r\nhost: echo\r\n\r\n").await;
        let answered = answer(plain).await;
        assert_eq!(answered[0], 21, "an alert: {answered:?}");
        assert_eq!(gateway.refused_handshakes("other").await, 1.0);
        gateway.wait_until_open(0, 0).await;
    });
}

#[test]
fn a_dead_endpoint_is_passed_over_and_without_any_there_is_an_alert() {
    run(async {
        let net = Net::new();
        let endpoints = [(11, 1000, "TCP"), (12, 1, "TCP")];
        let gateway = Gateway::start(&settings(net, &endpoints)).await;
        let hello = client_hello(ECHO_SNI, &["istio"]);
        assert_eq!(answer(sent(net, ISTIO, &hello).await).await, FAILURE);
        ended(&gateway, "dial_refused", 1.0).await;
        let living = Endpoint::echo(net.listen(12, 9000).await);
        for _ in 0..5 {
            let mut stream = sent(net, ISTIO, &hello).await;
            stream.shutdown().await.expect("our end");
            assert_eq!(answer(stream).await, hello);
        }
        assert_eq!(living.accepted(), 5);
        ended(&gateway, "completed", 5.0).await;
    });
}

#[test]
fn every_byte_of_both_directions_and_both_ends_arrive() {
    run(async {
        let net = Net::new();
        let gateway = Gateway::start(&settings(net, &[(11, 1, "TCP")])).await;
        let oracle = Oracle::new();
        // Concurrent ones need distinct randoms, or the gateway would detect a loop.
        let hellos: Vec<_> = (0..17).map(|_| client_hello(ECHO_SNI, &["istio"])).collect();
        let _endpoint = oracle_after(net, 11, &oracle, &hellos).await;
        let sizes = [(0, 0), (1, 0), (0, 1), (100, 64 * MIB), (64 * MIB, 100), (8 * MIB, 8 * MIB)];
        for (id, (up, down)) in (1..).zip(sizes) {
            let plan = Plan { up, down, ..Plan::both(id, 0) };
            let stream = sent(net, ISTIO, &hellos[0]).await;
            oracle.whole(plan, oracle::drive(stream, plan).await).await;
        }
        // Each is a task with a budget of its own. Under the one budget of a shared task, the first
        // ones would starve the others beyond the deadlines for a ClientHello and a first byte.
        let mut many = JoinSet::new();
        for (hello, id) in hellos.into_iter().skip(1).zip(100..) {
            let oracle = oracle.clone();
            many.spawn(async move {
                let plan = Plan::both(id, MIB + id);
                let stream = sent(net, ISTIO, &hello).await;
                oracle.whole(plan, oracle::drive(stream, plan).await).await;
            });
        }
        many.join_all().await;
        ended(&gateway, "completed", 22.0).await;
        let many: u64 = (100..116).map(|id| MIB + id).sum();
        let sent = counted(&gateway, "istio_tcp_sent_bytes_total").await;
        assert_eq!(sent, 1 + 72 * MIB + 100 + many);
        gateway.wait_until_open(0, 0).await;
        assert_eq!(gateway.metric("strait_buffered_bytes").await, 0.0);
    });
}

/// Returns a counter of bytes, summed over all its label sets.
async fn counted(gateway: &Gateway, name: &str) -> u64 {
    let metrics = gateway.scrape().await;
    let lines = metrics.lines().filter(|line| line.starts_with(name));
    let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
    values.sum()
}

/// Reads a connection to its end. Returns the kind of end.
async fn end_of(stream: &mut TcpStream) -> Result<(), ErrorKind> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match stream.read(&mut buffer).await {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) => return Err(error.kind()),
        }
    }
}

#[test]
fn a_reset_of_one_side_is_a_reset_of_the_other_and_never_an_end() {
    run(async {
        let net = Net::new();
        let gateway = Gateway::start(&settings(net, &[(11, 1, "TCP")])).await;
        let (tell, mut received) = tokio::sync::mpsc::channel(1);
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, move |mut stream| {
            let tell = tell.clone();
            async move {
                let mut first = vec![0; 5 + 512 + 1200];
                stream.read_exact(&mut first).await.expect("a hello");
                stream.write_all(b"here").await.expect("a word");
                let mut word = [0; 3];
                stream.read_exact(&mut word).await.expect("a word");
                match &word {
                    b"rst" => reset(stream),
                    // It has ended its own direction, and detects a reset without reading or
                    // writing.
                    b"fin" => {
                        stream.shutdown().await.expect("an end");
                        tell.send(end_of(&mut stream).await).await.expect("a test");
                    }
                    _ => tell.send(end_of(&mut stream).await).await.expect("a test"),
                }
            }
        });
        let hello = client_hello(ECHO_SNI, &["istio"]);
        let first = [&hello[..], &vec![0; 5 + 512 + 1200 - hello.len()]].concat();
        let open = async || {
            let mut stream = sent(net, ISTIO, &first).await;
            let mut here = [0; 4];
            stream.read_exact(&mut here).await.expect("a word");
            stream
        };
        for _ in 0..10 {
            let mut stream = open().await;
            stream.write_all(b"rst").await.expect("a word");
            assert_eq!(end_of(&mut stream).await, Err(ErrorKind::ConnectionReset));
        }
        ended(&gateway, "upstream_reset", 10.0).await;
        // A client that has ended its direction and waits is reset too.
        let mut stream = open().await;
        stream.write_all(b"rst").await.expect("a word");
        stream.shutdown().await.expect("our end");
        assert_eq!(end_of(&mut stream).await, Err(ErrorKind::ConnectionReset));
        for word in [b"end", b"fin"] {
            let mut stream = open().await;
            stream.write_all(word).await.expect("a word");
            if word == b"fin" {
                assert_eq!(end_of(&mut stream).await, Ok(()));
            }
            reset(stream);
            assert_eq!(received.recv().await, Some(Err(ErrorKind::ConnectionReset)), "{word:?}");
        }
        ended(&gateway, "downstream_reset", 2.0).await;
        gateway.wait_until_open(0, 0).await;
    });
}

#[test]
fn what_was_sent_before_an_end_is_delivered_though_a_reset_follows() {
    run(async {
        let net = Net::new();
        let gateway = Gateway::start(&settings(net, &[(11, 1, "TCP")])).await;
        let (tell, mut received) = tokio::sync::mpsc::channel(1);
        let (go, goes) = tokio::sync::watch::channel(false);
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, move |mut stream| {
            let (tell, mut goes) = (tell.clone(), goes.clone());
            async move {
                stream.write_all(b"here").await.expect("a word");
                goes.wait_for(|&go| go).await.expect("the test's word");
                let mut all = Vec::new();
                let end = stream.read_to_end(&mut all).await.map_err(|error| error.kind());
                tell.send((all.len(), end.map(|_| ()))).await.expect("a test");
            }
        });
        let hello = client_hello(ECHO_SNI, &["istio"]);
        let mut stream = sent(net, ISTIO, &hello).await;
        stream.read_exact(&mut [0; 4]).await.expect("a word");
        let bytes = vec![7; 256 * 1024];
        stream.write_all(&bytes).await.expect("bytes");
        stream.shutdown().await.expect("our end");
        // All of it is on its way to the endpoint, which has read nothing.
        let total = (hello.len() + bytes.len()) as u64;
        let counted = async || counted(&gateway, "istio_tcp_received_bytes_total").await;
        until("all bytes", counted, |&counted| counted == total).await;
        reset(stream);
        go.send_replace(true);
        assert_eq!(received.recv().await, Some((hello.len() + bytes.len(), Ok(()))));
        gateway.wait_until_open(0, 0).await;
    });
}

#[test]
fn a_reader_that_stalls_stops_its_writer_and_little_is_held_for_it() {
    run(async {
        let net = Net::new();
        let gateway = Gateway::start(&settings(net, &[(11, 1, "TCP")])).await;
        let sent_bytes = Arc::new(std::sync::atomic::AtomicU64::new(0));
        let count = Arc::clone(&sent_bytes);
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, move |mut stream| {
            let count = Arc::clone(&count);
            async move {
                let chunk = vec![0; 64 * 1024];
                while stream.write_all(&chunk).await.is_ok() {
                    count.fetch_add(chunk.len() as u64, std::sync::atomic::Ordering::SeqCst);
                }
            }
        });
        let mut streams = Vec::new();
        for _ in 0..8 {
            // Each needs a distinct random, or the gateway would detect a loop.
            streams.push(sent(net, ISTIO, &client_hello(ECHO_SNI, &["istio"])).await);
        }
        let mut last = u64::MAX;
        let still = async || {
            let now = sent_bytes.load(std::sync::atomic::Ordering::SeqCst);
            // deadline: only time can show that nothing moves.
            sleep(Duration::from_millis(300)).await;
            now > 0 && now == std::mem::replace(&mut last, now)
        };
        until("the writers wait", still, |&still| still).await;
        let held = gateway.metric("strait_buffered_bytes").await;
        assert!(held <= 8.0 * 512.0 * 1024.0, "{held}");
        // Kernel buffers of both hosts, for eight connections: 4 MiB and 6 MiB at most by default.
        assert!(last < 8 * 24 * MIB, "{last}");
        // A reader that resumes makes progress.
        let mut stream = streams.pop().expect("one");
        let mut taken = 0;
        let mut buffer = vec![0; 1 << 20];
        while taken < 64 * MIB {
            taken += stream.read(&mut buffer).await.expect("more") as u64;
        }
        drop((streams, stream));
        gateway.wait_until_open(0, 0).await;
        assert_eq!(gateway.metric("strait_buffered_bytes").await, 0.0);
    });
}

#[test]
fn a_drain_lets_tunnels_end_and_resets_the_rest_at_its_deadline() {
    run(async {
        let net = Net::new();
        let mut gateway = Gateway::start(&settings(net, &[(11, 1, "TCP")])).await;
        let (oracle, hello) = (Oracle::new(), client_hello(ECHO_SNI, &["istio"]));
        let _endpoint = oracle_after(net, 11, &oracle, std::slice::from_ref(&hello)).await;
        let mut in_time = sent(net, ISTIO, &hello).await;
        let plan = Plan::both(1, MIB);
        in_time.write_all(&plan.head()).await.expect("a head");
        let mut late = sent(net, ISTIO, &hello).await;
        gateway.wait_until_open(2, 2).await;
        gateway.signal(Signal::TERM);
        let refused = async || TcpStream::connect(net.address(1, ISTIO)).await.is_err();
        until("nobody accepts", refused, |&refused| refused).await;
        // The head was sent before, so the rest of the plan continues during the drain.
        let side = oracle::resume(in_time, plan).await;
        oracle.whole(plan, side).await;
        assert_eq!(end_of(&mut late).await, Err(ErrorKind::ConnectionReset));
        assert!(gateway.exited().await.success());
        gateway.logged("drain_deadline").await;
    });
}
