//! Stages 5 to 10 for a connection of a local client, which a binding leads to a service of other
//! clusters.
//!
//! The listener has checked the address of the client. A binding with `to` verifies its identity
//! besides. The gateway and, inside its tunnel, the workload are verified before a byte of the
//! client is sent.

use std::future::poll_fn;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};
use tokio_rustls::server::TlsStream;

use crate::datapath::accept::{AcceptedConnection, ConnectionResources};
use crate::datapath::binding::Binding;
use crate::datapath::copy::{CopyOutcome, local};
use crate::datapath::dial::{TOTAL_DIAL_TIMEOUT, remote};
use crate::datapath::handshake::{self, HandshakeError};
use crate::datapath::identity::{self, Peer};
use crate::datapath::io::linger;
use crate::datapath::io::shared_socket::SharedSocket;
use crate::datapath::limits::budget::BufferAccount;
use crate::datapath::limits::descriptors::{Holders, LimitReached, TunnelDescriptor};
use crate::datapath::{DataPath, balance};
use crate::limits::{Held, Source};
use crate::outer::{self, Failure, InnerTarget, Servers, Stream};
use crate::reason::{HandshakeRefusal, Reason};
use crate::snapshot::{Endpoint, EndpointSet, InFlight, Snapshot};
use crate::telemetry::{ConnectionGuard, Record};

use super::establish::{destination, remote_network};
use super::open::revoke_delay;
use super::tries::Tries;

/// Limit of gateways of which the log of one connection says why they are not used.
const UNUSED_SHOWN_MAX: usize = 4;

/// Connection of a local client.
#[derive(Debug)]
struct Client {
    data_path: Arc<DataPath>,
    peer: Arc<Peer>,
    binding: Arc<Binding>,
    record: Record,
    socket: SharedSocket,
    /// TLS above the socket, of a client with an identity.
    tls: Option<Box<TlsStream<SharedSocket>>>,
    /// Account of the bytes that wait in this process.
    account: Arc<BufferAccount>,
    _guards: (ConnectionResources, ConnectionGuard),
}

/// Open tunnel to the service through a gateway.
#[derive(Debug)]
struct GatewayTunnel {
    stream: Stream,
    endpoint: Arc<Endpoint>,
    _held: (InFlight, TunnelDescriptor),
}

/// Accepted connection of a client that may use the binding as far as its certificate decides.
struct VerifiedClient {
    peer: Peer,
    socket: SharedSocket,
    tls: Option<Box<TlsStream<SharedSocket>>>,
    resources: ConnectionResources,
}

/// Connection of a local client, forwarded through an open tunnel.
#[derive(Debug)]
struct Connection {
    client: Client,
    upstream: GatewayTunnel,
    _counted: Held,
}

/// Forwards one connection: verifies the client, picks a gateway, opens the tunnel, copies. A
/// connection that fails is reset, as no answer in its protocol is known.
pub fn run(data_path: Arc<DataPath>, accepted: AcceptedConnection) -> impl Future<Output = ()> {
    // Boxed, as the end: both need far more memory than the copy between them.
    let established = Box::pin(establish(data_path, accepted));
    async move {
        let Some(mut connection) = established.await else {
            return;
        };
        let Connection { client, upstream, .. } = &mut *connection;
        let outcome = client.copy(upstream).await;
        Box::pin(connection.end(outcome)).await;
    }
}

