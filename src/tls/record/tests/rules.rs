//! Records that no client should send, each with its alert. They are not encrypted, so that any
//! can be written down.

use super::super::{
    Content, HEADER_BYTES, PLAINTEXT_MAX, PROTECTED_MAX, RecordError, RecordLayer, TRAILER_BYTES,
};
use super::open;

const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const DATA: u8 = 23;

const UNEXPECTED_MESSAGE: u8 = 10;
const BAD_RECORD_MAC: u8 = 20;
const RECORD_OVERFLOW: u8 = 22;
const ILLEGAL_PARAMETER: u8 = 47;
const DECODE_ERROR: u8 = 50;

/// Returns a record whose protected part is the given one.
fn raw(protected: &[u8]) -> Vec<u8> {
    let [high, low] = u16::try_from(protected.len()).unwrap().to_be_bytes();
    [&[DATA, 3, 3, high, low], protected].concat()
}

/// Returns a record with `padding` zeros behind its type.
fn record(kind: u8, payload: &[u8], padding: usize) -> Vec<u8> {
    raw(&[payload, &[kind], &vec![0; padding], &[0; 16]].concat())
}

fn opened(mut input: Vec<u8>) -> Result<Vec<(Content, Vec<u8>)>, RecordError> {
    open(&mut RecordLayer::plaintext(), &mut input)
}

/// Checks the alert of each input.
fn check<const ROWS: usize>(rows: [(&str, Vec<u8>, u8); ROWS]) {
    for (name, input, expected) in rows {
        let error = opened(input).unwrap_err();
        assert_eq!(error.alert().map(u8::from), Some(expected), "{name}: {error}");
    }
}

#[test]
fn a_record_that_breaks_a_rule_of_its_form_has_the_alert_of_rfc_8446() {
    let full = vec![1; PLAINTEXT_MAX];
    let above = [&full[..], &[1]].concat();
    let wrong_tag = [&[1, DATA][..], &[1; 16]].concat();
    check([
        ("CCS", vec![20, 3, 3, 0, 1, 1], UNEXPECTED_MESSAGE),
        ("alert", vec![21, 3, 3, 0, 2, 2, 40], UNEXPECTED_MESSAGE),
        ("message", vec![22, 3, 3, 0, 1, 1], UNEXPECTED_MESSAGE),
        ("no TLS", b"PRI * HTTP/2.0".to_vec(), UNEXPECTED_MESSAGE),
        ("header", vec![23, 3, 3, 0x41, 0x01], RECORD_OVERFLOW),
        ("largest header", vec![23, 3, 3, 0xff, 0xff], RECORD_OVERFLOW),
        ("nothing", raw(&[]), BAD_RECORD_MAC),
        ("half a tag", raw(&[0; 15]), BAD_RECORD_MAC),
        ("wrong tag", raw(&wrong_tag), BAD_RECORD_MAC),
        ("only a tag", raw(&[0; 16]), UNEXPECTED_MESSAGE),
        ("only padding", raw(&[0; 500]), UNEXPECTED_MESSAGE),
        ("payload", record(DATA, &above, 0), RECORD_OVERFLOW),
        ("padding", record(DATA, &full, 1), RECORD_OVERFLOW),
        ("expansion", raw(&[0; PROTECTED_MAX]), RECORD_OVERFLOW),
        ("inner CCS", record(20, &[1], 0), UNEXPECTED_MESSAGE),
        ("heartbeat", record(24, &[1], 0), UNEXPECTED_MESSAGE),
    ]);
}

#[test]
fn a_message_or_alert_that_is_not_allowed_has_the_alert_of_rfc_8446() {
    let message = |payload: &[u8]| record(HANDSHAKE, payload, 0);
    let alert = |payload: &[u8]| record(ALERT, payload, 0);
    let within = |other: Vec<u8>| [record(HANDSHAKE, &[24, 0], 0), other].concat();
    let two = [24, 0, 0, 1, 0, 24, 0, 0, 1, 0];
    check([
        ("empty alert", alert(&[]), UNEXPECTED_MESSAGE),
        ("half an alert", alert(&[2]), DECODE_ERROR),
        ("two alerts", alert(&[1, 90, 1, 0]), DECODE_ERROR),
        ("empty message", message(&[]), UNEXPECTED_MESSAGE),
        ("ClientHello", message(&[1, 0, 0, 0]), UNEXPECTED_MESSAGE),
        ("Finished", message(&[20, 0, 0, 1, 0]), UNEXPECTED_MESSAGE),
        ("no request", message(&[24, 0, 0, 0]), DECODE_ERROR),
        ("long", message(&[24, 0, 0, 2, 0, 0]), DECODE_ERROR),
        ("huge", message(&[24, 1, 0, 1, 0]), DECODE_ERROR),
        ("unknown", message(&[24, 0, 0, 1, 2]), ILLEGAL_PARAMETER),
        ("two messages", message(&two), UNEXPECTED_MESSAGE),
        ("data", within(record(DATA, &[], 0)), UNEXPECTED_MESSAGE),
        ("an alert", within(alert(&[1, 0])), UNEXPECTED_MESSAGE),
        ("empty part", within(message(&[])), UNEXPECTED_MESSAGE),
        ("new message", within(message(&[24, 0])), DECODE_ERROR),
    ]);
}

