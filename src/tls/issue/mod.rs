//! Sources of certificates that are issued at run time and renewed before they expire.
//!
//! [`istio`] requests a certificate from Istio's authority when half of the current one's
//! lifetime is over (`rotation`), and can keep it on disk ([`cache`]). [`workload_api`] receives
//! certificates from a SPIFFE Workload API, which pushes renewals. Both report
//! [`CertificateEvent`], and accept only certificates that a peer would accept now.

pub mod cache;
pub mod istio;
mod rotation;
pub mod workload_api;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem};
use rustls::sign::CertifiedKey;
use spiffe::WorkloadApiError;
use thiserror::Error;

use crate::grpc::channel::ChannelError;

use super::{IdentityMaterial, TlsError, provider};

/// Deadline for an answer of an authority or an agent, including the connection.
const DEADLINE: Duration = Duration::from_secs(15);
/// Limit of the certificates in a chain; no peer follows a longer one.
const CHAIN_MAX: usize = 16;
/// Limit of the roots in an answer. A mesh has two for each of its authorities while it replaces
/// them.
const ROOTS_MAX: usize = 1024;
/// Limit of a peer's error text that is repeated, in characters.
const ERROR_TEXT_CHARS_MAX: usize = 512;

/// Event of a certificate source.
#[derive(Debug)]
pub enum CertificateEvent {
    /// A new certificate, valid now.
    Issued(Arc<IdentityMaterial>),
    /// A certificate from before this process started, valid now.
    Restored(Arc<IdentityMaterial>),
    /// A failure, with its cause. The previous certificate stays in force until it expires.
    Failed(String),
}

/// Reason for which there is no certificate.
#[derive(Debug, Error)]
pub enum IssueError {
    /// A request to this address failed.
    #[error("{address}: {error}")]
    AtAddress {
        /// Address of the authority, with its port.
        address: String,
        /// Cause of the failure.
        error: Box<Self>,
    },
    /// The authority was unreachable or not trusted.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The authority refused.
    #[error("the authority refused the request: {code}: {message:?}")]
    Refused {
        /// The gRPC status.
        code: tonic::Code,
        /// Message of the authority.
        message: String,
    },
    /// The answer did not arrive before the deadline.
    #[error("no answer within {DEADLINE:?}")]
    Timeout,
    /// The connection to the socket of the Workload API failed.
    #[error("the Workload API cannot be reached: {0}")]
    Socket(String),
    /// The agent has no identity for this workload.
    #[error("the Workload API has no identity for this workload ({0}); register one")]
    Withdrawn(String),
    /// The agent's answer is unusable.
    #[error("the Workload API: {0}")]
    WorkloadApi(String),
    /// The key or the request could not be created.
    #[error("cannot create a certificate request: {0}")]
    Request(#[from] rcgen::Error),
    /// The answer has too few parts.
    #[error("the answer has {0} parts; it needs a certificate and, last, the roots")]
    Parts(usize),
    /// The answer is not PEM.
    #[error("the answer cannot be read as PEM: {0}")]
    Pem(#[from] pem::Error),
    /// The answer has too many certificates.
    #[error("the answer has more than {0} certificates in its {1}")]
    TooMany(usize, &'static str),
    /// The certificates are unusable.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The certificate is for another identity.
    #[error(
        "the certificate is for {issued:?}, requested {requested}: the authority signs for the \
         identity of the token; write that trust domain, namespace and service account under \
         `identity`"
    )]
    Identity {
        /// The requested identity.
        requested: String,
        /// The identity in the certificate.
        issued: String,
    },
    /// The certificate is not valid yet.
    #[error("the certificate is not valid before {0}; check this host's clock")]
    NotYetValid(humantime::Timestamp),
    /// The certificate has expired.
    #[error("the certificate expired at {0}; check this host's clock")]
    Expired(humantime::Timestamp),
}

impl From<tonic::Status> for IssueError {
    fn from(status: tonic::Status) -> Self {
        Self::Refused {
            code: status.code(),
            message: shortened(status.message()),
        }
    }
}

impl From<WorkloadApiError> for IssueError {
    fn from(error: WorkloadApiError) -> Self {
        let text = shortened(&error.to_string());
        match error {
            WorkloadApiError::NoIdentityIssued
            | WorkloadApiError::PermissionDenied(_)
            | WorkloadApiError::EmptyResponse
            | WorkloadApiError::MissingRequiredField { .. } => Self::Withdrawn(text),
            _ => Self::WorkloadApi(text),
        }
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(ERROR_TEXT_CHARS_MAX).collect()
}

/// Builds material from an answer, if a peer would accept it now.
fn material_from_answer(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    roots: Vec<CertificateDer<'static>>,
    now: SystemTime,
) -> Result<IdentityMaterial, IssueError> {
    for (certificates, most, what) in [(&chain, CHAIN_MAX, "chain"), (&roots, ROOTS_MAX, "roots")] {
        if certificates.len() > most {
            return Err(IssueError::TooMany(most, what));
        }
    }
    let (answer, bundle) = (Path::new("the answer"), Path::new("the answer's roots"));
    if roots.is_empty() {
        return Err(TlsError::NoCertificate(bundle.to_owned()).into());
    }
    let material = IdentityMaterial::new((answer, chain), key, (bundle, roots))?;
    CertifiedKey::from_der(
        material.chain.clone(),
        material.key.clone_key(),
        &provider(),
    )
    .map_err(TlsError::KeyMismatch)?;
    let (start, end) = (material.not_before, material.identity.not_after);
    if now < start {
        return Err(IssueError::NotYetValid(start.into()));
    }
    if now >= end {
        return Err(IssueError::Expired(end.into()));
    }
    Ok(material)
}
