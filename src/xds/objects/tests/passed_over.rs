//! Tests of invalid objects: each is skipped alone, and still restricts others.

use super::*;

const EXPORTED: &str = "istio.io/global: \"true\"";
const ONE: &str = "10.0.0.1:8080";

/// Loads a text as a file. Returns the objects and the findings.
fn loaded(text: &str) -> (Objects, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("o.yaml");
    std::fs::write(&file, text).unwrap();
    let (objects, findings) = load(&[file]).unwrap_or_else(|findings| panic!("{findings}"));
    assert!(!findings.has_errors(), "{findings}");
    let is_reported = |one: &Finding| one.severity == Severity::PassedOver;
    let reported = findings.0.iter().filter(|one| is_reported(one));
    let reported: Vec<_> = reported.map(ToString::to_string).collect();
    (objects, reported.join("\n"))
}

fn join_with(text: &str, exposure: &str) -> JoinResult {
    let (objects, reported) = loaded(text);
    assert!(!reported.is_empty(), "no mistake in {text}");
    join(&Mesh::default(), &objects, &config(exposure), &AddressHolders::default())
}

fn in_namespace(text: &str, namespace: &str) -> String {
    text.replace("namespace: app", &format!("namespace: {namespace}"))
}

#[test]
fn a_mistake_in_one_object_passes_over_that_object_alone() {
    let mut good = service("east", EXPORTED);
    good += &slice("east", "", &at("10.0.0.1"));
    let mcs = |kind: &str, rest: &str| {
        format!("---\napiVersion: multicluster.x-k8s.io/v1alpha1\nkind: {kind}\n{rest}\n")
    };
    let evil = in_namespace(&slice("east", "", &at("224.0.0.1")), "evil");
    let table = [
        (
            evil.replace("service-name: hello", "service-name: Foo_Bar"),
            "has `Foo_Bar` for its kubernetes.io/service-name",
        ),
        (evil.clone(), "`endpoints[].addresses[]` is `224.0.0.1`"),
        (
            mcs("ServiceExport", "metadata: {name: a.b, namespace: evil}"),
            "`metadata.name` is `a.b`",
        ),
        (
            mcs("ServiceImport", "metadata: {name: a, namespace: evil}\nspec: {ips: [x]}"),
            "`spec.ips[]` is `x`",
        ),
        (evil.replace("endpoints: [", "endpoints: [5, "), "endpoints[]` is `5`"),
        (in_namespace(&service("east", "a: [1]"), "evil"), "`metadata.labels[]` is a list"),
        (
            "---\napiVersion: v1\nkind: Namespace\nmetadata: {name: evil, name: b}\n".to_owned(),
            "`metadata.name` is given twice",
        ),
    ];
    for (bad, want) in table {
        for text in [format!("{bad}{good}"), format!("{good}{bad}")] {
            let (objects, reported) = loaded(&text);
            assert!(reported.contains(want), "{want}: {reported}");
            let joined =
                join(&Mesh::default(), &objects, &config("{}"), &AddressHolders::default());
            assert_eq!(endpoints_of_host(&joined, OWN), Some(vec![ONE.to_owned()]), "{bad}");
            assert!(joined.scope.exported.contains(OWN), "{bad}");
            let names = joined.scope.exported.iter().chain(&joined.scope.local);
            let mut evil = names.filter(|name| name.contains("Foo_Bar") || name.contains("a.b"));
            assert_eq!(evil.next(), None, "{bad}");
        }
    }
}

#[test]
fn a_service_with_a_mistake_stays_in_its_cluster() {
    let endpoints = slice("east", "", &at("10.0.0.1"));
    for label in ["istio.io/global: \"false\"", EXPORTED, ""] {
        let bad = service("east", label).replace("port: 80", "port: http");
        let text = format!("{bad}{}{endpoints}", export("east", "null"));
        for exposure in ["{}", "{default: all}"] {
            let joined = join_with(&text, exposure);
            assert!(joined.scope.exported.is_empty(), "{label} {exposure}");
            assert!(joined.scope.local.contains(OWN) && joined.scope.local.contains(GLOBAL));
        }
    }
    // A Service without a valid `spec` may have declared itself local.
    for spec in ["spec: 5", "other: 5"] {
        let start = service("east", EXPORTED);
        let (start, _) = start.split_once("spec:").unwrap();
        let joined = join_with(&format!("{start}{spec}\n"), "{default: all}");
        assert!(joined.scope.local.contains(OWN), "{spec}");
    }
}

