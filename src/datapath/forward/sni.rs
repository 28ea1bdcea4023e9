//! Tunnels that are routed by the server name of the TLS inside them, or whose server name has to
//! agree with the authority.
//!
//! A client sends its ClientHello once it has read 200, so 200 is answered first and later failures
//! are resets (docs/wire-contract.md 1.5). The ClientHello is kept and replayed unchanged.

use tokio::time::timeout;

use crate::datapath::client_hello::{
    CLIENT_HELLO_BYTES_MAX, CLIENT_HELLO_DEADLINE, ClientHelloReader,
};
use crate::datapath::http2::tunnel::Target;
use crate::reason::Reason;
use crate::telemetry::Record;
use crate::wire::sni;

use super::super::DataPath;
use super::super::dial::Upstream;
use super::super::identity::Peer;
use super::super::policy::{self, Permit};
use super::setup::{PendingConnect, Tunnel};
use super::{dial_and_answer, establish, resolve_and_evaluate};

/// Memory of a reader besides the replayed bytes, for a ClientHello of up to
/// `SMALL_HELLO_BYTES`: rustls' state and its own copy. Those of Istio and of browsers are not
/// larger.
const SMALL_HELLO_BYTES: usize = 2 * 1024;
const SMALL_READER_BYTES: usize = 8 * 1024;
/// Memory of a reader for larger ones: two copies, in buffers that grow by doubling.
const LARGE_READER_BYTES: usize = 4 * CLIENT_HELLO_BYTES_MAX;

/// Answers 200, then resolves, evaluates policy and dials for the server name. The authority's
/// service only has to be one that the peer may use.
pub(super) async fn route_by_server_name(
    gateway: &DataPath,
    peer: &Peer,
    requested: PendingConnect,
    permit: Permit,
    record: &mut Record,
) -> Result<(Tunnel, Upstream), Reason> {
    let tunnel = requested.accept()?;
    match establish_by_server_name(gateway, peer, &tunnel, permit, record).await {
        Ok(upstream) => Ok((tunnel, upstream)),
        Err(reason) => Err(tunnel.refuse(reason)),
    }
}

async fn establish_by_server_name(
    gateway: &DataPath,
    peer: &Peer,
    tunnel: &Tunnel,
    outer: Permit,
    record: &mut Record,
) -> Result<Upstream, Reason> {
    let name = server_name(peer, tunnel, record).await?;
    let (origin, port) = (outer.route().origin(), outer.route().asked().port);
    let forwarded = outer.route().forwarded().cloned().map(Box::new);
    let via_gateway = outer.route().via_gateway;
    drop(outer);
    let target = name.and_then(|name| sni::authority_of(&name, port));
    let target = target.map(|authority| Target {
        authority,
        origin,
        forwarded,
        via_gateway,
    });
    let (permit, _) =
        resolve_and_evaluate(gateway, peer, target.ok_or(Reason::UnknownSni), record)?;
    tokio::select! {
        upstream = establish(gateway, peer, permit, record) => upstream,
        reason = tunnel.cancelled() => Err(reason),
        () = peer.listener.drain.closing() => Err(Reason::DrainDeadline),
    }
}

/// Dials by the authority, answers 200, and holds the ClientHello until its server name is
/// confirmed as one of the service's. Otherwise the endpoint is closed by RST and has received
/// no byte.
pub(super) async fn dial_and_check_server_name(
    gateway: &DataPath,
    peer: &Peer,
    requested: PendingConnect,
    permit: Permit,
    record: &mut Record,
) -> Result<(Tunnel, Upstream), Reason> {
    let (tunnel, upstream) = dial_and_answer(gateway, peer, requested, permit, record).await?;
    let name = match server_name(peer, &tunnel, record).await {
        Ok(name) => name,
        Err(reason) => return Err(tunnel.refuse(reason)),
    };
    let snapshot = gateway.reader.load();
    match name
        .is_some_and(|name| policy::is_name_of_service(&snapshot, peer, &upstream.grant, &name))
    {
        true => Ok((tunnel, upstream)),
        false => Err(tunnel.refuse(Reason::SniMismatch)),
    }
}

/// Returns the server name of the tunnel's TLS, if its ClientHello has one. The ClientHello
/// stays in the tunnel.
async fn server_name(
    peer: &Peer,
    tunnel: &Tunnel,
    record: &mut Record,
) -> Result<Option<Box<str>>, Reason> {
    let read = tokio::select! {
        read = timeout(CLIENT_HELLO_DEADLINE, read(tunnel)) => read,
        () = peer.listener.drain.closing() => return Err(Reason::DrainDeadline),
    };
    let late = || {
        (
            Reason::NoClientHello,
            "no ClientHello within 5 s".to_owned(),
        )
    };
    match read.unwrap_or_else(|_| Err(late())) {
        Ok(name) => {
            record.set_inner_sni(name.as_deref());
            Ok(name)
        }
        Err((reason, detail)) => {
            record.set_detail(detail);
            Err(reason)
        }
    }
}

/// Reads the ClientHello and puts it back. Memory that is held meanwhile is charged to the
/// tunnel's account.
async fn read(tunnel: &Tunnel) -> Result<Option<Box<str>>, (Reason, String)> {
    let hold = |tunnel: &Tunnel, bytes| tunnel.account().hold(bytes);
    let _small = hold(tunnel, SMALL_READER_BYTES);
    let (mut reader, mut large) = (ClientHelloReader::default(), None);
    loop {
        let received = tunnel.receive().await;
        let received = received.map_err(|reason| (reason, String::new()))?;
        let Some(mut bytes) = received else {
            let what = "the peer closed its side before a ClientHello";
            return Err((Reason::NoClientHello, what.to_owned()));
        };
        let now = bytes.split_to(bytes.len().min(reader.remaining()));
        if CLIENT_HELLO_BYTES_MAX - reader.remaining() + now.len() > SMALL_HELLO_BYTES {
            large.get_or_insert_with(|| hold(tunnel, LARGE_READER_BYTES));
        }
        match reader.push(&now) {
            Ok(None) => {}
            Ok(Some(hello)) => {
                tunnel.unread(&bytes);
                tunnel.unread(&hello.bytes);
                return Ok(hello.sni);
            }
            Err(refused) => return Err((Reason::NoClientHello, refused.detail)),
        }
    }
}
