//! Tunnels that are routed by the server name of the TLS inside them, or whose server name has to
//! agree with the authority.
//!
//! A client sends its ClientHello once it has read 200, so 200 is answered first and later failures
//! are resets (docs/wire-contract.md 1.5). The ClientHello is kept and replayed unchanged.

use tokio::time::timeout;

use crate::datapath::client_hello::{
    CLIENT_HELLO_BYTES_MAX, CLIENT_HELLO_DEADLINE, ClientHelloReader,
};
use crate::datapath::dial::Upstream;
use crate::datapath::http2::tunnel::Target;
use crate::datapath::policy::{self, Permit};
use crate::outer::Failure;
use crate::reason::Reason;
use crate::wire::sni;

use super::establish::NewTunnel;
use super::setup::AnsweredConnect;

/// Memory of a reader for a ClientHello of up to `SMALL_CLIENT_HELLO_BYTES`: its bytes, in a buffer
/// that grows by doubling, and its message. Those of Istio and of browsers are not larger.
const SMALL_CLIENT_HELLO_BYTES: usize = 2 * 1024;
const SMALL_READER_BYTES: usize = 8 * 1024;
/// Memory of a reader for larger ones.
const LARGE_READER_BYTES: usize = 4 * CLIENT_HELLO_BYTES_MAX;

/// Resolves, evaluates policy and dials for the server name of an answered tunnel. The authority's
/// service only has to be one that the peer may use.
pub(super) async fn establish(
    tunnel: &mut NewTunnel,
    stream: &AnsweredConnect,
    outer: Permit,
) -> Result<Upstream, Reason> {
    let name = server_name(tunnel, stream).await?;
    let target = target(&outer, name.as_deref());
    drop(outer);
    let (permit, _) = tunnel.resolve(target)?;
    tunnel.establish(permit, stream.cancelled()).await
}

/// Returns the target that the server name inside a permitted tunnel addresses.
///
/// # Errors
/// [`Reason::UnknownSni`] without a valid name.
pub fn target(outer: &Permit, name: Option<&str>) -> Result<Target, Reason> {
    let route = outer.route();
    Ok(Target {
        authority: sni::authority_of(name.ok_or(Reason::UnknownSni)?, route.authority.port),
        origin: route.origin,
        forwarded: route.forwarded().cloned().map(Box::new),
    })
}

/// Holds the ClientHello of a tunnel with an endpoint until its server name is confirmed as one of
/// the service's. Otherwise the endpoint is closed by RST and has received no byte.
pub(super) async fn check(
    tunnel: &mut NewTunnel,
    stream: &AnsweredConnect,
    Upstream { stream: endpoint, grant, .. }: &mut Upstream,
) -> Result<(), Reason> {
    let name = tokio::select! {
        name = server_name(tunnel, stream) => name?,
        () = endpoint.hold_received() => return Err(Reason::BuffersFull),
    };
    let snapshot = tunnel.data_path.reader.load();
    policy::check_server_name(&snapshot, &tunnel.peer, grant, name.as_deref())
}

/// Returns the server name of the TLS inside the tunnel, if its ClientHello has one. The
/// ClientHello stays in the stream.
async fn server_name(
    tunnel: &mut NewTunnel,
    stream: &AnsweredConnect,
) -> Result<Option<Box<str>>, Reason> {
    let read = tokio::select! {
        read = timeout(CLIENT_HELLO_DEADLINE, read(stream)) => read,
        () = tunnel.peer.listener.drain.closing() => return Err(Reason::DrainDeadline),
    };
    let late = || Err(no_client_hello("no ClientHello within 5 s"));
    match read.unwrap_or_else(|_| late()) {
        Ok(name) => {
            tunnel.record.set_inner_sni(name.as_deref());
            Ok(name)
        }
        Err(error) => {
            tunnel.record.set_detail(error.detail);
            Err(error.reason)
        }
    }
}

fn no_client_hello(detail: impl Into<String>) -> Failure {
    Failure::new(Reason::NoClientHello, detail)
}

/// Reads the ClientHello and puts it back. Memory that is held meanwhile is charged to the
/// tunnel's account.
async fn read(stream: &AnsweredConnect) -> Result<Option<Box<str>>, Failure> {
    let account = stream.account();
    let _small = account.hold(SMALL_READER_BYTES);
    let (mut reader, mut large) = (ClientHelloReader::default(), None);
    loop {
        let received = stream.receive().await.map_err(|reason| Failure::new(reason, ""));
        let Some(mut bytes) = received? else {
            return Err(no_client_hello("the peer closed its side before a ClientHello"));
        };
        let now = bytes.split_to(bytes.len().min(reader.remaining()));
        if CLIENT_HELLO_BYTES_MAX - reader.remaining() + now.len() > SMALL_CLIENT_HELLO_BYTES {
            large.get_or_insert_with(|| account.hold(LARGE_READER_BYTES));
        }
        match reader.push(&now) {
            Ok(None) => {}
            Ok(Some(hello)) => {
                stream.unread(&bytes);
                stream.unread(&hello.bytes);
                return Ok(hello.sni);
            }
            Err(refused) => return Err(no_client_hello(refused.detail)),
        }
    }
}
