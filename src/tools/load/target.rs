//! Gateway under load: connections, single or double, with their tunnels; or bare connections.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use h2::client::Builder;
use rustls::{CipherSuite, ClientConfig, ClientConnection, NamedGroup, RootCertStore};
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use crate::config::IdentityFiles;
use crate::tls::{self, IdentityMaterial};
use crate::tools::hbone::{Client, ConnectError, Tunnel, resolve};

use super::args::Plan;
use super::flow::{LoadStream, PassthroughStream};

/// Bytes of one read from a socket. TLS by itself would read 4 KiB at a time.
const READ_BYTES: usize = 64 * 1024;
/// Size of a frame: HTTP/2's default, and the minimum of h2.
const FRAME_BYTES: u32 = 16 * 1024;

/// Position of the random in a ClientHello: after the headers of the record and of the message, and
/// the version (RFC 8446 sections 4, 4.1.2 and 5.1).
const RANDOM: Range<usize> = 11..43;

/// Address and transport of the gateway, with counts of what was opened.
pub(super) struct Target {
    address: SocketAddr,
    way: Transport,
    pub(super) counts: Counts,
}

enum Transport {
    Hbone(Hbone),
    /// Bare connections, with the ClientHellos that they begin with.
    Bare(RoundRobin<Bytes>),
}

struct Hbone {
    tls: Arc<ClientConfig>,
    authorities: RoundRobin<String>,
    inner: Option<Inner>,
    settings: Builder,
}

struct Inner {
    tls: Arc<ClientConfig>,
    /// None if inner tunnels use the authority of the outer one.
    authorities: Option<RoundRobin<String>>,
}

/// Counts of connections and tunnels opened so far.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) connections: Cell<u64>,
    /// Number of tunnels that carry work: those of inner connections, if there are any.
    pub(super) tunnels: Cell<u64>,
    /// Number of tunnels that carry inner connections.
    pub(super) outer_tunnels: Cell<u64>,
    /// Key exchange and cipher suite of the last connection to the gateway.
    pub(super) negotiated: Cell<Option<(NamedGroup, CipherSuite)>>,
}

pub(super) fn add(count: &Cell<u64>, more: u64) {
    count.set(count.get() + more);
}

/// Round-robin list of authorities or ClientHellos.
struct RoundRobin<T> {
    all: Vec<T>,
    next: Cell<usize>,
}

impl<T> RoundRobin<T> {
    fn new(all: Vec<T>) -> Option<Self> {
        (!all.is_empty()).then(|| Self { all, next: Cell::new(0) })
    }

    fn next(&self) -> &T {
        let next = self.next.get();
        self.next.set((next + 1) % self.all.len());
        &self.all[next]
    }
}

/// Connection that carries streams. Dropping it ends all of them.
pub(super) struct Connection {
    client: Client,
    /// Outer connection, if one of its tunnels carries this one, with the authority of that tunnel.
    outer: Option<(Client, String)>,
}

/// Tunnel with its connection, or a bare connection without one.
pub(super) struct OpenTunnel {
    pub(super) tunnel: LoadStream,
    pub(super) connection: Option<Rc<Connection>>,
}

impl Target {
    /// Reads the certificates and resolves the gateway's name.
    pub(super) async fn new(plan: &Plan) -> anyhow::Result<Self> {
        let way = match plan.files() {
            Some(files) => Transport::Hbone(Hbone::new(plan, &files)?),
            None => {
                let hellos: anyhow::Result<Vec<_>> = plan.sni.iter().map(client_hello).collect();
                Transport::Bare(RoundRobin::new(hellos?).context("no server name")?)
            }
        };
        Ok(Self { address: resolve(&plan.to).await?, way, counts: Counts::default() })
    }

    /// Returns the HBONE transport; fails for bare connections.
    fn hbone(&self) -> anyhow::Result<&Hbone> {
        match &self.way {
            Transport::Hbone(hbone) => Ok(hbone),
            Transport::Bare(_) => bail!("a bare connection has no tunnels"),
        }
    }

