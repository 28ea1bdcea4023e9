//! Network namespace for a gateway, behind two bridged links: to its clients, and to its endpoints.
//!
//! The test itself is in the namespace of the machine, as client and as endpoint. A link that is
//! cut drops every packet without a signal to either side. Root and `ip` are needed.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Child;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::{Gateway, Net, Settings, identities, skip};

/// Host on the link of the endpoints.
pub const ENDPOINT_HOST: u8 = 131;
/// Host on the link of the clients, which serves as an endpoint too.
pub const NEAR_HOST: u8 = 3;
const RELAY_PORT: u16 = 15009;

/// Networks of labs, which RFC 2544 reserves for tests.
const ALLOW: &str = "[\"198.18.0.0/15\"]";

/// Makes the namespaces: `$0` is their name, `$1` the first three numbers of all addresses. In
/// packets beyond the length of a segment, a bridge does not see what its link could not carry.
const MAKE: &str = r#"set -e
ip netns add "$0-w"; ip netns add "$0-g"; ip -n "$0-g" link set lo up
link() {
  ip link add "$2" type veth peer name "$1-near" netns "$0-w"
  ip -n "$0-w" link add "$1-far" type veth peer name "$1" netns "$0-g"
  ip -n "$0-w" link add "$1-bridge" type bridge
  ip -n "$0-w" link set "$1-bridge" up
  for end in near far; do ip -n "$0-w" link set "$1-$end" master "$1-bridge" up; done
  ip link set "$2" gso_max_segs 1; ip -n "$0-g" link set "$1" gso_max_segs 1
  ip -n "$0-g" addr add "$3" dev "$1"; ip -n "$0-g" link set "$1" up
  ip link set "$2" up
}
link clients "$0c" "$1.1/25"; link ends "$0e" "$1.129/25"
ip addr add "$1.2/25" dev "$0c"; ip addr add "$1.3/25" dev "$0c"
ip addr add "$1.130/25" dev "$0e"; ip addr add "$1.131/25" dev "$0e"
"#;

/// Link of a lab.
#[derive(Clone, Copy, Debug)]
pub enum Link {
    Clients,
    Endpoints,
}

impl Link {
    /// Returns the ends of the link outside of the gateway's namespace: the near one, its bridge,
    /// and the far one.
    fn port(self) -> [&'static str; 3] {
        match self {
            Self::Clients => ["clients-near", "clients-bridge", "clients-far"],
            Self::Endpoints => ["ends-near", "ends-bridge", "ends-far"],
        }
    }
}

/// Direction of a link.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    ToGateway,
    FromGateway,
}

/// Length of the header before the packet of a frame.
const ETHERNET_HEADER: u16 = 14;

/// Ethernet address that no end of a link has.
const NOBODY: &str = "02:00:00:00:00:01";

/// Script of a link that impairs packets.
const IMPAIRED_LINK: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/support/impaired_link.py");

/// Link that impairs packets until its end.
pub struct ImpairedLink(Child);

impl ImpairedLink {
    /// Ends the link, which then forwards nothing. Returns the number of packets by what happened
    /// to them.
    pub async fn end(mut self) -> BTreeMap<String, u64> {
        drop(self.0.stdin.take());
        let output = self.0.wait_with_output().await.expect("an end");
        serde_json::from_slice(&output.stdout).expect("counts")
    }
}

/// Plain TCP relay in the place of the gateway, until it is dropped.
pub struct Relay {
    pub address: SocketAddr,
    _stop: oneshot::Sender<()>,
}

/// Copies each connection to `to` and back. The connection to `to` is open before, as that of a
/// tunnel is before its first byte.
async fn relay(listener: TcpListener, to: SocketAddr) {
    let mut connections = JoinSet::new();
    loop {
        let to = TcpStream::connect(to).await.expect("the endpoint");
        let (from, _) = listener.accept().await.expect("a connection");
        connections.spawn(async move {
            for stream in [&from, &to] {
                stream.set_nodelay(true).expect("an open connection");
            }
            let ((from, back), (answer, to)) = (from.into_split(), to.into_split());
            tokio::try_join!(relay_one(from, to), relay_one(answer, back))
        });
    }
}

