//! Tests of objects of several tenants, each of whom writes to one namespace.

use super::*;

/// Labels of a slice, and start of a Service's `spec`, for a slice that Kubernetes manages.
pub(super) const MANAGED: &str =
    "endpointslice.kubernetes.io/managed-by: endpointslice-controller.k8s.io";
pub(super) const SELECTOR: &str = "selector: {app: hello}, ";
pub(super) const EXPORTED: &str = "istio.io/global: \"true\"";
pub(super) const KEPT: &str = "istio.io/global: \"false\"";

/// Returns a Service `hello` in a namespace of our cluster.
pub(super) fn service_in(namespace: &str, label: &str, spec: &str) -> String {
    let text = service("east", label);
    let text = text.replacen("namespace: app", &format!("namespace: {namespace}"), 1);
    text.replacen("spec: {", &format!("spec: {{{spec}"), 1)
}

/// Returns a slice of that Service.
pub(super) fn slice_in(namespace: &str, labels: &str, endpoints: &str) -> String {
    let text = slice("east", labels, endpoints);
    text.replacen("namespace: app", &format!("namespace: {namespace}"), 1)
}

pub(super) fn pod_at(namespace: &str, name: &str, ip: &str) -> String {
    let target = format!("{{kind: Pod, namespace: {namespace}, name: {name}}}");
    format!("{{addresses: [{ip}], targetRef: {target}}}")
}

/// Returns the endpoints for the hostname of a namespace's Service.
pub(super) fn dialled_in(joined: &JoinResult, namespace: &str) -> Vec<String> {
    let host = format!("hello.{namespace}.svc.cluster.local");
    endpoints_of_host(joined, &host).unwrap_or_default()
}

/// Joins a Service and a slice of each of `a` and `b`. Also returns the endpoints dialled for
/// each.
fn both(a: [String; 2], b: [String; 2]) -> (JoinResult, [Vec<String>; 2]) {
    let joined = joined(&[a.concat(), b.concat()].concat());
    let dialled = ["a", "b"].map(|namespace| dialled_in(&joined, namespace));
    (joined, dialled)
}

pub(super) const ONE: &str = "10.0.0.1:8080";
pub(super) const TWO: &str = "10.0.0.2:8080";

#[test]
fn a_slice_names_pods_of_its_own_namespace_only() {
    for own in ["app", "\"\""] {
        let evil = slice_in("aaa", "", &pod_at("app", "web", "10.0.0.2"));
        let mut text = service_in("aaa", EXPORTED, "") + &evil;
        text += &service("east", EXPORTED);
        text += &slice("east", "", &pod_at(own, "web", "10.0.0.1"));
        let joined = joined(&text);
        assert_eq!(dialled_in(&joined, "app"), [ONE], "{own}");
        assert_eq!(dialled_in(&joined, "aaa"), [TWO], "{own}");
        let mut uids: Vec<_> = joined.mesh.workloads.keys().map(|uid| &**uid).collect();
        uids.sort_unstable();
        assert_eq!(uids, ["east//Endpoint/aaa/east/10.0.0.2", "east//Pod/app/web"]);
        let reported = joined.conflicts.to_string();
        let want = "o.yaml:10: warning: an endpoint of aaa/hello names the pod app/web, which is \
                    ignored: a slice names pods of its own namespace only";
        assert!(reported.starts_with(want), "{reported}");
    }
}

#[test]
fn what_a_slice_says_of_an_address_holds_in_its_namespace_only() {
    let labels = "topology.istio.io/network: far, topology.kubernetes.io/region: r9, \
                  istio.io/dataplane-mode: ambient";
    let mut text = service_in("aaa", EXPORTED, "") + &slice_in("aaa", labels, &at("10.0.0.1"));
    text += &(service("east", EXPORTED) + &slice("east", "", &at("10.0.0.1")));
    let joined = joined(&text);
    assert_eq!(dialled_in(&joined, "app"), [ONE]);
    assert!(dialled_in(&joined, "aaa").is_empty(), "it is in another network");
    let workload = joined.mesh.workloads.get("east//Endpoint/app/east/10.0.0.1");
    let workload = workload.expect("a workload of its own");
    assert_eq!(&*workload.locality.region, "r1");
    assert!(joined.conflicts.is_empty(), "{}", joined.conflicts);
}