    async fn tcp(&self) -> anyhow::Result<TcpStream> {
        let stream = TcpStream::connect(self.address).await.map_err(ConnectError::Io)?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// Opens a connection, and an inner connection through it if the plan has one.
    pub(super) async fn connect(&self) -> anyhow::Result<Connection> {
        let hbone = self.hbone()?;
        let stream = BufReader::with_capacity(READ_BYTES, self.tcp().await?);
        let outer = Client::with_settings(stream, &hbone.tls, &hbone.settings).await?;
        add(&self.counts.connections, 1);
        self.counts.negotiated.set(outer.negotiated);
        let Some(inner) = &hbone.inner else {
            return Ok(Connection { client: outer, outer: None });
        };
        let authority = hbone.authorities.next();
        let tunnel = outer.tunnel(authority).await.context("outer")?;
        add(&self.counts.outer_tunnels, 1);
        let client = Client::with_settings(tunnel, &inner.tls, &hbone.settings).await;
        Ok(Connection {
            client: client.context("inner")?,
            outer: Some((outer, authority.to_owned())),
        })
    }

    /// Opens a tunnel in a connection.
    pub(super) async fn tunnel(&self, connection: &Connection) -> anyhow::Result<Tunnel> {
        let hbone = self.hbone()?;
        let turns = match &hbone.inner {
            Some(inner) => inner.authorities.as_ref(),
            None => Some(&hbone.authorities),
        };
        let authority = match (turns, &connection.outer) {
            (None, Some((_, authority))) => authority,
            (turns, _) => turns.unwrap_or(&hbone.authorities).next(),
        };
        let tunnel = connection.client.tunnel(authority).await?;
        add(&self.counts.tunnels, 1);
        Ok(tunnel)
    }

    /// Opens a bare connection and sends its ClientHello, with a new random. A gateway would take
    /// repeated ones for a routing loop.
    async fn open_passthrough(&self, hellos: &RoundRobin<Bytes>) -> anyhow::Result<OpenTunnel> {
        let mut stream = self.tcp().await?;
        let mut hello = hellos.next().to_vec();
        fastrand::fill(hello.get_mut(RANDOM).unwrap_or_default());
        stream.write_all(&hello).await?;
        add(&self.counts.connections, 1);
        add(&self.counts.tunnels, 1);
        Ok(OpenTunnel {
            tunnel: LoadStream::Bare(PassthroughStream::new(stream)),
            connection: None,
        })
    }
}

impl Hbone {
    fn new(plan: &Plan, files: &IdentityFiles) -> anyhow::Result<Self> {
        let inner = plan.inner_files().map(|files| {
            anyhow::Ok(Inner {
                tls: client_tls(&files, plan.key_exchange())?,
                authorities: RoundRobin::new(plan.inner_authority.clone()),
            })
        });
        let mut settings = Builder::new();
        settings
            .initial_window_size(plan.stream_window())
            .initial_connection_window_size(plan.connection_window())
            .max_frame_size(FRAME_BYTES);
        Ok(Self {
            tls: client_tls(files, plan.key_exchange())?,
            authorities: RoundRobin::new(plan.authority.clone()).context("no authority")?,
            inner: inner.transpose()?,
            settings,
        })
    }
}

/// Returns a ClientHello for `name`, with ALPN `istio` for the gateways that require it.
fn client_hello(name: &String) -> anyhow::Result<Bytes> {
    let mut config = ClientConfig::builder()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    config.alpn_protocols = vec![b"istio".to_vec()];
    let host = name.clone().try_into();
    let host = host.with_context(|| format!("invalid server name `{name}`; write --sni HOST"))?;
    let mut bytes = Vec::new();
    ClientConnection::new(Arc::new(config), host)?.write_tls(&mut bytes)?;
    Ok(bytes.into())
}

impl OpenTunnel {
    fn new(tunnel: Tunnel, connection: Rc<Connection>) -> Self {
        Self { tunnel: LoadStream::Tunnel(tunnel), connection: Some(connection) }
    }
}

impl Connection {
    /// Fails if the server allows fewer streams, because the last ones would wait forever.
    ///
    /// # Errors
    /// The error has the server's limit.
    pub(super) fn check_stream_limit(&self, streams: usize) -> anyhow::Result<()> {
        let most = self.client.max_tunnels();
        ensure!(
            streams <= most,
            "too many streams per connection: {streams}, the server allows {most}; use fewer \
             --streams and more --connections"
        );
        Ok(())
    }

