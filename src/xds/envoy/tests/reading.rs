//! Tests of the conversion of assignments and of load balancing policies.

use super::*;

fn read(change: impl FnOnce(&mut ClusterLoadAssignment)) -> Result<Endpoints, String> {
    let mut from = assignment("x", vec![at(socket("10.0.0.1", 80))]);
    change(&mut from);
    endpoints::endpoints(from, &mut Interner::default())
}

fn read_one(change: impl FnOnce(&mut LbEndpoint)) -> Result<Endpoints, String> {
    read(|all| change(&mut all.endpoints[0].lb_endpoints[0]))
}

#[test]
fn an_endpoint_has_what_its_assignment_says() {
    let mut from = assignment("x", vec![at(socket("::ffff:10.0.0.1", 8080))]);
    let locality = Locality { region: "r".into(), zone: "z".into(), sub_zone: "s".into() };
    from.endpoints[0].locality = Some(locality);
    from.endpoints[0].priority = 2;
    from.endpoints[0].load_balancing_weight = Some(7);
    let one = &mut from.endpoints[0].lb_endpoints[0];
    one.load_balancing_weight = Some(3);
    one.metadata = Some(metadata("istio", "workload", "echo;app;echo-c;v1;west"));
    let percent = |numerator, denominator| FractionalPercent { numerator, denominator };
    let overload = |category: &str, of| DropOverload {
        category: category.to_owned(),
        drop_percentage: Some(of),
    };
    from.policy = Some(Policy {
        overprovisioning_factor: Some(200),
        drop_overloads: vec![
            overload("a", percent(5, 0)),
            overload("b", percent(5, 1)),
            overload("c", percent(5, 2)),
            overload("d", percent(u32::MAX, 0)),
        ],
        ..Policy::default()
    });
    let read = endpoints::endpoints(from, &mut Interner::default()).expect("an assignment");
    let (address, workload, port) = &read.list[0];
    assert_eq!((&**address, *port), ("10.0.0.1:8080", 8080));
    assert_eq!((workload.priority, workload.capacity, workload.healthy), (2, 3, true));
    assert_eq!(workload.protocol, Protocol::Tcp);
    let names = [
        &workload.workload_name,
        &workload.namespace,
        &workload.canonical_name,
        &workload.canonical_revision,
        &workload.cluster,
        &workload.locality.region,
        &workload.locality.zone,
        &workload.locality.subzone,
    ];
    assert_eq!(names.map(|name| &**name), ["echo", "app", "echo-c", "v1", "west", "r", "z", "s"]);
    let weights: Vec<_> = read.localities.iter().map(|((at, _), of)| (*at, *of)).collect();
    assert_eq!(weights, [(2, 7)]);
    assert_eq!(read.overprovisioning, 200);
    let drops: Vec<_> = read.drops.iter().map(|(_, parts)| *parts).collect();
    assert_eq!(drops, [50_000, 500, 5, 1_000_000]);
}

#[test]
fn what_is_left_out_has_envoys_default() {
    let read = read(|_| ()).expect("an assignment");
    let (_, workload, _) = &read.list[0];
    assert_eq!((workload.priority, workload.capacity, workload.healthy), (0, 1, true));
    assert_eq!((read.overprovisioning, read.drops.len()), (140, 0));
    assert!(read.localities.is_empty(), "a locality without weight has none");
}

#[test]
fn only_some_states_of_health_are_used() {
    for (status, healthy) in [
        (HealthStatus::Unknown.into(), true),
        (HealthStatus::Healthy.into(), true),
        (HealthStatus::Degraded.into(), true),
        (HealthStatus::Unhealthy.into(), false),
        (HealthStatus::Draining.into(), false),
        (HealthStatus::Timeout.into(), false),
        (99, false),
    ] {
        let read = read_one(|one| one.health_status = status).expect("an assignment");
        assert_eq!(read.list[0].1.healthy, healthy, "{status}");
    }
}

#[test]
fn labels_are_the_texts_of_envoy_lb_within_their_limits() {
    let mut of = metadata("envoy.lb", "version", "v2");
    let fields = &mut of.filter_metadata.get_mut("envoy.lb").expect("a filter").fields;
    let number = Value { kind: Some(Kind::NumberValue(1.0)) };
    fields.insert("number".to_owned(), number);
    let text = |text: &str| Value { kind: Some(Kind::StringValue(text.to_owned())) };
    fields.insert("long".to_owned(), text(&"x".repeat(64)));
    let labels = |of: &Metadata| {
        let of = of.clone();
        let read = read_one(|one| one.metadata = Some(of)).expect("an assignment");
        let labels = read.list[0].1.pod_labels.iter();
        let labels: Vec<_> = labels.map(|(key, value)| format!("{key}={value}")).collect();
        (labels, read.unused)
    };
    let unused =
        |count| format!("10.0.0.1:80: {count} labels of envoy.lb are unused, above 64 or too long");
    assert_eq!(labels(&of), (vec!["version=v2".to_owned()], vec![unused(1)]));
    let fields = &mut of.filter_metadata.get_mut("envoy.lb").expect("a filter").fields;
    fields.extend((0..100).map(|at| (format!("k{at}"), text("v"))));
    let (many, left_out) = labels(&of);
    assert_eq!((many.len(), left_out), (64, vec![unused(38)]));
    assert_eq!(labels(&metadata("other", "version", "v2")), (vec![], vec![]));
}