/// `a` is exported. Each row has the label of `b`, and the namespace of the pod in each slice,
/// or none.
#[test]
fn an_address_that_two_namespaces_list_without_proof_is_used_by_neither() {
    let rows = [
        ("both expose it", EXPORTED, ["", ""]),
        ("one keeps it", KEPT, ["", ""]),
        ("one does not expose it", "", ["", ""]),
        ("an invented pod, a kept address", KEPT, ["a", ""]),
        ("an invented pod, an exposed address", EXPORTED, ["a", ""]),
        ("a foreign pod, a kept address", KEPT, ["b", ""]),
        ("two pods, one kept", KEPT, ["a", "b"]),
        ("two pods", EXPORTED, ["a", "b"]),
    ];
    for (what, label, pods) in rows {
        let [one, two] = pods.map(|namespace| match namespace {
            "" => at("10.0.0.1"),
            namespace => pod_at(namespace, "web", "10.0.0.1"),
        });
        let (joined, dialled) = both(
            [service_in("a", EXPORTED, ""), slice_in("a", "", &one)],
            [service_in("b", label, ""), slice_in("b", "", &two)],
        );
        assert_eq!(dialled, [const { Vec::<String>::new() }; 2], "{what}");
        let reported = joined.conflicts.to_string();
        let want = "o.yaml:10: warning: the address 10.0.0.1 of a/hello is not used: namespace b \
                    lists it too at o.yaml:28, and neither has evidence for it";
        assert!(reported.contains(want), "{what}: {reported}");
        // A service without exposure needs no finding.
        let is_reported = reported.contains("10.0.0.1 of b/hello is not used");
        assert_eq!(is_reported, label == EXPORTED, "{what}: {reported}");
    }
}

#[test]
fn a_workload_of_the_mesh_file_settles_whose_an_address_without_proof_is() {
    let mesh = "services: []
workloads: [{uid: vm, workloadIps: [10.0.0.1], namespace: b, services: {}}]
";
    let (mesh, _) = crate::xds::file::parse(Path::new("m.yaml"), mesh).expect("a mesh");
    let forged = slice_in("a", "", &pod_at("a", "web", "10.0.0.1"));
    let mut text = service_in("a", EXPORTED, "") + &forged;
    text += &(service_in("b", EXPORTED, "") + &slice_in("b", "", &at("10.0.0.1")));
    let joined = joined_with(&mesh, &text, "{}");
    assert!(dialled_in(&joined, "a").is_empty());
    assert_eq!(dialled_in(&joined, "b"), [ONE]);
}

#[test]
fn the_name_of_a_cluster_makes_no_slice_the_gateway_of_a_network() {
    for cluster in ["NetworkGateway/far/192.0.2.1/15008", "x/SplitHorizonWorkload/y"] {
        let annotated = |text: String| {
            let labels = "topology.istio.io/cluster: east";
            let of = format!("  annotations: {{topology.istio.io/cluster: {cluster}}}\n  labels:");
            text.replace(labels, "a: b").replacen("  labels:", &of, 1)
        };
        let forged = slice("east", "topology.istio.io/network: far", &at("192.0.2.1"));
        let text = annotated(service("east", EXPORTED)) + &annotated(forged);
        let joined = joined(&text);
        let uids: Vec<_> = joined.mesh.workloads.keys().collect();
        assert!(uids.is_empty(), "{uids:?}");
        let reported = joined.warnings.to_string();
        let want = format!("the slice of app/hello is not used: its cluster is `{cluster}`");
        assert!(reported.contains(&want), "{reported}");
    }
}

