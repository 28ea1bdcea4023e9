//! Header blocks of a connection.

use loona_hpack::decoder::DecoderError;
use strait::datapath::http2::hpack::{Decoder, HpackError};
use strait::datapath::http2::request::{self, HEADER_LIST_BYTES_MAX};
use strait::reason::Reason;

/// Reads the length of each header block from one byte. An independent decoder yields the same
/// fields, or fails too, and a request takes the same fields from the table. Returns the number of
/// fields, and the error at their end.
pub fn hpack(mut data: &[u8]) -> (usize, Option<HpackError>) {
    let mut count = 0;
    let (mut ours, mut requests) = (Decoder::default(), Decoder::default());
    let mut other = loona_hpack::Decoder::new();
    other.set_max_allowed_table_size(4096);
    while let Some((&length, rest)) = data.split_first() {
        let (block, rest) = rest.split_at(usize::from(length).min(rest.len()));
        data = rest;
        let mut fields = Vec::new();
        let result = ours.decode(block, &mut |name, value| {
            fields.push((name.to_vec(), value.to_vec()));
        });
        count += fields.len();
        let request = request::decode(&mut requests, block);
        assert_eq!(request.as_ref().err(), result.as_ref().err());
        match (result, other.decode(block)) {
            (Ok(()), Ok(others)) => assert_eq!(fields, others),
            // A block of size updates alone is valid (RFC 7541 section 4.2).
            (Ok(()), Err(DecoderError::SizeUpdateAtEnd)) => assert!(fields.is_empty()),
            (Err(error), Err(_)) => return (count, Some(error)),
            // The other one accepts a size update after a field.
            (Err(error @ HpackError::TableSize), Ok(_)) => return (count, Some(error)),
            (result, others) => panic!("{result:?}, but {others:?}"),
        }
        let size: usize = fields.iter().map(|(n, v)| n.len() + v.len() + 32).sum();
        // Fields beyond a limit are ignored.
        if let Ok(Ok(request)) = request
            && request.target.as_ref().err() != Some(&Reason::TooManyFields)
        {
            assert!(size <= HEADER_LIST_BYTES_MAX);
            let authority = |(name, _): &&(Vec<u8>, Vec<u8>)| name == b":authority";
            let received = fields.iter().find(authority).map(|(_, value)| &value[..]);
            assert_eq!(request.authority.as_bytes(), received.unwrap_or_default());
        }
    }
    (count, None)
}
