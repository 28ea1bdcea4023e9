//! HTTP interfaces for operators and probes: readiness, metrics, and the admin pages.
//!
//! There are three routers for three ports. Readiness and metrics are open to the network. The
//! admin pages can stop the process and are bound to loopback. `app` binds the listeners and
//! passes each to [`serve`].

mod dashboard;
mod dump;
mod explain;
mod guard;
pub mod pages;
mod regions;
mod scrape;
mod server;
mod status;
mod stream;
mod view;

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use axum::Router;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware;
use axum::routing::{MethodRouter, get, post};
use serde::Deserialize;

use crate::config::Config;
use crate::lifecycle::{Lifecycle, Phase};
use crate::limits::OwnedPool;
use crate::snapshot::{EndpointSet, Publisher, Reader};
use crate::status::{GatewayRow, Status};
use crate::telemetry::{LogHandle, Metrics};

use scrape::Scrapes;

pub use explain::ExplainHandler;
pub use pages::{IssuerRow, ListenerRow, ListenerState};
pub use server::{Limits, serve};

/// Function that returns state of the running gateway.
pub type Source<T> = Arc<dyn Fn() -> T + Send + Sync>;

/// Function that returns the rule of the data path that denies an address.
pub type DenyLookup = Arc<dyn Fn(SocketAddr) -> Option<&'static str> + Send + Sync>;

/// Reason for which no drain is stored.
pub const DRAIN_FILE_UNSET: &str = "`drain.file` is not set; set it and restart";

/// Function that stores the drains in force that restarts keep, or returns why it cannot.
pub type DrainStorage = Source<Result<(), String>>;

/// State that the admin pages show and change.
#[derive(Clone, derive_more::Debug)]
#[debug("AdminState")]
pub struct AdminState {
    /// Snapshot that the data path reads.
    pub reader: Reader,
    /// Publisher of changes that an operator requests.
    pub publisher: Arc<Publisher>,
    /// Readiness, certificates, discovery, reloads.
    pub status: Arc<Status>,
    /// All metrics.
    pub metrics: Arc<Metrics>,
    /// Handle that stops the process.
    pub lifecycle: Lifecycle,
    pub log: LogHandle,
    /// Configuration in use.
    pub config: Arc<ArcSwap<Config>>,
    pub deny_list: DenyLookup,
    /// Pools of the resources that sources share.
    pub pools: Source<Vec<OwnedPool>>,
    pub issuers: Source<Vec<IssuerRow>>,
    /// Gateways of other networks.
    pub remote_gateways: Source<Vec<GatewayRow>>,
    /// Gateways of bindings, by the names of their listeners.
    pub bindings: Source<Vec<(Arc<str>, Arc<EndpointSet>)>>,
    /// Identities of peers with open tunnels, and the number of these.
    pub peer_tunnels: Source<Vec<(Arc<str>, usize)>>,
    /// Explanations of the outcome of a tunnel.
    pub explain: ExplainHandler,
    pub listeners: Source<Vec<ListenerRow>>,
    /// Storage of drains.
    pub store_drains: DrainStorage,
    /// Makes listeners follow the drains of the snapshot.
    pub follow_drains: Source<()>,
}

/// Index page of the admin port.
const INDEX: &str = "\
strait admin

GET  /certs             the certificates, as JSON
GET  /config_dump       state of the data path, as JSON for `istioctl ztunnel-config --file`
GET  /dashboard         this state as a page for a browser, read-only
GET  /explain           outcome of a hypothetical tunnel, as JSON: see `strait explain --help`
GET  /peers             gateways of other networks, and links, as JSON: `strait status peers`
GET  /ready             readiness, as on the readiness port
GET  /refusals          last refusals by kind, as JSON: `strait status refusals`
GET  /status            listeners, mesh, certificates, services, as JSON for `strait status`;
                        ?service=NAME, ?all
GET  /stats/prometheus  metrics, as on the metrics port
GET  /drain/region      dry run of the same POST; changes nothing
POST /drain/region      evacuates ?region=REGION until a restart; ?undo puts it back; ?force also
                        where services are left without endpoints; ?persist over restarts
POST /drain/cluster     the same for ?cluster=CLUSTER
POST /drain/endpoint    the same for ?endpoint=IP or UID
POST /drain/gateway     the same for ?gateway=IP:PORT of another network
POST /drain/service     rejects new tunnels to ?service=HOST
POST /drain/listener    closes ?listener=NAME, and drains its connections
POST /discovery/release applies the removals that `discovery.hold` holds
POST /logging           the log level; ?level=LEVEL[,TARGET=LEVEL...] changes it, ?reset undoes
POST /quitquitquit      starts the drain; a second one stops now
";

/// Creates the router of the readiness port: `/healthz/ready`.
pub fn readiness_router(status: Arc<Status>, lifecycle: Lifecycle) -> Router {
    Router::new().route("/healthz/ready", ready(status, lifecycle))
}

