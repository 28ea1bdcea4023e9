//! Local clients that reach a service behind the gateways of another cluster, and the names of
//! their bindings.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hickory_resolver::proto::op::{Message, Query, ResponseCode};
use hickory_resolver::proto::rr::{Name, RecordType};
use rustix::process::Signal;
use serde_json::{Value, json};
use strait::tls::{self, TrustedDomain};
use strait::tools::hbone::{self, IncomingTunnel};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::support::oracle::{self, Oracle, Plan, SideResult};
use crate::support::{
    ECHO, Endpoint, GATEWAY, Gateway, Net, RESET, Settings, endpoint_port, identities, replace,
    reset, run, try_echo, until,
};
use crate::transit::{WEST_GATEWAY, start_west, west};

pub const WORKLOAD: &str = "spiffe://west.local/ns/app/sa/echo";
/// Limit of a wait for something that happens at once.
const SOON: Duration = Duration::from_secs(10);
/// Bytes of a transfer: more than all windows and buffers on the way.
const MANY: u64 = 2_000_000;
/// Limit of a transfer, whose bytes are encrypted three times by debug builds on busy machines.
const TRANSFER_MAX: Duration = Duration::from_secs(60);
const SHED: &str =
    "strait_connections_shed_total{limit=\"not_in_sources\",source_cluster=\"unknown\"}";

/// HBONE workload. It ends on drop.
pub struct Workload {
    accepted: Arc<AtomicUsize>,
    sides: mpsc::Receiver<SideResult>,
    _task: JoinSet<()>,
}

impl Workload {
    /// Starts a workload with this identity at host 11. It takes the endpoint's side of the oracle,
    /// or echoes.
    pub async fn start(net: Net, identity: &str, has_oracle: bool) -> Self {
        let leaf = identities().leaf(identity);
        let domains = ["east.local", "west.local"].map(|name| TrustedDomain {
            name: name.into(),
            issuers: None,
            roots: None,
        });
        let tls = tls::endpoint_server_config(&identities().material(&leaf), domains.into());
        let listener = net.listen(11, 15008).await;
        let accepted = Arc::new(AtomicUsize::new(0));
        let (results, sides) = mpsc::channel(16);
        let count = Arc::clone(&accepted);
        let serve = hbone::serve(listener, tls.expect("a server"), move |incoming| {
            let (count, results) = (Arc::clone(&count), results.clone());
            async move {
                let IncomingTunnel { authority, tunnel } = incoming;
                assert_eq!(authority, ECHO);
                count.fetch_add(1, Ordering::SeqCst);
                if has_oracle {
                    let _ = results.send(oracle::answer(tunnel).await.1).await;
                } else {
                    let (mut read, mut write) = tokio::io::split(tunnel);
                    if tokio::io::copy(&mut read, &mut write).await.is_ok() {
                        let _ = write.shutdown().await;
                    }
                }
            }
        });
        let mut task = JoinSet::new();
        task.spawn(serve);
        Self { accepted, sides, _task: task }
    }

    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }
}

/// Address of the binding.
pub fn bound(net: Net) -> SocketAddr {
    net.address(2, 8080)
}

/// Settings of a gateway of cluster east with a binding to the service behind these gateways of
/// cluster west, each in a network of its own. `keys` are more keys of the binding.
pub fn east<'a>(net: Net, gateways: &[Net], keys: &str) -> Settings<'a> {
    let mut settings = Settings::new(net, identities());
    let networks = gateways.iter().enumerate().map(|(index, net)| {
        format!(
            "  - {{name: west-{index}, cluster: west, identities: [\"{WEST_GATEWAY}\"], gateways: \
             [\"{}:15008\"]}}\n",
            net.ip(1)
        )
    });
    settings.more += &format!(
        "networks:\n{}bindings: [{{cluster: west, service: \"{ECHO}\", listen: \"{}\"{keys}}}]\n",
        networks.collect::<String>(),
        bound(net)
    );
    settings
}

