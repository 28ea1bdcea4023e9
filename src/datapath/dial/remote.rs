//! Tunnels to endpoints that are reached through gateways of other networks.
//!
//! Each gateway adds its hash to `x-strait-via`, so a path that comes back ends after as many
//! tunnels as it has gateways.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

use crate::limits::Source;
use crate::outer::{
    self, Answer, Failure, InnerTarget, OpenError, Request, SOURCE_HEADER, Stream, Target,
};
use crate::reason::Reason;
use crate::snapshot::{Endpoint, EndpointSet};
use crate::wire::trace::{BAGGAGE, TRACEPARENT, is_forwarded};
use crate::wire::{GatewayHash, HOPS_MAX, ServiceLoad, Via};

use super::super::DataPath;
use super::super::balance::{Pick, Tried};
use super::super::first_peer::FirstPeer;
use super::super::http2::tunnel::Forwarded;
use super::super::identity::Peer;
use super::super::limits::budget::BufferAccount;

/// Shortest time for a try of a gateway while others are left, and time that the own network leaves
/// for gateways, as far as one whole dial has passed. A gateway whose first endpoint is dead
/// answers after [`DIAL_TIMEOUT`](super::DIAL_TIMEOUT).
pub const TRY_MIN: Duration = Duration::from_secs(3);
/// Time for which a service avoids the endpoint of an ejected gateway before it looks again.
const AVOIDANCE: Duration = Duration::from_secs(1);
/// Wait for a gateway after which its hostname is looked up again. A silent gateway may have been
/// replaced, and its failure takes up to five seconds.
const REFRESH_AFTER: Duration = Duration::from_secs(1);
/// Least wait of a tunnel for a gateway whose ejection has ended, while another endpoint is left.
const PROBE_WAIT: Duration = Duration::from_millis(250);

/// Rejects a tunnel that has passed this gateway already.
///
/// The list of any peer counts, not only of `trust.gateways`: it can only reject the peer's own
/// tunnel, and a gateway that is missing in `trust.gateways` must not make a loop endless.
///
/// # Errors
/// [`Reason::GatewayLoop`].
pub fn check_loop(
    own: impl FnOnce() -> Option<GatewayHash>,
    forwarded: Option<&Forwarded>,
) -> Result<(), Reason> {
    let Some(via) = forwarded.and_then(|forwarded| forwarded.via.as_deref()) else {
        return Ok(());
    };
    let passed = Via::parse(via).ok_or(Reason::GatewayLoop)?;
    let is_new = own().is_none_or(|own| !passed.contains(own));
    is_new.then_some(()).ok_or(Reason::GatewayLoop)
}

/// Returns the gateways that a tunnel has passed, with this one, for the next gateway.
///
/// # Errors
/// The tunnel has passed too many gateways.
pub fn extend_via(own: Option<GatewayHash>, forwarded: Option<&Forwarded>) -> Result<Via, String> {
    let passed = forwarded.and_then(|forwarded| forwarded.via.as_deref());
    let passed = passed.map_or_else(Via::default, |via| Via::parse(via).unwrap_or_default());
    let via = own.and_then(|own| passed.with(own));
    via.ok_or_else(|| format!("the tunnel has passed {HOPS_MAX} gateways"))
}

/// Returns the gateway of an endpoint of another network.
pub fn target(endpoint: &Endpoint) -> Option<Target> {
    let gateway = endpoint.remote.clone()?;
    let address = endpoint.address;
    Some(Target { address, gateway })
}

/// Suspends a picked endpoint if its gateway is ejected and the service has another endpoint.
/// Returns true if it was suspended now, and another endpoint should be picked. A suspended
/// endpoint is only picked if no other is left, and is then dialled. The time is short and no
/// ejection of the endpoint, so that the service uses the gateway again once that has recovered.
pub fn avoid(data_path: &DataPath, endpoints: &EndpointSet, endpoint: &Endpoint) -> bool {
    let is_out = target(endpoint).is_some_and(|target| {
        data_path.outer.is_ejected(&target) && has_alternative(data_path, endpoints, &target)
    });
    let now = Instant::now();
    is_out && endpoint.state.suspend(now, AVOIDANCE)
}

