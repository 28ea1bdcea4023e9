//! Counters of a TCP socket in the kernel.
//!
//! `getsockopt(TCP_INFO)` and `ioctl(SIOCOUTQ)` return them, but no maintained crate wraps either
//! without `unsafe`. `sock_diag(7)` has them too, and is a message on a netlink socket: the kernel
//! looks the socket up by its addresses and answers before `send` returns. Each thread keeps one
//! netlink socket.

use std::cell::Cell;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto, netlink, recv, send,
    socket_with,
};
use tokio::net::TcpStream;

/// Length of `struct nlmsghdr` with `struct inet_diag_req_v2` (linux/inet_diag.h).
const REQUEST_BYTES: u32 = 16 + 56;
/// `SOCK_DIAG_BY_FAMILY` (linux/sock_diag.h), the type of the request and of its answer.
const BY_FAMILY: u16 = 20;
/// `NLMSG_ERROR` and `NLM_F_REQUEST` (linux/netlink.h).
const ERROR: u16 = 2;
const REQUEST: u16 = 1;
/// `INET_DIAG_INFO` (linux/inet_diag.h), the attribute with `struct tcp_info` (linux/tcp.h).
const INFO: u16 = 2;
/// Buffer size for an answer, of which Linux 6.18 fills 408 bytes.
const ANSWER_BYTES: usize = 512;
/// Size of its parts before the attributes: `struct nlmsghdr` and `struct inet_diag_msg`.
const FIXED_BYTES: usize = 16 + 72;

thread_local! {
    /// Netlink socket of the thread, absent while it is in use and after a failure.
    static SOCKET: Cell<Option<OwnedFd>> = const { Cell::new(None) };
}

/// Counters of a TCP socket. All are 0 for a socket that was closed or reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpCounters {
    /// Bytes that the other side has not acknowledged. FIN counts as a byte.
    pub unacknowledged: u32,
    /// Retransmissions by timeout since bytes were last acknowledged.
    pub retransmissions: u8,
    /// Time since the last acknowledgement of any kind.
    pub silence: Duration,
    /// Window of the other side in bytes. 0 before Linux 5.4 too.
    pub window: u32,
    /// Bytes that were received without a gap.
    pub received_bytes: u64,
    /// Received packets with bytes, also those behind a gap.
    pub received_packets: u32,
}

impl TcpCounters {
    /// Returns the counters of a socket of this process.
    ///
    /// # Errors
    /// The kernel has no `sock_diag`, or a sandbox forbids it.
    pub fn of(stream: &TcpStream) -> io::Result<Self> {
        match stream.peer_addr() {
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(Self::default()),
            remote => Self::between(stream.local_addr()?, remote?),
        }
    }

    /// Returns the counters of the socket between these addresses.
    ///
    /// # Errors
    /// As for [`Self::of`].
    pub fn between(local: SocketAddr, remote: SocketAddr) -> io::Result<Self> {
        let request = request(local, remote);
        let socket = SOCKET.take().map_or_else(open, Ok)?;
        send(&socket, &request, SendFlags::DONTWAIT)?;
        let mut answer = [0; ANSWER_BYTES];
        recv(&socket, &mut answer[..], RecvFlags::DONTWAIT)?;
        // After a failure the socket has been dropped, so an answer always belongs to its request.
        SOCKET.set(Some(socket));
        parse(&answer)
    }

    /// Describes why a connection makes no progress, as far as its counters show it.
    pub fn describe_stall(&self) -> String {
        let Self { unacknowledged, retransmissions, received_bytes, .. } = self;
        match self {
            Self { retransmissions: 1.., .. } => format!(
                "{unacknowledged} bytes to the other side were sent again {retransmissions} times \
                 and not acknowledged; long packets to it may be lost (path MTU)"
            ),
            Self { received_packets: 0, .. } => "no byte of the other side arrived".to_owned(),
            Self { received_bytes: 0, .. } => "the first bytes of the other side are lost, and \
                 later ones arrived; long packets from it may be lost (path MTU)"
                .to_owned(),
            _ => format!(
                "the other side has acknowledged everything, and stopped after {received_bytes} \
                 bytes; long packets from it may be lost (path MTU)"
            ),
        }
    }
}

/// Returns the text `what` about a missed deadline, with the description of the stall.
pub fn explain_stall(what: &str, counters: io::Result<TcpCounters>) -> String {
    match counters {
        Ok(counters) => format!("{what}: {}", counters.describe_stall()),
        Err(_) => what.to_owned(),
    }
}

fn open() -> rustix::io::Result<OwnedFd> {
    socket_with(
        AddressFamily::NETLINK,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        Some(netlink::SOCK_DIAG),
    )
}

