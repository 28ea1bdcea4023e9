//! Record protection of TLS 1.3 after the handshake (RFC 8446 5), for a server.
//!
//! rustls performs the handshake and derives the keys. This module frames, opens and seals
//! records in the caller's buffers, without allocation or copy. A `Key` belongs to one direction.

mod error;
mod key;

use std::ops::Range;

use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{AlertDescription, ExtractedSecrets};

pub use error::RecordError;
pub use key::HEADER_BYTES;
use key::{Key, TAG_BYTES};

/// Limit of the payload of a record (RFC 8446 5.1).
pub const PLAINTEXT_MAX: usize = 16 * 1024;
/// Size of the trailer of a sent record: content type and tag.
pub const TRAILER_BYTES: usize = 1 + TAG_BYTES;
pub const RECORD_BYTES: usize = HEADER_BYTES + PLAINTEXT_MAX + TRAILER_BYTES;
/// Limit of a received record (RFC 8446 5.2).
pub const RECORD_MAX: usize = HEADER_BYTES + PROTECTED_MAX;
pub const KEY_UPDATE_BYTES: usize = HEADER_BYTES + KEY_UPDATE_HEAD.len() + 1 + TRAILER_BYTES;
/// Size of a sent record with an alert, which has a level and a description (RFC 8446 6).
pub const ALERT_BYTES: usize = HEADER_BYTES + 2 + TRAILER_BYTES;

/// Limit of the protected part of a received record (RFC 8446 5.2).
const PROTECTED_MAX: usize = PLAINTEXT_MAX + 256;
/// Type and length of a KeyUpdate. The request follows (RFC 8446 4.6.3).
const KEY_UPDATE_HEAD: [u8; 4] = [24, 0, 0, 1];
/// Levels of alerts (RFC 8446 6).
const WARNING: u8 = 1;
const FATAL: u8 = 2;
/// Content types as they stand in a record.
const ALERT: u8 = ContentType::Alert as u8;
const HANDSHAKE: u8 = ContentType::Handshake as u8;
const APPLICATION_DATA: u8 = ContentType::ApplicationData as u8;

/// Type of the content of a sent record (RFC 8446 5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ContentType {
    Alert = 21,
    Handshake = 22,
    ApplicationData = 23,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Size of the whole record in the input.
    pub bytes: usize,
    /// Place of the payload in the input.
    pub payload: Range<usize>,
    pub content: Content,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Application data, possibly empty.
    ApplicationData,
    /// A KeyUpdate. The receiving key has been switched already.
    KeyUpdate {
        /// True if the peer requests a KeyUpdate in return.
        requested: bool,
    },
    /// The peer sends nothing more.
    CloseNotify,
    /// Part of a handshake message, or an alert to ignore.
    Nothing,
}

/// Record protection of one connection, both directions.
#[derive(derive_more::Debug)]
#[debug("RecordLayer {{ .. }}")]
pub struct RecordLayer {
    receive: Key,
    send: Key,
    /// rustls' key schedule. None in a layer that does not encrypt.
    schedule: Option<KernelConnection<ServerConnectionData>>,
    /// Limit of records per key (RFC 8446 5.5).
    key_records_max: u64,
    /// Number of bytes of [`KEY_UPDATE_HEAD`] received so far.
    key_update_bytes: usize,
    /// True from a request for a KeyUpdate until the peer's next one.
    update_requested: bool,
}

impl RecordLayer {
    /// Creates the layer of a connection after its handshake.
    ///
    /// # Errors
    /// The connection is not one of TLS 1.3, or its suite is unknown.
    pub fn new(
        secrets: ExtractedSecrets,
        kernel: KernelConnection<ServerConnectionData>,
    ) -> Result<Self, rustls::Error> {
        let suite = kernel.negotiated_cipher_suite();
        let suite = suite.tls13().ok_or(rustls::Error::HandshakeNotComplete)?;
        Ok(Self {
            receive: Key::new(secrets.rx)?,
            send: Key::new(secrets.tx)?,
            schedule: Some(kernel),
            key_records_max: suite.common.confidentiality_limit,
            key_update_bytes: 0,
            update_requested: false,
        })
    }

