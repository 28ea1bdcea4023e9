//! One bench for each step of a tunnel that does not wait.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::{BatchSize, BenchmarkId, Criterion};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use strait::datapath::balance;
use strait::datapath::client_hello::ClientHelloReader;
use strait::datapath::dial::DenyList;
use strait::reason::Reason;
use strait::snapshot::builder::{Change, build};
use strait::snapshot::{Caller, ExposureTable, MatchedBy, NO_LINK_FACTORS, Requested, ServicePort};
use strait::telemetry::{Destination, DestinationService, Metrics, Proximity, Record, Source};
use strait::tools::samples;
use strait::wire::Authority;
use tokio::time::Instant;

use crate::mesh;

pub fn run(criterion: &mut Criterion) {
    authority(criterion);
    hello(criterion);
    route_and_policy(criterion);
    pick(criterion);
    deny(criterion);
    record(criterion);
    update(criterion);
}

fn authority(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("authority");
    for (name, text) in [
        ("name", "service-7.app.svc.cluster.local:80"),
        ("ipv4", "10.0.0.1:15008"),
        ("ipv6", "[2001:db8::1]:15008"),
        ("refused", "user@service-7.app:80"),
    ] {
        group.bench_function(name, |b| b.iter(|| Authority::parse(black_box(text))));
    }
    group.finish();
}

/// Reading of a ClientHello with a post-quantum share, and of its server name and protocols.
fn hello(criterion: &mut Criterion) {
    let mut config = ClientConfig::builder()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    config.alpn_protocols = vec![b"istio".to_vec()];
    let name = "outbound_.80_._.service-7.app.svc.cluster.local";
    let name = name.try_into().expect("a name");
    let mut client = ClientConnection::new(Arc::new(config), name).expect("a client");
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).expect("a hello");
    criterion.bench_function("hello", |b| {
        b.iter(|| ClientHelloReader::default().push(black_box(&bytes)));
    });
}

const WEST: Caller<'_> = Caller {
    trust_domain: "west.local",
    namespace: "shop",
    service_account: "checkout",
    ..Caller::UNKNOWN
};

/// Routing and policy in a mesh of 10,000 services.
fn route_and_policy(criterion: &mut Criterion) {
    const SERVICES: usize = 10_000;
    let snapshot = mesh::snapshot(mesh::mesh(SERVICES, 1));
    let parse = |text: &str| Authority::parse(text).expect("an authority");
    let name = parse(&format!("{}:80", mesh::hostname(SERVICES / 2)));
    let requested = [
        ("name", name.clone()),
        ("alias", parse(&format!("service-{}.global:80", SERVICES / 2))),
        (
            "family",
            parse(&mesh::hostname(SERVICES / 2).replace("cluster.local:", "clusterset.local:")),
        ),
        ("vip", parse("240.0.0.9:80")),
    ];
    let mut group = criterion.benchmark_group("route");
    for (kind, requested) in &requested {
        assert!(snapshot.find(WEST, requested).is_some(), "{kind}");
        group.bench_function(*kind, |b| {
            b.iter(|| black_box(&snapshot).find(black_box(WEST), black_box(requested)));
        });
    }
    group.finish();
    let north = Caller { trust_domain: "north.local", namespace: "other", ..WEST };
    let host = mesh::hostname(SERVICES / 2);
    let mut group = criterion.benchmark_group("policy");
    for (kind, caller) in [("allowed", WEST), ("refused", north)] {
        group.bench_function(kind, |b| {
            b.iter(|| {
                let to = ServicePort { host: &host, port: 80 };
                let (authority, matched_by) = (black_box(&name), &MatchedBy::Service);
                let of = Requested { authority, to, matched_by };
                snapshot.evaluate_exposure(black_box(caller), of)
            });
        });
    }
    group.finish();
}

fn pick(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pick");
    let tried = balance::Tried::default();
    for count in [10, 1_000, 100_000] {
        let set = mesh::endpoints(count);
        group.bench_function(BenchmarkId::from_parameter(count), |b| {
            b.iter(|| balance::choose(black_box(&set), &tried, NO_LINK_FACTORS).is_some());
        });
    }
    group.finish();
}

/// Check of an endpoint that has the port of our own listener, which is bound to any address.
fn deny(criterion: &mut Criterion) {
    let own = vec!["[::]:15008".parse().expect("an address")];
    let deny = DenyList::new(Vec::new(), own);
    let endpoint = "192.0.2.7:15008".parse().expect("an address");
    criterion.bench_function("deny", |b| b.iter(|| deny.denies(black_box(endpoint))));
}

/// Counting of a tunnel, of an old connection or a new one; the log is off.
/// Returns a function that records a tunnel of a source, with a `traceparent` of its peer.
pub fn recorder(metrics: Arc<Metrics>) -> impl Fn(Arc<Source>, Option<&[u8]>) {
    let set = mesh::endpoints(1);
    let service = DestinationService {
        hostname: mesh::hostname(0).into(),
        name: "service-0".into(),
        namespace: "app".into(),
    };
    move |source: Arc<Source>, traceparent: Option<&[u8]>| {
        let endpoint = &set.endpoints[0];
        let mut record = Record::new(&metrics, &source, "service-0.app.svc.cluster.local:80");
        record.begin_trace(traceparent, None);
        record.set_service(service.clone(), None);
        let destination =
            Destination { address: endpoint.address, pod: Arc::clone(&endpoint.definition) as _ };
        record.begin_dial(Instant::now());
        record.end_dial(Instant::now(), Duration::ZERO);
        record.set_open(destination, endpoint.labels(), None, Proximity::Zone);
        record.add_sent(1);
        record.finish(Reason::Completed);
    }
}

fn record(criterion: &mut Criterion) {
    let tunnel = recorder(Arc::new(Metrics::new()));
    let mut group = criterion.benchmark_group("record");
    let source = Arc::new(samples::source());
    group.bench_function("same connection", |b| b.iter(|| tunnel(Arc::clone(&source), None)));
    group.bench_function("new connection", |b| {
        let new = || Arc::new(samples::source());
        b.iter_batched(new, |source| tunnel(source, None), BatchSize::SmallInput);
    });
    group.finish();
}

/// Next snapshot, from the previous one and a change.
fn update(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("update");
    group.sample_size(10).measurement_time(Duration::from_secs(3));
    for (name, services, each) in [("mesh 1000", 100, 10), ("mesh 100000", 2_000, 50)] {
        let mesh = mesh::mesh(services, each);
        let old = mesh::snapshot(mesh.clone());
        let change =
            || Change { mesh: Some((mesh.clone(), mesh::NETWORK.into())), ..Change::default() };
        group.bench_function(name, |b| {
            b.iter_batched(change, |change| build(&old, change), BatchSize::PerIteration);
        });
    }
    let old = mesh::snapshot(mesh::mesh(2_000, 50));
    let change = || {
        let mut exposure = ExposureTable::new(false);
        exposure.add(mesh::to_west(&mesh::hostname(0)));
        Change { exposure: Some(exposure), ..Change::default() }
    };
    group.bench_function("exposure of 100000", |b| {
        b.iter_batched(change, |change| build(&old, change), BatchSize::PerIteration);
    });
    group.finish();
}
