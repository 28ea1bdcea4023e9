//! Labels of pods, by which subsets select workloads.

pub const CLUSTER: &str = "topology.istio.io/cluster";
pub const REGION: &str = "topology.kubernetes.io/region";
pub const ZONE: &str = "topology.kubernetes.io/zone";

/// Labels that every source of the mesh gives: those of the location, and those that Istio derives
/// the canonical revision and name from.
pub const KNOWN_LABELS: [&str; 7] = [
    "version",
    "service.istio.io/canonical-revision",
    "app",
    "service.istio.io/canonical-name",
    CLUSTER,
    REGION,
    ZONE,
];

pub const POD_LABELS_MAX: usize = 64;
/// Limit of the bytes of a value, and of a key without its prefix, in Kubernetes.
const NAME_MAX: usize = 63;
/// Limit of the bytes of a key's prefix, which is a DNS name, in Kubernetes.
const PREFIX_MAX: usize = 253;

/// Returns whether the key and the value of a label have the lengths that Kubernetes permits.
pub fn is_label(key: &str, value: &str) -> bool {
    let (prefix, name) = key.rsplit_once('/').unwrap_or(("", key));
    prefix.len() <= PREFIX_MAX && (1..=NAME_MAX).contains(&name.len()) && value.len() <= NAME_MAX
}
