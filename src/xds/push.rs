//! Decoder of delta responses, whose bodies are slices of the message.
//!
//! Entries are counted before they are decoded. An entry takes two bytes on the wire and a hundred
//! in memory, so a limit of message bytes alone does not bound memory.

use std::sync::Arc;

use bytes::Bytes;
use prost::encoding::WireType;

use super::client::{ENTRIES_MAX, Resource, Response};
use super::unknown::for_each_field;

/// Field numbers of `DeltaDiscoveryResponse`.
const SYSTEM_VERSION: u32 = 1;
const RESOURCES: u32 = 2;
const TYPE_URL: u32 = 4;
const NONCE: u32 = 5;
const REMOVED: u32 = 6;

/// Field numbers of its `Resource`.
const VERSION: u32 = 1;
const BODY: u32 = 2;
const NAME: u32 = 3;

/// Field numbers of `google.protobuf.Any`.
const ANY_TYPE: u32 = 1;
const ANY_VALUE: u32 = 2;

/// Response, with its properties for logs and metrics.
#[derive(Debug, Default)]
pub(super) struct Push {
    /// Length of the message in bytes.
    pub(super) bytes: usize,
    /// `system_version_info`.
    pub(super) version: String,
    /// Decoded response. Its bodies are slices of the message and keep all of it in memory.
    pub(super) response: Response,
}

/// Decodes a response.
///
/// # Errors
/// The message is malformed, or has more resources and removed names than the limit.
pub(super) fn read(message: &Bytes) -> Result<Push, String> {
    let mut push = Push { bytes: message.len(), ..Push::default() };
    push.response.resources.reserve_exact(resources(message)?);
    for_each_field(message, |number, wire, value| {
        let response = &mut push.response;
        match number {
            SYSTEM_VERSION => text(wire, value)?.clone_into(&mut push.version),
            RESOURCES => {
                let last = response.resources.last();
                let resource = resource(message, delimited(wire, value)?, last)?;
                response.resources.push(resource);
            }
            TYPE_URL => text(wire, value)?.clone_into(&mut response.type_url),
            NONCE => text(wire, value)?.clone_into(&mut response.nonce),
            REMOVED => response.removed.push(text(wire, value)?.to_owned()),
            _ => {}
        }
        Ok(())
    })?;
    Ok(push)
}

/// Returns the number of resources.
///
/// # Errors
/// The message is malformed, or has more resources and removed names than the limit.
fn resources(message: &[u8]) -> Result<usize, String> {
    let (mut resources, mut removed) = (0, 0);
    for_each_field(message, |number, _, _| {
        match number {
            RESOURCES => resources += 1,
            REMOVED => removed += 1,
            _ => {}
        }
        if resources + removed > ENTRIES_MAX {
            Err(format!("a response has more than {ENTRIES_MAX} resources and removed names"))
        } else {
            Ok(())
        }
    })?;
    Ok(resources)
}

/// Decodes a resource. `last` is the one before it.
fn resource(message: &Bytes, value: &[u8], last: Option<&Resource>) -> Result<Resource, String> {
    let (mut name, mut version, mut body_type) = ("", "", "");
    let mut resource = Resource::default();
    for_each_field(value, |number, wire, value| {
        match number {
            VERSION => version = text(wire, value)?,
            BODY => {
                let body = resource.body.get_or_insert_default();
                any(message, delimited(wire, value)?, (&mut body_type, body))?;
            }
            NAME => name = text(wire, value)?,
            _ => {}
        }
        Ok(())
    })?;
    resource.name = name.into();
    resource.version = share(version, last.map(|last| &last.version));
    resource.body_type = share(body_type, last.map(|last| &last.body_type));
    Ok(resource)
}

/// Returns the same text of another resource, `last`, or a new copy.
pub(super) fn share(text: &str, last: Option<&Arc<str>>) -> Arc<str> {
    let last = last.filter(|last| ***last == *text);
    last.map_or_else(|| text.into(), Arc::clone)
}

/// Decodes a body. As in protobuf, the last value of a repeated scalar field wins.
fn any<'a>(
    message: &Bytes,
    value: &'a [u8],
    (body_type, body): (&mut &'a str, &mut Bytes),
) -> Result<(), String> {
    for_each_field(value, |number, wire, value| {
        match number {
            ANY_TYPE => *body_type = text(wire, value)?,
            ANY_VALUE => *body = message.slice_ref(delimited(wire, value)?),
            _ => {}
        }
        Ok(())
    })
}

