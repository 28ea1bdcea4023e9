//! Stage 9: the connection to the picked endpoint, and the addresses that are never dialled.

pub mod remote;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use ipnet::IpNet;
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::sockopt::set_tcp_quickack;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use crate::config::Config;
use crate::limits::{Source, prefix};
use crate::outer::Failure;
use crate::reason::Reason;
use crate::snapshot::{InFlight, Snapshot, SourceHash};
use crate::telemetry::Record;

use super::DataPath;
use super::authorize::{self, Authorized};
use super::balance::{FailedTry, Pick};
use super::first_peer::FirstPeer;
use super::identity::Peer;
use super::io::endpoint::EndpointStream;
use super::limits::descriptors::{Holders, LimitReached, TunnelDescriptor};
use super::policy::Grant;

#[derive(Debug)]
pub struct Upstream {
    pub stream: EndpointStream,
    /// Grant of the tunnel, with its endpoint.
    pub grant: Grant,
    held: (InFlight, TunnelDescriptor),
}

impl Upstream {
    pub(super) fn new(pick: Pick, stream: EndpointStream, descriptor: TunnelDescriptor) -> Self {
        let (permit, endpoint, in_flight) = pick.into_parts();
        Self { stream, grant: permit.into_grant(endpoint), held: (in_flight, descriptor) }
    }

    /// Evaluates the grant again by [`authorize::reevaluate`].
    ///
    /// # Errors
    /// The change that revokes it.
    pub fn reevaluate(
        &mut self,
        snapshot: &Snapshot,
        data_path: &DataPath,
        peer: &Peer,
    ) -> Result<(), String> {
        let servers = self.stream.servers();
        authorize::reevaluate(snapshot, data_path, peer, &mut self.grant, servers.as_ref())
    }

    /// Returns the source that the tunnel is charged to.
    pub fn source(&self) -> &Source {
        self.held.1.source()
    }
}

/// Longest wait for one endpoint. One lost SYN fits: the kernel sends the next one after 1 s.
pub const DIAL_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest wait for all endpoints of one tunnel: ztunnel waits as long for its own dial.
pub const TOTAL_DIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// First acknowledgement to an endpoint, which completes the handshake of TCP there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FirstAck {
    /// At once, as an endpoint may send first.
    Alone,
    /// With the ClientHello, which is sent at once: one packet less, and one wake-up less of an
    /// endpoint. The kernel waits for it for 200 ms.
    WithBytes,
}

impl FirstAck {
    /// Returns that of a tunnel without a binding. Of their peers, those of TLS listeners are
    /// unauthenticated.
    fn of(peer: &Peer) -> Self {
        if peer.is_unauthenticated() { Self::WithBytes } else { Self::Alone }
    }
}

/// Connects to the picked endpoint by `deadline`, and within [`DIAL_TIMEOUT`].
///
/// # Errors
/// Returns the reason, and the permit for another attempt.
pub async fn run(
    data_path: &DataPath,
    peer: &Peer,
    authorized: Authorized,
    record: &mut Record,
    deadline: Instant,
) -> Result<Upstream, FailedTry> {
    let pick = authorized.into_pick();
    let address = pick.endpoint().address;
    let started = Instant::now();
    record.begin_dial(started);
    let holders = pick.holders();
    let connected = match holders.map_or(Err(LimitReached::Share), Holders::dial) {
        Ok(dialling) => {
            pick.endpoint().state.begin_dial(started);
            let connected = match remote::target(pick.endpoint()) {
                None if pick.route().binding.is_some() => {
                    let detail = "the endpoint of a binding has no gateway";
                    Err(Failure::new(Reason::NoEndpoint, detail))
                }
                None => {
                    let to = (address, FirstAck::of(peer));
                    let connected = connect(to, &data_path.deny, deadline).await;
                    connected.map(EndpointStream::Tcp)
                }
                Some(target) => {
                    let account = data_path.budget.account(dialling.source());
                    let through = (&target, &account);
                    let trace = record.traceparent();
                    let open = remote::open(&pick, through, (data_path, peer), trace, deadline);
                    let opened = Box::pin(open).await;
                    opened.map(|stream| EndpointStream::outer(stream, account))
                }
            };
            connected.map(|stream| (stream, dialling.connected()))
        }
        Err(full) => Err(Failure::new(full.reason(), full.to_string())),
    };
    match connected {
        Ok((stream, descriptor)) => {
            let now = Instant::now();
            let time = now.saturating_duration_since(started);
            let (route, endpoint) = (pick.route(), pick.endpoint());
            endpoint.state.record_dial(time);
            let source = source_of(peer, route.first_peer());
            endpoint.state.record_source(source, now);
            if endpoint.remote.is_none() {
                route.endpoints.dial_succeeded(endpoint, now);
            }
            data_path.metrics.dial_succeeded();
            record.end_dial(now, time);
            Ok(Upstream::new(pick, stream, descriptor))
        }
        Err(failure) => Err(pick.failed(failure)),
    }
}

