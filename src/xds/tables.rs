//! Services, workloads and exports of a control plane, common to the stores of all kinds.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::mem;
use std::sync::Arc;

use super::client::{ResourceStore, Response};
use super::convert::normal_hostname;
use crate::snapshot::mesh::{Mesh, Service, Workload};
use crate::snapshot::{ExportSet, Policies, Shards};
use crate::status::Unused;

/// Static clusters of istiod's waypoints and east-west gateways.
const STATIC_CLUSTERS: [&str; 2] = ["main_internal", "encap"];

/// Store of one kind of control plane.
pub trait MeshStore: ResourceStore + Debug + Send {
    /// Returns its services, workloads and exports.
    fn tables(&mut self) -> &mut Tables;

    /// Returns the policies if they are complete and have changed since the last call.
    fn take_policies(&mut self) -> Option<Policies> {
        None
    }

    /// Marks the policies as received, even if there are none.
    fn set_policies_received(&mut self) {}

    /// Keeps new services and exports back until the policies are received again, if they were
    /// before. Returns whether it does.
    fn await_policies(&mut self) -> bool {
        false
    }

    /// Returns the names to subscribe to in EDS, if they may have changed since the last call.
    fn take_eds_names(&mut self) -> Option<BTreeSet<String>> {
        None
    }

    /// Returns whether the resource of this name is a placeholder for an unreadable policy.
    fn has_placeholder(&self, _type_url: &str, _name: &str) -> bool {
        false
    }

    /// Returns the hostname and port that a cluster serves or exports, if it does.
    fn target(&self, cluster: &str) -> Option<(String, u16)> {
        parse_export(cluster)
    }

    /// Returns the number of unused resources of a type, and the first of them.
    fn unused(&self, _type_url: &str) -> (usize, Vec<Unused>) {
        (0, Vec::new())
    }
}

/// Services, workloads and exports, with the record of their changes.
#[derive(Debug, Default)]
pub struct Tables {
    pub(super) services: Shards<Arc<str>, Arc<Service>>,
    pub(super) workloads: Shards<Arc<str>, Arc<Workload>>,
    changed: bool,
    /// Exported hostname and port by cluster name. Several clusters may export the same one.
    exports: BTreeMap<Arc<str>, (String, u16)>,
    exports_changed: bool,
    /// True if endpoints without HBONE are not used.
    hbone_only: bool,
    /// True while new services and exports are kept back.
    keeps_back: bool,
    /// Services that are kept back.
    new_services: BTreeSet<Arc<str>>,
    /// Clusters whose exports are.
    new_exports: BTreeSet<Arc<str>>,
}

impl Tables {
    pub(super) fn new(hbone_only: bool) -> Self {
        Self { hbone_only, ..Self::default() }
    }

    /// Keeps services and exports back that are new from now on. Those that are kept back already
    /// stay so.
    pub(super) fn keep_back(&mut self) {
        self.keeps_back = true;
    }

    /// Adds what was kept back.
    pub(super) fn add_new(&mut self) {
        self.keeps_back = false;
        self.changed |= !mem::take(&mut self.new_services).is_empty();
        self.exports_changed |= !mem::take(&mut self.new_exports).is_empty();
    }

    pub fn mesh(&self) -> Mesh {
        let mut services = self.services.clone();
        self.new_services.iter().for_each(|key| drop(services.remove(key)));
        Mesh { services, workloads: self.workloads.clone(), hbone_only: self.hbone_only }
    }

    /// Returns the mesh, if it has changed since the last call.
    pub fn take_change(&mut self) -> Option<Mesh> {
        mem::take(&mut self.changed).then(|| self.mesh())
    }

    /// Returns the export set, if it may have changed since the last call.
    pub fn take_exports(&mut self) -> Option<ExportSet> {
        let exports = self.exports.iter().filter(|(name, _)| !self.new_exports.contains(*name));
        let exports = exports.map(|(_, (host, port))| (host.as_str(), *port));
        mem::take(&mut self.exports_changed)
            .then(|| exports.collect::<BTreeSet<_>>().into_iter().collect())
    }

    #[cfg(test)]
    pub(super) fn export_count(&self) -> usize {
        self.exports.len()
    }

    pub(super) fn put_service(&mut self, key: Arc<str>, service: Service) {
        let old = self.services.get(&key);
        if self.keeps_back && old.is_none() {
            self.new_services.insert(Arc::clone(&key));
        }
        if old.is_none_or(|old| **old != service) {
            self.services.insert(key, Arc::new(service));
            self.changed = true;
        }
    }