/// Returns the request for the socket between these addresses, in any state.
fn request(local: SocketAddr, remote: SocketAddr) -> Vec<u8> {
    let mut request = Vec::new();
    request.extend(REQUEST_BYTES.to_ne_bytes());
    request.extend(BY_FAMILY.to_ne_bytes());
    request.extend(REQUEST.to_ne_bytes());
    // Sequence number, and sender port, which the kernel fills in.
    request.extend([0; 8]);
    let family = match local {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let protocol = ipproto::TCP.as_raw().get();
    request.extend([family.as_raw().to_ne_bytes()[0], protocol.to_ne_bytes()[0]]);
    // Bit of the attribute, and padding.
    request.extend([1 << (INFO - 1), 0]);
    request.extend(u32::MAX.to_ne_bytes());
    request.extend(local.port().to_be_bytes());
    request.extend(remote.port().to_be_bytes());
    for address in [local, remote] {
        let mut field = [0; 16];
        match address.ip() {
            IpAddr::V4(ip) => field[..4].copy_from_slice(&ip.octets()),
            IpAddr::V6(ip) => field = ip.octets(),
        }
        request.extend(field);
    }
    let interface = match remote {
        SocketAddr::V4(_) => 0,
        SocketAddr::V6(remote) => remote.scope_id(),
    };
    request.extend(interface.to_ne_bytes());
    // INET_DIAG_NOCOOKIE.
    request.extend([0xff; 8]);
    request
}

fn parse(answer: &[u8; ANSWER_BYTES]) -> io::Result<TcpCounters> {
    match u16::from_ne_bytes([answer[4], answer[5]]) {
        BY_FAMILY => {
            let info = info(answer).unwrap_or_default();
            let silence = u64::from(word(info, 56));
            Ok(TcpCounters {
                unacknowledged: word(answer, 76),
                retransmissions: info.get(2).copied().unwrap_or_default(),
                silence: Duration::from_millis(silence),
                window: word(info, 228),
                received_bytes: field(info, 128).map_or(0, u64::from_ne_bytes),
                received_packets: word(info, 152),
            })
        }
        ERROR => {
            let code = word(answer, 16).cast_signed().wrapping_neg();
            match io::Error::from_raw_os_error(code) {
                _ if code == Errno::NOENT.raw_os_error() => Ok(TcpCounters::default()),
                error => Err(error),
            }
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Returns `struct tcp_info` of an answer.
fn info(answer: &[u8]) -> Option<&[u8]> {
    let mut rest = answer.get(FIXED_BYTES..)?;
    loop {
        // `struct nlattr`: its length, its type, and then the value up to a multiple of 4.
        let [length, kind] = [0, 2].map(|at| field(rest, at).map(u16::from_ne_bytes));
        let length = usize::from(length?).max(4);
        if kind? == INFO {
            return rest.get(4..length.min(rest.len()));
        }
        rest = rest.get(length.next_multiple_of(4)..)?;
    }
}

/// Returns the bytes of a field, unless a shorter structure of an older kernel lacks it.
fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

fn word(bytes: &[u8], at: usize) -> u32 {
    field(bytes, at).map_or(0, u32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;

    use socket2::SockRef;
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;

    use super::*;

    fn counters(stream: &TcpStream) -> TcpCounters {
        TcpCounters::of(stream).expect("an answer")
    }

    #[tokio::test]
    async fn a_byte_counts_until_the_other_side_has_acknowledged_it_and_so_does_fin() {
        for ip in ["127.0.0.1", "::1"] {
            let ip: IpAddr = ip.parse().expect("an address");
            let Ok(listener) = TcpListener::bind((ip, 0)).await else {
                assert!(ip.is_ipv6(), "a host may have no IPv6");
                continue;
            };
            // A small receive buffer, so that most of the written bytes stay unsent.
            SockRef::from(&listener).set_recv_buffer_size(1).expect("a buffer");
            let address = listener.local_addr().expect("an address");
            let near = TcpStream::connect(address).await.expect("a connection");
            let (mut far, _) = listener.accept().await.expect("a connection");
            let new = counters(&near);
            assert_eq!((new.unacknowledged, new.retransmissions), (0, 0));
            assert!(new.window > 0, "{new:?}");
            let mut written = 0;
            while let Ok(bytes) = near.try_write(&[7; 16 * 1024]) {
                written += bytes;
            }
            let before = counters(&near).unacknowledged;
            assert!(before > 0 && written >= before as usize, "{before}");
            let shut = SockRef::from(&near).shutdown(Shutdown::Write);
            shut.expect("an open socket");
            assert_eq!(counters(&near).unacknowledged, before + 1);
            let read = far.read_to_end(&mut Vec::new()).await;
            assert_eq!(read.expect("all bytes"), written);
            let received = counters(&far);
            // FIN counts here too.
            assert_eq!(received.received_bytes, written as u64 + 1);
            assert!(received.received_packets > 0, "{received:?}");
            while counters(&near).unacknowledged > 0 {
                // deadline: a kernel may delay the acknowledgement of FIN by 40 ms.
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            SockRef::from(&far).set_linger(Some(Duration::ZERO)).expect("an option");
            drop(far);
            assert_eq!(counters(&near), TcpCounters::default(), "reset");
        }
    }

    #[test]
    fn a_stall_is_described_as_far_as_the_counters_show_it() {
        let new = TcpCounters { unacknowledged: 2000, ..TcpCounters::default() };
        let (late, some) = (TcpCounters { received_packets: 1, ..new }, 517);
        for (counters, text) in [
            (new, "no byte of the other side arrived"),
            (TcpCounters { retransmissions: 4, ..late }, "2000 bytes to the other side were sent"),
            (late, "the first bytes of the other side are lost"),
            (TcpCounters { received_bytes: some, ..late }, "stopped after 517 bytes"),
        ] {
            let found = explain_stall("late", Ok(counters));
            assert!(found.starts_with("late: ") && found.contains(text), "{found}");
        }
        assert_eq!(explain_stall("late", Err(io::ErrorKind::Unsupported.into())), "late");
    }
}