/// Labels of a copy for the Service `hello`, which the controller of this cluster ignores.
const COPIED: &str = "multicluster.kubernetes.io/source-cluster: west, \
                      multicluster.kubernetes.io/service-name: hello";

#[test]
fn a_managed_slice_that_the_controller_never_sees_proves_nothing() {
    let victim = service_in("app", KEPT, SELECTOR)
        + &slice_in("app", MANAGED, &pod_at("app", "web", "10.0.0.1"));
    let forged = pod_at("evil", "invented", "10.0.0.1");
    for (what, cluster, labels) in [
        ("a copy", "west", COPIED),
        ("a copy beside an own Service", "east", COPIED),
        ("a copy of our own cluster", "east", &*COPIED.replace("west", "east")),
        ("a slice of another cluster", "west", "topology.istio.io/cluster: west"),
    ] {
        let labels = format!("{labels}, {MANAGED}, topology.istio.io/network: east");
        let slice = slice_in("evil", &labels, &forged);
        let slice = slice.replace("topology.istio.io/cluster: east, ", "");
        let service = service_in("evil", EXPORTED, SELECTOR);
        let service = service.replace("cluster: east", &format!("cluster: {cluster}"));
        let joined = joined(&(victim.clone() + &service + &slice));
        assert_eq!(
            exposed_endpoints(&joined, "hello.evil.mesh.internal").unwrap_or_default(),
            [""; 0]
        );
        assert!(dialled_in(&joined, "evil").is_empty(), "{what}");
        assert_eq!(dialled_in(&joined, "app"), [ONE], "{what}");
        let reported = joined.conflicts.to_string();
        let want = "the address 10.0.0.1 of evil/hello is not used: it belongs to namespace app";
        assert!(reported.contains(want), "{what}: {reported}");
    }
}

#[test]
fn a_slice_that_kubernetes_keeps_cannot_be_outdone_by_one_that_a_tenant_wrote() {
    let forged = || pod_at("a", "web", "10.0.0.1");
    let genuine = || slice_in("b", MANAGED, &pod_at("b", "web", "10.0.0.1"));
    // Neither label nor selector alone is evidence, because a tenant can write both.
    for (labels, spec) in [("", ""), (MANAGED, ""), ("", SELECTOR)] {
        for (label, other) in [(EXPORTED, KEPT), (KEPT, EXPORTED), (EXPORTED, EXPORTED)] {
            let (joined, dialled) = both(
                [service_in("a", label, spec), slice_in("a", labels, &forged())],
                [service_in("b", other, SELECTOR), genuine()],
            );
            assert_eq!(dialled, [vec![], vec![ONE.to_owned()]], "{}", joined.conflicts);
        }
    }
    // A tenant can write both, which is equal evidence.
    let (joined, dialled) = both(
        [service_in("a", EXPORTED, SELECTOR), slice_in("a", MANAGED, &forged())],
        [service_in("b", EXPORTED, SELECTOR), genuine()],
    );
    assert_eq!(dialled, [const { Vec::<String>::new() }; 2]);
    let reported = joined.conflicts.to_string();
    for (own, other, line) in [("a", "b", 28), ("b", "a", 10)] {
        let want = format!(
            "the address 10.0.0.1 of {own}/hello is not used: namespace {other} lists it too at \
             o.yaml:{line}, with equal evidence"
        );
        assert!(reported.contains(&want), "{reported}");
    }
}

#[test]
fn clusters_do_not_hide_that_an_address_is_of_another_namespace() {
    let near = "topology.istio.io/network: east";
    let evil = service("west", EXPORTED).replace("namespace: app", "namespace: evil")
        + &slice("west", near, &at("10.0.0.1")).replace("namespace: app", "namespace: evil");
    let own = service("east", KEPT) + &slice("east", "", &at("10.0.0.1"));
    let joined = joined(&(evil + &own));
    assert_eq!(exposed_endpoints(&joined, "hello.evil.mesh.internal"), Some(vec![]));
}

