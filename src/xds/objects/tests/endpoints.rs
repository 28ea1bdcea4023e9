//! Tests of endpoints: duplicates, locations, ports and health.

use std::path::Path;

use super::*;
use crate::snapshot::mesh::{GatewayAddress, Place, Protocol, Scope};
use crate::xds::file;

/// Joins `text` with a mesh file in which one workload serves the service.
fn with_mesh_file(text: &str) -> JoinResult {
    let mesh = "services: [{name: hello, namespace: app, hostname: hello.app.svc.cluster.local,
  vips: [], ports: {80: 8080}}]
workloads: [{uid: \"east//Pod/app/hello-a\", workloadIps: [10.0.0.1], namespace: app, network: east,
  capacity: 3, services: {app/hello.app.svc.cluster.local: {80: 8080}}}]
";
    let (mesh, _) = file::parse(Path::new("m.yaml"), mesh).unwrap_or_else(|f| panic!("{f}"));
    joined_with(&mesh, text, "{}")
}

#[test]
fn what_is_listed_twice_is_one_endpoint_and_weighs_once() {
    let pod = |name: &str, ip: &str| {
        let target = format!("{{kind: Pod, namespace: app, name: {name}}}");
        format!("{{addresses: [{ip}], targetRef: {target}}}")
    };
    let (a, near) = (pod("a", "10.0.0.1"), "topology.istio.io/network: east");
    let global = || service("east", "istio.io/global: \"true\"");
    let copy = slice("east", near, &at("10.0.0.1"))
        .replace("kubernetes.io/service-name", "multicluster.kubernetes.io/service-name")
        .replace("topology.istio.io/cluster", "multicluster.kubernetes.io/source-cluster");
    let six = slice("east", "", &pod("a", "fd00::1")).replace("IPv4", "IPv6");
    let one = slice("east", "", &a);
    for (what, text) in [
        ("one object of two control planes", format!("{}{one}{one}", global())),
        ("two slices, one without the pod", one.clone() + &slice("east", "", &at("10.0.0.1"))),
        ("the other way round", slice("east", "", &at("10.0.0.1")) + &one),
        ("two families of addresses", one.clone() + &six),
        ("a copy of our own slice", one.clone() + &copy),
        ("two clusters that claim it", one.clone() + &slice("west", near, &a)),
        ("an address twice", slice("east", "", &format!("{}, {}", at("10.0.0.1"), a))),
    ] {
        let joined = joined(&(global() + &global() + &text));
        let workloads: Vec<_> = joined.mesh.workloads.values().collect();
        assert_eq!(workloads.len(), 1, "{what}: {workloads:?}");
        assert_eq!(&*workloads[0].uid, "east//Pod/app/a", "{what}");
        assert_eq!(workloads[0].capacity, 1, "{what}");
        // Each address is an endpoint.
        let mut want = vec!["10.0.0.1:8080".to_owned()];
        want.extend(text.contains("IPv6").then(|| "[fd00::1]:8080".to_owned()));
        assert_eq!(endpoints_of_host(&joined, OWN), Some(want), "{what}");
        assert!(joined.warnings.is_empty(), "{what}: {}", joined.warnings);
    }
    for (what, backend) in [
        ("the pod", pod("hello-a", "10.0.0.1")),
        ("another pod at its address", pod("other", "10.0.0.1")),
        ("its address", at("10.0.0.1")),
    ] {
        let joined = with_mesh_file(&(global() + &slice("east", "", &backend)));
        let workloads: Vec<_> = joined.mesh.workloads.values().collect();
        assert_eq!(workloads.len(), 1, "{what} of the mesh file: {workloads:?}");
        assert_eq!(workloads[0].capacity, 3, "{what} of the mesh file");
    }
    let host = [pod("a", "10.0.0.1"), pod("b", "10.0.0.1")].join(", ");
    let joined = joined(&(global() + &slice("east", "", &host)));
    assert_eq!(joined.mesh.workloads.len(), 2, "pods of one node's address");
}

#[test]
fn workloads_of_the_mesh_file_are_part_of_the_global_service() {
    let mut text = export("east", "null") + &service("west", "istio.io/global: \"true\"");
    text += &slice("west", "topology.istio.io/network: east", &at("10.0.0.2"));
    let joined = with_mesh_file(&text);
    assert!(joined.warnings.is_empty(), "{}", joined.warnings);
    let both = vec!["10.0.0.1:8080".to_owned(), "10.0.0.2:8080".to_owned()];
    assert_eq!(endpoints_of_host(&joined, GLOBAL), Some(both));
    assert_eq!(endpoints_of_host(&joined, OWN), Some(vec!["10.0.0.1:8080".to_owned()]));
}

