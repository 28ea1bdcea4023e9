//! Tunnel without an endpoint, and the stages that find one and dial it.

use std::sync::Arc;

use tokio::time::Instant;

use crate::datapath::binding::Binding;
use crate::datapath::dial::{self, TOTAL_DIAL_TIMEOUT, Upstream};
use crate::datapath::http2::tunnel::Target;
use crate::datapath::identity::Peer;
use crate::datapath::listener::ListenerTarget;
use crate::datapath::policy::{self, Permit, Rejection};
use crate::datapath::route::{self, Route};
use crate::datapath::{DataPath, authorize, balance};
use crate::reason::Reason;
use crate::snapshot::{Endpoint, Service, Snapshot};
use crate::telemetry::{Destination, DestinationService, Proximity, Record, RemoteNetwork};
use crate::wire::sni::RouteBy;
use crate::wire::{GatewayHash, ServiceLoad};

use super::open::{Open, StreamGuards};
use super::tries::Tries;

/// Limit of gateways of which the log of one connection says why they are not used.
const UNUSED_SHOWN_MAX: usize = 4;

/// Tunnel that has no endpoint yet.
#[derive(Debug)]
pub struct NewTunnel {
    pub data_path: Arc<DataPath>,
    pub peer: Arc<Peer>,
    /// Generation of the snapshot before the tunnel was permitted.
    pub generation: u64,
    pub record: Record,
}

impl NewTunnel {
    /// Creates a tunnel that no rule was evaluated for yet.
    pub fn new(data_path: &Arc<DataPath>, peer: &Arc<Peer>, record: Record) -> Self {
        Self {
            generation: *data_path.reader.generation().borrow(),
            data_path: Arc::clone(data_path),
            peer: Arc::clone(peer),
            record,
        }
    }

    /// Decides about the target of a CONNECT, and records its service.
    pub(super) fn resolve(
        &mut self,
        target: Result<Target, Reason>,
    ) -> Result<(Permit, RouteBy), Reason> {
        let snapshot = self.data_path.reader.load();
        let own = || self.data_path.outer.own_hash(&snapshot);
        let room = self.data_path.budget.has_room().then_some(()).ok_or(Reason::BuffersFull);
        let decided = decide_connect(&snapshot, &self.peer, room, own, target);
        record_decision(&mut self.record, decided)
    }

    /// Decides about the target of a TLS listener, and records its service. `register` detects
    /// loops.
    pub(super) fn resolve_passthrough<L>(
        &mut self,
        register: impl FnOnce(&mut Record) -> Result<L, Reason>,
        target: Result<ListenerTarget, Reason>,
    ) -> Result<(Permit, L), Reason> {
        let (snapshot, room) = (self.data_path.reader.load(), self.check_room());
        let register = || register(&mut self.record);
        let decided = decide_passthrough(&snapshot, &self.peer, room, register, target);
        record_decision(&mut self.record, decided)
    }

    /// Decides about a client of a binding, and finds the gateways. `counted` counts it among the
    /// connections of the binding.
    pub(super) fn resolve_binding<T>(
        &mut self,
        binding: Arc<Binding>,
        counted: Result<T, Reason>,
    ) -> Result<(Permit, T), Reason> {
        let (snapshot, room) = (self.data_path.reader.load(), self.check_room());
        let decided = decide_binding(&snapshot, &self.peer, &binding, counted, room);
        let (permit, counted) = decided.map_err(|rejection| rejection.reason)?;
        // The binding was read before `generation`, and may have changed since.
        policy::check_binding(&snapshot, &self.peer, &binding).map_err(|why| {
            self.record.set_detail(why.to_owned());
            Reason::Revoked
        })?;
        if permit.route().endpoints.endpoints.is_empty() {
            let clusters = binding.clusters();
            let detail = format!("no gateway of {clusters} has an address, except evacuated ones");
            let unused = binding.endpoints.unused(&snapshot).into_iter().take(UNUSED_SHOWN_MAX);
            let unused = unused.map(|(gateway, why)| format!("; {gateway}: {why}"));
            self.record.set_detail(detail + &unused.collect::<String>());
        }
        Ok((permit, counted))
    }

    /// Checks that the tunnel may hold bytes.
    fn check_room(&self) -> Result<(), Reason> {
        let budget = &self.data_path.budget;
        budget.check_room(&budget.pool().account(&self.peer.charged_source()))
    }

