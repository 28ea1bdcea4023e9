//! Resources of a control plane, its streams, and its answers.
//!
//! [`Dialect::Istio`] answers an east-west gateway as istiod does (`pilot/pkg/xds/delta.go`,
//! `cds.go` and `workload.go`). CDS is derived from the exported services: each push has the whole
//! set. [`Dialect::Envoy`] sends changes only, of every type.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use prost::Message;
use strait::grpc::cluster::Cluster;
use strait::grpc::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource};
use strait::grpc::security::Authorization;
use strait::grpc::workload::gateway_address::Destination;
use strait::grpc::workload::{Address, Service, address};
use strait::xds::store::{ADDRESS, AUTHORIZATION, CLUSTER};
use tokio::sync::mpsc;
use tonic::Status;
use tonic::metadata::MetadataMap;

use super::Behaviour;

/// Clusters of an east-west gateway that exports nothing.
pub const BUILT_IN: [&str; 4] =
    ["main_internal", "encap", "forward_inner_connect", "BlackHoleCluster"];

/// Rules by which resources are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Dialect {
    #[default]
    Istio,
    Envoy,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) dialect: Dialect,
    pub(super) manner: Behaviour,
    /// Resources by type and name.
    resources: BTreeMap<(String, String), StoredResource>,
    /// Decoded services, from which the clusters are derived.
    services: BTreeMap<String, Service>,
    /// Services with the label `istio.io/global=true`, by `NAMESPACE/HOSTNAME`.
    pub(super) global: BTreeSet<String>,
    /// UDP ports. WDS has no field for them, and they have no clusters.
    pub(super) udp: BTreeSet<(String, u32)>,
    /// True if policies with `istio.io/dry-run` are sent, which istiod does only if that is
    /// enabled.
    pub(super) sends_dry_run: bool,
    version: u64,
    nonce: u64,
    streams: Vec<Stream>,
    pub(super) requests: Vec<DeltaDiscoveryRequest>,
    /// Metadata of the calls so far.
    pub(super) calls: Vec<MetadataMap>,
    pub(super) sent: usize,
    /// True if no token is required.
    pub(super) open: bool,
}

struct StoredResource {
    version: u64,
    body: Vec<u8>,
    /// Services of a workload.
    services: BTreeSet<String>,
    is_dry_run: bool,
}

pub(super) type Pushes = mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>;

pub(super) struct Stream {
    pub(super) pushes: Pushes,
    types: BTreeMap<String, Watch>,
}

/// Subscription of a stream to a type.
#[derive(Default)]
struct Watch {
    wildcard: bool,
    /// Names that were requested, and those that were sent in answer.
    names: BTreeSet<String>,
}

impl Stream {
    pub(super) fn new(pushes: Pushes) -> Self {
        Self { pushes, types: BTreeMap::new() }
    }
}

impl State {
    /// Adds or replaces resources of a type, and pushes.
    pub(super) fn put(&mut self, type_url: &str, resources: &[(&str, Vec<u8>)]) {
        self.version += 1;
        for (name, body) in resources {
            self.hold(type_url, name, body);
        }
        let names = resources.iter().map(|(name, _)| (*name).to_owned());
        let (hidden, names): (Vec<_>, Vec<_>) = names.partition(|name| {
            let key = (type_url.to_owned(), name.clone());
            !self.is_visible(&self.resources[&key])
        });
        self.push(type_url, &names, &hidden);
    }

    fn hold(&mut self, type_url: &str, name: &str, body: &[u8]) {
        let mut held = StoredResource {
            version: self.version,
            body: body.to_vec(),
            services: BTreeSet::new(),
            is_dry_run: false,
        };
        match type_url {
            ADDRESS => match Address::decode(body).ok().and_then(|one| one.r#type) {
                Some(address::Type::Workload(workload)) => {
                    held.services = workload.services.into_keys().collect();
                }
                Some(address::Type::Service(service)) => {
                    self.services.insert(name.to_owned(), service);
                }
                None => {}
            },
            AUTHORIZATION => {
                held.is_dry_run = Authorization::decode(body).is_ok_and(|policy| policy.dry_run);
            }
            _ => {}
        }
        let key = (type_url.to_owned(), name.to_owned());
        self.resources.insert(key, held);
    }

