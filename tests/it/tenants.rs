//! Tenants of one cluster. Each writes the objects of its own namespace, and cannot harm those of
//! another namespace.

use crate::scope::{answering, named, settings, started, write};
use crate::support::{Endpoint, Gateway, Net, identities, replace, run, until};

const EXPORTED: &str = "istio.io/global: \"true\"";
const KEPT: &str = "istio.io/global: \"false\"";

/// Label of a slice that Kubernetes reserves for a Service with a selector.
const MANAGED: &str = "endpointslice.kubernetes.io/managed-by: endpointslice-controller.k8s.io";

/// Hosts of the endpoint of the victim, `web` in `app`, and of the other tenant's, `thief` in
/// `aaa`, which is first in alphabetical order.
const VICTIM: u8 = 11;
const THIEF: u8 = 12;

const WEB: &str = "web.app.svc.cluster.local:80";
const THIEVES: &str = "thief.aaa.svc.cluster.local:80";

/// A virtual address.
const VIP: &str = "240.1.2.3";

/// A Service and its slice, whose endpoint is `target`.
fn service(
    (namespace, name): (&str, &str),
    (labels, spec): (&str, &str),
    (slice_labels, target): (&str, &str),
) -> String {
    format!(
        "---
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: {namespace}, labels: {{{labels}}}}}
spec: {{{spec} ports: [{{name: tcp, port: 80}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: {name}-1
  namespace: {namespace}
  labels: {{kubernetes.io/service-name: {name}, {slice_labels}}}
addressType: IPv4
ports: [{{name: tcp, port: 9000}}]
endpoints: [{target}]
"
    )
}

/// The endpoint at a host, with or without a pod.
fn endpoint(net: Net, host: u8, pod: Option<&str>) -> String {
    let ip = net.ip(host);
    let pod = pod.map(|namespace| {
        format!(", targetRef: {{kind: Pod, namespace: {namespace}, name: web-1}}")
    });
    format!("{{addresses: [{ip}]{}}}", pod.unwrap_or_default())
}

fn web(labels: &str, spec: &str, endpoint: &str) -> String {
    service(("app", "web"), (labels, spec), ("", endpoint))
}

fn thief(labels: &str, slice_labels: &str, endpoint: &str) -> String {
    service(("aaa", "thief"), (labels, ""), (slice_labels, endpoint))
}

/// A gateway with these objects, and the endpoints of both tenants.
async fn gateway_with(net: Net, objects: &str) -> (Gateway, [Endpoint; 2]) {
    let gateway = started(&settings(net, ""), objects).await;
    let mut endpoints = Vec::new();
    for host in [VICTIM, THIEF] {
        endpoints.push(named(net.listen(host, 9000).await, host));
    }
    (gateway, endpoints.try_into().ok().expect("two endpoints"))
}

/// The conflicts that `strait status` shows, each without the path of its file.
async fn conflicts(gateway: &Gateway) -> Vec<String> {
    let (_, page, _) = gateway.run_command(&["status"]).await;
    let lines = page.lines().filter_map(|line| line.split_once("all.yaml:"));
    lines.map(|(_, rest)| rest.to_owned()).collect()
}

#[test]
fn a_slice_that_names_a_foreign_pod_redirects_nothing() {
    run(async {
        let net = Net::new();
        let forged = endpoint(net, THIEF, Some("app"));
        let objects =
            thief(EXPORTED, "", &forged) + &web(EXPORTED, "", &endpoint(net, VICTIM, Some("app")));
        let (gateway, _endpoints) = gateway_with(net, &objects).await;
        let client = gateway.client(identities()).await;
        assert_eq!(answering(&client, WEB).await, [VICTIM]);
        assert_eq!(answering(&client, THIEVES).await, [THIEF], "its own address");
        let shown = conflicts(&gateway).await;
        let want = "7: warning: an endpoint of aaa/thief names the pod app/web-1, which is ignored";
        assert!(shown.len() == 1 && shown[0].starts_with(want), "{shown:?}");
        gateway.logged("names the pod app/web-1").await;
    });
}

#[test]
fn a_network_label_of_another_namespace_blackholes_nothing() {
    run(async {
        for pod in [None, Some("app")] {
            let net = Net::new();
            let far = "topology.istio.io/network: far, istio.io/dataplane-mode: ambient";
            let objects = thief(EXPORTED, far, &endpoint(net, VICTIM, pod))
                + &web(EXPORTED, "", &endpoint(net, VICTIM, Some("app")));
            let (gateway, _endpoints) = gateway_with(net, &objects).await;
            let client = gateway.client(identities()).await;
            assert_eq!(answering(&client, WEB).await, [VICTIM], "{pod:?}");
            assert!(answering(&client, THIEVES).await.is_empty(), "{pod:?}");
        }
    });
}

#[test]
fn a_pod_that_its_namespace_keeps_local_is_not_exported_by_another() {
    run(async {
        for (labels, pod) in [(KEPT, Some("app")), ("", Some("app")), (KEPT, None)] {
            let net = Net::new();
            let stolen = thief(EXPORTED, "", &endpoint(net, VICTIM, None));
            let objects = stolen + &web(labels, "", &endpoint(net, VICTIM, pod));
            let (gateway, [victim, _thief]) = gateway_with(net, &objects).await;
            let client = gateway.client(identities()).await;
            assert!(answering(&client, THIEVES).await.is_empty(), "{labels} {pod:?}");
            assert_eq!(victim.accepted(), 0, "{labels} {pod:?}");
            let ip = net.ip(VICTIM);
            let want = format!("7: warning: the address {ip} of aaa/thief is not used: ");
            let shown = conflicts(&gateway).await;
            assert!(shown.len() == 1 && shown[0].starts_with(&want), "{shown:?}");
            // A slice without a conflict is no longer reported, and is served.
            let own = thief(EXPORTED, "", &endpoint(net, THIEF, None));
            write(gateway.folder.path(), "all.yaml", &own);
            until("no conflict", async || conflicts(&gateway).await, Vec::is_empty).await;
            let answers = async || answering(&client, THIEVES).await;
            until("its own endpoint", answers, |all| *all == [THIEF]).await;
        }
    });
}

#[test]
fn a_slice_of_a_service_that_is_not_exported_takes_no_pod_away() {
    run(async {
        for labels in ["", KEPT] {
            let net = Net::new();
            let objects = thief(labels, "", &endpoint(net, VICTIM, None))
                + &service(
                    ("app", "web"),
                    (EXPORTED, "selector: {app: web},"),
                    (MANAGED, &endpoint(net, VICTIM, Some("app"))),
                );
            let (gateway, _endpoints) = gateway_with(net, &objects).await;
            let client = gateway.client(identities()).await;
            assert_eq!(answering(&client, WEB).await, [VICTIM], "{labels}");
        }
    });
}

#[test]
fn a_managed_copy_or_an_invented_pod_takes_no_address() {
    run(async {
        let copy = format!(
            "multicluster.kubernetes.io/source-cluster: west, {MANAGED}, \
             multicluster.kubernetes.io/service-name: thief, topology.istio.io/network: east"
        );
        for (labels, global) in [(&*copy, "thief.aaa.mesh.internal:80"), ("", THIEVES)] {
            let net = Net::new();
            let forged = endpoint(net, VICTIM, Some("aaa"));
            let of = match labels {
                "" => EXPORTED.to_owned(),
                _ => format!("{EXPORTED}, topology.istio.io/cluster: west"),
            };
            let spec = (&*of, "selector: {app: thief},");
            let objects = service(("aaa", "thief"), spec, (labels, &forged))
                + &web(KEPT, "", &endpoint(net, VICTIM, None));
            let (gateway, [victim, _thief]) = gateway_with(net, &objects).await;
            let client = gateway.client(identities()).await;
            assert!(answering(&client, global).await.is_empty(), "{global}");
            assert_eq!(victim.accepted(), 0, "{global}");
            let want = format!("7: warning: the address {} of aaa/thief", net.ip(VICTIM));
            let shown = conflicts(&gateway).await;
            assert!(shown.len() == 1 && shown[0].starts_with(&want), "{shown:?}");
        }
    });
}

#[test]
fn a_namespace_keeps_its_address_against_a_later_slice_with_forged_labels() {
    run(async {
        for evidence in [MANAGED, ""] {
            let of = |net, key, selector: &str, pod: &str| {
                let slice = (evidence, &*endpoint(net, VICTIM, Some(pod)));
                service(key, (EXPORTED, selector), slice)
            };
            let own = |net| of(net, ("app", "web"), "selector: {app: web},", "app");
            let forged = |net| of(net, ("aaa", "thief"), "selector: {app: thief},", "aaa");
            let both = |net| forged(net) + &own(net);
            let net = Net::new();
            let (gateway, [victim, _thief]) = gateway_with(net, &own(net)).await;
            let client = gateway.client(identities()).await;
            assert_eq!(answering(&client, WEB).await, [VICTIM]);
            write(gateway.folder.path(), "all.yaml", &both(net));
            let shown = async || conflicts(&gateway).await;
            let shown = until("the conflict", shown, |all| !all.is_empty()).await;
            let ip = net.ip(VICTIM);
            let want = format!("7: warning: the address {ip} of aaa/thief is not used: ");
            let want = want + "namespace app has had it for longer by ";
            assert!(shown.len() == 1 && shown[0].starts_with(&want), "{shown:?}");
            // A reload of the configuration keeps it, too.
            let config = std::fs::read_to_string(gateway.file("strait.yaml")).expect("a file");
            replace(&gateway.file("strait.yaml"), &format!("{config}# changed\n"));
            let reloads = "strait_reload_total{what=\"config\",result=\"ok\"}";
            let reloaded = async || gateway.metric(reloads).await;
            until("the configuration", reloaded, |count| *count > 0.5).await;
            let accepted = victim.accepted();
            assert!(answering(&client, THIEVES).await.is_empty(), "{evidence}");
            assert_eq!(victim.accepted(), accepted, "{evidence}");
            assert_eq!(answering(&client, WEB).await, [VICTIM], "{evidence}");
            // At a start neither has it, and both are named.
            let net = Net::new();
            let (gateway, _endpoints) = gateway_with(net, &both(net)).await;
            let client = gateway.client(identities()).await;
            for service in [WEB, THIEVES] {
                assert!(answering(&client, service).await.is_empty(), "{evidence}");
            }
            let shown = conflicts(&gateway).await;
            for (own, other) in [("aaa/thief", "app"), ("app/web", "aaa")] {
                let want = format!("of {own} is not used: namespace {other} lists it too");
                assert!(shown.iter().any(|line| line.contains(&want)), "{shown:?}");
            }
        }
    });
}

/// A ServiceImport at [`VIP`], and a slice that was copied for it.
fn import(net: Net, namespace: &str) -> String {
    let labels = "multicluster.kubernetes.io/source-cluster: west, topology.istio.io/network: east";
    let ip = net.ip(THIEF);
    format!(
        "---
apiVersion: multicluster.x-k8s.io/v1alpha1
kind: ServiceImport
metadata: {{name: thief, namespace: {namespace}}}
spec: {{type: ClusterSetIP, ips: [{VIP}], ports: [{{name: tcp, port: 80}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: thief-1
  namespace: {namespace}
  labels: {{multicluster.kubernetes.io/service-name: thief, {labels}}}
addressType: IPv4
ports: [{{name: tcp, port: 9000}}]
endpoints: [{{addresses: [{ip}]}}]
"
    )
}

#[test]
fn an_import_of_another_namespace_does_not_take_a_cluster_ip() {
    run(async {
        let net = Net::new();
        let spec = format!("clusterIP: {VIP},");
        let victim = web(EXPORTED, &spec, &endpoint(net, VICTIM, Some("app")));
        let (gateway, _endpoints) = gateway_with(net, &(import(net, "aaa") + &victim)).await;
        let client = gateway.client(identities()).await;
        assert_eq!(answering(&client, &format!("{VIP}:80")).await, [VICTIM]);
        let global = "thief.aaa.svc.clusterset.local:80";
        assert_eq!(answering(&client, global).await, [THIEF], "by its name");
        let shown = conflicts(&gateway).await;
        let want = format!(
            "2: warning: the address {VIP} of the ServiceImport aaa/thief is not used: it is the \
             clusterIP of the Service app/web at "
        );
        assert!(shown.len() == 1 && shown[0].starts_with(&want), "{shown:?}");
    });
}

#[test]
fn an_address_of_two_imports_leads_to_neither() {
    run(async {
        let net = Net::new();
        let one = import(net, "aaa");
        let [from, to] = [THIEF, VICTIM].map(|host| net.ip(host).to_string());
        let other = import(net, "app").replace(&from, &to);
        let (gateway, _endpoints) = gateway_with(net, &(one.clone() + &other)).await;
        let client = gateway.client(identities()).await;
        let vip = format!("{VIP}:80");
        assert!(answering(&client, &vip).await.is_empty());
        let shown = conflicts(&gateway).await;
        assert_eq!(shown.len(), 2, "{shown:?}");
        for (line, namespace) in [(2, "aaa"), (17, "app")] {
            let want = format!(
                "{line}: warning: the address {VIP} of the ServiceImport {namespace}/thief is not \
                 used: the ServiceImport "
            );
            assert!(shown.iter().any(|line| line.starts_with(&want)), "{shown:?}");
        }
        write(gateway.folder.path(), "all.yaml", &one);
        let answers = async || answering(&client, &vip).await;
        until("the only claim", answers, |all| *all == [THIEF]).await;
    });
}

#[test]
fn a_mistake_in_an_object_of_a_tenant_stops_neither_the_start_nor_a_reload() {
    run(async {
        let net = Net::new();
        let bad = |service: &str, address: &str| {
            format!(
                "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: bad, \
                 namespace: evil, labels: {{kubernetes.io/service-name: {service}}}}}\n\
                 addressType: IPv4\nendpoints: [{{addresses: [{address}]}}]\n"
            )
        };
        let own = web(EXPORTED, "", &endpoint(net, VICTIM, Some("app")));
        let started_with = own.clone() + &bad("Foo_Bar", "10.0.0.1");
        let (gateway, _endpoints) = gateway_with(net, &started_with).await;
        let client = gateway.client(identities()).await;
        assert_eq!(answering(&client, WEB).await, [VICTIM]);
        let reloads = async |what: &str, result: &str| {
            let labels = format!("what=\"{what}\",result=\"{result}\"");
            gateway.metric(&format!("strait_reload_total{{{labels}}}")).await
        };
        let status = async || gateway.run_command(&["status"]).await.1;
        gateway.logged("has `Foo_Bar` for its kubernetes.io/service-name").await;
        assert!(reloads("objects", "error").await > 0.5);
        assert!(status().await.contains("Foo_Bar"));

        let other = thief(EXPORTED, "", &endpoint(net, THIEF, None));
        let changed = own.clone() + &other + &bad("hello", "224.0.0.1");
        write(gateway.folder.path(), "all.yaml", &changed);
        let answers = async || answering(&client, THIEVES).await;
        until("the other objects", answers, |all| *all == [THIEF]).await;
        let received = async || status().await.contains("224.0.0.1");
        until("the other mistake", received, |received| *received).await;

        let config = std::fs::read_to_string(gateway.file("strait.yaml")).expect("a file");
        replace(&gateway.file("strait.yaml"), &format!("{config}# changed\n"));
        let configs = async || reloads("config", "ok").await;
        until("the configuration", configs, |count| *count > 0.5).await;
        assert!(reloads("config", "error").await < 0.5, "it has no mistake");

        write(gateway.folder.path(), "all.yaml", &(own + &other));
        let objects = async || reloads("objects", "ok").await;
        until("no mistake", objects, |count| *count > 0.5).await;
        assert!(!status().await.contains("224.0.0.1"));
    });
}
