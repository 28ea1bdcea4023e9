//! Holders of virtual addresses: the one service to which each claimed address of our network
//! leads.
//!
//! The mesh file takes precedence, then a Service, because Kubernetes allocates each clusterIP
//! once. ServiceImports come last, because their author can write any address. Of equal claims that
//! of the service that had the address before counts, and without one none.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use super::names::{Key, OwnedKey};
use super::owners::AddressOwners;
use super::service::Service;
use super::view::ObjectIndex;
use super::{Import, limit_findings};
use crate::snapshot::mesh::Mesh;
use crate::yaml::{Finding, Place};

/// Source of a claim to an address, the weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    Import,
    /// An endpoint of another namespace than the import's. A tunnel to its own address stays
    /// there.
    Endpoint,
    Service,
    File,
}

#[derive(Clone, Copy, Debug)]
struct Claim<'a> {
    source: Source,
    key: Key<'a>,
    place: Option<&'a Place>,
}

/// Claims to one address, the weakest first, each with its position. One tenant may write any
/// number of them.
type Claims<'a> = BTreeMap<(Source, Key<'a>), Option<&'a Place>>;

/// All claims to virtual addresses.
pub(super) struct VipClaims<'a> {
    claims: BTreeMap<IpAddr, Claims<'a>>,
    /// Services that had the addresses before.
    held: &'a HashMap<IpAddr, OwnedKey>,
}

impl<'a> VipClaims<'a> {
    /// Collects the claims of objects and of a mesh file.
    pub(super) fn new(
        view: &ObjectIndex<'a>,
        mesh: &'a Mesh,
        owners: &AddressOwners<'a>,
        held: &'a HashMap<IpAddr, OwnedKey>,
    ) -> Self {
        let mut vips = Self { claims: BTreeMap::new(), held };
        let network = &*view.config.gateway.network;
        for service in mesh.services.values() {
            let key = (&*service.namespace, &*service.name);
            let here = service.vips.iter();
            for (_, ip) in here.filter(|(of, _)| of.is_empty() || of == network) {
                vips.note(*ip, Source::File, key, None);
            }
        }
        for key in view.keys() {
            if let Some(service) = view.service(key, view.own_cluster()) {
                for ip in &service.ips {
                    vips.note(*ip, Source::Service, key, Some(&service.meta.place));
                }
            }
            if let Some(import) = view.import(key) {
                vips.note_import(key, import, owners);
            }
        }
        for (key, import) in view.bad_imports() {
            vips.note_import(key, import, owners);
        }
        vips
    }

    fn note_import(&mut self, key: Key<'a>, import: &'a Import, owners: &AddressOwners<'a>) {
        for ip in &import.ips {
            self.note(*ip, Source::Import, key, Some(&import.meta.place));
            if let Some(owner) = owners.proven_elsewhere(*ip, key.0) {
                self.note(*ip, Source::Endpoint, (owner.namespace, ""), owner.place);
            }
        }
    }

    /// Records a claim, once per source and service.
    fn note(&mut self, ip: IpAddr, source: Source, key: Key<'a>, place: Option<&'a Place>) {
        let claims = self.claims.entry(ip).or_default();
        claims.entry((source, key)).or_insert(place);
    }

    /// Returns the addresses of a Service that lead to it.
    pub(super) fn of_service(&self, key: Key<'_>, service: &Service) -> Vec<IpAddr> {
        self.held_addresses(&service.ips, Source::Service, key)
    }

    /// Returns the addresses of a ServiceImport that lead to it.
    pub(super) fn of_import(&self, key: Key<'_>, import: &Import) -> Vec<IpAddr> {
        self.held_addresses(&import.ips, Source::Import, key)
    }

    fn held_addresses(&self, ips: &[IpAddr], source: Source, key: Key<'_>) -> Vec<IpAddr> {
        let holds = |ip: &&IpAddr| {
            let holder = self.holder(**ip);
            holder.is_some_and(|one| (one.source, one.key) == (source, key))
        };
        ips.iter().filter(holds).copied().collect()
    }

    /// Returns the best claim. Of several with the same source, it is that of the service that had
    /// the address before.
    fn holder(&self, ip: IpAddr) -> Option<Claim<'a>> {
        let mut best = all(self.claims.get(&ip)?).rev();
        let first = best.next()?;
        let mut equal = best.take_while(|next| next.source == first.source);
        let Some(next) = equal.next() else {
            return Some(first);
        };
        let (namespace, name) = self.held.get(&ip)?;
        let mut equal = [first, next].into_iter().chain(equal);
        equal.find(|one| one.key == (&**namespace, &**name))
    }

    /// Returns the service that has each address.
    pub(super) fn holders(&self) -> HashMap<IpAddr, OwnedKey> {
        let held = self.claims.keys().filter_map(|ip| {
            let (namespace, name) = self.holder(*ip)?.key;
            Some((*ip, (namespace.into(), name.into())))
        });
        held.collect()
    }

    /// Returns a finding for each claim that another claim overrides.
    pub(super) fn findings(&self) -> Vec<Finding> {
        let lost = self.claims.iter().flat_map(|(ip, claims)| {
            let holder = self.holder(*ip);
            let is_lost = move |one: &Claim<'a>| holder.is_none_or(|by| by.key != one.key);
            let lost = all(claims).filter(is_lost);
            lost.filter_map(|claim| finding(*ip, claim, claims))
        });
        limit_findings(lost)
    }
}

/// Returns the claims, the weakest first.
fn all<'b, 'a>(claims: &'b Claims<'a>) -> impl DoubleEndedIterator<Item = Claim<'a>> + use<'b, 'a> {
    let claims = claims.iter();
    claims.map(|((source, key), place)| Claim { source: *source, key: *key, place: *place })
}

/// Builds the finding for an overridden claim. It names the best of the other claims.
fn finding(ip: IpAddr, claim: Claim<'_>, claims: &Claims<'_>) -> Option<Finding> {
    let kind = match claim.source {
        Source::Import => "ServiceImport",
        Source::Service => "Service",
        Source::Endpoint | Source::File => return None,
    };
    let other = all(claims).rev().find(|one| one.key != claim.key)?;
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
    let how = "an address that nothing else has";
    Some(Finding::warning(claim.place?, what, how).of(namespace))
}
