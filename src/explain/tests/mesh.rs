//! Seeded random meshes with everything that influences the route of a tunnel.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::{Answer, Question};
use super::*;
use crate::config::{self, Distribution, ExposedService, RegionWeight};
use crate::datapath::http2::tunnel::Target;
use crate::datapath::identity::Peer;
use crate::datapath::tests::peer_of;
use crate::snapshot::builder::build;
use crate::snapshot::mesh::{
    Assignment, GatewayAddress, Locality, LocalityWeight, Place, PodLabels, Scope, Waypoint,
};
use crate::snapshot::tests::{alias, entry, hosts};
use crate::snapshot::traffic::{Drained, Override, Position, Traffic, TrafficRule};
use crate::snapshot::{
    Alias, Audience, ExposureTable, FACTOR_ONE, LazySet, LinkFactors, NameTable, Snapshot, Subset,
    SubsetPart,
};
use crate::status::ReducedLink;
use crate::wire::label::CLUSTER;
use crate::wire::{Authority, HOPS_MAX, RegionPattern, ServiceLoad};

const ECHO: &str = "echo.app.svc.cluster.local";
const TWIN: &str = "twin.app.svc.cluster.local";
const WAYPOINTS: [&str; 2] = ["one.edge.svc.cluster.local", "two.edge.svc.cluster.local"];
const WORKLOADS_MAX: u8 = 24;
/// Peers: a workload, and a gateway of another network.
const PEERS: [[&str; 3]; 2] =
    [["west.local", "shop", "checkout"], ["west.local", "edge", "gateway"]];
const PREFERENCES: [&[Scope]; 6] = [
    &[],
    &[Scope::Network, Scope::Region, Scope::Zone],
    &[Scope::Network, Scope::Region],
    &[Scope::Network],
    &[Scope::Cluster, Scope::Node],
    &[Scope::Region, Scope::Zone, Scope::Subzone],
];
const DISTRIBUTIONS: [Distribution; 4] =
    [Distribution::Any, Distribution::Close, Distribution::Region, Distribution::Network];

/// Random mesh with a question about it, and the open tunnels of the mesh.
pub(super) struct Generated {
    pub(super) snapshot: Snapshot,
    pub(super) question: Question,
    /// Limit of transit of the listener.
    pub(super) transit: Transit,
    /// Links whose budget is exceeded.
    pub(super) links: Vec<ReducedLink>,
    peer: [&'static str; 3],
    _tunnels: Vec<InFlight>,
}

impl Generated {
    pub(super) fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let of_waypoints = rng.u8(..4) == 0;
        let services = [
            service(&mut rng, ECHO, of_waypoints),
            service(&mut rng, TWIN, false),
            service(&mut rng, WAYPOINTS[0], false),
            service(&mut rng, WAYPOINTS[1], false),
        ];
        let count = rng.u8(1..WORKLOADS_MAX);
        let mut workloads: Vec<_> = (1..=count).map(|at| workload(&mut rng, at)).collect();
        let gateways = rng.u8(..4);
        workloads.extend((1..=gateways).map(|at| gateway(&mut rng, at)));
        let locality = locality(&mut rng);
        let change = Change {
            mesh: Some((Mesh::new(services, workloads), "east".into())),
            trust: Some(
                TrustSet::new([("west.local", "west"), ("east.local", "east")])
                    .with_gateways([&*uri(PEERS[1])]),
            ),
            exposure: Some(exposure(&mut rng)),
            names: Some(names(&mut rng)),
            position: Some(Position { cluster: "east".into(), locality, ..Position::default() }),
            traffic: Some(traffic(&mut rng)),
            overrides: (rng.u8(..8) == 0)
                .then(|| Override::Drain(pattern(&mut rng).into(), Drained::now(false))),
            ..Change::default()
        };
        let snapshot = build(&Snapshot::default(), change);
        let tunnels = apply_history(&mut rng, &snapshot);
        let peer = PEERS[usize::from(one_in(&mut rng, 4))];
        Self {
            // Half of the listeners do not limit transit.
            transit: Transit::ALL[2 - rng.usize(..4) % 3],
            links: links(&mut rng),
            peer,
            question: Question {
                from: Some(uri(peer)),
                to: Some(target(&mut rng, count)),
                via: one_in(&mut rng, 4).then(|| via(&mut rng)),
                all: true,
                ..Question::default()
            },
            snapshot,
            _tunnels: tunnels,
        }
    }

