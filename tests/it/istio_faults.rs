//! Control plane that misbehaves. The gateway reports each fault, and the earlier state stays in
//! force.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use prost::Message as _;
use strait::config::pod::Pod;
use strait::config::{ControlPlane, HostPort, Roots};
use strait::grpc::discovery::{DeltaDiscoveryResponse, Resource};
use strait::grpc::security::Authorization;
use strait::grpc::workload::{Address, Workload};
use strait::snapshot::Publisher;
use strait::status::Status;
use strait::telemetry::Metrics;
use strait::xds::store::{ADDRESS, AUTHORIZATION};
use strait::xds::stream::{self, ControlPlaneKind, Feed};
use tokio::net::TcpListener;
use tokio::time::timeout;

use crate::istio::{asks, gateway};
use crate::support::istiod::{Behaviour, Istiod, NAME, TOKEN};
use crate::support::link::{Cut, Faults, FaultyRelay};
use crate::support::wds::{HOSTNAME, SERVICE, bytes, changed, service, workload};
use crate::support::{Endpoint, Gateway, Net, identities, run, until};

/// A control plane with one service and its one workload, at host 11.
fn istiod(net: Net) -> Istiod {
    let istiod = Istiod::default();
    istiod.put(ADDRESS, SERVICE, &service());
    istiod.put(ADDRESS, "a", &workload("a", bytes(net.ip(11))));
    istiod
}

fn resource(name: &str, body_type: &str, body: Vec<u8>) -> Resource {
    Resource {
        name: name.into(),
        version: "astray".into(),
        resource: Some(prost_types::Any { type_url: body_type.into(), value: body }),
        ..Resource::default()
    }
}

fn response(type_url: &str, resources: Vec<Resource>) -> DeltaDiscoveryResponse {
    DeltaDiscoveryResponse {
        type_url: type_url.into(),
        resources,
        ..DeltaDiscoveryResponse::default()
    }
}

/// Returns invalid responses, each with a part of the NACK's message; an empty text is an ACK. No
/// row may change the state in force.
fn astray() -> Vec<(DeltaDiscoveryResponse, &'static str)> {
    let good = || workload("a", vec![127, 0, 0, 9]).encode_to_vec();
    let a = |body_type, body| response(ADDRESS, vec![resource("a", body_type, body)]);
    let bodiless = Resource { resource: None, ..resource("a", "", Vec::new()) };
    let mut removed_too = a(ADDRESS, good());
    removed_too.removed_resources = vec!["a".into()];
    let mut unknown_removed = response(ADDRESS, Vec::new());
    unknown_removed.removed_resources = vec!["never there".into(), String::new()];
    let authorization = Authorization {
        name: "p".into(),
        namespace: "app".into(),
        action: 7,
        ..Authorization::default()
    };
    let authorization = resource("app/p", AUTHORIZATION, authorization.encode_to_vec());
    let many = (0..3000).map(|index| resource(&format!("bad{index}"), ADDRESS, vec![0xff; 3]));
    vec![
        (
            response("type.googleapis.com/envoy.Listener", Vec::new()),
            "no subscription to this type",
        ),
        (a(AUTHORIZATION, good()), "a: body: type"),
        (a(ADDRESS, vec![0xff; 8]), "a: "),
        (a(ADDRESS, Vec::new()), "a: address.type: neither workload"),
        (response(ADDRESS, vec![bodiless]), "a: it has no body"),
        (
            response(ADDRESS, vec![resource("a", ADDRESS, good()); 2]),
            "a: sent twice in one response",
        ),
        (removed_too, "a: both sent and removed in one response"),
        (unknown_removed, ""),
        (response(ADDRESS, Vec::new()), ""),
        (response(ADDRESS, vec![resource("", ADDRESS, good())]), "has no name"),
        (
            response(ADDRESS, vec![resource(&"n".repeat(1 << 20), ADDRESS, good())]),
            "want at most 2048",
        ),
        (response(AUTHORIZATION, vec![authorization]), "app/p: authorization.action: 7 is unknown"),
        (response(ADDRESS, many.collect()), " more"),
    ]
}

