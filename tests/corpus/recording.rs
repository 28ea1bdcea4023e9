//! Reader of the recordings in `tests/corpus/istiod`, which `tests/istiod/record.py` makes. The
//! replay in `xds::stream` and `tests/it` share it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Event of a recording.
#[derive(Debug)]
pub(crate) struct Event {
    /// Time since the start of the recording.
    pub(crate) at: Duration,
    /// Content.
    pub(crate) kind: Kind,
}

/// Content of an event. Calls have numbers.
#[derive(Debug)]
pub(crate) enum Kind {
    /// A call of a method begins.
    Open(u32, String),
    /// Strait sends a message.
    Request(u32, Vec<u8>),
    /// Istiod sends a message.
    Response(u32, Vec<u8>),
    /// A call ends, with its cause.
    End(u32, String),
    /// The driver of the recording has noted this.
    Mark(String),
    /// The connection gets a GOAWAY, or none is accepted.
    Other,
}

/// Returns the name and the path of each recording.
pub(crate) fn recordings() -> Vec<(String, PathBuf)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/istiod");
    let paths = fs::read_dir(folder).expect("recordings");
    let mut paths: Vec<_> = paths.map(|entry| entry.expect("a file").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|name| name == "txt"));
    paths.sort();
    let name = |path: &Path| path.file_stem().expect("a name").to_string_lossy().into();
    paths.into_iter().map(|path| (name(&path), path)).collect()
}

/// Reads a recording.
pub(crate) fn read(path: &Path) -> Vec<Event> {
    let text = fs::read_to_string(path).expect("a recording");
    let (mut events, mut rest) = (Vec::new(), text.as_str());
    while let Some((line, after)) = rest.split_once('\n') {
        let start = rest;
        rest = after;
        if line.starts_with('#') || line.is_empty() {
            continue;
        }
        let mut words = line.splitn(4, ' ');
        let mut word = || words.next().unwrap_or_default();
        let (at, kind, call) = (word(), word(), word());
        let number = || call.parse().expect("the number of a call");
        let mut message = || {
            let open = start.find('{').expect("a message");
            rest = &start[open + 1..];
            let bytes = read_message(&mut rest);
            rest = rest.trim_start_matches('\n');
            bytes
        };
        let kind = match kind {
            "open" => Kind::Open(number(), word().to_owned()),
            ">" => Kind::Request(number(), message()),
            "<" => Kind::Response(number(), message()),
            "end" => Kind::End(number(), word().to_owned()),
            "mark" => Kind::Mark(line.split_once("mark ").expect("a text").1.to_owned()),
            _ => Kind::Other,
        };
        let at = Duration::from_millis(at.parse().expect("milliseconds"));
        events.push(Event { at, kind });
    }
    events
}

/// Reads the fields of a message up to and with its closing brace, and returns its encoding.
fn read_message(rest: &mut &str) -> Vec<u8> {
    let mut encoded = Vec::new();
    loop {
        *rest = rest.trim_start();
        if let Some(after) = rest.strip_prefix('}') {
            *rest = after;
            return encoded;
        }
        let (field, after) = rest.split_once(": ").expect("a field");
        let field: u64 = field.parse().expect("the number of a field");
        *rest = after;
        read_value(field, rest, &mut encoded);
    }
}

fn read_value(field: u64, rest: &mut &str, into: &mut Vec<u8>) {
    let text = *rest;
    if let Some(after) = text.strip_prefix('{') {
        *rest = after;
        put_bytes(field, &read_message(rest), into);
    } else if let Some(after) = text.strip_prefix('"') {
        *rest = after;
        put_bytes(field, read_text(rest).as_bytes(), into);
    } else if let Some(after) = text.strip_prefix('x') {
        put_bytes(field, &read_hex(after, rest), into);
    } else if let Some(after) = text.strip_prefix("fixed32 x") {
        put_varint(field << 3 | 5, into);
        into.extend(read_hex(after, rest));
    } else if let Some(after) = text.strip_prefix("fixed64 x") {
        put_varint(field << 3 | 1, into);
        into.extend(read_hex(after, rest));
    } else {
        let end = text.find(|c: char| !c.is_ascii_digit()).expect("an end");
        put_varint(field << 3, into);
        put_varint(text[..end].parse().expect("a number"), into);
        *rest = &text[end..];
    }
}

/// Reads a text up to and with its closing quote.
fn read_text(rest: &mut &str) -> String {
    let mut text = String::new();
    let mut chars = rest.chars();
    loop {
        match chars.next().expect("a closing quote") {
            '"' => break,
            '\\' => match chars.next().expect("an escaped character") {
                'n' => text.push('\n'),
                other => text.push(other),
            },
            other => text.push(other),
        }
    }
    *rest = chars.as_str();
    text
}

fn read_hex<'a>(text: &'a str, rest: &mut &'a str) -> Vec<u8> {
    let end = text.find(|c: char| !c.is_ascii_hexdigit()).expect("an end");
    *rest = &text[end..];
    let bytes = (0..end).step_by(2);
    let bytes = bytes.map(|at| u8::from_str_radix(&text[at..at + 2], 16).expect("two digits"));
    bytes.collect()
}

fn put_bytes(field: u64, bytes: &[u8], into: &mut Vec<u8>) {
    put_varint(field << 3 | 2, into);
    put_varint(bytes.len() as u64, into);
    into.extend(bytes);
}

fn put_varint(mut number: u64, into: &mut Vec<u8>) {
    while number > 127 {
        into.push(number.to_le_bytes()[0] | 128);
        number >>= 7;
    }
    into.push(number.to_le_bytes()[0]);
}
