//! Stage 1: listening sockets, and the hand-over of accepted sockets to workers.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SocketFlags, acceptfrom_with};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::io::Interest;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tracing::{debug, warn};

use crate::limits::turns::{CurrentWork, Work};
use crate::limits::{Place, Source};
use crate::telemetry::{AcceptError, connection_refused};

use super::DataPath;
use super::limits::descriptors::{Descriptor, ListenerReserve};
use super::limits::load::{LoadGuard, WorkerLoad};
use super::listener::Listener;

#[derive(Debug)]
pub struct AcceptedConnection {
    /// The socket, with its options set.
    pub stream: TcpStream,
    /// Address of the peer; an IPv4-mapped IPv6 address is converted to IPv4.
    pub address: SocketAddr,
    /// Handshake slot, held until the handshake of the connection has completed.
    pub handshake: Place,
    /// Load and descriptor, held while the connection lives.
    pub resources: ConnectionResources,
    pub listener: Arc<Listener>,
    /// Load balancer that made the connection. The address is its own until its header is read.
    pub balanced: Option<Arc<Balanced>>,
    /// Time of the accept, later of the start of the handshake.
    pub since: Instant,
}

/// Load balancer of a connection, and what its header states besides the peer.
#[derive(Clone, Copy, Debug)]
pub struct Balanced {
    pub balancer: IpAddr,
    /// Address to which the peer connected; none before the header, and if it states none.
    pub destination: Option<SocketAddr>,
}

/// Resources that a connection holds while it lives.
#[derive(Debug)]
pub struct ConnectionResources {
    /// Entry in the load of the worker.
    pub load: LoadGuard,
    pub descriptor: Descriptor,
}

/// Handle by which the acceptor reaches a worker: its queue and its load.
#[derive(Clone, Debug)]
pub struct WorkerHandle {
    queue: mpsc::Sender<AcceptedConnection>,
    /// Load of the worker, by which new connections are assigned.
    pub load: WorkerLoad,
    /// Sign of life of the worker.
    pub turns: Arc<Turns>,
}

/// Sign of life of a worker. The worker notes it, and a watchdog reads it.
#[derive(Debug)]
pub struct Turns {
    begin: Instant,
    /// Milliseconds from `begin` to the last note.
    last: AtomicU64,
    /// Id of the worker's thread; 0 before its first turn.
    thread: AtomicU32,
    work: OnceLock<Arc<CurrentWork>>,
}

/// Queue of a worker, and its sign of life.
#[derive(Debug)]
pub struct WorkerQueue {
    pub(super) accepted: mpsc::Receiver<AcceptedConnection>,
    pub(super) turns: Arc<Turns>,
}

/// Limit of accepted sockets that wait for a worker. A worker with a full queue is overloaded.
const QUEUE_MAX: usize = 1024;
/// Length of the listen backlog, which `net.core.somaxconn` bounds too.
const BACKLOG: i32 = 4096;
/// Bounds of the backoff after a resource error: EMFILE does not pass by itself.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(1);
/// Poll interval at the connection limit; clients wait in the listen backlog.
const LIMIT_POLL_INTERVAL: Duration = Duration::from_millis(100);

impl WorkerHandle {
    /// Creates the handle of a worker and the queue that its runtime reads.
    pub fn new() -> (Self, WorkerQueue) {
        let (queue, accepted) = mpsc::channel(QUEUE_MAX);
        let turns = Arc::new(Turns::new());
        let handle = Self { queue, load: WorkerLoad::default(), turns: Arc::clone(&turns) };
        (handle, WorkerQueue { accepted, turns })
    }
}

impl Turns {
    fn new() -> Self {
        Self {
            begin: Instant::now(),
            last: AtomicU64::new(0),
            thread: AtomicU32::new(0),
            work: OnceLock::new(),
        }
    }

    /// Notes the thread that runs the worker, and its work.
    pub(super) fn enter(&self, work: Arc<CurrentWork>) {
        let id = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        self.thread.store(id, Ordering::Relaxed);
        let _ = self.work.set(work);
        self.note();
    }

    pub fn note(&self) {
        let time = u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(time, Ordering::Relaxed);
    }

    /// Returns the time since the last turn.
    pub fn idle(&self) -> Duration {
        let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
        self.begin.elapsed().saturating_sub(last)
    }

    /// Returns the work of the worker, and the cluster that pays for it.
    pub fn work(&self) -> (Work, Option<String>) {
        self.work.get().map_or((Work::Other, None), |work| work.read())
    }

    /// Returns the kernel's state of the worker's thread: R while it computes, S while it waits, D
    /// while it waits for a disk. Returns "unknown" if it cannot be read.
    pub fn thread_state(&self) -> String {
        let path = format!("/proc/self/task/{}/stat", self.thread.load(Ordering::Relaxed));
        let stat = std::fs::read_to_string(path).unwrap_or_default();
        let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().next());
        state.unwrap_or("unknown").to_owned()
    }
}