#[test]
fn what_a_control_plane_should_not_send_is_answered_and_changes_nothing() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, NAME);
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = istiod(net);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        for (index, (mut response, want)) in astray().into_iter().enumerate() {
            response.nonce = format!("astray {index}");
            istiod.push_unstored(&response);
            let requests = async || {
                let mut requests = istiod.requests().into_iter();
                requests.find(|request| request.response_nonce == response.nonce)
            };
            let answer = until(&response.nonce, requests, Option::is_some).await;
            let answer = answer.expect("an answer");
            assert_eq!(answer.type_url, response.type_url);
            let says = answer.error_detail.map_or_else(String::new, |error| error.message);
            assert!(says.len() < 64 << 10, "row {index}: {} bytes", says.len());
            assert!(says.contains(want), "row {index} wants {want:?}: {says}");
            assert_eq!(says.is_empty(), want.is_empty(), "row {index}: {says}");
            asks(&gateway).await.expect(want);
            assert_eq!(gateway.readiness().await.0, 200, "row {index}");
        }
    });
}

#[test]
fn a_response_that_cannot_be_answered_ends_its_stream_only() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, NAME);
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = istiod(net);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        // The first has a nonce of 1 MiB, and the second exceeds the limit of a message. The third
        // is small, but its entries are large when decoded.
        let nonce =
            DeltaDiscoveryResponse { nonce: "n".repeat(1 << 20), ..response(ADDRESS, Vec::new()) };
        let huge = response(ADDRESS, vec![resource("a", ADDRESS, vec![0; 201 << 20])]);
        let many = response(ADDRESS, vec![Resource::default(); 1_000_001]);
        for (response, why) in [
            (nonce, "is too long"),
            (huge, "limit 209715200"),
            (many, "more than 1000000 resources"),
        ] {
            let firsts = istiod.firsts();
            istiod.push_unstored(&response);
            gateway.logged(why).await;
            until("its return", async || istiod.firsts(), |&now| now > firsts).await;
            asks(&gateway).await.expect("a tunnel");
        }
        assert!(gateway.private_dirty() < 100 << 20, "nothing huge is held");
        assert_eq!(gateway.readiness().await.0, 200);
    });
}

#[test]
fn a_stream_that_is_cut_anywhere_is_made_again_until_all_is_received() {
    run(async {
        // Handshake, answer and responses are some 2.5 kB on their way back.
        const CUTS: usize = 6;
        const STEP: u64 = 110;
        let mut gateways = Vec::new();
        for of in 0..4 {
            let net = Net::new();
            let endpoint = Endpoint::echo(net.listen(11, 15008).await);
            let istiod = istiod(net);
            let serving = istiod.serve(net.address(3, 15012), identities()).await;
            let toxics = move |number: usize| match number {
                // The cuts of one gateway lie between those of the others.
                0..CUTS => {
                    let after = STEP * (4 * number + of) as u64;
                    let how = [Cut::Reset, Cut::End][number % 2];
                    [Faults::default(), Faults::cut(after, how)]
                }
                _ => [Faults::default(); 2],
            };
            let to = net.address(3, 15012);
            let link = FaultyRelay::new(net.listen(2, 15012).await, to, toxics);
            gateways.push((gateway(net, NAME), endpoint, istiod, serving, link));
        }
        for (gateway, ..) in &mut gateways {
            gateway.ready().await;
            asks(gateway).await.expect("a tunnel");
        }
    });
}

#[test]
fn a_slow_control_plane_in_pieces_of_one_byte_is_understood() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, NAME);
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = istiod(net);
        let to = net.address(3, 15012);
        let _serving = istiod.serve(to, identities()).await;
        let slow =
            Faults { delay: Duration::from_millis(200), slice: Some(1), ..Faults::default() };
        let _link = FaultyRelay::new(net.listen(2, 15012).await, to, move |_| [slow; 2]);
        gateway.ready().await;
        asks(&gateway).await.expect("a tunnel");
    });
}

