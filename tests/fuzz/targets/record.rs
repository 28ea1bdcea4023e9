//! TLS records behind the handshake, without encryption.

use strait::tls::record::{
    Content, ContentType, HEADER_BYTES, PLAINTEXT_MAX, RECORD_MAX, RecordError, RecordLayer,
    TRAILER_BYTES,
};

/// Opened records, and the error at their end.
type Opened = (Vec<(Content, Vec<u8>)>, Option<RecordError>);

/// Reads the size of segments from the first byte, and records from the rest. The result does not
/// depend on the segments. Each payload is within its record and the limits, and arrives again if
/// it is sealed.
pub fn record(data: &[u8]) {
    let Some((&size, bytes)) = data.split_first() else {
        return;
    };
    let whole = open(bytes, bytes.len().max(1));
    assert_eq!(whole, open(bytes, usize::from(size).max(1)));
    let (records, error) = whole;
    if let Some(error) = error {
        let is_answered = error.alert().is_some();
        assert_ne!(is_answered, matches!(error, RecordError::PeerAlert(_)));
        assert!(!matches!(
            error,
            RecordError::Internal(_) | RecordError::KeyExhausted
        ));
    }
    let mut layer = RecordLayer::plaintext();
    for (content, payload) in records {
        if content == Content::ApplicationData {
            let mut sealed = [&[0; HEADER_BYTES], &payload[..], &[0; TRAILER_BYTES]].concat();
            let content = ContentType::ApplicationData;
            layer.seal(content, &mut sealed).expect("a fitting record");
            let (again, error) = open(&sealed, sealed.len());
            assert_eq!(again, [(Content::ApplicationData, payload)]);
            assert_eq!(error, None);
        }
    }
}

/// Opens records that arrive in segments of `size` bytes.
fn open(bytes: &[u8], size: usize) -> Opened {
    let (mut layer, mut input, mut opened) = (RecordLayer::plaintext(), Vec::new(), Vec::new());
    for segment in bytes.chunks(size) {
        input.extend_from_slice(segment);
        loop {
            match layer.open(&mut input) {
                Ok(None) => break,
                Ok(Some(record)) => {
                    assert!((HEADER_BYTES + TRAILER_BYTES..=RECORD_MAX).contains(&record.bytes));
                    assert!(record.payload.start >= HEADER_BYTES);
                    assert!(record.payload.end <= record.bytes - TRAILER_BYTES);
                    assert!(record.payload.len() <= PLAINTEXT_MAX);
                    opened.push((record.content, input[record.payload].to_vec()));
                    input.drain(..record.bytes);
                }
                Err(error) => return (opened, Some(error)),
            }
        }
        assert!(
            input.len() < RECORD_MAX + size,
            "a record is opened once complete"
        );
    }
    (opened, None)
}