/// Returns the source of a tunnel, to which failures of its endpoint are attributed.
pub fn source_of(peer: &Peer, first_peer: Option<&FirstPeer>) -> SourceHash {
    let source = &*peer.source;
    if peer.is_unauthenticated() {
        return SourceHash::of(&prefix(source.address.ip()));
    }
    let principal = first_peer.map_or(&*source.principal, |first| &*first.principal);
    SourceHash::of(&(&*source.cluster, principal))
}

async fn connect(
    (address, ack): (SocketAddr, FirstAck),
    deny: &DenyList,
    deadline: Instant,
) -> Result<TcpStream, Failure> {
    deny.check(address)?;
    let end = deadline.min(Instant::now() + DIAL_TIMEOUT);
    let Ok(connected) = timeout_at(end, connect_socket(address, ack)).await else {
        let detail = format!("{address} did not answer in time");
        return Err(Failure::new(Reason::DialTimeout, detail));
    };
    connected.map_err(|error| Failure::new(Reason::of_dial(&error), format!("{address}: {error}")))
}

/// Connects a socket. Its error is read only if there is one, which saves a system call of tokio's
/// own connect.
async fn connect_socket(address: SocketAddr, ack: FirstAck) -> io::Result<TcpStream> {
    let socket =
        Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    // A dial that is abandoned, and a tunnel that breaks in any way, including a crash of this
    // process, end by RST here. Only a clean end reverts this, before the socket is closed.
    socket.set_linger(Some(Duration::ZERO))?;
    socket.set_tcp_nodelay(true)?;
    if ack == FirstAck::WithBytes {
        set_tcp_quickack(&socket, false)?;
    }
    if let Err(error) = socket.connect(&address.into())
        && error.raw_os_error() != Some(Errno::INPROGRESS.raw_os_error())
    {
        return Err(error);
    }
    let stream = TcpStream::from_std(socket.into())?;
    let ready = stream.ready(Interest::WRITABLE | Interest::ERROR).await?;
    let error = if ready.is_error() { stream.take_error()? } else { None };
    error.map_or(Ok(stream), Err)
}

/// Addresses that are never dialled, even if discovery names them.
#[derive(Debug, Default)]
pub struct DenyList {
    allow: Vec<IpNet>,
    own_listeners: ArcSwap<Vec<SocketAddr>>,
    local_addresses: LocalAddressCache,
}

impl DenyList {
    /// Creates the list. `allow` exempts networks from the fixed rules. `own` holds the listeners
    /// of this process, which cannot be exempted.
    pub fn new(allow: Vec<IpNet>, own: Vec<SocketAddr>) -> Self {
        Self {
            allow,
            own_listeners: ArcSwap::from_pointee(own),
            local_addresses: LocalAddressCache::default(),
        }
    }

