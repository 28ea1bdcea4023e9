//! Records between a layer and rustls' client, and records that no client should send.

mod peer;
mod rules;

use super::{Content, ContentType, HEADER_BYTES, RecordError, RecordLayer, TRAILER_BYTES};

/// Seals a payload by the layer.
fn seal(layer: &mut RecordLayer, content: ContentType, payload: &[u8]) -> Vec<u8> {
    let mut record = [&[0; HEADER_BYTES], payload, &[0; TRAILER_BYTES]].concat();
    layer.seal(content, &mut record).unwrap();
    record
}

/// Opens all complete records and removes them. Returns the content and payload of each.
fn open(
    layer: &mut RecordLayer,
    input: &mut Vec<u8>,
) -> Result<Vec<(Content, Vec<u8>)>, RecordError> {
    let mut opened = Vec::new();
    while let Some(record) = layer.open(input)? {
        opened.push((record.content, input[record.payload].to_vec()));
        input.drain(..record.bytes);
    }
    Ok(opened)
}
