//! Parser of a ClientHello, which may come in any number of records and segments.
//!
//! The scanner is incremental and finds the random and the end. The random identifies the same
//! ClientHello on another connection. The fields are read from the whole message.

use std::borrow::Cow;
use std::cell::Cell;

use crate::labels::labelled;

/// Random of a ClientHello (RFC 8446 section 4.1.2).
pub type ClientRandom = [u8; 32];

/// Content type of a handshake record (RFC 8446 section 5.1).
pub(super) const HANDSHAKE: u8 = 22;
/// Message type of a ClientHello (RFC 8446 section 4).
const CLIENT_HELLO: u8 = 1;
/// Bytes before the random: message type, length and legacy version.
const HEAD_BYTES: usize = 4 + 2;
/// Bytes of the header of a record: content type, version and length.
pub(super) const RECORD_HEADER_BYTES: usize = 1 + 2 + 2;
/// Limit of the bytes of a record (RFC 8446 section 5.1), and the first byte of its version.
const RECORD_BYTES_MAX: usize = 1 << 14;
const RECORD_VERSION: u8 = 3;
/// Limit of the bytes of the message, which TLS libraries have too.
const MESSAGE_BYTES_MAX: usize = 4 + 0xffff;
/// Extensions with the server name (RFC 6066 section 3) and the protocols (RFC 7301 section 3.1).
const SERVER_NAME: &[u8] = &[0, 0];
const ALPN: &[u8] = &[0, 16];
/// Type of the only kind of server names.
const HOST_NAME: u8 = 0;
/// Limit of the bytes of a session ID.
const SESSION_ID_BYTES_MAX: usize = 32;
/// Compression method that every client offers (RFC 8446 section 4.1.2, RFC 5246 section 7.4.1.2).
const NO_COMPRESSION: u8 = 0;

/// Scanner of the bytes of a connection up to the end of its ClientHello.
#[derive(Debug, Default)]
pub struct ClientHelloScanner {
    /// Number of bytes that were read.
    read: usize,
    /// Header of the current record, as far as it was read.
    header: [u8; RECORD_HEADER_BYTES],
    header_bytes: usize,
    /// Number of bytes left in the current record.
    record_left: usize,
    /// Start of the message, through its random.
    head: Head,
    /// Number of bytes of the message that were read.
    message_bytes: usize,
}

#[derive(Debug)]
struct Head([u8; HEAD_BYTES + 32]);

impl Default for Head {
    fn default() -> Self {
        Self([0; HEAD_BYTES + 32])
    }
}

impl ClientHelloScanner {
    /// Reads the next bytes of the connection, those after the ClientHello excepted. Returns `None`
    /// if it does not begin with a ClientHello.
    #[must_use]
    pub fn push(&mut self, mut bytes: &[u8]) -> Option<()> {
        while !bytes.is_empty() && self.end().is_none() {
            let count = if self.record_left == 0 {
                self.push_header(bytes)?
            } else {
                self.push_message(bytes)?
            };
            self.read += count;
            bytes = bytes.get(count..)?;
        }
        Some(())
    }

    /// Returns the random, once it was read.
    pub fn random(&self) -> Option<ClientRandom> {
        let is_read = self.message_bytes >= self.head.0.len();
        self.head.0.last_chunk().filter(|_| is_read).copied()
    }

    /// Returns the number of bytes up to the end of the ClientHello, once all of it was read.
    pub fn end(&self) -> Option<usize> {
        let is_whole = self.random().is_some() && self.message_bytes == self.message_length();
        is_whole.then_some(self.read)
    }

    /// Returns whether the current record is whole. One in which something follows a ClientHello is
    /// an error (RFC 8446 section 5.1).
    pub fn is_at_end_of_record(&self) -> bool {
        self.record_left == 0
    }

    /// Returns the length of the message, with its header. Valid once the header was read.
    fn message_length(&self) -> usize {
        let [_, first, second, third, ..] = self.head.0;
        4 + u32::from_be_bytes([0, first, second, third]) as usize
    }

