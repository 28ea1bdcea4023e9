//! Replay of recordings of a real istiod, with the recorded times on a paused clock.
//!
//! Beside each recording is a file with the expected requests, and with the changes of the snapshot
//! between its marks. `STRAIT_UPDATE=1` writes these files.

#[path = "../../../tests/corpus/recording.rs"]
mod recording;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::sync::Mutex;

use bytes::Bytes;
use http_body::Frame;
use http_body_util::StreamBody;
use prost::Message as _;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::time::{sleep, sleep_until};
use tonic::body::Body;

use self::recording::{Event, Kind, read, recordings};
use super::*;
use crate::config::{HostPort, Roots};
use crate::grpc::auth::{IstioCertificateRequest, IstioCertificateResponse};
use crate::grpc::discovery::DeltaDiscoveryResponse;
use crate::grpc::workload as proto;
use crate::snapshot::Snapshot;
use crate::snapshot::mesh::{Service, Workload};
use crate::tls::issue::istio::check_answer;
use crate::xds::client::Resource;
use crate::xds::store::{ADDRESS, CLUSTER};
use crate::xds::tests::{self as samples, policy, resource, workload};

/// Stream of a recording.
struct Call {
    opened: Duration,
    responses: Vec<(Duration, Vec<u8>)>,
    /// Time and cause of its end, if it ended before the recording.
    ended: Option<(Duration, String)>,
}

/// Observations in their order.
#[derive(Clone)]
struct Observed {
    start: Instant,
    text: Arc<Mutex<String>>,
}

impl Observed {
    fn line(&self, text: &str) {
        let at = self.start.elapsed().as_millis();
        let mut all = self.text.lock().expect("no panic");
        writeln!(all, "{at} {text}").expect("a text");
    }
}

fn feed() -> Feed {
    Feed {
        plane: ControlPlane {
            address: HostPort { host: "istiod".into(), port: Some(15012) },
            roots: Roots::Plaintext,
            token: None,
            san: None,
            headers: Vec::new(),
        },
        kind: ControlPlaneKind::Istio,
        cache: None,
        hold: Duration::from_secs(600),
        pod: Pod {
            name: "eastwest".into(),
            namespace: "istio-system".into(),
            ip: "10.88.1.10".into(),
            service_account: None,
            cluster: "east".into(),
            network: "east".into(),
            gateway: "eastwest".into(),
            istio_version: "1.31.0".into(),
            record: None,
        },
        publisher: Arc::new(Publisher::default()),
        status: Arc::new(Status::new(&["mesh"])),
        metrics: Arc::new(Metrics::new()),
        pending: "mesh",
        connected: Arc::default(),
    }
}

/// Returns the streams of delta ADS.
fn calls(events: &[Event]) -> Vec<Call> {
    let mut calls = BTreeMap::new();
    for Event { at, kind } in events {
        match kind {
            Kind::Open(number, method) if method == METHOD => {
                let call = Call { opened: *at, responses: Vec::new(), ended: None };
                calls.insert(*number, call);
            }
            Kind::Response(number, message) => {
                if let Some(call) = calls.get_mut(number) {
                    call.responses.push((*at, message.clone()));
                }
            }
            Kind::End(number, why) => {
                if let Some(call) = calls.get_mut(number) {
                    call.ended.get_or_insert_with(|| (*at, why.clone()));
                }
            }
            _ => {}
        }
    }
    calls.into_values().collect()
}

/// Returns the last part of a type URL.
fn short(type_url: &str) -> &str {
    type_url.rsplit('.').next().unwrap_or(type_url)
}

/// Describes a request. A response is named by its position in the recording.
fn describe(request: &DeltaDiscoveryRequest, responses: &[String]) -> String {
    let mut text = format!("> {}", short(&request.type_url));
    let answered = responses.iter().position(|of| *of == request.response_nonce);
    match (&request.error_detail, answered) {
        (Some(error), place) => write!(text, " NACK {place:?}: {}", error.message),
        (None, Some(place)) => write!(text, " ACK {place}"),
        (None, None) => write!(text, " first, {:?}", request.initial_resource_versions),
    }
    .expect("a text");
    for (what, names) in [
        ("subscribe", &request.resource_names_subscribe),
        ("unsubscribe", &request.resource_names_unsubscribe),
    ] {
        if !names.is_empty() {
            write!(text, " {what} {names:?}").expect("a text");
        }
    }
    text
}

