//! Memory accounting of services and workloads: the number of their list entries.

use crate::snapshot::mesh::{Service, Workload};

/// Number of list entries of a resource.
///
/// Entries of a workload are its policies and its endpoints: its ports per service, or one for a
/// service without ports. Entries of a service are its ports, addresses, identities and waypoints.
pub(super) trait Count {
    /// Returns the sum.
    fn count(&self) -> usize;
}

impl Count for Workload {
    fn count(&self) -> usize {
        let endpoints = self.services.values().map(|ports| ports.len().max(1));
        endpoints.sum::<usize>() + self.policies.len()
    }
}

impl Count for Service {
    fn count(&self) -> usize {
        let Self {
            ports,
            vips,
            subject_alt_names,
            waypoints,
            ..
        } = self;
        ports.len() + vips.len() + subject_alt_names.len() + waypoints.len()
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use crate::snapshot::mesh::Template;

    use super::*;

    #[test]
    fn every_list_counts_and_a_service_without_ports_too() {
        let ports = || [(80, 8080), (81, 8081)].into();
        let workload = Workload {
            services: [("a".into(), ports()), ("b".into(), [].into())].into(),
            template: Template {
                policies: ["a/p".into(), "a/q".into()].into(),
                ..Template::default()
            }
            .into(),
            ..Workload::default()
        };
        assert_eq!(workload.count(), 2 + 1 + 2);
        let service = Service {
            ports: [(80, 0)].into(),
            vips: vec![(String::new(), IpAddr::from([240, 0, 0, 1])); 2],
            subject_alt_names: vec![String::new(); 4],
            ..Service::default()
        };
        assert_eq!(service.count(), 1 + 2 + 4);
    }
}
