//! A SPIFFE Workload API: an agent on this host that gives certificate, key and bundles, and gives
//! them anew before they end.

use std::convert::Infallible;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use hyper_util::rt::TokioIo;
use rustls::RootCertStore;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use spiffe::transport::Endpoint as SpiffeEndpoint;
use spiffe::{WorkloadApiClient, X509Bundle, X509Context};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tonic::transport::{Endpoint, Uri};
use tower::service_fn;

use super::rotation::{Rotation, sleep_until};
use super::{DEADLINE, IssueError, News, judge};
use crate::tls::{Bundles, Material};

/// A silent agent is asked by PING, and given up.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_DEADLINE: Duration = Duration::from_secs(10);

/// Keeps the certificate that the agent behind `socket` has for us, and tells of every one and of
/// every failure.
pub async fn run(socket: PathBuf, news: mpsc::Sender<News>) {
    let mut rotation = Rotation::default();
    while !news.is_closed() {
        let Err(error) = listen(&socket, &news, &mut rotation).await;
        let due = rotation.failed(SystemTime::now());
        // Nobody who wants to know is the end of the loop.
        let _ = news.send(News::Failed(error.to_string())).await;
        sleep_until(due, &SystemTime::now).await;
    }
}

/// Tells what the agent tells, until it stops.
async fn listen(
    socket: &Path,
    news: &mpsc::Sender<News>,
    rotation: &mut Rotation,
) -> Result<Infallible, IssueError> {
    let client = in_time(connect(socket)).await??;
    let mut contexts = in_time(client.stream_x509_contexts()).await??;
    let mut next = in_time(contexts.next()).await?;
    while let Some(context) = next {
        let material = material(&context?, SystemTime::now())?;
        rotation.renewed(material.identity.not_after);
        let _ = news.send(News::Issued(Arc::new(material))).await;
        next = contexts.next().await;
    }
    Err(IssueError::WorkloadApi("ended its stream".to_owned()))
}

async fn in_time<T>(wait: impl Future<Output = T>) -> Result<T, IssueError> {
    timeout(DEADLINE, wait).await.map_err(|_| IssueError::Late)
}

async fn connect(socket: &Path) -> Result<WorkloadApiClient, IssueError> {
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
        .map_err(|error| IssueError::Socket(crate::grpc::channel::chain(&error)))?;
    let endpoint = SpiffeEndpoint::Unix(socket.to_owned());
    Ok(WorkloadApiClient::new_with_channel(endpoint, channel))
}

/// The first identity of the context, which is the one for us, and the bundles of all domains.
fn material(context: &X509Context, now: SystemTime) -> Result<Material, IssueError> {
    let none = || IssueError::Withdrawn("no certificate".to_owned());
    let svid = context.default_svid().ok_or_else(none)?;
    let chain = svid.cert_chain().iter();
    let chain = chain.map(|certificate| CertificateDer::from(certificate.as_bytes().to_vec()));
    let key = PrivatePkcs8KeyDer::from(svid.private_key().as_bytes().to_vec());
    let own = context.bundle_set().get(svid.spiffe_id().trust_domain());
    let own = own.map(|bundle| certificates(&bundle)).unwrap_or_default();
    let key = PrivateKeyDer::Pkcs8(key);
    let mut material = judge(chain.collect(), key, own, now)?;
    let (mut bundles, mut all) = (Bundles::new(), Vec::new());
    for (domain, bundle) in context.bundle_set().iter() {
        let certificates = certificates(bundle);
        let mut roots = RootCertStore::empty();
        // A domain none of whose roots can be used has no bundle.
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
    authorities
        .map(|authority| CertificateDer::from(authority.as_bytes().to_vec()))
        .collect()
}