#[test]
fn a_cluster_ip_of_another_namespace_is_no_endpoint() {
    let evil = service_in("evil", EXPORTED, "") + &slice_in("evil", "", &at("10.9.0.1"));
    let own = service_in("app", KEPT, "clusterIP: 10.9.0.1, ");
    let joined = joined(&(own + &evil));
    assert!(dialled_in(&joined, "evil").is_empty());
    let reported = joined.conflicts.to_string();
    let want = "the address 10.9.0.1 of evil/hello is not used: it belongs to namespace app by \
                o.yaml:2";
    assert!(reported.contains(want), "{reported}");
}

#[test]
fn a_workload_of_the_mesh_file_is_used_by_its_own_namespaces_only() {
    let mesh = "services: []
workloads: [{uid: w, workloadIps: [10.0.0.1], namespace: app, services: {}}]
";
    let (mesh, _) = crate::xds::file::parse(Path::new("m.yaml"), mesh).expect("a mesh");
    let joined_in = |namespace: &str| {
        let pod = pod_at(namespace, "web", "10.0.0.1");
        let text = service_in(namespace, EXPORTED, SELECTOR) + &slice_in(namespace, MANAGED, &pod);
        joined_with(&mesh, &text, "{}")
    };
    let own = joined_in("app");
    assert_eq!(dialled_in(&own, "app"), [ONE]);
    assert_eq!(own.mesh.workloads.keys().collect::<Vec<_>>(), [&"w".into()]);
    let evil = joined_in("evil");
    assert!(dialled_in(&evil, "evil").is_empty());
    let reported = evil.conflicts.to_string();
    assert!(reported.contains("it belongs to namespace app by the mesh file"), "{reported}");
}

#[test]
fn an_address_of_a_pod_that_is_known_in_another_network_is_not_taken_on() {
    let here = "{addresses: [], targetRef: {kind: Pod, namespace: evil, name: p}}";
    let far = "topology.istio.io/network: far";
    let mut text = service_in("evil", EXPORTED, "") + &slice_in("evil", "", here);
    text += &slice_in("evil", far, &pod_at("evil", "p", "10.0.0.1"));
    text += &(service("east", KEPT) + &slice("east", "", &at("10.0.0.1")));
    assert!(dialled_in(&joined(&text), "evil").is_empty());
}

#[test]
fn an_entry_of_strait_yaml_exposes_a_service_as_an_export_does() {
    let pair =
        |namespace: &str| service_in(namespace, "", "") + &slice_in(namespace, "", &at("10.0.0.1"));
    let entry =
        |name: &str| format!("{{service: hello.{name}.svc.cluster.local, to: [{{anyone: true}}]}}");
    let text = pair("a") + &pair("b");
    let reported = |entries: &[String]| {
        let exposure = format!("{{services: [{}]}}", entries.join(", "));
        let reported = joined_with(&Mesh::default(), &text, &exposure).conflicts;
        let reported = reported.to_string();
        ["a", "b"].map(|namespace| reported.contains(&format!("of {namespace}/hello is not used")))
    };
    assert_eq!(reported(&[]), [false, false]);
    assert_eq!(reported(&[entry("a")]), [true, false]);
    assert_eq!(reported(&[entry("a"), entry("b")]), [true, true]);
}

#[test]
fn services_of_one_namespace_share_pods() {
    let other = |text: String| text.replace("name: hello", "name: other");
    let mut text = service("east", KEPT) + &other(service("east", EXPORTED));
    let one = slice("east", "", &pod_at("app", "web", "10.0.0.1"));
    text += &(one.clone() + &one.replace("service-name: hello", "service-name: other"));
    let joined = joined(&text);
    assert_eq!(dialled_in(&joined, "app"), [ONE]);
    assert_eq!(exposed_endpoints(&joined, "other.app.svc.cluster.local"), Some(vec![ONE.into()]));
    assert_eq!(joined.mesh.workloads.len(), 1);
    assert!(joined.conflicts.is_empty(), "{}", joined.conflicts);
}

