//! Tests of the conversion of WDS messages, and of its errors.

use bytes::Bytes;

use super::*;

fn a_workload() -> proto::Workload {
    proto::Workload {
        uid: "east//Pod/app/echo-1".into(),
        namespace: "app".into(),
        addresses: vec![Bytes::from_static(&[10, 0, 0, 1])],
        ..proto::Workload::default()
    }
}

fn a_service() -> proto::Service {
    proto::Service {
        name: "echo".into(),
        namespace: "app".into(),
        hostname: "echo.app".into(),
        ..proto::Service::default()
    }
}

fn read_by_uid(from: proto::Workload) -> Result<Workload, String> {
    let uid = from.uid.as_str().into();
    workload(&uid, from, &mut Interner::default())
}

fn read(change: impl FnOnce(&mut proto::Workload)) -> Workload {
    let mut from = a_workload();
    change(&mut from);
    read_by_uid(from).expect("a workload")
}

fn read_service(change: impl FnOnce(&mut proto::Service)) -> Service {
    let mut from = a_service();
    change(&mut from);
    service(from).expect("a service")
}

fn port(service_port: u32, target_port: u32) -> proto::Port {
    proto::Port { service_port, target_port, app_protocol: 99 }
}

fn address(bytes: &'static [u8]) -> proto::NetworkAddress {
    proto::NetworkAddress {
        network: "east".into(),
        address: Bytes::from_static(bytes),
        length: None,
    }
}

fn by_name(namespace: &str, hostname: &str) -> proto::GatewayAddress {
    let name = proto::NamespacedHostname { namespace: namespace.into(), hostname: hostname.into() };
    proto::GatewayAddress { destination: Some(Destination::Hostname(name)), hbone_mtls_port: 0 }
}

fn by_address(bytes: &'static [u8], hbone_mtls_port: u32) -> proto::GatewayAddress {
    proto::GatewayAddress {
        destination: Some(Destination::Address(address(bytes))),
        hbone_mtls_port,
    }
}

#[test]
fn what_is_left_out_has_the_default_of_the_contract() {
    let want = Workload {
        uid: "east//Pod/app/echo-1".into(),
        own_name: Some("".into()),
        addresses: [[10, 0, 0, 1].into()].into(),
        healthy: true,
        capacity: 1,
        template: Template {
            namespace: "app".into(),
            service_account: "default".into(),
            trust_domain: "cluster.local".into(),
            cluster: "Kubernetes".into(),
            protocol: Protocol::Tcp,
            workload_type: "deployment".into(),
            ..Template::default()
        }
        .into(),
        ..Workload::default()
    };
    assert_eq!(read(|_| ()), want);
    let want = Service {
        name: "echo".into(),
        namespace: "app".into(),
        hostname: "echo.app".into(),
        ..Service::default()
    };
    assert_eq!(read_service(|_| ()), want);
}

fn fill(from: &mut proto::Workload) {
    from.name = "echo-1".into();
    from.waypoint = Some(by_name("app", "waypoint.app"));
    from.addresses.push(Bytes::from_static(&[0xfd; 16]));
    let mapped = b"\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\0\0\x02";
    from.addresses.push(Bytes::from_static(mapped));
    from.network = "east".into();
    from.tunnel_protocol = proto::TunnelProtocol::Hbone.into();
    from.trust_domain = "td".into();
    from.service_account = "echo".into();
    from.node = "node".into();
    from.canonical_name = "cn".into();
    from.canonical_revision = "v1".into();
    from.workload_type = proto::WorkloadType::Job.into();
    from.workload_name = "wn".into();
    from.authorization_policies = vec!["app/p".into()];
    from.status = proto::WorkloadStatus::Unhealthy.into();
    from.cluster_id = "c".into();
    from.network_gateway = Some(by_address(&[192, 0, 2, 1], 15443));
    from.hostname = "h".into();
    let list = proto::PortList { ports: vec![port(80, 8080)] };
    from.services.insert("app/Echo.App.".into(), list);
    from.locality =
        Some(proto::Locality { region: "r".into(), zone: "z".into(), subzone: "s".into() });
    from.network_mode = proto::NetworkMode::HostNetwork.into();
    from.capacity = Some(0);
}