    fn is_visible(&self, held: &StoredResource) -> bool {
        self.dialect == Dialect::Envoy || self.sends_dry_run || !held.is_dry_run
    }

    /// Removes a resource, and pushes.
    pub(super) fn remove(&mut self, type_url: &str, name: &str) {
        let key = (type_url.to_owned(), name.to_owned());
        self.resources.remove(&key);
        if type_url == ADDRESS {
            self.services.remove(name);
        }
        self.push(type_url, &[], &[name.to_owned()]);
    }

    /// Sends a response to every stream, regardless of its subscriptions.
    pub(super) fn push_unstored(&mut self, response: &DeltaDiscoveryResponse) {
        self.streams.retain(|stream| !stream.pushes.is_closed());
        for stream in &self.streams {
            let pushed = stream.pushes.try_send(Ok(response.clone()));
            pushed.expect("room for a push");
        }
    }

    fn push(&mut self, type_url: &str, names: &[String], removed: &[String]) {
        match (self.dialect, type_url) {
            (Dialect::Istio, CLUSTER) => return self.push_clusters(false),
            // Istiod generates CDS first, and an Address in the push makes it a full push.
            (Dialect::Istio, ADDRESS) => self.push_clusters(true),
            _ => {}
        }
        self.streams.retain(|stream| !stream.pushes.is_closed());
        let mut pushes = Vec::new();
        for stream in &mut self.streams {
            let Some(watch) = stream.types.get_mut(type_url) else {
                continue;
            };
            let has = |name: &&String| watch.wildcard || watch.names.contains(*name);
            let gone: Vec<_> = removed.iter().filter(has).cloned().collect();
            let mut sent: BTreeSet<_> = names.iter().filter(has).cloned().collect();
            if !watch.wildcard && !sent.is_empty() {
                // A request for a service includes its workloads. A workload that joins the service
                // has another name, and is not pushed.
                let all = self.resources.iter();
                let of =
                    all.filter(|((of, name), held)| of == type_url && belongs(name, held, &sent));
                let of: Vec<_> = of.map(|((_, name), _)| name.clone()).collect();
                sent.extend(of);
                watch.names.extend(sent.iter().cloned());
            }
            if !sent.is_empty() || !gone.is_empty() {
                pushes.push((stream.pushes.clone(), sent, gone));
            }
        }
        for (to, sent, gone) in pushes {
            let sent: Vec<_> = sent.into_iter().collect();
            let response = self.response(type_url, &sent, gone);
            to.try_send(Ok(response)).expect("room for a push");
        }
    }

    /// Pushes the whole set of clusters. Istiod compares it with the previous set only if the push
    /// has an Address. A service that is no longer exported is therefore missing at first, and
    /// removed later.
    pub(super) fn push_clusters(&mut self, compares: bool) {
        self.streams.retain(|stream| !stream.pushes.is_closed());
        let set = self.clusters();
        let mut pushes = Vec::new();
        for stream in &mut self.streams {
            let Some(watch) = stream.types.get_mut(CLUSTER) else {
                continue;
            };
            let gone: Vec<_> =
                if compares { watch.names.difference(&set).cloned().collect() } else { Vec::new() };
            watch.names.retain(|name| !gone.contains(name));
            watch.names.extend(set.iter().cloned());
            pushes.push((stream.pushes.clone(), gone));
        }
        let names: Vec<_> = set.into_iter().collect();
        for (to, gone) in pushes {
            let response = self.response(CLUSTER, &names, gone);
            to.try_send(Ok(response)).expect("room for a push");
        }
    }

