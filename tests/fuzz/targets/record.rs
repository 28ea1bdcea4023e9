//! TLS records behind the handshake, without encryption.

use strait::tls::record::{
    Content, ContentType, HEADER_BYTES, PLAINTEXT_MAX, RECORD_MAX, RecordError, RecordLayer,
    TRAILER_BYTES,
};

/// Unit of lengths in a script, so that the longest exceeds the limit of a record.
const LENGTH_STEP: usize = PLAINTEXT_MAX / 254;

/// Opened records, and the error at their end.
pub type Opened = (Vec<(Content, Vec<u8>)>, Option<RecordError>);

/// Reads the size of segments from the first byte, and records from the rest: their bytes, or a
/// script of them if the first byte is 0. The result does not depend on the segments. Each payload
/// is within its record and the limits, and arrives again if it is sealed. Returns the result.
pub fn record(data: &[u8]) -> Opened {
    let (size, bytes) = match data {
        [] => return (Vec::new(), None),
        [0, size, script @ ..] => (*size, records(script)),
        [size, bytes @ ..] => (*size, bytes.to_vec()),
    };
    let whole = open(&bytes, bytes.len().max(1));
    assert_eq!(whole, open(&bytes, usize::from(size).max(1)));
    let (records, error) = &whole;
    if let Some(error) = error {
        let is_answered = error.alert().is_some();
        assert_ne!(is_answered, matches!(error, RecordError::PeerAlert(_)));
        assert!(!matches!(error, RecordError::Internal(_) | RecordError::KeyExhausted));
    }
    let mut layer = RecordLayer::plaintext();
    for (content, payload) in records {
        if *content == Content::ApplicationData {
            let mut sealed = [&[0; HEADER_BYTES], &payload[..], &[0; TRAILER_BYTES]].concat();
            let content = ContentType::ApplicationData;
            layer.seal(content, &mut sealed).expect("a fitting record");
            let (again, error) = open(&sealed, sealed.len());
            assert_eq!(again, [(Content::ApplicationData, payload.clone())]);
            assert_eq!(error, None);
        }
    }
    whole
}

/// Returns the records of a script. Each takes three bytes: content type, length and padding. The
/// payload of data is made up; that of others follows, up to 255 bytes.
fn records(mut script: &[u8]) -> Vec<u8> {
    let mut records = Vec::new();
    while let [kind, length, padding, rest @ ..] = script {
        let (payload, rest) = match kind {
            0..128 => (vec![b'x'; usize::from(*length) * LENGTH_STEP], rest),
            _ => {
                let (payload, rest) = rest.split_at(usize::from(*length).min(rest.len()));
                (payload.to_vec(), rest)
            }
        };
        script = rest;
        let kind = match kind {
            0..128 => ContentType::ApplicationData as u8,
            kind => kind - 128,
        };
        let padding = vec![0; usize::from(*padding) * LENGTH_STEP];
        let length = payload.len() + padding.len() + TRAILER_BYTES;
        let [high, low] = u16::try_from(length).unwrap_or(u16::MAX).to_be_bytes();
        records.extend([ContentType::ApplicationData as u8, 3, 3, high, low]);
        records.extend(payload);
        records.push(kind);
        records.extend(padding);
        records.extend([0; TRAILER_BYTES - 1]);
    }
    records
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
        assert!(input.len() < RECORD_MAX + size, "a record is opened once complete");
    }
    (opened, None)
}