/// Starts a gateway with a binding, and a gateway of cluster west with this kind of endpoint.
async fn pair(net: Net, protocol: &str, keys: &str) -> (Gateway, Gateway, SocketAddr) {
    let donor = start_west(&west(net, &[(11, 1, protocol)])).await;
    let here = Net::new();
    let acceptor = Gateway::start(&east(here, &[net], keys)).await;
    (acceptor, donor, bound(here))
}

pub async fn connect(address: SocketAddr) -> TcpStream {
    TcpStream::connect(address).await.expect("a connection")
}

/// Asserts that a connection carries bytes.
pub async fn echoes(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    let echoed = timeout(SOON, try_echo(stream)).await;
    echoed.expect("an answer").expect("an open connection");
}

/// Asserts that a connection is reset without another byte.
pub async fn is_reset(stream: &mut TcpStream) {
    let read = timeout(SOON, stream.read(&mut [0; 8])).await;
    let error = read.expect("an end in time").expect_err("no clean end");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

/// Asserts that a new connection is reset, possibly before the client knows that it is open.
pub async fn is_rejected(address: SocketAddr) {
    match TcpStream::connect(address).await {
        Ok(mut stream) => is_reset(&mut stream).await,
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
}

#[test]
fn a_local_client_reaches_a_verified_workload_with_every_byte_and_both_ends() {
    run(async {
        let net = Net::new();
        let mut workload = Workload::start(net, WORKLOAD, true).await;
        let keys = ", workloads: {namespaces: [app]}";
        let (acceptor, donor, address) = pair(net, "HBONE", keys).await;
        // Long in both directions, then each direction ends long before the other.
        let directions = [(MANY, MANY), (MANY, 0), (0, MANY), (1, MANY), (MANY, 1)];
        for (id, (up, down)) in directions.into_iter().enumerate() {
            let plan = Plan { up, down, ..Plan::both(id as u64, 0) };
            let client = timeout(TRANSFER_MAX, oracle::drive(connect(address).await, plan)).await;
            let client = client.expect("an end in time");
            assert_eq!(client, SideResult::complete(down), "{plan:?}");
            let side = timeout(SOON, workload.sides.recv()).await;
            let side = side.expect("an end in time").expect("a workload");
            assert_eq!(side, SideResult::complete(up), "{plan:?}");
        }
        for (gateway, name) in [(&acceptor, "acceptor"), (&donor, "donor")] {
            let completed = async || gateway.tunnels("completed").await;
            until(name, completed, |&count| count == 5.0).await;
        }
        acceptor.wait_until_open(0, 0).await;
        let (_, page, _) = acceptor.run_command(&["status"]).await;
        assert!(page.contains(&format!("binding {ECHO}")), "{page}");
        assert!(page.contains(&format!("{ECHO} of west")), "{page}");
        let service = "dst.service=\"echo.app.svc.cluster.local\"";
        acceptor.logged(service).await;
        acceptor.logged(&format!("listener=\"binding {ECHO}\"")).await;
    });
}

#[test]
fn a_plain_endpoint_behind_the_gateway_is_reached_with_inner_tcp() {
    run(async {
        let net = Net::new();
        let oracle = Oracle::new();
        let _endpoint = oracle.endpoint(net.listen(11, endpoint_port()).await);
        let (acceptor, _donor, address) = pair(net, "TCP", ", inner: tcp").await;
        for (id, (up, down)) in [(MANY, MANY), (MANY, 1), (1, MANY)].into_iter().enumerate() {
            let plan = Plan { up, down, ..Plan::both(id as u64, 0) };
            let client = timeout(TRANSFER_MAX, oracle::drive(connect(address).await, plan)).await;
            oracle.whole(plan, client.expect("an end in time")).await;
        }
        let completed = async || acceptor.tunnels("completed").await;
        until("completed", completed, |&count| count == 3.0).await;
    });
}

#[test]
fn a_reset_of_either_side_reaches_the_other() {
    run(async {
        let net = Net::new();
        let listener = net.listen(11, endpoint_port()).await;
        let (_endpoint, mut ends) = Endpoint::reporting(listener);
        let (acceptor, _donor, address) = pair(net, "TCP", ", inner: tcp").await;
        let mut stream = connect(address).await;
        stream.write_u8(RESET).await.expect("an open connection");
        is_reset(&mut stream).await;
        assert_eq!(acceptor.tunnels("upstream_reset").await, 1.0);
        let mut stream = connect(address).await;
        stream.write_all(b"w").await.expect("an open connection");
        acceptor.wait_until_open(1, 1).await;
        reset(stream);
        let end = timeout(SOON, ends.recv()).await.expect("an end in time");
        assert_eq!(end, Some(Err(std::io::ErrorKind::ConnectionReset)));
        assert_eq!(acceptor.tunnels("downstream_reset").await, 1.0);
    });
}

#[test]
fn a_workload_with_another_identity_gets_no_byte() {
    run(async {
        for (identity, keys, why) in [
            (
                "spiffe://west.local/ns/other/sa/echo",
                ", workloads: {namespaces: [app]}",
                "is not one of the binding's `workloads`",
            ),
            (
                WORKLOAD,
                ", workloads: {identities: [\"spiffe://west.local/ns/app/sa/other\"]}",
                "is not one of the binding's `workloads`",
            ),
            ("spiffe://east.local/ns/app/sa/echo", "", "belongs to cluster east, not to west"),
        ] {
            let net = Net::new();
            let workload = Workload::start(net, identity, false).await;
            let (acceptor, _donor, address) = pair(net, "HBONE", keys).await;
            is_rejected(address).await;
            let untrusted = async || acceptor.tunnels("workload_untrusted").await;
            until(why, untrusted, |&count| count == 1.0).await;
            acceptor.logged(why).await;
            assert_eq!(workload.accepted(), 0);
        }
    });
}

#[test]
fn a_workload_without_hbone_is_unreachable_and_a_gateway_of_another_identity_untrusted() {
    run(async {
        let net = Net::new();
        let endpoint = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let (acceptor, _donor, address) = pair(net, "TCP", "").await;
        is_rejected(address).await;
        let unreachable = async || acceptor.tunnels("workload_unreachable").await;
        until("unreachable", unreachable, |&count| count == 1.0).await;
        assert_eq!(endpoint.accepted(), 1);
        let here = Net::new();
        let mut settings = east(here, &[net], "");
        settings.more = settings.more.replace("/sa/eastwest", "/sa/other");
        let acceptor = Gateway::start(&settings).await;
        is_rejected(bound(here)).await;
        let untrusted = async || acceptor.tunnels("gateway_untrusted").await;
        until("untrusted", untrusted, |&count| count == 1.0).await;
        acceptor.logged("is not an identity of this gateway").await;
    });
}

/// Returns the prediction for a connection of a client: its outcome, then the whole answer.
async fn predicted(gateway: &Gateway, client: &str) -> (String, Value) {
    let command = ["explain", "--binding", ECHO, "--address", client, "--json"];
    let (_, answer, error) = gateway.run_command(&command).await;
    let answer: Value = serde_json::from_str(&answer).unwrap_or_else(|_| panic!("{error}"));
    let reason = answer["outcome"]["reason"].as_str().unwrap_or("opened");
    (reason.to_owned(), answer)
}

#[test]
fn the_running_gateway_predicts_the_ends_of_connections_to_a_binding() {
    run(async {
        let net = Net::new();
        let _workload = Workload::start(net, WORKLOAD, false).await;
        let keys = ", connections: 1, workloads: {namespaces: [app]}";
        let (acceptor, _donor, address) = pair(net, "HBONE", keys).await;
        let (reason, answer) = predicted(&acceptor, "127.0.0.1").await;
        assert_eq!(reason, "opened");
        let gateway = &answer["endpoints"][0];
        assert_eq!(gateway["odds"], 1.0);
        assert_eq!(gateway["gatewayCertificate"], format!("{WEST_GATEWAY} of cluster west"));
        assert_eq!(gateway["workloadCertificate"], "any of namespace app of cluster west");
        assert_eq!(predicted(&acceptor, "192.0.2.1").await.0, "not_in_sources");
        let mut client = connect(address).await;
        echoes(&mut client).await;
        let (reason, answer) = predicted(&acceptor, "127.0.0.1").await;
        assert_eq!((&*reason, &answer["endpoints"]), ("binding_full", &json!([])));
        is_rejected(address).await;
        assert_eq!(acceptor.tunnels("binding_full").await, 1.0);
        let foreign = ", workloads: {identities: [\"spiffe://gone.local/ns/app/sa/echo\"]}";
        let here = Net::new();
        let acceptor = Gateway::start(&east(here, &[net], foreign)).await;
        assert_eq!(predicted(&acceptor, "127.0.0.1").await.0, "workload_untrusted");
        is_rejected(bound(here)).await;
        let untrusted = async || acceptor.tunnels("workload_untrusted").await;
        until("untrusted", untrusted, |&count| count == 1.0).await;
    });
}

#[test]
fn clients_of_other_networks_and_those_beyond_a_limit_are_reset() {
    run(async {
        let net = Net::new();
        let workload = Workload::start(net, WORKLOAD, false).await;
        let (acceptor, _donor, address) = pair(net, "HBONE", ", clients: [10.0.0.0/8]").await;
        is_rejected(address).await;
        assert_eq!(acceptor.metric(SHED).await, 1.0);
        assert_eq!(workload.accepted(), 0);
        let here = Net::new();
        let keys = ", connections: 2, connections_per_client: 1, idle: 1s";
        let acceptor = Gateway::start(&east(here, &[net], keys)).await;
        let mut first = connect(bound(here)).await;
        echoes(&mut first).await;
        is_rejected(bound(here)).await;
        assert_eq!(acceptor.tunnels("binding_full").await, 1.0);
        acceptor.logged("open connections of the client: 1").await;
        // The first one ends by its idle timeout, and makes room.
        is_reset(&mut first).await;
        assert_eq!(acceptor.tunnels("idle_timeout").await, 1.0);
        echoes(&mut connect(bound(here)).await).await;
    });
}

#[test]
fn one_gateway_is_donor_and_acceptor_of_a_service_that_both_clusters_have() {
    run(async {
        let (here, there) = (Net::new(), Net::new());
        let own = Endpoint::echo(here.listen(11, endpoint_port()).await);
        let other = Endpoint::echo(there.listen(11, endpoint_port()).await);
        let endpoints = [(11, 1, "TCP")];
        let keys = ", inner: tcp";
        let first = Gateway::start(&east(here, &[there], keys).endpoints(&endpoints)).await;
        let mut settings = west(there, &endpoints);
        let to_east = east(there, &[here], keys).more;
        let to_east = to_east.replace("cluster: west", "cluster: east");
        settings.more = to_east.replace(WEST_GATEWAY, GATEWAY);
        let second = start_west(&settings).await;
        echoes(&mut connect(bound(here)).await).await;
        assert_eq!((own.accepted(), other.accepted()), (0, 1));
        echoes(&mut connect(bound(there)).await).await;
        assert_eq!((own.accepted(), other.accepted()), (1, 1));
        for (gateway, name) in [(&first, "first"), (&second, "second")] {
            let completed = async || gateway.tunnels("completed").await;
            until(name, completed, |&count| count == 2.0).await;
        }
    });
}

#[test]
fn a_drain_keeps_open_connections_until_its_deadline() {
    run(async {
        let net = Net::new();
        let _workload = Workload::start(net, WORKLOAD, false).await;
        let (acceptor, _donor, address) = pair(net, "HBONE", "").await;
        let mut stream = connect(address).await;
        echoes(&mut stream).await;
        acceptor.signal(Signal::TERM);
        acceptor.logged("stopping").await;
        echoes(&mut stream).await;
        is_reset(&mut stream).await;
        acceptor.logged("reason=\"drain_deadline\"").await;
    });
}

#[test]
fn a_reload_changes_bindings_and_networks_and_ends_what_it_no_longer_permits() {
    run(async {
        let (net, gone, here) = (Net::new(), Net::new(), Net::new());
        let _workload = Workload::start(net, WORKLOAD, false).await;
        let _donor = start_west(&west(net, &[(11, 1, "HBONE")])).await;
        let acceptor = Gateway::start(&east(here, &[gone], "")).await;
        is_rejected(bound(here)).await;
        assert_eq!(acceptor.tunnels("gateway_unreachable").await, 1.0);
        let file = acceptor.file("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        let text = text.replace(&gone.ip(1).to_string(), &net.ip(1).to_string());
        replace(&file, &text);
        let name = "strait_reload_total{what=\"config\",result=\"ok\"}";
        let reloaded = async || acceptor.metric(name).await;
        until("the new gateway", reloaded, |&count| count >= 1.0).await;
        let mut stream = connect(bound(here)).await;
        echoes(&mut stream).await;
        // Another limit changes nothing for an open connection; another workload ends it.
        let limited =
            text.replace("cluster: west, service", "connections: 7, cluster: west, service");
        replace(&file, &limited);
        until("the new limit", reloaded, |&count| count >= 2.0).await;
        echoes(&mut stream).await;
        let keys = "workloads: {namespaces: [other]}, cluster: west, service";
        replace(&file, &text.replace("cluster: west, service", keys));
        is_reset(&mut stream).await;
        assert_eq!(acceptor.tunnels("revoked").await, 1.0);
        is_rejected(bound(here)).await;
        let untrusted = async || acceptor.tunnels("workload_untrusted").await;
        until("untrusted", untrusted, |&count| count == 1.0).await;
    });
}

pub fn question(name: &str, kind: RecordType) -> Vec<u8> {
    let mut query = Message::query();
    query.add_query(Query::query(name.parse::<Name>().expect("a name"), kind));
    query.to_vec().expect("a query")
}

/// Returns the code and the addresses of an answer.
fn read(answer: &[u8]) -> (ResponseCode, Vec<String>) {
    let answer = Message::from_vec(answer).expect("an answer");
    let addresses = answer.answers.iter().map(|record| record.data.to_string());
    (answer.metadata.response_code, addresses.collect())
}

pub async fn over_udp(server: SocketAddr, query: &[u8]) -> (ResponseCode, Vec<String>) {
    let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
    socket.send_to(query, server).await.expect("a query");
    let mut answer = [0; 1500];
    let received = timeout(SOON, socket.recv(&mut answer)).await;
    let length = received.expect("an answer").expect("an answer");
    read(&answer[..length])
}

async fn over_tcp(stream: &mut TcpStream, query: &[u8]) -> (ResponseCode, Vec<String>) {
    let length = u16::try_from(query.len()).expect("a short query");
    let framed = [&length.to_be_bytes()[..], query].concat();
    stream.write_all(&framed).await.expect("an open connection");
    let answer = async {
        let length = stream.read_u16().await.expect("a length");
        let mut answer = vec![0; usize::from(length)];
        stream.read_exact(&mut answer).await.expect("an answer");
        answer
    };
    read(&timeout(SOON, answer).await.expect("an answer"))
}

#[test]
fn names_of_bindings_are_answered_over_udp_and_tcp_and_follow_a_reload() {
    run(async {
        let here = Net::new();
        let server = here.address(3, 5353);
        let mut settings = east(here, &[Net::new()], ", names: [echo.global]");
        let wild = "dns: {families: [\"*.global\"], vips: 240.240.0.0/16, listen: ";
        settings.more += &format!("{wild}\"{server}\"}}\n");
        let acceptor = Gateway::start(&settings).await;
        let (_, page, _) = acceptor.run_command(&["status"]).await;
        assert!(page.contains("any connection, as echo.global"), "{page}");
        let own = vec![here.ip(2).to_string()];
        let mut stream = connect(server).await;
        for (name, code, addresses) in [
            ("echo.global.", ResponseCode::NoError, own.clone()),
            ("none.global.", ResponseCode::NXDomain, Vec::new()),
            ("example.com.", ResponseCode::Refused, Vec::new()),
        ] {
            let query = question(name, RecordType::A);
            let want = (code, addresses);
            assert_eq!(over_udp(server, &query).await, want, "{name}");
            // Several queries on one connection.
            assert_eq!(over_tcp(&mut stream, &query).await, want, "{name}");
        }
        // Of a binding at every address the name has a VIP.
        let file = acceptor.file("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        let at = format!("listen: \"{}\"", bound(here));
        replace(&file, &text.replace(&at, "listen: \"0.0.0.0:0\""));
        let query = question("echo.global.", RecordType::A);
        let answer = async || over_udp(server, &query).await;
        let moved = until("a VIP", answer, |(_, addresses)| *addresses != own).await;
        assert_eq!(moved.0, ResponseCode::NoError);
        assert!(moved.1[0].starts_with("240.240."), "{moved:?}");
        // A message that is no query ends the connection.
        stream.write_all(&[0, 1, 7]).await.expect("an open connection");
        let end = timeout(SOON, stream.read(&mut [0; 8])).await;
        assert!(matches!(end.expect("an end in time"), Ok(0) | Err(_)));
    });
}

#[test]
fn a_successor_has_the_sockets_of_bindings_and_of_the_dns_responder() {
    run(async {
        let here = Net::new();
        let (server, folder) = (here.address(3, 5353), tempfile::tempdir().expect("a folder"));
        let mut settings = east(here, &[Net::new()], ", names: [echo.global]");
        let dns = "dns: {families: [\"*.global\"], listen: ";
        settings.more += &format!("{dns}\"{server}\"}}\n");
        settings.take_over = Some(folder.path().join("take-over"));
        let mut first = Gateway::start(&settings).await;
        let query = question("echo.global.", RecordType::A);
        let want = over_udp(server, &query).await;
        assert_eq!(want, (ResponseCode::NoError, vec![here.ip(2).to_string()]));
        let next = Gateway::spawn(&settings, |_| {});
        let mut replaced = std::pin::pin!(next.logged("took over from the process that served"));
        loop {
            tokio::select! {
                () = &mut replaced => break,
                answer = over_udp(server, &query) => assert_eq!(answer, want),
            }
        }
        assert!(first.exited().await.success());
        assert_eq!(over_udp(server, &query).await, want);
        assert_eq!(over_tcp(&mut connect(server).await, &query).await, want);
        // There is no gateway behind the binding, which resets the connection perhaps at once.
        let _ = TcpStream::connect(bound(here)).await;
        next.logged("connection failed").await;
    });
}

#[test]
fn silent_dns_clients_shut_nobody_out_and_unlisted_ones_are_refused() {
    run(async {
        let here = Net::new();
        let server = here.address(3, 5353);
        let mut settings = east(here, &[Net::new()], ", names: [echo.global]");
        let dns = "dns: {families: [\"*.global\"], clients: [127.0.0.1/32], listen: ";
        settings.more += &format!("{dns}\"{server}\"}}\n");
        let _gateway = Gateway::start(&settings).await;
        let mut silent = Vec::new();
        for _ in 0..200 {
            silent.push(connect(server).await);
        }
        let query = question("echo.global.", RecordType::A);
        let mut stream = connect(server).await;
        let (code, addresses) = over_tcp(&mut stream, &query).await;
        assert_eq!((code, addresses.len()), (ResponseCode::NoError, 1));
        let socket = UdpSocket::bind("127.0.0.77:0").await.expect("a socket");
        socket.send_to(&query, server).await.expect("a query");
        let mut answer = [0; 1500];
        let received = timeout(SOON, socket.recv(&mut answer)).await;
        let length = received.expect("an answer").expect("an answer");
        assert!(length <= query.len(), "{length}");
        assert_eq!(read(&answer[..length]), (ResponseCode::Refused, Vec::new()));
    });
}
