//! A control plane: delta ADS of any types over TLS, with a token to show, as istiod has it; or in
//! plaintext and for anybody, as one beside the gateway may.

use std::collections::{BTreeMap, BTreeSet, HashMap};
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
use strait::grpc::auth::istio_certificate_service_server::IstioCertificateServiceServer;
use strait::grpc::discovery::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use strait::grpc::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource};
use strait::grpc::workload::{Address, address};
use strait::xds::store::ADDRESS;
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

use super::ca::Ca;
use super::{Gateway, Identities, Settings};

/// The name in its certificate.
pub const NAME: &str = "istiod.istio-system.svc";
/// The token that it wants to see.
pub const TOKEN: &str = "a-token-of-the-pod";

/// What it knows, whom it tells, and what it was told. It outlives the server.
#[derive(Clone, Default)]
pub struct Istiod {
    state: Arc<Mutex<State>>,
    /// Who signs certificates.
    pub ca: Ca,
}

/// How it treats whoever calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Manner {
    /// As it should.
    #[default]
    Well,
    /// It takes the call and never says a word.
    Silent,
    /// It refuses the call.
    Refusing,
    /// It says nothing of this type, until it behaves.
    Withholding(&'static str),
}

#[derive(Default)]
struct State {
    manner: Manner,
    /// By type and name: the version and the body.
    resources: BTreeMap<(String, String), (u64, Vec<u8>)>,
    version: u64,
    nonce: u64,
    streams: Vec<Stream>,
    requests: Vec<DeltaDiscoveryRequest>,
    /// By calls, the metadata that came with them.
    calls: Vec<MetadataMap>,
    sent: usize,
    /// Anybody may ask.
    open: bool,
}

type Pushes = mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>;

struct Stream {
    pushes: Pushes,
    types: BTreeMap<String, Watch>,
}

/// What a stream is told of a type.
#[derive(Default)]
struct Watch {
    wildcard: bool,
    /// What was asked for, and what came with it.
    names: BTreeSet<String>,
}

/// A running server. Dropped, it ends with all its connections.
pub struct Serving {
    sockets: Arc<Mutex<Vec<Socket>>>,
    tasks: JoinSet<()>,
}

impl Serving {
    /// Ends the server, and returns once another one can listen at its address.
    pub async fn stop(mut self) {
        self.tasks.shutdown().await;
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        for socket in self.sockets.lock().expect("no panic").drain(..) {
            // It may have ended by itself.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Istiod {
    /// Serves at `address` with a certificate of `identities`.
    pub async fn serve(&self, address: SocketAddr, identities: &Identities) -> Serving {
        let acceptor = TlsAcceptor::from(Arc::new(tls(identities)));
        self.listen(address, Some(acceptor)).await
    }

    /// Serves at `address` in plaintext, and from now on whoever asks.
    pub async fn serve_plainly(&self, address: SocketAddr) -> Serving {
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
                // As Go's sockets, of which istiod's are: a held back push would be timed as ours.
                stream.set_nodelay(true).expect("an open connection");
                let socket = stream.as_fd().try_clone_to_owned().expect("a descriptor");
                accepted.lock().expect("no panic").push(socket.into());
                // A client that refuses our certificate is no concern of the others.
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
            let _ = server
                .serve_with_incoming(ReceiverStream::new(incoming))
                .await;
        });
        Serving { sockets, tasks }
    }

    /// Puts a resource in and tells those who are connected.
    pub fn put(&self, type_url: &str, name: &str, body: &impl Message) {
        self.put_all(type_url, &[(name, body.encode_to_vec())]);
    }

    /// Puts resources in and tells of all of them by one push.
    pub fn put_all(&self, type_url: &str, resources: &[(&str, Vec<u8>)]) {
        let mut state = self.state();
        state.version += 1;
        let version = state.version;
        for (name, body) in resources {
            let key = (type_url.to_owned(), (*name).to_owned());
            state.resources.insert(key, (version, body.clone()));
        }
        let names = resources.iter().map(|(name, _)| (*name).to_owned());
        state.push(type_url, &names.collect::<Vec<_>>(), &[]);
    }

    /// Takes a resource out and tells those who are connected.
    pub fn remove(&self, type_url: &str, name: &str) {
        let mut state = self.state();
        state
            .resources
            .remove(&(type_url.to_owned(), name.to_owned()));
        state.push(type_url, &[], &[name.to_owned()]);
    }

