//! Sources of listening sockets: those that another process has opened, and new ones.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};

use listenfd::ListenFd;
use parking_lot::Mutex;
use socket2::{SockRef, Socket, Type};
use tracing::warn;

use crate::datapath::accept;

pub(in crate::app) use super::channel::{NamedSocket, SocketName, Transport};

#[derive(Debug, Default)]
pub(in crate::app) struct SocketSource {
    inherited: Mutex<Vec<NamedSocket>>,
    /// Sockets that systemd has opened, and keeps open for as long as its unit is active.
    of_systemd: Vec<SocketName>,
    /// Duplicates of the sockets that stay open until the end of the process, for a successor.
    /// `None` if there will be no successor.
    kept: Mutex<Option<Vec<NamedSocket>>>,
}

#[derive(Debug)]
pub(in crate::app) struct Reserved {
    pub(in crate::app) socket: Socket,
    /// True if another process has a descriptor of the socket, so that only a close may end it
    /// here.
    pub(in crate::app) is_inherited: bool,
}

impl SocketSource {
    /// Creates a source of these sockets of a predecessor, and those of systemd (`LISTEN_FDS`).
    /// `keeps` is true if there may be a successor.
    pub(super) fn new(mut inherited: Vec<NamedSocket>, keeps: bool) -> Self {
        inherited.retain(|one| match name_of(SockRef::from(&one.socket)) {
            Ok(name) if name == one.name => true,
            found => {
                warn!(socket = ?one.name, ?found, "the predecessor's socket is not used");
                false
            }
        });
        let passed = sockets_of_systemd();
        let of_systemd = passed.iter().map(|socket| socket.name).collect();
        inherited.extend(passed);
        let kept = Mutex::new(keeps.then(Vec::new));
        Self { inherited: Mutex::new(inherited), of_systemd, kept }
    }

    /// Returns a listening socket that stays open until the end of the process.
    ///
    /// # Errors
    /// The address is in use, or does not belong to this host.
    pub(in crate::app) fn tcp(&self, address: SocketAddr) -> io::Result<TcpListener> {
        self.open(Transport::Tcp, address, accept::bind)
    }

    /// Returns a socket for datagrams that stays open until the end of the process.
    pub(in crate::app) fn udp(&self, address: SocketAddr) -> io::Result<UdpSocket> {
        self.open(Transport::Udp, address, UdpSocket::bind)
    }

    fn open<S: From<OwnedFd> + AsFd>(
        &self,
        transport: Transport,
        address: SocketAddr,
        bind: impl Fn(SocketAddr) -> io::Result<S>,
    ) -> io::Result<S> {
        let inherited = self.take(transport, address).map(S::from);
        let socket = inherited.map_or_else(|| bind(address), Ok)?;
        if let Some(kept) = &mut *self.kept.lock() {
            let of = socket.as_fd().try_clone_to_owned()?;
            kept.push(NamedSocket { name: name_of(SockRef::from(&of))?, socket: of });
        }
        Ok(socket)
    }

    /// Reserves the address of a listener, which may be removed while the process runs.
    pub(in crate::app) fn reserve(&self, address: SocketAddr) -> io::Result<Reserved> {
        match self.take(Transport::Tcp, address) {
            Some(inherited) => Ok(Reserved { socket: inherited.into(), is_inherited: true }),
            None => Ok(Reserved { socket: accept::reserve(address)?, is_inherited: false }),
        }
    }

    /// Returns an inherited socket of a removed listener, which another one of the same address
    /// may use.
    pub(in crate::app) fn give_back(&self, address: SocketAddr, socket: OwnedFd) {
        let name = SocketName { transport: Transport::Tcp, address };
        self.inherited.lock().push(NamedSocket { name, socket });
    }

    /// Closes the inherited sockets that nothing uses, and returns their names. Those of systemd
    /// stay open: a listener that is opened later could not bind their addresses.
    pub(in crate::app) fn close_unused(&self) -> Vec<SocketName> {
        let mut inherited = self.inherited.lock();
        let names = inherited.iter().map(|socket| socket.name).collect();
        inherited.retain(|socket| self.of_systemd.contains(&socket.name));
        names
    }

    /// Returns duplicates of the sockets that stay open.
    pub(super) fn kept(&self) -> io::Result<Vec<NamedSocket>> {
        let kept = self.kept.lock();
        let sockets = kept.iter().flatten();
        sockets
            .map(|one| Ok(NamedSocket { name: one.name, socket: one.socket.try_clone()? }))
            .collect()
    }

    /// Closes the duplicates of the sockets that stay open.
    pub(super) fn release(&self) {
        *self.kept.lock() = None;
    }

    /// Takes an inherited socket. The IPv6 wildcard may have become that of IPv4.
    fn take(&self, transport: Transport, address: SocketAddr) -> Option<OwnedFd> {
        let mut inherited = self.inherited.lock();
        let of = |address| SocketName { transport, address };
        let mut names = vec![of(address)];
        if address.ip() == Ipv6Addr::UNSPECIFIED {
            names.push(of((Ipv4Addr::UNSPECIFIED, address.port()).into()));
        }
        let place = names
            .iter()
            .find_map(|name| inherited.iter().position(|socket| socket.name == *name))?;
        Some(inherited.swap_remove(place).socket)
    }
}

/// Returns the name of a socket that receives connections or datagrams.
fn name_of(socket: SockRef<'_>) -> io::Result<SocketName> {
    let transport = match socket.r#type()? {
        Type::STREAM if socket.is_listener()? => Transport::Tcp,
        Type::DGRAM => Transport::Udp,
        _ => return Err(io::Error::other("not a listening socket")),
    };
    let address = socket.local_addr()?.as_socket();
    let address = address.ok_or_else(|| io::Error::other("not an address of IP"))?;
    Ok(SocketName { transport, address })
}

/// Returns the sockets that systemd has opened (`sd_listen_fds(3)`).
fn sockets_of_systemd() -> Vec<NamedSocket> {
    let mut passed = ListenFd::from_env();
    let sockets = (0..passed.len()).filter_map(|index| {
        let socket = match passed.take_tcp_listener(index) {
            Ok(socket) => socket.map(OwnedFd::from),
            Err(_) => passed.take_udp_socket(index).ok().flatten().map(OwnedFd::from),
        };
        let named = socket.and_then(|socket| {
            let at = SockRef::from(&socket);
            at.set_nonblocking(true).ok()?;
            Some(NamedSocket { name: name_of(at).ok()?, socket })
        });
        if named.is_none() {
            warn!(index, "systemd passed a socket that is neither listening TCP nor UDP");
        }
        named
    });
    sockets.collect()
}