    /// Returns the clusters of an east-west gateway: one for each port of each exported service,
    /// and of each of their waypoints.
    fn clusters(&self) -> BTreeSet<String> {
        let mut keys = BTreeSet::new();
        for key in &self.global {
            let Some(service) = self.services.get(key) else {
                continue;
            };
            keys.insert(key.clone());
            let weighted = service.weighted_waypoints.iter();
            let weighted = weighted.filter_map(|one| one.destination.as_ref());
            let one = service.waypoint.iter();
            let one = one.filter(|_| service.weighted_waypoints.is_empty());
            for waypoint in weighted.chain(one) {
                if let Some(Destination::Hostname(name)) = &waypoint.destination {
                    keys.insert(format!("{}/{}", name.namespace, name.hostname));
                }
            }
        }
        let mut names: BTreeSet<_> = BUILT_IN.map(str::to_owned).into();
        for (key, service) in keys.iter().filter_map(|key| Some((key, self.services.get(key)?))) {
            for port in service.ports.iter().map(|port| port.service_port) {
                if !self.udp.contains(&(key.clone(), port)) {
                    names.insert(format!("inbound-vip|{port}|tcp|{}", service.hostname));
                }
            }
        }
        // A range query, because each change of an address comes here, and a bench has 100,000 of
        // them.
        let own = self.resources.range((CLUSTER.to_owned(), String::new())..);
        let own = own.take_while(|((of, _), _)| of == CLUSTER);
        names.extend(own.map(|((_, name), _)| name.clone()));
        names
    }

    fn response(
        &mut self,
        type_url: &str,
        names: &[String],
        removed: Vec<String>,
    ) -> DeltaDiscoveryResponse {
        self.nonce += 1;
        // Istiod gives versions only to services and workloads, and sends everything else again.
        let has_versions = self.dialect == Dialect::Envoy || type_url == ADDRESS;
        if has_versions {
            self.sent += names.len();
        }
        let resources = names.iter().map(|name| {
            let held = self.resources.get(&(type_url.to_owned(), name.clone()));
            let version = held.filter(|_| has_versions);
            Resource {
                name: name.clone(),
                version: version.map_or_else(String::new, |held| held.version.to_string()),
                resource: Some(prost_types::Any {
                    type_url: type_url.to_owned(),
                    value: held.map_or_else(|| cluster(name), |held| held.body.clone()),
                }),
                ..Resource::default()
            }
        });
        DeltaDiscoveryResponse {
            type_url: type_url.to_owned(),
            system_version_info: self.version.to_string(),
            nonce: self.nonce.to_string(),
            resources: resources.collect(),
            removed_resources: removed,
            ..DeltaDiscoveryResponse::default()
        }
    }

    /// Returns the names of a type that are sent.
    fn names(&self, type_url: &str) -> BTreeSet<String> {
        if (self.dialect, type_url) == (Dialect::Istio, CLUSTER) {
            return self.clusters();
        }
        let all = self.resources.iter();
        let all = all.filter(|((of, _), held)| of == type_url && self.is_visible(held));
        all.map(|((_, name), _)| name.clone()).collect()
    }

    /// Returns the resources that a client lacks, and the names of those that are gone.
    fn first(&mut self, type_url: &str, has: &HashMap<String, String>) -> DeltaDiscoveryResponse {
        let known = self.names(type_url);
        let gone = has.keys().filter(|name| !known.contains(*name)).cloned();
        let gone = gone.collect();
        let new = known.into_iter();
        let new: Vec<_> = new.filter(|name| self.is_new(type_url, name, has)).collect();
        self.response(type_url, &new, gone)
    }

    /// Returns true if a resource has to be sent to a client with these versions.
    fn is_new(&self, type_url: &str, name: &str, has: &HashMap<String, String>) -> bool {
        let held = self.resources.get(&(type_url.to_owned(), name.to_owned()));
        let is_compared = self.dialect == Dialect::Envoy || type_url == ADDRESS;
        let version = held.filter(|_| is_compared);
        let version = version.map(|held| held.version.to_string());
        version.is_none() || version.as_ref() != has.get(name)
    }

