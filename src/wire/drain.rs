//! Parts of the mesh that an operator evacuates.

use std::fmt;
use std::net::IpAddr;

use super::RegionPattern;

/// Limit of the name of a cluster or workload, in bytes.
const NAME_BYTES_MAX: usize = 2048;

/// Part of the mesh that new tunnels avoid.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DrainTarget {
    /// Everything in a region, zone or subzone.
    Region(RegionPattern),
    /// All workloads and gateways of a cluster.
    Cluster(Box<str>),
    /// Workload or gateway with this address.
    Address(IpAddr),
    /// Workload with this uid.
    Workload(Box<str>),
}

impl DrainTarget {
    /// Names of the kinds, as the commands and the pages write them.
    pub const KINDS: [&str; 3] = ["region", "cluster", "endpoint"];

    /// Parses the name of a part of a kind. A region must not be `*`; an endpoint is an IP address
    /// or the uid of a workload.
    pub fn parse(kind: &str, name: &str) -> Option<Self> {
        let is_name = !name.is_empty() && name.len() <= NAME_BYTES_MAX;
        let is_name = is_name && !name.contains(char::is_control);
        match kind {
            "region" => {
                let region = RegionPattern::parse(name)?;
                (region.part_count() > 0).then_some(Self::Region(region))
            }
            "cluster" => is_name.then(|| Self::Cluster(name.into())),
            "endpoint" => match name.parse() {
                Ok(address) => Some(Self::Address(address)),
                Err(_) => is_name.then(|| Self::Workload(name.into())),
            },
            _ => None,
        }
    }

    /// Returns the name of the kind.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Region(_) => "region",
            Self::Cluster(_) => "cluster",
            Self::Address(_) | Self::Workload(_) => "endpoint",
        }
    }

    /// Returns the name of the part.
    pub fn name(&self) -> String {
        match self {
            Self::Region(region) => region.to_string(),
            Self::Cluster(name) | Self::Workload(name) => name.to_string(),
            Self::Address(address) => address.to_string(),
        }
    }
}

impl From<RegionPattern> for DrainTarget {
    fn from(region: RegionPattern) -> Self {
        Self::Region(region)
    }
}

impl fmt::Display for DrainTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind(), self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_written_as_it_is_parsed() {
        for (kind, name) in [
            ("region", "us-west-2/us-west-2a"),
            ("cluster", "west"),
            ("endpoint", "10.0.0.1"),
            ("endpoint", "fd00::9"),
            ("endpoint", "east//Pod/app/echo-1"),
        ] {
            let target = DrainTarget::parse(kind, name).expect(name);
            assert_eq!((target.kind(), &*target.name()), (kind, name));
        }
        for (kind, name) in
            [("region", "*"), ("region", ""), ("cluster", ""), ("endpoint", "a\n"), ("zone", "a")]
        {
            assert_eq!(DrainTarget::parse(kind, name), None, "{kind} {name:?}");
        }
    }
}
