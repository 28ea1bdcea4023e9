//! The tests' istiod, compared with recordings of a real one: it answers the recorded requests, and
//! pushes the recorded changes, by messages of the same shape.

#[expect(dead_code, reason = "shared with the replay, which uses more of it")]
#[path = "../corpus/recording.rs"]
pub mod recording;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use prost::Message as _;
use strait::config::{ControlPlane, HostPort, Roots};
use strait::grpc::auth::{IstioCertificateRequest, IstioCertificateResponse};
use strait::grpc::call::{self, Messages};
use strait::grpc::channel;
use strait::grpc::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use strait::grpc::goaway::GoAwayCode;
use strait::xds::store::{ADDRESS, AUTHORIZATION, CLUSTER};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataMap;

use self::recording::{Kind, read, recordings};
use crate::support::istiod::{Istiod, TOKEN};
use crate::support::services::auth::istio_certificate_service_server::IstioCertificateService as _;
use crate::support::{Net, run};

const METHOD: &str =
    "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// Type of a message that follows all others of a push.
const LAST: &str = "type.googleapis.com/last";

/// Properties of all messages of one type in a push, other than bodies and opaque values.
#[derive(Debug, Default, PartialEq)]
struct Shape {
    resources: BTreeMap<String, ResourceShape>,
    removed: BTreeSet<String>,
    has_nonce: bool,
    has_version: bool,
}

#[derive(Debug, PartialEq)]
struct ResourceShape {
    has_version: bool,
    aliases: usize,
    body_type: Option<String>,
}

/// Types in the order of their first messages, with their shapes. A later message of clusters has
/// all of them again. Messages without content are left out.
fn shapes(messages: &[DeltaDiscoveryResponse]) -> Vec<(String, Shape)> {
    let mut shapes: Vec<(String, Shape)> = Vec::new();
    for message in messages {
        let of = &message.type_url;
        if !shapes.iter().any(|(known, _)| known == of) {
            shapes.push((of.clone(), Shape::default()));
        }
        let found = shapes.iter_mut().find(|(known, _)| known == of);
        let (_, shape) = found.expect("added above");
        if of == CLUSTER {
            shape.resources.clear();
        }
        shape.has_nonce = !message.nonce.is_empty();
        shape.has_version = !message.system_version_info.is_empty();
        shape.removed.extend(message.removed_resources.iter().cloned());
        let resources = message.resources.iter().map(|one| {
            let resource = ResourceShape {
                has_version: !one.version.is_empty(),
                aliases: one.aliases.len(),
                body_type: one.resource.as_ref().map(|body| body.type_url.clone()),
            };
            (one.name.clone(), resource)
        });
        shape.resources.extend(resources);
    }
    shapes
}

/// Recorded stream: its first requests, and the messages of each push. The first push has the
/// answers to the requests.
#[derive(Default)]
struct Recorded {
    firsts: Vec<DeltaDiscoveryRequest>,
    pushes: Vec<Vec<DeltaDiscoveryResponse>>,
}

fn streams(name: &str) -> Vec<Recorded> {
    let (_, path) = recordings().into_iter().find(|(known, _)| known == name).expect("a recording");
    let mut streams = BTreeMap::<u32, Recorded>::new();
    for event in read(&path) {
        match event.kind {
            Kind::Open(call, method) if method == METHOD => {
                streams.insert(call, Recorded::default());
            }
            Kind::Request(call, message) => {
                let Some(stream) = streams.get_mut(&call) else {
                    continue;
                };
                let request = DeltaDiscoveryRequest::decode(&*message).expect("a request");
                if request.response_nonce.is_empty() {
                    stream.firsts.push(request);
                }
            }
            Kind::Response(call, message) => {
                let Some(stream) = streams.get_mut(&call) else {
                    continue;
                };
                let response = DeltaDiscoveryResponse::decode(&*message).expect("a response");
                let pushes = &mut stream.pushes;
                let all: usize = pushes.iter().map(Vec::len).sum();
                let is_same = pushes
                    .last()
                    .and_then(|push| push.first())
                    .is_some_and(|one| one.system_version_info == response.system_version_info);
                if is_same && (all < stream.firsts.len() || pushes.len() > 1) {
                    pushes.last_mut().expect("a push").push(response);
                } else {
                    pushes.push(vec![response]);
                }
            }
            _ => {}
        }
    }
    streams.into_values().collect()
}

