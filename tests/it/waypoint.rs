//! Services behind waypoints, at a gateway that a control plane programs.

use std::collections::BTreeMap;

use http::{Method, Request};
use strait::grpc::security::{Action, Authorization, Scope};
use strait::grpc::workload::gateway_address::Destination;
use strait::grpc::workload::{
    Address, GatewayAddress, NamespacedHostname, Port, PortList, Service, TunnelProtocol,
    WeightedWaypoint, Workload, address,
};
use strait::tools::hbone::Tunnel;
use strait::xds::store::{ADDRESS, AUTHORIZATION};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::istio::spawn;
use crate::support::istiod::{Istiod, NAME, Serving};
use crate::support::wds::{
    HOSTNAME, SERVICE, bytes, changed, policy, service, waypoint_ports, workload,
};
use crate::support::{
    CLIENT, ECHO, Endpoint, Gateway, Net, Settings, broken, endpoint_port, identities, replace,
    run, until,
};

/// The identity of the workload of the waypoint `one`, and that of `two`.
const WAYPOINT: &str = "spiffe://east.local/ns/app/sa/one";
const OTHER: &str = "spiffe://east.local/ns/app/sa/two";
/// Identity that a tenant claims for the service of each waypoint.
const CLAIMED_IDENTITY: &str = "spiffe://west.local/ns/shop/sa/said";
/// The identity of the waypoint `one` of another cluster.
const REMOTE: &str = "spiffe://west.local/ns/app/sa/one";
/// Ingress gateway that only the configuration names.
const INGRESS: &str = "spiffe://west.local/ns/edge/sa/ingress";

/// Hosts of the service's own endpoint, and those of the waypoints `one` and `two`.
const OWN: u8 = 11;
const ONE: u8 = 12;
const TWO: u8 = 13;

/// An endpoint that sends its own name.
fn says(listener: TcpListener, name: u8) -> Endpoint {
    Endpoint::new(listener, move |mut stream| async move {
        let _ = stream.write_u8(name).await;
        let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
    })
}

fn at(name: &str) -> GatewayAddress {
    let hostname = NamespacedHostname {
        namespace: "app".into(),
        hostname: format!("{name}.app.svc.cluster.local"),
    };
    GatewayAddress { destination: Some(Destination::Hostname(hostname)), hbone_mtls_port: 15008 }
}

/// The service, behind these waypoints.
fn behind(waypoints: &[(&str, u32)]) -> Address {
    let mut message = service();
    if let Some(address::Type::Service(service)) = &mut message.r#type {
        let weighted = |&(name, weight): &(&str, u32)| WeightedWaypoint {
            destination: Some(at(name)),
            weight,
        };
        service.weighted_waypoints = waypoints.iter().map(weighted).collect();
    }
    message
}

/// The service of a waypoint.
fn of_waypoint(name: &str) -> Address {
    let service = Service {
        name: name.to_owned(),
        namespace: "app".into(),
        hostname: format!("{name}.app.svc.cluster.local"),
        ports: waypoint_ports(),
        subject_alt_names: vec![CLAIMED_IDENTITY.to_owned()],
        ..Service::default()
    };
    Address { r#type: Some(address::Type::Service(service)) }
}

/// The one workload of a waypoint. Istiod sends the pods of gateways and waypoints without HBONE.
fn pod(name: &str, address: Vec<u8>) -> Address {
    let mut message = workload(name, address);
    let ports = waypoint_ports();
    let list = PortList { ports };
    if let Some(address::Type::Workload(workload)) = &mut message.r#type {
        *workload = Workload {
            services: [(format!("app/{name}.app.svc.cluster.local"), list)].into(),
            workload_name: name.to_owned(),
            service_account: name.to_owned(),
            trust_domain: "east.local".into(),
            tunnel_protocol: TunnelProtocol::None.into(),
            ..std::mem::take(workload)
        };
    }
    message
}

/// Gateway, its control plane, and endpoints of the service and of two waypoints.
struct Mesh {
    gateway: Gateway,
    istiod: Istiod,
    _serving: Serving,
    _endpoints: [Endpoint; 3],
}

impl Mesh {
    async fn start(waypoints: &[(&str, u32)]) -> Self {
        Self::with(waypoints, "", &[]).await
    }

    /// The same with more lines of configuration, and with policies.
    async fn with(waypoints: &[(&str, u32)], more: &str, policies: &[Authorization]) -> Self {
        Self::at(Net::new(), waypoints, more, policies).await
    }