    /// Creates the list of a configuration, with the addresses of its listeners.
    pub fn of(config: &Config) -> Self {
        let own = config.listeners.iter().map(|listener| listener.bind);
        Self::new(config.dial.allow.clone(), own.collect())
    }

    /// Replaces the listener addresses of this process.
    pub fn set_own(&self, own: Vec<SocketAddr>) {
        self.own_listeners.store(Arc::new(own));
    }

    /// Returns the rule that forbids dialling `address`, if there is one.
    pub fn denies(&self, address: SocketAddr) -> Option<&'static str> {
        match self.leads_back(address) {
            Ok(is_own) => self.rule(address, is_own),
            Err(_) => Some("perhaps a listener of this gateway"),
        }
    }

    fn rule(&self, address: SocketAddr, is_own: bool) -> Option<&'static str> {
        if is_own {
            return Some("a listener of this gateway");
        }
        let ip = address.ip().to_canonical();
        let rule = fixed_rule(ip)?;
        (!self.allow.iter().any(|net| net.contains(&ip))).then_some(rule)
    }

    /// Checks that `address` may be dialled.
    ///
    /// # Errors
    /// A rule forbids it, or the lookup of the addresses of this host has failed.
    pub fn check(&self, address: SocketAddr) -> Result<(), Failure> {
        let is_own = self.leads_back(address).map_err(|error| {
            let detail =
                format!("{address} cannot be distinguished from addresses of this host: {error}");
            Failure::new(Reason::Overloaded, detail)
        })?;
        let denied = self.rule(address, is_own).map(|rule| {
            let detail = format!("{address} is {rule}, which is never dialled");
            Failure::new(Reason::DialDenied, detail)
        });
        denied.map_or(Ok(()), Err)
    }

    /// Returns true if `address` leads back to a listener of this process.
    pub fn is_own(&self, address: SocketAddr) -> bool {
        matches!(self.leads_back(address), Ok(true))
    }

    /// Returns whether `address` leads back to a listener of this process.
    ///
    /// # Errors
    /// The lookup of the addresses of this host has failed.
    fn leads_back(&self, address: SocketAddr) -> io::Result<bool> {
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        let own = self.own_listeners.load();
        let mut on_port = own.iter().filter(|own| own.port() == address.port());
        if on_port.clone().any(|own| own.ip().to_canonical() == address.ip()) {
            return Ok(true);
        }
        // A wildcard is any address of this host. The port alone decides nothing, because every
        // HBONE endpoint has ours.
        if on_port.any(|own| own.ip().is_unspecified()) {
            let (ip, now) = (address.ip(), Instant::now());
            return self.local_addresses.is_local(ip, now, is_local_address);
        }
        Ok(false)
    }
}

/// Returns the fixed rule that covers an address: no endpoint of a mesh can have it, but an attack
/// could name it.
fn fixed_rule(ip: IpAddr) -> Option<&'static str> {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    if ip.is_loopback() {
        Some("a loopback address")
    } else if link_local {
        Some("a link-local address")
    } else if ip.is_unspecified() || matches!(ip, IpAddr::V4(ip) if ip.octets()[0] == 0) {
        Some("an unspecified address")
    } else if ip.is_multicast() || matches!(ip, IpAddr::V4(ip) if ip.is_broadcast()) {
        Some("a multicast or broadcast address")
    } else if METADATA.contains(&ip) || EC2.contains(&ip) {
        Some("a metadata service")
    } else if matches!(ip, IpAddr::V4(ip) if ip.octets()[0] >= 240) {
        // Service VIPs may be here, as those that Istio allocates are. A VIP is resolved to its
        // endpoints and is never dialled itself.
        Some("a reserved address")
    } else if TEREDO.contains(&ip) {
        Some("a Teredo address")
    } else {
        embedded_ipv4(ip).and_then(|ip| fixed_rule(IpAddr::V4(ip)))
    }
}

