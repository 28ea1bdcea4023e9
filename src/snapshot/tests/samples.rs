//! Services and workloads of tests.

use crate::snapshot::mesh::{Service, Template, Workload};

/// Returns the service `NAME.app` of namespace `app`, with port 80.
pub(crate) fn service(name: &str) -> Service {
    Service {
        name: name.into(),
        namespace: "app".into(),
        hostname: format!("{name}.app").into(),
        ports: [(80, 8080)].into(),
        ..Service::default()
    }
}

/// Returns a healthy workload of weight 1 that serves port 80 of a [`service`] at its port 8080.
pub(crate) fn workload(uid: &str, service: &str, template: Template) -> Workload {
    Workload {
        uid: uid.into(),
        healthy: true,
        capacity: 1,
        services: [(format!("app/{service}.app").into(), [(80, 8080)].into())].into(),
        template: template.into(),
        ..Workload::default()
    }
}