/// Lifetime of a page on the metrics port. The port is open to the network, and encoding the page
/// of a large mesh takes tens of milliseconds.
const METRICS_PAGE_LIFETIME: Duration = Duration::from_secs(1);

/// Creates the router of the metrics port: `/metrics` and `/stats/prometheus`.
pub fn metrics_router(metrics: Arc<Metrics>) -> Router {
    let scrapes = Scrapes::new(&metrics, METRICS_PAGE_LIFETIME);
    Router::new().route("/metrics", stats(&scrapes)).route("/stats/prometheus", stats(&scrapes))
}

/// Creates the router of the admin port, which must be bound to loopback. It refuses requests
/// that could come from a foreign web page in a browser.
pub fn admin_router(state: AdminState) -> Router {
    // Operators see current metrics.
    let scrapes = Scrapes::new(&state.metrics, Duration::ZERO);
    Router::new()
        .route("/", get(INDEX))
        .route("/certs", get(dump::certs))
        .route("/config_dump", get(dump::config_dump))
        .route("/explain", get(explain::explain))
        .route("/peers", get(status::peers::peers))
        .route("/refusals", get(status::refusals::refusals))
        .route("/status", get(status::status))
        .route("/drain/{kind}", get(regions::drain).post(regions::drain))
        .route("/discovery/release", post(release))
        .route("/logging", post(logging))
        .route("/quitquitquit", post(quit))
        .route("/ready", ready(Arc::clone(&state.status), state.lifecycle.clone()))
        .route("/stats/prometheus", stats(&scrapes))
        .merge(dashboard::router(&state))
        .layer(middleware::from_fn(guard::refuse_foreign_pages))
        .with_state(state)
}

/// Answers 200 `ready`, or 500 with the pending conditions. A drain is one of them, so that load
/// balancers stop sending while connections are still accepted.
fn ready<S: Clone + Send + Sync + 'static>(
    status: Arc<Status>,
    lifecycle: Lifecycle,
) -> MethodRouter<S> {
    get(async move || {
        let pending = pending(&status, &lifecycle);
        if pending.is_empty() {
            let now = SystemTime::now();
            let crls = status.crls.lock();
            let text = match crls.iter().filter(|crl| crl.next_update <= now).count() {
                0 => "ready\n".to_owned(),
                stale => format!("ready; stale revocation lists: {stale}\n"),
            };
            return (StatusCode::OK, text);
        }
        let text = format!("not ready, pending: {}\n", pending.join(", "));
        (StatusCode::INTERNAL_SERVER_ERROR, text)
    })
}

/// Returns the conditions that readiness waits for, including a drain.
fn pending(status: &Status, lifecycle: &Lifecycle) -> Vec<String> {
    let mut pending = status.list_pending();
    if lifecycle.phase() >= Phase::Lag {
        pending.push("draining".to_owned());
    }
    pending
}

fn stats<S: Clone + Send + Sync + 'static>(scrapes: &Arc<Scrapes>) -> MethodRouter<S> {
    let scrapes = Arc::clone(scrapes);
    get(async move |headers: HeaderMap| scrapes.answer(&headers).await)
}

/// Requests that held removals are made; 409 if none are held.
async fn release(State(state): State<AdminState>) -> (StatusCode, String) {
    let status = &state.status;
    let owners = [&status.release, &status.release_objects];
    let mut applied = String::new();
    for (hold, owner) in status.held().into_iter().zip(owners) {
        let Some(hold) = hold else { continue };
        owner.notify_one();
        let _ = writeln!(applied, "{} removals by {} are applied", hold.removals, hold.by());
    }
    if applied.is_empty() {
        return (StatusCode::CONFLICT, "no removals are held\n".to_owned());
    }
    (StatusCode::OK, applied)
}

async fn quit(State(state): State<AdminState>) -> &'static str {
    tracing::info!("stopping, requested by /quitquitquit");
    state.lifecycle.stop();
    "shutting down\n"
}

/// Query parameters: `?level=info,mod=debug` and `?reset`, which needs no value.
#[derive(Debug, Deserialize)]
struct LogParameters {
    level: Option<String>,
    reset: Option<String>,
}

/// Changes the log level, and answers with the level in use. Resets first if both parameters are
/// given, like ztunnel.
async fn logging(
    State(state): State<AdminState>,
    Query(parameters): Query<LogParameters>,
) -> (StatusCode, String) {
    let changed = parameters.reset.is_some() || parameters.level.is_some();
    if parameters.reset.is_some() {
        state.log.reset();
    }
    if let Some(level) = parameters.level
        && let Err(error) = state.log.set(&level)
    {
        return (StatusCode::BAD_REQUEST, format!("{error}\n"));
    }
    let current = state.log.current();
    if changed {
        tracing::info!(level = current, "log level changed by /logging");
    }
    (StatusCode::OK, format!("current log level is {current}\n"))
}

#[cfg(test)]
pub(crate) mod tests;