    pub(super) fn target(&self) -> Target {
        let to = self.question.to.as_deref().expect("a target");
        Target {
            authority: Authority::parse(to).expect("an authority"),
            origin: self.question.origin().expect("an origin"),
            forwarded: self.question.forwarded().expect("gateways").map(Box::new),
        }
    }

    pub(super) fn explained(&self) -> Answer {
        let rules = (self.transit, &*self.links);
        explained(&self.snapshot, &self.question, rules, Instant::now())
    }

    pub(super) fn link_factors(&self) -> LinkFactors {
        LinkFactors::of_peer(&self.links, &self.peer().source.counted_cluster)
    }

    pub(super) fn peer(&self) -> Peer {
        peer_of(&self.snapshot, &uri(self.peer), self.transit)
    }
}

fn uri([domain, namespace, account]: [&str; 3]) -> String {
    format!("spiffe://{domain}/ns/{namespace}/sa/{account}")
}

pub(super) fn one_in(rng: &mut Rng, of: u8) -> bool {
    rng.u8(..of) == 0
}

fn target(rng: &mut Rng, count: u8) -> String {
    match rng.u8(..14) {
        0 => "echo.app.global:80".to_owned(),
        1 => "exposed.example:80".to_owned(),
        2 => "plain.example:80".to_owned(),
        3 => "both.example:80".to_owned(),
        4 => "regional.example:80".to_owned(),
        5 => "240.0.0.1:80".to_owned(),
        6 | 7 => "subset.example:80".to_owned(),
        8 => format!("10.0.0.{}:8080", rng.u8(1..=count)),
        _ => format!("{ECHO}:80"),
    }
}

fn links(rng: &mut Rng) -> Vec<ReducedLink> {
    // Half of the meshes have none.
    let count = rng.usize(..7).saturating_sub(3);
    let link = |(from, to): (&str, &str)| ReducedLink {
        from: from.into(),
        is_own: false,
        to: to.into(),
        weight_percent: rng.u8(1..100),
    };
    let links = [("west", "other"), ("east", "far"), ("west", "far")];
    links.into_iter().take(count).map(link).collect()
}

/// Returns gateways that a tunnel has passed, seldom this one or too many.
fn via(rng: &mut Rng) -> String {
    let passed = rng.usize(1..=HOPS_MAX + 1);
    let mut gateways = vec!["other"; passed];
    if one_in(rng, 4) {
        gateways[passed - 1] = "own";
    }
    gateways.join(",")
}

fn service(rng: &mut Rng, hostname: &str, of_waypoints: bool) -> Service {
    let mut parts = hostname.split('.');
    let mut part = || parts.next().unwrap_or_default();
    let (name, namespace) = (part(), part());
    let waypoint = |(place, weight): (&str, u32)| Waypoint {
        gateway: GatewayAddress { place: Place::Name(format!("edge/{place}")), port: 15008 },
        weight,
    };
    let weights = WAYPOINTS.map(|place| (place, rng.u32(..4)));
    let localities = (0..6).map(|_| LocalityWeight {
        priority: rng.u32(..3),
        locality: locality(rng),
        weight: rng.u32(..4),
    });
    let localities = localities.collect();
    let assignment = Assignment {
        overprovisioning: *rng.choice(&[100, 140, 200]).expect("a factor"),
        by_locality: rng.bool(),
        localities,
        drops: Vec::new(),
    };
    Service {
        name: name.into(),
        namespace: namespace.into(),
        hostname: hostname.into(),
        vips: match hostname {
            ECHO => vec![("east".to_owned(), [240, 0, 0, 1].into())],
            _ => Vec::new(),
        },
        ports: [(80, 8080), (15008, 15008)].into(),
        waypoints: if of_waypoints {
            weights.into_iter().map(waypoint).collect()
        } else {
            Vec::new()
        },
        preferences: one_in(rng, 2).then(|| rng.choice(PREFERENCES).expect("some").to_vec()),
        strict: one_in(rng, 8),
        allow_unhealthy: one_in(rng, 8),
        assignments: if one_in(rng, 4) {
            [(80, Arc::new(assignment))].into()
        } else {
            BTreeMap::new()
        },
        ..Service::default()
    }
}

