//! gRPC stream of the delta ADS client: connects, applies responses, publishes snapshots, waits,
//! and connects again.

mod held;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::park_timeout;
use std::time::{Duration, SystemTime};

use h2::Reason;
use tokio::sync::{Notify, mpsc};
use tokio::task::yield_now;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status as GrpcStatus;
use tracing::{debug, info, warn};

use super::cache::{Cache, Recorder};
use super::client::{Client, Request, StreamEnd};
use super::control_plane::{display_name, metric_label};
use super::envoy::ENDPOINT;
use super::first_answers::InitialEndpoints;
use super::hold::Hold;
use super::push::{self, Push};
use super::store::AUTHORIZATION;
use crate::config::ControlPlane;
use crate::config::pod::Pod;
use crate::grpc::call::{self, Messages};
use crate::grpc::channel::{self, ChannelError};
use crate::grpc::discovery::DeltaDiscoveryRequest;
use crate::grpc::goaway::GoAwayCode;
use crate::grpc::rpc;
use crate::labels::escape_control;
use crate::snapshot::{Publisher, builder::Change};
use crate::status::{Rejection, ReloadSource, ResourceType, Status};
use crate::telemetry::Metrics;

pub use super::control_plane::ControlPlaneKind;

/// Delta ADS method (docs/wire-contract.md 3.1).
const METHOD: &str =
    "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
/// Limit of a message (docs/wire-contract.md 3.1).
const MESSAGE_BYTES_MAX: usize = 200 * 1024 * 1024;
/// Limit of requests queued for the server. Each response causes one.
const REQUESTS_MAX: usize = 16;
/// Deadline for the server to accept the call, and for each request.
const CALL_DEADLINE: Duration = Duration::from_secs(30);
/// Deadline for the first response of the next type while some have none: a silent server has hung.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// Minimum time between snapshots after a single message. An isolated change is published at once.
const SNAPSHOTS_APART: Duration = Duration::from_millis(5);
/// Minimum time between snapshots after several messages. In a series of changes, one snapshot of
/// 20 changes costs little more than one of 5.
const BATCHES_APART: Duration = Duration::from_millis(20);
/// Limit of messages per snapshot.
const MESSAGES_MAX: usize = 64;
/// Limit of a nonce or type URL, in bytes.
const WORD_BYTES_MAX: usize = 1024;
/// Limit of the server's type version in status output, in characters.
const WORD_SHOWN: usize = 64;
/// Limit of rejected resources per type on the status page, and of all in the summary of the last
/// reload.
const REJECTED_KEPT: usize = 100;
const REJECTED_SHOWN: usize = 20;
/// gRPC's `INVALID_ARGUMENT`, the code of a NACK.
const INVALID_ARGUMENT: i32 = 3;

/// Configuration of the stream and the sinks of its results.
#[derive(Debug)]
pub struct Feed {
    pub plane: ControlPlane,
    pub kind: ControlPlaneKind,
    pub cache: Option<PathBuf>,
    /// Time for which a mass removal is held.
    pub hold: Duration,
    pub pod: Pod,
    pub publisher: Arc<Publisher>,
    pub status: Arc<Status>,
    pub metrics: Arc<Metrics>,
    /// Readiness condition that is pending until the first state is complete.
    pub pending: &'static str,
    /// Notified of each stream that the control plane accepts.
    pub connected: Arc<Notify>,
}

/// State that outlives a stream.
struct State {
    client: Client,
    store: Recorder,
    answers: InitialEndpoints,
}

impl State {
    /// Prepares a stream on which the control plane sends the whole state again. Returns the end of
    /// this one.
    fn request_all(&mut self) -> Ended {
        warn!("the content of the cache file is lost; the whole state is requested again");
        self.client.request_all();
        self.answers = InitialEndpoints::default();
        self.store.restored = None;
        let why = "the content of the cache file is lost".to_owned();
        Ended { end: StreamEnd::GoAway, why, is_broken: false }
    }
}

struct Ended {
    end: StreamEnd,
    why: String,
    /// True if the connection broke before the server sent a status.
    is_broken: bool,
}