    fn push_header(&mut self, bytes: &[u8]) -> Option<usize> {
        let room = self.header.get_mut(self.header_bytes..)?;
        let count = room.len().min(bytes.len());
        room.get_mut(..count)?.copy_from_slice(bytes.get(..count)?);
        self.header_bytes += count;
        let [kind, version, _, high, low] = self.header;
        if kind != HANDSHAKE {
            return None;
        }
        if self.header_bytes == RECORD_HEADER_BYTES {
            self.record_left = usize::from(u16::from_be_bytes([high, low]));
            self.header_bytes = 0;
            let is_valid = version == RECORD_VERSION && self.record_left <= RECORD_BYTES_MAX;
            (is_valid && self.record_left > 0).then_some(())?;
        }
        Some(count)
    }

    fn push_message(&mut self, bytes: &[u8]) -> Option<usize> {
        let wanted = match self.head.0.len().saturating_sub(self.message_bytes) {
            0 => self.message_length().checked_sub(self.message_bytes)?,
            missing => missing,
        };
        let count = bytes.len().min(self.record_left).min(wanted);
        if let Some(room) = self.head.0.get_mut(self.message_bytes..) {
            let (room, _) = room.split_at_mut(count.min(room.len()));
            room.copy_from_slice(bytes.get(..room.len())?);
        }
        self.message_bytes += count;
        self.record_left -= count;
        let [kind, ..] = self.head.0;
        let is_in_bounds = (self.head.0.len()..=MESSAGE_BYTES_MAX).contains(&self.message_length());
        let is_head_read = self.message_bytes >= self.head.0.len();
        (kind == CLIENT_HELLO && (is_in_bounds || !is_head_read)).then_some(count)
    }
}

/// Fields of a ClientHello by which a connection is routed, as sent.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ClientHelloFields<'a> {
    pub server_name: Option<&'a [u8]>,
    /// True if one of the wanted ALPN protocols is offered.
    pub is_offered: bool,
    /// True if every compression method is one that compresses. A server refuses that by
    /// illegal_parameter (RFC 8446 section 4.1.2).
    pub is_compressed: bool,
}

/// Returns the message in the records of a ClientHello up to its [`ClientHelloScanner::end`]. Only
/// parts of several records are copied.
pub fn message(records: &[u8]) -> Option<Cow<'_, [u8]>> {
    let (mut records, mut message) = (Rest(records), Cow::Borrowed(&[][..]));
    while !records.0.is_empty() {
        let &[.., high, low] = records.take(RECORD_HEADER_BYTES)?.first_chunk::<5>()?;
        let length = usize::from(u16::from_be_bytes([high, low]));
        let part = records.take(length.min(records.0.len()))?;
        if message.is_empty() {
            message = Cow::Borrowed(part);
        } else {
            message.to_mut().extend_from_slice(part);
        }
    }
    Some(message)
}

labelled! {
    /// First ALPN protocol that a ClientHello offers.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum OfferedProtocol {
        H2 = "h2",
        Http11 = "http/1.1",
        /// Protocols of Istio's sidecars, which all begin with this name.
        Istio = "istio",
        Other = "other",
        None = "none",
        #[default]
        Unknown = "unknown",
    }
}

impl OfferedProtocol {
    /// Reads the first bytes of a client, [`Self::Unknown`] unless they have the whole ClientHello,
    /// which ends at `end`.
    pub fn read(bytes: &[u8], end: Option<usize>) -> Self {
        let first = Cell::new(Self::None);
        let note = |name: &[u8]| {
            if first.get() == Self::None {
                first.set(match name {
                    b"h2" => Self::H2,
                    b"http/1.1" => Self::Http11,
                    name if name.starts_with(b"istio") => Self::Istio,
                    _ => Self::Other,
                });
            }
            false
        };
        let message = end.and_then(|end| message(bytes.get(..end)?));
        let fields = message.as_deref().and_then(|message| ClientHelloFields::read(message, note));
        fields.map_or(Self::Unknown, |_| first.get())
    }
}

