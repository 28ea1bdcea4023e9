//! Holders of virtual addresses: of all that claim an address of our network, the one service that
//! it leads to.
//!
//! The mesh file goes first, then a Service, whose clusterIP Kubernetes allocates and no other has,
//! and ServiceImports last, whose author writes any address. Of equal claims none holds.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::Import;
use super::WARNINGS_MAX;
use super::owners::Owners;
use super::ports::warning;
use super::service::Service;
use super::view::{Key, View};
use crate::config::{Finding, Place};
use crate::snapshot::mesh::Mesh;

/// Source of a claim to an address, the weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    Import,
    /// An endpoint of a namespace without the import. A tunnel to its own address stays there.
    Endpoint,
    Service,
    File,
}

#[derive(Debug)]
struct Claim<'a> {
    source: Source,
    key: Key<'a>,
    place: Option<&'a Place>,
}

/// All claims to virtual addresses.
pub(super) struct Vips<'a>(BTreeMap<IpAddr, Vec<Claim<'a>>>);

impl<'a> Vips<'a> {
    /// Collects the claims of objects and of a mesh file.
    pub(super) fn new(view: &View<'a>, mesh: &'a Mesh, owners: &Owners<'a>) -> Self {
        let mut vips = Self(BTreeMap::new());
        let network = &*view.config.gateway.network;
        for service in mesh.services.values() {
            let key = (&*service.namespace, &*service.name);
            let here = service.vips.iter();
            for (_, ip) in here.filter(|(of, _)| of.is_empty() || of == network) {
                vips.note(*ip, Source::File, key, None);
            }
        }
        for key in view.keys() {
            if let Some(service) = view.service(key, view.own()) {
                for ip in &service.ips {
                    vips.note(*ip, Source::Service, key, Some(&service.meta.place));
                }
            }
            let Some(import) = view.import(key) else {
                continue;
            };
            for ip in &import.ips {
                vips.note(*ip, Source::Import, key, Some(&import.meta.place));
                if let Some(owner) = owners.proven_elsewhere(*ip, key.0) {
                    vips.note(*ip, Source::Endpoint, (owner.namespace, ""), owner.place);
                }
            }
        }
        vips
    }

    /// Notes a claim, once for each source and service.
    fn note(&mut self, ip: IpAddr, source: Source, key: Key<'a>, place: Option<&'a Place>) {
        let claims = self.0.entry(ip).or_default();
        if !claims
            .iter()
            .any(|one| (one.source, one.key) == (source, key))
        {
            claims.push(Claim { source, key, place });
        }
    }

    /// Returns those addresses of a Service that lead to it.
    pub(super) fn of_service(&self, key: Key<'_>, service: &Service) -> Vec<IpAddr> {
        self.held(&service.ips, Source::Service, key)
    }

    /// Returns those addresses of a ServiceImport that lead to it.
    pub(super) fn of_import(&self, key: Key<'_>, import: &Import) -> Vec<IpAddr> {
        self.held(&import.ips, Source::Import, key)
    }

    fn held(&self, ips: &[IpAddr], source: Source, key: Key<'_>) -> Vec<IpAddr> {
        let holds = |ip: &&IpAddr| {
            let holder = self.0.get(*ip).and_then(|claims| holder(claims));
            holder.is_some_and(|one| (one.source, one.key) == (source, key))
        };
        ips.iter().filter(holds).copied().collect()
    }

    /// Returns a finding for each claim that another one keeps from its address.
    pub(super) fn findings(&self) -> Vec<Finding> {
        let lost = self.0.iter().flat_map(|(ip, claims)| {
            let holder = holder(claims);
            let is_lost = move |one: &&Claim<'a>| holder.is_none_or(|by| by.key != one.key);
            let lost = claims.iter().filter(is_lost);
            lost.filter_map(|claim| finding(*ip, claim, claims))
        });
        lost.take(WARNINGS_MAX).collect()
    }
}

/// Returns the best claim, unless there are several.
fn holder<'b, 'a>(claims: &'b [Claim<'a>]) -> Option<&'b Claim<'a>> {
    let best = claims.iter().map(|one| one.source).max()?;
    let mut holders = claims.iter().filter(|one| one.source == best);
    holders.next().filter(|_| holders.next().is_none())
}

/// Returns what is to be said of a claim that does not hold, naming the best of the other claims.
fn finding(ip: IpAddr, claim: &Claim<'_>, claims: &[Claim<'_>]) -> Option<Finding> {
    let kind = match claim.source {
        Source::Import => "ServiceImport",
        Source::Service => "Service",
        Source::Endpoint | Source::File => return None,
    };
    let others = claims.iter().filter(|one| one.key != claim.key);
    let other = others.max_by_key(|one| one.source)?;
    let (namespace, name) = other.key;
    let at = other.place.map(|place| format!(" at {place}"));
    let at = at.unwrap_or_default();
    let why = match other.source {
        Source::Import => format!("the ServiceImport {namespace}/{name}{at} has it too"),
        Source::Endpoint => format!("an endpoint of namespace {namespace}{at} has it"),
        Source::Service => format!("it is the clusterIP of the Service {namespace}/{name}{at}"),
        Source::File => format!("the mesh file gives it to the service {namespace}/{name}"),
    };
    let (namespace, name) = claim.key;
    let what = format!("the address {ip} of the {kind} {namespace}/{name} is not used: {why}");
    Some(warning(
        claim.place?,
        what,
        "an address that nothing else has",
    ))
}
