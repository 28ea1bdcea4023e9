//! Replacement of a running process: its listening sockets go to the next one, or come from
//! systemd.

use std::io::Read as _;
use std::net::Shutdown;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use socket2::{Domain, SockAddr, Socket, Type};
use strait::tools::hbone::{Client, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::passthrough::client_hello;
use crate::support::{
    CLIENT, ECHO, Endpoint, GATEWAY, Gateway, Net, Settings, bytes, identities, replace, run,
    try_echo, until,
};

/// Number of clients that connect again and again.
const CLIENTS: u64 = 4;
/// Bytes of one short tunnel.
const SHORT: u64 = 4 * 1024;
/// Bytes of a part of the long tunnel.
const PART: u64 = 64 * 1024;
/// Port of a second listener.
const EXTRA: u16 = 15009;
/// Number of signals, one of which surely arrives while the process waits.
const SIGNALS: u32 = 10;

/// Settings of a process that may be replaced through a socket in `folder`.
fn settings(net: Net, folder: &Path) -> Settings<'static> {
    let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    settings.more = "drain: {lag: 60s, deadline: 2h}\n".to_owned();
    settings.take_over = Some(folder.join("take-over"));
    settings
}

/// Starts a process beside the one that serves, and waits until it has replaced it.
async fn successor(settings: &Settings<'_>) -> Gateway {
    let next = Gateway::spawn(settings, |_| {});
    next.logged("took over from the process that served").await;
    next
}

async fn echo(tunnel: &mut Tunnel, from: u64, to: u64) {
    let (mut read, mut write) = tokio::io::split(tunnel);
    let send = bytes::send(&mut write, 1, from, to);
    let expect = bytes::expect(&mut read, 1, from, to);
    tokio::try_join!(send, expect).expect("every byte");
}

