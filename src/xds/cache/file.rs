//! Format of the cache file, its atomic replacement, and its validation.
//!
//! A file consists of a head (magic, format, length of the payload), the payload (a [`Header`] and
//! its [`Entry`] messages, all length-delimited) and the SHA-256 digest of both.

use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::path::Path;
use std::sync::Arc;

use aws_lc_rs::digest::{Context, SHA256, digest};
use bytes::Bytes;
use prost::Message;

use crate::replace_file::replace_file;
use crate::xds::client::Resource;
use crate::xds::push::{delimited, text};
use crate::xds::unknown::for_each_field;

const MAGIC: [u8; 8] = *b"\xf5strait\n";
/// Format that this build writes, and the only one that it reads.
const FORMAT: u32 = 1;
/// Length of the magic, the format and the payload length.
const HEAD_BYTES: usize = 8 + 4 + 8;
const DIGEST_BYTES: usize = 32;
/// Limit of a file that is written or read.
const FILE_BYTES_MAX: usize = 1 << 30;
/// Limit of resources, the same as the client's.
const RESOURCES_MAX: u64 = 1_000_000;

/// First message of the payload.
#[derive(Clone, PartialEq, Eq, Message)]
pub(in crate::xds) struct Header {
    #[prost(string, tag = "1")]
    pub(super) cluster: String,
    #[prost(string, tag = "2")]
    pub(super) network: String,
    /// Time of the write, in seconds since 1970.
    #[prost(uint64, tag = "3")]
    pub(super) saved: u64,
    #[prost(uint64, tag = "4")]
    pub(super) resources: u64,
}

/// Field numbers of an [`Entry`].
const TYPE_URL: u32 = 1;
const NAME: u32 = 2;
const VERSION: u32 = 3;
const BODY: u32 = 4;

/// Resource as received from the control plane.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Entry {
    #[prost(string, tag = "1")]
    pub(super) type_url: String,
    #[prost(string, tag = "2")]
    pub(super) name: String,
    #[prost(string, tag = "3")]
    pub(super) version: String,
    #[prost(bytes = "bytes", tag = "4")]
    pub(super) body: Bytes,
}

impl Entry {
    /// Returns the encoded entry without its length.
    pub(super) fn encode(&self) -> Bytes {
        self.encode_to_vec().into()
    }
}

/// Entry whose type and name are kept apart from the rest of it.
pub(in crate::xds) type Split = (&'static str, Arc<str>, Bytes);

/// Resource of an entry, and the part of the entry without type and name, as in [`Split`].
pub(in crate::xds) type Restored = (Resource, Bytes);

/// Returns the length of an entry and its first fields. The rest of the entry follows them.
fn first((type_url, name, rest): &Split) -> Vec<u8> {
    let first = named(type_url, name);
    let mut bytes = Vec::new();
    // Writing to a vector cannot fail.
    let _ = prost::encode_length_delimiter(first.encoded_len() + rest.len(), &mut bytes);
    bytes.extend(first.encode_to_vec());
    bytes
}

/// Replaces the file atomically. The old one is kept if that fails.
pub(super) fn write(path: &Path, header: &Header, entries: &[Split]) -> io::Result<()> {
    let header = header.encode_length_delimited_to_vec();
    let lengths = entries.iter().map(|split| first(split).len() + split.2.len());
    let length = header.len() + lengths.sum::<usize>();
    if length > FILE_BYTES_MAX - HEAD_BYTES - DIGEST_BYTES {
        return Err(ErrorKind::FileTooLarge.into());
    }
    let head = head(length);
    let parts = entries.iter().map(|split| (first(split), &*split.2));
    let parts = [(head, &*header)].into_iter().chain(parts);
    replace_file(path, |file| fill(file, parts))
}

fn fill<'a>(file: File, parts: impl Iterator<Item = (Vec<u8>, &'a [u8])>) -> io::Result<File> {
    let mut file = BufWriter::with_capacity(256 * 1024, file);
    let mut context = Context::new(&SHA256);
    for (first, rest) in parts {
        for part in [&*first, rest] {
            context.update(part);
            file.write_all(part)?;
        }
    }
    file.write_all(context.finish().as_ref())?;
    Ok(file.into_inner()?)
}

fn head(length: usize) -> Vec<u8> {
    let length = u64::try_from(length).unwrap_or(u64::MAX);
    let parts: [&[u8]; 3] = [&MAGIC, &FORMAT.to_le_bytes(), &length.to_le_bytes()];
    parts.concat()
}

