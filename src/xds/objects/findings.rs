//! Findings about claims to addresses and pods that other claims override.

use std::collections::HashSet;
use std::fmt;
use std::net::SocketAddr;

use super::addresses::AddressClaims;
use super::claims::{Claim, Evidence, Refusal};
use super::limit_findings;
use super::names::Key;
use super::slice::{Pod, Slice};
use super::view::ObjectIndex;
use crate::config::DefaultExposure;
use crate::yaml::Finding;

/// Returns a finding for each slice that names pods of other namespaces. Slices of exposed services
/// also have one for addresses that they may not use, or for host names. VIPs have one for each
/// claim that another one overrides.
pub(super) fn findings(view: &ObjectIndex<'_>, claims: &AddressClaims<'_>) -> Vec<Finding> {
    let exposed = exposed_slices(view);
    let slices = view.all_slices().flat_map(|(key, cluster, slice)| {
        let is_here = *view.network(cluster, slice) == *view.config.gateway.network;
        let is_exposed = is_here && exposed.contains(&std::ptr::from_ref(slice));
        let of_exposed = || refused_address(key, slice, claims).or_else(|| host_name(key, slice));
        foreign_pod(key, slice).into_iter().chain(is_exposed.then(of_exposed).flatten())
    });
    let mut found = limit_findings(slices);
    found.extend(limit_findings(claims.vips.all().filter_map(|one| overridden_vip(claims, one))));
    found
}

/// Returns the slices of exposed services: by an export of their cluster or, in ours, by the
/// configuration.
fn exposed_slices(view: &ObjectIndex<'_>) -> HashSet<*const Slice> {
    let exposure = &view.config.exposure;
    let entries: HashSet<_> =
        exposure.services.iter().filter_map(|one| key_of(&one.service.host)).collect();
    let slices = view.keys().into_iter().flat_map(|key| {
        let exporters: HashSet<_> = view.exporters(key).into_iter().collect();
        let is_entered = exposure.default == DefaultExposure::All || entries.contains(&key);
        let own = view.own_cluster();
        view.slices(key).filter(move |(cluster, _)| {
            let is_own = *cluster == own && !view.is_local(key, own);
            exporters.contains(cluster) || (is_entered && is_own)
        })
    });
    slices.map(|(_, slice)| std::ptr::from_ref(slice)).collect()
}

/// Returns the namespace and name of the service with a Kubernetes hostname.
fn key_of(host: &str) -> Option<Key<'_>> {
    let (name, rest) = host.split_once('.')?;
    let (namespace, _) = rest.split_once('.')?;
    Some((namespace, name))
}

fn refused_address(
    (namespace, name): Key<'_>,
    slice: &Slice,
    claims: &AddressClaims<'_>,
) -> Option<Finding> {
    let addresses = slice.endpoints.iter().flat_map(|one| &one.addresses);
    let ports = slice.ports.iter().map(|port| port.number);
    let used = addresses.flat_map(|ip| claims.used(*ip, ports.clone()));
    let refused = |at| Some((at, claims.endpoints.refusal((namespace, ""), at)?));
    let mut refused = used.filter_map(refused);
    let ((ip, port), refusal) = refused.next()?;
    let ip = match port {
        0 => ip.to_string(),
        port => SocketAddr::new(ip, port).to_string(),
    };
    let others = match refused.count() {
        0 => String::new(),
        others => format!(" (and {others} more)"),
    };
    let what = format!("the address {ip}{others} of {namespace}/{name} is not used: {refusal}");
    let how = match refusal {
        Refusal::Held(of) | Refusal::Equal(of) if port == 0 && of.evidence > Evidence::Slice => {
            "a workload of the mesh file, the Pod that has it, or the Node that has it"
        }
        _ => {
            "addresses of pods of the slice's namespace that Kubernetes keeps up to date, or a \
             workload of the mesh file"
        }
    };
    Some(Finding::warning(&slice.place, what, how).of(namespace))
}

impl fmt::Display for Refusal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = self.other();
        let namespace = of.by.0;
        let by = of.place.map_or_else(|| "the mesh file".to_owned(), ToString::to_string);
        match self {
            Self::Owned(_) => write!(f, "it belongs to namespace {namespace} by {by}"),
            Self::Held(_) => write!(
                f,
                "namespace {namespace} has had it for longer by {by}, with equal evidence"
            ),
            Self::Equal(one) if one.evidence == Evidence::Slice => write!(
                f,
                "namespace {namespace} lists it too at {by}, and neither has evidence for it"
            ),
            Self::Equal(_) => {
                write!(f, "namespace {namespace} lists it too at {by}, with equal evidence")
            }
        }
    }
}

/// Returns the finding for an object whose VIP leads elsewhere.
fn overridden_vip(claims: &AddressClaims<'_>, claim: &Claim<'_>) -> Option<Finding> {
    let kind = match claim.evidence {
        Evidence::Import => "ServiceImport",
        Evidence::Assigned => "Service",
        _ => return None,
    };
    let other = claims.vips.refusal(claim.by, claim.at)?.other();
    let (namespace, name) = other.by;
    let at = other.place.map(|place| format!(" at {place}")).unwrap_or_default();
    let why = match other.evidence {
        Evidence::Import => format!("the ServiceImport {namespace}/{name}{at} has it too"),
        Evidence::Assigned => format!("it is the clusterIP of the Service {namespace}/{name}{at}"),
        Evidence::File => format!("the mesh file gives it to the service {namespace}/{name}"),
        _ => format!("an endpoint of namespace {namespace}{at} has it"),
    };
    let (namespace, name) = claim.by;
    let ip = claim.at.0;
    let what = format!("the address {ip} of the {kind} {namespace}/{name} is not used: {why}");
    let how = "an address that nothing else has";
    Some(Finding::warning(claim.place?, what, how).of(namespace))
}

fn foreign_pod((namespace, name): Key<'_>, slice: &Slice) -> Option<Finding> {
    let mut foreign = slice.endpoints.iter().filter(|one| one.own_pod(namespace).is_none());
    let (of, pod): &Pod = foreign.find_map(|one| one.pod.as_ref())?;
    let what = format!(
        "an endpoint of {namespace}/{name} names the pod {of}/{pod}, which is ignored: a slice \
         names pods of its own namespace only"
    );
    Some(Finding::warning(&slice.place, what, "no such `targetRef`").of(namespace))
}

fn host_name((namespace, name): Key<'_>, slice: &Slice) -> Option<Finding> {
    let mut hosts = slice.endpoints.iter().map(|one| &one.host);
    let host = hosts.find(|host| !host.is_empty())?;
    let what = format!(
        "the endpoint {host} of {namespace}/{name} is not used: the answer to a host name could be \
         an address of another namespace"
    );
    let how = "a workload with this `hostname` into the mesh file, which an operator writes";
    Some(Finding::warning(&slice.place, what, how).of(namespace))
}