/// Opens a listening socket. An IPv6 wildcard also accepts IPv4, and becomes the IPv4 wildcard if
/// the host has no IPv6.
///
/// # Errors
/// Fails if the address is in use or does not belong to this host.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    listen(reserve(address)?, false)
}

/// Reserves an address for a listening socket; connections are refused until [`listen`].
pub fn reserve(address: SocketAddr) -> io::Result<Socket> {
    or_ipv4_wildcard(address, reserve_exactly)
}

/// Calls `reserve`, and replaces the IPv6 wildcard by the IPv4 wildcard on a host without IPv6.
fn or_ipv4_wildcard<T>(
    address: SocketAddr,
    reserve: impl Fn(SocketAddr) -> io::Result<T>,
) -> io::Result<T> {
    match reserve(address) {
        Err(error) if address.ip() == Ipv6Addr::UNSPECIFIED && is_ipv6_unavailable(&error) => {
            reserve((Ipv4Addr::UNSPECIFIED, address.port()).into())
        }
        reserved => reserved,
    }
}

/// Returns true if the kernel has no IPv6, or a setting has turned it off (`disable_ipv6`).
fn is_ipv6_unavailable(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    let codes = [Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL];
    code.is_some_and(|code| codes.map(Errno::raw_os_error).contains(&code))
}

fn reserve_exactly(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Starts to listen. Accepted sockets inherit the options of this one, which saves six system
/// calls for each. `is_tunnel` is true for a listener whose connections are one tunnel each.
///
/// # Errors
/// Fails if the address is in use.
pub fn listen(socket: Socket, is_tunnel: bool) -> io::Result<TcpListener> {
    let keepalive = if is_tunnel {
        // A tunnel that breaks in any way, including a crash of this process, ends by RST.
        socket.set_linger(Some(Duration::ZERO))?;
        &TUNNEL_KEEPALIVE
    } else {
        &HBONE_KEEPALIVE
    };
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(keepalive)?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// A listening socket that is registered with this runtime.
///
/// It wraps tokio's stream, which waits for the readiness of any socket. tokio's listener would
/// also register each accepted socket here, in vain: accepted sockets go to the runtime of a
/// worker.
#[derive(Debug)]
pub struct RegisteredListener {
    socket: tokio::net::TcpStream,
    /// Another process has a descriptor of the socket.
    is_shared: AtomicBool,
}

/// Registers a listening socket with this runtime. `is_shared` is true if another process has a
/// descriptor of it.
///
/// # Errors
/// Fails if memory or descriptors are exhausted.
pub fn register(socket: TcpListener, is_shared: bool) -> io::Result<RegisteredListener> {
    let socket = TcpStream::from(OwnedFd::from(socket));
    let socket = tokio::net::TcpStream::from_std(socket)?;
    Ok(RegisteredListener { socket, is_shared: AtomicBool::new(is_shared) })
}

impl RegisteredListener {
    /// Refuses connections from now on. Frees the address for another listener, even while the
    /// acceptor holds the socket. A socket that another process shares is left to it: a shutdown
    /// would end it there too.
    pub fn stop(&self) {
        if !self.is_shared.load(Ordering::Relaxed) {
            let _ = SockRef::from(&self.socket).shutdown(Shutdown::Both);
        }
    }

    /// Notes whether another process has a descriptor of the socket.
    pub fn set_shared(&self, is_shared: bool) {
        self.is_shared.store(is_shared, Ordering::Relaxed);
    }

    /// Returns another descriptor of the socket.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        self.socket.as_fd().try_clone_to_owned()
    }
}

/// Accepts until the drain begins, and hands each socket to the worker with the least load.
pub async fn run(
    data_path: &DataPath,
    socket: &RegisteredListener,
    listener: Arc<Listener>,
    workers: Vec<WorkerHandle>,
) {
    let share = data_path.admission.pool.register_listener();
    let mut backoff = BACKOFF_MIN;
    loop {
        let accept = async {
            while !share.has_free_descriptor() {
                data_path.metrics.accept_pauses.inc();
                sleep(LIMIT_POLL_INTERVAL).await;
            }
            let accept = || accept(&socket.socket);
            socket.socket.async_io(Interest::READABLE, accept).await
        };
        let accepted = tokio::select! {
            accepted = accept => accepted,
            () = listener.drain.draining() => {
                share.release();
                return socket.stop();
            }
        };
        match accepted {
            Ok((stream, address)) => {
                backoff = BACKOFF_MIN;
                dispatch(data_path, &listener, &share, &workers, stream, address);
            }
            Err(_) if listener.drain.is_draining() => {}
            Err(error) if is_connection_error(&error) => {
                data_path.metrics.accept_errors.inc(AcceptError::Connection.label());
                debug!(%error, "a connection failed before it was accepted");
            }
            Err(error) => {
                data_path.metrics.accept_errors.inc(AcceptError::Resource.label());
                // Jitter, so that listeners do not try together.
                let delay = backoff.mul_f64(1.0 + fastrand::f64());
                backoff = (2 * backoff).min(BACKOFF_MAX);
                warn!(%error, ?delay, "cannot accept connections; existing tunnels continue");
                sleep(delay).await;
            }
        }
    }
}

fn accept(socket: &tokio::net::TcpStream) -> io::Result<(TcpStream, SocketAddr)> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (stream, address) = acceptfrom_with(socket, flags)?;
    let address = address.ok_or(Errno::AFNOSUPPORT)?.try_into()?;
    Ok((stream.into(), address))
}

