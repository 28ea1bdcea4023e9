//! Records between a layer and rustls' client.

use std::io::{Read, Write};

use rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256;
use rustls::{AlertDescription, ClientConnection, SupportedCipherSuite};
use tokio::runtime::Builder;

use super::super::{
    Content, ContentType, HEADER_BYTES, KEY_UPDATE_BYTES, PLAINTEXT_MAX, RECORD_MAX, RecordError,
    RecordLayer, TRAILER_BYTES,
};
use super::{open, seal};
use crate::tls::tests::{SUITES, client, connect, server};

/// A layer and the client of its connection, after the handshake.
fn pair(suite: SupportedCipherSuite) -> (RecordLayer, ClientConnection) {
    let runtime = Builder::new_current_thread().build().unwrap();
    let connecting = connect(server(suite), client(suite), 1 << 16);
    let (accepted, _, client) = runtime.block_on(connecting);
    (accepted.layer, client)
}

/// Returns everything that the client has sealed.
fn take_sealed(client: &mut ClientConnection) -> Vec<u8> {
    let mut sealed = Vec::new();
    while client.wants_write() {
        client.write_tls(&mut sealed).unwrap();
    }
    sealed
}

fn send(client: &mut ClientConnection, data: &[u8]) -> Vec<u8> {
    client.set_buffer_limit(None);
    client.writer().write_all(data).unwrap();
    take_sealed(client)
}

/// Lets the client open `records`. Returns its application data.
fn receive(client: &mut ClientConnection, mut records: &[u8]) -> Vec<u8> {
    let mut data = Vec::new();
    while !records.is_empty() {
        client.read_tls(&mut records).unwrap();
        client.process_new_packets().unwrap();
        // WouldBlock ends what has arrived.
        let _ = client.reader().read_to_end(&mut data);
    }
    data
}

/// Returns the application data of opened records.
fn data(opened: Vec<(Content, Vec<u8>)>) -> Vec<u8> {
    let data = opened.into_iter().flat_map(|(content, payload)| match content {
        Content::ApplicationData => payload,
        _ => Vec::new(),
    });
    data.collect()
}

fn pattern(random: &mut fastrand::Rng, size: usize) -> Vec<u8> {
    (0..size).map(|_| random.u8(..)).collect()
}

#[test]
fn payloads_of_every_size_around_the_limits_arrive_with_every_suite() {
    let mut random = fastrand::Rng::with_seed(1);
    for suite in SUITES {
        let (mut layer, mut client) = pair(suite);
        let small = 0..300;
        let large = PLAINTEXT_MAX - 20..=PLAINTEXT_MAX;
        for size in small.chain(large) {
            let sent = pattern(&mut random, size);
            let record = seal(&mut layer, ContentType::ApplicationData, &sent);
            assert_eq!(record.len(), HEADER_BYTES + size + TRAILER_BYTES);
            assert!(record.len() <= RECORD_MAX);
            assert_eq!(receive(&mut client, &record), sent);
            let mut sealed = send(&mut client, &sent);
            assert_eq!(data(open(&mut layer, &mut sealed).unwrap()), sent);
            assert!(sealed.is_empty());
        }
        let sent = pattern(&mut random, 5 * PLAINTEXT_MAX + 1);
        let mut sealed = send(&mut client, &sent);
        let opened = open(&mut layer, &mut sealed).unwrap();
        assert_eq!(opened.len(), 6);
        assert_eq!(data(opened), sent);
    }
}

#[test]
fn a_record_of_a_wrong_length_is_not_sealed() {
    let (mut layer, _) = pair(TLS13_AES_128_GCM_SHA256);
    let too_large = HEADER_BYTES + PLAINTEXT_MAX + 1 + TRAILER_BYTES;
    for size in (0..HEADER_BYTES + TRAILER_BYTES).chain([too_large, 65_541, 70_000]) {
        let sealed = layer.seal(ContentType::ApplicationData, &mut vec![0; size]);
        assert!(matches!(sealed, Err(RecordError::Internal(_))), "{size}");
    }
}

#[test]
fn records_that_arrive_byte_by_byte_are_opened_when_each_is_complete() {
    let (mut layer, mut client) = pair(TLS13_AES_128_GCM_SHA256);
    let (mut sealed, mut ends, mut sent) = (Vec::new(), Vec::new(), Vec::new());
    for size in [1, 100, 2, 300] {
        client.refresh_traffic_keys().unwrap();
        sealed.extend(take_sealed(&mut client));
        ends.push(sealed.len());
        let payload = vec![7; size];
        sealed.extend(send(&mut client, &payload));
        ends.push(sealed.len());
        sent.extend(payload);
    }
    let (mut input, mut received) = (Vec::new(), Vec::new());
    for (index, byte) in sealed.into_iter().enumerate() {
        input.push(byte);
        let opened = open(&mut layer, &mut input).unwrap();
        assert_eq!(opened.len(), usize::from(ends.contains(&(index + 1))));
        received.extend(data(opened));
    }
    assert_eq!(received, sent);
}