/// Returns a line for everything in a snapshot that discovery decides.
fn dump(snapshot: &Snapshot) -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    for (name, service) in snapshot.mesh.services.iter() {
        lines.insert(dump_service(name, service));
    }
    for (name, workload) in snapshot.mesh.workloads.iter() {
        lines.insert(dump_workload(name, workload));
    }
    for (host, service) in snapshot.services.iter() {
        for (port, set) in service.ports.iter() {
            let is_exported = snapshot.exports.contains(host, *port);
            let exported = if is_exported { ", exported" } else { "" };
            let endpoints = set.endpoints.iter();
            let endpoints: BTreeSet<_> = endpoints
                .map(|one| {
                    let via = one.remote.as_ref().map(|remote| &remote.network);
                    format!("{} {:?} weight {} {via:?}", one.address, one.protocol, one.weight)
                })
                .collect();
            lines.insert(format!("port {host}:{port}{exported}: {endpoints:?}"));
        }
    }
    for policy in snapshot.policies.iter() {
        let text = format!("{policy:?}").replace("Condition { any: [], none: [] }", "-");
        lines.insert(format!("policy {text}"));
    }
    lines
}

fn dump_service(name: &str, service: &Service) -> String {
    let Service {
        vips,
        ports,
        subject_alt_names,
        waypoints,
        preferences,
        strict,
        allow_unhealthy,
        canonical,
        ..
    } = service;
    format!(
        "service {name}: {vips:?} {ports:?} sans {subject_alt_names:?} waypoints {waypoints:?} \
         prefers {preferences:?} strict {strict} allow_unhealthy {allow_unhealthy} \
         canonical {canonical}"
    )
}

fn dump_workload(name: &str, workload: &Workload) -> String {
    let services = workload.services.iter();
    let services: BTreeMap<_, BTreeMap<_, _>> =
        services.map(|(name, ports)| (name, ports.iter().collect())).collect();
    let template = &workload.template;
    let locality = &template.locality;
    format!(
        "workload {name}: {:?} {:?} healthy {} capacity {} {}/{}/{} in {}, {}/{}/{}, {services:?}, \
         hostname {:?}, gateway {:?}, waypoint {}, policies {:?}",
        workload.addresses,
        template.protocol,
        workload.healthy,
        workload.capacity,
        template.trust_domain,
        template.namespace,
        template.service_account,
        template.network,
        locality.region,
        locality.zone,
        locality.subzone,
        template.hostname,
        workload.network_gateway,
        template.has_waypoint,
        template.policies,
    )
}

/// Plays the streams, one after the other.
async fn play(feed: &Feed, calls: Vec<Call>, nonces: &[String], observed: &Observed) {
    let mut state = feed.start();
    for call in calls {
        sleep_until(observed.start + call.opened).await;
        feed.follow(&mut state);
        let (requests, mut sent) = mpsc::channel(REQUESTS_MAX);
        let (observing, of_requests) = (observed.clone(), nonces.to_vec());
        let observer = tokio::spawn(async move {
            while let Some(request) = sent.recv().await {
                observing.line(&describe(&request, &of_requests));
            }
        });
        for request in state.client.connected() {
            let sent = feed.send(&requests, request).await;
            assert!(sent.is_ok(), "the first requests");
        }
        state.store.connected();
        let responses = messages(call.responses, call.ended, observed.start);
        let ended = feed.apply(&mut state, &requests, responses, &mut true).await;
        let why = ended.err().map_or_else(String::new, |ended| ended.why);
        observed.line(&format!("ended {why}"));
        state.client.disconnected(StreamEnd::Harmless);
        drop(requests);
        observer.await.expect("no panic");
    }
}

