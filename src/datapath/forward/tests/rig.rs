//! Test fixture: an `HboneConnection` whose peer is in memory and whose endpoints are socket pairs.
//!
//! Socket pairs are synchronous, and nothing else runs, so each run of a schedule is the same.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::task::Wake;

use socket2::SockRef;
use tokio::sync::Semaphore;

use super::wire::{Frame, GatewayEnd, HEADERS, PeerEnd, SETTINGS, link};
use super::*;
use crate::datapath::forward::connection::close;
use crate::datapath::forward::open::{Open, StreamGuards};
use crate::datapath::forward::setup::{AnsweredConnect, PendingConnect};
use crate::datapath::forward::turn::{HboneConnection, NewRequest};
use crate::datapath::http2::streams::STREAMS_MAX;
use crate::datapath::io::endpoint::EndpointStream;
use crate::datapath::{authorize, balance, policy, route};
use crate::limits::Source;
use crate::limits::turns::WorkerTime;
use crate::outer;
use crate::snapshot::mesh::{Mesh, Service, Template, Workload};
use crate::snapshot::tests::entry;
use crate::snapshot::{Audience, ExposureTable, NO_LINK_FACTORS, TrustSet};

pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Header block of a CONNECT, without dynamic table.
pub(super) const CONNECT: &[u8] = b"\x00\x07:method\x07CONNECT\x00\x0a:authority\x0becho.app:80";
/// Limit of buffers in bytes, more than the tunnels of one connection hold.
const BUFFERS: usize = 64 << 20;
/// Limit of polls until a connection waits.
const POLLS_MAX: usize = 10_000;
/// Polls of the sockets that find nothing, after which nothing is left to do.
const IDLE_POLLS: usize = 2;

/// Gateway with one service, which is exposed to the peer.
#[derive(Debug)]
pub(super) struct TestGateway {
    pub(super) data_path: Arc<DataPath>,
    _publisher: Publisher,
    pub(super) peer: Arc<Peer>,
}

/// Returns a change that adds services with port 80, each with one endpoint, and exposes them.
pub(super) fn mesh<const N: usize>(services: [(&str, SocketAddr); N]) -> Change {
    let service = |name: &str, port| Service {
        name: name.into(),
        namespace: "app".into(),
        hostname: format!("{name}.app").into(),
        ports: [(80, port)].into(),
        ..Service::default()
    };
    let workload = |name: &str, endpoint: SocketAddr| Workload {
        uid: name.into(),
        addresses: [endpoint.ip()].into(),
        healthy: true,
        capacity: 1,
        services: [(format!("app/{name}.app").into(), [(80, endpoint.port())].into())].into(),
        template: Template {
            cluster: "east".into(),
            network: "east".into(),
            ..Template::default()
        }
        .into(),
        ..Workload::default()
    };
    let names = services.map(|(name, _)| name);
    let mesh = Mesh::new(
        services.map(|(name, endpoint)| service(name, endpoint.port())),
        services.map(|(name, endpoint)| workload(name, endpoint)),
    );
    Change {
        mesh: Some((mesh, "east".into())),
        trust: Some(TrustSet::new([("w", "west")])),
        exposure: Some(exposure(&names)),
        ..Change::default()
    }
}

/// Returns the exposure of services to every peer.
pub(super) fn exposure(names: &[&str]) -> ExposureTable {
    let mut table = ExposureTable::new(false);
    let anyone = vec![Audience { anyone: true, ..Audience::default() }];
    for name in names {
        table.add(entry(&format!("{name}.app"), anyone.clone()));
    }
    table
}

impl TestGateway {
    pub(super) fn new() -> Self {
        Self::with(WorkerTime::default())
    }

    /// Returns a gateway with settings of clusters.
    pub(super) fn with(turns: WorkerTime) -> Self {
        let publisher = Publisher::default();
        publisher.update(mesh([("echo", ([10, 0, 0, 1], 8080).into())]));
        let mut data_path = data_path_of(publisher.reader(), DenyList::default());
        Arc::get_mut(&mut data_path).expect("the only reference").turns = Arc::new(turns);
        data_path.budget.set_limit(BUFFERS);
        let holders = descriptor(&data_path).holders().clone();
        let peer =
            Arc::new(Peer { holders: Some(holders), ..(*peer(SystemTime::now() + FAR)).clone() });
        Self { data_path, _publisher: publisher, peer }
    }
}

/// Stream whose tunnel is not open yet.
#[derive(Debug)]
pub(super) enum Pending {
    Requested(PendingConnect),
    Answered(AnsweredConnect),
}

enum Life {
    Running(Box<HboneConnection<GatewayEnd>>),
    Closing(Pin<Box<dyn Future<Output = GatewayEnd>>>),
    Closed,
}