    /// Closes both connections, with GOAWAY and close_notify.
    pub(super) async fn close(self) {
        let Self { client, outer } = self;
        // The result no longer matters.
        let _ = client.close().await;
        if let Some((outer, _)) = outer {
            let _ = outer.close().await;
        }
    }
}

/// Connection that is opened again after it broke.
pub(super) struct ReconnectingConnection {
    target: Rc<Target>,
    connection: RefCell<Option<Rc<Connection>>>,
    /// Held while the connection is opened, so that every slot uses the same one.
    opening: tokio::sync::Mutex<()>,
}

impl ReconnectingConnection {
    pub(super) fn new(target: &Rc<Target>) -> Self {
        Self {
            target: Rc::clone(target),
            connection: RefCell::new(None),
            opening: tokio::sync::Mutex::new(()),
        }
    }

    /// Returns the connection, which it opens if there is none.
    async fn connection(&self) -> anyhow::Result<Rc<Connection>> {
        if let Some(connection) = self.current() {
            return Ok(connection);
        }
        let _opening = self.opening.lock().await;
        if let Some(connection) = self.current() {
            return Ok(connection);
        }
        let connection = Rc::new(self.target.connect().await?);
        self.connection.replace(Some(Rc::clone(&connection)));
        Ok(connection)
    }

    fn current(&self) -> Option<Rc<Connection>> {
        let current = self.connection.borrow();
        let alive = |connection: &&Rc<Connection>| !connection.client.is_closed();
        current.as_ref().filter(alive).map(Rc::clone)
    }

    /// Opens the connection for later tunnels; does nothing for bare connections.
    pub(super) async fn prepare(&self) -> anyhow::Result<()> {
        match self.target.way {
            Transport::Hbone(_) => self.connection().await.map(drop),
            Transport::Bare(_) => Ok(()),
        }
    }

    /// Opens a tunnel, or a bare connection.
    pub(super) async fn open(&self) -> anyhow::Result<OpenTunnel> {
        if let Transport::Bare(hellos) = &self.target.way {
            return self.target.open_passthrough(hellos).await;
        }
        let connection = self.connection().await?;
        match self.target.tunnel(&connection).await {
            Ok(tunnel) => Ok(OpenTunnel::new(tunnel, connection)),
            Err(error) => {
                // A draining connection is not closed, but takes no more tunnels.
                if !matches!(error.downcast_ref(), Some(ConnectError::Status(_))) {
                    self.discard(&connection);
                }
                Err(error)
            }
        }
    }

    /// Opens a tunnel in a connection of its own, or a bare connection.
    pub(super) async fn open_on_new_connection(&self) -> anyhow::Result<OpenTunnel> {
        if let Transport::Bare(hellos) = &self.target.way {
            return self.target.open_passthrough(hellos).await;
        }
        let connection = Rc::new(self.target.connect().await?);
        let tunnel = self.target.tunnel(&connection).await?;
        Ok(OpenTunnel::new(tunnel, connection))
    }

    fn discard(&self, connection: &Rc<Connection>) {
        let mut current = self.connection.borrow_mut();
        current.take_if(|current| Rc::ptr_eq(current, connection));
    }

    /// Closes the connection, unless others still use it.
    pub(super) async fn close(&self) {
        let connection = self.connection.take().and_then(Rc::into_inner);
        if let Some(connection) = connection {
            connection.close().await;
        }
    }
}

fn client_tls(
    files: &IdentityFiles,
    group: Option<NamedGroup>,
) -> anyhow::Result<Arc<ClientConfig>> {
    Ok(tls::client_config_any_server(&IdentityMaterial::load(files)?, group)?)
}
