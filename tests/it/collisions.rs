//! Tenants of one cluster: hostnames, VIPs and visibility of services from a control plane.

use strait::grpc::workload::{
    Address, NetworkAddress, PortList, Service, Visibility, Workload, address,
};
use strait::tools::hbone::Tunnel;
use strait::xds::store::ADDRESS;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::istio::spawn_with;
use crate::support::istiod::{Istiod, NAME, Serving};
use crate::support::wds::{HOSTNAME, bytes, changed, ports};
use crate::support::{Endpoint, Gateway, Net, Settings, broken, identities, replace, run, until};

/// A hostname that belongs to no namespace.
const API: &str = "api.example";
/// VIP of the service that is meant.
const VIP: [u8; 4] = [240, 0, 0, 9];

/// Hosts of the endpoints of the intended service, and of another tenant's.
const OWN: u8 = 11;
const OTHER: u8 = 12;

/// Returns a service `NAMESPACE/HOSTNAME` with the VIP.
fn service(name: &str, change: impl FnOnce(&mut Service)) -> Address {
    let (namespace, hostname) = name.split_once('/').expect("a namespace");
    let mut service = Service {
        name: "tenant".into(),
        namespace: namespace.into(),
        hostname: hostname.into(),
        addresses: vec![NetworkAddress {
            network: "east".into(),
            address: VIP.to_vec().into(),
            ..NetworkAddress::default()
        }],
        ports: ports(),
        ..Service::default()
    };
    change(&mut service);
    Address { r#type: Some(address::Type::Service(service)) }
}

/// Gateway, its control plane, and an endpoint of each of two tenants, which sends its own host.
struct World {
    gateway: Gateway,
    istiod: Istiod,
    net: Net,
    _serving: Serving,
    _endpoints: [Endpoint; 2],
}

impl World {
    /// Starts with these services in the first message, each with the host of its endpoint.
    async fn start(default: &str, exposure: &str, more: &str, received: &[(&str, u8)]) -> Self {
        let net = Net::new();
        let endpoint = async |host| {
            Endpoint::new(net.listen(host, 15008).await, move |mut stream| async move {
                let _ = stream.write_u8(host).await;
                let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
            })
        };
        let endpoints = [endpoint(OWN).await, endpoint(OTHER).await];
        let istiod = Istiod::default();
        let mut settings = Settings::new(net, identities());
        settings.exposure = exposure.to_owned();
        settings.more += more;
        let gateway = spawn_with(&settings, NAME, |folder| {
            let file = folder.join("strait.yaml");
            let text = std::fs::read_to_string(&file).expect("a configuration");
            let text = text.replace("default: none", &format!("default: {default}"));
            std::fs::write(&file, text).expect("a configuration");
        });
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut world = Self { gateway, istiod, net, _serving: serving, _endpoints: endpoints };
        for (name, host) in received {
            world.send_service(name, *host, |_| {});
        }
        world.gateway.ready().await;
        world
    }

    /// Sends a service and its one workload, in one message if there is no stream yet.
    fn send_service(&self, name: &str, host: u8, change: impl FnOnce(&mut Service)) {
        let (namespace, _) = name.split_once('/').expect("a namespace");
        let uid = format!("pod-of-{name}");
        let pod = changed(&uid, bytes(self.net.ip(host)), |pod| {
            *pod = Workload {
                namespace: namespace.into(),
                services: [(name.to_owned(), PortList { ports: ports() })].into(),
                ..std::mem::take(pod)
            };
        });
        self.istiod.put(ADDRESS, &uid, &pod);
        self.istiod.put(ADDRESS, name, &service(name, change));
    }

    /// Waits until the gateway has a service.
    async fn knows(&self, name: &str) {
        let (namespace, host) = name.split_once('/').expect("a namespace");
        let received = async || {
            let (_, dump) = self.gateway.http(15000, "GET", "/config_dump").await;
            let dump: serde_json::Value = serde_json::from_str(&dump).expect("a dump");
            let services = dump["services"].as_array().cloned().unwrap_or_default();
            let is_it = |service: &serde_json::Value| {
                service["namespace"] == namespace && service["hostname"] == host
            };
            services.iter().any(is_it)
        };
        until(name, received, |received| *received).await;
    }

    async fn tunnel(&self, authority: &str) -> Result<(u8, Tunnel), String> {
        loop {
            let client = self.gateway.client(identities()).await;
            let tunnel = client.tunnel(authority).await;
            let mut tunnel = tunnel.map_err(|error| error.to_string())?;
            // A change while the tunnel was opened revokes it at once.
            if let Ok(host) = tunnel.read_u8().await {
                // Without its handle the connection goes on as long as the tunnel does.
                tokio::spawn(client.wait_closed());
                return Ok((host, tunnel));
            }
        }
    }

    /// Returns the endpoint that answers.
    async fn asks(&self, authority: &str) -> Result<u8, String> {
        self.tunnel(authority).await.map(|(host, _)| host)
    }

    async fn wait_for_answer(&self, authority: &str, want: Option<u8>) {
        let asks = async || self.asks(authority).await.ok();
        until(authority, asks, |host| *host == want).await;
    }

    fn change(&self, from: &str, to: &str) {
        let file = self.gateway.file("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        assert!(text.contains(from), "{from}");
        replace(&file, &text.replace(from, to));
    }

    async fn status(&self) -> String {
        self.gateway.run_command(&["status"]).await.1
    }
}

#[test]
fn a_later_claim_displaces_the_first_one_neither_by_hostname_nor_by_vip() {
    run(async {
        let world = World::start("all", "    []\n", "", &[]).await;
        world.send_service("team-b/api.example", OWN, |_| {});
        world.knows("team-b/api.example").await;
        assert_eq!(world.asks("api.example:80").await, Ok(OWN));
        assert_eq!(world.asks("240.0.0.9:80").await, Ok(OWN));
        // Both are first in alphabetical order.
        let others = ["a/api.example", "a/a.a.svc.cluster.local"];
        for name in others {
            world.send_service(name, OTHER, |_| {});
            world.knows(name).await;
        }
        assert_eq!(world.asks("api.example:80").await, Ok(OWN));
        assert_eq!(world.asks("240.0.0.9:80").await, Ok(OWN));
        let status = world.status().await;
        for line in [
            "api.example is claimed by a/api.example, and team-b/api.example answers: it has the \
             oldest claim",
            "240.0.0.9 is claimed by a/a.a.svc.cluster.local, and team-b/api.example answers: it \
             has the oldest claim",
        ] {
            assert!(status.contains(line), "{line}\n{status}");
        }
        let arguments = ["explain", "--from", crate::support::CLIENT, "--to", "api.example:80"];
        let (_, text, _) = world.gateway.run_command(&arguments).await;
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains("is claimed by a/api.example"), "{text}");
        // The other service has the hostname once the first claim is gone.
        world.istiod.remove(ADDRESS, "team-b/api.example");
        world.wait_for_answer("api.example:80", Some(OTHER)).await;
    });
}

#[test]
fn a_canonical_service_and_the_owner_of_a_hostname_have_it_whoever_came_first() {
    run(async {
        let own = format!("app/{HOSTNAME}");
        let world = World::start("all", "    []\n", "", &[]).await;
        let squatter = format!("a/{HOSTNAME}");
        for name in [&*squatter, "a/a.a.svc.cluster.local"] {
            world.send_service(name, OTHER, |_| {});
            world.knows(name).await;
        }
        let authority = format!("{HOSTNAME}:80");
        assert_eq!(world.asks(&authority).await, Ok(OTHER), "nobody else has it");
        world.send_service(&own, OWN, |_| {});
        world.wait_for_answer(&authority, Some(OWN)).await;
        assert_eq!(world.asks("240.0.0.9:80").await, Ok(OTHER), "it was first");
        world.send_service(&own, OWN, |service| service.canonical = true);
        world.wait_for_answer("240.0.0.9:80", Some(OWN)).await;
        let status = world.status().await;
        assert!(status.contains("answers: it is the canonical service"), "{status}");
    });
}

#[test]
fn services_of_tenants_take_no_name_of_the_configuration_over() {
    const NAMES: &str =
        "names:\n  aliases:\n    - {name: orders.global, to: echo.app.svc.cluster.local}\n";
    run(async {
        let exposure = "    - {service: echo.app.svc.cluster.local, to: [{cluster: west}],
       names: [given.global]}\n";
        let own = format!("app/{HOSTNAME}");
        let world = World::start("all", exposure, NAMES, &[(&own, OWN)]).await;
        let names = ["orders.global", "given.global", "echo.app.mesh.internal"];
        for host in names {
            let name = format!("a/{host}");
            world.send_service(&name, OTHER, |_| {});
            world.knows(&name).await;
        }
        for host in names {
            let authority = format!("{host}:80");
            assert_eq!(world.asks(&authority).await, Ok(OWN), "{host}");
        }
        let status = world.status().await;
        for host in ["orders.global", "given.global", "echo.app.mesh.internal"] {
            let line = format!("{host} is claimed by a/{host}, and none answers");
            assert!(status.contains(&line), "{line}\n{status}");
        }
    });
}