    pub(super) fn put_workload(&mut self, workload: Workload) {
        if self.workloads.get(&workload.uid).is_none_or(|old| **old != workload) {
            self.insert_workload(workload);
        }
    }

    /// Adds a workload that differs from the known one.
    pub(super) fn insert_workload(&mut self, workload: Workload) {
        self.workloads.insert(Arc::clone(&workload.uid), Arc::new(workload));
        self.changed = true;
    }

    pub(super) fn remove_service(&mut self, key: &str) {
        self.changed |= self.services.remove(key).is_some();
    }

    pub(super) fn remove_workload(&mut self, uid: &str) {
        self.changed |= self.workloads.remove(uid).is_some();
    }

    /// Adds the export of a cluster. Clusters that export nothing, such as the one for blocked
    /// traffic, are ignored.
    pub(super) fn add_export(&mut self, cluster: &Arc<str>) {
        let Some(export) = parse_export(cluster) else { return };
        let is_new = self.exports.insert(Arc::clone(cluster), export).is_none();
        if is_new && self.keeps_back {
            self.new_exports.insert(Arc::clone(cluster));
        }
        self.exports_changed |= is_new;
    }

    pub(super) fn remove_export(&mut self, cluster: &str) {
        self.exports_changed |= self.exports.remove(cluster).is_some();
    }
}

/// Returns whether a CDS response lists every cluster there is.
///
/// istiod builds the clusters of a waypoint or east-west gateway all at once, the static ones
/// first (`buildWaypointInboundClusters`), and has no delta of them. A response with both
/// static clusters is thus the whole set. istiod leaves `removed_resources` empty when a
/// service loses its global scope but still exists. Absence from such a response is the only
/// sign of it. Any other response may be partial.
pub(super) fn has_all_clusters(response: &Response) -> bool {
    let has = |name: &&str| response.resources.iter().any(|one| *one.name == **name);
    STATIC_CLUSTERS.iter().all(has)
}

/// Parses the export of a cluster from its name, `inbound-vip|PORT|tcp|HOST`
/// (docs/wire-contract.md 2.2).
fn parse_export(name: &str) -> Option<(String, u16)> {
    let parts: Vec<_> = name.splitn(5, '|').collect();
    match parts[..] {
        ["inbound-vip", port, "tcp", host] => {
            Some((normal_hostname(host)?.into_owned(), port.parse().ok()?))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xds::client::Resource;

    #[test]
    fn what_two_clusters_export_stays_until_both_are_gone() {
        let mut exports = Tables::default();
        let [one, other] = ["inbound-vip|80|tcp|Echo.app", "inbound-vip|080|tcp|echo.app."];
        for name in [one, other, one] {
            exports.add_export(&name.into());
        }
        let only = ExportSet::from_iter([("echo.app", 80)]);
        assert_eq!(exports.take_exports().as_ref(), Some(&only));
        exports.remove_export(one);
        assert_eq!(exports.take_exports().as_ref(), Some(&only));
        exports.remove_export(other);
        assert_eq!(exports.take_exports(), Some(ExportSet::default()));
        assert_eq!(exports.take_exports(), None);
    }

    #[test]
    fn a_response_with_both_static_clusters_is_whole() {
        let response = |names: &[&str]| Response {
            resources: names
                .iter()
                .map(|name| Resource { name: (*name).into(), ..Resource::default() })
                .collect(),
            ..Response::default()
        };
        let service = "inbound-vip|80|tcp|echo.app";
        assert!(has_all_clusters(&response(&["main_internal", "encap"])));
        assert!(has_all_clusters(&response(&["encap", service, "main_internal"])));
        for partial in [
            &[][..],
            &[service],
            &["main_internal", service],
            &["encap", service],
            &["BlackHoleCluster", "forward_inner_connect", service],
        ] {
            assert!(!has_all_clusters(&response(partial)), "{partial:?}");
        }
    }

    #[test]
    fn other_names_export_nothing() {
        let mut exports = Tables::default();
        for name in [
            "inbound-vip|80|tcp|echo.app|more",
            "inbound-vip|80|tcp",
            "inbound-vip|80|http|echo.app",
            "inbound-vip|70000|tcp|echo.app",
            "encap",
            "",
        ] {
            exports.add_export(&name.into());
        }
        assert_eq!(exports.take_exports(), None);
    }
}