    /// Returns the load of the service for a gateway of another network: the endpoints of this
    /// network, and the tightest limit of concurrent tunnels.
    pub(super) fn load(&self, permit: &Permit) -> ServiceLoad {
        let snapshot = self.data_path.reader.load();
        let route = permit.route();
        let here = route.service.ports.get(&route.port);
        let of_service = policy::free_percent(&snapshot, &self.peer, route);
        ServiceLoad {
            ready: here.map_or(0, |set| set.weight()),
            free_percent: of_service.min(self.data_path.admission.pool.free_percent()),
        }
    }

    /// Picks, authorizes and dials, unless `cancelled` completes or the drain ends before. The
    /// exposure of the service may limit the time.
    pub(super) async fn establish(
        &mut self,
        permit: Permit,
        cancelled: impl Future<Output = Reason>,
    ) -> Result<Upstream, Reason> {
        let Self { data_path, peer, record, .. } = self;
        let limit = permit.connect_timeout();
        let deadline = Instant::now() + limit.unwrap_or(TOTAL_DIAL_TIMEOUT);
        let classify = |reason: Reason| {
            let is_late = reason.is_retriable() && deadline <= Instant::now();
            match limit {
                Some(_) if is_late => Reason::ConnectTimeout,
                _ => reason,
            }
        };
        let mut upstream = tokio::select! {
            // A stream that has ended while its task waited for the worker needs no endpoint.
            biased;
            reason = cancelled => return Err(reason),
            upstream = pick_and_dial(data_path, peer, permit, record, deadline) => {
                upstream.map_err(classify)?
            }
            () = peer.listener.drain.closing() => return Err(Reason::DrainDeadline),
        };
        self.check_still_permitted(&mut upstream)?;
        Ok(upstream)
    }

    /// Checks a tunnel that has waited for its endpoint against the rights of now. Like an open
    /// one, it keeps its route as long as these permit it.
    fn check_still_permitted(&mut self, upstream: &mut Upstream) -> Result<(), Reason> {
        let snapshot = self.data_path.reader.load();
        if snapshot.generation == self.generation && self.peer.lost_trust().is_none() {
            return Ok(());
        }
        let permitted = upstream.reevaluate(&snapshot, &self.data_path, &self.peer);
        self.generation = snapshot.generation;
        permitted.map_err(|why| {
            self.record.set_detail(why);
            Reason::Revoked
        })
    }

    /// Returns the tunnel to the endpoint that was dialled.
    pub(super) fn open(self, upstream: Upstream, guards: Option<StreamGuards>) -> Open {
        let Self { data_path, peer, generation, mut record } = self;
        let endpoint = &upstream.grant.endpoint;
        let proximity = proximity(&data_path.reader.load(), endpoint);
        let remote = remote_network(endpoint);
        let workload = endpoint.labels();
        record.set_open(destination(endpoint), workload, remote, proximity);
        Open { data_path, peer, generation, upstream, record, since: Instant::now(), guards }
    }
}

/// Decides about the target of a CONNECT: resolves it and evaluates policy. Also returns the
/// routing mode of the service, which is the listener's unless it has its own. `own` is the hash of
/// this gateway.
pub fn decide_connect(
    snapshot: &Snapshot,
    peer: &Peer,
    room: Result<(), Reason>,
    own: impl FnOnce() -> Option<GatewayHash>,
    target: Result<Target, Reason>,
) -> Result<(Permit, RouteBy), Rejection> {
    // Checked after the generation was obtained: a later loss of trust changes the generation.
    if peer.lost_trust().is_some() {
        return Err(Reason::Revoked.into());
    }
    room?;
    let target = target?;
    dial::remote::check_loop(own, target.forwarded())?;
    let route = route::resolve(snapshot, peer, target)?;
    let of_service = snapshot.route_by(route.requested());
    let route_by = of_service.unwrap_or_else(|| peer.listener.rules().route_by());
    Ok((policy::run(snapshot, peer, route)?, route_by))
}

/// Decides about the target of a TLS listener: resolves it and evaluates policy. Also returns the
/// entry of the ClientHello in the detection of loops.
pub fn decide_passthrough<L>(
    snapshot: &Snapshot,
    peer: &Peer,
    room: Result<(), Reason>,
    register: impl FnOnce() -> Result<L, Reason>,
    target: Result<ListenerTarget, Reason>,
) -> Result<(Permit, L), Rejection> {
    room?;
    let registered = register()?;
    let route = route::resolve_passthrough(snapshot, peer, target?)?;
    Ok((policy::run(snapshot, peer, route)?, registered))
}