fn workload(rng: &mut Rng, at: u8) -> Workload {
    let weights = [0, 1, 1, 1, 2, 3, 10, 1_000, u32::MAX];
    let mut served = vec![match rng.u8(..4) {
        0 => *rng.choice(&WAYPOINTS).expect("a waypoint"),
        1 => TWIN,
        _ => ECHO,
    }];
    served.extend(one_in(rng, 4).then_some(TWIN));
    let is_waypoint = WAYPOINTS.contains(&served[0]);
    let key = |hostname: &str| {
        let namespace = hostname.split('.').nth(1).unwrap_or_default();
        format!("{namespace}/{hostname}").as_str().into()
    };
    let ports = || [(80, 8080), (15008, 15008)].into();
    let plain = !is_waypoint && one_in(rng, 3);
    let network = if one_in(rng, 4) { "west" } else { "east" };
    // Most instances behind the gateways are of one cluster.
    let is_other = if network == "west" { !one_in(rng, 12) } else { rng.bool() };
    Workload {
        uid: format!("uid-{at:02}").into(),
        addresses: [[10, 0, 0, at].into()].into(),
        healthy: !one_in(rng, 5),
        capacity: *rng.choice(&weights).expect("a weight"),
        priority: rng.u32(..3),
        degraded: one_in(rng, 8),
        services: served.into_iter().map(|of| (key(of), ports())).collect(),
        template: Template {
            namespace: "app".into(),
            cluster: if is_other { "other" } else { "east" }.into(),
            network: network.into(),
            pod_labels: if rng.bool() {
                [("team".into(), "a".into())].into()
            } else {
                PodLabels::default()
            },
            locality: locality(rng).into(),
            protocol: if plain { Protocol::Tcp } else { Protocol::Hbone },
            ..Template::default()
        }
        .into(),
        ..Workload::default()
    }
}

/// Returns the record of a gateway of network `west`.
fn gateway(rng: &mut Rng, at: u8) -> Workload {
    Workload {
        uid: format!("NetworkGateway/west/192.0.2.{at}/15008").into(),
        addresses: [[192, 0, 2, at].into()].into(),
        healthy: !one_in(rng, 5),
        capacity: 1,
        template: Template {
            network: "west".into(),
            cluster: (*rng.choice(&["", "other", "far"]).expect("a cluster")).into(),
            locality: locality(rng).into(),
            ..Template::default()
        }
        .into(),
        ..Workload::default()
    }
}

fn locality(rng: &mut Rng) -> Locality {
    let region = *rng.choice(&["r1", "r1", "r2", "r3", ""]).expect("a region");
    let zone = *rng.choice(&["a", "b"]).expect("a zone");
    Locality {
        region: region.into(),
        zone: if region.is_empty() { "" } else { zone }.into(),
        subzone: Arc::default(),
    }
}

fn pattern(rng: &mut Rng) -> RegionPattern {
    let text = *rng.choice(&["r1", "r2", "r3/*", "r1/a"]).expect("a pattern");
    RegionPattern::parse(text).expect("a pattern")
}

fn traffic(rng: &mut Rng) -> Traffic {
    let rule = |rng: &mut Rng| {
        let weighted = |region, weight| RegionWeight { region, weight };
        let every = weighted(RegionPattern::parse("*").expect("a pattern"), rng.u32(..3));
        let mut regions = vec![every];
        regions.extend((0..rng.u8(..3)).map(|_| weighted(pattern(rng), rng.u32(..5))));
        TrafficRule {
            distribution: one_in(rng, 4).then(|| rng.choice(DISTRIBUTIONS).expect("some")),
            spill_below: one_in(rng, 3).then(|| rng.u8(1..=100)),
            regions: if one_in(rng, 4) { regions } else { Vec::new() },
            latency: one_in(rng, 4).then_some(true),
            ..TrafficRule::default()
        }
    };
    let services = ["both.example", ECHO, WAYPOINTS[0]];
    let services: Vec<_> = services.map(|host| (host.into(), rule(rng))).into();
    let services: Vec<_> = services.into_iter().filter(|_| rng.bool()).collect();
    Traffic::new(services, rule(rng))
}