/// Opens a tunnel through the gateway of the picked endpoint and, for a binding without
/// `inner: tcp`, the connection to the workload in it, whose bytes are on `account`. `traceparent`
/// is that of the tunnel's own span.
pub(super) async fn open(
    pick: &Pick,
    (target, account): (&Target, &Arc<BufferAccount>),
    (data_path, peer): (&DataPath, &Peer),
    traceparent: Option<String>,
    deadline: Instant,
) -> Result<Stream, Failure> {
    let binding = pick.route().binding.as_ref();
    if peer.is_unauthenticated() && binding.is_none() {
        let what = "endpoints of other networks are reached only from HBONE listeners";
        return Err(Failure::new(Reason::DialDenied, what));
    }
    let request = request(data_path, peer, pick, traceparent.as_deref())?;
    let Some(holders) = pick.holders() else {
        return Err(Failure::new(Reason::OverShare, "the tunnel has no source"));
    };
    let at = (&*pick.route().endpoints, &**pick.endpoint());
    let tunnel = send(data_path, at, (target, holders.source()), &request, deadline).await?;
    let Some(binding) = binding.filter(|binding| binding.is_inner_hbone()) else {
        return Ok(tunnel);
    };
    let inner = InnerTarget {
        authority: &binding.authority,
        cluster: &pick.endpoint().definition.cluster,
        workloads: &binding.config.workloads,
    };
    let account = Arc::clone(account);
    let charge = move |bytes| account.share(bytes);
    let (verified_by, end) =
        ((&*data_path.tls, &data_path.reader), (&data_path.lifecycle, deadline));
    outer::open_inner((tunnel, charge), &inner, verified_by, end).await
}

/// Returns the deadline for a try of an endpoint. If it is behind a gateway, the time is divided
/// among the endpoints that are left, so that silent gateways do not use up the time of others, but
/// a try has at least three seconds, or half of the time.
pub fn deadline_of_try(
    data_path: &DataPath,
    endpoints: &EndpointSet,
    endpoint: &Endpoint,
    tried: &Tried,
    deadline: Instant,
) -> Instant {
    let Some(target) = target(endpoint) else {
        return deadline;
    };
    let now = Instant::now();
    // A gateway may be an endpoint of several groups, with one state.
    let mut counted: Vec<_> = tried.endpoints.iter().map(|one| &one.state).collect();
    let left_out = |other: &Endpoint| other.remote.is_none() && tried.is_own_network_left_out;
    let others = endpoints.endpoints.iter().filter(|other| !left_out(other));
    let left = others.filter(|other| {
        let is_counted = counted.iter().any(|one| Arc::ptr_eq(one, &other.state));
        let is_left = !is_counted && is_alternative(data_path, other, &target, now);
        counted.extend(is_left.then_some(&other.state));
        is_left
    });
    let time = deadline.saturating_duration_since(now);
    let least = TRY_MIN.min(time / 2);
    // More tries than these have the least time each, however many are left.
    let useful = time.as_millis() / least.as_millis().max(1);
    let tries = 1 + left.take(usize::try_from(useful).unwrap_or(0)).count();
    let share = time / u32::try_from(tries).unwrap_or(1);
    deadline.min(now + share.max(least))
}

/// Sends a CONNECT of a source to the gateway of an endpoint, and records the factors of its
/// weight. Ejects the gateway if it has failed, which a source alone cannot cause, and there is
/// another one.
pub async fn send(
    data_path: &DataPath,
    (endpoints, endpoint): (&EndpointSet, &Endpoint),
    (target, source): (&Target, &Source),
    request: &Request,
    deadline: Instant,
) -> Result<Stream, Failure> {
    // The pool dials the addresses that are not denied.
    let checked = target.addresses().map(|address| data_path.deny.check(address));
    if let Some(denied) = checked.reduce(Result::or) {
        denied?;
    }
    let is_retry = endpoint.state.is_suspended(Instant::now());
    let open = async {
        if is_retry && has_alternative(data_path, endpoints, target) {
            probe(data_path, endpoint, (target, source), request, deadline).await
        } else {
            let of = (target, source);
            data_path.outer.open(of, request, deadline).await
        }
    };
    let refresh = async {
        sleep(REFRESH_AFTER).await;
        data_path.reader.request_refresh(endpoint);
        std::future::pending().await
    };
    let opened = tokio::select! {
        opened = open => opened,
        never = refresh => never,
    };
    let opened = opened.map(|answer| {
        let now = Instant::now();
        endpoint.state.record_share(answer.weight_factor, now);
        if let Some(load) = answer.load {
            match ServiceLoad::parse(load.as_bytes()) {
                Some(load) => endpoint.record_load(load, now),
                None => {
                    data_path.metrics.loads_malformed.inc();
                }
            }
        }
        answer.stream
    });
    opened.map_err(|error| {
        let is_gateway = matches!(error, OpenError::Gateway(_));
        if is_gateway && has_alternative(data_path, endpoints, target) {
            data_path.outer.eject(target);
        }
        error.into()
    })
}