/// Addresses of metadata services that are not link-local: GCP over IPv6, Alibaba, Azure, Oracle.
const METADATA: [IpAddr; 4] = [
    IpAddr::V6(Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)),
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)),
    IpAddr::V4(Ipv4Addr::new(192, 0, 0, 192)),
];
/// EC2's instance services over IPv6: metadata at ::254, DNS at ::253, time at ::123.
const EC2: IpNet = net32(0xfd00, 0xec2);
/// Teredo (RFC 4380), which embeds two IPv4 addresses and a port in each address.
const TEREDO: IpNet = net32(0x2001, 0);

const fn net32(first: u16, second: u16) -> IpNet {
    let ip = Ipv6Addr::new(first, second, 0, 0, 0, 0, 0, 0);
    IpNet::new_assert(IpAddr::V6(ip), 32)
}

/// Returns the IPv4 address that a translator or a tunnel would derive from an IPv6 one:
/// IPv4-compatible (RFC 4291 section 2.5.5.1), SIIT's IPv4-translated (RFC 2765 section 2.1),
/// NAT64 (RFC 6052 and RFC 8215), 6to4 (RFC 3056) and ISATAP (RFC 5214 section 6.1).
fn embedded_ipv4(ip: IpAddr) -> Option<Ipv4Addr> {
    let IpAddr::V6(ip) = ip else { return None };
    let (high, low) = match ip.segments() {
        [0x64, 0xff9b, 1, ..] => return Some(local_nat64(ip)),
        [0, 0, 0, 0, 0 | 0xffff, 0, high, low]
        | [0x64, 0xff9b, 0, .., high, low]
        | [.., 0 | 0x200, 0x5efe, high, low] => (high, low),
        [0x2002, high, low, ..] => (high, low),
        _ => return None,
    };
    Some(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)))
}

/// Returns the IPv4 address in 64:ff9b:1::/48, where an operator chooses a prefix of 48, 56, 64 or
/// 96 bits. The zeros after the address identify the prefix (RFC 6052 section 2.2).
fn local_nat64(ip: Ipv6Addr) -> Ipv4Addr {
    let octets = match ip.octets() {
        [_, _, _, _, _, _, a, b, 0, c, d, 0, 0, 0, 0, 0] => [a, b, c, d],
        [_, _, _, _, _, _, _, a, 0, b, c, d, 0, 0, 0, 0] => [a, b, c, d],
        [_, _, _, _, _, _, _, _, 0, a, b, c, d, 0, 0, 0] if [a, b, c] != [0; 3] => [a, b, c, d],
        [.., a, b, c, d] => [a, b, c, d],
    };
    Ipv4Addr::from(octets)
}

/// Cache of the kernel's answers on addresses, each of which costs five system calls.
#[derive(Debug, Default)]
struct LocalAddressCache(Mutex<HashMap<IpAddr, (Instant, bool)>>);

/// Lifetime of an answer. The addresses of a host seldom change. An address that has just been
/// added leads a tunnel back to us for no longer than this.
const LOCAL_ADDRESS_TTL: Duration = Duration::from_secs(10);
/// Limit of cached answers, each of about 64 bytes: half a mebibyte.
const LOCAL_ADDRESSES_MAX: usize = 8192;

impl LocalAddressCache {
    /// Returns whether `ip` belongs to this host, by a valid cached answer or by a new `lookup`.
    /// Only the answer of a route is cached.
    ///
    /// # Errors
    /// The `lookup` has failed. The address is not trusted then.
    fn is_local(
        &self,
        ip: IpAddr,
        now: Instant,
        lookup: impl FnOnce(IpAddr) -> io::Result<Option<bool>>,
    ) -> io::Result<bool> {
        if let Some((since, answer)) = self.0.lock().get(&ip).copied()
            && now.saturating_duration_since(since) < LOCAL_ADDRESS_TTL
        {
            return Ok(answer);
        }
        // Without a route the dial fails as well.
        let Some(answer) = lookup(ip)? else {
            return Ok(false);
        };
        let mut answers = self.0.lock();
        if answers.len() >= LOCAL_ADDRESSES_MAX {
            answers.clear();
        }
        answers.insert(ip, (now, answer));
        Ok(answer)
    }
}

