//! Export set of a control plane, read from the names of its clusters.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;

use super::client::Response;
use super::names::normal_hostname;
use crate::snapshot::ExportSet;

/// Static clusters of istiod's waypoints and east-west gateways.
const STATIC_CLUSTERS: [&str; 2] = ["main_internal", "encap"];

/// Returns whether a CDS response lists every cluster there is.
///
/// istiod builds the clusters of a waypoint or east-west gateway all at once, the static ones
/// first (`buildWaypointInboundClusters`), and has no delta of them. A response with both
/// static clusters is thus the whole set. istiod leaves `removed_resources` empty when a
/// service loses its global scope but still exists. Absence from such a response is the only
/// sign of it. Any other response may be partial.
pub(super) fn is_whole(response: &Response) -> bool {
    let has = |name: &&str| response.resources.iter().any(|one| *one.name == **name);
    STATIC_CLUSTERS.iter().all(has)
}

/// Exported hostname and port by cluster name. Several clusters may export the same one.
#[derive(Debug, Default)]
pub(super) struct Exports {
    clusters: BTreeMap<Arc<str>, (String, u16)>,
    changed: bool,
}

impl Exports {
    /// Returns the export set, if it may have changed since the last call.
    pub(super) fn take_change(&mut self) -> Option<ExportSet> {
        let all = || {
            let each = self.clusters.values();
            each.map(|(host, port)| (host.as_str(), *port))
        };
        mem::take(&mut self.changed).then(|| all().collect::<BTreeSet<_>>().into_iter().collect())
    }

    /// Adds a cluster. Clusters that export nothing, such as the one for blocked traffic, are
    /// ignored.
    pub(super) fn insert(&mut self, name: &Arc<str>) {
        if let Some(export) = parse_export(name) {
            self.changed |= self.clusters.insert(Arc::clone(name), export).is_none();
        }
    }

    /// Removes a cluster.
    pub(super) fn remove(&mut self, name: &str) {
        self.changed |= self.clusters.remove(name).is_some();
    }
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
        let mut exports = Exports::default();
        let [one, other] = [
            "inbound-vip|80|tcp|Echo.app",
            "inbound-vip|080|tcp|echo.app.",
        ];
        for name in [one, other, one] {
            exports.insert(&name.into());
        }
        let only = ExportSet::from_iter([("echo.app", 80)]);
        assert_eq!(exports.take_change().as_ref(), Some(&only));
        exports.remove(one);
        assert_eq!(exports.take_change().as_ref(), Some(&only));
        exports.remove(other);
        assert_eq!(exports.take_change(), Some(ExportSet::default()));
        assert_eq!(exports.take_change(), None);
    }

    #[test]
    fn a_response_with_both_static_clusters_is_whole() {
        let response = |names: &[&str]| Response {
            resources: names
                .iter()
                .map(|name| Resource {
                    name: (*name).into(),
                    ..Resource::default()
                })
                .collect(),
            ..Response::default()
        };
        let service = "inbound-vip|80|tcp|echo.app";
        assert!(is_whole(&response(&["main_internal", "encap"])));
        assert!(is_whole(&response(&["encap", service, "main_internal"])));
        for partial in [
            &[][..],
            &[service],
            &["main_internal", service],
            &["encap", service],
            &["BlackHoleCluster", "forward_inner_connect", service],
        ] {
            assert!(!is_whole(&response(partial)), "{partial:?}");
        }
    }

    #[test]
    fn other_names_export_nothing() {
        let mut exports = Exports::default();
        for name in [
            "inbound-vip|80|tcp|echo.app|more",
            "inbound-vip|80|tcp",
            "inbound-vip|80|http|echo.app",
            "inbound-vip|70000|tcp|echo.app",
            "encap",
            "",
        ] {
            exports.insert(&name.into());
        }
        assert_eq!(exports.take_change(), None);
    }
}