#[test]
fn every_field_of_a_workload_is_read() {
    let got = read(fill);
    let ips: Vec<_> = got.addresses.iter().map(IpAddr::to_string).collect();
    assert_eq!(ips[0], "10.0.0.1");
    assert!(ips[1].starts_with("fdfd:") && ips[2] == "10.0.0.2", "{ips:?}");
    assert_eq!((got.protocol, got.healthy, got.capacity), (Protocol::Hbone, false, 0));
    let gateway =
        GatewayAddress { place: Place::Address("east".into(), [192, 0, 2, 1].into()), port: 15443 };
    assert_eq!(got.network_gateway.as_deref(), Some(&gateway));
    assert_eq!(got.services, [("app/echo.app".into(), [(80, 8080)].into())].into());
    assert_eq!((&*got.trust_domain, &*got.cluster), ("td", "c"));
    assert_eq!((&*got.service_account, &*got.node), ("echo", "node"));
    assert_eq!((&*got.workload_name, &*got.workload_type), ("wn", "job"));
    assert_eq!((&*got.canonical_name, got.name()), ("cn", "echo-1"));
    assert_eq!((&*got.canonical_revision, &*got.hostname), ("v1", "h"));
    assert_eq!((&*got.policies[0], &*got.network), ("app/p", "east"));
    assert_eq!((got.host_network, &*got.locality.subzone), (true, "s"));
    assert!(got.has_waypoint);
}

#[test]
fn every_field_of_a_service_is_read() {
    let got = read_service(|from| {
        from.hostname = "Echo.App.".into();
        let range =
            |length| proto::NetworkAddress { length: Some(length), ..address(&[240, 0, 0, 1]) };
        from.addresses = vec![address(&[0xfd; 16]), range(32), range(24)];
        from.ports = vec![port(80, 0), port(81, 8081), port(81, 8082)];
        from.subject_alt_names = vec!["spiffe://td/ns/a/sa/b".into()];
        from.waypoint = Some(by_name("app", "Waypoint.App"));
        from.ingress_use_waypoint = true;
        from.canonical = true;
        from.visibility = proto::Visibility::Namespace.into();
        from.load_balancing = Some(proto::LoadBalancing {
            routing_preference: vec![6, 1, 99, 2],
            mode: load_balancing::Mode::Strict.into(),
            health_policy: load_balancing::HealthPolicy::AllowAll.into(),
        });
    });
    assert_eq!(&*got.hostname, "echo.app");
    assert_eq!(got.vips.len(), 2, "a range is no address");
    assert_eq!(got.vips[1], ("east".to_owned(), [240, 0, 0, 1].into()));
    assert_eq!(got.ports, BTreeMap::from([(80, 0), (81, 8082)]));
    assert_eq!(got.subject_alt_names, ["spiffe://td/ns/a/sa/b"]);
    let gateway = GatewayAddress { place: Place::Name("app/waypoint.app".into()), port: 15008 };
    assert_eq!(got.waypoints, [Waypoint { gateway, weight: 1 }]);
    assert_eq!(got.preferences, Some(vec![Scope::Network, Scope::Region]));
    assert!(got.ingress_use_waypoint && got.canonical && got.private);
    assert!(got.strict && got.allow_unhealthy && !got.passthrough);
}

#[test]
fn waypoints_with_weights_win() {
    let weighted =
        |name, weight| proto::WeightedWaypoint { destination: Some(by_name("app", name)), weight };
    let got = read_service(|from| {
        from.waypoint = Some(by_name("app", "one.app"));
        from.weighted_waypoints = vec![weighted("two.app", 0), weighted("three.app", 9)];
    });
    let weights: Vec<_> = got.waypoints.iter().map(|one| one.weight).collect();
    assert_eq!(weights, [0, 9]);
}

