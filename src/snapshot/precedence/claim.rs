//! Claims of services to hostnames and VIPs.

use std::sync::Arc;

use crate::snapshot::mesh;

#[derive(Clone, Debug)]
pub(in crate::snapshot) struct Claim {
    /// Service as `namespace/hostname`.
    pub(in crate::snapshot) name: Arc<str>,
    pub(in crate::snapshot) service: Arc<mesh::Service>,
    /// Version of the snapshot since which the claim exists without interruption.
    pub(in crate::snapshot) since: u64,
}

/// Claim to a VIP by a service that answers to its hostname.
#[derive(Clone, Debug)]
pub(in crate::snapshot) struct VipClaim {
    pub(in crate::snapshot) host: Arc<str>,
    pub(in crate::snapshot) rank: Rank,
}

/// Rank of a claim; the lowest wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::snapshot) struct Rank {
    pub(in crate::snapshot) is_unconfigured: bool,
    pub(in crate::snapshot) is_not_canonical: bool,
    pub(in crate::snapshot) is_not_owner: bool,
    pub(in crate::snapshot) since: u64,
}