pub(super) fn text(wire: WireType, value: &[u8]) -> Result<&str, String> {
    std::str::from_utf8(delimited(wire, value)?).map_err(|error| error.to_string())
}

pub(super) fn delimited(wire: WireType, value: &[u8]) -> Result<&[u8], String> {
    match wire {
        WireType::LengthDelimited => Ok(value),
        wire => Err(format!("wire type {wire:?}, want LengthDelimited")),
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::grpc::discovery::{DeltaDiscoveryResponse, Resource as Sent};

    fn sent(name: &str, version: &str, body: Option<&[u8]>) -> Sent {
        Sent {
            name: name.into(),
            version: version.into(),
            aliases: vec!["an/alias".into(), String::new()],
            resource: body.map(|body| prost_types::Any {
                type_url: "type.googleapis.com/some".into(),
                value: body.into(),
            }),
            ..Sent::default()
        }
    }

    fn response() -> DeltaDiscoveryResponse {
        DeltaDiscoveryResponse {
            system_version_info: "2026-08-22T15:00:18Z/7".into(),
            resources: vec![
                sent("a", "1", Some(b"body")),
                sent("", "", Some(b"")),
                sent("b", "", None),
            ],
            type_url: "type.googleapis.com/some".into(),
            nonce: "n".into(),
            removed_resources: vec!["gone".into(), String::new()],
            ..DeltaDiscoveryResponse::default()
        }
    }

    /// Returns the response as prost reads it.
    fn decoded(message: &[u8]) -> Option<(String, Response)> {
        let message = DeltaDiscoveryResponse::decode(message).ok()?;
        let resources = message.resources.into_iter().map(|resource| {
            let (body_type, body) = match resource.resource {
                Some(any) => (any.type_url.into(), Some(any.value.into())),
                None => (Arc::default(), None),
            };
            Resource {
                name: resource.name.into(),
                version: resource.version.into(),
                body,
                body_type,
            }
        });
        let response = Response {
            resources: resources.collect(),
            type_url: message.type_url,
            nonce: message.nonce,
            removed: message.removed_resources,
        };
        Some((message.system_version_info, response))
    }

    #[track_caller]
    fn same(message: &[u8]) {
        let read = read(&Bytes::copy_from_slice(message));
        let read = read.ok().map(|push| (push.version, push.response));
        match decoded(message) {
            // Fields without a use are skipped, even if they are malformed.
            None => {}
            decoded => assert_eq!(read, decoded, "{message:?}"),
        }
    }

    #[test]
    fn a_response_is_read_as_prost_reads_it() {
        let message = response().encode_to_vec();
        same(&message);
        for end in 0..message.len() {
            let cut = &message[..end];
            same(cut);
            let is_read = read(&Bytes::copy_from_slice(cut)).is_ok();
            assert_eq!(is_read, decoded(cut).is_some(), "{cut:?}");
        }
        for at in 0..message.len() {
            for bit in 0..8 {
                let mut flipped = message.clone();
                flipped[at] ^= 1 << bit;
                same(&flipped);
            }
        }
    }

    #[test]
    fn a_field_that_comes_twice_is_merged() {
        let twice = [response().encode_to_vec(), response().encode_to_vec()];
        same(&twice.concat());
        let any = |value: &[u8]| sent("a", "1", Some(value)).encode_to_vec();
        let resource = [any(b"one"), any(b"two"), sent("b", "", None).encode_to_vec()].concat();
        let length = u8::try_from(resource.len()).expect("one byte of length");
        same(&[vec![0x12, 0x80 | (length & 0x7f), length >> 7], resource].concat());
    }

    #[test]
    fn a_body_is_no_copy() {
        let message = Bytes::from(response().encode_to_vec());
        let push = read(&message).expect("a response");
        assert_eq!(push.bytes, message.len());
        let body = push.response.resources[0].body.as_ref().expect("a body");
        assert!(message.as_ptr_range().contains(&body.as_ptr()));
    }

    #[test]
    fn entries_are_counted() {
        let response = |resources, removed| {
            let response = DeltaDiscoveryResponse {
                resources: vec![Sent::default(); resources],
                removed_resources: vec![String::new(); removed],
                nonce: "n".into(),
                ..DeltaDiscoveryResponse::default()
            };
            read(&response.encode_to_vec().into())
        };
        for (resources, removed) in [(ENTRIES_MAX, 0), (0, ENTRIES_MAX)] {
            response(resources, removed).expect("at the limit");
            response(resources, removed + 1).expect_err("beyond it");
        }
    }
}
