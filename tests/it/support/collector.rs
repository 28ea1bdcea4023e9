//! OTLP collector that keeps the spans which it receives.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, Span};
use rustls::ServerConfig;
use tokio::io::{copy, split};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tonic::metadata::MetadataMap;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

/// Running collector, as its clients know it.
#[derive(Clone, Default)]
pub struct Collector {
    received: Arc<Mutex<Vec<ResourceSpans>>>,
    headers: Arc<Mutex<MetadataMap>>,
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        *self.headers.lock().expect("headers") = request.metadata().clone();
        self.received.lock().expect("spans").extend(request.into_inner().resource_spans);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    /// Serves until the handle is aborted.
    pub fn serve(&self, socket: TcpListener) -> JoinHandle<()> {
        let server = Server::builder().add_service(TraceServiceServer::new(self.clone()));
        tokio::spawn(async move {
            let _ = server.serve_with_incoming(TcpIncoming::from(socket)).await;
        })
    }

    /// Serves by TLS, which ends before [`Self::serve`].
    pub async fn serve_tls(&self, socket: TcpListener, tls: ServerConfig) {
        let plain = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
        let address = plain.local_addr().expect("its address");
        self.serve(plain);
        let acceptor = TlsAcceptor::from(Arc::new(tls));
        tokio::spawn(async move {
            while let Ok((stream, _)) = socket.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let (mut requests, mut answers) = split(acceptor.accept(stream).await?);
                    let mut plain = TcpStream::connect(address).await?;
                    let (mut from, mut to) = plain.split();
                    tokio::try_join!(copy(&mut requests, &mut to), copy(&mut from, &mut answers))
                });
            }
        });
    }

    /// Returns the spans of processes whose attribute `service.name` is this.
    pub fn spans(&self, service: &str) -> Vec<Span> {
        let mut received = self.received.lock().expect("spans").clone();
        received.retain(|process| {
            let resource = process.resource.as_ref().expect("a process");
            texts(&resource.attributes).get("service.name").is_some_and(|name| name == service)
        });
        let scopes = received.into_iter().flat_map(|process| process.scope_spans);
        scopes.flat_map(|scope| scope.spans).collect()
    }

    /// Returns a header of the last request.
    pub fn header(&self, name: &str) -> Option<String> {
        let headers = self.headers.lock().expect("headers");
        Some(headers.get(name)?.to_str().expect("text").to_owned())
    }
}

/// Returns the texts and numbers among attributes.
pub fn texts(attributes: &[KeyValue]) -> BTreeMap<&str, String> {
    let text = |attribute: &KeyValue| match attribute.value.clone()?.value? {
        Value::StringValue(text) => Some(text),
        Value::IntValue(number) => Some(number.to_string()),
        Value::DoubleValue(number) => Some(number.to_string()),
        _ => None,
    };
    attributes.iter().filter_map(|one| Some((&*one.key, text(one)?))).collect()
}

/// Returns an id as headers have it.
pub fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}
