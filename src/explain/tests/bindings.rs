//! Explanation of connections to bindings, compared with picks and with real connections.

use std::net::IpAddr;

use super::mesh::one_in;
use super::*;
use crate::config;
use crate::datapath::accept::{AcceptedConnection, ConnectionResources};
use crate::datapath::forward::binding;
use crate::datapath::limits::load::LoadGuard;
use crate::datapath::tests::{data_path_of, descriptor, tcp_pair};
use crate::lifecycle::DrainScope;
use crate::limits::{Held, Source};
use crate::snapshot::tests::hosts;
use crate::snapshot::{NO_LINK_FACTORS, Network, NetworkTable, Publisher};

const WORLDS: u32 = 300;
const HOST: &str = "echo.app.svc.cluster.local";
const NETWORKS: [(&str, &str); 3] = [("west-1", "west"), ("west-2", "west"), ("north", "north")];
const GATEWAYS: [&[&str]; 4] = [
    &[],
    &["spiffe://west.local/ns/edge/sa/gateway"],
    &["spiffe://gone.local/ns/edge/sa/gateway", "spiffe://north.local/ns/edge/sa/gateway"],
    &["spiffe://gone.local/ns/edge/sa/gateway"],
];

/// Random networks with a binding, a client of it, and its open connections.
struct Generated {
    publisher: Publisher,
    listener: Arc<Listener>,
    address: IpAddr,
    /// False if all tunnels together hold too much memory.
    has_room: bool,
    _open: (Vec<Held>, Vec<InFlight>),
}

/// Returns gateways of a network. Loopback addresses are never dialled.
fn network(rng: &mut Rng, cluster: &str, first: u8) -> Network {
    let gateways = (first..first + rng.u8(..4)).map(|last| {
        let net = if one_in(rng, 3) { "127.0.0" } else { "192.0.2" };
        hosts(&[&format!("{net}.{last}:15008")]).remove(0)
    });
    let gateways = gateways.collect();
    let identities = rng.choice(&GATEWAYS).expect("identities").iter();
    Network {
        cluster: Some(cluster.into()),
        gateways,
        identities: identities.map(|&uri| uri.into()).collect(),
        ..Network::default()
    }
}

fn mesh(rng: &mut Rng) -> Mesh {
    let service = Service {
        namespace: "app".into(),
        hostname: HOST.into(),
        ports: [(80, 8080)].into(),
        ..Service::default()
    };
    let instances = (0..rng.u8(..12)).map(|at| Workload {
        uid: format!("uid-{at}").into(),
        addresses: [[10, 0, 0, at].into()].into(),
        healthy: !one_in(rng, 4),
        capacity: rng.u32(1..4),
        services: [(format!("app/{HOST}").into(), [(80, 8080)].into())].into(),
        template: Template {
            network: rng.choice(&NETWORKS).expect("a network").0.into(),
            protocol: Protocol::Hbone,
            ..Template::default()
        }
        .into(),
        ..Workload::default()
    });
    let instances: Vec<_> = instances.collect();
    let has_service = !one_in(rng, 4);
    Mesh::new(has_service.then_some(service), instances)
}

fn binding(rng: &mut Rng) -> config::Binding {
    let clients: &[&str] =
        if rng.bool() { &["127.0.0.0/8"] } else { &["10.0.0.0/8", "127.0.0.0/8"] };
    let workloads = if one_in(rng, 4) {
        vec!["spiffe://gone.local/ns/app/sa/echo".to_owned()]
    } else {
        Vec::new()
    };
    config::Binding {
        cluster: match rng.u8(..3) {
            0 => vec!["north".to_owned()],
            1 => vec!["west".to_owned()],
            _ => vec!["north".to_owned(), "west".to_owned()],
        },
        service: config::HostPort::parse(&format!("{HOST}:80")).expect("a service"),
        listen: ([127, 0, 0, 1], 8080).into(),
        clients: clients.iter().map(|net| net.parse().expect("a net")).collect(),
        inner: if rng.bool() { config::Inner::Hbone } else { config::Inner::Tcp },
        workloads: config::ExpectedWorkloads { identities: workloads, namespaces: Vec::new() },
        names: vec!["echo.global".to_owned()],
        connections: rng.u32(1..4),
        connections_per_client: rng.u32(1..3),
        idle: std::time::Duration::from_secs(1),
        objects: Vec::new(),
        line: config::Line::default(),
        to: Vec::new(),
    }
}