    /// Creates a layer for tests and fuzzing. It frames records like TLS 1.3 but does not encrypt:
    /// header, payload, content type, 16 zero bytes.
    pub fn plaintext() -> Self {
        Self {
            receive: Key::plain(),
            send: Key::plain(),
            schedule: None,
            key_records_max: u64::MAX,
            key_update_bytes: 0,
            update_requested: false,
        }
    }

    /// Opens the first record of `input` in place. None: the record is incomplete.
    ///
    /// # Errors
    /// The record is not allowed by RFC 8446, or is a fatal alert. The connection has to end.
    pub fn open(&mut self, input: &mut [u8]) -> Result<Option<Record>, RecordError> {
        let Some(&header) = input.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let [kind, _, _, high, low] = header;
        // Since the handshake, neither change_cipher_spec nor cleartext is allowed (RFC 8446 5).
        if kind != APPLICATION_DATA {
            return Err(RecordError::UnexpectedMessage("unprotected record"));
        }
        let bytes = HEADER_BYTES + usize::from(u16::from_be_bytes([high, low]));
        if bytes > RECORD_MAX {
            return Err(RecordError::RecordOverflow);
        }
        let Some(protected) = input.get_mut(HEADER_BYTES..bytes) else {
            return Ok(None);
        };
        if self.receive.sequence >= self.key_records_max {
            return Err(RecordError::KeyExhausted);
        }
        let inner = self.receive.open(header, protected)?;
        // Content, type and padding together (RFC 8446 5.4).
        if inner.len() > PLAINTEXT_MAX + 1 {
            return Err(RecordError::RecordOverflow);
        }
        let padding = inner.iter().rev().take_while(|&&byte| byte == 0).count();
        let unpadded = inner.get(..inner.len() - padding).unwrap_or_default();
        let Some((&kind, payload)) = unpadded.split_last() else {
            return Err(RecordError::UnexpectedMessage("record of padding"));
        };
        let range = HEADER_BYTES..HEADER_BYTES + payload.len();
        // Records must not be interleaved with the parts of a message (RFC 8446 5.1).
        if self.key_update_bytes > 0 && kind != HANDSHAKE {
            return Err(RecordError::UnexpectedMessage("record within a message"));
        }
        let content = match kind {
            APPLICATION_DATA => Content::ApplicationData,
            ALERT => read_alert(payload)?,
            HANDSHAKE => match read_key_update(payload, &mut self.key_update_bytes)? {
                None => Content::Nothing,
                Some(requested) => {
                    self.switch_receiving_key()?;
                    Content::KeyUpdate { requested }
                }
            },
            _ => return Err(RecordError::UnexpectedMessage("unknown content type")),
        };
        Ok(Some(Record { bytes, payload: range, content }))
    }

    /// Seals `record` in place: a header, the payload and [`TRAILER_BYTES`], laid out already. Only
    /// the payload is filled in.
    pub fn seal(&mut self, content: ContentType, record: &mut [u8]) -> Result<(), RecordError> {
        const WRONG_LENGTH: RecordError = RecordError::Internal("wrong length of a record");
        let (header, protected) = record.split_first_chunk_mut().ok_or(WRONG_LENGTH)?;
        let length = u16::try_from(protected.len()).map_err(|_| WRONG_LENGTH)?;
        let (inner, tag) = protected.split_last_chunk_mut().ok_or(WRONG_LENGTH)?;
        let inner_bytes = inner.len();
        let kind = inner.last_mut().ok_or(WRONG_LENGTH)?;
        if inner_bytes > PLAINTEXT_MAX + 1 {
            return Err(WRONG_LENGTH);
        }
        if self.send.sequence >= self.key_records_max {
            return Err(RecordError::KeyExhausted);
        }
        *kind = content as u8;
        let [high, low] = length.to_be_bytes();
        *header = [APPLICATION_DATA, 3, 3, high, low];
        self.send.seal(*header, inner, tag)
    }