    /// From now on it treats calls and requests like this.
    pub fn behave(&self, manner: Manner) {
        self.state().manner = manner;
    }

    /// Sends all who are connected just this, and knows nothing of it later.
    pub fn say(&self, response: &DeltaDiscoveryResponse) {
        let mut state = self.state();
        state.streams.retain(|stream| !stream.pushes.is_closed());
        for stream in &state.streams {
            let pushed = stream.pushes.try_send(Ok(response.clone()));
            pushed.expect("room for a push");
        }
    }

    /// Everything that clients have said so far.
    pub fn requests(&self) -> Vec<DeltaDiscoveryRequest> {
        self.state().requests.clone()
    }

    /// The metadata of each call so far that showed its token.
    pub fn calls(&self) -> Vec<MetadataMap> {
        self.state().calls.clone()
    }

    /// How many first requests of a type came so far.
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

    /// How many resources were sent so far.
    pub fn sent(&self) -> usize {
        self.state().sent
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic with the lock held")
    }
}

impl State {
    fn push(&mut self, type_url: &str, names: &[String], removed: &[String]) {
        self.streams.retain(|stream| !stream.pushes.is_closed());
        let mut pushes = Vec::new();
        for stream in &mut self.streams {
            let Some(watch) = stream.types.get_mut(type_url) else {
                continue;
            };
            let has = |name: &&String| watch.wildcard || watch.names.contains(*name);
            let gone: Vec<_> = removed.iter().filter(has).cloned().collect();
            let is_wanted = |name: &&String| {
                let (_, body) = &self.resources[&(type_url.to_owned(), (*name).clone())];
                has(name) || belongs(type_url, name, body, &watch.names)
            };
            let sent: Vec<_> = names.iter().filter(is_wanted).cloned().collect();
            watch.names.extend(sent.iter().cloned());
            if !sent.is_empty() || !gone.is_empty() {
                pushes.push((stream.pushes.clone(), sent, gone));
            }
        }
        for (to, sent, gone) in pushes {
            let response = self.response(type_url, &sent, gone);
            to.try_send(Ok(response)).expect("room for a push");
        }
    }

    fn response(
        &mut self,
        type_url: &str,
        names: &[String],
        removed: Vec<String>,
    ) -> DeltaDiscoveryResponse {
        self.nonce += 1;
        self.sent += names.len();
        let resources = names.iter().map(|name| {
            let (version, body) = &self.resources[&(type_url.to_owned(), name.clone())];
            Resource {
                name: name.clone(),
                version: version.to_string(),
                resource: Some(prost_types::Any {
                    type_url: type_url.to_owned(),
                    value: body.clone(),
                }),
                ..Resource::default()
            }
        });
        DeltaDiscoveryResponse {
            type_url: type_url.to_owned(),
            nonce: self.nonce.to_string(),
            resources: resources.collect(),
            removed_resources: removed,
            ..DeltaDiscoveryResponse::default()
        }
    }

    /// What a client does not have yet, and what it has that is gone.
    fn first(&mut self, type_url: &str, has: &HashMap<String, String>) -> DeltaDiscoveryResponse {
        let known = self.resources.iter();
        let known = known.filter(|((of, _), _)| of == type_url);
        let new =
            known.filter(|((_, name), (version, _))| has.get(name) != Some(&version.to_string()));
        let new: Vec<_> = new.map(|((_, name), _)| name.clone()).collect();
        let is_gone = |name: &&String| {
            !self
                .resources
                .contains_key(&(type_url.to_owned(), (*name).clone()))
        };
        let gone = has.keys().filter(is_gone).cloned().collect();
        self.response(type_url, &new, gone)
    }

    /// What was asked for with what belongs to it, but for what a client has, and what of it is
    /// gone or was never there.
    fn asked(
        &mut self,
        type_url: &str,
        names: &BTreeSet<String>,
        has: &HashMap<String, String>,
    ) -> DeltaDiscoveryResponse {
        let known = self.resources.iter();
        let known = known.filter(|((of, name), (_, body))| {
            of == type_url && belongs(type_url, name, body, names)
        });
        let known = known.map(|((_, name), (version, _))| (name.clone(), version.to_string()));
        let known: Vec<_> = known.collect();
        let gone = names
            .iter()
            .filter(|name| !known.iter().any(|(one, _)| one == *name));
        let gone = gone.cloned().collect();
        let new = known
            .into_iter()
            .filter(|(name, version)| has.get(name) != Some(version));
        let new: Vec<_> = new.map(|(name, _)| name).collect();
        self.response(type_url, &new, gone)
    }