#[test]
fn services_of_a_namespace_with_a_mistake_stay_in_their_cluster() {
    // The namespace may have named a waypoint, which direct tunnels to the service would
    // bypass.
    let bad = "---\napiVersion: v1\nkind: Namespace\nmetadata: {name: app, labels: [a]}\n";
    let other = in_namespace(&service("east", EXPORTED), "other");
    let text = format!("{bad}{}{other}", service("east", EXPORTED));
    let joined = join_with(&text, "{}");
    assert!(!joined.scope.exported.contains(OWN) && joined.scope.local.contains(OWN));
    assert!(joined.scope.exported.contains("hello.other.svc.cluster.local"));
}

#[test]
fn an_address_of_a_slice_with_a_mistake_is_not_for_another_namespace() {
    let thief =
        in_namespace(&(service("east", EXPORTED) + &slice("east", "", &at("10.0.0.1"))), "thief");
    let victim = slice("east", "", &format!("{}, {}", at("10.0.0.1"), at("0.0.0.0")));
    for mistake in ["hello", "Foo_Bar"] {
        let own = format!("service-name: {mistake}");
        let victim = victim.replace("service-name: hello", &own);
        let joined = join_with(&format!("{thief}{victim}"), "{}");
        let stolen = endpoints_of_host(&joined, "hello.thief.svc.cluster.local");
        assert_eq!(stolen, Some(Vec::new()), "{mistake}");
        let reported = joined.conflicts.to_string();
        assert!(reported.contains("namespace app lists it too at "), "{mistake}: {reported}");
    }
}

#[test]
fn an_address_of_an_import_or_a_service_with_a_mistake_is_not_for_another_one() {
    let import = |namespace: &str, ips: &str| {
        format!(
            "---\napiVersion: multicluster.x-k8s.io/v1alpha1\nkind: ServiceImport\n\
             metadata: {{name: hello, namespace: {namespace}}}\n\
             spec: {{ips: [{ips}], ports: [{{port: 80}}]}}\n"
        )
    };
    let cluster_ip = service("east", EXPORTED).replace("{ports:", "{clusterIP: 240.0.0.1, ports:");
    for victim in [import("app", "240.0.0.1, x"), cluster_ip.replace("port: 80", "port: 0")] {
        let text = format!("{}{victim}", import("thief", "240.0.0.1"));
        let joined = join_with(&text, "{}");
        let thief = joined.mesh.services.get("thief/hello.thief.svc.clusterset.local");
        assert!(thief.unwrap().vips.is_empty(), "{victim}");
        let reported = joined.conflicts.to_string();
        let want = "the address 240.0.0.1 of the ServiceImport thief/hello is not used";
        assert!(reported.contains(want), "{reported}");
    }
}

#[test]
fn the_addresses_of_a_workload_are_bounded_however_many_endpoints_name_its_pod() {
    let pod = |index: u32, name: &str| {
        let ip = std::net::Ipv4Addr::from(0x0a01_0000 + index);
        format!("{{addresses: [{ip}], targetRef: {{kind: Pod, name: {name}}}}}")
    };
    let endpoints: Vec<_> = (0..5000).map(|index| pod(index, "one")).collect();
    let text = service("east", EXPORTED) + &slice("east", "", &endpoints.join(", "));
    let joined = joined(&text);
    let workloads = joined.mesh.workloads.sorted();
    assert_eq!(workloads.len(), 1);
    assert_eq!(workloads[0].addresses.len(), 16);
    assert_eq!(workloads[0].addresses[0].to_string(), "10.1.0.0");
    let one = (0..50).map(|ip| format!("10.2.0.{ip}")).collect::<Vec<_>>();
    let text = service("east", EXPORTED) + &slice("east", "", &at(&one.join(", ")));
    let joined = super::joined(&text);
    assert_eq!(joined.mesh.workloads.sorted()[0].addresses.len(), 16);
}

