//! Decoder of many workloads, of which the pods of a Deployment differ in few fields.
//!
//! All other fields of a workload are compared with those of earlier ones as they were received.
//! Only the first one of its kind is decoded and converted as a whole.

use std::sync::Arc;

use bytes::Bytes;
use foldhash::HashMap;

use super::address::{Address, read_address};
use crate::snapshot::mesh::Workload;
use crate::xds::convert::ip;
use crate::xds::interner::Interner;
use crate::xds::push::{delimited, text};
use crate::xds::unknown::for_each_raw_field;
use crate::xds::wds::ADDRESSES_MAX;

/// Field number of a workload in an address, and those of its own fields.
const WORKLOAD: u32 = 1;
const NAME: u32 = 1;
const ADDRESSES: u32 = 3;
const NODE: u32 = 9;
const UID: u32 = 20;
/// Field number of the map of services.
const SERVICES: u32 = 22;

/// Limit of the workloads that others are compared with, in bytes. Each counts with its common
/// fields as received and its fixed size: 20,000 Deployments of 600 bytes.
const KNOWN_BYTES_MAX: usize = 16 * 1024 * 1024;

#[derive(Debug, Default)]
pub(super) struct Alike {
    /// First workload with these common fields, encoded one after the other.
    known: HashMap<Box<[u8]>, Workload>,
    known_bytes: usize,
    common: Vec<u8>,
}

/// Fields that distinguish the pods of a Deployment.
#[derive(Default)]
struct Own<'a> {
    uid: &'a str,
    name: &'a str,
    node: &'a str,
    addresses: Vec<&'a [u8]>,
}

impl Alike {
    /// Returns what [`read_address`] does.
    pub(super) fn read(
        &mut self,
        name: &Arc<str>,
        body: Bytes,
        interner: &mut Interner,
    ) -> Result<Address, String> {
        self.common.clear();
        let own = own_fields(&body, &mut self.common).filter(|own| *own.uid == **name);
        let known = self.known.get(&*self.common);
        let alike = known.zip(own.as_ref()).and_then(|(known, own)| {
            let addresses = own.addresses.iter().map(|bytes| ip(bytes).ok());
            Some(Workload {
                uid: Arc::clone(name),
                own_name: Workload::own_name(name, own.name),
                node: interner.share(own.node),
                addresses: addresses.collect::<Option<_>>()?,
                network_gateway: known.network_gateway.clone(),
                services: known.services.clone(),
                template: Arc::clone(&known.template),
                ..*known
            })
        });
        if let Some(workload) = alike {
            return Ok(Address::Workload(workload));
        }
        let is_first = own.is_some() && known.is_none();
        let address = read_address(name, body.clone(), interner)?;
        let bytes = self.known_bytes + self.common.len() + size_of::<(Box<[u8]>, Workload)>();
        let has_room = bytes <= KNOWN_BYTES_MAX;
        if let (Address::Workload(workload), true) = (&address, is_first && has_room) {
            self.known.insert(self.common.as_slice().into(), workload.clone());
            self.known_bytes = bytes;
        }
        Ok(address)
    }
}