/// Connection under test.
pub(super) struct Rig {
    pub(super) data_path: Arc<DataPath>,
    pub(super) identity: Arc<Peer>,
    pub(super) peer: PeerEnd,
    /// Streams by their identifiers, as the tasks of a connection hold them.
    pub(super) pending: BTreeMap<u32, Pending>,
    /// Identifiers of the requests that were received, in order.
    pub(super) requests: Vec<u32>,
    slots: Arc<Semaphore>,
    life: Life,
    flag: Arc<Flag>,
}

#[derive(Debug, Default)]
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Rig {
    pub(super) fn new(gateway: &TestGateway) -> Self {
        let (gateway_end, peer) = link();
        let transport = Transport {
            socket: gateway_end,
            layer: RecordLayer::plaintext(),
            received: Vec::new(),
        };
        let source = gateway.peer.charged_source();
        let cluster = gateway.data_path.turns.limited(&Source::cluster(&"west".into()));
        let source = gateway.data_path.budget.source(&source);
        let mut connection = Box::new(HboneConnection::new(transport, source, cluster));
        connection.generation = *gateway.data_path.reader.generation().borrow();
        Self {
            data_path: Arc::clone(&gateway.data_path),
            identity: Arc::clone(&gateway.peer),
            peer,
            pending: BTreeMap::new(),
            requests: Vec::new(),
            slots: Arc::new(Semaphore::new(STREAMS_MAX as usize)),
            life: Life::Running(connection),
            flag: Arc::new(Flag(AtomicBool::new(true))),
        }
    }

    /// Starts a connection whose peer has sent its preface and SETTINGS.
    pub(super) async fn established(gateway: &TestGateway) -> Self {
        let mut rig = Self::new(gateway);
        let settings = Frame::new(SETTINGS, 0, 0, &[]).encode();
        rig.peer.send(&[PREFACE, &settings].concat());
        rig.pump().await;
        rig
    }

    pub(super) async fn send(&mut self, frame: Frame) {
        self.peer.send(&frame.encode());
        self.pump().await;
    }

    /// Opens a tunnel to a new endpoint, which is answered at once.
    pub(super) async fn tunnel(&mut self, id: u32) -> UnixStream {
        self.send(Frame::new(HEADERS, 4, id, CONNECT)).await;
        self.accept(id).expect("an open stream");
        let far = self.open(id, None).expect("an open stream");
        self.pump().await;
        far
    }

    /// Opens a tunnel through a gateway of another network, which is answered at once.
    pub(super) async fn tunnel_through(&mut self, id: u32, stream: outer::Stream) {
        self.send(Frame::new(HEADERS, 4, id, CONNECT)).await;
        self.accept(id).expect("an open stream");
        let Some(Pending::Answered(tunnel)) = self.pending.remove(&id) else {
            panic!("stream {id} was not answered");
        };
        let account = self.data_path.budget.account(&self.identity.charged_source());
        let open = self.opened(EndpointStream::outer(stream, account));
        tunnel.open(Box::new(open)).map_err(|(_, reason)| reason).expect("an open stream");
        self.pump().await;
    }

    /// Returns the connection while it runs.
    pub(super) fn connection(&mut self) -> Option<&mut HboneConnection<GatewayEnd>> {
        self.flag.0.store(true, Ordering::Relaxed);
        match &mut self.life {
            Life::Running(connection) => Some(connection),
            _ => None,
        }
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self.life, Life::Running(_))
    }

    pub(super) fn is_closed(&self) -> bool {
        matches!(self.life, Life::Closed)
    }

    /// Answers 200.
    pub(super) fn accept(&mut self, id: u32) -> Result<(), Reason> {
        let Some(Pending::Requested(connect)) = self.pending.remove(&id) else {
            panic!("stream {id} was not asked for");
        };
        let tunnel = connect.accept(None)?;
        self.pending.insert(id, Pending::Answered(tunnel));
        Ok(())
    }

    /// Hands an answered tunnel over, with an endpoint on a socket pair whose send buffer has this
    /// size. Returns the endpoint.
    pub(super) fn open(&mut self, id: u32, buffer: Option<usize>) -> Result<UnixStream, Reason> {
        let Some(Pending::Answered(tunnel)) = self.pending.remove(&id) else {
            panic!("stream {id} was not answered");
        };
        let (open, far) = self.endpoint(buffer);
        tunnel.open(Box::new(open)).map_err(|(_, reason)| reason)?;
        Ok(far)
    }

    fn endpoint(&self, buffer: Option<usize>) -> (Open, UnixStream) {
        let (near, far) = UnixStream::pair().expect("a pair");
        for end in [&near, &far] {
            end.set_nonblocking(true).expect("a socket");
        }
        if let Some(bytes) = buffer {
            let set = SockRef::from(&near).set_send_buffer_size(bytes);
            set.expect("a socket");
        }
        let near = TcpStream::from_std(OwnedFd::from(near).into()).expect("a socket");
        (self.opened(EndpointStream::Tcp(near)), far)
    }

    /// Returns a tunnel to the endpoint at the other end of a stream.
    fn opened(&self, stream: EndpointStream) -> Open {
        let (data_path, peer) = (&self.data_path, &self.identity);
        let target = target_of("echo.app:80", None);
        let snapshot = data_path.reader.load();
        let route = route::resolve(&snapshot, peer, target).expect("a route");
        let permit = policy::run(&snapshot, peer, route).expect("a permit");
        let pick =
            balance::pick(permit, &balance::Tried::default(), NO_LINK_FACTORS).expect("a pick");
        let pick = authorize::run(data_path, peer, pick).expect("a grant");
        let descriptor = peer.holders.as_ref().map(|holders| holders.dial());
        let descriptor = descriptor.expect("holders").expect("a descriptor").connected();
        let record = Record::new(&data_path.metrics, &peer.source, "echo.app:80");
        let slot = Arc::clone(&self.slots).try_acquire_owned().expect("a slot");
        let tunnel = NewTunnel {
            data_path: Arc::clone(data_path),
            peer: Arc::clone(peer),
            generation: snapshot.generation,
            record,
        };
        let upstream = Upstream::new(pick.into_pick(), stream, descriptor);
        tunnel.open(upstream, Some(StreamGuards { load: LoadGuard::default(), slot: slot.into() }))
    }

    /// Runs the connection until it waits.
    pub(super) async fn pump(&mut self) {
        let mut idle = 0;
        for _ in 0..POLLS_MAX {
            if self.flag.0.swap(false, Ordering::Relaxed) {
                idle = 0;
                self.poll();
            } else {
                idle += 1;
            }
            if idle > IDLE_POLLS {
                return;
            }
            // Lets the runtime poll the sockets.
            yield_now().await;
        }
        panic!("the connection never waits");
    }

    fn poll(&mut self) {
        let waker = Waker::from(Arc::clone(&self.flag));
        let cx = &mut Context::from_waker(&waker);
        match &mut self.life {
            Life::Running(connection) => {
                let end = connection.poll(cx);
                for NewRequest { key, setup, .. } in connection.take_requests() {
                    let connect =
                        PendingConnect::new(key, setup, Arc::clone(&connection.mailbox), false);
                    self.pending.insert(key.id, Pending::Requested(connect));
                    self.requests.push(key.id);
                }
                if let Poll::Ready(end) = end
                    && let Life::Running(connection) =
                        std::mem::replace(&mut self.life, Life::Closed)
                {
                    self.life = Life::Closing(Box::pin(close(connection, end)));
                    self.poll();
                }
            }
            Life::Closing(closing) => {
                if closing.as_mut().poll(cx).is_ready() {
                    self.life = Life::Closed;
                }
            }
            Life::Closed => {}
        }
    }

    /// Returns the reason for which the task of a stream has to stop, if there is one.
    pub(super) async fn cancelled(&self, id: u32) -> Option<Reason> {
        let mut waits: Pin<Box<dyn Future<Output = Reason> + '_>> = match self.pending.get(&id)? {
            Pending::Requested(connect) => Box::pin(connect.cancelled()),
            Pending::Answered(tunnel) => Box::pin(tunnel.cancelled()),
        };
        poll_fn(|cx| match waits.as_mut().poll(cx) {
            Poll::Ready(reason) => Poll::Ready(Some(reason)),
            Poll::Pending => Poll::Ready(None),
        })
        .await
    }

    /// Lets the clock advance, and runs the connection.
    pub(super) async fn wait(&mut self, time: Duration) {
        tokio::time::advance(time).await;
        self.pump().await;
    }
}

/// Reads what an endpoint has received. The second result is true at the end of the stream.
pub(super) fn drain(far: &mut UnixStream, into: &mut Vec<u8>) -> bool {
    let mut buffer = [0; 64 * 1024];
    loop {
        match far.read(&mut buffer) {
            Ok(0) => return true,
            Ok(count) => into.extend_from_slice(&buffer[..count]),
            Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
        }
    }
}

/// Writes as much as the socket takes. Returns the number of bytes.
pub(super) fn fill(far: &mut UnixStream, bytes: &[u8]) -> usize {
    let mut count = 0;
    while let Ok(written @ 1..) = far.write(&bytes[count..]) {
        count += written;
    }
    count
}