impl Ended {
    /// Returns the end after a GOAWAY. A GOAWAY with an error code is always a failure: after
    /// ENHANCE_YOUR_CALM an immediate retry would be wrong.
    fn by_goaway(self, reason: Option<Reason>) -> Self {
        match reason {
            Some(Reason::NO_ERROR) if self.is_broken => Self {
                end: StreamEnd::GoAway,
                why: "the control plane closed the connection by GOAWAY (connection age)".into(),
                ..self
            },
            None | Some(Reason::NO_ERROR) => self,
            Some(reason) => Self {
                end: StreamEnd::Status,
                why: format!(
                    "the control plane closed the connection by GOAWAY with {reason:?}: {}",
                    self.why
                ),
                ..self
            },
        }
    }
}

impl From<ChannelError> for Ended {
    fn from(error: ChannelError) -> Self {
        Self { end: StreamEnd::Connect, why: error.to_string(), is_broken: false }
    }
}

impl From<GrpcStatus> for Ended {
    fn from(status: GrpcStatus) -> Self {
        Self {
            end: StreamEnd::from_status(status.code().into(), status.message()),
            // The line breaks of a message would begin lines of the log.
            why: format!("{}: {}", status.code(), escape_control(status.message())),
            // A status from the server has no source error.
            is_broken: std::error::Error::source(&status).is_some(),
        }
    }
}

/// Keeps the mesh up to date with the control plane. It never returns. The last state stays in
/// force while the control plane is unavailable. It decodes and builds inline and needs its own
/// thread.
pub async fn run(feed: Feed) {
    let mut state = feed.start();
    feed.update_types(&state);
    let mut is_aged = false;
    loop {
        let Ended { end, why, .. } = feed.stream(&mut state, is_aged).await;
        is_aged = end == StreamEnd::GoAway;
        let wait = state.client.disconnected(end);
        let wait = wait.mul_f64(0.8 + 0.4 * fastrand::f64());
        feed.metrics.xds.terminated(termination(end));
        feed.status.set_discovery(|known| known.disconnect(why.clone(), SystemTime::now(), wait));
        let address = &feed.plane.address;
        if is_aged {
            info!(%address, ?wait, error = %why, "reconnecting to the control plane")
        } else {
            warn!(%address, ?wait, error = %why, "no stream to the control plane")
        }
        let _ = timeout(wait, feed.release_on_command(&mut state)).await;
    }
}

/// Returns the types that readiness waits for.
fn missing(client: &Client) -> impl Iterator<Item = &'static str> {
    let is_pending = |url: &&str| client.pending().any(|pending| pending == *url);
    let missing = move |url: &&'static str| is_pending(url) || client.unanswered(url) > 0;
    client.types().filter(missing)
}

/// Returns the termination label of ztunnel's metric.
fn termination(end: StreamEnd) -> &'static str {
    match end {
        StreamEnd::Connect => "ConnectionError",
        StreamEnd::Clean => "Complete",
        StreamEnd::Status => "Error",
        _ => "Reconnect",
    }
}

impl Feed {
    /// Returns the initial state: the published cache, or nothing.
    fn start(&self) -> State {
        let (mut client, source) = self.kind.new_client_and_store();
        let answers = InitialEndpoints::default();
        let Some(file) = self.cache.clone() else {
            let mut store = Recorder::new(source);
            store.hold = Hold::new(self.hold);
            return State { client, store, answers };
        };
        let cache =
            Cache { file, cluster: self.pod.cluster.clone(), network: self.pod.network.clone() };
        let mut store = Recorder::restore(cache, source, &mut client);
        store.hold = Hold::new(self.hold);
        if let Some(saved) = store.saved {
            self.metrics.xds.set_cache_time(ReloadSource::Mesh, saved);
            self.status.set_discovery(|known| known.saved = Some(saved));
        }
        let (status, metrics) = (Arc::clone(&self.status), Arc::clone(&self.metrics));
        tokio::spawn(store.writer(move |written| match written {
            Ok(saved) => {
                metrics.xds.set_cache_time(ReloadSource::Mesh, saved);
                status.set_discovery(|known| {
                    (known.saved, known.save_error) = (Some(saved), None);
                });
            }
            Err(error) => status.set_discovery(|known| known.save_error = Some(error)),
        }));
        if let Some(notice) = store.restored.clone() {
            store.set_policies_received();
            self.update(&mut store);
            store.save();
            self.status.set_reload(ReloadSource::Mesh, Err(notice));
            self.status.clear_pending(self.pending);
        }
        State { client, store, answers }
    }