impl Generated {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let networks = NETWORKS.iter().zip([1, 11, 21]);
        let networks = networks.map(|((name, cluster), first)| {
            let rule = network(&mut rng, cluster, first);
            (Arc::from(*name), rule)
        });
        let networks = NetworkTable::from_iter(networks.collect::<Vec<_>>());
        let publisher = Publisher::default();
        publisher.update(Change {
            mesh: Some((mesh(&mut rng), "east".into())),
            networks: Some(networks.with_bindings(true)),
            trust: Some(TrustSet::new([
                ("east.local", "east"),
                ("west.local", "west"),
                ("north.local", "north"),
            ])),
            ..Change::default()
        });
        let listener = config::Listener::from(&binding(&mut rng));
        let listener = Arc::new(Listener::new(&listener, DrainScope::default()));
        let known = listener.binding().expect("a binding");
        let address =
            *rng.choice(&[[127, 0, 0, 1], [127, 0, 0, 1], [10, 0, 0, 1]]).expect("an address");
        let others = [[127, 0, 0, 1], [127, 0, 0, 2]].into_iter().cycle();
        let others = others.take(rng.usize(..4));
        let open = others.flat_map(|other| listener.clients.open(other.into(), &known.config));
        let open = open.collect();
        let mut tunnels = Vec::new();
        for endpoint in &known.endpoints.load(&publisher.reader().snapshot()).endpoints {
            tunnels.extend((0..rng.u8(..4)).map(|_| InFlight::new(&endpoint.state)));
            mesh::apply_load(&mut rng, endpoint, Instant::now());
            if one_in(&mut rng, 6) {
                // The ejection lasts minutes.
                (0..8).for_each(|_| {
                    endpoint.state.eject(Instant::now());
                });
            }
        }
        Self {
            publisher,
            listener,
            address: address.into(),
            has_room: !one_in(&mut rng, 12),
            _open: (open, tunnels),
        }
    }

    fn explained(&self, question: &Question) -> Result<Answer, String> {
        let world = ExplainState {
            snapshot: &self.publisher.reader().snapshot(),
            places: &ConfigPositions::default(),
            deny: &DenyList::new(Vec::new(), Vec::new()),
            listeners: &[],
            bindings: &[Arc::clone(&self.listener)],
            links: &[],
            held: &[],
            has_room: self.has_room,
            now: Instant::now(),
        };
        run(&world, question)
    }

    /// Returns the p-value of picks.
    fn fit(&self, answer: &Answer) -> f64 {
        let known = self.listener.binding().expect("a binding");
        let set = known.endpoints.load(&self.publisher.reader().snapshot());
        let mut counts: HashMap<String, u32> = HashMap::new();
        for _ in 0..PICKS {
            let endpoint = choose(&set, &Tried::default(), NO_LINK_FACTORS).expect("an endpoint");
            *counts.entry(endpoint.uid().to_string()).or_default() += 1;
        }
        let bins = answer.endpoints.iter().map(|row| {
            let count = counts.remove(&*row.workload).unwrap_or(0);
            (row.probability * f64::from(PICKS), f64::from(count))
        });
        let p = p_value(&bins.collect::<Vec<_>>());
        assert!(counts.is_empty(), "picks that are not reported: {counts:?}");
        p
    }

    /// Serves a real connection, and returns the metrics after its end.
    async fn connect(&self) -> String {
        let gateway = data_path_of(self.publisher.reader(), DenyList::default());
        let held = gateway.budget.account(&Source::prefix([192, 0, 2, 1].into()));
        if !self.has_room {
            gateway.budget.set_limit(0);
            held.charge(1 << 20);
        }
        let (_client, stream) = tcp_pair().await;
        let accepted = AcceptedConnection {
            stream: stream.into_std().expect("a socket"),
            address: (self.address, 1).into(),
            handshake: gateway
                .admission
                .acquire_handshake(&Source::prefix(self.address))
                .expect("a slot"),
            resources: ConnectionResources {
                load: LoadGuard::default(),
                descriptor: descriptor(&gateway),
            },
            listener: Arc::clone(&self.listener),
            balanced: None,
            since: std::time::Instant::now(),
        };
        binding::run(Arc::clone(&gateway), accepted).await;
        gateway.metrics.encode()
    }
}

