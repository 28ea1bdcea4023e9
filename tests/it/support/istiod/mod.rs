//! Control plane: delta ADS over TLS with a token, like istiod; or in plaintext without a token,
//! like one beside the gateway. `state` decides what is sent.

mod state;

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsFd;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};

use prost::Message;
use rcgen::SanType;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use socket2::Socket;
use strait::grpc::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::either::Either;
use tonic::metadata::MetadataMap;
use tonic::transport::Server;
use tonic::transport::server::Connected;
use tonic::{Request, Response, Status, Streaming};

pub use self::state::BUILT_IN;
use self::state::{Dialect, State, Stream};
use super::ca::Ca;
use super::services::auth::istio_certificate_service_server::IstioCertificateServiceServer;
use super::services::discovery::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use super::{Gateway, Identities, Settings};

/// Name in the server's certificate.
pub const NAME: &str = "istiod.istio-system.svc";
/// Token that the server requires.
pub const TOKEN: &str = "a-token-of-the-pod";

/// Resources, subscribers and received requests. It outlives the server.
#[derive(Clone, Default)]
pub struct Istiod {
    state: Arc<Mutex<State>>,
    /// Certificate authority.
    pub ca: Ca,
}

/// Behaviour towards callers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Behaviour {
    /// Normal.
    #[default]
    Normal,
    /// Accepts the call and never answers.
    Silent,
    /// Rejects the call.
    Refusing,
    /// Sends nothing of this type, until the behaviour changes.
    OmitsType(&'static str),
}

/// Running server. On drop it ends, with all its connections.
pub struct Serving {
    sockets: Arc<Mutex<Vec<Socket>>>,
    tasks: JoinSet<()>,
}

impl Serving {
    /// Stops the server, and returns once another one can listen at its address.
    pub async fn stop(mut self) {
        self.tasks.shutdown().await;
    }

    /// Breaks all connections, and goes on.
    pub fn disconnect(&self) {
        for socket in self.sockets.lock().expect("no panic").drain(..) {
            // The connection may have ended by itself.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.disconnect();
    }
}

impl Istiod {
    /// Returns a control plane that sends deltas of every type, as one of Envoys.
    pub fn envoy_dialect() -> Self {
        let control = Self::default();
        control.state().dialect = Dialect::Envoy;
        control
    }

    /// Serves at `address` with a certificate of `identities`.
    pub async fn serve(&self, address: SocketAddr, identities: &Identities) -> Serving {
        let name = SanType::DnsName(NAME.try_into().expect("a name"));
        let acceptor = TlsAcceptor::from(Arc::new(tls(identities, name)));
        self.listen(address, Some(acceptor)).await
    }

    /// Serves at `address` in plaintext, and requires no token from now on.
    pub async fn serve_plaintext(&self, address: SocketAddr) -> Serving {
        self.state().open = true;
        self.listen(address, None).await
    }