    /// Runs one stream to its end. `is_aged` is true if the previous stream ended by age, which
    /// was logged already.
    async fn stream(&self, state: &mut State, is_aged: bool) -> Ended {
        let (mut useful, goaway) = (false, GoAwayCode::default());
        let mut ended = match self.exchange(state, is_aged, &goaway, &mut useful).await {
            Ok(()) => Ended {
                end: StreamEnd::Clean,
                why: "the control plane ended the stream".to_owned(),
                is_broken: false,
            },
            Err(ended) => ended.by_goaway(goaway.reason()),
        };
        // Without backoff, a stream that ends before any response would be retried a hundred times
        // a second.
        if !useful {
            ended.end = StreamEnd::Status;
        }
        ended
    }

    /// Opens a stream, and uses it until it ends.
    async fn exchange(
        &self,
        state: &mut State,
        is_aged: bool,
        goaway: &GoAwayCode,
        useful: &mut bool,
    ) -> Result<(), Ended> {
        // Cached clusters: the first request names the endpoints that they refer to.
        self.follow(state);
        let (requests, responses) = self.open(&mut state.client, goaway).await?;
        if is_aged {
            debug!(address = %self.plane.address, "connected to the control plane")
        } else {
            info!(address = %self.plane.address, "connected to the control plane")
        }
        self.connected.notify_one();
        state.store.connected();
        self.metrics.xds.connected();
        self.status.set_discovery(|known| known.connect(SystemTime::now()));
        self.apply(state, &requests, responses, useful).await
    }

    /// Applies responses and sends the answers until the stream ends.
    async fn apply(
        &self,
        state: &mut State,
        requests: &mpsc::Sender<DeltaDiscoveryRequest>,
        mut responses: Messages,
        useful: &mut bool,
    ) -> Result<(), Ended> {
        let mut next = Instant::now();
        let mut answered = Instant::now();
        loop {
            let missing = unanswered(&state.client).count();
            let response = tokio::select! {
                response = awaited(&state.client, answered, &mut responses) => response?,
                () = state.answers.wait_deadline() => {
                    self.report_complete(state);
                    continue;
                }
                () = state.store.lost() => return Err(state.request_all()),
                () = state.store.hold.end() => {
                    let changes = self.release(state, "its time has passed");
                    self.send_all(requests, changes).await?;
                    continue;
                }
                () = self.status.release.notified() => {
                    let changes = self.release(state, "requested by `strait release`");
                    self.send_all(requests, changes).await?;
                    continue;
                }
            };
            let Some(response) = response else { break };
            let heard = Instant::now();
            let drained = self.drain_batch(response, next, &mut responses, requests, state).await;
            // Accepted resources are published even if the stream broke: the next stream reports
            // their versions as in force.
            let changes = self.publish(state);
            next = Instant::now();
            self.metrics.times().propagated(next - heard);
            next += match drained? {
                ..=1 => SNAPSHOTS_APART,
                // There may be more.
                MESSAGES_MAX.. => Duration::ZERO,
                _ => BATCHES_APART,
            };
            if unanswered(&state.client).count() < missing {
                answered = heard;
            }
            self.send_all(requests, changes).await?;
            *useful = true;
            self.status.set_discovery(|known| known.retries = 0);
        }
        Ok(())
    }

    /// Opens a stream on a new connection, with the first requests.
    async fn open(
        &self,
        client: &mut Client,
        goaway: &GoAwayCode,
    ) -> Result<(mpsc::Sender<DeltaDiscoveryRequest>, Messages), Ended> {
        let channel = channel::connect(&self.plane, goaway.clone()).await?;
        let (requests, outgoing) = mpsc::channel(REQUESTS_MAX);
        for request in client.connected() {
            self.send(&requests, request).await?;
        }
        let mut call = tonic::Request::new(());
        channel::add_credentials(&self.plane, &self.pod.cluster, &mut call).await?;
        let (metadata, ..) = call.into_parts();
        let outgoing = ReceiverStream::new(outgoing);
        let called = call::open(channel, METHOD, metadata, outgoing, MESSAGE_BYTES_MAX);
        let late = || GrpcStatus::deadline_exceeded("the call timed out");
        let called = timeout(CALL_DEADLINE, called).await;
        let responses = called.map_err(|_| late())??;
        Ok((requests, responses))
    }

