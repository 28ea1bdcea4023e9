//! Threads and HTTP servers beside the data path, and the sources of the admin pages.

use std::collections::HashSet;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use axum::Router;
use tokio_util::sync::CancellationToken;
use tracing::error;

use crate::admin::{self, AdminState, IssuerRow, Limits, ListenerRow, ListenerState, Source};
use crate::config::Config;
use crate::datapath::DataPath;
use crate::datapath::limits::admission::Admission;
use crate::lifecycle::Lifecycle;
use crate::limits::OwnedPool;
use crate::responder::{self, Responder};
use crate::snapshot::{EndpointSet, RemoteGateway};
use crate::status::{GatewayRow, Status};
use crate::telemetry::LogHandle;

use super::hand_over::sockets::SocketSource;
use super::state::App;
use super::supervise::spawn_thread;
use super::thread::with_bind_context;
use super::{drains, explain};

/// The other listening sockets. All are bound before any is served, so that a failed start serves
/// no tunnel.
pub(super) struct Sockets {
    admin: TcpListener,
    metrics: Vec<TcpListener>,
    dns: Vec<responder::Sockets>,
}

impl Sockets {
    pub(super) fn bind(config: &Config, from: &SocketSource) -> anyhow::Result<Self> {
        let metrics = config.metrics.bind.iter();
        let metrics = metrics.map(|address| bind("metrics.bind", *address, from));
        let dns = config.dns.listen.iter().map(|address| {
            let sockets = from.tcp(*address).and_then(|tcp| {
                let udp = from.udp(tcp.local_addr()?)?;
                responder::Sockets::new(tcp, udp)
            });
            with_bind_context(sockets, "dns.listen", *address)
        });
        Ok(Self {
            dns: dns.collect::<Result<_, _>>()?,
            admin: bind("admin.bind", config.admin.bind, from)?,
            metrics: metrics.collect::<Result<_, _>>()?,
        })
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        let others = [&self.admin].into_iter().chain(&self.metrics);
        let others = others.filter_map(|socket| socket.local_addr().ok());
        others.chain(self.dns.iter().filter_map(|dns| dns.address().ok()))
    }

    pub(super) fn serve(
        self,
        app: &App,
        log: &LogHandle,
        begin: &CancellationToken,
    ) -> anyhow::Result<()> {
        let data_path = &app.data_path;
        let pool = data_path.outer.clone();
        data_path.metrics.remote_gateways.set(move || pool.status());
        let responder = Arc::new(Responder::new(Arc::clone(&app.config)));
        let pools: Source<Vec<OwnedPool>> = {
            let responder = Arc::clone(&responder);
            source(app, move |app| pools(app, &responder))
        };
        let shares = Arc::downgrade(&pools);
        data_path.metrics.pools.set(move || shares.upgrade().map_or_else(Vec::new, |read| read()));
        let listeners = Arc::downgrade(&app.listeners);
        data_path.metrics.listeners.set(move || {
            let rows = listeners.upgrade().map(|listeners| listeners.rows()).unwrap_or_default();
            let up = |row: ListenerRow| (row.listener.name, row.state == ListenerState::Open);
            rows.into_iter().map(up).collect()
        });
        let turns = Arc::clone(&data_path.turns);
        data_path.metrics.worker_time.set(move || turns.used());
        let state = AdminState {
            reader: data_path.reader.clone(),
            publisher: Arc::clone(&app.publisher),
            status: Arc::clone(&app.status),
            metrics: Arc::clone(&data_path.metrics),
            lifecycle: data_path.lifecycle.clone(),
            log: log.clone(),
            config: Arc::clone(&app.config),
            deny_list: {
                let data_path = Arc::clone(data_path);
                Arc::new(move |address| data_path.deny.denies(address))
            },
            pools: Arc::clone(&pools),
            issuers: source(app, |app| issuers(&app.data_path)),
            remote_gateways: source(app, |app| remote_gateways(&app.data_path)),
            bindings: source(app, bindings),
            peer_tunnels: source(app, |app| app.data_path.admission.pool.tunnels()),
            explain: explain::for_gateway(app),
            listeners: source(app, |app| app.listeners.rows()),
            store_drains: drains::storage(app),
            follow_drains: source(app, |app| app.listeners.follow_drains()),
        };
        let router = admin::admin_router(state);
        let lifecycle = &data_path.lifecycle;
        let times = (begin, lifecycle, &app.status);
        spawn("strait-admin", self.admin, router, Limits::PAGES, times)?;
        let router = admin::metrics_router(Arc::clone(&data_path.metrics));
        for socket in self.metrics {
            let router = router.clone();
            spawn("strait-metrics", socket, router, Limits::PROBES, times)?;
        }
        if !self.dns.is_empty() {
            let (begin, lifecycle) = (begin.clone(), lifecycle.clone());
            let dns = self.dns;
            spawn_thread(&app.status, "strait-responder", async move {
                begin.cancelled().await;
                tokio::select! {
                    () = responder::run(dns, responder) => {}
                    () = lifecycle.ports_end() => {}
                }
            })?;
        }
        Ok(())
    }
}

