//! Whom the work is sent to: connections, single or double, and the tunnels in them.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Context, ensure};
use h2::client::Builder;
use rustls::{CipherSuite, ClientConfig, NamedGroup};
use tokio::io::BufReader;
use tokio::net::TcpStream;

use crate::config::IdentityFiles;
use crate::hbone::{Client, ConnectError, Tunnel};
use crate::tls::{self, Material};

use super::args::{Files, Plan};

/// What is read from a socket at once: TLS by itself would ask for 4 KiB at a time.
const READ_BYTES: usize = 64 * 1024;
/// HTTP/2's own default, and the least that h2 works with.
const FRAME_BYTES: u32 = 16 * 1024;

/// How the gateway is reached, and how often it was.
pub(super) struct Target {
    address: SocketAddr,
    tls: Arc<ClientConfig>,
    authorities: Turns,
    inner: Option<Inner>,
    settings: Builder,
    pub(super) counts: Counts,
}

struct Inner {
    tls: Arc<ClientConfig>,
    /// None where inner tunnels ask for what the outer one asked for.
    authorities: Option<Turns>,
}

/// What was opened so far.
#[derive(Default)]
pub(super) struct Counts {
    /// Connections to the gateway.
    pub(super) connections: Cell<u64>,
    /// Tunnels that carry work; those of inner connections, where these exist.
    pub(super) tunnels: Cell<u64>,
    /// Tunnels that carry inner connections.
    pub(super) outer_tunnels: Cell<u64>,
    /// What the last connection to the gateway has agreed on.
    pub(super) agreed: Cell<Option<(NamedGroup, CipherSuite)>>,
}

pub(super) fn add(count: &Cell<u64>, more: u64) {
    count.set(count.get() + more);
}

/// Authorities that take turns.
struct Turns {
    authorities: Vec<String>,
    next: Cell<usize>,
}

impl Turns {
    fn new(authorities: &[String]) -> Option<Self> {
        (!authorities.is_empty()).then(|| Self {
            authorities: authorities.to_vec(),
            next: Cell::new(0),
        })
    }

    fn next(&self) -> &str {
        let next = self.next.get();
        self.next.set((next + 1) % self.authorities.len());
        &self.authorities[next]
    }
}

/// A connection that carries streams. Dropping it ends them all.
pub(super) struct Connection {
    client: Client,
    /// The connection below, in one of whose tunnels this one runs, and what that asked for.
    outer: Option<(Client, String)>,
}

/// A tunnel, with the connection that it is in.
pub(super) struct Open {
    pub(super) tunnel: Tunnel,
    pub(super) connection: Rc<Connection>,
}

impl Target {
    /// Reads the certificates and resolves the gateway's name.
    ///
    /// # Errors
    /// A file cannot be used, or the name has no address.
    pub(super) async fn new(plan: &Plan) -> anyhow::Result<Self> {
        let resolved = tokio::net::lookup_host(&plan.to).await;
        let mut resolved = resolved
            .with_context(|| format!("cannot resolve `{}`; write --to HOST:PORT", plan.to))?;
        let address = resolved.next();
        let inner = match &plan.inner {
            Some((files, authorities)) => Some(Inner {
                tls: client_tls(files, plan.key_exchange)?,
                authorities: Turns::new(authorities),
            }),
            None => None,
        };
        let mut settings = Builder::new();
        settings
            .initial_window_size(plan.stream_window())
            .initial_connection_window_size(plan.connection_window())
            .max_frame_size(FRAME_BYTES);
        Ok(Self {
            address: address.with_context(|| format!("`{}` has no address", plan.to))?,
            tls: client_tls(&plan.files, plan.key_exchange)?,
            authorities: Turns::new(&plan.authorities).context("no authority")?,
            inner,
            settings,
            counts: Counts::default(),
        })
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// TCP, TLS or HTTP/2 failed, of either connection of two.
    pub(super) async fn connect(&self) -> anyhow::Result<Connection> {
        let stream = TcpStream::connect(self.address)
            .await
            .map_err(ConnectError::Io)?;
        stream.set_nodelay(true)?;
        let stream = BufReader::with_capacity(READ_BYTES, stream);
        let outer = Client::with_settings(stream, &self.tls, &self.settings).await?;
        add(&self.counts.connections, 1);
        self.counts.agreed.set(outer.agreed());
        let Some(inner) = &self.inner else {
            return Ok(Connection {
                client: outer,
                outer: None,
            });
        };
        let authority = self.authorities.next();
        let tunnel = outer.tunnel(authority).await.context("outer")?;
        add(&self.counts.outer_tunnels, 1);
        let client = Client::with_settings(tunnel, &inner.tls, &self.settings).await;
        Ok(Connection {
            client: client.context("inner")?,
            outer: Some((outer, authority.to_owned())),
        })
    }

    /// Opens a tunnel in a connection.
    ///
    /// # Errors
    /// It was refused, or the connection is gone.
    pub(super) async fn tunnel(&self, connection: &Connection) -> Result<Tunnel, ConnectError> {
        let inner = self.inner.as_ref();
        let turns = match inner {
            Some(inner) => inner.authorities.as_ref(),
            None => Some(&self.authorities),
        };
        let authority = match (turns, &connection.outer) {
            (None, Some((_, authority))) => authority,
            (turns, _) => turns.unwrap_or(&self.authorities).next(),
        };
        let tunnel = connection.client.tunnel(authority).await?;
        add(&self.counts.tunnels, 1);
        Ok(tunnel)
    }
}

impl Connection {
    /// Fails if the server does not let it have so many tunnels: the last ones would wait forever.
    ///
    /// # Errors
    /// It says how many there may be.
    pub(super) fn has_room(&self, streams: usize) -> anyhow::Result<()> {
        let most = self.client.tunnels_max();
        ensure!(
            streams <= most,
            "the server allows {most} streams of a connection, and {streams} are asked for; \
             write fewer --streams and more --connections"
        );
        Ok(())
    }

