//! Number of bytes of a TCP socket that its other side has not acknowledged, FIN included.
//!
//! `ioctl(SIOCOUTQ)` returns this number, but no maintained crate wraps it without `unsafe`.
//! `sock_diag(7)` has it as `idiag_wqueue`, and is a message on a netlink socket: the kernel
//! looks the socket up by its addresses and answers before `send` returns. Each thread keeps one
//! netlink socket.

use std::cell::Cell;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

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
/// Buffer size for an answer: 16 bytes of header, `struct inet_diag_msg` of 72, and attributes
/// that are truncated.
const ANSWER_BYTES: usize = 256;

thread_local! {
    /// Netlink socket of the thread, absent while it is in use and after a failure.
    static SOCKET: Cell<Option<OwnedFd>> = const { Cell::new(None) };
}

/// Returns the number of bytes that the other side of `stream` has not acknowledged; 0 for a
/// socket that was closed or reset. FIN counts as a byte.
///
/// # Errors
/// The kernel has no `sock_diag`, or a sandbox forbids it.
pub fn unacknowledged_bytes(stream: &TcpStream) -> io::Result<u32> {
    let remote = match stream.peer_addr() {
        Err(error) if error.kind() == io::ErrorKind::NotConnected => return Ok(0),
        remote => remote?,
    };
    let request = request(stream.local_addr()?, remote);
    let socket = SOCKET.take().map_or_else(open, Ok)?;
    send(&socket, &request, SendFlags::DONTWAIT)?;
    let mut answer = [0; ANSWER_BYTES];
    recv(&socket, &mut answer[..], RecvFlags::DONTWAIT)?;
    // After a failure the socket has been dropped, so an answer always belongs to its request.
    SOCKET.set(Some(socket));
    parse(&answer)
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
    // No extensions, and padding.
    request.extend([family.as_raw().to_ne_bytes()[0], protocol.to_ne_bytes()[0]]);
    request.extend([0; 2]);
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

fn parse(answer: &[u8; ANSWER_BYTES]) -> io::Result<u32> {
    let word = |at: usize| {
        let mut word = [0; 4];
        word.copy_from_slice(&answer[at..at + 4]);
        u32::from_ne_bytes(word)
    };
    match u16::from_ne_bytes([answer[4], answer[5]]) {
        BY_FAMILY => Ok(word(76)),
        ERROR => match io::Error::from_raw_os_error(word(16).cast_signed().wrapping_neg()) {
            gone if gone.raw_os_error() == Some(Errno::NOENT.raw_os_error()) => Ok(0),
            error => Err(error),
        },
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;

    use socket2::SockRef;
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;

    use super::*;

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
            assert_eq!(unacknowledged_bytes(&near).expect("an answer"), 0);
            let mut written = 0;
            while let Ok(bytes) = near.try_write(&[7; 16 * 1024]) {
                written += bytes;
            }
            let before = unacknowledged_bytes(&near).expect("an answer");
            assert!(before > 0 && written >= before as usize, "{before}");
            let shut = SockRef::from(&near).shutdown(Shutdown::Write);
            shut.expect("an open socket");
            assert_eq!(unacknowledged_bytes(&near).expect("an answer"), before + 1);
            let read = far.read_to_end(&mut Vec::new()).await;
            assert_eq!(read.expect("all bytes"), written);
            while unacknowledged_bytes(&near).expect("an answer") > 0 {
                // deadline: a kernel may delay the acknowledgement of FIN by 40 ms.
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
            SockRef::from(&far).set_linger(Some(std::time::Duration::ZERO)).expect("an option");
            drop(far);
            assert_eq!(unacknowledged_bytes(&near).expect("an answer"), 0, "reset");
        }
    }
}
