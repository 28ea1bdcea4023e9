//! Ends of tunnels: FIN and END_STREAM separately, and no break that looks like an end.

use h2::Reason;
use strait::tools::hbone::Tunnel;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::raw::{self, Ending, RawPeer};
use crate::support::{
    ECHO, Endpoint, Gateway, Net, Settings, broken, bytes, identities, reset, run, until,
};

const SIZE: u64 = 1 << 20;
const UP: u64 = 1;
const DOWN: u64 = 2;

async fn gateway(net: Net) -> Gateway {
    Gateway::start(&Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")])).await
}

async fn ended(gateway: &Gateway, reason: &str, count: f64) {
    until(reason, async || gateway.tunnels(reason).await, |&now| now == count).await;
}

#[test]
fn a_client_that_ends_first_still_gets_every_byte() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, |mut stream| async move {
            bytes::expect(&mut stream, UP, 0, SIZE).await.expect("all bytes up");
            bytes::expect_end(&mut stream).await;
            bytes::send(&mut stream, DOWN, 0, SIZE).await.expect("all bytes down");
        });
        let client = gateway.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        bytes::send(&mut tunnel, UP, 0, SIZE).await.expect("all bytes up");
        tunnel.shutdown().await.expect("our end");
        bytes::expect(&mut tunnel, DOWN, 0, SIZE).await.expect("all bytes down");
        bytes::expect_end(&mut tunnel).await;
        ended(&gateway, "completed", 1.0).await;
    });
}

#[test]
fn an_endpoint_that_ends_first_still_gets_every_byte() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let (done, all) = tokio::sync::oneshot::channel();
        let done = std::sync::Mutex::new(Some(done));
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, move |mut stream| {
            let done = done.lock().expect("a lock").take();
            async move {
                bytes::send(&mut stream, DOWN, 0, SIZE).await.expect("all bytes down");
                stream.shutdown().await.expect("the endpoint's end");
                bytes::expect(&mut stream, UP, 0, SIZE).await.expect("all bytes up");
                bytes::expect_end(&mut stream).await;
                done.expect("the only connection").send(()).expect("the test waits");
            }
        });
        let client = gateway.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        bytes::expect(&mut tunnel, DOWN, 0, SIZE).await.expect("all bytes down");
        bytes::expect_end(&mut tunnel).await;
        bytes::send(&mut tunnel, UP, 0, SIZE).await.expect("all bytes up");
        tunnel.shutdown().await.expect("our end");
        all.await.expect("the endpoint has every byte and the end");
        ended(&gateway, "completed", 1.0).await;
    });
}

#[test]
fn a_reset_endpoint_is_connect_error_and_never_an_end() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        // Odd connections break while they send, even ones while they receive.
        let turn = std::sync::atomic::AtomicUsize::new(0);
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, move |mut stream| {
            let sends = turn.fetch_add(1, std::sync::atomic::Ordering::SeqCst).is_multiple_of(2);
            async move {
                // Only after the tunnel is open: an endpoint that resets at once is a failed dial.
                let _ = bytes::expect(&mut stream, UP, 0, 1024).await;
                if sends {
                    let _ = bytes::send(&mut stream, DOWN, 0, SIZE / 4).await;
                } else {
                    let _ = bytes::expect(&mut stream, UP, 1024, SIZE / 4).await;
                }
                reset(stream);
            }
        });
        let client = gateway.client(identities()).await;
        for round in 0..20 {
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            // Bytes that the endpoint does not read are lost with it, as the reset indicates.
            let _ = bytes::send(&mut tunnel, UP, 0, SIZE / 2).await;
            assert_eq!(broken(&mut tunnel).await, Some(Reason::CONNECT_ERROR), "round {round}");
        }
        ended(&gateway, "upstream_reset", 20.0).await;
    });
}

#[test]
fn an_endpoint_reset_after_the_clients_end_is_no_end_either() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, |mut stream| async move {
            bytes::expect_end(&mut stream).await;
            let _ = bytes::send(&mut stream, DOWN, 0, 1000).await;
            reset(stream);
        });
        let client = gateway.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        tunnel.shutdown().await.expect("our end");
        assert_eq!(broken(&mut tunnel).await, Some(Reason::CONNECT_ERROR));
    });
}