/// Verifies the client and opens the tunnel, or records the reason for which that failed.
async fn establish(
    data_path: Arc<DataPath>,
    accepted: AcceptedConnection,
) -> Option<Box<Connection>> {
    let (address, listener) = (accepted.address, Arc::clone(&accepted.listener));
    let binding = listener.binding()?;
    let VerifiedClient { peer, socket, tls, resources } =
        match Box::pin(verify_client(&data_path, accepted, &binding)).await {
            Ok(session) => session,
            Err(refused) => {
                refused.close(&data_path, address).await;
                return None;
            }
        };
    let mut record = Record::new(&data_path.metrics, &peer.source, &binding.authority);
    record.set_service(binding.service.clone(), None);
    let account = data_path.budget.account(&peer.charged_source());
    let mut client = Client {
        peer: Arc::new(peer),
        record,
        socket,
        tls,
        account,
        _guards: (resources, data_path.metrics.connection_opened()),
        binding,
        data_path,
    };
    let counted = listener.clients.open(address.ip(), client.binding.limits);
    match client.open(counted).await {
        Ok((upstream, _counted)) => Some(Box::new(Connection { client, upstream, _counted })),
        Err(reason) => {
            client.record.finish(reason);
            None
        }
    }
}

/// Performs the handshake and authenticates the client, if the binding requires an identity.
async fn verify_client(
    data_path: &DataPath,
    accepted: AcceptedConnection,
    binding: &Binding,
) -> Result<VerifiedClient, HandshakeError> {
    let (address, listener) = (accepted.address, Arc::clone(&accepted.listener));
    if binding.requires_identity() {
        let (stream, mut resources) = handshake::run_local(data_path, accepted).await?;
        let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let descriptor = &mut resources.descriptor;
        let peer = identity::admit(data_path, certificates, (address, listener), descriptor)?;
        return Ok(VerifiedClient {
            peer,
            socket: stream.get_ref().0.clone(),
            tls: Some(Box::new(stream)),
            resources,
        });
    }
    // Nothing is read from the client before the tunnel is open.
    let resources = accepted.resources;
    let socket = TcpStream::from_std(accepted.stream)
        .map_err(|error| HandshakeError::new(HandshakeRefusal::Other, &error))?;
    let peer = Peer {
        holders: Some(resources.descriptor.holders().clone()),
        ..Peer::unauthenticated(address, listener, None)
    };
    Ok(VerifiedClient { peer, socket: SharedSocket::new(socket), tls: None, resources })
}

impl Client {
    /// Opens the tunnel, unless the client resets its connection or the drain ends before.
    async fn open(
        &mut self,
        counted: Result<Held, String>,
    ) -> Result<(GatewayTunnel, Held), Reason> {
        let counted = counted.map_err(|full| {
            self.record.set_detail(full);
            Reason::BindingFull
        });
        let snapshot = self.data_path.reader.load();
        let (caller, room) = (self.peer.policy_source(), self.account.check_room());
        let counted = self.binding.decide(caller, &snapshot, counted, room)?;
        drop(snapshot);
        let drain = &self.peer.listener.drain;
        // A client that has sent FIN may still wait for the answer.
        let reset = self.socket.ready(Interest::ERROR);
        let (data_path, target) = (&*self.data_path, (&*self.binding, &self.account));
        let opened = pick_and_open(data_path, &self.peer, target, &mut self.record);
        let upstream = tokio::select! {
            opened = opened => opened?,
            _ = reset => return Err(Reason::DownstreamReset),
            () = drain.closing() => return Err(Reason::DrainDeadline),
        };
        let (endpoint, servers) = (&upstream.endpoint, upstream.stream.servers());
        let snapshot = self.data_path.reader.load();
        let target = (&*self.binding, &**endpoint);
        if let Some(why) = revocation(&snapshot, &self.peer, target, &servers) {
            self.record.set_detail(why);
            return Err(Reason::Revoked);
        }
        let remote = remote_network(endpoint);
        let destination = destination(endpoint);
        self.record.set_open(destination, endpoint.labels(), remote);
        Ok((upstream, counted))
    }

