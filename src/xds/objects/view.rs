//! Index of the objects by service and cluster.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;
use std::ptr;
use std::sync::Arc;

use super::limited::LimitedFindings;
use super::meta::{Meta, ROOT_NAMESPACE};
use super::names::Key;
use super::service::{DeclaredScope, Service};
use super::shares::Shares;
use super::slice::Slice;
use super::{Export, Import, Objects, RunningPod};
use crate::config::{Config, DefaultExposure, Selector};
use crate::yaml::Finding;

type Clusters<'a, T> = BTreeMap<&'a str, &'a T>;

/// Label that Kubernetes sets on every namespace.
const NAME: &str = "kubernetes.io/metadata.name";

/// Limit of the pairs of an address and a port in all slices: ten for each of 100,000 workloads.
/// Each pair may be a claim, and is an endpoint under each name of a service.
const PAIRS_MAX: usize = 1_000_000;

/// Index of all objects. Of several objects with the same key, the first counts.
pub(super) struct ObjectIndex<'a> {
    pub(super) config: &'a Config,
    namespaces: BTreeMap<(&'a str, &'a str), &'a Meta>,
    services: BTreeMap<Key<'a>, Clusters<'a, Service>>,
    exports: BTreeMap<Key<'a>, Clusters<'a, Export>>,
    imports: BTreeMap<Key<'a>, &'a Import>,
    slices: BTreeMap<Key<'a>, Vec<&'a Slice>>,
    /// Services that a cluster keeps to itself, even if another copy of the Service does not
    /// declare it.
    local_services: BTreeSet<(&'a str, Key<'a>)>,
    /// Invalid namespaces by cluster, whose labels are not fully known.
    invalid_namespaces: BTreeSet<(&'a str, &'a str)>,
    /// Slices of namespaces with more than their share of [`PAIRS_MAX`]. They serve nothing.
    beyond: HashSet<*const Slice>,
    objects: &'a Objects,
}

impl<'a> ObjectIndex<'a> {
    pub(super) fn new(
        objects: &'a Objects,
        config: &'a Config,
        warnings: &mut LimitedFindings,
    ) -> Self {
        let mut contradiction = |of: &Meta, first: &Meta, what: String| {
            let what =
                format!("{what} differs from the one at {}, which takes precedence", first.place);
            let warning = Finding::warning(&of.place, what, "it once, or the same");
            warnings.push(warning.of(&of.namespace));
        };
        let mut view = Self {
            config,
            namespaces: BTreeMap::new(),
            services: BTreeMap::new(),
            exports: BTreeMap::new(),
            imports: BTreeMap::new(),
            slices: BTreeMap::new(),
            local_services: BTreeSet::new(),
            invalid_namespaces: BTreeSet::new(),
            beyond: slices_beyond(objects),
            objects,
        };
        for (cluster, name) in &objects.passed_over.namespaces {
            let cluster = view.cluster(cluster.as_ref());
            view.invalid_namespaces.insert((cluster, &**name));
        }
        for namespace in &objects.namespaces {
            let key = (view.cluster(namespace.cluster.as_ref()), &*namespace.name);
            view.namespaces.entry(key).or_insert(namespace);
        }
        for service in &objects.services {
            let cluster = view.cluster(service.meta.cluster.as_ref());
            let key = key(&service.meta);
            if service.declared == DeclaredScope::Local {
                view.local_services.insert((cluster, key));
            }
            let clusters = view.services.entry(key).or_default();
            let first = clusters.entry(cluster).or_insert(service);
            if !first.agrees(service) {
                let what = format!("the Service {}/{} of cluster {cluster}", key.0, key.1);
                contradiction(&service.meta, &first.meta, what);
            }
        }
        for export in &objects.exports {
            let cluster = view.cluster(export.meta.cluster.as_ref());
            let clusters = view.exports.entry(key(&export.meta)).or_default();
            clusters.entry(cluster).or_insert(export);
        }
        for import in own_imports(&objects.imports, config) {
            let key = key(&import.meta);
            let first = view.imports.entry(key).or_insert(import);
            if (&first.ports, &first.ips) != (&import.ports, &import.ips) {
                let what = format!("the ServiceImport {}/{}", key.0, key.1);
                contradiction(&import.meta, &first.meta, what);
            }
        }
        for slice in &objects.slices {
            view.add_slice(slice, warnings);
        }
        view
    }

