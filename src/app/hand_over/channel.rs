//! Packets with descriptors between two processes of one user (`unix(7)`: SOCK_SEQPACKET and
//! SCM_RIGHTS).

use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
    SocketType,
};
use rustix::{net, process};
use serde::{Deserialize, Serialize};

/// Version of the messages. Both processes must have the same.
const VERSION: u32 = 2;
/// Shortest wait for a packet; zero would mean no deadline (`socket(7)`).
const WAIT_MIN: Duration = Duration::from_millis(1);
const PACKET_BYTES_MAX: usize = 16 * 1024;
/// Limit of the descriptors in one packet; the kernel's is 253.
const DESCRIPTORS_MAX: usize = 64;
/// Limit of the sockets of a process: more than any configuration has listeners.
const SOCKETS_MAX: usize = 4096;
/// Deadline for a packet that the other process owes.
pub(super) const PACKET_DEADLINE: Duration = Duration::from_secs(10);
/// Mode bits with which another user could replace a socket in a folder.
const WRITABLE_BY_OTHERS: u32 = 0o022;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::app) enum Transport {
    Tcp,
    Udp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(in crate::app) struct SocketName {
    pub(in crate::app) transport: Transport,
    pub(in crate::app) address: SocketAddr,
}

#[derive(Debug)]
pub(in crate::app) struct NamedSocket {
    pub(in crate::app) name: SocketName,
    pub(in crate::app) socket: OwnedFd,
}

/// Packet between the two processes.
#[derive(Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub(super) enum Message {
    /// Sockets of the predecessor, whose descriptors are attached in the same order.
    Sockets { version: u32, names: Vec<SocketName>, has_more: bool },
    /// The successor lacks only its listeners.
    Prepared,
    /// The successor may accept.
    Allowed,
    /// The successor serves.
    Ready,
    /// The predecessor closes its sockets.
    Released,
    /// The predecessor goes on.
    Refused { error: String },
}

/// Connection between the two processes.
#[derive(Debug)]
pub(super) struct Channel(OwnedFd);

/// Socket on which a process waits for its successor.
#[derive(Debug)]
pub(super) struct Server {
    socket: OwnedFd,
    /// Path that the earlier process has.
    path: PathBuf,
    /// Its own path until it has that one.
    own: Option<PathBuf>,
}

impl Server {
    /// Listens on a path of its own beside this one, which an earlier process may have.
    pub(super) fn bind(path: &Path) -> anyhow::Result<Self> {
        let mut own = path.as_os_str().to_owned();
        own.push(format!(".{}", std::process::id()));
        let own = PathBuf::from(own);
        // One of this name is of a process that has ended.
        let _ = fs::remove_file(&own);
        let server = Self { socket: seqpacket()?, path: path.to_owned(), own: Some(own.clone()) };
        let bound = || -> io::Result<()> {
            net::bind(&server.socket, &SocketAddrUnix::new(&own)?)?;
            net::listen(&server.socket, 1)?;
            Ok(())
        };
        bound().with_context(|| cannot_listen(path))?;
        Ok(server)
    }

    /// Takes the path from the earlier process.
    pub(super) fn replace(&mut self) -> anyhow::Result<()> {
        if let Some(own) = self.own.take() {
            let renamed = fs::rename(&own, &self.path);
            let renamed = renamed.inspect_err(|_| drop(fs::remove_file(&own)));
            renamed.with_context(|| cannot_listen(&self.path))?;
        }
        Ok(())
    }

    /// Waits for a process of the same user.
    pub(super) fn accept(&self) -> anyhow::Result<Channel> {
        let channel = Channel(net::accept_with(&self.socket, SocketFlags::CLOEXEC)?);
        channel.check_user()?;
        Ok(channel)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(own) = &self.own {
            drop(fs::remove_file(own));
        }
    }
}

fn cannot_listen(path: &Path) -> String {
    format!("cannot listen on {} (`--take-over`)", path.display())
}

