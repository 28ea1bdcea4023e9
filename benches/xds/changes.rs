//! Time from a message to the snapshot. It uses the stream's code in this process, because another
//! process could not report when a snapshot is published.

use std::sync::Arc;
use std::time::{Duration, Instant};

use strait::config::pod::Pod;
use strait::config::{ControlPlane, HostPort, Roots};
use strait::snapshot::Publisher;
use strait::status::Status;
use strait::telemetry::Metrics;
use strait::xds::stream::{self, ControlPlaneKind, Feed};

use crate::gateway::Control;
use crate::mesh::Mesh;
use crate::support::istiod::{NAME, TOKEN};
use crate::support::{Net, identities};

/// Interval of single changes, longer than the minimum interval of snapshots.
const APART: Duration = Duration::from_millis(8);
/// Poll interval of the snapshot, and so the largest error of the measurement.
const LOOK: Duration = Duration::from_micros(20);

/// Returns the time from the hand-over of a message to the control plane's gRPC until the snapshot,
/// for `count` changes of one workload.
pub fn run(mesh: Mesh, count: usize) -> Vec<Duration> {
    let net = Net::new();
    let control = Control::start(net, mesh);
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("a file");
        path
    };
    let publisher = Arc::new(Publisher::default());
    let status = Arc::new(Status::new(&["discovery"]));
    let istio = Feed {
        connected: Arc::default(),
        plane: ControlPlane {
            address: HostPort {
                host: control.address.ip().to_string(),
                port: Some(control.address.port()),
            },
            roots: Roots::File(write("root.crt", &identities().root)),
            token: Some(write("token", TOKEN)),
            san: Some(NAME.to_owned()),
            headers: Default::default(),
        },
        kind: ControlPlaneKind::Istio,
        cache: None,
        hold: Duration::ZERO,
        pod: Pod {
            name: "strait".into(),
            namespace: "istio-system".into(),
            ip: net.ip(1).to_string(),
            service_account: Some("default".into()),
            cluster: "east".into(),
            network: "east".into(),
            gateway: String::new(),
            istio_version: String::new(),
            record: None,
        },
        publisher: Arc::clone(&publisher),
        status: Arc::clone(&status),
        metrics: Arc::new(Metrics::new()),
        pending: "discovery",
    };
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(stream::run(istio));
    });
    let reader = publisher.reader();
    wait(|| status.list_pending().is_empty());
    let change = |_| {
        std::thread::park_timeout(APART);
        let before = reader.load().version;
        let began = Instant::now();
        control.changes.make();
        wait(|| reader.load().version != before);
        began.elapsed()
    };
    (0..count).map(change).collect()
}

fn wait(mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(60), "no snapshot");
        // Parks rather than spins: the stream and the control plane need the two cores.
        std::thread::park_timeout(LOOK);
    }
}