    async fn at(
        net: Net,
        waypoints: &[(&str, u32)],
        more: &str,
        policies: &[Authorization],
    ) -> Self {
        let endpoints = [
            says(net.listen(OWN, 15008).await, OWN),
            says(net.listen(ONE, 15008).await, ONE),
            says(net.listen(TWO, 15008).await, TWO),
        ];
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &behind(waypoints));
        istiod.put(ADDRESS, "a", &workload("a", bytes(net.ip(OWN))));
        for (name, host) in [("one", ONE), ("two", TWO)] {
            let service = format!("app/{name}.app.svc.cluster.local");
            istiod.put(ADDRESS, &service, &of_waypoint(name));
            istiod.put(ADDRESS, name, &pod(name, bytes(net.ip(host))));
        }
        for policy in policies {
            let name = format!("app/{}", policy.name);
            istiod.put(AUTHORIZATION, &name, policy);
        }
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut settings = Settings::new(net, identities());
        settings.more += more;
        let (of_west, to_all) = ("{cluster: west}", "{anyone: true}");
        let exposure = settings.exposure.replace(of_west, to_all);
        // Every port.
        settings.exposure = exposure.replace(":80\"", "\"");
        let mut gateway = spawn(&settings, NAME);
        gateway.ready().await;
        Self { gateway, istiod, _serving: serving, _endpoints: endpoints }
    }

    /// Returns the endpoint that answers a peer with these `x-istio-source` values.
    async fn asks(&self, id: &str, words: &[&str]) -> Result<u8, String> {
        let mut tunnel = self.tunnel(id, words).await?;
        Ok(tunnel.read_u8().await.expect("a name"))
    }

    async fn tunnel(&self, id: &str, words: &[&str]) -> Result<Tunnel, String> {
        let client = self.gateway.client_as(identities(), id).await;
        let mut request = Request::builder().method(Method::CONNECT).uri(ECHO);
        for word in words {
            request = request.header("x-istio-source", *word);
        }
        let request = request.body(()).expect("a request");
        let tunnel = client.request(request).await.map_err(|e| e.to_string())?;
        // Without its handle the connection goes on as long as the tunnel does.
        tokio::spawn(client.wait_closed());
        Ok(tunnel)
    }

    async fn becomes(&self, id: &str, words: &[&str], want: u8) {
        let asks = async || self.asks(id, words).await;
        let _ = until("another way", asks, |host| *host == Ok(want)).await;
    }
}

#[test]
fn a_tunnel_reaches_a_waypoint_that_is_sent_without_hbone() {
    run(async {
        let mesh = Mesh::start(&[("one", 1)]).await;
        assert_eq!(mesh.asks(CLIENT, &[]).await, Ok(ONE));
        let arguments = ["explain", "--from", CLIENT, "--to", ECHO];
        let (code, text, _) = mesh.gateway.run_command(&arguments).await;
        assert_eq!(code, 0, "{text}");
        let is_row = |line: &str| line.contains("one") && line.contains(":15008");
        assert!(text.lines().any(is_row), "{text}");
        // Its other port has no endpoint.
        let (_, page, _) = mesh.gateway.run_command(&["status", "app/one"]).await;
        let line = page.lines().find(|line| line.contains("15021"));
        assert!(line.is_some(), "{page}");
        assert!(page.contains("the workload does not support HBONE"), "{page}");
    });
}

#[test]
fn a_service_port_15008_with_another_target_opens_no_port_of_a_plain_pod() {
    run(async {
        let net = Net::new();
        let mesh = Mesh::at(net, &[], "", &[]).await;
        let own = net.listen(OWN, endpoint_port()).await;
        let _plain = says(own, TWO);
        let tunnel = async |port: u16| {
            let client = mesh.gateway.client_as(identities(), CLIENT).await;
            let opened = client.tunnel(&format!("{HOSTNAME}:{port}")).await;
            let mut tunnel = opened.map_err(|error| error.to_string())?;
            Ok::<u8, String>(tunnel.read_u8().await.expect("a name"))
        };
        let put = |targets: [(u32, u16); 2]| {
            let port = |(service_port, target): (u32, u16)| Port {
                service_port,
                target_port: target.into(),
                ..Port::default()
            };
            let ports = targets.map(port).to_vec();
            let mut service = service();
            if let Some(address::Type::Service(service)) = &mut service.r#type {
                service.ports.clone_from(&ports);
            }
            let pod = changed("a", bytes(net.ip(OWN)), |pod| {
                pod.tunnel_protocol = TunnelProtocol::None.into();
                pod.services = [(SERVICE.to_owned(), PortList { ports })].into();
            });
            mesh.istiod.put(ADDRESS, SERVICE, &service);
            mesh.istiod.put(ADDRESS, "a", &pod);
        };
        for plain in [
            [(80, endpoint_port()), (15008, endpoint_port())],
            [(80, 15008), (15008, endpoint_port())],
        ] {
            put([(80, endpoint_port()), (15008, 15008)]);
            let _ = until("HBONE", async || tunnel(15008).await, |host| *host == Ok(OWN)).await;
            put(plain);
            let refused = until("a refusal", async || tunnel(15008).await, Result::is_err).await;
            assert!(refused.expect_err("a refusal").contains("503"));
            tunnel(80).await.expect_err("the workload does not support HBONE");
        }
        let (_, page, _) = mesh.gateway.run_command(&["status", SERVICE]).await;
        assert!(page.contains("the workload does not support HBONE"), "{page}");
    });
}