/// Returns messages at the recorded times, and the recorded end.
fn messages(
    responses: Vec<(Duration, Vec<u8>)>,
    ended: Option<(Duration, String)>,
    start: Instant,
) -> Messages {
    let (frames, body) = mpsc::channel(1);
    tokio::spawn(async move {
        for (at, message) in responses {
            sleep_until(start + at).await;
            let length = u32::try_from(message.len()).expect("a short message");
            let framed = [&[0], &length.to_be_bytes()[..], &message].concat();
            let sent = frames.send(Ok(Frame::data(Bytes::from(framed)))).await;
            sent.expect("a reader");
        }
        if let Some((at, why)) = ended {
            sleep_until(start + at).await;
            let _ = frames.send(Err(GrpcStatus::unknown(why))).await;
        }
    });
    let body = StreamBody::new(ReceiverStream::new(body));
    Messages::new(Body::new(body), MESSAGE_BYTES_MAX)
}

/// Notes the difference of the snapshot to that of the mark before.
async fn mark(feed: &Feed, events: &[Event], observed: &Observed) {
    let reader = feed.publisher.reader();
    let mut before = BTreeSet::new();
    for event in events {
        let Kind::Mark(text) = &event.kind else {
            continue;
        };
        sleep_until(observed.start + event.at).await;
        let now = dump(&reader.snapshot());
        let mut change = format!("= {text}");
        for (sign, one, other) in [('-', &before, &now), ('+', &now, &before)] {
            for line in one.difference(other) {
                write!(change, "\n  {sign} {line}").expect("a text");
            }
        }
        observed.line(&change);
        before = now;
    }
}

/// Returns a time at which a recorded certificate is valid. It begins two minutes before it is
/// issued, so that its issuer may be younger than that.
fn time_of(leaf: &str) -> SystemTime {
    let leaf = CertificateDer::from_pem_slice(leaf.as_bytes()).expect("a certificate");
    let (_, leaf) = x509_parser::parse_x509_certificate(&leaf).expect("a certificate");
    let start = u64::try_from(leaf.validity().not_before.timestamp()).expect("after 1970");
    SystemTime::UNIX_EPOCH + Duration::from_secs(start + 10 * 60)
}

/// Describes the calls of the certificate authority. A recording has no private key, so the key is
/// the first thing about an answer that is wrong.
fn describe_issuance(events: &[Event]) -> String {
    let opened = events.iter().filter_map(|event| match &event.kind {
        Kind::Open(number, method) if method != METHOD => Some((*number, method)),
        _ => None,
    });
    let issuances: BTreeMap<_, _> = opened.collect();
    let mut text = String::new();
    for Event { kind, .. } in events {
        let line = match kind {
            Kind::Request(call, message) if issuances.contains_key(call) => {
                let request = IstioCertificateRequest::decode(&**message).expect("a request");
                format!("> {} for {} s", issuances[call], request.validity_duration)
            }
            Kind::Response(call, message) if issuances.contains_key(call) => {
                let answer = IstioCertificateResponse::decode(&**message).expect("an answer");
                let chain = answer.cert_chain;
                let parts = chain.iter();
                let counts = parts.map(|pem| pem.matches("BEGIN CERTIFICATE-").count());
                let counts: Vec<_> = counts.collect();
                let key = rcgen::KeyPair::generate().expect("a key").serialize_der();
                let key = PrivateKeyDer::Pkcs8(key.into());
                let checked = check_answer(&chain, key, "", time_of(&chain[0]));
                let why = checked.err().map(|error| error.to_string());
                format!("< certificates of each part {counts:?}, {why:?}")
            }
            _ => continue,
        };
        writeln!(text, "{line}").expect("a text");
    }
    text
}

#[test]
fn a_message_of_the_control_plane_begins_no_line_of_the_log() {
    let status = GrpcStatus::unavailable("away\n2026-11-28 INFO access: connection complete");
    let why = Ended::from(status).why;
    assert!(why.ends_with("away\\n2026-11-28 INFO access: connection complete"), "{why}");
}