/// Returns whether the kernel delivers `ip` to this host; `None` without a route. The source that
/// it chooses for an own address is the address itself. Connecting a UDP socket sends nothing.
fn is_local_address(ip: IpAddr) -> io::Result<Option<bool>> {
    if ip.is_loopback() {
        return Ok(Some(true));
    }
    let any = match ip {
        IpAddr::V4(_) => IpAddr::from([0; 4]),
        IpAddr::V6(_) => IpAddr::from([0; 16]),
    };
    let socket = UdpSocket::bind((any, 0))?;
    match socket.connect((ip, 9)) {
        Err(error) if is_without_route(&error) => return Ok(None),
        connected => connected?,
    }
    Ok(Some(socket.local_addr()?.ip() == ip))
}

/// Returns true if a connect has failed because there is no route, or one of the types
/// `unreachable`, `blackhole` (EINVAL) or `prohibit` (EACCES).
fn is_without_route(error: &io::Error) -> bool {
    let error = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(error, Some(Errno::NETUNREACH | Errno::HOSTUNREACH | Errno::INVAL | Errno::ACCESS))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn what_no_endpoint_can_be_is_denied_and_pods_are_not() {
        let deny = DenyList::default();
        let denied = "127.0.0.1:80 127.9.9.9:15008 [::1]:80 [::ffff:127.0.0.1]:80 \
            169.254.169.254:80 [::ffff:169.254.169.254]:80 [fe80::1]:80 [fd00:ec2::254]:80 \
            [fd20:ce::254]:80 100.100.100.200:80 168.63.129.16:80 192.0.0.192:80 \
            [64:ff9b::169.254.169.254]:80 \
            [::127.0.0.1]:80 [64:ff9b:1::127.0.0.1]:80 [2002:a9fe:a9fe::1]:80 \
            [fd00:ec2::253]:80 [fd00:ec2:1::1]:80 [::ffff:0:127.0.0.1]:80 \
            [::ffff:0:169.254.169.254]:80 [2001::1]:80 \
            [2001:0:4136:e378:8000:63bf:3fff:fdd2]:80 240.0.0.1:80 [::ffff:254.1.2.3]:80 \
            [64:ff9b::240.0.0.1]:80 [64:ff9b:1:7f00:0:100::]:80 [64:ff9b:1:7f:0:1::]:80 \
            [64:ff9b:1:abcd:a9:fea9:fe00::]:80 [64:ff9b:1:0:7f:0:100:0]:80 \
            [fd00::5efe:127.0.0.1]:80 [2001:db8::200:5efe:169.254.169.254]:80 0.0.0.0:80 \
            0.1.2.3:80 [::]:80 224.0.0.1:80 255.255.255.255:80 [ff02::1]:80";
        for text in denied.split_whitespace() {
            assert!(deny.denies(address(text)).is_some(), "{text}");
        }
        let permitted = "10.0.0.1:15008 192.168.1.1:80 [fd00::1]:15008 223.255.255.255:80 \
            [fd00:ec3::254]:80 [2001:1::1]:80 [2002:a00:1::1]:80 [::ffff:0:10.0.0.1]:80 \
            [64:ff9b::10.0.0.1]:80 [64:ff9b:1::10.0.0.1]:80 [64:ff9b:1:a00:0:100::]:80";
        for text in permitted.split_whitespace() {
            assert_eq!(deny.denies(address(text)), None, "{text}");
        }
    }

    #[test]
    fn allow_opens_the_fixed_list_and_never_our_own_listeners() {
        let allow = vec!["127.0.0.0/8".parse().expect("a network")];
        let deny = DenyList::new(allow, vec![address("127.0.0.1:15008"), address("[::]:15021")]);
        assert_eq!(deny.denies(address("127.0.0.2:15008")), None);
        assert!(deny.denies(address("127.0.0.1:15008")).is_some());
        assert!(deny.denies(address("[::ffff:127.0.0.1]:15008")).is_some());
        assert!(deny.denies(address("127.0.0.9:15021")).is_some(), "a wildcard takes them all");
        assert_eq!(deny.denies(address("192.0.2.1:15021")), None, "the port alone is no loop");
    }

    #[test]
    fn the_kernel_is_asked_once_in_ten_seconds_and_failures_are_not_kept() {
        let (answers, start) = (LocalAddressCache::default(), Instant::now());
        let ip = IpAddr::from([192, 0, 2, 1]);
        let has = |after, answer: io::Result<Option<bool>>| {
            let mut requested = false;
            let ask = |_| {
                requested = true;
                answer
            };
            let has = answers.is_local(ip, start + Duration::from_secs(after), ask);
            (has.ok(), requested)
        };
        let failed = || Err(io::ErrorKind::OutOfMemory.into());
        assert_eq!(has(0, failed()), (None, true));
        assert_eq!(has(0, Ok(None)), (Some(false), true), "no failure was kept");
        assert_eq!(has(0, Ok(Some(false))), (Some(false), true));
        assert_eq!(has(9, Ok(Some(true))), (Some(false), false));
        assert_eq!(has(10, Ok(Some(true))), (Some(true), true));
        assert_eq!(has(19, Ok(Some(false))), (Some(true), false));
        assert_eq!(has(20, failed()), (None, true));
    }

    #[test]
    fn routes_that_lead_nowhere_are_no_routes_and_a_lack_of_descriptors_is_none() {
        let is_none = |error: Errno| is_without_route(&error.into());
        for error in [Errno::NETUNREACH, Errno::HOSTUNREACH, Errno::INVAL, Errno::ACCESS] {
            assert!(is_none(error), "{error}");
        }
        for error in [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::PERM] {
            assert!(!is_none(error), "{error}");
        }
    }

    /// Returns whether a dial completes the handshake before it has sent a byte, and checks that
    /// the connection is accepted afterwards.
    async fn completes_without_bytes(ack: FirstAck) -> bool {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("a listener");
        let address = listener.local_addr().expect("an address");
        let stream = connect_socket(address, ack).await.expect("a connection");
        let is_complete = listener.accept().is_ok();
        assert_eq!(stream.try_write(b"hello").expect("room"), 5);
        while !is_complete && listener.accept().is_err() {
            tokio::task::yield_now().await;
        }
        is_complete
    }

    #[tokio::test]
    async fn the_first_acknowledgement_is_sent_with_the_bytes_that_follow_at_once() {
        // A process that is stopped for 200 ms in between gets the other result.
        let (mut is_sent, mut is_saved) = (false, false);
        for _ in 0..20 {
            is_sent |= completes_without_bytes(FirstAck::Alone).await;
            is_saved |= !completes_without_bytes(FirstAck::WithBytes).await;
        }
        assert!(is_sent && is_saved, "{is_sent} {is_saved}");
    }

    #[test]
    fn answers_are_bounded() {
        let answers = LocalAddressCache::default();
        for ip in 0..3 * u32::try_from(LOCAL_ADDRESSES_MAX).expect("few") {
            let ip = IpAddr::V4(Ipv4Addr::from_bits(ip));
            let is_local = answers.is_local(ip, Instant::now(), |_| Ok(Some(false)));
            assert_eq!(is_local.ok(), Some(false));
        }
        assert!(answers.0.lock().len() <= LOCAL_ADDRESSES_MAX);
    }
}