#[test]
fn pods_at_the_address_of_their_node_stay_apart_and_take_an_unnamed_endpoint_in() {
    let pod = |index: u32| {
        format!("{{addresses: [10.0.0.1], targetRef: {{kind: Pod, name: web-{index}}}}}")
    };
    let mut endpoints = vec![at("10.0.0.1")];
    endpoints.extend((0..20_000).map(pod));
    endpoints.push(at("10.0.0.1"));
    let text = service("east", EXPORTED) + &slice("east", "", &endpoints.join(", "));
    let joined = joined(&text);
    assert_eq!(joined.mesh.workloads.len(), 20_000);
    let uids = joined.mesh.workloads.keys();
    assert!(uids.into_iter().all(|uid| uid.contains("//Pod/app/web-")));
}

#[test]
fn warnings_about_entries_of_the_operator_come_before_those_of_tenants() {
    let mut text = service("east", "istio.io/global: \"false\"");
    for index in 0..300 {
        let tenant = service("east", EXPORTED) + &slice("east", "", &at("10.0.0.1"));
        let tenant = tenant.replacen("ports: [{name: http, port: 8080}]", "ports: [{port: 1}]", 1);
        text += &in_namespace(&tenant, &format!("t{index}"));
    }
    let exposure = format!("{{services: [{{service: {OWN}, to: [{{anyone: true}}]}}]}}");
    let reported = joined_with(&Mesh::default(), &text, &exposure).warnings;
    assert_eq!(reported.0.len(), 202);
    let first = reported.0[0].to_string();
    assert!(first.contains("is exposed to nobody"), "{first}");
    let last = reported.0[201].to_string();
    assert!(last.contains("100 more findings are omitted"), "{last}");
}

#[test]
fn a_namespace_with_many_findings_leaves_those_of_others() {
    // Findings of invalid objects, entries without effect, joined services, endpoints, addresses
    // and waypoints.
    let many = 300;
    let repeat = |text: &dyn Fn(usize) -> String| (0..many).map(text).collect::<String>();
    let named = |text: String, index: usize| text.replace("hello", &format!("hello{index}"));
    let of_zoo = |text: &str| text.replace("namespace: app", "namespace: zoo");
    let of_first = |text: &dyn Fn(usize) -> String| repeat(text) + &of_zoo(&text(0));
    let waypoint = "istio.io/use-waypoint: w, istio.io/use-waypoint-namespace: other";
    let foreign = "{addresses: [10.0.0.1], targetRef: {kind: Pod, namespace: x, name: p}}";
    let import = "---\napiVersion: multicluster.x-k8s.io/v1alpha1\nkind: ServiceImport\n\
                  metadata: {name: hello, namespace: app}\n\
                  ports: [{name: http, port: 80}]\nips: [10.9.0.1]\n";
    for text in [
        of_first(&|index| named(service("east", waypoint), index)),
        of_first(&|index| named(slice("east", "", foreign), index)),
        of_first(&|index| named(import.into(), index)),
        of_first(&|index| {
            named(slice("west", "", &at("10.0.0.1")), index)
                + &{ named(export("west", "2026-01-31T12:00:00Z"), index) }
        }),
    ] {
        let joined = joined(&text);
        let found = joined.warnings.0.iter().chain(&joined.conflicts.0);
        let found: Vec<_> = found.map(ToString::to_string).collect();
        assert_eq!(found.len(), 201, "{}", found[0]);
        let is_of_zoo = |text: &String| text.contains("zoo/hello0") || text.contains("hello0.zoo");
        assert!(found.iter().any(is_of_zoo), "{}", found[0]);
    }
    let folder = tempfile::tempdir().expect("a folder");
    let files = ["app", "zoo"].map(|namespace| {
        let file = folder.path().join(format!("{namespace}.yaml"));
        let invalid = in_namespace(&service("east", ""), namespace);
        let invalid = invalid.replace("port: 80", "port: none");
        std::fs::write(&file, invalid.repeat(200)).expect("a file");
        file
    });
    let (_, findings) = load(&files).expect("objects");
    let of = |findings: &Findings, namespace: &str| {
        let of = findings.0.iter().filter(|one| *one.namespace == *namespace);
        of.count()
    };
    assert_eq!((of(&findings, "app"), of(&findings, "zoo")), (101, 100));
}