impl<'a> ClientHelloFields<'a> {
    /// Reads a whole message (RFC 8446 section 4.1.2), given which protocols are wanted. Other
    /// extensions are not examined, as they are for the endpoint. Returns `None` if the message is
    /// malformed.
    pub fn read(message: &'a [u8], is_wanted: impl Fn(&[u8]) -> bool) -> Option<Self> {
        let mut rest = Rest(message);
        rest.take(HEAD_BYTES + 32)?;
        let session_id = rest.take_sized(1)?;
        let (suites, compressions) = (rest.take_sized(2)?, rest.take_sized(1)?);
        let is_valid = session_id.len() <= SESSION_ID_BYTES_MAX
            && suites.len() >= 2
            && suites.len().is_multiple_of(2)
            && !compressions.is_empty();
        let mut extensions = Rest(if rest.0.is_empty() { &[] } else { rest.take_sized(2)? });
        (is_valid && rest.0.is_empty()).then_some(())?;
        let (mut server_name, mut protocols) = (None, None);
        while !extensions.0.is_empty() {
            let (kind, body) = (extensions.take(2)?, extensions.take_sized(2)?);
            let field = match kind {
                SERVER_NAME => &mut server_name,
                ALPN => &mut protocols,
                _ => continue,
            };
            // An endpoint might use the other one of two.
            field.replace(Rest(body).take_list()?).is_none().then_some(())?;
        }
        let is_compressed = !compressions.contains(&NO_COMPRESSION);
        let mut fields = Self { is_compressed, ..Self::default() };
        if let Some(mut names) = server_name {
            (names.take(1)? == [HOST_NAME]).then_some(())?;
            fields.server_name = Some(names.take_sized(2)?);
            names.0.is_empty().then_some(())?;
        }
        while let Some(all) = protocols.as_mut().filter(|all| !all.0.is_empty()) {
            fields.is_offered |= is_wanted(all.take_sized(1).filter(|name| !name.is_empty())?);
        }
        Some(fields)
    }
}

/// Part of a message that was not read yet.
#[derive(Debug)]
pub(super) struct Rest<'a>(pub(super) &'a [u8]);