impl Channel {
    /// Connects to the process that waits on a path. `None` if there is none.
    pub(super) fn connect(path: &Path) -> anyhow::Result<Option<Self>> {
        let socket = seqpacket()?;
        match net::connect(&socket, &SocketAddrUnix::new(path)?) {
            Ok(()) => {}
            Err(Errno::NOENT | Errno::CONNREFUSED) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        let channel = Self(socket);
        channel.check_user()?;
        Ok(Some(channel))
    }

    fn check_user(&self) -> anyhow::Result<()> {
        let user = socket_peercred(&self.0)?.uid;
        ensure!(user == process::geteuid(), "the other process is of another user");
        Ok(())
    }

    pub(super) fn send_sockets(&self, sockets: &[NamedSocket]) -> anyhow::Result<()> {
        let mut rest = sockets;
        loop {
            let (packet, later) = rest.split_at(rest.len().min(DESCRIPTORS_MAX));
            rest = later;
            let names = packet.iter().map(|socket| socket.name).collect();
            let message = Message::Sockets { version: VERSION, names, has_more: !rest.is_empty() };
            let descriptors: Vec<_> = packet.iter().map(|one| one.socket.as_fd()).collect();
            self.send_with(&message, &descriptors)?;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    pub(super) fn receive_sockets(&self) -> anyhow::Result<Vec<NamedSocket>> {
        let mut sockets = Vec::new();
        loop {
            let (message, descriptors) = self.receive(PACKET_DEADLINE)?;
            if let Message::Refused { error } = message {
                bail!("it goes on: {error}");
            }
            let Message::Sockets { version, names, has_more } = message else {
                bail!("the process that serves sent {message:?} in place of its sockets");
            };
            ensure!(version == VERSION, "the process that serves has protocol version {version}");
            ensure!(names.len() == descriptors.len(), "a packet lacks descriptors");
            ensure!(sockets.len() + names.len() <= SOCKETS_MAX, "it has too many sockets");
            let named = names.into_iter().zip(descriptors);
            sockets.extend(named.map(|(name, socket)| NamedSocket { name, socket }));
            if !has_more {
                return Ok(sockets);
            }
        }
    }

    /// Receives a message without content.
    ///
    /// # Errors
    /// The other process refuses, sent something else, or has ended.
    pub(super) fn expect(&self, wanted: &Message, deadline: Duration) -> anyhow::Result<()> {
        let (message, _) = self.receive(deadline)?;
        if let Message::Refused { error } = message {
            bail!("{error}");
        }
        ensure!(message == *wanted, "the other process sent {message:?}");
        Ok(())
    }

    /// Receives a message that the other process has sent already. Further sends of it fail.
    pub(super) fn expect_last(&self, wanted: &Message) -> anyhow::Result<()> {
        net::shutdown(&self.0, Shutdown::Read)?;
        self.expect(wanted, PACKET_DEADLINE)
    }

    /// Waits until the other process closes the channel.
    pub(super) fn wait_for_end(&self) {
        // An error and the deadline end the wait too.
        let _ = self.receive(PACKET_DEADLINE);
    }

    /// Sends a message without descriptors.
    pub(super) fn send(&self, message: &Message) -> anyhow::Result<()> {
        self.send_with(message, &[])
    }

    fn send_with(&self, message: &Message, descriptors: &[BorrowedFd<'_>]) -> anyhow::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        set_socket_timeout(&self.0, Timeout::Send, Some(PACKET_DEADLINE))?;
        let parts = [IoSlice::new(&bytes)];
        retry_on_intr(|| net::sendmsg(&self.0, &parts, &mut control, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    fn receive(&self, deadline: Duration) -> anyhow::Result<(Message, Vec<OwnedFd>)> {
        let mut bytes = vec![0; PACKET_BYTES_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut room = [IoSliceMut::new(&mut bytes)];
        let end = Instant::now() + deadline;
        // The kernel does not restart a call with a timeout after a signal (`signal(7)`).
        let received = retry_on_intr(|| {
            let left = end.saturating_duration_since(Instant::now()).max(WAIT_MIN);
            set_socket_timeout(&self.0, Timeout::Recv, Some(left))?;
            net::recvmsg(&self.0, &mut room, &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        let descriptors = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let descriptors: Vec<_> = descriptors.flatten().collect();
        ensure!(received.bytes > 0, "the other process has ended");
        // Descriptors are missing if this process is at its limit of open files.
        let is_cut = received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
        ensure!(!is_cut, "a packet is too large, or this process is out of descriptors");
        Ok((serde_json::from_slice(&bytes[..received.bytes])?, descriptors))
    }
}

/// Checks that no other user can replace a socket in its folder.
pub(super) fn check_folder(path: &Path) -> anyhow::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or_else(|| Path::new("."));
    let shown = folder.display();
    let found = folder.metadata().with_context(|| {
        format!(
            "cannot use {shown} (`--take-over`); create the folder for this user, as by `install \
             -d -m 755 {shown}`"
        )
    })?;
    let is_own = [0, process::geteuid().as_raw()].contains(&found.uid());
    ensure!(
        found.is_dir() && is_own && found.mode() & WRITABLE_BY_OTHERS == 0,
        "another user may write to {shown} (`--take-over`): write the path of a socket in a folder \
         of this user with mode 0755 or less, such as /run/strait/take-over"
    );
    Ok(())
}

fn seqpacket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    Ok(net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_has_the_path_of_the_earlier_one_only_after_it_replaced_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("take-over");
        let mut first = Server::bind(&path).expect("a server");
        first.replace().expect("a free path");
        let second = Server::bind(&path).expect("a second server");
        let reached = |server: &Server| {
            let channel = Channel::connect(&path).expect("a path").expect("a server");
            channel.send(&Message::Ready).expect("sent");
            server.accept().expect("a channel");
        };
        reached(&first);
        drop(second);
        reached(&first);
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
        let mut third = Server::bind(&path).expect("a third server");
        third.replace().expect("the path");
        reached(&third);
    }

    #[test]
    fn a_process_that_gives_up_has_the_answer_or_the_other_one_cannot_send_it() {
        for is_answered in [false, true] {
            let kind = SocketType::SEQPACKET;
            let pair = net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
            let (own, other) = pair.expect("a pair");
            let (own, other) = (Channel(own), Channel(other));
            if is_answered {
                other.send(&Message::Released).expect("sent");
            }
            assert_eq!(own.expect_last(&Message::Released).is_ok(), is_answered);
            assert!(other.send(&Message::Released).is_err());
        }
    }
}
