//! Fields of a message as they are on the wire, and those that we do not know.
//!
//! prost passes them over, as protobuf has it. Of a message in which every field narrows or widens
//! what the others say, that is not safe: a condition of tomorrow would be read as none.

use prost::bytes::Buf;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

/// The fields that we know of a message: number, name, and what is in it.
#[derive(Debug)]
pub(super) struct Shape(pub(super) &'static [(u32, &'static str, Kind)]);

/// What is in a field.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// No message, or one that is judged by others.
    Leaf,
    /// A message.
    One(&'static Shape),
    /// A list of messages.
    Many(&'static Shape),
}

/// Looks for a field that is not in the shape, at any depth.
///
/// # Errors
/// The first one, with the path to it; or the message is none.
pub(super) fn refuse(bytes: &[u8], shape: &Shape) -> Result<(), String> {
    let mut bytes = bytes;
    let mut counts = vec![0_usize; shape.0.len()];
    while bytes.has_remaining() {
        let (number, wire) = decode_key(&mut bytes).map_err(|error| format!(": {error}"))?;
        let known = shape.0.iter().position(|(known, ..)| *known == number);
        let Some(place) = known else {
            return Err(format!(": field {number} is not understood"));
        };
        let (_, name, kind) = shape.0[place];
        let index = counts[place];
        counts[place] += 1;
        let (inner, at) = match kind {
            Kind::One(shape) => (Some(shape), format!(".{name}")),
            Kind::Many(shape) => (Some(shape), format!(".{name}[{index}]")),
            Kind::Leaf => (None, format!(".{name}")),
        };
        let value = field(&mut bytes, number, wire).map_err(|why| format!("{at}: {why}"))?;
        if let Some(inner) = inner {
            refuse(value, inner).map_err(|why| format!("{at}{why}"))?;
        }
    }
    Ok(())
}

/// Shows each field of a message: its number, its form, and its bytes if it has a length.
///
/// # Errors
/// What `see` has against one, or the message is none.
pub(super) fn fields<'a>(
    mut bytes: &'a [u8],
    mut see: impl FnMut(u32, WireType, &'a [u8]) -> Result<(), String>,
) -> Result<(), String> {
    while bytes.has_remaining() {
        let (number, wire) = decode_key(&mut bytes).map_err(|error| error.to_string())?;
        let value = field(&mut bytes, number, wire)?;
        see(number, wire, value)?;
    }
    Ok(())
}

/// Takes one field; gives its bytes if it has a length.
fn field<'a>(bytes: &mut &'a [u8], number: u32, wire: WireType) -> Result<&'a [u8], String> {
    if wire != WireType::LengthDelimited {
        let skipped = skip_field(wire, number, bytes, DecodeContext::default());
        return skipped.map(|()| &[][..]).map_err(|error| error.to_string());
    }
    let length = decode_varint(bytes).map_err(|error| error.to_string())?;
    let length = usize::try_from(length).map_err(|error| error.to_string())?;
    let split = bytes.split_at_checked(length);
    let (value, rest) = split.ok_or("it is cut off")?;
    *bytes = rest;
    Ok(value)
}