#[tokio::test(start_paused = true)]
async fn a_recorded_istiod_leads_to_the_expected_snapshots_and_answers() {
    let mut differ = Vec::new();
    let all = recordings();
    assert!(!all.is_empty(), "no recordings");
    for (name, path) in all {
        let events = read(&path);
        let feed = feed();
        let observed = Observed { start: Instant::now(), text: Arc::default() };
        let calls = calls(&events);
        let sent = calls.iter().flat_map(|call| &call.responses);
        let sent = sent.map(|(_, message)| {
            let response = DeltaDiscoveryResponse::decode(&**message).expect("a response");
            response.nonce
        });
        let nonces: Vec<_> = sent.collect();
        let played = play(&feed, calls, &nonces, &observed);
        tokio::join!(played, mark(&feed, &events, &observed));
        let observed = observed.text.lock().expect("no panic").clone();
        let observed = observed + &describe_issuance(&events);
        // Every response has one answer.
        let answers = observed.matches(" ACK ").count();
        assert_eq!(answers, nonces.len(), "{name}: {observed}");
        let expected = path.with_extension("expected");
        if std::env::var_os("STRAIT_UPDATE").is_some() {
            fs::write(&expected, &observed).expect("a file");
        }
        let expected = fs::read_to_string(&expected).unwrap_or_default();
        let mut lines = observed.lines().zip(expected.lines().chain([""; 1]));
        if observed != expected {
            let first = lines.find(|(one, other)| one != other);
            differ.push(format!("{name}: {first:?}"));
        }
    }
    assert!(
        differ.is_empty(),
        "the first lines that differ, observed and expected: {differ:#?}; if the new ones are \
         right, type: STRAIT_UPDATE=1 cargo test --locked --lib a_recorded_istiod"
    );
}

fn service(name: &str, port: u32) -> Resource {
    let hostname = format!("{name}.app");
    let ports = vec![proto::Port { service_port: port, target_port: port, app_protocol: 0 }];
    let from =
        proto::Service { namespace: "app".into(), hostname, ports, ..proto::Service::default() };
    samples::service(from)
}

fn export(name: &str) -> Resource {
    resource(CLUSTER, &format!("inbound-vip|80|tcp|{name}.app"), "", &())
}

/// Returns a response after some seconds.
fn answer(seconds: u64, type_url: &str, resources: Vec<Resource>) -> (Duration, Vec<u8>) {
    let resource = |one: Resource| crate::grpc::discovery::Resource {
        name: one.name.to_string(),
        version: one.version.to_string(),
        resource: Some(prost_types::Any {
            type_url: one.body_type.to_string(),
            value: one.body.unwrap_or_default().to_vec(),
        }),
        ..crate::grpc::discovery::Resource::default()
    };
    let response = DeltaDiscoveryResponse {
        type_url: type_url.into(),
        nonce: "n".into(),
        resources: resources.into_iter().map(resource).collect(),
        ..DeltaDiscoveryResponse::default()
    };
    (Duration::from_secs(seconds), response.encode_to_vec())
}

/// Plays a stream that stays open for an hour, unless the gateway ends it. Returns the time that it
/// took and the reason of its end.
async fn play_one(
    feed: &Feed,
    state: &mut State,
    responses: Vec<(Duration, Vec<u8>)>,
) -> (Duration, String) {
    let (requests, mut sent) = mpsc::channel(REQUESTS_MAX);
    tokio::spawn(async move { while sent.recv().await.is_some() {} });
    let start = Instant::now();
    state.client.connected();
    state.store.connected();
    let hour = Duration::from_secs(3600);
    let responses = messages(responses, Some((hour, "age".to_owned())), start);
    let ended = feed.apply(state, &requests, responses, &mut false).await;
    state.client.disconnected(StreamEnd::Harmless);
    (start.elapsed(), ended.err().map_or_else(String::new, |ended| ended.why))
}