/// Reasons for which a connection ends before anything is dialled.
const LOCAL: [&str; 4] = ["binding_full", "buffers_full", "no_endpoint", "dial_denied"];

#[tokio::test]
async fn in_300_meshes_shares_of_bindings_fit_and_predicted_rejections_happen() {
    let mut counts: HashMap<String, u32> = HashMap::new();
    let (mut fitted, mut loaded) = (0, 0);
    for seed in 200_000.. {
        fastrand::seed(seed);
        let of = Generated::new(seed);
        let question = Question {
            binding: Some("echo.global".to_owned()),
            address: Some(of.address),
            all: true,
            ..Question::default()
        };
        let answer = of.explained(&question).expect("a good question");
        let outcome = &answer.outcome;
        let reason = outcome.reason.clone().unwrap_or_else(|| "opened".to_owned());
        if !answer.endpoints.is_empty() {
            let p = of.fit(&answer);
            assert!(p > P_MIN, "seed {seed}: p is {p}");
            fitted += 1;
            loaded += usize::from(is_loaded(&answer));
        }
        let is_admitted = of.listener.rules().admits(of.address);
        assert_eq!(reason != "not_in_sources", is_admitted, "seed {seed}");
        // No other address of the mesh answers.
        let is_denied = |row: &EndpointRow| {
            let refused = row.refused.as_deref();
            refused.is_some_and(|why| why.ends_with("see `dial.allow`"))
        };
        if LOCAL.contains(&&*reason) && answer.endpoints.iter().all(is_denied) {
            let metrics = of.connect().await;
            let line = format!("strait_tunnels_total{{reason=\"{reason}\",source_cluster=\"");
            let mut lines = metrics.lines().filter(|found| found.starts_with(&line));
            assert!(lines.any(|found| found.ends_with(" 1")), "seed {seed}: {reason}");
        }
        *counts.entry(reason).or_default() += 1;
        if fitted == WORLDS {
            break;
        }
    }
    for reason in LOCAL.iter().chain(&["opened", "gateway_untrusted", "workload_untrusted"]) {
        let count = counts.get(*reason).copied().unwrap_or(0);
        assert!(count >= 5, "{reason}: {counts:?}");
    }
    assert!(loaded > 100, "{loaded} have a gateway with a load");
}

#[tokio::test]
async fn clients_with_an_identity_are_judged_by_to_of_the_binding() {
    let mut of = Generated::new(1);
    let config = config::Binding {
        clients: vec!["0.0.0.0/0".parse().expect("a net")],
        to: vec![config::Audience {
            cluster: Some("west".to_owned()),
            ..config::Audience::default()
        }],
        ..binding(&mut Rng::with_seed(1))
    };
    let listener = Listener::new(&config::Listener::from(&config), DrainScope::default());
    of.listener = Arc::new(listener);
    let ask = |from: Option<&str>| {
        let question = Question {
            binding: Some("echo.global".to_owned()),
            from: from.map(|domain| format!("spiffe://{domain}/ns/shop/sa/checkout")),
            ..Question::default()
        };
        let answer = of.explained(&question)?;
        Ok::<_, String>(answer.outcome.reason.unwrap_or_default())
    };
    assert_eq!(ask(Some("north.local")).as_deref(), Ok("not_for_peer"));
    assert_ne!(ask(Some("west.local")).as_deref(), Ok("not_for_peer"));
    assert!(ask(Some("gone.local")).is_ok_and(|reason| reason.contains("trust")));
    assert!(ask(None).is_err_and(|why| why.contains("--from")));
    // As for real connections, the handshake precedes the count.
    let binding = of.listener.binding().expect("a binding");
    let more = || of.listener.clients.open([0; 4].into(), &binding.config).ok();
    let _held: Vec<_> = std::iter::from_fn(more).collect();
    assert_eq!(ask(Some("west.local")).as_deref(), Ok("binding_full"));
    assert!(ask(Some("gone.local")).is_ok_and(|reason| reason.contains("trust")));
}
