//! Handshakes over links of every kind, and their failures.

use std::io::ErrorKind;
use std::sync::Arc;

use rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256 as SUITE;
use rustls::server::ServerSessionMemoryCache;
use rustls::{
    AlertDescription, ClientConfig, ClientConnection, InvalidMessage, RootCertStore, ServerConfig,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio_rustls::TlsConnector;

use super::super::record::{Content, ContentType, HEADER_BYTES, TRAILER_BYTES};
use super::super::{
    ALPN_H2, AcceptError, PeerTrust, accept, client_config, endpoint_server_config, explain_error,
    listener_server_config, provider, refusal_for_error, server_config_any_client,
};
use super::samples::{MATERIAL, authority, certificates};
use super::{SUITES, client, connect, server, server_name};
use crate::reason::HandshakeRefusal;
use crate::tls::verifier::ClientVerifier;

#[tokio::test]
async fn a_handshake_succeeds_with_every_suite_and_in_pieces_of_a_few_bytes() {
    for suite in SUITES {
        // The client's change_cipher_spec, which nobody reads at once, has 6 bytes.
        for link_bytes in [6, 7, 100, 1 << 16] {
            let (accepted, ..) = connect(server(suite), client(suite), link_bytes).await;
            assert_eq!(accepted.alpn.as_deref(), Some(ALPN_H2));
            assert_eq!(accepted.peer_certificates, MATERIAL.chain);
            assert!(accepted.rest.is_empty());
        }
    }
}

#[tokio::test]
async fn bytes_behind_the_finished_message_are_left_sealed_and_in_order() {
    let (mut near, far) = duplex(1 << 16);
    let accepted = tokio::spawn(async move {
        let accepted = accept(Arc::new(server(SUITE)), &mut near).await;
        accepted.map(|accepted| (accepted, near))
    });
    let connector = TlsConnector::from(Arc::new(client(SUITE)));
    let mut stream = connector.connect(server_name(), far).await.unwrap();
    // The server has not run since the client wrote its Finished, and receives all at once.
    stream.write_all(b"first").await.unwrap();
    stream.get_mut().1.refresh_traffic_keys().unwrap();
    stream.write_all(b"second").await.unwrap();
    let (mut accepted, _near) = accepted.await.unwrap().unwrap();
    let mut contents = Vec::new();
    let mut rest = &mut accepted.rest[..];
    assert!(!rest.is_empty());
    while let Some(record) = accepted.layer.open(rest).unwrap() {
        if record.content == Content::ApplicationData {
            contents.extend_from_slice(&rest[record.payload]);
        }
        rest = &mut rest[record.bytes..];
    }
    assert!(rest.is_empty());
    assert_eq!(contents, b"firstsecond");
}

#[tokio::test]
async fn tickets_are_sent_before_the_records_that_follow() {
    let mut server = server(SUITE);
    server.send_tls13_tickets = 3;
    server.session_storage = ServerSessionMemoryCache::new(8);
    let (mut near, far) = duplex(1 << 16);
    let connector = TlsConnector::from(Arc::new(client(SUITE)));
    let answering = async {
        let mut accepted = accept(Arc::new(server), &mut near).await.unwrap();
        let mut record = [b'.'; HEADER_BYTES + 10 + TRAILER_BYTES];
        let layer = &mut accepted.layer;
        layer.seal(ContentType::ApplicationData, &mut record).unwrap();
        near.write_all(&record).await.unwrap();
    };
    let reading = async {
        let mut stream = connector.connect(server_name(), far).await.unwrap();
        let mut answer = [0; 10];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(answer, [b'.'; 10]);
        assert_eq!(stream.get_ref().1.tls13_tickets_received(), 3);
    };
    tokio::join!(answering, reading);
}

#[tokio::test]
async fn a_client_without_a_certificate_receives_the_alert_and_the_socket_survives() {
    let mut config = client(SUITE);
    config.client_auth_cert_resolver = Arc::new(NoCertificate);
    let (alert, error) = refused(config, server(SUITE)).await;
    assert_eq!(alert, Some(AlertDescription::CertificateRequired));
    let expected = rustls::Error::NoCertificatesPresented;
    assert!(matches!(error, AcceptError::Tls(error) if error == expected));
}

#[tokio::test]
async fn a_client_of_another_protocol_receives_the_alert() {
    let mut config = client(SUITE);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let (alert, error) = refused(config, server(SUITE)).await;
    assert_eq!(alert, Some(AlertDescription::NoApplicationProtocol));
    let expected = rustls::Error::NoApplicationProtocol;
    assert!(matches!(error, AcceptError::Tls(error) if error == expected));
    // rustls accepts a missing offer.
    let mut config = client(SUITE);
    config.alpn_protocols = Vec::new();
    let (accepted, ..) = connect(server(SUITE), config, 1 << 16).await;
    assert_eq!(accepted.alpn, None);
}

#[tokio::test]
async fn a_client_that_rejects_our_certificate_is_a_reason_of_its_own() {
    let mut roots = RootCertStore::empty();
    roots.add(certificates(&authority().root_pem()).remove(0)).unwrap();
    let verifiers = [
        ClientVerifier::of_servers(None, &Arc::new(roots), &provider()),
        ClientVerifier::of_servers(Some(&["spiffe://a/ns/b/sa/c"]), &MATERIAL.roots, &provider()),
    ];
    for verifier in verifiers {
        let mut config = client(SUITE);
        let verifier = Arc::new(verifier);
        config.dangerous().set_certificate_verifier(verifier);
        let (mut near, far) = duplex(1 << 16);
        let connector = TlsConnector::from(Arc::new(config));
        let (accepted, connected) = tokio::join!(
            accept(Arc::new(server(SUITE)), &mut near),
            connector.connect(server_name(), far)
        );
        assert!(connected.is_err());
        let Err(AcceptError::Tls(error)) = accepted else {
            panic!("{accepted:?}");
        };
        assert_eq!(refusal_for_error(&error), HandshakeRefusal::PeerRejectedUs);
        let why = explain_error(&error);
        let want = "the peer rejected the certificate of this gateway: alert CertificateUnknown";
        assert_eq!(why, want);
    }
}

#[test]
fn alerts_about_other_things_than_the_certificate_are_other_failures() {
    use HandshakeRefusal::{Other, PeerRejectedUs};
    for (alert, want) in [
        (AlertDescription::UnknownCA, PeerRejectedUs),
        (AlertDescription::BadCertificate, PeerRejectedUs),
        (AlertDescription::CertificateExpired, PeerRejectedUs),
        (AlertDescription::CertificateRevoked, PeerRejectedUs),
        (AlertDescription::UnsupportedCertificate, PeerRejectedUs),
        (AlertDescription::DecryptError, PeerRejectedUs),
        (AlertDescription::AccessDenied, PeerRejectedUs),
        (AlertDescription::HandshakeFailure, Other),
        (AlertDescription::ProtocolVersion, Other),
        (AlertDescription::UserCanceled, Other),
        (AlertDescription::InternalError, Other),
    ] {
        let error = rustls::Error::AlertReceived(alert);
        assert_eq!(refusal_for_error(&error), want, "{alert:?}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_in_the_middle_is_an_end_of_file() {
    for sent in [&b""[..], &[22, 3, 1], &[22, 3, 1, 0, 4, 1, 0, 2, 0]] {
        let (mut near, mut far) = duplex(1 << 16);
        far.write_all(sent).await.unwrap();
        drop(far);
        let error = accept(Arc::new(server(SUITE)), &mut near).await;
        let Err(AcceptError::Io(error)) = error else {
            panic!("{error:?}");
        };
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
        assert_eq!(error.to_string(), "tls handshake eof");
    }
}

#[tokio::test]
async fn bytes_that_are_no_tls_are_refused_before_a_record_is_complete() {
    let (mut near, mut far) = duplex(1 << 16);
    far.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let error = accept(Arc::new(server(SUITE)), &mut near).await;
    let expected = rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType);
    assert!(matches!(error, Err(AcceptError::Tls(error)) if error == expected));
    let mut alert = [0; 7];
    far.read_exact(&mut alert).await.unwrap();
    let decode_error = AlertDescription::DecodeError.into();
    assert_eq!(alert, [21, 3, 3, 0, 2, 2, decode_error]);
}

#[tokio::test]
async fn a_client_hello_in_records_of_one_byte_is_answered_and_one_without_end_is_not() {
    let mut session = ClientConnection::new(Arc::new(client(SUITE)), server_name()).unwrap();
    let mut hello = Vec::new();
    session.write_tls(&mut hello).unwrap();
    let (mut near, mut far) = duplex(1 << 20);
    for &byte in &hello[HEADER_BYTES..] {
        far.write_all(&[22, 3, 1, 0, 1, byte]).await.unwrap();
    }
    let accepting = tokio::spawn(async move { accept(Arc::new(server(SUITE)), &mut near).await });
    assert_eq!(far.read_u8().await.unwrap(), 22, "a ServerHello");
    accepting.abort();

    let (mut near, mut far) = duplex(1 << 20);
    far.write_all(&[22, 3, 1, 0, 4, 1, 2, 0, 0]).await.unwrap();
    for _ in 0..100 {
        far.write_all(&[22, 3, 1, 4, 0]).await.unwrap();
        far.write_all(&[0; 1024]).await.unwrap();
    }
    let error = accept(Arc::new(server(SUITE)), &mut near).await;
    let expected = rustls::Error::InvalidMessage(InvalidMessage::HandshakePayloadTooLarge);
    assert!(matches!(error, Err(AcceptError::Tls(error)) if error == expected));
}

#[test]
fn only_the_configuration_of_a_listener_gives_its_secrets_away() {
    let listener = listener_server_config(&MATERIAL, &PeerTrust::default()).unwrap();
    assert!(listener.config.enable_secret_extraction);
    let endpoint = endpoint_server_config(&MATERIAL, Vec::new()).unwrap();
    assert!(!endpoint.enable_secret_extraction);
    let tool = server_config_any_client(&MATERIAL).unwrap();
    assert!(!tool.enable_secret_extraction);
    assert!(!client_config(&MATERIAL, &[]).unwrap().enable_secret_extraction);
}

#[derive(Debug)]
struct NoCertificate;

impl rustls::client::ResolvesClientCert for NoCertificate {
    fn resolve(
        &self,
        _: &[&[u8]],
        _: &[rustls::SignatureScheme],
    ) -> Option<Arc<rustls::sign::CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

/// Returns the alert that the client receives, and the error of the server.
async fn refused(
    client: ClientConfig,
    server: ServerConfig,
) -> (Option<AlertDescription>, AcceptError) {
    let (mut near, mut far) = duplex(1 << 16);
    let mut session = ClientConnection::new(Arc::new(client), server_name()).unwrap();
    let accepting = async {
        let error = accept(Arc::new(server), &mut near).await.err();
        near.shutdown().await.unwrap();
        error
    };
    let receiving = async {
        loop {
            let mut bytes = Vec::new();
            while session.wants_write() {
                session.write_tls(&mut bytes).unwrap();
            }
            far.write_all(&bytes).await.unwrap();
            let mut read = [0; 4096];
            let count = far.read(&mut read).await.unwrap();
            if count == 0 {
                return None;
            }
            session.read_tls(&mut &read[..count]).unwrap();
            match session.process_new_packets() {
                Err(rustls::Error::AlertReceived(alert)) => return Some(alert),
                processed => drop(processed.unwrap()),
            }
        }
    };
    let (error, alert) = tokio::join!(accepting, receiving);
    (alert, error.unwrap())
}