    /// Applies a message and those that arrive before the next snapshot is due. Returns their
    /// number.
    ///
    /// Until then the thread waits, rather than the task, so that they do not wake it one by one:
    /// a thread that wakes a thousand times a second delays the tunnels of its core.
    async fn drain_batch(
        &self,
        first: Push,
        due: Instant,
        responses: &mut Messages,
        requests: &mpsc::Sender<DeltaDiscoveryRequest>,
        state: &mut State,
    ) -> Result<usize, Ended> {
        park_timeout(due.saturating_duration_since(Instant::now()));
        // The first turn of the runtime finds the socket readable, the second reads it.
        yield_now().await;
        yield_now().await;
        let (mut next, mut count) = (Some(first), 0);
        while let Some(push) = next.take() {
            let response = push.response;
            // Both are echoed in the answer.
            if response.nonce.len().max(response.type_url.len()) > WORD_BYTES_MAX {
                return Err(GrpcStatus::internal("a nonce or a type is too long").into());
            }
            let url = metric_label(&response.type_url);
            self.metrics.xds.message(url, push.bytes);
            let version: String = push.version.chars().take(WORD_SHOWN).collect();
            for request in state.client.received(response, &mut state.store) {
                self.answers(url, &version, request.error.is_none());
                self.send(requests, request).await?;
            }
            count += 1;
            if count < MESSAGES_MAX {
                next = before(due, responses).await?;
            }
        }
        Ok(count)
    }

    async fn send_all(
        &self,
        to: &mpsc::Sender<DeltaDiscoveryRequest>,
        requests: Vec<Request>,
    ) -> Result<(), Ended> {
        for request in requests {
            self.send(to, request).await?;
        }
        Ok(())
    }

    async fn send(
        &self,
        requests: &mpsc::Sender<DeltaDiscoveryRequest>,
        request: Request,
    ) -> Result<(), Ended> {
        if let Some(error) = &request.error
            && let Some(suppressed) = self.metrics.xds.nacked(metric_label(&request.type_url))
        {
            // Quoted, because names and reasons come from the server.
            warn!(type_url = ?request.type_url, ?error,
                suppressed = (suppressed > 0).then_some(suppressed),
                "rejected resources of the control plane");
        }
        let request = self.message(request);
        let sent = timeout(CALL_DEADLINE, requests.send(request)).await;
        match sent {
            Ok(Ok(())) => Ok(()),
            _ => Err(GrpcStatus::cancelled("the control plane reads no requests").into()),
        }
    }

    /// Publishes changes and updates status and readiness. Returns the resulting changes of the
    /// subscription.
    fn publish(&self, state: &mut State) -> Vec<Request> {
        let State { client, store, .. } = &mut *state;
        if client.pending().chain(client.without_response()).all(|url| url != AUTHORIZATION) {
            store.set_policies_received();
        }
        let changes = self.follow(state);
        self.report_hold(&mut state.store);
        self.update_types(state);
        let State { client, store, .. } = &*state;
        let rejected = client.rejected().map(|(_, name, why, _)| format!("{name}: {why}"));
        let rejected: Vec<_> = rejected.take(REJECTED_SHOWN).collect();
        let result = if rejected.is_empty() { Ok(()) } else { Err(rejected.join("; ")) };
        let notice = store.restored.as_deref().filter(|_| !client.is_synced());
        let result = result.and_then(|()| notice.map_or(Ok(()), |notice| Err(notice.to_owned())));
        self.status.set_reload(ReloadSource::Mesh, result.map(|()| None));
        self.report_complete(state);
        changes
    }

    /// Subscribes to exactly the endpoints that clusters refer to, and publishes changes. Returns
    /// the changes of the subscription.
    fn follow(&self, state: &mut State) -> Vec<Request> {
        let State { client, store, .. } = state;
        let names = store.store.take_eds_names();
        let changes = names.map(|names| client.set_wanted(ENDPOINT, &names, store));
        self.update(store);
        changes.unwrap_or_default()
    }

    /// Reports the first complete state to readiness and the cache.
    fn report_complete(&self, state: &mut State) {
        let State { client, store, answers } = state;
        let complete = client.is_synced() && answers.are_complete(client);
        if complete {
            self.status.clear_pending(self.pending);
        }
        // A cached partial state would be served as complete, for example without its policies.
        if complete || store.restored.is_some() {
            store.save();
        }
    }

    /// Records the answer to a response: ACK or NACK.
    fn answers(&self, url: &'static str, version: &str, accepted: bool) {
        if accepted {
            self.metrics.xds.accepted(url);
        }
        self.status
            .set_discovery(|known| known.record_answer(display_name(url), version, accepted));
    }

