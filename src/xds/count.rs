//! How much memory services and workloads take beside their names: what their lists have.

use crate::snapshot::mesh::{Service, Workload};

/// How much the lists of a resource have: a workload its endpoints, which are its ports for each
/// of its services, or one where it has none, and the names of its policies; a service its ports,
/// addresses, identities and waypoints.
pub(super) trait Count {
    /// The sum.
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