/// Connects, opens a tunnel and uses it, again and again.
async fn short_tunnels(net: Net, stop: Arc<AtomicBool>, done: Arc<AtomicU64>) {
    let tls = identities().client(CLIENT, GATEWAY);
    while !stop.load(Ordering::Relaxed) {
        let client = Client::connect(net.address(1, 15008), &tls).await.expect("a connection");
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        echo(&mut tunnel, 0, SHORT).await;
        tunnel.shutdown().await.expect("our end");
        bytes::expect_end(&mut tunnel).await;
        done.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn successors_refuse_no_connection_and_leave_open_tunnels_alone() {
    run(async {
        let net = Net::new();
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(net, folder.path());
        let mut first = Gateway::start(&settings).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = first.client(identities()).await;
        let mut long = client.tunnel(ECHO).await.expect("a tunnel");
        echo(&mut long, 0, PART).await;
        let (stop, done) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS {
            clients.spawn(short_tunnels(net, Arc::clone(&stop), Arc::clone(&done)));
        }
        let mut second = successor(&settings).await;
        let third = successor(&settings).await;
        // Neither reset nor waited for: the lag is a minute.
        assert!(second.exited().await.success());
        assert!(second.log().contains("the next process serves; this one drains"));
        echo(&mut long, PART, 2 * PART).await;
        assert!(first.is_running(), "{}", first.log());
        let before = done.load(Ordering::Relaxed);
        while done.load(Ordering::Relaxed) < before + CLIENTS {
            tokio::task::yield_now().await;
        }
        stop.store(true, Ordering::Relaxed);
        clients.join_all().await;
        assert_eq!(third.readiness().await.0, 200);
        assert!(third.metric("strait_connections_total").await >= CLIENTS as f64);
        long.shutdown().await.expect("our end");
        bytes::expect_end(&mut long).await;
        assert!(first.exited().await.success());
        for ended in [&first, &second] {
            let log = ended.log();
            let ends = log.matches("reason=").count();
            assert_eq!(log.matches("reason=\"completed\"").count(), ends, "{log}");
        }
    });
}

#[test]
fn a_successor_that_fails_before_it_is_ready_changes_nothing() {
    run(async {
        let net = Net::new();
        let folder = tempfile::tempdir().unwrap();
        let mut settings = settings(net, folder.path());
        let extra = net.address(1, EXTRA);
        settings.listeners = format!("  - {{name: extra, bind: \"{extra}\", protocol: hbone}}\n");
        let mut first = Gateway::start(&settings).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let mut bad = Gateway::spawn(&settings, |folder| {
            std::fs::write(folder.join("mesh.yaml"), "services: 1\n").expect("a file");
        });
        assert!(!bad.exited().await.success());
        first.logged("the next process failed before it was ready").await;
        // One that waits for its control plane, and is killed meanwhile. A listener that is removed
        // here has its socket in the other process too.
        let mut late = Gateway::spawn(&settings, |folder| {
            let file = folder.join("strait.yaml");
            let text = std::fs::read_to_string(&file).expect("the file");
            let istio = "{kind: istio, address: \"localhost:9\", roots: root.crt}";
            let text = text.replace("{kind: file, path: mesh.yaml}", istio);
            std::fs::write(file, text).expect("a file");
        });
        late.logged("no stream to the control plane").await;
        let file = first.file("strait.yaml");
        let with = std::fs::read_to_string(&file).unwrap();
        replace(&file, &with.replace(&settings.listeners, ""));
        first.logged("listener removed").await;
        let order = ["drain", "listener", "cross-network"];
        let (code, _, error) = first.run_command(&order).await;
        assert!(code == 1 && error.contains("the next process starts"), "{code} {error}");
        late.signal(Signal::KILL);
        late.exited().await;
        replace(&file, &with);
        let extra = async || TcpStream::connect(net.address(1, EXTRA)).await.is_ok();
        until("the listener that came back", extra, |&is_open| is_open).await;
        let client = first.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        echo(&mut tunnel, 0, PART).await;
        drop(tunnel);
        assert_eq!(first.readiness().await.0, 200);
        let _second = successor(&settings).await;
        assert!(first.exited().await.success());
    });
}

/// Returns a socket for the other end of a hand-over, and the address in `folder` at which
/// processes wait.
fn other_process(folder: &Path) -> (Socket, SockAddr) {
    let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None).expect("a socket");
    socket.set_read_timeout(Some(Duration::from_secs(30))).expect("a deadline");
    (socket, SockAddr::unix(folder.join("take-over")).expect("an address"))
}

/// Receives a packet, without its descriptors.
fn receive(mut channel: &Socket) -> String {
    let mut bytes = [0; 16 * 1024];
    let count = channel.read(&mut bytes).expect("a packet");
    String::from_utf8_lossy(&bytes[..count]).into_owned()
}

fn send(channel: &Socket, message: &str) {
    channel.send(message.as_bytes()).expect("a sent packet");
}

#[test]
fn a_successor_that_gives_up_after_it_was_ready_leaves_the_ports_to_the_predecessor() {
    run(async {
        let net = Net::new();
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(net, folder.path());
        let mut first = Gateway::start(&settings).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let (channel, address) = other_process(folder.path());
        let connected = async || channel.connect(&address).is_ok();
        until("a process that waits", connected, |&is_connected| is_connected).await;
        assert!(receive(&channel).contains("sockets"));
        send(&channel, r#"{"message":"prepared"}"#);
        assert_eq!(receive(&channel), r#"{"message":"allowed"}"#);
        // It gives up before the other process has read that it is ready.
        channel.shutdown(Shutdown::Read).unwrap();
        send(&channel, r#"{"message":"ready"}"#);
        first.logged("the next process failed before it was ready; this one goes on").await;
        drop(channel);
        let client = first.client(identities()).await;
        echo(&mut client.tunnel(ECHO).await.expect("a tunnel"), 0, PART).await;
        drop(client);
        let _second = successor(&settings).await;
        assert!(first.exited().await.success());
    });
}

#[test]
fn a_signal_ends_no_take_over() {
    run(async {
        let folder = tempfile::tempdir().unwrap();
        let (listener, address) = other_process(folder.path());
        listener.bind(&address).unwrap();
        listener.listen(1).unwrap();
        let mut next = Gateway::spawn(&settings(Net::new(), folder.path()), |_| {});
        let (channel, _) = listener.accept().expect("the next process");
        channel.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        send(&channel, r#"{"message":"sockets","version":2,"names":[],"has_more":false}"#);
        assert_eq!(receive(&channel), r#"{"message":"prepared"}"#);
        send(&channel, r#"{"message":"allowed"}"#);
        assert_eq!(receive(&channel), r#"{"message":"ready"}"#);
        for _ in 0..SIGNALS {
            next.signal(Signal::HUP);
            next.readiness().await;
        }
        send(&channel, r#"{"message":"released"}"#);
        drop(channel);
        next.logged("took over from the process that served").await;
        next.ready().await;
    });
}

/// Opens a connection by its server name. Its endpoint echoes the ClientHello.
async fn by_name(net: Net) -> TcpStream {
    let hello = client_hello("outbound_.80_._.echo.app.svc.cluster.local", &["istio"]);
    let mut stream = TcpStream::connect(net.address(1, EXTRA)).await.expect("a connection");
    stream.write_all(&hello).await.expect("a hello");
    let mut answer = vec![0; hello.len()];
    stream.read_exact(&mut answer).await.expect("an echo");
    assert_eq!(answer, hello);
    stream
}

#[test]
fn a_successor_has_the_sockets_of_tls_listeners() {
    run(async {
        let net = Net::new();
        let folder = tempfile::tempdir().unwrap();
        let mut settings = settings(net, folder.path());
        settings.exposure = settings.exposure.replace("{cluster: west}", "{anyone: true}");
        settings.listeners = format!(
            "  - {{name: names, bind: \"{}\", protocol: tls, routing: istio}}\n",
            net.address(1, EXTRA)
        );
        let mut first = Gateway::start(&settings).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let mut before = by_name(net).await;
        let second = successor(&settings).await;
        drop(by_name(net).await);
        assert!(second.metric("strait_connections_total").await >= 1.0);
        // A change of files reaches the process that serves.
        replace(&second.file("mesh.yaml"), &settings.mesh.replace("capacity: 1,", "capacity: 2,"));
        second.logged("reloaded what=\"mesh\"").await;
        drop(by_name(net).await);
        try_echo(&mut before).await.expect("an open tunnel");
        drop(before);
        assert!(first.exited().await.success());
    });
}

#[test]
fn a_socket_that_others_could_replace_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    run(async {
        let folder = tempfile::tempdir().unwrap();
        let open = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(folder.path(), open).unwrap();
        let mut gateway = Gateway::spawn(&settings(Net::new(), folder.path()), |_| {});
        assert!(!gateway.exited().await.success());
        let log = gateway.log();
        assert!(log.contains("another user may write to"), "{log}");
        assert!(log.contains("such as /run/strait/take-over"), "{log}");
    });
}

/// Opens the socket of a listener, and becomes the gateway, as systemd does.
const SYSTEMD: &str = "
import os, socket, sys
address, port, *command = sys.argv[1:]
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind((address, int(port)))
listener.listen()
os.dup2(listener.fileno(), 3, inheritable=True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1')
os.execv(command[0], command)
";

#[test]
fn systemd_opens_the_sockets_and_learns_the_state() {
    run(async {
        let net = Net::new();
        let folder = tempfile::tempdir().unwrap();
        let notified = folder.path().join("notify");
        let states = UnixDatagram::bind(&notified).unwrap();
        states.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let state = move || {
            let mut text = [0; 256];
            let count = states.recv(&mut text).expect("a state");
            String::from_utf8_lossy(&text[..count]).into_owned()
        };
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let program = std::mem::replace(&mut settings.program, "python3".into());
        let address = net.address(1, 15008);
        let (host, port) = (address.ip().to_string(), address.port().to_string());
        let ready = Gateway::folder(&settings);
        let file = ready.path().join("strait.yaml");
        let mut gateway = Gateway::spawn_in(ready, &settings, |command| {
            command.args(["-c", SYSTEMD, &host, &port]).arg(program);
            command.args(["run", "-c"]).arg(file).env("NOTIFY_SOCKET", &notified);
        });
        gateway.ready().await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        echo(&mut client.tunnel(ECHO).await.expect("a tunnel"), 0, PART).await;
        assert_eq!(state(), "READY=1\n");
        // A listener of another protocol has the same socket, which systemd keeps open.
        let file = gateway.file("strait.yaml");
        let hbone = std::fs::read_to_string(&file).unwrap();
        replace(&file, &hbone.replace("protocol: hbone", "protocol: tls, routing: istio"));
        gateway.logged("listener removed").await;
        let opened = async || gateway.log().matches("listener opened").count();
        until("the other listener", opened, |&count| count == 2).await;
        replace(&file, &hbone);
        until("the listener that came back", opened, |&count| count == 3).await;
        let client = gateway.client(identities()).await;
        echo(&mut client.tunnel(ECHO).await.expect("a tunnel"), 0, PART).await;
        gateway.signal(Signal::TERM);
        assert_eq!(state(), "STOPPING=1\n");
    });
}