    /// Copies until the connection ends by itself, the drain deadline passes, the binding changes,
    /// or memory runs short.
    async fn copy(&mut self, upstream: &mut GatewayTunnel) -> CopyOutcome {
        let GatewayTunnel { stream, endpoint, .. } = upstream;
        let account = &self.account;
        account.open_gate();
        let servers = stream.servers();
        let (data_path, binding) = (&*self.data_path, &*self.binding);
        let revocation =
            || revocation(&data_path.reader.load(), &self.peer, (binding, endpoint), &servers);
        let mut stop = Box::pin(wait_for_stop(data_path, &self.peer, revocation));
        let stop = poll_fn(|cx| account.poll_gated(cx, |cx| stop.as_mut().poll(cx)));
        let idle = self.binding.config.idle;
        let (record, socket) = (&mut self.record, &self.socket);
        let copy = async {
            match &mut self.tls {
                Some(tls) => {
                    let client = (&**socket, &mut **tls);
                    Box::pin(local::run(client, stream, idle, account, record)).await
                }
                None => {
                    let client = (&**socket, &mut socket.clone());
                    local::run(client, stream, idle, account, record).await
                }
            }
        };
        let (reason, why) = tokio::select! {
            biased;
            outcome = copy => return outcome,
            stopped = stop => stopped.unwrap_or((Reason::BuffersFull, None)),
        };
        if let Some(why) = why {
            self.record.set_detail(why);
        }
        CopyOutcome::broken(reason)
    }
}

impl Connection {
    /// Ends both sides in the same way.
    async fn end(self: Box<Self>, outcome: CopyOutcome) {
        // Their order is that of the drops, from the last one to the first.
        let Self {
            _counted,
            upstream: GatewayTunnel { stream, endpoint, _held },
            client: Client { peer, mut record, socket, tls, _guards, .. },
        } = *self;
        let CopyOutcome { result, delivery_deadline } = outcome;
        record.finish(result.err().unwrap_or(Reason::Completed));
        if result.is_ok() {
            endpoint.state.restore(Instant::now());
            linger::disable_reset_on_close(&socket);
        } else if let Some(deadline) = delivery_deadline {
            drop((socket, tls));
            // The connection is counted as long as its tunnel.
            let delivery = stream.deliver(deadline);
            peer.listener.drain.run_until_closed(delivery).await;
            return;
        }
        // Before the sockets, so that a client that sees the end finds it counted.
        drop(record);
    }
}

/// Picks gateways and opens a tunnel through one, until one succeeds, none is left, or the time
/// budget is used up.
async fn pick_and_open(
    data_path: &DataPath,
    peer: &Peer,
    (binding, account): (&Binding, &Arc<BufferAccount>),
    record: &mut Record,
) -> Result<GatewayTunnel, Reason> {
    let deadline = Instant::now() + TOTAL_DIAL_TIMEOUT;
    let endpoints = binding.endpoints.load(&data_path.reader.load());
    // No gateway is before this one, so a loop ends the way through the picked gateway alone.
    let (mut tries, mut reason) = (Tries::new(true, deadline), Reason::NoEndpoint);
    let links = data_path.link_factors(peer);
    let source = peer.charged_source();
    if endpoints.endpoints.is_empty() {
        let clusters = binding.clusters();
        let detail =
            format!("no gateway of {clusters} has an address, except in evacuated regions");
        let unused = binding.endpoints.unused(&data_path.reader.load());
        let unused = unused.into_iter().take(UNUSED_SHOWN_MAX);
        let unused = unused.map(|(gateway, why)| format!("; {gateway}: {why}"));
        record.set_detail(detail + &unused.collect::<String>());
    }
    while Instant::now() < deadline
        && let Some(endpoint) = balance::choose(&endpoints, &tries.tried, &links).cloned()
    {
        if remote::avoid(data_path, &endpoints, &endpoint) {
            continue;
        }
        let in_flight = InFlight::new(&endpoint.state);
        let holders = peer.holders.as_ref();
        let dialling = holders.map_or(Err(LimitReached::Share), Holders::dial);
        let dialling = dialling.map_err(|full| {
            record.set_detail(full.to_string());
            full.reason()
        })?;
        let started = Instant::now();
        endpoint.state.begin_dial(started);
        let target = (binding, account, &source);
        let pick = (&*endpoints, &*endpoint);
        let try_end = tries.deadline(data_path, pick.0, pick.1, deadline);
        let opened = open(data_path, pick, target, try_end);
        let failure = match Box::pin(opened).await {
            Ok(stream) => {
                let time = started.elapsed();
                endpoint.state.record_dial(time);
                data_path.metrics.dial_succeeded(time);
                return Ok(GatewayTunnel {
                    stream,
                    endpoint,
                    _held: (in_flight, dialling.connected()),
                });
            }
            Err(failure) => failure,
        };
        reason = failure.reason;
        tries.next(data_path, failure, &endpoints, endpoint, record)?;
    }
    Err(reason)
}