    fn update_types(&self, State { client, store, .. }: &State) {
        let now = SystemTime::now();
        let types = client.types().map(|url| {
            let rejected = client.rejected().filter(|(of, ..)| *of == url);
            let rejection = |(_, name, reason, version): (_, &str, &str, &str)| Rejection {
                name: name.to_owned(),
                reason: reason.to_owned(),
                version: version.to_owned(),
                since: now,
            };
            let (unused, unused_first) = store.store.unused(url);
            let reported = ResourceType {
                name: display_name(url).into(),
                synced: missing(client).all(|missing| missing != url),
                held: client.held(url),
                rejected: rejected.clone().count() + client.unlisted_rejections(url),
                at_least: client.unlisted_rejections(url) > 0,
                rejections: rejected.take(REJECTED_KEPT).map(rejection).collect(),
                unused,
                unused_first,
                ..ResourceType::default()
            };
            self.metrics.xds.create_type(url);
            self.metrics.xds.set_resources(url, reported.held, reported.rejected);
            reported
        });
        let types = types.collect();
        let from_disk = store.restored.as_deref().filter(|_| !client.is_synced());
        self.status.set_discovery(|known| {
            known.address = self.plane.address.to_string();
            known.from_disk = from_disk.map(ToOwned::to_owned);
            known.set_types(types);
        });
        let missing = missing(client).map(display_name).collect();
        self.status.missing(self.pending, missing);
    }

    /// Publishes changes as the next snapshot.
    fn update(&self, store: &mut Recorder) {
        let network: Arc<str> = self.pod.network.as_str().into();
        let tables = store.store.tables();
        let change = Change {
            mesh: tables.take_change().map(|mesh| (mesh, network)),
            exports: tables.take_exports(),
            policies: store.store.take_policies(),
            ..Change::default()
        };
        if change.mesh.is_none() && change.exports.is_none() && change.policies.is_none() {
            return;
        }
        self.publisher.update(change);
    }

    fn message(&self, request: Request) -> DeltaDiscoveryRequest {
        DeltaDiscoveryRequest {
            node: request.with_node.then(|| self.kind.node(&self.pod)),
            type_url: request.type_url.into_owned(),
            resource_names_subscribe: request.subscribe,
            resource_names_unsubscribe: request.unsubscribe,
            initial_resource_versions: request.initial_versions,
            response_nonce: request.nonce,
            error_detail: request.error.map(|message| rpc::Status {
                code: INVALID_ARGUMENT,
                message,
                ..rpc::Status::default()
            }),
        }
    }
}

/// Returns the types that have to be answered on this stream. istiod answers each of its types, if
/// need be with nothing. Another server may stay silent about a type without changes.
fn unanswered(client: &Client) -> impl Iterator<Item = &'static str> {
    let is_istiod = client.types().any(|url| url == AUTHORIZATION);
    let is_needed = move |url: &&'static str| is_istiod || client.pending().any(|of| of == *url);
    client.without_response().filter(is_needed)
}

/// Returns the next message. The deadline of [`SILENCE_MAX`] holds while a type is [`unanswered`],
/// whatever the others receive. Afterwards the server may stay silent, and PING detects its loss.
async fn awaited(
    client: &Client,
    answered: Instant,
    responses: &mut Messages,
) -> Result<Option<Push>, Ended> {
    if unanswered(client).next().is_none() {
        return Ok(response(responses).await?);
    }
    let reported = timeout_at(answered + SILENCE_MAX, response(responses)).await;
    Ok(reported.map_err(|_| {
        let missing: Vec<_> = unanswered(client).map(display_name).collect();
        let missing = missing.join(", ");
        Ended {
            end: StreamEnd::Status,
            why: format!("no first response within {SILENCE_MAX:?}: {missing}"),
            is_broken: false,
        }
    })??)
}

/// Returns the next message if it arrives before `due`.
async fn before(due: Instant, responses: &mut Messages) -> Result<Option<Push>, GrpcStatus> {
    match timeout_at(due, response(responses)).await {
        // The next call returns the end of the stream again.
        Ok(message) => message,
        Err(_) => Ok(None),
    }
}

/// Returns the next response, or `None` at the end of the stream.
async fn response(responses: &mut Messages) -> Result<Option<Push>, GrpcStatus> {
    let Some(message) = responses.next().await? else {
        return Ok(None);
    };
    push::read(&message)
        .map(Some)
        .map_err(|why| GrpcStatus::internal(format!("no discovery response: {why}")))
}