fn exposure(rng: &mut Rng) -> ExposureTable {
    let mut table = ExposureTable::new(rng.bool());
    let to = vec![Audience { cluster: Some("west".into()), ..Audience::default() }];
    for (service, names) in [(ECHO, &["exposed.example"][..]), (TWIN, &[])] {
        table.add(ExposedService {
            transit: Some(Transit::ALL[rng.usize(..3)]),
            names: hosts(names),
            workloads: true,
            ..entry(service, to.clone())
        });
    }
    table
}

fn names(rng: &mut Rng) -> NameTable {
    let twin = format!("{TWIN}:80");
    let both = |name| alias(name, &[ECHO, &twin]);
    let consumers = Some(vec!["west".into()]);
    let region = Some((*rng.choice(&["r1", "r2"]).expect("a region")).into());
    let plain = Alias::new(alias("plain.example", &[ECHO]), None);
    let several = Alias::new(config::Alias { consumers, ..both("both.example:80") }, None);
    let regional = Alias::new(config::Alias { region, ..both("regional.example") }, None);
    let part = |name: &str, labels: &[(&str, &str)], weight| SubsetPart {
        name: name.into(),
        labels: labels.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect(),
        weight,
    };
    let far: &[_] = match rng.u8(..3) {
        0 => &[(CLUSTER, "other"), ("team", "a")],
        _ => &[(CLUSTER, "other")],
    };
    let mut parts = vec![part("far", far, rng.u32(1..100))];
    if !one_in(rng, 3) {
        parts.push(part("near", &[(CLUSTER, "east")], rng.u32(1..100)));
    }
    let subset = Subset { name: "mix".into(), parts: parts.into() };
    let of_subset = Alias::new(alias("subset.example", &[ECHO]), Some(subset));
    NameTable::new(
        ["svc.cluster.local", "global"],
        [
            ("plain.example", plain),
            ("both.example", several),
            ("regional.example", regional),
            ("subset.example", of_subset),
        ],
    )
}

/// Records what a gateway may have advertised, and the factor by its round trip time.
pub(super) fn apply_load(rng: &mut Rng, gateway: &Endpoint, now: Instant) {
    let (state, instances) = (&gateway.state, gateway.definition.capacity);
    if rng.bool() {
        let load = ServiceLoad {
            ready: instances.saturating_mul(rng.u32(..8)) / 2,
            free_percent: rng.u32(..=100),
        };
        state.record_load(load, now);
    }
    if one_in(rng, 4) {
        state.record_share(rng.u32(1..=2 * FACTOR_ONE), now);
    }
}

/// Applies random history to the endpoints: open tunnels, dials and ejections.
fn apply_history(rng: &mut Rng, snapshot: &Snapshot) -> Vec<InFlight> {
    let mut services: Vec<_> = snapshot.services.iter().collect();
    services.sort_by_key(|(hostname, _)| Arc::clone(hostname));
    let sets = services.iter().flat_map(|(_, service)| {
        let remote = service.transit_ports.get(&80).map(|sets| &sets.always);
        service.ports.get(&80).map(LazySet::get).into_iter().chain(remote)
    });
    let endpoints: Vec<&Arc<Endpoint>> = sets.flat_map(|set| &set.endpoints).collect();
    let (is_busy, now) = (rng.bool(), Instant::now());
    let mut tunnels = Vec::new();
    for endpoint in endpoints {
        let state = &endpoint.state;
        let open = if is_busy { rng.u8(..6) } else { 0 };
        tunnels.extend((0..open).map(|_| InFlight::new(state)));
        state.record_dial(Duration::from_millis(rng.u64(1..50)));
        if endpoint.remote.is_some() {
            apply_load(rng, endpoint, now);
        }
        if one_in(rng, 6) {
            // The ejections last minutes, so that none ends while picks are counted.
            for _ in 0..8 {
                state.eject(now);
            }
        }
    }
    tunnels
}
