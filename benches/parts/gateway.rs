//! Whole data path on a separate thread, which reports its usage.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread;

use strait::config::{self, Line, ListenerProtocol, TlsRouting};
use strait::datapath::accept::{self, WorkerHandle};
use strait::datapath::limits::admission::Admission;
use strait::datapath::listener::Listener;
use strait::datapath::{DataPath, dial, serve};
use strait::lifecycle::{DrainScope, Lifecycle};
use strait::snapshot::Publisher;
use strait::snapshot::builder::Change;
use strait::snapshot::mesh::{Mesh, Protocol, Service, Template, Workload};
use strait::snapshot::{Audience, ExposureTable, TrustSet};
use strait::telemetry::Metrics;
use strait::tls::{InboundTls, ServerTls};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot};

use crate::allocations::Usage;
use crate::mesh;

/// Name of the gateway's thread.
pub const THREAD: &str = "gateway";
/// Limit of buffers in bytes, much more than these tunnels hold.
const BUFFERS: usize = 64 << 20;

/// A running gateway.
pub struct Running {
    pub addresses: Vec<SocketAddr>,
    data_path: Arc<DataPath>,
    questions: mpsc::Sender<oneshot::Sender<Usage>>,
    _publisher: Publisher,
}

/// Listening socket, and the listener that handles its connections.
type Bound = (TcpListener, Arc<Listener>);

/// Behaviour of an endpoint; each kind is a port of the service.
#[derive(Clone, Copy)]
pub enum Endpoint {
    Echo,
    Sink,
    Source,
}

impl Endpoint {
    const ALL: [Self; 3] = [Self::Echo, Self::Sink, Self::Source];

    fn port(self) -> u16 {
        80 + self as u16
    }

    pub fn authority(self) -> String {
        format!("endpoint.app:{}", self.port())
    }

    async fn serve(self, mut stream: TcpStream) {
        let mut buffer = vec![0; 64 * 1024];
        if matches!(self, Self::Source) {
            while stream.write_all(&buffer).await.is_ok() {}
            return;
        }
        while let Ok(count @ 1..) = stream.read(&mut buffer).await {
            let echo = matches!(self, Self::Echo);
            if echo && stream.write_all(&buffer[..count]).await.is_err() {
                break;
            }
        }
    }
}

pub fn runtime() -> Runtime {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime")
}

impl Running {
    /// Starts a gateway with one worker, an HBONE listener and one by Istio's server names, and the
    /// endpoints behind it.
    pub fn start(tls: ServerTls) -> Self {
        let mut exposure = ExposureTable::new(false);
        let mut service = mesh::to_west("endpoint.app");
        service.to.push(Audience { anyone: true, ..Audience::default() });
        exposure.add(service);
        let change = Change {
            mesh: Some((endpoints(), mesh::NETWORK.into())),
            trust: Some(TrustSet::new([("west.local", "west")])),
            exposure: Some(exposure),
            has_passthrough: Some(true),
            ..Change::default()
        };
        let sni = tls_listener(TlsRouting::Istio { routing: "istio" });
        Self::with(tls, change, vec![Listener::default(), sni])
    }

    /// Starts a gateway with one worker and these listeners.
    pub fn with(tls: ServerTls, change: Change, listeners: Vec<Listener>) -> Self {
        let publisher = Publisher::default();
        publisher.update(change);
        let bound = |listener: Listener| {
            let socket = accept::reserve(([127, 0, 0, 1], 0).into()).expect("a port");
            let socket = accept::listen(socket, listener.rules().is_passthrough()).expect("a port");
            (socket, Arc::new(listener))
        };
        let sockets: Vec<_> = listeners.into_iter().map(bound).collect();
        let address = |(socket, _): &Bound| socket.local_addr().expect("an address");
        let addresses: Vec<_> = sockets.iter().map(address).collect();
        let loopback = "127.0.0.0/8".parse().expect("a network");
        let metrics = Arc::new(Metrics::new());
        let data_path = Arc::new(DataPath::new(
            publisher.reader(),
            InboundTls::new(tls),
            metrics,
            Lifecycle::default(),
            Admission::new(1024),
            BUFFERS,
            dial::DenyList::new(vec![loopback], addresses.clone()),
        ));
        let (questions, received) = mpsc::channel(1);
        let running = Arc::clone(&data_path);
        let serving = move || runtime().block_on(serve(running, sockets, received));
        let spawned = thread::Builder::new().name(THREAD.into()).spawn(serving);
        spawned.expect("a thread");
        Self { addresses, data_path, questions, _publisher: publisher }
    }

