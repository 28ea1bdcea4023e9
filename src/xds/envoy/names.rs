//! Mapping of clusters to services, by name or by configuration.

use std::collections::BTreeMap;

use crate::snapshot::mesh::UNKNOWN_NAMESPACE;
use crate::wire::{Authority, Host};

/// Host and port of a service, in the form of a peer's authority.
pub(super) type Target = (String, u16);

#[derive(Debug, PartialEq, Eq)]
pub(super) enum ClusterTarget {
    /// The cluster has the endpoints of a service. The configuration takes precedence over the
    /// name.
    Serves {
        target: Target,
        is_configured: bool,
    },
    /// The cluster is one of Istio's subsets, which no authority can request.
    Subset,
    Unknown,
}

/// Returns the target of a cluster. An entry of `configured` for the name takes precedence.
/// Otherwise the name is parsed in Istio's forms (docs/wire-contract.md 2.2), `outbound|PORT||HOST`
/// and `inbound-vip|PORT|tcp|HOST`, or as `HOST:PORT`.
pub(super) fn cluster_target(name: &str, configured: &BTreeMap<String, Target>) -> ClusterTarget {
    if let Some(target) = configured.get(name) {
        let target = target.clone();
        return ClusterTarget::Serves { target, is_configured: true };
    }
    let parts: Vec<_> = name.splitn(5, '|').collect();
    let target = match parts[..] {
        ["outbound", port, "", host] | ["inbound-vip", port, "tcp", host] => {
            target(&format!("{host}:{port}"))
        }
        ["outbound", _, _, _] => return ClusterTarget::Subset,
        [name] => target(name),
        _ => None,
    };
    target.map_or(ClusterTarget::Unknown, |target| ClusterTarget::Serves {
        target,
        is_configured: false,
    })
}

/// Parses a target like the authority of a peer. An IP address is not a service name.
fn target(text: &str) -> Option<Target> {
    let Authority { host, port } = Authority::parse(text).ok()?;
    match host {
        Host::Name(name) => Some((name.into(), port)),
        Host::Ip(_) => None,
    }
}

/// Returns the namespace and name of a host's service: those of Kubernetes for
/// `name.namespace.svc.…`, and otherwise the host itself in the namespace
/// [`UNKNOWN_NAMESPACE`].
pub(super) fn service_of(host: &str) -> (&str, &str) {
    let mut labels = host.split('.');
    match (labels.next(), labels.next(), labels.next(), labels.next()) {
        (Some(name), Some(namespace), Some("svc"), Some(_)) => (namespace, name),
        _ => (UNKNOWN_NAMESPACE, host),
    }
}

pub(in crate::xds) fn namespace_of_host(host: &str) -> &str {
    service_of(host).0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_is_the_service_that_its_name_or_the_configuration_says() {
        let configured = [("legacy".to_owned(), ("old.app".to_owned(), 70))].into();
        for (name, want) in [
            ("outbound|80||echo.app.svc.cluster.local", Some(("echo.app.svc.cluster.local", 80))),
            ("outbound|80||Echo.App.", Some(("echo.app", 80))),
            ("inbound-vip|81|tcp|echo.app", Some(("echo.app", 81))),
            ("echo.app:82", Some(("echo.app", 82))),
            ("echo:82", Some(("echo", 82))),
            ("legacy", Some(("old.app", 70))),
            ("outbound|0||echo.app", None),
            ("outbound|80||*.app", None),
            ("outbound|80||10.0.0.1", None),
            ("inbound-vip|80|http|echo.app", None),
            ("inbound|80||", None),
            ("outbound|80||echo.app|more", None),
            ("outbound_.80_._.echo.app", None),
            ("10.0.0.1:80", None),
            ("[::1]:80", None),
            ("PassthroughCluster", None),
            ("", None),
        ] {
            let want = want.map_or(ClusterTarget::Unknown, |(host, port)| ClusterTarget::Serves {
                target: (host.to_owned(), port),
                is_configured: name == "legacy",
            });
            assert_eq!(cluster_target(name, &configured), want, "{name}");
        }
        assert_eq!(cluster_target("outbound|80|v1|echo.app", &configured), ClusterTarget::Subset);
    }

    #[test]
    fn a_service_of_kubernetes_has_its_namespace() {
        for (host, want) in [
            ("echo.app.svc.cluster.local", ("app", "echo")),
            ("echo.app.svc", ("unknown", "echo.app.svc")),
            ("api.example.com", ("unknown", "api.example.com")),
        ] {
            assert_eq!(service_of(host), want);
        }
    }
}
