//! Endpoints of bindings: gateways of the clusters whose service a binding claims.

use std::collections::HashMap;
use std::mem;
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;

use super::endpoints::Entries;
use super::remote_gateways::{Gateway, Rank};
use super::remote_instances::{NetworkShare, capacity};
use super::tiers::Ranking;
use super::{Endpoint, EndpointSet, EndpointState, ExclusionReason, Snapshot, mesh};

/// Endpoints of one binding, with the states of their gateways, which outlive a snapshot.
#[derive(Debug)]
pub struct BoundEndpoints {
    clusters: Box<[Arc<str>]>,
    host: Arc<str>,
    port: u16,
    last: Mutex<Last>,
}

/// Set of the last snapshot that was read.
#[derive(Debug, Default)]
struct Last {
    version: Option<u64>,
    set: Arc<EndpointSet>,
    states: HashMap<(Arc<str>, SocketAddr), Arc<EndpointState>>,
}

/// Gateway that is not an endpoint, and the reason.
type UnusedGateway = (String, String);

impl BoundEndpoints {
    pub fn new(clusters: impl IntoIterator<Item = Arc<str>>, host: Arc<str>, port: u16) -> Self {
        Self { clusters: clusters.into_iter().collect(), host, port, last: Mutex::default() }
    }

    /// Takes over the states of gateways from an earlier version of the binding, if it has the same
    /// service. Connections of that version continue to use them.
    pub fn keep_states(&self, old: &Self) {
        if (&self.host, self.port) == (&old.host, old.port) {
            let states = old.last.lock().states.clone();
            self.last.lock().states = states;
        }
    }

    /// Returns the current endpoints. Networks are weighted by their ready instances, or evenly
    /// where the mesh does not know these. The cost after a change of the snapshot is that of all
    /// gateways.
    pub fn load(&self, snapshot: &Snapshot) -> Arc<EndpointSet> {
        let mut last = self.last.lock();
        // An older snapshot, which another worker still has, changes nothing.
        if last.version >= Some(snapshot.version) {
            return Arc::clone(&last.set);
        }
        let old = mem::take(&mut last.states);
        let (shares, _) = self.find(snapshot, |gateway| {
            let key = (Arc::clone(&gateway.remote.network), gateway.address);
            let state = old.get(&key).cloned().unwrap_or_default();
            last.states.insert(key, Arc::clone(&state));
            state
        });
        let entries = Entries::local(std::iter::empty(), None).with_networks(shares);
        let endpoints = entries.list.into_iter().map(|entry| entry.endpoint);
        last.set = Arc::new(EndpointSet::new(endpoints));
        last.version = Some(snapshot.version);
        Arc::clone(&last.set)
    }

    /// Returns the gateways that are not endpoints, each with the reason.
    pub fn unused(&self, snapshot: &Snapshot) -> Vec<UnusedGateway> {
        self.find(snapshot, |_| Arc::default()).1
    }

    /// Returns the endpoints by network, and the other gateways of the clusters. A network whose
    /// instances of the service are unknown counts as one instance. `state` returns that of the
    /// service behind a gateway.
    fn find(
        &self,
        snapshot: &Snapshot,
        mut state: impl FnMut(&Gateway) -> Arc<EndpointState>,
    ) -> (Vec<NetworkShare>, Vec<UnusedGateway>) {
        let (own_network, rules) = (snapshot.network(), &snapshot.networks);
        let unknown =
            mesh::Service { hostname: Arc::clone(&self.host), ..mesh::Service::default() };
        let known = snapshot.services.get(&*self.host);
        let service = known.map_or(&unknown, |known| &known.definition);
        let name = service.key();
        let of = (service, name.as_str());
        // Its namespace selects the rule of `traffic`, and its own preferences do not apply.
        let unranked =
            mesh::Service { namespace: Arc::clone(&service.namespace), ..mesh::Service::default() };
        let ranking =
            Ranking::new(&unranked, self.port, &self.host, own_network, &snapshot.balancing);
        let drained = snapshot.balancing.drained_service(service);
        let remote = &snapshot.index.remote;
        let mut networks = remote.instances(of, self.port, (own_network, false));
        for network in remote.gateways.keys() {
            networks.entry(network).or_default();
        }
        let (mut shares, mut unused) = (Vec::new(), Vec::new());
        for (network, found) in networks {
            let (ready, all) = if found.all.is_empty() { (1, 1) } else { capacity(&found.serving) };
            let mut used = Vec::new();
            for gateway in remote.gateways(network, &found.all, rules) {
                let cluster = &gateway.remote.cluster;
                let why = if cluster.is_empty() {
                    remote.why_unknown(&gateway).to_owned()
                } else if !self.clusters.contains(cluster) {
                    continue;
                } else if !gateway.is_ready() {
                    "the gateway is not ready".to_owned()
                } else if ready == 0 {
                    "no instance of the service behind it is ready".to_owned()
                } else {
                    let (instances, state) = ((&*found.serving, ready), state(&gateway));
                    let rank = Rank::default();
                    let endpoint = gateway.endpoint(of, self.port, rank, instances, state);
                    let why = drained.cloned().map(ExclusionReason::Evacuated);
                    match why.or_else(|| evacuation(&ranking, &endpoint)) {
                        Some(why) => why.to_string(),
                        None => {
                            used.push(endpoint);
                            continue;
                        }
                    }
                };
                unused.push((format!("{network}/gateway/{}", gateway.address), why));
            }
            if !used.is_empty() {
                shares.push(NetworkShare { gateways: used, part: None, ready, all });
            }
        }
        (shares, unused)
    }
}