    /// Says goodbye: GOAWAY and close_notify, of both connections.
    pub(super) async fn close(self) {
        let Self { client, outer } = self;
        // How the other side takes it makes no difference any more.
        let _ = client.close().await;
        if let Some((outer, _)) = outer {
            let _ = outer.close().await;
        }
    }
}

/// One connection at a time, opened again when it broke.
pub(super) struct Line {
    target: Rc<Target>,
    connection: RefCell<Option<Rc<Connection>>>,
    /// Held while it is opened, so that one is for all.
    opening: tokio::sync::Mutex<()>,
}

impl Line {
    pub(super) fn new(target: &Rc<Target>) -> Self {
        Self {
            target: Rc::clone(target),
            connection: RefCell::new(None),
            opening: tokio::sync::Mutex::new(()),
        }
    }

    /// The connection, which is opened if there is none.
    ///
    /// # Errors
    /// As [`Target::connect`].
    pub(super) async fn connection(&self) -> anyhow::Result<Rc<Connection>> {
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

    /// Opens a tunnel.
    ///
    /// # Errors
    /// It was refused, or there is no connection.
    pub(super) async fn open(&self) -> anyhow::Result<Open> {
        let connection = self.connection().await?;
        match self.target.tunnel(&connection).await {
            Ok(tunnel) => Ok(Open { tunnel, connection }),
            Err(error) => {
                // A connection that drains is not closed, and yet of no use any more.
                if !matches!(error, ConnectError::Refused(_)) {
                    self.give_up(&connection);
                }
                Err(error.into())
            }
        }
    }

    /// Opens a tunnel in a connection of its own.
    ///
    /// # Errors
    /// As [`Line::open`].
    pub(super) async fn open_alone(&self) -> anyhow::Result<Open> {
        let connection = Rc::new(self.target.connect().await?);
        let tunnel = self.target.tunnel(&connection).await?;
        Ok(Open { tunnel, connection })
    }

    fn give_up(&self, connection: &Rc<Connection>) {
        let mut current = self.connection.borrow_mut();
        current.take_if(|current| Rc::ptr_eq(current, connection));
    }

    /// Closes the connection, if nobody else has a part of it.
    pub(super) async fn close(&self) {
        let connection = self.connection.take().and_then(Rc::into_inner);
        if let Some(connection) = connection {
            connection.close().await;
        }
    }
}

fn client_tls(files: &Files, group: Option<NamedGroup>) -> anyhow::Result<Arc<ClientConfig>> {
    Ok(tls::client_config_for_any(&material(files)?, group)?)
}

/// Reads a certificate, its key and the roots.
///
/// # Errors
/// A file cannot be used; the message names it.
pub(super) fn material(files: &Files) -> anyhow::Result<Material> {
    let files = IdentityFiles {
        chain: files.chain.clone(),
        key: files.key.clone(),
        roots: files.roots.clone(),
    };
    Ok(Material::load(&files)?)
}
