//! The entries of a delta response, counted before it is decoded: one takes two bytes on the wire
//! and a hundred in memory, so that the limit of a message's bytes alone would bound nothing.

use prost::encoding::WireType;

use super::client::ENTRIES_MAX;
use super::unknown::fields;

/// Fields of a response: what is new, and the names of what is gone.
const RESOURCES: u32 = 2;
const REMOVED: u32 = 6;
/// The field of a resource with its other names.
const ALIASES: u32 = 4;

/// Whether a response, as it is on the wire, has no more resources, aliases and removed names than
/// could be held.
///
/// # Errors
/// It has more, or is no message.
pub(super) fn few(response: &[u8]) -> Result<(), String> {
    let mut entries = 0_usize;
    fields(response, |number, wire, value| {
        entries += match (number, wire) {
            (RESOURCES, WireType::LengthDelimited) => 1 + aliases(value)?,
            (REMOVED, _) => 1,
            _ => 0,
        };
        match entries > ENTRIES_MAX {
            true => Err(format!(
                "a response has more than {ENTRIES_MAX} resources, aliases and removed names"
            )),
            false => Ok(()),
        }
    })
}

fn aliases(resource: &[u8]) -> Result<usize, String> {
    let mut aliases = 0;
    fields(resource, |number, _, _| {
        aliases += usize::from(number == ALIASES);
        Ok(())
    })?;
    Ok(aliases)
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::grpc::discovery::{DeltaDiscoveryResponse, Resource};

    #[test]
    fn entries_are_counted_at_both_depths() {
        let response = |resources, aliases, removed| {
            let resource = Resource {
                aliases: vec![String::new(); aliases],
                ..Resource::default()
            };
            let response = DeltaDiscoveryResponse {
                resources: vec![resource; resources],
                removed_resources: vec![String::new(); removed],
                nonce: "n".into(),
                ..DeltaDiscoveryResponse::default()
            };
            few(&response.encode_to_vec())
        };
        for (resources, aliases, removed) in [
            (ENTRIES_MAX, 0, 0),
            (0, 0, ENTRIES_MAX),
            (2, ENTRIES_MAX / 2 - 1, 0),
        ] {
            response(resources, aliases, removed).expect("at the limit");
            response(resources, aliases, removed + 1).expect_err("beyond it");
        }
        few(&[0x12, 0x7f]).expect_err("cut off");
    }
}