    async fn listen(&self, address: SocketAddr, acceptor: Option<TlsAcceptor>) -> Serving {
        let listener = TcpListener::bind(address).await.expect("a listener");
        let (connections, incoming) = mpsc::channel(16);
        let sockets = Arc::<Mutex<Vec<Socket>>>::default();
        let accepted = Arc::clone(&sockets);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                // Like Go's sockets, which istiod uses. Nagle's delay of a push would be counted as
                // the gateway's.
                stream.set_nodelay(true).expect("an open connection");
                let socket = stream.as_fd().try_clone_to_owned().expect("a descriptor");
                accepted.lock().expect("no panic").push(socket.into());
                // A client that rejects the certificate must not affect the others.
                let stream = match &acceptor {
                    Some(acceptor) => acceptor.accept(stream).await.map(Either::Left),
                    None => Ok(Either::Right(stream)),
                };
                if let Ok(stream) = stream {
                    let _ = connections.send(io::Result::Ok(Connection(stream))).await;
                }
            }
        });
        let discovery = AggregatedDiscoveryServiceServer::new(self.clone());
        let ca = IstioCertificateServiceServer::new(self.ca.clone());
        tasks.spawn(async move {
            let server = Server::builder().add_service(discovery).add_service(ca);
            let _ = server.serve_with_incoming(ReceiverStream::new(incoming)).await;
        });
        Serving { sockets, tasks }
    }

    /// Adds a resource and pushes it.
    pub fn put(&self, type_url: &str, name: &str, body: &impl Message) {
        self.put_all(type_url, &[(name, body.encode_to_vec())]);
    }

    /// Adds resources and sends all of them in one push.
    pub fn put_all(&self, type_url: &str, resources: &[(&str, Vec<u8>)]) {
        self.state().put(type_url, resources);
    }

    /// Removes a resource and pushes the removal.
    pub fn remove(&self, type_url: &str, name: &str) {
        self.state().remove(type_url, name);
    }

    /// Labels a service `NAMESPACE/HOSTNAME` with `istio.io/global=true`. Gateways receive a
    /// cluster for each of its ports, and for those of its waypoints.
    pub fn export(&self, service: &str) {
        let mut state = self.state();
        state.global.insert(service.to_owned());
        state.push_clusters(false);
    }

    /// Removes the label from a service. The push lacks its clusters. Only the next push with a
    /// change of an address names them as removed.
    pub fn unexport(&self, service: &str) {
        let mut state = self.state();
        state.global.remove(service);
        state.push_clusters(false);
    }

    /// Makes a port of a service UDP.
    pub fn make_udp(&self, service: &str, port: u32) {
        self.state().udp.insert((service.to_owned(), port));
    }

    /// Sends policies with dry run too, as istiod does only if that is enabled.
    pub fn enable_dry_run(&self) {
        self.state().sends_dry_run = true;
    }

    /// Sets the behaviour towards calls and requests from now on.
    pub fn set_behaviour(&self, manner: Behaviour) {
        self.state().manner = manner;
    }

    /// Sends this response to all subscribers, without storing its resources.
    pub fn push_unstored(&self, response: &DeltaDiscoveryResponse) {
        self.state().push_unstored(response);
    }

    /// Returns all requests of clients so far.
    pub fn requests(&self) -> Vec<DeltaDiscoveryRequest> {
        self.state().requests.clone()
    }

    /// Returns the metadata of each call so far that had a valid token.
    pub fn calls(&self) -> Vec<MetadataMap> {
        self.state().calls.clone()
    }

    /// Returns the number of initial requests of all types so far.
    pub fn firsts(&self) -> usize {
        let requests = self.requests().into_iter();
        let firsts = requests.filter(|request| request.response_nonce.is_empty());
        firsts.count()
    }

    /// The messages of all NACKs so far.
    pub fn rejections(&self) -> Vec<String> {
        let requests = self.requests().into_iter();
        let errors = requests.filter_map(|request| request.error_detail);
        errors.map(|error| error.message).collect()
    }

    /// Returns the number of resources sent so far that have a version: under Istio, those of WDS.
    pub fn sent(&self) -> usize {
        self.state().sent
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic with the lock held")
    }
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for Istiod {
    type DeltaAggregatedResourcesStream = ReceiverStream<Result<DeltaDiscoveryResponse, Status>>;

    async fn delta_aggregated_resources(
        &self,
        call: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        if !self.state().open {
            check_token(call.metadata())?;
        }
        self.state().calls.push(call.metadata().clone());
        if self.state().manner == Behaviour::Refusing {
            return Err(Status::unavailable("out for lunch"));
        }
        let (pushes, responses) = mpsc::channel(256);
        let istiod = self.clone();
        let mut requests = call.into_inner();
        tokio::spawn(async move {
            istiod.state().add_stream(Stream::new(pushes.clone()));
            while let Ok(Some(request)) = requests.message().await {
                istiod.state().received(request, &pushes);
            }
        });
        Ok(Response::new(ReceiverStream::new(responses)))
    }
}

/// Starts a gateway and a control plane of this kind at host 2 of its net, with these keys of
/// `discovery` besides its address. `prepare` receives its folder.
pub fn programmed(
    settings: &Settings<'_>,
    kind: &str,
    keys: &str,
    prepare: impl FnOnce(&Path),
) -> Gateway {
    let net = settings.net;
    Gateway::spawn(settings, |folder| {
        std::fs::write(folder.join("token"), TOKEN).expect("a token");
        let file = folder.join("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        let address = net.address(2, 15012);
        let discovery = format!("{{kind: {kind}, address: \"{address}\", {keys}}}");
        let text = text.replace("{kind: file, path: mesh.yaml}", &discovery);
        assert!(text.contains(&discovery));
        std::fs::write(file, text).expect("a configuration");
        prepare(folder);
    })
}

/// Checks the token of a call.
pub fn check_token(metadata: &MetadataMap) -> Result<(), Status> {
    let token = metadata.get("authorization");
    if token.and_then(|token| token.to_str().ok()) == Some(&format!("Bearer {TOKEN}")) {
        Ok(())
    } else {
        Err(Status::unauthenticated("this is not the token"))
    }
}

/// Returns the TLS of a gRPC server with this name.
pub fn tls(identities: &Identities, name: SanType) -> ServerConfig {
    let leaf = identities.east.leaf_with(|parameters| {
        parameters.subject_alt_names = vec![name];
    });
    let leaf = leaf.expect("a leaf");
    let chain = CertificateDer::pem_slice_iter(leaf.chain_pem.as_bytes());
    let chain = chain.collect::<Result<Vec<_>, _>>().expect("a chain");
    let key = PrivateKeyDer::from_pem_slice(leaf.key_pem.as_bytes()).expect("a key");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut tls = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .expect("a certificate");
    tls.alpn_protocols = vec![b"h2".to_vec()];
    tls
}

/// Stream in the form that the server requires.
struct Connection(Either<TlsStream<TcpStream>, TcpStream>);

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