pub(super) fn bind(
    key: &str,
    address: SocketAddr,
    from: &SocketSource,
) -> anyhow::Result<TcpListener> {
    with_bind_context(from.tcp(address), key, address)
}

/// Serves a port on a dedicated thread, so that its clients delay neither other ports nor the
/// control path: from `begin` until a successor serves it or the process closes, so that a drain
/// can be observed to its end.
pub(super) fn spawn(
    name: &'static str,
    socket: TcpListener,
    router: Router,
    limits: Limits,
    (begin, lifecycle, status): (&CancellationToken, &Lifecycle, &Arc<Status>),
) -> anyhow::Result<()> {
    let (begin, lifecycle) = (begin.clone(), lifecycle.clone());
    spawn_thread(status, name, async move {
        begin.cancelled().await;
        let end = lifecycle.ports_end();
        match tokio::net::TcpListener::from_std(socket) {
            Ok(listener) => admin::serve(name, limits, listener, router, end).await,
            Err(error) => error!(port = name, %error, "cannot serve an HTTP port"),
        }
    })?;
    Ok(())
}

fn source<T>(app: &App, read: impl Fn(&App) -> T + Send + Sync + 'static) -> Source<T> {
    let app = app.clone();
    Arc::new(move || read(&app))
}

/// Returns the pools of all resources that sources share.
fn pools(app: &App, responder: &Responder) -> Vec<OwnedPool> {
    let data_path = &app.data_path;
    let Admission { pool, handshakes } = &data_path.admission;
    let snapshot = data_path.reader.snapshot();
    let services = snapshot.exposure.hosts().flat_map(|host| {
        let limited = snapshot.exposure.entries(host).iter();
        let limited = limited.filter(|entry| entry.limits.tunnels.is_some());
        limited.map(move |entry| OwnedPool::new(entry.open.pool(), Some(host.to_owned())))
    });
    let bindings = app.listeners.bindings().into_iter().map(|listener| {
        OwnedPool::new(listener.clients.pool(), Some(listener.rules().name().to_string()))
    });
    let common = pool.pools().into_iter().chain([handshakes.pool(), data_path.budget.pool()]);
    common
        .map(|pool| OwnedPool::new(pool, None))
        .chain(data_path.outer.pools())
        .chain(services)
        .chain(bindings)
        .chain(responder.pools())
        .collect()
}

/// Returns the gateways of other networks: those that tunnels have used, and those that the mesh
/// and the configuration name besides.
fn remote_gateways(data_path: &DataPath) -> Vec<GatewayRow> {
    let mut rows = data_path.outer.status();
    let used: HashSet<_> = rows.iter().map(|row| (row.address, row.network.clone())).collect();
    let snapshot = data_path.reader.snapshot();
    let known = snapshot.remote_gateways();
    let unused = known.filter(|(address, of)| !used.contains(&(*address, of.network.to_string())));
    let row = |(address, of): (_, Arc<RemoteGateway>)| {
        GatewayRow::new(address, [&of.network, &of.cluster], None, 100)
    };
    rows.extend(unused.map(row));
    rows.sort_by_key(|row| row.address);
    rows
}

/// Returns the gateways of bindings, by the names of their listeners.
fn bindings(app: &App) -> Vec<(Arc<str>, Arc<EndpointSet>)> {
    let snapshot = app.data_path.reader.snapshot();
    let endpoints = app.listeners.bindings().into_iter().filter_map(|listener| {
        let set = listener.binding()?.endpoints.load(&snapshot);
        Some((Arc::clone(listener.rules().name()), set))
    });
    endpoints.collect()
}

/// Returns the issuers that the gateway has seen, with their current clusters.
fn issuers(data_path: &DataPath) -> Vec<IssuerRow> {
    let seen = data_path.tls.issuers().into_iter();
    let snapshot = data_path.reader.load();
    seen.map(|seen| IssuerRow {
        spki: seen.issuer.spki.to_string(),
        subject: seen.issuer.subject.to_string(),
        cluster: snapshot.trust.issuer_cluster(&seen.issuer.spki).map(ToOwned::to_owned),
        accepted: seen.accepted,
        refused: seen.refused,
    })
    .collect()
}