/// Starts an endpoint that reports the end of each of its connections.
async fn witness(
    net: Net,
) -> (Endpoint, tokio::sync::mpsc::Receiver<Result<(), std::io::ErrorKind>>) {
    let (tell, received) = tokio::sync::mpsc::channel(1);
    let endpoint = Endpoint::new(net.listen(11, 9000).await, move |mut stream| {
        let tell = tell.clone();
        async move {
            let mut buffer = [0; 64];
            let end = loop {
                match stream.read(&mut buffer).await {
                    Ok(0) => break Ok(()),
                    Ok(_) => {}
                    Err(error) => break Err(error.kind()),
                }
            };
            tell.send(end).await.expect("the test waits");
        }
    });
    (endpoint, received)
}

const RESET: Option<Result<(), std::io::ErrorKind>> =
    Some(Err(std::io::ErrorKind::ConnectionReset));

#[test]
fn a_reset_client_is_a_reset_for_the_endpoint_whatever_the_code() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let (_endpoint, mut received) = witness(net).await;
        let client = gateway.client(identities()).await;
        for code in [Reason::CANCEL, Reason::NO_ERROR, Reason::INTERNAL_ERROR] {
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            tunnel.write_all(b"some bytes").await.expect("a write");
            tunnel.reset(code);
            assert_eq!(received.recv().await, RESET, "{code:?}");
        }
        ended(&gateway, "downstream_reset", 1.0).await;
        ended(&gateway, "downstream_cancelled", 2.0).await;
    });
}

/// A TLS 1.3 record with an alert in it.
fn alert() -> Vec<u8> {
    [&[23, 3, 3, 0, 19][..], &[7; 19]].concat()
}

/// Two exchanges with an echo, as of an inner connection that is established and used.
async fn exchanges(tunnel: &mut Tunnel) {
    let mut answer = [0; 5];
    for _ in 0..2 {
        tunnel.write_all(b"hello").await.expect("a request");
        tunnel.read_exact(&mut answer).await.expect("an answer");
    }
}

#[test]
fn a_reset_once_the_inner_connection_has_closed_is_a_normal_end() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        // As ztunnel ends a tunnel of double HBONE.
        for code in [Reason::CANCEL, Reason::NO_ERROR] {
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            exchanges(&mut tunnel).await;
            tunnel.reset(code);
        }
        ended(&gateway, "completed", 2.0).await;
        // As Envoy does, after the close_notify of the inner connection.
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        exchanges(&mut tunnel).await;
        tunnel.write_all(&alert()).await.expect("an alert");
        // Once its echo is here, the alert has been sent. A reset would discard it.
        tunnel.read_exact(&mut alert()).await.expect("its echo");
        tunnel.reset(Reason::INTERNAL_ERROR);
        ended(&gateway, "completed", 3.0).await;
        assert_eq!(gateway.tunnels_by_reason().await.len(), 1);

        // A reset before a close_notify, or without one, is not a clean end.
        let mut early = client.tunnel(ECHO).await.expect("a tunnel");
        early.write_all(&alert()).await.expect("an alert");
        early.read_exact(&mut alert()).await.expect("its echo");
        early.reset(Reason::CANCEL);
        ended(&gateway, "downstream_cancelled", 1.0).await;
        let mut open = client.tunnel(ECHO).await.expect("a tunnel");
        exchanges(&mut open).await;
        open.reset(Reason::INTERNAL_ERROR);
        ended(&gateway, "downstream_reset", 1.0).await;
        assert_eq!(gateway.tunnels("completed").await, 3.0);
    });
}

#[test]
fn a_download_that_is_cancelled_is_no_normal_end() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, |mut stream| async move {
            let mut request = [0; 5];
            for _ in 0..2 {
                stream.read_exact(&mut request).await.expect("a request");
                stream.write_all(&request).await.expect("an answer");
            }
            let _ = bytes::send(&mut stream, DOWN, 0, 64 * SIZE).await;
        });
        let client = gateway.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        exchanges(&mut tunnel).await;
        bytes::expect(&mut tunnel, DOWN, 0, SIZE).await.expect("a part of it");
        tunnel.reset(Reason::CANCEL);
        ended(&gateway, "downstream_cancelled", 1.0).await;
    });
}

#[test]
fn a_lost_client_connection_is_a_reset_for_the_endpoint() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let (_endpoint, mut received) = witness(net).await;
        let client = gateway.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        tunnel.write_all(b"some bytes").await.expect("a write");
        drop(client);
        assert_eq!(received.recv().await, RESET);
        ended(&gateway, "downstream_lost", 1.0).await;
    });
}

