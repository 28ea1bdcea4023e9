//! Errors of record protection, with their alerts.

use rustls::AlertDescription;
use thiserror::Error;

/// Error of record protection. It ends the connection.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum RecordError {
    #[error("unexpected TLS message: {0}")]
    UnexpectedMessage(&'static str),
    #[error("TLS record with a wrong authentication tag")]
    BadRecordMac,
    #[error("TLS record above the size limit")]
    RecordOverflow,
    #[error("malformed TLS message: {0}")]
    DecodeError(&'static str),
    #[error("KeyUpdate with an unknown request")]
    IllegalParameter,
    #[error("TLS alert from the peer: {0:?}")]
    PeerAlert(AlertDescription),
    #[error("a TLS key has reached its limit of records")]
    KeyExhausted,
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