#[test]
fn an_entry_with_a_namespace_means_no_other_service_of_the_hostname() {
    run(async {
        let exposure = format!(
            "    - {{service: \"{API}:80\", namespace: team-b, to: [{{cluster: west}}]}}\n"
        );
        let received = [("a/api.example", OTHER)];
        let world = World::start("all", &exposure, "", &received).await;
        let refused = world.asks("api.example:80").await;
        assert!(refused.expect_err("it is not meant").contains("503"));
        assert!(world.asks("240.0.0.9:80").await.is_err(), "nor by its VIP");
        let status = world.status().await;
        let line = "api.example is claimed by a/api.example, and none answers: `exposure.services` \
                    selects the service of namespace team-b";
        assert!(status.contains(line), "{status}");

        world.send_service("team-b/api.example", OWN, |_| {});
        world.wait_for_answer("api.example:80", Some(OWN)).await;
        let (_, mut open) = world.tunnel("api.example:80").await.expect("a tunnel");
        // Another namespace is meant from now on.
        world.change("namespace: team-b", "namespace: a");
        assert_eq!(broken(&mut open).await, Some(h2::Reason::INTERNAL_ERROR));
        world.wait_for_answer("api.example:80", Some(OTHER)).await;
    });
}

#[test]
fn a_service_that_only_its_namespace_sees_is_not_exposed_by_default() {
    run(async {
        let own = format!("app/{HOSTNAME}");
        let authority = format!("{HOSTNAME}:80");
        let world = World::start("all", "    []\n", "", &[(&own, OWN)]).await;
        let (_, mut open) = world.tunnel(&authority).await.expect("a tunnel");
        let private = |service: &mut Service| service.visibility = Visibility::Namespace.into();
        world.send_service(&own, OWN, private);
        assert_eq!(broken(&mut open).await, Some(h2::Reason::INTERNAL_ERROR));
        for authority in [&*authority, "240.0.0.9:80", "echo.app.mesh.internal:80"] {
            let refused = world.asks(authority).await;
            assert!(refused.expect_err("it is private").contains("503"));
        }
        let (_, page, _) = world.gateway.run_command(&["status"]).await;
        assert!(page.contains("nobody: it is visible only in its namespace"), "{page}");
        let arguments = ["explain", "--from", crate::support::CLIENT, "--to", &authority];
        let (_, text, _) = world.gateway.run_command(&arguments).await;
        assert!(text.contains("limits it to its namespace"), "{text}");

        world.istiod.export(&own);
        world.wait_for_answer(&authority, Some(OWN)).await;
        world.istiod.unexport(&own);
        world.wait_for_answer(&authority, None).await;
        let entry = format!("    - {{service: {HOSTNAME}, to: [{{cluster: west}}]}}\n");
        world.change("    []\n", &entry);
        world.wait_for_answer(&authority, Some(OWN)).await;
    });
}
