//! Tests of addresses that a namespace has before another one claims them.

use super::tenants::{
    EXPORTED, KEPT, MANAGED, ONE, SELECTOR, TWO, dialled_in, holders, import, pod_at, service_in,
    slice_in,
};
use super::*;

/// Returns the Service and slice of a namespace, by labels, with a pod at 10.0.0.1.
fn pod_of(namespace: &str, evidence: &str) -> String {
    let pod = pod_at(namespace, "web", "10.0.0.1");
    service_in(namespace, EXPORTED, SELECTOR) + &slice_in(namespace, evidence, &pod)
}

/// Joins one text after another.
fn joined_in_turn(texts: &[&str]) -> JoinResult {
    joined_in_turn_with(&Mesh::default(), texts)
}

fn joined_in_turn_with(mesh: &Mesh, texts: &[&str]) -> JoinResult {
    let mut held = AddressHolders::default();
    let mut last = None;
    for text in texts {
        let joined = joined_after(&held, mesh, text, "{}");
        held = joined.holders.clone();
        last = Some(joined);
    }
    last.expect("a text")
}

fn dialled(joined: &JoinResult) -> [Vec<String>; 2] {
    ["a", "b"].map(|namespace| dialled_in(joined, namespace))
}

const NONE: [Vec<String>; 2] = [Vec::new(), Vec::new()];

#[test]
fn a_namespace_keeps_an_address_against_later_objects_with_equal_evidence() {
    // Forged labels of Kubernetes, or a slice without proof.
    for evidence in [MANAGED, ""] {
        for (first, later) in [("a", "b"), ("b", "a")] {
            let (alone, other) = (pod_of(first, evidence), pod_of(later, evidence));
            for both in [format!("{alone}{other}"), format!("{other}{alone}")] {
                assert_eq!(dialled(&joined_in_turn(&[&both])), NONE, "at a start");
                let joined = joined_in_turn(&[&alone, &both, &both]);
                assert_eq!(dialled_in(&joined, first), [ONE], "{evidence}");
                assert!(dialled_in(&joined, later).is_empty(), "{evidence}");
                let reported = joined.conflicts.to_string();
                let want = format!(
                    "the address 10.0.0.1 of {later}/hello is not used: namespace {first} has had \
                     it for longer by o.yaml:"
                );
                assert!(reported.contains(&want), "{reported}");
                assert_eq!(joined.conflicts.0.len(), 1, "{reported}");
                // It is free once its holder has left.
                let joined = joined_in_turn(&[&alone, &both, &other]);
                assert_eq!(dialled_in(&joined, later), [ONE]);
            }
        }
    }
}

#[test]
fn equal_claims_that_come_together_have_nothing_until_one_leaves() {
    let (a, b) = (pod_of("a", MANAGED), pod_of("b", MANAGED));
    let both = format!("{a}{b}");
    assert_eq!(dialled(&joined_in_turn(&["---\n", &both, &both])), NONE);
    let joined = joined_in_turn(&[&both, &a, &both]);
    assert_eq!(dialled(&joined), [vec![ONE.to_owned()], Vec::new()]);
}

#[test]
fn better_evidence_takes_an_address_from_its_holder() {
    let (weak, strong) = (pod_of("a", ""), pod_of("b", MANAGED));
    let both = format!("{weak}{strong}");
    let joined = joined_in_turn(&[&weak, &both]);
    assert_eq!(dialled(&joined), [Vec::new(), vec![ONE.to_owned()]]);
    // And keeps it against equal evidence that comes later.
    let equal = format!("{}{strong}", pod_of("a", MANAGED));
    let joined = joined_in_turn(&[&weak, &both, &equal]);
    assert_eq!(dialled(&joined), [Vec::new(), vec![ONE.to_owned()]]);
}

#[test]
fn an_invalid_slice_of_the_holder_gives_its_address_to_nobody() {
    let (a, b) = (pod_of("a", ""), pod_of("b", ""));
    let invalid = a.replace("service-name: hello", "service-name: Hello!");
    let mut held = AddressHolders::default();
    for text in [a.clone(), format!("{invalid}{b}"), format!("{a}{b}")] {
        let mut objects = Objects::default();
        read::text(Path::new("o.yaml"), &text, &mut objects);
        let joined = join(&Mesh::default(), &objects, &config("{}"), &held);
        assert!(dialled_in(&joined, "b").is_empty(), "{text}");
        held = joined.holders;
    }
}

const NODE: &str = "---\napiVersion: v1\nkind: Node\nmetadata: {name: n1.example}\nstatus:\n  \
                    addresses: [{type: Hostname, address: n1}, {type: InternalIP, address: \
                    10.0.0.1}]\n";

/// Returns [`pod_of`] with another port of the pod.
fn at_port(namespace: &str, evidence: &str, port: u16) -> String {
    let target = format!("port: {port}");
    pod_of(namespace, evidence).replace("port: 8080", &target)
}