#[test]
fn trailers_are_a_protocol_error_for_the_peer_and_a_reset_for_the_endpoint() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let (_endpoint, mut received) = witness(net).await;
        let mut peer = RawPeer::connect(&gateway).await;
        let trailers = |stream| {
            let mut frame = raw::headers(stream, &[("grpc-status", b"0")]);
            // The flags are byte 4 of a frame's header.
            frame[4] |= raw::END_STREAM;
            frame
        };
        let protocol_error =
            Ending::Reset(u8::try_from(u32::from(Reason::PROTOCOL_ERROR)).expect("1"));
        // On an open tunnel, behind bytes, and before the tunnel is open.
        peer.tunnel(1, ECHO).await;
        peer.write(&trailers(1)).await;
        assert_eq!(peer.ending(1).await, protocol_error);
        assert_eq!(received.recv().await, RESET);
        peer.tunnel(3, ECHO).await;
        let mut frames = raw::frame(raw::DATA, 0, 3, b"some bytes");
        frames.extend(trailers(3));
        peer.write(&frames).await;
        assert_eq!(peer.ending(3).await, protocol_error);
        assert_eq!(received.recv().await, RESET);
        let fields: [(&str, &[u8]); 2] = [(":method", b"CONNECT"), (":authority", ECHO.as_bytes())];
        let mut frames = raw::headers(5, &fields);
        frames.extend(trailers(5));
        peer.write(&frames).await;
        // The tunnel was answered or not; its endpoint may not have been dialled.
        let mut ending = peer.ending(5).await;
        if ending == Ending::Answered {
            ending = peer.ending(5).await;
        }
        assert_eq!(ending, protocol_error);
        ended(&gateway, "malformed", 3.0).await;
    });
}

/// Frames of one record each, together less than the first window of a stream.
const CHUNK: usize = 16 * 1024;
const SENT: u64 = 12 * CHUNK as u64;

#[test]
fn what_a_client_sent_before_its_end_is_delivered_though_it_resets_after_it() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let (tell, mut received) = tokio::sync::mpsc::channel(1);
        // The endpoint has bytes of its own under way, and reads only when signalled.
        let (go, goes) = tokio::sync::watch::channel(false);
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, move |mut stream| {
            let (tell, mut goes) = (tell.clone(), goes.clone());
            async move {
                stream.write_all(&[7; 100]).await.expect("some bytes");
                goes.wait_for(|&go| go).await.expect("the test's word");
                let all = bytes::expect(&mut stream, UP, 0, SENT).await;
                bytes::expect_end(&mut stream).await;
                tell.send(all.map_err(|error| error.kind())).await.expect("the test waits");
            }
        });
        let mut peer = RawPeer::connect(&gateway).await;
        for (stream, code) in [(1, Reason::CANCEL), (3, Reason::NO_ERROR)] {
            go.send_replace(false);
            peer.tunnel(stream, ECHO).await;
            let mut sent = Vec::new();
            for from in (0..SENT).step_by(CHUNK) {
                let end = u8::from(from + CHUNK as u64 == SENT) * raw::END_STREAM;
                let data = bytes::range(UP, from, from + CHUNK as u64);
                sent.extend(raw::frame(raw::DATA, end, stream, &data));
            }
            sent.extend(raw::frame(raw::RST_STREAM, 0, stream, &u32::from(code).to_be_bytes()));
            peer.write(&sent).await;
            go.send_replace(true);
            assert_eq!(received.recv().await, Some(Ok(())), "{code:?}");
        }
        ended(&gateway, "downstream_cancelled", 2.0).await;
    });
}

#[test]
fn an_upload_whose_end_comes_together_with_the_end_of_its_connection_is_delivered() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let (tell, mut received) = tokio::sync::mpsc::channel(1);
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, move |mut stream| {
            let tell = tell.clone();
            async move {
                let all = bytes::expect(&mut stream, UP, 0, SENT).await;
                let all = all.map_err(|error| error.kind());
                let end = stream.read(&mut [0; 1]).await.map_err(|error| error.kind());
                tell.send((all, end)).await.expect("the test waits");
            }
        });
        for round in 0..20 {
            let mut peer = RawPeer::connect(&gateway).await;
            peer.tunnel(1, ECHO).await;
            let mut sent = Vec::new();
            for from in (0..SENT).step_by(CHUNK) {
                let end = u8::from(from + CHUNK as u64 == SENT) * raw::END_STREAM;
                sent.extend(raw::frame(
                    raw::DATA,
                    end,
                    1,
                    &bytes::range(UP, from, from + CHUNK as u64),
                ));
            }
            peer.write(&sent).await;
            peer.close_with_fin().await;
            assert_eq!(received.recv().await, Some((Ok(()), Ok(0))), "round {round}");
        }
    });
}