/// Waits for the log line about a failed stream, and checks that everything continues but the
/// tunnels.
async fn waits(gateway: &Gateway, why: &str) {
    gateway.logged("no stream to the control plane").await;
    gateway.logged(why).await;
    let (status, pending) = gateway.readiness().await;
    assert!(status == 500 && pending.contains("discovery"), "{pending}");
    assert_eq!(gateway.http(15000, "GET", "/config_dump").await.0, 200);
}

#[test]
fn a_control_plane_that_refuses_is_asked_again() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, NAME);
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = istiod(net);
        istiod.set_behaviour(Behaviour::Refusing);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        waits(&gateway, "out for lunch").await;
        istiod.set_behaviour(Behaviour::Normal);
        gateway.ready().await;
        asks(&gateway).await.expect("a tunnel");
    });
}

#[test]
fn a_control_plane_that_is_silent_stops_nothing_else() {
    run(async {
        let net = Net::new();
        // One is silent before TLS, the other after the call.
        let listener = net.listen(2, 15012).await;
        let deaf = gateway(net, NAME);
        let other = Net::new();
        let mut unanswered = gateway(other, NAME);
        let istiod = istiod(other);
        istiod.set_behaviour(Behaviour::Silent);
        let _serving = istiod.serve(other.address(2, 15012), identities()).await;
        until("the call", async || istiod.firsts(), |&requested| requested == 3).await;
        let (status, pending) = unanswered.readiness().await;
        assert!(status == 500 && pending.contains("discovery"), "{pending}");
        waits(&deaf, "connect timed out after 5s").await;
        unanswered.signal(rustix::process::Signal::TERM);
        assert!(unanswered.exited().await.success());
        drop(listener);
    });
}

/// Discovery at host 2, with its files in `folder`.
fn discovery(net: Net, folder: &Path, publisher: Arc<Publisher>, status: Arc<Status>) -> Feed {
    let (roots, token) = (folder.join("root.crt"), folder.join("token"));
    std::fs::write(&roots, &identities().root).expect("roots");
    std::fs::write(&token, TOKEN).expect("a token");
    Feed {
        connected: Arc::default(),
        plane: ControlPlane {
            address: HostPort { host: net.ip(2).to_string(), port: Some(15012) },
            roots: Roots::File(roots),
            token: Some(token),
            san: Some(NAME.to_owned()),
            headers: Vec::new(),
        },
        kind: ControlPlaneKind::Istio,
        cache: None,
        hold: Duration::ZERO,
        pod: Pod {
            name: "strait".into(),
            namespace: "istio-system".into(),
            ip: net.ip(1).to_string(),
            service_account: Some("strait".into()),
            cluster: "east".into(),
            network: "east".into(),
            gateway: String::new(),
            istio_version: "1.31.0".into(),
            record: None,
        },
        publisher,
        status,
        metrics: Arc::new(Metrics::new()),
        pending: "discovery",
    }
}