/// Sends the first CONNECT to a gateway after an ejection. The tunnel soon goes on to another
/// endpoint. A later answer ends the ejection, and counts as a dial, so that the next one may wait
/// longer.
async fn probe(
    data_path: &DataPath,
    endpoint: &Endpoint,
    (target, source): (&Target, &Source),
    request: &Request,
    deadline: Instant,
) -> Result<Answer, OpenError> {
    let (pool, state) = (data_path.outer.clone(), Arc::clone(&endpoint.state));
    let (target, source, request) = (target.clone(), source.clone(), request.clone());
    let (send, answer) = oneshot::channel();
    let wait = PROBE_WAIT.max(2 * Duration::from_millis(state.mean_dial_millis().into()));
    tokio::spawn(async move {
        let started = Instant::now();
        let opened = pool.open((&target, &source), &request, deadline).await;
        if let Err(Ok(_)) = send.send(opened) {
            state.record_dial(started.elapsed());
            state.end_ejection(Instant::now());
        }
    });
    let late = || {
        let detail = "the gateway did not answer the first CONNECT after its ejection in time";
        Err(OpenError::Tunnel(Failure::new(Reason::RemoteUnavailable, detail)))
    };
    let answered = timeout(wait, answer).await;
    answered.map_or_else(|_| late(), |opened| opened.unwrap_or_else(|_| late()))
}

/// Returns true if the service has another endpoint, here or behind a gateway, that is not ejected.
pub fn has_alternative(data_path: &DataPath, endpoints: &EndpointSet, target: &Target) -> bool {
    let now = Instant::now();
    let mut others = endpoints.endpoints.iter();
    others.any(|other| is_alternative(data_path, other, target, now))
}

/// Returns true if `other` is not reached through this gateway, and is not ejected.
fn is_alternative(data_path: &DataPath, other: &Endpoint, target: &Target, now: Instant) -> bool {
    let through = self::target(other);
    through.as_ref() != Some(target)
        && !other.state.is_ejected(now)
        && !through.is_some_and(|other| data_path.outer.is_ejected(&other))
}

/// Creates the CONNECT for the service of the picked endpoint, with our hash in `x-strait-via`.
/// The tunnel's own `traceparent`, if it has one, replaces the received one. Headers of traces that
/// the gateway could refuse are left out. That of a binding has no first peer.
///
/// # Errors
/// The tunnel has passed too many gateways, its first peer has no header, or this gateway has no
/// certificate for a binding yet.
fn request(
    data_path: &DataPath,
    peer: &Peer,
    pick: &Pick,
    traceparent: Option<&str>,
) -> Result<Request, Failure> {
    let fail = |detail: &str| Failure::new(Reason::GatewayLoop, detail);
    let forwarded = pick.route().forwarded();
    let traceparent = traceparent.map(str::as_bytes);
    let own = data_path.outer.own_hash(&data_path.reader.load());
    if let Some(binding) = &pick.route().binding {
        let via = own.and_then(|own| Via::default().with(own));
        let early = || Failure::new(Reason::GatewayUnreachable, "no certificate yet");
        let mut request = Request::new(binding.authority.to_string(), &via.ok_or_else(early)?);
        if let Some(traceparent) = traceparent {
            request.set(TRACEPARENT, traceparent);
        }
        return Ok(request);
    }
    let via = extend_via(own, forwarded).map_err(|detail| fail(&detail))?;
    let authority = pick.endpoint().remote_authority();
    let authority = authority.ok_or_else(|| fail("the endpoint names no service"))?;
    let mut request = Request::new(authority, &via);
    let received = forwarded.and_then(|forwarded| forwarded.source.as_deref());
    let is_set = match received.filter(|_| pick.route().first_peer().is_some()) {
        Some(trusted) => request.set(SOURCE_HEADER, trusted),
        None => request.set(SOURCE_HEADER, FirstPeer::header(peer).as_bytes()),
    };
    if !is_set {
        // Without the header, the next gateway would evaluate this gateway alone.
        let detail = "x-strait-source does not fit into a request";
        return Err(Failure::new(Reason::BadSource, detail));
    }
    let received = forwarded.and_then(|forwarded| forwarded.traceparent.as_deref());
    let baggage = forwarded.and_then(|forwarded| forwarded.baggage.as_deref());
    for (name, value) in [(TRACEPARENT, traceparent.or(received)), (BAGGAGE, baggage)] {
        if let Some(value) = value
            && !(is_forwarded(name, value) && request.set(name, value))
        {
            data_path.metrics.traces_dropped.inc(name);
        }
    }
    Ok(request)
}