    /// Seals an alert: close_notify with the level warning, all others as fatal (RFC 8446 6.1 and
    /// 6.2).
    pub fn seal_alert(
        &mut self,
        alert: AlertDescription,
    ) -> Result<[u8; ALERT_BYTES], RecordError> {
        let level = if alert == AlertDescription::CloseNotify { WARNING } else { FATAL };
        let mut record = [0; ALERT_BYTES];
        record[HEADER_BYTES] = level;
        record[HEADER_BYTES + 1] = alert.into();
        self.seal(ContentType::Alert, &mut record)?;
        Ok(record)
    }

    /// Returns true once a key has protected half as many records as its suite allows
    /// (RFC 8446 5.5). A KeyUpdate is then due; it also requests the peer's if that is due.
    pub fn needs_key_update(&self) -> bool {
        self.is_due(&self.send) || self.needs_request()
    }

    fn is_due(&self, key: &Key) -> bool {
        key.sequence >= self.key_records_max / 2
    }

    fn needs_request(&self) -> bool {
        self.is_due(&self.receive) && !self.update_requested
    }

    /// Seals a KeyUpdate with the old key into `record`, and switches the sending key.
    pub fn update_sending_key(
        &mut self,
        record: &mut [u8; KEY_UPDATE_BYTES],
    ) -> Result<(), RecordError> {
        let request = self.needs_request();
        let payload = KEY_UPDATE_HEAD.into_iter().chain([u8::from(request)]);
        for (byte, of_message) in record.iter_mut().skip(HEADER_BYTES).zip(payload) {
            *byte = of_message;
        }
        self.seal(ContentType::Handshake, record)?;
        self.update_requested |= request;
        self.send = match &mut self.schedule {
            Some(schedule) => schedule.update_tx_secret().and_then(Key::new),
            None => Ok(Key::plain()),
        }
        .map_err(|_| KEY_UPDATE_FAILED)?;
        Ok(())
    }

    fn switch_receiving_key(&mut self) -> Result<(), RecordError> {
        self.update_requested = false;
        self.receive = match &mut self.schedule {
            Some(schedule) => schedule.update_rx_secret().and_then(Key::new),
            None => Ok(Key::plain()),
        }
        .map_err(|_| KEY_UPDATE_FAILED)?;
        Ok(())
    }
}

const KEY_UPDATE_FAILED: RecordError = RecordError::Internal("cannot derive a key");

/// Reads an alert. Alerts are neither split nor joined (RFC 8446 5.1), and their level is ignored
/// (RFC 8446 6).
fn read_alert(payload: &[u8]) -> Result<Content, RecordError> {
    match *payload {
        [] => Err(RecordError::UnexpectedMessage("empty alert")),
        [_, alert] => match AlertDescription::from(alert) {
            AlertDescription::CloseNotify => Ok(Content::CloseNotify),
            // The only other alert that is no error (RFC 8446 6.1).
            AlertDescription::UserCanceled => Ok(Content::Nothing),
            error => Err(RecordError::PeerAlert(error)),
        },
        _ => Err(RecordError::DecodeError("alert of a wrong length")),
    }
}

/// Reads a KeyUpdate or a part of it: the only message that a client sends after its handshake.
/// Returns its request once it is complete. `head_bytes` counts the bytes of
/// [`KEY_UPDATE_HEAD`] read before.
fn read_key_update(part: &[u8], head_bytes: &mut usize) -> Result<Option<bool>, RecordError> {
    if part.is_empty() {
        return Err(RecordError::UnexpectedMessage("empty handshake record"));
    }
    let mut bytes = part.iter();
    for expected in KEY_UPDATE_HEAD.iter().skip(*head_bytes) {
        match bytes.next() {
            None => return Ok(None),
            Some(byte) if byte == expected => *head_bytes += 1,
            Some(_) if *head_bytes == 0 => {
                return Err(RecordError::UnexpectedMessage("handshake message"));
            }
            Some(_) => return Err(RecordError::DecodeError("KeyUpdate of a wrong length")),
        }
    }
    let requested = match *bytes.as_slice() {
        [] => return Ok(None),
        [request @ 0..=1] => request == 1,
        [_] => return Err(RecordError::IllegalParameter),
        // A message before a change of keys has to end its record (RFC 8446 5.1).
        _ => return Err(RecordError::UnexpectedMessage("bytes after a KeyUpdate")),
    };
    *head_bytes = 0;
    Ok(Some(requested))
}

#[cfg(test)]
mod tests;
