//! Detection of unknown fields in encoded protobuf messages.
//!
//! prost skips unknown fields, as protobuf specifies. That is unsafe in a message in which
//! every field narrows or widens the others: a condition of a later version would be read as no
//! condition.

use prost::bytes::Buf;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use super::convert::At as _;

/// Known fields of a message: number, name and content.
#[derive(Debug)]
pub(super) struct Shape(pub(super) &'static [(u32, &'static str, FieldKind)]);

#[derive(Clone, Copy, Debug)]
pub(super) enum FieldKind {
    /// No message, or a message that other code checks.
    Leaf,
    One(&'static Shape),
    Repeated(&'static Shape),
}

/// Rejects a message with a field that is not in the shape, at any depth.
///
/// # Errors
/// The path to the first unknown field, or the reason why the message cannot be decoded.
pub(super) fn refuse(bytes: &[u8], shape: &Shape) -> Result<(), String> {
    let mut bytes = bytes;
    let mut counts = vec![0_usize; shape.0.len()];
    while bytes.has_remaining() {
        let (number, wire) = decode_key(&mut bytes).map_err(|error| error.to_string())?;
        let known = shape.0.iter().position(|(known, ..)| *known == number);
        let Some(place) = known else {
            return Err(format!("unknown field {number}"));
        };
        let (_, name, kind) = shape.0[place];
        let index = counts[place];
        counts[place] += 1;
        let (inner, at) = match kind {
            FieldKind::One(shape) => (Some(shape), format!(".{name}")),
            FieldKind::Repeated(shape) => (Some(shape), format!(".{name}[{index}]")),
            FieldKind::Leaf => (None, format!(".{name}")),
        };
        let value = field(&mut bytes, number, wire).at(&at)?;
        if let Some(inner) = inner {
            refuse(value, inner).at(&at)?;
        }
    }
    Ok(())
}

/// Passes the number, wire type and bytes of each field to `see`. The bytes are empty unless
/// the field is length-delimited.
///
/// # Errors
/// The first error of `see`, or the reason why the message cannot be decoded.
pub(super) fn for_each_field<'a>(
    bytes: &'a [u8],
    mut visit: impl FnMut(u32, WireType, &'a [u8]) -> Result<(), String>,
) -> Result<(), String> {
    for_each_raw_field(bytes, |number, wire, value, _| visit(number, wire, value))
}

/// Does what [`for_each_field`] does, and also passes each field as it is encoded.
pub(super) fn for_each_raw_field<'a>(
    mut bytes: &'a [u8],
    mut visit: impl FnMut(u32, WireType, &'a [u8], &'a [u8]) -> Result<(), String>,
) -> Result<(), String> {
    while bytes.has_remaining() {
        let all = bytes;
        let (number, wire) = decode_key(&mut bytes).map_err(|error| error.to_string())?;
        let value = field(&mut bytes, number, wire)?;
        let (raw, _) = all.split_at(all.len() - bytes.len());
        visit(number, wire, value, raw)?;
    }
    Ok(())
}

/// Consumes one field. Returns its bytes if it is length-delimited, and an empty slice
/// otherwise.
fn field<'a>(bytes: &mut &'a [u8], number: u32, wire: WireType) -> Result<&'a [u8], String> {
    if wire != WireType::LengthDelimited {
        let skipped = skip_field(wire, number, bytes, DecodeContext::default());
        return skipped.map(|()| &[][..]).map_err(|error| error.to_string());
    }
    let length = decode_varint(bytes).map_err(|error| error.to_string())?;
    let length = usize::try_from(length).map_err(|error| error.to_string())?;
    let split = bytes.split_at_checked(length);
    let (value, rest) = split.ok_or("truncated field")?;
    *bytes = rest;
    Ok(value)
}