/// Returns the reason for which a gateway is not used if its region is evacuated, by an operator
/// or by weight 0. Other weights of regions do not distribute connections, because gateways of the
/// configuration have no region.
fn evacuation(ranking: &Ranking<'_>, gateway: &Endpoint) -> Option<ExclusionReason> {
    if let Some(target) = ranking.evacuated_address(gateway) {
        return Some(ExclusionReason::Evacuated(target.clone()));
    }
    let has_region = !gateway.definition.locality.region.is_empty();
    ranking.exclusion(&gateway.definition).filter(|why| match why {
        ExclusionReason::Evacuated(_) => true,
        // The weight of `*` is not that of a gateway without a region.
        ExclusionReason::NoWeight(_) => has_region,
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::super::builder::{Change, build};
    use super::super::mesh::{GatewayAddress, Mesh, Place, Protocol, Template, Workload};
    use super::super::remote::{GATEWAY_RECORD, RemoteGateway};
    use super::super::tests::{hosts, locality, region_weights};
    use super::super::traffic::{Drained, Override, Traffic};
    use super::super::{Network, NetworkTable};
    use super::*;
    use crate::wire::{DrainTarget, RegionPattern};

    /// Returns a network of a cluster with gateways at these last octets.
    fn network(name: &str, cluster: &str, gateways: &[u8]) -> (Arc<str>, Network) {
        let gateways = gateways.iter();
        let gateways: Vec<_> = gateways.map(|last| format!("192.0.2.{last}:15008")).collect();
        let rule = Network {
            cluster: Some(cluster.into()),
            gateways: gateways.iter().flat_map(|one| hosts(&[one])).collect(),
            ..Network::default()
        };
        (name.into(), rule)
    }

    fn service() -> mesh::Service {
        mesh::Service {
            namespace: "app".into(),
            hostname: "echo.app".into(),
            ports: [(80, 80)].into(),
            ..mesh::Service::default()
        }
    }

    fn snapshot(mesh: Mesh) -> Snapshot {
        let networks = [
            network("west-1", "west", &[1]),
            network("west-2", "west", &[2, 3]),
            network("north", "north", &[4]),
        ];
        let change = Change {
            mesh: Some((mesh, "east".into())),
            networks: Some(NetworkTable::from_iter(networks)),
            ..Change::default()
        };
        build(&Snapshot::default(), change)
    }

    /// Returns the gateways of the service in these clusters with their shares.
    fn shares(clusters: &[&str], snapshot: &Snapshot) -> Vec<(String, f64)> {
        let clusters = clusters.iter().map(|&cluster| cluster.into());
        let bound = BoundEndpoints::new(clusters, "echo.app".into(), 80);
        let set = bound.load(snapshot);
        let total: u32 = set.endpoints.iter().map(|one| one.weight).sum();
        let share = |one: &Arc<Endpoint>| {
            assert_eq!(one.remote_authority().as_deref(), Some("echo.app:80"));
            let share = f64::from(one.weight) / f64::from(total);
            (one.address.to_string(), share)
        };
        set.endpoints.iter().map(share).collect()
    }

    #[test]
    fn a_service_that_the_mesh_does_not_know_is_spread_evenly_over_networks() {
        let snapshot = snapshot(Mesh::default());
        let (one, two, three) = ("192.0.2.1:15008", "192.0.2.2:15008", "192.0.2.3:15008");
        let west = [(one, 0.5), (two, 0.25), (three, 0.25)];
        let west = west.map(|(address, share)| (address.to_owned(), share));
        assert_eq!(shares(&["west"], &snapshot), west);
        let third = 1.0 / 3.0;
        let found = shares(&["west", "north"], &snapshot);
        let north = found.iter().find(|(address, _)| address.ends_with(".4:15008"));
        assert_eq!(north.map(|(_, share)| *share), Some(third));
        assert!(shares(&["east"], &snapshot).is_empty());
    }

    #[test]
    fn instances_that_the_mesh_knows_weigh_their_network_and_states_stay() {
        let workload = |uid: &str, network: &str, healthy| Workload {
            uid: uid.into(),
            healthy,
            capacity: 1,
            services: [("app/echo.app".into(), [(80, 80)].into())].into(),
            template: Template { network: network.into(), ..Template::default() }.into(),
            ..Workload::default()
        };
        let pods = [
            workload("a", "west-1", true),
            workload("b", "west-1", true),
            workload("c", "west-1", true),
            workload("d", "west-2", false),
            workload("e", "north", true),
        ];
        let snapshot = snapshot(Mesh::new([service()], pods));
        let north = ("192.0.2.4:15008".to_owned(), 0.25);
        let west = ("192.0.2.1:15008".to_owned(), 0.75);
        let mut found = shares(&["west", "north"], &snapshot);
        found.sort_by(|one, other| one.0.cmp(&other.0));
        assert_eq!(found, [west, north]);
        let bound = BoundEndpoints::new(["north".into()], "echo.app".into(), 80);
        let state = |snapshot: &Snapshot| Arc::clone(&bound.load(snapshot).endpoints[0].state);
        let next = build(&snapshot, Change::default());
        assert!(Arc::ptr_eq(&state(&snapshot), &state(&next)));
    }

    #[test]
    fn gateways_of_an_evacuated_region_are_left_out_with_the_reason() {
        let workload = |uid: &str, region: &str| Workload {
            uid: uid.into(),
            healthy: true,
            capacity: 1,
            services: [("app/echo.app".into(), [(80, 80)].into())].into(),
            template: Template {
                network: uid.into(),
                locality: locality(region).into(),
                ..Template::default()
            }
            .into(),
            ..Workload::default()
        };
        let pods = [workload("west-1", "us-west"), workload("north", "us-north")];
        let before = snapshot(Mesh::new([service()], pods));
        let bound = || BoundEndpoints::new(["west".into(), "north".into()], "echo.app".into(), 80);
        let region = RegionPattern::parse("us-north").expect("a region");
        let order = |target| Change {
            overrides: Some(Override::Drain(target, Drained::now(false))),
            ..Change::default()
        };
        let by_operator = order(region.into());
        let by_address = order(DrainTarget::parse("endpoint", "192.0.2.4").expect("an address"));
        let by_weight = Change {
            traffic: Some(Traffic::new([], region_weights(&[("us-north", 0)]))),
            ..Change::default()
        };
        let of = |snapshot: &Snapshot| {
            let set = bound().load(snapshot);
            let mut networks: Vec<_> = set.endpoints.iter().map(|one| one.address.ip()).collect();
            networks.sort_unstable();
            networks.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let west = ["192.0.2.1", "192.0.2.2", "192.0.2.3"];
        assert_eq!(of(&before).len(), 4);
        for (change, why) in [
            (by_operator, "strait drain region"),
            (by_address, "strait drain endpoint"),
            (by_weight, "weight 0"),
        ] {
            let next = build(&before, change);
            assert_eq!(of(&next), west);
            let unused = bound().unused(&next);
            assert_eq!(unused.len(), 1, "{unused:?}");
            assert_eq!(unused[0].0, "north/gateway/192.0.2.4:15008");
            assert!(unused[0].1.contains(why), "{unused:?}");
            let is_empty = |snapshot| {
                let north = BoundEndpoints::new(["north".into()], "echo.app".into(), 80);
                north.load(snapshot).endpoints.is_empty()
            };
            assert!(is_empty(&next) && !is_empty(&before));
        }
    }

    #[test]
    fn a_gateway_without_a_region_has_no_weight_of_all_other_regions() {
        let rule = region_weights(&[("us-west", 100), ("*", 0)]);
        let change = Change { traffic: Some(Traffic::new([], rule)), ..Change::default() };
        let next = build(&snapshot(Mesh::new([service()], [])), change);
        let bound = BoundEndpoints::new(["north".into()], "echo.app".into(), 80);
        assert_eq!(bound.load(&next).endpoints.len(), 1);
    }

    /// Returns the record of a gateway as istiod sends it, without a cluster.
    fn record(address: &str) -> Workload {
        Workload {
            uid: format!("{GATEWAY_RECORD}west/{address}/15008").into(),
            addresses: [address.parse().expect("an address")].into(),
            healthy: true,
            capacity: 1,
            template: Template {
                network: "west".into(),
                cluster: "Kubernetes".into(),
                trust_domain: "east.local".into(),
                namespace: "istio-system".into(),
                service_account: "eastwest".into(),
                ..Template::default()
            }
            .into(),
            ..Workload::default()
        }
    }

    /// Returns the workload that stands for a cluster's instances of a service behind an address.
    fn split_horizon(cluster: &str, address: &str, host: &str) -> Workload {
        let place = Place::Address("west".to_owned(), address.parse().expect("an address"));
        Workload {
            uid: format!("{cluster}/SplitHorizonWorkload/gw/gw/{address}/{host}").into(),
            healthy: true,
            capacity: 2,
            services: [(format!("app/{host}").into(), [(80, 80)].into())].into(),
            network_gateway: Some(Arc::new(GatewayAddress { place, port: 15008 })),
            template: Template {
                network: "west".into(),
                cluster: cluster.into(),
                protocol: Protocol::Hbone,
                ..Template::default()
            }
            .into(),
            ..Workload::default()
        }
    }

    /// Returns the gateway of a binding to cluster west, and why others are not used.
    fn bound(snapshot: &Snapshot) -> (Option<Arc<RemoteGateway>>, Vec<(String, String)>) {
        snapshot.index.remote.assert_counts();
        let bound = BoundEndpoints::new(["west".into()], "echo.app".into(), 80);
        let set = bound.load(snapshot);
        let gateway = set.endpoints.first().and_then(|one| one.remote.clone());
        (gateway, bound.unused(snapshot))
    }

    #[test]
    fn the_cluster_of_a_gateway_without_one_is_that_of_all_split_horizon_records_behind_it() {
        const V4: &str = "192.0.2.9";
        const V6: &str = "2001:db8::9";
        let domains = [("east.local", "east"), ("west.local", "west")];
        let table = NetworkTable::default().with_domains(domains);
        let next = |before: &Snapshot, workloads: Vec<Workload>| {
            let change = Change {
                mesh: Some((Mesh::new([service()], workloads), "east".into())),
                networks: Some(table.clone()),
                ..Change::default()
            };
            build(before, change)
        };
        let west = |host| split_horizon("west", V4, host);
        let north = |host| split_horizon("north", V4, host);
        // A tenant's WorkloadEntry, to which istiod gives the gateway of its `network`.
        let entry = |cluster: &str| Workload {
            uid: format!("{cluster}/networking.istio.io/WorkloadEntry/evil/vm").into(),
            ..split_horizon(cluster, V4, "evil.evil")
        };
        let of_one = "neither its record nor a split-horizon record";
        let mut snapshot = Snapshot::default();
        for (workloads, why) in [
            (vec![], Err(of_one)),
            (vec![west("echo.app")], Ok(())),
            (vec![west("other.app")], Ok(())),
            (vec![west("other.app"), north("more.app")], Err("several clusters")),
            (vec![north("more.app")], Err("")),
            (vec![west("other.app"), west("more.app")], Ok(())),
            (vec![split_horizon("west", "192.0.2.8", "other.app")], Err(of_one)),
            (vec![split_horizon("", V4, "echo.app")], Err(of_one)),
            (vec![entry("west")], Err(of_one)),
            (vec![west("echo.app"), entry("east")], Ok(())),
        ] {
            for records in [vec![record(V4)], vec![record(V4), record(V6)]] {
                let all = [records, workloads.clone()].concat();
                snapshot = next(&snapshot, all.clone());
                let fresh = next(&Snapshot::default(), all);
                let (gateway, unused) = bound(&snapshot);
                assert_eq!((&gateway, &unused), (&bound(&fresh).0, &bound(&fresh).1));
                assert_eq!(gateway.is_some(), why.is_ok(), "{unused:?}");
                match (gateway, why) {
                    (Some(gateway), _) => {
                        assert_eq!(&*gateway.cluster, "west");
                        let identity = "spiffe://west.local/ns/istio-system/sa/eastwest";
                        assert_eq!(gateway.identities, [identity.into()].into());
                    }
                    (None, Err("")) => assert!(unused.is_empty(), "another cluster: {unused:?}"),
                    (None, Err(why)) => {
                        assert!(unused.iter().all(|one| one.1.contains(why)), "{unused:?}");
                        assert!(!unused.is_empty());
                    }
                    (None, Ok(())) => {}
                }
            }
        }
    }
}