#[test]
fn conditions_say_who_is_dialled() {
    let backend = |last: u8, conditions: &str| {
        format!("{{addresses: [10.0.0.{last}], conditions: {{{conditions}}}}}")
    };
    let dialled = |backends: &[String]| {
        let text = service("east", "") + &slice("east", "", &backends.join(", "));
        endpoints_of_host(&joined(&text), OWN).unwrap_or_default()
    };
    let ready = backend(1, "ready: true");
    for (conditions, want) in [
        ("", true),
        ("ready: null", true),
        ("ready: true, serving: true, terminating: false", true),
        ("ready: false", false),
        ("ready: false, serving: false, terminating: true", false),
        ("ready: false, serving: true, terminating: true", false),
    ] {
        let addresses = dialled(&[ready.clone(), backend(2, conditions)]);
        assert_eq!(addresses.len() == 2, want, "{conditions}: {addresses:?}");
    }
    let ending = backend(2, "ready: false, serving: true, terminating: true");
    let not_ready = backend(3, "ready: false");
    assert_eq!(dialled(&[ending, not_ready]), ["10.0.0.2:8080"], "the last that serves");
}

#[test]
fn ports_are_joined_by_name_and_the_older_export_holds() {
    let ports = |text: &str, ports: &str| {
        text.replace("[{name: http, port: 80}]", ports).replace("[{name: http, port: 8080}]", ports)
    };
    let two = "[{name: http, port: 80, targetPort: web}, {name: dns, port: 53, protocol: UDP}, \
               {name: admin, port: 81, targetPort: 9001}]";
    let targets = "[{name: http, port: 8080}, {name: admin, port: 9001}, {name: other, port: 1}, \
                   {name: dns, port: 5353, protocol: UDP}, {name: all}]";
    let text =
        ports(&service("east", ""), two) + &ports(&slice("east", "", &at("10.0.0.1")), targets);
    let joined_one = joined(&text);
    let own = joined_one.mesh.services.get("app/hello.app.svc.cluster.local").unwrap();
    assert_eq!(own.ports, [(80, 0), (81, 9001)].into());
    let workload = joined_one.mesh.workloads.values().next().unwrap();
    let served = workload.services.get("app/hello.app.svc.cluster.local").unwrap();
    assert_eq!(served.iter().collect::<Vec<_>>(), [(&80, &8080), (&81, &9001)]);

    let mut text = service("east", "") + &ports(&service("west", ""), "[{name: http, port: 90}]");
    text += &export("east", "2026-02-01T00:00:00Z");
    text += &export("west", "2026-01-01T00:00:00Z");
    text += &slice("east", "", &at("10.0.0.1"));
    text += &slice("west", "topology.istio.io/network: east", &at("10.0.0.2"));
    let joined = joined(&text);
    let global = joined.mesh.services.get("app/hello.app.mesh.internal").unwrap();
    assert_eq!(global.ports.keys().collect::<Vec<_>>(), [&90], "the older export's");
    let reported = joined.warnings.to_string();
    let want = "o.yaml:2: warning: the port http of hello.app.svc.clusterset.local is 80 here and \
                90 in an older export, which takes precedence";
    assert!(reported.starts_with(want), "{reported}");
}

#[test]
fn an_import_brings_ports_and_an_address_and_copied_slices_its_endpoints() {
    for (version, spec) in [
        (
            "v1alpha1",
            "spec: {type: ClusterSetIP, ips: [10.9.0.1], ports: [{name: http, port: 80}]}",
        ),
        ("v1beta1", "type: ClusterSetIP\nips: [10.9.0.1]\nports: [{name: http, port: 80}]"),
    ] {
        let mut text = format!(
            "apiVersion: multicluster.x-k8s.io/{version}\nkind: ServiceImport\n\
             metadata: {{name: hello, namespace: app}}\n{spec}\n"
        );
        let copy = slice("west", "topology.istio.io/network: east", &at("10.0.0.2"));
        let copy =
            copy.replace("kubernetes.io/service-name", "multicluster.kubernetes.io/service-name");
        text +=
            &copy.replace("topology.istio.io/cluster", "multicluster.kubernetes.io/source-cluster");
        let joined = joined(&text);
        assert!(joined.warnings.is_empty(), "{}", joined.warnings);
        for host in ["hello.app.svc.clusterset.local", GLOBAL] {
            assert_eq!(
                endpoints_of_host(&joined, host),
                Some(vec!["10.0.0.2:8080".to_owned()]),
                "{host}"
            );
            assert!(joined.scope.exported.contains(host), "{host}");
        }
        let set = joined.mesh.services.get("app/hello.app.svc.clusterset.local").unwrap();
        assert_eq!(set.vips, [("east".to_owned(), "10.9.0.1".parse().unwrap())]);
        assert_eq!(set.preferences, None, "the configured default applies");
        assert_eq!(&*joined.mesh.workloads.values().next().unwrap().cluster, "west");
    }
    let orphan = slice("west", "", &at("10.0.0.2"))
        .replace("kubernetes.io/service-name", "multicluster.kubernetes.io/service-name")
        .replace("topology.istio.io/cluster", "multicluster.kubernetes.io/source-cluster");
    let reported = joined(&orphan).warnings.to_string();
    assert!(
        reported.contains("the endpoints of app/hello in cluster west are not used"),
        "{reported}"
    );
}