/// The tests' istiod, and what a client of it holds.
struct Compared {
    istiod: Istiod,
    address: SocketAddr,
    /// Versions of the recording and of the tests' istiod, by name.
    versions: BTreeMap<String, (String, String)>,
    exported: BTreeSet<String>,
    differences: Vec<String>,
}

/// Returns the name of the service behind a cluster `inbound-vip|PORT|tcp|HOST`.
fn service_of(cluster: &str) -> Option<String> {
    let host = cluster.strip_prefix("inbound-vip|")?.rsplit('|').next()?;
    let namespace = host.split('.').nth(1)?;
    Some(format!("{namespace}/{host}"))
}

impl Compared {
    /// Makes the changes of a push. Returns true if there are any.
    fn change(&mut self, push: &[DeltaDiscoveryResponse]) -> bool {
        let mut changes = false;
        for message in push {
            let of = message.type_url.as_str();
            if of == CLUSTER {
                let names = message.resources.iter().map(|one| one.name.as_str());
                let exported: BTreeSet<_> = names.filter_map(service_of).collect();
                // The tests' istiod exports the waypoints of exported services by itself.
                let is_waypoint = |name: &&String| name.starts_with("app/waypoint.");
                for gone in self.exported.difference(&exported) {
                    changes = true;
                    self.istiod.unexport(gone);
                }
                for new in exported.difference(&self.exported) {
                    changes = true;
                    if !is_waypoint(&new) {
                        self.istiod.export(new);
                    }
                }
                self.exported = exported;
                continue;
            }
            let bodies = message.resources.iter().map(|one| {
                let body = one.resource.as_ref().expect("a body");
                (one.name.as_str(), body.value.clone())
            });
            let bodies: Vec<_> = bodies.collect();
            changes |= !bodies.is_empty() || !message.removed_resources.is_empty();
            if !bodies.is_empty() {
                self.istiod.put_all(of, &bodies);
            }
            for gone in &message.removed_resources {
                self.istiod.remove(of, gone);
            }
        }
        changes
    }

    /// Opens a stream with the recorded requests, whose versions are replaced.
    async fn open(&self, firsts: &[DeltaDiscoveryRequest]) -> Stream {
        let plane = ControlPlane {
            address: HostPort {
                host: self.address.ip().to_string(),
                port: Some(self.address.port()),
            },
            roots: Roots::Plaintext,
            token: None,
            san: None,
            headers: Vec::new(),
        };
        let channel = channel::connect(&plane, GoAwayCode::default()).await;
        let (requests, outgoing) = mpsc::channel(16);
        for first in firsts {
            let mut first = first.clone();
            for (name, version) in &mut first.initial_resource_versions {
                if let Some((recorded, own)) = self.versions.get(name)
                    && recorded == version
                {
                    own.clone_into(version);
                }
            }
            requests.send(first).await.expect("room");
        }
        let outgoing = ReceiverStream::new(outgoing);
        let channel = channel.expect("a channel");
        let metadata = MetadataMap::new();
        let messages = call::open(channel, METHOD, metadata, outgoing, MESSAGE_BYTES_MAX).await;
        Stream { messages: messages.expect("a stream"), _requests: requests }
    }

    /// Compares the messages of a push, and keeps their versions.
    fn compare(
        &mut self,
        what: &str,
        recorded: &[DeltaDiscoveryResponse],
        own: &[DeltaDiscoveryResponse],
        is_first: bool,
    ) {
        let has_content =
            |(_, shape): &(String, Shape)| !shape.resources.is_empty() || !shape.removed.is_empty();
        let [mut of_recorded, mut of_own] = [shapes(recorded), shapes(own)];
        if !is_first {
            of_recorded.retain(has_content);
            of_own.retain(has_content);
        }
        if of_own != of_recorded {
            let difference = format!("{what}:\nown {of_own:?}\nrecorded {of_recorded:?}");
            self.differences.push(difference);
        }
        for (messages, is_own) in [(recorded, false), (own, true)] {
            for one in messages.iter().flat_map(|message| &message.resources) {
                let entry = self.versions.entry(one.name.clone()).or_default();
                let version = if is_own { &mut entry.1 } else { &mut entry.0 };
                one.version.clone_into(version);
            }
        }
    }
}