impl<'a> Rest<'a> {
    pub(super) fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    /// Takes bytes after their length, which has `width` bytes.
    pub(super) fn take_sized(&mut self, width: usize) -> Option<&'a [u8]> {
        let length = self.0.get(..width)?.iter();
        let length = length.fold(0, |length, &byte| (length << 8) | usize::from(byte));
        let sized = self.0.get(width..)?.get(..length)?;
        self.take(width + length)?;
        Some(sized)
    }

    /// Takes a list, which must not be empty, and is all of the rest.
    fn take_list(mut self) -> Option<Self> {
        let list = self.take_sized(2)?;
        (!list.is_empty() && self.0.is_empty()).then_some(Self(list))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANDOM: ClientRandom = [7; 32];

    fn message(kind: u8) -> Vec<u8> {
        let mut message = vec![kind, 0, 0, 100, 3, 3];
        message.extend(RANDOM);
        message.extend([0; 66]);
        message
    }

    fn records(message: &[u8], size: usize) -> Vec<u8> {
        let record = |part: &[u8]| {
            let length = u16::try_from(part.len()).expect("short").to_be_bytes();
            [&[22, 3, 1], &length[..], part].concat()
        };
        message.chunks(size).flat_map(record).collect()
    }

    /// Reads bytes in segments of one size. Returns the random and the end.
    fn read(bytes: &[u8], segment: usize) -> Option<(Option<ClientRandom>, Option<usize>)> {
        let mut scanner = ClientHelloScanner::default();
        bytes.chunks(segment).try_for_each(|part| scanner.push(part))?;
        Some((scanner.random(), scanner.end()))
    }

    #[test]
    fn random_and_end_are_found_however_the_hello_is_cut_into_records_and_segments() {
        for size in [1, 5, 37, 38, 39, 103, 200] {
            let hello = records(&message(1), size);
            for segment in [1, 2, 7, 43, 500] {
                let found = (Some(RANDOM), Some(hello.len()));
                assert_eq!(read(&hello, segment), Some(found), "{size} {segment}");
                let more = [&hello[..], b"early data"].concat();
                assert_eq!(read(&more, segment), Some(found), "{size} {segment}");
                let part = &hello[..hello.len() - 1];
                assert_eq!(read(part, segment), Some((Some(RANDOM), None)), "{size} {segment}");
            }
        }
        let two = records(&[message(1), message(1)].concat(), 300);
        assert_eq!(read(&two, 300), Some((Some(RANDOM), Some(5 + 104))));
    }

    #[test]
    fn what_ends_before_the_random_has_none() {
        let hello = records(&message(1), 200);
        for length in 0..43 {
            assert_eq!(read(&hello[..length], 500), Some((None, None)), "{length}");
        }
        assert_eq!(read(&hello[..43], 500), Some((Some(RANDOM), None)));
    }

    #[test]
    fn a_message_in_one_record_is_not_copied() {
        let one = records(&message(1), 200);
        assert!(matches!(super::message(&one), Some(Cow::Borrowed(_))));
        for size in [200, 103, 1] {
            let whole = records(&message(1), size);
            assert_eq!(super::message(&whole).as_deref(), Some(&message(1)[..]), "{size}");
        }
    }

    #[test]
    fn the_first_protocol_of_a_whole_hello_is_read() {
        let sized = |bytes: &[u8]| {
            let length = u8::try_from(bytes.len()).expect("short");
            [&[length][..], bytes].concat()
        };
        let hello = |names: &[&str]| {
            let names: Vec<u8> = names.iter().flat_map(|name| sized(name.as_bytes())).collect();
            let alpn = [&[0, 16, 0][..], &sized(&[&[0][..], &sized(&names)].concat())].concat();
            let extensions = if names.is_empty() { Vec::new() } else { alpn };
            let body = [&[3, 3][..], &RANDOM, &[0, 0, 2, 0x13, 1, 1, 0, 0], &sized(&extensions)];
            records(&[&[1, 0, 0][..], &sized(&body.concat())].concat(), 50)
        };
        for (names, expected) in [
            (&["h2", "http/1.1"][..], OfferedProtocol::H2),
            (&["http/1.1", "h2"], OfferedProtocol::Http11),
            (&["istio-peer-exchange", "istio"], OfferedProtocol::Istio),
            (&["postgresql"], OfferedProtocol::Other),
            (&[], OfferedProtocol::None),
        ] {
            let whole = hello(names);
            let (_, end) = read(&whole, 500).expect("a hello");
            assert_eq!(end, Some(whole.len()));
            let more = [&whole[..], b"early data"].concat();
            assert_eq!(OfferedProtocol::read(&more, end), expected, "{names:?}");
            let part = &whole[..whole.len() - 1];
            for end in [end, None] {
                assert_eq!(OfferedProtocol::read(part, end), OfferedProtocol::Unknown);
            }
        }
    }

    #[test]
    fn what_is_no_hello_is_rejected() {
        let short = [&[1, 0, 0, 33, 3, 3][..], &[7; 40]].concat();
        let long = [&[1, 1, 0, 0, 3, 3][..], &[7; 40]].concat();
        for other in [
            records(&message(2), 200),
            b"GET / HTTP/1.1".to_vec(),
            [22, 3, 1, 0, 0].repeat(20),
            records(&short, 200),
            records(&long, 200),
            [&records(&message(1)[..50], 50)[..], b"GET / HTTP/1.1"].concat(),
        ] {
            for segment in [1, 500] {
                assert_eq!(read(&other, segment), None, "{other:?}");
            }
        }
    }
}
