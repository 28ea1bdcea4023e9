//! `strait check` of objects of several tenants: conflicting claims, each at its line.

use crate::check::{GOOD, GOOD_MESH, check};
use crate::support::{CommandOutput, folder_with_certificates, run, run_command, write};

/// An exported Service of one tenant, and the beginning of an EndpointSlice of it.
const EXPORTED: &str = "apiVersion: v1
kind: Service
metadata: {name: web, namespace: aaa, labels: {istio.io/global: \"true\"}}
spec: {ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: aaa, labels: {kubernetes.io/service-name: web}}
";

/// Returns the output of `strait check` for these objects beside the usual files.
async fn checked(objects: &str) -> CommandOutput {
    let folder = folder_with_certificates().await;
    let config = GOOD.replacen("exposure:\n", "exposure:\n  files: [objects.yaml]\n", 1);
    assert_ne!(config, GOOD);
    write(folder.path(), "strait.yaml", &config);
    write(folder.path(), "mesh.yaml", GOOD_MESH);
    write(folder.path(), "objects.yaml", objects);
    let checked = check(folder.path()).await;
    assert_eq!(checked.code, Some(0), "{checked:?}");
    checked
}

#[test]
fn claims_to_pods_and_addresses_of_others_are_warnings_at_their_lines() {
    run(async {
        let objects = "addressType: IPv4
ports: [{port: 8080}]
endpoints:
- {addresses: [10.0.0.9], targetRef: {kind: Pod, namespace: app, name: db-1}}
- {addresses: [10.0.0.8]}
- {addresses: [10.0.0.1]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: db-1, namespace: app, labels: {kubernetes.io/service-name: db}}
addressType: IPv4
endpoints:
- {addresses: [10.0.0.8], targetRef: {kind: Pod, namespace: app, name: db-1}}
";
        let reported = checked(&format!("{EXPORTED}{objects}")).await.stderr;
        let want = "objects.yaml:6: warning: an endpoint of aaa/web names the pod app/db-1, which \
                    is ignored: a slice names pods of its own namespace only; write no such \
                    `targetRef`\nobjects.yaml:6: warning: the address 10.0.0.8 (and 1 more) of \
                    aaa/web is not used: namespace app lists it too at objects.yaml:16, and \
                    neither has evidence for it; write addresses of pods of the slice's namespace \
                    that Kubernetes keeps up to date, or a workload of the mesh file\n";
        assert_eq!(reported, want);
    });
}

#[test]
fn a_host_name_in_a_slice_is_a_warning_at_its_line() {
    run(async {
        let objects = "addressType: FQDN
ports: [{port: 8080}]
endpoints: [{addresses: [db.app.svc.cluster.local]}]
";
        let reported = checked(&format!("{EXPORTED}{objects}")).await.stderr;
        let want = "objects.yaml:6: warning: the endpoint db.app.svc.cluster.local of aaa/web is \
                    not used: the answer to a host name could be an address of another namespace; \
                    write a workload with this `hostname` into the mesh file, which an operator \
                    writes\n";
        assert_eq!(reported, want);
    });
}

#[test]
fn a_service_of_another_namespace_that_is_no_waypoint_is_a_warning_at_what_names_it() {
    run(async {
        let objects = |label: &str| {
            format!(
                "apiVersion: v1
kind: Service
metadata:
  name: x
  namespace: aaa
  labels: {{istio.io/use-waypoint: web, istio.io/use-waypoint-namespace: app}}
spec: {{ports: [{{port: 80}}]}}
---
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: app, labels: {{istio.io/global: \"false\", {label}}}}}
spec: {{ports: [{{port: 80}}]}}
"
            )
        };
        let reported = checked(&objects("")).await.stderr;
        let want = "objects.yaml:1: warning: tunnels to aaa/x are rejected: its waypoint app/web \
                    is of another namespace, and is not a Service with the label \
                    `gateway.istio.io/managed: istio.io-mesh-controller`; write the name of a \
                    waypoint, or the service with its waypoint into the mesh file\n";
        assert_eq!(reported, want);
        let labelled = objects("gateway.istio.io/managed: istio.io-mesh-controller");
        let reported = checked(&labelled).await.stderr;
        assert!(!reported.contains("are refused"), "{reported}");
    });
}

#[test]
fn equal_claims_to_an_address_are_warnings_at_both_lines() {
    run(async {
        let service = |name: &str| {
            format!(
                "---\napiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: {name}}}\n\
                 spec: {{clusterIP: 10.9.0.1, ports: [{{port: 80}}]}}\n"
            )
        };
        let reported = checked(&(service("a") + &service("b"))).await.stderr;
        let want = [("2", "a", "b", "7"), ("7", "b", "a", "2")].map(|(line, own, other, at)| {
            format!(
                "objects.yaml:{line}: warning: the address 10.9.0.1 of the Service {own}/web is \
                 not used: it is the clusterIP of the Service {other}/web at objects.yaml:{at}; \
                 write an address that nothing else has\n"
            )
        });
        assert_eq!(reported, want.concat());
    });
}

#[test]
fn a_distribution_that_the_mesh_contradicts_is_an_error_and_is_ignored() {
    run(async {
        let folder = folder_with_certificates().await;
        let config = GOOD.replacen("exposure:\n", "exposure:\n  files: [objects.yaml]\n", 1);
        let mesh = GOOD_MESH.replacen("  - uid:", "  - locality: {region: us-east}\n    uid:", 1);
        let mesh = mesh.replace("echo.app.svc.cluster.local", "echo.example.com");
        write(folder.path(), "mesh.yaml", &mesh);
        write(
            folder.path(),
            "strait.yaml",
            &config.replace("echo.app.svc.cluster.local", "echo.example.com"),
        );
        let policy = |namespace: &str, regions: &str| {
            format!(
                "apiVersion: admiral.io/v1\nkind: GlobalTrafficPolicy\nmetadata: {{name: gtp, \
                 namespace: {namespace}}}\nspec: {{policy: [{{dns: echo.example.com, lbType: 1, \
                 target: [{regions}]}}]}}\n"
            )
        };
        let explain = "explain -c strait.yaml --from spiffe://west.local/ns/shop/sa/checkout --to \
                       echo.example.com:80";
        let explain: Vec<_> = explain.split(' ').collect();
        let west = "{region: us-west, weight: 1}";
        for (namespace, regions, want) in [
            ("other", west, "is not a service of namespace other"),
            ("app", west, "no workload of it is in a region with a weight"),
            ("app", "{region: us-west, weight: 1}, {region: us-east}", "no workload of"),
        ] {
            write(folder.path(), "objects.yaml", &policy(namespace, regions));
            let checked = check(folder.path()).await;
            assert_eq!(checked.code, Some(1), "{checked:?}");
            let line = checked.stderr.lines().next().unwrap_or_default();
            let is_wanted = line.starts_with("objects.yaml:4: error: ") && line.contains(want);
            assert!(is_wanted, "{want}: {checked:?}");
            let explained = run_command(folder.path(), &explain).await;
            assert!(explained.stdout.contains("100.0%       10.0.0.1:15008"), "{explained:?}");
        }
        let both = format!("{west}, {{region: us-east, weight: 1}}");
        write(folder.path(), "objects.yaml", &policy("app", &both));
        let checked = check(folder.path()).await;
        assert_eq!(checked.code, Some(0), "{checked:?}");
        assert!(checked.stderr.contains("unknown region us-west"), "{checked:?}");
    });
}

#[test]
fn a_mistake_in_an_object_is_an_error_of_check_at_its_line() {
    run(async {
        let folder = folder_with_certificates().await;
        let config = GOOD.replacen("exposure:\n", "exposure:\n  files: [objects.yaml]\n", 1);
        write(folder.path(), "strait.yaml", &config);
        write(folder.path(), "mesh.yaml", GOOD_MESH);
        let objects = "apiVersion: multicluster.x-k8s.io/v1alpha1
kind: ServiceExport
metadata: {name: a.b, namespace: app}
---
apiVersion: multicluster.x-k8s.io/v1alpha1
kind: ServiceImport
metadata: {name: web, namespace: app}
spec: {ips: [x]}
";
        write(folder.path(), "objects.yaml", objects);
        let checked = check(folder.path()).await;
        assert_eq!(checked.code, Some(1), "{checked:?}");
        for want in [
            "objects.yaml:3: error: `metadata.name` is `a.b`",
            "objects.yaml:8: error: `spec.ips[]` is `x`",
            "strait.yaml: 2 mistakes",
        ] {
            assert!(checked.stderr.contains(want), "{want}: {checked:?}");
        }
        let requested = "echo.app.svc.cluster.local:80";
        let peer = "spiffe://west.local/ns/shop/sa/checkout";
        let explain = ["explain", "-c", "strait.yaml", "--from", peer, "--to", requested];
        let explained = run_command(folder.path(), &explain).await;
        let first = explained.stderr.lines().next();
        assert!(first.is_some_and(|line| line.contains("`a.b`")), "{explained:?}");
        assert!(!explained.stdout.is_empty(), "{explained:?}");
    });
}

#[test]
fn a_global_traffic_policy_of_admiral_divides_an_alias_of_two_namespaces() {
    run(async {
        let folder = folder_with_certificates().await;
        let config = GOOD.replacen("exposure:\n", "exposure:\n  files: [objects.yaml]\n", 1);
        let (mut services, mut workloads) = (String::new(), String::new());
        let mut exposed = String::new();
        for (at, region) in [(1, "us-west-2"), (2, "us-east-2")] {
            let namespace = region.replace('-', "");
            let host = format!("payments.{namespace}.svc.cluster.local");
            exposed += &format!("    - {{service: {host}, to: [{{cluster: west}}]}}\n");
            services += &format!(
                "  - {{name: payments, namespace: {namespace}, hostname: {host}, vips: [], ports: \
                 {{80: 8080}}}}\n"
            );
            workloads += &format!(
                "  - {{uid: w{at}, namespace: {namespace}, workloadIps: [10.0.1.{at}], locality: \
                 {{region: {region}}}, services: {{{namespace}/{host}: {{80: 8080}}}}}}\n"
            );
        }
        let mesh = GOOD_MESH.replacen("services:\n", &format!("services:\n{services}"), 1);
        let mesh = mesh.replacen("workloads:\n", &format!("workloads:\n{workloads}"), 1);
        let names = "names: {aliases: [{name: \"default.payments.global:80\", to: \
                     [payments.uswest2.svc.cluster.local, payments.useast2.svc.cluster.local]}]}\n";
        let config = config.replacen("  services:\n", &format!("  services:\n{exposed}"), 1);
        write(folder.path(), "mesh.yaml", &mesh);
        write(folder.path(), "strait.yaml", &format!("{config}{names}"));
        let policy = |namespace: &str| {
            format!(
                "apiVersion: admiral.io/v1alpha1
kind: GlobalTrafficPolicy
metadata: {{name: payments-gtp, namespace: {namespace}}}
spec:
  selector:
    identity: payments
  policy:
  - dns: default.payments.global
    lbType: 1
    target:
    - region: us-west-2/*
      weight: 10
    - region: us-east-2/*
      weight: 90
"
            )
        };
        let explain = "explain -c strait.yaml --from spiffe://west.local/ns/shop/sa/checkout --to \
                       default.payments.global:80";
        let explain: Vec<_> = explain.split(' ').collect();
        for (namespace, is_used) in [("uswest2", true), ("useast2", true), ("other", false)] {
            write(folder.path(), "objects.yaml", &policy(namespace));
            let checked = check(folder.path()).await;
            assert_eq!(checked.code == Some(0), is_used, "{checked:?}");
            assert_eq!(checked.stderr.is_empty(), is_used, "{checked:?}");
            let explained = run_command(folder.path(), &explain).await.stdout;
            for (at, share) in [("10.0.1.1:", "10.0%"), ("10.0.1.2:", "90.0%")] {
                let line = explained.lines().find(|line| line.contains(at));
                let line = line.unwrap_or_else(|| panic!("{explained}"));
                assert_eq!(line.trim_start().starts_with(share), is_used, "{explained}");
            }
        }
    });
}
