//! Processes that are stopped, killed or starved of CPU time.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use h2::Reason;
use rustix::process::Signal;
use strait::tools::hbone::Tunnel;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use super::{all_broken, all_whole, start};
use crate::support::cgroup::{Cgroup, enter};
use crate::support::oracle::{End, Oracle, Plan};
use crate::support::process::send_signal;
use crate::support::{
    ECHO, Gateway, Net, Settings, broken, bytes, endpoint_port, identities, run, until,
};

/// Endpoint that sends the last number of its address, and echoes.
const ECHO_PROGRAM: &str = r"
import asyncio, sys
async def serve(reader, writer):
    writer.write(bytes([int(sys.argv[1].split('.')[-1])]))
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def main():
    async with await asyncio.start_server(serve, sys.argv[1], int(sys.argv[2])) as server:
        await server.serve_forever()
asyncio.run(main())
";

const STREAM_BYTES: u64 = 256 * 1024;

/// Starts an endpoint as a process of its own.
async fn endpoint(address: SocketAddr) -> Child {
    let mut command = Command::new("python3");
    command.args(["-c", ECHO_PROGRAM, &address.ip().to_string(), &address.port().to_string()]);
    let process = command
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("python3");
    let listens = async || tokio::net::TcpStream::connect(address).await.is_ok();
    until("an endpoint", listens, |&listens| listens).await;
    process
}

async fn gateway(net: Net, hosts: &[u8]) -> Gateway {
    let hosts: Vec<_> = hosts.iter().map(|&host| (host, 1, "TCP")).collect();
    Gateway::start(&Settings::new(net, identities()).endpoints(&hosts)).await
}

/// Waits without being taken for a test that hangs.
pub(super) async fn pause(time: Duration) {
    for _ in 0..4 {
        // deadline: the duration of the fault is what is tested.
        sleep(time / 4).await;
    }
}

/// Stops the gateway in the middle of tunnels, which then complete.
pub(super) async fn stopped_for(time: Duration) {
    let net = Net::new();
    let gateway = gateway(net, &[11]).await;
    let oracle = Oracle::new();
    let _endpoint = oracle.endpoint(net.listen(11, endpoint_port()).await);
    let client = gateway.client(identities()).await;
    let rest = Duration::from_millis(50);
    let plan = |id| Plan { rest, ..Plan::both(id, 30 * 16 * 1024) };
    let tunnels = start(&client, &[1, 2, 3, 4].map(plan)).await;
    gateway.signal(Signal::STOP);
    pause(time).await;
    gateway.signal(Signal::CONT);
    all_whole(&oracle, tunnels).await;
    client.tunnel(ECHO).await.expect("a new tunnel on the same connection");
}

/// Stops an endpoint in the middle of tunnels, which then complete.
pub(super) async fn endpoint_stopped_for(time: Duration) {
    let net = Net::new();
    let gateway = gateway(net, &[11]).await;
    let process = endpoint(net.address(11, endpoint_port())).await;
    let client = gateway.client(identities()).await;
    let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
    assert_eq!(tunnel.read_u8().await.expect("a name"), 11);
    send_signal(&process, Signal::STOP);
    // More than the kernel takes for a process that does not read.
    let (mut read, mut write) = tokio::io::split(tunnel);
    let send = async {
        bytes::send(&mut write, 1, 0, 64 * STREAM_BYTES).await.expect("an open tunnel");
        write.shutdown().await.expect("our end");
    };
    let receive = async {
        let echoed = bytes::expect(&mut read, 1, 0, 64 * STREAM_BYTES).await;
        echoed.expect("every byte");
        bytes::expect_end(&mut read).await;
    };
    let stop = async {
        pause(time).await;
        send_signal(&process, Signal::CONT);
    };
    tokio::join!(send, receive, stop);
}

#[test]
fn a_gateway_that_is_stopped_for_10_seconds_loses_no_byte() {
    run(stopped_for(Duration::from_secs(10)));
}

#[test]
fn an_endpoint_that_is_stopped_for_10_seconds_loses_no_byte() {
    run(endpoint_stopped_for(Duration::from_secs(10)));
}

