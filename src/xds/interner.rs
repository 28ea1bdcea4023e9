//! Interner of strings and other values that many resources have in common.

use std::borrow::Borrow;
use std::hash::{BuildHasher as _, Hash, Hasher as _};
use std::sync::Arc;

use foldhash::HashMap;
use foldhash::fast::RandomState;

use crate::snapshot::Locality;
use crate::snapshot::mesh::{GatewayAddress, Ports, Services, Sorted, Template};

/// Number of values of a kind below which unused ones are not removed.
const SWEEP_MIN: usize = 1024;

/// Interned namespaces, clusters, nodes and the like. Unused ones are removed from time to time.
#[derive(Debug, Default)]
pub(super) struct Interner {
    /// Seed of all hashes. Values of one hash are compared, so a collision costs only memory.
    state: RandomState,
    strings: Shared<str>,
    localities: Shared<Locality>,
    gateways: Shared<GatewayAddress>,
    /// Templates by the addresses of their shared parts, which is much cheaper than by their
    /// contents.
    templates: Shared<Template>,
    /// Services by the addresses of their names.
    services: Shared<Sorted<Arc<str>, Ports>>,
}

impl Interner {
    pub(super) fn share(&mut self, word: &str) -> Arc<str> {
        if word.is_empty() {
            return Arc::default();
        }
        self.strings.share(self.state.hash_one(word), word)
    }

    /// Returns the interned copy of a string, and interns this copy if there is none.
    pub(super) fn share_arc(&mut self, word: &Arc<str>) -> Arc<str> {
        self.strings.share(self.state.hash_one(word), Arc::clone(word))
    }

    pub(super) fn share_locality(
        &mut self,
        region: &str,
        zone: &str,
        subzone: &str,
    ) -> Arc<Locality> {
        let locality = Locality {
            region: self.share(region),
            zone: self.share(zone),
            subzone: self.share(subzone),
        };
        let hash = self.state.hash_one(&locality);
        self.localities.share(hash, locality)
    }

    pub(super) fn share_gateway(&mut self, gateway: GatewayAddress) -> Arc<GatewayAddress> {
        let hash = self.state.hash_one(&gateway);
        self.gateways.share(hash, gateway)
    }

    /// Returns the interned copy of a template. Its strings and locality must be interned.
    pub(super) fn share_template(&mut self, template: Template) -> Arc<Template> {
        let Template {
            namespace,
            service_account,
            trust_domain,
            cluster,
            network,
            hostname,
            protocol,
            locality,
            workload_name,
            workload_type,
            canonical_name,
            canonical_revision,
            host_network,
            has_waypoint,
            policies,
            pod_labels,
            labels: _,
        } = &template;
        let strings = [
            namespace,
            service_account,
            trust_domain,
            cluster,
            network,
            hostname,
            workload_name,
            workload_type,
            canonical_name,
            canonical_revision,
        ];
        let mut hasher = self.state.build_hasher();
        let labels = pod_labels.iter().flat_map(|(key, value)| [key, value]);
        for text in strings.into_iter().chain(policies.iter()).chain(labels) {
            Arc::as_ptr(text).addr().hash(&mut hasher);
        }
        Arc::as_ptr(locality).addr().hash(&mut hasher);
        (protocol, host_network, has_waypoint).hash(&mut hasher);
        self.templates.share(hasher.finish(), template)
    }

    /// Returns the interned copy of services. Their names must be interned.
    pub(super) fn share_services(&mut self, services: Sorted<Arc<str>, Ports>) -> Services {
        let mut hasher = self.state.build_hasher();
        for (name, ports) in services.iter() {
            Arc::as_ptr(name).addr().hash(&mut hasher);
            for port in ports.iter() {
                port.hash(&mut hasher);
            }
        }
        Services(self.services.share(hasher.finish(), services))
    }
}

/// Values by a hash. Of two different values with one hash, the last one is known.
#[derive(Debug)]
struct Shared<T: ?Sized> {
    known: HashMap<u64, Arc<T>>,
    /// Number of known values at which unused ones are removed.
    sweep_at: usize,
}

impl<T: PartialEq + ?Sized> Shared<T> {
    fn share<V: Borrow<T> + Into<Arc<T>>>(&mut self, hash: u64, value: V) -> Arc<T> {
        let own: &T = value.borrow();
        if let Some(known) = self.known.get(&hash).filter(|known| ***known == *own) {
            return Arc::clone(known);
        }
        if self.known.len() >= self.sweep_at {
            self.known.retain(|_, known| Arc::strong_count(known) > 1);
            self.sweep_at = SWEEP_MIN.max(2 * self.known.len());
        }
        let value = value.into();
        self.known.insert(hash, Arc::clone(&value));
        value
    }
}

impl<T: ?Sized> Default for Shared<T> {
    fn default() -> Self {
        Self { known: HashMap::default(), sweep_at: SWEEP_MIN }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_kept_once_and_goes_when_nobody_uses_it() {
        let mut interner = Interner::default();
        let kept = interner.share("app");
        assert!(Arc::ptr_eq(&kept, &interner.share("app")));
        for at in 0..10 * SWEEP_MIN {
            interner.share(&at.to_string());
        }
        assert!(interner.strings.known.len() <= SWEEP_MIN);
        assert!(Arc::ptr_eq(&kept, &interner.share("app")));
    }

    #[test]
    fn a_locality_is_kept_once() {
        let mut interner = Interner::default();
        let mut share = || interner.share_locality("", "", "");
        assert!(Arc::ptr_eq(&share(), &share()));
    }

    #[test]
    fn templates_and_services_are_kept_once_and_go_when_unused() {
        let mut interner = Interner::default();
        let mut shared = |name: &str, port| {
            let template = Template {
                canonical_name: interner.share(name),
                pod_labels: [(interner.share("team"), interner.share(name))].into(),
                locality: interner.share_locality("", "", ""),
                ..Template::default()
            };
            let services = Sorted::from([(interner.share(name), [(80, port)].into())]);
            let parts = (interner.share_template(template), interner.share_services(services));
            assert!(interner.templates.known.len() <= SWEEP_MIN);
            parts
        };
        let (template, services) = shared("a", 80);
        for at in 0..3 * SWEEP_MIN {
            shared(&format!("b{at}"), 80);
        }
        let (same, other_ports) = shared("a", 81);
        assert!(Arc::ptr_eq(&template, &same));
        assert_ne!(services, other_ports);
        assert!(Arc::ptr_eq(&services.0, &shared("a", 80).1.0));
        assert!(!Arc::ptr_eq(&template, &shared("c", 80).0));
    }
}