/// Returns true if an accept error concerns one connection, so that the next accept may succeed.
/// Linux passes pending network errors of the new socket on (`accept(2)`).
fn is_connection_error(error: &io::Error) -> bool {
    use io::ErrorKind::*;
    matches!(
        error.kind(),
        ConnectionAborted
            | ConnectionReset
            | ConnectionRefused
            | Interrupted
            | HostUnreachable
            | NetworkUnreachable
            | NetworkDown
            | TimedOut
    )
}

fn dispatch(
    data_path: &DataPath,
    listener: &Arc<Listener>,
    share: &Arc<ListenerReserve>,
    workers: &[WorkerHandle],
    stream: TcpStream,
    address: SocketAddr,
) {
    let address = SocketAddr::new(address.ip().to_canonical(), address.port());
    let (rules, balancer) = (listener.rules(), address.ip());
    let balanced = rules.is_balancer(balancer).then_some(Balanced { balancer, destination: None });
    if balanced.is_none() && !rules.admits(address.ip()) {
        return reject(data_path, &stream, address, "not_in_sources");
    }
    let least = workers.iter().min_by_key(|worker| worker.load.count());
    let Some(worker) = least else { return };
    let unverified = match balanced {
        Some(_) => Source::balancers(),
        None => Source::prefix(address.ip()),
    };
    let source = match listener.binding() {
        Some(_) => Source::binding(rules.name()).client(address.ip()),
        None => unverified.clone(),
    };
    let descriptor = match share.holders(&source).connection() {
        Ok(descriptor) => descriptor,
        Err(full) => {
            connection_refused(&data_path.metrics, address, full.label(), &full);
            return reject(data_path, &stream, address, full.label());
        }
    };
    let Some(handshake) = data_path.admission.acquire_handshake(&unverified) else {
        return reject(data_path, &stream, address, "source");
    };
    let held = ConnectionResources { load: worker.load.guard(), descriptor };
    let accepted = AcceptedConnection {
        stream,
        address,
        handshake,
        resources: held,
        listener: Arc::clone(listener),
        balanced: balanced.map(Arc::new),
        since: Instant::now(),
    };
    if let Err(full) = worker.queue.try_send(accepted) {
        reject(data_path, &full.into_inner().stream, address, "worker");
    }
}

/// Closes a rejected connection by RST, so that no socket stays in TIME_WAIT.
pub(super) fn reject(
    data_path: &DataPath,
    stream: &impl AsFd,
    address: SocketAddr,
    limit: &'static str,
) {
    data_path.metrics.connection_shed(address.ip(), limit);
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

/// Keepalive of HBONE listeners: 180 s, 180 s, 9 as in ztunnel. HTTP/2 PINGs detect a dead peer
/// first; TCP probes are the fallback.
const HBONE_KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(180))
    .with_interval(Duration::from_secs(180))
    .with_retries(9);

/// Keepalive of TLS passthrough listeners and bindings, which have no PING. It detects a dead peer
/// within a minute.
const TUNNEL_KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(30))
    .with_interval(Duration::from_secs(10))
    .with_retries(3);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wildcard_is_ipv4s_where_there_is_no_ipv6() {
        let failing = |errno: Errno| {
            move |address: SocketAddr| {
                let error = io::Error::from_raw_os_error(errno.raw_os_error());
                address.is_ipv4().then(|| address.to_string()).ok_or(error)
            }
        };
        let rows = [
            ("[::]:15008", Errno::AFNOSUPPORT, Some("0.0.0.0:15008")),
            ("[::]:15008", Errno::ADDRNOTAVAIL, Some("0.0.0.0:15008")),
            ("[::]:15008", Errno::ADDRINUSE, None),
            ("[::]:15008", Errno::ACCESS, None),
            ("[::1]:15008", Errno::ADDRNOTAVAIL, None),
        ];
        for (address, errno, want) in rows {
            let address = address.parse().unwrap();
            let reserved = or_ipv4_wildcard(address, failing(errno)).ok();
            assert_eq!(reserved.as_deref(), want, "{address} {errno}");
        }
    }

    #[test]
    fn the_wildcard_takes_ipv4_on_every_host() {
        let listener = bind((Ipv6Addr::UNSPECIFIED, 0).into()).unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    }
}