/// Reads a file. Returns `None` if there is none.
pub(super) fn read(path: &Path) -> Result<Option<(Header, Vec<Restored>)>, String> {
    let metadata = match path.metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        metadata => metadata.map_err(|error| error.to_string())?,
    };
    if !metadata.is_file() {
        return Err("it is not a file".to_owned());
    }
    let limit = u64::try_from(FILE_BYTES_MAX).unwrap_or(u64::MAX);
    if metadata.len() > limit {
        return Err(format!("it has more than {FILE_BYTES_MAX} bytes"));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(metadata.len()).unwrap_or(0) + 1);
    let read = File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes));
    read.map_err(|error| error.to_string())?;
    parse(&bytes.into()).map(Some)
}

/// Parses a file. Entries are slices of it: no body is copied.
pub(super) fn parse(bytes: &Bytes) -> Result<(Header, Vec<Restored>), String> {
    let Some((magic, rest)) = bytes.split_first_chunk() else {
        return Err("it is too short".to_owned());
    };
    if *magic != MAGIC {
        return Err("it is not a state file of Strait".to_owned());
    }
    let Some((format, rest)) = rest.split_first_chunk() else {
        return Err("it is too short".to_owned());
    };
    match u32::from_le_bytes(*format) {
        FORMAT => {}
        other => return Err(format!("it has format {other}, this build reads {FORMAT}")),
    }
    let Some((length, rest)) = rest.split_first_chunk() else {
        return Err("it is too short".to_owned());
    };
    let want = u64::from_le_bytes(*length).saturating_add(DIGEST_BYTES as u64);
    let have = rest.len() as u64;
    if want != have {
        let what = if have < want { "cut off" } else { "too long" };
        return Err(format!("it is {what}: {have} bytes after its head, not {want}"));
    }
    let Some((summed, sum)) = bytes.split_last_chunk::<DIGEST_BYTES>() else {
        return Err("it is too short".to_owned());
    };
    if digest(&SHA256, summed).as_ref() != sum {
        return Err("it is damaged: the checksum differs".to_owned());
    }
    payload(bytes.slice_ref(&summed[HEAD_BYTES..]))
}

fn payload(mut bytes: Bytes) -> Result<(Header, Vec<Restored>), String> {
    let wrong = |error: String| format!("it cannot be decoded: {error}");
    let header = Header::decode_length_delimited(&mut bytes);
    let header = header.map_err(|error| wrong(error.to_string()))?;
    if header.resources > RESOURCES_MAX {
        return Err(format!("it has more than {RESOURCES_MAX} resources"));
    }
    let mut entries = Vec::with_capacity(usize::try_from(header.resources).unwrap_or_default());
    for _ in 0..header.resources {
        entries.push(entry(&mut bytes).map_err(wrong)?);
    }
    if !bytes.is_empty() {
        return Err(format!("{} bytes follow its last resource", bytes.len()));
    }
    Ok((header, entries))
}

/// Decodes the first entry.
fn entry(bytes: &mut Bytes) -> Result<Restored, String> {
    let length = prost::decode_length_delimiter(&mut *bytes).map_err(|error| error.to_string())?;
    if length > bytes.len() {
        return Err("an entry is cut off".to_owned());
    }
    let whole = bytes.split_to(length);
    let (mut resource, mut body) = (Resource::default(), Bytes::new());
    for_each_field(&whole, |number, wire, value| {
        match number {
            TYPE_URL => text(wire, value)?.clone_into(&mut resource.body_type),
            NAME => resource.name = text(wire, value)?.into(),
            VERSION => resource.version = text(wire, value)?.into(),
            BODY => body = whole.slice_ref(delimited(wire, value)?),
            _ => {}
        }
        Ok(())
    })?;
    let Resource { body_type, name, version, .. } = &resource;
    let first = field_bytes(body_type.len()) + field_bytes(name.len());
    // This build writes version and body last.
    let rest = if first + field_bytes(version.len()) + field_bytes(body.len()) == whole.len() {
        whole.slice(first..)
    } else {
        let (version, body) = (version.to_string(), body.clone());
        Entry { version, body, ..Entry::default() }.encode()
    };
    resource.body = Some(body);
    Ok((resource, rest))
}

/// Returns the length of an encoded field whose value has this length. A tag takes one byte.
fn field_bytes(value: usize) -> usize {
    if value == 0 { 0 } else { 1 + prost::length_delimiter_len(value) + value }
}

fn named(type_url: &str, name: &str) -> Entry {
    Entry { type_url: type_url.to_owned(), name: name.to_owned(), ..Entry::default() }
}