    /// Returns the named resources and those that belong to them, except for those that a client
    /// has, and the names of those that are gone or never existed.
    fn requested(
        &mut self,
        type_url: &str,
        names: &BTreeSet<String>,
        has: &HashMap<String, String>,
    ) -> DeltaDiscoveryResponse {
        let known = self.resources.iter();
        let known = known.filter(|((of, name), held)| of == type_url && belongs(name, held, names));
        let known: BTreeSet<_> = known.map(|((_, name), _)| name.clone()).collect();
        let gone = names.difference(&known).cloned().collect();
        let new = known.into_iter();
        let new: Vec<_> = new.filter(|name| self.is_new(type_url, name, has)).collect();
        self.response(type_url, &new, gone)
    }

    /// Adds a stream.
    pub(super) fn add_stream(&mut self, stream: Stream) {
        self.streams.push(stream);
    }

    /// Answers a request of the stream with these pushes.
    pub(super) fn received(&mut self, request: DeltaDiscoveryRequest, pushes: &Pushes) {
        let withheld = match self.manner {
            Behaviour::Silent => true,
            Behaviour::OmitsType(of) => request.type_url == of,
            Behaviour::Normal | Behaviour::Refusing => false,
        };
        // Requests of Envoy that acknowledge a response can change its subscription too.
        let asks =
            request.response_nonce.is_empty() || !request.resource_names_subscribe.is_empty();
        let mut streams = self.streams.iter();
        let index = streams.position(|stream| stream.pushes.same_channel(pushes));
        // A stream that has ended may have one more request.
        if let Some(index) = index.filter(|_| asks && !withheld) {
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
        let mut requested: BTreeSet<_> = request.resource_names_subscribe.iter().cloned().collect();
        requested.extend(has.keys().cloned());
        let mut changes = requested.iter().any(|name| !watch.names.contains(name));
        for name in &request.resource_names_unsubscribe {
            let is_added = requested.remove(name);
            changes |= watch.names.remove(name) || is_added;
        }
        // Istiod ignores a request that changes no subscription. A subscribed name has to be
        // unsubscribed before it is answered again.
        if self.dialect == Dialect::Istio && !is_first && !changes {
            return;
        }
        // Control planes other than istiod do not answer a request that only unsubscribes.
        if self.dialect == Dialect::Envoy && !is_first && requested.is_empty() {
            return;
        }
        watch.wildcard |= is_first && request.resource_names_subscribe.is_empty();
        watch.names.extend(requested.iter().cloned());
        let response = if watch.wildcard {
            self.first(of, &has)
        } else if is_first || !requested.is_empty() {
            self.requested(of, &requested, &has)
        } else {
            // Like Istio: names that were not unsubscribed are sent as removed.
            let gone = watch.names.iter().cloned().collect();
            self.response(of, &[], gone)
        };
        let stream = &mut self.streams[index];
        let watch = stream.types.entry(of.clone()).or_default();
        let sent = response.resources.iter().map(|one| one.name.clone());
        if (self.dialect, &**of) == (Dialect::Istio, CLUSTER) {
            watch.names = sent.collect();
        } else {
            watch.names.extend(sent);
        }
        let pushed = stream.pushes.try_send(Ok(response));
        pushed.expect("room for a push");
    }
}

/// Returns true if these names request a resource: by its own name, or a workload by one of its
/// services.
fn belongs(name: &str, held: &StoredResource, names: &BTreeSet<String>) -> bool {
    names.contains(name) || !held.services.is_disjoint(names)
}

fn cluster(name: &str) -> Vec<u8> {
    let cluster = Cluster { name: name.to_owned(), ..Cluster::default() };
    cluster.encode_to_vec()
}