#[test]
fn a_host_name_in_a_slice_is_no_endpoint() {
    // The victim's headless service, a DNS name of one of its pods, and a name of the tenant's
    // own.
    for host in ["hello.app.svc.cluster.local", "10-0-0-1.app.pod.cluster.local", "X.Evil."] {
        for pod in ["", ", targetRef: {kind: Pod, namespace: evil, name: p}"] {
            let backend = format!("{{addresses: [{host}]{pod}}}");
            let named = slice_in("evil", "", &backend).replace("IPv4", "FQDN");
            for (label, is_reported) in [(EXPORTED, true), (KEPT, false)] {
                let joined = joined(&(service_in("evil", label, "") + &named));
                assert!(joined.mesh.workloads.is_empty(), "{host} {pod}");
                let name = host.trim_end_matches('.').to_lowercase();
                let want = format!(
                    "o.yaml:10: warning: the endpoint {name} of evil/hello is not used: the answer \
                     to a host name could be an address of another namespace; write a workload \
                     with this `hostname` into the mesh file, which an operator writes"
                );
                let want = if is_reported { want } else { String::new() };
                assert_eq!(joined.conflicts.to_string(), want);
            }
        }
    }
}

#[test]
fn a_waypoint_of_another_namespace_or_kept_local_is_used_only_if_its_labels_say_that_it_is_one() {
    const WAYPOINT: &str = "gateway.istio.io/managed: istio.io-mesh-controller";
    let both = format!("{KEPT}, {WAYPOINT}");
    let ambient = "istio.io/dataplane-mode: ambient";
    let names = "istio.io/use-waypoint: web, istio.io/use-waypoint-namespace: app";
    let web = |text: String| text.replace("hello", "web");
    for (namespace, label, want) in [
        ("evil", KEPT, false),
        ("evil", EXPORTED, false),
        ("evil", "", false),
        ("evil", WAYPOINT, true),
        ("evil", &both, true),
        ("app", "", true),
        ("app", KEPT, false),
        ("app", &both, true),
    ] {
        let mut text = service_in(namespace, &format!("{EXPORTED}, {names}"), "");
        text += &slice_in(namespace, "", &at("10.0.0.2"));
        text += &(web(service("east", label)) + &web(slice("east", ambient, &at("10.0.0.1"))));
        let labelled = format!(
            "---\napiVersion: v1\nkind: Namespace\n\
             metadata: {{name: {namespace}, labels: {{{names}}}}}\n"
        );
        // The label is on the Service, or on its namespace.
        for text in [text.clone(), text.replacen(names, "", 1) + &labelled] {
            let joined = joined(&text);
            let key = format!("{namespace}/hello.{namespace}.svc.cluster.local");
            let service = joined.mesh.services.get(&*key).expect("a service");
            assert!(!service.waypoints.is_empty(), "never dialled past it");
            let lacks = snapshot(&joined).lacks_waypoint(service);
            assert_eq!(lacks, !want, "{namespace} {label}");
            let reported = joined.conflicts.to_string();
            let refusal = format!(
                "o.yaml:2: warning: tunnels to {namespace}/hello are rejected: its waypoint \
                 app/web "
            );
            assert_eq!(reported.contains(&refusal), !want, "{namespace} {label}: {reported}");
        }
    }
}

/// Returns an import of a namespace with an address.
pub(super) fn import(namespace: &str, ip: &str) -> String {
    format!(
        "---\napiVersion: multicluster.x-k8s.io/v1beta1\nkind: ServiceImport\n\
         metadata: {{name: hello, namespace: {namespace}}}\ntype: ClusterSetIP\nips: ['{ip}']\n\
         ports: [{{name: http, port: 80}}]\n"
    )
}

