//! Subsets of a service's endpoints, by labels of their workloads.

use std::fmt;
use std::sync::Arc;

use super::mesh::Workload;
use super::remote::UNNAMED_CLUSTER;
use crate::config::{ExposedService, ServiceSubset};
use crate::wire::label::{CLUSTER, REGION, ZONE};

/// Subset, or shares of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subset {
    /// Name in server names and aliases.
    pub name: Box<str>,
    /// Its only part, or the subsets that share its tunnels. The first that a workload matches
    /// counts.
    pub parts: Box<[SubsetPart]>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubsetPart {
    pub name: Arc<str>,
    /// Keys and values of all labels that its workloads have.
    pub labels: Vec<(String, String)>,
    pub weight: u32,
}

impl Subset {
    /// Returns a subset of the service `host`. The subsets that may share its tunnels are those of
    /// `services`.
    pub fn of(host: &str, of: &ServiceSubset, services: &[ExposedService]) -> Self {
        let shares = of.split.iter().filter_map(|share| {
            let of = find(services, host, &share.subset)?;
            Some(SubsetPart::of(of, share.weight))
        });
        let own = of.split.is_empty().then(|| SubsetPart::of(of, 1));
        Self { name: of.name.as_str().into(), parts: shares.chain(own).collect() }
    }

    pub(super) fn part_of(&self, workload: &Workload) -> Option<usize> {
        let has = |part: &SubsetPart| part.has(|key| label(workload, key));
        self.parts.iter().position(has)
    }

    /// Returns the index of the part of all instances behind gateways of a cluster.
    ///
    /// A tunnel names the service to the gateway, and not a subset: any of the instances may get
    /// it. All of them thus need the labels, and these can only be of the location, because one
    /// record may represent many instances.
    pub(super) fn part_of_network<'a>(
        &self,
        instances: impl Iterator<Item = &'a Workload> + Clone,
        cluster: &'a str,
    ) -> Option<usize> {
        let has = |part: &SubsetPart, one: &'a Workload| {
            part.has(|key| match key {
                CLUSTER if [UNNAMED_CLUSTER, ""].contains(&&*one.cluster) => Some(cluster),
                CLUSTER | REGION | ZONE => label(one, key),
                _ => None,
            })
        };
        self.parts.iter().position(|part| instances.clone().all(|one| has(part, one)))
    }
}

/// Returns a subset that an entry of the service `host` defines.
pub(super) fn find<'a>(
    services: &'a [ExposedService],
    host: &str,
    name: &str,
) -> Option<&'a ServiceSubset> {
    let mut services = services.iter().filter(|exposed| exposed.service.host == host);
    services.find_map(|exposed| exposed.subset(name))
}

impl SubsetPart {
    fn of(of: &ServiceSubset, weight: u32) -> Self {
        Self { name: of.name.as_str().into(), labels: of.labels.clone(), weight }
    }

    fn has<'a>(&self, value: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.labels.iter().all(|(key, wanted)| value(key) == Some(&**wanted))
    }
}

/// Returns the value of a label of a workload. Sources without labels give those that Istio derives
/// from them.
fn label<'a>(workload: &'a Workload, key: &str) -> Option<&'a str> {
    let derived = match key {
        CLUSTER => return Some(&workload.cluster),
        REGION => return Some(&workload.locality.region),
        ZONE => return Some(&workload.locality.zone),
        "version" | "service.istio.io/canonical-revision" => Some(&workload.canonical_revision),
        "app" | "service.istio.io/canonical-name" => Some(&workload.canonical_name),
        _ => None,
    };
    workload.pod_labels.get(key).or(derived).map(|value| &**value)
}

impl fmt::Display for Subset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        for part in &self.parts {
            let labels = part.labels.iter().map(|(key, value)| format!("{key}: {value}"));
            let labels: Vec<_> = labels.collect();
            write!(f, " {{{}}} {}", labels.join(", "), part.weight)?;
        }
        Ok(())
    }
}
