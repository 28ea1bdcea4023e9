//! SPIFFE Workload API on a unix socket. Its messages are written by hand, with the field numbers
//! of the standard.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use strait::tools::dev::Leaf;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::body::Body;
use tonic::server::{Grpc, NamedService, ServerStreamingService};
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use tower::Service;

#[derive(Clone, PartialEq, prost::Message)]
pub struct Context509 {
    #[prost(message, repeated, tag = "1")]
    svids: Vec<Svid>,
    #[prost(map = "string, bytes", tag = "3")]
    federated_bundles: HashMap<String, Vec<u8>>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Svid {
    #[prost(string, tag = "1")]
    spiffe_id: String,
    #[prost(bytes = "vec", tag = "2")]
    chain: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    bundle: Vec<u8>,
}

type Answer = Result<Context509, Status>;

/// Current answer, and its subscribers.
#[derive(Clone)]
pub struct WorkloadApi {
    answer: watch::Sender<Answer>,
    streams: Arc<AtomicUsize>,
    ends_streams: Arc<AtomicBool>,
}

impl WorkloadApi {
    /// Creates a server that has no identity for any caller.
    pub fn new() -> Self {
        Self {
            answer: watch::Sender::new(Err(no_identity())),
            streams: Arc::default(),
            ends_streams: Arc::default(),
        }
    }

    /// Ends each stream after one answer from now on.
    pub fn end_streams(&self) {
        self.ends_streams.store(true, Ordering::Relaxed);
    }

    /// Returns the number of streams so far.
    pub fn streams(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }

    /// Serves at a socket until the returned set is dropped.
    pub fn serve(&self, socket: &Path) -> JoinSet<()> {
        let listener = UnixListener::bind(socket).expect("a socket");
        let api = self.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let server = Server::builder().add_service(api);
            let _ = server.serve_with_incoming(UnixListenerStream::new(listener)).await;
        });
        tasks
    }

    /// Sets an identity with the root of its domain, and the bundles of other domains.
    pub fn set_identity(&self, id: &str, leaf: &Leaf, root: &str, federated: &[(&str, &str)]) {
        let key = PrivateKeyDer::from_pem_slice(leaf.key_pem.as_bytes()).expect("a key");
        let svid = Svid {
            spiffe_id: id.to_owned(),
            chain: der(&leaf.chain_pem),
            key: key.secret_der().to_vec(),
            bundle: der(root),
        };
        let federated = federated.iter();
        let federated = federated.map(|(domain, root)| (format!("spiffe://{domain}"), der(root)));
        let context = Context509 { svids: vec![svid], federated_bundles: federated.collect() };
        drop(self.answer.send_replace(Ok(context)));
    }

    /// Withdraws the identity.
    pub fn withdraw(&self) {
        drop(self.answer.send_replace(Err(no_identity())));
    }
}

fn no_identity() -> Status {
    Status::permission_denied("no identity issued")
}

/// Returns the concatenated DER of certificates in PEM.
fn der(pem: &str) -> Vec<u8> {
    let certificates = CertificateDer::pem_slice_iter(pem.as_bytes());
    certificates.flat_map(|certificate| certificate.expect("a certificate").to_vec()).collect()
}

impl NamedService for WorkloadApi {
    const NAME: &'static str = "SpiffeWorkloadAPI";
}

impl ServerStreamingService<()> for WorkloadApi {
    type Response = Context509;
    type ResponseStream = ReceiverStream<Answer>;
    type Future = Ready<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, call: Request<()>) -> Self::Future {
        // The standard requires this header against requests that a browser could be made to send.
        if call.metadata().get("workload.spiffe.io").is_none() {
            return ready(Err(Status::invalid_argument("the security header is missing")));
        }
        let (received, responses) = mpsc::channel(1);
        let mut answers = self.answer.subscribe();
        self.streams.fetch_add(1, Ordering::Relaxed);
        let ends = self.ends_streams.load(Ordering::Relaxed);
        tokio::spawn(async move {
            loop {
                let answer = answers.borrow_and_update().clone();
                let is_last = ends || answer.is_err();
                if received.send(answer).await.is_err()
                    || is_last
                    || answers.changed().await.is_err()
                {
                    return;
                }
            }
        });
        ready(Ok(Response::new(ReceiverStream::new(responses))))
    }
}

impl Service<http::Request<Body>> for WorkloadApi {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let api = self.clone();
        Box::pin(async move {
            let mut grpc = Grpc::new(ProstCodec::<Context509, ()>::default());
            Ok(grpc.server_streaming(api, request).await)
        })
    }
}