#[test]
fn padding_is_removed_up_to_the_limit() {
    for padding in [0, 1, 255, PLAINTEXT_MAX - 3] {
        let got = opened(record(DATA, b"a\0b", padding)).unwrap();
        assert_eq!(got, [(Content::ApplicationData, b"a\0b".to_vec())]);
    }
    let empty = [record(DATA, &[], 0), record(DATA, &[], PLAINTEXT_MAX)].concat();
    assert_eq!(opened(empty).unwrap().len(), 2);
    let full = vec![0; PLAINTEXT_MAX];
    let got = opened(record(DATA, &full, 0)).unwrap();
    assert_eq!(got, [(Content::ApplicationData, full)]);
}

#[test]
fn a_record_above_the_limit_is_refused_by_its_header_and_another_waits() {
    let mut layer = RecordLayer::plaintext();
    for size in 0..HEADER_BYTES {
        assert_eq!(layer.open(&mut [23, 3, 3, 0x41, 0x01][..size]), Ok(None));
    }
    let overflow = Err(RecordError::RecordOverflow);
    assert_eq!(layer.open(&mut [23, 3, 3, 0x41, 0x01]), overflow);
    assert_eq!(layer.open(&mut [23, 3, 3, 0x41, 0x00]), Ok(None));
}

#[test]
fn every_alert_but_two_is_fatal_and_not_answered() {
    for level in [0, 1, 2, 255] {
        for code in 0..=u8::MAX {
            let got = opened(record(ALERT, &[level, code], 0));
            match code {
                0 => assert_eq!(got.unwrap()[0].0, Content::CloseNotify),
                90 => assert_eq!(got.unwrap()[0].0, Content::Nothing),
                _ => {
                    let error = got.unwrap_err();
                    assert_eq!(error, RecordError::PeerAlert(code.into()));
                    assert_eq!(error.alert(), None);
                }
            }
        }
    }
    let shown = RecordError::PeerAlert(46.into()).to_string();
    assert_eq!(shown, "TLS alert from the peer: CertificateUnknown");
}

#[test]
fn a_key_update_is_read_whatever_its_parts() {
    let message = [24, 0, 0, 1, 1];
    for parts in 0..1 << (message.len() - 1) {
        let (mut input, mut start) = (Vec::new(), 0);
        for end in 1..=message.len() {
            if end == message.len() || parts & 1 << (end - 1) != 0 {
                input.extend(record(HANDSHAKE, &message[start..end], end));
                start = end;
            }
        }
        input.extend(record(DATA, b"x", 0));
        let got = opened(input).unwrap();
        let (last, got) = got.split_last().unwrap();
        assert_eq!(last.0, Content::ApplicationData);
        let (update, nothing) = got.split_last().unwrap();
        assert_eq!(update.0, Content::KeyUpdate { requested: true });
        assert!(nothing.iter().all(|(content, _)| *content == Content::Nothing));
    }
}

#[test]
fn a_layer_without_encryption_opens_what_it_seals() {
    let mut layer = RecordLayer::plaintext();
    let mut sealed = super::seal(&mut layer, super::ContentType::ApplicationData, b"abc");
    assert_eq!(sealed, record(DATA, b"abc", 0));
    assert_eq!(sealed.len(), HEADER_BYTES + 3 + TRAILER_BYTES);
    let mut update = [0; super::super::KEY_UPDATE_BYTES];
    layer.update_sending_key(&mut update).unwrap();
    sealed.extend(update);
    let got = open(&mut layer, &mut sealed).unwrap();
    assert_eq!(got[0], (Content::ApplicationData, b"abc".to_vec()));
    assert_eq!(got[1].0, Content::KeyUpdate { requested: false });
}