#[test]
fn pods_of_two_namespaces_use_different_ports_of_their_node() {
    let mesh = "services: []
workloads: [{uid: w, workloadIps: [10.0.0.1], namespace: sys, networkMode: HostNetwork,
  services: {}}]
";
    let (mesh, _) = crate::xds::file::parse(Path::new("m.yaml"), mesh).expect("a mesh");
    let node = NODE.to_owned();
    let of_west = NODE.replace("{name:", "{labels: {topology.istio.io/cluster: west}, name:");
    let invalid = NODE.replace("address: 10.0.0.1", "address: ten");
    for evidence in [MANAGED, ""] {
        let different = at_port("a", evidence, 8080) + &at_port("b", evidence, 9090);
        let same = at_port("a", evidence, 8080) + &at_port("b", evidence, 8080);
        let shared = ["10.0.0.1:8080", "10.0.0.1:9090"].map(|one| vec![one.to_owned()]);
        for (objects, is_shared) in [(&node, true), (&String::new(), false), (&of_west, false)] {
            let joined = joined_in_turn(&[&format!("{objects}{different}")]);
            let want = if is_shared { &shared } else { &NONE };
            assert_eq!(dialled(&joined), *want, "{objects} {}", joined.conflicts);
            assert_eq!(joined.conflicts.is_empty(), is_shared);
            let joined = joined_in_turn(&[&format!("{objects}{same}")]);
            assert_eq!(dialled(&joined), NONE, "{objects}");
        }
        let joined = joined_in_turn_with(&mesh, &[&different]);
        let want = if evidence == MANAGED { &shared } else { &NONE };
        assert_eq!(dialled(&joined), *want, "the mesh file, {}", joined.conflicts);
    }
    let mut objects = Objects::default();
    let findings = read::text(Path::new("o.yaml"), &invalid, &mut objects);
    assert!(findings.to_string().contains("is `ten`"), "{findings}");
    assert!(objects.nodes.is_empty());
}

#[test]
fn a_port_of_a_node_is_kept_by_the_namespace_that_has_it() {
    let alone = NODE.to_owned() + &at_port("a", MANAGED, 8080);
    let both = alone.clone() + &at_port("b", MANAGED, 8080);
    let joined = joined_in_turn(&[&alone, &both]);
    assert_eq!(dialled(&joined), [vec![ONE.to_owned()], Vec::new()]);
    let reported = joined.conflicts.to_string();
    let want =
        "the address 10.0.0.1:8080 of b/hello is not used: namespace a has had it for longer";
    assert!(reported.contains(want), "{reported}");
    // Also if the Node comes later.
    let without = both.replace(NODE, "");
    let joined = joined_in_turn(&[&at_port("a", MANAGED, 8080), &without, &both]);
    assert_eq!(dialled(&joined), [vec![ONE.to_owned()], Vec::new()]);
    // A slice without proof takes no port beside those that are proven.
    let unproven = alone + &at_port("b", "", 9090);
    let joined = joined_in_turn(&[&unproven]);
    assert_eq!(dialled(&joined), [vec![ONE.to_owned()], Vec::new()]);
}

/// Returns the Pod of [`pod_of`].
fn running_pod(namespace: &str, spec: &str, phase: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: web, namespace: {namespace}}}\nspec: \
         {{{spec}}}\nstatus: {{phase: {phase}, podIP: 10.0.0.1, podIPs: [{{ip: 10.0.0.1}}]}}\n"
    )
}

#[test]
fn an_address_that_a_forged_slice_claimed_before_its_pod_existed_belongs_to_the_pod() {
    let forged = pod_of("a", MANAGED);
    let slices = format!("{forged}{}", pod_of("b", MANAGED));
    let running = running_pod("b", "", "Running");
    let with_pod = format!("{slices}{running}");
    for turns in [&[&*forged, &slices, &with_pod][..], &[&forged, &with_pod], &[&with_pod]] {
        let joined = joined_in_turn(turns);
        assert_eq!(dialled(&joined), [vec![], vec![ONE.to_owned()]], "{}", joined.conflicts);
        let reported = joined.conflicts.to_string();
        let want = "the address 10.0.0.1 of a/hello is not used: it belongs to namespace b by \
                    o.yaml:38";
        assert!(reported.contains(want), "{reported}");
    }
    // A pod needs no slice to keep its address from others.
    let joined = joined_in_turn(&[&forged, &format!("{forged}{running}")]);
    assert_eq!(dialled(&joined), NONE);
    // One that has ended has no address, and one of another network has none of this one.
    let ended = [running_pod("b", "", "Succeeded"), running_pod("b", "", "Failed")];
    let far = running.replace("{name:", "{labels: {topology.istio.io/network: far}, name:");
    let labels =
        "{labels: {topology.istio.io/cluster: west, topology.istio.io/network: east}, name:";
    let labelled = running.replace("{name:", labels);
    let pending = running.replace(", podIPs: [{ip: 10.0.0.1}]", "");
    for other in [&ended[0], &ended[1], &far, &labelled, &pending] {
        let joined = joined_in_turn(&[&forged, &format!("{slices}{other}")]);
        assert_eq!(dialled(&joined), [vec![ONE.to_owned()], vec![]], "{other}");
    }
}