/// Opens the tunnel through one gateway and, unless the binding has `inner: tcp`, the connection to
/// the workload in it.
async fn open(
    data_path: &DataPath,
    (endpoints, endpoint): (&EndpointSet, &Endpoint),
    (binding, account, source): (&Binding, &Arc<BufferAccount>, &Source),
    deadline: Instant,
) -> Result<Stream, Failure> {
    let authority = &binding.authority;
    let at = (endpoints, endpoint);
    let tunnel = remote::open_bound(data_path, at, source, authority, deadline).await?;
    if !binding.is_inner_hbone() {
        return Ok(tunnel);
    }
    let target = InnerTarget {
        authority,
        cluster: &endpoint.definition.cluster,
        workloads: &binding.workloads,
    };
    let verified_by = (&*data_path.tls, &data_path.reader);
    let account = Arc::clone(account);
    let charge = move |bytes| account.share(bytes);
    let end = (&data_path.lifecycle, deadline);
    outer::open_inner((tunnel, charge), &target, verified_by, end).await
}

/// Waits until an open connection has to be stopped. Returns the reason, and the change that
/// revoked it.
async fn wait_for_stop(
    data_path: &DataPath,
    peer: &Peer,
    revocation: impl Fn() -> Option<String>,
) -> (Reason, Option<String>) {
    let revoked = async {
        let mut changes = data_path.reader.generation();
        loop {
            if let Some(why) = revocation() {
                Box::pin(sleep(revoke_delay())).await;
                return why;
            }
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    };
    let untrusted = async {
        match &peer.chain {
            Some(chain) => chain.wait_trust_lost().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = peer.listener.drain.closing() => (Reason::DrainDeadline, None),
        why = untrusted => (Reason::Revoked, Some(why.to_string())),
        why = revoked => (Reason::Revoked, Some(why)),
    }
}

/// Returns the change that revokes an open connection, if there is one: of the configuration, or of
/// the records and trust by which the client, the gateway and the workload were verified.
fn revocation(
    snapshot: &Snapshot,
    peer: &Peer,
    (binding, endpoint): (&Binding, &Endpoint),
    servers: &Servers,
) -> Option<String> {
    if let Some(refusal) = peer.lost_trust() {
        return Some(refusal.description().to_owned());
    }
    if !peer.is_admitted() {
        let what = "the binding's `clients` no longer contain the client's address";
        return Some(what.to_owned());
    }
    let now = peer.listener.binding();
    let admits = |now: &Arc<Binding>| now.admits(peer.policy_source(), snapshot);
    if !now.as_ref().is_some_and(admits) {
        return Some("the binding's `to` no longer contains the client".to_owned());
    }
    if !now.is_some_and(|now| now.leads_as(binding)) {
        return Some("the binding has another service, cluster or workloads".to_owned());
    }
    let known = endpoint.remote.as_ref()?;
    let wanted = snapshot.current_gateway(known, endpoint.address);
    let cluster = &endpoint.definition.cluster;
    let workload = servers.check_workload(&binding.workloads, cluster, snapshot);
    servers.check_gateway(&wanted, snapshot).and(workload).err()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::tests::future_size;

    #[test]
    fn an_idle_connection_stays_small() {
        let size = future_size(run);
        // Excludes `Connection`, which is boxed. A task adds a header of 152 bytes, and is rounded
        // up to a multiple of 128.
        assert!(size <= 872, "{size}");
    }
}
