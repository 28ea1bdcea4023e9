//! Stage 1 behind a load balancer: the peer that the PROXY header of a connection states.
//!
//! A connection of one of `listeners[].balancers` is charged to the balancers together until its
//! header has arrived, and to its peer from then on. A balancer has no share as one address has:
//! all peers behind it would divide that.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use tokio::net::TcpStream;

use crate::limits::{Source, turns};
use crate::reason::HandshakeRefusal;
use crate::telemetry::connection_refused;
use crate::wire::proxy_protocol::{HEADER_BYTES_MAX, Origin, parse};

use super::DataPath;
use super::accept::{AcceptedConnection, Balanced, reject};
use super::handshake::{HandshakeError, in_time};

/// Reads the header, and returns the connection as that of the peer in it.
///
/// # Errors
/// Returns the refusal if there is no valid header in time. Returns none if a limit has closed the
/// connection, which has been counted.
pub async fn identify(
    data_path: &DataPath,
    accepted: AcceptedConnection,
) -> Result<AcceptedConnection, Option<HandshakeError>> {
    let AcceptedConnection {
        stream,
        mut address,
        mut handshake,
        mut resources,
        listener,
        balanced,
        ..
    } = accepted;
    let stream = TcpStream::from_std(stream).map_err(failed)?;
    let header = in_time(&handshake, "no PROXY header within 5 s", read(&stream)).await?;
    let origin = header?;
    let mut destination = None;
    if let Origin::Peer { source, destination: stated } = origin {
        address = SocketAddr::new(source.ip().to_canonical(), source.port());
        destination = Some(stated);
    }
    let shed = |limit| {
        reject(data_path, &stream, address, limit);
        None
    };
    // A balancer may check health from outside of `sources`. Its tunnels are judged like others.
    if origin != Origin::Balancer && !listener.rules().admits(address.ip()) {
        return Err(shed("not_in_sources"));
    }
    // Without a stated peer, that of the balancer's own address.
    let source = Source::prefix(address.ip());
    let holders = resources.descriptor.holders().of(&source);
    resources.descriptor.move_to(&holders).map_err(|full| {
        connection_refused(&data_path.metrics, address, full.label(), &full);
        shed(full.label())
    })?;
    let place = data_path.admission.acquire_handshake(&source);
    handshake = place.ok_or_else(|| shed("source"))?;
    turns::charge_to(&source);
    let balanced = balanced.map(|of| Arc::new(Balanced { destination, ..*of }));
    let stream = stream.into_std().map_err(failed)?;
    let since = Instant::now();
    Ok(AcceptedConnection { stream, address, handshake, resources, listener, balanced, since })
}

fn failed(error: std::io::Error) -> HandshakeError {
    HandshakeError::new(HandshakeRefusal::Other, &error)
}

/// Reads the header, and no byte after it.
async fn read(stream: &TcpStream) -> Result<Origin, HandshakeError> {
    let (mut buffer, mut read) = ([0; HEADER_BYTES_MAX], 0);
    loop {
        let seen = read + stream.peek(&mut buffer[read..]).await.map_err(failed)?;
        if seen == read {
            return Err(failed(std::io::ErrorKind::UnexpectedEof.into()));
        }
        let header = parse(&buffer[..seen])
            .map_err(|why| HandshakeError::new(HandshakeRefusal::NoProxyHeader, &why))?;
        let end = header.map_or(seen, |(_, length)| length);
        while read < end {
            read += stream.try_read(&mut buffer[read..end]).map_err(failed)?;
        }
        if let Some((origin, _)) = header {
            return Ok(origin);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use tokio::io::AsyncWriteExt;
    use tokio::time::{Duration, Instant};

    use super::super::accept::ConnectionResources;
    use super::super::limits::load::LoadGuard;
    use super::super::tests::{data_path_of, descriptor, tcp_pair};
    use super::*;
    use crate::snapshot::Publisher;

    /// Returns a connection of a load balancer, and its other end.
    async fn connection(data_path: &DataPath) -> (TcpStream, AcceptedConnection) {
        let (client, stream) = tcp_pair().await;
        let balancer = IpAddr::from([127, 0, 0, 1]);
        let accepted = AcceptedConnection {
            stream: stream.into_std().expect("a socket"),
            address: (balancer, 1).into(),
            handshake: data_path.admission.acquire_handshake(&Source::balancers()).expect("a slot"),
            resources: ConnectionResources {
                load: LoadGuard::default(),
                descriptor: descriptor(data_path),
            },
            listener: Arc::default(),
            balanced: Some(Arc::new(Balanced { balancer, destination: None })),
            since: std::time::Instant::now(),
        };
        (client, accepted)
    }

    #[tokio::test]
    async fn a_header_in_pieces_charges_the_connection_to_its_peer_and_leaves_the_rest() {
        let data_path = data_path_of(Publisher::default().reader(), Default::default());
        let (mut client, accepted) = connection(&data_path).await;
        client.set_nodelay(true).expect("an open connection");
        let sent = async {
            for byte in b"PROXY TCP4 192.0.2.7 198.51.100.9 40007 443\r\n" {
                client.write_all(&[*byte]).await.expect("a write");
                tokio::task::yield_now().await;
            }
            client.write_all(b"rest").await.expect("a write");
        };
        let (identified, ()) = tokio::join!(identify(&data_path, accepted), sent);
        let identified = identified.expect("a peer");
        assert_eq!(identified.address, ([192, 0, 2, 7], 40007).into());
        let source = Source::prefix([192, 0, 2, 7].into());
        assert_eq!(*identified.resources.descriptor.holders().source(), source);
        let stated = identified.balanced.and_then(|of| of.destination);
        assert_eq!(stated, Some(([198, 51, 100, 9], 443).into()));
        let stream = TcpStream::from_std(identified.stream).expect("a socket");
        let mut rest = [0; 4];
        stream.readable().await.expect("an open connection");
        assert_eq!((stream.try_read(&mut rest).ok(), &rest), (Some(4), b"rest"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_balancer_without_a_whole_header_is_refused_after_5_seconds() {
        let data_path = data_path_of(Publisher::default().reader(), Default::default());
        for (bytes, is_closed, refusal) in [
            (&b""[..], false, HandshakeRefusal::Timeout),
            (b"PROXY TCP4", false, HandshakeRefusal::Timeout),
            (b"PROXY TCP4", true, HandshakeRefusal::Other),
            (b"\x16\x03", false, HandshakeRefusal::NoProxyHeader),
        ] {
            let (mut client, accepted) = connection(&data_path).await;
            client.write_all(bytes).await.expect("a write");
            let client = (!is_closed).then_some(client);
            let start = Instant::now();
            let refused = identify(&data_path, accepted).await.expect_err("a refusal");
            assert_eq!(refused.map(|it| it.refusal), Some(refusal));
            let is_late = refusal == HandshakeRefusal::Timeout;
            assert_eq!(start.elapsed() >= Duration::from_secs(5), is_late);
            drop(client);
        }
        assert_eq!(data_path.admission.handshakes.pool().used(), 0);
    }
}