    /// Returns the usage of the gateway's thread so far.
    pub async fn usage(&self) -> Usage {
        let (answer, answered) = oneshot::channel();
        self.questions.send(answer).await.expect("a gateway");
        answered.await.expect("a gateway")
    }

    /// Replaces the TLS configuration, as a reload of certificates does.
    pub fn reload(&self, tls: ServerTls) {
        self.data_path.tls.replace(tls);
    }
}

/// Returns a TLS listener.
pub fn tls_listener(routing: TlsRouting) -> Listener {
    let listener = config::Listener {
        name: "tls".into(),
        bind: ([127, 0, 0, 1], 0).into(),
        line: Line::default(),
        sources: Vec::new(),
        balancers: Vec::new(),
        protocol: ListenerProtocol::Tls(routing),
    };
    Listener::new(&listener, DrainScope::default())
}

async fn serve(
    data_path: Arc<DataPath>,
    sockets: Vec<Bound>,
    mut received: mpsc::Receiver<oneshot::Sender<Usage>>,
) {
    let (worker, queue) = WorkerHandle::new();
    tokio::spawn(serve::run_worker(Arc::clone(&data_path), queue));
    for (socket, listener) in sockets {
        let socket = accept::register(socket, false).expect("a listener");
        let (data_path, worker) = (Arc::clone(&data_path), worker.clone());
        let accepting = async move {
            accept::run(&data_path, &socket, listener, vec![worker]).await;
        };
        tokio::spawn(accepting);
    }
    while let Some(answer) = received.recv().await {
        let _ = answer.send(Usage::of_this_thread());
    }
}

/// Starts endpoints on a separate thread, as a service of one workload.
fn endpoints() -> Mesh {
    let bound = Endpoint::ALL.map(|kind| {
        let socket = TcpListener::bind("127.0.0.1:0").expect("a port");
        socket.set_nonblocking(true).expect("a listener");
        (kind, socket)
    });
    let port = |(kind, socket): &(Endpoint, TcpListener)| {
        (kind.port(), socket.local_addr().expect("an address").port())
    };
    let ports: std::collections::BTreeMap<_, _> = bound.iter().map(port).collect();
    thread::spawn(move || {
        runtime().block_on(async {
            for (kind, socket) in bound {
                let socket = tokio::net::TcpListener::from_std(socket).expect("a listener");
                tokio::spawn(async move {
                    while let Ok((stream, _)) = socket.accept().await {
                        tokio::spawn(kind.serve(stream));
                    }
                });
            }
            std::future::pending::<()>().await;
        });
    });
    let service = Service {
        name: "endpoint".into(),
        namespace: "app".into(),
        hostname: "endpoint.app".into(),
        ports: ports.clone(),
        ..Service::default()
    };
    let workload = Workload {
        uid: "endpoint".into(),
        own_name: Some("endpoint".into()),
        addresses: [[127, 0, 0, 1].into()].into(),
        healthy: true,
        capacity: 1,
        services: [("app/endpoint.app".into(), ports.into_iter().collect())].into(),
        template: Template {
            namespace: "app".into(),
            trust_domain: "east.local".into(),
            protocol: Protocol::Tcp,
            ..Template::default()
        }
        .into(),
        ..Workload::default()
    };
    Mesh::new([service], [workload])
}