/// Twelve hours without a control plane, in this process, because the clock of another process
/// cannot be paused.
#[test]
fn twelve_hours_without_a_control_plane_change_nothing() {
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let net = Net::new();
        let folder = tempfile::tempdir().expect("a folder");
        let publisher = Arc::new(Publisher::default());
        let reader = publisher.reader();
        let status = Arc::new(Status::new(&["discovery"]));
        let istio = discovery(net, folder.path(), publisher, Arc::clone(&status));
        let istiod = istiod(net);
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        let stream = tokio::spawn(stream::run(istio));
        let pending = async || status.list_pending();
        until("readiness", pending, Vec::is_empty).await;
        let before = (reader.load().version, istiod.sent(), istiod.requests().len());
        serving.stop().await;

        // A server that is no control plane has its address, and counts the connections.
        let requested = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&requested);
        let bind = async || TcpListener::bind(net.address(2, 15012)).await;
        let listener = until("its address", bind, Result::is_ok).await;
        let listener = listener.expect("a listener");
        let counts = tokio::spawn(async move {
            while listener.accept().await.is_ok() {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        tokio::time::pause();
        // deadline: the clock is paused, and this is the time that passes.
        tokio::time::sleep(Duration::from_secs(12 * 3600)).await;
        let tries = requested.load(Ordering::Relaxed);
        assert!((2300..3800).contains(&tries), "every 12 to 18 s: {tries}");
        assert_eq!(status.list_pending(), [""; 0], "ready throughout");
        let snapshot = reader.load();
        assert_eq!(snapshot.version, before.0);
        let service = snapshot.services.get(HOSTNAME).expect("the service");
        assert_eq!(service.ports.get(&80).unwrap().endpoints.len(), 1);

        counts.abort();
        let _ = counts.await;
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        // The next try is due.
        tokio::time::advance(Duration::from_secs(20)).await;
        tokio::time::resume();
        let answers = async || istiod.requests().len();
        until("its return", answers, |&now| now >= before.2 + 6).await;
        assert_eq!(istiod.sent(), before.1, "nothing is sent again");
        assert_eq!(reader.load().version, before.0);
        stream.abort();
    });
}

#[test]
fn a_stream_that_says_nothing_is_given_up_until_all_is_received() {
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let net = Net::new();
        let folder = tempfile::tempdir().expect("a folder");
        let status = Arc::new(Status::new(&["discovery"]));
        let publisher = Arc::new(Publisher::default());
        let istio = discovery(net, folder.path(), publisher, Arc::clone(&status));
        let istiod = istiod(net);
        istiod.set_behaviour(Behaviour::Silent);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let stream = tokio::spawn(stream::run(istio));
        let pass = async |seconds| {
            tokio::time::pause();
            tokio::time::advance(Duration::from_secs(seconds)).await;
            tokio::time::resume();
        };
        until("requests", async || istiod.firsts(), |&now| now == 3).await;
        // The client's deadline begins when the stream is open, after the server has received the
        // first request. On a busy machine the time may pass before that, and has to pass again.
        let pass_until = async |what: &str, done: &dyn Fn() -> bool| {
            for _ in 0..30 {
                pass(61).await;
                let polls = async {
                    while !done() {
                        // deadline: of the polls, after which time passes again
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                };
                if timeout(Duration::from_secs(1), polls).await.is_ok() {
                    return;
                }
            }
            panic!("{what}: not within 30 silences");
        };
        pass_until("requests", &|| istiod.firsts() >= 6).await;
        istiod.set_behaviour(Behaviour::Normal);
        pass_until("readiness", &|| status.list_pending().is_empty()).await;
        let firsts = istiod.firsts();
        pass(3600).await;
        assert_eq!(istiod.firsts(), firsts, "all is told, and silence is no fault");
        stream.abort();
    });
}

#[test]
fn values_that_we_do_not_know_yet_mean_what_is_safe() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, NAME);
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = istiod(net);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        let changed = |change: fn(&mut Workload)| changed("a", bytes(net.ip(11)), change);
        let rows: [(&str, Address); 2] = [
            ("tunnel_protocol", changed(|one| one.tunnel_protocol = 99)),
            ("status", changed(|one| one.status = 99)),
        ];
        for (what, unknown) in rows {
            istiod.put(ADDRESS, "a", &unknown);
            until(what, async || asks(&gateway).await, Result::is_err)
                .await
                .expect_err("no endpoint that can be dialled");
            istiod.put(ADDRESS, "a", &changed(|_| {}));
            until(what, async || asks(&gateway).await, Result::is_ok).await.expect("a tunnel");
        }
        assert_eq!(istiod.rejections(), [""; 0]);
    });
}
