//! Certificates that are issued to us while we run, and renewed before they end.
//!
//! Istio's authority ([`istio`]) is asked when a certificate is half over (`rotation`), and what it
//! has issued may be kept on disk for a restart without it ([`cache`]); a SPIFFE
//! Workload API ([`workload_api`]) tells of a new one by itself. Both tell what they get as
//! [`News`]. Nothing is used that a peer would not accept now.

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

use super::{Material, TlsError, provider};

/// The time for an authority or an agent to answer, connection included.
const DEADLINE: Duration = Duration::from_secs(15);
/// The most certificates in a chain: more is no chain that a peer would follow.
const CHAIN_MAX: usize = 16;
/// The most roots that one answer may bring. A mesh has two for each of its authorities while it
/// replaces them.
const ROOTS_MAX: usize = 1024;
/// How much of what a peer says of an error is repeated.
const WORDS_MAX: usize = 512;

/// What a source of certificates tells.
#[derive(Debug)]
pub enum News {
    /// A certificate that is good now.
    Issued(Arc<Material>),
    /// A certificate that was issued before this process began, and is good now.
    Restored(Arc<Material>),
    /// There is no new one, and why. The one before is good until it ends.
    Failed(String),
}

/// Why there is no certificate.
#[derive(Debug, Error)]
pub enum IssueError {
    /// A certificate was not to be had at this address.
    #[error("{address}: {error}")]
    At {
        /// The authority's address, with its port.
        address: String,
        /// Why not.
        error: Box<Self>,
    },
    /// The authority could not be reached, or not be trusted.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The authority refused.
    #[error("the authority refused: {code}: {message:?}")]
    Refused {
        /// The gRPC status.
        code: tonic::Code,
        /// Its words.
        message: String,
    },
    /// Nobody answered.
    #[error("no answer within {DEADLINE:?}")]
    Late,
    /// The socket of the Workload API could not be connected to.
    #[error("the Workload API cannot be reached: {0}")]
    Socket(String),
    /// The agent has no identity for us.
    #[error("the Workload API gives this workload no identity ({0}); register one for it")]
    Withdrawn(String),
    /// The agent's answer cannot be used.
    #[error("the Workload API: {0}")]
    WorkloadApi(String),
    /// No key or no request could be made.
    #[error("no request for a certificate could be made: {0}")]
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
    /// The certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The certificate is for somebody else.
    #[error(
        "the certificate is for {got:?} and not for {asked}, which was asked for: the authority \
         signs for whom the token belongs to; write that trust domain, namespace and service \
         account under `identity`"
    )]
    Identity {
        /// Whom we are.
        asked: String,
        /// Whom the certificate is for.
        got: String,
    },
    /// The certificate is not valid yet.
    #[error("the certificate is valid only from {0} on; is this host's clock slow?")]
    NotYetValid(humantime::Timestamp),
    /// The certificate is not valid any more.
    #[error("the certificate has ended, at {0}; is this host's clock fast?")]
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
    text.chars().take(WORDS_MAX).collect()
}

/// What was issued to us as material, if a peer would accept it now.
fn judge(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    roots: Vec<CertificateDer<'static>>,
    now: SystemTime,
) -> Result<Material, IssueError> {
    for (certificates, most, what) in [(&chain, CHAIN_MAX, "chain"), (&roots, ROOTS_MAX, "roots")] {
        if certificates.len() > most {
            return Err(IssueError::TooMany(most, what));
        }
    }
    let (answer, bundle) = (Path::new("the answer"), Path::new("the answer's roots"));
    if roots.is_empty() {
        return Err(TlsError::NoCertificate(bundle.to_owned()).into());
    }
    let material = Material::new((answer, chain), key, (bundle, roots))?;
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
