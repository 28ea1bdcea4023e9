//! Model of the simulated mesh: clusters, services and their instances, and the shares of tunnels
//! that follow from the numbers alone.

use std::net::Ipv4Addr;

use fastrand::Rng;

use super::*;
use crate::config::{Distribution, ExposedService};
use crate::snapshot::mesh::{GatewayAddress, Mesh, Place, Protocol, Service, Template, Workload};
use crate::snapshot::tests::{entry, locality, region_weights};
use crate::snapshot::traffic::{Traffic, TrafficRule};
use crate::snapshot::{Audience, ExposureTable};
use crate::wire::Transit;

/// Number of clusters, each a network of its own. The gateway is in the first one.
pub(super) const CLUSTERS: u8 = 160;
/// Number of gateways of each cluster.
const GATEWAYS: u8 = 3;
/// Number of regions. A cluster is in the region of its index modulo this.
pub(super) const REGIONS: u8 = 8;
/// Region that fails and returns.
pub(super) const FAILING: u8 = 3;
/// Gateways of the failing region.
pub(super) const FAILING_GATEWAYS: u32 = (CLUSTERS / REGIONS) as u32 * GATEWAYS as u32;
/// Pods of a service in the own network.
const PODS: usize = 2;
/// Part of the tunnels of [`Kind::Weighted`] for the failing region.
const WEIGHT: u32 = 90;
/// Changes of each kind in a step of churn.
const CHANGES: usize = 20;

/// Number of bins: one for the own network, and one for each gateway of the others.
pub(super) const BINS: usize = 1 + (CLUSTERS - 1) as usize * GATEWAYS as usize;

/// Distribution of a service.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Over all instances evenly.
    Spread,
    /// To the own network.
    Stay,
    /// Over all instances evenly, none of which is in the own network.
    RemoteOnly,
    /// 90 % to the failing region, 10 % to all others.
    Weighted,
    /// Over all instances evenly, which are in the own network and in one of the failing region.
    /// Most of its endpoints fail.
    Pair,
}

struct SimulatedService {
    kind: Kind,
    /// Uids of the pods in the own network.
    pods: Vec<Arc<str>>,
    /// Other clusters, each of another region, with their numbers of instances.
    remote: Vec<(u8, u32)>,
}

/// Services and instances as the control plane reports them.
pub(super) struct Model {
    rng: Rng,
    services: Vec<SimulatedService>,
    /// Common fields of all workloads of each cluster.
    templates: Vec<Arc<Template>>,
    /// Number of pods so far.
    pods: u32,
    /// Number of services that tunnels ask for, the first ones.
    pub(super) requested: usize,
    /// Factor of the weights of each cluster's gateways.
    pub(super) factors: Vec<f64>,
    /// Mesh of the next update.
    pub(super) mesh: Mesh,
}

pub(super) fn host(service: usize) -> String {
    format!("s{service:05}.app")
}

fn network(cluster: u8) -> String {
    format!("net-{cluster:03}")
}

fn address(cluster: u8, gateway: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 200, cluster, gateway)
}

/// Returns the cluster of a gateway by its address.
pub(super) fn cluster_of(address: std::net::SocketAddr) -> Option<u8> {
    match address.ip() {
        std::net::IpAddr::V4(ip) => match ip.octets() {
            [10, 200, cluster, _] => Some(cluster),
            _ => None,
        },
        std::net::IpAddr::V6(_) => None,
    }
}

/// Returns the bin of an endpoint by its address.
pub(super) fn bin_of(address: std::net::SocketAddr) -> usize {
    match (cluster_of(address), address.ip()) {
        (Some(cluster), std::net::IpAddr::V4(ip)) => bin(cluster, ip.octets()[3]),
        _ => 0,
    }
}

/// Returns the first bin of a cluster.
pub(super) fn first_bin(cluster: u8) -> usize {
    bin(cluster, 1)
}

fn bin(cluster: u8, gateway: u8) -> usize {
    usize::from(gateway) + usize::from(cluster - 1) * usize::from(GATEWAYS)
}

/// Returns the bins of all gateways of the same network.
pub(super) fn siblings(bin: usize) -> Range<usize> {
    let gateways = usize::from(GATEWAYS);
    let first = 1 + (bin - 1) / gateways * gateways;
    first..first + gateways
}

/// Returns the region of a bin.
pub(super) fn region_of(bin: usize) -> usize {
    match bin.checked_sub(1) {
        Some(index) => (1 + index / usize::from(GATEWAYS)) % usize::from(REGIONS),
        None => 0,
    }
}