#[test]
fn a_tunnel_goes_by_the_waypoint_unless_a_trusted_one_has_done_its_work() {
    run(async {
        let mesh = Mesh::start(&[("one", 1)]).await;
        for (id, words, want) in [
            (CLIENT, &[][..], ONE),
            (CLIENT, &["waypoint"], ONE),
            (CLIENT, &["gateway"], ONE),
            (WAYPOINT, &[], ONE),
            (WAYPOINT, &["waypoint"], OWN),
            (WAYPOINT, &["gateway"], OWN),
            (WAYPOINT, &["sidecar"], ONE),
            (WAYPOINT, &["waypoint", "waypoint"], ONE),
            (INGRESS, &["gateway"], ONE),
        ] {
            assert_eq!(mesh.asks(id, words).await, Ok(want), "{id} {words:?}");
        }
        let file = mesh.gateway.file("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        let waypoints = format!("  waypoints: [\"{INGRESS}\"]\nlisteners:");
        replace(&file, &text.replace("listeners:", &waypoints));
        mesh.becomes(INGRESS, &["gateway"], OWN).await;
        assert_eq!(mesh.asks(CLIENT, &["gateway"]).await, Ok(ONE));

        // The service is the requested one, the workload is the waypoint's.
        let metrics = mesh.gateway.scrape().await;
        let opened = metrics.lines().find(|line| {
            line.starts_with("istio_tcp_connections_opened_total")
                && line.contains("destination_workload=\"one\"")
        });
        let opened = opened.expect("a tunnel by the waypoint");
        let of = "destination_service=\"echo.app.svc.cluster.local\"";
        assert!(opened.contains(of), "{opened}");
    });
}

#[test]
fn a_waypoint_of_another_cluster_is_trusted_only_if_it_is_configured() {
    run(async {
        let mesh = Mesh::start(&[("one", 1)]).await;
        // If clusters share a network, istiod sends the waypoints of both.
        let mut remote = pod("one", vec![127, 255, 0, 1]);
        if let Some(address::Type::Workload(workload)) = &mut remote.r#type {
            workload.uid = "remote".into();
            workload.cluster_id = "west".into();
            workload.trust_domain = "west.local".into();
            workload.capacity = Some(0);
        }
        mesh.istiod.put(ADDRESS, "remote", &remote);
        let received = async || mesh.gateway.http(15000, "GET", "/config_dump").await.1;
        let is_received = |dump: &String| dump.contains("\"uid\": \"remote\"");
        until("the waypoint", received, is_received).await;
        assert_eq!(mesh.asks(WAYPOINT, &["waypoint"]).await, Ok(OWN));
        assert_eq!(mesh.asks(REMOTE, &["waypoint"]).await, Ok(ONE));
        let arguments = ["explain", "--from", REMOTE, "--to", ECHO, "--origin", "waypoint"];
        let (_, text, _) = mesh.gateway.run_command(&arguments).await;
        let why = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let wanted = "not a workload of this cluster in the service's waypoint";
        assert!(why.contains(wanted), "{text}");

        let file = mesh.gateway.file("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        let waypoints = format!("  waypoints: [\"{REMOTE}\"]\nlisteners:");
        replace(&file, &text.replace("listeners:", &waypoints));
        mesh.becomes(REMOTE, &["waypoint"], OWN).await;
    });
}

#[test]
fn with_one_trust_domain_only_waypoints_of_the_configuration_are_trusted() {
    run(async {
        let mesh = Mesh::start(&[("one", 1)]).await;
        let mut lost = mesh.tunnel(WAYPOINT, &["waypoint"]).await.expect("past");
        assert_eq!(lost.read_u8().await.expect("a name"), OWN);
        // The waypoint of another cluster has the identity of ours, and so its cluster.
        let file = mesh.gateway.file("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        let domain = "    - {name: west.local, cluster: west}\n";
        assert!(text.contains(domain), "{text}");
        let text = text.replace(domain, "");
        replace(&file, &text);
        assert_eq!(broken(&mut lost).await, Some(h2::Reason::INTERNAL_ERROR));
        assert_eq!(mesh.asks(WAYPOINT, &["waypoint"]).await, Ok(ONE));
        let arguments = ["explain", "--from", WAYPOINT, "--to", ECHO, "--origin", "waypoint"];
        let (_, reported, _) = mesh.gateway.run_command(&arguments).await;
        let why = reported.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(why.contains("clusters cannot be distinguished"), "{reported}");

        let waypoints = format!("  waypoints: [\"{WAYPOINT}\"]\nlisteners:");
        replace(&file, &text.replace("listeners:", &waypoints));
        mesh.becomes(WAYPOINT, &["waypoint"], OWN).await;
    });
}

#[test]
fn a_tunnel_that_went_past_a_waypoint_ends_when_its_header_is_trusted_no_more() {
    run(async {
        let mesh = Mesh::start(&[("one", 1)]).await;
        let mut kept = mesh.tunnel(CLIENT, &[]).await.expect("a tunnel");
        let mut lost = mesh.tunnel(WAYPOINT, &["waypoint"]).await.expect("a tunnel");
        assert_eq!(lost.read_u8().await.expect("a name"), OWN);
        assert_eq!(kept.read_u8().await.expect("a name"), ONE);
        mesh.istiod.put(ADDRESS, SERVICE, &behind(&[("two", 1)]));
        assert_eq!(broken(&mut lost).await, Some(h2::Reason::INTERNAL_ERROR));
        mesh.gateway.logged("is no longer trusted").await;
        assert!((mesh.gateway.tunnels("revoked").await - 1.0).abs() < 0.5);
        drop(kept);
    });
}

#[test]
fn a_tunnel_that_went_past_ends_with_the_last_workload_of_its_identity() {
    run(async {
        let mesh = Mesh::start(&[("one", 1)]).await;
        let lost = mesh.tunnel(WAYPOINT, &["waypoint"]).await;
        let mut lost = lost.expect("a tunnel");
        assert_eq!(lost.read_u8().await.expect("a name"), OWN);
        mesh.istiod.remove(ADDRESS, "one");
        assert_eq!(broken(&mut lost).await, Some(h2::Reason::INTERNAL_ERROR));
        mesh.gateway.logged("is no longer trusted").await;
        assert!((mesh.gateway.tunnels("revoked").await - 1.0).abs() < 0.5);
    });
}

#[test]
fn a_tunnel_that_went_past_ends_with_the_service_of_its_waypoint() {
    run(async {
        let mesh = Mesh::start(&[("one", 1)]).await;
        let mut kept = mesh.tunnel(CLIENT, &[]).await.expect("a tunnel");
        let lost = mesh.tunnel(WAYPOINT, &["waypoint"]).await;
        let mut lost = lost.expect("a tunnel");
        assert_eq!(lost.read_u8().await.expect("a name"), OWN);
        assert_eq!(kept.read_u8().await.expect("a name"), ONE);
        mesh.istiod.remove(ADDRESS, "app/one.app.svc.cluster.local");
        assert_eq!(broken(&mut lost).await, Some(h2::Reason::INTERNAL_ERROR));
        mesh.gateway.logged("is no longer trusted").await;
        assert!((mesh.gateway.tunnels("revoked").await - 1.0).abs() < 0.5);
        drop(kept);
    });
}

#[test]
fn waypoints_share_by_weight_and_without_one_nothing_goes_past() {
    run(async {
        const TUNNELS: usize = 400;
        let mesh = Mesh::start(&[("one", 1), ("two", 3)]).await;
        let mut shares = BTreeMap::<u8, usize>::new();
        for _ in 0..TUNNELS {
            let host = mesh.asks(CLIENT, &[]).await.expect("a waypoint");
            *shares.entry(host).or_default() += 1;
        }
        // A quarter is 100; five standard deviations of 8.7 are 43.
        assert!((57..=143).contains(&shares[&ONE]), "{shares:?}");
        assert_eq!(shares[&ONE] + shares[&TWO], TUNNELS, "{shares:?}");

        mesh.istiod.remove(ADDRESS, "two");
        let only_one = async || {
            let mut hosts = Vec::new();
            for _ in 0..10 {
                hosts.push(mesh.asks(CLIENT, &[]).await);
            }
            hosts
        };
        until("the one that is left", only_one, |hosts| hosts.iter().all(|host| *host == Ok(ONE)))
            .await;
        mesh.istiod.remove(ADDRESS, "one");
        let asks = async || mesh.asks(CLIENT, &[]).await;
        let refused = until("a refusal", asks, Result::is_err).await;
        assert!(refused.expect_err("a refusal").contains("503"));
        assert!(mesh.gateway.tunnels("no_waypoint").await > 0.5);
        // Without a workload, no peer has the identity of a waypoint.
        mesh.asks(WAYPOINT, &["waypoint"]).await.expect_err("there is no such waypoint");

        let none = behind(&[]);
        mesh.istiod.put(ADDRESS, SERVICE, &none);
        mesh.becomes(CLIENT, &[], OWN).await;
    });
}

#[test]
fn only_waypoints_of_the_requested_service_are_trusted() {
    run(async {
        // Both are used: `two` is the waypoint of another service.
        let mesh = Mesh::start(&[("one", 1)]).await;
        let mut other = behind(&[("two", 1)]);
        if let Some(address::Type::Service(service)) = &mut other.r#type {
            service.hostname = "other.app.svc.cluster.local".into();
            service.addresses.clear();
        }
        let name = "app/other.app.svc.cluster.local";
        mesh.istiod.put(ADDRESS, name, &other);
        // A tenant's pod with the labels of the waypoint's.
        let mut labelled = pod("one", vec![127, 255, 0, 1]);
        if let Some(address::Type::Workload(workload)) = &mut labelled.r#type {
            workload.uid = "labelled".into();
            workload.namespace = "shop".into();
            workload.capacity = Some(0);
        }
        mesh.istiod.put(ADDRESS, "labelled", &labelled);
        let received = async || mesh.gateway.http(15000, "GET", "/config_dump").await.1;
        until("all of it", received, |dump| {
            dump.contains("\"uid\": \"labelled\"") && dump.contains("other.app.svc")
        })
        .await;
        let labelled = "spiffe://east.local/ns/shop/sa/one";
        for (id, want) in
            [(WAYPOINT, OWN), (OTHER, ONE), (CLAIMED_IDENTITY, ONE), (labelled, ONE), (CLIENT, ONE)]
        {
            assert_eq!(mesh.asks(id, &["waypoint"]).await, Ok(want), "{id}");
            assert_eq!(mesh.asks(id, &["gateway"]).await, Ok(want), "{id}");
        }
        let arguments = ["explain", "--from", OTHER, "--to", ECHO, "--origin", "waypoint"];
        let (_, text, _) = mesh.gateway.run_command(&arguments).await;
        let why = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(why.contains("and is not trusted"), "{text}");
    });
}