#[tokio::test(start_paused = true)]
async fn a_service_that_is_new_on_a_stream_waits_for_the_policies_and_these_have_a_minute() {
    let feed = feed();
    let mut state = feed.start();
    let services = || {
        let snapshot = feed.publisher.reader().snapshot();
        let names = snapshot.mesh.services.iter().map(|(name, _)| name.to_string());
        names.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(" ")
    };
    let is_exported = |host: &str| feed.publisher.reader().snapshot().exports.contains(host, 80);
    let first = vec![
        answer(0, ADDRESS, vec![service("old", 80), service("own", 80)]),
        answer(0, AUTHORIZATION, vec![policy(0, 80, "1")]),
        answer(0, CLUSTER, vec![export("old")]),
    ];
    assert!(play_one(&feed, &mut state, first).await.1.contains("age"));
    assert_eq!((&*services(), is_exported("old.app")), ("app/old.app app/own.app", true));
    // The changes of known services apply, and do not extend the minute.
    let silent = vec![
        answer(0, ADDRESS, vec![service("new", 80)]),
        answer(20, CLUSTER, vec![export("old"), export("own"), export("new")]),
        answer(70, ADDRESS, vec![service("old", 81)]),
    ];
    for _ in 0..2 {
        let (took, why) = play_one(&feed, &mut state, silent.clone()).await;
        assert_eq!((took.as_secs(), &*why), (80, "no first response within 60s: authorizations"));
        let lines = dump(&feed.publisher.reader().snapshot());
        assert!(lines.iter().any(|line| line.contains("old.app: [] {81")), "{lines:#?}");
        assert_eq!((&*services(), is_exported("own.app")), ("app/old.app app/own.app", false));
    }
    let all = [ADDRESS, AUTHORIZATION, CLUSTER].map(|type_url| answer(0, type_url, Vec::new()));
    assert!(play_one(&feed, &mut state, all.into()).await.1.contains("age"));
    assert_eq!(&*services(), "app/new.app app/old.app app/own.app");
    assert!(is_exported("own.app") && is_exported("new.app"));
}

#[tokio::test(start_paused = true)]
async fn a_damaged_cache_file_is_replaced_after_a_stream_that_claims_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("cache");
    let feed = Feed { cache: Some(file.clone()), ..feed() };
    let (requests, _sent) = mpsc::channel(REQUESTS_MAX);
    let workloads =
        |names: &[&str]| names.iter().map(|name| workload(name, "1")).collect::<Vec<_>>();
    let stream = async |state: &mut State, names: &[&str], later: &[(Duration, Vec<u8>)]| {
        let first = state.client.connected();
        state.store.connected();
        let whole: [(_, &[_]); 3] = [(ADDRESS, names), (AUTHORIZATION, &[]), (CLUSTER, &[])];
        let whole = whole.map(|(type_url, names)| answer(0, type_url, workloads(names)));
        let sent = whole.iter().chain(later).cloned();
        let end = Some((Duration::from_secs(60), "the end".to_owned()));
        let responses = messages(sent.collect(), end, Instant::now());
        let ended = feed.apply(state, &requests, responses, &mut true).await;
        state.client.disconnected(StreamEnd::Clean);
        (first, ended.expect_err("an end"))
    };
    let mut state = feed.start();
    let damage = async {
        sleep(Duration::from_secs(10)).await;
        let mut bytes = fs::read(&file).expect("a file");
        bytes[50] ^= 1;
        fs::write(&file, bytes).expect("a write in place");
    };
    let later = [answer(20, ADDRESS, workloads(&["c"]))];
    let ((_, ended), ()) = tokio::join!(stream(&mut state, &["a", "b"], &later), damage);
    assert_eq!(
        (ended.end, &*ended.why),
        (StreamEnd::GoAway, "the content of the cache file is lost")
    );
    let (first, _) = stream(&mut state, &["a", "b", "c"], &[]).await;
    assert!(first.iter().all(|one| one.initial_versions.is_empty()), "{first:?}");
    let (mut client, store) = feed.kind.new_client_and_store();
    let cache =
        Cache { file, cluster: feed.pod.cluster.clone(), network: feed.pod.network.clone() };
    Recorder::restore(cache, store, &mut client);
    assert_eq!(client.held(ADDRESS), 3);
}
