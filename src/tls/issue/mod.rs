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

use anyhow::{anyhow, ensure};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use thiserror::Error;
use tokio::sync::{Notify, mpsc, oneshot};

use super::{IdentityMaterial, TlsError};

/// Deadline for an answer of an authority or an agent, including the connection.
const DEADLINE: Duration = Duration::from_secs(15);
/// Limit of the certificates in a chain; no peer follows a longer one.
const CHAIN_MAX: usize = 16;
/// Limit of the roots in an answer. A mesh has two for each of its authorities while it replaces
/// them.
const ROOTS_MAX: usize = 1024;
/// Limit of a peer's error text that is repeated, in characters.
const ERROR_TEXT_CHARS_MAX: usize = 512;

#[derive(Debug)]
pub enum CertificateEvent {
    /// A new certificate, valid now. The sender is used once it is in force, and dropped if it is
    /// refused.
    Issued(Arc<IdentityMaterial>, oneshot::Sender<()>),
    /// A certificate from before this process started, valid now.
    Restored(Arc<IdentityMaterial>),
    /// A failure, with its cause. The previous certificate stays in force until it expires.
    Failed(String),
}

/// Events that end the wait for the next request.
#[derive(Clone, Debug, Default)]
pub struct RenewalSignals {
    /// Notified when the control plane is reachable again.
    pub reachable: Arc<Notify>,
    /// Notified when the certificate in force becomes unusable, or the restored one is.
    pub unusable: Arc<Notify>,
}

/// Expiry of a certificate, in the past.
#[derive(Debug, Error)]
#[error("the certificate expired at {0}; check this host's clock")]
struct Expired(humantime::Timestamp);

/// Reports a new certificate. Returns whether it is in force.
async fn report_issued(
    news: &mpsc::Sender<CertificateEvent>,
    material: &Arc<IdentityMaterial>,
) -> bool {
    let (in_force, verdict) = oneshot::channel();
    // If the receiver is closed, the sender of the verdict is dropped.
    let _ = news.send(CertificateEvent::Issued(Arc::clone(material), in_force)).await;
    verdict.await.is_ok()
}

fn shortened(text: &str) -> String {
    text.chars().take(ERROR_TEXT_CHARS_MAX).collect()
}

fn parse_certificates(part: &str) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let certificates = CertificateDer::pem_slice_iter(part.as_bytes());
    certificates.collect::<Result<_, _>>().map_err(bad_pem)
}

fn bad_pem(error: pem::Error) -> anyhow::Error {
    anyhow!("the answer cannot be read as PEM: {error}")
}

fn require_identity(material: &IdentityMaterial, requested: &str) -> anyhow::Result<()> {
    let issued = &*material.identity.uri;
    ensure!(
        issued == requested,
        "the certificate is for {issued:?}, requested {requested}: the authority signs for the \
         identity of the token; write that trust domain, namespace and service account under \
         `identity`"
    );
    Ok(())
}

/// Builds material from an answer, if a peer would accept it now.
fn material_from_answer(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    roots: Vec<CertificateDer<'static>>,
    now: SystemTime,
) -> anyhow::Result<IdentityMaterial> {
    for (certificates, most, what) in [(&chain, CHAIN_MAX, "chain"), (&roots, ROOTS_MAX, "roots")] {
        ensure!(
            certificates.len() <= most,
            "the answer has more than {most} certificates in its {what}"
        );
    }
    let (answer, bundle) = (Path::new("the answer"), Path::new("the answer's roots"));
    if roots.is_empty() {
        return Err(TlsError::NoCertificate(bundle.to_owned()).into());
    }
    let material = IdentityMaterial::new(answer, chain, key, bundle, roots)?;
    let (start, end) = (material.not_before, material.identity.not_after);
    ensure!(
        now >= start,
        "the certificate is not valid before {}; check this host's clock",
        humantime::Timestamp::from(start)
    );
    ensure!(now < end, Expired(end.into()));
    Ok(material.verified(now)?)
}