impl Model {
    pub(super) fn new(services: usize) -> Self {
        let template = |cluster| Template {
            namespace: "edge".into(),
            service_account: "gateway".into(),
            trust_domain: "east.local".into(),
            cluster: network(cluster).into(),
            network: network(cluster).into(),
            protocol: Protocol::Hbone,
            locality: locality(&format!("r{}/a", cluster % REGIONS)).into(),
            ..Template::default()
        };
        let mut model = Self {
            rng: Rng::with_seed(160),
            services: Vec::new(),
            templates: (0..CLUSTERS).map(|of| Arc::new(template(of))).collect(),
            pods: 0,
            requested: services,
            factors: vec![1.0; CLUSTERS.into()],
            mesh: Mesh::new((0..services).map(service), []),
        };
        for at in 0..services {
            let of = model.simulated(at);
            model.services.push(of);
        }
        for cluster in 1..CLUSTERS {
            model.put_gateways(cluster, true);
        }
        model
    }

    /// Makes a service, and adds its instances to the mesh.
    fn simulated(&mut self, at: usize) -> SimulatedService {
        let kind = match at % 10 {
            0 => Kind::Stay,
            1 => Kind::RemoteOnly,
            2 => Kind::Weighted,
            3 => Kind::Pair,
            _ => Kind::Spread,
        };
        let mut clusters: Vec<u8> = Vec::new();
        let count = if kind == Kind::Pair { 1 } else { 3 };
        while clusters.len() < count {
            let cluster = self.rng.u8(1..CLUSTERS);
            let mut known = clusters.iter();
            let is_new = known.all(|other| other % REGIONS != cluster % REGIONS);
            let is_needed = matches!(kind, Kind::Weighted | Kind::Pair) && clusters.is_empty();
            if is_new && (!is_needed || cluster % REGIONS == FAILING) {
                clusters.push(cluster);
            }
        }
        let clusters = clusters.into_iter();
        let remote: Vec<_> = clusters.map(|of| (of, self.rng.u32(1..5))).collect();
        for &(cluster, count) in &remote {
            self.put_record(at, cluster, count);
        }
        let pods = if kind == Kind::RemoteOnly { 0 } else { PODS };
        SimulatedService { kind, pods: (0..pods).map(|_| self.put_pod(at)).collect(), remote }
    }

    /// Adds a pod of the own network, and returns its uid.
    fn put_pod(&mut self, service: usize) -> Arc<str> {
        self.pods += 1;
        let address = Ipv4Addr::from_bits(Ipv4Addr::new(10, 0, 0, 0).to_bits() + self.pods);
        let uid: Arc<str> = format!("pod-{}", self.pods).into();
        let pod = Workload {
            uid: Arc::clone(&uid),
            addresses: [address.into()].into(),
            ..self.workload(service, 0)
        };
        self.mesh.workloads.insert(Arc::clone(&uid), Arc::new(pod));
        uid
    }

    /// Adds or replaces the split-horizon record of a service in a cluster.
    fn put_record(&mut self, service: usize, cluster: u8, count: u32) {
        let (network, address) = (network(cluster), address(cluster, 1));
        let uid = format!("{network}/SplitHorizonWorkload/edge/gw/{address}/{}", host(service));
        let place = Place::Address(network, address.into());
        let record = Workload {
            uid: uid.into(),
            capacity: count,
            network_gateway: Some(Arc::new(GatewayAddress { place, port: 15008 })),
            ..self.workload(service, cluster)
        };
        let uid = Arc::clone(&record.uid);
        self.mesh.workloads.insert(uid, Arc::new(record));
    }

    fn workload(&self, service: usize, cluster: u8) -> Workload {
        let key = format!("app/{}", host(service)).into();
        Workload {
            healthy: true,
            capacity: 1,
            services: [(key, [(80, 8080)].into())].into(),
            template: Arc::clone(&self.templates[usize::from(cluster)]),
            ..Workload::default()
        }
    }

    fn put_gateways(&mut self, cluster: u8, is_ready: bool) {
        for gateway in 1..=GATEWAYS {
            let (network, address) = (network(cluster), address(cluster, gateway));
            let record = Workload {
                uid: format!("NetworkGateway/{network}/{address}/15008").into(),
                addresses: [address.into()].into(),
                healthy: is_ready,
                capacity: 1,
                template: Arc::clone(&self.templates[usize::from(cluster)]),
                ..Workload::default()
            };
            let uid = Arc::clone(&record.uid);
            self.mesh.workloads.insert(uid, Arc::new(record));
        }
    }

