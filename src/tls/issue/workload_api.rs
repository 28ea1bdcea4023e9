//! Client of a SPIFFE Workload API: an agent on this host that pushes certificate, key and
//! bundles, and their renewals.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{anyhow, bail};
use hyper_util::rt::TokioIo;
use rustls::RootCertStore;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use spiffe::transport::Endpoint as SpiffeEndpoint;
use spiffe::{WorkloadApiClient, WorkloadApiError, X509Bundle, X509Context};
use tokio::net::UnixStream;
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tonic::transport::{Endpoint, Uri};
use tower::service_fn;

use super::rotation::{RenewalSchedule, sleep_until};
use super::{CertificateEvent, DEADLINE, material_from_answer, report_issued, shortened};
use crate::tls::{Bundles, IdentityMaterial};

/// Idle time before a PING, and the deadline for its acknowledgement; then the connection is
/// closed.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_DEADLINE: Duration = Duration::from_secs(10);

/// Receives certificates from the agent at `socket`, and reports every certificate and every
/// failure. `unusable` is notified when the certificate in force becomes unusable. Returns once
/// `news` is closed and the agent's stream has ended.
pub async fn run(socket: PathBuf, news: mpsc::Sender<CertificateEvent>, unusable: Arc<Notify>) {
    let mut rotation = RenewalSchedule::default();
    while !news.is_closed() {
        let ended = forward_contexts(&socket, &news, &unusable, &mut rotation).await;
        rotation.take_unusable(&unusable);
        let due = rotation.failed(SystemTime::now());
        if let Err(error) = ended {
            // A closed receiver ends the loop.
            let _ = news.send(CertificateEvent::Failed(error.to_string())).await;
        }
        rotation.wait_until(due, &unusable, &SystemTime::now).await;
    }
}

/// Forwards the agent's certificates until its stream ends, a certificate is refused or becomes
/// unusable, or its renewal is late: the agent sends its current one on each new stream.
async fn forward_contexts(
    socket: &Path,
    news: &mpsc::Sender<CertificateEvent>,
    unusable: &Notify,
    rotation: &mut RenewalSchedule,
) -> anyhow::Result<()> {
    let client = with_deadline(connect(socket)).await??;
    let mut contexts = with_deadline(client.stream_x509_contexts()).await?.map_err(agent_error)?;
    let mut next = with_deadline(contexts.next()).await?;
    while let Some(context) = next {
        let material = Arc::new(material(&context.map_err(agent_error)?, SystemTime::now())?);
        rotation.take_unusable(unusable);
        if !report_issued(news, &material).await {
            return Ok(());
        }
        rotation.renewed(material.valid_until, SystemTime::now());
        let due = renewal_due(&material, SystemTime::now());
        next = tokio::select! {
            next = contexts.next() => next,
            () = unusable.notified() => {
                rotation.unusable();
                return Ok(());
            }
            () = sleep_until(due, &SystemTime::now) => {
                let end = humantime::Timestamp::from(material.valid_until);
                bail!("the Workload API: sent no renewal of the certificate that expires at {end}");
            }
        };
    }
    bail!("the Workload API: ended its stream")
}

/// Returns the time by which the agent has to renew a certificate: a quarter of its lifetime before
/// its end, or half of what is left.
fn renewal_due(material: &IdentityMaterial, now: SystemTime) -> SystemTime {
    let end = material.valid_until;
    let life = end.duration_since(material.not_before).unwrap_or_default();
    let left = end.duration_since(now).unwrap_or_default();
    (end - life / 4).max(now + left / 2)
}

async fn with_deadline<T>(wait: impl Future<Output = T>) -> anyhow::Result<T> {
    timeout(DEADLINE, wait).await.map_err(|_| anyhow!("no answer within {DEADLINE:?}"))
}

async fn connect(socket: &Path) -> anyhow::Result<WorkloadApiClient> {
    let path = socket.to_owned();
    let connector = service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost")
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_DEADLINE)
        .keep_alive_while_idle(true)
        .connect_with_connector(connector)
        .await
        .map_err(|error| {
            let error = crate::grpc::channel::error_chain(&error);
            anyhow!("the Workload API cannot be reached: {error}")
        })?;
    let endpoint = SpiffeEndpoint::Unix(socket.to_owned());
    Ok(WorkloadApiClient::new_with_channel(endpoint, channel))
}

fn agent_error(error: WorkloadApiError) -> anyhow::Error {
    let text = shortened(&error.to_string());
    match error {
        WorkloadApiError::NoIdentityIssued
        | WorkloadApiError::PermissionDenied(_)
        | WorkloadApiError::EmptyResponse
        | WorkloadApiError::MissingRequiredField { .. } => no_identity(&text),
        _ => anyhow!("the Workload API: {text}"),
    }
}

fn no_identity(why: &str) -> anyhow::Error {
    anyhow!("the Workload API has no identity for this workload ({why}); register one")
}

/// Converts the context's first identity, which is the default for this workload, and the
/// bundles of all trust domains.
fn material(context: &X509Context, now: SystemTime) -> anyhow::Result<IdentityMaterial> {
    let svid = context.default_svid().ok_or_else(|| no_identity("no certificate"))?;
    let chain = svid.cert_chain().iter();
    let chain = chain.map(|certificate| CertificateDer::from(certificate.as_bytes().to_vec()));
    let key = PrivatePkcs8KeyDer::from(svid.private_key().as_bytes().to_vec());
    let own = context.bundle_set().get(svid.spiffe_id().trust_domain());
    let own = own.map(|bundle| certificates(&bundle)).unwrap_or_default();
    let key = PrivateKeyDer::Pkcs8(key);
    let mut material = material_from_answer(chain.collect(), key, own, now)?;
    let (mut bundles, mut all) = (Bundles::new(), Vec::new());
    for (domain, bundle) in context.bundle_set().iter() {
        let certificates = certificates(bundle);
        let mut roots = RootCertStore::empty();
        // A domain without a usable root has no bundle.
        if roots.add_parsable_certificates(certificates.clone()).0 > 0 {
            bundles.insert(domain.as_str().into(), Arc::new(roots));
        }
        all.extend(certificates);
    }
    (material.bundles, material.root_certificates) = (Some(bundles), all);
    Ok(material)
}

fn certificates(bundle: &X509Bundle) -> Vec<CertificateDer<'static>> {
    let authorities = bundle.authorities().iter();
    authorities.map(|authority| CertificateDer::from(authority.as_bytes().to_vec())).collect()
}
