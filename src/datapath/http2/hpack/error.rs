//! Errors of header blocks.

/// Reason for which a header block cannot be decoded: COMPRESSION_ERROR (RFC 9113 section 4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HpackError {
    /// The block ends inside a field.
    Truncated,
    /// An integer takes more than five octets (RFC 7541 section 5.1).
    Integer,
    /// A string is not valid Huffman code, or its padding is invalid (RFC 7541 section 5.2).
    Huffman,
    /// An index is 0 or exceeds both tables (RFC 7541 sections 2.3.3 and 6.1).
    Index,
    /// A table size update exceeds the limit, or follows a field (RFC 7541 sections 4.2 and 6.3).
    TableSize,
}
