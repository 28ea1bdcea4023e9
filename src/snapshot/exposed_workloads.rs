//! Workloads that peers may reach at their own addresses, because an exposure entry of their
//! service allows it. No other address of a workload resolves.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use super::Shards;

/// Workloads of the services whose entry exposes them.
#[derive(Clone, Debug, Default)]
pub(super) struct ExposedWorkloads {
    /// Addresses and workloads by the hostname of their service.
    pub(super) services: Shards<Arc<str>, Arc<BTreeSet<WorkloadAddress>>>,
    /// Services and workloads at each address of this network, in order of the hostnames.
    pub(super) addresses: Shards<IpAddr, Arc<[ServiceWorkload]>>,
}

/// Hostname of a service, and uid of one of its workloads.
pub(super) type ServiceWorkload = (Arc<str>, Arc<str>);

/// Address of a workload, and its uid.
pub(super) type WorkloadAddress = (IpAddr, Arc<str>);

impl ExposedWorkloads {
    /// Records whether a workload of a service is at an address.
    pub(super) fn set_served(
        &mut self,
        ip: IpAddr,
        host: &Arc<str>,
        uid: &Arc<str>,
        is_there: bool,
    ) {
        let old = self.addresses.get(&ip).into_iter();
        let old = old.flat_map(|places| places.iter());
        let others = old.filter(|(other, own)| (other, own) != (host, uid));
        let mut places: Vec<_> = others.cloned().collect();
        places.extend(is_there.then(|| (Arc::clone(host), Arc::clone(uid))));
        places.sort_unstable();
        let places = (!places.is_empty()).then(|| places.into());
        self.addresses.set(ip, places);
    }
}
