//! HPACK (RFC 7541): decoder of header blocks, and encoder of a status.
//!
//! The work for a block is linear in its length: a Huffman string grows to at most 8/5, an indexed
//! field is passed on without a copy, and an inserted entry shares an indexed name. A field of a
//! few octets can refer to 4 KiB, though, so a caller has to bound what it copies.

mod error;
mod huffman;
mod table;
#[cfg(test)]
mod tests;

pub use error::HpackError;
use table::{DynamicTable, Name, TABLE_BYTES_MAX};

/// Index of `:status: 200` in the static table, the first of the `:status` entries.
const STATUS_INDEX: u8 = 8;
/// Statuses in the static table, in the order of their indices.
const INDEXED_STATUSES: [u16; 7] = [200, 204, 206, 304, 400, 404, 500];

/// Decoder of the header blocks of one connection, with its dynamic table.
///
/// It allocates nothing until the first entry is inserted. After an error it must not be used.
#[derive(Debug, Default)]
pub struct Decoder {
    table: DynamicTable,
}

/// Output of Huffman strings, reused for all fields of a block.
#[derive(Default)]
struct Scratch {
    name: Vec<u8>,
    value: Vec<u8>,
}

impl Decoder {
    /// Decodes a complete header block. Calls `field` with the name and value of each field, in
    /// order.
    ///
    /// # Errors
    /// Any error is a connection error of type COMPRESSION_ERROR.
    pub fn decode(
        &mut self,
        mut block: &[u8],
        field: &mut dyn FnMut(&[u8], &[u8]),
    ) -> Result<(), HpackError> {
        let mut scratch = Scratch::default();
        let mut may_resize = true;
        while let Some(&first) = block.first() {
            let is_size_update = first & 0xe0 == 0x20;
            if !is_size_update {
                may_resize = false;
            }
            if first & 0x80 != 0 {
                let (name, value) = self.table.get(integer(&mut block, 7)?)?;
                field(name, value);
            } else if first & 0x40 != 0 {
                self.decode_literal(&mut block, 6, &mut scratch, field)?;
            } else if is_size_update {
                let size = integer(&mut block, 5)?;
                if !may_resize || size > TABLE_BYTES_MAX {
                    return Err(HpackError::TableSize);
                }
                self.table.resize(size);
            } else {
                // Without indexing, or never indexed: the same for a receiver that re-encodes
                // nothing.
                self.decode_literal(&mut block, 4, &mut scratch, field)?;
            }
        }
        Ok(())
    }

    /// Decodes a literal field (RFC 7541 section 6.2). A prefix of 6 bits belongs to the form that
    /// is inserted into the table.
    fn decode_literal(
        &mut self,
        block: &mut &[u8],
        prefix: u32,
        scratch: &mut Scratch,
        field: &mut dyn FnMut(&[u8], &[u8]),
    ) -> Result<(), HpackError> {
        let index = integer(block, prefix)?;
        let literal = match index {
            0 => Some(string(block, &mut scratch.name)?),
            _ => None,
        };
        let value = string(block, &mut scratch.value)?;
        let name = match literal {
            Some(name) => name,
            None => self.table.get(index)?.0,
        };
        field(name, value);
        if prefix == 6 {
            let name = match literal {
                Some(name) => Name::Shared(name.into()),
                None => self.table.name(index)?,
            };
            self.table.insert(name, value);
        }
        Ok(())
    }
}

/// Appends the header block of a response without fields other than `:status`.
pub fn encode_status(status: u16, block: &mut Vec<u8>) {
    let indexed = (STATUS_INDEX..).zip(INDEXED_STATUSES);
    for (index, known) in indexed {
        if known == status {
            return block.push(0x80 | index);
        }
    }
    // Literal without indexing, with an indexed name and a value of three octets.
    block.extend([STATUS_INDEX, 3]);
    let digit = |place: u16| b"0123456789"[usize::from(status / place % 10)];
    block.extend([digit(100), digit(10), digit(1)]);
}

/// Appends a literal field that is never indexed (RFC 7541 section 6.2.2). Longer names and values
/// than one octet can announce are cut.
pub fn encode_field(name: &str, value: &str, block: &mut Vec<u8>) {
    const LENGTH_MAX: usize = 126;
    block.push(0);
    for text in [name, value] {
        let octets = text.as_bytes();
        let octets = octets.get(..LENGTH_MAX).unwrap_or(octets);
        block.push(u8::try_from(octets.len()).unwrap_or_default());
        block.extend(octets);
    }
}

/// Decodes an integer (RFC 7541 section 5.1) of at most five octets, which is less than 2²⁹.
fn integer(block: &mut &[u8], prefix: u32) -> Result<usize, HpackError> {
    let (&first, mut rest) = block.split_first().ok_or(HpackError::Truncated)?;
    let prefix_max = (1 << prefix) - 1;
    let mut value = usize::from(first) & prefix_max;
    if value == prefix_max {
        let mut shift = 0;
        loop {
            let (&octet, after) = rest.split_first().ok_or(HpackError::Truncated)?;
            rest = after;
            value += usize::from(octet & 0x7f) << shift;
            if octet & 0x80 == 0 {
                break;
            }
            shift += 7;
            if shift == 4 * 7 {
                return Err(HpackError::Integer);
            }
        }
    }
    *block = rest;
    Ok(value)
}

/// Decodes a string (RFC 7541 section 5.2), into `scratch` if it is Huffman code.
fn string<'a, 'b: 'a>(
    block: &mut &'b [u8],
    scratch: &'a mut Vec<u8>,
) -> Result<&'a [u8], HpackError> {
    let is_huffman = block.first().is_some_and(|first| first & 0x80 != 0);
    let length = integer(block, 7)?;
    let (text, rest) = block.split_at_checked(length).ok_or(HpackError::Truncated)?;
    *block = rest;
    if !is_huffman {
        return Ok(text);
    }
    scratch.clear();
    huffman::decode(text, scratch)?;
    Ok(scratch)
}