#[test]
fn only_ranking_modes_have_preferences() {
    for (mode, preference, ranks, passes) in [
        (0, vec![4], false, false),
        (2, vec![4], true, false),
        (2, vec![], false, false),
        (3, vec![4], false, true),
    ] {
        let got = read_service(|from| {
            from.load_balancing = Some(proto::LoadBalancing {
                routing_preference: preference,
                mode,
                health_policy: 0,
            });
        });
        assert_eq!(got.preferences.is_some(), ranks, "{mode}");
        assert_eq!((got.passthrough, got.strict), (passes, false), "{mode}");
    }
}

#[test]
fn what_we_do_not_know_means_what_is_safe() {
    let got = read(|from| {
        from.tunnel_protocol = 99;
        from.status = 99;
        from.network_mode = 99;
        from.workload_type = 99;
    });
    assert_eq!(got.protocol, Protocol::Tcp);
    assert!(!got.healthy && got.host_network && got.workload_type.is_empty());
    let legacy = proto::TunnelProtocol::LegacyIstioMtls;
    assert_eq!(read(|from| from.tunnel_protocol = legacy.into()).protocol, Protocol::Tcp);
    let got = read_service(|from| {
        from.visibility = 99;
        from.ip_families = 99;
        from.load_balancing =
            Some(proto::LoadBalancing { routing_preference: vec![1], mode: 99, health_policy: 99 });
    });
    let plain = Service { name: "echo".into(), ..read_service(|_| ()) };
    assert_eq!(got, plain);
}

#[test]
fn special_records_of_other_networks_are_read() {
    let split = read(|from| {
        from.uid = "west/SplitHorizonWorkload/ns/gw/192.0.2.1/app/echo.app".into();
        from.addresses.clear();
        from.network_gateway = Some(by_address(&[192, 0, 2, 1], 0));
        from.capacity = Some(7);
    });
    assert!(split.addresses.is_empty() && split.capacity == 7);
    assert_eq!(split.network_gateway.map(|gateway| gateway.port), Some(15008));
    let gateway = read(|from| {
        from.uid = "NetworkGateway/west/gw.example.com/15008".into();
        from.addresses.clear();
        from.hostname = "gw.example.com".into();
    });
    assert_eq!(&*gateway.hostname, "gw.example.com");
}