    fn received(&mut self, request: DeltaDiscoveryRequest, index: usize) {
        let withheld = match self.manner {
            Manner::Silent => true,
            Manner::Withholding(of) => request.type_url == of,
            Manner::Well | Manner::Refusing => false,
        };
        // Envoy's answers have changes of its subscription in them.
        let asks =
            request.response_nonce.is_empty() || !request.resource_names_subscribe.is_empty();
        if asks && !withheld {
            self.subscribed(&request, index);
        }
        self.requests.push(request);
    }

    fn subscribed(&mut self, request: &DeltaDiscoveryRequest, index: usize) {
        let of = &request.type_url;
        let versions = request.initial_resource_versions.clone();
        let has: HashMap<_, _> = versions.into_iter().collect();
        let types = &mut self.streams[index].types;
        let is_first = !types.contains_key(of);
        let watch = types.entry(of.clone()).or_default();
        let mut asked: BTreeSet<_> = request.resource_names_subscribe.iter().cloned().collect();
        asked.extend(has.keys().cloned());
        for name in &request.resource_names_unsubscribe {
            asked.remove(name);
            watch.names.remove(name);
        }
        watch.wildcard |= is_first && request.resource_names_subscribe.is_empty();
        watch.names.extend(asked.iter().cloned());
        let response = match watch.wildcard {
            true => self.first(of, &has),
            false if is_first || !asked.is_empty() => self.asked(of, &asked, &has),
            // As Istio does it: what was not taken back is said to be gone.
            false => {
                let gone = watch.names.iter().cloned().collect();
                self.response(of, &[], gone)
            }
        };
        let stream = &mut self.streams[index];
        let sent = response.resources.iter().map(|one| one.name.clone());
        stream
            .types
            .entry(of.clone())
            .or_default()
            .names
            .extend(sent);
        let pushed = stream.pushes.try_send(Ok(response));
        pushed.expect("room for a push");
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
        if self.state().manner == Manner::Refusing {
            return Err(Status::unavailable("out for lunch"));
        }
        let (pushes, responses) = mpsc::channel(64);
        let gone = pushes.clone();
        let mut stream = Some(Stream {
            pushes,
            types: BTreeMap::new(),
        });
        let mut requests = call.into_inner();
        let istiod = self.clone();
        tokio::spawn(async move {
            while let Ok(Some(request)) = requests.message().await {
                let mut state = istiod.state();
                state.streams.extend(stream.take());
                let mut streams = state.streams.iter();
                let own = streams.position(|stream| stream.pushes.same_channel(&gone));
                state.received(request, own.expect("our own stream"));
            }
        });
        Ok(Response::new(ReceiverStream::new(responses)))
    }
}

/// Whether these names ask for a resource: by its own, or a workload by those of its services.
fn belongs(type_url: &str, name: &str, body: &[u8], names: &BTreeSet<String>) -> bool {
    let workload = || match Address::decode(body).ok()?.r#type? {
        address::Type::Workload(workload) if type_url == ADDRESS => Some(workload),
        _ => None,
    };
    let of = || workload().is_some_and(|one| one.services.keys().any(|of| names.contains(of)));
    names.contains(name) || of()
}

/// A gateway that a control plane of this kind at host 2 of its net programs, with these keys of
/// `discovery` besides its address. `prepare` gets its folder.
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

/// Whether a call shows the token.
pub fn check_token(metadata: &MetadataMap) -> Result<(), Status> {
    let token = metadata.get("authorization");
    match token.and_then(|token| token.to_str().ok()) == Some(&format!("Bearer {TOKEN}")) {
        true => Ok(()),
        false => Err(Status::unauthenticated("this is not the token")),
    }
}

fn tls(identities: &Identities) -> ServerConfig {
    let leaf = identities.east.leaf_with(|parameters| {
        let name = NAME.try_into().expect("a name");
        parameters.subject_alt_names = vec![SanType::DnsName(name)];
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

/// A stream as the server wants it.
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
