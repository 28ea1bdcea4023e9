//! Huffman code of HPACK (RFC 7541 section 5.2 and appendix B).
//!
//! The code is canonical: in the order of length and symbol, each code is the next number. The
//! lengths therefore define it.

use super::HpackError;

/// Symbol after all octets, which ends a string and is only used as padding.
const EOS: u16 = 256;
const SYMBOLS: usize = EOS as usize + 1;
/// Length of the shortest and of the longest code in bits.
const BITS_MIN: usize = 5;
const BITS_MAX: usize = 30;

/// Length of each symbol's code in bits (RFC 7541 appendix B).
#[rustfmt::skip]
const LENGTHS: [u8; SYMBOLS] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28,
    28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11,
    10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8,
    15, 6, 12, 10, 13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6, 15, 5, 6, 5,
    6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7,
    7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23,
    23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21,
    23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23, 26, 26, 20, 19, 22, 23, 22, 25,
    26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26,
    28, 27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26, 30,
];

/// Codes of one length. Codes stand at the top of 32 bits.
#[derive(Clone, Copy)]
struct Codes {
    first: u32,
    /// Last code, filled with ones.
    last: u32,
    /// Position of the first code's symbol in the order of codes.
    position: usize,
}

/// Symbols in the order of their codes, and codes by their length in bits.
struct Code {
    symbols: [u16; SYMBOLS],
    by_length: [Codes; BITS_MAX + 1],
}

static CODE: Code = build();

const fn build() -> Code {
    let none = Codes { first: 0, last: 0, position: 0 };
    let (mut symbols, mut by_length) = ([0; SYMBOLS], [none; BITS_MAX + 1]);
    let (mut code, mut position, mut length) = (0_u32, 0, BITS_MIN);
    while length <= BITS_MAX {
        by_length[length].first = code;
        by_length[length].position = position;
        let mut symbol = 0;
        while symbol <= EOS {
            if LENGTHS[symbol as usize] as usize == length {
                symbols[position] = symbol;
                position += 1;
                // EOS, the last code, consists of ones: the sum wraps to 0.
                code = code.wrapping_add(1 << (32 - length));
            }
            symbol += 1;
        }
        by_length[length].last = code.wrapping_sub(1);
        length += 1;
    }
    Code { symbols, by_length }
}

/// Returns the symbol at the top of `bits`, and the length of its code.
fn find(bits: u32) -> (u16, usize) {
    for (length, codes) in CODE.by_length.iter().enumerate().skip(BITS_MIN) {
        if bits <= codes.last {
            let offset = (bits - codes.first) >> (32 - length);
            return (CODE.symbols[codes.position + offset as usize], length);
        }
    }
    (EOS, BITS_MAX)
}

/// Decodes `text` and appends it to `out`, at most 8/5 as many octets.
pub(super) fn decode(mut text: &[u8], out: &mut Vec<u8>) -> Result<(), HpackError> {
    // Bits that are not decoded yet stand at the top.
    let (mut bits, mut count) = (0_u64, 0);
    loop {
        while count <= 48
            && let Some((&octet, rest)) = text.split_first()
        {
            bits |= u64::from(octet) << (56 - count);
            count += 8;
            text = rest;
        }
        // Ones after the end complete the padding to EOS.
        let filled = bits | (u64::MAX >> count);
        let (symbol, length) = find((filled >> 32) as u32);
        if length > count {
            let is_padding = count < 8 && filled == u64::MAX;
            return is_padding.then_some(()).ok_or(HpackError::Huffman);
        }
        // EOS is no octet, and invalid within a string.
        out.push(u8::try_from(symbol).map_err(|_| HpackError::Huffman)?);
        bits <<= length;
        count -= length;
    }
}

/// Returns the code of an octet, and its length in bits.
#[cfg(test)]
pub(super) fn code(octet: u8) -> (u32, usize) {
    let position = CODE.symbols.iter().position(|symbol| *symbol == u16::from(octet));
    let length = usize::from(LENGTHS[usize::from(octet)]);
    let codes = CODE.by_length[length];
    let offset = u32::try_from(position.unwrap() - codes.position).unwrap();
    ((codes.first >> (32 - length)) + offset, length)
}
