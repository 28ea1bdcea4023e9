//! Records of the gateways of other networks that endpoints name by hostname.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::snapshot::mesh::{Template, Workload};
use crate::xds::tables::Tables;

/// Users of each gateway. All Envoy clusters that name a gateway share one record, so that a mesh
/// of many services does not have as many records.
#[derive(Debug, Default)]
pub(super) struct Gateways {
    /// Number of Envoy clusters by uid of the record and by the Istio cluster that they state.
    users: BTreeMap<Arc<str>, BTreeMap<Arc<str>, usize>>,
}

impl Gateways {
    /// Replaces the records that one Envoy cluster names. The Istio cluster of a gateway is that
    /// on which all its users agree.
    pub(super) fn replace(&mut self, old: &[Workload], new: &[Workload], tables: &mut Tables) {
        for record in new {
            let clusters = self.users.entry(Arc::clone(&record.uid)).or_default();
            *clusters.entry(Arc::clone(&record.cluster)).or_default() += 1;
        }
        for record in old {
            let Some(clusters) = self.users.get_mut(&record.uid) else {
                continue;
            };
            if let Some(count) = clusters.get_mut(&record.cluster) {
                *count -= 1;
            }
            clusters.retain(|_, count| *count > 0);
        }
        let mut seen = BTreeSet::new();
        for record in old.iter().chain(new).filter(|one| seen.insert(&one.uid)) {
            let clusters = self.users.get(&record.uid);
            let clusters: Vec<_> = clusters.into_iter().flat_map(BTreeMap::keys).collect();
            match clusters[..] {
                [] => {
                    self.users.remove(&record.uid);
                    tables.remove_workload(&record.uid);
                }
                [cluster] => tables.put_workload(with_cluster(record, Arc::clone(cluster))),
                _ => tables.put_workload(with_cluster(record, Arc::default())),
            }
        }
    }
}

fn with_cluster(record: &Workload, cluster: Arc<str>) -> Workload {
    let template = Template { cluster, ..Template::clone(&record.template) };
    Workload { template: template.into(), ..record.clone() }
}