#[test]
fn policies_of_its_namespace_let_everybody_come_to_a_waypoint() {
    run(async {
        // The waypoint's pod is in the namespace that admits only the bank.
        let allow = policy("allow", Scope::Namespace, Action::Allow, "bank");
        let mesh = Mesh::with(&[("one", 1)], "policy: {istio: enforce}\n", &[allow]).await;
        let mut open = mesh.tunnel(CLIENT, &[]).await.expect("a tunnel");
        assert_eq!(open.read_u8().await.expect("a name"), ONE);
        // After the waypoint, the workload's own policies apply.
        let refused = mesh.asks(WAYPOINT, &["waypoint"]).await;
        assert!(refused.expect_err("a refusal").contains("401"));
        let arguments = ["explain", "--from", CLIENT, "--to", ECHO];
        let (code, text, _) = mesh.gateway.run_command(&arguments).await;
        assert_eq!(code, 0, "{text}");
        let why = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(why.contains("which evaluates the policies"), "{text}");

        // Open tunnels are evaluated again by the same rule.
        let deny = policy("deny", Scope::Namespace, Action::Deny, "shop");
        mesh.istiod.put(AUTHORIZATION, "app/deny", &deny);
        let received = async || mesh.gateway.http(15000, "GET", "/config_dump").await.1;
        until("the policy", received, |dump| dump.contains("\"deny\"")).await;
        assert_eq!(mesh.asks(CLIENT, &[]).await, Ok(ONE));
        assert!(mesh.gateway.tunnels("revoked").await < 0.5);
        // Without its waypoint, the service has its own workloads again, with their policies.
        mesh.istiod.put(ADDRESS, SERVICE, &behind(&[]));
        let asks = async || mesh.asks(CLIENT, &[]).await;
        let refused = until("a refusal", asks, Result::is_err).await;
        assert!(refused.expect_err("a refusal").contains("401"));
    });
}