    fn add_slice(&mut self, slice: &'a Slice, warnings: &mut LimitedFindings) {
        let key @ (namespace, name) = (&*slice.namespace, &*slice.service);
        let cluster = self.cluster(slice.cluster.as_ref());
        // The uids of its workloads begin with the cluster, and could be those of a gateway.
        let (why, how) = if cluster.contains('/') && cluster != self.own_cluster() {
            (format!("its cluster is `{cluster}`"), "the name of a cluster, without `/`")
        } else if self.is_beyond(slice) {
            let why = format!(
                "slices have more than {PAIRS_MAX} pairs of an address and a port, and namespace \
                 {namespace} has the most of them"
            );
            (why, "fewer ports or endpoints")
        } else {
            return self.slices.entry(key).or_default().push(slice);
        };
        let what = format!("the slice of {namespace}/{name} is not used: {why}");
        warnings.push(Finding::warning(&slice.place, what, how).of(namespace));
    }

    fn is_beyond(&self, slice: &Slice) -> bool {
        self.beyond.contains(&ptr::from_ref(slice))
    }

    pub(super) fn own_cluster(&self) -> &'a str {
        &self.config.gateway.cluster
    }

    fn cluster(&self, declared: Option<&'a Arc<str>>) -> &'a str {
        match declared {
            Some(cluster) => cluster,
            None => self.own_cluster(),
        }
    }

    /// Returns the namespaces with objects that are not known.
    pub(super) fn closed_namespaces(&self) -> impl Iterator<Item = &'a Arc<str>> {
        self.objects.closed.iter()
    }

    /// Returns the services that any object refers to.
    pub(super) fn keys(&self) -> BTreeSet<Key<'a>> {
        let keys = self.services.keys().chain(self.exports.keys());
        let keys = keys.chain(self.imports.keys()).chain(self.slices.keys());
        keys.copied().collect()
    }

    /// Returns the metadata of the import of a service, and of its Services in all clusters.
    pub(super) fn metadata(&self, key: Key<'a>) -> impl Iterator<Item = &'a Meta> {
        let services = self.services.get(&key).into_iter().flat_map(BTreeMap::values);
        let import = self.import(key).map(|import| &import.meta);
        import.into_iter().chain(services.map(|service| &service.meta))
    }

    /// Returns the Service of a cluster.
    pub(super) fn service(&self, key: Key<'a>, cluster: &str) -> Option<&'a Service> {
        self.services.get(&key)?.get(cluster).copied()
    }

    /// Returns the export of a cluster.
    pub(super) fn export(&self, key: Key<'a>, cluster: &str) -> Option<&'a Export> {
        self.exports.get(&key)?.get(cluster).copied()
    }

    /// Returns the import of a service into our cluster.
    pub(super) fn import(&self, key: Key<'a>) -> Option<&'a Import> {
        self.imports.get(&key).copied()
    }

    /// Returns the slices of a service, each with its cluster.
    pub(super) fn slices(&self, key: Key<'a>) -> impl Iterator<Item = (&'a str, &'a Slice)> {
        let slices = self.slices.get(&key).into_iter().flatten();
        slices.map(|slice| (self.cluster(slice.cluster.as_ref()), *slice))
    }

    /// Returns the slices of all services, each with its cluster. Invalid ones and those beyond the
    /// limit serve nothing, but their addresses remain unavailable to others.
    pub(super) fn all_slices(&self) -> impl Iterator<Item = (Key<'a>, &'a str, &'a Slice)> {
        let beyond = self.objects.slices.iter().filter(|slice| self.is_beyond(slice));
        let unused = beyond.chain(&self.objects.passed_over.slices);
        self.slices.values().flatten().copied().chain(unused).map(|slice| {
            let key = (&*slice.namespace, &*slice.service);
            (key, self.cluster(slice.cluster.as_ref()), slice)
        })
    }

    /// Returns the ports that a slice claims of a node; none for all ports, which it may mean if no
    /// port of it can be read. One beyond the limit claims all for lack of room.
    pub(super) fn claimed_ports(&self, slice: &Slice) -> Option<Vec<u16>> {
        let ports: Vec<_> = slice.ports.iter().map(|port| port.number).collect();
        Some(ports).filter(|ports| !ports.is_empty() && !self.is_beyond(slice))
    }

    /// Returns whether the controller of Kubernetes reverts changes of a slice by others. It finds
    /// the slices of a Service with a selector by the service name label of this cluster (see
    /// [`super::slice`]). It does not see copies or objects that claim to be of another cluster.
    pub(super) fn is_managed(&self, key: Key<'a>, cluster: &str, slice: &Slice) -> bool {
        let own = self.own_cluster();
        let is_own = !slice.is_copy && cluster == own;
        let service = self.service(key, own).filter(|service| !service.meta.is_copy());
        is_own && slice.is_managed && service.is_some_and(|service| service.has_selector)
    }

    /// Returns the Services of our cluster. Only slices and imports are copied. A tenant of another
    /// cluster can write the label of a copy.
    pub(super) fn own_services(&self) -> impl Iterator<Item = (Key<'a>, &'a Service)> {
        let services = self.services.iter();
        let services =
            services.filter_map(|(key, clusters)| Some((*key, *clusters.get(self.own_cluster())?)));
        services.filter(|(_, service)| !service.meta.is_copy())
    }

    /// Returns the imports into our cluster. Of invalid ones the addresses remain claimed.
    pub(super) fn imports(&self) -> impl Iterator<Item = (Key<'a>, &'a Import)> {
        let good = self.imports.iter().map(|(key, import)| (*key, *import));
        let bad = own_imports(&self.objects.passed_over.imports, self.config);
        good.chain(bad.map(|import| (key(&import.meta), import)))
    }

    /// Returns whether a cluster keeps a service to itself. It does if a Service declares it,
    /// or if an invalid or unknown Service or namespace may declare it.
    pub(super) fn is_local(&self, key: Key<'a>, cluster: &'a str) -> bool {
        self.objects.closed.contains(key.0)
            || self.local_services.contains(&(cluster, key))
            || self.invalid_namespaces.contains(&(cluster, key.0))
    }

    /// Returns the clusters that export a service, those with the oldest ServiceExport first.
    pub(super) fn exporters(&self, key: Key<'a>) -> Vec<&'a str> {
        let services = self.services.get(&key).into_iter().flatten();
        let services = services
            .filter(|(cluster, service)| self.is_exported_by_label_or_rule(cluster, service));
        let exports = self.exports.get(&key).into_iter().flatten();
        let copies = self.slices(key).filter(|(_, slice)| slice.is_copy);
        let clusters = services.map(|(cluster, _)| *cluster);
        let clusters = clusters.chain(exports.map(|(cluster, _)| *cluster));
        let clusters: BTreeSet<_> = clusters.chain(copies.map(|(cluster, _)| cluster)).collect();
        let clusters = clusters.into_iter();
        let mut clusters: Vec<_> = clusters.filter(|one| !self.is_local(key, one)).collect();
        clusters.sort_by_key(|cluster| {
            let created = self.export(key, cluster).and_then(|export| export.created);
            (created.is_none(), created)
        });
        clusters
    }

    /// Returns whether a Service is exported by its labels or, in our cluster, by the
    /// configured rules.
    fn is_exported_by_label_or_rule(&self, cluster: &str, service: &Service) -> bool {
        if matches!(service.declared, DeclaredScope::Global | DeclaredScope::GlobalOnly) {
            return true;
        }
        let exposure = &self.config.exposure;
        let by_rule = || exposure.auto.iter().any(|rule| self.is_selected(cluster, service, rule));
        cluster == self.own_cluster() && (exposure.default == DefaultExposure::All || by_rule())
    }

    fn is_selected(
        &self,
        cluster: &str,
        service: &Service,
        rule: &crate::config::AutoExport,
    ) -> bool {
        let name = &*service.meta.namespace;
        let namespace = self.namespaces.get(&(cluster, name));
        // An unknown namespace has unknown labels, which must not count as missing labels.
        let is_known = |selector: &Selector| namespace.is_some() || selector.is_about(NAME);
        if !rule.namespaces.as_ref().is_none_or(is_known) {
            return false;
        }
        let of_namespace = |key: &str| match key {
            NAME => Some(name),
            _ => namespace.and_then(|meta| meta.label(key)),
        };
        rule.exports(of_namespace, |key| service.meta.label(key))
    }

    /// Returns the namespace and name of the waypoint of a Service of our cluster. Its own
    /// label takes precedence over that of its namespace.
    pub(super) fn waypoint(&self, service: &'a Service) -> Option<(&'a str, &'a str)> {
        let namespace = self.namespaces.get(&(self.own_cluster(), &*service.meta.namespace));
        let of_namespace = || namespace.and_then(|meta| meta.waypoint());
        service.meta.waypoint().or_else(of_namespace)?
    }

    /// Returns the network of a slice's endpoints: the label of the slice, or the network of
    /// its cluster.
    pub(super) fn network(&self, cluster: &'a str, slice: &'a Slice) -> &'a str {
        let stated = slice.network.as_deref();
        stated.unwrap_or_else(|| self.network_of_cluster(cluster))
    }

    /// Returns the network of a cluster. The default network of another cluster has the name of the
    /// cluster.
    fn network_of_cluster(&self, cluster: &'a str) -> &'a str {
        let root = self.namespaces.get(&(cluster, ROOT_NAMESPACE));
        let by_default = || {
            if cluster == self.own_cluster() { &*self.config.gateway.network } else { cluster }
        };
        root.and_then(|meta| meta.network()).unwrap_or_else(by_default)
    }

    /// Returns the addresses of the nodes in our network, also by the pods that share them.
    pub(super) fn node_addresses(&self) -> impl Iterator<Item = IpAddr> {
        let nodes = self.objects.nodes.iter().filter(|node| {
            let cluster = self.cluster(node.cluster.as_ref());
            *self.network_of_cluster(cluster) == *self.config.gateway.network
        });
        let nodes = nodes.flat_map(|node| node.addresses.iter().copied());
        let pods = self.pods().filter(|pod| pod.host_network);
        nodes.chain(pods.flat_map(|pod| pod.addresses.iter().copied()))
    }

    /// Returns the pods in our network. A tenant can write the labels of a pod, which therefore
    /// bring no pod of another network here. Only slices and imports are copied.
    pub(super) fn pods(&self) -> impl Iterator<Item = &'a RunningPod> {
        let pods = self.objects.pods.iter().filter(|pod| !pod.meta.is_copy());
        pods.filter(|pod| {
            let cluster = self.cluster(pod.meta.cluster.as_ref());
            let networks = [Some(self.network_of_cluster(cluster)), pod.meta.network()];
            let own = &*self.config.gateway.network;
            networks.into_iter().flatten().all(|network| network == own)
        })
    }

    /// Returns whether the endpoints of a slice use HBONE.
    pub(super) fn is_ambient(&self, cluster: &str, slice: &Slice) -> bool {
        let namespace = self.namespaces.get(&(cluster, &*slice.namespace));
        let of_namespace = || namespace.and_then(|meta| meta.is_ambient());
        slice.is_ambient.or_else(of_namespace).unwrap_or(false)
    }
}

/// Returns the slices that find no room in the share of their namespace, of the invalid ones too:
/// their claims take as much.
fn slices_beyond(objects: &Objects) -> HashSet<*const Slice> {
    let all = || objects.slices.iter().chain(&objects.passed_over.slices);
    let wanted = all().map(|slice| (Arc::clone(&slice.namespace), slice.pairs()));
    let mut shares = Shares::divide(PAIRS_MAX, wanted);
    let beyond = all().filter(|slice| !shares.use_up(&slice.namespace, slice.pairs()));
    beyond.map(ptr::from_ref).collect()
}

fn own_imports<'a>(imports: &'a [Import], config: &'a Config) -> impl Iterator<Item = &'a Import> {
    let own = &*config.gateway.cluster;
    let is_own = move |cluster: Option<&str>| cluster.is_none_or(|cluster| cluster == own);
    imports.iter().filter(move |import| is_own(import.meta.cluster.as_deref()))
}

fn key(meta: &Meta) -> Key<'_> {
    (&meta.namespace, &meta.name)
}