/// Decides about a connection of a verified client of a binding, and finds the gateways. `counted`
/// counts it among the connections of the binding.
pub fn decide_binding<T>(
    snapshot: &Snapshot,
    peer: &Peer,
    binding: &Arc<Binding>,
    counted: Result<T, Reason>,
    room: Result<(), Reason>,
) -> Result<(Permit, T), Rejection> {
    let counted = counted?;
    if !binding.admits(peer.policy_source(), snapshot) {
        return Err(Reason::NotForPeer.into());
    }
    room?;
    let route = Route::of_binding(snapshot, Arc::clone(binding));
    Ok((policy::run(snapshot, peer, route)?, counted))
}

/// Records the service of a decided target.
fn record_decision<T>(
    record: &mut Record,
    decided: Result<(Permit, T), Rejection>,
) -> Result<(Permit, T), Reason> {
    let route = match &decided {
        Ok((permit, _)) => Some(permit.route()),
        Err(Rejection { route, .. }) => route.as_deref(),
    };
    if let Some(route) = route {
        let first_peer = route.first_peer().map(|first| &*first.principal);
        record.set_service(labels(&route.service), first_peer);
    } else if let Err(Rejection { reason: Reason::BadSource, .. }) = decided {
        record.set_detail("x-strait-source is malformed, or was sent twice".to_owned());
    }
    decided.map_err(|rejection| rejection.reason)
}

/// Picks and dials until an endpoint answers, none is left, or the deadline has passed.
async fn pick_and_dial(
    data_path: &DataPath,
    peer: &Peer,
    mut permit: Permit,
    record: &mut Record,
    deadline: Instant,
) -> Result<Upstream, Reason> {
    if let Some(category) = balance::draw_drop_category(permit.route().drops()) {
        record.set_detail(format!("dropped by drop_overloads of the control plane: {category:?}"));
        return Err(Reason::DropOverload);
    }
    let mut tries = Tries::new(permit.route().is_from_client(), deadline);
    let links = data_path.link_factors(peer);
    let mut reason = permit.route().reason_without_endpoint();
    if permit.route().endpoints.endpoints.is_empty()
        && let Some(why) = permit.route().detail()
    {
        record.set_detail(why);
    }
    while Instant::now() < deadline {
        tries.admit(&permit.route().endpoints, deadline, record)?;
        let Ok(pick) = balance::pick(permit, &tries.tried, &links) else {
            break;
        };
        let (endpoints, endpoint) = (&pick.route().endpoints, pick.endpoint());
        if dial::remote::avoid(data_path, endpoints, endpoint) {
            permit = pick.into_permit();
            continue;
        }
        tries.begin(endpoint);
        let try_end = tries.deadline(data_path, endpoints, endpoint, deadline);
        // In place of nested matches, which would keep the first result while the second waits.
        let failed = 'failed: {
            let authorized = match authorize::run(data_path, peer, pick) {
                Ok(authorized) => authorized,
                Err(denied) => break 'failed denied,
            };
            match dial::run(data_path, peer, authorized, record, try_end).await {
                Ok(upstream) => return Ok(upstream),
                Err(failed) => failed,
            }
        };
        (reason, permit) = (failed.failure.reason, failed.permit);
        let endpoints = &permit.route().endpoints;
        tries.next(data_path, failed.failure, endpoints, failed.endpoint, record)?;
    }
    Err(reason)
}

/// Returns the service in logs and metrics.
pub(super) fn labels(service: &Service) -> DestinationService {
    DestinationService {
        hostname: Arc::clone(&service.hostname),
        name: Arc::clone(&service.name),
        namespace: Arc::clone(&service.namespace),
    }
}

/// Returns the destination in logs and metrics.
fn destination(endpoint: &Endpoint) -> Destination {
    Destination { address: endpoint.address, pod: Arc::clone(&endpoint.definition) as _ }
}

/// Returns the network of an endpoint behind a gateway, for the counts of bytes.
fn remote_network(endpoint: &Endpoint) -> Option<RemoteNetwork<'_>> {
    let remote = endpoint.remote.as_ref()?;
    Some(RemoteNetwork { cluster: &remote.cluster, network: &remote.network })
}

/// Returns the distance of an endpoint, for the times of tunnels.
fn proximity(snapshot: &Snapshot, endpoint: &Endpoint) -> Proximity {
    let (own, its) = (&snapshot.balancing.position.locality, &endpoint.definition.locality);
    if endpoint.remote.is_some() {
        Proximity::Remote
    } else if own.region.is_empty() || own.region != its.region {
        Proximity::Network
    } else if own.zone.is_empty() || own.zone != its.zone {
        Proximity::Region
    } else {
        Proximity::Zone
    }
}
