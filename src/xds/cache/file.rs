//! Format of the cache file, its atomic replacement, and its validation.
//!
//! A file consists of a head (magic, format, length of the payload), the payload (a [`Header`] and
//! its [`Entry`] messages, all length-delimited) and the SHA-256 digest of both. Entries are in the
//! order of their types and names, so that a file can be merged with changes.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, Read, Seek as _, Write};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use aws_lc_rs::digest::{Context, SHA256, digest};
use bytes::Bytes;
use prost::Message;

use crate::replace_file::replace_file;
use crate::xds::client::Resource;
use crate::xds::push::{delimited, share, text};
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

/// Type and name of an entry.
type Key = (&'static str, Arc<str>);

/// Entries by type and name: without these two, encoded, or `None` for one that was removed.
pub(in crate::xds) type Changes = BTreeMap<Key, Option<Bytes>>;

/// Replaces the file atomically by the entries of `base`, an earlier file, with changes. The header
/// gets their number. Returns the new file. If that fails, the old one is kept, and removals of
/// what `base` does not have are dropped: they would grow for as long as writes fail.
///
/// # Errors
/// `InvalidData` if `base` cannot be read, and any other kind otherwise.
pub(super) fn write(
    path: &Path,
    mut header: Header,
    base: Option<&File>,
    changes: &mut Changes,
) -> io::Result<File> {
    let base = base.map_or_else(|| Ok(Bytes::new()), |file| entries(&content(file)?));
    let merged = base.as_ref().map_err(String::clone).and_then(|base| merge(base, changes));
    let (resources, parts, void) = merged.map_err(|why| {
        io::Error::new(ErrorKind::InvalidData, format!("the last file cannot be read: {why}"))
    })?;
    header.resources = resources;
    let header = header.encode_length_delimited_to_vec();
    let length = header.len() + parts.iter().map(|part| part.len()).sum::<usize>();
    let bytes_max = FILE_BYTES_MAX - HEAD_BYTES - DIGEST_BYTES;
    let written = if resources > RESOURCES_MAX || length > bytes_max {
        Err(ErrorKind::FileTooLarge.into())
    } else {
        let parts = [head(length).into(), header.into()].into_iter().chain(parts);
        replace_file(path, |file| fill(file, parts))
    };
    if written.is_err() {
        void.iter().for_each(|key| drop(changes.remove(key)));
    }
    written
}

fn fill<'a>(file: File, parts: impl Iterator<Item = Cow<'a, [u8]>>) -> io::Result<File> {
    let mut file = BufWriter::with_capacity(256 * 1024, file);
    let mut context = Context::new(&SHA256);
    for part in parts {
        context.update(&part);
        file.write_all(&part)?;
    }
    file.write_all(context.finish().as_ref())?;
    Ok(file.into_inner()?)
}

fn head(length: usize) -> Vec<u8> {
    let length = u64::try_from(length).unwrap_or(u64::MAX);
    let parts: [&[u8]; 3] = [&MAGIC, &FORMAT.to_le_bytes(), &length.to_le_bytes()];
    parts.concat()
}

/// Encoded entries. Unchanged neighbours are one part.
type Parts<'a> = Vec<Cow<'a, [u8]>>;

/// Merges encoded entries with changes. Returns the number of the results, their bytes, and the
/// removals without an entry.
fn merge<'a>(base: &'a [u8], changes: &'a Changes) -> Result<(u64, Parts<'a>, Vec<Key>), String> {
    let mut changes = changes.iter().peekable();
    let (mut resources, mut parts, mut void) = (0, Vec::new(), Vec::new());
    // Unchanged entries that are in no part so far begin at `run`.
    let (mut run, mut rest, mut last) = (base, base, None);
    loop {
        let entry = rest;
        let own = if rest.is_empty() { None } else { Some(key(next_entry(&mut rest)?)?) };
        if own.is_some() && own <= last {
            return Err("its entries are not in order".to_owned());
        }
        let mut stays = own.is_some();
        while let Some(((type_url, name), new)) =
            changes.next_if(|((of, name), _)| own.is_none_or(|own| (*of, &**name) <= own))
        {
            parts.push(Cow::Borrowed(&run[..run.len() - entry.len()]));
            let is_own = own == Some((*type_url, &**name));
            (run, stays) = if is_own { (rest, false) } else { (entry, stays) };
            if let Some(new) = new {
                parts.extend([Cow::Owned(first(type_url, name, new)), Cow::Borrowed(&**new)]);
                resources += 1;
            } else if !is_own {
                void.push((*type_url, Arc::clone(name)));
            }
        }
        resources += u64::from(stays);
        if own.is_none() {
            parts.push(Cow::Borrowed(run));
            return Ok((resources, parts, void));
        }
        last = own;
    }
}

/// Returns the length of an entry and its first fields. The rest of the entry follows them.
fn first(type_url: &str, name: &str, rest: &[u8]) -> Vec<u8> {
    let first = Entry { type_url: type_url.to_owned(), name: name.to_owned(), ..Entry::default() };
    let mut bytes = Vec::new();
    // Writing to a vector cannot fail.
    let _ = prost::encode_length_delimiter(first.encoded_len() + rest.len(), &mut bytes);
    bytes.extend(first.encode_to_vec());
    bytes
}