#[test]
fn a_pod_or_service_of_another_cluster_that_is_labelled_as_a_copy_of_ours_claims_nothing() {
    const COPIED: &str = "multicluster.kubernetes.io/source-cluster: east";
    let own = pod_of("a", MANAGED);
    let labels = format!("{{labels: {{topology.istio.io/cluster: west, {COPIED}}}, name:");
    for spec in ["", "hostNetwork: true"] {
        let forged = running_pod("b", spec, "Running").replace("{name:", &labels);
        let joined = joined_in_turn(&[&(own.clone() + &forged)]);
        assert_eq!(dialled(&joined), [vec![ONE.to_owned()], vec![]], "{}", joined.conflicts);
    }
    let import = import("a", "10.9.0.1");
    let of_west = |text: String| {
        text.replace("topology.istio.io/cluster: east", "topology.istio.io/cluster: west")
    };
    let forged = of_west(service_in("b", COPIED, "clusterIP: 10.9.0.1, "));
    let joined = joined_in_turn(&[&(import + &forged)]);
    assert_eq!(holders(&joined, "10.9.0.1"), ["hello.a.svc.clusterset.local"]);
    // Its selector makes no slice of the same name evidence.
    let selected = of_west(service_in("b", COPIED, SELECTOR));
    let slice = slice_in("b", MANAGED, &pod_at("b", "web", "10.0.0.1"));
    let joined = joined_in_turn(&[&format!("{own}{selected}{slice}")]);
    assert_eq!(dialled(&joined), [vec![ONE.to_owned()], vec![]], "{}", joined.conflicts);
}

#[test]
fn a_pod_in_the_network_of_its_host_says_that_its_address_is_that_of_a_node() {
    let different = at_port("a", MANAGED, 8080) + &at_port("b", MANAGED, 9090);
    let joined =
        joined_in_turn(&[&(running_pod("c", "hostNetwork: true", "Running") + &different)]);
    let shared = ["10.0.0.1:8080", "10.0.0.1:9090"].map(|one| vec![one.to_owned()]);
    assert_eq!(dialled(&joined), shared);
    assert!(joined.conflicts.is_empty(), "{}", joined.conflicts);
}

#[test]
fn a_namespace_keeps_a_port_of_a_node_beside_those_that_the_mesh_file_gives_it() {
    let mesh = "services: [{name: hello, namespace: a, hostname: hello.a,
  vips: [east/10.9.9.9], ports: {80: 8080}}]
workloads: [{uid: w, workloadIps: [10.0.0.1], namespace: a, networkMode: HostNetwork,
  services: {a/hello.a: {80: 8080}}}]
";
    let (mesh, _) = crate::xds::file::parse(Path::new("m.yaml"), mesh).expect("a mesh");
    for evidence in [MANAGED, ""] {
        let own = at_port("a", evidence, 9090);
        let both = own.clone() + &at_port("b", evidence, 9090);
        let joined = joined_in_turn_with(&mesh, &[&own, &both]);
        let want = [vec!["10.0.0.1:9090".to_owned()], vec![]];
        assert_eq!(dialled(&joined), want, "{evidence}: {}", joined.conflicts);
    }
}

#[test]
fn a_port_of_one_address_of_a_pod_is_not_used_at_its_node() {
    // The other slice of the pod lists its port 8080 at an address of its own.
    let other = slice_in("b", MANAGED, &pod_at("b", "web", "10.0.0.2"));
    let text = NODE.to_owned() + &at_port("a", MANAGED, 8080);
    let joined = joined_in_turn(&[&(text + &other + &at_port("b", MANAGED, 9090))]);
    assert_eq!(dialled(&joined), [[ONE], [TWO]]);
}

#[test]
fn an_import_keeps_its_address_against_a_later_one() {
    let (a, b) = (import("a", "10.9.0.1"), import("b", "10.9.0.1"));
    let joined = joined_in_turn(&[&a, &format!("{b}{a}")]);
    assert_eq!(holders(&joined, "10.9.0.1"), ["hello.a.svc.clusterset.local"]);
    // A Service has better evidence than any import.
    let service = service_in("c", KEPT, "clusterIP: 10.9.0.1, ");
    let joined = joined_in_turn(&[&a, &format!("{service}{b}{a}")]);
    assert_eq!(holders(&joined, "10.9.0.1"), ["hello.c.svc.cluster.local"]);
}
