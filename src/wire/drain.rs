//! Parts of the mesh and of this gateway that an operator drains.

use std::net::{IpAddr, SocketAddr};

use derive_more::Display;

use super::RegionPattern;

/// Limit of the name of a part, in bytes.
const NAME_BYTES_MAX: usize = 2048;

/// Part of the mesh that new tunnels avoid, or listener that accepts none.
#[derive(Clone, Debug, Display, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[display("{} {}", self.kind(), self.name())]
pub enum DrainTarget {
    /// Everything in a region, zone or subzone.
    Region(RegionPattern),
    /// All workloads and gateways of a cluster.
    Cluster(Box<str>),
    /// Workload or gateway with this address.
    Address(IpAddr),
    Workload(Box<str>),
    /// Gateway of another network, by the address of its HBONE port.
    Gateway(SocketAddr),
    /// Service, by its hostname or `namespace/hostname`.
    Service(Box<str>),
    /// Listener of the configuration, by its name.
    Listener(Box<str>),
}

impl DrainTarget {
    /// Names of the kinds, as the commands and the pages write them.
    pub const KINDS: [&str; 6] =
        ["region", "cluster", "endpoint", "gateway", "service", "listener"];

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
            "gateway" => Some(Self::Gateway(name.parse().ok()?)),
            "service" => is_name.then(|| Self::Service(name.into())),
            "listener" => is_name.then(|| Self::Listener(name.into())),
            _ => None,
        }
    }

    pub fn kind(&self) -> &'static str {
        match self {
            Self::Region(_) => "region",
            Self::Cluster(_) => "cluster",
            Self::Address(_) | Self::Workload(_) => "endpoint",
            Self::Gateway(_) => "gateway",
            Self::Service(_) => "service",
            Self::Listener(_) => "listener",
        }
    }

    pub fn name(&self) -> String {
        match self {
            Self::Region(region) => region.to_string(),
            Self::Cluster(name)
            | Self::Workload(name)
            | Self::Service(name)
            | Self::Listener(name) => name.to_string(),
            Self::Address(address) => address.to_string(),
            Self::Gateway(address) => address.to_string(),
        }
    }
}

impl From<RegionPattern> for DrainTarget {
    fn from(region: RegionPattern) -> Self {
        Self::Region(region)
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
            ("gateway", "192.0.2.1:15008"),
            ("gateway", "[fd00::9]:15008"),
            ("service", "app/echo.app.svc.cluster.local"),
            ("listener", "cross network"),
        ] {
            let target = DrainTarget::parse(kind, name).expect(name);
            assert_eq!((target.kind(), &*target.name()), (kind, name));
        }
        for (kind, name) in [
            ("region", "*"),
            ("region", ""),
            ("cluster", ""),
            ("endpoint", "a\n"),
            ("gateway", "192.0.2.1"),
            ("service", ""),
            ("listener", "a\tb"),
            ("zone", "a"),
        ] {
            assert_eq!(DrainTarget::parse(kind, name), None, "{kind} {name:?}");
        }
    }
}