/// Returns the type and the name of an entry.
fn key(entry: &[u8]) -> Result<(&str, &str), String> {
    let (mut type_url, mut name) = ("", "");
    for_each_field(entry, |number, wire, value| {
        match number {
            TYPE_URL => type_url = text(wire, value)?,
            NAME => name = text(wire, value)?,
            _ => {}
        }
        Ok(())
    })?;
    Ok((type_url, name))
}

/// Removes the first entry from encoded ones. Returns it without its length.
fn next_entry<'a>(bytes: &mut &'a [u8]) -> Result<&'a [u8], String> {
    let length = prost::decode_length_delimiter(&mut *bytes).map_err(|error| error.to_string())?;
    let (entry, rest) = bytes.split_at_checked(length).ok_or("an entry is cut off")?;
    *bytes = rest;
    Ok(entry)
}

/// Reads a file. Returns it with its content, or `None` if there is none.
pub(super) fn read(path: &Path) -> Result<Option<(File, Header, Vec<Resource>)>, String> {
    let metadata = match path.metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        metadata => metadata.map_err(|error| error.to_string())?,
    };
    if !metadata.is_file() {
        return Err("it is not a file".to_owned());
    }
    let file = File::open(path).map_err(|error| error.to_string())?;
    let (header, resources) = parse(&content(&file)?)?;
    Ok(Some((file, header, resources)))
}

fn content(mut file: &File) -> Result<Bytes, String> {
    let length = file.metadata().map_err(|error| error.to_string())?.len();
    let length = usize::try_from(length).ok().filter(|length| *length <= FILE_BYTES_MAX);
    let length = length.ok_or_else(|| format!("it has more than {FILE_BYTES_MAX} bytes"))?;
    let mut bytes = vec![0; length];
    let read = file.rewind().and_then(|()| file.read_exact(&mut bytes));
    read.map_err(|error| error.to_string())?;
    Ok(bytes.into())
}

/// Parses a file. Bodies are slices of it. Another thread computes the checksum meanwhile.
pub(super) fn parse(bytes: &Bytes) -> Result<(Header, Vec<Resource>), String> {
    check_head(bytes)?;
    thread::scope(|scope| {
        let check = || check_digest(bytes);
        let checked = thread::Builder::new().spawn_scoped(scope, check);
        let parsed = resources(bytes);
        let checked = checked.ok().and_then(|thread| thread.join().ok());
        checked.unwrap_or_else(check)?;
        parsed
    })
}

fn resources(bytes: &Bytes) -> Result<(Header, Vec<Resource>), String> {
    let (header, entries) = payload(bytes)?;
    let wrong = |error: String| format!("it cannot be decoded: {error}");
    let mut rest = &*entries;
    let mut resources = Vec::with_capacity(usize::try_from(header.resources).unwrap_or_default());
    for _ in 0..header.resources {
        let entry = next_entry(&mut rest).map_err(wrong)?;
        resources.push(resource(&entries, entry, resources.last()).map_err(wrong)?);
    }
    if !rest.is_empty() {
        return Err(format!("{} bytes follow its last resource", rest.len()));
    }
    Ok((header, resources))
}

/// Returns the encoded entries of a file that is valid.
fn entries(bytes: &Bytes) -> Result<Bytes, String> {
    check_head(bytes)?;
    check_digest(bytes)?;
    Ok(payload(bytes)?.1)
}

/// Checks the magic, the format and the length of a file.
fn check_head(bytes: &[u8]) -> Result<(), String> {
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
    Ok(())
}

fn check_digest(bytes: &[u8]) -> Result<(), String> {
    match bytes.split_last_chunk::<DIGEST_BYTES>() {
        Some((summed, sum)) if digest(&SHA256, summed).as_ref() == sum => Ok(()),
        _ => Err("it is damaged: the checksum differs".to_owned()),
    }
}

/// Decodes the header. Returns it with the encoded entries.
fn payload(bytes: &Bytes) -> Result<(Header, Bytes), String> {
    let mut payload = bytes.slice(HEAD_BYTES..bytes.len().saturating_sub(DIGEST_BYTES));
    let header = Header::decode_length_delimited(&mut payload);
    let header = header.map_err(|error| format!("it cannot be decoded: {error}"))?;
    if header.resources > RESOURCES_MAX {
        return Err(format!("it has more than {RESOURCES_MAX} resources"));
    }
    Ok((header, payload))
}

/// Decodes an entry. Its body is a slice of `all`. `last` is the resource before it.
fn resource(all: &Bytes, entry: &[u8], last: Option<&Resource>) -> Result<Resource, String> {
    let (mut name, mut version, mut body_type, mut body) = ("", "", "", Bytes::new());
    for_each_field(entry, |number, wire, value| {
        match number {
            TYPE_URL => body_type = text(wire, value)?,
            NAME => name = text(wire, value)?,
            VERSION => version = text(wire, value)?,
            BODY => body = all.slice_ref(delimited(wire, value)?),
            _ => {}
        }
        Ok(())
    })?;
    Ok(Resource {
        name: name.into(),
        version: share(version, last.map(|last| &last.version)),
        body: Some(body),
        body_type: share(body_type, last.map(|last| &last.body_type)),
    })
}