#[test]
fn keys_are_updated_by_either_side_at_any_point() {
    for (seed, suite) in (0..32).zip(SUITES.into_iter().cycle()) {
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut layer, mut client) = pair(suite);
        let (mut to_server, mut to_client) = (Vec::new(), Vec::new());
        let (mut sent_up, mut got_up) = (Vec::new(), Vec::new());
        let (mut sent_down, mut got_down) = (Vec::new(), Vec::new());
        let mut updates = 0;
        for _ in 0..200 {
            let size = random.usize(0..2000);
            let payload = pattern(&mut random, size);
            match random.u8(..6) {
                0 => client.refresh_traffic_keys().unwrap(),
                1 => {
                    let mut record = [0; KEY_UPDATE_BYTES];
                    layer.update_sending_key(&mut record).unwrap();
                    to_client.extend(record);
                }
                2 => {
                    to_server.extend(send(&mut client, &payload));
                    sent_up.extend(payload);
                }
                3 => {
                    to_client.extend(seal(&mut layer, ContentType::ApplicationData, &payload));
                    sent_down.extend(payload);
                }
                4 => {
                    let opened = open(&mut layer, &mut to_server).unwrap();
                    for (content, _) in &opened {
                        if *content == (Content::KeyUpdate { requested: true }) {
                            updates += 1;
                            let mut record = [0; KEY_UPDATE_BYTES];
                            layer.update_sending_key(&mut record).unwrap();
                            to_client.extend(record);
                        }
                    }
                    got_up.extend(data(opened));
                }
                _ => {
                    got_down.extend(receive(&mut client, &to_client));
                    to_client.clear();
                }
            }
            to_server.extend(take_sealed(&mut client));
        }
        got_up.extend(data(open(&mut layer, &mut to_server).unwrap()));
        got_down.extend(receive(&mut client, &to_client));
        assert!(got_up == sent_up && got_down == sent_down, "seed {seed}");
        assert!(updates > 0, "seed {seed}");
    }
}

#[test]
fn a_key_update_is_due_at_half_the_limit_of_the_suite_and_the_limit_is_kept() {
    let (mut layer, mut client) = pair(TLS13_AES_128_GCM_SHA256);
    assert_eq!(layer.key_records_max, 1 << 24, "draft-irtf-cfrg-aead-limits");
    layer.key_records_max = 10;
    for count in 0..10 {
        assert_eq!(layer.needs_key_update(), count >= 5, "{count}");
        let record = seal(&mut layer, ContentType::ApplicationData, b"x");
        assert_eq!(receive(&mut client, &record), b"x");
    }
    let mut record = [0; HEADER_BYTES + TRAILER_BYTES];
    let sealed = layer.seal(ContentType::ApplicationData, &mut record);
    assert_eq!(sealed, Err(RecordError::KeyExhausted));
    let updated = layer.update_sending_key(&mut [0; KEY_UPDATE_BYTES]);
    assert_eq!(updated, Err(RecordError::KeyExhausted));
}

#[test]
fn a_worn_receiving_key_is_replaced_on_request_and_refused_at_its_limit() {
    let (mut layer, mut client) = pair(TLS13_AES_128_GCM_SHA256);
    layer.key_records_max = 10;
    for _ in 0..5 {
        assert!(!layer.needs_key_update());
        let mut sealed = send(&mut client, b"x");
        open(&mut layer, &mut sealed).unwrap();
    }
    assert!(layer.needs_key_update());
    let mut record = [0; KEY_UPDATE_BYTES];
    layer.update_sending_key(&mut record).unwrap();
    assert!(!layer.needs_key_update(), "requested once");
    receive(&mut client, &record);
    let mut sealed = send(&mut client, b"y");
    let opened = open(&mut layer, &mut sealed).unwrap();
    let update = Content::KeyUpdate { requested: false };
    let contents: Vec<_> = opened.iter().map(|(content, _)| *content).collect();
    assert_eq!(contents, [update, Content::ApplicationData]);
    // The new key may be used as often again.
    for _ in 1..10 {
        let mut sealed = send(&mut client, b"x");
        open(&mut layer, &mut sealed).unwrap();
    }
    assert!(layer.needs_key_update());
    let mut sealed = send(&mut client, b"x");
    let refused = open(&mut layer, &mut sealed);
    assert_eq!(refused, Err(RecordError::KeyExhausted));
}

#[test]
fn a_change_of_any_byte_is_detected_and_so_is_a_repeated_record() {
    let (mut layer, mut client) = pair(TLS13_AES_128_GCM_SHA256);
    let mut first = send(&mut client, b"first");
    for index in HEADER_BYTES..first.len() {
        // The failure leaves a sequence number used, so each try has a layer in its first state.
        layer.receive.sequence = 0;
        let mut changed = first.clone();
        changed[index] ^= 1;
        assert_eq!(layer.open(&mut changed), Err(RecordError::BadRecordMac));
    }
    layer.receive.sequence = 0;
    let mut version = first.clone();
    version[1] ^= 1;
    assert_eq!(layer.open(&mut version), Err(RecordError::BadRecordMac));
    layer.receive.sequence = 0;
    assert!(layer.open(&mut first.clone()).unwrap().is_some());
    assert_eq!(layer.open(&mut first), Err(RecordError::BadRecordMac));
}

#[test]
fn close_notify_goes_in_both_directions() {
    let (mut layer, mut client) = pair(TLS13_AES_128_GCM_SHA256);
    client.send_close_notify();
    let opened = open(&mut layer, &mut take_sealed(&mut client)).unwrap();
    assert_eq!(opened, [(Content::CloseNotify, vec![1, 0])]);
    let record = layer.seal_alert(AlertDescription::CloseNotify).unwrap();
    client.read_tls(&mut &record[..]).unwrap();
    assert!(client.process_new_packets().unwrap().peer_has_closed());
}

#[test]
fn a_fatal_alert_reaches_the_client() {
    let (mut layer, mut client) = pair(TLS13_AES_128_GCM_SHA256);
    let alert = AlertDescription::BadRecordMac;
    let record = layer.seal_alert(alert).unwrap();
    client.read_tls(&mut &record[..]).unwrap();
    let error = client.process_new_packets().unwrap_err();
    assert_eq!(error, rustls::Error::AlertReceived(alert));
}

#[test]
fn nothing_secret_is_printed() {
    let (layer, _) = pair(TLS13_AES_128_GCM_SHA256);
    assert_eq!(format!("{layer:?}"), "RecordLayer { .. }");
}