#[test]
fn endpoints_know_their_cluster_network_place_and_protocol() {
    let namespaces = "---\napiVersion: v1\nkind: List\nitems:
- {apiVersion: v1, kind: Namespace, metadata: {name: istio-system, labels: {
    topology.istio.io/cluster: north, topology.istio.io/network: net-n}}}
- {apiVersion: v1, kind: Namespace, metadata: {name: app, labels: {
    istio.io/dataplane-mode: ambient}}}
";
    let backend = "{addresses: [10.0.0.1], zone: z1, nodeName: n1}";
    let learned = |cluster: &str, labels: &str| {
        let mut text = namespaces.to_owned() + &service(cluster, "istio.io/global: \"true\"");
        text += &slice(cluster, labels, backend);
        let joined = joined(&text);
        let workload = joined.mesh.workloads.values().next().unwrap();
        assert_eq!((&*workload.locality.zone, &*workload.node), ("z1", "n1"));
        let region = workload.locality.region.to_string();
        (workload.network.to_string(), region, workload.protocol)
    };
    let hbone = Protocol::Hbone;
    assert_eq!(learned("east", ""), ("east".into(), "r1".into(), hbone));
    let none = "istio.io/dataplane-mode: none";
    assert_eq!(learned("east", none), ("east".into(), "r1".into(), Protocol::Tcp));
    let placed = "topology.istio.io/network: x, topology.kubernetes.io/region: r9";
    assert_eq!(learned("west", placed), ("x".into(), "r9".into(), Protocol::Tcp));
    assert_eq!(learned("west", ""), ("west".into(), String::new(), Protocol::Tcp));
    assert_eq!(learned("north", ""), ("net-n".into(), String::new(), Protocol::Tcp));
}

#[test]
fn traffic_distribution_becomes_preferences() {
    use Scope::{Network, Region, Zone};
    let close: &[Scope] = &[Network, Region, Zone];
    let table: [(&str, &str, Option<&[Scope]>); 9] = [
        ("", "", None),
        ("PreferClose", "", Some(close)),
        ("PreferSameZone", "", Some(close)),
        ("PreferSameNode", "", Some(close)),
        ("", "PreferNetwork", Some(&[Network])),
        ("", "preferregion", Some(&[Network, Region])),
        ("", "Any", Some(&[])),
        ("PreferClose", "Any", Some(close)),
        ("", "Nearby", None),
    ];
    for (field, annotation, want) in table {
        let mut text = service("east", "");
        if !field.is_empty() {
            text = text.replace("spec: {", &format!("spec: {{trafficDistribution: {field}, "));
        }
        let key = "networking.istio.io/traffic-distribution";
        let annotations = format!("  annotations: {{{key}: \"{annotation}\"}}\n  labels:");
        let objects = {
            let mut objects = Objects::default();
            let text = text.replace("  labels:", &annotations);
            let findings = read::text(Path::new("o.yaml"), &text, &mut objects);
            assert!(!findings.has_errors(), "{findings}");
            assert_eq!(findings.is_empty(), annotation != "Nearby", "{findings}");
            objects
        };
        let joined = join(&Mesh::default(), &objects, &config("{}"), &AddressHolders::default());
        let own = joined.mesh.services.values().next().unwrap();
        assert_eq!(own.preferences.as_deref(), want, "{field} {annotation}");
    }
}

#[test]
fn a_waypoint_is_that_of_the_service_or_of_its_namespace() {
    let namespace = "---\napiVersion: v1\nkind: Namespace\n\
                     metadata: {name: app, labels: {istio.io/use-waypoint: all}}\n";
    let other = "istio.io/use-waypoint: own, istio.io/use-waypoint-namespace: gateways";
    for (namespace, label, want) in [
        ("", "", None),
        (namespace, "", Some("app/all.app.svc.cluster.local")),
        (namespace, "istio.io/use-waypoint: own", Some("app/own.app.svc.cluster.local")),
        (namespace, "istio.io/use-waypoint: none", None),
        ("", other, Some("gateways/own.gateways.svc.cluster.local")),
    ] {
        let joined = joined(&(namespace.to_owned() + &service("east", label)));
        let service = joined.mesh.services.values().next().unwrap();
        let gateway = service.waypoints.first().map(|one| one.gateway.clone());
        let want =
            want.map(|name| GatewayAddress { place: Place::Name(name.to_owned()), port: 15008 });
        assert_eq!(gateway, want, "{label}");
    }
    let managed = "gateway.istio.io/managed: istio.io-mesh-controller";
    let joined = joined(&(service("east", "") + &slice("east", managed, &at("10.0.0.1"))));
    let workload = joined.mesh.workloads.values().next().unwrap();
    assert_eq!(workload.protocol, Protocol::Hbone);
}

#[test]
fn an_address_of_two_services_leads_to_neither() {
    let with_ip = |name: &str| {
        let text = service("east", "").replace("name: hello", &format!("name: {name}"));
        text.replace("spec: {", "spec: {clusterIPs: [10.9.0.1, None], ")
    };
    let joined = joined(&(with_ip("hello") + &with_ip("other")));
    let of = |name: &str| {
        let name = format!("app/{name}.app.svc.cluster.local");
        joined.mesh.services.get(&*name).unwrap().vips.len()
    };
    assert_eq!((of("hello"), of("other")), (0, 0));
}