#[test]
fn hbone_is_what_the_metadata_says() {
    let tunnel = metadata("envoy.transport_socket_match", "tunnel", "http");
    let tunnelled = read_one(|one| one.metadata = Some(tunnel)).expect("an assignment");
    assert_eq!(tunnelled.list[0].1.protocol, Protocol::Hbone);
    // The form that Istio's gateways use.
    let inside = Form::EnvoyInternalAddress(EnvoyInternalAddress {
        endpoint_id: "10.0.0.9:8080".into(),
        ..EnvoyInternalAddress::default()
    });
    let filter = "envoy.filters.listener.original_dst";
    let read = read_one(|one| {
        *one = at(inside.clone());
        one.metadata = Some(metadata(filter, "local", "10.0.0.9:8080"));
    });
    let read = read.expect("an assignment");
    let (address, workload, port) = &read.list[0];
    assert_eq!((&**address, *port), ("10.0.0.9:8080", 8080));
    assert_eq!(workload.protocol, Protocol::Hbone);
    assert_eq!(workload.addresses[0].to_string(), "10.0.0.9");
    let elsewhere = read_one(|one| *one = at(inside)).expect("an assignment");
    assert_eq!(
        elsewhere.unused,
        ["`10.0.0.9:8080`: internal listener without an original destination"]
    );
}

#[test]
fn what_nobody_could_dial_is_left_out_and_reported() {
    let pipe = Form::Pipe(Pipe { path: "/run/x".into() });
    let of = |change: fn(&mut SocketAddress)| {
        let mut socket = SocketAddress {
            address: "10.0.0.2".into(),
            port_specifier: Some(PortSpecifier::PortValue(80)),
            ..SocketAddress::default()
        };
        change(&mut socket);
        Form::SocketAddress(socket)
    };
    let named = Some(PortSpecifier::NamedPort("http".into()));
    let by_name = SocketAddress {
        address: "10.0.0.2".into(),
        port_specifier: named,
        ..SocketAddress::default()
    };
    for (form, why) in [
        (pipe, "`/run/x` is a unix socket"),
        (of(|of| of.protocol = 1), "`10.0.0.2` is not TCP"),
        (
            of(|of| of.resolver_name = "r".into()),
            "`10.0.0.2`: custom resolver `r` is not supported",
        ),
        (Form::SocketAddress(by_name), "`10.0.0.2`: named port `http` is not supported"),
        (socket("10.0.0.2", 0), "`10.0.0.2` has no port"),
        (socket("10.0.0.1", 80), "10.0.0.1:80: duplicate"),
    ] {
        let read = read(|all| all.endpoints[0].lb_endpoints.push(at(form))).expect("the others");
        assert_eq!((read.list.len(), read.unused_count), (1, 1), "{why}");
        assert_eq!(read.unused, [why]);
    }
    let weighted = read(|all| {
        all.policy = Some(Policy { weighted_priority_health: true, ..Policy::default() });
    });
    assert_eq!(weighted.expect("an assignment").unused_count, 1);
}

type Change = fn(&mut ClusterLoadAssignment);

fn one(all: &mut ClusterLoadAssignment) -> &mut LbEndpoint {
    &mut all.endpoints[0].lb_endpoints[0]
}

fn drops(all: &mut ClusterLoadAssignment, category: &str, denominator: i32) {
    let overload = DropOverload {
        category: category.to_owned(),
        drop_percentage: Some(FractionalPercent { numerator: 1, denominator }),
    };
    all.policy.get_or_insert_default().drop_overloads = vec![overload];
}

#[test]
fn a_mistake_in_an_endpoint_is_named_with_its_place() {
    let table: [(Change, &str); 9] = [
        (|all| one(all).host_identifier = None, "endpoints[0].lb_endpoints[0].endpoint: missing"),
        (
            |all| one(all).host_identifier = Some(HostIdentifier::EndpointName("a".into())),
            "endpoints[0].lb_endpoints[0].endpoint_name: not supported, want endpoint",
        ),
        (
            |all| one(all).host_identifier = Some(HostIdentifier::Endpoint(Endpoint::default())),
            "endpoints[0].lb_endpoints[0].endpoint.address: missing or unsupported",
        ),
        (
            |all| *one(all) = at(socket("10.0.0.1", 65536)),
            "endpoints[0].lb_endpoints[0].endpoint.address.socket_address.port_value: 65536, want \
             at most 65535",
        ),
        (
            |all| *one(all) = at(socket("10.0.0.256", 80)),
            "endpoints[0].lb_endpoints[0].endpoint.address.socket_address.address: `10.0.0.256` \
             is neither an address nor a host name",
        ),
        (
            |all| *one(all) = at(socket("", 80)),
            "endpoints[0].lb_endpoints[0].endpoint.address.socket_address.address: `` is neither \
             an address nor a host name",
        ),
        (
            |all| one(all).load_balancing_weight = Some(0),
            "endpoints[0].lb_endpoints[0].load_balancing_weight: 0, want at least 1",
        ),
        (
            |all| {
                let mut other = at(socket("10.0.0.2", 80));
                other.load_balancing_weight = Some(u32::MAX);
                all.endpoints[0].lb_endpoints.push(other);
            },
            "endpoints[0].lb_endpoints[1].load_balancing_weight: 4294967295, and the sum of its \
             locality is over 4294967295",
        ),
        (
            |all| {
                one(all).host_identifier =
                    Some(HostIdentifier::Endpoint(Endpoint { address: Some(Address::default()) }))
            },
            "endpoints[0].lb_endpoints[0].endpoint.address: missing or unsupported",
        ),
    ];
    for (change, want) in table {
        assert_eq!(read(change).expect_err(want), want);
    }
}