async fn relay_one(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> std::io::Result<()> {
    copy(&mut from, &mut to).await?;
    to.shutdown().await
}

/// Namespaces of a test, removed on drop.
pub struct Lab {
    name: String,
    pub net: Net,
}

impl Lab {
    /// Makes the namespaces. Without the rights or the kernel for it, the row is skipped.
    pub fn new(row: &str) -> Option<Self> {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let (first, net) = loop {
            let [_, _, high, low] = std::process::id().to_be_bytes();
            let next = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes()[1];
            let first = [198, 18 + high % 2, low.wrapping_add(next)];
            let net = Net::of_lab(first);
            if std::net::TcpListener::bind((net.ip(2), 0)).is_err() {
                break (first, net);
            }
        };
        let lab = Self { name: format!("sl{}x{}", std::process::id(), first[2]), net };
        let [one, two, three] = first;
        let made = output("sh", &["-c", MAKE, &lab.name, &format!("{one}.{two}.{three}")]);
        if made.status.success() {
            return Some(lab);
        }
        let why = String::from_utf8_lossy(&made.stderr);
        skip(row, &format!("no network namespaces can be made here, as by root: {}", why.trim()));
        None
    }

    /// Returns the settings of a gateway in the lab.
    pub fn settings(&self, endpoints: &[(u8, u32, &str)]) -> Settings<'static> {
        let mut settings = Settings::new(self.net, identities()).endpoints(endpoints);
        settings.inside = vec!["nsenter".to_owned(), self.namespace()];
        settings.allow = ALLOW;
        settings
    }

    /// Starts a gateway with one endpoint at [`ENDPOINT_HOST`].
    pub async fn gateway(&self) -> Gateway {
        Gateway::start(&self.settings(&[(ENDPOINT_HOST, 1, "TCP")])).await
    }

    /// Starts a relay to an endpoint on a thread in the gateway's namespace.
    pub async fn relay(&self, to: SocketAddr) -> Relay {
        let namespace = File::open(format!("/run/netns/{}-g", self.name)).expect("a namespace");
        let address = self.net.address(1, RELAY_PORT);
        let (ready, is_ready) = oneshot::channel();
        let (stop, stopped) = oneshot::channel();
        std::thread::spawn(move || {
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), kind).expect("root");
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let listener = TcpListener::bind(address).await.expect("a listener");
                ready.send(()).expect("a test");
                tokio::select! {
                    () = relay(listener, to) => {}
                    _ = stopped => {}
                }
            });
        });
        is_ready.await.expect("a relay");
        Relay { address, _stop: stop }
    }

    /// Drops every packet of a link in both directions.
    pub fn cut(&self, link: Link) {
        self.bridge(&[link.port()[0], "nomaster"]);
    }

    pub fn heal(&self, link: Link) {
        let [port, bridge, _] = link.port();
        self.bridge(&[port, "master", bridge]);
    }

    /// Loses every packet of a link in one direction, without a signal: its sender has a wrong
    /// Ethernet address of the receiver.
    pub fn cut_one_way(&self, link: Link, way: Way) {
        self.one_way(link, way, &["lladdr", NOBODY, "nud", "permanent"]);
    }

    pub fn heal_one_way(&self, link: Link, way: Way) {
        self.one_way(link, way, &["lladdr", NOBODY, "nud", "failed"]);
    }

    fn one_way(&self, link: Link, way: Way, state: &[&str]) {
        let (inside, end, gateway, others) = match link {
            Link::Clients => ("clients", "c", 1, [2, NEAR_HOST]),
            Link::Endpoints => ("ends", "e", 129, [130, ENDPOINT_HOST]),
        };
        let (outside, namespace) = (format!("{}{end}", self.name), format!("{}-g", self.name));
        let (words, device, hosts) = match way {
            Way::ToGateway => (&[][..], &*outside, &[gateway][..]),
            Way::FromGateway => (&["-n", &*namespace][..], inside, &others[..]),
        };
        for host in hosts {
            let address = self.net.ip(*host).to_string();
            let change = ["neigh", "replace", &*address, "dev", device];
            succeeded(&output("ip", &[words, &change, state].concat()));
        }
    }

    /// Drops packets of a link in one direction that are longer than this, without a signal.
    pub fn narrow(&self, link: Link, way: Way, bytes: u16) {
        // tbf drops frames that are longer than its bucket.
        let bucket = (bytes + ETHERNET_HEADER).to_string();
        let shape = ["tbf", "rate", "1gbit", "burst", &bucket, "latency", "100ms"];
        self.queue(link, way, "add", &shape);
    }

    pub fn widen(&self, link: Link, way: Way) {
        self.queue(link, way, "del", &[]);
    }

    fn queue(&self, link: Link, way: Way, change: &str, shape: &[&str]) {
        let port = match way {
            Way::FromGateway => link.port()[0],
            Way::ToGateway => link.port()[2],
        };
        let namespace = format!("{}-w", self.name);
        let words = ["-n", &namespace, "qdisc", change, "dev", port, "root"];
        succeeded(&output("tc", &[&words[..], shape].concat()));
    }

    /// Loses, delays, reorders, repeats and corrupts packets of a link, by the seed.
    pub async fn impair(&self, link: Link, seed: u64) -> ImpairedLink {
        let (inside, outside) = match link {
            Link::Clients => ("clients", "c"),
            Link::Endpoints => ("ends", "e"),
        };
        let [near, _, far] = link.port();
        let ports = [near, far];
        let outside = format!("{}{outside}", self.name);
        let checksums = ["python3", IMPAIRED_LINK, "checksums"];
        succeeded(&output(checksums[0], &[&checksums[1..], &[&outside]].concat()));
        let namespace = self.namespace();
        succeeded(&output("nsenter", &[&[&*namespace], &checksums[..], &[inside]].concat()));
        for port in ports {
            self.bridge(&[port, "nomaster"]);
        }
        let mut script = tokio::process::Command::new("nsenter")
            .arg(format!("--net=/run/netns/{}-w", self.name))
            .args(["python3", IMPAIRED_LINK, &seed.to_string()])
            .args(ports)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("python3");
        let mut ready = [0; 6];
        let stdout = script.stdout.as_mut().expect("a pipe");
        stdout.read_exact(&mut ready).await.expect("a link");
        ImpairedLink(script)
    }

    /// Sets a key of net.ipv4 in the gateway's namespace.
    pub fn sysctl(&self, key: &str, value: &str) {
        let script = format!("echo '{value}' > /proc/sys/net/ipv4/{key}");
        succeeded(&output("nsenter", &[&self.namespace(), "sh", "-c", &script]));
    }

    fn namespace(&self) -> String {
        format!("--net=/run/netns/{}-g", self.name)
    }

    fn bridge(&self, change: &[&str]) {
        let namespace = format!("{}-w", self.name);
        let words = ["-n", &namespace, "link", "set"];
        succeeded(&output("ip", &[&words[..], change].concat()));
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for end in ["w", "g"] {
            output("ip", &["netns", "del", &format!("{}-{end}", self.name)]);
        }
    }
}

fn output(program: &str, args: &[&str]) -> Output {
    let output = Command::new(program).args(args).output();
    output.unwrap_or_else(|error| panic!("{program}: {error}"))
}

fn succeeded(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