#[test]
fn an_endpoint_that_is_killed_breaks_its_own_tunnels_and_no_other() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net, &[11, 12]).await;
        let mut lost = endpoint(net.address(11, endpoint_port())).await;
        let _kept = endpoint(net.address(12, endpoint_port())).await;
        let client = gateway.client(identities()).await;
        let (mut broken_tunnels, mut whole) = (Vec::new(), Vec::new());
        for _ in 0..100 {
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            match tunnel.read_u8().await.expect("a name") {
                11 => broken_tunnels.push(tunnel),
                _ => whole.push(tunnel),
            }
        }
        assert!(!broken_tunnels.is_empty() && !whole.is_empty());
        // A process that has read everything ends by FIN, as one that closes its connections does.
        send_signal(&lost, Signal::STOP);
        for tunnel in &mut broken_tunnels {
            tunnel.write_all(b"unread").await.expect("an open tunnel");
        }
        let arrived = async || unread(net.address(11, endpoint_port()));
        let count = broken_tunnels.len();
        until("unread bytes", arrived, |&arrived| arrived == count).await;
        let killed = Instant::now();
        lost.kill().await.expect("a kill");
        for tunnel in &mut broken_tunnels {
            let end = timeout(Duration::from_secs(5), broken(tunnel)).await;
            assert_eq!(end.expect("an end in time"), Some(Reason::CONNECT_ERROR));
        }
        // One second is promised; debug builds of others may run beside.
        assert!(killed.elapsed() < Duration::from_secs(3), "{:?}", killed.elapsed());
        for id in 0..20 {
            let mut tunnel = client.tunnel(ECHO).await.expect("no new tunnel fails");
            assert_eq!(tunnel.read_u8().await.expect("a name"), 12, "tunnel {id}");
            whole.push(tunnel);
        }
        for (id, tunnel) in (0..).zip(whole) {
            echoes_all(tunnel, id).await;
        }
    });
}

/// Returns the number of connections of a listener with bytes that their process has not read.
fn unread(listener: SocketAddr) -> usize {
    let std::net::IpAddr::V4(ip) = listener.ip() else {
        return 0;
    };
    let local = format!("{:08X}:{:04X}", u32::from_le_bytes(ip.octets()), listener.port());
    let table = std::fs::read_to_string("/proc/net/tcp").expect("the kernel's sockets");
    let lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    // Local address, remote address, state (01 is established), send and receive queue.
    let held = lines.filter(|fields| fields.get(1) == Some(&&*local) && fields[3] == "01");
    held.filter(|fields| !fields[4].ends_with(":00000000")).count()
}

async fn echoes_all(tunnel: Tunnel, id: u64) {
    let (mut read, mut write) = tokio::io::split(tunnel);
    let send = async {
        bytes::send(&mut write, id, 0, STREAM_BYTES).await.expect("an open tunnel");
        write.shutdown().await.expect("our end");
    };
    let receive = async {
        bytes::expect(&mut read, id, 0, STREAM_BYTES).await.expect("every byte");
        bytes::expect_end(&mut read).await;
    };
    tokio::join!(send, receive);
}

#[test]
fn a_gateway_that_is_killed_looks_clean_to_nobody_and_another_one_serves_at_once() {
    run(async {
        let (net, other) = (Net::new(), Net::new());
        let lost = gateway(net, &[11]).await;
        let kept = gateway(other, &[11]).await;
        let oracle = Oracle::new();
        let _endpoint = oracle.endpoint(net.listen(11, endpoint_port()).await);
        let _other = oracle.endpoint(other.listen(11, endpoint_port()).await);
        let client = lost.client(identities()).await;
        let rest = Duration::from_millis(50);
        let ids = 0..16;
        let plans: Vec<_> =
            ids.clone().map(|id| Plan { rest, ..Plan::both(id, 1 << 30) }).collect();
        let tunnels = start(&client, &plans).await;
        let copied = async || lost.metric("strait_tunnels_open").await;
        until("tunnels", copied, |&open| open == 16.0).await;
        // deadline: heads and bytes of all tunnels are on their way.
        sleep(Duration::from_millis(500)).await;
        lost.kill().await;
        let killed = Instant::now();
        let second = kept.client(identities()).await;
        all_whole(&oracle, start(&second, &[Plan::both(100, 1 << 16)]).await).await;
        assert!(killed.elapsed() < Duration::from_secs(3), "{:?}", killed.elapsed());
        all_broken(tunnels).await;
        for id in ids {
            let side = oracle.side(id).await;
            assert!(matches!(side.end, End::Broken(_)), "{side:?}");
        }
    });
}

/// Runs four tunnels through a gateway with a tenth of a core.
pub(super) fn throttled(plan: fn(u64) -> Plan) {
    let Some(cgroup) = Cgroup::cpu("CPU throttling by cgroup", 100_000.0) else {
        return;
    };
    run(async {
        let net = Net::new();
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        settings.inside = enter(&cgroup.path);
        let gateway = Gateway::start(&settings).await;
        let oracle = Oracle::new();
        let _endpoint = oracle.endpoint(net.listen(11, endpoint_port()).await);
        assert!(cgroup.set(10_000.0), "a smaller quota");
        let client = gateway.client(identities()).await;
        all_whole(&oracle, start(&client, &[1, 2, 3, 4].map(plan)).await).await;
        assert_eq!(gateway.readiness().await.0, 200);
    });
}

#[test]
fn a_gateway_with_a_tenth_of_a_core_loses_no_byte() {
    throttled(|id| Plan::both(id, 1 << 20));
}