struct Stream {
    messages: Messages,
    _requests: mpsc::Sender<DeltaDiscoveryRequest>,
}

impl Stream {
    async fn next(&mut self) -> DeltaDiscoveryResponse {
        let message = self.messages.next().await.expect("a stream");
        DeltaDiscoveryResponse::decode(message.expect("a message")).expect("a response")
    }

    /// Returns the messages of the push before [`LAST`].
    async fn push(&mut self) -> Vec<DeltaDiscoveryResponse> {
        let mut messages = Vec::new();
        loop {
            let message = self.next().await;
            if message.type_url == LAST {
                return messages;
            }
            messages.push(message);
        }
    }
}

/// Returns the differences.
async fn compare_recording(name: &str) -> Vec<String> {
    let net = Net::new();
    let mut compared = Compared {
        istiod: Istiod::default(),
        address: net.address(2, 15012),
        versions: BTreeMap::new(),
        exported: BTreeSet::new(),
        differences: Vec::new(),
    };
    // Discovery does not say which ports are UDP.
    compared.istiod.make_udp("app/changing.app.svc.cluster.local", 53);
    let _serving = compared.istiod.serve_plaintext(compared.address).await;
    let last =
        DeltaDiscoveryResponse { type_url: LAST.to_owned(), ..DeltaDiscoveryResponse::default() };
    for (number, recorded) in streams(name).into_iter().enumerate() {
        let (first, pushes) = recorded.pushes.split_first().expect("answers");
        let types: Vec<_> = recorded.firsts.iter().map(|one| &*one.type_url).collect();
        assert_eq!(types, [ADDRESS, AUTHORIZATION, CLUSTER]);
        compared.change(first);
        let mut stream = compared.open(&recorded.firsts).await;
        let mut own = Vec::new();
        for _ in &recorded.firsts {
            own.push(stream.next().await);
        }
        compared.compare(&format!("{name}, stream {number}"), first, &own, true);
        for (at, push) in pushes.iter().enumerate() {
            if compared.change(push) {
                compared.istiod.push_unstored(&last);
                let own = stream.push().await;
                let what = format!("{name}, stream {number}, push {at}");
                compared.compare(&what, push, &own, false);
            }
        }
    }
    compared.differences
}

#[test]
fn the_istiod_of_the_tests_sends_messages_of_the_shape_of_a_real_one() {
    run(async {
        let mut differences = Vec::new();
        for (name, _) in recordings() {
            differences.extend(compare_recording(&name).await);
        }
        assert!(differences.is_empty(), "{}", differences.join("\n"));
    });
}

/// Returns the number of certificates of each part, without parts that repeat the last one: the
/// roots, which the chain of an authority's own certificate can have too.
fn parts(answer: &IstioCertificateResponse) -> Vec<usize> {
    let mut parts = answer.cert_chain.clone();
    let roots = parts.pop().expect("the roots");
    parts.retain(|part| *part != roots);
    let parts = parts.iter().chain([&roots]);
    parts.map(|part| part.matches("BEGIN CERTIFICATE-").count()).collect()
}

#[test]
fn the_authority_of_the_tests_answers_in_the_parts_of_a_real_one() {
    run(async {
        let mut issued = 0;
        for (name, path) in recordings() {
            let (mut opened, mut request) = (None, IstioCertificateRequest::default());
            for event in read(&path) {
                match event.kind {
                    Kind::Open(call, method) if method != METHOD => opened = Some(call),
                    Kind::Request(call, message) if opened == Some(call) => {
                        request = IstioCertificateRequest::decode(&*message).expect("a request");
                    }
                    Kind::Response(call, message) if opened == Some(call) => {
                        let recorded = IstioCertificateResponse::decode(&*message);
                        let mut asked = tonic::Request::new(request.clone());
                        let token = format!("Bearer {TOKEN}").parse().expect("a header");
                        asked.metadata_mut().insert("authorization", token);
                        let own = Istiod::default().ca.create_certificate(asked).await;
                        let own = own.expect("an answer").into_inner();
                        assert_eq!(parts(&own), parts(&recorded.expect("an answer")), "{name}");
                        issued += 1;
                    }
                    _ => {}
                }
            }
        }
        assert!(issued > 0, "no issuance is recorded");
    });
}