/// Returns the hostnames that a virtual address leads to.
pub(super) fn holders(joined: &JoinResult, ip: &str) -> Vec<String> {
    let vip = ("east".to_owned(), ip.parse().expect("an address"));
    let services = joined.mesh.services.values();
    let holders = services.filter(|service| service.vips.contains(&vip));
    holders.map(|service| service.hostname.to_string()).collect()
}

#[test]
fn a_cluster_ip_is_that_of_its_service_whatever_imports_say() {
    for ip in ["10.9.0.1", "::ffff:10.9.0.1"] {
        let service = service_in("app", "", "clusterIP: 10.9.0.1, ");
        let joined = joined(&(import("aaa", ip) + &service + &import("bbb", ip)));
        assert_eq!(holders(&joined, "10.9.0.1"), [OWN]);
        let reported = joined.conflicts.to_string();
        for (line, namespace) in [(2, "aaa"), (17, "bbb")] {
            let want = format!(
                "o.yaml:{line}: warning: the address 10.9.0.1 of the ServiceImport \
                 {namespace}/hello is not used: it is the clusterIP of the Service app/hello at \
                 o.yaml:9"
            );
            assert!(reported.contains(&want), "{reported}");
        }
    }
    // A ServiceImport of the same Service may have its address.
    let own = service_in("app", "", "clusterIP: 10.9.0.1, ");
    let joined = joined(&(own + &import("app", "10.9.0.1")));
    assert_eq!(holders(&joined, "10.9.0.1"), [OWN]);
    assert!(joined.conflicts.is_empty(), "{}", joined.conflicts);
}

#[test]
fn of_equal_claims_to_an_address_none_holds() {
    let both = joined(&(import("a", "10.9.0.1") + &import("b", "10.9.0.1")));
    assert!(holders(&both, "10.9.0.1").is_empty());
    let reported = both.conflicts.to_string();
    for (own, other) in [("a", "b"), ("b", "a")] {
        let want = format!(
            "the address 10.9.0.1 of the ServiceImport {own}/hello is not used: the ServiceImport \
             {other}/hello at o.yaml:"
        );
        assert!(reported.contains(&want), "{reported}");
    }
    assert_eq!(holders(&joined(&import("a", "10.9.0.1")), "10.9.0.1").len(), 1);
}

#[test]
fn an_import_does_not_take_the_address_of_an_endpoint() {
    let slice = slice("east", MANAGED, &pod_at("app", "web", "10.0.0.1"));
    let text = service_in("app", "", SELECTOR) + &slice + &import("evil", "10.0.0.1");
    let joined = joined(&text);
    assert!(holders(&joined, "10.0.0.1").is_empty());
    let reported = joined.conflicts.to_string();
    assert!(reported.contains("an endpoint of namespace app at o.yaml:10 has it"), "{reported}");
    // A slice alone proves nothing, and takes no address from an import.
    let evil = service_in("evil", "", "") + &slice_in("evil", "", &at("10.9.0.1"));
    let joined = super::joined(&(import("app", "10.9.0.1") + &evil));
    assert_eq!(holders(&joined, "10.9.0.1"), ["hello.app.svc.clusterset.local"]);
}

#[test]
fn the_mesh_file_gives_an_address_before_all_objects() {
    for network in ["", "east"] {
        let mesh = format!(
            "services: [{{name: dns, namespace: sys, hostname: dns.sys.svc.cluster.local,
  vips: [{network}/10.9.0.1], ports: {{53: 53}}}}]\nworkloads: []\n"
        );
        let (mesh, _) = crate::xds::file::parse(Path::new("m.yaml"), &mesh).expect("a mesh");
        let text = service_in("app", "", "clusterIP: 10.9.0.1, ") + &import("evil", "10.9.0.1");
        let joined = joined_with(&mesh, &text, "{}");
        assert!(!holders(&joined, "10.9.0.1").contains(&OWN.to_owned()));
        let reported = joined.conflicts.to_string();
        let want = "is not used: the mesh file gives it to the service sys/dns";
        assert_eq!(reported.matches(want).count(), 2, "{reported}");
    }
}