/// Modification of a valid message, and the error that it causes.
type Wrong<T> = (fn(&mut T), &'static str);

fn claim(from: &mut proto::Workload, name: &str, ports: Vec<proto::Port>) {
    from.services.insert(name.to_owned(), proto::PortList { ports });
}

const WRONG_WORKLOADS: [Wrong<proto::Workload>; 11] = [
    (
        |w| w.addresses = vec![Bytes::from_static(&[10, 0, 0, 1]); 65],
        "workload.addresses: 65 entries, want at most 64",
    ),
    (
        |w| w.authorization_policies = vec![String::new(); 1025],
        "workload.authorization_policies: 1025 entries, want at most 1024",
    ),
    (
        |w| (0..1025).for_each(|at| claim(w, &format!("app/{at}"), Vec::new())),
        "workload.services: 1025 entries, want at most 1024",
    ),
    (
        |w| claim(w, "app/a", vec![port(1, 1); 1025]),
        "workload.services[`app/a`].ports: 1025 entries, want at most 1024",
    ),
    (|w| w.uid.clear(), "workload.uid: empty"),
    (|w| w.namespace = "a/b".into(), "workload.namespace: `a/b` has a slash"),
    (
        |w| w.addresses.push(Bytes::from_static(&[0; 5])),
        "workload.addresses[1]: 5 bytes, want 4 or 16",
    ),
    (|w| w.addresses = vec![Bytes::new()], "workload.addresses[0]: 0 bytes, want 4 or 16"),
    (
        |w| w.waypoint = Some(proto::GatewayAddress::default()),
        "workload.waypoint.destination: neither hostname nor address",
    ),
    (
        |w| w.network_gateway = Some(by_address(&[1], 0)),
        "workload.network_gateway.destination.address.address: 1 bytes, want 4 or 16",
    ),
    (|w| claim(w, "echo.app", vec![]), "workload.services[`echo.app`]: want NAMESPACE/HOSTNAME"),
];

#[test]
fn what_only_dialing_or_finding_needs_rejects_no_workload() {
    let got = read(|from| {
        from.namespace.clear();
        let ports = vec![port(80, 0), port(81, 65536), port(0, 1), port(65616, 1), port(82, 82)];
        claim(from, "app/a", ports);
        claim(from, "/a\nb", vec![port(1, 1)]);
        from.network_gateway = Some(by_address(&[1; 4], 65536));
        from.waypoint = Some(by_name("", "?"));
        from.application_tunnel = Some(proto::ApplicationTunnel { protocol: 1, port: 70_000 });
    });
    let ports = [(80, 0), (81, 0), (82, 82)].into();
    let services = [("app/a".into(), ports), ("/a\\nb".into(), [(1, 1)].into())];
    assert_eq!(got.services, services.into());
    assert_eq!((&*got.namespace, got.has_waypoint), ("", true));
    let gateway = got.network_gateway.expect("a gateway");
    assert_eq!(gateway.port, HBONE_PORT);
}

#[test]
fn what_only_dialing_or_finding_needs_rejects_no_service() {
    let got = read_service(|from| {
        from.namespace.clear();
        from.hostname = "a b".into();
        from.addresses = vec![proto::NetworkAddress { length: Some(33), ..address(&[1; 4]) }];
        from.ports = vec![port(80, 65536), port(0, 80), port(65536, 80), port(82, 8082)];
        from.waypoint = Some(by_name("a", "?"));
    });
    assert_eq!((&*got.namespace, &*got.hostname), ("", "a b"));
    assert!(got.vips.is_empty());
    assert_eq!(got.ports, BTreeMap::from([(80, 0), (82, 8082)]));
    let gateway = GatewayAddress { place: Place::Name("a/?".into()), port: HBONE_PORT };
    assert_eq!(got.waypoints, [Waypoint { gateway, weight: 1 }]);
    assert_eq!(&*read_service(|from| from.hostname.clear()).hostname, "");
}

#[test]
fn a_workload_that_is_wrong_is_rejected_by_its_field() {
    for (change, want) in WRONG_WORKLOADS {
        let mut from = a_workload();
        change(&mut from);
        assert_eq!(read_by_uid(from).expect_err(want), want);
    }
}

const WRONG_SERVICES: [Wrong<proto::Service>; 8] = [
    (
        |s| s.addresses = vec![address(&[10, 0, 0, 1]); 1025],
        "service.addresses: 1025 entries, want at most 1024",
    ),
    (|s| s.ports = vec![port(1, 1); 1025], "service.ports: 1025 entries, want at most 1024"),
    (
        |s| s.subject_alt_names = vec![String::new(); 1025],
        "service.subject_alt_names: 1025 entries, want at most 1024",
    ),
    (
        |s| s.weighted_waypoints = vec![proto::WeightedWaypoint::default(); 65],
        "service.weighted_waypoints: 65 entries, want at most 64",
    ),
    (
        |s| s.addresses = vec![address(&[1; 4]), address(&[1; 3])],
        "service.addresses[1].address: 3 bytes, want 4 or 16",
    ),
    (
        |s| s.weighted_waypoints = vec![proto::WeightedWaypoint::default()],
        "service.weighted_waypoints[0].destination: missing",
    ),
    (|s| s.namespace = "a/b".into(), "service.namespace: `a/b` has a slash"),
    (
        |s| {
            s.weighted_waypoints = vec![proto::WeightedWaypoint {
                destination: Some(by_address(&[1; 5], 0)),
                weight: 1,
            }];
        },
        "service.weighted_waypoints[0].destination.destination.address.address: 5 bytes, \
         want 4 or 16",
    ),
];

#[test]
fn a_service_that_is_wrong_is_rejected_by_its_field() {
    for (change, want) in WRONG_SERVICES {
        let mut from = a_service();
        change(&mut from);
        assert_eq!(service(from).expect_err(want), want);
    }
}

#[test]
fn a_message_shows_little_of_a_long_text() {
    assert_eq!(shown(&"a".repeat(81)), format!("`{}…`", "a".repeat(80)));
    assert_eq!(shown("ä\0"), "`ä\\0`");
}
