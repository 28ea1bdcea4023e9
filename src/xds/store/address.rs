//! Content of an address resource: a workload or a service.

use std::sync::Arc;

use bytes::Bytes;
use prost::Message as _;

use crate::grpc::workload as proto;
use crate::snapshot::mesh::{Service, Workload};
use crate::xds::client::Resource;
use crate::xds::convert::shown;
use crate::xds::interner::Interner;
use crate::xds::wds;

pub const ADDRESS: &str = "type.googleapis.com/istio.workload.Address";

/// Limit of the body of one resource, in bytes. Kubernetes limits objects to 1.5 MiB.
pub(in crate::xds) const BODY_BYTES_MAX: usize = 2 * 1024 * 1024;

/// Content of an address resource.
#[derive(Debug, PartialEq)]
pub(super) enum Address {
    Workload(Workload),
    /// Service, with its interned name, by which workloads refer to it.
    Service(Arc<str>, Service),
}

pub(super) fn read_address(
    name: &Arc<str>,
    body: Bytes,
    interner: &mut Interner,
) -> Result<Address, String> {
    let address = proto::Address::decode(body).map_err(|error| error.to_string())?;
    match address.r#type {
        Some(proto::address::Type::Workload(from)) => {
            is_named(name, "workload.uid", &from.uid)?;
            wds::workload(name, from, interner).map(Address::Workload)
        }
        Some(proto::address::Type::Service(from)) => {
            let own = format!("{}/{}", from.namespace, from.hostname);
            let service = wds::service(from)?;
            is_named(name, "service.hostname", &own)?;
            Ok(Address::Service(interner.share_arc(name), service))
        }
        None => Err("address.type: neither workload nor service".to_owned()),
    }
}

/// Returns true if a resource is a workload that can be used.
pub(in crate::xds) fn is_workload(resource: &Resource) -> bool {
    let read = |body: &Bytes| read_address(&resource.name, body.clone(), &mut Interner::default());
    matches!(body(ADDRESS, resource).and_then(read), Ok(Address::Workload(_)))
}

/// Returns the body of a resource of a type.
pub(super) fn body<'a>(wanted: &str, resource: &'a Resource) -> Result<&'a Bytes, String> {
    if *resource.body_type != *wanted {
        let got = shown(&resource.body_type);
        return Err(format!("resource.type_url: {got}, want `{wanted}`"));
    }
    let body = resource.body.as_ref().ok_or("resource: missing")?;
    if body.len() > BODY_BYTES_MAX {
        let bytes = body.len();
        return Err(format!("resource: {bytes} bytes, want at most {BODY_BYTES_MAX}"));
    }
    Ok(body)
}

/// Checks that a resource is named after its content, because resources are removed by name.
pub(in crate::xds) fn is_named(own: &str, field: &str, name: &str) -> Result<(), String> {
    if *own == *name {
        return Ok(());
    }
    let (name, own) = (shown(name), shown(own));
    Err(format!("{field}: {name} is named {own}"))
}
