//! VIPs: addresses that are derived from names.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use aws_lc_rs::digest::{SHA256, digest};
use ipnet::IpNet;

/// Returns the number of VIPs of a network. The first and the last address are left out: they may
/// mean the network and a broadcast.
pub fn vip_count(network: IpNet) -> u128 {
    let bits = u32::from(network.max_prefix_len() - network.prefix_len()).min(127);
    (1_u128 << bits).saturating_sub(2)
}

/// Takes the VIP of a name: its hash, or the next address that is free. There is none once all are
/// taken.
pub fn vip(network: IpNet, name: &str, taken: &mut BTreeSet<u128>) -> Option<IpAddr> {
    let hosts = vip_count(network);
    if hosts == 0 {
        return None;
    }
    let hash = digest(&SHA256, name.as_bytes());
    let hash = hash.as_ref().first_chunk().copied()?;
    let start = u128::from_be_bytes(hash) % hosts;
    let place = (start..hosts).chain(0..start).find(|place| taken.insert(*place))? + 1;
    match network.network() {
        IpAddr::V4(first) => {
            let place = u32::try_from(place).ok()?;
            Some(Ipv4Addr::from_bits(first.to_bits().checked_add(place)?).into())
        }
        IpAddr::V6(first) => Some(Ipv6Addr::from_bits(first.to_bits().checked_add(place)?).into()),
    }
}
