//! Errors of record protection, with their alerts.

use rustls::AlertDescription;
use thiserror::Error;

/// Error of record protection. It ends the connection.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum RecordError {
    /// Record, message or alert that is not allowed where it is.
    #[error("unexpected TLS message: {0}")]
    UnexpectedMessage(&'static str),
    /// Record whose tag is wrong or missing.
    #[error("TLS record with a wrong authentication tag")]
    BadRecordMac,
    /// Record beyond the size limits.
    #[error("TLS record above the size limit")]
    RecordOverflow,
    /// Message or alert with a wrong length.
    #[error("malformed TLS message: {0}")]
    DecodeError(&'static str),
    /// KeyUpdate with an unknown request.
    #[error("KeyUpdate with an unknown request")]
    IllegalParameter,
    #[error("TLS alert from the peer: {0:?}")]
    PeerAlert(AlertDescription),
    /// Key that has protected as many records as its suite allows.
    #[error("a TLS key has reached its limit of records")]
    KeyExhausted,
    /// Failure on this side.
    #[error("TLS record protection: {0}")]
    Internal(&'static str),
}

impl RecordError {
    /// Returns the alert to send (RFC 8446 6.2). None: the peer has sent a fatal alert, which is
    /// not answered.
    pub fn alert(&self) -> Option<AlertDescription> {
        Some(match self {
            Self::UnexpectedMessage(_) => AlertDescription::UnexpectedMessage,
            Self::BadRecordMac => AlertDescription::BadRecordMac,
            Self::RecordOverflow => AlertDescription::RecordOverflow,
            Self::DecodeError(_) => AlertDescription::DecodeError,
            Self::IllegalParameter => AlertDescription::IllegalParameter,
            Self::PeerAlert(_) => return None,
            Self::KeyExhausted | Self::Internal(_) => AlertDescription::InternalError,
        })
    }
}