    /// Sets the readiness of the failing region's gateways, as the control plane reports it.
    pub(super) fn report_region(&mut self, is_ready: bool) {
        for cluster in (1..CLUSTERS).filter(|of| of % REGIONS == FAILING) {
            self.put_gateways(cluster, is_ready);
        }
    }

    /// Replaces some pods, and changes the number of instances of some services in other networks.
    pub(super) fn churn(&mut self) {
        for _ in 0..CHANGES {
            let at = self.rng.usize(..self.services.len());
            let remote = &mut self.services[at].remote;
            let (place, count) = (self.rng.usize(..remote.len()), self.rng.u32(1..5));
            let (cluster, now) = &mut remote[place];
            *now = count;
            let cluster = *cluster;
            self.put_record(at, cluster, count);
            let at = self.rng.usize(..self.services.len());
            if let Some(old) = self.services[at].pods.pop() {
                self.mesh.workloads.remove(&*old);
                let new = self.put_pod(at);
                self.services[at].pods.push(new);
            }
        }
    }

    /// Returns the service of the next tunnel.
    pub(super) fn random_service(&mut self) -> usize {
        self.rng.usize(..self.requested)
    }

    /// Adds the probability of each bin for a tunnel to a service.
    pub(super) fn add_shares(&self, service: usize, is_region_up: bool, bins: &mut [f64]) {
        let of = &self.services[service];
        if of.kind == Kind::Stay {
            bins[0] += 1.0;
            return;
        }
        let is_failing = |cluster: u8| cluster % REGIONS == FAILING;
        let remote = of.remote.iter().filter(|(cluster, _)| is_region_up || !is_failing(*cluster));
        let weight =
            |cluster: u8, count: u32| f64::from(count) * self.factors[usize::from(cluster)];
        let sum = |failing: bool| -> f64 {
            let of_region = remote.clone().filter(|one| is_failing(one.0) == failing);
            of_region.map(|&(cluster, count)| weight(cluster, count)).sum()
        };
        let pods = f64::from(u32::try_from(of.pods.len()).expect("few"));
        let (there, elsewhere) = (sum(true), sum(false) + pods);
        // Share of a weight of one in the failing region, and of one elsewhere.
        let [in_region, outside] = if of.kind == Kind::Weighted && is_region_up {
            let share = f64::from(WEIGHT) / 100.0;
            [share / there, (1.0 - share) / elsewhere]
        } else {
            [1.0 / (there + elsewhere); 2]
        };
        bins[0] += pods * outside;
        for &(cluster, count) in remote {
            let each = if is_failing(cluster) { in_region } else { outside };
            for gateway in 1..=GATEWAYS {
                bins[bin(cluster, gateway)] += each * weight(cluster, count) / f64::from(GATEWAYS);
            }
        }
    }

    /// Returns the rule of each service.
    pub(super) fn traffic(&self) -> Traffic {
        let any = TrafficRule { distribution: Some(Distribution::Any), ..TrafficRule::default() };
        let failing = format!("r{FAILING}");
        let weighted = region_weights(&[(&*failing, WEIGHT), ("*", 100 - WEIGHT)]);
        let rules = self.services.iter().enumerate().filter_map(|(at, of)| {
            let rule = match of.kind {
                Kind::Stay => return None,
                Kind::Spread | Kind::RemoteOnly | Kind::Pair => &any,
                Kind::Weighted => &weighted,
            };
            Some((host(at).into(), rule.clone()))
        });
        Traffic::new(rules, TrafficRule::default())
    }

    /// Returns the exposure of all services to cluster west, with transit.
    pub(super) fn exposure(&self) -> ExposureTable {
        let to = Audience { cluster: Some("west".into()), ..Audience::default() };
        let mut table = ExposureTable::new(false);
        for at in 0..self.services.len() {
            let transit = Some(Transit::Always);
            table.add(ExposedService { transit, ..entry(&host(at), vec![to.clone()]) });
        }
        table
    }
}

fn service(at: usize) -> Service {
    Service {
        name: format!("s{at:05}").into(),
        namespace: "app".into(),
        hostname: host(at).into(),
        ports: [(80, 8080)].into(),
        ..Service::default()
    }
}