#[test]
fn a_mistake_in_a_locality_or_a_policy_is_named_with_its_place() {
    let table: [(Change, &str); 9] = [
        (
            |all| all.endpoints[0].load_balancing_weight = Some(0),
            "endpoints[0].load_balancing_weight: 0, want at least 1",
        ),
        (
            |all| {
                all.endpoints[0].load_balancing_weight = Some(u32::MAX);
                let again = all.endpoints[0].clone();
                all.endpoints.push(again);
            },
            "endpoints[1].load_balancing_weight: 4294967295, and the sum of its priority is over \
             4294967295",
        ),
        (|all| all.endpoints[0].priority = 129, "endpoints[0].priority: 129, want at most 128"),
        (
            |all| {
                let list = LbConfig::LoadBalancerEndpoints(LbEndpointList {});
                all.endpoints[0].lb_config = Some(list);
            },
            "endpoints[0].load_balancer_endpoints: not supported, want lb_endpoints",
        ),
        (
            |all| {
                let leds = LedsClusterLocalityConfig::default();
                all.endpoints[0].lb_config = Some(LbConfig::LedsClusterLocalityConfig(leds));
            },
            "endpoints[0].leds_cluster_locality_config: not supported, want lb_endpoints",
        ),
        (
            |all| all.policy.get_or_insert_default().overprovisioning_factor = Some(0),
            "policy.overprovisioning_factor: 0, want at least 1",
        ),
        (|all| drops(all, "", 0), "policy.drop_overloads[0].category: empty"),
        (
            |all| drops(all, "a", 3),
            "policy.drop_overloads[0].drop_percentage.denominator: 3 is unknown",
        ),
        (
            |all| {
                let policy = all.policy.get_or_insert_default();
                policy.drop_overloads = vec![DropOverload::default(); 65];
            },
            "policy.drop_overloads: 65 entries, want at most 64",
        ),
    ];
    for (change, want) in table {
        assert_eq!(read(change).expect_err(want), want);
    }
}

/// Returns one policy of a kind, with these settings.
fn policy(kind: &str, value: &[u8]) -> LoadBalancingPolicy {
    LoadBalancingPolicy {
        policies: vec![load_balancing_policy::Policy {
            typed_extension_config: Some(TypedExtensionConfig {
                name: "any".into(),
                typed_config: Some(Any {
                    type_url: format!(
                        "type.googleapis.com/envoy.extensions.load_balancing_policies.{kind}"
                    ),
                    value: value.to_vec(),
                }),
            }),
        }],
    }
}

#[test]
fn weights_of_localities_count_where_the_cluster_says_so() {
    let weighted =
        CommonLbConfig { locality_weighted_lb_config: Some(LocalityWeightedLbConfig {}) };
    for (common, policy, want, reported) in [
        (None, None, false, 0),
        (Some(CommonLbConfig::default()), None, false, 0),
        (Some(weighted), None, true, 0),
        // `load_balancing_policy` takes precedence.
        (Some(weighted), Some(policy("round_robin.v3.RoundRobin", &[])), false, 0),
        (None, Some(policy("round_robin.v3.RoundRobin", &[0x12, 2, 0x12, 0])), true, 0),
        (None, Some(policy("round_robin.v3.RoundRobin", &[0x12, 2, 0x0a, 0])), false, 0),
        (None, Some(policy("least_request.v3.LeastRequest", &[0x22, 2, 0x12, 0])), true, 0),
        (None, Some(policy("random.v3.Random", &[0x0a, 2, 0x12, 0])), true, 0),
        (None, Some(policy("wrr_locality.v3.WrrLocality", &[])), true, 0),
        (Some(weighted), Some(policy("maglev.v3.Maglev", &[])), false, 1),
        (None, Some(policy("random.v3.Random", &[0x0a, 9])), false, 0),
    ] {
        let cluster = Cluster {
            common_lb_config: common,
            load_balancing_policy: policy.clone(),
            ..named_by_eds(ECHO, "")
        };
        let read = cluster::cluster(cluster, &mut Interner::default()).expect("a cluster");
        assert_eq!((read.by_locality, read.notes.len()), (want, reported), "{policy:?}");
    }
}