/// Returns the own fields of a workload, and appends the others to `common`. Returns `None` for all
/// else, and for what can be decoded only as a whole, or not at all.
fn own_fields<'a>(body: &'a [u8], common: &mut Vec<u8>) -> Option<Own<'a>> {
    let (mut own, mut workload) = (Own::default(), None);
    for_each_raw_field(body, |number, wire, value, _| {
        let is_only = number == WORKLOAD && workload.replace(delimited(wire, value)?).is_none();
        if is_only { Ok(()) } else { Err("more than one workload".to_owned()) }
    })
    .ok()?;
    for_each_raw_field(workload?, |number, wire, value, raw| {
        match number {
            UID => own.uid = text(wire, value)?,
            NAME => own.name = text(wire, value)?,
            NODE => own.node = text(wire, value)?,
            ADDRESSES => own.addresses.push(delimited(wire, value)?),
            _ => common.extend_from_slice(raw),
        }
        // prost reads an entry of a map whatever wire type it has.
        if number == SERVICES {
            delimited(wire, value)?;
        }
        Ok(())
    })
    .ok()?;
    (!own.uid.is_empty() && own.addresses.len() <= ADDRESSES_MAX).then_some(own)
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::grpc::workload as proto;

    /// Returns a pod of one of two Deployments.
    fn pod(index: usize) -> proto::Workload {
        let service = format!("app/echo-{}.app", index % 2);
        let ports = vec![proto::Port { service_port: 80, target_port: 8080, app_protocol: 0 }];
        let [last, ..] = index.to_le_bytes();
        proto::Workload {
            uid: format!("east//Pod/app/{index}"),
            name: format!("pod-{index}"),
            namespace: "app".into(),
            addresses: vec![vec![10, 0, 0, last].into()],
            node: format!("node-{}", index % 3),
            trust_domain: "east.local".into(),
            service_account: format!("account-{}", index % 2),
            services: [(service, proto::PortList { ports })].into(),
            capacity: Some(2),
            ..proto::Workload::default()
        }
    }

    fn encoded(workload: proto::Workload) -> Vec<u8> {
        let r#type = Some(proto::address::Type::Workload(workload));
        proto::Address { r#type }.encode_to_vec()
    }

    /// Reads a body in both ways, and compares the results.
    #[track_caller]
    fn compare(alike: &mut Alike, interner: &mut Interner, name: &str, body: &[u8]) -> bool {
        let (name, body) = (name.into(), Bytes::copy_from_slice(body));
        let read = alike.read(&name, body.clone(), interner);
        assert_eq!(read, read_address(&name, body, interner));
        read.is_ok()
    }

    #[test]
    fn pods_that_are_alike_are_read_as_if_each_were_decoded() {
        let (mut alike, mut interner) = (Alike::default(), Interner::default());
        for index in 0..20 {
            let pod = pod(index);
            let name = pod.uid.clone();
            assert!(compare(&mut alike, &mut interner, &name, &encoded(pod)));
        }
        assert_eq!(alike.known.len(), 2, "one for each Deployment");
        let of_service = proto::address::Type::Service(proto::Service {
            namespace: "app".into(),
            hostname: "echo.app".into(),
            ..proto::Service::default()
        });
        let service = proto::Address { r#type: Some(of_service) }.encode_to_vec();
        assert!(compare(&mut alike, &mut interner, "app/echo.app", &service));
        assert_eq!(alike.known.len(), 2);
        let good: [fn(&mut proto::Workload); 5] = [
            |pod| pod.name = "4".into(),
            |pod| pod.addresses = vec![vec![0; 16].into(), vec![10, 0, 0, 1].into()],
            |pod| pod.addresses.clear(),
            |pod| pod.capacity = None,
            |pod| pod.node.clear(),
        ];
        for change in good {
            let mut pod = pod(4);
            change(&mut pod);
            let name = pod.uid.clone();
            assert!(compare(&mut alike, &mut interner, &name, &encoded(pod)));
        }
        let bad: [fn(&mut proto::Workload); 4] = [
            |pod| pod.uid = "other".into(),
            |pod| pod.addresses = vec![vec![0; 5].into()],
            |pod| pod.addresses = vec![vec![10, 0, 0, 1].into(); 65],
            |pod| pod.namespace = "a/b".into(),
        ];
        for change in bad {
            let mut pod = pod(4);
            change(&mut pod);
            assert!(!compare(&mut alike, &mut interner, "east//Pod/app/4", &encoded(pod)));
        }
    }

    #[test]
    fn the_workloads_that_others_are_compared_with_are_bounded_in_bytes() {
        let (mut alike, mut interner) = (Alike::default(), Interner::default());
        for index in 0..20 {
            let host = format!("{index:02}").repeat(1 << 19);
            let pod = proto::Workload { hostname: host, ..pod(0) };
            let name = pod.uid.clone();
            assert!(compare(&mut alike, &mut interner, &name, &encoded(pod)));
        }
        let bytes: usize = alike.known.keys().map(|common| common.len()).sum();
        assert!(alike.known.len() == 15 && bytes < alike.known_bytes);
        assert!(alike.known_bytes <= KNOWN_BYTES_MAX);
    }

    #[test]
    fn any_flipped_bit_gives_the_same_workload_or_error() {
        let (mut alike, mut interner) = (Alike::default(), Interner::default());
        let (one, other) = (encoded(pod(0)), encoded(pod(2)));
        let twice = [&*one, &*other].concat();
        for body in [&one, &other, &twice] {
            for (at, bit) in (0..body.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
                let mut flipped = body.clone();
                flipped[at] ^= 1 << bit;
                for name in ["east//Pod/app/0", "east//Pod/app/2"] {
                    compare(&mut alike, &mut interner, name, &flipped);
                }
            }
            for end in 0..body.len() {
                compare(&mut alike, &mut interner, "east//Pod/app/2", &body[..end]);
            }
        }
    }
}
